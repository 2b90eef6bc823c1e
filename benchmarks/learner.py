"""Learners in torch to measure vector envs with: they count where their time goes.

PPO (Schulman et al., 2017, arXiv:1707.06347), with generalised advantages, collects with all envs
and learns by turns. DQN (Mnih et al., 2015) and SAC (Haarnoja et al., 2018, arXiv:1812.05905) have
the sizes of CleanRL's single-file scripts: they begin a step of all envs, learn from earlier steps
once for each env, and take the step's results. If the vector env lets them, the envs compute
meanwhile; that does not change what is learned. Steps are copied into arrays, or the workers record
them. A learner runs in one process.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from shmvec import Pipeline

__all__ = ["BUFFER", "DQN", "PARTS", "PPO", "SAC", "Clock", "PixelDQN", "Recipe", "Threads"]

PARTS = ("env", "policy", "learning", "handling")
BUFFER = 20_000  # steps in the replay buffer
_GAMMA = 0.99  # discount
_LAMBDA = 0.95  # of generalised advantages
_WIDTH = 64  # of the layers of PPO's networks without images


@dataclass(frozen=True)
class Recipe:
    """The parameters of a PPO run.

    Attributes:
        num_envs: Number of envs.
        num_steps: Steps of each env between two updates.
        epochs: Epochs of an update.
        minibatches: Minibatches of an epoch.
        learning_rate: Adam's learning rate.
        entropy: Weight of the policy's entropy.
    """

    num_envs: int = 8
    num_steps: int = 128
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 2.5e-4
    entropy: float = 0.01

    @property
    def steps(self) -> int:
        """Number of steps of all envs between two updates."""
        return self.num_envs * self.num_steps


@dataclass(frozen=True)
class Threads:
    """Torch's threads within an operation, while PPO collects and while it learns."""

    collecting: int = 1
    learning: int = 1

    def __str__(self) -> str:
        """One number if they are the same."""
        if self.collecting == self.learning:
            return str(self.collecting)
        return f"{self.collecting}, learning {self.learning}"


class Clock:
    """Counts the seconds of each part.

    Attributes:
        seconds: Seconds by part.
    """

    def __init__(self) -> None:
        """Starts the clock."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.resume()

    def resume(self) -> None:
        """Drops the time since the last call, in which others had their turn."""
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        """Adds the time since the last call to this part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


class Learner:
    """A training run on a vector env.

    Attributes:
        clock: Seconds of each part since the start.
        returns: Returns of ended episodes, if envs report them (RecordEpisodeStatistics).
        steps: Number of env steps, without resets.
    """

    def __init__(self, envs: Any, seed: int) -> None:
        """Makes a learner, for envs with the autoreset mode NEXT_STEP."""
        torch.manual_seed(seed)
        self._envs = envs
        self.returns: list[float] = []
        self.steps = 0
        self.clock = Clock()

    def weights(self) -> float:
        """The sum of all weights, which is equal for runs that have learned the same."""
        return float(sum(part.detach().double().sum() for part in self._parameters()))

    def digest(self) -> str:
        """A digest of the learning curve: of all episodes' returns."""
        return hashlib.sha256(np.asarray(self.returns, np.float64).tobytes()).hexdigest()[:12]

    def iterate(self) -> None:
        """Makes some steps, and learns."""
        raise NotImplementedError

    def _parameters(self) -> list[Any]:
        raise NotImplementedError

    def _add_returns(self, infos: dict[str, Any]) -> None:
        if "_episode" in infos:
            self.returns += infos["episode"]["r"][infos["_episode"]].tolist()


def network(inputs: int, width: int, outputs: int, gain: float, activation: Any = nn.Tanh) -> Any:
    """A network of two hidden layers, initialised orthogonally."""
    layers: list[Any] = []
    for size, wide, scale in ((inputs, width, 2**0.5), (width, width, 2**0.5)):
        layers += [_initialised(nn.Linear(size, wide), scale), activation()]
    return nn.Sequential(*layers, _initialised(nn.Linear(width, outputs), gain))


