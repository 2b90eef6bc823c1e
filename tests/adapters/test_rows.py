"""Agents as rows: each as if its env were alone; equal to SuperSuit's, for Gymnasium and SB3."""

import gc
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from agents import MODES, Band, info_of
from equality import same
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from sb3_stand_in import INSTALLED, AgentVecEnv
from tables import deep

from shmvec import FaultPolicy
from shmvec.adapters.pettingzoo import ParallelVectorEnv

AGENTS = ["ann", "bob", "cid"]
NUM_ENVS = 4
WORKERS = pytest.mark.parametrize("num_workers", [2, *deep(0)])
# By agent: the turns in which it is born and dies. An episode each, again and again.
LIVES = [
    {"ann": (0, 2), "bob": (0, 4), "cid": (0, 3)},
    {"ann": (0, 3), "cid": (1, 5)},
    dict.fromkeys(AGENTS, (0, 2)),
]


class Herd(Band):
    """Its agents are alike."""

    metadata = {"name": "herd", "render_modes": ["rgb_array"]}
    seen = spaces.Box(0, 1, (3,), np.float32)
    done = spaces.Discrete(3)

    def __init__(self, first=0, lives=LIVES):
        super().__init__(lives, AGENTS, first)
        self.unwrapped = self
        self.options = None

    def observation_space(self, agent):
        return self.seen

    def action_space(self, agent):
        return self.done

    def _observe(self, agent):
        return self.rng.random(3).astype(np.float32)

    def reset(self, seed=None, options=None):
        self.options = options
        observations, _ = super().reset(seed, options)
        return observations, {agent: {"episode": self.episode} for agent in self.agents}


class Alone:
    """What the rows of an env must return, for an env that is stepped by itself."""

    def __init__(self, env, mode):
        self.env, self.mode, self.over = env, mode, False

    def reset(self, **arguments):
        observations, infos = self.env.reset(**arguments)
        self.over, self.ends = False, {}
        return self._observed(observations), [infos.get(agent, {}) for agent in AGENTS]

    def step(self, actions):
        no = [False] * len(AGENTS)
        if self.over:
            observations, infos = self.reset()
            return observations, [0.0] * len(AGENTS), no, no, infos
        acting = {a: action for a, action in zip(AGENTS, actions, strict=True) if self._lives(a)}
        observed, rewards, terminations, truncations, infos = self.env.step(acting)
        observations, infos = self._observed(observed), [infos.get(agent, {}) for agent in AGENTS]
        for agent in acting:
            if terminations[agent] or truncations[agent]:
                self.ends[agent] = terminations[agent], truncations[agent]
        self.over = not self.env.agents
        ends = [self.ends.get(a, (True, False)) if self.over else (False, False) for a in AGENTS]
        if self.over and self.mode == "SameStep":
            last, final = observations, infos
            observations, infos = self.reset()
            infos = [
                {**info, "final_obs": one, "final_info": two}
                for info, one, two in zip(infos, last, final, strict=True)
            ]
        rewards = [rewards.get(agent, 0.0) for agent in AGENTS]
        return observations, rewards, *map(list, zip(*ends, strict=True)), infos

    def _lives(self, agent):
        return agent in self.env.agents

    def _observed(self, observations):
        return [observations.get(agent, np.zeros(3, np.float32)) for agent in AGENTS]


def herd(make=Herd, num_envs=NUM_ENVS, **options):
    fns = [partial(make, env) for env in range(num_envs)]
    return closing(ParallelVectorEnv(fns, **options))


def assert_rows(results, expected):
    """A batch of rows is what its envs return alone."""
    *arrays, infos = results
    for array, kind in zip(arrays, zip(*expected, strict=True), strict=False):
        np.testing.assert_array_equal(array, [value for env in kind for value in env])
    expected_infos = [info for row in expected for info in row[-1]]
    assert len(expected_infos) == len(results[0])
    for row, info in enumerate(expected_infos):
        np.testing.assert_equal(info_of(infos, row), info)


