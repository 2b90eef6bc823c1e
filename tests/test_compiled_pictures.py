"""Compiled wrappers of pictures do as Gymnasium's, bit for bit."""

import sys
from collections import deque
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import paired
from test_compiled_wrappers import (
    Drawn,
    Mine,
    altered,
    attributes,
    change,
    check_sources,
    compile_env,
    double,
    follow,
    happens,
    names_of,
    seen,
    steps_of_both,
)

from shmvec import FaultPolicy, ShmVectorEnv
from shmvec._wrappers import code_of, notes_of

pytestmark = pytest.mark.deep

SCREEN = (6, 5, 3)


class Arcade(Drawn):
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
    "skip": wrappers.MaxAndSkipObservation,
    "skip 2": partial(wrappers.MaxAndSkipObservation, skip=2),
    "skip 7": partial(wrappers.MaxAndSkipObservation, skip=7),
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
    ("_skip", 3),
    ("_skip", np.int64(2)),
    ("_skip", 0),
    ("_obs_buffer", np.zeros((2, *SCREEN), np.float32)),
    ("_obs_buffer", np.zeros((3, *SCREEN), np.uint8)),
    ("_obs_buffer", [np.zeros(SCREEN, np.uint8)] * 2),
    ("_obs_buffer", []),
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


def coloured():
    """An env whose pictures have each value of red with all of green and blue."""
    env = Arcade(shape=(256, 256, 3))
    colours = np.stack(np.indices((256, 256, 256), np.uint8), axis=-1)
    env.observed = iter(colours).__next__
    return wrappers.GrayscaleObservation(env)


def test_each_colour_becomes_the_same_gray():
    python, stepper = coloured(), compile_env(coloured())
    assert names_of(stepper) == ["GrayscaleObservation"]
    for _ in range(256):
        assert seen(stepper.step(1)) == seen(python.step(1))


@pytest.mark.parametrize("name", ["gray", "gray with an axis", "stack", "skip"])
def test_another_source_makes_the_twin_step_aside(name, monkeypatch, tmp_path):
    make = partial(wrapped, [name])
    check_sources(type(make()).__name__, make, monkeypatch, tmp_path)


def test_another_concatenate_that_is_set_before_the_env_is_called(monkeypatch):
    def ones(space, items, out):
        out[...] = 1
        return out

    monkeypatch.setattr(wrappers.stateful_observation, "concatenate", ones)
    follow(partial(wrapped, ["stack"]), [(("reset",), [1]), (None, [1])])


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

    def make():
        base = Changing()
        env = base.outer = wrappers.FrameStackObservation(wrappers.GrayscaleObservation(base), 4)
        return env

    steps_of_both(make, 5, 1)


@pytest.mark.parametrize("skip", [1, 2, 3, 5, 1.0, None])
def test_frames_to_skip_that_the_env_changes_while_they_are_skipped(skip):
    class Changing(Arcade):
        def step(self, action):
            if self.count == 5:
                vars(self.outer)["_skip"] = skip
            return super().step(action)

    def make():
        base = Changing(length=19)
        env = base.outer = wrappers.MaxAndSkipObservation(wrappers.OrderEnforcing(base), 4)
        return env

    steps_of_both(make, 7, 1)


@pytest.mark.parametrize("at", [1, 5, 6, 8])
def test_another_env_that_is_set_while_frames_are_skipped_takes_the_next_frame(at):
    class Changing(Arcade):
        def step(self, action):
            if self.count == at:
                self.outer.env = Arcade(script=7, length=2)
            return super().step(action)

    def make():
        base = Changing(length=19)
        env = base.outer = wrappers.MaxAndSkipObservation(wrappers.OrderEnforcing(base), 4)
        return env

    steps_of_both(make, 5, 1)


def test_what_has_no_truth_value_is_asked_for_it_when_python_asks():
    class Many(Arcade):
        def step(self, action):
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, np.zeros(2, bool), truncated, info

    steps_of_both(lambda: wrappers.MaxAndSkipObservation(Many(), 2), 3, 1)


def test_frames_that_are_parts_of_the_stack():
    found = []
    for stepped_by in (lambda env: env, compile_env):
        env = wrappers.FrameStackObservation(Arcade(), 4)
        stepper = stepped_by(env)
        env.reset()
        memory = np.arange(5 * 90, dtype=np.uint8).reshape((5, *SCREEN))
        env.stacked_obs = memory[1:]
        env.obs_queue = deque([*memory[2:5], memory[0], memory[1]][:4], maxlen=4)
        found.append([seen(stepper.step(1)) for _ in range(3)] + [seen(memory)])
    assert found[0] == found[1]


