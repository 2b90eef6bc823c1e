"""Compiled wrappers of Stable-Baselines3 do as its Python ones, bit for bit."""

import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_compiled_pictures import CHANGED, Arcade, arcade, fetched, follow_ale
from test_compiled_wrappers import (
    attributes,
    check_sources,
    compile_env,
    follow,
    module_of,
    names_of,
    seen,
    steps_of_both,
)

from shmvec._wrappers import notes_of

pytestmark = pytest.mark.deep

atari = pytest.importorskip("stable_baselines3.common.atari_wrappers")
monitor = pytest.importorskip("stable_baselines3.common.monitor")


WRAPPERS = {
    "sticky": partial(atari.StickyActionEnv, action_repeat_probability=0.4),
    "no-ops": partial(atari.NoopResetEnv, noop_max=3),
    "fire": atari.FireResetEnv,
    "lives": atari.EpisodicLifeEnv,
    "skip": atari.MaxAndSkipEnv,
    "skip 1": partial(atari.MaxAndSkipEnv, skip=1),
    "skip 2": partial(atari.MaxAndSkipEnv, skip=2),
    "signs": atari.ClipRewardEnv,
    "monitor": monitor.Monitor,
    "monitor of counts": partial(monitor.Monitor, info_keywords=("count",)),
    "statistics": wrappers.RecordEpisodeStatistics,
    "normal": wrappers.NormalizeReward,
    "limit": partial(wrappers.TimeLimit, max_episode_steps=4),
}
CHANGES = [
    None,
    None,
    None,
    ("reset",),
    ("_skip", 3),
    ("_skip", np.int64(2)),
    ("_skip", 0),
    ("_obs_buffer", np.zeros((2, 6, 5, 3), np.float32)),
    ("_obs_buffer", np.zeros((3, 6, 5, 3), np.uint8)),
    ("_obs_buffer", np.asfortranarray(np.zeros((2, 6, 5, 3), np.uint8))),
    ("lives", 9),
    ("needs_reset", True),
    ("rewards", [1]),
    ("info_keywords", ("count", "missing")),
    ("current_reset_info", {"a": 1}),
    ("total_steps", 2.5),
    ("action_repeat_probability", 1.0),
    ("_sticky_action", 3),
    ("deleted", "_sticky_action"),
    ("shorter", None),
]


def wrapped(names, **arguments):
    env = Arcade(**arguments)
    for name in names:
        env = WRAPPERS[name](env)
    return env


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=6),
    dtype=st.sampled_from(["uint8", "uint8", "float32", "int16"]),
    oddness=st.sampled_from([0.0, 0.0, 0.1]),
    script=st.integers(0, 1000),
    length=st.sampled_from([3, 9]),
    steps=st.lists(
        st.tuples(st.sampled_from(CHANGES), st.sampled_from([[0], [3]])), min_size=1, max_size=15
    ),
)
def test_any_chain(names, dtype, oddness, script, length, steps):
    make = partial(wrapped, names, dtype=dtype, oddness=oddness, script=script, length=length)
    follow(make, [(("reset",), [0]), *steps])


@pytest.mark.parametrize("name", ["sticky", "lives", "skip", "monitor"])
def test_another_source_makes_the_twin_step_aside(name, monkeypatch, tmp_path):
    make = partial(wrapped, [name])
    check_sources(type(make()).__name__, make, monkeypatch, tmp_path)


@pytest.mark.parametrize("name", ["lives", "monitor", "skip"])
@pytest.mark.parametrize("what", ["env", "__dict__"])
def test_what_the_env_changes_in_its_step_counts_in_this_step(name, what):
    class Changing(Arcade):
        def step(self, action):
            if self.count == 2:
                other = Arcade(script=7)
                other.left = 1
                setattr(self.outer, what, other if what == "env" else dict(vars(self.outer)))
            return super().step(action)

    def make():
        base = Changing(length=9)
        base.outer = env = WRAPPERS[name](base)
        return env

    steps_of_both(make, 4, 1)