def _initialised(layer: Any, gain: float) -> Any:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def convolutions(channels: int) -> Any:
    """The network of Mnih et al., 2015, for images of 84 x 84."""
    layers: list[Any] = []
    for size, wide, kernel, stride in ((channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)):
        layers += [_initialised(nn.Conv2d(size, wide, kernel, stride), 2**0.5), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.Flatten(), _initialised(nn.Linear(64 * 7 * 7, 512), 2**0.5), nn.ReLU()
    )


# ---- PPO -----------------------------------------------------------------------------------------


class _Agent:
    """A policy and a value function: one network for images, else one for each."""

    def __init__(self, observations: Any, actions: Any, device: torch.device) -> None:
        self.images = len(observations.shape) == 3
        self.discrete = isinstance(actions, gym.spaces.Discrete)
        outputs = int(actions.n) if self.discrete else math.prod(actions.shape)
        if self.images:
            if observations.shape[1:] != (84, 84):
                raise ValueError(f"images must be (channels, 84, 84), not {observations.shape}")
            trunk = convolutions(observations.shape[0])
            policy = _initialised(nn.Linear(512, outputs), 0.01)
            value = _initialised(nn.Linear(512, 1), 1.0)
            self._parts = nn.ModuleList([trunk, policy, value])
        else:
            inputs = math.prod(observations.shape)
            policy = network(inputs, _WIDTH, outputs, 0.01)
            self._parts = nn.ModuleList([policy, network(inputs, _WIDTH, 1, 1.0)])
        self._parts.to(device)  # moved afterwards, so that initial weights are the same anywhere
        self._log_std = nn.Parameter(torch.zeros(0 if self.discrete else outputs, device=device))
        self.parameters = [*self._parts.parameters(), self._log_std]

    def __call__(self, observations: Any) -> tuple[Any, Any]:
        """Computes the policy's distributions, and values."""
        *trunk, policy, value = self._parts
        if trunk:
            observations = trunk[0](observations.float() / 255)
        else:
            observations = observations.flatten(1).float()
        outputs = policy(observations)
        if self.discrete:
            return Categorical(logits=outputs), value(observations)[:, 0]
        policy = Independent(Normal(outputs, self._log_std.exp().expand_as(outputs)), 1)
        return policy, value(observations)[:, 0]


@dataclass
class _Transitions:
    """Arrays ``(num_steps, num_envs, ...)`` of what was collected."""

    observations: Any
    actions: Any
    log_probs: Any
    values: Any
    rewards: Any
    terminations: Any
    ends: Any
    is_reset: Any  # whether the step was a reset, as in the mode NEXT_STEP


