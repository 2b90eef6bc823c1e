"""``ShmVecEnv`` keeps what SB3's ``SubprocVecEnv`` promises, and does better where that failed.

What needs Stable-Baselines3 itself is in test_sb3_learning.py.
"""

import multiprocessing
import os
import subprocess
import sys
from contextlib import closing
from copy import deepcopy
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, Failing, Scripted, Spaces
from equality import same
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import parent_of
from sb3_stand_in import ShmVecEnv
from strategies import infos, spaces, unsized_leaves
from tables import deep

import shmvec

NUM_ENVS = 5


def vec_env(make=Counter, num_workers=2, num_envs=NUM_ENVS, **options):
    """A few envs; forked, because that is quickest to start."""
    fns = list(make) if isinstance(make, list) else [make] * num_envs
    return closing(
        ShmVecEnv(fns, start_method="fork", num_workers=min(num_workers, len(fns)), **options)
    )


class Asked(Counter):
    """Shows what `reset` was given, and has what is asked of envs."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}

    def __init__(self, *, render_mode="rgb_array", length=5, lock=True):
        super().__init__(length=length)
        self.render_mode = render_mode
        self.given = []
        self.reward_of = abs  # an attribute that can be called
        self.calls = 0
        if lock:
            self.lock = multiprocessing.Lock()  # cannot be pickled

    def reset(self, **given):
        self.given.append(given)
        return super().reset(**given)

    def add(self, a, b=0, *, indices=0):
        self.calls += 1
        return a + b + indices

    def action_masks(self):
        return np.arange(4) != self.count % 4

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.abs(achieved_goal - desired_goal).sum(-1)

    def raises(self, error):
        raise error

    def render(self):
        return np.full((2, 3, 3), self.count, np.uint8)


# ---- construction ----------------------------------------------------------------------------


@pytest.mark.deep
def test_envs_are_those_of_dummy_vec_env_without_workers():
    with vec_env(Asked, num_workers=0) as env:
        env.reset()
        assert [type(one) for one in env.envs] == [Asked] * NUM_ENVS
        assert len({id(one) for one in env.envs}) == NUM_ENVS
        env.envs[1].calls = 7
        assert env.get_attr("calls") == [0, 7, 0, 0, 0]
    with vec_env(Asked, num_workers=2) as env:
        assert not hasattr(env, "envs")
        with pytest.raises(AttributeError, match="live in workers.*num_workers=0"):
            env.envs  # noqa: B018


@pytest.mark.deep
def test_start_method_defaults_to_forkserver():
    with closing(ShmVecEnv([Counter] * 2, num_workers=1)) as env:
        (process,) = env.processes
        assert parent_of(process.pid) != os.getpid()  # but the fork server's
        assert env.reset().shape == (2, 4)


@pytest.mark.deep
def test_illegal_start_method():
    with pytest.raises(ValueError, match="cannot find context for 'illegal_method'"):
        ShmVecEnv([Counter], start_method="illegal_method")


@pytest.mark.deep
def test_options_of_shm_vector_env():
    with vec_env(num_workers=3, step_timeout=50.0, faults=shmvec.FaultPolicy()) as env:
        assert env.num_workers == len(env.processes) == 3
        assert "ShmVecEnv" in env.processes[0].name
    with pytest.raises(ValueError, match="num_workers"):
        ShmVecEnv([Counter], num_workers=2)


@pytest.mark.parametrize(
    "option",
    [{"copy": False}, *deep({"autoreset_mode": "NextStep"}, {"batch_size": 1}, {"num_worker": 1})],
)
def test_options_that_would_break_a_vec_env_are_refused(option):
    with pytest.raises(TypeError, match=f"takes no {next(iter(option))}.*num_workers"):
        ShmVecEnv([Counter], **option)


@pytest.mark.deep
@pytest.mark.parametrize("workers", [0, 2, NUM_ENVS])
def test_vecenv_func_checker(workers):
    """Functions that return one env for several: one process would step it several times."""
    env = Counter()
    if workers == NUM_ENVS:  # each process has a copy, as with SubprocVecEnv
        with vec_env([lambda: env] * NUM_ENVS, workers) as copies:
            copies.reset()
            assert copies.get_attr("resets") == [1] * NUM_ENVS
        return
    with pytest.raises(ValueError, match=r"env_fns\[0\] and env_fns\[1\] returned the same env"):
        vec_env([lambda: env] * NUM_ENVS, workers)


@pytest.mark.deep
def test_attributes():
    with vec_env(Asked) as env:
        assert env.num_envs == NUM_ENVS
        assert env.observation_space == Counter().observation_space
        assert env.action_space == gym.spaces.Discrete(4)
        assert env.render_mode == "rgb_array"
        assert env.metadata["render_fps"] == 7 and "rgb_array" in env.metadata["render_modes"]
        assert "autoreset_mode" not in env.metadata
        assert not env.waiting and not env.closed
        assert env.reset_infos == [{}] * NUM_ENVS


# ---- transitions -----------------------------------------------------------------------------


class Alone:
    """Envs stepped one after the other, by SB3's rules: what ShmVecEnv's results must equal."""

    def __init__(self, env_fns):
        self.envs = [env_fn() for env_fn in env_fns]

    def reset(self, seeds):
        pairs = [env.reset(seed=seed) for env, seed in zip(self.envs, seeds, strict=True)]
        self.reset_infos = [deepcopy(info) for _, info in pairs]
        return [observation for observation, _ in pairs]

    def step(self, actions):
        rows = []
        for i, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            observation, reward, terminated, truncated, info = deepcopy(env.step(action))
            info["TimeLimit.truncated"] = truncated and not terminated
            if terminated or truncated:
                info["terminal_observation"] = observation
                observation, self.reset_infos[i] = deepcopy(env.reset())
            rows.append((observation, np.float32(reward), terminated or truncated, info))
        return [list(column) for column in zip(*rows, strict=True)]


def assert_same(mine, reference):
    assert same(mine, reference), f"\n{mine}\n{reference}"


common = settings(deadline=None, suppress_health_check=list(HealthCheck))
lengths = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=5)
per_env_infos = st.lists(st.lists(infos(), min_size=1, max_size=3), min_size=1, max_size=3)


def stacked(space, observations):
    return concatenate(space, observations, create_empty_array(space, len(observations)))


def compare(observations, actions, lengths, infos, seed, **options):
    """Steps ShmVecEnv and envs alone side by side; every transition is the same."""
    fns = [
        lambda n=n, i=i: Scripted(observations, actions, n, infos[i % len(infos)])
        for i, n in enumerate(lengths)
    ]
    alone = Alone(fns)
    with closing(ShmVecEnv(fns, start_method="fork", **options)) as env:
        assert env.observation_space == observations and env.action_space == actions
        seeds = env.seed(seed)
        assert_same(env.reset(), stacked(observations, alone.reset(seeds)))
        assert_same(list(env.reset_infos), alone.reset_infos)
        many_actions = batch_space(actions, len(fns))
        many_actions.seed(seed)
        for _ in range(8):
            batch = list(iterate(many_actions, many_actions.sample()))
            found, rewards, dones, infos = env.step(batch)
            assert rewards.dtype == np.float32 and dones.dtype == bool and type(infos) is list
            expected, *others = alone.step(batch)
            assert_same(found, stacked(observations, expected))
            assert_same([list(rewards), dones.tolist(), infos], others)
            assert_same(env.reset_infos, alone.reset_infos)
        assert_same(env.get_attr("actions"), [env.actions for env in alone.envs])


@pytest.mark.deep
@settings(common, max_examples=40)
@given(spaces(), spaces(), lengths, per_env_infos, st.integers(0, 99), st.data())
def test_transitions(observations, actions, lengths, infos, seed, data):
    num_workers = data.draw(st.sampled_from([0, 0, len(lengths)]))
    compare(observations, actions, lengths, infos, seed, num_workers=num_workers)


@pytest.mark.deep
@settings(common, max_examples=20)
@given(spaces(unsized_leaves), spaces(unsized_leaves), lengths, per_env_infos, st.integers(0, 99))
def test_transitions_as_messages(observations, actions, lengths, infos, seed):
    compare(observations, actions, lengths, infos, seed, num_workers=0, shared_memory=False)


class Ends(gym.Env):
    """Episodes of one step, which end as given; it returns the same array each time."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, terminated, truncated):
        self.end = terminated, truncated
        self.array = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        self.array[0] = 5
        return self.array, {"began": 1}

    def step(self, action):
        self.array[0] = 3
        return self.array, 1.0, *self.end, {"ended": 1}


