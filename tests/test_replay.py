"""What is sampled from a replay is what the caller of the vector env has seen, and nothing else."""

import json
import math
import multiprocessing
import os
import resource
import signal
import tempfile
import threading
import time
from contextlib import closing, nullcontext, suppress
from copy import deepcopy
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from equality import MODES, same, sync_env
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_alone, run_script, send_signal
from replay_reference import (
    ACTIONS,
    DEADLINE_S,
    FIELDS,
    KINDS,
    Caller,
    Numbered,
    Reference,
    assert_typed,
    assert_whole,
    key_of,
    reward_of,
)
from strategies import boxes, spaces
from tables import deep, first, paired, row

from shmvec import EnvTimeoutError, FaultPolicy, Pipeline, Replay, ShmVectorEnv, evaluate
from shmvec.exchange import AutoresetMode

ALL_MODES = list(AutoresetMode)
WAYS = ["lockstep", "masked", "some", "rolled", "partial", "piped", "mixed"]


def numbered(num_envs, *arguments, stack=1, padding="reset", **options):
    """Functions that make numbered envs; with a stack of frames, if it is more than one."""

    def make(index):
        env = Numbered(index, *arguments, **options)
        return env if stack == 1 else FrameStackObservation(env, stack, padding_type=padding)

    return [partial(make, index) for index in range(num_envs)]


def _frames_of(envs):
    """The frames of the observations of numbered envs."""
    try:
        return envs.get_attr("stack_size")[0]
    except AttributeError:
        return 1


def watched(envs, capacity, **options):
    """A replay of these envs, its reference, and a caller that has them see the same."""
    kept = {key: options[key] for key in ("n_step", "discount") if key in options}
    mode = AutoresetMode(envs.autoreset_mode).value
    frames = _frames_of(envs)
    reference = Reference(envs.num_envs, mode, capacity, frame_stack=frames, **kept)
    caller = Caller(envs, reference)
    if envs.batch_size is None and mode != "Disabled":
        caller.pipeline = Pipeline(envs, lambda seen, env_ids: caller.actions(len(env_ids)))
    return Replay(envs, capacity, **options), reference, caller


def played(caller, how, turns):
    """Has the caller step the envs so often in this way."""
    ways = [how]
    if how in ("mixed", "all at once"):
        ways = ["lockstep"] * 4 + ["masked"] * 3 + ["resets_some"]
    if how == "mixed":
        ways += ["some"] * 3
    if how == "mixed" and caller.reference.mode != "Disabled":
        ways += ["rolled", "piped"]
    for _ in range(turns):
        getattr(caller, caller.rng.choice(ways))()


# ---- what is sampled is what was seen ------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    num_envs=st.integers(1, 4),
    workers=st.integers(0, 2),
    mode=st.sampled_from(ALL_MODES),
    kind=st.sampled_from(KINDS),
    actions=st.sampled_from(list(ACTIONS)),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    how=st.sampled_from(WAYS),
    n_step=st.integers(1, 4),
    discount=st.sampled_from([0.5, 0.9, 1.0]),
    stack=st.integers(1, 4),
    padding=st.sampled_from(["reset", "zero"]),
    depth=st.integers(16, 40) | st.just(1000),
    less=st.integers(0, 3),
    said=st.booleans(),
    prioritized=st.sampled_from([None, 0.6]),
    on_disk=st.booleans(),
    turns=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_samples_are_what_the_caller_has_seen(
    num_envs, workers, mode, kind, actions, lengths, how, n_step, discount, stack, padding, depth,
    less, said, prioritized, on_disk, turns, seed,
):  # fmt: skip
    if how in ("rolled", "piped") and mode is AutoresetMode.DISABLED:
        how = "lockstep"
    fns = numbered(num_envs, kind, actions, lengths, stack=stack, padding=padding)
    capacity = max(1, depth * num_envs - min(less, num_envs - 1))
    envs = ShmVectorEnv(
        fns,
        num_workers=min(workers, num_envs),
        autoreset_mode=mode,
        batch_size=1 + seed % num_envs if how == "partial" else None,
    )
    folder = tempfile.TemporaryDirectory() if on_disk else nullcontext()
    given_stack = {"frame_stack": "auto"}
    if said and kind in ("box", "image"):
        given_stack = {"frame_stack": stack, "padding": padding}
    with folder as path, closing(envs):
        replay, reference, caller = watched(
            envs,
            capacity,
            n_step=n_step,
            discount=discount,
            prioritized=prioritized,
            on_disk=path and os.path.join(path, "replay"),
            seed=seed,
            **given_stack,
        )
        with closing(replay):
            reference.check_all(replay)
            if how == "piped":
                caller.pipeline = Pipeline(
                    envs, lambda seen, env_ids: caller.actions(len(env_ids)), deterministic=True
                )
            if how != "partial":
                caller.reset(seed=seed)
            for count in turns:
                played(caller, how, count)
                if reference.check_all(replay):
                    assert_typed(replay.sample(3), 3, envs)


def test_a_hand_computed_example():
    """Two episodes of three steps: one terminates, one is truncated."""
    with ShmVectorEnv([lambda: Numbered(0, lengths=(3,))], num_workers=1) as envs:
        replay = Replay(envs, 100, n_step=2, discount=0.5, seed=0)
        envs.reset(seed=0)
        for action in range(3, 8):  # the fourth of them resets
            envs.step([action])
        batch = replay.sample(200)
        rows = {int(number): row for row, number in enumerate(batch.observations[:, 1])}
        # Of observation 5, which begins the second episode, only one step was made.
        assert sorted(rows) == [1, 2, 3]
        rewards = {number: reward_of(number) for number in range(1, 6)}
        expected = {  # action, reward, next observation, terminated, truncated, discount
            1: (3, rewards[2] + 0.5 * rewards[3], 3, False, False, 0.25),
            2: (4, rewards[3] + 0.5 * rewards[4], 4, False, True, 0.25),
            3: (5, rewards[4], 4, False, True, 0.5),
        }
        for number, row in rows.items():
            found = (
                batch.actions[row],
                batch.rewards[row],
                batch.next_observations[row, 1],
                batch.terminations[row],
                batch.truncations[row],
                batch.discounts[row],
            )
            assert found == expected[number]
        # The second episode is terminated and truncated at once.
        for _ in range(2):
            envs.step([3])
        batch = replay.sample(200)
        last = batch.next_observations[:, 1] == 8
        assert last.sum() and batch.terminations[last].all() and batch.truncations[last].all()
        assert not batch.discounts[last].any()


@pytest.mark.deep
@pytest.mark.parametrize("prioritized", [None, 0.6])
def test_its_length_is_the_number_of_transitions_that_can_be_sampled(prioritized):
    """Of one step; of several, the newest ones are still to come."""
    with ShmVectorEnv(numbered(2, "box", "box", lengths=(9,)), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 60, prioritized=prioritized, seed=0)
        caller.reset(seed=0)
        for _ in range(6):
            played(caller, "lockstep", 7)
            found = reference.check_all(replay)
            assert len(replay) == replay.stats().transitions == found


@pytest.mark.deep
def test_every_transition_is_as_likely():
    with ShmVectorEnv(numbered(3), num_workers=1, autoreset_mode="SameStep") as envs:
        replay, reference, caller = watched(envs, 60, seed=5)
        caller.reset(seed=0)
        played(caller, "masked", 60)
        there = len(replay)
        draws = replay.sample(500 * there)
        keys = [key_of(row) for row in draws.observations]
        counts = np.array([keys.count(key) for key in set(keys)])
        assert len(counts) == there
        assert_as_likely(counts, np.full(there, 1 / there))


