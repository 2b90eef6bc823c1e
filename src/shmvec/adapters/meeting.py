"""Wrapped envs that are stepped together: each in a thread, until their requests meet.

A wrapper around an env handle is the user's code, and runs here; what it asks the env below is not
sent by its thread. The thread waits until all the others have asked something or are done; then the
caller's thread carries all requests out at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shmvec.exchange import uninterrupted

__all__ = ["Meeting", "current"]

_local = threading.local()


def current() -> Meeting | None:
    """The meeting that runs the calling thread, if one does."""
    return getattr(_local, "meeting", None)


class Meeting:
    """Threads for jobs, and the place where their requests meet."""

    def __init__(self, num_jobs: int, carry_out: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """Prepares the threads.

        Args:
            num_jobs: The most there are at a time.
            carry_out: Takes the requests of all jobs that ask, and returns an answer to each.
        """
        self._pool = ThreadPoolExecutor(num_jobs, "shmvec-wrapped-env")
        self._carry_out = carry_out
        self._arrived = threading.Condition()
        self._running = 0  # jobs that have neither asked something nor come to an end
        self._asked: list[tuple[Any, Future[Any]]] = []

    def run(self, jobs: Mapping[int, Callable[[], Any]]) -> dict[int, Future[Any]]:
        """Runs jobs to their end.

        Args:
            jobs: By number; at most ``num_jobs``.

        Returns:
            What each has returned or raised.

        Raises:
            BaseException: What ``carry_out`` raises, KeyboardInterrupt included; all jobs have
                come to an end.
        """
        error: BaseException | None = None
        outcomes: dict[int, Future[Any]] = {}
        while True:
            try:
                if not outcomes and error is None:
                    with uninterrupted():
                        self._running = len(jobs)
                        for number, job in jobs.items():
                            outcomes[number] = self._pool.submit(self._work, job)
                with self._arrived:
                    self._arrived.wait_for(lambda: self._running == 0)
                if not self._asked:
                    break
                if error is None:
                    answers = self._carry_out([request for request, _ in self._asked])
                else:  # whoever asks now is to raise that it is over
                    answers = [RuntimeError(f"broken off by {error!r}") for _ in self._asked]
                with uninterrupted():
                    asked, self._asked = self._asked, []
                    self._running = len(asked)
                    for (_, reply), answer in zip(asked, answers, strict=True):
                        reply.set_result(answer)
            except BaseException as raised:
                error = raised
        if error is not None:
            raise error
        return outcomes

    def ask(self, request: Any) -> Any:
        """Called by a job: waits until its request has been carried out; returns the answer."""
        reply: Future[Any] = Future()
        with self._arrived:
            self._asked.append((request, reply))
            self._running -= 1
            self._arrived.notify()
        return reply.result()

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def _work(self, job: Callable[[], Any]) -> Any:
        _local.meeting = self
        try:
            return job()
        finally:
            _local.meeting = None
            with self._arrived:
                self._running -= 1
                self._arrived.notify()