def test_vecenv_terminal_obs():
    ends = [(False, False), (False, True), (True, False), (True, True)]
    with vec_env([partial(Ends, *end) for end in ends]) as env:
        env.reset()
        observations, _, dones, infos = env.step([0] * 4)
        assert dones.tolist() == [False, True, True, True]
        assert [info["TimeLimit.truncated"] for info in infos] == [False, True, False, False]
        assert {type(info["TimeLimit.truncated"]) for info in infos} == {bool}
        assert observations[:, 0].tolist() == [3, 5, 5, 5]
        assert ["terminal_observation" in info for info in infos] == [False, True, True, True]
        assert [info["terminal_observation"].tolist() for info in infos[1:]] == [[3]] * 3
        assert [info["ended"] for info in infos] == [1] * 4


STRANGE = [
    {"episode": {"r": 1.0, "l": 3, "t": 0.5}, "terminal_observation": "mine"},
    {"TimeLimit.truncated": True, 3: "a key that is no string"},
    {"deep": {"er": {"array": np.arange(6).reshape(2, 3), "list": [{"x": (1, 2)}]}}},
    {"final_obs": 1, "final_info": {"x": 1}, "fault": 2, "reset": 3},
    {"long": np.arange(40_000)},  # longer than the ring
    {},
]


