"""Bad input: a clear exception that names the env, before anything is sent, and nothing left."""

import copy
import os
import re
import threading
import time
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Failing, Spaces, TwoArguments, Words
from equality import same
from processes import state
from tables import deep, paired, row

from shmvec import ShmVectorEnv
from shmvec.exchange import HostedEnv

WORKERS = pytest.mark.parametrize("num_workers", [2, *deep(0)])


def make_counter():
    return Counter(9)


@pytest.mark.parametrize(
    ("env_fns", "error", "message"),
    [
        ([make_counter, 3], TypeError, r"env_fns\[1\] is a int"),
        *deep(
            ([], ValueError, "env_fns is empty"),
            ([Counter(9)], TypeError, r"env_fns\[0\] is a Counter, not a function"),
        ),
    ],
)
def test_env_fns(env_fns, error, message):
    with pytest.raises(error, match=message):
        ShmVectorEnv(env_fns)


@pytest.mark.parametrize(
    ("num_workers", "error"),
    [
        (3, ValueError),
        *deep((-1, ValueError), (True, ValueError), ("2", TypeError), (1.5, TypeError)),
    ],
)
def test_num_workers(num_workers, error):
    with pytest.raises(error, match="num_workers must be"):
        ShmVectorEnv([make_counter] * 2, num_workers=num_workers)


@WORKERS
@pytest.mark.parametrize(
    "wrapped",
    [gym.wrappers.OrderEnforcing, *deep(lambda env: env, HostedEnv)],
    ids=["wrapped", "as it is", "hosted"],
)
def test_env_fns_that_return_the_same_env(num_workers, wrapped):
    env = Counter(9)
    made = [make_counter, lambda: env, make_counter, lambda: wrapped(env)]
    first, second = 1, 3
    if num_workers == 2:  # workers have two each
        made, first, second = [*made[:2], lambda: env, made[3]], 2, 3
    with pytest.raises(ValueError, match=rf"env_fns\[{first}\] and env_fns\[{second}\] returned"):
        ShmVectorEnv(made, num_workers=num_workers)


@pytest.mark.deep
def test_env_fns_that_return_copies_of_an_env_each_in_its_own_worker():
    env = Counter(9)
    with closing(ShmVectorEnv([lambda: env] * 3, num_workers=3)) as envs:
        envs.reset()
        assert envs.get_attr("resets") == (1, 1, 1)


@pytest.mark.deep
@WORKERS
def test_an_env_that_is_not_gymnasiums_need_not_say_what_it_wraps(num_workers):
    class Silent(Counter):
        @property
        def unwrapped(self):
            raise NotImplementedError

    class SaysNone(Counter):
        unwrapped = None

    for kind in (Silent, SaysNone):
        with closing(ShmVectorEnv([partial(kind, 9)] * 4, num_workers=num_workers)) as envs:
            assert envs.reset()[0].shape == (4, 4)


@WORKERS
def test_an_env_of_which_a_process_can_hold_only_one(num_workers):
    instances = []

    def make():
        if instances:
            raise RuntimeError("Cannot create multiple emulator instances per process")
        instances.append(1)
        return Counter(9)

    with pytest.raises(RuntimeError, match="emulator") as caught:
        ShmVectorEnv([make] * 4, num_workers=num_workers, context="fork")
    second = 1 if num_workers < 2 else "1|3"
    assert re.match(
        rf"Env ({second}) was not the first in its process: .* num_workers=num_envs\.",
        caught.value.__notes__[0],
    )
    instances.clear()
    with closing(ShmVectorEnv([make] * 4, num_workers=4, context="fork")) as envs:
        envs.reset()


@pytest.mark.deep
def test_an_env_that_is_the_first_in_its_process_is_not_blamed_on_others():
    def broken():
        raise LookupError("no licence")

    with pytest.raises(LookupError, match="no licence") as caught:
        ShmVectorEnv([broken, make_counter], num_workers=1)
    said = [str(caught.value.__cause__), *getattr(caught.value, "__notes__", ())]
    assert "num_workers" not in "".join(said)


@pytest.mark.deep
@WORKERS
def test_an_env_fn_returns_no_env(num_workers):
    with pytest.raises(TypeError, match=r"env_fns\[1\]\(\) returned a NoneType without reset"):
        ShmVectorEnv([make_counter, lambda: None], num_workers=num_workers)


