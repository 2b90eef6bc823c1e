"""Dead, hanging and healthy workers: distinguished whatever else befalls their processes."""

import os
import signal
import time
from contextlib import closing

import pytest
from envs import Counter
from processes import send_signal
from scripts import running, session_of, succeeds
from tables import deep, paired

from shmvec import EnvTimeoutError, ShmVectorEnv

DEADLINE_S = 60


# ---- a fork server that is killed ---------------------------------------------------------------

SERVED = """
    import signal, time
    from envs import Counter
    from processes import gone, parent_of, state
    from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError

    class Slow(Counter):
        def step(self, action):
            if action == 3:
                time.sleep(0.2)  # in which the parent looks after its workers
            return super().step(action)

    def made(policy):
        policy = FaultPolicy(on_crash=policy, backoff_s=0)
        envs = ShmVectorEnv(
            [lambda: Slow(99)] * 2, num_workers=2, context="forkserver", faults=policy
        )
        envs.reset(seed=0)
        return envs

    def pids(envs):
        return [process.pid for process in envs.processes]

    def kill(pid):
        os.kill(pid, signal.SIGKILL)
        assert gone([pid], 60), state(pid)

    def count(envs, counts):
        observations, rewards, _, truncations, infos = envs.step([3, 3])
        assert observations[:, 0].tolist() == counts == rewards.tolist(), observations
        assert not truncations.any() and "fault" not in infos, infos
"""


@pytest.mark.parametrize("dies", ["before", *deep("after")])
def test_a_death_beside_that_of_the_fork_server_is_mended(dies):
    """There are never two workers of the same envs."""
    succeeds(
        SERVED,
        f"""
        envs = made("restart")
        before = pids(envs)
        if {dies!r} == "before":
            kill(before[0])
        kill(parent_of(before[1]))
        if {dies!r} == "after":
            count(envs, [1, 1])
            kill(before[0])
        made = int({dies!r} == "after")
        observations, rewards, _, truncations, infos = envs.step([3, 3])
        assert truncations.tolist() == infos["_fault"].tolist() == [True, False], truncations
        assert observations[:, 0].tolist() == [made, made + 1], observations
        after = pids(envs)
        assert after[0] not in before and after[1] == before[1]
        *_, infos = envs.step([3, 3])
        for turn in range(1, 4):
            count(envs, [turn, made + 2 + turn])
        assert pids(envs) == after and envs.stats().faults.restarts == 1
        envs.close()
        assert gone(before + after, 60)
        """,
    )


@pytest.mark.deep
def test_all_that_serves_the_program_dies():
    """It is not the end of one that lets SIGPIPE end it, as programs of the command line do."""
    succeeds(
        SERVED,
        """
        from pathlib import Path

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        made("raise").close()
        served = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert len(served) == 2, served  # a fork server and Python's resource tracker
        for pid in map(int, served):
            kill(pid)
        made("raise").close()
        """,
    )


@pytest.mark.deep
@pytest.mark.parametrize("then", ["crash", "start", "restart"])
def test_a_stopped_fork_server_goes_on_when_it_is_needed(then):
    succeeds(
        SERVED,
        f"""
        envs = made({"restart" if then == "restart" else "raise"!r})
        server = parent_of(envs.processes[1].pid)
        if {then!r} == "start":
            envs.close()
        os.kill(server, signal.SIGSTOP)
        if {then!r} == "crash":
            kill(pids(envs)[0])
            try:
                envs.step([3, 3])
            except WorkerCrashError as error:
                assert "killed by SIGKILL" in str(error), error
        if {then!r} == "start":
            envs = made("raise")
            count(envs, [1, 1])
        if {then!r} == "restart":
            kill(pids(envs)[0])
            envs.step([3, 3])
            assert envs.stats().faults.restarts == 1
        envs.close()
        envs = made("raise")
        assert parent_of(envs.processes[1].pid) == server
        envs.close()
        """,
    )


