"""Envs of a worker whose ``step`` or ``reset`` is a coroutine function: tasks of one event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic_ns
from typing import Any

from shmvec._core import end_forks
from shmvec._processes.overlap import Alarm, Executor, Outcome, Result, Work
from shmvec.faults import EnvTimeoutError

__all__ = ["EnvCoroutines"]

_GRACE_S = 0.01  # for tasks that are late because another one has not given up the loop
_PATIENCE_S = 1.0  # for tasks to heed that they are cancelled


class EnvCoroutines(Executor):
    """One event loop, in the worker's main thread."""

    def __init__(self, most: int | None, num_envs: int) -> None:
        """Makes the event loop; the arguments are those of an Executor."""
        super().__init__(most, num_envs)
        self._events = asyncio.new_event_loop()
        self._tasks: dict[Work, asyncio.Task[None]] = {}
        self._overdue: dict[Work, EnvTimeoutError] = {}
        self._rung = asyncio.Event()
        self._broken: BaseException | None = None
        self._serves = False

    def run_all(self, calls: Mapping[int, Callable[[], Any]]) -> dict[int, Result]:
        """Makes calls, and waits for all that they return and that can be awaited, at once."""
        tasks = {lane: self._events.create_task(_awaited(call)) for lane, call in calls.items()}
        ended: BaseException | None = None
        if tasks:
            try:
                self._events.run_until_complete(asyncio.wait(tasks.values()))
            except BaseException as error:  # an env has stopped the loop, or cancelled all tasks
                ended = error
        return {
            lane: task.result() if task.done() and not task.cancelled() else (None, ended)
            for lane, task in tasks.items()
        }

    def launch(self, work: Work) -> None:
        """Makes a task of work."""
        self._tasks[work] = self._events.create_task(self._task(work))

    async def _task(self, work: Work) -> None:
        value, error = await _awaited(work.function)
        end_forks()
        del self._tasks[work]
        error = self._overdue.pop(work, error)
        self._take(work, (value, error, (work.began, monotonic_ns())))

    def deliver(self, work: Work, outcome: Outcome) -> None:
        """Has ``ended`` called soon."""
        self._events.call_soon(self._take, work, outcome)

    def _take(self, work: Work, outcome: Outcome) -> None:
        if not self._serves:  # this worker is about to end
            return
        try:
            self.ended(work, outcome)
        except BaseException as error:  # not an env's: the worker cannot go on
            self._broken = error
        if self._broken is not None or self.loop.in_progress == 0:
            self._rung.set()

    def abandon(self, work: Work) -> None:
        """Cancels work."""
        if work in self._tasks:
            self._events.call_soon(self._tasks[work].cancel)  # not before its first step

    def interrupt(self, limits: tuple[float | None, float | None]) -> None:
        """Cancels what takes longer than its limit; a signal's handler may call it."""
        # Later: what has only waited for its turn is done by then.
        later = partial(self._events.call_later, _GRACE_S, self._cancel, *limits)
        self._events.call_soon_threadsafe(later)

    def _cancel(self, step_limit: float | None, reset_limit: float | None) -> None:
        limits = {"step": step_limit, "reset": reset_limit}
        now = monotonic_ns()
        for running in list(self._tasks):
            limit = limits.get(running.what)
            if limit is None or now - running.began <= 1e9 * limit:
                continue
            # A reset may wait for one that is made ahead.
            waiting = [work for work in (running, *running.copy.queue) if work.i >= 0][:1]
            for work in waiting:
                error = EnvTimeoutError(self._first_env + work.i, running.what, limit)
                self.abandon(running)
                if work is running:
                    self._overdue[work] = error
                else:
                    running.copy.queue.remove(work)
                    self.deliver(work, (None, error, (running.began, now)))

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one to close, or until the parent is gone."""
        self._events.add_reader(alarm.fileno(), self._rung.set)
        self._serves = True
        try:
            self._events.run_until_complete(self._serve(alarm))
        finally:  # before the descriptor is closed, whose number a socket of an env may get
            self._serves = False
            self._events.remove_reader(alarm.fileno())
            self._events.run_until_complete(_cancelled(set(self._tasks.values())))

    async def _serve(self, alarm: Alarm) -> None:
        loop, rung, is_open = self.loop, self._rung, True
        while is_open or loop.in_progress:
            is_open = is_open and loop.serve_pending()
            try:
                if loop.sleep() and (is_open or loop.in_progress):
                    await rung.wait()
            finally:
                loop.awake()
            rung.clear()
            alarm.silence()
            if self._broken is not None:
                raise self._broken
            if not alarm.parent_alive():
                return
        for copies in self._copies:  # resets that are made ahead
            for copy in copies:
                copy.queue.clear()
        await _cancelled(set(self._tasks.values()))

    def end(self) -> None:
        """Closes the event loop, once the envs are closed."""
        self._events.run_until_complete(_cancelled(asyncio.all_tasks(self._events)))
        self._events.run_until_complete(self._events.shutdown_asyncgens())
        self._events.close()


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancels tasks, and waits for a moment for them to end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_PATIENCE_S)


async def _awaited(call: Callable[[], Any]) -> Result:
    """Makes a call, and waits for what it returns if that can be awaited."""
    try:
        value = call()
        return await value if inspect.isawaitable(value) else value, None
    except BaseException as error:
        return None, error
