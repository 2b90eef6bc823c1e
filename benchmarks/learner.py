"""A learner to measure vector envs with: PPO by torch, which keeps account of where its time goes.

The algorithm is Schulman et al., 2017 (arXiv:1707.06347), with generalised advantages, and all is
done in one process, collecting and learning by turns, as single-file scripts do.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import nn
from torch.distributions import Categorical, Normal

from shmvec import Pipeline

__all__ = ["PARTS", "Clock", "Recipe", "Threads", "Training", "convolutions", "network"]

PARTS = ("env", "policy", "learning", "handling")


@dataclass(frozen=True)
class Recipe:
    """What a training run is like; how much it learns from what it has met.

    Attributes:
        num_envs: Number of envs.
        num_steps: Steps of each between two updates.
        epochs: How often an update goes through them.
        minibatches: In how many parts each time.
        learning_rate: Adam's.
        gamma: How much a later reward counts.
        gae_lambda: How far advantages look ahead.
        entropy: How much the policy's entropy counts.
        width: Of the layers of networks that see no images.
    """

    num_envs: int = 8
    num_steps: int = 128
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 2.5e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    entropy: float = 0.01
    width: int = 64

    @property
    def steps(self) -> int:
        """Of all envs between two updates."""
        return self.num_envs * self.num_steps


@dataclass(frozen=True)
class Threads:
    """Torch's threads within an operation, while it collects and while it learns."""

    collecting: int = 1
    learning: int = 1

    def __str__(self) -> str:
        """One number if they are the same."""
        if self.collecting == self.learning:
            return str(self.collecting)
        return f"{self.collecting}, learning {self.learning}"


class Clock:
    """Seconds that each part has taken.

    Attributes:
        seconds: By part.
    """

    def __init__(self) -> None:
        """Starts."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.resume()

    def resume(self) -> None:
        """What has passed since the last call went into nothing: others had their turn."""
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        """What has passed since the last call went into this part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


def network(inputs: int, width: int, outputs: int, gain: float, activation: Any = nn.Tanh) -> Any:
    """Two hidden layers, initialised orthogonally."""
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


class _Agent:
    """A policy and a value function: one network for images, else one for each."""

    def __init__(self, observations: Any, actions: Any, width: int, device: torch.device) -> None:
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
            policy = network(inputs, width, outputs, 0.01)
            self._parts = nn.ModuleList([policy, network(inputs, width, 1, 1.0)])
        self._parts.to(device)  # the same weights at first, wherever they are
        self._log_std = nn.Parameter(torch.zeros(0 if self.discrete else outputs, device=device))
        self.parameters = [*self._parts.parameters(), self._log_std]

    def __call__(self, observations: Any) -> tuple[Any, Any]:
        """The policy's distributions, and values."""
        *trunk, policy, value = self._parts
        if trunk:
            observations = trunk[0](observations.float() / 255)
        else:
            observations = observations.flatten(1).float()
        outputs = policy(observations)
        if self.discrete:
            return Categorical(logits=outputs), value(observations)[:, 0]
        return Normal(outputs, self._log_std.exp().expand_as(outputs)), value(observations)[:, 0]

    def log_prob(self, policy: Any, actions: Any) -> Any:
        """Of each env's action."""
        log_probs = policy.log_prob(actions)
        return log_probs if self.discrete else log_probs.sum(1)

    def entropy(self, policy: Any) -> Any:
        """Of each env's distribution."""
        entropy = policy.entropy()
        return entropy if self.discrete else entropy.sum(1)


@dataclass
class _Kept:
    """What was met, ``(num_steps, num_envs, ...)`` each."""

    observations: Any
    actions: Any
    log_probs: Any
    values: Any
    rewards: Any
    terminations: Any
    ends: Any
    was_over: Any  # the step was a reset, as the mode NEXT_STEP makes them


