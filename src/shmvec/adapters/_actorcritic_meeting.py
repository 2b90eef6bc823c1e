"""Steps wrapped env handles together: each in a thread, whose requests are carried out at once.

A wrapper around an env handle is the user's code, and runs in the parent. A request that it makes
to the env below is not sent by its thread: the thread waits until every other thread has made a
request or is done; then the caller's thread carries out all requests at once.

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
    """A call that is made in a thread, and may make requests to its meeting.

    Attributes:
        result: What the call has returned.
        error: What the call has raised, or None.
        request: The call's request that is not yet carried out.
        answers: The queue on which the call's thread waits for an answer.
        cancelled: Whether requests are refused, so that the call ends.
        done: Whether the call has ended.
    """

    def __init__(self, call: Callable[[], Any], bell: SimpleQueue[None]) -> None:
        """Takes the call, and the queue that is notified of its requests and of its end."""
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
            num_jobs: Number of jobs at a time, at most.
            carry_out: Takes the requests of all jobs that wait, and returns an answer to each.
        """
        self._carry_out = carry_out
        self._jobs: list[Job] = []  # jobs of a `run` that has not ended
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
            calls: The calls, by number; at most ``num_jobs``.

        Returns:
            The job of each call, with what the call has returned or raised.

        Raises:
            BaseException: What ``carry_out`` raises, KeyboardInterrupt included; all calls have
                ended by then.
        """
        self._interrupt()  # ends jobs of an earlier `run` that was interrupted twice
        bell: SimpleQueue[None] = SimpleQueue()
        jobs = {number: Job(call, bell) for number, call in calls.items()}
        self._jobs = active = list(jobs.values())
        try:
            for queue, job in zip(self._queues, active, strict=False):
                queue.put(job.run)
            while active:
                for _ in active:  # each job notifies once: of a request, or of its end
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
        """Refuses the requests of all jobs until the jobs have ended."""
        if not self._jobs:
            return
        for job in self._jobs:
            job.cancelled = True
            job.answers.put(None)
        over: SimpleQueue[None] = SimpleQueue()
        for queue in self._queues:  # a call queued behind a job runs once the job has ended
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
        """Ends the threads of a meeting that was not closed."""
        for queue in self._queues:
            queue.put(None)


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := queue.get()) is not None:
        call()
        del call
