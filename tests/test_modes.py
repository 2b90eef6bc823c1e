"""Autoreset modes and observation modes where they go beyond what SyncVectorEnv shows."""

import threading
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter, SameArrays, Scripted, Words
from equality import same, sync_env
from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.utils import batch_differing_spaces
from tables import deep, paired

from shmvec import ShmVectorEnv
from shmvec.exchange import AutoresetMode

WORKERS = pytest.mark.parametrize("num_workers", [2, *deep(0)])


@WORKERS
@pytest.mark.parametrize("dtype", [np.float32, *deep(np.float64)])  # in the slab, in the message
@pytest.mark.parametrize("shared_memory", [True, *deep(False)])
def test_a_final_observation_is_not_overwritten_by_the_reset(num_workers, dtype, shared_memory):
    envs = ShmVectorEnv(
        [lambda: SameArrays(1, dtype)] * 2,
        autoreset_mode="SameStep",
        num_workers=num_workers,
        shared_memory=shared_memory,
    )
    with closing(envs):
        envs.reset()
        observations, _, _, _, infos = envs.step([0, 0])
        assert observations.tolist() == [[-1, -1]] * 2
        for final in infos["final_obs"]:
            assert final.tolist() == [1, 1] and final.dtype == dtype
        assert infos["final_info"]["parts"].tolist() == [[1, 1]] * 2
        assert infos["parts"].tolist() == [[-1, -1]] * 2
        first = infos["final_obs"][0]
        envs.reset()
        envs.step([0, 0])
        assert first.tolist() == [1, 1] and first.flags.writeable  # the user's own


@pytest.mark.deep
@WORKERS
def test_an_overridden_add_info_gets_final_observations(num_workers):
    class Lists(ShmVectorEnv):
        def _add_info(self, vector_infos, env_info, env_num):
            vector_infos.setdefault("all", []).append((env_num, env_info))
            return vector_infos

    envs = Lists(
        [lambda: SameArrays(1)] * 2, autoreset_mode=AutoresetMode.SAME_STEP, num_workers=num_workers
    )
    with closing(envs):
        envs.reset()
        found = envs.step([0, 0])[4]["all"]
        assert [env for env, _ in found] == [0, 1]
        for _, info in found:
            assert list(info) == ["final_obs", "final_info", "parts"]
            assert info["final_obs"].tolist() == [1, 1]


@pytest.mark.deep
@WORKERS
def test_a_failing_reset_at_the_end_of_an_episode(num_workers):
    class Once(Counter):
        def reset(self, **kwargs):
            if self.resets == 1:
                self.resets += 1
                raise ValueError("not again")
            return super().reset(**kwargs)

    envs = ShmVectorEnv(
        [lambda: Once(2), lambda: Counter(5)], autoreset_mode="SameStep", num_workers=num_workers
    )
    with closing(envs):
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(ValueError, match="not again") as caught:
            envs.step([0, 0])
        assert "In reset() of env 0" in str(caught.value.__cause__)
        assert envs.reset()[0][:, 0].tolist() == [0, 0]


@WORKERS
@pytest.mark.parametrize("shared_memory", [True, *deep(False)])
def test_disabled_leaves_resets_to_the_caller(num_workers, shared_memory):
    envs = ShmVectorEnv(
        [lambda: Counter(2), lambda: Counter(3)],
        autoreset_mode=AutoresetMode.DISABLED,
        num_workers=num_workers,
        shared_memory=shared_memory,
    )
    with closing(envs):
        assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
        envs.reset(seed=0)
        envs.step([0, 0])
        _, _, terminations, truncations, _ = envs.step([0, 0])
        assert terminations.tolist() == [True, False]
        with pytest.raises(AssertionError, match=r"episodes of envs \[0\] are over"):
            envs.step([0, 0])
        observations, infos = envs.reset(options={"reset_mask": terminations | truncations})
        assert observations[:, 0].tolist() == [0, 2]  # env 1 shows its last observation
        assert infos["_reset"].tolist() == [True, False]
        observations, _, terminations, _, _ = envs.step([0, 0])
        assert observations[:, 0].tolist() == [1, 3]  # nothing was sent before
        assert terminations.tolist() == [False, True]
        envs.reset()
        envs.step([0, 0])


def boxes(*highs, size=5):
    return [gym.spaces.Box(0, high, (size,)) for high in highs]


def scripted(spaces):
    return [lambda s=s: Scripted(s, gym.spaces.Discrete(2), [3]) for s in spaces]


@WORKERS
@pytest.mark.parametrize("shared_memory", [True, *deep(False)])
@pytest.mark.parametrize(
    "mode",
    ["different", *deep(((gym.spaces.Box(0, 9, (3, 5)), gym.spaces.Box(0, 9, (5,))),))],
    ids=["different", "pair"],
)
def test_spaces_that_differ_in_bounds(num_workers, shared_memory, mode):
    spaces = boxes(1, 2, 3)
    sync = sync_env(scripted(spaces), observation_mode=mode)
    envs = ShmVectorEnv(
        scripted(spaces),
        observation_mode=mode,
        num_workers=num_workers,
        shared_memory=shared_memory,
    )
    with closing(envs), closing(sync):
        assert envs.observation_mode == mode
        assert envs.observation_space == sync.observation_space
        assert envs.single_observation_space == sync.single_observation_space
        if mode == "different":
            assert envs.observation_space == batch_differing_spaces(spaces)
        assert same(envs.reset(seed=1), sync.reset(seed=1))
        for _ in range(5):
            assert same(envs.step([0, 1, 0]), sync.step([0, 1, 0]))


