"""Workers die: by any fault, at any moment, whatever surrounds them, it is noticed and mended."""

import logging
import os
import select
import signal
import subprocess
import time
from contextlib import closing, suppress

import numpy as np
import pytest
from envs import Counter
from scripts import succeeds
from stepping import DEADLINE_S, faulty, kill, lockstep, partial
from tables import deep, first, paired
from test_fault_policy import row_of

from shmvec import FaultPolicy, ShmVectorEnv

RESTART = FaultPolicy(on_crash="restart", max_restarts=3, backoff_s=0)

# ---- fault x moment x surroundings --------------------------------------------------------------

DYING = """
    import ctypes, dataclasses, os, signal, subprocess, threading, time
    from gymnasium.error import ClosedEnvironmentError
    from echoing import Echo
    from processes import gone, parent_of
    from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError

    class Dying(Echo):
        def step(self, action):
            if action == 9:
                self.die()
            return super().step(action)

        def die(self):
            FAULT

    def made(env=Dying, on_crash="raise", **options):
        policy = FaultPolicy(on_crash=on_crash, backoff_s=0)
        envs = ShmVectorEnv([env] * 4, num_workers=2, faults=policy, **options)
        envs.reset(seed=0)
        return envs

    def pids(envs):
        return [process.pid for process in envs.processes]

    def kill(pid):
        os.kill(pid, signal.SIGKILL)
        assert gone([pid], 60)

    def check_raises(call, last):
        try:
            call()
        except WorkerCrashError as error:
            assert error.workers in ((0,), ()), error.workers
            assert error.envs == (0, 1) and HOW in str(error), error
            assert f"the last command was {last!r}" in str(error), error
        else:
            raise AssertionError("it was not noticed")

    def check_goes_on(envs):
        for _ in range(3):
            envs.step([1] * 4)
        assert envs.call("echo", 1) == (1,) * 4
"""

# By name: what the env does, and how the error says it.
FAULTS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    "exit": ("os._exit(3)", "exit code 3"),
    "segfault": ("ctypes.string_at(0)", "killed by SIGSEGV"),
}

MOMENTS = {
    "in a step": """
        envs = made({options})
        check_raises(lambda: envs.step([9, 1, 1, 1]), "step")
        assert envs.closed
        try:
            envs.step([1] * 4)
        except ClosedEnvironmentError:
            envs.close()
        else:
            raise AssertionError("it is closed")
    """,
    "in a call": """
        envs = made({options})
        check_raises(lambda: envs.call_some([0], "die"), "call")
        envs.close()
    """,
    "while no call waits": """
        envs = made({options})
        os.kill(envs.processes[0].pid, signal.SIGKILL)
        check_raises(lambda: [envs.step([1] * 4) for _ in range(100_000)], "step")
        envs.close()
    """,
    "before a command": """
        envs = made({options})
        kill(envs.processes[0].pid)
        check_raises(lambda: envs.set_attr("payload", b"x" * 1_000_000), "set_attr")
        envs.close()
    """,
    "in a partial batch": """
        envs = made({options})
        envs.send([9, 1, 1, 1])
        check_raises(lambda: [envs.recv(min_envs=1) for _ in range(4)], "step")
        envs.close()
    """,
    "and is restarted": """
        envs = made(on_crash="restart", {options})
        before = pids(envs)
        for _ in range(2):
            *_, truncations, infos = envs.step([9, 1, 1, 1])
            assert truncations.tolist() == [True, True, False, False], infos
            check_goes_on(envs)
        after = pids(envs)
        assert after[0] != before[0] and after[1] == before[1], (before, after)
        assert envs.stats().faults.restarts == 2
        envs.close()
        assert gone(before + after, 60)
    """,
    "never": """
        envs = made(on_crash="restart", {options})
        before = pids(envs)
        check_goes_on(envs)
        assert pids(envs) == before and not any(dataclasses.astuple(envs.stats().faults))
        envs.close()
        assert gone(before, 60)
    """,
}

# By name: options of the vector env, and code. What spawned workers start gets all they have got.
SURROUNDINGS = {
    "fork": ("context='fork'", ""),
    "spawn": ("context='spawn'", ""),
    "forkserver": ("context='forkserver'", ""),
    "a fork of the env lives on": (
        "env=Helped, context='fork'",
        """
        class Helped(Dying):
            def __init__(self):
                super().__init__()
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
        """,
    ),
    "a command of the env lives on": (
        "env=Helped, context='spawn'",
        """
        class Helped(Dying):
            def __init__(self):
                super().__init__()
                os.system("sleep 60 &")
        """,
    ),
    "the fork server is dead": (
        "context='forkserver'",
        """
        alive = made

        def made(**options):
            envs = alive(**options)
            kill(parent_of(envs.processes[0].pid))
            return envs
        """,
    ),
    "the program ignores SIGCHLD": (
        "",
        """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        """,
    ),
    "a handler of the program reaps all children": (
        "",
        """
        def reap(number, frame):
            try:
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:
                pass

        signal.signal(signal.SIGCHLD, reap)
        """,
    ),
    "a thread of the program reaps all children": (
        "",
        """
        def reap():
            while True:
                try:
                    os.waitpid(-1, 0)
                except ChildProcessError:
                    time.sleep(0.001)

        threading.Thread(target=reap, daemon=True).start()
        """,
    ),
}


