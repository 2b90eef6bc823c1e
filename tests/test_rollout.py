"""Rollouts: the same numbers as step(), written by the workers where a learner reads them."""

import gc
import sys
import sysconfig
import types
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Fails, Nested, Speaks, Story, stories
from equality import same, sync_env
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from replay_reference import at
from tables import deep, paired, row

from shmvec import ShmVectorEnv
from shmvec.exchange import AutoresetMode


class Truncates(Counter):
    """Its episodes are truncated, and never terminate."""

    def step(self, action):
        observation, reward, over, _, info = super().step(action)
        return observation, reward, False, over, info


def assert_holds(rollout, index, results):
    observations, rewards, terminations, truncations = results
    assert same(at(rollout.observations, index), observations)
    assert same(rollout.rewards[index], rewards)
    assert same(rollout.terminations[index], terminations)
    assert same(rollout.truncations[index], truncations)


@pytest.mark.parametrize(
    "mode, workers, kind",
    paired(
        [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP],
        [3, 0, 1, 1],
        [Nested, Story, Story, Nested],
    ),
)
def test_a_rollout_holds_what_step_returns(kind, workers, mode):
    fns = [lambda i=i: kind(i) for i in range(5)]
    reference = sync_env(fns, mode)
    envs = ShmVectorEnv(fns, num_workers=workers, autoreset_mode=mode)
    envs.action_space.seed(0)
    try:
        last = (envs.reset(seed=3)[0], np.zeros(5), np.zeros(5, bool), np.zeros(5, bool))
        assert same(last[0], reference.reset(seed=3)[0])
        older = []
        for length in (9, 9, 9, 4, 4):
            rollout = envs.rollout(length)
            given = []
            assert_holds(rollout, 0, last)
            for t in range(length):
                actions = envs.action_space.sample()
                given.append(actions)
                infos = rollout.step(actions)
                *results, expected = reference.step(actions)
                last = tuple(results)
                assert same(infos, expected)
                assert_holds(rollout, t + 1, last)
            for t in range(length):
                kept = at(rollout.actions, t)
                if isinstance(kept, dict):
                    kept = {key: kept[key] for key in given[t]}
                assert same(kept, given[t])
            older.append((rollout, rollout.rewards.copy()))
            older = older[-1:]
        for kept, rewards in older:
            assert (kept.rewards == rewards).all()
    finally:
        envs.close()
        reference.close()


@pytest.mark.deep
def test_plain_steps_and_masks_go_on_from_where_a_rollout_ended():
    envs = ShmVectorEnv([lambda i=i: Story(i, length=100) for i in range(5)], num_workers=2)
    mask = np.array([True, False, True, True, False])
    try:
        envs.reset(seed=0)
        for steps in (2, 3):  # of 3: broken off, and whole
            rollout = envs.rollout(3)
            for t in range(steps):
                rollout.step([t] * 5)
            last = [at(part, steps) for part in (rollout.observations, rollout.rewards)]
            answers = envs.exchange.take(everyone=True)  # of none
            assert (answers.observations == last[0]).all() and (answers.rewards == last[1]).all()
            for action in (8, 9):
                observations, rewards, *_ = envs.step([action] * 5, mask=mask)
                assert (observations[~mask] == last[0][~mask]).all()
                assert (rewards[~mask] == last[1][~mask]).all()
                assert (observations[mask, 3] == action).all() and (rewards[mask] == action).all()
            observations, _ = envs.reset(options={"reset_mask": ~mask})
            assert (observations[mask, 3] == 9).all() and (observations[~mask, 3] == -1).all()
            envs.step([1] * 5)
    finally:
        envs.close()


@pytest.mark.deep
def test_two_alternate_and_a_third_waits_for_one_to_be_dropped():
    envs = ShmVectorEnv(stories(3), num_workers=2)
    try:
        envs.reset(seed=0)
        held = []
        for _ in range(2):
            rollout = envs.rollout(4)
            for _ in range(4):
                rollout.step([1, 2, 3])
            held.append((rollout, rollout.rewards.copy()))
        with pytest.raises(BufferError, match="two rollouts are still in use"):
            envs.rollout(4)
        rewards = held[0][0].rewards[1:]
        del held[0], rollout
        with pytest.raises(BufferError):  # a part of one of its arrays is left
            envs.rollout(4)
        assert (held[0][0].rewards == held[0][1]).all()
        del rewards
        third = envs.rollout(4)
        third.step([1, 2, 3])
        assert (held[0][0].rewards == held[0][1]).all()
        held[0][0].release()
        fourth = envs.rollout(4)
        assert fourth.rewards.ctypes.data == held[0][0].rewards.ctypes.data
    finally:
        envs.close()
    assert third.rewards.shape == (5, 3)  # after close the arrays are still there


