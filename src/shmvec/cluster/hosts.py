"""``Host``: steps the envs of one node; requests and answers are one message each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from shmvec.cluster.actor_pool import CLOSE_TIMEOUT_S
from shmvec.cluster.fragments import unpickle
from shmvec.spaces import batched, refuse_reward_space
from shmvec.vector_env import ShmVectorEnv, StepResults

__all__ = ["Answer", "Host", "HostReport", "Request", "gather_answers"]


class Request(NamedTuple):
    """A request to an env of a host: to step, or to reset.

    Attributes:
        env: The env's index in the whole vector env.
        is_reset: Whether the request is a reset.
        action: The action of a step.
        seed: The seed of a reset.
        options: The options of a reset.
    """

    env: int
    is_reset: bool
    action: Any = None
    seed: int | None = None
    options: Any = None


class Answer(NamedTuple):
    """An env's answer to a request; after a reset the reward is 0."""

    env: int
    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True)
class HostReport:
    """A host's description of its envs."""

    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    metadata: dict[str, Any]
    render_mode: str | None


class Host:
    """A node's share of the envs of a vector env, and their workers."""

    def __init__(self, env_fns: bytes, envs: range, options: Mapping[str, Any]) -> None:
        """Builds the envs.

        Args:
            env_fns: A pickled list of the functions that make the envs of all hosts.
            envs: Indices of this host's envs.
            options: Options of ``ShmVectorEnv``.
        """
        functions = unpickle("env_fns", env_fns)[envs.start : envs.stop]
        self._first_env = envs.start
        self._envs = ShmVectorEnv(functions, **options)
        try:
            refuse_reward_space(self._envs.reward_space, "a ClusterVectorEnv")
        except BaseException:
            self.close()
            raise

    def report(self) -> HostReport:
        """Describes the envs to the vector env."""
        envs = self._envs
        spaces = envs.single_observation_space, envs.single_action_space
        return HostReport(spaces, envs.metadata, envs.render_mode)

    def send(self, requests: Sequence[Request]) -> None:
        """Asks envs, and does not wait."""
        envs, first = self._envs, self._first_env
        steps = [request for request in requests if not request.is_reset]
        resets = [request for request in requests if request.is_reset]
        if steps:
            actions = batched(envs.single_action_space, [request.action for request in steps])
            envs.send(actions, [request.env - first for request in steps])
        if resets:
            chosen = [each.env - first for each in resets]
            seeds, options = [each.seed for each in resets], [each.options for each in resets]
            envs.async_reset(seeds, options, chosen)

    def send_and_receive(self, requests: Sequence[Request], least: int) -> list[Answer]:
        """Asks envs; waits until ``least`` envs in flight are ready, and returns all answers."""
        self.send(requests)
        exchange, space = self._envs.exchange, self._envs.single_observation_space
        exchange.recycle()
        answers = exchange.delivered(exchange.take(count=self._envs.num_envs, least=least))
        return [Answer(env + self._first_env, *results) for env, *results in answers.by_env(space)]

    def call(self, name: str, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each env, or gets an attribute."""
        return self._envs.call(name, *args, **kwargs)

    def set_attr(self, name: str, values: list[Any]) -> None:
        """Sets an attribute of each env."""
        self._envs.set_attr(name, values)

    def close(self) -> None:
        """Closes the envs; those that hang are ended."""
        self._envs.close(timeout=CLOSE_TIMEOUT_S)


def gather_answers(
    space: gym.Space[Any], answers: Sequence[Answer], num_envs: int | None = None
) -> StepResults:
    """Gathers answers, in their order, into the results of a step.

    Args:
        space: Observation space of one env.
        answers: At least one answer.
        num_envs: Number of envs for which infos have rows. None: a row for each answer.
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
    """Gathers infos by Gymnasium's own method."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.closed = True

    def add(self, infos: dict[str, Any], info: dict[str, Any], row: int) -> dict[str, Any]:
        return self._add_info(infos, info, row)