def test_results_are_new_arrays_that_nothing_changes():
    stepper = compile_env(wrapped(["gray", "stack"]))
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


class Counted:
    """ALE's emulator, of which each call is counted."""

    def __init__(self, ale, calls):
        self.ale, self.calls = ale, calls

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.ale, name)


def counted(env, calls):
    env.ale = Counted(env.ale, calls)


def set_to(name, value):
    return lambda env: setattr(env, name, value)


ALE_CHANGES = {
    "obs": set_to("_get_obs", lambda: np.full((210, 160, 3), 7, np.uint8)),
    "info": set_to("_get_info", lambda: {"mine": 1}),
    "frames": set_to("_frameskip", 3),
    "frames by chance": set_to("_frameskip", (2, 5)),
    "no frames": set_to("_frameskip", None),
    "kind": set_to("_obs_type", "ram"),
    "no kind": set_to("_obs_type", "none"),
    "actions": lambda env: vars(env)["_action_set"].reverse(),
    "a tuple of actions": lambda env: vars(env).update(_action_set=(0, 1, 3)),
    "no actions": lambda env: vars(env).pop("_action_set"),
    "continuous": set_to("continuous", True),
    "sound": set_to("sound_obs", True),
    "calls": lambda env: counted(env, env.calls),
    "no emulator": lambda env: delattr(env, "ale"),
}
PREPROCESSING_CHANGES = [
    ("frame_skip", 2),
    ("frame_skip", np.int64(3)),
    ("frame_skip", 0),
    ("frame_skip", None),
    ("terminal_on_life_loss", True),
    ("lives", 9),
    ("lives", None),
    ("game_over", 5),
    ("grayscale_obs", False),
    ("scale_obs", True),
    ("screen_size", (9, 8)),
    ("obs_buffer", []),
    ("obs_buffer", [np.zeros((210, 160), np.uint8)] * 2),
    ("obs_buffer", [1, 2]),
    ("obs_buffer", tuple(np.zeros((2, 210, 160, 3), np.uint8))),
    ("deleted", "obs_buffer"),
    ("checked_step", False),
    ("_skip", 3),
    ("shorter", None),
]
ALE_WRAPPERS = {
    **{name: WRAPPERS[name] for name in ("skip", "skip 2", "skip 7", "statistics", "mine")},
    "preprocessing": partial(wrappers.AtariPreprocessing, noop_max=3),
    "lives": partial(wrappers.AtariPreprocessing, noop_max=3, terminal_on_life_loss=True),
    "colours": partial(
        wrappers.AtariPreprocessing, frame_skip=3, screen_size=40, grayscale_obs=False
    ),
    "numbers": partial(wrappers.AtariPreprocessing, scale_obs=True, grayscale_newaxis=True),
    "every frame": partial(wrappers.AtariPreprocessing, noop_max=0, frame_skip=1),
    "every second": partial(wrappers.AtariPreprocessing, noop_max=1, frame_skip=2),
    "stack": WRAPPERS["stack"],
    "checker": wrappers.PassiveEnvChecker,
    "order": wrappers.OrderEnforcing,
    "limit": partial(wrappers.TimeLimit, max_episode_steps=9),
    "reward": partial(wrappers.TransformReward, func=double),
    "normal": wrappers.NormalizeReward,
}


def arcade(names, game="pong", **arguments):
    """ALE's env, as it is registered, in these wrappers."""
    env = pytest.importorskip("ale_py.env").AtariEnv(
        game, **{"frameskip": 1, "repeat_action_probability": 0.0, **arguments}
    )
    env.calls = []
    for name in names:
        env = ALE_WRAPPERS[name](env)
    return env


def state_of(env):
    """All that can be seen of an env of ALE and its wrappers."""
    *outer, inner = attributes(env)
    ale = inner.pop("ale", None) and getattr(env.unwrapped.ale, "ale", env.unwrapped.ale)
    return outer, inner, ale and (seen(ale.getRAM()), ale.getFrameNumber(), ale.lives())


def follow_ale(make, script):
    """Steps an env of ALE in Python and compiled, and compares all that can be seen."""
    python, env = make(), make()
    stepper = compile_env(env)
    assert seen(env.reset(seed=1)) == seen(python.reset(seed=1))
    for what, action in script:
        for each in (env, python):
            if isinstance(what, tuple):
                happens(partial(change, each, what))
            elif what in ALE_CHANGES:
                happens(partial(ALE_CHANGES[what], each.unwrapped))
        if what == "reset":
            assert happens(partial(env.reset, seed=2)) == happens(partial(python.reset, seed=2))
        mine, expected = (happens(partial(each.step, action)) for each in (stepper, python))
        assert mine == expected
        assert state_of(env) == state_of(python)
    return stepper