@pytest.mark.deep
def test_arrays_are_the_workers_own_memory():
    torch = pytest.importorskip("torch")
    envs = ShmVectorEnv(stories(3), num_workers=2)
    try:
        envs.reset(seed=0)
        rollout = envs.rollout(4)
        tensor = torch.from_numpy(rollout.observations)
        rewards = torch.from_dlpack(rollout.rewards)
        flags = torch.from_numpy(rollout.terminations)
        rollout.step([7, 8, 9])
        assert tensor.data_ptr() == rollout.observations.ctypes.data
        assert tensor[1, :, 3].tolist() == rewards[1].tolist() == [7, 8, 9]
        assert not flags[1].any()
        address = tensor.data_ptr()
        del rollout
        envs.rollout(4)
        assert envs.rollout(4).observations.ctypes.data != address  # the tensor holds its half
    finally:
        envs.close()


def test_what_a_learner_does_to_the_arrays_stays_there():
    envs = ShmVectorEnv(stories(2), num_workers=1)
    try:
        envs.reset(seed=0)
        first = envs.rollout(2)
        first.step([1, 1])
        first.step([2, 2])
        last = first.observations[-1].copy()
        first.observations[:] = 0
        first.terminations[:] = True
        second = envs.rollout(2)
        assert (second.observations[0] == last).all() and not second.terminations[0].any()
        second.step([3, 3])
        assert second.rewards[1].tolist() == [3, 3]
    finally:
        envs.close()


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["NextStep", *deep("SameStep")])
def test_steps_that_only_reset_are_not_valid(mode):
    with ShmVectorEnv([lambda: Counter(2), lambda: Counter(9)], autoreset_mode=mode) as envs:
        with pytest.raises(RuntimeError, match="env 0 was never reset.*call reset"):
            envs.rollout(6)
        envs.reset(seed=1)
        rollout = envs.rollout(6)
        assert repr(rollout) == "Rollout(0 of 6 steps, 2 envs)"
        for _ in range(6):
            rollout.step([1, 1])
        expected = np.ones((6, 2), bool)
        if mode == "NextStep":  # two steps, and a reset
            expected[2::3, 0] = False
        np.testing.assert_array_equal(rollout.valid, expected)


def test_advantages_as_the_docs_compute_them():
    page = (Path(__file__).parents[1] / "docs" / "rollouts.md").read_text()
    names = {}
    exec(page[page.index("import numpy") : page.index("values = rollout.obs")], names)
    with ShmVectorEnv([lambda: Counter(3), lambda: Truncates(2), lambda: Counter(99)]) as envs:
        envs.reset(seed=1)
        rollout = envs.rollout(12)
        for _ in range(12):
            rollout.step([1, 1, 1])
        values = np.random.default_rng(1).normal(size=(13, 3))
        found = names["advantages_of"](rollout, values, 0.9, 0.8)
        for env in range(3):
            for t in np.flatnonzero(rollout.valid[:, env]):
                # The definition: a sum over the steps of the episode from here on.
                expected, weight = 0.0, 1.0
                for step in range(t, 12):
                    terminated = rollout.terminations[step + 1, env]
                    following = 0.0 if terminated else values[step + 1, env]
                    gain = rollout.rewards[step + 1, env] + 0.9 * following - values[step, env]
                    expected, weight = expected + weight * gain, weight * 0.9 * 0.8
                    if terminated or rollout.truncations[step + 1, env]:
                        break
                assert found[t, env] == pytest.approx(expected)


def test_a_rollout_that_cannot_go_on():
    envs = ShmVectorEnv([lambda i=i: Fails(i) for i in range(2)], num_workers=1)
    try:
        envs.reset(seed=0)
        failed = envs.rollout(2)
        with pytest.raises(LookupError, match="thirteen"):
            failed.step([13, 1])
        with pytest.raises(RuntimeError, match="its last step failed"):
            failed.step([1, 1])
        failed.release()
        envs.reset(seed=0)
        full = envs.rollout(1)
        with pytest.raises(ValueError, match="wrong actions"):
            full.step([1])
        full.step([1, 1])  # nothing was sent before
        with pytest.raises(RuntimeError, match="all 1 steps of this rollout are made"):
            full.step([1, 1])
        older = envs.rollout(3)
        newer = envs.rollout(3)
        with pytest.raises(RuntimeError, match="another one was begun"):
            older.step([1, 1])
        newer.step([1, 1])
        envs.step([1, 1])
        with pytest.raises(RuntimeError, match="stepped or reset without it"):
            newer.step([1, 1])
        older.release()
        with pytest.raises(RuntimeError, match="was released"):
            older.step([1, 1])
        assert older.released and not newer.released
        envs.async_reset()
        with pytest.raises(AlreadyPendingCallError):
            envs.rollout(3)
        envs.recv()
        envs.step_async([1, 1])
        with pytest.raises(AlreadyPendingCallError):
            envs.rollout(3)
        envs.step_wait()
        open_end = envs.rollout(3)
    finally:
        envs.close()
    with pytest.raises(ClosedEnvironmentError):
        open_end.step([1, 1])
    with pytest.raises(ClosedEnvironmentError):
        envs.rollout(3)