class Late(gym.Env):
    """An env that makes its spaces in its first reset, or says that it has none yet."""

    def __init__(self, says_none=False):
        self.resets, self.closed = 0, False
        if says_none:
            self.observation_space = self.action_space = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert not self.closed
        self.resets += 1
        self.observation_space = gym.spaces.Box(-9, 9, (2,), np.float64)
        self.action_space = gym.spaces.Discrete(3)
        return np.array([self.resets, 0.0]), {}

    def step(self, action):
        return np.array([self.resets, action]), 1.0, False, False, {}

    def close(self):
        self.closed = True


@WORKERS
@pytest.mark.parametrize("says_none", [False, *deep(True)])
def test_spaces_that_exist_only_after_a_reset(num_workers, says_none):
    make = partial(Late, says_none)
    hint = r"env_fns\[0\].*Late without observation_space, action_space.*HostedEnv.made_by"
    with pytest.raises(TypeError, match=hint):
        ShmVectorEnv([make] * 2, num_workers=num_workers)
    made = partial(HostedEnv.made_by, make)
    with closing(ShmVectorEnv([made] * 2, num_workers=num_workers)) as envs:
        assert envs.reset()[0].tolist() == [[1, 0], [1, 0]]  # as if there had been no other reset
        assert envs.step([2, 1])[0].tolist() == [[1, 2], [1, 1]]
    with pytest.raises(TypeError, match=r"env_fns\[0\]\(\) returned a NoneType without reset"):
        ShmVectorEnv([partial(HostedEnv.made_by, lambda: None)] * 2, num_workers=num_workers)
    one = make()
    with pytest.raises(ValueError, match="returned the same env twice.*`lambda: gym.make"):
        ShmVectorEnv([partial(HostedEnv.made_by, lambda: one)] * 2, num_workers=num_workers)


@pytest.mark.deep
def test_an_env_that_cannot_make_its_first_reset_is_closed():
    class Fails(Late):
        def reset(self, *, seed=None, options=None):
            raise OSError("no display")

    env = Fails(False)
    with pytest.raises(OSError, match="no display"):
        HostedEnv.made_by(lambda: env)
    assert env.closed


class Box:  # as gym's, which need not be installed
    __module__ = "gym.spaces.box"


class OfGym(Late):
    observation_space = Box()
    action_space = Box()


@pytest.mark.deep
@WORKERS
def test_spaces_of_gym(num_workers):
    hint = "OfGym whose observation_space, .* of gym, not of gymnasium.*shimmy.*CompatibilityV0"
    with pytest.raises(TypeError, match=hint):
        ShmVectorEnv([make_counter, OfGym], num_workers=num_workers)


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_env_fns_that_fail_are_all_named_though_their_workers_have_ended_long_before(
    context, tmp_path
):
    def fails():
        (tmp_path / str(os.getpid())).touch()
        raise gym.error.NameNotFound("no such env")

    def is_built_last():
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if [state(pid) for pid in os.listdir(tmp_path)] == ["Z", "Z"]:
                return Counter(9)
            time.sleep(0.01)
        raise TimeoutError("the others have not ended")

    with pytest.raises(gym.error.NameNotFound, match="no such env") as caught:
        ShmVectorEnv([fails, is_built_last, fails], num_workers=3, context=context)
    assert any("env 2: gymnasium.error.NameNotFound" in note for note in caught.value.__notes__)


@pytest.mark.deep
def test_an_env_fn_that_cannot_be_pickled():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"env_fns\[1\] cannot be pickled.* files .* in the env\."):
        ShmVectorEnv([make_counter, lambda: lock and None], context="spawn", num_workers=1)


class Interrupted:
    """An env function in whose pickling a signal's handler once raises."""

    interruptions = 1

    def __call__(self):
        return Counter()

    def __reduce__(self):
        if Interrupted.interruptions:
            Interrupted.interruptions = 0
            raise TimeoutError("a handler's")
        return make_counter, ()


@pytest.mark.deep
def test_what_a_handler_raises_while_env_fns_are_pickled():
    with pytest.raises(TimeoutError, match="a handler's"):
        ShmVectorEnv([Interrupted()], context="spawn", num_workers=1)


@WORKERS
@pytest.mark.parametrize("which", ["observation_space", *deep("action_space")])
def test_unequal_spaces(num_workers, which):
    def other():
        env = Counter(9)
        setattr(env, which, gym.spaces.Discrete(77))
        return env

    with pytest.raises(RuntimeError, match=f"{which.replace('_', ' ')} of env 2 is Discrete.77"):
        ShmVectorEnv([make_counter, make_counter, other], num_workers=num_workers)