class Informs(Ends):
    """Ends every episode at once; its infos are those given, of steps and resets alike."""

    def __init__(self, infos, over):
        super().__init__(over, False)
        self.infos, self.turn = infos, 0

    def info(self):
        self.turn += 1
        return self.infos[self.turn % len(self.infos)]

    def reset(self, *, seed=None, options=None):
        return super().reset()[0], self.info()

    def step(self, action):
        return *super().step(action)[:4], self.info()


@pytest.mark.deep
@pytest.mark.parametrize("over", [False, True])
def test_infos_are_those_that_the_envs_returned(over):
    n = len(STRANGE)
    fns = [partial(Informs, STRANGE[i:] + STRANGE[:i], over) for i in range(n)]
    alone = Alone([partial(Informs, deepcopy(STRANGE[i:] + STRANGE[:i]), over) for i in range(n)])
    with vec_env(fns) as env:
        env.reset()
        alone.reset([None] * n)
        assert_same(env.reset_infos, alone.reset_infos)
        for _ in range(n):
            assert_same(env.step([0] * n)[3], alone.step([0] * n)[3])
            assert_same(env.reset_infos, alone.reset_infos)


@pytest.mark.deep
def test_structured_actions():
    space = gym.spaces.Dict(
        go=gym.spaces.Box(-1, 1, (2,)), say=gym.spaces.Tuple([gym.spaces.Discrete(3)])
    )
    with vec_env(partial(Spaces, gym.spaces.Discrete(2), space)) as env:
        env.reset()
        actions = [{"go": np.full(2, i, np.float32), "say": (i % 3,)} for i in range(NUM_ENVS)]
        env.step(actions)
        for i, (action,) in enumerate(env.get_attr("actions")):
            assert action["go"].tolist() == [i, i] and action["say"] == (i % 3,)
        with pytest.raises(TypeError, match="a list, one action for each env"):
            env.step({"go": np.zeros((NUM_ENVS, 2)), "say": ([0] * NUM_ENVS,)})


@pytest.mark.deep
def test_what_actions_envs_get():
    with vec_env(partial(Spaces, gym.spaces.Discrete(2), gym.spaces.Box(-1, 1, (1,)))) as env:
        env.reset()
        env.step(np.zeros((NUM_ENVS, 3), np.float32))  # another shape, as from DummyVecEnv
        assert env.get_attr("actions")[0][0].shape == (3,)
        with pytest.raises(TypeError, match="wrong actions: they have dtype"):
            env.step(np.full((NUM_ENVS, 1), "left"))
    actions = ["left", 0.5, None, (1,), 4]
    with vec_env(partial(Spaces, gym.spaces.Discrete(2)), shared_memory=False) as env:
        env.reset()
        env.step(actions)
        assert env.get_attr("actions") == [[action] for action in actions]


