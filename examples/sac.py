"""SAC in one file, in the shape of CleanRL's, on a `shmvec.Replay`: there is no buffer to fill.

    pip install 'shmvec[examples]'
    python examples/sac.py                                          # Pendulum, one minute
    python examples/sac.py --env-id HalfCheetah-v5 --total-timesteps 1000000  # needs mujoco

The algorithm is Haarnoja et al., 2018 (arXiv:1812.05905), with a learned temperature. Workers
record what their envs do. While they step, the learner learns from earlier transitions.
"""

from __future__ import annotations

import argparse
import copy
import math
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
    """Makes an env."""
    return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Makes a network with two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()),
        nn.Linear(256, outputs),
    )


class Agent(nn.Module):
    """A policy, two critics, and the temperature."""

    def __init__(self, observations: gym.spaces.Box, actions: gym.spaces.Box) -> None:
        """Makes the networks."""
        super().__init__()
        inputs, self.size = int(np.prod(observations.shape)), int(np.prod(actions.shape))
        self.policy = mlp(inputs, 2 * self.size)
        self.critics = nn.ModuleList(mlp(inputs + self.size, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        low, high = (torch.as_tensor(part).float() for part in (actions.low, actions.high))
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("center", (high + low) / 2)

    def act(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draws actions; returns them and their log-probabilities."""
        means, log_stds = self.policy(observations.float()).chunk(2, 1)
        normal = torch.distributions.Normal(means, (3.5 * log_stds.tanh() - 1.5).exp())
        raw = normal.rsample()
        squashed = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # log(1 - tanh²)
        log_probs = (normal.log_prob(raw) - squashed - self.scale.log()).sum(1)
        return raw.tanh() * self.scale + self.center, log_probs

    def values(self, critics: Any, observations: torch.Tensor, actions: torch.Tensor) -> Any:
        """Computes both critics' values, ``(2, n)``."""
        inputs = torch.cat([observations.float(), actions], 1)
        return torch.stack([critic(inputs)[:, 0] for critic in critics])


def learner(agent: Agent, replay: shmvec.Replay, options: argparse.Namespace) -> Any:
    """Returns a function that makes one update."""
    adam = partial(torch.optim.Adam, lr=options.learning_rate)
    critics, policy = adam(agent.critics.parameters()), adam(agent.policy.parameters())
    temperature = adam([agent.log_alpha])

    def step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def update() -> None:
        batch = replay.sample(options.batch_size, device=options.device)
        alpha = agent.log_alpha.exp().detach()
        with torch.no_grad():
            actions, log_probs = agent.act(batch.next_observations)
            best = agent.values(agent.targets, batch.next_observations, actions).amin(0)
            targets = batch.rewards + batch.discounts * (best - alpha * log_probs)
        errors = agent.values(agent.critics, batch.observations, batch.actions) - targets
        step(critics, errors.square().mean(1).sum())
        actions, log_probs = agent.act(batch.observations)
        best = agent.values(agent.critics, batch.observations, actions).amin(0)
        step(policy, (alpha * log_probs - best).mean())
        missing = log_probs.detach() - agent.size  # to the target entropy
        step(temperature, (-agent.log_alpha.exp() * missing).mean())
        with torch.no_grad():
            for old, new in zip(
                agent.targets.parameters(), agent.critics.parameters(), strict=True
            ):
                old.lerp_(new, options.tau)

    return update


def train(options: argparse.Namespace) -> None:
    """Trains, and prints the mean return on the way."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the envs need the cores
    envs = shmvec.ShmVectorEnv([partial(make, options.env_id)] * options.num_envs)
    replay = shmvec.Replay(envs, options.capacity, discount=options.gamma, seed=options.seed)
    agent = Agent(envs.single_observation_space, envs.single_action_space).to(options.device)
    update = learner(agent, replay, options)
    envs.action_space.seed(options.seed)

    recent: deque[float] = deque(maxlen=20)
    observations, _ = envs.reset(seed=options.seed)
    start, updates, next_report = time.perf_counter(), 0, 0
    for step in range(0, options.total_timesteps, options.num_envs):
        if step < options.learning_starts:
            actions = envs.action_space.sample()
        else:
            with torch.no_grad():
                inputs = torch.as_tensor(observations, device=options.device)
                actions = agent.act(inputs)[0].cpu().numpy()
        envs.step_async(actions)
        while updates < (step - options.learning_starts) // options.train_frequency:
            update()
            updates += 1
        observations, _, _, _, infos = envs.step_wait()
        if "episode" in infos:
            recent.extend(infos["episode"]["r"][infos["_episode"]].tolist())
        if recent and step >= next_report:
            rate = step / (time.perf_counter() - start)
            print(f"{step:9,} steps  mean return {np.mean(recent):8.1f}  {rate:7,.0f} steps/s")
            next_report = step + options.total_timesteps // 10
    print(f"{replay.stats().transitions:,} transitions, {updates:,} updates")
    replay.close()
    envs.close()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--env-id", default="Pendulum-v1")
    parser.add_argument("--total-timesteps", type=int, default=10_000)
    parser.add_argument("--num-envs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--capacity", type=int, default=100_000, help="of the replay")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--learning-starts", type=int, default=500, help="steps")
    parser.add_argument("--train-frequency", type=int, default=1, help="steps for each update")
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--tau", type=float, default=0.005)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