def assert_as_likely(counts, chances):
    """Asserts that counts of draws are as these chances say, by a bound of eight deviations."""
    expected = counts.sum() * np.asarray(chances)
    found = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    assert found < freedom + 8 * math.sqrt(2 * freedom)


@pytest.mark.deep
@pytest.mark.parametrize(
    "options, mode",
    paired(
        [
            {"copy": False},
            {"caller_steps": True, "num_workers": 2},
            {"overlap": 2},
            {"spare_envs": 2},
            {"compile_wrappers": False},
            {"context": "spawn"},
            {"observation_mode": "different"},
        ],
        ["NextStep", "SameStep"],
    ),
)
def test_whatever_the_options(options, mode):
    options = {"num_workers": 1, **options}
    life = "copy" if "spare_envs" in options else None
    fns = numbered(4, life=life)
    with ShmVectorEnv(fns, autoreset_mode=mode, **options) as envs:
        replay, reference, caller = watched(envs, 80, n_step=2, seed=1)
        caller.reset(seed=0)
        for _ in range(3):
            played(caller, "mixed", 15)
            assert reference.check_all(replay)


@pytest.mark.deep
def test_a_pipeline_that_hands_out_transitions():
    with ShmVectorEnv(numbered(4, lengths=(3, 6)), num_workers=2) as envs:
        replay = Replay(envs, 10_000, seed=0)
        pipeline = Pipeline(envs, lambda seen, env_ids: np.full(len(env_ids), 4))
        pipeline.reset(seed=0)
        handed, sampled = {}, []
        for turn, found in enumerate(pipeline):
            for row in np.flatnonzero(found.valid):
                key = key_of(found.observations[row])
                handed[key] = [
                    found.observations[row].copy(),
                    found.next_observations[row].copy(),
                    found.rewards[row],
                    found.terminations[row],
                    found.truncations[row],
                ]
            if turn < 60 and turn % 10 == 9:
                sampled.append(replay.sample(200))
            if turn == 80:  # by now all that was taken before was handed out
                break
        pipeline.drop()
        assert sampled
        for batch in sampled:
            assert_whole(batch)
            for row in range(200):
                found = handed[key_of(batch.observations[row])]
                assert same(batch.observations[row], found[0])
                assert same(batch.next_observations[row], found[1])
                assert [
                    batch.rewards[row],
                    batch.terminations[row],
                    batch.truncations[row],
                ] == found[2:]


@pytest.mark.deep
@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_replay_that_begins_in_the_middle_of_episodes(mode):
    """A step from an observation that it has not seen is no transition; the one after it is."""
    fns = numbered(3, lengths=(9, 5, 2), stack=2)
    with ShmVectorEnv(fns, num_workers=2, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        over = np.zeros(3, bool)
        for _ in range(5):
            over = np.logical_or(*envs.step([3] * 3)[2:4])
            if mode is AutoresetMode.DISABLED and over.any():
                envs.reset(options={"reset_mask": over})
                over[:] = False
        if mode is AutoresetMode.SAME_STEP:
            over[:] = False
        replay = Replay(envs, 300, seed=0)
        reference = Reference(3, mode.value, 300, frame_stack=2, over=over)
        caller = Caller(envs, reference)
        for turns in (1, 2, 1, 20):
            played(caller, "lockstep", turns)
            reference.check_all(replay)
        assert len(replay) > 10


@pytest.mark.deep
def test_steps_whose_results_nobody_has_taken():
    """What follows a step that was abandoned does not follow from what was there before it."""
    with ShmVectorEnv(numbered(2, lengths=(40,)), num_workers=1) as envs:
        replay = Replay(envs, 200, seed=0)
        envs.reset(seed=0)
        for turn in range(60):
            if turn % 4 == 3:
                send_signal(envs.processes[0], signal.SIGSTOP)
                try:
                    envs.step_async([5, 5])
                    with pytest.raises(multiprocessing.TimeoutError):
                        envs.step_wait(timeout=0.001)
                finally:
                    send_signal(envs.processes[0], signal.SIGCONT)
            else:
                envs.step([turn % 5 + 3] * 2)
            if turn > 2:
                assert_whole(replay.sample(100))
        assert len(replay) > 40


@pytest.mark.deep
def test_partial_batches_that_are_discarded():
    with ShmVectorEnv(numbered(4, lengths=(40,)), num_workers=2, batch_size=2) as envs:
        replay = Replay(envs, 400, seed=0)
        envs.async_reset(seed=0)
        envs.exchange.discard()  # resets that nobody has seen begin episodes as others do
        for turn in range(60):
            idle = [env for env in range(4) if not envs.exchange.in_flight(env)]
            if idle:
                envs.send([turn % 5 + 3] * len(idle), idle)
            if turn % 7 == 6:
                envs.exchange.discard()
            else:
                envs.recv(timeout=DEADLINE_S)
            if len(replay):
                assert_whole(replay.sample(50))
        assert len(replay) >= 30


@pytest.mark.deep
@pytest.mark.parametrize("workers", [0, 2])
def test_an_env_that_raises_without_a_policy(workers):
    with ShmVectorEnv([partial(Frail, index) for index in range(3)], num_workers=workers) as envs:
        replay, reference, caller = watched(envs, 300, seed=0)
        caller.reset(seed=0)
        for _ in range(4):
            for _ in range(5):
                caller.lockstep(caller.rng.integers(50, size=3))
            with pytest.raises(LookupError):
                envs.step(np.array([4, RAISE, 5]))
            assert_whole(replay.sample(200))
            caller.reset()
            batch = replay.sample(200)  # the neighbours' steps, which nobody has seen, may be there
            assert_whole(batch)
            assert not (batch.actions >= KILL).any()


@pytest.mark.deep
def test_samples_while_envs_are_in_flight():
    with ShmVectorEnv(numbered(3), num_workers=1, autoreset_mode="SameStep") as envs:
        replay, reference, caller = watched(envs, 60, n_step=2, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 30)
        for _ in range(20):
            actions = caller.actions(3)
            envs.step_async(actions)
            reference.check_all(replay)  # what the workers write meanwhile was not taken
            caller.saw(range(3), actions, envs.step_wait())
            reference.check_all(replay)


@pytest.mark.deep
def test_samples_are_copies():
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 40, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 30)
        first, second = replay.sample(40), replay.sample(40)
        kept = first.observations.copy()
        second.observations[:] = -1
        second.next_observations[:] = -1
        second.rewards[:] = -1
        reference.check_all(replay)
        played(caller, "lockstep", 30)
        assert np.array_equal(first.observations, kept)
        reference.check_all(replay)


# ---- stacks of frames that are not what they seem ------------------------------------------------


class Skips(gym.Wrapper):
    """Makes two steps of the env for each of its own, until its episode is over."""

    def step(self, action):
        total = 0.0
        for _ in range(2):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class Reverses(gym.ObservationWrapper):
    """Shows the newest frame first."""

    def observation(self, observation):
        return observation[::-1]


class Scales(gym.ObservationWrapper):
    """Shows frames in another scale, the older ones darker than the newest."""

    def observation(self, observation):
        return observation * np.array([0.25, 0.5, 1.0])[:, None]


class Darkens(gym.ObservationWrapper):
    """Shows the oldest frame alone in another scale."""

    def observation(self, observation):
        return observation * np.array([0.25, 1.0, 1.0])[:, None]


