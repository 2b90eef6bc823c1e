"""A program for SuperSuit's rows of agents: Stable-Baselines3's PPO learns for all agents at once.

    python examples/coming_from/pettingzoo_program.py

PettingZoo's tutorials use ``ss.pettingzoo_env_to_vec_env_v1(env)`` and
``ss.concat_vec_envs_v1(env, 8, base_class="stable_baselines3")``; here ``as_rows`` replaces them.
Then the policy plays by agent, as in PettingZoo. See docs/coming-from/pettingzoo.md.
"""

import argparse
from functools import partial

import numpy as np
from mpe2 import simple_spread_v3
from stable_baselines3 import PPO

from shmvec.adapters.pettingzoo import ParallelVectorEnv

EPISODE = 25


def play(model: PPO, make, num_envs: int = 16) -> float:
    """Returns the mean return of an agent in an episode; each acts on its own observations."""
    envs = ParallelVectorEnv([make] * num_envs)
    observations, _ = envs.reset(seed=1000)
    returns = 0.0
    for _ in range(EPISODE):
        actions = {
            agent: model.predict(observations[agent], deterministic=True)[0]
            for agent in envs.possible_agents
        }
        observations, rewards, _, _, _ = envs.step(actions)
        returns += np.mean(list(rewards.values()))
    envs.close()
    return float(returns)


def main() -> None:
    """Learns, and prints agents' mean returns before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--total-steps", type=int, default=100_000)
    total_steps = parser.parse_args().total_steps
    make = partial(simple_spread_v3.parallel_env, N=2, max_cycles=EPISODE)
    envs = ParallelVectorEnv([make] * 8, autoreset_mode="SameStep")
    rows = envs.as_rows("stable_baselines3")
    model = PPO("MlpPolicy", rows, n_steps=125, batch_size=250, seed=0)
    before = play(model, make)
    model.learn(total_steps)
    print(f"return {before:.1f} before, {play(model, make):.1f} after {model.num_timesteps} steps")
    rows.close()


if __name__ == "__main__":
    main()
