"""Deaths are noticed whatever else there is: helpers that envs have started, programs that reap."""

import pytest
from scripts import succeeds

DYING = """
    import os, signal, subprocess, threading, time
    from echoing import Echo
    from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError

    class Dying(Echo):
        def step(self, action):
            if action == 9:
                self.die()
            return super().step(action)

        def die(self):
            os.kill(os.getpid(), signal.SIGKILL)

    def made(env=Dying, on_crash="raise", **options):
        policy = FaultPolicy(on_crash=on_crash, backoff_s=0)
        envs = ShmVectorEnv([env] * 4, num_workers=2, faults=policy, **options)
        envs.reset(seed=0)
        return envs

    def check_raises(call):
        try:
            call()
        except WorkerCrashError as error:
            assert error.workers in ((0,), ()), error.workers
        else:
            raise AssertionError("it was not noticed")

    def check_goes_on(envs):
        for _ in range(3):
            envs.step([1] * 4)
        assert envs.call("echo", 1) == (1,) * 4
"""

# What happens, to a vector env that is made by made(...).
DEATHS = {
    "in a step": """
        envs = made({options})
        check_raises(lambda: envs.step([9, 1, 1, 1]))
        envs.close()
    """,
    "in a call": """
        envs = made({options})
        check_raises(lambda: envs.call_some([0], "die"))
        envs.close()
    """,
    "while nobody waits": """
        envs = made({options})
        os.kill(envs.processes[0].pid, signal.SIGKILL)
        check_raises(lambda: [envs.step([1] * 4) for _ in range(100_000)])
        envs.close()
    """,
    "in a partial batch": """
        envs = made({options})
        envs.send([9, 1, 1, 1])
        check_raises(lambda: [envs.recv(min_envs=1) for _ in range(4)])
        envs.close()
    """,
    "and is restarted": """
        envs = made(on_crash="restart", {options})
        for _ in range(2):
            *_, truncations, infos = envs.step([9, 1, 1, 1])
            assert truncations[0], infos
            check_goes_on(envs)
        envs.close()
    """,
    "at the end": """
        envs = made({options})
        check_goes_on(envs)
        envs.close()
    """,
}

# What an env starts, and how its worker is started. A spawned worker's children get all it has got.
HELPERS = {
    "a fork": (
        "fork",
        """
        class Helped(Dying):
            def __init__(self):
                super().__init__()
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
        """,
    ),
    "a command in the background": (
        "spawn",
        """
        class Helped(Dying):
            def __init__(self):
                super().__init__()
                os.system("sleep 60 &")
        """,
    ),
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("helper", HELPERS)
def test_a_worker_dies_while_what_its_env_has_started_lives(helper, death):
    context, env = HELPERS[helper]
    options = f"env=Helped, context={context!r}"
    succeeds(DYING, env, DEATHS[death].replace("{options}", options))


REAPERS = {
    "ignores": """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    """,
    "has a handler": """
        def reap(number, frame):
            try:
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:
                pass

        signal.signal(signal.SIGCHLD, reap)
    """,
    "has a thread": """
        def reap():
            while True:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    time.sleep(0.001)

        threading.Thread(target=reap, daemon=True).start()
    """,
}


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("reaper", REAPERS)
def test_a_worker_dies_in_a_program_that_reaps_all_its_children(reaper, death):
    succeeds(DYING, REAPERS[reaper], DEATHS[death].replace("{options}", ""))
