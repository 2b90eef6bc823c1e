"""Faults of workers and envs: errors, the policy for them, and exceptions sent between processes.

An env's exception reaches the caller with its type, arguments, traceback and the env's index,
whatever its constructor looks like and whether or not it can be pickled.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pickle import PickleError, loads
from textwrap import indent
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gymnasium import logger
from gymnasium.utils import colorize

from shmvec._hints import add_note, refuse_unknown_arguments
from shmvec._pickling import ExceptionPickler, Pickler, dumps  # bound: an env may patch the module

__all__ = [
    "EnvTimeoutError",
    "Failure",
    "Fault",
    "FaultPolicy",
    "RemoteTraceback",
    "Report",
    "TooManyFaultsError",
    "WorkerCrashError",
    "add_note",
    "cut_traceback",
    "derived_seed",
    "envs_in_words",
    "log_as_gymnasium_does",
    "module_that_raised",
    "raise_failures",
    "restart_seed",
]


_MAX_LOGGED_TRACEBACKS = 2  # if more envs fail, no traceback is logged
_OWN_FILES = os.path.dirname(__file__) + os.sep, "src/shmvec/"  # of Python and of Cython code
_MAX_STDERR_CHARS = 8192  # a message adds no further worker's lines after so many

Raised = TypeVar("Raised", bound=BaseException)


class WorkerCrashError(RuntimeError):
    """A worker process ended unexpectedly, and the policy does not restart it.

    The vector env is closed.

    Attributes:
        workers: Indices of the workers that ended.
        envs: Indices of their envs.
        summary: The message without its advice.
        stderr: The last lines that each of these workers has written to stderr.
    """

    summary = ""
    each: Mapping[int, str] = {}  # the summary for one worker
    workers: tuple[int, ...] = ()
    envs: tuple[int, ...] = ()
    stderr: tuple[str, ...] = ()


class TooManyFaultsError(WorkerCrashError):
    """A worker needed more restarts or resets than the policy allows; the vector env is closed.

    Attributes:
        history: The faults of the worker within the policy's window, oldest first.
    """

    history: tuple[Fault, ...] = ()


class EnvTimeoutError(multiprocessing.TimeoutError, TimeoutError):
    """An env takes longer than ``step_timeout`` or ``reset_timeout`` allows.

    Attributes:
        env: The index of the env.
        operation: "step", "reset", or "build" of an env in a worker that is started in place of
            another.
        limit: Seconds that it may take.
        stack: The Python stack of its worker then, most recent call first, as lines; if it could
            not be read, the reason in parentheses.
        stderr: The last lines that its worker had written to stderr.
    """

    stack = ""
    stderr = ""

    def __init__(self, env: int, operation: str, limit: float) -> None:
        """Makes the error, with its message."""
        delay = f"has been in {operation}() for longer than {operation}_timeout={limit:g} seconds"
        if operation == "build":
            delay = (
                f"has not been rebuilt: its worker has taken longer than reset_timeout={limit:g} "
                "seconds for each of its envs, plus twice the time of its first start"
            )
        super().__init__(
            f"env {env} {delay}. It may still come back: the next call waits for it first, under "
            "the same limit. close(terminate=True) ends it."
        )
        self.env = env
        self.operation = operation
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error with all its attributes."""
        arguments = (self.env, self.operation, self.limit)
        return type(self), arguments, {**vars(self), "args": self.args}

    def add_stack_and_stderr(self, stack: str, stderr: str) -> None:
        """Adds the worker's stack, and its last lines on stderr."""
        self.stack, self.stderr = stack, stderr
        self.args = (f"{self.args[0]}{stack_section(stack)}{stderr_section({None: stderr})}",)

    @property
    def summary(self) -> str:
        """The message without its advice."""
        if self.operation == "build":
            return f"env {self.env} was not rebuilt in time"
        return f"env {self.env} was in {self.operation}() for longer than {self.limit:g} s"


