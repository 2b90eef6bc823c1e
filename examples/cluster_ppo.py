"""PPO from fragments: the same file on a laptop and on a cluster of any size.

    pip install 'shmvec[cluster,examples,bench]'
    python examples/cluster_ppo.py --local                      # no Ray: to debug
    python examples/cluster_ppo.py                              # Ray on this machine
    python examples/cluster_ppo.py --env-id HalfCheetah-v5 --num-envs 16 --total-steps 1000000
    ray job submit --working-dir examples -- python cluster_ppo.py      # on a cluster

Runners, one on each node, step their envs with their own copy of the policy. The learner, which is
this process, updates the policy with each fragment that comes, and sends its weights back. With
``--ordered`` the same seed gives the same learning curve each time, and with ``--local`` as well.

The algorithm is Schulman et al., 2017 (arXiv:1707.06347). Fragments may come from weights of some
updates ago; the clipped ratio of probabilities accounts for that.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import shmvec
from shmvec.cluster import Collector, Fragment

Weights = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Result:
    """The results of a training run."""

    episodes: int
    mean_return: float  # of the last 100 episodes
    digest: str  # of all episodes' returns
    steps_per_second: float


class Agent(nn.Module):
    """A policy over discrete or continuous actions, and a value function."""

    def __init__(self, observation_size: int, action_space: gym.Space[Any]) -> None:
        """Initialises orthogonally, the policy's last layer close to zero."""
        super().__init__()
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        outputs = int(action_space.n if self.discrete else np.prod(action_space.shape))
        self.policy = _network(observation_size, outputs, gain=0.01)
        self.value = _network(observation_size, 1, gain=1.0)
        self.log_std = nn.Parameter(torch.zeros(0 if self.discrete else outputs))
        self.register_buffer("mean", torch.zeros(observation_size))
        self.register_buffer("std", torch.ones(observation_size))

    def normal(self, observations: torch.Tensor) -> torch.Tensor:
        """Normalises observations by the statistics of those that the learner got."""
        return ((observations - self.mean) / self.std).clamp(-10, 10)

    def distribution(self, observations: torch.Tensor) -> torch.distributions.Distribution:
        """The distribution of actions, for normalised observations."""
        outputs = self.policy(observations)
        if self.discrete:
            return torch.distributions.Categorical(logits=outputs)
        normal = torch.distributions.Normal(outputs, self.log_std.exp())
        return torch.distributions.Independent(normal, 1)

    def sample(
        self, actions: torch.distributions.Distribution, generator: torch.Generator
    ) -> torch.Tensor:
        """Draws actions from a distribution, by this generator."""
        if self.discrete:
            return torch.multinomial(actions.probs, 1, generator=generator)[:, 0]
        noise = torch.randn(actions.mean.shape, generator=generator)
        return actions.mean + actions.stddev * noise

    def weights(self) -> Weights:
        """The parameters, as arrays that are sent without a copy."""
        return {name: value.numpy() for name, value in self.state_dict().items()}


def _network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size, width, scale in ((inputs, 64, 2**0.5), (64, 64, 2**0.5), (64, outputs, gain)):
        layer = nn.Linear(size, width)
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Actor:
    """The policy of a runner."""

    def __init__(self, env_id: str, seed: int) -> None:
        """Makes an agent, whose parameters the learner sets."""
        torch.set_num_threads(1)  # the networks are tiny, and the envs need the cores
        env = gym.make(env_id)
        self._agent = Agent(env.observation_space.shape[0], env.action_space)
        env.close()
        self._random = torch.Generator().manual_seed(seed)

    def set_weights(self, weights: Weights) -> None:
        """Takes the learner's weights."""
        self._agent.load_state_dict({key: torch.tensor(value) for key, value in weights.items()})

    def __call__(self, observations: Any, env_ids: Any) -> tuple[Any, dict[str, Any]]:
        """Draws actions; returns them, their log-probabilities and values."""
        with torch.no_grad():
            inputs = self._agent.normal(torch.tensor(observations, dtype=torch.float32))
            distribution = self._agent.distribution(inputs)
            actions = self._agent.sample(distribution, self._random)
            extras = {
                "log_probs": distribution.log_prob(actions).numpy(),
                "values": self._agent.value(inputs)[:, 0].numpy(),
            }
        return actions.numpy(), extras


