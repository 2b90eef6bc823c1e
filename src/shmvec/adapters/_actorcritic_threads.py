"""Steps wrapped env handles together: each in a thread, whose requests are sent as one batch.

A wrapper around an env handle is the user's code, and runs in the parent. Its thread does not send
requests to the env below. It waits until every other thread has made a request or has ended; then
the caller's thread executes all requests at once.

Ctrl-C may come anywhere in the caller's thread. So that thread takes no locks, and only puts into
queues, which is atomic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

_local = threading.local()


class Job:
    """A call in a thread, which may make requests."""

    def __init__(self, call: Callable[[], Any], notifications: SimpleQueue[None]) -> None:
        """Prepares a call; ``notifications`` gets an item for each request, and for the end."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.request: Any = None  # not yet executed
        self.answers: SimpleQueue[Any] = SimpleQueue()  # where the call waits for an answer
        self.cancelled = False  # whether requests are refused, so that the call ends
        self.done = False  # whether the call has ended
        self._call = call
        self._notifications = notifications

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
            self._notifications.put(None)

    def ask(self, request: Any) -> Any:
        """Waits until a request of this job has been executed; returns the answer."""
        answer = None
        if not self.cancelled:
            self.request = request
            self._notifications.put(None)
            answer = self.answers.get()
        if self.cancelled:
            raise RuntimeError("interrupted by an exception of another env, or by Ctrl-C")
        return answer


def current_job() -> Job | None:
    """The job of the calling thread; None if it has none."""
    return getattr(_local, "job", None)


class BatchingThreads:
    """Threads that run jobs, whose requests are executed in batches."""

    def __init__(self, num_jobs: int, execute: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """Starts the threads.

        Args:
            num_jobs: The largest number of jobs at a time.
            execute: Takes the requests of all waiting jobs, and returns an answer to each.
        """
        self._execute = execute
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
            The job of each call, with its result or exception.

        Raises:
            BaseException: ``execute`` has raised it, or Ctrl-C has; all calls have ended.
        """
        self._interrupt()  # ends jobs of an earlier `run` that was interrupted twice
        notifications: SimpleQueue[None] = SimpleQueue()
        jobs = {number: Job(call, notifications) for number, call in calls.items()}
        self._jobs = active = list(jobs.values())
        try:
            for queue, job in zip(self._queues, active, strict=False):
                queue.put(job.run)
            while active:
                for _ in active:  # each job notifies once, of a request or of its end
                    notifications.get()
                active = [job for job in active if not job.done]
                answers = self._execute([job.request for job in active]) if active else []
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
        drained: SimpleQueue[None] = SimpleQueue()
        for queue in self._queues:  # this call runs after the job of the thread has ended
            queue.put(partial(drained.put, None))
        for _ in self._queues:
            drained.get()
        self._jobs = []

    def close(self) -> None:
        """Ends the threads."""
        self._interrupt()
        self.__del__()
        for thread in self._threads:
            thread.join()

    def __del__(self) -> None:
        """Ends the threads, if ``close`` was not called."""
        for queue in self._queues:
            queue.put(None)


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := queue.get()) is not None:
        call()
        del call