@dataclass(frozen=True)
class FaultPolicy:
    """How failures of envs are handled. The default is what Gymnasium does: raise.

    The step in which a fault happens returns the env's last observation, reward 0 and
    ``truncated=True``, so that no learner bootstraps across the break, and ``infos["fault"]``
    describes it: ``type``, ``message``, ``restarts`` of its worker so far, ``stderr`` (the last
    lines that a crashed worker has written there) and ``stack`` (the traceback of an exception, or
    the stack of an env that took too long). The next step is as after any truncation in the
    autoreset mode. A restart of a worker ends the episodes of its other envs: they are truncated as
    well, in the same step or in their next one.

    A restarted env is built by its ``env_fn`` and reset with :func:`restart_seed`, so a run with
    the same faults in the same places is the same run.

    Attributes:
        on_crash: A worker process died. "raise" WorkerCrashError and close, or "restart" it.
        on_error: An env raised in ``step`` or ``reset``. "raise" the exception, "reset" the env, or
            "restart" its worker.
        on_timeout: An env takes longer than its limit. "raise" EnvTimeoutError, and let the env
            continue; "reset": raise EnvTimeoutError inside the env's own code (by the signal
            SIGUSR1) and reset it, and restart its worker if that has no effect within a second;
            "restart" its worker at once.
        step_timeout: Seconds that a step of one env may take. None: as long as it likes.
        reset_timeout: Seconds that a reset of one env may take. A worker that replaces another one
            may take as long for each env that it builds, plus twice the time of the first start.
        max_restarts: How many restarts and resets of a worker are done within ``window_s``; one
            more raises TooManyFaultsError.
        window_s: Seconds in which restarts and resets are counted.
        backoff_s: Seconds to wait before a second restart within ``window_s``; twice as long before
            each further one, 30 s at most.
    """

    on_crash: str = "raise"
    on_error: str = "raise"
    on_timeout: str = "raise"
    step_timeout: float | None = None
    reset_timeout: float | None = None
    max_restarts: int = 10
    window_s: float = 600.0
    backoff_s: float = 0.1

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: A value is out of range, or is not one of the words above.
        """
        for name, allowed in (
            ("on_crash", ("raise", "restart")),
            ("on_error", ("raise", "reset", "restart")),
            ("on_timeout", ("raise", "reset", "restart")),
        ):
            if getattr(self, name) not in allowed:
                words = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} must be one of {words}, got {getattr(self, name)!r}")
        if self.max_restarts < 0 or not self.window_s > 0 or not self.backoff_s >= 0:
            raise ValueError(
                "max_restarts and backoff_s must not be negative, and window_s must be positive: "
                f"got {self.max_restarts}, {self.backoff_s} and {self.window_s}"
            )
        if self.on_timeout != "raise" and self.step_timeout is None and self.reset_timeout is None:
            raise ValueError(
                f"on_timeout={self.on_timeout!r} needs a limit: step_timeout= or reset_timeout="
            )

    @property
    def raises(self) -> bool:
        """Whether the policy only raises."""
        return self.on_crash == self.on_error == self.on_timeout == "raise"


# This checks the names first, with a better message than that of the dataclass's own __init__.
FaultPolicy.__init__ = refuse_unknown_arguments(FaultPolicy.__init__)  # type: ignore[assignment]


@dataclass(frozen=True)
class Fault:
    """A fault that was handled.

    Attributes:
        env: The env that failed, or the first of the worker that did.
        worker: Its worker.
        type: Name of the exception's type.
        message: The exception's message, or a description of the crash.
        done: "reset" or "restart".
        at: The time, in seconds since the epoch.
        restarts: How often the worker had been restarted by then, this time included.
        stderr: The last lines that the worker had written to stderr, if its process crashed or was
            ended because of a time limit. After a crash in C they include its Python stack.
        stack: The traceback of an env's exception; or the worker's stack, most recent call first,
            if its process was ended because of a time limit.
    """

    env: int
    worker: int
    type: str
    message: str
    done: str
    at: float
    restarts: int
    stderr: str = ""
    stack: str = ""

    @property
    def info(self) -> dict[str, Any]:
        """The fault as a dict, for ``infos["fault"]``."""
        return {
            "type": self.type,
            "message": self.message,
            "restarts": self.restarts,
            "stderr": self.stderr,
            "stack": self.stack,
        }


class Report(NamedTuple):
    """Report of a fault in an env's next answer.

    Attributes:
        fault: The fault.
        cut_off: Whether the answer is a truncation that replaces a lost one.
        last: With an autoreset in the same step: the episode's last observation, in a list; else
            None.
    """

    fault: Fault
    cut_off: bool
    last: list[Any] | None

    @property
    def info(self) -> dict[str, Any]:
        """The entries for infos."""
        fault = self.fault.info
        if self.last is None:
            return {"fault": fault}
        return {"fault": fault, "final_obs": self.last[0], "final_info": {"fault": fault}}


def restart_seed(seed: int | None, restarts: int) -> int | None:
    """The seed of an env's reset after its worker was restarted.

    Args:
        seed: The last seed that ``reset`` gave to the env; None if it gave none.
        restarts: How often its worker has been restarted.

    Returns:
        Another seed, the same one each time; None if there was none.
    """
    return derived_seed(seed, restarts)


def derived_seed(seed: int | None, *numbers: int) -> int | None:
    """A seed that follows from another one and from numbers; None if there is no other."""
    if seed is None:
        return None
    words = [abs(seed), *numbers, *([1] if seed < 0 else [])]  # an env may accept negative seeds
    return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)


class RemoteTraceback(Exception):
    """The traceback of an env's exception as text: the cause of the exception raised here."""

    def __init__(self, text: str) -> None:
        """Stores the text."""
        super().__init__(text)

    def __str__(self) -> str:
        """The traceback between quotes, as in multiprocessing.pool."""
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class Failure:
    """An exception in an env, in a form that can be sent to another process.

    Attributes:
        env: The env's index.
        worker: Its worker's index.
        operation: The operation that failed: "make", "reset", "step", "call", ...
        type: Name of the exception's type.
        summary: Type and message, one line.
        traceback: The formatted traceback, without frames of this package and without notes.
        notes: The exception's notes.
        pickled: The exception; None if it cannot be pickled.
    """

    env: int
    worker: int
    operation: str
    type: str
    summary: str
    traceback: str
    notes: tuple[str, ...]
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, env: int, worker: int, operation: str) -> Failure:
        """Describes a caught exception."""
        notes: tuple[str, ...] = ()
        try:
            notes = tuple(map(str, getattr(error, "__notes__", None) or ()))
            formatted = traceback.TracebackException.from_exception(error)
            formatted.__notes__ = None
            _remove_own_frames(formatted)
            text = "".join(formatted.format())
            summary = "".join(formatted.format_exception_only()).strip()
            if isinstance(error, EnvTimeoutError):
                summary = error.summary
        except Exception:  # an exception whose __str__ raises
            summary = text = type(error).__name__
        kind = type(error).__name__
        return cls(env, worker, operation, kind, summary, text, notes, _pickle_error(error))

    @property
    def text(self) -> str:
        """The traceback, and the notes."""
        return "\n".join([self.traceback.rstrip("\n"), *self.notes, ""])

    def exception(self) -> BaseException:
        """The exception to raise in the parent; its cause is the worker's traceback."""
        error: BaseException
        try:
            if self.pickled is None:
                raise PickleError
            error = loads(self.pickled)
            if not isinstance(error, BaseException):
                raise PickleError
        except Exception:
            error = RuntimeError(
                f"env {self.env} raised an exception that cannot be pickled: {self.summary}"
            )
        # Notes that Python prints with the exception are not repeated in its cause.
        prints_notes = sys.version_info >= (3, 11) and hasattr(error, "__notes__")
        cause = RemoteTraceback(
            f"In {self.operation}() of env {self.env}, worker {self.worker}:\n"
            f"{self.traceback if prints_notes else self.text}"
        )
        BaseException.__setattr__(error, "__cause__", cause)  # as in add_note
        return error