class Training:
    """A training run on a vector env, of as many iterations as are called for.

    Attributes:
        clock: Where the time has gone since it began.
        returns: Of the episodes that have ended, where envs tell them (RecordEpisodeStatistics).
        steps: Env steps made; resets are none.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
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
            envs: A vector env with the autoreset mode NEXT_STEP.
            recipe: What to do.
            seed: Of the learner and the envs.
            rollouts: Workers write where the learner reads: ``ShmVectorEnv.rollout``.
            pipeline: So they do, and step some envs while the policy computes: ``Pipeline``.
            device: Where the networks are, and what they learn from.
            threads: Torch's; None: they are left alone.
        """
        torch.manual_seed(seed)
        self._envs, self._recipe, self._threads = envs, recipe, threads
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"
        space = envs.single_observation_space
        self._agent = _Agent(space, envs.single_action_space, recipe.width, self._device)
        self._optimizer = torch.optim.Adam(
            self._agent.parameters, lr=recipe.learning_rate, eps=1e-5
        )
        self.returns: list[float] = []
        self.steps = 0
        self._copies = self._empty()
        observations, _ = envs.reset(seed=seed)
        self._observations = self._moved(observations)
        self._over = torch.zeros(recipe.num_envs, dtype=torch.bool, device=self._device)
        self._collect = self._into_rollouts if rollouts else self._with_copies
        if pipeline:
            shm: Any = envs
            self._pipeline = Pipeline(shm, self._answer, device=self._device)
            self._collect = self._by_pipeline
        self.clock = Clock()

    def iterate(self) -> None:
        """Collects once, and learns from it."""
        self._use(self._threads.collecting if self._threads else None)
        kept = self._collect()
        self.steps += int((~kept.was_over).sum())
        self.clock("handling")
        self._use(self._threads.learning if self._threads else None)
        self._learn(kept)
        if not self._on_host:
            torch.cuda.synchronize(self._device)
        self.clock("learning")

    @staticmethod
    def _use(threads: int | None) -> None:
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def weights(self) -> float:
        """The sum of all weights: equal for runs that have learned the same."""
        return float(sum(part.detach().double().sum() for part in self._agent.parameters))

    def digest(self) -> str:
        """Of the learning curve: of each episode's return."""
        return hashlib.sha256(np.asarray(self.returns, np.float64).tobytes()).hexdigest()[:12]

    def _moved(self, batch: Any) -> Any:
        """A tensor where the networks are; on the CPU of the same memory."""
        return torch.as_tensor(batch).to(self._device)

    def _empty(self) -> _Kept:
        shape = self._recipe.num_steps, self._recipe.num_envs
        envs: Any = self._envs
        actions, images = envs.single_action_space, self._agent.images
        return _Kept(
            torch.zeros(
                *shape,
                *envs.single_observation_space.shape,
                dtype=torch.uint8 if images else torch.float32,
                device=self._device,
            ),
            torch.zeros(
                *shape,
                *actions.shape,
                dtype=torch.int64 if self._agent.discrete else torch.float32,
                device=self._device,
            ),
            *(torch.zeros(shape, device=self._device) for _ in range(4)),
            *(torch.zeros(shape, dtype=torch.bool, device=self._device) for _ in range(2)),
        )

    def _act(self, observations: Any) -> tuple[Any, Any, Any]:
        with torch.no_grad():
            policy, values = self._agent(observations)
            actions = policy.sample()
            return actions, self._agent.log_prob(policy, actions), values

    def _with_copies(self) -> _Kept:
        """Keeps copies of each step's results."""
        kept, clock = self._copies, self.clock
        for t in range(self._recipe.num_steps):
            kept.observations[t], kept.was_over[t] = self._observations, self._over
            clock("handling")
            actions, log_probs, values = self._act(self._observations)
            clock("policy")
            kept.actions[t], kept.log_probs[t], kept.values[t] = actions, log_probs, values
            clock("handling")
            actions = actions.cpu().numpy()
            clock("policy")
            results = self._envs.step(actions)
            clock("env")
            observations, rewards, terminations, truncations, infos = results
            self._observations = self._moved(observations)
            self._over = self._moved(terminations | truncations)
            kept.rewards[t] = self._moved(rewards)
            kept.terminations[t], kept.ends[t] = self._moved(terminations), self._over
            self._record(infos)
        return kept

    def _into_rollouts(self) -> _Kept:
        """Learns from where workers have written."""
        clock = self.clock
        envs: Any = self._envs
        rollout = envs.rollout(self._recipe.num_steps, pin=not self._on_host)
        written = torch.from_numpy(rollout.observations)
        observations = written[:-1] if self._on_host else self._copies.observations
        log_probs, values = self._copies.log_probs, self._copies.values
        for t in range(self._recipe.num_steps):
            if not self._on_host:
                observations[t].copy_(written[t], non_blocking=True)
            clock("handling")
            actions, log_probs[t], values[t] = self._act(observations[t])
            actions = actions.cpu().numpy()
            clock("policy")
            infos = rollout.step(actions)
            clock("env")
            self._record(infos)
        self._observations = self._moved(written[-1])
        return self._kept(rollout, observations, log_probs, values)

    def _by_pipeline(self) -> _Kept:
        """Learns from what a pipeline has collected."""
        rollout = self._pipeline.collect(self._recipe.num_steps)
        self.clock("env")
        for infos in rollout.infos:
            self._record(infos)
        extras = rollout.extras
        self._observations = rollout.observations[-1]
        return self._kept(rollout, rollout.observations[:-1], extras["log_probs"], extras["values"])

    def _answer(self, observations: Any, env_ids: Any) -> tuple[Any, dict[str, Any]]:
        """The pipeline's policy."""
        self.clock("env")
        actions, log_probs, values = self._act(observations)
        actions = actions.cpu()
        self.clock("policy")
        return actions, {"log_probs": log_probs, "values": values}

    def _kept(self, rollout: Any, observations: Any, log_probs: Any, values: Any) -> _Kept:
        """What a rollout holds, where the networks are."""
        terminations = self._moved(rollout.terminations)
        over = terminations | self._moved(rollout.truncations)
        return _Kept(
            observations,
            self._moved(rollout.actions),
            log_probs,
            values,
            self._moved(rollout.rewards[1:]).float(),
            terminations[1:].float(),
            over[1:],
            over[:-1],
        )

    def _record(self, infos: dict[str, Any]) -> None:
        if "_episode" in infos:
            self.returns += infos["episode"]["r"][infos["_episode"]].tolist()

    def _advantages(self, kept: _Kept, last: Any) -> Any:
        """Generalised advantages; sums stop where an episode ends."""
        recipe = self._recipe
        following = torch.cat([kept.values[1:], last[None]])
        deltas = kept.rewards + recipe.gamma * following * (1 - kept.terminations) - kept.values
        carries = recipe.gamma * recipe.gae_lambda * (~kept.ends).float()
        advantages, carried = torch.empty_like(deltas), torch.zeros_like(last)
        for t in reversed(range(recipe.num_steps)):
            advantages[t] = carried = deltas[t] + carries[t] * carried
        return advantages

    def _learn(self, kept: _Kept) -> None:
        """Some epochs of minibatches."""
        recipe, agent = self._recipe, self._agent
        with torch.no_grad():
            advantages = self._advantages(kept, agent(self._observations)[1])
        rows = torch.nonzero(~kept.was_over.flatten())[:, 0]
        observations = kept.observations.flatten(0, 1)[rows]
        if not agent.images:
            observations = observations.float()
        actions = kept.actions.flatten(0, 1)[rows]
        old_log_probs, old_values, gains = (
            part.flatten()[rows] for part in (kept.log_probs, kept.values, advantages)
        )
        returns = gains + old_values
        size = max(2, -(-len(rows) // recipe.minibatches))
        for _ in range(recipe.epochs):
            for batch in torch.randperm(len(rows)).to(self._device).split(size):
                policy, values = agent(observations[batch])
                ratio = (agent.log_prob(policy, actions[batch]) - old_log_probs[batch]).exp()
                gain = gains[batch]
                gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)
                surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                loss = (
                    -surrogate.mean()
                    + 0.25 * (values - returns[batch]).square().mean()
                    - recipe.entropy * agent.entropy(policy).mean()
                )
                self._optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters, 0.5)
                self._optimizer.step()