@pytest.mark.parametrize("context", ["fork", *deep("forkserver", "spawn")])
def test_a_signal_to_all_processes_of_a_program_is_the_programs_alone(context):
    """A job scheduler's "save your work", or Ctrl-C; an env's own handler is the env's."""
    with running(
        f"""
        import signal, socket
        from envs import Counter
        from processes import parent_of
        from shmvec import ShmVectorEnv

        def said(whose):
            return lambda number, frame: print(whose, signal.Signals(number).name, flush=True)

        class Asks(Counter):
            def reset(self, *, seed=None, options=None):
                signal.signal(signal.SIGUSR2, said("env"))
                return super().reset(seed=seed)

        numbers = signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU
        for number in numbers:
            signal.signal(number, said("program"))
        woken, wakes = socket.socketpair()
        for end in (woken, wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno())
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        envs = ShmVectorEnv(
            [lambda: Counter(99), lambda: Asks(99)], num_workers=2, context={context!r}
        )
        envs.reset(seed=0)
        processes = list(envs.processes)
        server = parent_of(processes[0].pid)
        for number in numbers[: 5 if {context!r} == "fork" else 4]:
            for pid in {{server, os.getpid(), *(process.pid for process in processes)}}:
                os.kill(pid, number)
            assert envs.step([1, 1])[1].any()
        assert len(woken.recv(100)) == len(numbers[: 5 if {context!r} == "fork" else 4])
        envs.close(terminate=True)
        assert [process.exitcode for process in processes] == [-signal.SIGTERM] * 2
        """
    ) as script:
        assert script.wait(DEADLINE_S) == 0, script.communicate()
        names = ["SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU"][: 4 + (context == "fork")]
        expected = [f"program {name}" for name in names] + ["env SIGUSR2"]
        assert sorted(script.stdout.read().splitlines()) == sorted(expected)
        assert script.stderr.read() == ""


# ---- vector envs that are made at the same time -------------------------------------------------


@pytest.mark.deep
def test_vector_envs_that_two_threads_make_at_the_same_time():
    """A worker of one that dies is noticed while those of the other live."""
    succeeds("""
        import multiprocessing, signal, threading
        from contextlib import suppress
        from envs import Counter
        from processes import gone
        from shmvec import FaultPolicy, ShmVectorEnv

        def meet():  # each forks before the other goes on
            with suppress(threading.BrokenBarrierError):
                together.wait(1)

        made = {}
        together = threading.Barrier(2)
        policy = FaultPolicy(on_crash="restart", backoff_s=0)
        os.register_at_fork(after_in_parent=meet)

        def make(name):
            made[name] = ShmVectorEnv(
                [lambda: Counter(99)] * 2, num_workers=2, context="fork", faults=policy
            )

        threads = [threading.Thread(target=make, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        together.abort()
        unnoticed = []
        for name, envs in made.items():
            envs.reset(seed=0)
            for worker in range(2):
                pid = envs.processes[worker].pid
                os.kill(pid, signal.SIGKILL)
                assert gone([pid], 60)
                envs.step_async([1, 1])
                try:
                    *_, truncations, infos = envs.step_wait(timeout=30)
                except multiprocessing.TimeoutError:
                    unnoticed.append((name, worker))
                    break
                assert truncations.tolist() == [worker == 0, worker == 1], truncations
                assert envs.step([1, 1])[1][worker] == 0
        for envs in made.values():
            envs.close(terminate=True)
        assert not unnoticed, unnoticed
    """)


# ---- processes that are stopped -----------------------------------------------------------------

SUSPENDED = """
    import faulthandler, time
    from envs import Counter
    from shmvec import FaultPolicy, ShmVectorEnv

    faulthandler.dump_traceback_later(100, exit=True)

    class Works(Counter):
        def step(self, action):
            if action == 3:
                print("begun", flush=True)
                while not os.path.exists(GATE):  # which comes while all of it is stopped
                    pass
                begin = time.process_time()
                while time.process_time() - begin < 0.05:
                    pass
            return super().step(action)

    policy = FaultPolicy(on_timeout="restart", step_timeout=2.0, backoff_s=0)
    envs = ShmVectorEnv([lambda: Works(99)] * 2, num_workers=2, faults=policy)
    envs.reset(seed=0)
    pids = [process.pid for process in envs.processes]
"""


