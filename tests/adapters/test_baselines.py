"""OpenAI baselines' SubprocVecEnv: its interface, what its own tests check, and its old faults."""

import importlib.util
import multiprocessing
import os
import sys
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Failing, Infos, Spaces
from processes import output_of
from tables import deep

from shmvec import FaultPolicy
from shmvec.adapters.baselines import AlreadySteppingError, NotSteppingError, SubprocVecEnv

SPLITS = pytest.mark.parametrize(
    "split",
    [{"num_workers": 2}, *deep({"in_series": 2})],
    ids=str,
)


def vec_env(env_fns, **options):
    """Forked, unless the processes are what the test is about: that starts faster."""
    return closing(SubprocVecEnv(env_fns, **{"context": "fork", **options}))


def counters(n, **options):
    return [partial(Counter, offset=10 * i, **options) for i in range(n)]


class Picture(gym.Env):
    """Shows its number, in a size and with channels of its own."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}

    def __init__(self, value, shape=(2, 3, 3), render_mode="rgb_array"):
        self.value, self.shape, self.render_mode = value, shape, render_mode

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def render(self):
        if self.render_mode is None:
            return None
        return np.full(self.shape, self.value, np.uint8)


# ---- SubprocVecEnv(env_fns, spaces=None, context="spawn", in_series=1) ------------------------


@pytest.mark.parametrize("in_series", [2, *deep(6)])
def test_in_series_envs_share_a_process_and_are_stepped_in_turn(in_series):
    with vec_env(counters(6), in_series=in_series) as venv:
        venv.reset()
        processes = venv.vector_env.processes
        assert len(processes) == 6 // in_series
        assert all(process.daemon and "SubprocVecEnv" in process.name for process in processes)
        rewards = venv.step([0] * 6)[1]
        assert rewards.tolist() == [1 + 10 * i for i in range(6)]


@pytest.mark.deep
@pytest.mark.parametrize("in_series", [4, 7])
def test_in_series_must_divide_the_number_of_envs(in_series):
    with pytest.raises(ValueError, match=f"6, must be divisible by .* {in_series}"):
        SubprocVecEnv(counters(6), in_series=in_series)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"in_series": 0}, ValueError, "at least 1"),
        *deep(
            ({"in_series": 1.5}, TypeError, "must be an int"),
            ({"in_series": 2, "num_workers": 1}, ValueError, "exclude each other"),
            ({"context": "thread"}, ValueError, "context"),
            ({"autoreset_mode": "Disabled"}, TypeError, "autoreset_mode"),
            ({"nonsense": 1}, TypeError, "nonsense"),
        ),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_started(arguments, error, message):
    with pytest.raises(error, match=message):
        SubprocVecEnv(counters(2), **arguments)
    assert not multiprocessing.active_children()


def test_context_is_spawn_and_lambdas_will_do():
    class Local(Counter):
        """Only cloudpickle can send it."""

    with closing(SubprocVecEnv([lambda: Local(length=3)] * 2)) as venv:
        assert venv.vector_env.context == "spawn"
        assert venv.reset().shape == (2, 4)
        assert venv.step([0, 1])[1].tolist() == [1.0, 1.0]


@pytest.mark.deep
def test_spaces_are_the_envs_or_checked():
    space = Counter().observation_space, Counter().action_space
    for given_spaces in (None, space, list(space)):
        with vec_env(counters(2), spaces=given_spaces, num_workers=0) as venv:
            assert (venv.observation_space, venv.action_space) == space
    for other in (
        (gym.spaces.Discrete(2), space[1]),
        (space[0], gym.spaces.Discrete(2)),
        (space[0], None),
        space[0],
    ):
        with pytest.raises(ValueError, match=r"spaces must be None or .* got .*(Discrete|Box)"):
            SubprocVecEnv(counters(2), spaces=other, context="fork")
    assert not multiprocessing.active_children()


# ---- step_async, step_wait, step, reset ------------------------------------------------------


def test_done_envs_are_reset_at_once_and_terminal_observations_are_kept_beside_the_infos():
    with vec_env([partial(Counter, length=2), partial(Counter, length=3)]) as venv:
        venv.reset()
        venv.step([1, 1])
        assert venv.terminal_observations == [None, None]
        observations, rewards, dones, infos = venv.step([2, 2])
        assert (observations.dtype, rewards.dtype, dones.dtype) == ("f8", "f8", "?")
        assert dones.tolist() == [True, False]
        assert observations[:, :2].tolist() == [[0, -1], [2, 2]]
        assert venv.terminal_observations[0][:2].tolist() == [2, 2]
        assert venv.terminal_observations[1] is None
        assert infos == ({"count": 2, "action": 2},) * 2
        assert venv.reset_infos == [{"reset": 2}, {"reset": 1}]


@pytest.mark.parametrize(("terminates", "limit", "expected"), [
    (3, 3, [False]), *deep((9, 3, [True]), (3, 9, [])),
])  # fmt: skip
def test_time_limit_truncated_says_whether_the_episode_would_have_gone_on(
    terminates, limit, expected
):
    def make():
        return gym.wrappers.TimeLimit(Counter(length=terminates), limit)

    with vec_env([make], num_workers=0) as venv:
        venv.reset()
        for _ in range(3):
            _, _, dones, (info,) = venv.step([0])
        assert dones[0]
        assert [info[key] for key in info if key == "TimeLimit.truncated"] == expected


@pytest.mark.deep
def test_infos_are_each_envs_own_dicts_with_its_own_types():
    per_env = [[{"x": 1, "s": "a"}], [{"x": 1.5, "nested": {"y": [1, 2]}}], [{}]]
    with vec_env([partial(Infos, one) for one in per_env], in_series=3) as venv:
        venv.reset()
        found = venv.step([0, 0, 0])[3]
        assert found == tuple(one[0] for one in per_env)
        assert [type(info.get("x")) for info in found] == [int, float, type(None)]
        found[0]["episode"] = {"r": 1}  # VecMonitor writes into them
        assert "episode" not in venv.step([0, 0, 0])[3][0]


@pytest.mark.deep
def test_a_running_step_is_dropped_by_reset():
    with vec_env(counters(2)) as venv:
        venv.reset()
        venv.step_async([1, 1])
        assert venv.reset()[:, 0].tolist() == [0, 0]
        assert not venv.waiting
        with pytest.raises(NotSteppingError):
            venv.step_wait()
        assert venv.step([1, 1])[1].tolist() == [1, 11]


@pytest.mark.deep
def test_seeds_and_options_are_passed_on():
    with vec_env(counters(2), in_series=2) as venv:
        first = venv.reset(seed=5, options={"level": 2})
        np.testing.assert_array_equal(first, venv.reset(seed=[5, 6]))
        assert venv.vector_env.get_attr("received") == ([{"level": 2}, None],) * 2
        with pytest.raises(ValueError, match="length"):
            venv.reset(seed=[1])


# ---- dict observations -----------------------------------------------------------------------


@SPLITS
def test_dict_observations_are_a_dict_of_stacked_arrays(split):
    space = gym.spaces.Dict(a=gym.spaces.Box(0, 1, (2, 3)), b=gym.spaces.Discrete(5))
    with vec_env([partial(Spaces, space, seed=i) for i in range(4)], **split) as venv:
        for observations in (venv.reset(), venv.step([0] * 4)[0]):
            assert list(observations) == ["a", "b"]
            assert observations["a"].shape == (4, 2, 3)
            assert observations["b"].shape == (4,) and observations["b"].dtype == np.int64
            assert len(np.unique(observations["a"][:, 0, 0])) == 4


@pytest.mark.deep
def test_tuple_observations_are_a_tuple_of_stacked_arrays():
    space = gym.spaces.Tuple((gym.spaces.Box(0, 1, (2,)), gym.spaces.MultiBinary(3)))
    with vec_env([partial(Spaces, space)] * 2, num_workers=0) as venv:
        first, second = venv.reset()
        assert first.shape == (2, 2) and second.shape == (2, 3)
        for _ in range(3):
            venv.step([0, 0])
        assert [len(last) for last in venv.terminal_observations] == [2, 2]


@pytest.mark.deep
@pytest.mark.parametrize("as_list", [True, False])
def test_dict_and_tuple_actions_come_one_by_one_or_stacked(as_list):
    space = gym.spaces.Dict(
        x=gym.spaces.Discrete(9), y=gym.spaces.Tuple((gym.spaces.Box(0, 1, (2,)),))
    )
    actions = [{"x": i, "y": (np.full(2, i / 9, np.float32),)} for i in range(2)]
    stacked = {"x": np.arange(2), "y": (np.array([a["y"][0] for a in actions]),)}
    with vec_env([partial(Spaces, gym.spaces.Discrete(2), space)] * 2, num_workers=0) as venv:
        venv.reset()
        venv.step(actions if as_list else stacked)
        for i, (received,) in enumerate(venv.vector_env.get_attr("actions")):
            assert received["x"] == i
            np.testing.assert_array_equal(received["y"][0], actions[i]["y"][0])
        with pytest.raises(ValueError, match=r"\[1\] must be a dict"):
            venv.step([actions[0], {"x": 1}])
        with pytest.raises(ValueError, match=r"\[0\] must be a tuple of 1"):
            venv.step([{"x": 1, "y": ()}, actions[0]])


# ---- attributes ------------------------------------------------------------------------------


def test_attributes_are_named_as_they_were():
    with vec_env([lambda: gym.make("CartPole-v1")] * 2) as venv:
        assert venv.num_envs == 2
        assert venv.observation_space.shape == (4,)
        assert venv.action_space == gym.spaces.Discrete(2)
        assert venv.spec.id == "CartPole-v1"
        assert venv.viewer is None and venv.in_series == 1
        assert (venv.closed, venv.waiting) == (False, False)
        assert venv.unwrapped is venv
        assert venv.metadata["render.modes"] == ["human", "rgb_array"]
        assert venv.metadata["render_fps"] == 50
        venv.reset()
        venv.step_async([0, 1])
        assert venv.waiting
        venv.step_wait()
        assert not venv.waiting
    assert venv.closed


@pytest.mark.deep
def test_it_counts_as_baselines_vec_env_where_that_is_in_use(monkeypatch):
    import abc
    import types

    theirs = types.ModuleType("baselines.common.vec_env")
    theirs.VecEnv = abc.ABCMeta("VecEnv", (), {})
    monkeypatch.setitem(sys.modules, "baselines.common.vec_env", theirs)
    with vec_env([Counter], num_workers=0) as venv:
        assert isinstance(venv, theirs.VecEnv)


@pytest.mark.parametrize("attributes", [{}, {"VecEnv": object}, None])
def test_baselines_without_an_abstract_class_is_left_alone(monkeypatch, attributes):
    import types

    theirs = attributes if attributes is None else types.SimpleNamespace(**attributes)
    monkeypatch.setitem(sys.modules, "baselines.common.vec_env", theirs)
    with vec_env([Counter], num_workers=0) as venv:
        assert venv.num_envs == 1


# ---- get_images, render, get_viewer ----------------------------------------------------------


def pictures(*shapes, **options):
    return [partial(Picture, 10 * (i + 1), shape, **options) for i, shape in enumerate(shapes)]


def test_render_rgb_array_tiles_the_frames():
    with vec_env(pictures(*[(2, 3, 3)] * 5), num_workers=2) as venv:
        images = venv.get_images()
        assert [image[0, 0, 0] for image in images] == [10, 20, 30, 40, 50]
        assert venv.metadata["render_fps"] == 7 and venv.render_mode == "rgb_array"
        picture = venv.render(mode="rgb_array")
        assert picture.shape == (6, 6, 3) and picture.dtype == np.uint8
        assert picture[::2, ::3, 0].tolist() == [[10, 20], [30, 40], [50, 0]]


@pytest.mark.deep
def test_render_takes_frames_of_mixed_sizes_and_grey_ones():
    with vec_env(pictures((2, 3, 3), (4, 2), (1, 5, 1)), num_workers=0) as venv:
        picture = venv.render("rgb_array")
        assert picture.shape == (8, 10, 3)
        assert (picture[:4, 5:7] == 20).all() and (picture[4:5, :5] == 30).all()


@pytest.mark.deep
def test_render_human_shows_a_window():
    if importlib.util.find_spec("pygame") is None:
        pytest.skip("pygame is not installed")
    script = f"""
