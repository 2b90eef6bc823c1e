"""``stats()``: what was counted is what was done."""

import time
from contextlib import closing

import pytest
from envs import Counter
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode

from shmvec import ShmVectorEnv


class Timing(Counter):
    """Knows how long it was in `step` and `reset`."""

    def __init__(self, length):
        super().__init__(length)
        self.in_step = self.in_reset = 0.0

    def step(self, action):
        start = time.perf_counter()
        result = super().step(action)
        self.in_step += time.perf_counter() - start
        return result

    def reset(self, **kwargs):
        start = time.perf_counter()
        result = super().reset(**kwargs)
        self.in_reset += time.perf_counter() - start
        return result


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_counts(num_workers, mode):
    envs = ShmVectorEnv(
        [lambda: Timing(2), lambda: Timing(50), lambda: Timing(50)],
        autoreset_mode=mode,
        num_workers=num_workers,
    )
    with closing(envs):
        envs.reset()
        before = envs.stats()
        for _ in range(6):
            envs.step([0, 0, 0])
        stats = envs.stats() - before
        assert len(stats.workers) == max(1, num_workers)
        resets = 2 if mode is AutoresetMode.NEXT_STEP else 3
        steps = 18 - resets if mode is AutoresetMode.NEXT_STEP else 18
        assert sum(worker.resets for worker in stats.workers) == resets
        assert sum(worker.steps for worker in stats.workers) == steps
        assert all(worker.requests == 6 for worker in stats.workers)
        assert stats.parent.requests == 6 * len(stats.workers)
        # What the envs say themselves is part of what was measured around them.
        whole = envs.stats()
        assert sum(worker.step_s for worker in whole.workers) >= sum(envs.get_attr("in_step"))
        assert sum(worker.reset_s for worker in whole.workers) >= sum(envs.get_attr("in_reset"))
        if num_workers == 0:
            assert not any(worker.waits for worker in whole.workers)


def test_waits_are_counted_by_phase():
    with closing(ShmVectorEnv([Counter] * 2, num_workers=2)) as envs:
        envs.reset()
        for _ in range(50):
            envs.step([0, 0])
        time.sleep(0.12)  # more than a slice: the workers sleep
        envs.step([0, 0])
        envs.step([0, 0])  # publishes what the wait before it was like
        stats = envs.stats()
        for worker in stats.workers:
            assert 0 < worker.waits <= worker.requests
            assert worker.parks >= 2 and worker.park_s > 0.05
            assert worker.late_wakes <= worker.parks
            assert worker.pause_s + worker.yield_s + worker.park_s < 60
        assert stats.parent.wakes >= 1


def stepped_until_all(envs, have):
    """Both sides, once each has done something: which finds the other ready is the machine's."""
    until = time.monotonic() + 60
    while True:
        stats = envs.stats()
        sides = [stats.parent, *stats.workers]
        if all(getattr(side, have) for side in sides):
            return sides
        assert time.monotonic() < until, stats
        envs.step([0, 0])


@pytest.mark.parametrize("policy", ["adaptive", "spin", "park"])
def test_wait_policies_spend_their_waits_as_named(policy):
    with closing(ShmVectorEnv([Counter] * 2, num_workers=1, wait_policy=policy)) as envs:
        assert envs.wait_policy == policy
        envs.reset()
        for step in range(1, 30):
            assert envs.step([0, 1])[0][:, 0].tolist() == [step % 6] * 2
        for side in stepped_until_all(envs, "parks" if policy == "park" else "waits"):
            if policy == "spin":
                assert side.pause_s > 0 and side.yield_s == 0
            if policy == "park":
                assert side.pause_s == side.yield_s == 0


def test_an_unknown_wait_policy():
    with pytest.raises(ValueError, match="must be one of 'adaptive', 'spin', 'park', got 'block'"):
        ShmVectorEnv([Counter], wait_policy="block")


def test_stats_of_a_closed_env():
    envs = ShmVectorEnv([Counter])
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.stats()