class StepsInReset(gym.Wrapper):
    """Begins each episode with a step, as a FireReset does."""

    def reset(self, **arguments):
        self.env.reset(**arguments)
        observation, *_, info = self.env.step(4)
        return observation, info


@pytest.mark.parametrize(
    "around, first_only",
    [
        (Skips, False),
        *deep((None, False), (TimeLimit, False), (TimeLimit, True)),
        *deep(*((wrapper, False) for wrapper in (Reverses, Scales, Darkens, StepsInReset))),
    ],
)
def test_stacks_below_other_wrappers(around, first_only):
    """Observations are put together as the caller has seen them, or their steps are refused."""

    def make(index):
        env = Numbered(index, lengths=(7, 4))
        if index == 1 and first_only:  # of the same space, which is all that others must have
            env = Scales(FrameStackObservation(env, 3))
        else:
            env = FrameStackObservation(env, 3)
        if around is TimeLimit:
            return TimeLimit(env, 5)
        return env if around is None else around(env)

    fns = [partial(make, index) for index in range(2)]
    with ShmVectorEnv(fns, num_workers=1, autoreset_mode="SameStep") as envs:
        replay = Replay(envs, 200, seed=0)
        if first_only or around not in (None, TimeLimit):
            with pytest.raises(ValueError, match="with frame_stack=1"):
                envs.reset(seed=0)
                for _ in range(4):
                    envs.step([4, 5])
            return
        observations, _ = envs.reset(seed=0)
        seen = [[], []]
        last = observations.copy()
        for _ in range(30):
            observations, _, terminations, truncations, infos = envs.step([4, 5])
            for env in range(2):
                over = terminations[env] or truncations[env]
                after = infos["final_obs"][env] if over else observations[env]
                seen[env].append((last[env].tobytes(), np.array(after).tobytes()))
            last = observations.copy()
        batch = replay.sample(300)
        pairs = {pair for pairs in seen for pair in pairs}
        for row in range(300):
            found = batch.observations[row].tobytes(), batch.next_observations[row].tobytes()
            assert found in pairs


class Stumbles(Numbered):
    """Makes a step and then fails: it raises, or returns what cannot be taken."""

    def __init__(self, index):
        super().__init__(index, lengths=(50,))
        self.action_space = gym.spaces.Discrete(100)

    def step(self, action):
        observation, *results, info = super().step(action)
        if action == 80:
            raise LookupError("after the step")
        if action == 81:
            info = {"lock": threading.Lock()}
        if action == 82:
            results[0] = None
        if action == 83:
            observation = observation[:2]
        return observation, *results, info


@pytest.mark.deep
@pytest.mark.parametrize("action, mode, workers", paired([80, 81, 82, 83], ALL_MODES, [0, 1]))
def test_a_step_that_fails_after_the_env_has_made_it(action, mode, workers):
    """If the caller goes on without a reset, the next step does not follow what was recorded."""
    fns = [partial(Stumbles, index) for index in range(2)]
    with ShmVectorEnv(fns, num_workers=workers, autoreset_mode=mode) as envs:
        replay = Replay(envs, 200, seed=0)
        envs.reset(seed=0)
        for turn in range(30):
            if turn % 5 == 4:
                with pytest.raises((LookupError, TypeError, ValueError)):
                    envs.step(np.array([action, 3]))
            else:
                with suppress(RuntimeError):  # it may ask for a reset
                    envs.step(np.array([turn % 5 + 3, turn % 5 + 4]))
            if turn > 2:
                batch = replay.sample(100)
                assert_whole(batch)
                assert not (batch.actions == action).any()


@pytest.mark.deep
def test_states_that_were_set():
    with ShmVectorEnv(numbered(3, lengths=(50,)), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 300, n_step=2, seed=0)
        caller.reset(seed=0)
        for turn in range(8):
            played(caller, "lockstep", 4)
            chosen = [turn % 3] if turn < 5 else None
            replay.interrupt(chosen)
            reference.forget(chosen)
            envs.set_attr("count", [20 * turn] * 3)
            assert reference.check_all(replay)
        with pytest.raises(ValueError):
            replay.interrupt([3])


