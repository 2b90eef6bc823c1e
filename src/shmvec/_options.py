"""The table of a vector env's options: names, types, defaults, documentation and checks.

An option is one entry of :class:`VectorEnvOptions`: its name, type, default and documentation, how
its value is checked, and how the text of its environment variable is read. From these follow the
signature and the docstring of ``ShmVectorEnv``, the checked values (:class:`Settings`), what
``install`` takes, and the environment variables.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from functools import wraps
from importlib.util import find_spec
from multiprocessing.context import BaseContext
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector.async_vector_env import _async_worker

from shmvec._arguments import (
    checked_batch_size,
    checked_count,
    checked_env_fns,
    checked_int,
    checked_seconds,
)
from shmvec._autoreset import Autoreset, AutoresetMode
from shmvec._cores import WAIT_POLICIES, usable_cores
from shmvec._hints import did_you_mean, refuse_unknown
from shmvec.faults import FaultPolicy

__all__ = [
    "NUM_WORKER_ARGUMENTS",
    "OPTIONS",
    "MaxWorkers",
    "Check",
    "Fallback",
    "VectorEnvOptions",
    "Settings",
    "add_installed",
    "checked_worker",
    "describe",
    "add_options_to_docstring",
    "end_installed",
    "exchange_settings",
    "with_signature_of",
    "takes_options",
    "environment_variable",
]

P = ParamSpec("P")
Owner = TypeVar("Owner")
Init = TypeVar("Init", bound=Callable[..., None])

_LONGEST_LIMIT_S = 1e9  # the nanoseconds of a longer one do not fit into 64 bits
_ASSUMED_NUM_ENVS = 1 << 20  # for the checks of `install`, when the number is not known yet
# The last arguments came with Gymnasium 1.1 (autoreset_mode) and 1.4 (semaphore).
NUM_WORKER_ARGUMENTS = len(inspect.signature(_async_worker).parameters)

# Environment variables of all workers, or, by its index, of each.
WorkerEnviron: TypeAlias = Mapping[str, str] | Callable[[int], Mapping[str, str]] | None


class Settings(SimpleNamespace):
    """Checked options by name, ``num_envs``, and what an Exchange is given besides."""

    @property
    def method(self) -> str:
        """The start method of processes."""
        return _start_method(self.context)

    @property
    def autoreset(self) -> Autoreset:
        """What the autoreset mode means."""
        return Autoreset.of(self.autoreset_mode)

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """Seconds that a step and a reset of one env may take; None: as long as they like."""
        return self.step_timeout, self.reset_timeout


# Returns the value to use, from the given value and the settings checked before it.
Check: TypeAlias = Callable[[Any, Settings], Any]


class MaxWorkers(int):
    """A default for ``num_workers``: fewer are used where fewer envs may be stepped at a time."""

    def __new__(cls, count: Any) -> MaxWorkers:
        """Takes an integer, or its text."""
        if not isinstance(count, str):
            count = checked_int("num_workers", count, "an int or None")
        limit = super().__new__(cls, count)
        if limit < 0:
            raise ValueError(f"num_workers must not be negative, got {count}")
        return limit


@dataclass(frozen=True)
class Fallback:
    """An option's value where neither the program nor a default from outside gives one."""

    value: Any


# ---- checks --------------------------------------------------------------------------------------


def checked_worker(worker: Any, _: Any = None) -> Any:
    """A worker function that takes the arguments which Gymnasium's own takes, or None.

    Raises:
        ValueError: It takes others.
    """
    if worker is None:
        return None
    signature = inspect.signature(worker)
    try:
        signature.bind(*(None,) * NUM_WORKER_ARGUMENTS)
    except TypeError as error:
        raise ValueError(
            f"A custom `worker` must accept {NUM_WORKER_ARGUMENTS} arguments. Got the signature "
            f"{signature} which should match {inspect.signature(_async_worker)}."
        ) from error
    return worker


def _checked_context(context: Any, _: Settings) -> Any:
    """Checks the context, and returns it unchanged, since users see it as an attribute."""
    _start_method(context)
    return context