def _remove_own_frames(formatted: traceback.TracebackException) -> None:
    """Removes this package's frames from a traceback and its chain, unless there are no others."""
    chain: list[traceback.TracebackException | None] = [formatted]
    for each in chain:  # it grows in the loop
        if each is not None:
            foreign = [frame for frame in each.stack if not frame.filename.startswith(_OWN_FILES)]
            each.stack[:] = foreign or each.stack
            chain += [each.__cause__, each.__context__]


def _pickle_error(error: BaseException) -> bytes | None:
    """Pickles an exception by its content, or else as its class says; None if neither works."""
    for kind in ExceptionPickler, Pickler:
        with suppress(Exception):
            return dumps(error, kind=kind)
    return None


def cut_traceback(error: Raised) -> Raised:
    """Removes the frames of an env's exception below this call, which are all this package's."""
    return error.with_traceback(None) if isinstance(error.__cause__, RemoteTraceback) else error


def module_that_raised(error: BaseException) -> str:
    """The name of the module whose code has raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name: str = frame.f_globals.get("__name__", "")
    return name


def raise_failures(failures: Sequence[Failure]) -> None:
    """Raises the exception of the first env that failed; the others are named in its notes.

    Args:
        failures: The failures, in any order; nothing is raised if there are none.
    """
    if not failures:
        return
    first, *others = sorted(failures, key=lambda failure: failure.env)
    error = first.exception()
    note_failures(error, others)
    try:
        raise error
    finally:
        del error  # or its traceback keeps this frame, and all callers' locals, in a cycle with it


def note_failures(error: BaseException, others: Sequence[Failure]) -> None:
    """Adds a note on other failures to an exception; equal messages are written once."""
    envs_by_summary: dict[str, list[int]] = {}
    for other in others:
        envs_by_summary.setdefault(other.summary, []).append(other.env)
    if envs_by_summary:
        parts = (f"{envs_in_words(envs)}: {summary}" for summary, envs in envs_by_summary.items())
        add_note(error, f"At the same time: {'; '.join(parts)}")


def envs_in_words(envs: Sequence[int]) -> str:
    """Envs in words: "env 3"; "envs 1, 4"; "envs 1 to 7"; for a range of two, "envs 1 to 2"."""
    if len(envs) == 1:
        return f"env {envs[0]}"
    if isinstance(envs, range) or (len(envs) > 2 and envs[-1] - envs[0] == len(envs) - 1):
        return f"envs {envs[0]} to {envs[-1]}"
    return f"envs {', '.join(map(str, envs))}"


class EnvErrorWarning(UserWarning):
    """A log line whose argument is AsyncVectorEnv's text, while it prints a shorter one."""

    def __init__(self, text: str, short_text: str = "") -> None:
        """Takes both texts; the short one may be missing, as when a pickle is loaded."""
        super().__init__(text)
        self._short_text = short_text or text

    def __str__(self) -> str:
        """The short text."""
        return self._short_text