# ---- as a Gymnasium VectorEnv ------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_workers, mode",
    [(2, MODES[0]), *deep((2, MODES[1]), (2, MODES[2]), (0, MODES[0]))],
)
def test_rows_receive_what_their_agents_do(num_workers, mode):
    with herd(num_workers=num_workers, autoreset_mode=mode) as envs:
        rows = envs.as_rows()
        assert isinstance(rows, gym.vector.VectorEnv)
        assert rows.num_envs == NUM_ENVS * len(AGENTS) and rows.parallel is envs
        assert rows.single_observation_space == Herd.seen
        assert rows.observation_space.shape == (12, 3)
        assert rows.action_space == spaces.MultiDiscrete([3] * 12)
        assert rows.metadata["autoreset_mode"].value == mode
        alone = [Alone(Herd(env), mode) for env in range(NUM_ENVS)]
        expected = [one.reset(seed=9 + env) for env, one in enumerate(alone)]
        assert_rows(rows.reset(seed=9), expected)
        rng = np.random.default_rng(1)
        for _ in range(14):
            over = np.array([not one.env.agents for one in alone])
            if mode == "Disabled" and over.any():
                rows.reset(options={"reset_mask": np.repeat(over, 3)})
                for env in np.flatnonzero(over):
                    alone[env].reset(options={})
            there = [agent in one.env.agents for one in alone for agent in AGENTS]
            assert rows.alive.tolist() == there
            actions = rng.integers(3, size=12)
            results = rows.step(actions)
            assert results[1].dtype == np.float64 and results[2].dtype == np.bool_
            per_env = actions.reshape(NUM_ENVS, 3)
            assert_rows(results, [one.step(a) for one, a in zip(alone, per_env, strict=True)])


class Rich(Herd):
    seen = spaces.Dict(
        a=spaces.Box(0, 1, (2,), np.float64),
        b=spaces.Tuple((spaces.Discrete(4), spaces.Text(5))),
    )
    done = spaces.Dict(x=spaces.Discrete(9), y=spaces.Tuple((spaces.Box(0, 1, (2,)),)))

    def _observe(self, agent):
        return {"a": self.rng.random(2), "b": (self.rng.integers(4), agent)}

    def step(self, actions):
        for agent, action in actions.items():
            assert action["x"] == AGENTS.index(agent) and action["y"][0].shape == (2,)
        return super().step({agent: action["x"] for agent, action in actions.items()})


@pytest.mark.deep
@pytest.mark.parametrize("as_list", [False, True])
def test_rows_of_dicts_and_tuples(as_list):
    with herd(Rich, 2, num_workers=0) as envs:
        rows = envs.as_rows()
        observations, _ = rows.reset()
        assert observations["a"].shape == (6, 2) and observations["b"][0].shape == (6,)
        names = observations["b"][1]
        assert [name for name, there in zip(names, rows.alive, strict=True) if there] == [
            "ann", "bob", "cid", "ann",
        ]  # fmt: skip
        actions = [{"x": row % 3, "y": (np.ones(2, np.float32),)} for row in range(6)]
        if not as_list:
            actions = {"x": np.arange(6) % 3, "y": (np.ones((6, 2), np.float32),)}
        assert rows.step(actions)[1].tolist() == [1, 2, 3, 1, 0, 0]


class Unlike(Herd):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def observation_space(self, agent):
        return spaces.Discrete(2) if (agent, self.what) == ("bob", "observation") else self.seen

    def action_space(self, agent):
        return spaces.Discrete(2) if (agent, self.what) == ("bob", "action") else self.done


@pytest.mark.deep
@pytest.mark.parametrize("what", ["observation", "action"])
def test_rows_must_be_alike(what):
    with closing(ParallelVectorEnv([partial(Unlike, what)], num_workers=0)) as envs:
        message = f"one {what} space, but that of agent 'bob' is Discrete.*pad_{what}"
        with pytest.raises(ValueError, match=message):
            envs.as_rows()
    with herd(batch_size=2) as envs, pytest.raises(ValueError, match="batch_size"):
        envs.as_rows()
    with herd(num_workers=0) as envs, pytest.raises(ValueError, match="base_class must be"):
        envs.as_rows("stable_baselines")


