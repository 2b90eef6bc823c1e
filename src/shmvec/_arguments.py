"""Checks arguments of calls before anything is sent: envs, seeds, options of resets, actions.

``_options`` checks the options of a vector env.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from shmvec.spaces import mapped

__all__ = [
    "Envs",
    "Options",
    "select_actions",
    "check_automatic_options",
    "checked_batch_size",
    "checked_count",
    "checked_env_fns",
    "checked_env_ids",
    "checked_int",
    "checked_options",
    "checked_seconds",
    "checked_seeds",
    "checked_wrappers",
    "existing_env_ids",
    "masked_env_ids",
    "values_by_env",
    "reset_arguments",
]

Envs: TypeAlias = npt.NDArray[np.intp]  # indices of envs
# Options of a reset: the same for all envs, or one for each.
Options: TypeAlias = dict[str, Any] | Sequence[dict[str, Any] | None] | None


def checked_env_fns(env_fns: Sequence[Callable[[], gym.Env[Any, Any]]]) -> list[Any]:
    """Checks that there is at least one env_fn and all are callable; returns a list."""
    if isinstance(env_fns, str):
        raise TypeError(
            f"env_fns must be a list of functions, one for each env, got {env_fns!r}. To make a "
            f"vector env from an env's id, call shmvec.make_vec({env_fns!r}, num_envs=8)"
        )
    if not isinstance(env_fns, Iterable):
        name = getattr(env_fns, "__name__", "")
        raise TypeError(
            "env_fns must be a list of functions, one for each env: "
            f"[{name if name.isidentifier() else 'make_env'}] * 8. It is "
            f"{'one function' if callable(env_fns) else f'of the type {type(env_fns).__name__}'}"
        )
    functions = list(env_fns)
    if not functions:
        raise ValueError("env_fns is empty: a vector env needs at least one env")
    for index, env_fn in enumerate(functions):
        if not callable(env_fn):
            raise TypeError(
                f"env_fns[{index}] is a {type(env_fn).__name__}, not a function that makes "
                "an env (write `lambda: gym.make(...)`)"
            )
    return functions


def checked_wrappers(wrappers: Any) -> list[Callable[[Any], Any]]:
    """Checks functions that wrap an env; returns a list."""
    if isinstance(wrappers, Iterable) and not isinstance(wrappers, (str, dict)):
        functions = list(wrappers)
        if all(map(callable, functions)):
            return functions
    raise TypeError(
        "wrappers must be a list of functions that take an env and return it wrapped, such as "
        f"[gymnasium.wrappers.FlattenObservation]; got {wrappers!r}"
    )


def checked_int(name: str, value: Any, kind: str = "an int") -> int:
    """Checks a value of any integer type; ``kind`` names what is expected in the TypeError."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {kind}, got {value!r}") from None


def checked_count(name: str, count: Any) -> int:
    """Checks a positive integer; ``name`` is the argument's, for the message."""
    checked = checked_int(name, count)
    if checked < 1:
        raise ValueError(f"{name} must be at least 1, got {checked}")
    return checked


def checked_seconds(name: str, value: Any, *, or_zero: bool = False) -> float | None:
    """Checks a positive number of seconds, or None; with ``or_zero`` also 0."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be seconds or None, got {value!r}") from None
    if or_zero and not seconds >= 0:
        raise ValueError(f"{name} must not be negative, got {seconds}")
    if not or_zero and not seconds > 0:
        raise ValueError(f"{name} must be positive, got {seconds}")
    return seconds


def checked_batch_size(batch_size: Any, num_envs: int) -> int | None:
    """Checks the number of envs that ``recv`` returns; None: all."""
    if batch_size is None:
        return None
    size = checked_int("batch_size", batch_size, "an int or None")
    if not 1 <= size <= num_envs:
        raise ValueError(
            f"batch_size must be between 1 and the number of envs ({num_envs}), got {size}"
        )
    return size


# ---- which envs ----------------------------------------------------------------------------------


def checked_env_ids(env_id: Any, num_envs: int) -> Envs:
    """Checks indices of envs, and returns them as an array; None means all.

    Raises:
        TypeError: They are not integers.
        ValueError: There are none, or they have another number of dimensions than one.
    """
    if env_id is None:
        return np.arange(num_envs, dtype=np.intp)
    ids = np.asarray(env_id)
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(
            f"env_id must be indices of envs, a list or an array of one dimension, got {env_id!r}"
        )
    if ids.dtype.kind not in "iu":
        raise TypeError(f"env_id must be integers, got {ids.dtype}: {env_id!r}")
    return np.ascontiguousarray(ids, np.intp)


def existing_env_ids(env_id: Any, num_envs: int) -> Envs:
    """Checks that indices are those of existing envs, each once; None means all.

    Raises:
        TypeError: They are not integers.
        ValueError: There is no such env, or it is named twice.
    """
    envs = checked_env_ids(env_id, num_envs)
    if envs.min() < 0 or envs.max() >= num_envs:
        raise ValueError(f"env_id must be in 0 to {num_envs - 1}, got {envs.tolist()}")
    if len(np.unique(envs)) < len(envs):
        raise ValueError(f"env_id names an env twice: {envs.tolist()}")
    return envs


def masked_env_ids(mask: Any, num_envs: int, name: str = "`options['reset_mask']`") -> Envs:
    """Checks a mask, and returns the indices of its envs; ``name`` is its name in messages."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"{name} must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"{name} must contain a boolean array with at least one True value, got "
            f"reset_mask={mask}"
        )
    return np.flatnonzero(mask)


