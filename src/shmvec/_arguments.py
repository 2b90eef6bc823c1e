"""What the caller passes, checked before anything is started or sent."""

from __future__ import annotations

import multiprocessing
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from shmvec._cores import WAIT_POLICIES
from shmvec.spaces import mapped

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode
else:
    try:
        from gymnasium.vector import AutoresetMode
    except ImportError:  # Gymnasium 1.0 resets at the next step and has no name for it

        class AutoresetMode(Enum):
            """When an episode's end is followed by a reset."""

            NEXT_STEP = "NextStep"
            SAME_STEP = "SameStep"
            DISABLED = "Disabled"


__all__ = [
    "AtMost",
    "AutoresetMode",
    "Options",
    "WorkerEnviron",
    "checked_autoreset_mode",
    "checked_batch_size",
    "checked_context",
    "checked_count",
    "checked_env_fns",
    "checked_env_ids",
    "checked_environs",
    "checked_hang_warning",
    "checked_limits",
    "checked_max_concurrency",
    "checked_num_workers",
    "checked_observation_mode",
    "checked_options",
    "checked_preload",
    "checked_seeds",
    "checked_threads",
    "checked_wait_policy",
    "checked_worker_init",
    "existing_env_ids",
    "given_actions",
    "given_once",
    "masked_env_ids",
    "one_each",
    "reset_arguments",
]

_FOR_EVER = 1e9  # seconds: the nanoseconds of more do not fit into 64 bits

# For reset: the same for all envs, or one for each.
Options: TypeAlias = dict[str, Any] | Sequence[dict[str, Any] | None] | None
# Environment variables of all workers, or, by its index, of each.
WorkerEnviron: TypeAlias = Mapping[str, str] | Callable[[int], Mapping[str, str]] | None


class AtMost(int):
    """A number of workers that is a default: no more than there are envs, or may be stepped."""

    def __new__(cls, count: Any) -> AtMost:
        """Takes an integer, or its text."""
        try:
            most = super().__new__(cls, count if isinstance(count, str) else operator.index(count))
        except TypeError:
            raise TypeError(f"num_workers must be an int or None, got {count!r}") from None
        if most < 0:
            raise ValueError(f"num_workers must not be negative, got {count}")
        return most


def checked_env_fns(env_fns: Sequence[Callable[[], gym.Env[Any, Any]]]) -> list[Any]:
    """The functions as a list; at least one, all callable."""
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


def checked_autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """The mode, given as such or as its value ("NextStep", "SameStep", "Disabled")."""
    return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)


def checked_observation_mode(mode: Any) -> None:
    """Raises unless it is "same", "different" or a pair of spaces (batched, single)."""
    if isinstance(mode, tuple) and len(mode) == 2:
        if not isinstance(mode[0], gym.Space) or not isinstance(mode[1], gym.Space):
            raise TypeError(
                "Expected both elements of observation_mode to be Spaces, got "
                f"{type(mode[0])} and {type(mode[1])}"
            )
    elif not isinstance(mode, str) or mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and "
            f"batch observation space, actual got {mode}"
        )


def checked_max_concurrency(limit: Any) -> None:
    """Raises unless it is None or a positive integer."""
    if limit is None:
        return
    if not isinstance(limit, (int, np.integer)):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(limit)}.")
    if limit < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {limit}.")


def checked_num_workers(
    num_workers: Any, num_envs: int, cores: int, max_concurrency: int | None
) -> int:
    """The number of worker processes: as asked for, or one for each usable core."""
    if num_workers is None or isinstance(num_workers, AtMost):
        most = cores if num_workers is None else int(num_workers)
        return min(most, num_envs if max_concurrency is None else min(num_envs, max_concurrency))
    try:
        count = operator.index(num_workers)
    except TypeError:
        raise TypeError(f"num_workers must be an int or None, got {num_workers!r}") from None
    if isinstance(num_workers, bool) or not 0 <= count <= num_envs:
        raise ValueError(
            f"num_workers must be between 0 (the calling process) and the number of envs "
            f"({num_envs}), got {num_workers!r}; None chooses one for each usable core"
        )
    if max_concurrency is not None and count > max_concurrency:
        raise ValueError(
            f"num_workers={count} would step {count} envs at a time, but "
            f"max_concurrency={max_concurrency}: leave one of them out"
        )
    return count


