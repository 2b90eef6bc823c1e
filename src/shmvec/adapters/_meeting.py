"""Wrapped envs that are stepped together: each in a thread, until their requests meet.

A wrapper around an env handle is the user's code, and runs here; what it asks the env below is not
sent by its thread. The thread waits until all the others have asked something or are done; then the
caller's thread carries all requests out at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

_local = threading.local()


def current() -> Meeting | None:
    """The meeting that runs the calling thread, if one does."""
    return getattr(_local, "meeting", None)


class _Asked:
    """A request of a job, which waits for the answer."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.answered = False
        # One put both leaves the answer and wakes the job: Ctrl-C comes before it or after.
        self.answers: SimpleQueue[Any] = SimpleQueue()


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
        self._asked: list[_Asked] = []

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
        begun = False
        outcomes: dict[int, Future[Any]] = {number: Future() for number in jobs}
        self._asked = []
        while True:  # Ctrl-C may come anywhere in it: then what was not done yet is done next
            try:
                if not begun:
                    begun = True
                    for number, job in jobs.items():
                        self._pool.submit(self._work, job, outcomes[number])
                if error is not None:
                    for outcome in outcomes.values():
                        outcome.cancel()  # if it has not begun
                pending = self._pending(outcomes.values())
                if not pending:
                    break
                if error is None:
                    answers = self._carry_out([asked.request for asked in pending])
                else:
                    answers = [RuntimeError(f"broken off by {error!r}") for _ in pending]
                for asked, answer in zip(pending, answers, strict=True):
                    asked.answers.put(answer)
                    asked.answered = True
            except BaseException as raised:
                error = raised
        if error is not None:
            raise error
        return outcomes

    def ask(self, request: Any) -> Any:
        """Called by a job: waits until its request has been carried out; returns the answer."""
        asked = _Asked(request)
        with self._arrived:
            self._asked.append(asked)
            self._arrived.notify()
        return asked.answers.get()

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown()

    def _pending(self, outcomes: Iterable[Future[Any]]) -> list[_Asked]:
        """Waits until each job waits for an answer or is done; the requests to be answered."""
        jobs = list(outcomes)

        def at_rest() -> bool:
            self._asked = [asked for asked in self._asked if not asked.answered]
            return len(self._asked) + sum([job.done() for job in jobs]) >= len(jobs)

        with self._arrived:
            self._arrived.wait_for(at_rest)
            return self._asked

    def _work(self, job: Callable[[], Any], outcome: Future[Any]) -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        _local.meeting = self
        try:
            outcome.set_result(job())
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            _local.meeting = None
            with self._arrived:
                self._arrived.notify()