import sys; sys.path[:0] = {[os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]}
import pygame
from test_baselines import SubprocVecEnv, pictures
venv = SubprocVecEnv(pictures(*[(20, 30, 3)] * 2), num_workers=0)
assert venv.render() is True
assert venv.viewer is venv.get_viewer() and venv.viewer.isopen
assert pygame.display.get_surface().get_size() == (30, 40)
assert pygame.display.get_surface().get_at((1, 21))[:3] == (20, 20, 20)
pygame.event.post(pygame.event.Event(pygame.QUIT))
assert venv.viewer.isopen is False
venv.render("human")
venv.close()
assert not pygame.display.get_init() and venv.viewer is None
"""
    output_of("-c", script, environ={"SDL_VIDEODRIVER": "dummy"})


@pytest.mark.deep
def test_rendering_says_what_is_wrong():
    with vec_env(pictures((2, 3, 3), render_mode=None), num_workers=0) as venv:
        with pytest.raises(ValueError, match='env 0 returned no frame: .*render_mode="rgb_array"'):
            venv.render("rgb_array")
        with pytest.raises(NotImplementedError, match="'ansi'"):
            venv.render("ansi")
        venv.step_async([0])
        with pytest.raises(AlreadySteppingError, match="get_images"):
            venv.get_images()
        venv.step_wait()


# ---- processes -------------------------------------------------------------------------------


class Environ(Counter):
    def mpi(self):
        return [name for name in os.environ if name.startswith(("OMPI_", "PMI_"))]


def test_mpi_variables_are_cleared_while_processes_start(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    with vec_env([Environ] * 2) as venv:
        assert venv.vector_env.call("mpi") == ([], [])
    assert os.environ["OMPI_COMM_WORLD_SIZE"] == "2" and os.environ["PMI_RANK"] == "0"


# ---- the original's faults -------------------------------------------------------------------


def test_a_second_step_async_is_an_error_and_changes_nothing():
    with vec_env(counters(2)) as venv:
        venv.reset()
        venv.step_async([1, 1])
        with pytest.raises(AlreadySteppingError, match="already running an async step"):
            venv.step_async([2, 2])
        with pytest.raises(AlreadySteppingError):
            venv.step([2, 2])
        assert venv.step_wait()[0][:, :2].tolist() == [[1, 1], [1, 1]]
        assert venv.step([2, 2])[0][:, :2].tolist() == [[2, 2], [2, 2]]


@pytest.mark.deep
def test_step_wait_alone_is_an_error():
    with vec_env(counters(2)) as venv:
        with pytest.raises(NotSteppingError, match="not running an async step"):
            venv.step_wait()
        venv.reset()
        venv.step([0, 0])
        with pytest.raises(NotSteppingError):
            venv.step_wait()


@pytest.mark.deep
def test_a_fault_policy_goes_on_and_infos_say_so():
    policy = FaultPolicy(on_crash="restart", on_error="reset", backoff_s=0)
    env_fns = [Counter, partial(Failing, "step", "kill"), partial(Failing, "step", KeyError("x"))]
    with vec_env(env_fns, faults=policy) as venv:
        venv.reset(seed=1)
        before = venv.step([1, 1, 1])[0]
        observations, rewards, dones, infos = venv.step([1, 1, 1])
        assert dones.tolist() == [False, True, True] and rewards.tolist() == [2, 0, 0]
        assert observations[:, 0].tolist() == [2, 0, 0]
        assert [info.get("fault", {}).get("type") for info in infos] == [
            None, "WorkerCrashError", "KeyError",
        ]  # fmt: skip
        for env in (1, 2):
            np.testing.assert_array_equal(venv.terminal_observations[env], before[env])
            assert infos[env]["TimeLimit.truncated"] is True
        assert venv.step([1, 1, 1])[2].tolist() == [False] * 3