class PPO(Learner):
    """Collects with all envs, then learns."""

    def __init__(
        self,
        envs: Any,
        recipe: Recipe,
        *,
        seed: int = 1,
        rollouts: bool = False,
        pipeline: bool = False,
        device: str = "cpu",
        threads: Threads | None = None,
    ) -> None:
        """Makes a learner and resets the envs.

        Args:
            envs: A vector env.
            recipe: The parameters.
            seed: Seed of the learner and the envs.
            rollouts: Whether workers write where the learner reads: ``ShmVectorEnv.rollout``.
            pipeline: Whether they do so, and step some envs while the policy computes, by
                ``Pipeline``.
            device: Device of the networks and of their data.
            threads: Torch's threads; None: as they are.
        """
        super().__init__(envs, seed)
        self._recipe, self._threads = recipe, threads
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"
        space = envs.single_observation_space
        self._agent = _Agent(space, envs.single_action_space, self._device)
        self._optimizer = torch.optim.Adam(
            self._agent.parameters, lr=recipe.learning_rate, eps=1e-5
        )
        self._copies = self._empty()
        observations, _ = envs.reset(seed=seed)
        self._observations = self._to_device(observations)
        self._over = torch.zeros(recipe.num_envs, dtype=torch.bool, device=self._device)
        self._collect = self._collect_rollout if rollouts else self._collect_copies
        if pipeline:
            self._pipeline = Pipeline(envs, self._pipeline_policy, device=self._device)
            self._collect = self._collect_by_pipeline
        self.clock.resume()

    def iterate(self) -> None:
        """Collects once, and learns from it."""
        self._set_threads(self._threads.collecting if self._threads else None)
        transitions = self._collect()
        self.steps += int((~transitions.is_reset).sum())
        self.clock("handling")
        self._set_threads(self._threads.learning if self._threads else None)
        self._learn(transitions)
        if not self._on_host:
            torch.cuda.synchronize(self._device)
        self.clock("learning")

    @staticmethod
    def _set_threads(threads: int | None) -> None:
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def _parameters(self) -> list[Any]:
        return self._agent.parameters

    def _to_device(self, batch: Any) -> Any:
        """A tensor on the networks' device; on the CPU it shares the array's memory."""
        return torch.as_tensor(batch).to(self._device)

    def _empty(self) -> _Transitions:
        shape = self._recipe.num_steps, self._recipe.num_envs

        def zeros(size: tuple[int, ...], kind: Any) -> Any:
            return torch.zeros(*shape, *size, dtype=kind, device=self._device)

        observations, actions = self._envs.single_observation_space, self._envs.single_action_space
        return _Transitions(
            zeros(observations.shape, torch.uint8 if self._agent.images else torch.float32),
            zeros(actions.shape, torch.int64 if self._agent.discrete else torch.float32),
            *(zeros((), torch.float32) for _ in range(4)),
            *(zeros((), torch.bool) for _ in range(2)),
        )

    def _act(self, observations: Any) -> tuple[Any, Any, Any]:
        with torch.no_grad():
            policy, values = self._agent(observations)
            actions = policy.sample()
            return actions, policy.log_prob(actions), values

    def _collect_copies(self) -> _Transitions:
        """Collects by copying each step's results."""
        transitions, clock = self._copies, self.clock
        for t in range(self._recipe.num_steps):
            transitions.observations[t], transitions.is_reset[t] = self._observations, self._over
            clock("handling")
            actions, log_probs, values = self._act(self._observations)
            clock("policy")
            transitions.actions[t], transitions.log_probs[t], transitions.values[t] = (
                actions,
                log_probs,
                values,
            )
            clock("handling")
            actions = actions.cpu().numpy()
            clock("policy")
            results = self._envs.step(actions)
            clock("env")
            observations, rewards, terminations, truncations, infos = results
            self._observations = self._to_device(observations)
            self._over = self._to_device(terminations | truncations)
            transitions.rewards[t] = self._to_device(rewards)
            transitions.terminations[t], transitions.ends[t] = (
                self._to_device(terminations),
                self._over,
            )
            self._add_returns(infos)
        return transitions

    def _collect_rollout(self) -> _Transitions:
        """Collects by rollouts, into which workers write."""
        clock = self.clock
        rollout = self._envs.rollout(self._recipe.num_steps, pin=not self._on_host)
        shared = torch.from_numpy(rollout.observations)
        observations = shared[:-1] if self._on_host else self._copies.observations
        log_probs, values = self._copies.log_probs, self._copies.values
        for t in range(self._recipe.num_steps):
            if not self._on_host:
                observations[t].copy_(shared[t], non_blocking=True)
            clock("handling")
            actions, log_probs[t], values[t] = self._act(observations[t])
            actions = actions.cpu().numpy()
            clock("policy")
            infos = rollout.step(actions)
            clock("env")
            self._add_returns(infos)
        self._observations = self._to_device(shared[-1])
        return self._from_rollout(rollout, observations, log_probs, values)

    def _collect_by_pipeline(self) -> _Transitions:
        """Collects by a pipeline."""
        rollout = self._pipeline.collect(self._recipe.num_steps)
        self.clock("env")
        for infos in rollout.infos:
            self._add_returns(infos)
        extras = rollout.extras
        self._observations = rollout.observations[-1]
        return self._from_rollout(
            rollout, rollout.observations[:-1], extras["log_probs"], extras["values"]
        )

    def _pipeline_policy(self, observations: Any, env_ids: Any) -> tuple[Any, dict[str, Any]]:
        """The pipeline's policy."""
        self.clock("env")
        actions, log_probs, values = self._act(observations)
        actions = actions.cpu()
        self.clock("policy")
        return actions, {"log_probs": log_probs, "values": values}

    def _from_rollout(
        self, rollout: Any, observations: Any, log_probs: Any, values: Any
    ) -> _Transitions:
        """Moves a rollout to the networks' device."""
        terminations = self._to_device(rollout.terminations)
        over = terminations | self._to_device(rollout.truncations)
        return _Transitions(
            observations,
            self._to_device(rollout.actions),
            log_probs,
            values,
            self._to_device(rollout.rewards[1:]).float(),
            terminations[1:].float(),
            over[1:],
            over[:-1],
        )

    def _advantages(self, transitions: _Transitions, last: Any) -> Any:
        """Generalised advantages; sums stop where an episode ends."""
        recipe = self._recipe
        following = torch.cat([transitions.values[1:], last[None]])
        deltas = (
            transitions.rewards
            + _GAMMA * following * (1 - transitions.terminations)
            - transitions.values
        )
        decays = _GAMMA * _LAMBDA * (~transitions.ends).float()
        advantages, advantage = torch.empty_like(deltas), torch.zeros_like(last)
        for t in reversed(range(recipe.num_steps)):
            advantages[t] = advantage = deltas[t] + decays[t] * advantage
        return advantages

    def _learn(self, transitions: _Transitions) -> None:
        """Learns by epochs of minibatches."""
        recipe, agent = self._recipe, self._agent
        with torch.no_grad():
            advantages = self._advantages(transitions, agent(self._observations)[1])
        rows = torch.nonzero(~transitions.is_reset.flatten())[:, 0]
        observations = transitions.observations.flatten(0, 1)[rows]
        if not agent.images:
            observations = observations.float()
        actions = transitions.actions.flatten(0, 1)[rows]
        old_log_probs, old_values, advantages = (
            part.flatten()[rows] for part in (transitions.log_probs, transitions.values, advantages)
        )
        returns = advantages + old_values
        size = max(2, -(-len(rows) // recipe.minibatches))
        for _ in range(recipe.epochs):
            for batch in torch.randperm(len(rows)).to(self._device).split(size):
                policy, values = agent(observations[batch])
                ratio = (policy.log_prob(actions[batch]) - old_log_probs[batch]).exp()
                gain = advantages[batch]
                gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)
                surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                loss = (
                    -surrogate.mean()
                    + 0.25 * (values - returns[batch]).square().mean()
                    - recipe.entropy * policy.entropy().mean()
                )
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters, 0.5)
                self._optimizer.step()