def test_transitions_by_their_indices():
    with ShmVectorEnv(numbered(3, stack=2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 90, n_step=2, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 25)
        batch = replay.sample(100)
        chosen = np.unique(batch.indices)[-20:]  # the newest of them stay for some steps
        expected_rows = vars_of(replay.at(chosen))
        played(caller, "lockstep", 2)
        for array, expected in zip(vars_of(replay.at(chosen)), expected_rows, strict=True):
            assert same(array, expected)
        batch = replay.sample(100)
        for array, expected in zip(vars_of(replay.at(batch.indices)), vars_of(batch), strict=True):
            assert same(array, expected)
        played(caller, "lockstep", 35)
        with pytest.raises(IndexError):
            replay.at(batch.indices)
        for indices in ([-1], [2**62], [-(2**62)]):
            with pytest.raises((IndexError, ValueError)):
                replay.at(indices)
        with pytest.raises((TypeError, ValueError)):
            replay.at([[0]])
        reference.check(replay.sample(100))


@pytest.mark.parametrize(
    "mode", [AutoresetMode.SAME_STEP, *deep(AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)]
)
def test_the_latest_transitions(mode):
    """Each is latest after its own step, and still after a reset alone."""
    with ShmVectorEnv(numbered(3), num_workers=1, autoreset_mode=mode) as envs:
        replay, reference, caller = watched(envs, 300, seed=0)
        assert replay.latest().tolist() == [-1, -1, -1]
        caller.reset(seed=0)
        assert replay.latest().tolist() == [-1, -1, -1]
        for _ in range(30):
            before = {key for key in reference.transitions()}
            caller.lockstep()
            expected = reference.transitions()
            new = set(expected) - before
            latest = replay.latest()
            if mode is AutoresetMode.NEXT_STEP:  # some envs have been reset instead
                stepped = [key[0] for key in sorted(new)]
                latest[np.setdiff1d(np.arange(3), stepped)] = -1
            assert ((latest >= 0) == replay.holds(latest)).all()
            if new:
                assert reference.check(replay.at(latest[latest >= 0]), expected) == new
            assert (latest[latest >= 0] % 3 == [key[0] for key in sorted(new)]).all()


@pytest.mark.deep
def test_a_step_after_something_unknown_is_not_the_latest():
    with ShmVectorEnv(numbered(2, lengths=(50,)), num_workers=1, autoreset_mode="SameStep") as envs:
        replay, reference, caller = watched(envs, 100, seed=0)
        caller.reset(seed=0)
        caller.lockstep()
        assert (replay.latest() >= 0).all()
        replay.interrupt([1])
        caller.lockstep()
        assert (replay.latest() >= 0).tolist() == [True, False]


class Large(gym.Env):
    """Its observations are of 32 KiB, each full of one number."""

    observation_space = gym.spaces.Box(0, np.inf, (64, 64), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, index):
        self.number = index * 1_000_000

    def reset(self, *, seed=None, options=None):
        self.number += 10
        self.count = 0
        return np.full((64, 64), float(self.number)), {}

    def step(self, action):
        self.number += 1
        self.count += 1
        return np.full((64, 64), float(self.number)), float(self.number), self.count == 7, False, {}


@pytest.mark.deep
@pytest.mark.parametrize("depth, workers", [(16, 2), (100, 0)])
def test_large_batches_that_are_put_together_ahead(depth, workers):
    """What is put together while the envs go on is as it was when it was drawn."""
    fns = [partial(Large, index) for index in range(2)]
    with ShmVectorEnv(fns, num_workers=workers, autoreset_mode="SameStep") as envs:
        replay = Replay(envs, depth * 2, seed=0)
        envs.reset(seed=0)
        for _ in range(depth):
            envs.step([0, 1])
        kept = []
        for turn in range(25):
            batch = replay.sample(64)
            for _ in range(turn % 12):
                envs.step([0, 1])
            before, after = batch.observations, batch.next_observations
            numbers = before[:, 0, 0]
            assert (before == numbers[:, None, None]).all()
            assert (after == numbers[:, None, None] + 1).all()
            assert np.array_equal(batch.rewards, (numbers + 1).astype(np.float32))
            assert np.array_equal(batch.actions, numbers > 900_000)
            kept.append((batch, numbers.copy()))
            if turn == 12:
                replay.sample(5)  # another size
        for batch, numbers in kept:
            assert np.array_equal(batch.observations[:, 5, 5], numbers)


@pytest.mark.parametrize("padding", ["auto", *deep("reset", "zero")])
def test_frames_of_envs_that_stack_none(padding):
    """frame_stack= puts stacks together as FrameStackObservation would have."""
    alone = numbered(2, "image", lengths=(4, 7))
    with_stacks = numbered(
        2, "image", lengths=(4, 7), stack=3, padding=padding.replace("auto", "reset")
    )
    with ShmVectorEnv(alone, num_workers=1, autoreset_mode="SameStep") as envs:
        mirror = ShmVectorEnv(with_stacks, num_workers=1, autoreset_mode="SameStep")
        with closing(mirror):
            replay = Replay(envs, 200, frame_stack=3, padding=padding, n_step=2, seed=0)
            reference = Reference(2, "SameStep", 200, frame_stack=3, n_step=2)
            caller = Caller(mirror, reference)
            envs.reset(seed=0)
            caller.reset(seed=0)
            for _ in range(30):
                actions = caller.actions(2)
                envs.step(actions)
                caller.lockstep(actions)
            assert reference.check_all(replay)


@pytest.mark.deep
def test_a_replay_that_nobody_closes_goes_with_the_envs():
    envs = ShmVectorEnv(numbered(2), num_workers=1)
    replay, reference, caller = watched(envs, 100, seed=0)
    caller.reset(seed=0)
    played(caller, "lockstep", 10)
    expected = reference.transitions()
    envs.close()
    assert reference.check(replay.sample(500)) <= set(expected)  # what was recorded is there
    assert len(replay) == len(expected)
    # That its descriptors are closed, the fixture of all tests looks at.


@pytest.mark.deep
def test_the_memory_of_a_replay_is_sealed():
    """A worker that shortened it would end the program."""
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        before = set(os.listdir("/proc/self/fd"))
        replay = Replay(envs, 100)
        for number in set(os.listdir("/proc/self/fd")) - before:
            with suppress(FileNotFoundError):
                if "memfd:shmvec" in os.readlink(f"/proc/self/fd/{number}"):
                    with pytest.raises(PermissionError):
                        os.ftruncate(int(number), 0)
        replay.close()


@pytest.mark.deep
def test_a_disk_that_is_full_is_named_and_nothing_is_left_of_what_failed(tmp_path):
    run_alone(f"import pathlib, test_replay as it; it.fill_disk(pathlib.{tmp_path!r})")


def fill_disk(tmp_path):
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 1000, seed=0, prioritized=0.6)
        caller.reset(seed=0)
        played(caller, "lockstep", 20)
        files = ("rows.bin", "replay.json", "priorities.npz")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        for most in (1000, replay.stats().nbytes + 1000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
            if most > 1000:
                replay.save(tmp_path)
            else:
                with pytest.raises(OSError, match="too large: .*rows.bin"):
                    replay.save(tmp_path)
                assert not any(tmp_path.iterdir())
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


@pytest.mark.deep
def test_a_folder_whose_description_has_other_numbers(tmp_path):
    nan, large = float("nan"), 10**400
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 100, n_step=3, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 20)
        replay.save(tmp_path)
        replay.close()
        file = tmp_path / "replay.json"
        whole = json.loads(file.read_text())
        wrong = {
            "n_step": (0, -1, 1.5, 90, None),
            "discount": (nan, 0, 1.1, large, "x"),
            "frame_stack": (0, -1, 99, "x"),
            "prioritized": (-1.0, nan, "x"),
            "depth": (0, -1, large, None),
            "newest": (1,),
            "random": (None, {}, {"bit_generator": "MT19937"}),
        }
        for name, values in wrong.items():
            for value in values:
                file.write_text(json.dumps(whole | {name: value}))
                with pytest.raises(ValueError, match="is damaged|with other observations"):
                    Replay.load(tmp_path, envs)
        for content in (b"[" * 100_000, b"[]", b"{}", b"null", b'{"format": 1}', b"\xff\xfe"):
            file.write_bytes(content)
            with row(content), pytest.raises(ValueError):
                Replay.load(tmp_path, envs)
        file.write_text(json.dumps(whole))
        again = Replay.load(tmp_path, envs)  # nothing is left of what has failed
        assert reference.check_all(again)


@pytest.mark.deep
@pytest.mark.parametrize("count", [-1, -(2**62), 2**62])
def test_a_folder_whose_counts_are_wrong(tmp_path, count):
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 100, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 20)
        replay.save(tmp_path)
        replay.close()
        about = json.loads((tmp_path / "replay.json").read_text())
        offset = {name: offset for name, offset, *_ in about["arrays"]}["committed"]
        with (tmp_path / "rows.bin").open("r+b") as file:
            file.seek(offset)
            file.write(np.int64(count).tobytes())
        try:
            again = Replay.load(tmp_path, envs)
        except (ValueError, OSError):
            return
        envs.reset()
        for _ in range(10):
            envs.step([3, 3])
        assert 0 <= len(again) <= 100
        again.sample(100)


@pytest.mark.deep
def test_a_replay_on_a_disk_goes_on_in_its_folder(tmp_path):
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 80, seed=0, on_disk=tmp_path / "rows")
        caller.reset(seed=0)
        for _ in range(3):
            played(caller, "lockstep", 23)
            there = reference.check_all(replay)
            replay.close()
            replay = Replay.load(tmp_path / "rows", envs, on_disk=tmp_path / "rows")
            assert reference.check_all(replay) == there
            reference.forget()
        replay.close()
        with pytest.raises(FileExistsError, match="holds a replay"):
            Replay(envs, 80, on_disk=tmp_path / "rows")


@pytest.mark.deep
def test_an_evaluation_in_between():
    with ShmVectorEnv(numbered(2, lengths=(5, 3)), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 400, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 10)
        evaluate(envs, lambda seen, env_ids: np.full(len(env_ids), 4), episodes=6)
        assert_whole(replay.sample(500))
        caller.reset()
        played(caller, "lockstep", 10)
        assert_whole(replay.sample(500))


@pytest.mark.deep
@pytest.mark.parametrize("how", ["lockstep", "piped", "rolled"])
def test_workers_that_are_recycled(how):
    fns = numbered(4, life="process", lengths=(4, 9))
    with ShmVectorEnv(fns, num_workers=2, recycle_after=7) as envs:
        replay, reference, caller = watched(envs, 400, n_step=2, seed=0)
        caller.reset(seed=0)
        for _ in range(4):
            played(caller, how, 12)
            assert reference.check_all(replay)
        assert envs.exchange.restarts(0)
        envs.restart([1])
        played(caller, how, 12)
        assert reference.check_all(replay)


