"""``ShmVectorEnv`` on other systems than Linux: Gymnasium's vector envs, with one warning.

So a program that trains on Linux runs on a laptop with macOS or Windows. The signature, ``install``
and the environment variables are as on Linux; the table of options refuses what Gymnasium lacks.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from shmvec._autoreset import AutoresetMode
from shmvec._core import is_native, needs_linux
from shmvec._options import (
    OPTIONS,
    Check,
    MaxWorkers,
    Settings,
    VectorEnvOptions,
    with_signature_of,
)

__all__ = ["ShmVectorEnv"]

_MISSING_FEATURES = (
    "partial batches (batch_size=, send, recv), rollouts, Replay, Pipeline, evaluate, fault "
    "policies and time limits, stats, planning, aio, adapters, clusters and `python -m shmvec`"
)


@cache  # it does not keep that the warning was an error
def _warn_once() -> None:
    warnings.warn(
        f"{needs_linux('shmvec')}. Here ShmVectorEnv is as fast as AsyncVectorEnv (or "
        f"SyncVectorEnv, with num_workers=0). Missing are {_MISSING_FEATURES}. A script needs "
        "`if __name__ == '__main__':` if its processes are spawned, as on macOS and Windows",
        stacklevel=4,
    )


def _refuse_option(name: str) -> Check:
    """Returns the check of an option that Gymnasium lacks: it must be None or the default."""
    default = OPTIONS[name].default
    if isinstance(default, AutoresetMode):  # Gymnasium 1.0 has no such option
        default = default.value

    def check(value: Any, _: Settings) -> Any:
        if isinstance(value, AutoresetMode):
            value = value.value
        if value is None or isinstance(value, (str, int, float, tuple)) and value == default:
            return value
        raise TypeError(
            f"{needs_linux(f'the option {name}')}. Leave it out where shmvec.is_native is False"
        )

    return check


def _checked_num_workers(num_workers: Any, settings: Settings) -> int:
    """The number of processes, which in Gymnasium is that of envs, or 0."""
    if num_workers is None:
        return settings.num_envs  # type: ignore[no-any-return]
    count: int = _check_num_workers(num_workers, settings)
    if count != 0 if isinstance(num_workers, MaxWorkers) else count not in (0, settings.num_envs):
        raise TypeError(
            f"{needs_linux(f'num_workers={num_workers}')}. AsyncVectorEnv has a process for each "
            "env: leave num_workers out, or give 0 for SyncVectorEnv"
        )
    if count == 0 and settings.worker is not None:
        raise TypeError(needs_linux("a `worker` function without processes"))
    return count


_check_num_workers: Any = OPTIONS["num_workers"].check
if not is_native:
    for _name in OPTIONS.keys() - inspect.signature(AsyncVectorEnv).parameters.keys():
        OPTIONS[_name] = replace(OPTIONS[_name], check=_refuse_option(_name))
    OPTIONS["num_workers"] = replace(OPTIONS["num_workers"], check=_checked_num_workers)


class _LinuxMethods(VectorEnv[Any, Any, Any]):
    """Methods and attributes that Gymnasium's vector envs lack."""

    num_workers: int

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        hint = "" if name.startswith("_") else f": {needs_linux('what Gymnasium lacks')}"
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self
        )


class ShmVectorEnv(_LinuxMethods, AsyncVectorEnv):
    """Gymnasium's ``AsyncVectorEnv``, or its ``SyncVectorEnv`` if ``num_workers`` is 0."""

    @with_signature_of(VectorEnvOptions)
    def __init__(self, env_fns: list[Any], settings: Settings) -> None:
        """Starts a process for each env, or none.

        Raises:
            TypeError: An option needs Linux.
        """
        base: Any = AsyncVectorEnv
        if settings.num_workers == 0:
            if type(self) is not ShmVectorEnv:
                raise TypeError(needs_linux("num_workers=0 in a subclass of ShmVectorEnv"))
            self.__class__, base = _SyncVectorEnv, SyncVectorEnv  # type: ignore[assignment]
        _warn_once()
        names = OPTIONS.keys() & inspect.signature(base).parameters.keys()
        base.__init__(self, env_fns, **{name: getattr(settings, name) for name in names})
        self.num_workers = settings.num_workers


class _SyncVectorEnv(_LinuxMethods, SyncVectorEnv):
    """The class of ``ShmVectorEnv(num_workers=0)``."""