@pytest.mark.deep
@WORKERS
def test_texts_that_differ(num_workers):
    spaces = [gym.spaces.Text(3, min_length=low) for low in (1, 3)]
    envs = ShmVectorEnv(
        scripted(spaces), observation_mode="different", num_workers=num_workers, shared_memory=False
    )
    with closing(envs):
        assert envs.observation_space == gym.spaces.Tuple(spaces)
        assert all(map(gym.spaces.Text.contains, spaces, envs.reset(seed=0)[0]))


MIXED = [gym.spaces.Box(0, 1, (3,)), gym.spaces.Discrete(5)]


UNFIT = [
    (boxes(1, 2), "same"),
    ([*boxes(1), *boxes(1, size=4)], "different"),
    ([*boxes(1), *boxes(1, size=4)], (gym.spaces.Box(0, 1, (2, 5)), *boxes(1))),
    (MIXED, "same"),
    (MIXED, "different"),
    (MIXED, (gym.spaces.Box(0, 1, (2, 3)), MIXED[0])),
    (MIXED, "neither"),
    (MIXED, 5),
    (MIXED, (1, MIXED[0])),
]


@pytest.mark.parametrize("unfit, num_workers", paired(UNFIT, [2, 0]))
def test_modes_that_do_not_fit_raise_what_gymnasium_raises(unfit, num_workers):
    spaces, mode = unfit

    def raised(make):
        with pytest.raises(Exception) as caught:
            make(scripted(spaces), observation_mode=mode)
        return type(caught.value), str(caught.value).replace("ShmVectorEnv", "AsyncVectorEnv")

    def make_ours(*args, **kwargs):
        ShmVectorEnv(*args, **kwargs, num_workers=num_workers)

    def make_theirs(*args, **kwargs):
        """AsyncVectorEnv leaves its processes behind when the spaces differ."""

        class Closing(AsyncVectorEnv):
            def _check_spaces(self):
                try:
                    super()._check_spaces()
                except BaseException:
                    self.close(terminate=True)
                    raise

        return Closing(*args, **kwargs)

    ours, theirs = raised(make_ours), raised(make_theirs)
    if theirs[0] is AssertionError:  # before 1.4 some arguments were checked by assertions
        assert ours[0] in (AssertionError, TypeError, ValueError, RuntimeError)
        return
    assert ours[0] is theirs[0]
    assert ours[1].startswith(theirs[1].split("got ")[0])


@WORKERS
def test_custom_spaces_travel_as_messages(num_workers):
    make = [lambda: Scripted(Words(), Words(), [3])] * 3
    envs = ShmVectorEnv(make, shared_memory=False, num_workers=num_workers)
    with closing(envs):
        observations, _ = envs.reset(seed=4)
        assert observations in envs.observation_space
        actions = (("go", 1), ("stop", {"by": [2]}), None)
        envs.step(actions)
        assert envs.get_attr("actions") == tuple([action] for action in actions)
        for bad in (actions[:2], (*actions, 1)):
            with pytest.raises(ValueError, match=f"there are {len(bad)} for 3 envs"):
                envs.step(bad)
        with pytest.raises(TypeError, match="that of env 1 cannot be pickled"):
            envs.step((1, threading.Lock(), 3))
        assert [len(seen) for seen in envs.get_attr("actions")] == [1, 1, 1]


@pytest.mark.deep
@WORKERS
def test_any_picklable_action_travels_as_a_message(num_workers):
    """As with AsyncVectorEnv: the env judges. In a slab, what does not fit the space is refused."""

    class Taking(Counter):
        def step(self, action):
            return super().step(0)[:4] + ({"action": repr(action)},)

    envs = ShmVectorEnv([Taking] * 3, shared_memory=False, num_workers=num_workers)
    with closing(envs):
        envs.reset()
        infos = envs.step((None, 1.5, {"up": 1}))[4]
        assert infos["action"].tolist() == ["None", "1.5", "{'up': 1}"]


@pytest.mark.deep
@WORKERS
def test_messages_larger_than_their_rings(num_workers):
    class Long(gym.Env):
        observation_space = gym.spaces.Sequence(gym.spaces.Box(-1, 1, (1,)), stack=True)
        action_space = gym.spaces.Sequence(gym.spaces.Discrete(10), stack=True)

        def reset(self, *, seed=None, options=None):
            return np.zeros((0, 1), np.float32), {}

        def step(self, action):
            self.last = action
            size = int(action[0])
            return np.full((size, 1), 0.5, np.float32), 0.0, False, False, {"sum": action.sum()}

    envs = ShmVectorEnv([Long] * 3, shared_memory=False, num_workers=num_workers)
    with closing(envs):
        envs.reset()
        for sizes in ([1, 200_000, 3], [300_000, 5, 400_000], [1, 2, 3]):
            actions = tuple(np.r_[size, np.ones(size, int)] for size in sizes)
            observations, _, _, _, infos = envs.step(actions)
            assert [len(observation) for observation in observations] == sizes
            assert infos["sum"].tolist() == [2 * size for size in sizes]
            assert [len(last) for last in envs.get_attr("last")] == [1 + size for size in sizes]


@pytest.mark.deep
def test_an_observation_by_message_after_an_error_elsewhere():
    class Raising(Counter):
        def step(self, action):
            if action == 3:
                raise ValueError("three")
            return super().step(action)

    with closing(ShmVectorEnv([Raising] * 3, shared_memory=False, num_workers=2)) as envs:
        envs.reset()
        envs.step([0, 0, 0])
        with pytest.raises(ValueError, match="three"):
            envs.step([0, 3, 0])
        mask = np.array([False, True, False])
        observations, _ = envs.reset(options={"reset_mask": mask})
        assert observations[:, 0].tolist() == [2, 0, 2]  # the others have made their step
