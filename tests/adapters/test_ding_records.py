"""DI-engine's env managers: attributes of the envs, replays, and the records of V2."""

import importlib.util
import sys
import types
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from ding_envs import (
    END,
    TRUNCATE,
    WORKERS,
    Late,
    Obedient,
    OfDIEngine,
    OfGym,
    gate,
    manager,
    obedient,
)

from shmvec.adapters.ding import (
    ManagerClosedError,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
)

# ---- attributes ------------------------------------------------------------------------------


@pytest.mark.deep
def test_attributes_are_forwarded_as_lists():
    with manager() as envs:
        with pytest.raises(AttributeError, match="only after launch"):
            _ = envs.index
        envs.launch()
        assert envs.index == [0, 1, 2, 3]
        assert envs._name == ["name0", "name1", "name2", "name3"]
        assert not hasattr(envs, "xxx")
        with pytest.raises(AttributeError, match="xxx"):
            _ = envs.xxx
        assert list(envs.step({0: 0})) == [0]


def test_method_name_list_only_listed_methods_are_called():
    class Mine(SyncSubprocessEnvManager):
        @property
        def method_name_list(self):
            return [*super().method_name_list, "user_defined"]

    with manager(env_fns=obedient(2, render_mode="rgb_array")) as envs:
        envs.launch()
        with pytest.raises(RuntimeError, match=r"method\(user_defined\)"):
            envs.user_defined()
        assert [frame.shape for frame in envs.render()] == [(2, 3, 3)] * 2
    with manager(Mine, num_envs=2) as envs:
        envs.launch()
        assert envs.user_defined() == [0, 1]
        assert envs.user_defined(plus=5) == [5, 6]


@pytest.mark.deep
def test_spaces():
    with manager(num_envs=2) as envs:
        assert envs.observation_space == Obedient.observation_space
        assert envs.action_space == Obedient.action_space
        assert envs.reward_space.shape == ()
        envs.launch()
        assert envs.observation_space == Obedient.observation_space
    with manager(env_fns=[OfDIEngine]) as envs:
        assert envs.reward_space == OfDIEngine.reward_space


@pytest.mark.deep
@pytest.mark.parametrize("says_none", [False, True])
def test_spaces_that_exist_only_after_the_first_reset(says_none):
    with manager(env_fns=[lambda: Late(says_none)] * 4, num_workers=2) as envs:
        assert envs.action_space == OfDIEngine.action_space  # of env_ref
        assert envs.reward_space == OfDIEngine.reward_space
        envs.enable_save_replay("videos")
        envs.seed([5, 6, 7, 8])
        envs.launch()
        assert envs.observation_space == OfDIEngine.observation_space
        assert envs.replays == [[("videos", 0)]] * 4  # the env that is stepped was not reset before
        assert envs.seeded == [[(5,)], [(6,)], [(7,)], [(8,)]]
        assert envs.resets == [1] * 4
        assert envs.step({2: 1})[2].obs.tolist() == [1, 1]


@pytest.mark.deep
def test_spaces_of_gym():
    """Which need not be installed: these here have its names."""
    with manager(env_fns=[OfGym] * 2) as envs:
        assert envs.action_space == gym.spaces.Discrete(3)
        envs.launch()
        assert envs.observation_space == gym.spaces.Dict(
            seen=gym.spaces.Box(-1, 1, (2,), np.float32), bits=gym.spaces.MultiBinary(2)
        )
        assert envs.action_space == gym.spaces.Discrete(3)
        assert envs.reward_space == gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 3])])
        step = envs.step({0: np.array([2])})[0]
        assert step.obs["seen"].tolist() == [0.5, 0.5] and step.obs["bits"].tolist() == [1, 0]


@pytest.mark.deep
def test_envs_in_the_shapes_of_di_engine():
    with manager(env_fns=[OfDIEngine] * 2) as envs:
        envs.launch()
        assert envs.ready_obs[1].tolist() == [0, 0]
        steps = envs.step({0: 0, 1: 2})
        assert steps[0].reward.tolist() == [0.5] and not steps[0].done
        steps = envs.step({0: 0, 1: 2})
        assert steps[0].done and steps[0].info["TimeLimit.truncated"] is False
        assert steps[1].done and steps[1].info["TimeLimit.truncated"] is True


# ---- replays ---------------------------------------------------------------------------------


def test_enable_save_replay_before_the_first_reset():
    with manager(env_fns=[OfDIEngine] * 2) as envs:
        envs.enable_save_replay("videos")
        envs.launch()
        assert envs.replays == [[("videos", 0)]] * 2
        envs.step({0: 0, 1: 0})
        envs.enable_save_replay(["a", "b"])
        envs.reset()
        envs.reset()
        assert envs.replays == [[("videos", 0), ("a", 1)], [("videos", 0), ("b", 1)]]
        with pytest.raises(ValueError, match="1 replay paths for 2"):
            envs.enable_save_replay(["a"])


