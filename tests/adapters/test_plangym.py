"""The facade of plangym's: its whole interface, over envs of Gymnasium's and of plangym's kind."""

import gc
import multiprocessing
import sys
import types
from contextlib import closing
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from gymnasium.error import ClosedEnvironmentError
from plangym_envs import Fickle, Walk, Words
from processes import output_of
from tables import deep

from shmvec import FaultPolicy
from shmvec.adapters.plangym import GymnasiumEnv, ParallelEnv, make
from shmvec.planning import StateAccess

WORKERS = pytest.mark.parametrize("n_workers", [2, *deep(0)])


def parallel(env_class=GymnasiumEnv, name="CartPole-v1", n_workers=2, **options):
    return closing(ParallelEnv(env_class, name, n_workers=n_workers, **options))


def counting(name="counter", **options):
    return GymnasiumEnv(name, env_fn=partial(Counter, length=6), **options)


def states_along(env, count):
    """So many states, along episodes."""
    state, *_ = env.reset()
    states = []
    for _ in range(count):
        states.append(state)
        state, _, _, end, truncated, _ = env.step(env.sample_action(), state)
        if end or truncated:
            state, *_ = env.reset()
    return states


# ---- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n_workers, count",
    [(2, 7), *deep((0, 7), (1, 1), (2, 0), (3, 200))],
)
def test_step_batch_is_that_of_one_env(n_workers, count):
    options = {"frameskip": 2, "worker_options": {"rows": 64}}
    with parallel(n_workers=n_workers, **options) as env, closing(env.plan_env.clone()) as alone:
        states = states_along(alone, count)
        actions = [alone.sample_action() for _ in range(count)]
        dt = 1 + np.arange(count) % 3
        ours = env.step_batch(actions, states, dt)
        theirs = alone.step_batch(actions, states, dt)
        assert all(type(values) is list and len(values) == count for values in ours)
        for mine, other in zip(ours[:2], theirs[:2], strict=True):
            for one, another in zip(mine, other, strict=True):
                np.testing.assert_array_equal(one, another)
                assert one.dtype == another.dtype
        assert ours[2:] == theirs[2:]


@pytest.mark.deep
def test_types_are_those_of_plangym():
    with parallel(n_workers=1) as env:
        state, observation, info = env.reset()
        assert isinstance(state, np.ndarray) and observation.dtype == np.float32
        assert isinstance(info, dict)
        states, observations, rewards, ends, truncateds, infos = env.step_batch(
            [0, 1], [state] * 2, dt=np.array([3, 1])
        )
        assert [type(values[0]) for values in (states, observations, rewards, ends, infos)] == [
            np.ndarray, np.ndarray, float, bool, dict,
        ]  # fmt: skip
        assert type(truncateds[0]) is bool
        assert infos == [{"n_step": 3, "dt": 3}, {"n_step": 1, "dt": 1}]
        assert all(type(value) is int for info in infos for value in info.values())


@pytest.mark.deep
def test_none_for_each_state_is_no_states():
    with parallel(Walk) as env:
        env.reset()
        actions = np.zeros((4, 2), np.float32)
        result = env.step_batch(actions, [None] * 4)
        assert len(result) == 5
        assert [observation[0] for observation in result[0]] == [1, 2, 1, 2]
        states, *_ = env.step_batch(actions, [None] * 4, return_state=True)
        assert [state[0] for state in states] == [3, 4, 3, 4]
        with pytest.raises(ValueError, match="wrong states"):
            env.step_batch(actions, [None, None, states[0], states[1]])


@pytest.mark.deep
@pytest.mark.parametrize("return_state", [None, True, False])
@pytest.mark.parametrize("given", [True, False])
def test_whether_states_are_returned(return_state, given):
    with parallel(Walk, n_workers=1) as env:
        state, *_ = env.reset()
        assert len(env.reset(return_state=False)) == 2
        returned = given if return_state is None else return_state
        states = [state] * 3 if given else None
        actions = [env.sample_action()] * 3
        assert len(env.step_batch(actions, states, return_state=return_state)) == 5 + returned
        one = env.step(actions[0], state if given else None, return_state=return_state)
        assert len(one) == 5 + returned