# ---- seeds and options -----------------------------------------------------------------------


def test_seeds_and_options_are_used_once():
    with vec_env(Asked) as env:
        assert list(env.seed(7)) == [7, 8, 9, 10, 11]
        env.set_options({"x": 1})
        first = env.reset()
        env.seed(7)
        env.set_options([{"x": i} for i in range(NUM_ENVS)])
        np.testing.assert_array_equal(env.reset(), first)
        assert not np.array_equal(env.reset(), first)
        assert env.get_attr("given") == [
            [
                {"seed": 7 + i, "options": {"x": 1}},
                # An env whose options are empty is given none, by SB3's rule.
                {"seed": 7 + i, **({"options": {"x": i}})},
                {"seed": None},
            ]
            for i in range(NUM_ENVS)
        ]


@pytest.mark.deep
def test_automatic_resets_are_given_nothing():
    with vec_env(partial(Asked, length=1)) as env:
        env.seed(3)
        env.reset()
        env.step([0] * NUM_ENVS)
        assert env.get_attr("given") == [[{"seed": 3 + i}, {}] for i in range(NUM_ENVS)]


def test_automatic_resets_are_given_what_is_set_for_them_and_set_options_is_not():
    with vec_env(partial(Asked, length=1)) as env:
        env.set_options({"x": 1})
        env.reset()
        env.set_reset_options([{"x": 2}, {"x": 3}], indices=[0, -1])
        env.set_reset_seeds(7)
        for _ in range(2):
            env.step([0] * NUM_ENVS)
        first, *others, last = ([{"seed": None, "options": {"x": 1}}] for _ in range(NUM_ENVS))
        first += [{"seed": 7, "options": {"x": 2}}, {"options": {"x": 2}}]
        last += [{"seed": 6 + NUM_ENVS, "options": {"x": 3}}, {"options": {"x": 3}}]
        for env_id, given in enumerate(others, 1):
            given += [{"seed": 7 + env_id}, {}]
        assert env.get_attr("given") == [first, *others, last]


class OldReset(Counter):
    def reset(self, seed=None):
        return super().reset(seed=seed)


@pytest.mark.deep
def test_backward_compat_seed():
    """Envs whose `reset` knows of no options."""
    with vec_env(OldReset) as env:
        env.seed(3)
        first = env.reset()
        env.seed(3)
        np.testing.assert_array_equal(env.reset(), first)


@pytest.mark.deep
def test_a_wrong_number_of_options_is_refused_and_nothing_is_reset():
    with vec_env() as env:
        env.set_options([{}, {"x": 1}])
        with pytest.raises(ValueError, match="number of envs, 5, but it is 2"):
            env.reset()
        assert env.get_attr("resets") == [0] * NUM_ENVS
        env.set_options()
        env.reset()


# ---- attributes and methods ------------------------------------------------------------------


def test_vecenv_custom_calls():
    """What SB3's own test of that name checks."""
    with vec_env(Asked) as env:
        assert env.env_method("add", 1, b=2) == [3] * NUM_ENVS
        for i in range(NUM_ENVS):
            assert env.set_attr("offset", i, indices=i) is None
        assert env.get_attr("offset") == list(range(NUM_ENVS))
        assert env.env_method("add", 1, indices=[0, 2]) == [1, 1]
        env.set_attr("offset", 42)
        assert env.get_attr("offset") == [42] * NUM_ENVS
        env.set_attr("offset", 12, indices=[0, 1])
        assert env.get_attr("offset") == [12, 12, 42, 42, 42]
        assert env.get_attr("offset", indices=[0, 2]) == [12, 42]
        env.set_attr("offset", 7, indices=[0, -1])
        assert env.get_attr("offset") == [7, 12, 42, 42, 7]
        assert env.get_attr("offset", indices=[-1]) == [7]