def write_counts(monkeypatch):
    """Stands in for moviepy: instead of a video, its number of frames is written."""
    init = gym.wrappers.RecordVideo.__init__

    def without_moviepy(self, *args, **kwargs):
        sys.modules.setdefault("moviepy", types.ModuleType("moviepy"))
        init(self, *args, **kwargs)

    def stop_recording(self):
        if self.recording:
            path = Path(self.video_folder, f"{self._video_name}.mp4")
            path.write_text(str(len(self.recorded_frames)))
        self.recorded_frames, self.recording, self._video_name = [], False, None

    monkeypatch.setattr(gym.wrappers.RecordVideo, "__init__", without_moviepy)
    monkeypatch.setattr(gym.wrappers.RecordVideo, "stop_recording", stop_recording)


@pytest.mark.deep
def test_enable_save_replay_works_with_record_video(tmp_path, monkeypatch):
    with_moviepy = importlib.util.find_spec("moviepy") is not None
    if not with_moviepy:
        write_counts(monkeypatch)
    fns = obedient(2, render_mode="rgb_array", length=2)
    with manager(env_fns=fns, num_workers=2, episode_num=2) as envs:
        envs.enable_save_replay(str(tmp_path))
        envs.launch()
        while not envs.done:
            envs.step(dict.fromkeys(envs.ready_obs, 0))
    found = sorted(tmp_path.glob("*.mp4"))
    assert [path.name for path in found] == [
        f"env-{env}-episode-{episode}.mp4" for env in range(2) for episode in range(2)
    ]
    if not with_moviepy:
        assert [path.read_text() for path in found] == ["3"] * 4


@pytest.mark.deep
def test_enable_save_replay_of_envs_that_do_not_render_says_so(tmp_path):
    with manager(num_envs=1) as envs:
        envs.enable_save_replay(str(tmp_path))
        with pytest.raises(RuntimeError, match="Env 0 reset .*render"):
            envs.launch()


# ---- V2 --------------------------------------------------------------------------------------


@WORKERS
def test_v2_takes_arrays_and_returns_records(num_workers):
    with manager(SubprocessEnvManagerV2, num_workers=num_workers, episode_num=2) as envs:
        envs.launch()
        assert envs.ready_obs.shape == (4, 4)
        assert envs.ready_obs[:, 0].tolist() == envs.ready_obs_id == [0, 1, 2, 3]
        records = envs.step(np.array([0, 1, TRUNCATE, 3]))
        assert [int(record.env_id) for record in records] == [0, 1, 2, 3]
        assert [float(record.reward) for record in records] == [0, 1, TRUNCATE, 3]
        assert [bool(record["done"]) for record in records] == [False, False, True, False]
        assert bool(records[2].info.TimeLimit_truncated) is True
        assert int(records[1].info.count) == 1
        assert records[3].obs.shape == (4,)
        with pytest.raises(AttributeError):
            _ = records[0].nothing
        total = 4
        while not envs.done:
            observations = envs.ready_obs
            total += len(envs.step([0] * len(observations)))
        assert envs.ready_obs.shape == (0, 4) and envs.ready_obs_id == []
        assert total == sum(envs.asked)
        assert envs.step([]) == []


class OwnSpace(gym.Space):
    """A space that Gymnasium's functions for batches do not know."""

    def sample(self, mask=None, probability=None):
        return np.zeros(4)

    def contains(self, x):
        return True

    def __eq__(self, other):
        return isinstance(other, OwnSpace)


class ObservesOwnSpace(Obedient):
    observation_space = OwnSpace()


def test_v2_stacks_observations_of_a_space_that_gymnasium_does_not_know():
    with manager(
        SubprocessEnvManagerV2, env_fns=[ObservesOwnSpace] * 3, num_workers=0, shared_memory=False
    ) as envs:
        envs.launch()
        assert envs.ready_obs.shape == (3, 4)


@pytest.mark.deep
def test_v2_actions_are_for_the_observations_that_were_shown():
    """A reset that ends between ready_obs and step does not shift them."""
    door = gate()
    with manager(SubprocessEnvManagerV2, env_fns=obedient(3, gate=door), num_workers=3) as envs:
        envs.launch()
        door.set()
        envs.reset({0: {"stat": "gate"}})
        door.clear()
        _ = envs.ready_obs
        envs.step([END, 0, 0])
        assert envs.ready_obs[:, 0].tolist() == [1, 2]
        door.set()
        assert envs.resets == [3, 1, 1]  # waits for all
        assert [int(record.env_id) for record in envs.step([5, 6])] == [1, 2]
        assert envs.asked == [1, 2, 2]


@pytest.mark.deep
def test_v2_refuses_other_numbers_of_actions():
    with manager(SubprocessEnvManagerV2) as envs:
        with pytest.raises(ManagerClosedError):
            envs.step([0])
        envs.launch()
        assert len(envs.ready_obs) == 4
        with pytest.raises(ValueError, match="3 actions for the 4 envs"):
            envs.step([0, 0, 0])
        with pytest.raises(TypeError, match="not a dict"):
            envs.step({0: 0})
        assert envs.asked == [0] * 4


@pytest.mark.deep
def test_v2_records_are_treetensors_if_that_is_installed():
    tnp = pytest.importorskip("treetensor.numpy")
    with manager(SubprocessEnvManagerV2) as envs:
        envs.launch()
        assert isinstance(envs.step([0] * 4)[0], tnp.ndarray)
