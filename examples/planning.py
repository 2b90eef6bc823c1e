"""Plays by planning: random shooting from the game's present state, in parallel.

    python examples/planning.py                                # CartPole, about ten seconds
    python examples/planning.py --env pong --moves 60          # Pong: needs ale-py
    python examples/planning.py --plot plan.png                # also draws what happened

Nothing is learned. Before each move a few hundred random action sequences are tried from the
present state, all at once: `PlanningVectorEnv.step_batch` steps them in parallel on all cores.
The first action of the best sequence is played. (Random shooting is the simplest planner; see
Richards 2005, "Robust Constrained Model Predictive Control", and Nagabandi et al. 2018.)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec.planning import PlanningVectorEnv


@dataclass
class Task:
    """A game and how to plan in it.

    Attributes:
        make: Makes the env.
        horizon: How many actions a sequence has.
        hold: How many steps each action is repeated.
        moves: How many moves are played.
    """

    make: Callable[[], gym.Env[Any, Any]]
    horizon: int
    hold: int
    moves: int


def make_pong() -> gym.Env[Any, Any]:
    """Makes Pong without sticky actions, so that the emulator's state is complete."""
    import ale_py

    gym.register_envs(ale_py)
    return gym.make("ALE/Pong-v5", repeat_action_probability=0.0, render_mode="rgb_array")


TASKS = {
    "cartpole": Task(lambda: gym.make("CartPole-v1"), horizon=40, hold=1, moves=200),
    "pong": Task(make_pong, horizon=12, hold=3, moves=60),
}


def shoot(
    env: PlanningVectorEnv,
    state: Any,
    observation: Any,
    task: Task,
    samples: int,
    rng: np.random.Generator,
) -> tuple[Any, Any, int]:
    """Tries random sequences of actions from a state.

    Returns:
        The first action of the best sequence; the observations of all sequences, ``(horizon,
        samples, ...)``; and the number of steps.
    """
    states = np.stack([state] * samples)
    actions = rng.integers(env.action_space.n, size=(task.horizon, samples))
    returns = rng.random(samples) * 1e-6  # ties are broken at random
    observations = np.stack([observation] * samples)
    seen = []
    steps = 0
    alive = np.arange(samples)
    for depth in range(task.horizon):
        states[alive], observations[alive], rewards, ends, truncateds, _ = env.step_batch(
            actions[depth, alive], states[alive], dt=task.hold
        )
        returns[alive] += rewards
        steps += len(alive) * task.hold
        seen.append(observations.copy())
        alive = alive[~(ends | truncateds)]
        if len(alive) == 0:
            break
    return actions[0, np.argmax(returns)], np.stack(seen), steps


@dataclass
class Game:
    """A game: observations, rewards by move, the angles of planned sequences, planned steps."""

    observations: list[Any]
    rewards: list[float]
    plans: list[Any]
    steps: int = 0


def play(
    name: str, moves: int | None = None, samples: int = 200, seed: int = 0, planning: bool = True
) -> Game:
    """Plays a game by planning, or at random."""
    task = TASKS[name]
    rng = np.random.default_rng(seed)
    game = Game([], [], [])
    with PlanningVectorEnv(task.make) as env:
        state, observation, _ = env.reset(seed=seed)
        game.observations.append(observation)
        for _ in range(moves or task.moves):
            if planning:
                action, seen, steps = shoot(env, state, observation, task, samples, rng)
                game.steps += steps
                if name == "cartpole":
                    angles = seen[:, :, 2]
                    game.plans.append(np.where(np.abs(angles) < 0.21, angles, np.nan))  # it fell
            else:
                action = rng.integers(env.action_space.n)
            state, observation, reward, end, truncated, _ = env.step(action, state, dt=task.hold)
            game.observations.append(observation)
            game.rewards.append(reward)
            if end or truncated:
                break
    return game


def draw(path: Path, name: str, game: Game, at_random: Game) -> None:
    """Draws the game's rewards, those of random play, and what the game looked like."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), constrained_layout=True)
    above.plot(np.cumsum(game.rewards), label="planning")
    above.plot(np.cumsum(at_random.rewards), label="random actions")
    above.set(xlabel="move", ylabel="sum of rewards", title=f"{name}: random shooting")
    above.legend()
    if name == "cartpole":
        angles = [observation[2] for observation in game.observations]
        for start in range(0, len(game.plans), 15):
            ahead = game.plans[start][:, :30]
            steps = np.arange(start + 1, start + 1 + len(ahead))
            below.plot(steps, ahead, color="tab:gray", alpha=0.15, linewidth=0.7)
        below.plot(angles, color="tab:blue")
        below.set(xlabel="move", ylabel="pole's angle, rad", ylim=(-0.3, 0.3))
        below.set_title("the game (blue), and sequences that were tried (gray)")
    else:
        which = np.linspace(0, len(game.observations) - 1, 8).astype(int)
        below.imshow(np.concatenate([game.observations[i] for i in which], axis=1))
        below.set_title("the game at moves " + ", ".join(map(str, which)))
        below.axis("off")
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", choices=TASKS, default="cartpole")
    parser.add_argument("--moves", type=int, help="at most this many")
    parser.add_argument("--samples", type=int, default=200, help="sequences tried before each move")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")
    options = parser.parse_args()

    start = time.perf_counter()
    game = play(options.env, options.moves, options.samples, options.seed)
    elapsed = time.perf_counter() - start
    at_random = play(options.env, options.moves, 0, options.seed, planning=False)
    print(
        f"{options.env}: {sum(game.rewards):g} in {len(game.rewards)} moves by planning, "
        f"{sum(at_random.rewards):g} in {len(at_random.rewards)} at random; "
        f"{game.steps:,} steps planned in {elapsed:.1f} s"
    )
    if options.plot is not None:
        draw(options.plot, options.env, game, at_random)
        print(f"drawn: {options.plot}")


if __name__ == "__main__":
    main()