@pytest.mark.deep
def test_indices():
    with vec_env(Asked) as env:
        env.set_attr("offset", 5, indices=np.int64(1))
        assert env.get_attr("offset", 1) == env.get_attr("offset", np.array([1])) == [5]
        assert env.get_attr("offset", (i for i in (2, 1, 0))) == [0, 5, 0]
        assert env.get_attr("offset", range(1, 3)) == [5, 0]
        assert env.get_attr("offset", []) == env.env_method("add", 1, indices=[]) == []
        env.set_attr("offset", 9, [])
        assert env.get_attr("offset", [1, 1, -4]) == [5, 5, 5]
        assert env.env_method("add", 1, indices=[2, 0, 2]) == [1, 1, 1]
        assert env.get_attr("calls") == [1, 0, 2, 0, 0]
        for wrong, error in ((5, IndexError), ([0, -6], IndexError), ([0.5], TypeError)):
            with pytest.raises(error):
                env.set_attr("offset", 1, wrong)
            with pytest.raises(error):
                env.env_method("add", 1, indices=wrong)
        assert env.get_attr("offset") == [0, 5, 0, 0, 0]
        assert env.get_attr("calls") == [1, 0, 2, 0, 0]


@pytest.mark.deep
def test_get_attr_calls_nothing():
    with vec_env(Asked) as env:
        assert env.get_attr("reward_of") == [abs] * NUM_ENVS
        assert env.env_method("reward_of", -2) == [2] * NUM_ENVS


@pytest.mark.deep
def test_has_attr():
    with vec_env([Asked, partial(Asked, lock=False)]) as env:
        assert env.has_attr("action_masks") and env.has_attr("count") is False
        assert env.has_attr("lock") is False  # the second has none
    with vec_env(Asked) as env:
        assert env.has_attr("lock") is True  # though it cannot be pickled


@pytest.mark.deep
def test_methods_of_any_name_can_be_called():
    with vec_env(Asked) as env:
        env.reset()
        (observation, info), *_ = env.env_method("reset", seed=3, indices=[1])
        assert info == {"reset": 2}
        assert env.env_method("step", 2, indices=0)[0][4] == {"count": 1, "action": 2}
        assert env.get_attr("resets") == [1, 2, 1, 1, 1]
        with pytest.raises(TypeError, match="not callable"):
            env.env_method("calls")


class Outer(gym.Wrapper):
    inner = None


def test_vec_env_is_wrapped():
    fns = [Counter, lambda: Outer(Counter()), lambda: gym.wrappers.TimeLimit(Outer(Counter()), 3)]
    with vec_env(fns) as env:
        assert env.env_is_wrapped(Outer) == [False, True, True]
        assert env.env_is_wrapped(gym.wrappers.TimeLimit) == [False, False, True]
        assert env.env_is_wrapped(gym.Wrapper, indices=[2, 0]) == [True, False]


def test_get_images():
    with vec_env(Asked) as env:
        env.reset()
        env.step([0] * NUM_ENVS)
        images = env.get_images()
        assert type(images) is list
        assert [image.tolist() for image in images] == [np.ones((2, 3, 3)).tolist()] * NUM_ENVS
    with vec_env(Counter) as env, pytest.warns(UserWarning, match="no images"):
        assert env.get_images() == [None] * NUM_ENVS


# ---- one step at a time ----------------------------------------------------------------------


def test_step_async_and_wait():
    with vec_env() as env:
        env.reset()
        with pytest.raises(NoAsyncCallError):
            env.step_wait()
        env.step_async([1] * NUM_ENVS)
        assert env.waiting
        for call in (
            lambda: env.step_async([2] * NUM_ENVS),
            lambda: env.get_attr("offset"),
            lambda: env.set_attr("offset", 1),
        ):
            with pytest.raises(AlreadyPendingCallError):
                call()
        assert env.step_wait()[0][:, 1].tolist() == [1] * NUM_ENVS
        assert not env.waiting


@pytest.mark.deep
def test_reset_cancels_a_step():
    with vec_env() as env:
        env.reset()
        for turn in range(3):
            env.step_async([0] * NUM_ENVS)
            assert env.reset()[:, 0].tolist() == [0] * NUM_ENVS
            assert not env.waiting
            assert env.reset_infos == [{"reset": 2 + turn}] * NUM_ENVS
            observations, _, _, infos = env.step([0] * NUM_ENVS)
            assert observations[:, 0].tolist() == [1] * NUM_ENVS and infos[0]["count"] == 1