def checked_threads(threads_per_worker: Any, num_workers: int, cores: int) -> int:
    """Threads for the libraries in a worker: as asked for, or its share of the cores."""
    if threads_per_worker is None:
        return max(1, cores // max(1, num_workers))
    try:
        threads = operator.index(threads_per_worker)
    except TypeError:
        raise TypeError(
            f"threads_per_worker must be an int or None, got {threads_per_worker!r}"
        ) from None
    if threads < 0:
        raise ValueError(f"threads_per_worker must not be negative, got {threads}")
    return threads


def checked_context(context: Any) -> str:
    """How processes are started: a start method's name.

    Args:
        context: A start method's name, a context of ``multiprocessing``'s, or None for Python's
            default, which is not thereby fixed.

    Raises:
        ValueError: There is no such start method.
        TypeError: It is something else.
    """
    available = multiprocessing.get_all_start_methods()
    if context is None:
        return multiprocessing.get_start_method(allow_none=True) or available[0]
    ask = getattr(context, "get_start_method", None)
    name = context if ask is None else ask()
    if not isinstance(name, str):
        raise TypeError(
            "context must be a start method's name, a multiprocessing context or None, got "
            f"{context!r}"
        )
    if name not in available:
        raise ValueError(f"cannot find context for {name!r}: there are {', '.join(available)}")
    return name


def checked_environs(worker_environ: WorkerEnviron, num_workers: int) -> list[dict[str, str]]:
    """Each worker's own environment variables.

    Raises:
        TypeError: Names and values are no strings.
        ValueError: There are no workers.
    """
    if worker_environ is None:
        return [{} for _ in range(num_workers)]
    if num_workers == 0:
        raise ValueError(
            "worker_environ is for worker processes, and num_workers=0 has none: set os.environ"
        )
    one = (lambda _: worker_environ) if isinstance(worker_environ, Mapping) else worker_environ
    found = []
    for worker in range(num_workers):
        try:
            environ = dict(one(worker))
            environ = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
        except (TypeError, ValueError) as error:
            raise TypeError(
                "worker_environ must be a dict of strings, or a function that returns one for a "
                f"worker's index; of worker {worker}: {error}"
            ) from error
        found.append(environ)
    return found


def checked_preload(preload: Sequence[str]) -> list[str]:
    """Names of modules that there are.

    Raises:
        TypeError: They are no strings.
        ModuleNotFoundError: There is none of that name.
    """
    names = [preload] if isinstance(preload, str) else list(preload)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"preload must be names of modules, got {name!r}")
        first = name.partition(".")[0]
        if first not in sys.modules and find_spec(first) is None:
            raise ModuleNotFoundError(f"preload names {name!r}: there is no module of that name")
    return names


def checked_worker_init(init: Any, num_workers: int) -> Any:
    """A function to call in each worker, or None.

    Raises:
        TypeError: It cannot be called.
        ValueError: There are no workers.
    """
    if init is not None and not callable(init):
        raise TypeError(f"worker_init must be a function of a worker's index, got {init!r}")
    if init is not None and num_workers == 0:
        raise ValueError("worker_init is for worker processes, and num_workers=0 has none")
    return init


def checked_count(name: str, count: Any) -> int:
    """A positive integer."""
    try:
        checked = operator.index(count)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {count!r}") from None
    if checked < 1:
        raise ValueError(f"{name} must be at least 1, got {checked}")
    return checked


def checked_limits(
    step_timeout: Any, reset_timeout: Any, num_workers: int
) -> tuple[float | None, float | None]:
    """Seconds that a step and a reset of one env may take; None: as long as they like."""
    limits = []
    for name, limit in (("step_timeout", step_timeout), ("reset_timeout", reset_timeout)):
        if limit is not None:
            try:
                limit = float(limit)
            except (TypeError, ValueError):
                raise TypeError(f"{name} must be seconds or None, got {limit!r}") from None
            if not limit > 0:
                raise ValueError(f"{name} must be positive, got {limit}")
            if num_workers == 0:
                raise ValueError(
                    f"{name} needs worker processes: with num_workers=0 the env runs in this one, "
                    "and nobody is left to look at the clock"
                )
            if limit > _FOR_EVER:
                limit = None
        limits.append(limit)
    return limits[0], limits[1]


def checked_hang_warning(seconds: Any) -> float | None:
    """Seconds after which a hang is told; None: it never is."""
    if seconds is None:
        return None
    try:
        seconds = float(seconds)
    except (TypeError, ValueError):
        raise TypeError(f"hang_warning_s must be seconds or None, got {seconds!r}") from None
    if not seconds >= 0:
        raise ValueError(f"hang_warning_s must not be negative, got {seconds}")
    return seconds if 0 < seconds <= _FOR_EVER else None


def checked_wait_policy(policy: Any) -> None:
    """Raises unless it is one of the policies."""
    if policy not in WAIT_POLICIES:
        names = ", ".join(map(repr, WAIT_POLICIES))
        raise ValueError(f"wait_policy must be one of {names}, got {policy!r}")


def checked_seeds(seed: Any, num_envs: int) -> list[int | None] | None:
    """One seed for each env, or None for none at all. Any integer type will do."""
    if seed is None:
        return None
    try:
        first = operator.index(seed)
    except TypeError:
        pass
    else:
        return [first + i for i in range(num_envs)]
    seeds = list(seed)
    if len(seeds) != num_envs:
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


