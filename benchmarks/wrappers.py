"""The cost of wrappers for a step, in Python and compiled.

    python benchmarks/wrappers.py
    python benchmarks/wrappers.py --chain CartPole Hopper --seconds 3

The bare step of an env in this process, the step of its wrappers, and that of their compiled twins
take turns, in blocks of the same actions after the same resets, which are not measured. The table
has medians, in µs a step. The floor of an Atari chain is the work that compilation cannot save:
four frames, two screens, and resizing one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import wrappers
from harness import Calls, arguments, heading, write_results

from shmvec._commands.measuring import describe_machine, machine, race, table_line
from shmvec._wrappers import compile_env, notes_of

BLOCK = 12  # steps: an untrained CartPole stands for longer


def cleanrl(name: str) -> gym.Env[Any, Any]:
    """An env as CleanRL's ppo_continuous_action wraps it."""
    env: Any = wrappers.FlattenObservation(gym.make(name))
    env = wrappers.ClipAction(wrappers.RecordEpisodeStatistics(env))
    env = wrappers.NormalizeObservation(env)
    env = wrappers.TransformObservation(env, clipped, env.observation_space)
    return wrappers.TransformReward(wrappers.NormalizeReward(env, gamma=0.99), clipped)


def clipped(value: Any) -> Any:
    """Clips a value to [-10, 10]."""
    return np.clip(value, -10, 10)


def with_statistics(name: str) -> gym.Env[Any, Any]:
    """An env as CleanRL's ppo wraps it."""
    return wrappers.RecordEpisodeStatistics(gym.make(name))


def stable_baselines(name: str) -> gym.Env[Any, Any]:
    """An Atari env as Stable-Baselines3 wraps it."""
    from stable_baselines3.common.atari_wrappers import AtariWrapper
    from stable_baselines3.common.monitor import Monitor

    env = one_frame(name)
    # A reset of AtariWrapper continues its episode, which ends at some time.
    return wrappers.Autoreset(AtariWrapper(Monitor(env)))


def cleanrl_atari(name: str) -> gym.Env[Any, Any]:
    """An Atari env as CleanRL's ppo_atari wraps it, with the wrappers of Gymnasium 1."""
    from stable_baselines3.common import atari_wrappers as atari

    env: Any = wrappers.RecordEpisodeStatistics(one_frame(name))
    env = atari.MaxAndSkipEnv(atari.NoopResetEnv(env, noop_max=30), skip=4)
    env = atari.EpisodicLifeEnv(env)
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = atari.FireResetEnv(env)
    env = wrappers.ResizeObservation(atari.ClipRewardEnv(env), (84, 84))
    return wrappers.FrameStackObservation(wrappers.GrayscaleObservation(env), 4)


def preprocessed(name: str) -> gym.Env[Any, Any]:
    """An Atari env as Gymnasium wraps it."""
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(one_frame(name)), 4)


def one_frame(name: str) -> gym.Env[Any, Any]:
    """An Atari env whose steps are single frames; OpenCV gets one thread, as in a worker."""
    import ale_py
    import cv2

    cv2.setNumThreads(1)
    gym.register_envs(ale_py)
    return gym.make(name, frameskip=1, repeat_action_probability=0)


def floor_of(env: Any, colours: bool) -> Callable[[int], Any]:
    """A function that does what a step of an Atari chain cannot do without."""
    import cv2

    ale = env.unwrapped.ale
    actions = ale.getMinimalActionSet()
    screens = [np.zeros((210, 160, 3) if colours else (210, 160), np.uint8) for _ in range(2)]
    fetch = ale.getScreenRGB if colours else ale.getScreenGrayscale

    def step(action: int) -> Any:
        for _ in range(4):
            ale.act(actions[action])
        for screen in screens:
            fetch(screen)
        return cv2.resize(screens[0], (84, 84), interpolation=cv2.INTER_AREA)

    return step


PONG, PREPROCESSED = "Pong, CleanRL's chain", "Pong, AtariPreprocessing and a stack"
CHAINS: dict[str, Callable[[], Any]] = {
    "HalfCheetah-v5, CleanRL's chain": partial(cleanrl, "HalfCheetah-v5"),
    "HalfCheetah-v5, gym.make": partial(gym.make, "HalfCheetah-v5"),
    "Hopper-v5, gym.make": partial(gym.make, "Hopper-v5"),
    "Pong, Stable-Baselines3's chain": partial(stable_baselines, "ALE/Pong-v5"),
    PONG: partial(cleanrl_atari, "ALE/Pong-v5"),
    PREPROCESSED: partial(preprocessed, "ALE/Pong-v5"),
    "CartPole-v1, gym.make": partial(gym.make, "CartPole-v1"),
    "CartPole-v1, with statistics": partial(with_statistics, "CartPole-v1"),
}
FLOORS = {PONG: partial(floor_of, colours=True), PREPROCESSED: partial(floor_of, colours=False)}
WAYS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "bare": lambda env: env.unwrapped.step,
    "Python": lambda env: env.step,
    "compiled": lambda env: compiled_step(env),
}


def compiled_step(env: Any) -> Callable[[Any], Any]:
    """The step of the wrappers' compiled twins; prints which have none."""
    stepper = compile_env(env, always=True)
    left = [why for _, why in notes_of(stepper) if why]
    if left:
        print(f"not all is compiled: {left}")
    return stepper.step


def blocks(make: Callable[[], Any], way: Callable[[Any], Callable[[Any], Any]]) -> Calls:
    """Blocks of steps of an env, each after a reset."""
    env, seeds = make(), count(1)
    step = way(env)
    space = env.unwrapped.action_space
    space.seed(1)
    actions = [space.sample() for _ in range(BLOCK)]

    def call(_: Any) -> None:
        deque(map(step, actions), maxlen=0)

    return Calls(call, env.close, batches=BLOCK, before=lambda: env.reset(seed=next(seeds)))


def main() -> None:
    """Prints the table."""
    parser = arguments(__doc__, seconds=3.0)
    parser.add_argument("--chain", nargs="+", default=[""], help="parts of their names")
    options = parser.parse_args()
    print(f"{describe_machine(machine())}\n")
    print(heading("µs a step", *WAYS, "floor"), flush=True)
    rows = []
    for name, make in CHAINS.items():
        if not any(part in name for part in options.chain):
            continue
        ways = {**WAYS, "floor": FLOORS[name]} if name in FLOORS else WAYS
        starts = {way: partial(blocks, make, step) for way, step in ways.items()}
        try:
            results = race(starts, options.seconds)
        except ImportError as error:
            print(table_line(name, error, *[""] * 3))
            continue
        row = {way: result.median.batch_us for way, result in results.items()}
        rows.append({"chain": name, **row})
        shown = (f"{row[way]:.1f}" if way in row else "" for way in (*WAYS, "floor"))
        print(table_line(name, *shown), flush=True)
    write_results(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
