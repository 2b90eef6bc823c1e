"""The options of a vector env: their values, checked; and those that a program does not give."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec

from shmvec._arguments import (
    AtMost,
    AutoresetMode,
    WorkerEnviron,
    checked_autoreset_mode,
    checked_context,
    checked_count,
    checked_environs,
    checked_hang_warning,
    checked_limits,
    checked_max_concurrency,
    checked_num_workers,
    checked_observation_mode,
    checked_preload,
    checked_threads,
    checked_wait_policy,
    checked_worker_init,
    given_once,
)
from shmvec._cores import usable_cores
from shmvec.faults import FaultPolicy

__all__ = [
    "Settings",
    "add_installed",
    "end_installed",
    "of_workers",
    "with_defaults",
    "with_faults",
]


@dataclass(kw_only=True)
class Settings:
    """Options of ``ShmVectorEnv``, by their names there, and what follows from them.

    Attributes:
        method: How processes are started, as ``context`` says.
        environs: Each worker's own environment variables.
        limits: Seconds that a step and a reset of one env may take.
        threads: Threads that libraries may start in a worker; 0: as many as they like.
    """

    num_envs: int
    shared_memory: bool = True
    copy: bool = True
    context: InitVar[Any] = None
    daemon: bool = True
    preload: Sequence[str] = ()
    worker_environ: InitVar[WorkerEnviron] = None
    worker_init: Callable[[int], object] | None = None
    observation_mode: Any = "same"
    autoreset_mode: Any = AutoresetMode.NEXT_STEP
    max_concurrency: int | None = None
    num_workers: Any = None
    wait_policy: str = "adaptive"
    threads_per_worker: InitVar[int | None] = None
    pin_workers: bool = False
    step_timeout: InitVar[float | None] = None
    reset_timeout: InitVar[float | None] = None
    faults: Any = None
    recycle_after: int | None = None
    hang_warning_s: float | None = 30.0
    method: str = field(init=False)
    environs: list[dict[str, str]] = field(init=False)
    limits: tuple[float | None, float | None] = field(init=False)
    threads: int = field(init=False)

    def __post_init__(
        self,
        context: Any,
        worker_environ: WorkerEnviron,
        threads_per_worker: int | None,
        step_timeout: float | None,
        reset_timeout: float | None,
    ) -> None:
        """Checks the values.

        Raises:
            ValueError: One of them is out of range, or no such word.
            TypeError: One of them is of another kind.
        """
        self.method = checked_context(context)
        self.autoreset_mode = checked_autoreset_mode(self.autoreset_mode)
        checked_observation_mode(self.observation_mode)
        checked_max_concurrency(self.max_concurrency)
        checked_wait_policy(self.wait_policy)
        cores = usable_cores()
        self.num_workers = checked_num_workers(
            self.num_workers, self.num_envs, cores, self.max_concurrency
        )
        self.environs = checked_environs(worker_environ, self.num_workers)
        self.preload = checked_preload(self.preload)
        checked_worker_init(self.worker_init, self.num_workers)
        if self.faults is None:
            self.faults = FaultPolicy()
        if not isinstance(self.faults, FaultPolicy):
            raise TypeError(f"faults must be a shmvec.FaultPolicy, got {self.faults!r}")
        if self.recycle_after is not None:
            self.recycle_after = checked_count("recycle_after", self.recycle_after)
        self.hang_warning_s = checked_hang_warning(self.hang_warning_s)
        if self.num_workers == 0:
            self.hang_warning_s = None  # nobody is left to say so
        self.limits = checked_limits(
            given_once("step_timeout", step_timeout, self.faults.step_timeout),
            given_once("reset_timeout", reset_timeout, self.faults.reset_timeout),
            self.num_workers,
        )
        self.threads = checked_threads(threads_per_worker, self.num_workers, cores)


P = ParamSpec("P")


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("it must be 0 or 1")
    return text == "1"


def _policy(text: str) -> FaultPolicy:
    """Of ``on_crash=restart,max_restarts=3``."""
    fields: dict[str, Any] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        kind = str if name.startswith("on_") else int if name == "max_restarts" else float
        fields[name] = kind(value)
    policy = FaultPolicy(**fields)
    checked_limits(policy.step_timeout, policy.reset_timeout, 1)
    return policy


def _limit(name: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        checked_limits(**{**dict.fromkeys(_LIMITS), name: float(text)}, num_workers=1)
        return float(text)

    return parse


def _word(check: Callable[[str], object]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        check(text)
        return text

    return parse


# How workers run, which is nobody's concern but theirs: for all that stands on an Exchange.
_OF_WORKERS: dict[str, Callable[[str], Any]] = {
    "num_workers": AtMost,
    "threads_per_worker": lambda text: checked_threads(int(text), 1, 1),
    "wait_policy": _word(checked_wait_policy),
    "pin_workers": _flag,
    "hang_warning_s": lambda text: checked_hang_warning(float(text)) or 0.0,  # None: not given
}
_LIMITS = ("step_timeout", "reset_timeout")
_OF_VECTOR_ENVS: dict[str, Callable[[str], Any]] = {
    **_OF_WORKERS,
    "context": _word(checked_context),
    "preload": lambda text: [name.strip() for name in text.split(",")],
    "shared_memory": _flag,
    "step_timeout": _limit("step_timeout"),
    "reset_timeout": _limit("reset_timeout"),
    "faults": _policy,
    "recycle_after": lambda text: checked_count("recycle_after", int(text)),
}

_installed: list[dict[str, Any]] = []  # those of each call of install


def add_installed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the options of a call of ``install``, and returns what was added."""
    added = dict(options)
    if added.get("num_workers") is not None:
        added["num_workers"] = AtMost(added["num_workers"])
    _installed.append(added)
    return added


