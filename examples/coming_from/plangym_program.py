"""A swarm of walkers plans, as in a program for plangym: only its import has changed.

    python examples/coming_from/plangym_program.py                  # CartPole, some seconds
    python examples/coming_from/plangym_program.py --moves 20

``from shmvec.adapters import plangym`` replaces ``import plangym``. Before each move the walkers
step from the game's present state. Those that have fallen, and some of those that do badly, go on
from the states of better ones. The first action of the best is played. (After Cerezo and Ballester
2018, "Fractal AI: A Fragile Theory of Intelligence", with a simpler rule.)
"""

import argparse

import numpy as np

from shmvec.adapters import plangym


def plan(env, state, walkers, horizon, rng):
    """Returns the first action of the best walker."""
    states = [state.copy() for _ in range(walkers)]
    first = actions = np.array([env.sample_action() for _ in range(walkers)])
    scores = np.zeros(walkers)
    for _ in range(horizon):
        dt = rng.integers(1, 4, walkers)
        states, observs, rewards, ends, truncateds, infos = env.step_batch(
            actions=actions, states=states, dt=dt
        )
        angles = np.array([abs(obs[2]) for obs in observs])
        ends = np.array(ends) | np.array(truncateds)
        scores += np.array(rewards) / np.array([info["n_step"] for info in infos]) - angles
        scores[ends] = -np.inf
        if ends.all():
            break
        others = rng.integers(0, walkers, walkers)
        moves = ends | ((scores[others] > scores) & (rng.random(walkers) < 0.5))
        others[ends] = rng.choice(np.flatnonzero(~ends), ends.sum())
        states = [
            states[other if move else i].copy()
            for i, (move, other) in enumerate(zip(moves, others, strict=True))
        ]
        first, scores = (np.where(moves, x[others], x) for x in (first, scores))
        actions = np.array([env.sample_action() for _ in range(walkers)])
    return int(first[np.argmax(scores)])


def main():
    """Plays one game, and prints its score."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--moves", type=int, default=200)
    parser.add_argument("--walkers", type=int, default=48)
    parser.add_argument("--horizon", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    env = plangym.make(name="CartPole-v1", n_workers=options.workers)
    state, obs, info = env.reset()
    score, moves = 0.0, 0
    for _ in range(options.moves):
        action = plan(env, state, options.walkers, options.horizon, rng)
        state, obs, reward, end, truncated, info = env.step(action=action, state=state)
        score += reward
        moves += 1
        if end or truncated:
            break
    env.close()
    print(f"{env.name}: score {score:g} after {moves} moves, each planned by {options.walkers}")


if __name__ == "__main__":
    main()