# ---- DQN and SAC ---------------------------------------------------------------------------------


class OffPolicy(Learner):
    """Learns between the steps of all envs."""

    batch_size = 128
    learning_starts = 500  # steps

    def __init__(
        self, envs: Any, *, waits: bool, threads: int, seed: int = 1, replay: Any = None
    ) -> None:
        """Makes a learner and resets the env.

        Args:
            envs: A vector env.
            waits: Whether it calls ``step`` before it learns; else it calls ``step_async``.
            threads: Torch's threads.
            seed: Seed of the learner and the env.
            replay: A shmvec.Replay of the envs to learn from; None: it learns from copies.
        """
        torch.set_num_threads(threads)
        super().__init__(envs, seed)
        self._random = np.random.default_rng(seed)
        self._waits, self._replay = waits, replay
        self._make_networks(envs.single_observation_space, envs.single_action_space)
        size, actions = envs.single_observation_space.shape, envs.single_action_space
        kind = np.uint8 if len(size) == 3 else np.float32
        self._buffer = {
            "observations": np.zeros((BUFFER, *size), kind),
            "next_observations": np.zeros((BUFFER, *size), kind),
            "actions": np.zeros((BUFFER, *actions.shape), actions.dtype),
            "rewards": np.zeros(BUFFER, np.float32),
            "terminations": np.zeros(BUFFER, np.float32),
        }
        self._iterations = 0
        self._over = np.zeros(envs.num_envs, bool)
        self._observations, _ = envs.reset(seed=seed)
        self.clock.resume()

    def iterate(self) -> None:
        """Makes a step of all envs, and learns meanwhile."""
        envs, clock = self._envs, self.clock
        actions = self._act(self._observations)
        clock("policy")
        if self._waits:
            results = envs.step(actions)
        else:
            envs.step_async(actions)
        clock("env")
        for _ in range(envs.num_envs):
            if self.steps >= self.learning_starts:
                self._learn(self._sample)
            self._iterations += 1
        clock("learning")
        if not self._waits:
            results = envs.step_wait()
        clock("env")
        observations, rewards, terminations, truncations, infos = results
        stepped = np.flatnonzero(~self._over)  # the others were reset
        if self._replay is None:
            rows = (self.steps + np.arange(len(stepped))) % BUFFER
            for name, values in (
                ("observations", self._observations),
                ("next_observations", observations),
                ("actions", actions),
                ("rewards", rewards),
                ("terminations", terminations),
            ):
                self._buffer[name][rows] = values[stepped]
        self.steps += len(stepped)
        self._over = terminations | truncations
        self._observations = observations
        self._add_returns(infos)
        clock("handling")

    def _sample(self) -> dict[str, Any]:
        """Samples a batch of earlier steps."""
        if self._replay is not None:
            batch = self._replay.sample(self.batch_size, device="cpu")
            kind = torch.from_numpy(self._buffer["observations"]).dtype
            return {
                "observations": batch.observations.to(kind),
                "next_observations": batch.next_observations.to(kind),
                "actions": batch.actions,
                "rewards": batch.rewards,
                "terminations": batch.terminations.float(),
            }
        rows = self._random.integers(min(self.steps, BUFFER), size=self.batch_size)
        return {name: torch.from_numpy(array[rows]) for name, array in self._buffer.items()}

    def _make_networks(self, observations: Any, actions: Any) -> None:
        """Makes the networks."""
        raise NotImplementedError

    def _act(self, observations: Any) -> Any:
        raise NotImplementedError

    def _learn(self, sample: Callable[[], dict[str, Any]]) -> None:
        raise NotImplementedError


