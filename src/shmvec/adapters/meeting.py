"""Wrapped envs that are stepped together: each in a thread, until their requests meet.

A wrapper around an env handle is the user's code, and runs here; what it asks the env below is not
sent by its thread. The thread waits until all the others have asked something or are done; then the
caller's thread carries all requests out at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

from shmvec._shared.pipes import uninterrupted

__all__ = ["Meeting", "Raised", "current"]

_local = threading.local()


def current() -> Meeting | None:
    """The meeting that runs the calling thread, if one does."""
    return getattr(_local, "meeting", None)


class Raised:
    """An exception in place of a result."""

    def __init__(self, error: BaseException) -> None:
        """Takes the exception."""
        self.error = error


class Meeting:
    """Threads for jobs, and the place where their requests meet."""

    def __init__(self, num_jobs: int, carry_out: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """Prepares the threads.

        Args:
            num_jobs: The most there are at a time.
            carry_out: Takes the requests of all jobs that ask, and returns an answer to each, a
                ``Raised`` if that is an exception.
        """
        self._pool = ThreadPoolExecutor(num_jobs, "shmvec-wrapped-env")
        self._carry_out = carry_out
        self._arrived = threading.Condition()
        self._expected = 0
        self._asked: dict[int, Any] = {}
        self._done: dict[int, Any] = {}
        self._replies: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(num_jobs)]

    def run(self, jobs: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Runs jobs to their end.

        Args:
            jobs: By number, below ``num_jobs``.

        Returns:
            What each has returned, or a ``Raised``.

        Raises:
            BaseException: What ``carry_out`` raises, KeyboardInterrupt included; all jobs have
                come to an end.
        """
        error: BaseException | None = None
        self._asked, self._done = {}, {}
        self._expected = len(jobs)
        begun = False
        while True:
            try:
                if not begun:
                    begun = True
                    with uninterrupted():
                        for number, job in jobs.items():
                            self._pool.submit(self._work, number, job)
                with self._arrived:
                    self._arrived.wait_for(self._all_there)
                if not self._asked:
                    break
                if error is None:
                    answers = self._carry_out(list(self._asked.values()))
                else:  # whoever asks now learns that it is over
                    answers = [Raised(RuntimeError(f"broken off by {error!r}"))] * len(self._asked)
                with uninterrupted():
                    asked, self._asked = self._asked, {}
                    for number, answer in zip(asked, answers, strict=True):
                        self._replies[number].put(answer)
            except BaseException as raised:
                error = raised
        if error is not None:
            raise error
        return self._done

    def ask(self, request: Any) -> Any:
        """Called by a job: waits until its request has been carried out; returns the answer."""
        number = _local.number
        with self._arrived:
            self._asked[number] = request
            self._arrived.notify()
        answer = self._replies[number].get()
        if isinstance(answer, Raised):
            raise answer.error
        return answer

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def _all_there(self) -> bool:
        return len(self._asked) + len(self._done) == self._expected

    def _work(self, number: int, job: Callable[[], Any]) -> None:
        _local.meeting, _local.number = self, number
        try:
            outcome = job()
        except BaseException as error:
            outcome = Raised(error)
        finally:
            _local.meeting = None
        with self._arrived:
            self._done[number] = outcome
            self._arrived.notify()