def given_once(name: str, limit: float | None, other: float | None) -> float | None:
    """A time limit that may be given in two places."""
    if limit is not None and other is not None and limit != other:
        raise ValueError(f"{name} is given twice: {limit}, and {other} in the FaultPolicy")
    return other if limit is None else limit


def of_each_env(
    checked: Callable[[Any, int], list[Any] | None],
    values: Any,
    env_id: npt.NDArray[np.intp] | None,
    num_envs: int,
) -> list[Any] | None:
    """Seeds or options by env, of which a list has one for each env in ``env_id``; None: of all."""
    if env_id is None or not isinstance(values, (list, tuple, np.ndarray)):
        return checked(values, num_envs)
    found: list[Any] = [None] * num_envs
    for env, value in zip(env_id.tolist(), checked(values, len(env_id)) or (), strict=True):
        found[env] = value
    return found


def masked_env_ids(
    mask: Any, num_envs: int, name: str = "`options['reset_mask']`"
) -> npt.NDArray[np.intp]:
    """Indices of the envs of a mask; ``name`` is what messages call it."""
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


def checked_batch_size(batch_size: Any, num_envs: int) -> int | None:
    """A number of envs, or None.

    Raises:
        TypeError: It is no integer.
        ValueError: There are not so many envs.
    """
    if batch_size is None:
        return None
    try:
        size = operator.index(batch_size)
    except TypeError:
        raise TypeError(f"batch_size must be an int or None, got {batch_size!r}") from None
    if not 1 <= size <= num_envs:
        raise ValueError(
            f"batch_size must be between 1 and the number of envs ({num_envs}), got {size}"
        )
    return size


def checked_env_ids(env_id: Any, num_envs: int) -> npt.NDArray[np.intp]:
    """Indices of envs, as an array; None means all.

    Raises:
        TypeError: They are no integers.
        ValueError: There are none, or they are not in one row.
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


def existing_env_ids(env_id: Any, num_envs: int) -> npt.NDArray[np.intp]:
    """Indices of envs that there are, each once; None means all.

    Raises:
        TypeError: They are no integers.
        ValueError: There is no such env, or it is named twice.
    """
    envs = checked_env_ids(env_id, num_envs)
    if envs.min() < 0 or envs.max() >= num_envs:
        raise ValueError(f"env_id must be in 0 to {num_envs - 1}, got {envs.tolist()}")
    if len(np.unique(envs)) < len(envs):
        raise ValueError(f"env_id names an env twice: {envs.tolist()}")
    return envs


def one_each(values: Any, envs: Sequence[int]) -> dict[int, Any]:
    """The value for each env: one of a list or tuple, or the same for all.

    Raises:
        ValueError: There are more or fewer.
    """
    if not isinstance(values, (list, tuple)):
        values = [values] * len(envs)
    if len(values) != len(envs):
        raise ValueError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(values)}` values for {len(envs)} environments."
        )
    return dict(zip(envs, values, strict=True))


def given_actions(
    space: Any, actions: Any, envs: npt.NDArray[np.intp], num_envs: int | None = None
) -> Any:
    """The actions of some envs, out of those of all.

    Args:
        space: That of one env.
        actions: Of all.
        envs: Which are wanted.
        num_envs: How many there must be. None: at least those.

    Raises:
        ValueError: There are more or fewer.
        TypeError: What should be many is one.
    """

    def given(part: Any) -> Any:
        if num_envs is not None:
            try:
                count = len(part)
            except TypeError:
                raise TypeError(
                    f"wrong actions: they are one {type(part).__name__}, and there are "
                    f"{num_envs} envs. Nothing was sent to any env."
                ) from None
            if count != num_envs:
                raise ValueError(
                    f"wrong actions: there are {count}, and {num_envs} envs, those included that "
                    "the mask leaves out. Nothing was sent to any env."
                )
        return part[envs] if isinstance(part, np.ndarray) else [part[env] for env in envs]

    return mapped(space, given, actions)


def reset_arguments(
    num_envs: int,
    seed: int | Sequence[int | None] | None,
    options: Options,
    env_id: npt.ArrayLike | None = None,
) -> tuple[npt.NDArray[np.intp], list[Any] | None, list[Any] | None]:
    """The envs to reset, and the seed and options of each of them."""
    if env_id is not None:
        envs = existing_env_ids(env_id, num_envs)
    elif isinstance(options, dict) and "reset_mask" in options:
        options = dict(options)
        envs = masked_env_ids(options.pop("reset_mask"), num_envs)
    else:
        envs = np.arange(num_envs, dtype=np.intp)
    named = None if env_id is None else envs
    seeds = of_each_env(checked_seeds, seed, named, num_envs)
    each = of_each_env(checked_options, options, named, num_envs)
    return (
        envs,
        None if seeds is None else [seeds[env] for env in envs],
        None if each is None else [each[env] for env in envs],
    )