# ---- faults of the original ------------------------------------------------------------------


@pytest.mark.deep
def test_faults_restart_a_killed_worker():
    """The episode is truncated, and says why; the next one has begun."""
    policy = shmvec.FaultPolicy(on_crash="restart", backoff_s=0)
    fns = [Counter, partial(Failing, "step", "kill", at=2), Counter]
    fns[0] = fns[2] = partial(Counter, 1000)
    with vec_env(fns, 3, faults=policy) as env:
        env.reset()
        last = env.step([0] * 3)[0]
        observations, rewards, dones, infos = env.step([0] * 3)
        assert dones[1] and rewards[1] == 0
        assert infos[1]["fault"]["type"] == "WorkerCrashError"
        assert infos[1]["TimeLimit.truncated"] is True
        np.testing.assert_array_equal(infos[1]["terminal_observation"], last[1])
        assert "final_obs" not in infos[1] and "final_info" not in infos[1]
        assert env.reset_infos[1]["fault"]["restarts"] == 1
        assert env.reset_infos[1]["reset"] == 1
        assert observations[1, 0] == 0
        assert dones.tolist() == [False, True, False]
        assert [info.keys() >= {"TimeLimit.truncated"} for info in infos] == [True] * 3
        env.step([0] * 3)
        env.reset()


@pytest.mark.deep
def test_an_attribute_error_in_env_method_does_not_end_the_worker():
    """SB3's worker dies of it, and the caller gets an EOFError."""
    with vec_env(Asked) as env:
        env.reset()
        with pytest.raises(AttributeError, match="no_such_method"):
            env.env_method("no_such_method")
        with pytest.raises(AttributeError, match="no_such_attribute"):
            env.get_attr("no_such_attribute", indices=[2])
        with pytest.raises(AttributeError, match="from within"):
            env.env_method("raises", AttributeError("from within"))
        with pytest.raises(KeyError, match="other"):
            env.env_method("raises", KeyError("other"), indices=-1)
        assert env.step([0] * NUM_ENVS)[0][:, 0].tolist() == [1] * NUM_ENVS


def test_set_attr_reaches_the_env_inside_its_wrappers():
    """SB3 sets it on the outermost wrapper, where the env does not see it."""
    with vec_env(lambda: Outer(gym.wrappers.TimeLimit(Counter(), 9))) as env:
        env.set_attr("offset", 100)
        env.set_attr("_max_episode_steps", 2)
        env.set_attr("inner", [1, 2], indices=1)  # a list is one value
        env.reset()
        assert env.step([0] * NUM_ENVS)[1].tolist() == [101] * NUM_ENVS
        assert env.step([0] * NUM_ENVS)[2].all()
        assert env.get_attr("inner") == [None, [1, 2], None, None, None]
        env.set_attr("brand_new", (3,))
        assert env.get_attr("brand_new") == [(3,)] * NUM_ENVS


@pytest.mark.deep
def test_restart_and_stats():
    with vec_env(partial(Counter, 1000), NUM_ENVS) as env:
        env.reset()
        env.restart([-1, 0])
        _, _, dones, infos = env.step([0] * NUM_ENVS)
        assert dones.tolist() == [True, False, False, False, True]
        assert infos[0]["fault"]["type"] == "Restart" and "fault" not in infos[1]
        env.restart([])
        assert env.stats().faults.restarts == 2


# ---- without Stable-Baselines3 ---------------------------------------------------------------


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)


@pytest.mark.deep
def test_without_sb3_the_import_says_what_to_install():
    ran = run("import sys; sys.modules['stable_baselines3'] = None; import shmvec.adapters.sb3")
    assert ran.returncode == 1
    assert "ImportError" in ran.stderr and "pip install stable-baselines3" in ran.stderr


@pytest.mark.deep
def test_workers_need_neither_sb3_nor_torch():
    imported = run("import sys, shmvec.adapters._sb3_env; print(*sys.modules)").stdout.split()
    assert "shmvec" in imported and not {"torch", "stable_baselines3"} & {*imported}