def describe(envs: Any, name: str, method: str, spec: Any = None) -> str:
    """Returns the ``repr`` of a vector env or an exchange."""
    parts = [] if spec is None else [spec.id]
    parts += [f"num_envs={envs.num_envs}", f"num_workers={envs.num_workers}"]
    parts.append(f"autoreset_mode={envs.autoreset_mode.value!r}")
    if envs.num_workers:
        parts.append(f"context={method!r}")
    return f"{name}({', '.join(parts)}{', closed' if envs.closed else ''})"


def _start_method(context: Any) -> str:
    available = multiprocessing.get_all_start_methods()
    if context is None:  # get_start_method() alone would fix Python's default
        return multiprocessing.get_start_method(allow_none=True) or available[0]
    get_start_method = getattr(context, "get_start_method", None)
    name = context if get_start_method is None else get_start_method()
    if not isinstance(name, str):
        raise TypeError(
            "context must be a start method's name, a multiprocessing context or None, got "
            f"{context!r}"
        )
    if name not in available:
        raise ValueError(f"cannot find context for {name!r}: there are {', '.join(available)}")
    return name


def _checked_observation_mode(mode: Any, _: Settings) -> Any:
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
    return mode


def _checked_autoreset_mode(mode: Any, settings: Settings) -> AutoresetMode:
    try:
        chosen = AutoresetMode(mode)
    except ValueError:
        names = [each.value for each in AutoresetMode]
        raise ValueError(
            f"{mode!r} is not a valid AutoresetMode: autoreset_mode is one of "
            f"{', '.join(map(repr, names))}{did_you_mean([str(mode)], names)}"
        ) from None
    is_fixed = getattr(settings, "worker", None) is not None and NUM_WORKER_ARGUMENTS < 7
    if is_fixed and chosen is not AutoresetMode.NEXT_STEP:
        raise ValueError(
            "Gymnasium 1.0 does not tell a worker function the autoreset mode: with `worker`, "
            f"{chosen} needs Gymnasium 1.1 or newer"
        )
    return chosen


def _checked_max_concurrency(limit: Any, _: Settings) -> Any:
    if limit is None:
        return None
    if not isinstance(limit, (int, np.integer)):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(limit)}.")
    if limit < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {limit}.")
    return limit


def _checked_num_workers(num_workers: Any, settings: Settings) -> int:
    """The number of worker processes; by default one for each usable core."""
    num_envs: int = settings.num_envs
    limit: int | None = settings.max_concurrency
    if num_workers is None or isinstance(num_workers, MaxWorkers):
        default = usable_cores() if num_workers is None else int(num_workers)
        return min(default, num_envs if limit is None else min(num_envs, limit))
    count = checked_int("num_workers", num_workers, "an int or None")
    if isinstance(num_workers, bool) or not 0 <= count <= num_envs:
        raise ValueError(
            f"num_workers must be between 0 (the calling process) and the number of envs "
            f"({num_envs}), got {num_workers!r}; None chooses one for each usable core"
        )
    if limit is not None and count > limit:
        raise ValueError(
            f"num_workers={count} would step {count} envs at a time, but "
            f"max_concurrency={limit}: leave one of them out"
        )
    return count


def _checked_caller_steps(caller_steps: Any, settings: Settings) -> bool:
    if caller_steps and settings.num_workers == 1:
        settings.num_workers = 0  # the caller is the only worker
    return bool(caller_steps) and settings.num_workers > 0


def _checked_overlap(overlap: Any, settings: Settings) -> int | str | None:
    """The number of a worker's envs that may be busy at once, or "auto"."""
    if overlap is None:
        return None
    if overlap != "auto":
        try:
            overlap = checked_count("overlap", overlap)
        except (TypeError, ValueError) as error:
            raise type(error)(f'{error}; or "auto"') from None
    _refuse_without_loop("overlap", settings)
    chosen: int | str = overlap
    return chosen


def _checked_spare_envs(spare_envs: Any, settings: Settings) -> int:
    count = checked_int("spare_envs", spare_envs, "an int")
    if count < 0:
        raise ValueError(f"spare_envs must not be negative, got {spare_envs!r}")
    if count:
        _refuse_without_loop("spare_envs", settings)
    return count