@pytest.mark.deep
@WORKERS
def test_wrong_calls_of_rows_are_refused(num_workers):
    with herd(num_workers=num_workers) as envs:
        rows = envs.as_rows()
        with pytest.raises(NoAsyncCallError):
            rows.step_wait()
        rows.reset(seed=1)
        for actions in (np.zeros(11, np.int64), [0] * 13):
            with pytest.raises(ValueError, match=r"there are 1\d actions for 12 rows"):
                rows.step(actions)
        with pytest.raises(TypeError, match="'ann': they have dtype"):
            rows.step(np.full(12, 0.5))
        for mask, message in (
            (np.ones(4, np.bool_), "shape"),
            (np.arange(12) < 4, "all rows of an env, or none"),
        ):
            with pytest.raises(ValueError, match=message):
                rows.reset(options={"reset_mask": mask})
        with pytest.raises(ValueError, match="length"):
            rows.reset(seed=[1, 2])
        rows.step_async(np.zeros(12, np.int64))
        for again in (rows.step_async, rows.step):
            with pytest.raises(AlreadyPendingCallError):
                again(np.zeros(12, np.int64))
        assert rows.step_wait()[1].any()
        rows.step_async(np.zeros(12, np.int64))
        rows.reset(seed=1)  # which discards it
        there = rows.alive
        assert rows.step(np.zeros(12, np.int64))[1].tolist() == there.tolist()  # of one turn
        rows.close()
        assert rows.closed and envs.closed
        with pytest.raises(ClosedEnvironmentError):
            rows.reset()


@pytest.mark.deep
def test_seeds_and_options_of_rows():
    with herd(num_workers=2) as envs:
        rows = envs.as_rows()
        first = rows.reset(seed=5, options={"level": 1})[0]
        assert envs.get_attr("options") == ({"level": 1},) * NUM_ENVS
        del rows  # the envs live on
        gc.collect()
        again = np.repeat([5, 6, 7, 8], 3).tolist()
        options = [{"row": row} for row in range(12)]
        later = ParallelVectorEnv.as_rows(envs)
        for _ in range(2):
            later.reset()
        assert same(later.reset(seed=again, options=options)[0], first)
        assert envs.get_attr("options") == tuple({"row": row} for row in (0, 3, 6, 9))
        assert [frame.shape for frame in later.render()] == [(2, 2, 3)] * NUM_ENVS


class Broken(Herd):
    def step(self, actions):
        if self.episode == 1 and self.turn == 1:
            raise KeyError("x")
        return super().step(actions)


@pytest.mark.deep
@pytest.mark.parametrize("mode", MODES[:2])
def test_a_fault_truncates_the_rows_of_its_env(mode):
    policy = FaultPolicy(on_error="reset")
    with herd(Broken, 2, num_workers=2, faults=policy, autoreset_mode=mode) as envs:
        rows = envs.as_rows()
        rows.reset(seed=0)
        rows.step(np.zeros(6, np.int64))
        _, rewards, terminations, truncations, infos = rows.step(np.zeros(6, np.int64))
        assert rewards.tolist() == [2, 2, 2, 0, 0, 0]
        # Bob was not in that episode.
        assert terminations.tolist() == [False] * 4 + [True, False]
        assert truncations.tolist() == [False] * 3 + [True, False, True]
        assert infos["fault"]["type"].tolist() == [None] * 3 + ["KeyError"] * 3
    with herd(Broken, 2, num_workers=2) as envs:
        rows = envs.as_rows()
        rows.reset(seed=0)
        rows.step(np.zeros(6, np.int64))
        with pytest.raises(KeyError, match="x"):
            rows.step(np.zeros(6, np.int64))
        assert rows.reset(seed=0)[0].shape == (6, 3)


# ---- as SB3's VecEnv ---------------------------------------------------------------------------


def as_vec_env(envs):
    if INSTALLED:
        return envs.as_rows("stable_baselines3")
    return AgentVecEnv(envs.as_rows())  # on the stand-in, which as_rows does not find


def test_methods_of_sb3_rows_can_be_called_by_their_class():
    with herd(autoreset_mode="SameStep", num_workers=0) as envs:
        rows = as_vec_env(envs)
        rows.reset()
        AgentVecEnv.step_async(rows, np.zeros(12, np.int64))
        assert len(rows.step_wait()[3]) == 12
        AgentVecEnv.close(rows)
        assert envs.closed


