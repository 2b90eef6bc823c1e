"""What may go wrong in a worker, and how the user gets to see it.

An exception of an env crosses the process boundary with its type, arguments, traceback and the
env's index, whatever its constructor looks like and whether or not it can be pickled.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
from gymnasium import logger

__all__ = [
    "EnvTimeoutError",
    "Failure",
    "RemoteTraceback",
    "WorkerCrashError",
    "log_as_gymnasium_does",
    "raise_failures",
]


class WorkerCrashError(RuntimeError):
    """A worker process ended without being told to; the vector env is closed."""


class EnvTimeoutError(multiprocessing.TimeoutError, TimeoutError):
    """An env takes longer than ``step_timeout`` or ``reset_timeout`` allows.

    Attributes:
        env: Its index.
        operation: "step" or "reset".
        limit: Seconds that it may take.
    """

    def __init__(self, env: int, operation: str, limit: float) -> None:
        """Says so."""
        super().__init__(
            f"env {env} has been in {operation}() for longer than {operation}_timeout={limit:g} "
            "seconds. It may still come back: the next call waits for it first, under the same "
            "limit. close(terminate=True) ends it."
        )
        self.env = env
        self.operation = operation
        self.limit = limit


class RemoteTraceback(Exception):
    """The traceback of an exception in an env, as text: the cause of the one that is raised."""

    def __init__(self, text: str) -> None:
        """Stores the text."""
        super().__init__(text)

    def __str__(self) -> str:
        """The traceback, set off as multiprocessing.pool does."""
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class Failure:
    """An exception in an env, fit to travel.

    Attributes:
        env: The env's index.
        worker: Its worker's index.
        operation: What it was doing: "make", "reset", "step", "call", ...
        summary: Type and message, one line.
        text: The formatted traceback.
        pickled: Type, arguments and attributes; None if they cannot be pickled.
    """

    env: int
    worker: int
    operation: str
    summary: str
    text: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException, env: int, worker: int, operation: str) -> Failure:
        """Describes a caught exception."""
        try:
            pickled: bytes | None = cloudpickle.dumps(
                (type(error), error.args, getattr(error, "__dict__", {}))
            )
            _rebuild(pickled)
        except Exception:
            pickled = None
        try:
            summary = "".join(traceback.format_exception_only(type(error), error)).strip()
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        except Exception:  # an exception whose __str__ raises
            summary = text = type(error).__name__
        return cls(env, worker, operation, summary, text, pickled)

    def exception(self) -> BaseException:
        """The exception to raise in the parent, its cause the worker's traceback."""
        error: BaseException
        try:
            if self.pickled is None:
                raise pickle.PickleError
            error = _rebuild(self.pickled)
        except Exception:
            error = RuntimeError(
                f"env {self.env} raised an exception that cannot be pickled: {self.summary}"
            )
        error.__cause__ = RemoteTraceback(
            f"In {self.operation}() of env {self.env}, worker {self.worker}:\n{self.text}"
        )
        return error


def _rebuild(pickled: bytes | None) -> BaseException:
    """Makes an exception without calling its constructor, which may want other arguments."""
    kind, args, attributes = pickle.loads(pickled or b"")
    error: BaseException = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def raise_failures(failures: Sequence[Failure]) -> None:
    """Raises the exception of the first env that failed; the others are named in its notes.

    Args:
        failures: What went wrong, in any order; nothing is raised if it is empty.
    """
    if not failures:
        return
    first, *others = sorted(failures, key=lambda failure: failure.env)
    error = first.exception()
    if others and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(
            "At the same time: "
            + "; ".join(f"env {other.env}: {other.summary}" for other in others)
        )
    raise error


def log_as_gymnasium_does(failures: Sequence[Failure]) -> None:
    """The lines that AsyncVectorEnv logs, word for word: code matches on them.

    (No worker is shut down here.) Gymnasium logs errors as warnings; where these are errors the
    env's own exception is still what is raised.
    """
    lines = []
    for failure in failures:
        lines += [
            f"Received the following error from Worker-{failure.env} - Shutting it down",
            failure.text,
        ]
    for line in [*lines, "Raising the last exception back to the main process."]:
        with suppress(Warning):
            logger.error("%s", line)


def describe_exit(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "still running"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


def crash(workers: Sequence[tuple[int, Any, int | None]], doing: str) -> WorkerCrashError:
    """The error for workers that ended on their own.

    Args:
        workers: Index, envs (a range) and exit code of each.
        doing: What the vector env was doing.
    """
    lines = [
        f"worker {index} (envs {envs.start} to {envs.stop - 1}) {describe_exit(code)}"
        for index, envs, code in workers
    ]
    return WorkerCrashError(
        f"A worker process ended unexpectedly while {doing}: {'; '.join(lines)}. The vector env "
        "is closed. Look at the worker's output above; a segfault or the OOM killer of the "
        "system leaves none. num_workers=0 runs the envs in this process, for a debugger."
    )