class DQN(OffPolicy):
    """Learns from a batch every ten steps.

    Attributes:
        every: Number of steps between two batches.
        exploration: Number of steps in which random actions become rare.
    """

    every, exploration = 10, 5_000

    def _make_networks(self, observations: Any, actions: Any) -> None:
        self._num_actions = int(actions.n)
        self._net = self._network(observations.shape)
        self._target = copy.deepcopy(self._net)
        self._optimizer = torch.optim.Adam(self._net.parameters(), lr=2.5e-4)

    def _parameters(self) -> list[Any]:
        return list(self._net.parameters())

    def _network(self, shape: tuple[int, ...]) -> Any:
        return network(shape[0], 120, self._num_actions, 1.0, nn.ReLU)

    def _act(self, observations: Any) -> Any:
        n = len(observations)
        exploring = self._random.random(n) < max(0.05, 1 - self.steps / self.exploration)
        actions = self._random.integers(self._num_actions, size=n)
        if not exploring.all():
            with torch.no_grad():
                best = self._net(torch.as_tensor(observations)).argmax(1).numpy()
            actions[~exploring] = best[~exploring]
        return actions

    def _learn(self, sample: Callable[[], dict[str, Any]]) -> None:
        if self._iterations % self.every:
            return
        batch = sample()
        with torch.no_grad():
            best = self._target(batch["next_observations"]).amax(1)
            targets = batch["rewards"] + _GAMMA * best * (1 - batch["terminations"])
        values = self._net(batch["observations"]).gather(1, batch["actions"][:, None])[:, 0]
        self._optimizer.zero_grad()
        nn.functional.mse_loss(values, targets).backward()
        self._optimizer.step()
        if self._iterations % 500 == 0:
            self._target.load_state_dict(self._net.state_dict())


