"""DQN and SAC by torch, for benchmarks/training.py: learners that compute between steps.

Mnih et al., 2015 (DQN), and Haarnoja et al., 2018 (arXiv:1812.05905), in sizes that CleanRL's
single-file scripts have. A step of all envs is begun, then the learner learns from what it has met
before, as often as there are envs, then the step's results are taken: the envs compute meanwhile,
if the vector env lets them. Whether it does changes nothing about what is learned. Steps are copied
into arrays, or the workers record them.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from learner import Clock, convolutions, network
from torch import nn

__all__ = ["BUFFER", "DQN", "SAC", "OffPolicy", "PixelDQN"]

BUFFER = 20_000  # steps
_GAMMA = 0.99


class OffPolicy:
    """A training run, of as many steps as are called for.

    Attributes:
        clock: Where the time has gone since it began.
        returns: Of the episodes that have ended, where envs tell them (RecordEpisodeStatistics).
        steps: Env steps made; resets are none.
    """

    batch_size = 128
    learning_starts = 500  # steps

    def __init__(
        self, envs: Any, *, waits: bool, threads: int, seed: int = 1, replay: Any = None
    ) -> None:
        """Makes a learner and resets the env.

        Args:
            envs: A vector env with the autoreset mode NEXT_STEP.
            waits: It calls ``step`` before it learns; else ``step_async``.
            threads: Torch's.
            seed: Of the learner and the env.
            replay: A shmvec.Replay of them, from which it learns; None: from what it copies.
        """
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._random = np.random.default_rng(seed)
        self._envs, self._waits, self._replay = envs, waits, replay
        self._make(envs.single_observation_space, envs.single_action_space)
        size, actions = envs.single_observation_space.shape, envs.single_action_space
        kind = np.uint8 if len(size) == 3 else np.float32
        self._met = {
            "observations": np.zeros((BUFFER, *size), kind),
            "following": np.zeros((BUFFER, *size), kind),
            "actions": np.zeros((BUFFER, *actions.shape), actions.dtype),
            "rewards": np.zeros(BUFFER, np.float32),
            "terminations": np.zeros(BUFFER, np.float32),
        }
        self.returns: list[float] = []
        self.steps = self._iterations = 0
        self._over = np.zeros(envs.num_envs, bool)
        self._observations, _ = envs.reset(seed=seed)
        self.clock = Clock()

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
                self._learn(self._batch)
            self._iterations += 1
        clock("learning")
        if not self._waits:
            results = envs.step_wait()
        clock("env")
        observations, rewards, terminations, truncations, infos = results
        stepped = np.flatnonzero(~self._over)  # of the others this was the reset
        if self._replay is None:
            rows = (self.steps + np.arange(len(stepped))) % BUFFER
            for name, values in (
                ("observations", self._observations),
                ("following", observations),
                ("actions", actions),
                ("rewards", rewards),
                ("terminations", terminations),
            ):
                self._met[name][rows] = values[stepped]
        self.steps += len(stepped)
        self._over = terminations | truncations
        self._observations = observations
        if "_episode" in infos:
            self.returns += infos["episode"]["r"][infos["_episode"]].tolist()
        clock("handling")

    def _batch(self) -> dict[str, Any]:
        """What was met, at random."""
        if self._replay is not None:
            drawn = self._replay.sample(self.batch_size, device="cpu")
            kind = torch.from_numpy(self._met["observations"]).dtype
            return {
                "observations": drawn.observations.to(kind),
                "following": drawn.next_observations.to(kind),
                "actions": drawn.actions,
                "rewards": drawn.rewards,
                "terminations": drawn.terminations.float(),
            }
        rows = self._random.integers(min(self.steps, BUFFER), size=self.batch_size)
        return {name: torch.from_numpy(met[rows]) for name, met in self._met.items()}

    def weights(self) -> float:
        """The sum of all weights: equal for runs that have learned the same."""
        return float(sum(part.detach().double().sum() for part in self._parameters()))

    def digest(self) -> str:
        """Of the learning curve: of each episode's return."""
        return hashlib.sha256(np.asarray(self.returns, np.float64).tobytes()).hexdigest()[:12]

    def _make(self, observations: Any, actions: Any) -> None:
        """Makes the networks."""
        raise NotImplementedError

    def _parameters(self) -> list[Any]:
        raise NotImplementedError

    def _act(self, observations: Any) -> Any:
        raise NotImplementedError

    def _learn(self, batch: Callable[[], dict[str, Any]]) -> None:
        raise NotImplementedError


