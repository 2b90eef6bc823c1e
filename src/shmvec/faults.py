"""Faults of workers and envs: errors, the policy for them, and exceptions sent between processes.

An exception of an env reaches the caller with its type, arguments, traceback and the env's index,
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

from shmvec._hints import add_note, refusing_unknown
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
    "raise_failures",
    "restart_seed",
]


_LOGGED = 2  # if no more envs fail, the tracebacks of all are logged
_OURS = os.path.dirname(__file__) + os.sep, "src/shmvec/"  # files of Python and Cython code

Raised = TypeVar("Raised", bound=BaseException)
_ENOUGH = 8192  # characters of last lines in a message, after which no further worker's are added


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
        what = f"has been in {operation}() for longer than {operation}_timeout={limit:g} seconds"
        if operation == "build":
            what = (
                "is not built again: its worker has taken longer than reset_timeout="
                f"{limit:g} seconds for each of its envs, and twice what the first start has taken"
            )
        super().__init__(
            f"env {env} {what}. It may still come back: the next call waits for it first, under "
            "the same limit. close(terminate=True) ends it."
        )
        self.env = env
        self.operation = operation
        self.limit = limit

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error with all its attributes."""
        given = (self.env, self.operation, self.limit)
        return type(self), given, {**vars(self), "args": self.args}

    def take_last_words(self, stack: str, stderr: str) -> None:
        """Adds the worker's stack, and its last lines on stderr."""
        self.stack, self.stderr = stack, stderr
        self.args = (f"{self.args[0]}{stack_text(stack)}{stderr_text({None: stderr})}",)

    @property
    def summary(self) -> str:
        """The message without its advice."""
        if self.operation == "build":
            return f"env {self.env} was not built again in time"
        return f"env {self.env} was in {self.operation}() for longer than {self.limit:g} s"


@dataclass(frozen=True)
class FaultPolicy:
    """How failures of envs are handled. The default is what Gymnasium does: raise.

    The step in which a fault happens returns for its env the last observation, reward 0 and
    ``truncated=True``, so that no learner bootstraps across the break, and ``infos["fault"]``
    describes it: ``type``, ``message``, ``restarts`` of its worker so far, ``stderr`` (the last
    lines that a crashed worker has written there) and ``stack`` (the traceback of an exception, or
    the stack of an env that took too long). The next step is that after any truncation in the
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
        reset_timeout: Seconds that a reset of one env may take. A worker that is started in place
            of another may take as long for each env that it builds, and twice what the first start
            has taken besides.
        max_restarts: How many restarts and resets of a worker within ``window_s`` are done; one
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


# The names are checked before the dataclass's own __init__ can complain of one.
FaultPolicy.__init__ = refusing_unknown(FaultPolicy.__init__)  # type: ignore[assignment]


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
        stderr: The last lines that the worker had written to stderr, if its process has crashed or
            was ended because of a time limit. After a crash in C they have its Python stack.
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
        cut_off: Whether the answer is a truncation in place of what was lost.
        last: With an autoreset in the same step: the observation the episode ended with, in a
            list; else None.
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
    words = [abs(seed), *numbers, *([1] if seed < 0 else [])]  # an env may take negative seeds
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
            _leave_out_ours(formatted)
            text = "".join(formatted.format())
            summary = "".join(formatted.format_exception_only()).strip()
            if isinstance(error, EnvTimeoutError):
                summary = error.summary
        except Exception:  # an exception whose __str__ raises
            summary = text = type(error).__name__
        kind = type(error).__name__
        return cls(env, worker, operation, kind, summary, text, notes, _pickled(error))

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
        # Where the exception shows the notes itself, they are not shown twice.
        shows = sys.version_info >= (3, 11) and hasattr(error, "__notes__")
        cause = RemoteTraceback(
            f"In {self.operation}() of env {self.env}, worker {self.worker}:\n"
            f"{self.traceback if shows else self.text}"
        )
        BaseException.__setattr__(error, "__cause__", cause)  # as in add_note
        return error


def _leave_out_ours(formatted: traceback.TracebackException) -> None:
    """Removes frames of this package, where there are others, from a traceback and its chain."""
    chain: list[traceback.TracebackException | None] = [formatted]
    for each in chain:  # which grows meanwhile
        if each is not None:
            theirs = [frame for frame in each.stack if not frame.filename.startswith(_OURS)]
            each.stack[:] = theirs or each.stack
            chain += [each.__cause__, each.__context__]


def _pickled(error: BaseException) -> bytes | None:
    """An exception by what it holds, or else as its class says; None if neither can be sent."""
    for kind in ExceptionPickler, Pickler:
        with suppress(Exception):
            return dumps(error, kind=kind)
    return None


def cut_traceback(error: Raised) -> Raised:
    """Removes the frames below this call, all of them ours, of an exception raised in an env."""
    return error.with_traceback(None) if isinstance(error.__cause__, RemoteTraceback) else error


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
    failed: dict[str, list[int]] = {}
    for other in others:
        failed.setdefault(other.summary, []).append(other.env)
    if failed:
        each = (f"{envs_in_words(envs)}: {summary}" for summary, envs in failed.items())
        add_note(error, f"At the same time: {'; '.join(each)}")


def envs_in_words(envs: Sequence[int]) -> str:
    """Envs in words: env 3; envs 1, 4; envs 1 to 7; of a range, envs 1 to 2."""
    if len(envs) == 1:
        return f"env {envs[0]}"
    if isinstance(envs, range) or (len(envs) > 2 and envs[-1] - envs[0] == len(envs) - 1):
        return f"envs {envs[0]} to {envs[-1]}"
    return f"envs {', '.join(map(str, envs))}"


class EnvErrorWarning(UserWarning):
    """A line of a log: its argument is the text of AsyncVectorEnv, and it prints a short one."""

    def __init__(self, text: str, shown: str = "") -> None:
        """Takes what AsyncVectorEnv logs, and what is printed in its place, if it is another."""
        super().__init__(text)
        self._shown = shown or text

    def __str__(self) -> str:
        """The short text."""
        return self._shown


def log_as_gymnasium_does(failures: Sequence[Failure]) -> None:
    """Logs failures word for word as AsyncVectorEnv does, since programs match on it.

    Of a traceback only the last line is shown, since the exception that is raised shows it whole.
    If more than two envs have failed, the others are named in one line. (No worker is shut down
    here.) Gymnasium logs errors as warnings; where warnings are errors, the env's own exception is
    raised nevertheless.
    """
    if logger.min_level > logger.ERROR:
        return
    words = "Received the following error from Worker-{} - Shutting it down"
    lines: list[tuple[str, str]] = []  # what is logged, and what is shown of it
    if len(failures) <= _LOGGED:
        for failure in failures:
            said = words.format(failure.env)
            what = f"env {failure.env} has raised {failure.summary} (no worker is shut down)"
            lines += [(said, said), (failure.traceback, what)]
    else:
        first, *others = sorted(failure.env for failure in failures)
        for said in words.format(first), f"and {len(others)} more: {envs_in_words(others)}":
            lines.append((said, said))
    said = "Raising the last exception back to the main process."
    level = _frames_of_ours()
    for texts in [*lines, (said, said)]:
        text, shown = (colorize(f"ERROR: {each}", "red") for each in texts)
        with suppress(Warning):
            warnings.warn(EnvErrorWarning(text, shown), stacklevel=level)


def _frames_of_ours() -> int:
    """How many frames there are from the caller's to the first one that is not ours."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


