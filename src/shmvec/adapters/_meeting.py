"""Wrapped envs that are stepped together: each in a thread, until their requests meet.

A wrapper around an env handle is the user's code, and runs here; what it asks the env below is not
sent by its thread. The thread waits until all the others have asked something or are done; then the
caller's thread carries all requests out at once.

Ctrl-C may come anywhere in the caller's thread. So that thread takes no lock: what jobs have come
to is in attributes, each written by one thread, and what wakes is a queue's put, which is done as a
whole or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

_local = threading.local()


class Job:
    """Something that is done in a thread, and may ask its meeting for something.

    Attributes:
        result: What it has returned.
        error: What it has raised, or None.
    """

    def __init__(self, call: Callable[[], Any], bell: SimpleQueue[None]) -> None:
        """Takes what is called, and what is rung when it asks for something or is done."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.request: Any = None
        self.num_asked = self.num_answered = 0  # by the job, and by the caller's thread
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.cancelled = self._begun = self._done = False
        self._call = call
        self._bell = bell

    def run(self) -> None:
        """Runs the call, in the job's thread."""
        self._begun = True  # before it looks whether it is cancelled
        _local.job = self
        try:
            if not self.cancelled:
                self.result = self._call()
        except BaseException as error:
            self.error = error
        finally:
            _local.job = None
            self._done = True
            self._bell.put(None)

    def ask(self, request: Any) -> Any:
        """Waits until a request of this job has been carried out; returns the answer."""
        self.request = request
        self.num_asked += 1
        self._bell.put(None)
        return self.answers.get()

    def reply(self, answer: Any) -> None:
        """Answers its request; where Ctrl-C comes in between, it is answered once more."""
        number = self.num_asked
        self.answers.put(answer)
        self.num_answered = number

    @property
    def is_asking(self) -> bool:
        """Whether the job waits for an answer."""
        return self.num_asked > self.num_answered and not self._done

    @property
    def is_done(self) -> bool:
        """Whether the job has ended, or will never begin."""
        return self._done or (self.cancelled and not self._begun)


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
        self._jobs: list[Job] = []
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._queues: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(num_jobs)]
        self._threads = [
            threading.Thread(target=_work, args=[queue], name="shmvec-wrapped-env", daemon=True)
            for queue in self._queues
        ]
        for thread in self._threads:
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
        self._break_off()  # what a call has left that was interrupted twice
        jobs = {number: Job(call, self._bell) for number, call in calls.items()}
        self._jobs = list(jobs.values())
        try:
            for queue, job in zip(self._queues, self._jobs, strict=False):
                queue.put(job)
            while asking := self._asking():
                answers = self._carry_out([job.request for job in asking])
                for job, answer in zip(asking, answers, strict=True):
                    job.reply(answer)
        except BaseException:
            self._break_off()
            raise
        return jobs

    def _asking(self) -> list[Job]:
        """Waits until each job asks for something or is done; returns those that ask."""
        while not all([job.is_asking or job.is_done for job in self._jobs]):
            self._bell.get()
        return [job for job in self._jobs if job.is_asking]

    def _break_off(self) -> None:
        """Brings all jobs to their end."""
        for job in self._jobs:
            job.cancelled = True
        while asking := self._asking():
            for job in asking:
                job.reply(RuntimeError("broken off: another env has raised, or Ctrl-C"))

    def close(self) -> None:
        """Ends the threads."""
        self._break_off()
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        """Ends the threads, if that was forgotten."""
        for queue in self._queues:
            queue.put(None)


def _work(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job
