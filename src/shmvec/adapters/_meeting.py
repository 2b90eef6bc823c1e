"""Wrapped envs that are stepped together: each in a thread, until their requests meet.

A wrapper around an env handle is the user's code, and runs here; what it asks the env below is not
sent by its thread. The thread waits until all the others have asked something or are done; then the
caller's thread carries all requests out at once.

Ctrl-C may come anywhere in the caller's thread. So that thread takes no lock: it puts into queues,
which is done as a whole or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

_local = threading.local()


class Job:
    """A call that is made in a thread, and may ask its meeting for something.

    Attributes:
        result: What it has returned.
        error: What it has raised, or None.
        request: What it asks for.
        answers: Where it waits for an answer.
        cancelled: Whether its requests are refused.
        done: Whether it has ended.
    """

    def __init__(self, call: Callable[[], Any], bell: SimpleQueue[None]) -> None:
        """Takes what is called, and what is rung when it asks for something or is done."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.request: Any = None
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.cancelled = self.done = False
        self._call = call
        self._bell = bell

    def run(self) -> None:
        """Makes the call, in the job's thread."""
        _local.job = self
        try:
            if not self.cancelled:
                self.result = self._call()
        except BaseException as error:
            self.error = error
        finally:
            _local.job = None
            self.done = True
            self._bell.put(None)

    def ask(self, request: Any) -> Any:
        """Waits until a request of this job has been carried out; returns the answer."""
        answer = None
        if not self.cancelled:
            self.request = request
            self._bell.put(None)
            answer = self.answers.get()
        if self.cancelled:
            raise RuntimeError("interrupted: another env has raised, or Ctrl-C")
        return answer


def current() -> Job | None:
    """The job that runs in the calling thread, if one does."""
    return getattr(_local, "job", None)


class Meeting:
    """Threads for jobs, and the place where their requests meet."""

    def __init__(self, num_jobs: int, carry_out: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """Starts the threads.

        Args:
            num_jobs: The most there are at a time.
            carry_out: Takes the requests of all jobs that ask, and returns an answer to each.
        """
        self._carry_out = carry_out
        self._jobs: list[Job] = []  # of a call that has not come to its end
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        for _ in range(num_jobs):
            queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            thread = threading.Thread(target=_work, args=[queue], name="shmvec-wrapped-env")
            thread.daemon = True
            self._queues.append(queue)
            self._threads.append(thread)
            thread.start()

    def run(self, calls: Mapping[int, Callable[[], Any]]) -> dict[int, Job]:
        """Makes calls, each in a thread.

        Args:
            calls: By number; at most ``num_jobs``.

        Returns:
            What each has returned or raised.

        Raises:
            BaseException: What ``carry_out`` raises, KeyboardInterrupt included; all calls have
                come to an end.
        """
        self._interrupt()  # what a call has left that was interrupted twice
        bell: SimpleQueue[None] = SimpleQueue()
        jobs = {number: Job(call, bell) for number, call in calls.items()}
        self._jobs = active = list(jobs.values())
        try:
            for queue, job in zip(self._queues, active, strict=False):
                queue.put(job.run)
            while active:
                for _ in active:  # each rings once: it asks for something, or is done
                    bell.get()
                active = [job for job in active if not job.done]
                answers = self._carry_out([job.request for job in active]) if active else []
                for job, answer in zip(active, answers, strict=True):
                    job.answers.put(answer)
            self._jobs = []
        except BaseException:
            self._interrupt()
            raise
        return jobs

    def _interrupt(self) -> None:
        """Brings all jobs to their end."""
        if not self._jobs:
            return
        for job in self._jobs:
            job.cancelled = True
            job.answers.put(None)
        over: SimpleQueue[None] = SimpleQueue()
        for queue in self._queues:  # what comes after the jobs is run when they are done
            queue.put(partial(over.put, None))
        for _ in self._queues:
            over.get()
        self._jobs = []

    def close(self) -> None:
        """Ends the threads."""
        self._interrupt()
        self.__del__()
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        """Ends the threads, if that was forgotten."""
        for queue in self._queues:
            queue.put(None)


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := queue.get()) is not None:
        call()
        del call