def _refuse_without_processes(name: str, settings: Settings, why: str = "") -> None:
    """Raises ValueError where the caller steps envs, which the option ``name`` cannot reach."""
    if settings.num_workers == 0:
        raise ValueError(f"{name} needs worker processes, and num_workers=0 has none{why}")
    if settings.caller_steps:
        raise ValueError(
            f"{name} is for worker processes, and with caller_steps=True some envs are in the "
            "calling one: leave one of them out"
        )


def _refuse_without_loop(name: str, settings: Settings) -> None:
    """Raises ValueError where some envs are not stepped by the loop of a worker process."""
    _refuse_without_processes(name, settings)
    if getattr(settings, "worker", None) is not None:
        raise ValueError(f"a `worker` function steps its env itself: leave {name} out")


def _checked_wait_policy(policy: Any, _: Settings) -> Any:
    if policy not in WAIT_POLICIES:
        names = ", ".join(map(repr, WAIT_POLICIES))
        raise ValueError(f"wait_policy must be one of {names}, got {policy!r}")
    return policy


def _checked_threads(threads_per_worker: Any, settings: Settings) -> int:
    """The number of threads of a worker's libraries; by default its share of the cores."""
    if threads_per_worker is None:
        num_workers: int = settings.num_workers
        return max(1, usable_cores() // max(1, num_workers))
    threads = checked_int("threads_per_worker", threads_per_worker, "an int or None")
    if threads < 0:
        raise ValueError(f"threads_per_worker must not be negative, got {threads}")
    return threads


def _checked_faults(faults: Any, _: Settings) -> FaultPolicy:
    if faults is None:
        return FaultPolicy()
    if not isinstance(faults, FaultPolicy):
        raise TypeError(f"faults must be a shmvec.FaultPolicy, got {faults!r}")
    return faults


def _time_limit(name: str) -> Check:
    """Returns the check of a time limit: an option, or in the FaultPolicy, or both."""

    def check(value: Any, settings: Settings) -> float | None:
        policy_limit = getattr(settings.faults, name)
        if value is not None and policy_limit is not None and value != policy_limit:
            raise ValueError(
                f"{name} is given twice: {value}, and {policy_limit} in the FaultPolicy"
            )
        limit = checked_seconds(name, policy_limit if value is None else value)
        if limit is None:
            return None
        _refuse_without_processes(name, settings, ": nothing could interrupt an env in this one")
        return limit if limit <= _LONGEST_LIMIT_S else None

    return check


def _checked_hang_warning(value: Any, settings: Settings) -> float | None:
    seconds = checked_seconds("hang_warning_s", value, or_zero=True)
    # If the envs are in the calling process, nobody could write the warning.
    return seconds if seconds and settings.num_workers and seconds <= _LONGEST_LIMIT_S else None


def _checked_preload(preload: Any, _: Settings) -> list[str]:
    names = [preload] if isinstance(preload, str) else list(preload)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"preload must be names of modules, got {name!r}")
        first = name.partition(".")[0]
        if first not in sys.modules and find_spec(first) is None:
            raise ModuleNotFoundError(f"preload names {name!r}: there is no module of that name")
    return names


def _checked_worker_environ(worker_environ: Any, settings: Settings) -> list[dict[str, str]]:
    if worker_environ is None:
        return [{} for _ in range(settings.num_workers)]
    _refuse_without_processes("worker_environ", settings, ": set os.environ")
    is_constant = isinstance(worker_environ, Mapping)
    environs = []
    for worker in range(settings.num_workers):
        try:
            environ = dict(worker_environ if is_constant else worker_environ(worker))
            environ = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
        except (TypeError, ValueError) as error:
            raise TypeError(
                "worker_environ must be a dict of strings, or a function that returns one for a "
                f"worker's index; for worker {worker}: {error}"
            ) from error
        environs.append(environ)
    return environs


def _checked_worker_init(init: Any, settings: Settings) -> Any:
    if init is not None and not callable(init):
        raise TypeError(f"worker_init must be a function of a worker's index, got {init!r}")
    if init is not None:
        _refuse_without_processes("worker_init", settings)
    return init