@pytest.mark.deep
def test_calls_in_between_change_nothing():
    envs = ShmVectorEnv(stories(3), num_workers=2)
    try:
        envs.reset(seed=0)
        rollout = envs.rollout(3)
        rollout.step([1, 2, 3])
        assert envs.get_attr("asked") == (1, 1, 1)
        envs.set_attr("length", 2)
        rollout.step([1, 2, 3])
        assert rollout.terminations[2].tolist() == [True, False, False]
    finally:
        envs.close()


def test_bad_rollouts():
    for kind, options, length, error, message in [
        (Story, {}, 0, ValueError, "length must be at least 1"),
        (Story, {}, 2.5, TypeError, "length must be an int"),
        (Story, {"shared_memory": False}, 2, TypeError, "shared_memory=True"),
        (Story, {"autoreset_mode": AutoresetMode.DISABLED}, 2, ValueError, "are reset when"),
        (Speaks, {}, 2, TypeError, r"observation space holds Text"),
    ]:
        with row(kind, options, length):
            with closing(ShmVectorEnv([lambda k=kind: k(0)] * 2, num_workers=1, **options)) as envs:
                envs.reset()
                with pytest.raises(error, match=message):
                    envs.rollout(length)
                envs.step([1, 1])


class Large(Story):
    """Half a MiB of observations: a long rollout needs terabytes."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1 << 16,), np.float64)

    def reset(self, **how):
        return np.zeros(1 << 16), super().reset(**how)[1]

    def step(self, action):
        return np.zeros(1 << 16), *super().step(action)[1:]


@pytest.mark.deep
def test_not_enough_memory():
    envs = ShmVectorEnv([lambda: Large(0)] * 2, num_workers=2)
    try:
        envs.reset()
        with pytest.raises(OSError, match="shmvec needs"):
            envs.rollout(1 << 20)
        assert envs.step([1, 2])[1].tolist() == [1, 2]
        envs.rollout(2).step([1, 2])
    finally:
        envs.close()


@pytest.mark.deep
@pytest.mark.parametrize("old", [False, True])
def test_a_rollout_that_only_a_cycle_keeps_is_first_looked_for_among_young_objects(old):
    def note(phase, info):
        if phase == "start":
            generations.append(info["generation"])

    generations = []
    envs = ShmVectorEnv(stories(2), num_workers=1)
    try:
        envs.reset()
        gc.disable()  # before there is the cycle, which a collection would make older
        cycle = [envs.rollout(4)]
        cycle.append(cycle)
        newer = envs.rollout(4)
        if old:
            gc.collect()
        gc.callbacks.append(note)
        try:
            del cycle
            envs.rollout(4)
        finally:
            gc.callbacks.remove(note)
        # A free-threaded Python has no generations: it looks at all objects in any case.
        ages = old and not sysconfig.get_config_var("Py_GIL_DISABLED")
        assert generations == ([0, 1, 2] if ages else [0])
        newer.release()
    finally:
        gc.enable()
        envs.close()


def fake_torch(available=True, error=0):
    """A torch whose CUDA keeps a list of the memory that is page-locked."""
    locked = {}

    def register(address, nbytes, flags):
        if error == 0:
            locked[address] = nbytes
        return error

    cudart = types.SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop)
    cuda = types.SimpleNamespace(is_available=lambda: available, cudart=lambda: cudart)
    return types.SimpleNamespace(cuda=cuda), locked


def test_memory_is_page_locked_as_long_as_it_is_there(monkeypatch):
    envs = ShmVectorEnv(stories(2), num_workers=1)
    torch, locked = fake_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    try:
        envs.reset()
        rollout = envs.rollout(4, pin=True)
        ((address, nbytes),) = locked.items()
        for array in (rollout.observations, rollout.rewards, rollout.actions):
            begin = array.ctypes.data
            assert address <= begin and begin + array.nbytes <= address + nbytes
        again = envs.rollout(4, pin=True)
        assert len(locked) == 1
        again.step([1, 1])
        envs.rollout(3, pin=True).step([1, 1])  # of another length: other memory
        gc.collect()
        assert len(locked) == 2  # the arrays of the first are still there
        del rollout, again, array
        gc.collect()
        assert len(locked) == 1
    finally:
        envs.close()
    del envs
    gc.collect()
    assert not locked


@pytest.mark.deep
def test_memory_that_cannot_be_page_locked(monkeypatch):
    with closing(ShmVectorEnv(stories(2), num_workers=1)) as envs:
        envs.reset()
        for torch, message in [
            (None, "not installed"),
            (fake_torch(False)[0], "does not find here"),
            (fake_torch(True, 2)[0], "could not page-lock .* error 2"),
        ]:
            monkeypatch.setitem(sys.modules, "torch", torch)
            with row(message), pytest.raises(RuntimeError, match=message):
                envs.rollout(4, pin=True)
            assert envs.step([1, 2])[1].tolist() == [1, 2]
