"""A program for Stable-Baselines3's ``SubprocVecEnv``: PPO learns CartPole, and is evaluated.

    python examples/coming_from/sb3_program.py

Only ``vec_env_cls`` has changed. See docs/coming-from/sb3.md.
"""

import argparse

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from shmvec.adapters.sb3 import ShmVecEnv


def main() -> None:
    """Learns, and prints the mean return before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--total-steps", type=int, default=10_000)
    total_steps = parser.parse_args().total_steps
    env = make_vec_env("CartPole-v1", n_envs=8, seed=0, vec_env_cls=ShmVecEnv)
    env = VecNormalize(env, norm_reward=False)
    model = PPO("MlpPolicy", env, n_steps=128, batch_size=256, learning_rate=1e-3, seed=1)
    before, _ = evaluate_policy(model, env, n_eval_episodes=10)
    model.learn(total_steps)
    after, _ = evaluate_policy(model, env, n_eval_episodes=10)
    print(f"return {before:.0f} before, {after:.0f} after {model.num_timesteps} steps")
    env.close()


if __name__ == "__main__":
    main()