CHANGED = st.sampled_from(["reset", *ALE_CHANGES, *PREPROCESSING_CHANGES])


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    names=st.lists(st.sampled_from(sorted(ALE_WRAPPERS)), max_size=5, unique=True),
    arguments=st.fixed_dictionaries(
        {"game": st.sampled_from(["pong", "breakout"])},
        optional={
            "obs_type": st.sampled_from(["rgb", "grayscale", "ram"]),
            "frameskip": st.sampled_from([1, 2, (2, 4)]),
            "repeat_action_probability": st.just(0.25),
            "max_num_frames_per_episode": st.sampled_from([1, 5, 18]),
            "render_mode": st.just("rgb_array"),
        },
    ),
    script=st.lists(
        st.tuples(
            st.one_of(st.none(), st.none(), CHANGED),
            st.sampled_from([0, 1, 2, 3, np.int64(1), -1, 9, "a", np.zeros(3, np.float32)]),
        ),
        min_size=1,
        max_size=10,
    ),
)
def test_any_game_of_ale(names, arguments, script):
    make = partial(arcade, names, **arguments)
    try:
        make().reset()
    except Exception:  # this wrapper cannot wrap that
        return
    follow_ale(make, script)


GAME = [(None, each % 4) for each in range(12)]


@pytest.mark.parametrize("what", ALE_CHANGES)
def test_what_is_changed_of_ale_is_obeyed(what):
    names = ["checker", "order", "statistics", "skip"]
    follow_ale(partial(arcade, names, "breakout"), [*GAME, (what, 1), *GAME])


@pytest.mark.parametrize("what", PREPROCESSING_CHANGES)
def test_what_is_changed_of_preprocessing_is_obeyed(what):
    pytest.importorskip("cv2")
    follow_ale(
        partial(arcade, ["order", "lives", "stack"], "breakout"), [*GAME, (what, 1), *GAME[:3]]
    )


@pytest.mark.parametrize(
    "name, game",
    paired(["preprocessing", "lives", "colours", "numbers", "every frame"], ["pong", "breakout"]),
)
def test_preprocessing_is_compiled(name, game):
    pytest.importorskip("cv2")
    make = partial(arcade, ["checker", "order", name, "stack"], game, repeat_action_probability=0.2)
    stepper = follow_ale(make, [*GAME, ("reset", 1), *GAME * 3])
    assert len(names_of(stepper)) == 4
    assert fetched(stepper) == 0


@pytest.mark.parametrize("name", ["ale", "_get_obs"])
def test_a_patch_of_preprocessing_is_noticed(name, monkeypatch):
    pytest.importorskip("cv2")
    kind = wrappers.AtariPreprocessing
    patched = {
        "ale": property(lambda self: Counted(self.unwrapped.ale, self.unwrapped.calls)),
        "_get_obs": lambda self: self.obs_buffer[0] + 1,
    }
    stepper, python = compile_env(arcade(["preprocessing"])), arcade(["preprocessing"])
    assert seen(stepper.env.reset(seed=1)) == seen(python.reset(seed=1))
    for _ in range(3):
        assert seen(stepper.step(1)) == seen(python.step(1))
        assert state_of(stepper.env) == state_of(python)
        monkeypatch.setattr(kind, name, patched[name])
    assert bool(python.unwrapped.calls) == (name == "ale")


@pytest.mark.filterwarnings("ignore:`continuous` is set")  # ale-py 0.10.1
@pytest.mark.parametrize("arguments", [{"continuous": True}, {"sound_obs": True}])
def test_ale_with_another_space(arguments):
    try:
        arcade([], **arguments)
    except TypeError:
        pytest.skip("this ale-py does not know it")
    action = np.ones(3, np.float32) if "continuous" in arguments else 1
    follow_ale(partial(arcade, ["statistics", "normal"], **arguments), [(None, action)] * 4)
    if "continuous" in arguments:
        follow_ale(partial(arcade, ["skip"], **arguments), [(None, action)] * 4)


@pytest.mark.parametrize(
    "names, frames",
    paired(
        [["skip 2", "skip"], ["skip", "order", "skip 2"], ["preprocessing", "skip 7"]],
        [5, 11, None],
    ),
)
def test_frames_that_are_skipped_by_two(names, frames):
    make = partial(arcade, names, max_num_frames_per_episode=frames)
    follow_ale(make, [*GAME[:5], ("reset", 1), *GAME[:3]])


