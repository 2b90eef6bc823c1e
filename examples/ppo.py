"""PPO on CartPole in one file: the same script, and the same learning curve, on either class.

    pip install 'shmvec[examples]'
    python examples/ppo.py                      # shmvec.ShmVectorEnv
    python examples/ppo.py --vector-env async   # gymnasium.vector.AsyncVectorEnv
    python examples/ppo.py --data rollout       # workers write where the learner reads
    python examples/ppo.py --data pipeline      # half of the envs step while the policy computes
    tensorboard --logdir runs

The last line has a digest of all episodes' returns: the same seed gives the same digest with every
class, for any number of workers. (``--data pipeline`` asks the policy about half of the envs at a
time. So that the digest is the same there, the noise of actions is drawn when a rollout begins.)

The algorithm is Schulman et al., 2017 (arXiv:1707.06347), with generalised advantages. Vector envs
reset at the step after an episode's end (``AutoresetMode.NEXT_STEP``). That step's action is not
used, so the step is left out of the batch. The observation at the end is the episode's own, so the
value after a truncation is bootstrapped from it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import shmvec

VECTOR_ENVS = {
    "shm": shmvec.ShmVectorEnv,
    "async": gym.vector.AsyncVectorEnv,
    "sync": gym.vector.SyncVectorEnv,
}


@dataclass(frozen=True)
class Result:
    """The results of a training run."""

    episodes: int
    mean_return: float  # of the last 100 episodes
    digest: str  # of all episodes' returns
    steps_per_second: float
    handling: float  # seconds spent on data, neither in the networks nor in the envs
    collecting: float  # seconds spent on rollouts: all but learning from them


class Agent(nn.Module):
    """Two small networks: a policy over discrete actions, and a value function."""

    def __init__(self, observation_size: int, num_actions: int, width: int = 64) -> None:
        """Initialises orthogonally, the policy's last layer close to uniform."""
        super().__init__()
        self.policy = _network(observation_size, width, num_actions, advantage=0.01)
        self.value = _network(observation_size, width, 1, advantage=1.0)