def _checked_batch_size(batch_size: Any, settings: Settings) -> int | tuple[int, int] | None:
    if batch_size is not None and settings.caller_steps:
        raise ValueError(
            "batch_size asks for the envs that are ready first, and with caller_steps=True the "
            "caller steps some of them only while it waits: leave one of them out"
        )
    if not isinstance(batch_size, tuple):
        return checked_batch_size(batch_size, settings.num_envs)
    if len(batch_size) != 2:
        raise ValueError(f"batch_size must be an int or a pair (least, most), got {batch_size!r}")
    least, most = (checked_batch_size(size, settings.num_envs) for size in batch_size)
    if least is None or most is None or least > most:
        raise ValueError(f"batch_size=(least, most) must be two ints in order, got {batch_size!r}")
    return least, most


def _checked_batch_timeout(batch_timeout: Any, settings: Settings) -> float | None:
    seconds = checked_seconds("batch_timeout", batch_timeout, or_zero=True)
    if (seconds is None) == isinstance(settings.batch_size, tuple):
        raise ValueError(
            "batch_timeout= and batch_size=(least, most) belong together: recv() returns when "
            "`most` envs are ready, or after so many seconds with at least `least`; got "
            f"batch_size={settings.batch_size!r} and batch_timeout={batch_timeout!r}"
        )
    return seconds


def _positive_int(name: str, optional: bool = True) -> Check:
    """Returns the check of a positive integer, which accepts None if it is optional."""
    return lambda value, _: None if optional and value is None else checked_count(name, value)


# ---- texts of environment variables --------------------------------------------------------------


def _parse_flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("it must be 0 or 1")
    return text == "1"


def _parse_policy(text: str) -> FaultPolicy:
    """Parses ``on_crash=restart,max_restarts=3``."""
    values: dict[str, Any] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, value = (part.strip() for part in entry.partition("="))
        kind = str if name.startswith("on_") else int if name == "max_restarts" else float
        values[name] = kind(value)
    return FaultPolicy(**values)


def _parse_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


# ---- the table -----------------------------------------------------------------------------------


class Scope(Enum):
    """The part of the library that an option configures."""

    WORKERS = "how workers run: its variable holds for every Exchange"
    EXCHANGE = "the envs of an Exchange: its variable holds for vector envs"
    VECTOR_ENV = "the vector env's own methods: no option of an Exchange"


@dataclass(frozen=True)
class Option:
    """The table's entry for an option, without its name and type.

    Attributes:
        default: The value if none is given.
        doc: Its text in docstrings.
        check: Returns the value to use; raises ValueError or TypeError. None: any will do.
        parse: Makes the value from its environment variable's text. None: it has no variable.
        scope: The part of the library that it configures.
    """

    default: Any
    doc: str
    check: Check | None = None
    parse: Callable[[str], Any] | None = None
    scope: Scope = Scope.EXCHANGE


def _option(default: Any, doc: str, **entry: Any) -> Any:
    """A field of the table; Any, because type checkers take it for the field's default."""
    return field(default=default, metadata={"option": Option(default, doc, **entry)})