class Anything(Numbered):
    """A number, and beside it a sample of any space; it takes actions of any space."""

    def __init__(self, index, seen, acted):
        super().__init__(index, lengths=(3, 5))
        self.beside, self.action_space = deepcopy(seen), deepcopy(acted)
        self.observation_space = gym.spaces.Tuple((gym.spaces.Discrete(1 << 22), self.beside))
        self.beside.seed(index)

    def _observation(self, action):
        self.number += 1
        return self.index << 16 | self.number, self.beside.sample()


fixed = st.one_of(
    boxes(),
    st.builds(
        lambda n, start: gym.spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(gym.spaces.MultiDiscrete),
    st.integers(1, 4).map(gym.spaces.MultiBinary),
)


@pytest.mark.deep
@settings(max_examples=25, deadline=None)
@given(
    seen=spaces(fixed),
    acted=spaces(fixed),
    workers=st.integers(0, 1),
    mode=st.sampled_from(ALL_MODES),
    saved=st.booleans(),
)
def test_spaces_of_all_kinds(seen, acted, workers, mode, saved):
    fns = [partial(Anything, index, seen, acted) for index in range(2)]
    with (
        tempfile.TemporaryDirectory() as folder,
        ShmVectorEnv(fns, num_workers=workers, autoreset_mode=mode) as envs,
    ):
        replay, reference, caller = watched(envs, 60, seed=0)
        caller.reset(seed=0)
        for _ in range(2):
            played(caller, "all at once", 20)
            assert reference.check_all(replay)
        if saved:
            replay.save(folder)
            replay.close()
            replay = Replay.load(folder, envs)
            assert reference.check_all(replay)
        replay.close()


@pytest.mark.deep
@pytest.mark.parametrize("workers", [0, 1])
def test_actions_that_do_not_fit_their_space(workers):
    """Envs are given them as they are; the steps are no transitions, for want of a row."""
    with ShmVectorEnv(numbered(2, "image", "box", lengths=(6,)), num_workers=workers) as envs:
        replay, reference, caller = watched(envs, 300, n_step=2, seed=0)
        caller.reset(seed=0)
        for _ in range(8):
            played(caller, "lockstep", 4)
            actions = [np.zeros(3, np.float32)] * 2
            over = list(reference.over)
            results = envs.step(actions)
            for env in range(2):
                if not over[env]:
                    reference.forget([env])
            caller.saw(range(2), actions, results)
            assert reference.check_all(replay)


@pytest.mark.deep
def test_a_replay_that_is_refused_leaves_what_its_folder_holds(tmp_path):
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 80, seed=0, on_disk=tmp_path)
        caller.reset(seed=0)
        played(caller, "lockstep", 20)
        there = reference.check_all(replay)
        replay.close()
        with pytest.raises(FileExistsError, match="holds a replay"):
            Replay(envs, 10**12, on_disk=tmp_path)
        again = Replay.load(tmp_path, envs)
        assert reference.check_all(again) == there
        with pytest.raises(ValueError, match="close"):  # two at once
            Replay(envs, 80)
        again.close()
        again = Replay.load(tmp_path, envs)
        assert reference.check_all(again) == there


# ---- faults --------------------------------------------------------------------------------------

KILL, EXIT, RAISE, SLEEP = range(90, 94)  # actions
FAILS_IN_RESET = 95  # the reset after it raises once
RESTART = FaultPolicy(
    on_crash="restart", on_error="restart", on_timeout="restart", step_timeout=1.0,
    max_restarts=10_000, backoff_s=0,
)  # fmt: skip
RESET = FaultPolicy(
    on_crash="restart", on_error="reset", on_timeout="reset", step_timeout=1.0,
    max_restarts=10_000, backoff_s=0,
)  # fmt: skip


class Frail(Numbered):
    """Fails where its action says so."""

    def __init__(self, index, lengths=(9, 30)):
        super().__init__(index, lengths=lengths, life="process")
        self.action_space = gym.spaces.Discrete(100)
        self.fails_in_reset = False

    def reset(self, **how):
        if self.fails_in_reset:
            self.fails_in_reset = False
            raise LookupError("in the reset")
        return super().reset(**how)

    def step(self, action):
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == EXIT:
            os._exit(7)
        elif action == RAISE:
            raise LookupError("as asked", self.index)
        elif action == SLEEP:
            time.sleep(DEADLINE_S)
        self.fails_in_reset |= bool(action == FAILS_IN_RESET)
        return super().step(action)


def some_faults(caller, faults, likely=0.04):
    """Actions, of which some are faults."""
    actions = caller.rng.integers(90, size=caller.envs.num_envs)
    chosen = caller.rng.random(len(actions)) < likely
    actions[chosen] = caller.rng.choice(faults, chosen.sum())
    return actions


FAULTS = [(RESTART, [KILL, EXIT, RAISE]), (RESET, [KILL, RAISE]), (RESET, [FAILS_IN_RESET])]


@pytest.mark.parametrize(
    "how, policy_and_faults, mode, workers",
    paired(
        ["lockstep", "masked", "some", "partial"] * 3,
        FAULTS,
        [*ALL_MODES, *ALL_MODES[::-1]],
        [1, 2],
    ),
)
def test_no_sample_holds_a_step_that_failed(mode, policy_and_faults, workers, how):
    policy, faults = policy_and_faults
    fns = [partial(Frail, index) for index in range(4)]
    size = 2 if how == "partial" else None
    with ShmVectorEnv(
        fns, num_workers=workers, autoreset_mode=mode, faults=policy, batch_size=size
    ) as envs:
        replay, reference, caller = watched(envs, 400, n_step=2, seed=0)
        if how != "partial":
            caller.reset(seed=0)
        for _ in range(4):
            for _ in range(30):
                getattr(caller, how)(some_faults(caller, faults))
            assert reference.check_all(replay)
            batch = replay.sample(500)
            assert not ((batch.actions >= KILL) & (batch.actions < FAILS_IN_RESET)).any()
        if how != "partial" and FAILS_IN_RESET not in faults:  # there it depends on who is first
            assert sum(envs.exchange.restarts(env) for env in range(4))


@pytest.mark.deep
@pytest.mark.parametrize("policy", [RESTART, RESET])
def test_no_sample_holds_a_step_that_took_too_long(policy):
    with ShmVectorEnv(
        [partial(Frail, index) for index in range(3)], num_workers=2, faults=policy
    ) as envs:
        replay, reference, caller = watched(envs, 300, seed=0)
        caller.reset(seed=0)
        for env in range(3):
            for _ in range(6):
                caller.lockstep(some_faults(caller, [RAISE], 0.0))
            assert reference.check_all(replay)
            actions = np.full(3, 4)
            actions[env] = SLEEP
            caller.lockstep(actions)
            assert not (replay.sample(300).actions == SLEEP).any()
            reference.check_all(replay)


@pytest.mark.deep
def test_a_time_limit_without_a_policy():
    fns = [partial(Frail, index, (50,)) for index in range(2)]
    with ShmVectorEnv(fns, num_workers=1, step_timeout=1.0) as envs:
        replay = Replay(envs, 100, seed=0)
        envs.reset(seed=0)
        for _ in range(5):
            envs.step([4, 5])
        with pytest.raises(EnvTimeoutError):
            envs.step([4, SLEEP])
        assert_whole(replay.sample(100))
        envs.close(terminate=True)


