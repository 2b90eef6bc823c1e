"""Envs on other nodes: asked by one message a node, and answered by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from shmvec.cluster.fragments import opened
from shmvec.spaces import batched, one_of
from shmvec.vector_env import ShmVectorEnv, StepResults

__all__ = ["Answer", "Ask", "Host", "Hosted", "together"]


class Ask(NamedTuple):
    """A request to an env of a host: to step, or to reset.

    Attributes:
        env: Which env, by its number in the vector env; so everywhere here.
        is_reset: Whether it is to reset.
        action: For a step.
        seed: For a reset.
        options: For a reset.
    """

    env: int
    is_reset: bool
    action: Any = None
    seed: int | None = None
    options: Any = None


class Answer(NamedTuple):
    """What an env has answered, to a reset with reward 0."""

    env: int
    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True)
class Hosted:
    """What a host reports of its envs."""

    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    metadata: dict[str, Any]
    render_mode: str | None


class Host:
    """Some envs of a vector env, on a node."""

    def __init__(self, env_fns: bytes, envs: range, options: Mapping[str, Any]) -> None:
        """Builds the envs.

        Args:
            env_fns: Pickled: a list, of all hosts' envs.
            envs: The host's share of these.
            options: Options of ``ShmVectorEnv``.
        """
        functions = opened("env_fns", env_fns)[envs.start : envs.stop]
        self._first = envs.start
        self._envs = ShmVectorEnv(functions, **options)

    def report(self) -> Hosted:
        """What the vector env needs to know of the envs."""
        envs = self._envs
        spaces = envs.single_observation_space, envs.single_action_space
        return Hosted(spaces, envs.metadata, envs.render_mode)

    def begin(self, asks: Sequence[Ask]) -> None:
        """Asks envs."""
        envs, first = self._envs, self._first
        steps = [ask for ask in asks if not ask.is_reset]
        resets = [ask for ask in asks if ask.is_reset]
        if steps:
            actions = batched(envs.single_action_space, [ask.action for ask in steps])
            envs.send(actions, [ask.env - first for ask in steps])
        if resets:
            each = [ask.env - first for ask in resets]
            envs.async_reset([ask.seed for ask in resets], [ask.options for ask in resets], each)

    def turn(self, asks: Sequence[Ask], least: int) -> list[Answer]:
        """Asks envs; waits until so many of all that were asked are ready, and returns those."""
        self.begin(asks)
        exchange, space = self._envs.exchange, self._envs.single_observation_space
        exchange.recycle()
        taken = exchange.take(count=self._envs.num_envs, least=least)
        if taken.failures:
            exchange.raise_failures(taken.failures)
        answers = []
        for row, env in enumerate(taken.envs.tolist()):
            if env in taken.reports:
                taken.infos[row].update(taken.reports[env].info)
            answers.append(
                Answer(
                    env + self._first,
                    one_of(space, taken.observations, row),
                    float(taken.rewards[row]),
                    bool(taken.terminations[row]),
                    bool(taken.truncations[row]),
                    taken.infos[row],
                )
            )
        return answers

    def call(self, name: str, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """What a method of each env returns."""
        return self._envs.call(name, *args, **kwargs)

    def set_attr(self, name: str, values: list[Any]) -> None:
        """Sets an attribute of each env."""
        self._envs.set_attr(name, values)

    def close(self) -> None:
        """Closes the envs."""
        self._envs.close()


def together(
    space: gym.Space[Any], answers: Sequence[Answer], num_envs: int | None = None
) -> StepResults:
    """The results of a step, from answers in their order.

    Args:
        space: Space of an observation.
        answers: At least one.
        num_envs: Infos have a row for each of so many envs. None: for those that have answered.
    """
    empty: Any = create_empty_array(space, len(answers))
    gatherer = _Gatherer(num_envs or len(answers))
    infos: dict[str, Any] = {}
    for row, answer in enumerate(answers):
        if answer.info:
            infos = gatherer.add(infos, answer.info, answer.env if num_envs else row)
    return (
        concatenate(space, [answer.observation for answer in answers], empty),
        np.array([answer.reward for answer in answers], np.float64),
        np.array([answer.terminated for answer in answers], np.bool_),
        np.array([answer.truncated for answer in answers], np.bool_),
        infos,
    )


class _Gatherer(VectorEnv[Any, Any, Any]):
    """Gathers infos as a vector env of so many envs does."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.closed = True

    def add(self, infos: dict[str, Any], info: dict[str, Any], row: int) -> dict[str, Any]:
        return self._add_info(infos, info, row)