@dataclass
class VectorEnvOptions:
    """The options of a vector env, in the order of ``ShmVectorEnv``'s arguments.

    The first ones are ``AsyncVectorEnv``'s, in its order. The rest is in the order of checks: one
    that looks at another option's value comes after it.

    Type checkers see the signature of this class as that of ``ShmVectorEnv``. It has no instances.
    """

    env_fns: Sequence[Callable[[], gym.Env[Any, Any]]] = field(
        metadata={
            "option": Option(
                default=None,
                doc="""One function for each env; env ``i`` is ``env_fns[i]()``, built once, in its
                worker. Unless the workers are forked they are sent by cloudpickle.""",
            )
        }
    )
    shared_memory: bool = _option(
        True,
        """Whether observations and actions lie in arrays in shared memory. False: they travel as
        messages, through shared memory as well, which is slower but takes values of any space,
        Sequence, Graph and classes of your own included.""",
        parse=_parse_flag,
    )
    copy: bool = _option(
        True,
        """Whether observations are returned as copies. False: as views of shared memory, the same
        arrays each time, which the next ``step`` or ``reset`` overwrites; after ``close`` they stay
        readable and keep the last values. With ``batch_size`` nothing is overwritten that you still
        hold: see ``recv``.""",
    )
    context: str | BaseContext | None = _option(
        None,
        """How processes are started: "fork", "spawn", "forkserver", one of multiprocessing's
        contexts, or None for Python's default. None of them runs the program's script again.""",
        check=_checked_context,
        parse=str,
    )
    daemon: bool = _option(
        True,
        "The ``daemon`` attribute of the processes; they may start others in any case.",
    )
    worker: Callable[..., None] | None = _option(
        None,
        """A worker function for ``AsyncVectorEnv``, which takes over how an env is stepped and
        reset. It runs unchanged, in a thread for each env, and gets its commands through pipes:
        slower than the default.""",
        check=checked_worker,
        scope=Scope.VECTOR_ENV,
    )
    observation_mode: str | tuple[gym.Space[Any], gym.Space[Any]] = _option(
        "same",
        """"same": all observation spaces are equal. "different": they may differ in bounds, not in
        shape and dtype. A pair of spaces: the batched and the single one.""",
        check=_checked_observation_mode,
    )
    autoreset_mode: str | AutoresetMode = _option(
        AutoresetMode.NEXT_STEP,
        """NEXT_STEP: the step after an episode's end resets. SAME_STEP: the step that ends it
        resets; what it ended with is in ``infos["final_obs"]`` and ``infos["final_info"]``.
        DISABLED: you do, with ``options["reset_mask"]``.""",
        check=_checked_autoreset_mode,
    )
    max_concurrency: int | None = _option(
        None,
        """At most so many envs are stepped at the same time: a limit to the number of workers.""",
        check=_checked_max_concurrency,
    )
    _: KW_ONLY
    num_workers: int | None = _option(
        None,
        """Processes that hold the envs, split as evenly as possible. None: one for each usable core
        (by affinity, cgroup quota, Slurm, Ray and torchrun), at most one for each env. 0: the envs
        live in the calling process, for debuggers and profilers.""",
        check=_checked_num_workers,
        parse=MaxWorkers,
        scope=Scope.WORKERS,
    )
    caller_steps: bool = _option(
        False,
        """Whether the caller is the last worker, and steps its envs while the others step theirs:
        faster where there are few cores, as in a notebook. If one of these envs crashes or hangs,
        so does the calling process.""",
        check=_checked_caller_steps,
    )
    overlap: int | str | None = _option(
        None,
        """How many envs of a worker may be in ``step`` or ``reset`` at once, for envs that wait
        (for a server, a browser, another program) and native code that gives up the GIL; each lives
        in a thread of its own. So many are built at once, too, except the first of a worker, so
        ``env_fns`` run in several threads. "auto": it is learned, and all are built at once.
        Envs whose ``step`` or ``reset`` is a coroutine
        function share an event loop instead, and None lets all of them be busy at once.""",
        check=_checked_overlap,
    )
    spare_envs: int = _option(
        0,
        """Number of further copies of each env. They are reset ahead, while the env's episode is
        played: for resets that take long, and wait or give up the GIL. A copy lives in a thread of
        its own. The seeds of episodes follow from those of ``reset``, but differ from those without
        copies. docs/waiting-envs.md says what copies may not share.""",
        check=_checked_spare_envs,
    )
    wait_policy: str = _option(
        "adaptive",
        """How parent and workers wait for each other. "adaptive": spin while it pays, then sleep;
        right nearly everywhere. "spin": spin up to 40 ms: the least delay where all have a core to
        themselves, ruinous elsewhere. "park": sleep at once.""",
        check=_checked_wait_policy,
        parse=str,
        scope=Scope.WORKERS,
    )
    threads_per_worker: int | None = _option(
        None,
        """How many threads BLAS, OpenMP, torch and OpenCV may start in a worker. None: its share of
        the cores. 0: as many as they like. Variables such as ``OMP_NUM_THREADS`` that you have set
        hold. (If the program has loaded them before a fork, OpenBLAS is not limited, and GNU's
        OpenMP, which torch has, gets one thread.)""",
        check=_checked_threads,
        parse=int,
        scope=Scope.WORKERS,
    )
    pin_workers: bool = _option(
        False,
        "Whether each worker is bound to a core of its own.",
        parse=_parse_flag,
        scope=Scope.WORKERS,
    )
    faults: FaultPolicy | None = _option(
        None,
        """What is done when a worker dies, an env raises or takes too long. None: each of these
        raises.""",
        check=_checked_faults,
        parse=_parse_policy,
    )
    step_timeout: float | None = _option(
        None,
        "Seconds that a step of one env may take. None: as long as it likes.",
        check=_time_limit("step_timeout"),
        parse=float,
    )
    reset_timeout: float | None = _option(
        None,
        "Seconds that a reset of one env may take.",
        check=_time_limit("reset_timeout"),
        parse=float,
    )
    recycle_after: int | None = _option(
        None,
        """A worker is restarted after so many steps of each of its envs, for simulators that leak;
        up to a quarter earlier if the episodes of all its envs are over then. Envs that are in an
        episode are truncated; in mode SAME_STEP, the episodes that have just begun. Workers do so
        one after the other: the first restart of worker ``i`` of ``n`` comes after ``(i + 1) / n``
        of these steps.""",
        check=_positive_int("recycle_after"),
        parse=int,
    )
    hang_warning_s: float | None = _option(
        30.0,
        """After so many seconds in one step, reset, call or start, the log says where in Python the
        worker is; the wait goes on. 0 or None: never.""",
        check=_checked_hang_warning,
        parse=float,
        scope=Scope.WORKERS,
    )
    log_errors: bool = _option(
        True,
        """Whether an exception of an env is also logged before it is raised, in the words of
        ``AsyncVectorEnv`` ("Received the following error from Worker-3 - Shutting it down", where
        3 is the env, and nothing is shut down).""",
        parse=_parse_flag,
        scope=Scope.WORKERS,
    )
    preload: Sequence[str] = _option(
        (),
        """Modules that are imported once, before workers are forked, by this process or by the fork
        server, besides those that the env_fns name.""",
        check=_checked_preload,
        parse=_parse_names,
    )
    compile_wrappers: bool = _option(
        True,
        """Whether a worker steps wrappers of Gymnasium's that it knows in compiled code, with the
        same results; docs/wrappers.md lists them.""",
        parse=_parse_flag,
        scope=Scope.WORKERS,
    )
    worker_environ: WorkerEnviron = _option(
        None,
        """Environment variables of the workers, such as ``CUDA_VISIBLE_DEVICES``, or a function
        that returns them for a worker's index; set before its imports.""",
        check=_checked_worker_environ,
    )
    worker_init: Callable[[int], object] | None = _option(
        None,
        "Called with its index in each worker, before the envs are built.",
        check=_checked_worker_init,
    )
    batch_size: int | tuple[int, int] | None = _option(
        None,
        """``recv`` returns so many envs, those that are ready first; ``step`` and ``reset``, too.
        None: all. A pair: the least and the most, with ``batch_timeout``.""",
        check=_checked_batch_size,
        scope=Scope.VECTOR_ENV,
    )
    batch_timeout: float | None = _option(
        None,
        """With ``batch_size=(least, most)``: ``recv`` returns as soon as ``most`` envs are ready,
        and after so many seconds those that are, ``least`` of them at least.""",
        check=_checked_batch_timeout,
        scope=Scope.VECTOR_ENV,
    )
    num_buffers: int = _option(
        4,
        """With ``copy=False`` and ``batch_size``: how many results of each env there is room for.
        One is being written, the others may be held in batches.""",
        check=_positive_int("num_buffers", optional=False),
        scope=Scope.VECTOR_ENV,
    )
    hold_batches: int | None = _option(
        None,
        """Likewise: after so many further ``recv`` a batch may be overwritten, even if its arrays
        are still in use. None: only when they are gone, or by ``release``.""",
        check=_positive_int("hold_batches"),
        scope=Scope.VECTOR_ENV,
    )
    record_order: list[npt.NDArray[np.intp]] | None = _option(
        None,
        "A list to which ``recv`` appends the envs of each batch.",
        scope=Scope.VECTOR_ENV,
    )
    replay_order: Iterable[npt.ArrayLike] | None = _option(
        None,
        """Such a list: ``recv`` returns these batches, in this order, so that an asynchronous run
        can be repeated.""",
        scope=Scope.VECTOR_ENV,
    )


