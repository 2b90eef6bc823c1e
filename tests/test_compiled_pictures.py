"""Compiled wrappers of pictures do as Gymnasium's, bit for bit."""

from collections import deque
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_compiled_wrappers import (
    Mine,
    Told,
    attributes,
    check_sources,
    compiled,
    double,
    follow,
    happens,
    names_of,
    seen,
)

from shmvec import ShmVectorEnv
from shmvec._wrappers import notes_of

SCREEN = (6, 5, 3)


class Arcade(Told):
    """An env that looks like ALE's, with lives."""

    scale = 90

    def __init__(self, dtype="uint8", shape=SCREEN, **arguments):
        super().__init__(dtype, shape, **arguments)
        if dtype == "uint8" and shape:
            self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(4)
        self.left = 3

    @property
    def ale(self):
        return self

    def lives(self):
        return self.left

    def get_action_meanings(self):
        return ["NOOP", "FIRE", "LEFT", "RIGHT"]

    def reset(self, **arguments):
        self.left = 3
        return super().reset(**arguments)

    def step(self, action):
        self.left = max(0, self.left + int(self.draw.choice([0, 0, 0, -1, -1, 1])))
        return super().step(int(np.ravel(action)[0]) if np.isfinite(np.ravel(action)[0]) else 0)


def stacked_on_ones(env):
    padding = env.observation_space.low + np.ones((), env.observation_space.dtype)
    return wrappers.FrameStackObservation(env, 3, padding_type=padding)


WRAPPERS = {
    "gray": wrappers.GrayscaleObservation,
    "gray with an axis": partial(wrappers.GrayscaleObservation, keep_dim=True),
    "stack": partial(wrappers.FrameStackObservation, stack_size=4),
    "stack of one": partial(wrappers.FrameStackObservation, stack_size=1),
    "stack on zeros": partial(wrappers.FrameStackObservation, stack_size=2, padding_type="zero"),
    "stack on ones": stacked_on_ones,
    "flatten": wrappers.FlattenObservation,
    "statistics": wrappers.RecordEpisodeStatistics,
    "limit": partial(wrappers.TimeLimit, max_episode_steps=4),
    "mine": Mine,
}
CHANGES = [
    None,
    None,
    None,
    ("reset",),
    ("func", double),
    ("observation", double),
    ("obs_queue", deque(maxlen=4)),
    ("obs_queue", deque([np.zeros((6, 5), np.uint8)] * 4, maxlen=4)),
    ("obs_queue", deque([np.zeros((6, 5), np.int8)] * 4, maxlen=4)),
    ("obs_queue", []),
    ("stacked_obs", np.zeros((4, 6, 5), np.uint8)),
    ("stacked_obs", np.asfortranarray(np.zeros((4, 6, 5), np.uint8))),
    ("stacked_obs", np.zeros((4, 6, 5), np.float32)),
    ("stacked_obs", np.zeros((4, 6, 5), object)),
    ("stacked_obs", None),
    ("observation_space", gym.spaces.Discrete(3)),
    ("observation_space", gym.spaces.Dict(a=gym.spaces.Discrete(3))),
    ("deleted", "obs_queue"),
    ("shorter", None),
]


def wrapped(names, **arguments):
    env = Arcade(**arguments)
    for name in names:
        env = WRAPPERS[name](env)
    return env


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=5),
    dtype=st.sampled_from(["uint8", "uint8", "uint8", "float32"]),
    shape=st.sampled_from([SCREEN, SCREEN, SCREEN, (3,), ()]),
    oddness=st.sampled_from([0.0, 0.0, 0.1]),
    script=st.integers(0, 1000),
    steps=st.lists(st.tuples(st.sampled_from(CHANGES), st.just([1])), min_size=1, max_size=15),
)
def test_any_chain(names, dtype, shape, oddness, script, steps):
    make = partial(wrapped, names, dtype=dtype, shape=shape, oddness=oddness, script=script)
    try:
        make()
    except Exception:  # this wrapper cannot wrap that
        return
    follow(make, [(("reset",), [0]), *steps])


@pytest.mark.parametrize("keep_dim", [False, True])
def test_a_whole_chain_is_compiled(keep_dim):
    pytest.importorskip("cv2")

    def make():
        env = wrappers.ResizeObservation(Arcade(shape=(21, 16, 3), length=7), (8, 8))
        env = wrappers.GrayscaleObservation(env, keep_dim=keep_dim)
        return wrappers.FrameStackObservation(wrappers.RecordEpisodeStatistics(env), 4)

    script = [(("reset",) if i % 9 == 0 else None, [1]) for i in range(60)]
    assert len(names_of(follow(make, script))) == 4


