"""Late messages, which do not fit the rings, and workers that die while another's is being read."""

import os
import signal
import time
from contextlib import suppress

import pytest
from envs import Counter
from scripts import succeeds
from test_fault_policy import row_of

from shmvec import FaultPolicy, ShmVectorEnv

BULK = 300_000  # characters: more than a ring holds
RESTART = FaultPolicy(on_crash="restart", max_restarts=3, backoff_s=0)
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


def made(reader, victim, times):
    """Three workers; when the info of one is pickled for the n-th time another one is killed."""
    envs = ShmVectorEnv([lambda i=i: Bulky(i) for i in range(3)], num_workers=3, faults=RESTART)
    try:
        envs.reset(seed=1)
        envs.set_attr("victim", envs.processes[victim].pid)
        envs.set_attr("times", times)
    except BaseException:
        envs.close()
        raise
    return envs


def check(envs, steps, actions, victim):
    """Whoever died is truncated once; everyone's results are its own, infos included."""
    counts, over, told = [0] * 3, [False] * 3, []
    for turn in range(4):
        given = actions if turn == 0 else [1] * 3
        observations, rewards, terminations, truncations, infos = steps(envs, given)
        for env in range(3):
            info = row_of(infos, env)
            if "fault" in info:
                assert truncations[env] and rewards[env] == 0
                told.append(env)
                over[env] = True
                continue
            counts[env] = 0 if over[env] else counts[env] + 1
            assert (observations[env, 0], terminations[env]) == (counts[env], False)
            assert rewards[env] == (0 if over[env] else counts[env] + 10 * env)
            if not over[env]:
                assert info["count"] == counts[env]
                assert info["late"] == Bulky(env).text(counts[env])
            over[env] = False
    assert told in ([victim], [])


def step_after_step(steps, reader, victim, times):
    envs = made(reader, victim, times)
    try:
        check(envs, steps, [SLOW if env == reader else 1 for env in range(3)], victim)
    finally:
        envs.close(terminate=True)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("reader, victim", [(0, 1), (2, 0)])
@pytest.mark.parametrize("steps", ["lockstep", "masked", "partial"])
def test_a_worker_dies_while_the_late_message_of_another_is_read(steps, reader, victim, times):
    succeeds(f"""
        import stepping, test_late_message_faults as faults
        faults.step_after_step(stepping.{steps}, {reader}, {victim}, {times})
    """)