def log_as_gymnasium_does(failures: Sequence[Failure]) -> None:
    """Logs failures word for word as AsyncVectorEnv does, since programs match on its texts.

    For a traceback one line is printed, since the exception that is raised later shows all of it.
    If more than two envs have failed, the others are named in one line. (No worker is shut down
    here.) Gymnasium logs errors as warnings; where warnings are errors, the env's own exception is
    raised nevertheless.
    """
    if logger.min_level > logger.ERROR:
        return
    template = "Received the following error from Worker-{} - Shutting it down"
    lines: list[tuple[str, str]] = []  # AsyncVectorEnv's text, and the one to print
    if len(failures) <= _MAX_LOGGED_TRACEBACKS:
        for failure in failures:
            line = template.format(failure.env)
            short = f"env {failure.env} has raised {failure.summary} (no worker is shut down)"
            lines += [(line, line), (failure.traceback, short)]
    else:
        first, *others = sorted(failure.env for failure in failures)
        for line in template.format(first), f"and {len(others)} more: {envs_in_words(others)}":
            lines.append((line, line))
    line = "Raising the last exception back to the main process."
    level = _count_own_frames()
    for texts in [*lines, (line, line)]:
        text, short = (colorize(f"ERROR: {each}", "red") for each in texts)
        with suppress(Warning):
            warnings.warn(EnvErrorWarning(text, short), stacklevel=level)