# ---- resets --------------------------------------------------------------------------------------


def checked_seeds(seed: Any, num_envs: int) -> list[int | None] | None:
    """One seed for each env, or None for none at all. Any integer type is accepted."""
    if seed is None:
        return None
    try:
        first = operator.index(seed)
    except TypeError:
        pass
    else:
        return [first + i for i in range(num_envs)]
    expected = f"seed must be an int, None, or a list of {num_envs} of these, one for each env"
    if not isinstance(seed, Iterable):
        raise TypeError(f"{expected}; got {seed!r}")
    seeds = list(seed)
    if len(seeds) != num_envs:
        if isinstance(seed, (str, bytes)):
            raise ValueError(f"{expected}; got {seed!r}")
        raise ValueError(
            "If seeds are passed as a list the length must match "
            f"num_envs={num_envs} but got length={len(seeds)}."
        )
    for env, value in enumerate(seeds):
        try:
            seeds[env] = None if value is None else operator.index(value)
        except TypeError:
            raise TypeError(
                f"the seed of env {env} must be an int or None, got {value!r}"
            ) from None
    return seeds


def checked_options(options: Any, num_envs: int) -> list[Any] | None:
    """Options of a reset, one for each env, or None for none at all."""
    if options is None:
        return None
    if not isinstance(options, (list, tuple)):
        return [options] * num_envs
    if len(options) != num_envs:
        raise ValueError(
            f"If options are passed as a list its length must be the number of envs, {num_envs}, "
            f"but it is {len(options)}"
        )
    return list(options)


def reset_arguments(
    num_envs: int,
    seed: int | Sequence[int | None] | None,
    options: Options,
    env_id: npt.ArrayLike | None = None,
) -> tuple[Envs, list[Any] | None, list[Any] | None]:
    """The envs to reset, and the seed and options of each of them.

    A list of seeds or options has one for each env in ``env_id``; without ``env_id``, also with a
    mask, it has one for each env of the vector env.

    Raises:
        ValueError: There is a mask in a list of options, or besides ``env_id``.
    """
    several = isinstance(options, (list, tuple))
    if several or env_id is not None:
        all_options = options if isinstance(options, (list, tuple)) else [options]
        if any(isinstance(each, dict) and "reset_mask" in each for each in all_options):
            place = "is in a list of options" if several else "was given together with env_id"
            raise ValueError(
                f"options['reset_mask'] {place}: it chooses envs only in one dict of options, "
                "which is for all of these. To reset some envs with options of their own, call "
                "async_reset(options=[...], env_id=[...]), and recv(min_envs=...). Nothing was "
                "sent to any env."
            )
    if env_id is not None:
        envs = existing_env_ids(env_id, num_envs)
    elif isinstance(options, dict) and "reset_mask" in options:
        options = dict(options)
        envs = masked_env_ids(options.pop("reset_mask"), num_envs)
    else:
        envs = np.arange(num_envs, dtype=np.intp)

    def of_envs(check: Callable[[Any, int], list[Any] | None], values: Any) -> list[Any] | None:
        if env_id is not None and isinstance(values, (list, tuple, np.ndarray)):
            return check(values, len(envs))
        each = check(values, num_envs)
        return None if each is None else [each[env] for env in envs]

    return envs, of_envs(checked_seeds, seed), of_envs(checked_options, options)


def check_automatic_options(options: Any) -> None:
    """Checks options of automatic resets: the same for all envs, or a list.

    Raises:
        TypeError: Options are no dict.
        ValueError: There is a mask in the options.
    """
    for one in options if isinstance(options, (list, tuple)) else [options]:
        if one is not None and not isinstance(one, dict):
            raise TypeError(f"options must be a dict, a list of them, or None, got {one!r}")
        if one is not None and "reset_mask" in one:
            raise ValueError(
                "options['reset_mask'] chooses envs for reset(), not for automatic resets: choose "
                "these by env_id"
            )


# ---- values for envs -----------------------------------------------------------------------------


def values_by_env(values: Any, envs: Sequence[int]) -> dict[int, Any]:
    """The value for each env: from a list or tuple of them, or the same for all.

    Raises:
        ValueError: There are more or fewer values than envs.
    """
    if not isinstance(values, (list, tuple)):
        values = [values] * len(envs)
    if len(values) != len(envs):
        raise ValueError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(values)}` values for {len(envs)} environments."
        )
    return dict(zip(envs, values, strict=True))


def select_actions(envs: Envs, space: gym.Space[Any], actions: Any, num_envs: int) -> Any:
    """Selects the actions of some envs from those of all ``num_envs``.

    Raises:
        ValueError: There are more or fewer actions than envs.
        TypeError: They are not a list, tuple or array.
    """

    def select(part: Any) -> Any:
        try:
            count = len(part)
        except TypeError:
            raise TypeError(
                f"wrong actions: they are one {type(part).__name__}, and there are "
                f"{num_envs} envs. Nothing was sent to any env."
            ) from None
        if count != num_envs:
            raise ValueError(
                f"wrong actions: there are {count} for {num_envs} envs; those that the mask leaves "
                "out need one, too. Nothing was sent to any env."
            )
        return part[envs] if isinstance(part, np.ndarray) else [part[env] for env in envs]

    return mapped(space, select, actions)
