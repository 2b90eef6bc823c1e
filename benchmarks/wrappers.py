"""What wrappers cost a step: in Python, and compiled.

One env in this process: its bare step, that of its wrappers, and that of their compiled twins, in
short blocks one after the other; the table has the medians of their times, in µs a step. The floor
of an Atari chain is what no wrapper saves: four frames, two screens, and to resize one, with the
same actions after the same resets. Then 32 envs in workers, with `compile_wrappers` off and on, in
thousands of steps a second; chains where Python is as fast are not compiled there.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import wrappers

from shmvec import ShmVectorEnv
from shmvec._wrappers import compiled, notes_of

BLOCK = 12  # steps: an untrained CartPole stands for longer


def cleanrl(name: str) -> gym.Env[Any, Any]:
    """An env as CleanRL's ppo_continuous_action wraps it."""
    env: Any = wrappers.FlattenObservation(gym.make(name))
    env = wrappers.ClipAction(wrappers.RecordEpisodeStatistics(env))
    env = wrappers.NormalizeObservation(env)
    env = wrappers.TransformObservation(env, clipped, env.observation_space)
    return wrappers.TransformReward(wrappers.NormalizeReward(env, gamma=0.99), clipped)


def clipped(value: Any) -> Any:
    """Between -10 and 10."""
    return np.clip(value, -10, 10)


def with_statistics(name: str) -> gym.Env[Any, Any]:
    """An env as CleanRL's ppo wraps it."""
    return wrappers.RecordEpisodeStatistics(gym.make(name))


def stable_baselines(name: str) -> gym.Env[Any, Any]:
    """An Atari env as Stable-Baselines3 wraps it."""
    from stable_baselines3.common.atari_wrappers import AtariWrapper
    from stable_baselines3.common.monitor import Monitor

    env = one_frame(name)
    # An AtariWrapper that is reset goes on with its episode, and at some time that is over.
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
    """An Atari env of which each step is a frame, and OpenCV with one thread, as in a worker."""
    import ale_py
    import cv2

    cv2.setNumThreads(1)
    gym.register_envs(ale_py)
    return gym.make(name, frameskip=1, repeat_action_probability=0)


def floor_of(env: Any, colours: bool) -> Callable[[int], Any]:
    """What a step of an Atari chain cannot do without: a function that does it."""
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


def one_env(
    make: Callable[[], Any], floor: Callable[[Any], Any] | None, seconds: float
) -> list[float]:
    """Microseconds of a step: bare, wrapped, compiled; and of its floor, if it has one."""
    envs = [make() for _ in range(4 if floor else 3)]
    stepper = compiled(envs[2], always=True)
    steps = [envs[0].unwrapped.step, envs[1].step, stepper.step]
    if floor:
        steps.append(floor(envs[3]))
    space = envs[0].unwrapped.action_space
    space.seed(1)
    actions = [space.sample() for _ in range(BLOCK)]
    times: list[list[float]] = [[] for _ in steps]
    end = time.perf_counter() + seconds
    seed = 0
    while time.perf_counter() < end:
        seed += 1
        for env, step, kept in zip(envs, steps, times, strict=True):
            env.reset(seed=seed)
            start = time.perf_counter()
            deque(map(step, actions), maxlen=0)
            kept.append(1e6 * (time.perf_counter() - start) / BLOCK)
    left = [why for _, why in notes_of(stepper) if why]
    if left:
        print(f"not all is compiled: {left}")
    return [median(each) for each in times]


def many_envs(make: Callable[[], Any], num_envs: int, seconds: float) -> list[float]:
    """Steps a second, in thousands: with wrappers in Python, and compiled."""
    rates: list[list[float]] = [[], []]
    with (
        closing(ShmVectorEnv([make] * num_envs, compile_wrappers=False)) as python,
        closing(ShmVectorEnv([make] * num_envs, compile_wrappers=True)) as twins,
    ):
        python.action_space.seed(1)
        actions = python.action_space.sample()
        for envs in (python, twins):
            envs.reset(seed=1)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for envs, kept in zip((python, twins), rates, strict=True):
                start = time.perf_counter()
                for _ in range(20):
                    envs.step(actions)
                kept.append(20e-3 * num_envs / (time.perf_counter() - start))
    return [median(each) for each in rates]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each chain, twice")
    parser.add_argument("--num-envs", type=int, default=32)
    given = parser.parse_args()
    print(f"| | bare | Python | compiled | floor | {given.num_envs} envs: Python | compiled |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, make in CHAINS.items():
        found = one_env(make, FLOORS.get(name), given.seconds)
        times = " | ".join([f"{each:.2f} µs" for each in found] + [""] * (4 - len(found)))
        rates = many_envs(make, given.num_envs, given.seconds)
        print(f"| {name} | {times} | {rates[0]:.1f} k/s | {rates[1]:.1f} k/s |", flush=True)


if __name__ == "__main__":
    main()
