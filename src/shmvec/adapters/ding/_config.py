"""Configuration of the env managers, and checks of the arguments of their methods."""

from __future__ import annotations

import logging
import math
import multiprocessing
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from shmvec._arguments import checked_int, checked_seconds
from shmvec._hints import did_you_mean
from shmvec.faults import FaultPolicy

log = logging.getLogger("shmvec")


@dataclass
class EnvManagerConfig(MutableMapping[str, Any]):
    """Configuration of an env manager: attributes, which are also the keys of a mapping.

    A program may add keys or attributes of its own, as programs for DI-engine do. The manager does
    not read them, and warns of one that looks like a misspelt key of the manager's.

    Attributes:
        episode_num: Number of episodes after which an env is DONE.
        max_retry: Number of attempts at a reset.
        retry_type: How a reset that failed is tried again: "reset" asks the same env, "renew" a
            new one, in a new process. (A process that died, or was ended for being late, is a new
            one in any case.)
        auto_reset: Whether an env whose episode is over is reset. False: ``reset`` it yourself.
        step_timeout: Seconds that a step of one env may take. None: as long as it likes.
        reset_timeout: Seconds that a reset of one env may take, in its worker.
        retry_waiting_time: Seconds before a reset is tried again.
        shared_memory: Whether observations lie in shared memory; see ``ShmVectorEnv``.
        copy_on_get: Whether observations are copies. False: they may be views of shared memory,
            which later steps of their env overwrite.
        context: How processes are started: "fork", "spawn", "forkserver", or None for Python's
            default.
        wait_num: Number of ready envs at which ``step`` returns.
        step_wait_timeout: Seconds after which ``step`` returns with fewer. None: it waits on.
        connect_timeout: Seconds that a reset may take from the parent's request to the answer,
            other envs of its worker included. None: as long as it likes.
        reset_inplace: Whether the step that ends an episode also resets.
        num_workers: Processes that hold the envs. None: one for each env where an env must be
            replaceable alone (retry_type "renew", step_timeout, reset_timeout); else as
            ``ShmVectorEnv`` chooses. 0: the calling process.
        faults: The ``shmvec.FaultPolicy`` for steps that fail. None: they raise, and the env is in
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
        """Raises ValueError or TypeError unless all values are possible."""
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
        step_wait_timeout: Not used: ``step`` waits as long as it takes.
    """

    wait_num: float = math.inf
    step_wait_timeout: float | None = None


_Config = TypeVar("_Config", bound=EnvManagerConfig)


def config_of(kind: type[_Config], cfg: Any) -> _Config:
    """A configuration of a class, made from any mapping (dict, EasyDict, another one) or None."""
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


def checked_env(env: Any, num_envs: int) -> int:
    index = checked_int("an env id", env)
    if not 0 <= index < num_envs:
        raise ValueError(f"there is no env {env}: there are {num_envs}")
    return index


def checked_params(reset_param: Any, num_envs: int) -> dict[int, dict[str, Any] | None]:
    """Keyword arguments of resets, by env."""
    if not isinstance(reset_param, Mapping):
        raise TypeError(
            f"reset_param must be a dict {{env_id: kwargs}}, got {type(reset_param).__name__}"
        )
    params: dict[int, dict[str, Any] | None] = {}
    for env, kwargs in reset_param.items():
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(
                f"the reset_param of env {env} must be a dict of keyword arguments or None, "
                f"got {kwargs!r}"
            )
        params[checked_env(env, num_envs)] = None if kwargs is None else dict(kwargs)
    return params


def checked_seeds(seed: Any, num_envs: int) -> dict[int, int | None]:
    """The seed of each env that gets one."""
    if isinstance(seed, Mapping):
        seeds = {checked_env(env, num_envs): value for env, value in seed.items()}
    elif isinstance(seed, (list, tuple, np.ndarray)):
        if len(seed) != num_envs:
            raise ValueError(f"there are {len(seed)} seeds for {num_envs} envs")
        seeds = dict(enumerate(seed))
    else:
        first = checked_int("seed", seed, "an int, a list or a dict")
        seeds = {env: first + env for env in range(num_envs)}
    for env, value in seeds.items():
        if value is not None:
            seeds[env] = checked_int(f"the seed of env {env}", value)
            if value < 0:
                raise ValueError(f"the seed of env {env} must not be negative, got {value}")
    return seeds