@pytest.mark.deep
def test_the_state_after_the_last_step_is_the_terminal_one():
    """The env resets itself once it has been taken; its next step says so."""
    with parallel(Walk, n_workers=1) as env:
        env.reset()
        actions = np.zeros((4, 2))
        states, observations, rewards, ends, _, infos = env.step_batch(
            actions, dt=3, return_state=True
        )
        assert [state[0] for state in states] == [3, 6, 3, 6]
        assert [observation[0] for observation in observations] == [3, 6, 3, 6]
        assert rewards == [6, 15, 6, 15] and ends == [False, True] * 2
        assert ["autoreset" in info for info in infos] == [False, False, True, False]
        *_, infos = env.step_batch(actions[:1], states[:1])
        assert "autoreset" not in infos[0]  # a state was set


@pytest.mark.deep
@WORKERS
def test_envs_without_spaces(n_workers):
    with parallel(Words, n_workers=n_workers) as env:
        env.reset()
        states, observations, *_ = env.step_batch(["one", "three"], [{"count": 4}, {"count": 0}])
        assert states == [{"count": 7}, {"count": 5}]
        assert observations == ["after 7", "after 5"]
        assert env.step_batch([])[-1] == []
        env.set_state({"count": 30})
        assert env.step_batch(["four"], return_state=True)[0] == [{"count": 34}]
        if n_workers:
            assert env.reset(indices=[0])[0] == [{"count": 0}]


@pytest.mark.deep
@WORKERS
def test_states_and_observations_that_change_their_dtype(n_workers):
    with parallel(Fickle, n_workers=n_workers) as env:
        state, observation, _ = env.reset()
        assert state.dtype == np.float32 and observation.dtype == np.int64
        states, observations, *_ = env.step_batch([env.sample_action()] * 3, [state] * 3)
        assert [each.dtype for each in states] == [np.float64] * 3
        assert [seen.tolist() for seen in observations] == [[1.5]] * 3
        mixed = [state, states[0], state]
        states, *_ = env.step_batch([env.sample_action()] * 3, mixed)
        assert [each[0] for each in states] == [1, 2, 1]


@pytest.mark.deep
def test_dt_that_is_no_number_of_steps():
    with parallel(Walk, n_workers=1) as env:
        actions = np.zeros((2, 2))
        assert [info["dt"] for info in env.step_batch(actions, dt=[2.9, 1.0])[-1]] == [2, 1]
        for dt in (0, [1, -1], [1, 2, 3]):
            with pytest.raises(ValueError, match="dt must be"):
                env.step_batch(actions, dt=dt)
        with closing(GymnasiumEnv("CartPole-v1")) as alone, pytest.raises(ValueError, match="dt"):
            alone.step_with_dt(0, dt=0)


class Raises(Walk):
    def step(self, action, **others):
        if action[0] == 1:
            raise LookupError("lost")
        return super().step(action, **others)


@pytest.mark.deep
def test_worker_options_are_those_of_planning():
    policy = FaultPolicy(on_error="reset")
    with parallel(Raises, n_workers=1, worker_options={"faults": policy}) as env:
        state, *_ = env.reset()
        *_, truncateds, infos = env.step_batch(np.array([[0, 0], [1, 0]]), [state] * 2)
        assert truncateds == [False, True] and infos[1]["fault"]["type"] == "LookupError"


# ---- the env of this process, and states -----------------------------------------------------


@pytest.mark.deep
def test_all_else_is_done_by_the_env_of_this_process():
    with parallel(Walk, n_workers=1, length=9) as env:
        assert type(env.plan_env) is Walk and env.plan_env.length == 9
        assert env.obs_shape == (3,) and env.action_shape == (2,)
        assert env.name == "CartPole-v1" and env.unwrapped is env
        assert env.step_with_dt(np.ones(2), dt=2)[0].tolist() == [2, 2, 0]
        assert env.render("rgb_array") == "CartPole-v1 at 2"
        assert env.length == 9 and repr(env) == str(env)
        assert not hasattr(env, "nothing_of_the_kind")
        for name in ("STATE_IS_ARRAY", "OBS_IS_ARRAY", "SINGLETON", "DEFAULT_OBS_TYPE"):
            assert hasattr(ParallelEnv, name) and getattr(env, name) == getattr(Walk, name)


