"""A hyper-parameter search, with a process and a share of the cores for each trial that runs.

    pip install shmvec
    python examples/recipes/hyperparameters.py              # random search
    python examples/recipes/hyperparameters.py --optuna     # pip install optuna

Each trial has a ShmVectorEnv of its own, and num_workers= is its share of the cores. A trial that
uses torch should call torch.set_num_threads(cores).
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import shmvec

NUM_TRIALS, AT_ONCE = 4, 2
SPACE = {"deviation": (0.1, 3.0), "noise": (0.0, 0.5)}


def trial(parameters: dict[str, float], cores: int) -> float:
    """Train CartPole by the cross-entropy method; return the last mean return."""
    rng, mean, deviation = np.random.default_rng(1), np.zeros(4), parameters["deviation"]
    with shmvec.make_vec("CartPole-v1", num_envs=16, num_workers=min(cores, 16)) as envs:
        for generation in range(3):
            policies = mean + deviation * rng.standard_normal((16, 4))
            observations, _ = envs.reset(seed=generation)
            lengths, playing = np.zeros(16), np.ones(16, bool)
            while playing.any():
                actions = ((observations * policies).sum(1) > 0).astype(int)
                observations, _, terminations, truncations, _ = envs.step(actions)
                lengths += playing
                playing &= ~(terminations | truncations)
            elite = policies[lengths.argsort()[-4:]]
            mean, deviation = elite.mean(0), elite.std(0) + parameters["noise"]
        return float(lengths.mean())


if __name__ == "__main__":
    cores = max(1, len(os.sched_getaffinity(0)) // AT_ONCE)
    with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn")) as pool:
        if "--optuna" in sys.argv:
            import optuna

            def objective(asked: optuna.Trial) -> float:
                """Run a trial in a process of the pool."""
                parameters = {name: asked.suggest_float(name, *SPACE[name]) for name in SPACE}
                return pool.submit(trial, parameters, cores).result()

            study = optuna.create_study(direction="maximize")
            study.optimize(objective, n_trials=NUM_TRIALS, n_jobs=AT_ONCE)
            print(f"best: {study.best_value:.1f} {study.best_params}")
        else:
            rng = np.random.default_rng(1)
            drawn = [{n: rng.uniform(*SPACE[n]) for n in SPACE} for _ in range(NUM_TRIALS)]
            scores = list(pool.map(trial, drawn, [cores] * NUM_TRIALS))
            print(f"best: {max(scores):.1f} {drawn[np.argmax(scores)]}")
