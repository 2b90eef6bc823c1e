"""Answers of envs on other nodes: asked for in one message a node, and put together here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from shmvec.cluster.fragments import opened
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Ask", "Host", "Hosted", "Piece", "together"]

Rows: TypeAlias = npt.NDArray[np.intp]


@dataclass
class Ask:
    """A request to envs of a host: to step, or to reset if there are no actions.

    Attributes:
        envs: Which envs, by their numbers on the host.
        actions: A list, one for each.
        seeds: Likewise; None: none at all.
        options: Likewise.
    """

    envs: Rows
    actions: Any = None
    seeds: list[int | None] | None = None
    options: list[Any] | None = None


@dataclass
class Piece:
    """Answers of some envs.

    Attributes:
        envs: Which envs, by their numbers in the vector env.
        observations: A list, one for each.
        rewards: float64 ``(n,)``.
        terminations: bool ``(n,)``.
        truncations: bool ``(n,)``.
        infos: Gymnasium's dict of arrays, with a row for each.
    """

    envs: Rows
    observations: list[Any]
    rewards: npt.NDArray[np.float64]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]
    infos: dict[str, Any]

    def rows(self, rows: Sequence[int]) -> Piece:
        """The answers of some rows."""
        chosen = np.array(rows, np.intp)
        return Piece(
            self.envs[chosen],
            [self.observations[row] for row in rows],
            self.rewards[chosen],
            self.terminations[chosen],
            self.truncations[chosen],
            _infos_of(self.infos, chosen),
        )


@dataclass(frozen=True)
class Hosted:
    """What a host reports of its envs."""

    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    metadata: dict[str, Any]
    render_mode: str | None
    num_workers: int


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
        self._envs = ShmVectorEnv(functions, batch_size=len(functions), **options)

    def report(self) -> Hosted:
        """What the vector env needs to know of the envs."""
        envs = self._envs
        spaces = envs.single_observation_space, envs.single_action_space
        return Hosted(spaces, envs.metadata, envs.render_mode, envs.num_workers)

    def begin(self, asks: Sequence[Ask]) -> None:
        """Asks envs."""
        envs = self._envs
        for ask in asks:
            if ask.actions is None:
                envs.async_reset(ask.seeds, ask.options, ask.envs)
            else:
                envs.send(_by_part(envs.single_action_space, ask.actions), ask.envs)

    def turn(self, asks: Sequence[Ask], least: int) -> Piece:
        """Asks envs; waits until so many of all that were asked are ready, and returns those."""
        self.begin(asks)
        envs = self._envs
        observations, rewards, terminations, truncations, infos = envs.recv(min_envs=least)
        there = infos.pop("env_id")
        space = gym.vector.utils.batch_space(envs.single_observation_space, len(there))
        each = list(iterate(space, observations))
        return Piece(there, each, rewards, terminations, truncations, infos)

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
    space: gym.Space[Any], pieces: Sequence[Piece], num_envs: int | None = None
) -> tuple[Any, ...]:
    """Pieces as one, in their order: the results of a step, with the envs in front.

    Args:
        space: Space of an observation.
        pieces: At least one.
        num_envs: Infos have a row for each of so many envs. None: for those that there are.
    """
    envs = np.concatenate([piece.envs for piece in pieces])
    each = [observation for piece in pieces for observation in piece.observations]
    empty: Any = create_empty_array(space, len(each))
    observations = concatenate(space, each, empty)
    begins = np.cumsum([0, *(len(piece.envs) for piece in pieces)])
    parts = [
        (piece.infos, piece.envs if num_envs else np.arange(begin, begin + len(piece.envs)))
        for piece, begin in zip(pieces, begins, strict=False)
    ]
    return (
        envs,
        observations,
        np.concatenate([piece.rewards for piece in pieces]),
        np.concatenate([piece.terminations for piece in pieces]),
        np.concatenate([piece.truncations for piece in pieces]),
        _joined(parts, num_envs or len(envs)),
    )


def _by_part(space: gym.Space[Any], actions: Sequence[Any]) -> Any:
    """Actions of some envs as those of a vector env: of a Dict or a Tuple each part by itself."""
    if isinstance(space, gym.spaces.Dict):
        parts = {key: [action[key] for action in actions] for key in space}
        return {key: _by_part(space[key], part) for key, part in parts.items()}
    if isinstance(space, gym.spaces.Tuple):
        columns = zip(*actions, strict=True)
        return tuple(_by_part(*each) for each in zip(space, columns, strict=True))
    return actions


def _infos_of(infos: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    """Infos of some rows; what none of these says is left out."""
    found: dict[str, Any] = {}
    for key, value in infos.items():
        if f"_{key}" not in infos:
            continue  # a mask
        mask = infos[f"_{key}"][rows]
        if mask.any():
            found[key] = _infos_of(value, rows) if isinstance(value, dict) else value[rows]
            found[f"_{key}"] = mask
    return found


def _joined(parts: Sequence[tuple[Mapping[str, Any], Rows]], count: int) -> dict[str, Any]:
    """Infos of parts, each with the rows that are its, as Gymnasium makes them of all."""
    infos: dict[str, Any] = {}
    for key in dict.fromkeys(key for of, _ in parts for key in of if f"_{key}" in of):
        having = [(of[key], of[f"_{key}"], rows) for of, rows in parts if key in of]
        first = having[0][0]
        if isinstance(first, dict):
            infos[key] = _joined([(value, rows) for value, _, rows in having], count)
        else:
            empty = np.empty if first.dtype == object else np.zeros
            infos[key] = empty((count, *first.shape[1:]), first.dtype)
            for value, _, rows in having:
                infos[key][rows] = value
        infos[f"_{key}"] = np.zeros(count, np.bool_)
        for _, mask, rows in having:
            infos[f"_{key}"][rows] = mask
    return infos