class _Scaled(nn.Module):
    def forward(self, frames: Any) -> Any:
        return frames.float() / 255


class PixelDQN(DQN):
    """Learns from stacked frames, as in Mnih et al.: from a batch of 32 every four steps."""

    batch_size, every = 32, 4

    def _network(self, shape: tuple[int, ...]) -> Any:
        return nn.Sequential(_Scaled(), convolutions(shape[0]), nn.Linear(512, self._num_actions))


class SAC(OffPolicy):
    """Learns from a batch every step: two critics, a policy and the entropy's weight."""

    batch_size = 256
    learning_starts = 100

    def _make_networks(self, observations: Any, actions: Any) -> None:
        self._num_actions = actions.shape[0]
        inputs = observations.shape[0]
        self._policy = network(inputs, 256, 2 * self._num_actions, 1.0, nn.ReLU)
        self._critics = nn.ModuleList(
            network(inputs + self._num_actions, 256, 1, 1.0, nn.ReLU) for _ in range(2)
        )
        self._targets = copy.deepcopy(self._critics)
        self._log_alpha = nn.Parameter(torch.zeros(1))
        self._policy_optimizer = torch.optim.Adam(self._policy.parameters(), lr=3e-4)
        self._critic_optimizer = torch.optim.Adam(self._critics.parameters(), lr=1e-3)
        self._alpha_optimizer = torch.optim.Adam([self._log_alpha], lr=1e-3)

    def _parameters(self) -> list[Any]:
        return [*self._policy.parameters(), *self._critics.parameters(), self._log_alpha]

    def _draw(self, observations: Any) -> tuple[Any, Any]:
        """Actions in (-1, 1), and their log-probabilities."""
        means, log_stds = self._policy(observations).chunk(2, 1)
        normal = torch.distributions.Normal(means, (3.5 * log_stds.tanh() - 1.5).exp())
        raw = normal.rsample()
        actions = raw.tanh()
        log_probs = normal.log_prob(raw) - 2 * (
            math.log(2) - raw - nn.functional.softplus(-2 * raw)
        )
        return actions, log_probs.sum(1)

    def _act(self, observations: Any) -> Any:
        if self.steps < self.learning_starts:
            return self._random.uniform(-1, 1, (1, self._num_actions)).astype(np.float32)
        with torch.no_grad():
            return self._draw(torch.as_tensor(observations).float())[0].numpy()

    def _learn(self, sample: Callable[[], dict[str, Any]]) -> None:
        batch = sample()
        alpha = self._log_alpha.exp().detach()

        def values(critics: Any, observations: Any, actions: Any) -> Any:
            inputs = torch.cat([observations, actions.float()], 1)
            return torch.stack([critic(inputs)[:, 0] for critic in critics])

        with torch.no_grad():
            actions, log_probs = self._draw(batch["next_observations"])
            best = (
                values(self._targets, batch["next_observations"], actions).amin(0)
                - alpha * log_probs
            )
            targets = batch["rewards"] + _GAMMA * (1 - batch["terminations"]) * best
        errors = values(self._critics, batch["observations"], batch["actions"]) - targets
        self._critic_optimizer.zero_grad()
        errors.square().mean(1).sum().backward()
        self._critic_optimizer.step()
        for _ in range(2 * (self._iterations % 2 == 0)):  # every other step, twice
            actions, log_probs = self._draw(batch["observations"])
            best = values(self._critics, batch["observations"], actions).amin(0)
            self._policy_optimizer.zero_grad()
            (alpha * log_probs - best).mean().backward()
            self._policy_optimizer.step()
            self._alpha_optimizer.zero_grad()
            missing = log_probs.detach() - self._num_actions  # to the target entropy
            (-self._log_alpha.exp() * missing).mean().backward()
            self._alpha_optimizer.step()
            alpha = self._log_alpha.exp().detach()
        with torch.no_grad():
            for old, new in zip(
                self._targets.parameters(), self._critics.parameters(), strict=True
            ):
                old.lerp_(new, 0.005)
