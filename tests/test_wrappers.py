"""Gymnasium's vector wrappers on top: what they give is what they give over SyncVectorEnv."""

from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Scripted
from equality import same, sync_env
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import vector as wrappers
from tables import first

from shmvec import ShmVectorEnv

BOX = gym.spaces.Box(-1, 1, (2, 4), seed=0)
WRAPPERS = {  # first one that has a state
    "NormalizeObservation": wrappers.NormalizeObservation,
    "ClipAction": wrappers.ClipAction,
    "ClipReward": lambda envs: wrappers.ClipReward(envs, 0.2, 0.6),
    "DictInfoToList": wrappers.DictInfoToList,
    "DtypeObservation": lambda envs: wrappers.DtypeObservation(envs, np.float64),
    "FilterObservation": lambda envs: wrappers.FilterObservation(envs, ["a"]),
    "FlattenObservation": wrappers.FlattenObservation,
    "NormalizeReward": wrappers.NormalizeReward,
    "NumpyToTorch": lambda envs: wrappers.NumpyToTorch(envs),  # imports torch
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "RescaleAction": lambda envs: wrappers.RescaleAction(envs, 0.0, 1.0),
    "RescaleObservation": lambda envs: wrappers.RescaleObservation(envs, 0.0, 1.0),
    "ReshapeObservation": lambda envs: wrappers.ReshapeObservation(envs, (4, 2)),
    "TransformReward": lambda envs: wrappers.TransformReward(envs, lambda rewards: rewards * 2),
    "VectorizeTransformObservation": lambda envs: wrappers.VectorizeTransformObservation(
        envs, gym.wrappers.TransformObservation, func=np.abs, observation_space=None
    ),
}
NEEDS = {"NumpyToTorch": ("torch", "array_api_compat")}


def observation_space(name):
    if name == "FilterObservation":
        return gym.spaces.Dict(a=BOX, b=gym.spaces.Discrete(3))
    return BOX


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting", "ignore:overflow encountered")
@pytest.mark.parametrize("name", first(WRAPPERS))
def test_a_wrapper_gives_what_it_gives_over_sync(name):
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    space = observation_space(name)
    make = [
        lambda n=n: Scripted(space, gym.spaces.Box(-1, 1, (3,)), [n, 3], [{"count": n}])
        for n in (2, 4, 5)
    ]
    ours, theirs = (
        WRAPPERS[name](kind(make, **kwargs))
        for kind, kwargs in ((ShmVectorEnv, {"num_workers": 2}), (SyncVectorEnv, {}))
    )
    with closing(ours), closing(theirs):
        compare(ours.reset(seed=1), theirs.reset(seed=1))
        actions = np.linspace(-2, 2, 9).reshape(3, 3).astype(np.float32)
        if name == "NumpyToTorch":
            import torch

            actions = torch.from_numpy(actions)
        for _ in range(12):
            mine, reference = ours.step(actions), theirs.step(actions)
            compare(mine, reference)
        assert same(
            [np.asarray(a) for a in ours.unwrapped.get_attr("actions")[0]],
            [np.asarray(a) for a in theirs.unwrapped.get_attr("actions")[0]],
        )


def compare(mine, reference):
    for infos in (mine[-1], reference[-1]):
        if isinstance(infos, dict) and "episode" in infos:
            infos["episode"].pop("t")  # the time
    if type(mine[0]).__module__ == "torch":
        mine, reference = ([*map(np.asarray, x[:-1]), {}] for x in (mine, reference))
    assert same(list(mine), list(reference)), f"\n{mine}\n{reference}"


@pytest.mark.deep
def test_every_wrapper_of_gymnasium_is_here():
    elsewhere = {
        "ArrayConversion",  # base of the conversions
        "HumanRendering",  # needs a screen
        "JaxToNumpy",  # for envs in jax, which are no processes
        "JaxToTorch",
        "RecordVideo",  # below
        "TransformAction",  # base of ClipAction and RescaleAction
        "TransformObservation",  # base of the others
        "VectorizeTransformAction",  # base of ClipAction
        "VectorizeTransformReward",  # base of ClipReward
        "GrayscaleObservation",  # below
        "ResizeObservation",
    }
    assert set(wrappers.__all__) <= WRAPPERS.keys() | elsewhere


@pytest.mark.deep
def test_wrappers_of_images():
    pytest.importorskip("cv2")
    make = [
        lambda: Scripted(gym.spaces.Box(0, 255, (8, 8, 3), np.uint8), gym.spaces.Discrete(2), [3])
    ] * 2
    results = []
    for kind in (ShmVectorEnv, SyncVectorEnv):
        envs = wrappers.ResizeObservation(wrappers.GrayscaleObservation(kind(make)), (4, 4))
        with closing(envs):
            results.append([envs.reset(seed=2), *[envs.step([0, 1]) for _ in range(6)]])
    assert same(*results)
    assert results[0][0][0].shape == (2, 4, 4)


class Filmed(Counter):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    render_mode = "rgb_array"

    def render(self):
        return np.full((32, 32, 3), 10 * self.count, np.uint8)


@pytest.mark.deep
def test_record_video(tmp_path):
    pytest.importorskip("moviepy")
    envs = ShmVectorEnv([Filmed] * 2)
    with closing(wrappers.RecordVideo(envs, str(tmp_path / "videos"), video_length=5)) as recording:
        recording.reset(seed=0)
        for _ in range(6):
            recording.step(recording.action_space.sample())
    assert list((tmp_path / "videos").glob("*.mp4"))


@pytest.mark.deep
def test_wrappers_add_to_infos_that_are_theirs_alone():
    """RecordEpisodeStatistics writes into the infos it gets: they must be fresh each step."""
    envs = wrappers.RecordEpisodeStatistics(ShmVectorEnv([lambda: Counter(2)] * 2))
    with closing(envs):
        envs.reset()
        envs.step([0, 0])
        infos = envs.step([0, 0])[4]
        assert infos["episode"]["l"].tolist() == [2, 2]
        assert "episode" not in envs.step([0, 0])[4]


@pytest.mark.deep
def test_same_step_final_observations_pass_through_wrappers():
    results = []
    make = [lambda: Scripted(BOX, gym.spaces.Discrete(2), [2])] * 2
    for envs in (sync_env(make, "SameStep"), ShmVectorEnv(make, autoreset_mode="SameStep")):
        envs = wrappers.RecordEpisodeStatistics(envs)
        with closing(envs):
            envs.reset(seed=0)
            steps = [envs.step([0, 0]) for _ in range(4)]
            for step in steps:
                step[4].get("episode", {}).pop("t", None)
            results.append(steps)
    assert same(*results)