def _count_own_frames() -> int:
    """The number of frames from the caller's to the first one outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame, level = frame.f_back, level + 1
    return level


def describe_exit(code: int | str | None) -> str:
    """Describes how a process has ended."""
    if isinstance(code, str):
        return code
    if code is None:
        return (
            "has ended; its exit code is unknown, because the program ignores SIGCHLD or waits for "
            "all of its children, or because the fork server has ended, too"
        )
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


def describe_exits(workers: Iterable[tuple[int, range, int | str | None]]) -> str:
    """Describes how workers have ended; neighbours that have ended alike are named together.

    Args:
        workers: Index, envs and exit code of each, or a description in place of the code.
    """
    # A description, first and last worker, first and last env.
    runs: list[tuple[str, int, int, int, int]] = []
    for index, envs, code in workers:
        end, first, first_env = describe_exit(code), index, envs.start
        if runs and runs[-1][0] == end and runs[-1][2] == index - 1:
            _, first, _, first_env, _ = runs.pop()
        runs.append((end, first, index, first_env, envs.stop - 1))
    return "; ".join(
        f"worker{f' {first}' if first == last else f's {first} to {last}'} "
        f"({envs_in_words(range(first_env, last_env + 1))}) {end}"
        for end, first, last, first_env, last_env in runs
    )


def stderr_before(cause: object, worker: int) -> str:
    """A worker's last lines on stderr, if the cause of its restart has them; else ""."""
    if isinstance(cause, WorkerCrashError):
        return dict(zip(cause.workers, cause.stderr, strict=False)).get(worker, "")
    return cause.stderr if isinstance(cause, EnvTimeoutError) else ""


def stack_section(stack: str) -> str:
    """The Python stack of a worker, as the end of a message."""
    if not stack:
        return ""
    return f"\nThe Python stack of its worker, most recent call first:\n{indent(stack, '    ')}"


def stderr_section(stderr: Mapping[Any, str]) -> str:
    """The last lines of workers on stderr, by worker, as the end of a message."""
    section = ""
    for worker, text in stderr.items():
        if text and len(section) < _MAX_STDERR_CHARS:
            name = "its worker" if worker is None else f"worker {worker}"
            section += f"\nThe last lines of {name} on stderr:\n{indent(text, '    ')}"
    return section


def crash_error(
    workers: Sequence[tuple[int, range, int | str | None, str]], doing: str
) -> WorkerCrashError:
    """Makes the error for workers that ended on their own.

    Args:
        workers: Index, envs, exit code (or a description) and last lines on stderr of each.
        doing: The last command.
    """
    ends = describe_exits((index, envs, code) for index, envs, code, _ in workers)
    stderr = {index: text for index, _, _, text in workers}
    output_hint = (
        "Look at the worker's output above; the OOM killer of the system leaves none. "
        if not any(stderr.values())
        else ""
    )
    restart = "; faults=FaultPolicy(on_crash='restart') restarts such workers"
    error = WorkerCrashError(
        f"A worker process ended unexpectedly; the last command was {doing!r}: {ends}. The vector "
        f"env is closed. {output_hint}num_workers=0 runs the envs in this process, for a debugger"
        f"{restart * (doing != 'start')}.{stderr_section(stderr)}"
    )
    error.summary = f"{ends}, in {doing!r}"
    error.each = {
        i: f"{describe_exits([(i, envs, code)])}, in {doing!r}" for i, envs, code, _ in workers
    }
    error.workers = tuple(index for index, *_ in workers)
    error.envs = tuple(env for _, envs, *_ in workers for env in envs)
    error.stderr = tuple(stderr.values())
    return error