OPTIONS: dict[str, Option] = {
    entry.name: entry.metadata["option"]
    for entry in fields(VectorEnvOptions)
    if entry.name != "env_fns"
}


# ---- signature and docstring ---------------------------------------------------------------------


def with_signature_of(
    table: Callable[P, object],
) -> Callable[
    [Callable[[Owner, list[Any], Settings], None]],
    Callable[Concatenate[Owner, P], None],
]:
    """Gives an ``__init__(self, env_fns, settings)`` the table's signature and documentation.

    Options that are left out or None get their values from ``install`` and the environment.
    """
    signature = inspect.signature(table)

    def decorate(
        init: Callable[[Owner, list[Any], Settings], None],
    ) -> Callable[Concatenate[Owner, P], None]:
        def checked(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
            if args or "env_fns" in kwargs:  # checked first, since users get it wrong most often
                checked_env_fns(args[0] if args else kwargs["env_fns"])  # type: ignore[arg-type]
            refuse_unknown(type(self).__name__, kwargs, signature.parameters)
            options = signature.bind(*args, **kwargs).arguments
            env_fns = checked_env_fns(options.pop("env_fns"))
            init(self, env_fns, _make_settings(len(env_fns), options, OPTIONS, _outside_defaults()))

        receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = list(signature.parameters.values())
        checked.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [receiver, *parameters], return_annotation=None
        )
        checked.__annotations__ = {each.name: each.annotation for each in parameters}
        checked.__name__, checked.__qualname__ = init.__name__, init.__qualname__
        checked.__module__ = init.__module__
        checked.__doc__ = add_options_to_docstring(init.__doc__ or "")
        return checked

    return decorate