@pytest.mark.deep
@pytest.mark.parametrize("how", ["partial", "rolled"])
def test_workers_that_are_killed_at_any_moment(how):
    """Rows that a worker was writing as it died are nobody's."""
    fns = [partial(Frail, index, (5, 40)) for index in range(4)]
    kills = threading.Event()
    killed = []

    def kill():
        rng = np.random.default_rng(0)
        until = time.monotonic() + DEADLINE_S
        while len(killed) < 15 and time.monotonic() < until and not kills.is_set():
            kills.wait(float(rng.random()) * 0.04)
            process = envs.processes[int(rng.integers(2))]
            if process.pid not in killed:
                with suppress(OSError, ValueError, AttributeError):
                    process.kill()  # it may be going, or just be starting
                    killed.append(process.pid)

    envs = ShmVectorEnv(
        fns,
        num_workers=2,
        autoreset_mode="SameStep",
        faults=RESTART,
        batch_size=3 if how == "partial" else None,
    )
    with envs:
        replay, reference, caller = watched(envs, 200, n_step=3, seed=0)
        caller.space = gym.spaces.Discrete(50)
        if how != "partial":
            caller.reset(seed=0)
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            turns = 0
            while killer.is_alive() or turns % 20:
                getattr(caller, how)()
                turns += 1
                if turns % 20 == 0:
                    reference.check_all(replay)
        finally:
            kills.set()
            killer.join(DEADLINE_S)
        assert len(killed) == 15
        for _ in range(30):
            getattr(caller, how)()
        assert reference.check_all(replay) > 30


# ---- the same run again --------------------------------------------------------------------------


@pytest.mark.parametrize("mode, prioritized", paired(reversed(ALL_MODES), [0.7, None]))
def test_the_same_seed_gives_the_same_batches_for_any_number_of_workers(mode, prioritized):
    def run(workers, seed=3):
        fns = numbered(5, "dict", lengths=(4, 1, 9))
        with ShmVectorEnv(fns, num_workers=workers, autoreset_mode=mode) as envs:
            replay = Replay(envs, 100, n_step=2, prioritized=prioritized, seed=seed)
            caller = Caller(envs, Reference(5, mode.value, 100))
            caller.reset(seed=1)
            found = []
            for _ in range(8):
                played(caller, "all at once", 8)
                batch = replay.sample(32)
                found.append(vars_of(batch))
                if prioritized:
                    replay.update_priorities(batch.indices, batch.rewards.astype(float) ** 2 + 0.1)
            return found

    first = run(0)
    for workers in (1, 2, 3):
        assert same(run(workers), first)
    assert not same(run(1, seed=4), first)


def vars_of(batch):
    """The arrays of a batch."""
    return [getattr(batch, name) for name in (*FIELDS, "indices", "weights")]


# ---- priorities ----------------------------------------------------------------------------------


def priority_of(numbers):
    """A priority for the transition that begins with the observation of this number."""
    return 0.1 + (np.asarray(numbers) * 7 % 13).astype(float)


def with_priorities(replay, draws=4000):
    """Gives each transition its priority; returns how many there are."""
    batch = replay.sample(draws)
    replay.update_priorities(batch.indices, priority_of(batch.observations[:, 1]))
    return len(np.unique(batch.observations[:, :2], axis=0))


@pytest.mark.parametrize("alpha, capacity", paired([0.5, 1.0], [48, 1000]))
def test_draws_are_as_frequent_as_priorities_say(alpha, capacity):
    with ShmVectorEnv(numbered(3), num_workers=1, autoreset_mode="SameStep") as envs:
        replay, reference, caller = watched(envs, capacity, prioritized=alpha, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 25)
        assert with_priorities(replay) == len(replay)
        beta = 0.4
        batch = replay.sample(40_000, beta=beta)
        keys, places, counts = np.unique(
            batch.observations[:, :2], axis=0, return_inverse=True, return_counts=True
        )
        assert len(keys) == len(replay)
        chances = priority_of(keys[:, 1]) ** alpha
        chances /= chances.sum()
        assert_as_likely(counts, chances)
        # Weights are (N * P) ** -beta, scaled so that the greatest is 1.
        weights = (len(replay) * chances[places.ravel()]) ** -beta
        np.testing.assert_allclose(batch.weights, weights / weights.max(), rtol=1e-4)


@pytest.mark.deep
def test_weights_are_one_without_priorities_and_with_beta_zero():
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        for prioritized in (None, 0.6):
            replay, reference, caller = watched(envs, 100, prioritized=prioritized, seed=0)
            caller.reset(seed=0)
            played(caller, "lockstep", 20)
            beta = 0.0 if prioritized else 0.4
            if prioritized:
                with_priorities(replay)
            assert (replay.sample(50, beta=beta).weights == 1).all()
            replay.close()


@pytest.mark.deep
def test_new_transitions_are_sampled_soon():
    """They have the greatest priority there was, so that each is seen once before long."""
    with ShmVectorEnv(numbered(2, lengths=(99,)), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 1000, prioritized=1.0, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 20)
        batch = replay.sample(2000)
        replay.update_priorities(batch.indices, np.full(2000, 1e-3))
        top = batch.indices[:1]
        replay.update_priorities(top, np.array([5.0]))
        caller.lockstep()
        numbers = replay.sample(900).observations[:, 1]
        newest = (numbers == numbers.max()).sum()
        # Two new ones and the one that was set share almost all draws.
        assert 450 < newest < 750


@pytest.mark.deep
def test_priorities_of_transitions_that_are_overwritten_change_nothing():
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 60, prioritized=1.0, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 40)
        stale = replay.sample(2000).indices
        played(caller, "lockstep", 45)  # once round: all of them are overwritten
        assert with_priorities(replay) == len(replay)
        replay.update_priorities(stale, np.full(len(stale), 1e6))
        reference.check_all(replay)
        batch = replay.sample(40_000)
        keys, counts = np.unique(batch.observations[:, :2], axis=0, return_counts=True)
        chances = priority_of(keys[:, 1])
        assert_as_likely(counts, chances / chances.sum())


@pytest.mark.deep
def test_indices_name_transitions_as_long_as_these_are_there():
    """A priority given after many more steps is still that of the transition sampled."""
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 200, prioritized=1.0, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 70)
        batch = replay.sample(1)
        key = key_of(batch.observations[0])
        played(caller, "lockstep", 15)
        everything = replay.sample(8000).indices
        replay.update_priorities(everything, np.full(len(everything), 1e-3))
        replay.update_priorities(batch.indices, np.array([1e6]))
        draws = {key_of(row) for row in replay.sample(200).observations}
        assert key in draws and len(draws) < 10


@pytest.mark.deep
@pytest.mark.parametrize("zero, exponent", [(0.0, 0.6), (1e-30, 0.6), (0.0, 60.0)])
def test_priorities_of_nothing(zero, exponent):
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 100, prioritized=exponent, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 20)
        batch = replay.sample(2000)
        replay.update_priorities(batch.indices, np.full(2000, zero))
        batch = replay.sample(100)
        reference.check(batch)
        assert np.isfinite(batch.weights).all() and (batch.weights > 0).all()