@WORKERS
@pytest.mark.parametrize(
    ("space", "error", "message"),
    [
        (gym.spaces.Sequence(gym.spaces.Discrete(2)), TypeError, "has a dynamic shape"),
        *deep(
            (gym.spaces.Graph(gym.spaces.Box(0, 1, (2,)), None), TypeError, "has a dynamic shape"),
            (gym.Space((2,), np.float32), ValueError, "you can disable this feature with"),
        ),
    ],
)
def test_spaces_that_cannot_be_shared_memory(space, error, message, num_workers):
    nested = gym.spaces.Dict(a=gym.spaces.Discrete(2), b=gym.spaces.Tuple([space]))
    with pytest.raises(error, match=message) as caught:
        ShmVectorEnv([lambda: Spaces(nested)] * 2, num_workers=num_workers)
    assert "observation space['b'][0]" in str(caught.value)
    assert isinstance(caught.value, ValueError)  # what our users are promised for all of them
    with pytest.raises(error, match=message):  # Gymnasium raises the same
        gym.vector.AsyncVectorEnv([lambda: Spaces(nested)] * 2)


@pytest.mark.deep
@pytest.mark.parametrize("space", [gym.spaces.Sequence(gym.spaces.Discrete(2)), Words()])
def test_parts_that_cannot_be_shared_memory_can_be_left_out(space):
    """As MiniGrid's missions, which are strings of no fixed size beside an image."""
    image = gym.spaces.Box(0, 255, (7, 7, 3), np.uint8)
    whole = gym.spaces.Dict(direction=gym.spaces.Discrete(4), image=image, mission=space)
    advice = r"gymnasium.wrappers.FilterObservation\(env, \['direction', 'image'\]\)"
    with pytest.raises(ValueError, match=advice):
        ShmVectorEnv([lambda: Spaces(whole)] * 2, num_workers=1)

    def make():
        return gym.wrappers.FilterObservation(Spaces(whole), ["direction", "image"])

    with closing(ShmVectorEnv([make] * 2, num_workers=1)) as envs:
        assert list(envs.reset(seed=0)[0]) == ["direction", "image"]


@pytest.mark.deep
@WORKERS
def test_wrong_actions_are_not_sent(num_workers):
    envs = ShmVectorEnv([make_counter] * 3, num_workers=num_workers)
    envs.reset(seed=1)
    for actions, error, message in (
        ([0, 1], ValueError, "there are 2"),
        ([0, 1, 2, 3], ValueError, "there are 4"),
        (1, TypeError, "one int"),
        ([0.5, 1.5, 2.5], TypeError, "dtype float64"),
        (np.zeros(3, complex), TypeError, "dtype complex128"),
        (["a", "b", "c"], TypeError, "dtype <U1"),
        (None, TypeError, "dtype object"),
        ([0, [1, 2], 3], ValueError, "no array of numbers"),
        ({"a": 1}, TypeError, "dtype object"),
    ):
        with pytest.raises(error, match=f"wrong actions: .*{message}.*\n*.*Nothing was sent"):
            envs.step(actions)
    assert envs.step([1, 2, 3])[0][:, :2].tolist() == [[1, 1], [1, 2], [1, 3]]
    envs.close()


@WORKERS
@pytest.mark.parametrize("shape", [[3], *deep([3, 1, 1], [3, 2])])
@pytest.mark.parametrize("how", ["masked", *deep("all", "after a restart")])
def test_actions_of_another_shape_are_given_to_the_envs_as_gymnasium_gives_them(
    num_workers, shape, how
):
    box = gym.spaces.Box(-9, 9, (1,))
    actions = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    functions = [lambda: Spaces(gym.spaces.Discrete(2), box)] * 3
    envs = ShmVectorEnv(functions, num_workers=num_workers)
    expected = gym.vector.SyncVectorEnv(functions)
    try:
        envs.reset(seed=1)
        expected.reset(seed=1)
        expected.step(actions.copy())
        if how == "masked":
            envs.step(actions, mask=np.array([True, False, True]))
        elif how == "after a restart":
            envs.restart()
            assert envs.step(actions)[3].all()
            envs.reset(seed=1)
            envs.step(actions)
        else:
            envs.step(actions)
        actions[:] = -1  # envs may keep theirs
        for vector_env in (envs, expected):
            vector_env.step(np.ones((3, 1), np.float32))
        theirs = list(expected.get_attr("actions"))
        if how == "masked":
            theirs[1] = theirs[1][1:]
        assert same(list(envs.get_attr("actions")), theirs)
    finally:
        envs.close()
        expected.close()


