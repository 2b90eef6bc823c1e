"""Parallel envs of many agents, stepped as vector envs: by agent what each env alone would tell."""

import os
import warnings
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from agents import DONE, MODES, SEEN, Band, info_of
from equality import same
from gymnasium import spaces
from gymnasium.error import (
    AlreadyPendingCallError,
    NoAsyncCallError,
    ResetNeeded,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import deep

from shmvec import FaultPolicy
from shmvec.adapters.pettingzoo import ParallelVectorEnv

DEADLINE = 100.0
NUM_ENVS = 4
WORKERS = pytest.mark.parametrize("num_workers", [2, *deep(0)])
WORKERS_AND_MODES = pytest.mark.parametrize(
    "num_workers, mode",
    [(2, MODES[0]), *deep((2, MODES[1]), (2, MODES[2]), (0, MODES[0]))],
)


def zeros(space):
    if isinstance(space, spaces.Dict):
        return {key: zeros(part) for key, part in space.items()}
    return np.zeros(space.shape, space.dtype)[()]


class Alone:
    """One env, stepped alone, and what is expected of it in a vector env."""

    def __init__(self, env, mode):
        self.env, self.mode, self.alive = env, mode, []

    def reset(self, seed=None, options=None):
        observations, infos = self.env.reset(seed=seed, options=options)
        self.alive = list(self.env.agents)
        return self._row(observations, {}, {}, {}, infos)

    def step(self, actions):
        if not self.alive and self.mode == "NextStep":
            return self.reset()
        results = self.env.step({agent: actions[agent] for agent in self.alive})
        before, self.alive = self.alive, list(self.env.agents)
        if self.alive or self.mode != "SameStep":
            return self._row(*results)
        ended = self._row(*results)
        again = self.reset()
        for agent in ended:
            last = {}
            if agent in before:
                last["final_obs"] = ended[agent]["observation"]
            if ended[agent]["info"]:
                last["final_info"] = ended[agent]["info"]
            ended[agent] |= {
                "observation": again[agent]["observation"],
                "alive": again[agent]["alive"],
                "info": {**last, **again[agent]["info"]},
            }
        return ended

    def _row(self, observations, rewards, terminations, truncations, infos):
        return {
            agent: {
                "observation": observations.get(agent, zeros(SEEN[agent])),
                "reward": float(rewards.get(agent, 0)),
                "terminated": bool(terminations.get(agent, False)),
                "truncated": bool(truncations.get(agent, False)),
                "alive": agent in self.alive,
                "info": infos.get(agent, {}),
            }
            for agent in self.env.possible_agents
        }


def of_row(batch, row):
    return {k: of_row(v, row) for k, v in batch.items()} if isinstance(batch, dict) else batch[row]


def assert_rows(envs, results, expected, rows=None):
    """Each row of a vector env's results is what its env alone has returned."""
    observations, rewards, terminations, truncations, infos = results
    alive = envs.alive
    for agent in envs.possible_agents:
        assert rewards[agent].dtype == np.float64
        assert terminations[agent].dtype == truncations[agent].dtype == np.bool_
        assert alive[agent].dtype == np.bool_
        for row, one in enumerate(expected):
            env = row if rows is None else rows[row]
            row_results = {
                "observation": of_row(observations[agent], row),
                "reward": rewards[agent][row].item(),
                "terminated": terminations[agent][row].item(),
                "truncated": truncations[agent][row].item(),
                "alive": alive[agent][env].item(),
            }
            info = one[agent].pop("info")
            assert same(row_results, one[agent]), (agent, env)
            assert str(sorted(info_of(infos[agent], row).items())) == str(
                sorted((key, plain(value)) for key, value in info.items())
            )


def plain(value):
    """Numbers as Gymnasium's arrays of infos give them."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return np.int64(value) if type(value) is int else value


def reset_results(envs, reset):
    observations, infos = reset
    zero = {agent: np.zeros(envs.num_envs) for agent in envs.possible_agents}
    no = {agent: np.zeros(envs.num_envs, bool) for agent in envs.possible_agents}
    return observations, zero, no, no, infos


def bands(num_envs=NUM_ENVS, kind=Band, **options):
    return [lambda i=i: kind(first=i, **options) for i in range(num_envs)]


def vector_env(env_fns=None, **options):
    return closing(ParallelVectorEnv(bands() if env_fns is None else env_fns, **options))


def sampled(envs, seed=None):
    actions = {}
    for index, agent in enumerate(envs.possible_agents):
        space = envs.action_space(agent)
        if seed is not None:
            space.seed(seed + index)
        actions[agent] = space.sample()
    return actions


# ---- the interface -----------------------------------------------------------------------------


@pytest.mark.deep
@WORKERS
def test_spaces_by_agent(num_workers):
    with vector_env(num_workers=num_workers) as envs:
        assert envs.num_envs == NUM_ENVS
        assert envs.possible_agents == ["ann", "bob", "cid"]
        for agent in envs.possible_agents:
            assert envs.single_observation_space(agent) == SEEN[agent]
            assert envs.single_action_space(agent) == DONE[agent]
            batched = gym.vector.utils.batch_space(SEEN[agent], NUM_ENVS)
            assert envs.observation_space(agent) == batched
            batched = gym.vector.utils.batch_space(DONE[agent], NUM_ENVS)
            assert envs.action_space(agent) == batched
        assert envs.metadata["name"] == "band"
        assert envs.render_mode == "rgb_array"
        with pytest.raises(ValueError, match="no agent 'dan'"):
            envs.observation_space("dan")


@pytest.mark.deep
@WORKERS
def test_reset_takes_seeds_and_options(num_workers):
    with vector_env(num_workers=num_workers) as envs:
        observations, infos = envs.reset(seed=3)
        assert observations["ann"].shape == (NUM_ENVS, 3)
        assert observations["bob"]["place"].shape == (NUM_ENVS, 2)
        envs.reset(seed=[5, None, 6, 7], options={"a": 1})
        envs.reset(options=[{"env": env} for env in range(NUM_ENVS)])
        assert envs.get_attr("given") == tuple(
            [
                (3 + env, None),
                ([5, None, 6, 7][env], {"a": 1}),
                (None, {"env": env}),
            ]
            for env in range(NUM_ENVS)
        )
        with pytest.raises(ValueError, match="length"):
            envs.reset(seed=[1])


@WORKERS_AND_MODES
def test_agents_die_are_born_and_begin_again(num_workers, mode):
    """Some of LIVES has each: a death, a birth within the episode, another set of agents."""
    with vector_env(num_workers=num_workers, autoreset_mode=mode) as envs:
        alone = [Alone(Band(first=env), mode) for env in range(NUM_ENVS)]
        expected = [one.reset(seed=9 + env) for env, one in enumerate(alone)]
        assert_rows(envs, reset_results(envs, envs.reset(seed=9)), expected)
        for turn in range(12):
            assert envs.agents == envs.possible_agents == list(SEEN)
            assert {a: there.tolist() for a, there in envs.alive.items()} == {
                a: [a in one.alive for one in alone] for a in SEEN
            }
            over = np.array([not one.alive for one in alone])
            if mode == "Disabled" and over.any():
                envs.reset(options={"reset_mask": over})
                for env in np.flatnonzero(over):
                    alone[env].reset(options={})
            actions = sampled(envs, turn)
            results = envs.step(actions)
            expected = [
                one.step({agent: actions[agent][env] for agent in actions})
                for env, one in enumerate(alone)
            ]
            assert_rows(envs, results, expected)
        received = envs.get_attr("received")
        for ours, one in zip(received, alone, strict=True):
            assert str(ours) == str(one.env.received)


@WORKERS
def test_final_observations_by_agent(num_workers):
    with vector_env(num_workers=num_workers, autoreset_mode="SameStep") as envs:
        envs.reset(seed=0)
        *_, infos = envs.step(sampled(envs))  # env 2: only bob, who dies at once
        assert infos["bob"]["_final_obs"].tolist() == [False, False, True, False]
        assert infos["bob"]["final_obs"][2]["place"].shape == (2,)
        assert infos["bob"]["final_obs"][1] is None
        assert not infos["ann"]["_final_obs"].any()
        assert envs.alive["ann"].all()


@pytest.mark.deep
@WORKERS
def test_calls_attributes_and_render(num_workers):
    with vector_env(num_workers=num_workers) as envs:
        envs.reset()
        assert [state.tolist() for state in envs.call("state")] == [[0, i] for i in range(4)]
        assert envs.get_attr("episode") == (0, 1, 2, 3)
        envs.set_attr("gift", [1, 2, 3, 4])
        assert envs.get_attr("gift") == (1, 2, 3, 4)
        envs.set_attr("gift", 7)
        assert envs.get_attr("gift") == (7,) * 4
        frames = envs.render()
        assert isinstance(frames, tuple) and frames[0].shape == (2, 2, 3)
        with pytest.raises(ValueError, match="use `reset` directly"):
            envs.call("reset")
        with pytest.raises(AttributeError, match="nothing"):
            envs.get_attr("nothing")


# ---- masks and partial batches -----------------------------------------------------------------


@pytest.mark.deep
@WORKERS_AND_MODES
def test_step_of_some_envs(num_workers, mode):
    with vector_env(num_workers=num_workers, autoreset_mode=mode) as envs:
        envs.reset(seed=1)
        before = envs.step(sampled(envs))[0]
        alive = envs.alive
        mask = np.array([True, False, False, True])
        observations, rewards, terminations, truncations, infos = envs.step(
            sampled(envs, 1), mask=mask
        )
        for agent in envs.possible_agents:
            assert not rewards[agent][~mask].any()
            assert not (terminations[agent] | truncations[agent])[~mask].any()
            assert (envs.alive[agent] == alive[agent])[~mask].all()
            assert "turn" not in infos[agent] or not infos[agent]["_turn"][~mask].any()
        np.testing.assert_array_equal(observations["ann"][~mask], before["ann"][~mask])
        assert rewards["cid"][mask].all()
        assert [len(received) for received in envs.get_attr("received")] == [2, 1, 1, 2]


@WORKERS
def test_partial_batches(num_workers):
    with vector_env(num_workers=num_workers, batch_size=2) as envs:
        alone = [Alone(Band(first=env), "NextStep") for env in range(NUM_ENVS)]
        waiting = {env: (one.reset, (env,)) for env, one in enumerate(alone)}
        envs.async_reset(seed=0)
        for turn in range(20):
            results = envs.recv()
            rows = results[4]["env_id"]
            assert len(rows) == 2
            expected = []
            for env in rows.tolist():
                call, arguments = waiting.pop(env)
                expected.append(call(*arguments))
            assert_rows(envs, results, expected, rows)
            actions = {a: values[:2] for a, values in sampled(envs, turn).items()}
            envs.send(actions, rows)
            for row, env in enumerate(rows.tolist()):
                given = {agent: values[row] for agent, values in actions.items()}
                waiting[env] = (alone[env].step, (given,))


@pytest.mark.deep
@WORKERS
def test_calls_in_two_halves(num_workers):
    with vector_env(num_workers=num_workers) as envs, vector_env() as whole:
        with pytest.raises(NoAsyncCallError):
            envs.step_wait()
        envs.reset_async(seed=3)
        with pytest.raises(AlreadyPendingCallError):
            envs.reset_async()
        assert same(envs.reset_wait(), whole.reset(seed=3))
        actions = sampled(envs)
        envs.step_async(actions)
        with pytest.raises(AlreadyPendingCallError):
            envs.step_async(actions)
        assert same(envs.step_wait(timeout=DEADLINE), whole.step(actions))
        envs.call_async("state")
        assert same(envs.call_wait(), whole.call("state"))
        only = np.array([False, True, False, False])
        envs.reset_async(options={"reset_mask": only})
        assert same(envs.reset_wait(), whole.reset(options={"reset_mask": only}))
        assert same(envs.alive, whole.alive)
        assert len(envs.processes) == num_workers


# ---- actions -----------------------------------------------------------------------------------


@WORKERS
def test_actions_of_the_dead_do_not_matter(num_workers):
    with vector_env(num_workers=num_workers) as envs:
        envs.reset()
        dead = ~envs.alive["ann"]
        assert dead.tolist() == [False, False, True, False]
        nan = np.array([1, 2, np.nan, 0])
        actions = {**sampled(envs), "ann": nan}
        actions["cid"] = [None if not there else [1, 2] for there in envs.alive["cid"]]
        actions["bob"] = np.where(envs.alive["bob"][:, None], [0.5, 0.5], np.nan)
        envs.step(actions)
        received = [given[-1] for given in envs.get_attr("received")]
        assert [given.get("ann") for given in received] == [1, 2, None, 0]
        assert [np.array(given.get("cid")).tolist() for given in received] == [
            [1, 2],
            None,
            None,
            [1, 2],
        ]
        assert all("bob" not in given or (given["bob"] == 0.5).all() for given in received)


BAD = [
    ({"dan": [0] * 4}, ValueError, "no agent 'dan'"),
    ({"ann": None}, ValueError, r"no actions for agent 'ann', which is alive in envs \[0, 1, 3\]"),
    ({"ann": [0] * 3}, ValueError, r"of agent 'ann': they have shape \(3,\); \(4,\)"),
    ({"bob": np.zeros((4, 3))}, ValueError, r"of agent 'bob': they have shape \(4, 3\)"),
    ({"cid": [1, 2, 3, 4]}, ValueError, "of agent 'cid'"),
    ({"cid": [[1, 1], [1], [1, 1], [1, 1]]}, ValueError, "of agent 'cid'"),
    ({"ann": [0.5] * 4}, TypeError, "of agent 'ann': they have dtype float64"),
    ({"ann": [np.nan, 1, 1, 1]}, TypeError, "of agent 'ann'"),
    ({"ann": ["x"] * 4}, TypeError, "of agent 'ann'"),
    ({"ann": [None, 1, 1, 1]}, ValueError, r"alive in envs \[0\]"),
]


@pytest.mark.deep
@WORKERS
def test_bad_actions_are_refused_before_anything_is_sent(num_workers):
    with vector_env(num_workers=num_workers) as envs:
        with pytest.raises(ResetNeeded, match=r"envs \[0, 1, 2, 3\]"):
            envs.step(sampled(envs))
        envs.reset()
        for wrong, error, message in BAD:
            for call in (envs.step, lambda actions: envs.send(actions, [0, 1, 2, 3])):
                with pytest.raises(error, match=message):
                    call({**sampled(envs), **wrong})
        with pytest.raises(ValueError, match="no actions for agent 'ann'"):
            envs.step({})
        with pytest.raises(TypeError, match="dict by agent"):
            envs.step([1, 2, 3, 4])
        with pytest.raises(ValueError, match="shape"):
            envs.step(sampled(envs), mask=np.ones(3, bool))
        with pytest.raises(ValueError, match="0 to 3"):
            envs.send(sampled(envs), [4])
        assert envs.get_attr("received") == ([],) * 4
        envs.step(sampled(envs))


# ---- envs that do not fit ----------------------------------------------------------------------


class Other(Band):
    def observation_space(self, agent):
        return spaces.Box(0, 1, (5,)) if agent == "ann" else SEEN[agent]


class Stranger(Band):
    where = "observations"

    def step(self, actions):
        results = super().step(actions)
        index = ["observations", "rewards", "terminations", "truncations", "infos"]
        if self.where == "agents":
            self.agents = [*self.agents, "dan"]
        else:
            results[index.index(self.where)]["dan"] = {} if self.where == "infos" else 0
        return results


@pytest.mark.deep
@WORKERS
def test_envs_must_have_the_same_agents_and_spaces(num_workers):
    fns = [Band, Band, lambda: Band(agents=("ann", "bob")), Band]
    with pytest.raises(RuntimeError, match="observation space of env 2"):
        ParallelVectorEnv(fns, num_workers=num_workers)
    fns = [Band, lambda: Band(agents=("bob", "ann", "cid"))] * 2
    with pytest.raises(RuntimeError, match="possible_agents of env 1 are"):
        ParallelVectorEnv(fns, num_workers=num_workers)
    with pytest.raises(RuntimeError, match="observation space of env 3"):
        ParallelVectorEnv([Band, Band, Band, Other], num_workers=num_workers)


class Nameless(Band):
    """Says who is there, and not who there may ever be."""

    def __init__(self):
        super().__init__()
        del self.possible_agents


@pytest.mark.deep
def test_what_is_no_parallel_env():
    with pytest.raises(TypeError, match="a Nameless without possible_agents"):
        ParallelVectorEnv([Nameless])
    with pytest.raises(TypeError, match="without the methods observation_space.*ParallelEnv"):
        ParallelVectorEnv([lambda: gym.make("CartPole-v1")])
    with pytest.raises(ValueError, match="env_fns is empty"):
        ParallelVectorEnv([])
    with pytest.raises(TypeError, match="not a function"):
        ParallelVectorEnv([Band()])
    with pytest.raises(ValueError, match="must be distinct names"):
        ParallelVectorEnv([lambda: Band(agents=("ann", "ann"))])
    with pytest.raises(TypeError, match="nonsense"):
        ParallelVectorEnv([Band], nonsense=1)


@pytest.mark.deep
@pytest.mark.parametrize(
    "where", ["observations", "rewards", "terminations", "truncations", "infos", "agents"]
)
def test_agents_that_there_cannot_be(where):
    def make():
        env = Stranger()
        env.where = where
        return env

    with vector_env([make], num_workers=0) as envs:
        envs.reset()
        with pytest.raises(ValueError, match="agent 'dan' that is not in possible_agents"):
            envs.step(sampled(envs))


class Lingering(Band):
    """Leaves its dead in `agents`, as some envs do."""

    def step(self, actions):
        before = self.agents
        results = super().step(actions)
        if not self.agents:
            self.agents = before
        return results


@pytest.mark.deep
def test_agents_that_are_done_are_dead_whatever_the_env_says():
    with vector_env([lambda: Lingering([{"ann": (0, 1), "bob": (0, 1)}])] * 2) as envs:
        envs.reset()
        envs.step(sampled(envs))
        assert not any(there.any() for there in envs.alive.values())
        *_, infos = envs.step({})
        assert infos["ann"]["episode"].tolist() == [1, 1]


class Unlisted(Band):
    """Keeps no list of the agents that live."""

    agents = property(lambda self: self._there(), lambda self, _: None)

    def _there(self):
        raise AttributeError("agents")

    def step(self, actions):
        self.turn += 1
        gone = {agent: self.turn == 2 and agent == "ann" for agent in actions}
        observed = {agent: self._observe(agent) for agent in actions}
        return observed, dict.fromkeys(actions, 1.0), gone, dict.fromkeys(actions, False), {}

    def reset(self, seed=None, options=None):
        self.turn = 0
        return {agent: self._observe(agent) for agent in ("ann", "bob")}, {}


def test_an_env_without_agents_goes_on_with_those_it_tells_something():
    with vector_env([Unlisted] * 2) as envs:
        envs.reset()
        for alive in (True, False):
            envs.step(sampled(envs))
            assert envs.alive["ann"].tolist() == [alive] * 2
            assert envs.alive["bob"].all() and not envs.alive["cid"].any()


# ---- faults ------------------------------------------------------------------------------------


class Unlucky(Band):
    """Raises or dies in the second step of its second episode, if it is env 1."""

    how = "raise"

    def step(self, actions):
        if self.episode == 2 and self.turn == 1 and len(self.given) == 2:
            if self.how == "kill":
                os._exit(3)
            raise ZeroDivisionError("unlucky")
        return super().step(actions)


def unlucky(how):
    def make(env):
        made = Unlucky([{"ann": (0, 2), "bob": (0, 3)}], first=env)
        made.how = how
        return made

    return [lambda env=env: make(env) for env in range(2)]


@pytest.mark.parametrize(
    "how, mode",
    [("kill", MODES[0]), *deep(("kill", MODES[1]), ("kill", MODES[2]), ("raise", MODES[1]))],
)
def test_a_policy_truncates_the_agents_of_an_env_that_failed(how, mode):
    policy = FaultPolicy(on_error="reset", on_crash="restart")
    fns = unlucky(how)
    options = {"faults": policy, "autoreset_mode": mode, "context": "fork"}
    with vector_env(fns, num_workers=2, **options) as envs:
        envs.reset(seed=1)
        for _ in range(9):
            over = ~(envs.alive["ann"] | envs.alive["bob"])
            if mode == "Disabled" and over.any():
                envs.reset(options={"reset_mask": over})
            before = envs.alive
            observations, rewards, terminations, truncations, infos = envs.step(sampled(envs))
            if "fault" in infos:
                break
        assert infos["_fault"].tolist() == [False, True]
        assert before["ann"][1] and before["bob"][1] and not before["cid"][1]
        for agent in envs.possible_agents:
            assert rewards[agent][1] == 0 and not terminations[agent][1]
            assert truncations[agent][1] == before[agent][1]
            assert envs.alive[agent][1] == (mode == "SameStep" and agent != "cid")
            if mode == "SameStep":
                assert infos[agent]["_final_obs"][1] == before[agent][1]
        if mode == "Disabled":
            envs.reset(options={"reset_mask": np.array([False, True])})
        elif mode == "NextStep":
            envs.step(sampled(envs))
        assert envs.alive["ann"][1] and envs.alive["bob"][1]
        envs.step(sampled(envs), mask=np.array([False, True]))


# ---- against envs that are stepped alone -------------------------------------------------------


@st.composite
def episodes(draw):
    """Lives of which in each episode somebody is there from the beginning."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        lives = {}
        for agent in SEEN:
            if draw(st.booleans()):
                born = draw(st.integers(0, 2))
                lives[agent] = born, born + draw(st.integers(1, 3))
        lives[draw(st.sampled_from(list(SEEN)))] = 0, draw(st.integers(1, 4))
        found.append(lives)
    return found


@pytest.mark.deep
@settings(max_examples=15, deadline=None)
@given(st.data(), episodes(), st.integers(1, 5), st.sampled_from(MODES), st.booleans())
def test_every_env_is_as_if_it_were_alone(data, lives, num_envs, mode, shared_memory):
    num_workers = data.draw(st.integers(0, num_envs))
    alone = [Alone(Band(lives, first=env), mode) for env in range(num_envs)]
    options = {"num_workers": num_workers, "autoreset_mode": mode, "shared_memory": shared_memory}
    with vector_env(bands(num_envs, lives=lives), **options) as envs:
        expected = [one.reset(seed=env) for env, one in enumerate(alone)]
        assert_rows(envs, reset_results(envs, envs.reset(seed=0)), expected)
        for turn in range(10):
            over = np.array([not one.alive for one in alone])
            if mode == "Disabled" and over.any():
                envs.reset(options={"reset_mask": over})
                for env in np.flatnonzero(over):
                    alone[env].reset()
            actions = sampled(envs, turn)
            expected = [
                one.step({agent: actions[agent][env] for agent in actions})
                for env, one in enumerate(alone)
            ]
            for agent in list(actions):
                if not envs.alive[agent].any() and data.draw(st.booleans()):
                    del actions[agent]
            assert_rows(envs, envs.step(actions), expected)
        for received, one in zip(envs.get_attr("received"), alone, strict=True):
            assert str(received) == str(one.env.received)


# ---- real ones ---------------------------------------------------------------------------------


def real(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what these import
        package, module, make = name.rsplit(".", 2)
        pytest.importorskip("pettingzoo")
        return getattr(pytest.importorskip(f"{package}.{module}"), make)


@pytest.mark.deep
@pytest.mark.parametrize(
    "name",
    [
        "mpe2.simple_spread_v3.parallel_env",
        "mpe2.simple_speaker_listener_v4.parallel_env",
        "pettingzoo.butterfly.knights_archers_zombies_v11.parallel_env",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_real_envs(name):
    make = real(name)
    alone = make()
    with vector_env([make] * 2) as envs:
        observations, _ = envs.reset(seed=4)
        expected, _ = alone.reset(seed=5)
        for turn in range(40):
            if not alone.agents:
                break
            for agent in envs.possible_agents:
                there = agent in alone.agents
                assert envs.alive[agent][1] == there
                if there:
                    np.testing.assert_array_equal(observations[agent][1], expected[agent])
            actions = sampled(envs, turn)
            observations, rewards, terminations, truncations, _ = envs.step(actions)
            mine = {agent: actions[agent][1] for agent in alone.agents}
            expected, paid, terminated, truncated, _ = alone.step(mine)
            for agent in mine:
                assert rewards[agent][1] == paid[agent]
                assert terminations[agent][1] == terminated[agent]
                assert truncations[agent][1] == truncated[agent]
    alone.close()
