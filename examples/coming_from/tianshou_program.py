"""A program for Tianshou's ``SubprocVectorEnv``: DQN learns CartPole, by the procedural API.

    python examples/coming_from/tianshou_program.py

It is a shorter form of the program in Tianshou's README. Only the import of the vector env has
changed. See docs/coming-from/tianshou.md.
"""

import argparse

import gymnasium as gym
import tianshou as ts
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import CollectStats
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.space_info import SpaceInfo

from shmvec.adapters.tianshou import SubprocVectorEnv

TASK = "CartPole-v1"


def main() -> None:
    """Learns, and prints the best return of a test."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--epoch-steps", type=int, default=2_000)
    arguments = parser.parse_args()
    training_envs = SubprocVectorEnv([lambda: gym.make(TASK)] * 10, num_workers=2)
    test_envs = SubprocVectorEnv([lambda: gym.make(TASK)] * 20, num_workers=2)
    env = gym.make(TASK)
    space_info = SpaceInfo.from_env(env)
    net = Net(
        state_shape=space_info.observation_info.obs_shape,
        action_shape=space_info.action_info.action_shape,
        hidden_sizes=[64, 64],
    )
    policy = DiscreteQLearningPolicy(
        model=net, action_space=env.action_space, eps_training=0.1, eps_inference=0.05
    )
    algorithm = ts.algorithm.DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=1e-3),
        gamma=0.9,
        n_step_return_horizon=3,
        target_update_freq=320,
    )
    buffer = ts.data.VectorReplayBuffer(20_000, len(training_envs))
    training_collector = ts.data.Collector[CollectStats](
        algorithm, training_envs, buffer, exploration_noise=True
    )
    test_collector = ts.data.Collector[CollectStats](algorithm, test_envs, exploration_noise=True)

    def stop(mean_return: float) -> bool:
        return mean_return >= 195

    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=training_collector,
            test_collector=test_collector,
            max_epochs=arguments.epochs,
            epoch_num_steps=arguments.epoch_steps,
            collection_step_num_env_steps=10,
            test_step_num_episodes=20,
            batch_size=64,
            update_step_num_gradient_steps_per_sample=1 / 10,
            stop_fn=stop,
            show_progress=False,
        )
    )
    print(f"best return {result.best_reward:.0f} after {result.train_step} steps")
    training_envs.close()
    test_envs.close()


if __name__ == "__main__":
    main()
