"""Runs a worker's envs whose ``step`` or ``reset`` is a coroutine function, in one event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic_ns
from typing import Any

from shmvec._core import end_forks
from shmvec._processes.overlap import Alarm, Outcome, OverlappingExecutor, Result, Work
from shmvec.faults import EnvTimeoutError

__all__ = ["EnvCoroutines", "try_await", "cancel_and_wait"]

_INTERRUPT_DELAY_S = 0.01  # for tasks that are only late because another one has held the loop
_CANCEL_TIMEOUT_S = 1.0  # for cancelled tasks to end


class EnvCoroutines(OverlappingExecutor):
    """One event loop, in the worker's main thread."""

    awaits = True

    def __init__(self, overlap: int | str) -> None:
        """Makes the event loop; ``overlap`` is that of ``OverlappingExecutor``."""
        super().__init__(overlap)
        self._event_loop = asyncio.new_event_loop()
        self._tasks: dict[Work, asyncio.Task[None]] = {}
        self._timeouts: dict[Work, EnvTimeoutError] = {}
        self._wake_event = asyncio.Event()
        self._error: BaseException | None = None
        self._is_serving = False

    def run_all(
        self, calls: Mapping[int, Callable[[], Any]], timeout_after_error: float | None = None
    ) -> dict[int, Result]:
        """Makes calls, and waits at once for all that they return and that can be awaited."""
        tasks = {i: self._event_loop.create_task(try_await(call)) for i, call in calls.items()}
        late: set[asyncio.Task[Result]] = set()
        loop_error: BaseException | None = None
        if tasks:
            try:
                wait = _wait_for_tasks(set(tasks.values()), timeout_after_error)
                late = self._event_loop.run_until_complete(wait)
            except BaseException as error:  # an env has stopped the loop, or cancelled all tasks
                loop_error = error
        return {
            i: task.result() if task.done() and not task.cancelled() else (None, loop_error)
            for i, task in tasks.items()
            if task not in late
        }

    def launch(self, work: Work) -> None:
        """Makes a task of the call."""
        self._tasks[work] = self._event_loop.create_task(self._run_work(work))

    async def _run_work(self, work: Work) -> None:
        value, error = await try_await(work.function)
        del self._tasks[work]
        error = self._timeouts.pop(work, error)
        self._finish_work(work, (value, error, (work.start_ns, monotonic_ns())))

    def _finish_work(self, work: Work, outcome: Outcome) -> None:
        if not self._is_serving:  # the worker is about to end
            return
        try:
            self.finish_work(work, outcome)
        except BaseException as error:  # no env has raised this, so the worker cannot go on
            self._error = error
        if self._error is not None or self.loop.num_busy == 0:
            self._wake_event.set()

    def interrupt(self, limits: tuple[float | None, float | None]) -> None:
        """Cancels calls that take longer than their limit; a signal's handler may call this."""
        # This is done later, because tasks that have only waited for their turn are done by then.
        later = partial(self._event_loop.call_later, _INTERRUPT_DELAY_S, self._cancel, *limits)
        self._event_loop.call_soon_threadsafe(later)

    def _cancel(self, step_limit: float | None, reset_limit: float | None) -> None:
        limits = {"step": step_limit, "reset": reset_limit}
        now = monotonic_ns()
        for work, task in self._tasks.items():
            limit = limits.get(work.operation)
            if limit is not None and now - work.start_ns > 1e9 * limit:
                env = self._first_env + work.i
                self._timeouts[work] = EnvTimeoutError(env, work.operation, limit)
                self._event_loop.call_soon(task.cancel)  # so the task has begun before

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one asks to close, or until the parent is gone."""
        self._event_loop.add_reader(alarm.fileno(), self._wake_event.set)
        self._is_serving = True
        try:
            self._event_loop.run_until_complete(self._serve(alarm))
        finally:  # the descriptor is closed later, and a socket of an env may get its number
            self._is_serving = False
            self._event_loop.remove_reader(alarm.fileno())
            self._event_loop.run_until_complete(cancel_and_wait(set(self._tasks.values())))

    async def _serve(self, alarm: Alarm) -> None:
        loop, rung, is_open = self.loop, self._wake_event, True
        while is_open or loop.num_busy:
            is_open = is_open and loop.serve_pending()
            try:
                if loop.announce_sleep() and (is_open or loop.num_busy):
                    await rung.wait()
            finally:
                loop.end_sleep()
            rung.clear()
            alarm.silence()
            if self._error is not None:
                raise self._error
            if not alarm.parent_alive():
                return

    def end(self) -> None:
        """Closes the event loop, once the envs are closed."""
        self._event_loop.run_until_complete(cancel_and_wait(asyncio.all_tasks(self._event_loop)))
        self._event_loop.run_until_complete(self._event_loop.shutdown_asyncgens())
        self._event_loop.close()


async def cancel_and_wait(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancels tasks, and waits a moment for them to end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)


async def _wait_for_tasks(
    tasks: set[asyncio.Task[Result]], timeout_after_error: float | None
) -> set[asyncio.Task[Result]]:
    """Waits for tasks; cancels and returns those that take too long after one has raised."""
    has_raised, pending = timeout_after_error is None, tasks
    while pending and not has_raised:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        has_raised = any(task.result()[1] is not None for task in done)
    if pending:
        _, pending = await asyncio.wait(pending, timeout=timeout_after_error)
        await cancel_and_wait(pending)
    return pending


async def try_await(call: Callable[[], Any]) -> Result:
    """Makes a call, and waits for what it returns if that can be awaited."""
    try:
        value = call()
        return await value if inspect.isawaitable(value) else value, None
    except BaseException as error:
        return None, error
    finally:
        end_forks()