def cleanrl(screen):
    """An Atari env as CleanRL's ppo_atari wraps it."""
    env = wrappers.RecordEpisodeStatistics(screen)
    env = atari.EpisodicLifeEnv(atari.MaxAndSkipEnv(atari.NoopResetEnv(env, 3)))
    return atari.ClipRewardEnv(atari.FireResetEnv(env))


def test_a_whole_chain_is_compiled():
    def make():
        return cleanrl(monitor.Monitor(Arcade(length=12)))

    script = [(("reset",) if i % 9 == 0 else None, [i % 4]) for i in range(60)]
    stepper = follow(make, script)
    assert len(names_of(stepper)) == 7


def test_breakout_as_stable_baselines_wraps_it():
    ale_py = pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    gym.register_envs(ale_py)

    def make():
        env = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0)
        env = atari.AtariWrapper(monitor.Monitor(env), action_repeat_probability=0.25)
        return wrappers.NormalizeReward(env)

    python, env = make(), make()
    stepper = compile_env(env)
    assert all(not why for _, why in notes_of(stepper))
    draw = np.random.default_rng(1)
    assert seen(env.reset(seed=1)) == seen(python.reset(seed=1))
    for _ in range(150):
        action = int(draw.integers(4))
        found, expected = stepper.step(action), python.step(action)
        assert seen(found) == seen(expected)
        if expected[2] or expected[3]:
            assert seen(env.reset()) == seen(python.reset())
    assert attributes(env)[:-1] == attributes(python)[:-1]


@pytest.mark.parametrize("game", ["pong", "breakout"])
def test_a_game_as_cleanrl_wraps_it(game):
    pytest.importorskip("cv2")

    def make():
        env = cleanrl(wrappers.OrderEnforcing(wrappers.PassiveEnvChecker(arcade([], game))))
        env = wrappers.GrayscaleObservation(wrappers.ResizeObservation(env, (84, 84)))
        return wrappers.FrameStackObservation(env, 4)

    draw = np.random.default_rng(1)
    actions = draw.integers(4, size=150).tolist()
    script = [("reset" if i % 40 == 39 else None, action) for i, action in enumerate(actions)]
    stepper = follow_ale(make, script)
    assert len(names_of(stepper)) == 11
    assert fetched(stepper) == 0  # but by the emulator, into the buffer


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=5, unique=True),
    game=st.sampled_from(["pong", "breakout"]),
    obs_type=st.sampled_from(["rgb", "rgb", "grayscale", "ram"]),
    frames=st.sampled_from([None, None, 5, 18]),
    script=st.lists(
        st.tuples(st.one_of(st.none(), st.none(), CHANGED), st.integers(0, 3)),
        min_size=1,
        max_size=10,
    ),
)
def test_any_chain_of_a_game(names, game, obs_type, frames, script):
    def make():
        env = arcade([], game, obs_type=obs_type, max_num_frames_per_episode=frames)
        for name in names:
            env = WRAPPERS[name](env)
        return env

    try:
        make().reset(seed=1)
    except Exception:  # this wrapper cannot wrap that
        return
    follow_ale(make, script)


def test_a_copy_in_cleanrl_is_recognised(monkeypatch, tmp_path):
    # Whose text differs from the original's in annotations.
    source = Path(atari.__file__).read_text().replace(" -> AtariStepReturn", "")
    copied = module_of(source, tmp_path)
    wrap = copied.MaxAndSkipEnv(copied.EpisodicLifeEnv(copied.StickyActionEnv(Arcade(), 0.5)))
    assert {why for _, why in notes_of(compile_env(wrap))} != {""}  # it is not where CleanRL has it
    monkeypatch.setitem(sys.modules, "cleanrl_utils.atari_wrappers", copied)
    assert {why for _, why in notes_of(compile_env(wrap))} == {""}
