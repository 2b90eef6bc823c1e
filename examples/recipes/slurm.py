"""A run for Slurm: as many workers as the task has CPUs, and a seed from the job array.

    sbatch examples/recipes/slurm.sh
    python examples/recipes/slurm.py --seed 1     # without Slurm

By default there is a worker for each CPU: shmvec reads the affinity, the cgroup's quota and
SLURM_CPUS_PER_TASK (docs/containers.md). So the program needs no option for that.
"""

import argparse
import os
import socket

import shmvec


def main() -> None:
    """Step at random for a while."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    envs = shmvec.make_vec("CartPole-v1", num_envs=options.num_envs)
    job = os.environ.get("SLURM_JOB_ID", "none")
    cores = len(os.sched_getaffinity(0))
    print(f"{socket.gethostname()}, job {job}: {envs.num_workers} workers on {cores} CPUs")
    envs.action_space.seed(options.seed)
    envs.reset(seed=options.seed)
    total = 0.0
    for _ in range(options.steps):
        _, rewards, *_ = envs.step(envs.action_space.sample())
        total += rewards.sum()
    print(f"seed {options.seed}: reward {total:.0f}")
    print(envs.stats().verdict)  # what limits the speed on this node
    envs.close()


if __name__ == "__main__":
    main()