@WORKERS
def test_wrong_nested_actions(num_workers):
    space = gym.spaces.Dict(
        a=gym.spaces.Discrete(3), b=gym.spaces.Tuple([gym.spaces.Text(3), gym.spaces.Box(0, 1)])
    )
    envs = ShmVectorEnv(
        [lambda: Spaces(gym.spaces.Discrete(2), space)] * 2, num_workers=num_workers
    )
    envs.reset()
    good = {"a": [0, 1], "b": (("x", "yz"), np.zeros((2, 1)))}
    for bad, error, message in (
        ({"a": [0, 1]}, KeyError, "'b' is missing"),
        ([0, 1], TypeError, "needs a mapping"),
        ({**good, "a": [0, 1, 2]}, ValueError, "there are 3"),
        ({**good, "b": (("x", "yz"),)}, ValueError, "Tuple action space of 2 parts"),
        ({**good, "b": (("x",), np.zeros((2, 1)))}, ValueError, "1 texts for 2 envs"),
        ({**good, "b": (("x", "long"), np.zeros((2, 1)))}, ValueError, "wrong action for env 1"),
        ({**good, "b": (("x", 3), np.zeros((2, 1)))}, TypeError, "wrong action for env 1"),
    ):
        with pytest.raises(error, match=message):
            envs.step(bad)
    envs.step(good)
    (seen,), _ = envs.get_attr("actions")
    assert seen["a"] == 0 and seen["b"][0] == "x"
    envs.close()


@WORKERS
def test_wrong_seeds(num_workers):
    envs = ShmVectorEnv([make_counter] * 3, num_workers=num_workers)
    for seed, error, message in (
        ([1, 2], ValueError, "must match num_envs=3 but got length=2"),
        ([1, "b", 3], TypeError, "seed of env 1"),
        ([1, 2, 3.5], TypeError, "seed of env 2"),
    ):
        with pytest.raises(error, match=message):
            envs.reset(seed=seed)
    envs.reset(seed=4)
    envs.close()


@WORKERS
@pytest.mark.parametrize("shared_memory", [True, *deep(False)])
def test_wrong_actions_with_a_mask(num_workers, shared_memory):
    envs = ShmVectorEnv([make_counter] * 3, num_workers=num_workers, shared_memory=shared_memory)
    with closing(envs):
        envs.reset()
        mask = np.array([True, False, False])
        for actions, error, message in (
            ([1, 2], ValueError, "there are 2 for 3 envs"),
            (np.zeros((1, 3), int), ValueError, "there are 1 for 3 envs"),
            (np.zeros(4, int), ValueError, "there are 4 for 3 envs"),
            (1, TypeError, "they are one int"),
            (np.array(1), TypeError, "they are one ndarray"),
            (None, TypeError, "they are one NoneType"),
        ):
            with pytest.raises(error, match=f"wrong actions: {message}.*Nothing was sent"):
                envs.step(actions, mask=mask)
        assert envs.step([1, 2, 3], mask=mask)[0][0, :2].tolist() == [1, 1]


@pytest.mark.deep
def test_wrong_masks():
    envs = ShmVectorEnv([make_counter] * 2, num_workers=1)
    for mask, error in (
        ([True, False], TypeError),
        (np.array([True]), ValueError),
        (np.array([1, 0]), TypeError),
        (np.array([False, False]), ValueError),
    ):
        with pytest.raises(error, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})
    envs.close()


@pytest.mark.deep
@pytest.mark.parametrize(
    "error, operation, num_workers",
    paired(
        [
            ValueError("plain", 3),
            TwoArguments(1, "two"),
            KeyboardInterrupt(),
            SystemExit(4),
            OSError(2, "No such file", "x"),
        ],
        ["step", "reset"],
        [0, 2, 2],
    ),
)
def test_an_env_raises(error, operation, num_workers):
    error = copy.deepcopy(error) if type(error) is not TwoArguments else TwoArguments(1, "two")
    make = [make_counter, lambda: Failing(operation, error), make_counter]
    # By a fork: pickle would want a constructor that takes the exception's args.
    envs = ShmVectorEnv(make, num_workers=num_workers, context="fork")
    envs.reset(seed=1)
    with pytest.raises(type(error)) as caught:
        envs.step([0, 0, 0])
        if operation == "step":
            envs.step([0, 0, 0])
        else:
            envs.reset(seed=3)
    assert caught.value.args == error.args and vars(caught.value) == vars(error)
    assert f"{operation}() of env 1" in str(caught.value.__cause__)
    assert "_fail" in str(caught.value.__cause__)
    envs.reset(seed=3)  # usable again
    assert envs.step([1, 1, 1])[1].tolist() == [1, 1, 1]
    envs.close()