@pytest.mark.deep
def test_states_are_set_everywhere():
    with parallel(Walk) as env:
        actions = np.zeros((2, 2))
        for state in ([3.0, 0], [2.0, 1]):
            env.set_state(np.array(state))
            assert env.get_state().tolist() == state
            assert [seen[0] for seen in env.step_batch(actions)[0]] == [state[0] + 1] * 2
        env.plan_env.set_state(np.array([1.0, 0]))
        env.sync_states(None)
        assert [seen[0] for seen in env.step_batch(actions)[0]] == [2, 2]
        env.sync_states(np.array([4.0, 0]))
        assert [seen[0] for seen in env.step_batch(actions)[0]] == [5, 5]
        states, observations, infos = env.reset(indices=[1])
        assert (
            [state.tolist() for state in states] == [[0, 0]]
            and observations.shape == (1, 3)
            and len(infos) == 1
        )
        assert env.call("get_state")[0].tolist() == [5, 0]


@pytest.mark.deep
def test_the_env_of_this_process_is_built_when_it_is_needed(tmp_path):
    def built(**arguments):
        with (tmp_path / "built").open("a") as file:
            file.write("x")
        return Walk(**arguments)

    with parallel(built, n_workers=1, delay_setup=True) as env:
        assert not (tmp_path / "built").exists()
        env.setup()
        env.setup()
        env.step_batch(np.zeros((2, 2)))
        assert (tmp_path / "built").read_text() == "x"
        env.reset()
        assert (tmp_path / "built").read_text() == "xx"


@pytest.mark.deep
def test_what_workers_envs_are_made_with():
    with parallel(Walk, n_workers=1, frameskip=3, render_mode="human", x=1) as env:
        assert env.call("render_mode") == (None,)  # one window is enough
        assert env.render_mode == "human"
        assert env.call("frameskip") == (3,) and env.frameskip == env.plan_env.frameskip == 3
        assert env.call("others") == ({"x": 1, "delay_setup": False},)
    with parallel(Walk, n_workers=1) as env:
        assert env.call("render_mode") == ("rgb_array",) and env.render_mode == "rgb_array"


@pytest.mark.deep
def test_clone():
    with parallel(Walk, n_workers=1, length=4, blocking=True) as env:
        env.delay_setup = True
        with closing(env.clone(n_workers=2)) as other:
            assert other.delay_setup and other.blocking and other.n_workers == 2
            other.reset()
            assert other.call("length") == (4, 4)


@pytest.mark.deep
def test_close():
    env = ParallelEnv(Walk, "walk", n_workers=1)
    local = env.plan_env
    env.close()
    env.close()
    assert not local.is_open
    for use in (env.reset, lambda: env.step_batch([]), lambda: env.obs_shape):
        with pytest.raises(ClosedEnvironmentError, match="setup"):
            use()
    with pytest.raises(ClosedEnvironmentError):
        _ = env.plan_env


def test_setup_after_close_starts_anew():
    with parallel(Walk, n_workers=2, worker_options={"rows": 8}) as env:
        state, *_ = env.reset()
        first = env.plan_env
        for _ in range(2):
            env.close()
            env.setup()
            assert len(env.step_batch([env.sample_action()] * 3, [state] * 3)) == 6
        assert env.plan_env is not first and not first.is_open


@pytest.mark.deep
def test_an_env_that_is_forgotten_closes_itself():
    env = ParallelEnv(Walk, "walk", n_workers=1)
    env.reset()
    del env
    gc.collect()
    assert not multiprocessing.active_children()


# ---- GymnasiumEnv ----------------------------------------------------------------------------


@pytest.mark.deep
def test_the_state_of_a_gymnasium_env_is_that_of_planning():
    with closing(GymnasiumEnv("CartPole-v1")) as env:
        state, observation, _ = env.reset()
        np.testing.assert_array_equal(state, StateAccess(env.gym_env, True).get())
        later = [env.step(1)[0] for _ in range(3)]
        env.set_state(state)
        for seen in later:
            np.testing.assert_array_equal(env.step(1)[0], seen)
        assert env.obs_shape == (4,) and env.action_shape == () and env.STATE_IS_ARRAY
        assert observation.shape == env.observation_space.shape