def describe_exit(code: int | str | None) -> str:
    """The end of a process in words."""
    if isinstance(code, str):
        return code
    if code is None:
        return (
            "has ended; its exit code is unknown, since the program ignores SIGCHLD or waits for "
            "all of its children, or since the fork server has ended, too"
        )
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


def ends(workers: Iterable[tuple[int, range, int | str | None]]) -> str:
    """How workers have ended, in words; neighbours that have ended alike are named together.

    Args:
        workers: Index, envs and exit code of each, or words for another fate.
    """
    runs: list[
        tuple[str, int, int, int, int]
    ] = []  # how, first and last worker, first and last env
    for index, envs, code in workers:
        how, first, first_env = describe_exit(code), index, envs.start
        if runs and runs[-1][0] == how and runs[-1][2] == index - 1:
            _, first, _, first_env, _ = runs.pop()
        runs.append((how, first, index, first_env, envs.stop - 1))
    return "; ".join(
        f"worker{f' {first}' if first == last else f's {first} to {last}'} "
        f"({envs_in_words(range(first_env, last_env + 1))}) {how}"
        for how, first, last, first_env, last_env in runs
    )


def last_words(cause: object, worker: int) -> str:
    """A worker's last lines on stderr, if the cause of its restart has them; else ""."""
    if isinstance(cause, WorkerCrashError):
        return dict(zip(cause.workers, cause.stderr, strict=False)).get(worker, "")
    return cause.stderr if isinstance(cause, EnvTimeoutError) else ""


def stack_text(stack: str) -> str:
    """The end of a message: the Python stack of a worker."""
    if not stack:
        return ""
    return f"\nThe Python stack of its worker, most recent call first:\n{indent(stack, '    ')}"


def stderr_text(stderr: Mapping[Any, str]) -> str:
    """The end of a message: the last lines of workers on stderr, by worker."""
    shown = ""
    for worker, text in stderr.items():
        if text and len(shown) < _ENOUGH:
            who = "its worker" if worker is None else f"worker {worker}"
            shown += f"\nThe last lines of {who} on stderr:\n{indent(text, '    ')}"
    return shown


def crash(
    workers: Sequence[tuple[int, range, int | str | None, str]], doing: str
) -> WorkerCrashError:
    """Makes the error for workers that ended on their own.

    Args:
        workers: Index, envs (a range), exit code (or how it ended, in words) and last lines on
            stderr of each.
        doing: The last command.
    """
    fates = ends((index, envs, code) for index, envs, code, _ in workers)
    stderr = {index: text for index, _, _, text in workers}
    silent = (
        "Look at the worker's output above; the OOM killer of the system leaves none. "
        if not any(stderr.values())
        else ""
    )
    error = WorkerCrashError(
        f"A worker process ended unexpectedly; the last command was {doing!r}: "
        f"{fates}. The vector env "
        f"is closed. {silent}num_workers=0 runs the envs in this process, for a debugger; "
        "faults=FaultPolicy(on_crash='restart') goes on without this one."
        f"{stderr_text(stderr)}"
    )
    error.summary = f"{fates}, in {doing!r}"
    error.each = {
        index: f"{ends([(index, envs, code)])}, in {doing!r}" for index, envs, code, _ in workers
    }
    error.workers = tuple(index for index, *_ in workers)
    error.envs = tuple(env for _, envs, *_ in workers for env in envs)
    error.stderr = tuple(stderr.values())
    return error
