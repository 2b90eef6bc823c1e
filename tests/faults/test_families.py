"""What envs start ends with their worker, however that ends; nothing else does."""

import signal

import families
import pytest
from scripts import DEADLINE_S, running, succeeds
from tables import deep, paired

CONTEXTS = ["fork", "spawn", "forkserver"]

FAMILIES = """
    import contextlib, multiprocessing, signal, subprocess, time
    from pathlib import Path
    from families import *
    from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError

    def made(env=Starting, workers=2, **options):
        envs = ShmVectorEnv([env] * 2, num_workers=workers, **options)
        envs.reset(seed=0)
        return envs

    def check_crash(envs, actions):
        pids = started_by(envs)
        try:
            envs.step(actions)
        except WorkerCrashError as error:
            assert error.workers == (0,), error
        else:
            raise AssertionError("it was not noticed")
        half = len(pids) // 2
        check_gone(pids[:half])
        check_lives(pids[half:])
        envs.close()
        check_gone(pids[half:])

    def check_restart(envs, actions):
        before = started_by(envs)
        envs.step(actions)
        after = started_by(envs)
        half = len(before) // 2
        assert not set(before[:half]) & set(after[:half]) and before[half:] == after[half:]
        check_gone(before[:half])
        check_lives(after)
        envs.close()
        check_gone(after)
"""

ENDS = {
    "close": """
        envs = made({options})
        pids = started_by(envs)
        check_lives(pids)
        envs.close()
        check_gone(pids)
    """,
    "close(terminate=True)": """
        envs = made({options})
        pids = started_by(envs)
        envs.close(terminate=True)
        check_gone(pids)
    """,
    "forgotten": """
        import warnings
        warnings.simplefilter("ignore")
        envs = made({options})
        pids = started_by(envs)
        del envs
        check_gone(pids)
    """,
    "restart": """
        envs = made({options})
        before = started_by(envs)
        envs.restart([0])
        after = started_by(envs)
        half = len(before) // 2
        assert before[half:] == after[half:]
        check_gone(before[:half])
        check_lives(after)
        envs.close()
        check_gone(after)
    """,
    "a step that takes too long": """
        policy = FaultPolicy(on_timeout="restart", step_timeout=1.0, backoff_s=0)
        check_restart(made(faults=policy, {options}), [9, 1])
    """,
    "a crash that is mended": """
        check_restart(made(faults=FaultPolicy(on_crash="restart", backoff_s=0), {options}), [8, 1])
    """,
    "a segfault": """
        check_crash(made({options}), [7, 1])
    """,
    "SIGKILL": """
        check_crash(made({options}), [8, 1])
    """,
    "SIGKILL, found by close": """
        envs = made({options})
        pids = started_by(envs)
        os.kill(envs.processes[0].pid, signal.SIGKILL)
        envs.close()
        check_gone(pids)
    """,
    "an env_fn that fails": """
        try:
            made(Failing, {options})
        except RuntimeError as error:
            check_gone(error.args)
        else:
            raise AssertionError("it was made")
    """,
}


@pytest.mark.parametrize("context, end", paired(CONTEXTS, ENDS))
def test_what_envs_have_started_ends_with_their_worker(context, end):
    succeeds(FAMILIES, ENDS[end].replace("{options}", f"context={context!r}"))


# ---- no others ----------------------------------------------------------------------------------

LIVING = """
    def living():
        return subprocess.Popen(["sleep", "90"], start_new_session=True)

    class Opting(Starting):
        def __init__(self):
            super().__init__()
            self.outlives = outliving()
"""


@pytest.mark.parametrize("end", ["close()", *deep("close(terminate=True)", "step([8, 8])")])
def test_others_live_on(end):
    """The program's own, those of other vector envs, and what has set its limit anew."""
    succeeds(
        FAMILIES,
        LIVING,
        f"""
        own = living()
        other = made()
        envs = made(Opting)
        ours, outlives = started_by(envs), envs.call("outlives")
        try:
            envs.{end}
        except WorkerCrashError:
            envs.close()
        check_gone(ours)
        check_lives([own.pid, *outlives, *started_by(other)])
        other.step([1, 1])
        other.close()
        own.kill()
        own.wait()
        for pid in outlives:
            os.kill(pid, signal.SIGKILL)
        """,
    )


# ---- multiprocessing in envs --------------------------------------------------------------------

