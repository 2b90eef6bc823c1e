"""Threads and forks of the program that uses a vector env."""

import threading
from contextlib import closing

import pytest
from envs import Counter
from scripts import succeeds
from tables import paired

from shmvec import FaultPolicy, ShmVectorEnv, TooManyFaultsError

CONTEXTS = ["fork", "spawn", "forkserver"]

START = """
    import contextlib, gc, multiprocessing, os, random, re, sys, threading, time
    from pathlib import Path
    from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
    from echoing import Echo
    from shmvec import FaultPolicy, ShmVectorEnv

    def check(envs):
        for n in range(1, 4):
            observations, rewards, *_ = envs.step([n] * 4)
            assert observations[:, 1].tolist() == rewards.tolist() == [n] * 4
            assert envs.call("echo", n) == (n,) * 4
"""


@pytest.mark.deep
@pytest.mark.parametrize("context, daemon", paired(CONTEXTS, [True, False]))
def test_a_fork_of_the_program_may_end_as_it_likes(context, daemon):
    """Its exit runs all that is registered for the end of the program."""
    body = f"""
        from multiprocessing import resource_tracker

        def disown_tracker():
            resource_tracker._resource_tracker._pid = None

        if sys.version_info[:2] == (3, 13):  # which waits for it in forks, too, and complains
            os.register_at_fork(after_in_child=disown_tracker)
        envs = ShmVectorEnv([Echo] * 4, num_workers=2, context={context!r}, daemon={daemon})
        envs.reset(seed=0)
        for how in ("sys.exit()", "del envs", "envs.close()"):
            said, say = os.pipe()
            child = os.fork()
            if child == 0:
                os.dup2(say, 2)
                exec(how)
                sys.exit(0)
            os.close(say)
            assert os.waitpid(child, 0)[1] == 0, how
            assert os.read(said, 1000) == b"", how
            os.close(said)
            check(envs)
        envs.close()
    """
    succeeds(START, body)


@pytest.mark.deep
def test_a_thread_that_has_made_it_may_end():
    body = """
        def make():
            global envs
            envs = ShmVectorEnv([Echo] * 4, num_workers=2, context="fork")
            envs.reset(seed=0)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        for _ in range(5):
            time.sleep(0.1)  # what watches the thread has seen its end
            check(envs)
        envs.close()
    """
    succeeds(START, body)


MADE = "ShmVectorEnv([Hanging] * 4, num_workers=2, context='fork', faults=policy)"
BEGUN = "Exchange([build] * 2, num_workers=2, context='fork', faults=policy, wait=False)"
# By name: how it is made, what waits, how many workers hang then, and how it is closed.
WAITS = {
    "step": (MADE, "envs.step([7] * 4)", 2, "terminate=True"),
    "recv": (MADE, "envs.send([7] * 4), envs.recv()", 2, "terminate=True"),
    "step of some": (MADE, "envs.step([7, None, 7, None])", 2, "terminate=True"),
    "call": (MADE, "envs.call('hang')", 2, "terminate=True"),
    "reset": (MADE, "envs.reset(options={'hang': True})", 2, "terminate=True"),
    "start": (BEGUN, "envs.initialize()", 2, "terminate=True"),
    # Worker 1 answers the close before worker 0 its step.
    "step, closed in order": (MADE, "envs.step([6, 1, 1, 1])", 1, ""),
}


@pytest.mark.parametrize("what, on_crash", paired(WAITS, ["raise", "restart"]))
def test_closed_by_another_thread_while_one_waits(what, on_crash):
    made, waits, hanging, how = WAITS[what]
    body = f"""
        from shmvec.exchange import Exchange

        def build():
            os.write(entered, b"x")
            time.sleep(60)

        class Hanging(Echo):
            def hang(self, seconds=60):
                os.write(entered, b"x")
                time.sleep(seconds)

            def step(self, action):
                if action > 5:
                    self.hang(60 if action == 7 else 1)
                return super().step(action)

            def reset(self, *, seed=None, options=None):
                if options:
                    self.hang()
                return super().reset(seed=seed)

        def wait():
            try:
                {waits}
            except BaseException as error:
                raised.append(error)

        def children():
            found = []
            for path in Path("/proc/self/task").glob("*/children"):
                with contextlib.suppress(OSError):  # the thread has ended meanwhile
                    found += path.read_text().split()
            return found

        seen, entered = os.pipe()
        raised = []
        policy = FaultPolicy(on_crash={on_crash!r}, backoff_s=0)
        envs = {made}
        if {what != "start"}:
            envs.reset(seed=0)
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        for _ in range({hanging}):
            os.read(seen, 1)
        envs.close({how})
        thread.join(60)
        assert not thread.is_alive(), "it still waits"
        assert [type(error) for error in raised] == [ClosedEnvironmentError], raised
        assert envs.closed and not any(process.is_alive() for process in envs.processes)
        until = time.monotonic() + 60
        while children() and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert not children(), children()
        try:
            envs.call("echo", 1)
        except ClosedEnvironmentError:
            pass
        else:
            raise AssertionError("it is closed")
        envs.close()
    """
    succeeds(START, body)