# ---- on disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stack, prioritized, on_disk, mode",
    first(
        [
            (3, 0.6, False, ALL_MODES[0]),
            (1, None, True, ALL_MODES[1]),
            (3, 0.6, False, ALL_MODES[2]),
        ]
    ),
)
def test_a_replay_is_saved_and_loaded(tmp_path, mode, stack, prioritized, on_disk):
    """Also in the middle of episodes: what follows does not follow from what was saved."""
    fns = numbered(3, stack=stack, lengths=(8, 5))
    with ShmVectorEnv(fns, num_workers=1, autoreset_mode=mode) as envs:
        replay, reference, caller = watched(
            envs, 90, n_step=2, prioritized=prioritized, seed=0,
            on_disk=tmp_path / "rows" if on_disk else None,
        )  # fmt: skip
        caller.reset(seed=0)
        played(caller, "lockstep", 33)
        found = reference.check_all(replay)
        there = len(replay)
        if prioritized:
            batch = replay.sample(5000)
            numbers = batch.observations[:, -1, 1]
            replay.update_priorities(batch.indices, 0.1 + 10.0 * (numbers == numbers.max()))
        replay.save(tmp_path / "saved")
        played(caller, "lockstep", 1)
        reference.check_all(replay)
    reference.logs = [log[:] for log in reference.logs]
    with ShmVectorEnv(fns, num_workers=2, autoreset_mode=mode) as envs:
        envs.reset(seed=7)
        over = np.zeros(3, bool)
        for _ in range(3):
            over = np.logical_or(*envs.step([4] * 3)[2:4])
        # These are other envs, in the middle of their episodes.
        replay = Replay.load(tmp_path / "saved", envs)
        assert len(replay) == there
        transitions = reference.transitions()
        assert len(reference.check(replay.sample(30 * there), transitions)) == found
        if prioritized:
            numbers = [key_of(row, True)[1] for row in replay.sample(1000).observations]
            assert numbers.count(max(numbers)) > 300
        assert not over.any()
        for _ in range(2):
            envs.step([6] * 3)
        for batch in (replay.sample(500), replay.sample(500)):
            before, after = batch.observations, batch.next_observations
            if stack > 1:
                before, after = before[:, -1], after[:, -1]
            gap = after[:, 1] - before[:, 1]
            assert ((gap == 1) | (gap == 2)).all()
            assert (np.abs(after[:, 3] - before[:, 3] - gap) < 1e-9).all()


@pytest.mark.deep
@settings(max_examples=10, deadline=None)
@given(
    mode=st.sampled_from(ALL_MODES),
    n_step=st.integers(1, 3),
    stack=st.integers(1, 3),
    padding=st.sampled_from(["reset", "zero"]),
    prioritized=st.sampled_from([None, 0.6, 1.0]),
    depth=st.integers(16, 60),
    turns=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_a_loaded_replay_draws_what_the_saved_one_draws(
    mode, n_step, stack, padding, prioritized, depth, turns, seed
):
    fns = numbered(2, stack=stack, padding=padding)
    with (
        tempfile.TemporaryDirectory() as folder,
        ShmVectorEnv(fns, num_workers=0, autoreset_mode=mode) as envs,
        ShmVectorEnv(fns, num_workers=0, autoreset_mode=mode) as others,
    ):
        replay, reference, caller = watched(
            envs, 2 * depth, n_step=n_step, prioritized=prioritized, seed=seed
        )
        callers = caller, Caller(others, Reference(2, AutoresetMode(mode).value, 2 * depth))
        for each in callers:
            each.reset(seed=seed)
        for count in turns:
            for each in callers:
                played(each, "all at once", count)
            latest = replay.latest()
            if prioritized and (latest >= 0).any():  # the largest will be gone
                replay.update_priorities(latest[latest >= 0], [9.0] * int((latest >= 0).sum()))
        if prioritized:
            indices = np.arange(2 * replay.recorded)
            indices = indices[replay.holds(indices)]
            replay.update_priorities(indices, np.ones(len(indices)))
        replay.save(folder)
        loaded = Replay.load(folder, others)
        for count in turns:
            for each in callers:
                each.reset()
                played(each, "all at once", count)
            if replay.holds(np.arange(2 * replay.recorded)).any():
                assert same(vars_of(loaded.sample(300)), vars_of(replay.sample(300)))
        reference.check_all(replay)


LEARNER = """
import sys
from functools import partial
from replay_reference import Numbered
from shmvec import Replay, ShmVectorEnv

if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else {folder!r}
    fns = [partial(Numbered, index, lengths=(7, 4)) for index in range(3)]
    envs = ShmVectorEnv(fns, num_workers=2, autoreset_mode="SameStep")
    replay = Replay(envs, {capacity}, on_disk=folder, seed=0, prioritized={prioritized})
    envs.reset(seed=0)
    for turn in range(10**9):
        envs.step([turn % 5 + 3] * 3)
        if turn == {turns}:
            replay.sample(10)
            print("there", flush=True)
"""


@pytest.mark.parametrize(
    "capacity, turns, prioritized",
    [(300, 1000, 0.6), *deep((10_000, 200, None), (300, 1003, None))],
)
def test_a_learner_that_is_killed_leaves_what_it_has_seen(tmp_path, capacity, turns, prioritized):
    folder = tmp_path / "rows"
    process = run_script(
        LEARNER.format(folder=str(folder), capacity=capacity, turns=turns, prioritized=prioritized)
    )
    try:
        line = process.stdout.readline()
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        errors = process.stderr.read()
        process.stdout.close()
        process.stderr.close()
    assert line == "there\n", errors
    fns = [partial(Numbered, index, lengths=(7, 4)) for index in range(3)]
    with ShmVectorEnv(fns, num_workers=1, autoreset_mode="SameStep") as envs:
        replay = Replay.load(folder, envs)
        assert len(replay) >= min(0.7 * 3 * turns, 0.7 * capacity)
        batch = replay.sample(2000)
        assert_whole(batch)
        assert set(batch.observations[:, 0]) == {0, 1, 2}
        envs.reset(seed=0)
        for _ in range(10):
            envs.step([3] * 3)
        batch = replay.sample(2000)
        gap = batch.next_observations[:, 1] - batch.observations[:, 1]
        assert (gap == 1).all()


# ---- what cannot be ------------------------------------------------------------------------------


BAD_ARGUMENTS = [
    ({"capacity": 0}, ValueError, "capacity"),
    ({"capacity": 30}, ValueError, "at least 32"),
    ({"n_step": 100}, ValueError, "at least"),
    ({"capacity": -5}, ValueError, "capacity"),
    ({"capacity": 2.5}, TypeError, "capacity"),
    ({"capacity": "many"}, TypeError, "capacity"),
    ({"capacity": 10**12}, (OSError, MemoryError, ValueError), r"\d"),
    ({"capacity": 10**30}, (OSError, MemoryError, ValueError), r"\d"),
    ({"n_step": 0}, ValueError, "n_step"),
    ({"n_step": 1.5}, TypeError, "n_step"),
    ({"discount": 1.5}, ValueError, "discount"),
    ({"discount": -0.1}, ValueError, "discount"),
    ({"discount": math.nan}, ValueError, "discount"),
    ({"frame_stack": 0}, ValueError, "frame_stack"),
    ({"frame_stack": "three"}, (TypeError, ValueError), "frame_stack"),
    ({"padding": "mirror"}, ValueError, "padding"),
    ({"prioritized": 0.0}, ValueError, "prioritized"),
    ({"prioritized": -1.0}, ValueError, "prioritized"),
    ({"prioritized": math.nan}, ValueError, "prioritized"),
    ({"prioritized": "yes"}, TypeError, "."),
    ({"on_disk": 5}, TypeError, "."),
    ({"seed": "mine"}, (TypeError, ValueError), "."),
    ({"seed": -1}, ValueError, "."),
]


def test_bad_arguments():
    with ShmVectorEnv(numbered(2, stack=3), num_workers=1) as envs:
        for options, error, message in BAD_ARGUMENTS:
            with row(options), pytest.raises(error, match=message):
                Replay(envs, **{"capacity": 100, **options})
        # Nothing is changed by it.
        replay, reference, caller = watched(envs, 100, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 10)
        assert reference.check_all(replay)


class Speaks(Numbered):
    """Its observations, or actions, have no fixed size."""

    def __init__(self, observations=None, actions=None):
        super().__init__(0)
        self.observation_space = observations or self.observation_space
        self.action_space = actions or self.action_space


WORDS = gym.spaces.Sequence(gym.spaces.Box(0, 1, (2,)))


@pytest.mark.deep
def test_envs_whose_results_have_no_rows():
    for kind, options, error, message in [
        (partial(Speaks, gym.spaces.Text(5)), {}, TypeError, "Text"),
        (partial(Speaks, gym.spaces.Dict(a=gym.spaces.Text(5))), {}, TypeError, "Text"),
        (partial(Speaks, None, WORDS), {}, TypeError, "Sequence"),
        (partial(Numbered, 0), {"shared_memory": False}, TypeError, "shared_memory=True"),
    ]:
        with row(kind, options), ShmVectorEnv([kind] * 2, num_workers=1, **options) as envs:
            with pytest.raises(error, match=message):
                Replay(envs, 100)


@pytest.mark.deep
def test_other_vector_envs_and_closed_ones():
    reference = sync_env(numbered(1), MODES[0])
    with closing(reference), pytest.raises(TypeError, match="ShmVectorEnv"):
        Replay(reference, 100)
    envs = ShmVectorEnv(numbered(2), num_workers=1)
    with pytest.raises(TypeError, match="wrap the single envs"):  # it would record what is below
        Replay(gym.wrappers.vector.TransformReward(envs, lambda reward: reward / 16), 100)
    replay, reference, caller = watched(envs, 100, seed=0)
    caller.reset(seed=0)
    played(caller, "lockstep", 10)
    envs.close()
    with pytest.raises((gym.error.ClosedEnvironmentError, RuntimeError, ValueError), match="clos"):
        Replay(envs, 100)
    replay.close()
    replay.close()


@pytest.mark.deep
def test_a_closed_replay_leaves_the_envs_alone():
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 100, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 10)
        replay.close()
        there = reference.transitions()
        played(caller, "lockstep", 10)
        assert reference.check(replay.sample(1000), there) == set(there)  # what was recorded
        again, reference, caller = watched(envs, 100, seed=0)
        played(caller, "lockstep", 20)
        assert reference.check_all(again)
        with pytest.raises(ValueError, match="close"):
            Replay(envs, 100)
        replay.close()  # leaves the other one alone
        played(caller, "lockstep", 5)
        assert reference.check_all(again)
    reference.check_all(again)