@pytest.mark.deep
def test_states_of_no_fixed_size():
    with closing(counting()) as env:
        state, *_ = env.reset()
        assert not env.STATE_IS_ARRAY and not isinstance(state, np.ndarray)
        with parallel(counting, n_workers=1) as many:
            assert not many.STATE_IS_ARRAY
            states, observations, *_ = many.step_batch([2, 3], [state] * 2)
            assert [seen[:2].tolist() for seen in observations] == [[1, 2], [1, 3]]
            env.set_state(states[1])
            assert env.step(0)[-1]["count"] == 2


@pytest.mark.deep
def test_seeds_are_for_the_next_reset():
    with closing(GymnasiumEnv("CartPole-v1")) as env, parallel(n_workers=1) as many:
        expected, _ = gym.make("CartPole-v1").reset(seed=5)
        for one in (env, many):
            one.seed(5)
            np.testing.assert_array_equal(one.reset()[1], expected)
            assert (one.reset()[1] != expected).any()
            one.seed()


@pytest.mark.deep
def test_envs_whose_reset_knows_no_seed():
    class Old(Counter):
        def reset(self):
            return super().reset()

    with parallel(partial(GymnasiumEnv, env_fn=Old), n_workers=1) as env:
        assert env.reset()[-1] == {"reset": 2}
        assert env.reset(indices=[0])[-1] == [{"reset": 3}]


@pytest.mark.deep
def test_time_limits_are_taken_off():
    def wrapped():
        env = gym.wrappers.TimeLimit(Counter(length=99), 3)
        return gym.wrappers.TransformReward(gym.wrappers.ClipReward(env, -5, 5), float)

    def limits(env):
        return str(env.gym_env).count("TimeLimit")

    for make_env in (wrapped, lambda: gym.wrappers.TimeLimit(Counter(length=99), 3)):
        with closing(GymnasiumEnv("x", env_fn=make_env)) as env:
            assert env.remove_time_limit and limits(env) == 0
            assert env.step(0, dt=9)[-1]["n_step"] == 9
        with closing(GymnasiumEnv("x", env_fn=make_env, remove_time_limit=False)) as env:
            assert limits(env) == 1
            *_, truncated, info = env.step(0, dt=9)
            assert truncated and info["n_step"] == 3
    with closing(GymnasiumEnv("CartPole-v1")) as env:
        assert limits(env) == 0


@pytest.mark.deep
def test_autoreset_of_one_env():
    for autoreset in (True, False):
        with closing(counting(autoreset=autoreset)) as env:
            env.reset()
            observation, reward, end, *_ = env.step(0, dt=9)
            assert end and observation[0] == 6 and reward == 21
            assert env.gym_env.count == (0 if autoreset else 6)


@pytest.mark.deep
def test_wrappers():
    given = [
        gym.wrappers.FlattenObservation,
        (gym.wrappers.ClipReward, {"min_reward": 0, "max_reward": 0.5}),
        (gym.wrappers.TransformReward, [lambda reward: reward * 2]),
        (gym.wrappers.TransformReward, lambda reward: reward + 1),
    ]
    with closing(GymnasiumEnv("CartPole-v1", wrappers=given)) as env:
        assert env.step(0)[1] == 2
        with closing(env.clone()) as other:
            assert other.step(0)[1] == 2
        env.apply_wrappers([(gym.wrappers.TransformReward, [lambda reward: -reward])])
        state, *_ = env.reset()
        assert env.step(0, state)[2] == -2


def small_cartpole():
    """Its pictures are a hundredth of what they are: spaces of a batch of them cost seconds."""
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    env.unwrapped.screen_width, env.unwrapped.screen_height = 60, 40
    return env