@pytest.mark.deep
def test_several_envs_raise():
    make = [make_counter] + [lambda: Failing("step", ValueError("first"), at=1)] * 2
    envs = ShmVectorEnv(make, num_workers=2)
    envs.reset()
    with pytest.raises(ValueError, match="first") as caught:
        envs.step([0, 0, 0])
    assert "env 1" in str(caught.value.__cause__)
    if hasattr(caught.value, "__notes__"):
        assert "env 2: ValueError: first" in caught.value.__notes__[0]
    envs.close()


@WORKERS
def test_close_raises(num_workers):
    envs = ShmVectorEnv(
        [make_counter, lambda: Failing("close", ValueError("stuck"))], num_workers=num_workers
    )
    with pytest.raises(ValueError, match="stuck") as caught:
        envs.close()
    assert "close() of env 1" in str(caught.value.__cause__)
    assert envs.closed
    envs.close()


@pytest.mark.deep
def test_a_step_before_a_reset_is_the_envs_to_judge():
    envs = ShmVectorEnv([lambda: gym.make("CartPole-v1")] * 2, num_workers=1)
    with pytest.raises(gym.error.ResetNeeded):
        envs.step([0, 0])
    envs.reset()
    envs.step([0, 0])
    envs.close()


class Returns(gym.Env):
    """Returns this observation and reward, if it is env 1, and what fits if it is env 0."""

    def __init__(self, space, which, observation, reward):
        self.observation_space = space
        self.action_space = gym.spaces.Discrete(2)
        self.observation, self.reward = observation, reward
        if which == 0:
            self.observation, self.reward = space.sample(), 1.0

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation, self.reward, False, False, {}


def returning(space, observation=0, reward=1.0):
    return [lambda i=i: Returns(space, i, observation, reward) for i in range(2)]


BOX = gym.spaces.Box(0, 9, (3,))
CAMERA = gym.spaces.Dict(camera=gym.spaces.Tuple([BOX, gym.spaces.Discrete(3)]))


@pytest.mark.deep
@WORKERS
def test_observations_of_another_shape_with_as_many_elements(num_workers):
    for space, observation, expected in (
        (gym.spaces.Discrete(5), np.array([3]), 3),
        (gym.spaces.Discrete(5), [3], 3),
        (gym.spaces.Box(0, 9, (1,)), 3.0, [3.0]),
        (gym.spaces.Box(0, 9, (1,)), np.float32(3), [3.0]),
        (gym.spaces.Box(0, 9, ()), np.array([3.0]), 3.0),
        (BOX, np.ones((1, 3)), [1, 1, 1]),
    ):
        made = returning(space, observation, np.array([2.5]))
        with row(space, observation), closing(ShmVectorEnv(made, num_workers=num_workers)) as envs:
            envs.reset(seed=1)
            observations, rewards, *_ = envs.step([0, 0])
            assert observations[1].tolist() == expected
            assert rewards.tolist() == [1.0, 2.5] and rewards.dtype == np.float64


@pytest.mark.deep
@pytest.mark.parametrize("num_workers, shared_memory", [(0, True), (2, True), (2, False)])
def test_what_does_not_fit_an_observation_is_named(num_workers, shared_memory):
    options = {"num_workers": num_workers, "shared_memory": shared_memory}
    for space, observation, message in (
        (BOX, np.zeros(2), r"the observation has shape \(2,\) and dtype float64; its space Box"),
        (BOX, None, r"the observation is None; .* needs shape \(3,\) and dtype float32"),
        (BOX, ["a", "b", "c"], r"the observation has shape \(3,\) and dtype (<U1|object); "),
        (CAMERA, {"camera": (np.zeros(4), 1)}, r"observation\['camera'\]\[0\] has shape \(4,\)"),
        (CAMERA, {"camera": (np.zeros(3),)}, r"observation\['camera'\] has no 1"),
        (CAMERA, {"camera": 5}, r"observation\['camera'\] is a int; .* needs a tuple"),
        (CAMERA, {"lens": 5}, "observation has no 'camera'"),
        (CAMERA, np.zeros(3), "observation is a ndarray; .* needs a mapping"),
    ):
        with row(message), closing(ShmVectorEnv(returning(space, observation), **options)) as envs:
            envs.reset(seed=1)
            with pytest.raises((ValueError, TypeError, LookupError), match=f"env 1: .*{message}"):
                envs.step([0, 0])
            envs.reset(seed=1)
