"""A rollout that does not come about, or is broken off: what follows is right, and in its place."""

from contextlib import suppress

import numpy as np
import pytest
from envs import Counter
from scripts import succeeds

from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError

DEADLINE_S = 60
RESTART = FaultPolicy(on_crash="restart", backoff_s=0)


def counters(**options):
    return ShmVectorEnv([lambda i=i: Counter(999, offset=10 * i) for i in range(4)], **options)


def rewards_of(counts):
    """What a batch of counters returns that have made so many steps."""
    return [count + 10 * i for i, count in enumerate(counts)]


def check_rollout(envs, counts, length=4):
    """A rollout and a plain step of counters that have made so many steps before."""
    rollout = envs.rollout(length)
    assert rollout.observations[0, :, 0].tolist() == counts
    for t in range(1, length + 1):
        rollout.step([t % 4] * 4)
        expected = [count + t for count in counts]
        assert rollout.observations[t, :, 0].tolist() == expected
        assert rollout.observations[t, :, 1].tolist() == [t % 4] * 4
        assert rollout.rewards[t].tolist() == rewards_of(expected)
        assert not rollout.terminations[t].any() and not rollout.truncations[t].any()
    check_step(envs, [count + length for count in counts])


def check_step(envs, counts):
    """A plain step of counters that have made so many steps before."""
    observations, rewards, terminations, truncations, _ = envs.step([3] * 4)
    assert observations[:, :2].tolist() == [[count + 1, 3] for count in counts]
    assert rewards.tolist() == rewards_of([count + 1 for count in counts])
    assert not terminations.any() and not truncations.any()


def test_after_a_rollout_in_whose_beginning_a_worker_died():
    envs = counters(num_workers=2, faults=RESTART)
    try:
        envs.reset(seed=0)
        check_rollout(envs, [0] * 4)
        envs.processes[1].kill()
        envs.processes[1].join(DEADLINE_S)
        with suppress(WorkerCrashError):
            envs.rollout(8)
        rollout = envs.rollout(4)
        assert rollout.observations[0, :, 0].tolist() == [5] * 4
        infos = rollout.step([1] * 4)
        # Of the new worker's envs it is a truncation, and then a reset.
        assert infos["_fault"].tolist() == [False, False, True, True]
        assert rollout.rewards[1].tolist() == [6, 16, 0, 0]
        assert rollout.truncations[1].tolist() == [False, False, True, True]
        rollout.step([2] * 4)
        assert rollout.observations[2, :, 0].tolist() == [7, 7, 0, 0]
        assert rollout.rewards[2].tolist() == [7, 17, 0, 0]
        check_step(envs, [7, 7, 0, 0])
        check_rollout(envs, [8, 8, 1, 1])
    finally:
        envs.close()


@pytest.mark.deep
@pytest.mark.parametrize("length", [2**23, 2**24])
def test_a_rollout_of_more_steps_than_can_be_numbered(length):
    """It is refused: nothing lands in the rollout that is held."""
    envs = ShmVectorEnv([lambda: Counter(999, size=3)], num_workers=1)
    try:
        envs.reset(seed=0)
        held = envs.rollout(4)
        for _ in range(2):
            held.step([1])
        before = held.observations.copy()
        with pytest.raises(ValueError, match="length"):
            envs.rollout(length).step([2])
        assert np.array_equal(held.observations, before)
        held.step([2])
        assert held.observations[3, 0, :2].tolist() == [3, 2]
    finally:
        envs.close()


@pytest.mark.deep
def test_descriptors_that_run_out_as_a_rollout_begins():
    """However many are left: it is an OSError or works, and what follows is right."""
    out = succeeds("""
        import resource
        from envs import Counter
        from shmvec import ShmVectorEnv

        def rolled(envs, length, count):
            rollout = envs.rollout(length)
            rollout.step([1, 1])
            return rollout.observations[:2, :, 0].tolist() == [[count] * 2, [count + 1] * 2]

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        for left in range(7):
            envs = ShmVectorEnv([lambda: Counter(99)] * 2, num_workers=2)
            envs.reset(seed=0)
            resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
            held = []
            try:
                while True:
                    held.append(os.dup(0))
            except OSError:
                pass
            for _ in range(left):
                os.close(held.pop())
            try:
                envs.rollout(8)
                said = "works"
            except OSError:
                said = "OSError"
            finally:
                for descriptor in held:
                    os.close(descriptor)
            print(said, flush=True)
            observations, rewards, *_ = envs.step([1, 1])
            stepped = observations[:, 0].tolist() == [1, 1] == rewards.tolist()
            print(stepped, rolled(envs, 4, 1), rolled(envs, 8, 2), flush=True)
            envs.close()
    """)
    lines = out.splitlines()
    assert lines[1::2] == ["True True True"] * 7
    assert set(lines[::2]) == {"OSError", "works"}
