"""What is wrong with an observation that cannot be put where its space says: for messages."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["misfit", "odd_one"]


def misfit(
    env: int, space: gym.Space[Any], observation: Any, error: Exception, exact: bool = False
) -> Exception:
    """An error that names the env and the part of the space that an observation does not fit.

    Args:
        env: Whose it is.
        space: Observation space of one env.
        observation: What the env returned.
        error: What putting it has raised: the new one is of the same type, if it can be.
        exact: Whether its shape must be that of the space, not only the number of elements.
    """
    what = _wrong(space, observation, "observation", exact) or f"observation: {error}"
    kind = next((kind for kind in (KeyError, TypeError) if isinstance(error, kind)), ValueError)
    return kind(f"env {env}: the {what}")


def odd_one(
    space: gym.Space[Any], envs: Iterable[int], observations: Iterable[Any], error: Exception
) -> tuple[int | None, Exception]:
    """The first of several that do not fit together, and its error; None and ``error``: none."""
    for env, observation in zip(envs, observations, strict=True):
        if _wrong(space, observation, "", exact=True):
            return env, misfit(env, space, observation, error, exact=True)
    return None, error


def _wrong(space: gym.Space[Any], value: Any, path: str, exact: bool) -> str | None:
    """What is wrong with a value, or with the first part of it that is; None: nothing."""
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{path} is a {type(value).__name__}; its space {space} needs a mapping"
        return _wrong_part(space, space.spaces.items(), value, set(value), path, exact)
    if isinstance(space, gym.spaces.Tuple):
        if not isinstance(value, (tuple, list)):
            return f"{path} is a {type(value).__name__}; its space {space} needs a tuple"
        return _wrong_part(space, enumerate(space.spaces), value, range(len(value)), path, exact)
    if value is None:
        return f"{path} is None; its space {space} needs {_needed(space)}"
    if space.shape is None or space.dtype is None:
        return None
    try:
        array = np.asarray(value)
        fits = array.shape == space.shape or (not exact and array.size == int(np.prod(space.shape)))
        array.astype(space.dtype)
    except (TypeError, ValueError):
        fits = False
        array = np.array(value, object)
    if fits:
        return None
    return (
        f"{path} has shape {array.shape} and dtype {array.dtype}; its space {space} needs "
        f"{_needed(space)}"
    )


def _wrong_part(
    space: gym.Space[Any],
    parts: Iterable[tuple[Any, gym.Space[Any]]],
    value: Any,
    keys: Container[Any],
    path: str,
    exact: bool,
) -> str | None:
    for key, part in parts:
        if key not in keys:
            return f"{path} has no {key!r}, which its space {space} needs"
        wrong = _wrong(part, value[key], f"{path}[{key!r}]", exact)
        if wrong is not None:
            return wrong
    return None


def _needed(space: gym.Space[Any]) -> str:
    if space.shape is None or space.dtype is None:
        return "a value"
    return f"shape {space.shape} and dtype {space.dtype}"