@pytest.mark.parametrize("how, sooner", paired(["lockstep", "partial"], ["parent", "workers"]))
def test_a_suspended_program_does_not_take_its_workers_for_hanging(how, sooner, tmp_path):
    """Ctrl-Z and fg, a scheduler's suspend: all of it has stood still for longer than the limit."""
    gate = tmp_path / "gate"
    with running(
        SUSPENDED.replace("GATE", repr(str(gate))),
        f"""
        import stepping
        observations, *_, infos = stepping.{how}(envs, [3, 1])
        assert "fault" not in infos, infos
        print(*observations[:, 0], [process.pid for process in envs.processes] == pids)
        envs.close()
        """,
    ) as script:
        assert script.stdout.readline() == "begun\n"
        pids = session_of(script.pid)
        pids.sort(key=lambda pid: (pid == script.pid) == (sooner == "workers"))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.3)  # longer than the limit
        gate.touch()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        out, err = script.communicate(timeout=DEADLINE_S)
        assert (out, script.returncode) == ("1.0 1.0 True\n", 0), err


@pytest.mark.deep
def test_a_stopped_worker_is_noticed_in_partial_batches_after_a_call():
    envs = ShmVectorEnv([Counter] * 2, num_workers=2, step_timeout=1.0)
    stopped = envs.processes[1]
    try:
        envs.reset(seed=0)
        envs.get_attr("length")
        send_signal(stopped, signal.SIGSTOP)
        envs.send([1, 1])
        with pytest.raises(EnvTimeoutError, match="env 1.*step_timeout=1 "):
            envs.recv(timeout=60)
    finally:
        send_signal(stopped, signal.SIGCONT)
        envs.close()


@pytest.mark.deep
@pytest.mark.parametrize(
    "ask",
    [
        lambda envs: envs.get_attr("length"),
        lambda envs: envs.reset(seed=1),
        lambda envs: envs.rollout(4),
    ],
    ids=["get_attr", "reset", "rollout"],
)
def test_a_stopped_worker_is_noticed_by_all_that_asks_and_goes_on_to_close(ask):
    with closing(ShmVectorEnv([Counter] * 2, num_workers=2, step_timeout=1.0)) as envs:
        envs.reset(seed=0)
        processes = list(envs.processes)
        send_signal(processes[1], signal.SIGSTOP)
        with pytest.raises(EnvTimeoutError, match="env 1"):
            ask(envs)
    assert [process.exitcode for process in processes] == [0, 0]


# ---- processes that cannot be killed ------------------------------------------------------------


@pytest.mark.deep
def test_a_killed_worker_that_hangs_in_the_kernel_is_waited_for_with_a_limit():
    """A tracer that is told of its exit holds it there, as a driver would."""
    said = succeeds(
        """
        import ctypes, logging, time
        from envs import Counter
        from processes import gone
        from shmvec import FaultPolicy, ShmVectorEnv
        from shmvec._processes import supervisor, worker_process

        supervisor.SIGKILL_TIMEOUT_S = worker_process.SIGKILL_TIMEOUT_S = 0.5
        SEIZE, DETACH, TRACE_EXIT = 0x4206, 17, 0x40
        ptrace = ctypes.CDLL(None).ptrace
        logging.basicConfig(format="%(message)s", stream=sys.stdout)
        envs = ShmVectorEnv([lambda: Counter(99)] * 2, num_workers=2, context="fork")
        envs.reset(seed=0)
        pids = [process.pid for process in envs.processes]
        assert ptrace(SEIZE, pids[1], None, TRACE_EXIT) == 0
        begin = time.monotonic()
        try:
            envs.restart([1])
        except TimeoutError as error:
            print(error)
        envs.close()
        assert time.monotonic() - begin < 30
        assert gone(pids[:1], 60)
        assert os.waitid(os.P_PID, pids[1], os.WSTOPPED | 0x40000000)
        assert ptrace(DETACH, pids[1], None, None) == 0
        assert gone(pids, 60)
        """
    )
    assert said.count("hangs in the kernel") == 2, said