def die(fault, how, surroundings, moment):
    options, code = SURROUNDINGS[surroundings]
    dying = DYING.replace("FAULT", FAULTS[fault][0]).replace("HOW", repr(how))
    succeeds(dying, code, MOMENTS[moment].replace("{options}", options))


@pytest.mark.parametrize(
    "surroundings, moment",
    [
        ("the fork server is dead", "and is restarted"),
        ("the program ignores SIGCHLD", "never"),
        *deep(*(("fork", moment) for moment in MOMENTS)),
        *deep(*((each, "in a step") for each in list(SURROUNDINGS)[1:])),
        *deep(
            *((each, "and is restarted") for each in list(SURROUNDINGS)[1:] if "server" not in each)
        ),
        *deep(*((each, "never") for each in SURROUNDINGS if "reaps" in each)),
    ],
)
def test_a_worker_dies_whatever_surrounds_it(surroundings, moment):
    die("SIGKILL", "", surroundings, moment)


@pytest.mark.parametrize(
    "fault, moment", paired(FAULTS, ["in a step", "in a call", "in a partial batch"])
)
def test_the_error_says_how_a_worker_died(fault, moment):
    die(fault, FAULTS[fault][1], "fork", moment)


# ---- how soon it is noticed ----------------------------------------------------------------------


class Mortal(Counter):
    """Dies in step(9)."""

    def step(self, action):
        if action == 9:
            time.sleep(0.15)  # those that wait for it have long been asleep
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Outlasting(Counter):
    """Rests in step(9) until it is released."""

    def __init__(self, released):
        super().__init__(99)
        self.released = released

    def step(self, action):
        if action == 9:
            assert select.select([self.released], [], [], DEADLINE_S)[0], "no death was noticed"
        return super().step(action)


def waits(envs):
    """For both: the other env answers once the death has been noticed."""
    envs.step([9, 9])


def is_busy(envs):
    """Steps the other env, which answers at once."""
    until = time.monotonic() + DEADLINE_S
    envs.send([9, 1])
    while 0 not in (ids := envs.recv(min_envs=1)[-1]["env_id"]):
        assert time.monotonic() < until, "no death was noticed"
        envs.send([1], ids)
    if len(ids) == 1:
        envs.recv(min_envs=1)


@pytest.mark.parametrize("caller", first([waits, is_busy]))
def test_a_death_is_noticed_while_the_other_worker(caller):
    released, release = os.pipe()
    log = logging.getLogger("shmvec")
    releasing = logging.Handler()
    releasing.emit = lambda record: os.write(release, b"go on")
    policy = FaultPolicy(on_crash="restart", max_restarts=99, backoff_s=0)
    make = [lambda: Mortal(99), lambda: Outlasting(released)]
    envs = ShmVectorEnv(make, num_workers=2, context="fork", faults=policy)
    log.addHandler(releasing)
    try:
        envs.reset(seed=0)
        caller(envs)
        assert envs.step([1, 1])[4].get("_fault") is None
    finally:
        log.removeHandler(releasing)
        envs.close()
        os.close(released)
        os.close(release)


