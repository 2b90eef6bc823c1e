"""Learns CartPole with the cross-entropy method: each env of the batch tries its own policy.

Needs nothing but shmvec:

    python examples/cross_entropy.py

Prints the mean and the best length of an episode for each generation. The same seed gives the same
numbers on any machine, with any number of workers, and with partial batches: ``--batch-size 16``
chooses the actions of 16 envs while the others step. Replace ``shmvec.make_vec(...)`` by
``gymnasium.make_vec(..., vectorization_mode="async")`` to compare.
"""

import argparse
import time

import numpy as np

import shmvec


def evaluate(envs: shmvec.ShmVectorEnv, policies: np.ndarray, seed: int) -> np.ndarray:
    """Plays one episode with each linear policy (num_envs, 4); returns their lengths."""
    observations, _ = envs.reset(seed=seed)
    lengths = np.zeros(envs.num_envs)
    playing = np.ones(envs.num_envs, bool)
    while playing.any():
        actions = (np.einsum("ij,ij->i", observations, policies) > 0).astype(np.int64)
        observations, rewards, terminations, truncations, _ = envs.step(actions)
        lengths += rewards * playing
        playing &= ~(terminations | truncations)
    return lengths


def evaluate_in_parts(envs: shmvec.ShmVectorEnv, policies: np.ndarray, seed: int) -> np.ndarray:
    """Does the same by partial batches; an env whose episode is over is not stepped again."""
    envs.async_reset(seed=seed)
    lengths = np.zeros(envs.num_envs)
    in_flight = envs.num_envs
    while in_flight > 0:
        observations, rewards, terminations, truncations, infos = envs.recv(
            min_envs=min(envs.batch_size or envs.num_envs, in_flight)
        )
        ids = infos["env_id"]
        lengths[ids] += rewards  # 0 for a reset
        playing = ~(terminations | truncations)
        actions = (np.einsum("ij,ij->i", observations, policies[ids]) > 0).astype(np.int64)
        in_flight -= np.count_nonzero(~playing)
        if playing.any():
            envs.send(actions[playing], ids[playing])
    return lengths


def main() -> None:
    """Trains until the mean length exceeds 450, or for the given number of generations."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--generations", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch-size", type=int, help="choose actions for so many envs at a time")
    options = parser.parse_args()

    rng = np.random.default_rng(options.seed)
    mean, deviation = np.zeros(4), np.ones(4)
    envs = shmvec.make_vec("CartPole-v1", options.num_envs, batch_size=options.batch_size)
    play = evaluate if options.batch_size is None else evaluate_in_parts
    start = time.perf_counter()
    for generation in range(options.generations):
        policies = mean + deviation * rng.standard_normal((options.num_envs, 4))
        lengths = play(envs, policies, seed=1000 * generation)
        elite = policies[np.argsort(lengths)[-options.num_envs // 4 :]]
        mean, deviation = elite.mean(axis=0), elite.std(axis=0) + 0.05
        print(f"generation {generation:2}: mean {lengths.mean():5.1f}, best {lengths.max():5.1f}")
        if lengths.mean() > 450:
            break
    print(f"{time.perf_counter() - start:.1f} s")
    envs.close()


if __name__ == "__main__":
    main()