@pytest.mark.deep
@pytest.mark.parametrize("what", ["envs.step([1] * 4)", "envs.rollout(8).step([1] * 4)"])
def test_workers_forked_later_do_not_map_what_is_closed(what):
    body = f"""
        kept = []
        for _ in range(3):
            envs = ShmVectorEnv([Echo] * 4, num_workers=2, context="fork")
            envs.reset(seed=0)
            {what}
            envs.close()
            kept.append(envs)
        envs = ShmVectorEnv([Echo] * 4, num_workers=2, context="fork")
        envs.reset(seed=0)
        held_by = []
        for process in envs.processes:
            mapped = set()
            for line in Path(f"/proc/{{process.pid}}/maps").read_text().splitlines():
                if "/dev/shm/" in line or "memfd:" in line:
                    mapped.add(line.split()[4])
            assert len(mapped) == 1, mapped
            held = set()
            for path in Path(f"/proc/{{process.pid}}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(path)
                    if "/dev/shm/" in target or "memfd:" in target:
                        held.add(os.stat(path).st_ino)
            held_by.append(held)
        # Each has its depot, and a place for its stacks.
        assert [len(held) for held in held_by] == [2, 2], held_by
        assert len(set.union(*held_by)) == 4, held_by
        envs.close()
    """
    succeeds(START, body)


INSIDE = """
    def inside(**options):
        try:
            envs = ShmVectorEnv([Echo] * 4, **options)
            envs.reset(seed=0)
            check(envs)
            envs.close()
            return "all is well"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    class Nesting(Echo):
        def nest(self, **options):
            return inside(**options)
"""


@pytest.mark.deep
@pytest.mark.parametrize("context", CONTEXTS)
def test_in_a_pools_worker_which_is_daemonic(context):
    body = f"""
        with multiprocessing.get_context("fork").Pool(1) as pool:
            for num_workers in (2, 0):
                assert pool.apply(inside, kwds=dict(num_workers=num_workers)) == "all is well"
            said = pool.apply(inside, kwds=dict(num_workers=2, context={context!r}))
            assert said == "all is well", said
    """
    succeeds(START, INSIDE, body)


@pytest.mark.deep
@pytest.mark.parametrize("context, daemon", paired(CONTEXTS, [True, False]))
def test_a_vector_env_in_another_ones_worker(context, daemon):
    body = f"""
        envs = ShmVectorEnv([Nesting] * 2, num_workers=1, context={context!r}, daemon={daemon})
        for num_workers in (2, 0):
            said = envs.call_some([0], "nest", num_workers=num_workers)[0]
            assert said == "all is well", said
        assert envs.processes[0].daemon is {daemon}
        envs.close()
    """
    succeeds(START, INSIDE, body)


@pytest.mark.deep
def test_a_fork_in_the_middle_of_a_call_is_refused_and_names_the_process():
    succeeds("""
        import os, threading, time
        import pytest
        from echoing import Echo
        from shmvec import ShmVectorEnv

        forked, tell = os.pipe()

        class Waiting(Echo):
            def step(self, action):
                os.read(forked, 1)
                return super().step(action)

        def fork():
            while not envs.exchange.num_in_flight:
                time.sleep(0.001)
            pid = os.fork()
            if pid == 0:
                code = 2
                try:
                    envs.step([1, 1])
                except RuntimeError as error:
                    code = 0 if f"belongs to process {os.getppid()}" in str(error) else 3
                finally:
                    os._exit(code)
            became.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.write(tell, b"12")

        became = []
        envs = ShmVectorEnv([Waiting] * 2, num_workers=1, context="fork")
        envs.reset()
        thread = threading.Thread(target=fork)
        thread.start()
        envs.step([1, 1])
        thread.join()
        assert became == [0], became
        envs.close()
    """)


@pytest.mark.deep
def test_a_lock_that_another_thread_held_at_the_fork_is_named():
    lock = threading.Lock()

    class Draws(Counter):
        def reset(self, *, seed=None, options=None):
            with lock:
                return super().reset(seed=seed)

    policy = FaultPolicy(on_timeout="restart", reset_timeout=1.0, max_restarts=0)
    with closing(ShmVectorEnv([Draws], num_workers=1, context="fork", faults=policy)) as envs:
        envs.reset()
        with lock:
            envs.restart()
            with pytest.raises(TooManyFaultsError, match="context='forkserver'") as caught:
                envs.reset()
    assert "in reset" in str(caught.value)