class Executing(Counter):
    """Says which descriptors a program gets that it executes, but for standard streams."""

    def inherited(self):
        listing = "for each in /proc/$$/fd/*; do readlink $each; done"
        shell = ["sh", "-c", listing]
        return subprocess.run(shell, close_fds=False, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize("context", ["forkserver", *deep("fork", "spawn")])
def test_a_program_that_an_env_executes_holds_no_channel(context):
    """It would keep the worker's socket open when the worker is dead."""
    with closing(ShmVectorEnv([Executing], num_workers=1, context=context)) as envs:
        (links,) = envs.call("inherited")
    assert "pipe:" in links and "socket:" not in links


# ---- several at once -----------------------------------------------------------------------------

BUILDS_S = 0.3


class Slow(Counter):
    """Takes its time to be built; says which process it is in, and kills others from there."""

    def __init__(self, folder, index, kills=()):
        super().__init__(99, offset=10 * index)
        mine = folder / str(index)
        again = mine.exists()
        mine.write_text(str(os.getpid()))
        time.sleep(BUILDS_S / 2)
        for other in kills if again else ():
            os.kill(int((folder / str(other)).read_text()), signal.SIGKILL)
        time.sleep(BUILDS_S / 2)


def check_all_truncated(envs, steps):
    """Every env, which has made one step, is truncated by the next or the one after it, once."""
    lost = np.zeros(envs.num_envs, bool)
    counts = np.ones(envs.num_envs)
    over = np.zeros(envs.num_envs, bool)
    for _ in range(4):
        observations, rewards, terminations, truncations, infos = steps(envs, [1] * envs.num_envs)
        truncated = faulty(infos, envs.num_envs)
        assert truncations.tolist() == truncated.tolist() and not terminations.any()
        assert not (lost & truncated).any()
        counts = np.where(truncated, counts, np.where(over, 0, counts + 1))
        assert observations[:, 0].tolist() == counts.tolist()
        offsets = 10 * np.arange(envs.num_envs)
        stepped = ~(truncated | over)
        assert rewards.tolist() == np.where(stepped, counts + offsets, 0).tolist()
        over = truncated
        lost |= truncated
    assert lost.all() and envs.stats().faults.crashes == envs.num_workers


# The workers that are killed, and those that the new worker 1 kills while it is built.
TOGETHER = {"at the same moment": ([0, 1, 2], []), "while one is replaced": ([1], [0, 2])}


@pytest.mark.parametrize(
    "context, steps, when",
    paired(["fork", "spawn", "forkserver", "fork"], [lockstep, partial], TOGETHER),
)
def test_workers_that_die_together_all_come_back(context, steps, when, tmp_path):
    killed, kills = TOGETHER[when]
    fns = [lambda i=i: Slow(tmp_path, i, kills=kills if i == 1 else ()) for i in range(3)]
    envs = ShmVectorEnv(fns, num_workers=3, context=context, faults=RESTART)
    try:
        envs.reset(seed=1)
        envs.step([1] * 3)
        kill(envs, killed)
        check_all_truncated(envs, steps)
    finally:
        envs.close()


# ---- while the late message of another worker is read --------------------------------------------

BULK = 300_000  # characters: more than a ring holds
SLOW = 3  # an action: this step's info takes long, and another worker dies meanwhile


class Slowly:
    """A text that is pickled slowly, when the last time some process is killed meanwhile."""

    def __init__(self, text, victim, times):
        self.text, self.victim, self.times = text, victim, times

    def __reduce__(self):
        self.times -= 1
        if self.times == 0:
            with suppress(ProcessLookupError):
                os.kill(self.victim, signal.SIGKILL)
        time.sleep(0.2)  # in which the parent looks after its workers
        return str, (self.text,)


class Bulky(Counter):
    """A counter whose infos are late messages."""

    victim, times = 0, 0

    def __init__(self, index):
        super().__init__(99, offset=10 * index)
        self.index = index

    def text(self, count):
        return f"{self.index} {count} ".ljust(BULK, "x")

    def step(self, action):
        *results, _ = super().step(action)
        text = self.text(self.count)
        late = Slowly(text, self.victim, self.times) if action == SLOW else text
        return *results, {"late": late, "count": self.count}


def check_infos(envs, steps, actions, victim):
    """The one that died is truncated once; everyone's results are its own, infos included."""
    counts, over, truncated = [0] * 3, [False] * 3, []
    for turn in range(4):
        given = actions if turn == 0 else [1] * 3
        observations, rewards, terminations, truncations, infos = steps(envs, given)
        for env in range(3):
            info = row_of(infos, env)
            if "fault" in info:
                assert truncations[env] and rewards[env] == 0
                truncated.append(env)
                over[env] = True
                continue
            counts[env] = 0 if over[env] else counts[env] + 1
            assert (observations[env, 0], terminations[env]) == (counts[env], False)
            assert rewards[env] == (0 if over[env] else counts[env] + 10 * env)
            if not over[env]:
                assert info["count"] == counts[env]
                assert info["late"] == Bulky(env).text(counts[env])
            over[env] = False
    assert truncated in ([victim], [])


def die_meanwhile(steps, reader, victim, times):
    """Of three workers one is killed when the info of another is pickled for the n-th time."""
    envs = ShmVectorEnv([lambda i=i: Bulky(i) for i in range(3)], num_workers=3, faults=RESTART)
    try:
        envs.reset(seed=1)
        envs.set_attr("victim", envs.processes[victim].pid)
        envs.set_attr("times", times)
        check_infos(envs, steps, [SLOW if env == reader else 1 for env in range(3)], victim)
    finally:
        envs.close(terminate=True)


@pytest.mark.deep
@pytest.mark.parametrize(
    "steps, pair, times", paired(["lockstep", "masked", "partial"], [(0, 1), (2, 0)], [1, 2])
)
def test_a_worker_dies_while_the_late_message_of_another_is_read(steps, pair, times):
    succeeds(f"""
        import stepping, test_deaths
        test_deaths.die_meanwhile(stepping.{steps}, *{pair}, {times})
    """)