def test_samples_that_cannot_be():
    with ShmVectorEnv(numbered(2, lengths=(9,)), num_workers=1) as envs:
        replay = Replay(envs, 100, n_step=3, prioritized=0.6)
        with pytest.raises(RuntimeError, match="sample"):
            replay.sample(1)
        envs.reset(seed=0)
        envs.step([3, 3])
        envs.step([3, 3])
        with pytest.raises(RuntimeError, match="sample"):
            replay.sample(1)
        envs.step([3, 3])
        assert len(replay.sample(7).indices) == 7
        for size, error in ((0, ValueError), (-1, ValueError), (2.5, TypeError), ("a", TypeError)):
            with pytest.raises(error):
                replay.sample(size)
        for beta in (-0.1, 1.5, math.nan):
            with pytest.raises(ValueError, match="beta"):
                replay.sample(1, beta=beta)
        with pytest.raises((ImportError, RuntimeError, ValueError)):
            replay.sample(1, device="nonsense")


BAD_PRIORITIES = [
    ([0, 1], [1.0], ValueError),
    ([[0, 1]], [1.0, 1.0], ValueError),
    ([0, 1], [1.0, math.nan], ValueError),
    ([0, 1], [1.0, math.inf], ValueError),
    ([0, 1], [1.0, -1.0], ValueError),
    ([0.5, 1.5], [1.0, 1.0], TypeError),
    (["a", "b"], [1.0, 1.0], (TypeError, ValueError)),
    ([0, 1], ["a", "b"], (TypeError, ValueError)),
    ([0, -1], [1.0, 1.0], (ValueError, IndexError)),
    ([0, 2**62], [1.0, math.nan], ValueError),
]


def test_bad_priorities():
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 100, prioritized=1.0, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 20)
        before = with_priorities(replay)
        for indices, priorities, error in BAD_PRIORITIES:
            with row(indices, priorities), pytest.raises(error):
                replay.update_priorities(np.array(indices), np.array(priorities))
        # None of them was set.
        batch = replay.sample(20_000)
        keys, counts = np.unique(batch.observations[:, :2], axis=0, return_counts=True)
        assert len(keys) == before
        chances = priority_of(keys[:, 1])
        assert_as_likely(counts, chances / chances.sum())
        replay.update_priorities(np.zeros(0, np.int64), np.zeros(0))


def test_folders_that_do_not_load(tmp_path):
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 100, prioritized=0.6, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 20)
        replay.save(tmp_path / "saved")
        replay.close()
        with pytest.raises(OSError):
            Replay.load(tmp_path / "nothing", envs)
        for kind, count in (("image", 2), ("box", 3)):
            with ShmVectorEnv(numbered(count, kind), num_workers=1) as others:
                with pytest.raises(ValueError):
                    Replay.load(tmp_path / "saved", others)
        files = sorted(path for path in (tmp_path / "saved").iterdir())
        assert "replay.json" in {path.name for path in files}
        for path in files:
            kept = path.read_bytes()
            for damaged in (kept[: len(kept) // 2], b""):
                path.write_bytes(damaged)
                with pytest.raises((ValueError, OSError)):
                    Replay.load(tmp_path / "saved", envs)
            path.write_bytes(kept)
        assert len(Replay.load(tmp_path / "saved", envs)) > 10


@pytest.mark.deep
def test_a_folder_that_is_in_use_or_holds_other_things(tmp_path):
    (tmp_path / "file").write_text("a text")
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        with pytest.raises((OSError, ValueError)):
            Replay(envs, 100, on_disk=tmp_path / "file")
        assert (tmp_path / "file").read_text() == "a text"


@pytest.mark.deep
def test_tensors(gpu_in_use):
    torch = pytest.importorskip("torch")
    with ShmVectorEnv(numbered(2, "dict", "dict"), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 100, prioritized=0.6, seed=0)
        caller.reset(seed=0)
        played(caller, "lockstep", 20)
        for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
            batch = replay.sample(50, device=device)
            assert batch.rewards.device.type == device
            replay.update_priorities(batch.indices, batch.rewards.abs() + 0.1)
            for row in range(50):
                number = int(batch.observations["what"][row, 0, 0])
                assert int(batch.next_observations["what"][row, 0, 0]) == number + 1
                assert float(batch.rewards[row]) == reward_of(number + 1)


@pytest.mark.deep
def test_what_it_says_of_itself():
    with ShmVectorEnv(numbered(2), num_workers=1) as envs:
        replay, reference, caller = watched(envs, 100, seed=0)
        caller.reset(seed=0)
        assert len(replay) == 0 and "Replay" in repr(replay)
        played(caller, "lockstep", 20)
        assert str(len(replay)) in str(replay.stats())
