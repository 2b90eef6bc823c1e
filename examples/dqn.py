"""DQN in one file, in the shape of CleanRL's, on a `shmvec.Replay`: there is no buffer to fill.

    pip install 'shmvec[examples]'
    python examples/dqn.py                                          # CartPole, half a minute
    python examples/dqn.py --env-id ALE/Pong-v5 --num-envs 8 --total-timesteps 1000000 \
        --learning-starts 20000 --capacity 300000 --batch-size 32 --learning-rate 1e-4

Workers record what their envs do. While they step, the learner learns from earlier transitions.
Each of Atari's stacked frames is stored once.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import deque
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import shmvec


def make(env_id: str) -> gym.Env[Any, Any]:
    """Makes an env; Atari's games are preprocessed as in Mnih et al., 2015."""
    if not env_id.startswith("ALE/"):
        return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))
    import ale_py

    gym.register_envs(ale_py)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id, frameskip=1))
    env = gym.wrappers.AtariPreprocessing(env, noop_max=30)
    return gym.wrappers.FrameStackObservation(env, 4)


class QNetwork(nn.Module):
    """Computes the values of all actions."""

    def __init__(self, observations: gym.Space[Any], actions: int) -> None:
        """Makes convolutions for stacks of frames, else two layers."""
        super().__init__()
        size = observations.shape
        self.pictures = len(size) == 3
        if self.pictures:
            convolutions = nn.Sequential(
                *(nn.Conv2d(size[0], 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()),
                *(nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten()),
            )
            features = convolutions(torch.zeros(1, *size)).shape[1]
            self.layers = nn.Sequential(
                convolutions, nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, actions)
            )
        else:
            self.layers = nn.Sequential(
                *(nn.Flatten(), nn.Linear(int(np.prod(size)), 120), nn.ReLU()),
                *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions)),
            )

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Returns values ``(n, actions)``."""
        observations = observations.float()
        return self.layers(observations / 255 if self.pictures else observations)


def train(options: argparse.Namespace) -> None:
    """Trains, and prints the mean return on the way."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the envs need the cores
    rng = np.random.default_rng(options.seed)
    envs = shmvec.ShmVectorEnv([partial(make, options.env_id)] * options.num_envs)
    replay = shmvec.Replay(envs, options.capacity, discount=options.gamma, seed=options.seed)
    num_actions = int(envs.single_action_space.n)
    network = QNetwork(envs.single_observation_space, num_actions).to(options.device)
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=options.learning_rate)

    def learn() -> None:
        batch = replay.sample(options.batch_size, device=options.device)
        with torch.no_grad():
            rewards = batch.rewards.sign() if network.pictures else batch.rewards
            targets = rewards + batch.discounts * target(batch.next_observations).amax(1)
        values = network(batch.observations).gather(1, batch.actions[:, None])[:, 0]
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(values, targets).backward()
        optimizer.step()

    recent: deque[float] = deque(maxlen=50)
    observations, _ = envs.reset(seed=options.seed)
    start, updates, next_report = time.perf_counter(), 0, 0
    for step in range(0, options.total_timesteps, options.num_envs):
        epsilon = max(0.05, 1 - step / (options.exploration * options.total_timesteps))
        with torch.no_grad():
            inputs = torch.as_tensor(observations, device=options.device)
            actions = network(inputs).argmax(1).cpu().numpy()
        exploring = rng.random(options.num_envs) < epsilon
        actions[exploring] = rng.integers(num_actions, size=np.count_nonzero(exploring))
        envs.step_async(actions)
        while updates < (step - options.learning_starts) // options.train_frequency:
            learn()
            updates += 1
            if updates % options.target_frequency == 0:
                target.load_state_dict(network.state_dict())
        observations, _, _, _, infos = envs.step_wait()
        if "episode" in infos:
            recent.extend(infos["episode"]["r"][infos["_episode"]].tolist())
        if recent and step >= next_report:
            rate = step / (time.perf_counter() - start)
            print(f"{step:9,} steps  mean return {np.mean(recent):7.1f}  {rate:7,.0f} steps/s")
            next_report = step + options.total_timesteps // 10
    print(f"{replay.stats().transitions:,} transitions, {updates:,} updates")
    replay.close()
    envs.close()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--total-timesteps", type=int, default=60_000)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--capacity", type=int, default=20_000, help="of the replay")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--learning-starts", type=int, default=1_000, help="steps")
    parser.add_argument("--train-frequency", type=int, default=4, help="steps for each update")
    parser.add_argument("--target-frequency", type=int, default=100, help="updates")
    parser.add_argument("--exploration", type=float, default=0.3, help="share of the steps")
    parser.add_argument("--gamma", type=float, default=0.99)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