def test_sb3_rows_are_what_gymnasiums_are():
    with (
        herd(autoreset_mode="SameStep") as envs,
        herd(autoreset_mode="SameStep", num_workers=0) as others,
    ):
        ours, theirs = as_vec_env(envs), others.as_rows()
        assert isinstance(ours, AgentVecEnv) and ours.num_envs == 12 and ours.rows.parallel is envs
        assert ours.seed(3) == [3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6, 6]
        ours.set_options({"level": 1})
        assert same(ours.reset(), theirs.reset(seed=3)[0])
        assert ours.get_attr("options", [0, 5]) == [{"level": 1}] * 2
        assert ours.reset_infos[0] == {"episode": 0} and ours.reset_infos[4] == {}
        rng = np.random.default_rng(1)
        for _ in range(10):
            actions = rng.integers(3, size=12)
            observations, rewards, dones, infos = ours.step(actions)
            expected = theirs.step(actions)
            assert same(observations, expected[0]) and rewards.dtype == np.float32
            np.testing.assert_array_equal(rewards, expected[1])
            np.testing.assert_array_equal(dones, expected[2] | expected[3])
            for row, info in enumerate(infos):
                wanted = info_of(expected[4], row)
                if dones[row]:
                    assert same(info.pop("terminal_observation"), wanted.pop("final_obs"))
                    final = wanted.pop("final_info", {})
                    assert ours.reset_infos[row] == wanted
                    wanted = final
                assert info.pop("TimeLimit.truncated") == (dones[row] and not expected[2][row])
                assert info == wanted


@pytest.mark.deep
def test_sb3_rows_are_asked_through_their_envs():
    with herd(num_workers=0) as envs, pytest.raises(ValueError, match="SameStep"):
        as_vec_env(envs)
    with herd(autoreset_mode="SameStep") as envs:
        rows = as_vec_env(envs)
        rows.reset()
        assert rows.render_mode == "rgb_array" and len(rows.get_images()) == NUM_ENVS
        assert rows.get_attr("episode") == [env for env in range(NUM_ENVS) for _ in AGENTS]
        rows.set_attr("mark", 7, indices=[0, 1, 9])
        assert rows.get_attr("mark", [2, 10]) == [7, 7]
        assert rows.env_method("observation_space", "ann", indices=3) == [Herd.seen]
        assert rows.env_is_wrapped(gym.Wrapper, indices=[0, 1]) == [False] * 2
        rows.close()
        assert envs.closed


# ---- beside SuperSuit --------------------------------------------------------------------------


def compare(make, theirs, steps=30):
    """Rows receive what SuperSuit's do."""
    ours = ParallelVectorEnv([make] * 3, num_workers=2, autoreset_mode="SameStep").as_rows()
    with closing(ours), closing(theirs):
        observations, infos = ours.reset(seed=5)
        expected, _ = theirs.reset(seed=5)
        assert same(observations, expected)
        rng = np.random.default_rng(0)
        ends = 0
        for _ in range(steps):
            actions = rng.integers(ours.single_action_space.n, size=ours.num_envs)
            our_results, their_results = ours.step(actions), theirs.step(actions)
            assert same(our_results[0], their_results[0])
            for mine, other in zip(our_results[1:4], their_results[1:4], strict=True):
                np.testing.assert_allclose(mine, other, rtol=1e-6)  # rewards are float32 there
            dones = our_results[2] | our_results[3]
            for row in np.flatnonzero(dones):
                last = their_results[4][row]["terminal_observation"]
                assert same(our_results[4]["final_obs"][row], last)
            ends += dones.sum()
        assert ends


@pytest.mark.deep
def test_rows_equal_supersuits():
    supersuit = pytest.importorskip("supersuit")
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    make = partial(spread.parallel_env, max_cycles=7)
    rows = supersuit.pettingzoo_env_to_vec_env_v1(make())
    compare(make, supersuit.concat_vec_envs_v1(rows, 3, num_cpus=1))


@pytest.mark.deep
def test_ppo_learns_on_sb3_rows():
    sb3 = pytest.importorskip("stable_baselines3")
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    make = partial(spread.parallel_env, max_cycles=7)
    envs = ParallelVectorEnv([make] * 2, num_workers=2, autoreset_mode="SameStep")
    with closing(envs):
        rows = envs.as_rows("stable_baselines3")
        model = sb3.PPO("MlpPolicy", rows, n_steps=32, batch_size=32, seed=0)
        assert model.learn(200).num_timesteps >= 200