@pytest.mark.parametrize(
    "buffer, obs_type",
    paired(
        [
            np.zeros((2, 210, 160, 3), np.float32),
            np.zeros((2, 3, 210, 160, 3), np.uint8),
            np.zeros((2, 250, 160, 3), np.uint8),
            np.zeros((1, 210, 160, 3), np.uint8),
            np.asfortranarray(np.zeros((2, 210, 160, 3), np.uint8)),
            np.broadcast_to(np.uint8(1), (2, 210, 160, 3)),
            [None, None],
            {},
        ],
        ["rgb", "grayscale", "ram"],
    ),
)
def test_a_buffer_of_another_kind(obs_type, buffer):
    script = [*GAME[:2], (("_obs_buffer", buffer), 1), *GAME[:2]]
    follow_ale(partial(arcade, ["skip"], obs_type=obs_type), script)


@pytest.mark.parametrize("skip", ["skip", "skip 7", "preprocessing"])
def test_a_game_that_ends_while_frames_are_skipped(skip):
    python, env = (arcade(["statistics", skip]) for _ in range(2))
    stepper = compile_env(env)
    assert seen(env.reset(seed=1)) == seen(python.reset(seed=1))
    ended = False
    while not ended:
        expected = python.step(0)
        assert seen(stepper.step(0)) == seen(expected)
        ended = expected[2]
    assert state_of(env) == state_of(python)
    assert env.get_wrapper_attr("episode_count") == 1


def fetched(stepper):
    """How many screens a step fetches by the env's method."""
    frames = []
    own = type(stepper.env.unwrapped)
    sys.setprofile(lambda frame, event, _: event == "call" and frames.append(frame))
    try:
        stepper.step(0)
    finally:
        sys.setprofile(None)
    names = [each.f_code.co_name for each in frames if type(each.f_locals.get("self")) is own]
    return names.count("_get_obs")


@pytest.mark.parametrize(
    ("names", "screens"),
    [
        (["skip"], 2),
        (["skip 7"], 2),
        (["checker", "order", "limit", "statistics", "skip", "reward"], 2),
        (["mine", "skip"], 4),
        (["reward", "skip"], 4),
        (["skip 2", "skip"], 8),
        (["skip", "skip 2"], 4),
    ],
)
def test_a_screen_that_nobody_looks_at_is_not_fetched(names, screens):
    env = arcade(names, obs_type="grayscale")
    stepper = compile_env(env)
    env.reset(seed=1)
    stepper.step(0)  # the checker looks
    assert fetched(stepper) == screens


@pytest.mark.parametrize("name", ["_get_obs", "step", "emulator"])
def test_a_patch_of_ale_is_noticed(name, monkeypatch):
    env = arcade(["skip"], obs_type="grayscale")
    kind = type(env.unwrapped)
    stepper = compile_env(env)
    env.reset(seed=1)
    assert fetched(stepper) == 2
    if name == "emulator":
        monkeypatch.setattr(type(env.unwrapped.ale), "mine", 1, raising=False)
    else:
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *given: method(*given))
    assert fetched(stepper) == 4


def test_another_source_of_preprocessing_is_noticed(monkeypatch, tmp_path):
    pytest.importorskip("cv2")
    check_sources("AtariPreprocessing", partial(arcade, ["colours"]), monkeypatch, tmp_path)


def test_another_source_of_ale_is_noticed(monkeypatch, tmp_path):
    for name, function in code_of(type(arcade([]))):
        with monkeypatch.context() as patch:
            patch.setattr(function, "__code__", altered(function, tmp_path))
            env = arcade(["skip"], obs_type="grayscale")
            stepper = compile_env(env)
            env.reset(seed=1)
            assert fetched(stepper) == 4, name


@pytest.mark.parametrize("compile_wrappers", [False, True])
def test_frames_that_take_too_long_are_interrupted(compile_wrappers):
    ale_py = pytest.importorskip("ale_py")

    def make():
        gym.register_envs(ale_py)
        game = gym.make("ALE/Breakout-v5", frameskip=10**7, disable_env_checker=True)
        return wrappers.MaxAndSkipObservation(game, 2)

    faults = FaultPolicy(on_timeout="reset", step_timeout=1.0)
    with closing(
        ShmVectorEnv([make], num_workers=1, faults=faults, compile_wrappers=compile_wrappers)
    ) as envs:
        envs.reset(seed=1)
        assert envs.step([0])[-1]["fault"]["type"][0] == "EnvTimeoutError"
        assert envs.stats().faults.restarts == 0  # it was interrupted, and not killed
