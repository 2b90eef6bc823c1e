"""Configuration of the env managers, and checks of the arguments of their methods."""

from __future__ import annotations

import logging
import math
import multiprocessing
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from shmvec._arguments import checked_int, checked_seconds, checked_seeds, existing_env_ids
from shmvec._hints import did_you_mean
from shmvec.faults import FaultPolicy

log = logging.getLogger("shmvec")


@dataclass
class EnvManagerConfig(MutableMapping[str, Any]):
    """Configuration of an env manager; its attributes are also the keys of a mapping.

    Programs may add other keys or attributes, as they do for DI-engine. The manager ignores them,
    but warns of one that looks like a misspelt key.

    Attributes:
        episode_num: Number of episodes after which an env is DONE.
        max_retry: Number of attempts at a reset.
        retry_type: How a failed reset is retried: "reset" asks the same env, "renew" a new one, in
            a new process. (A process that died or was too late is replaced in any case.)
        auto_reset: Whether an env whose episode is over is reset. False: ``reset`` it yourself.
        step_timeout: Seconds that a step of one env may take. None: no limit.
        reset_timeout: Seconds that a reset of one env may take, in its worker. None: no limit.
        retry_waiting_time: Seconds before a reset is retried.
        shared_memory: Whether observations lie in shared memory; see ``ShmVectorEnv``.
        copy_on_get: Whether observations are copies. False: they may be views of shared memory,
            which later steps of their env overwrite.
        context: How processes are started: "fork", "spawn", "forkserver", or None for Python's
            default.
        wait_num: Number of ready envs at which ``step`` returns.
        step_wait_timeout: Seconds after which ``step`` returns with fewer. None: never.
        connect_timeout: Seconds between the request for a reset and the answer, which may wait for
            other envs of the worker. None: no limit.
        reset_inplace: Whether the step that ends an episode also resets.
        num_workers: Number of processes. None: one for each env if single envs may have to be
            replaced (retry_type "renew", step_timeout, reset_timeout); else as ``ShmVectorEnv``
            chooses. 0: envs live in the calling process.
        faults: The ``shmvec.FaultPolicy`` for failing steps. None: they raise, and the env is in
            ERROR until it is reset.
    """

    episode_num: float = math.inf
    max_retry: int = 1
    retry_type: str = "reset"
    auto_reset: bool = True
    step_timeout: float | None = None
    reset_timeout: float | None = None
    retry_waiting_time: float = 0.1
    shared_memory: bool = True
    copy_on_get: bool = True
    context: str | None = "fork"
    wait_num: float = 2
    step_wait_timeout: float | None = 0.01
    connect_timeout: float | None = 60
    reset_inplace: bool = False
    num_workers: int | None = None
    faults: FaultPolicy | None = None

    def check(self) -> None:
        """Raises ValueError or TypeError if a value is wrong."""
        _check_number("episode_num", self.episode_num, least=1)
        _check_number("max_retry", self.max_retry, least=0)
        _check_word("retry_type", self.retry_type, ("reset", "renew"))
        for name in ("auto_reset", "shared_memory", "copy_on_get", "reset_inplace"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        for name in ("step_timeout", "reset_timeout", "connect_timeout"):
            checked_seconds(name, getattr(self, name))
        checked_seconds("step_wait_timeout", self.step_wait_timeout, or_zero=True)
        if self.retry_waiting_time is None:
            raise TypeError("retry_waiting_time must be seconds, got None")
        checked_seconds("retry_waiting_time", self.retry_waiting_time, or_zero=True)
        _check_number("wait_num", self.wait_num, least=1)
        if self.context is not None:
            _check_word("context", self.context, multiprocessing.get_all_start_methods())
        if self.reset_inplace and not self.auto_reset:
            raise ValueError("reset_inplace is unavailable when auto_reset=False")
        if self.faults is not None and not isinstance(self.faults, FaultPolicy):
            raise TypeError(f"faults must be a shmvec.FaultPolicy or None, got {self.faults!r}")

        names = [each.name for each in fields(self)]
        for key in set(self) - set(names):
            hint = did_you_mean([str(key)], names, likeness=0.8)
            if hint:
                log.warning("an env manager has no %r%s", key, hint)

    def __getitem__(self, key: str) -> Any:
        """The value of a key."""
        return vars(self)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Sets the value of a key, or adds one."""
        vars(self)[key] = value

    def __delitem__(self, key: str) -> None:
        """Removes a key; a key of the manager's gets its default value."""
        del vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        """All keys."""
        return iter(vars(self))

    def __len__(self) -> int:
        """Number of keys."""
        return len(vars(self))


@dataclass
class SyncEnvManagerConfig(EnvManagerConfig):
    """Configuration of a manager that waits for all envs that it steps.

    Attributes:
        wait_num: Not used: ``step`` waits for all.
        step_wait_timeout: Not used: ``step`` has no limit.
    """

    wait_num: float = math.inf
    step_wait_timeout: float | None = None


_Config = TypeVar("_Config", bound=EnvManagerConfig)


def config_of(kind: type[_Config], cfg: Any) -> _Config:
    """Makes a configuration of a mapping (dict, EasyDict, another configuration) or None."""
    config = kind()
    if cfg is not None:
        if not isinstance(cfg, Mapping):
            raise TypeError(f"cfg must be a dict, an EasyDict or a {kind.__name__}, got {cfg!r}")
        config.update(cfg)
    config.check()
    return config


def _check_number(name: str, number: Any, least: int) -> None:
    """Raises unless a number is an integer, or infinite, and at least ``least``."""
    if number != math.inf:
        checked_int(name, number)
    elif name == "max_retry":
        raise ValueError("max_retry must be finite: a reset that always fails must end")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")


def _check_word(name: str, word: Any, words: Any) -> None:
    if word not in words:
        allowed = " or ".join(map(repr, words))
        raise ValueError(f"{name} must be {allowed}, got {word!r}")


# ---- arguments of calls -------------------------------------------------------------------------


def checked_envs(name: str, by_env: Any, num_envs: int) -> list[int]:
    """The envs of a dict by env id; ``name`` is the dict's name in messages."""
    if not isinstance(by_env, Mapping):
        raise TypeError(f"{name} must be a dict by env id, got {type(by_env).__name__}")
    envs: list[int] = existing_env_ids([*by_env], num_envs).tolist() if by_env else []
    return envs


def checked_params(reset_param: Any, num_envs: int) -> dict[int, dict[str, Any] | None]:
    """Keyword arguments of resets, by env."""
    envs = checked_envs("reset_param", reset_param, num_envs)
    for env, kwargs in reset_param.items():
        if not isinstance(kwargs, Mapping | None):
            raise TypeError(
                f"the reset_param of env {env} must be a dict of keyword arguments or None, "
                f"got {kwargs!r}"
            )
    params = [None if kwargs is None else dict(kwargs) for kwargs in reset_param.values()]
    return dict(zip(envs, params, strict=True))


def seeds_by_env(seed: Any, num_envs: int) -> dict[int, int | None]:
    """The seed of each env that gets one."""
    envs, seeds = list(range(num_envs)), seed
    if isinstance(seed, Mapping):
        envs, seeds = checked_envs("seed", seed, num_envs), [*seed.values()]
    checked = checked_seeds(seeds, len(envs)) or [None] * len(envs)
    if any(value is not None and value < 0 for value in checked):
        raise ValueError(f"seeds must not be negative, got {seed}")
    return dict(zip(envs, checked, strict=True))
