"""RLlib's PPO, whose EnvRunners step their envs with shmvec. Only two settings change.

    pip install 'shmvec[cluster]' 'ray[rllib]' torch
    python examples/rllib_ppo.py

``gym_env_vectorize_mode="async"`` has an EnvRunner make Gymnasium's AsyncVectorEnv;
``worker_process_setup_hook`` runs ``shmvec.install()`` in each of Ray's processes, which puts
ShmVectorEnv in its place. An EnvRunner is an actor with as many workers as it has CPUs:
``num_cpus_per_env_runner``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import ray
from ray.rllib.algorithms.ppo import PPOConfig

import shmvec


def install() -> None:
    """Runs in each of Ray's processes."""
    shmvec.install()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--num-env-runners", type=int, default=1)
    parser.add_argument("--num-cpus-per-env-runner", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=8, help="of each EnvRunner")
    parser.add_argument("--iterations", type=int, default=3)
    options = parser.parse_args(arguments)
    ray.init(runtime_env={"worker_process_setup_hook": install}, log_to_driver=False)
    config = (
        PPOConfig()
        .environment(options.env_id)
        .env_runners(
            num_env_runners=options.num_env_runners,
            num_cpus_per_env_runner=options.num_cpus_per_env_runner,
            num_envs_per_env_runner=options.num_envs,
            gym_env_vectorize_mode="async",
        )
        .training(train_batch_size_per_learner=1024, minibatch_size=256, num_epochs=4)
    )
    algorithm = config.build_algo()
    kinds = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: type(runner.env.unwrapped).__name__, local_env_runner=False
    )
    print(f"the EnvRunners step envs by {', '.join(kinds)}")
    for iteration in range(options.iterations):
        results = algorithm.train()["env_runners"]
        mean = results["episode_return_mean"]
        print(f"iteration {iteration}: mean return {mean:.1f}", flush=True)
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