POOLING = """
    class Pooling(Echo):
        pool = None

        def __init__(self, how="fork", closes=True):
            super().__init__()
            context = multiprocessing.get_context(how)
            self.closes = closes
            self.pool = context.Pool(2)
            self.process = context.Process(target=time.sleep, args=(90,))  # not daemonic
            self.process.start()
            self.queue = context.SimpleQueue()

        def step(self, action):
            process = multiprocessing.get_context("fork").Process(target=self.queue.put, args=(7,))
            process.start()
            assert self.queue.get() == 7
            process.join()
            assert process.exitcode == 0
            assert self.pool.map(abs, [-1, -2]) == [1, 2]
            return super().step(action)

        def started(self):
            return [self.process.pid, *(process.pid for process in self.pool._pool)]

        def close(self):
            if self.closes:
                self.process.kill()
                self.process.join()
                self.pool.terminate()
                self.pool.join()
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    "context, daemon, closes", paired(CONTEXTS, [True, False], [True, False, False, True])
)
def test_an_env_uses_multiprocessing(context, daemon, closes):
    succeeds(
        FAMILIES,
        POOLING,
        f"""
        envs = made(lambda: Pooling(closes={closes}), context={context!r}, daemon={daemon})
        assert all(process.daemon == {daemon} for process in envs.processes)
        envs.step([1, 1])
        pids = started_by(envs)
        check_lives(pids)
        envs.close()
        check_gone(pids)
        """,
    )


@pytest.mark.deep
@pytest.mark.parametrize("context, end", paired(["fork", "spawn"], ["close", "crash", "orphan"]))
def test_a_vector_env_in_an_env_ends_with_its_worker(context, end):
    body = f"""
        class Outer(Starting):
            def __init__(self):
                super().__init__()
                self.inner = made(context={context!r})
                self.inner.step([1, 1])

            def started(self):
                return super().started() + started_by(self.inner)

        envs = made(Outer, context={context!r})
        pids = started_by(envs)
        print(*pids, flush=True)
        check_lives(pids)
        if {end!r} == "orphan":
            os.kill(os.getpid(), signal.SIGKILL)
        if {end!r} == "crash":
            try:
                envs.step([8, 8])
            except WorkerCrashError:
                pass
        envs.close()
        check_gone(pids)
    """
    with running(FAMILIES, body) as script:
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) > 6 * len(families.WAYS), script.stderr.read()
        script.wait(DEADLINE_S)
        families.check_gone(pids)
        assert script.returncode == (-signal.SIGKILL if end == "orphan" else 0)
        assert not script.stderr.read()


# ---- the dead -----------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_thousands_of_short_lived_daemons_leave_no_zombies_and_the_envs_children_their_status(
    context,
):
    succeeds(
        FAMILIES,
        f"""
        class Breeding(Echo):
            def __init__(self):
                super().__init__()
                self.child = subprocess.Popen(["sh", "-c", "exit 7"])

            def step(self, action):
                subprocess.run(["sh", "-c", "for i in $(seq 1000); do (true &); done"])
                return super().step(action)

            def children(self):
                count = 0
                for children in Path("/proc/self/task").glob("*/children"):
                    with contextlib.suppress(OSError):  # the thread has ended meanwhile
                        count += len(children.read_text().split())
                return count

            def status(self):
                return self.child.wait()

        envs = made(Breeding, context={context!r})
        envs.step([1, 1])
        until = time.monotonic() + 60  # the last daemons may still be about to end
        while (found := envs.call("children")) != (1, 1):  # the env's own
            assert time.monotonic() < until, found
        assert envs.call("status") == (7, 7)
        envs.close()
        """,
    )


# ---- how the end is found -----------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", *deep("spawn", "forkserver")])
def test_an_env_that_ignores_the_end_of_its_children(context):
    """A shell that has ended has left no trace with the worker, but its command lives."""
    succeeds(
        FAMILIES,
        f"""
        class Ignoring(Starting):
            ways = [background]

            def __init__(self):
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                super().__init__()

        envs = made(Ignoring, context={context!r})
        pids = started_by(envs)
        check_lives(pids)
        envs.close()
        check_gone(pids)
        """,
    )


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", *deep("spawn", "forkserver")])
def test_where_processes_cannot_be_marked_the_group_ends_with_its_worker(context):
    succeeds(
        FAMILIES,
        f"""
        class Grouped(Starting):
            ways = [forked, background]

        resource.setrlimit(RLIMIT_LOCKS, (1000, 1000))
        envs = made(Grouped, context={context!r})
        pids = started_by(envs)
        envs.step([1, 1])
        envs.close(terminate=True)
        check_gone(pids)
        """,
    )


@pytest.mark.deep
def test_a_program_that_gets_orphans_has_no_zombies_of_what_envs_have_started():
    """Process 1 of a container is one, a subreaper another; its own children are its own."""
    succeeds(
        FAMILIES,
        """
        import ctypes

        def zombies():
            found = []
            for children in Path("/proc/self/task").glob("*/children"):
                with contextlib.suppress(OSError):  # the thread has ended meanwhile
                    for pid in children.read_text().split():
                        stat = Path(f"/proc/{pid}/stat").read_text()
                        if stat.rpartition(")")[2].split()[0] == "Z":
                            found.append(int(pid))
            return found

        PR_SET_CHILD_SUBREAPER = 36
        assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
        own = subprocess.Popen(["sh", "-c", "exit 7"])
        envs = made(faults=FaultPolicy(on_crash="restart", backoff_s=0))
        envs.step([8, 1])
        envs.restart()
        os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
        assert zombies() == [own.pid], zombies()
        envs.close()
        assert zombies() == [own.pid], zombies()
        assert own.wait() == 7
        """,
    )