def coloured(reds):
    """An env whose pictures have each of these values of red with all of green and blue."""
    env = Arcade(shape=(256, 256, 3))
    colours = np.stack(np.indices((256, 256, 256), np.uint8)[:, reds], axis=-1)
    env.observed = iter(colours).__next__
    return wrappers.GrayscaleObservation(env)


@pytest.mark.parametrize("reds", [[0, 7, 255], pytest.param(range(256), marks=pytest.mark.deep)])
def test_each_colour_becomes_the_same_gray(reds):
    python, stepper = coloured(reds), compiled(coloured(reds))
    assert names_of(stepper) == ["GrayscaleObservation"]
    for _ in reds:
        assert seen(stepper.step(1)) == seen(python.step(1))


@pytest.mark.parametrize("name", ["gray", "gray with an axis", "stack"])
def test_another_source_makes_the_twin_step_aside(name, monkeypatch, tmp_path):
    make = partial(wrapped, [name])
    check_sources(type(make()).__name__, make, monkeypatch, tmp_path)


@pytest.mark.parametrize("what", ["obs_queue", "stacked_obs", "env", "func", "longer"])
def test_what_the_env_changes_in_its_step_counts_in_this_step(what):
    class Changing(Arcade):
        def step(self, action):
            if self.count == 2:
                stack, gray = self.outer, self.outer.env
                if what == "obs_queue":
                    stack.obs_queue = deque([np.ones((6, 5), np.uint8)] * 4, maxlen=4)
                elif what == "stacked_obs":
                    stack.stacked_obs = np.zeros((4, 6, 5), np.int16)
                elif what == "env":
                    stack.env = Arcade(dtype="int16")
                elif what == "func":
                    gray.func = double
                else:
                    stack.__dict__ = {**vars(stack), "obs_queue": deque(stack.obs_queue, maxlen=9)}
            return super().step(action)

    found = []
    for stepped_by in (lambda env: env, compiled):
        base = Changing()
        env = base.outer = wrappers.FrameStackObservation(wrappers.GrayscaleObservation(base), 4)
        stepper = stepped_by(env)
        env.reset()
        found.append([(happens(partial(stepper.step, 1)), attributes(env)) for _ in range(5)])
    assert found[0] == found[1]


def test_frames_that_are_parts_of_the_stack():
    found = []
    for stepped_by in (lambda env: env, compiled):
        env = wrappers.FrameStackObservation(Arcade(), 4)
        stepper = stepped_by(env)
        env.reset()
        memory = np.arange(5 * 90, dtype=np.uint8).reshape((5, *SCREEN))
        env.stacked_obs = memory[1:]
        env.obs_queue = deque([*memory[2:5], memory[0], memory[1]][:4], maxlen=4)
        found.append([seen(stepper.step(1)) for _ in range(3)] + [seen(memory)])
    assert found[0] == found[1]


def test_results_are_new_arrays_that_nothing_changes():
    stepper = compiled(wrapped(["gray", "stack"]))
    stepper.env.reset()
    kept = [stepper.step(1)[0] for _ in range(6)]
    was = seen(kept)
    for _ in range(6):
        stepper.step(1)
    assert seen(kept) == was
    assert all(each.flags.owndata and each.flags.writeable for each in kept)
    assert not any(np.shares_memory(each, stepper.env.stacked_obs) for each in kept)


def test_a_dict_is_stacked():
    stepper = follow(partial(wrapped, ["stack"], shape=()), [(("reset",), [0]), *[(None, [1])] * 9])
    assert not [why for _, why in notes_of(stepper) if why]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_vector_env_is_equal_to_gymnasiums(num_workers):
    makes = [partial(wrapped, ["statistics", "gray", "stack"], script=i) for i in range(2)]
    with (
        closing(ShmVectorEnv(makes, num_workers=num_workers)) as mine,
        closing(gym.vector.SyncVectorEnv(makes)) as python,
    ):
        assert seen(mine.reset(seed=1)) == seen(python.reset(seed=1))
        for _ in range(20):
            found, expected = mine.step(np.ones(2, int)), python.step(np.ones(2, int))
            assert seen(found[:4]) == seen(expected[:4])
        for name in ("obs_queue", "stacked_obs", "episode_count"):
            assert seen(mine.get_attr(name)) == seen(python.get_attr(name))