class DQN(OffPolicy):
    """Learns from a batch every ten steps.

    Attributes:
        every: How many steps it makes between two batches.
        exploration: In so many steps it goes from random actions to its own.
    """

    every, exploration = 10, 5_000

    def _make(self, observations: Any, actions: Any) -> None:
        self._actions = int(actions.n)
        self._net = self._network(observations.shape)
        self._target = copy.deepcopy(self._net)
        self._optimizer = torch.optim.Adam(self._net.parameters(), lr=2.5e-4)

    def _parameters(self) -> list[Any]:
        return list(self._net.parameters())

    def _network(self, shape: tuple[int, ...]) -> Any:
        return network(shape[0], 120, self._actions, 1.0, nn.ReLU)

    def _act(self, observations: Any) -> Any:
        n = len(observations)
        exploring = self._random.random(n) < max(0.05, 1 - self.steps / self.exploration)
        chosen = self._random.integers(self._actions, size=n)
        if not exploring.all():
            with torch.no_grad():
                best = self._net(torch.as_tensor(observations)).argmax(1).numpy()
            chosen[~exploring] = best[~exploring]
        return chosen

    def _learn(self, batch: Callable[[], dict[str, Any]]) -> None:
        if self._iterations % self.every:
            return
        met = batch()
        with torch.no_grad():
            best = self._target(met["following"]).amax(1)
            targets = met["rewards"] + _GAMMA * best * (1 - met["terminations"])
        values = self._net(met["observations"]).gather(1, met["actions"][:, None])[:, 0]
        self._optimizer.zero_grad()
        nn.functional.mse_loss(values, targets).backward()
        self._optimizer.step()
        if self._iterations % 500 == 0:
            self._target.load_state_dict(self._net.state_dict())


class _Pixels(nn.Module):
    """Values of actions, from stacked frames."""

    def __init__(self, channels: int, actions: int) -> None:
        super().__init__()
        self._layers = nn.Sequential(convolutions(channels), nn.Linear(512, actions))

    def forward(self, frames: Any) -> Any:
        return self._layers(frames.float() / 255)


class PixelDQN(DQN):
    """Learns from stacked frames, as Mnih et al. do: from a batch of 32 every four steps."""

    batch_size, every = 32, 4

    def _network(self, shape: tuple[int, ...]) -> Any:
        return _Pixels(shape[0], self._actions)


class SAC(OffPolicy):
    """Learns from a batch every step: two critics, a policy and the entropy's weight."""

    batch_size = 256
    learning_starts = 100

    def _make(self, observations: Any, actions: Any) -> None:
        self._actions = actions.shape[0]
        inputs = observations.shape[0]
        self._policy = network(inputs, 256, 2 * self._actions, 1.0, nn.ReLU)
        self._critics = nn.ModuleList(
            network(inputs + self._actions, 256, 1, 1.0, nn.ReLU) for _ in range(2)
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
            return self._random.uniform(-1, 1, (1, self._actions)).astype(np.float32)
        with torch.no_grad():
            return self._draw(torch.as_tensor(observations).float())[0].numpy()

    def _learn(self, batch: Callable[[], dict[str, Any]]) -> None:
        met = batch()
        alpha = self._log_alpha.exp().detach()

        def values(critics: Any, observations: Any, actions: Any) -> Any:
            inputs = torch.cat([observations, actions.float()], 1)
            return torch.stack([critic(inputs)[:, 0] for critic in critics])

        with torch.no_grad():
            actions, log_probs = self._draw(met["following"])
            best = values(self._targets, met["following"], actions).amin(0) - alpha * log_probs
            targets = met["rewards"] + _GAMMA * (1 - met["terminations"]) * best
        errors = values(self._critics, met["observations"], met["actions"]) - targets
        self._critic_optimizer.zero_grad()
        errors.square().mean(1).sum().backward()
        self._critic_optimizer.step()
        for _ in range(2 * (self._iterations % 2 == 0)):  # every other step, twice
            actions, log_probs = self._draw(met["observations"])
            best = values(self._critics, met["observations"], actions).amin(0)
            self._policy_optimizer.zero_grad()
            (alpha * log_probs - best).mean().backward()
            self._policy_optimizer.step()
            self._alpha_optimizer.zero_grad()
            missing = log_probs.detach() - self._actions  # of the entropy that is wanted
            (-self._log_alpha.exp() * missing).mean().backward()
            self._alpha_optimizer.step()
            alpha = self._log_alpha.exp().detach()
        with torch.no_grad():
            for old, new in zip(
                self._targets.parameters(), self._critics.parameters(), strict=True
            ):
                old.lerp_(new, 0.005)