def end_installed(added: dict[str, Any] | None = None) -> bool:
    """Takes away what was added, with what was added later; None: all. Whether nothing is left."""
    for index, options in enumerate(_installed):
        if added is None or options is added:
            del _installed[index:]
            return not _installed
    return False


def with_defaults(init: Callable[P, None]) -> Callable[P, None]:
    """An ``__init__`` whose options, if they are left out or None, have these defaults."""
    signature = inspect.signature(init)

    @wraps(init)
    def filled(*args: P.args, **kwargs: P.kwargs) -> None:
        bound = signature.bind_partial(*args, **kwargs)
        bound.arguments.update(_under(bound.arguments))
        init(*bound.args, **bound.kwargs)

    return filled


def with_faults(options: dict[str, Any], policy: FaultPolicy) -> dict[str, Any]:
    """Options with a default of ``faults`` that stands behind all other defaults."""
    known = _under(options)
    if "faults" in options or "faults" in known:
        return options
    limits = {name: known[name] for name in _LIMITS if name in known}  # no matter of the default
    return {**limits, **options, "faults": policy}


def _under(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options, with the defaults for those that are left out or None."""
    found = _from_environment(_OF_VECTOR_ENVS)
    for later in (*_installed, options):
        given = {name: value for name, value in later.items() if value is not None}
        found = {**_without_conflicts(found, given), **given}
    return found


def _without_conflicts(defaults: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that do not make an error of what is given, which goes before them."""
    left_out: tuple[str, ...] = ()
    if given.get("num_workers") == 0:
        left_out = *_LIMITS, "faults", "worker_environ", "worker_init"
    elif "faults" in given:
        left_out = _LIMITS
    kept = {name: value for name, value in defaults.items() if name not in left_out}
    policy = kept.get("faults")
    if isinstance(policy, FaultPolicy):
        doubled = [name for name in _LIMITS if getattr(policy, name) is not None]
        limits = {name: given[name] for name in doubled if name in given}
        kept["faults"] = replace(policy, **limits) if limits else policy
    return kept


def of_workers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an Exchange; how its workers run, where it is not given, as the environment says.

    What ``install`` says is for vector envs.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return {**options, **_from_environment(_OF_WORKERS), **given}


def _from_environment(options: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    found = {}
    for name, parse in options.items():
        variable = f"SHMVEC_{name.upper()}"
        text = os.environ.get(variable, "").strip()
        if text:
            try:
                found[name] = parse(text)
            except (ValueError, TypeError, SyntaxError) as error:
                raise ValueError(f"{variable}={text!r} in the environment: {error}") from None
    return found