def add_options_to_docstring(doc: str) -> str:
    """Inserts an ``Args`` section of all options into a docstring, before ``Raises``."""
    lines = ["Args:"]
    for entry in fields(VectorEnvOptions):
        text = " ".join(entry.metadata["option"].doc.split())
        lines += textwrap.wrap(
            f"{entry.name}: {text}",
            width=92,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )
    before, raises, after = inspect.cleandoc(doc).partition("Raises:\n")
    text = "\n".join(lines)
    return f"{before}{text}\n\n{raises}{after}"


def takes_options(*excluded: str, reason: str) -> Callable[[Init], Init]:
    """Makes an ``__init__`` with ``**options`` take those of an Exchange, except for some.

    Others are refused. ``{options}`` in the docstring becomes the names of those that it takes.

    Args:
        *excluded: Names of the options that the class sets itself, or that have no meaning for it.
        reason: Why they are excluded, for the message.
    """
    names = sorted(_exchange_options().keys() - set(excluded))

    def decorate(init: Init) -> Init:
        parameters = inspect.signature(init).parameters

        @wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            refused = [name for name in kwargs if name not in parameters and name not in names]
            if refused:
                raise TypeError(
                    f"{type(self).__name__}() takes no {', '.join(refused)}: {reason}. Of "
                    f"ShmVectorEnv's options it takes {', '.join(names)}"
                    f"{did_you_mean(refused, [*parameters, *names])}"
                )
            init(self, *args, **kwargs)

        quoted = textwrap.wrap(", ".join(f"``{name}``" for name in names), width=80)
        checked.__doc__ = (init.__doc__ or "").replace("{options}", f"\n{' ' * 16}".join(quoted))
        return checked  # type: ignore[return-value]

    return decorate


# ---- defaults from outside -----------------------------------------------------------------------

_installations: list[dict[str, Any]] = []  # the options of each call of install


def environment_variable(name: str) -> str:
    """The environment variable of an option."""
    return f"SHMVEC_{name.upper()}"


