"""The spaces of a vector env, on which those of its envs must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shmvec._shared.layout import check_shared_memory
from shmvec._shared.records import Report

__all__ = ["agreed_spaces"]

Space = gym.Space[Any]


def agreed_spaces(
    name: str,
    ranges: Sequence[range],
    reports: Sequence[Report],
    mode: str | tuple[Space, Space],
    shared_memory: bool,
) -> tuple[Space, Space, Space, Space]:
    """The spaces of observations and actions, of one env and of the batch.

    Args:
        name: Of the vector env's class, for messages.
        ranges: The envs of each worker.
        reports: What each worker says of its envs.
        mode: The ``observation_mode``.
        shared_memory: Whether observations are to lie in shared memory.

    Returns:
        Observation space of one env, of the batch; action space of one env, of the batch.

    Raises:
        RuntimeError: Spaces of the envs differ.
        ValueError: The observation space cannot be shared memory.
    """
    first = reports[0]
    observation_spaces: list[Any] = []
    action_spaces: list[Any] = []
    for envs, report in zip(ranges, reports, strict=True):
        observation_spaces += [report.observation_space] * len(envs)
        action_spaces += [report.action_space] * len(envs)
        for env, which, space in report.unequal:
            (observation_spaces if which == "observation_space" else action_spaces)[env] = space

    num_envs = len(observation_spaces)
    if isinstance(mode, tuple):
        batched, single = mode
    else:
        single = first.observation_space
        batched = (
            batch_space(single, num_envs)
            if mode == "same"
            else batch_differing_spaces(observation_spaces)
        )
    if shared_memory:
        check_shared_memory(single)
    for env, space in enumerate(observation_spaces):
        where = f"The observation space of env {env} is {space}, not {single}."
        if mode == "same" and space != single:
            raise RuntimeError(
                f"{name}(..., observation_mode='same') however some of the sub-environments "
                "observation spaces are not equivalent. If this is intentional, use "
                f"`observation_mode='different'` instead. {where}"
            )
        if mode != "same" and not is_space_dtype_shape_equiv(single, space):
            raise RuntimeError(
                f"{name}(..., observation_mode='different' or custom space) however the "
                "sub-environment's observation spaces do not share a common shape and dtype. "
                f"{where}"
            )
    for env, space in enumerate(action_spaces):
        if space != first.action_space:
            raise RuntimeError(
                "Some environments have an action space different from "
                f"`{first.action_space}`. In order to batch actions, the action spaces "
                "from all environments must be equal. "
                f"The action space of env {env} is {space}."
            )
    return single, batched, first.action_space, batch_space(first.action_space, num_envs)