def _network(inputs: int, width: int, outputs: int, advantage: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    sizes = (inputs, width, 2**0.5), (width, width, 2**0.5), (width, outputs, advantage)
    for size, following, scale in sizes:
        layer = nn.Linear(size, following)
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


@dataclass
class Transitions:
    """Arrays ``(steps, envs)`` of what a policy did; ``valid`` is 0 where a step was a reset."""

    observations: torch.Tensor
    actions: torch.Tensor
    log_probs: torch.Tensor
    values: torch.Tensor
    rewards: torch.Tensor
    terminations: torch.Tensor
    ends: torch.Tensor
    valid: torch.Tensor

    def advantages(self, next_value: torch.Tensor, gamma: float, gae: float) -> torch.Tensor:
        """Generalised advantage estimates; sums stop where an episode ends."""
        values = torch.cat([self.values, next_value[None]])
        advantages = torch.zeros_like(self.rewards)
        advantage = torch.zeros_like(next_value)
        for t in reversed(range(len(self.rewards))):
            bootstrapped = gamma * values[t + 1] * (1 - self.terminations[t])
            delta = self.rewards[t] + bootstrapped - values[t]
            advantage = delta + gamma * gae * (1 - self.ends[t]) * advantage
            advantages[t] = advantage
        return advantages


class Collector:
    """Lets a policy act, and collects transitions by copying the results of each step.

    Attributes:
        next_observation: What the envs show after the last step.
        handling: Seconds spent on data: neither in the networks nor in the envs.
    """

    def __init__(self, envs: gym.vector.VectorEnv, num_steps: int, seed: int) -> None:
        """Resets the envs."""
        self.envs, self.num_steps = envs, num_steps
        self._noise = torch.empty(num_steps, envs.num_envs, int(envs.single_action_space.n))
        self.next_observation = _tensor(envs.reset(seed=seed)[0])
        self.handling = 0.0
        self._ended = torch.zeros(envs.num_envs)
        self._returns = np.zeros(envs.num_envs)
        self._lengths = np.zeros(envs.num_envs, int)

    def collect(self, agent: Agent) -> Transitions:
        """Makes ``num_steps`` steps."""
        shape = self.num_steps, self.envs.num_envs
        self._noise.exponential_()
        begin = time.perf_counter()
        observations = torch.zeros(*shape, *self.next_observation.shape[1:])
        transitions = Transitions(observations, *(torch.zeros(shape) for _ in range(7)))
        self.handling += time.perf_counter() - begin
        for t in range(self.num_steps):
            with torch.no_grad():
                action, log_prob, value = act(agent, self.next_observation, self._noise[t])
            begin = time.perf_counter()
            transitions.observations[t], transitions.actions[t] = self.next_observation, action
            transitions.log_probs[t], transitions.values[t] = log_prob, value
            transitions.valid[t] = 1 - self._ended  # after an end this step is a reset
            self.handling += time.perf_counter() - begin
            results = self.envs.step(action.numpy())
            begin = time.perf_counter()
            observation, rewards, terminations, truncations, _ = results
            self.next_observation = _tensor(observation)
            transitions.rewards[t], transitions.terminations[t] = (
                _tensor(rewards),
                _tensor(terminations),
            )
            transitions.ends[t] = self._ended = _tensor(terminations | truncations)
            self.handling += time.perf_counter() - begin
        return transitions

    def finished(self, transitions: Transitions) -> Iterator[tuple[int, int, float, int]]:
        """Yields step, env, return and length of each episode that ended."""
        rewards, ends, valid = (
            part.numpy() for part in (transitions.rewards, transitions.ends, transitions.valid)
        )
        for t in range(self.num_steps):
            self._returns += rewards[t]
            self._lengths += valid[t].astype(int)
            for env in np.flatnonzero(ends[t]):
                yield t, int(env), self._returns[env], self._lengths[env]
                self._returns[env] = self._lengths[env] = 0


class RolloutCollector(Collector):
    """Collects without copies: workers write each step where the learner reads it."""

    envs: shmvec.ShmVectorEnv

    def collect(self, agent: Agent) -> Transitions:
        """Makes ``num_steps`` steps."""
        log_probs, values = [], []
        self._noise.exponential_()
        begin = time.perf_counter()
        rollout = self.envs.rollout(self.num_steps)
        observations = torch.from_numpy(rollout.observations)
        self.handling += time.perf_counter() - begin
        for t in range(self.num_steps):
            with torch.no_grad():
                action, log_prob, value = act(agent, observations[t], self._noise[t])
            log_probs.append(log_prob)
            values.append(value)
            rollout.step(action.numpy())
        begin = time.perf_counter()
        transitions = self._transitions_of(rollout, torch.stack(log_probs), torch.stack(values))
        self.handling += time.perf_counter() - begin
        return transitions

    def _transitions_of(
        self, rollout: Any, log_probs: torch.Tensor, values: torch.Tensor
    ) -> Transitions:
        """Makes tensors of a rollout, without copies."""
        observations = torch.from_numpy(rollout.observations)
        self.next_observation = observations[-1]
        ended = torch.from_numpy(rollout.terminations | rollout.truncations).float()
        return Transitions(
            observations[:-1],
            torch.from_numpy(rollout.actions),
            log_probs,
            values,
            torch.from_numpy(rollout.rewards[1:]).float(),
            torch.from_numpy(rollout.terminations[1:]).float(),
            ended[1:],
            1 - ended[:-1],
        )


class PipelineCollector(RolloutCollector):
    """Steps half of the envs while the policy is asked about the others, if that pays."""

    def __init__(self, envs: shmvec.ShmVectorEnv, num_steps: int, seed: int) -> None:
        """Resets the envs."""
        super().__init__(envs, num_steps, seed)
        self._pipeline = shmvec.Pipeline(envs, self._act)
        self._steps = np.zeros(envs.num_envs, np.int64)
        self._agent: Agent

    def collect(self, agent: Agent) -> Transitions:
        """Makes ``num_steps`` steps."""
        self._noise.exponential_()
        self._agent, self._steps[:] = agent, 0
        rollout = self._pipeline.collect(self.num_steps)
        begin = time.perf_counter()
        extras = (torch.from_numpy(rollout.extras[key]) for key in ("log_probs", "values"))
        transitions = self._transitions_of(rollout, *extras)
        self.handling += time.perf_counter() - begin
        return transitions

    def _act(self, observations: Any, env_ids: Any) -> tuple[Any, dict[str, Any]]:
        """Chooses actions for some envs."""
        noise = self._noise[self._steps[env_ids], env_ids]
        self._steps[env_ids] += 1
        with torch.no_grad():
            action, log_prob, value = act(self._agent, torch.from_numpy(observations), noise)
        return action, {"log_probs": log_prob, "values": value}


def act(
    agent: Agent, observations: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples actions; returns them, their log-probabilities, and the observations' values.

    Args:
        agent: The networks.
        observations: ``(n, ...)``.
        noise: ``(n, actions)``, from the exponential distribution. The action whose probability
            divided by its noise is the largest is a sample of these probabilities.
    """
    policy = Categorical(logits=agent.policy(observations))
    action = (policy.probs / noise).argmax(-1)
    return action, policy.log_prob(action), agent.value(observations)[:, 0]


COLLECTORS = {"copy": Collector, "rollout": RolloutCollector, "pipeline": PipelineCollector}


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    transitions: Transitions,
    advantages: torch.Tensor,
    options: argparse.Namespace,
    clip: float,
) -> dict[str, float]:
    """Learns by epochs of minibatches; returns the last minibatch's losses."""
    valid = transitions.valid.flatten().bool()
    observations = transitions.observations.flatten(0, 1)[valid]
    actions, old_log_probs, old_values, advantages = (
        part.flatten()[valid]
        for part in (transitions.actions, transitions.log_probs, transitions.values, advantages)
    )
    returns = advantages + old_values
    clipped: list[float] = []
    for _ in range(options.epochs):
        for batch in torch.randperm(len(actions)).split(options.minibatch_size):
            policy = Categorical(logits=agent.policy(observations[batch]))
            log_ratio = policy.log_prob(actions[batch]) - old_log_probs[batch]
            ratio = log_ratio.exp()
            advantage = advantages[batch]
            if len(advantage) > 1:
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            value_loss = 0.5 * (agent.value(observations[batch])[:, 0] - returns[batch]).square()
            entropy = policy.entropy().mean()
            loss = (
                -surrogate.mean()
                + options.value_coefficient * value_loss.mean()
                - options.entropy_coefficient * entropy
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), options.max_grad_norm)
            optimizer.step()
            clipped.append(((ratio - 1).abs() > clip).float().mean().item())
    unexplained = (returns - old_values).var() / returns.var().clamp_min(1e-8)
    return {
        "losses/policy_loss": -surrogate.mean().item(),
        "losses/value_loss": value_loss.mean().item(),
        "losses/entropy": entropy.item(),
        "losses/old_approx_kl": -log_ratio.mean().item(),
        "losses/approx_kl": (ratio - 1 - log_ratio).mean().item(),
        "losses/clipfrac": float(np.mean(clipped)),
        "losses/explained_variance": 1 - unexplained.item(),
    }


def train(options: argparse.Namespace) -> Result:
    """Trains, and logs on the way."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the networks are tiny, and the envs need the cores
    make = VECTOR_ENVS[options.vector_env]
    workers = {} if options.num_workers is None else {"num_workers": options.num_workers}
    envs = make([lambda: gym.make(options.env_id)] * options.num_envs, **workers)
    observation_size = int(np.prod(envs.single_observation_space.shape))
    agent = Agent(observation_size, int(envs.single_action_space.n), options.width)
    optimizer = torch.optim.Adam(agent.parameters(), lr=options.learning_rate, eps=1e-5)
    writer = _writer(options)

    iterations = max(1, options.total_steps // (options.num_envs * options.num_steps))
    returns: list[float] = []
    recent: deque[float] = deque(maxlen=100)
    start = time.perf_counter()
    step, collecting = 0, 0.0
    collector = COLLECTORS[options.data](envs, options.num_steps, options.seed)
    for iteration in range(iterations):
        left = 1 - iteration / iterations
        optimizer.param_groups[0]["lr"] = left * options.learning_rate
        begin = time.perf_counter()
        transitions = collector.collect(agent)
        collecting += time.perf_counter() - begin
        step_of = step + transitions.valid.sum(1).cumsum(0)
        for t, _, total, length in collector.finished(transitions):
            returns.append(float(total))
            recent.append(returns[-1])
            if writer is not None:
                writer.add_scalar("charts/episodic_return", total, int(step_of[t]))
                writer.add_scalar("charts/episodic_length", length, int(step_of[t]))
        step = int(step_of[-1])
        with torch.no_grad():
            next_value = agent.value(collector.next_observation)[:, 0]
        advantages = transitions.advantages(next_value, options.gamma, options.gae_lambda)
        losses = update(agent, optimizer, transitions, advantages, options, left * options.clip)
        rate = step / (time.perf_counter() - start)
        if writer is not None:
            writer.add_scalar("charts/learning_rate", left * options.learning_rate, step)
            writer.add_scalar("charts/SPS", rate, step)
            for name, loss in losses.items():
                writer.add_scalar(name, loss, step)
        if iteration % max(1, iterations // 20) == 0 or iteration == iterations - 1:
            mean = f"{np.mean(recent):6.1f}" if recent else "     -"
            print(f"{step:8,} steps  mean return {mean}  {rate:7,.0f} steps/s", flush=True)
    envs.close()
    if writer is not None:
        writer.close()
    digest = hashlib.sha256(np.asarray(returns, np.float64).tobytes()).hexdigest()[:16]
    mean_return = float(np.mean(recent)) if recent else 0.0
    rate = step / (time.perf_counter() - start)
    return Result(len(returns), mean_return, digest, rate, collector.handling, collecting)


def _tensor(array: Any) -> torch.Tensor:
    return torch.as_tensor(np.asarray(array), dtype=torch.float32)


def _writer(options: argparse.Namespace) -> Any:
    """TensorBoard's writer; None if it is not wanted or not installed."""
    if not options.log_dir:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("no TensorBoard: pip install 'shmvec[examples]'", file=sys.stderr)
        return None
    name = f"{options.env_id}-{options.vector_env}-{options.seed}-{time.strftime('%H%M%S')}"
    writer = SummaryWriter(f"{options.log_dir}/{name}")
    lines = "\n".join(f"|{name}|{value}|" for name, value in vars(options).items())
    writer.add_text("hyperparameters", f"|name|value|\n|-|-|\n{lines}")
    return writer


def main(arguments: Sequence[str] | None = None) -> Result:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--vector-env", choices=VECTOR_ENVS, default="shm")
    parser.add_argument(
        "--data", choices=COLLECTORS, default="copy", help="rollout and pipeline need shmvec"
    )
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-workers", type=int, help="of shmvec; by default it chooses")
    parser.add_argument("--width", type=int, default=64, help="of the networks' layers")
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-dir", default="runs", help="TensorBoard's folder; '' for none")
    parser.add_argument("--num-steps", type=int, default=32, help="steps of each env in a rollout")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--minibatch-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="falls to 0")
    parser.add_argument("--clip", type=float, default=0.2, help="falls to 0")
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--gae-lambda", type=float, default=0.8)
    parser.add_argument("--value-coefficient", type=float, default=0.5)
    parser.add_argument("--entropy-coefficient", type=float, default=0.0)
    parser.add_argument("--max-grad-norm", type=float, default=0.5)
    options = parser.parse_args(arguments)
    if options.vector_env != "shm" and (options.data != "copy" or options.num_workers):
        parser.error("--data and --num-workers need --vector-env shm")
    result = train(options)
    print(
        f"{options.vector_env}, seed {options.seed}: {result.episodes} episodes, mean return of "
        f"the last 100 {result.mean_return:.1f}, {result.steps_per_second:,.0f} steps/s, "
        f"{result.handling:.2f} s of handling data, {result.collecting:.2f} s of collecting, "
        f"learning curve {result.digest}"
    )
    return result


if __name__ == "__main__":
    main()