class Learner:
    """Updates an agent with fragments."""

    def __init__(self, collector: Collector, options: argparse.Namespace) -> None:
        """Makes the agent."""
        torch.manual_seed(options.seed)
        torch.set_num_threads(1)
        space = collector.single_observation_space
        self.agent = Agent(space.shape[0], collector.single_action_space)
        self._options = options
        self._optimizer = torch.optim.Adam(
            self.agent.parameters(), lr=options.learning_rate, eps=1e-5
        )
        self._count, self._mean = 1e-4, torch.zeros(space.shape[0], dtype=torch.float64)
        self._squares = torch.zeros(space.shape[0], dtype=torch.float64)

    def update(self, fragment: Fragment, left: float) -> None:
        """Learns from a fragment by epochs of minibatches; ``left`` is the run's share to come."""
        options, agent = self._options, self.agent
        self._optimizer.param_groups[0]["lr"] = left * options.learning_rate
        valid = torch.tensor(fragment.valid)
        observations = torch.tensor(fragment.observations, dtype=torch.float32)
        inputs = agent.normal(observations)
        log_probs = torch.tensor(fragment.extras["log_probs"])[valid]
        with torch.no_grad():
            last = agent.value(inputs[-1])[:, 0]
        values = torch.cat([torch.tensor(fragment.extras["values"]), last[None]])
        advantages = self._advantages(fragment, values)
        returns, advantages = (advantages + values[:-1])[valid], advantages[valid]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        inputs, actions = inputs[:-1][valid], torch.tensor(fragment.actions)[valid]
        for _ in range(options.epochs):
            for batch in torch.randperm(len(actions)).split(options.minibatch_size):
                log_prob = agent.distribution(inputs[batch]).log_prob(actions[batch])
                ratio = (log_prob - log_probs[batch]).exp()
                clipped = ratio.clamp(1 - options.clip, 1 + options.clip)
                surrogate = torch.min(ratio * advantages[batch], clipped * advantages[batch])
                errors = agent.value(inputs[batch])[:, 0] - returns[batch]
                loss = 0.25 * errors.square().mean() - surrogate.mean()
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                self._optimizer.step()
        if options.normalize:
            self._add_to_statistics(observations[:-1][valid].double())

    def _advantages(self, fragment: Fragment, values: torch.Tensor) -> torch.Tensor:
        """Generalised advantage estimates; sums stop where an episode ends."""
        options = self._options
        rewards = options.reward_scale * torch.tensor(fragment.rewards[1:], dtype=torch.float32)
        nonterminal = 1 - torch.tensor(fragment.terminations[1:]).float()
        ends = torch.tensor((fragment.terminations | fragment.truncations)[1:]).float()
        advantages = torch.zeros_like(rewards)
        advantage = torch.zeros_like(values[-1])
        for t in reversed(range(len(rewards))):
            delta = rewards[t] + options.gamma * values[t + 1] * nonterminal[t] - values[t]
            advantage = delta + options.gamma * options.gae_lambda * (1 - ends[t]) * advantage
            advantages[t] = advantage
        return advantages

    def _add_to_statistics(self, observations: torch.Tensor) -> None:
        """Updates the mean and deviation of observations."""
        self._count += len(observations)
        delta = observations - self._mean
        self._mean += delta.sum(0) / self._count
        self._squares += (delta * (observations - self._mean)).sum(0)
        self.agent.mean.copy_(self._mean)
        self.agent.std.copy_((self._squares / self._count).sqrt() + 1e-4)


class Returns:
    """The returns of episodes that have ended."""

    def __init__(self) -> None:
        """Begins without episodes."""
        self.all: list[float] = []
        self.recent: deque[float] = deque(maxlen=100)
        self._running: dict[int, npt.NDArray[np.float64]] = defaultdict(lambda: np.zeros(1))

    def add(self, fragment: Fragment) -> None:
        """Adds those of a fragment; an unfinished episode goes on in the runner's next one."""
        running = self._running[fragment.runner] + np.zeros(fragment.rewards.shape[1])
        ends = fragment.terminations | fragment.truncations
        for rewards, over in zip(fragment.rewards[1:], ends[1:], strict=True):
            running += rewards
            self.all += running[over].tolist()
            self.recent.extend(running[over].tolist())
            running[over] = 0
        self._running[fragment.runner] = running


def make_envs(env_id: str, num_envs: int) -> shmvec.ShmVectorEnv:
    """The envs of a runner: a worker for each of its CPUs."""
    return shmvec.ShmVectorEnv([partial(gym.make, env_id)] * num_envs)


def train(options: argparse.Namespace) -> Result:
    """Trains, and logs on the way."""
    begin = time.perf_counter()
    returns, steps, reports = Returns(), 0, 0
    with Collector(
        partial(make_envs, options.env_id, options.num_envs),
        partial(Actor, options.env_id),
        options.num_steps,
        options.num_runners,
        options.in_flight,
        options.seed,
        ordered=options.ordered,
        local=options.local,
    ) as collector:
        learner = Learner(collector, options)
        collector.set_weights(learner.agent.weights())
        for fragment in collector:
            steps += fragment.steps
            returns.add(fragment)
            learner.update(fragment, max(0.0, 1 - steps / options.total_steps))
            collector.set_weights(learner.agent.weights())
            if steps * 20 // options.total_steps > reports or steps >= options.total_steps:
                reports = steps * 20 // options.total_steps
                mean = f"{np.mean(returns.recent):8.1f}" if returns.recent else "       -"
                print(f"{steps:9,} steps  mean return {mean}  {collector.stats()}", flush=True)
            if steps >= options.total_steps:
                break
    return Result(
        len(returns.all),
        float(np.mean(returns.recent)) if returns.recent else 0.0,
        hashlib.sha256(np.array(returns.all).tobytes()).hexdigest()[:16],
        steps / (time.perf_counter() - begin),
    )


def main(arguments: Sequence[str] | None = None) -> Result:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--local", action="store_true", help="no Ray: all in this process")
    parser.add_argument("--ordered", action="store_true", help="fragments in rounds of the runners")
    parser.add_argument("--num-runners", type=int, help="None: one on each node")
    parser.add_argument("--in-flight", type=int, default=1, help="fragments of each runner")
    parser.add_argument("--num-envs", type=int, default=8, help="of each runner")
    parser.add_argument("--num-steps", type=int, default=128, help="of each env in a fragment")
    parser.add_argument("--total-steps", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--minibatch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="falls to 0")
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--reward-scale", type=float, default=0.1)
    parser.add_argument("--normalize", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("shmvec.cluster").setLevel(logging.INFO)
    result = train(options)
    print(
        f"{options.env_id}, seed {options.seed}: {result.episodes} episodes, mean return of the "
        f"last 100 {result.mean_return:.1f}, {result.steps_per_second:,.0f} steps/s, learning "
        f"curve {result.digest}"
    )
    return result


if __name__ == "__main__":
    main()