def add_installed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the options of a call of ``install``, and returns what was added.

    Raises:
        ValueError: A value is out of range, or two of them exclude each other.
        TypeError: A value is of a wrong type.
    """
    added = {name: value for name, value in options.items() if value is not None}
    if "num_workers" in added:
        added["num_workers"] = MaxWorkers(added["num_workers"])
    _check_values(Settings(num_envs=_ASSUMED_NUM_ENVS), added, OPTIONS)
    _installations.append(added)
    return added


def end_installed(added: dict[str, Any] | None = None) -> bool:
    """Removes options, and those added later (None: all); returns whether none are left."""
    for index, options in enumerate(_installations):
        if added is None or options is added:
            del _installations[index:]
            return not _installations
    return False


def exchange_settings(num_envs: int, options: Mapping[str, Any]) -> Settings:
    """The settings of an Exchange; the environment has defaults for the options of workers.

    Raises:
        TypeError: An Exchange has no such option; or the option's check raises it.
        ValueError: A value is out of range, or none of the allowed words.
    """
    table = _exchange_options()
    refuse_unknown("Exchange", options, table)
    return _make_settings(num_envs, options, table, [_environment_defaults(Scope.WORKERS)])


def _exchange_options() -> dict[str, Option]:
    return {name: each for name, each in OPTIONS.items() if each.scope is not Scope.VECTOR_ENV}


def _make_settings(
    num_envs: int,
    options: Mapping[str, Any],
    table: Mapping[str, Option],
    outside: Iterable[Mapping[str, Any]],
) -> Settings:
    """Checks the caller's options; those that are missing or None get defaults from outside.

    Earlier mappings of defaults have precedence. A default is dropped if it does not fit the
    caller's values: either its check fails, or it makes the check of one of them fail.
    """
    fallbacks = {name: each.value for name, each in options.items() if isinstance(each, Fallback)}
    explicit = {name: value for name, value in options.items() if name not in fallbacks}
    values = {name: value for name, value in explicit.items() if value is not None}
    for defaults in [*outside, fallbacks]:
        values |= _compatible_defaults(num_envs, values, defaults, table)
    settings = Settings(num_envs=num_envs)
    _check_values(settings, {**explicit, **values}, table)
    return settings


def _compatible_defaults(
    num_envs: int,
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    table: Mapping[str, Option],
) -> dict[str, Any]:
    """The defaults that fit the values and each other: no check fails."""
    fitting = {name: value for name, value in defaults.items() if name not in values}
    while fitting and (misfit := _misfit(num_envs, {**values, **fitting}, table)) is not None:
        if misfit not in fitting:  # the caller's: find the default with which it is refused
            trial = dict(values)
            if _misfit(num_envs, trial, table) == misfit:  # it is wrong by itself
                break
            for name in fitting:
                trial[name] = fitting[name]
                if _misfit(num_envs, trial, table) == misfit:
                    break
            misfit = name
        del fitting[misfit]
    return fitting


def _misfit(num_envs: int, values: Mapping[str, Any], table: Mapping[str, Option]) -> str | None:
    settings = Settings(num_envs=num_envs)
    try:
        _check_values(settings, values, table)
    except (TypeError, ValueError):
        return next(name for name in table if name not in vars(settings))
    return None


def _check_values(
    settings: Settings, values: Mapping[str, Any], table: Mapping[str, Option]
) -> None:
    for name, option in table.items():
        value = values.get(name, option.default)
        setattr(settings, name, value if option.check is None else option.check(value, settings))


def _outside_defaults() -> list[dict[str, Any]]:
    """Defaults from outside, by precedence: calls of ``install``, the last first; variables."""
    return [*reversed(_installations), _environment_defaults()]


def _environment_defaults(scope: Scope | None = None) -> dict[str, Any]:
    """Values of the environment variables of all options, or of those of one scope."""
    values = {}
    for name, option in OPTIONS.items():
        variable = environment_variable(name)
        text = os.environ.get(variable, "").strip()
        if not text or option.parse is None or scope not in (None, option.scope):
            continue
        try:
            values[name] = option.parse(text)
            _check_values(Settings(num_envs=1), {name: values[name]}, OPTIONS)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{variable}={text!r} in the environment: {error}") from None
    return values
