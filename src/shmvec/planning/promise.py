"""Calls under way: a promise waits for a result, and gives it as often as it is asked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shmvec._parent.partial import EnvsFailed
from shmvec._shared.pipes import uninterrupted

__all__ = ["Promise", "Queue", "Work"]

Result = TypeVar("Result")
Rows = npt.NDArray[np.intp]

# Sends, then yields rows to wait for and gets what they have answered; returns the result.
Work = Generator[Rows, Any, Result]


class Promise(Generic[Result]):
    """A result that is still to come. Call it to wait for it.

    Promises may be waited for in any order, and more than once.
    """

    def __init__(self, settle: Callable[[Promise[Any], float | None], None]) -> None:
        """Takes what waits until it is settled."""
        self._settle = settle
        self._settled = False
        self._result: Any = None
        self._error: BaseException | None = None

    def __call__(self, timeout: float | None = None) -> Result:
        """Waits, and returns the result.

        Args:
            timeout: Seconds to wait. None: as long as it takes.

        Raises:
            multiprocessing.TimeoutError: The time is up. Nothing is lost: call again.
            Exception: Whatever the call has raised.
        """
        if not self._settled:
            self._settle(self, timeout)
        if self._error is not None:
            raise self._error
        result: Result = self._result
        return result

    @property
    def done(self) -> bool:
        """Whether the result is there. Nothing is looked for: only waiting makes it come."""
        return self._settled

    def _set(self, result: Any, error: BaseException | None = None) -> None:
        self._settled = True
        self._result, self._error = result, error


class Queue:
    """Works one after another; the first is under way.

    An error of an env ends the work that it happened in, and no other.
    """

    def __init__(
        self,
        collect: Callable[[Rows, float | None], Any],
        unfinished: tuple[type[BaseException], ...],
        abort: Callable[[], None],
    ) -> None:
        """Takes what waits.

        Args:
            collect: Waits for rows and returns their answers.
            unfinished: What that raises if one can wait once more.
            abort: Takes all answers that are still to come, and drops them.
        """
        self._collect = collect
        self._unfinished = unfinished
        self._abort = abort
        self._waiting: deque[tuple[Promise[Any], Work[Any]]] = deque()
        self._rows: Rows | None = None  # that the first one waits for

    def add(self, work: Work[Result]) -> Promise[Result]:
        """Begins a work, or leaves it for when those before it are done."""
        promise: Promise[Result] = Promise(self._settle)
        self._waiting.append((promise, work))
        if len(self._waiting) == 1:
            self._advance(partial(next, work))
        return promise

    def finish(self) -> None:
        """Waits until nothing is under way; errors are left to their promises."""
        while self._waiting:
            self._step(None)

    def _settle(self, promise: Promise[Any], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not promise.done:
            self._step(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _step(self, timeout: float | None) -> None:
        """Lets the first work go on by one wait."""
        _, work = self._waiting[0]
        if self._rows is None:  # Ctrl-C has ended the work before, or what dropped its rows
            self._advance(partial(next, work))
            return
        try:
            answers = self._collect(self._rows, timeout)
        except EnvsFailed as failed:  # an env may raise anything, what stands for a timeout, too
            self._advance(partial(work.throw, failed.exception()))
        except self._unfinished:
            raise
        except Exception as error:
            self._advance(partial(work.throw, error))
        else:
            self._advance(partial(work.send, answers))

    def _advance(self, go_on: Callable[[], Rows]) -> None:
        """Lets the first work go on to its next wait; if it ends, the one after it, and so on.

        Ctrl-C is for waits: what is neither sent nor put together would be lost.
        """
        with uninterrupted():
            self._go_on(go_on)

    def _go_on(self, go_on: Callable[[], Rows]) -> None:
        while True:
            self._rows = None
            try:
                self._rows = go_on()
                return
            except StopIteration as end:
                self._settle_first(end.value)
            except BaseException as error:
                self._settle_first(None, error)
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
            if not self._waiting:
                return
            go_on = partial(next, self._waiting[0][1])

    def _settle_first(self, result: Any, error: BaseException | None = None) -> None:
        promise, _ = self._waiting.popleft()
        promise._set(result, error)
        if error is not None:
            self._abort()
