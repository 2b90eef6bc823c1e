"""Infos: Gymnasium's dict of arrays, equal in keys, their order, dtypes, masks and values."""

import gymnasium as gym
import numpy as np
import pytest
from envs import Infos
from equality import same
from gymnasium.vector import SyncVectorEnv, VectorEnv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import infos
from tables import first

from shmvec import ShmVectorEnv


def outcome(run):
    try:
        return "infos", run()
    except Exception as error:
        return "raised", type(error)


class Plain(VectorEnv):
    def __init__(self, num_envs):
        self.num_envs = num_envs

    def gathered(self, per_env):
        vector = {}
        for i, info in enumerate(per_env):
            vector = self._add_info(vector, info, i)
        return vector


def gathered(per_env):
    """What Gymnasium makes of one step's infos."""
    return Plain(len(per_env)).gathered(per_env)


# Of three envs, in one step after the other.
SEQUENCES = [
    [[{"a": 1}, {"a": 1.5}, {"a": np.float32(2)}]],
    [[{"a": {"b": 1}}, {"a": 3}, {}], [{"a": 3}, {"a": {"b": 1}}, {}]],
    [[{"a": 1}, {"_a": 5}, {"a": 2, "_a": 3}]],
    [[{"_b": None, "b": 1}, {"b": 2}, {}]],
    [[{"a": 2**70}, {}, {}], [{"a": "\ud800"}, {}, {}]],
    [[{"a": np.zeros(2)}, {"a": np.zeros(3)}, {}]],
    [[{"a": None}, {"a": 1}, {"a": "x"}], [{"a": 1}, {"a": None}, {}]],
    [[{"a": {}}, {"a": {"b": {}}}, {}]],
    [[{"a": np.timedelta64(3, "s")}, {"a": np.array(["x"])}, {3: 4}]],
    [[{"final_obs": np.zeros(2)}, {}, {"final_obs": {"a": 1}}]],
    [[{"a": np.zeros((0, 2))}, {"a": np.array(3)}, {"b": np.array([None])}]],
]


@pytest.mark.parametrize("sequence", first(SEQUENCES))
def test_equal_to_gymnasium(sequence):
    per_env = [[step[i] for step in sequence] for i in range(3)]
    envs = ShmVectorEnv([lambda s=s: Infos(s) for s in per_env], num_workers=0)
    envs.reset()
    try:
        for step in sequence:
            ours = outcome(lambda: envs.step([0, 0, 0])[4])
            theirs = outcome(lambda step=step: gathered(step))
            assert ours[0] == theirs[0], (ours, theirs)
            if ours[0] == "infos":
                assert same(ours[1], theirs[1]), (ours[1], theirs[1])
    finally:
        envs.close()


@pytest.mark.deep
@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(infos(), min_size=3, max_size=3), min_size=1, max_size=4))
def test_any_infos_are_equal_to_gymnasiums(sequence):
    test_equal_to_gymnasium(sequence)


@pytest.mark.deep
def test_infos_are_fresh_objects():
    envs = ShmVectorEnv([lambda: Infos([{"a": 1, "n": {"b": 2.0}}])] * 2, num_workers=1)
    envs.reset()
    first = envs.step([0, 0])[4]
    first["a"][:] = 9
    first["n"]["b"][:] = 9
    first["mine"] = 1
    second = envs.step([0, 0])[4]
    assert second["a"].tolist() == [1, 1] and second["n"]["b"].tolist() == [2, 2]
    assert "mine" not in second and first["a"].tolist() == [9, 9]
    first["a"].resize(1, refcheck=False)  # nothing holds on to the user's arrays
    envs.close()


@pytest.mark.deep
def test_dicts_of_other_classes():
    from collections import OrderedDict

    sequence = [OrderedDict(a=1), {"n": OrderedDict(b=1)}]
    ours = ShmVectorEnv([lambda: Infos(sequence)] * 2, num_workers=1)
    theirs = SyncVectorEnv([lambda: Infos(sequence)] * 2)
    ours.reset(), theirs.reset()
    for _ in range(4):
        assert same(ours.step([0, 0])[4], theirs.step([0, 0])[4])
    ours.close()


@pytest.mark.deep
def test_more_looks_than_are_learned():
    """Infos that never look alike: in the end they are pickled, and equal all the same."""
    sequence = [{f"key{i}": i, "x": i} for i in range(1500)]
    envs = ShmVectorEnv([lambda: Infos(sequence)], num_workers=0)
    envs.reset()
    for i in range(1500):
        info = envs.step([0])[4]
        assert info[f"key{i}"].tolist() == [i] and len(info) == 4
    envs.close()


def test_an_info_that_cannot_be_pickled():
    def make():
        import threading

        return Infos([{"ok": 1}, {"lock": threading.Lock()}])

    envs = ShmVectorEnv([make] * 2, num_workers=2)
    envs.reset()
    envs.step([0, 0])
    with pytest.raises(TypeError, match="pickle"):
        envs.step([0, 0])
    envs.step([0, 0])
    envs.close()


def test_episode_statistics_come_and_go():
    make = [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))] * 6
    ours, theirs = ShmVectorEnv(make, num_workers=2), SyncVectorEnv(make)
    ours.reset(seed=1), theirs.reset(seed=1)
    theirs.action_space.seed(1)
    seen = 0
    for _ in range(200):
        action = theirs.action_space.sample()
        mine, reference = ours.step(action)[4], theirs.step(action)[4]
        if "episode" in reference:
            seen += 1
            mine["episode"].pop("t"), reference["episode"].pop("t")
        assert same(mine, reference)
    assert seen
    ours.close()
