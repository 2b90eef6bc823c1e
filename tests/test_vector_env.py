"""ShmVectorEnv: results equal SyncVectorEnv's whatever the workers, and its lifecycle."""

import gc
import sys
import warnings
import weakref
from contextlib import closing
from copy import copy

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Spaces
from equality import MODES, assert_equals_sync, assert_same, assert_same_steps
from gymnasium.vector import SyncVectorEnv
from tables import deep, first

import shmvec
from shmvec import ShmVectorEnv
from shmvec._cores import usable_cores
from shmvec.exchange import AutoresetMode


def fns(*lengths):
    return [lambda length=length, i=i: Counter(length, i) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("context", ["forkserver", "spawn", *deep("fork")])
def test_start_methods(context):
    assert_equals_sync(fns(3, 4, 5), num_workers=2, context=context)


def test_spaces_and_metadata_are_those_of_sync():
    ours, theirs = ShmVectorEnv(fns(3, 3), num_workers=1), SyncVectorEnv(fns(3, 3))
    for name in (
        "num_envs",
        "observation_space",
        "action_space",
        "single_observation_space",
        "single_action_space",
        "render_mode",
        "spec",
        "closed",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    mode = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # Gymnasium 1.0 has no name for it
    assert ours.metadata == {**theirs.metadata, **mode}
    assert "autoreset_mode" not in Counter.metadata or gym.__version__ < "1.4"  # a copy
    assert gym.vector.VectorEnv in ShmVectorEnv.__bases__
    assert str(ours).startswith("ShmVectorEnv(num_envs=2, num_workers=")
    ours.close()


def test_default_number_of_workers():
    envs = ShmVectorEnv(fns(*[3] * (usable_cores() + 1)))
    assert envs.num_workers == usable_cores()
    envs.close()
    envs = ShmVectorEnv(fns(3))
    assert envs.num_workers == 1
    envs.close()


@pytest.mark.parametrize("num_workers", [2, *deep(0)])
def test_seeding(num_workers):
    def noise(result):
        return result[0][:, 2].tolist()

    envs = ShmVectorEnv(fns(9, 9, 9), num_workers=num_workers)
    by_int = noise(envs.reset(seed=5))
    assert len(set(by_int)) == 3
    assert noise(envs.reset(seed=[5, 6, 7])) == by_int
    assert noise(envs.reset(seed=np.int64(5))) == by_int
    assert noise(envs.reset()) != by_int
    mixed = noise(envs.reset(seed=[None, 6, None]))
    assert mixed[1] == by_int[1] and mixed[0] != by_int[0]
    big = 2**70
    assert noise(envs.reset(seed=big)) == noise(envs.reset(seed=[big, big + 1, big + 2]))
    assert envs.np_random_seed == (big, big + 1, big + 2)
    assert all(isinstance(r, np.random.Generator) for r in envs.np_random)
    envs.close()


class Told(Counter):
    """Notes what each reset is given."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=abs(seed or 0))
        self.received[-1] = seed, type(seed), options
        return observation, info


@pytest.mark.parametrize(
    "how",
    [
        {"num_workers": 2},
        {"num_workers": 0},
        *deep({"num_workers": 2, "caller_steps": True}, {"num_workers": 1, "overlap": 2}),
    ],
    ids=str,
)
def test_resets_are_given_what_sync_gives(how):
    seeds = (
        None,
        [0, 2**63 - 1, None],
        [-(2**63), 2**63, None],
        [-1, None, -(2**63) - 1],
        [None, None, None],
        7,
    )
    mask = {"reset_mask": np.array([True, False, True])}
    masks = [mask, mask | {"level": 2}] if len(MODES) > 1 else []  # Gymnasium 1.0 knows none
    ours, theirs = ShmVectorEnv([Told] * 3, **how), SyncVectorEnv([Told] * 3)
    with closing(ours), closing(theirs):
        for options in (None, {}, {"level": 1}, *masks):
            for seed in seeds:
                assert_same(
                    *(envs.reset(seed=seed, options=copy(options)) for envs in (ours, theirs))
                )
        assert ours.get_attr("received") == theirs.get_attr("received")


@pytest.mark.parametrize("num_workers", [2, *deep(0)])
def test_a_seed_that_an_env_refuses(num_workers):
    ours, theirs = ShmVectorEnv(fns(9, 9, 9), num_workers=num_workers), SyncVectorEnv(fns(9, 9, 9))
    with closing(ours), closing(theirs):
        messages = []
        for envs in (ours, theirs):
            with pytest.raises(gym.error.Error, match="-1") as refused:
                envs.reset(seed=[2, -1, 4])
            messages.append(str(refused.value))
        assert messages[0] == messages[1]
        np.testing.assert_equal(ours.reset(seed=5)[0], theirs.reset(seed=5)[0])


@pytest.mark.parametrize("num_workers", [2, *deep(0)])
def test_reset_options_and_mask(num_workers):
    envs = ShmVectorEnv(fns(9, 9, 9), num_workers=num_workers)
    envs.reset(options={"level": 3})
    assert [got[-1] for got in envs.get_attr("received")] == [{"level": 3}] * 3
    envs.step([0, 0, 0])
    options = {"reset_mask": np.array([False, True, False]), "level": 4}
    observations, infos = envs.reset(options=options)
    assert observations[:, 0].tolist() == [1, 0, 1]
    assert infos["reset"].tolist() == [0, 2, 0] and infos["_reset"].tolist() == [0, 1, 0]
    assert "reset_mask" in options
    assert envs.get_attr("received")[1][-1] == {"level": 4}
    envs.close()


@pytest.mark.parametrize("num_workers", [2, *deep(0)])
def test_call_get_set_render(num_workers):
    envs = ShmVectorEnv(fns(9, 8, 7), num_workers=num_workers)
    envs.reset()
    assert envs.get_attr("length") == (9, 8, 7)
    envs.set_attr("length", [1, 2, 3])
    assert envs.call("get_wrapper_attr", "length") == (1, 2, 3)
    envs.set_attr("length", 4)
    assert envs.get_attr("length") == (4, 4, 4)
    assert envs.call("has_wrapper_attr", name="missing") == (False,) * 3
    with pytest.raises(AttributeError, match="missing"):
        envs.get_attr("missing")
    with pytest.raises(ValueError, match="use `step` directly"):
        envs.call("step", 1)
    with pytest.raises(ValueError, match="length equal"):
        envs.set_attr("length", [1, 2])
    assert envs.step([1, 1, 1])[1].tolist() == [1, 2, 3]
    envs.close()
    envs = ShmVectorEnv(
        [lambda: gym.make("CartPole-v1", render_mode="rgb_array")] * 2, num_workers=num_workers
    )
    assert envs.render_mode == "rgb_array"
    try:
        import pygame  # noqa: F401
    except ImportError:
        pass
    else:
        envs.reset()
        assert [frame.shape for frame in envs.render()] == [(400, 600, 3)] * 2
    envs.close()


class Searched(Counter):
    """Counts how often all its attributes are listed, as traceback does to find similar ones."""

    listed = 0

    def __dir__(self):
        self.listed += 1
        return super().__dir__()


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [0, 1])
def test_asking_for_an_attribute_that_is_missing_is_cheap(num_workers):
    """LeRobot asks so in each step; Python 3.12 and later would compare all names with it."""
    with ShmVectorEnv([Searched], num_workers=num_workers) as envs:
        with pytest.raises(AttributeError, match="missing") as raised:
            envs.call("missing")
        assert "Searched" in str(raised.value.__cause__)
        assert envs.get_attr("listed") == (0,)


@pytest.mark.parametrize("num_workers", [2, *deep(0)])
def test_copies_are_the_users(num_workers):
    envs = ShmVectorEnv(fns(9, 9), num_workers=num_workers)
    first, _ = envs.reset(seed=1)
    kept = first.copy()
    results = envs.step([1, 1])
    assert (first == kept).all() and first is not results[0]
    for array in results[:4]:
        assert array.flags.owndata and array.flags.writeable
    rewards = results[1]
    envs.step([1, 1])
    assert rewards.tolist() == [1, 2]
    envs.close()


HOLDS = {
    "array": lambda array: array,
    "view": lambda array: array[1:],
    "memoryview": memoryview,
    "cycle": lambda array: (cycle := [array]).append(cycle) or cycle,
    "weak reference": weakref.ref,
}


@pytest.mark.deep
@pytest.mark.parametrize("hold", first(HOLDS.values()), ids=HOLDS)
def test_an_array_that_is_held_is_not_written_again(hold):
    """Those that nobody holds are written again, which a weak reference must not show."""
    with ShmVectorEnv([lambda: Counter(50)] * 3, num_workers=0) as envs:
        envs.reset(seed=0)
        held = []
        for _ in range(20):
            results = envs.step([0, 1, 2])[:4]
            held.append([(hold(array), array.copy()) for array in results])
            del results
        for holder, values in (each for step in held for each in step):
            if isinstance(holder, weakref.ref):
                holder = holder()
                if holder is None:
                    continue
            array = holder[0] if isinstance(holder, list) else np.asarray(holder)
            np.testing.assert_array_equal(array, values[len(values) - len(array) :])


@pytest.mark.deep
def test_an_array_that_somebody_waits_for_ends_when_it_is_let_go():
    with ShmVectorEnv([lambda: Counter(50)] * 3, num_workers=0) as envs:
        envs.reset(seed=0)
        ended = []
        for array in envs.step([0, 1, 2])[:4]:
            weakref.finalize(array, ended.append, True)
        del array
        for _ in range(3):
            envs.step([0, 1, 2])
        assert ended == [True] * 4


@pytest.mark.deep
def test_what_a_user_did_to_an_array_is_not_in_later_ones():
    def shape(array):
        array.shape = (-1, 1)

    def kind(array):
        array.dtype = np.uint8

    def size(array):
        array.resize(1, refcheck=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy deprecates some of this
        with ShmVectorEnv([lambda: Counter(50)] * 3, num_workers=0) as envs:
            envs.reset(seed=0)
            for count in range(1, 13):
                results = envs.step([0, 1, 2])[:4]
                shapes = [(array.shape, array.dtype, array.flags.writeable) for array in results]
                assert shapes[0] == ((3, 4), np.float64, True)
                assert shapes[1] == ((3,), np.float64, True)
                assert shapes[2] == shapes[3] == ((3,), np.bool_, True)
                assert results[0][:, 0].tolist() == results[1].tolist() == [count] * 3
                for array in results:
                    [shape, kind, size, lambda array: array.setflags(write=False)][count % 4](array)


@pytest.mark.parametrize("num_workers", [2, *deep(0)])
def test_views_live_as_documented(num_workers):
    envs = ShmVectorEnv(fns(9, 9), num_workers=num_workers, copy=False)
    first, _ = envs.reset(seed=1)
    second = envs.step([1, 1])[0]
    assert first is second and first[:, 0].tolist() == [1, 1]
    envs.step([2, 2])
    assert first[:, 0].tolist() == [2, 2]
    envs.close()
    gc.collect()
    assert first[:, :2].tolist() == [[2, 2], [2, 2]]
    first[:] = 5  # still memory that may be written
    assert first.sum() == 5 * first.size


@pytest.mark.deep
def test_views_of_nested_observations_outlive_the_env():
    space = gym.spaces.Dict(a=gym.spaces.Box(0, 1, (3,)), t=gym.spaces.Text(5))
    envs = ShmVectorEnv([lambda: Spaces(space)] * 3, num_workers=2, copy=False)
    observations, _ = envs.reset(seed=3)
    again, _ = envs.reset(seed=3)
    assert observations["a"] is again["a"] and observations["t"] == again["t"]
    kept = observations["a"].copy()
    envs.close()
    del envs
    gc.collect()
    assert (observations["a"] == kept).all()


def test_make_vec():
    envs = shmvec.make_vec("CartPole-v1", num_envs=3, vector_kwargs={"num_workers": 2})
    assert envs.num_envs == 3 and envs.num_workers == 2
    assert envs.spec.id == "CartPole-v1" and envs.spec.kwargs["num_envs"] == 3
    again = shmvec.make_vec(envs.spec)
    assert again.num_envs == 3 and again.num_workers == 2
    assert_same_steps(again, gym.make_vec("CartPole-v1", 3, vectorization_mode="sync"), 8)
    envs.close()
    again.close()


def test_make_vec_arguments():
    envs = shmvec.make_vec(
        "CartPole-v1",
        2,
        wrappers=[lambda env: gym.wrappers.TimeAwareObservation(env)],
        max_episode_steps=3,
    )
    reference = gym.make_vec(
        "CartPole-v1",
        2,
        vectorization_mode="sync",
        wrappers=[lambda env: gym.wrappers.TimeAwareObservation(env)],
        max_episode_steps=3,
    )
    assert_same_steps(envs, reference, 10)
    assert "max_episode_steps" in envs.spec.kwargs and "wrappers" in envs.spec.kwargs
    envs.close()
    with pytest.raises(gym.error.Error):
        shmvec.make_vec("NoSuchEnv-v0", 2)
    with pytest.raises(gym.error.Error, match="Invalid id type"):
        shmvec.make_vec(3)
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        shmvec.make_vec("CartPole-v1", 0)


@pytest.mark.deep
def test_make_vec_takes_options_and_arguments_of_the_env():
    with shmvec.make_vec(
        "CartPole-v1", 2, num_workers=2, autoreset_mode="SameStep", sutton_barto_reward=True
    ) as envs:
        assert envs.num_workers == 2 and envs.autoreset_mode is AutoresetMode.SAME_STEP
        envs.reset(seed=1)
        assert envs.step([0, 1])[1].tolist() == [0.0, 0.0]
        with shmvec.make_vec(envs.spec) as again:
            assert again.num_workers == 2 and again.autoreset_mode is AutoresetMode.SAME_STEP
    assert envs.closed
    with pytest.raises(TypeError, match="argument 'num_worker'") as caught:
        shmvec.make_vec("CartPole-v1", 2, num_worker=2)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__[-1].endswith("Did you mean 'num_workers'?")


@pytest.mark.deep
def test_repr():
    envs = shmvec.make_vec("CartPole-v1", 3, num_workers=2, context="spawn")
    shown = "CartPole-v1, num_envs=3, num_workers=2, autoreset_mode='NextStep', context='spawn'"
    assert repr(envs) == f"ShmVectorEnv({shown})"
    envs.close()
    assert repr(envs) == f"ShmVectorEnv({shown}, closed)"


@pytest.mark.deep
def test_repr_of_a_pipeline_and_an_exchange():
    with shmvec.make_vec("CartPole-v1", 4, num_workers=2, context="fork") as envs:
        pipeline = shmvec.Pipeline(envs, lambda observations, env_ids: observations[:, 0])
        assert repr(pipeline) == f"Pipeline({envs!r}, groups=2)"
        shown = "num_envs=4, num_workers=2, autoreset_mode='NextStep', context='fork'"
        assert repr(envs.exchange) == f"ShmVectorEnv({shown})"
    assert repr(envs.exchange) == f"ShmVectorEnv({shown}, closed)"


@pytest.mark.deep
def test_actions_keep_the_dtype_of_the_caller():
    def seen(envs):
        return [
            [(type(a), getattr(a, "dtype", None)) for a in env] for env in envs.get_attr("actions")
        ]

    box = gym.spaces.Box(-1, 1, (2,), np.float32)
    make = [lambda: Spaces(gym.spaces.Discrete(3), box, length=99)] * 3
    ours, theirs = ShmVectorEnv(make, num_workers=2), SyncVectorEnv(make)
    ours.reset(seed=1), theirs.reset(seed=1)
    for dtype in ("f4", "f8", "f2", "i8", "?", ">f8", "longdouble"):
        action = np.linspace(0, 1, 6).reshape(3, 2).astype(dtype)
        ours.step(action), theirs.step(action)
    ours.step(np.asfortranarray(np.ones((3, 2), np.float32)))
    theirs.step(np.asfortranarray(np.ones((3, 2), np.float32)))
    wide = {np.dtype(">f8"): np.dtype("f8"), np.dtype("longdouble"): np.dtype("f4")}
    for mine, reference in zip(ours.get_attr("actions"), theirs.get_attr("actions"), strict=True):
        for a, b in zip(mine, reference, strict=True):
            assert a.dtype == wide.get(b.dtype, b.dtype) and (a == b.astype(a.dtype)).all()
    assert all(kind is np.ndarray for env in seen(ours) for kind, _ in env)
    ours.close()


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_action_space_may_be_of_the_other_byte_order(num_workers):
    box = gym.spaces.Box(-1, 1, (2,), np.dtype("f4").newbyteorder())
    make = [lambda: Spaces(gym.spaces.Discrete(3), box, 99)] * 2
    envs = ShmVectorEnv(make, num_workers=num_workers)
    envs.reset()
    for dtype in (box.dtype, "f4", "f8", "longdouble"):
        envs.step(np.array([[0.25, 0.5], [0.5, 1]], dtype))
    for env, row in enumerate([[0.25, 0.5], [0.5, 1]]):
        actions = envs.get_attr("actions")[env]
        assert [action.tolist() for action in actions] == [row] * 4
        assert [str(action.dtype) for action in actions] == ["float32"] * 2 + ["float64", "float32"]
    envs.close()


@pytest.mark.deep
def test_works_in_the_debugger_process():
    """num_workers=0: the env runs under the caller's frames."""

    class Introspecting(Counter):
        def step(self, action):
            frame, names = sys._getframe(), []
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            self.found = "test_works_in_the_debugger_process" in names
            return super().step(action)

    envs = ShmVectorEnv([Introspecting], num_workers=0)
    envs.reset()
    envs.step([0])
    assert envs.get_attr("found") == (True,)
    envs.close()