@pytest.mark.deep
def test_pictures():
    pytest.importorskip("pygame")
    with closing(GymnasiumEnv("CartPole-v1", return_image=True)) as env:
        assert env.img_shape == (400, 600, 3) and env.render_mode == "rgb_array"
        state, _, info = env.reset()
        for each in (info, env.step(1)[-1]):
            assert each["rgb"].shape == env.img_shape
        *_, last = env.step(0, dt=15)
        env.set_state(state)
        first = env.get_image()
        np.testing.assert_array_equal(first, info["rgb"])
        assert (last["rgb"] != first).any()
    for obs_type, shape in (("rgb", (40, 60, 3)), ("grayscale", (40, 60))):
        with parallel(env_fn=small_cartpole, n_workers=1, obs_type=obs_type) as env:
            state, observation, _ = env.reset()
            assert env.obs_shape == observation.shape == shape and observation.dtype == np.uint8
            assert env.observation_space.contains(observation) and env.obs_type == obs_type
            (seen,) = env.step_batch([1], [state], return_state=False)[0]
            np.testing.assert_array_equal(seen, env.step(1, state)[1])
    with closing(GymnasiumEnv("CartPole-v1", render_mode=None)) as env:
        assert env.img_shape is None
        with pytest.raises(RuntimeError, match="Cannot get image when render_mode=None"):
            env.get_image()


@pytest.mark.deep
@pytest.mark.parametrize(
    "arguments",
    [
        {"render_mode": "telepathy"},
        {"obs_type": "smell"},
        {"return_image": True, "render_mode": None},
    ],
)
def test_arguments_that_are_refused(arguments):
    with pytest.raises(ValueError):
        GymnasiumEnv("CartPole-v1", **arguments)


# ---- make, and plangym itself ----------------------------------------------------------------


def without_plangym(monkeypatch):
    monkeypatch.setitem(sys.modules, "plangym.registry", None)


def test_make_without_plangym(monkeypatch):
    without_plangym(monkeypatch)
    with closing(make("CartPole-v1")) as env:
        assert type(env) is GymnasiumEnv
    for arguments, workers in (({"n_workers": 2}, 2), ({"n_workers": 1, "ray": True}, 1)):
        with closing(make(name="CartPole-v1", **arguments, frameskip=2)) as env:
            assert type(env) is ParallelEnv and env.n_workers == workers and env.frameskip == 2
            assert type(env.plan_env) is GymnasiumEnv
    with closing(make("CartPole-v1", ray=True, delay_setup=True)) as env:
        assert env.n_workers == 8


def stand_in_for_plangym(monkeypatch):
    """plangym's classes and registry, as far as they are asked."""
    from abc import ABC

    class PlangymEnv(ABC):  # noqa: B024
        pass

    class BalloonEnv(Walk):
        pass

    def get_planenv_class(name, domain_name, state):
        return Walk if "Walk" in (name, domain_name) or state else BalloonEnv

    registry = types.ModuleType("plangym.registry")
    registry.get_planenv_class = get_planenv_class
    core = types.ModuleType("plangym.core")
    core.PlangymEnv = PlangymEnv
    for name, module in (("registry", registry), ("core", core)):
        monkeypatch.setitem(sys.modules, f"plangym.{name}", module)
    return PlangymEnv


@pytest.mark.deep
def test_make_takes_plangyms_own_classes(monkeypatch):
    kind = stand_in_for_plangym(monkeypatch)
    with closing(make("Walk", length=3)) as env:
        assert type(env) is Walk and env.length == 3
    for arguments in ({"domain_name": "Walk"}, {"state": "Start"}):
        with closing(make("x", n_workers=1, **arguments)) as env:
            assert type(env.plan_env) is Walk
            assert arguments.items() <= env.plan_env.others.items()
            assert isinstance(env, kind)
    with closing(make("CartPole-v1")) as env:  # a name that it does not know
        assert type(env) is GymnasiumEnv and isinstance(env, kind)


@pytest.mark.deep
def test_what_plangym_lacks_is_no_secret(monkeypatch):
    class Finder:
        def find_spec(self, name, *_):
            if name.startswith("plangym"):
                raise ModuleNotFoundError("No module named 'cv2'", name="cv2")

    for name in [name for name in sys.modules if name.partition(".")[0] == "plangym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="cv2"):
        make("CartPole-v1")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("env_class", "name"),
    [
        ("control:ClassicControl", "CartPole-v1"),
        ("control:ClassicControl", "MountainCarContinuous-v0"),
        ("control:MujocoEnv", "HalfCheetah-v5"),
        ("videogames:AtariEnv", "ALE/MsPacman-v5"),
    ],
)
def test_results_are_those_of_the_original(env_class, name):
    pytest.importorskip("plangym")
    script = Path(__file__).with_name("plangym_beside.py")
    said = output_of(script, env_class, name)  # the original leaves its pipes open
    assert "equal: 42 rows" in said
