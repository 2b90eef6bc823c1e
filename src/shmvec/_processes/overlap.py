"""Executors call the envs of a worker: one after the other, in a thread each, or as coroutines.

An ``Executor`` calls them in the thread that serves requests. An ``OverlappingExecutor`` makes the
calls that the worker's loop begins, and gives the loop replays of these calls in place of the envs
(``_core/worker.pyx``). ``EnvThreads`` keeps a thread for each env, in which the env is built, used
and closed. ``event_loop`` has the executor of envs whose methods are coroutine functions.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic_ns, process_time_ns
from typing import Any

import gymnasium as gym

from shmvec._core import Channel, OverlappedLoop, WorkerLoop, deep_copy, end_forks
from shmvec._pickling import new_copy
from shmvec.faults import EnvTimeoutError

__all__ = [
    "Alarm",
    "EnvThread",
    "EnvThreads",
    "Executor",
    "Outcome",
    "Overlap",
    "OverlappingExecutor",
    "Replay",
    "Result",
    "Work",
    "try_call",
    "is_asynchronous",
    "unwrap",
]

Overlap = int | str | None

# Each thread that waits for the GIL wakes once in a switch interval and finds nothing to do: 500
# threads and the default interval of 5 ms took two thirds of a core.
_SWITCH_INTERVAL_PER_THREAD_S = 0.0001
_EVENTFD_ONE = (1).to_bytes(8, "little")  # what is written to an eventfd
_CPU_SHARE_LIMIT = 0.7  # of a core; a process that uses less can have more envs busy at once


class Alarm:
    """Wakes a sleeping worker when its descriptor is written to, or when the parent is gone."""

    def __init__(
        self, parent_alive: Callable[[], bool], descriptor: int, parent: int, channel: Channel
    ) -> None:
        """Takes the alarm's descriptor, and what shows that the parent or the channel is gone."""
        self.parent_alive = parent_alive
        self._descriptor = descriptor
        self._epoll = select.epoll()
        self._epoll.register(parent, select.EPOLLIN)
        self._epoll.register(channel, 0)
        self._epoll.register(descriptor, select.EPOLLIN)

    def ring(self) -> None:
        """Wakes the worker; any thread may call it."""
        os.write(self._descriptor, _EVENTFD_ONE)

    def doze(self) -> None:
        """Sleeps until it rings, or the parent or the channel is gone."""
        self._epoll.poll()
        self.silence()

    def silence(self) -> None:
        """Resets it after it has rung."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)

    def fileno(self) -> int:
        """A descriptor that is readable when ``doze`` would return at once."""
        return self._epoll.fileno()


def is_asynchronous(env: Any) -> bool:
    """Whether the ``step`` or ``reset`` of an env, or of an env within, is a coroutine function.

    Args:
        env: The env; its class; or a function that makes it, which may be a coroutine function.
    """
    if isinstance(env, partial):
        env = env.func
    if inspect.iscoroutinefunction(env):
        return True
    while env is not None:
        methods = getattr(env, "step", None), getattr(env, "reset", None)
        if any(map(inspect.iscoroutinefunction, methods)):
            return True
        env = env.env if isinstance(env, gym.Wrapper) else None
    return False


Result = tuple[Any, BaseException | None]  # what a call has returned, and raised
# What a call has returned, and raised, and when it began and ended, in ns of the monotonic clock.
Outcome = tuple[Any, BaseException | None, tuple[int, int]]


@dataclass(eq=False)
class Work:
    """A call of an env.

    Attributes:
        i: The place of the env among the worker's.
        operation: "step", "reset" or "call".
        function: What is called.
        start_ns: When it began.
    """

    i: int
    operation: str
    function: Callable[[], Any]
    start_ns: int


class Replay:
    """Stands for an env whose calls were made already: returns and raises what they did.

    Attributes:
        outcomes: The outcomes of its calls.
        span: When its last step began and ended.
        reset_span: When its last reset began and ended.
    """

    def __init__(self) -> None:
        """Prepares for an env that has made no call yet."""
        self.outcomes: deque[Outcome] = deque()
        self.span = self.reset_span = (0, 0)

    def step(self, action: Any) -> Any:
        """Returns what the env's step has returned."""
        value, error, self.span = self.outcomes.popleft()
        return unwrap((value, error))

    def reset(self, **arguments: Any) -> Any:
        """Returns what the env's reset has returned."""
        value, error, self.reset_span = self.outcomes.popleft()
        return unwrap((value, error))


def try_call(call: Callable[[], Any]) -> Result:
    """Makes a call; returns its value and its exception, one of which is None."""
    try:
        return call(), None
    except BaseException as error:
        return None, error


def unwrap(result: Result) -> Any:
    """Returns what a call has returned, or raises what it has raised."""
    value, error = result
    if error is None:
        return value
    try:
        raise error
    finally:
        del error, result  # otherwise its traceback would keep it alive


class Executor:
    """Calls the envs of a worker one after the other, in the thread that serves requests.

    Attributes:
        build_concurrency: How many envs may be built at once.
        awaits: Whether it awaits what calls return.
        loop: The worker's loop.
    """

    build_concurrency = 1
    awaits = False

    def __init__(self, interrupts: bool = True) -> None:
        """``interrupts`` says whether an env that takes too long is interrupted in this thread."""
        self._interrupts = interrupts
        self.loop: Any = None

    def run_all(
        self, calls: Mapping[int, Callable[[], Any]], timeout_after_error: float | None = None
    ) -> dict[int, Result]:
        """Makes calls where the envs live, and waits for all of them.

        Args:
            calls: The calls, by the envs' places; several may be made at once.
            timeout_after_error: Seconds for the others once one has raised; None: no limit. The
                results leave out those that take longer.
        """
        results = {}
        for i, call in calls.items():
            results[i] = try_call(call)
            end_forks()
        return results

    def make_loop(
        self, envs: Sequence[Any], steppers: Sequence[Any], **arguments: Any
    ) -> WorkerLoop:
        """Makes the worker's loop.

        Args:
            envs: The envs.
            steppers: The objects that have the envs' ``step``.
            **arguments: The other arguments of the loop's class.
        """
        self.loop = WorkerLoop(envs=envs, steppers=steppers, **arguments)
        return self.loop

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one asks to close, or until the parent is gone."""
        self.loop.serve(alarm.parent_alive, alarm.doze)

    def interrupt(self, limits: tuple[float | None, float | None]) -> None:
        """Interrupts a call that takes longer than its limit; called by a signal's handler."""
        busy = self.loop.current_operation() if self._interrupts and self.loop is not None else None
        if busy is not None:
            env, operation, elapsed = busy
            limit = dict(zip(("step", "reset"), limits, strict=True)).get(operation)
            if limit is not None and elapsed > limit:
                raise EnvTimeoutError(env, operation, limit)

    def end(self) -> None:
        """Ends threads or the event loop, once the envs are closed."""


class OverlappingExecutor(Executor):
    """Has several envs busy at once.

    Attributes:
        replays: A replay of each env.
    """

    def __init__(self, overlap: int | str) -> None:
        """``overlap`` is how many envs may be busy at once; "auto": it adapts."""
        super().__init__(interrupts=False)
        self._adapts = isinstance(overlap, str)
        self._max_busy = 1 if isinstance(overlap, str) else overlap
        self.build_concurrency = sys.maxsize if isinstance(overlap, str) else overlap
        self._queue: deque[tuple[int, str, Any]] = deque()
        self._busy: set[int] = set()
        # When a measurement began, by two clocks, and how many envs must still end during it.
        self._measurement: tuple[int, int, int] | None = None
        self.replays: list[Replay] = []

    def make_loop(
        self, envs: Sequence[Any], steppers: Sequence[Any], **arguments: Any
    ) -> WorkerLoop:
        """Makes the worker's loop, over replays."""
        self._envs, self._steppers = envs, steppers
        self._first_env: int = arguments["first_env"]
        self._resets_in_step: bool = arguments["autoreset"].in_step
        self.replays = [Replay() for _ in envs]
        self.loop = OverlappedLoop(envs=self.replays, steppers=self.replays, **arguments)
        self.loop.set_executor(self)
        return self.loop

    # ---- which envs are busy -----------------------------------------------------------------

    def start(self, i: int, what: str, argument: Any) -> None:
        """Has an env begin a call, now or when others have ended theirs."""
        self._queue.append((i, what, argument))
        self._begin_queued()

    def _begin_queued(self) -> None:
        while self._queue and len(self._busy) < self._max_busy:
            i, what, argument = self._queue.popleft()
            self._busy.add(i)
            self.replays[i].outcomes.clear()
            self._begin(i, what, argument)
        if self._adapts and self._queue and self._measurement is None:
            self._measurement = monotonic_ns(), process_time_ns(), self._max_busy

    def _finish(self, i: int, outcome: Outcome) -> None:
        self._busy.discard(i)
        if self._adapts:
            self._adapt_max_busy()
        self._begin_queued()
        self.loop.finish_env(i, outcome[:2])

    def _adapt_max_busy(self) -> None:
        """Doubles the number of envs at once if others wait and the process uses little of a core.

        A measurement ends when as many envs have ended as may be busy at once, or when none waits.
        """
        if self._measurement is None:
            return
        began, used, left = self._measurement
        self._measurement = began, used, left - 1
        if left > 1 and self._queue:
            return
        if process_time_ns() - used < _CPU_SHARE_LIMIT * (monotonic_ns() - began):
            self._max_busy = min(2 * self._max_busy, len(self._envs))
        self._measurement = None

    # ---- what they do ------------------------------------------------------------------------

    def _begin(self, i: int, what: str, argument: Any) -> None:
        if what == "step":
            function = partial(self._steppers[i].step, argument)
        elif what == "reset":
            function = partial(_reset_env, self._envs[i], argument)
        else:
            function = partial(argument.run, self._envs[i], self._first_env + i)
        work = Work(i, what, function, monotonic_ns())
        self.loop.begin_env(i, what, work.start_ns)
        self.launch(work)

    def launch(self, work: Work) -> None:
        """Has a call made where its env lives; then the loop's thread calls ``finish_work``."""
        raise NotImplementedError

    def finish_work(self, work: Work, outcome: Outcome) -> None:
        """Takes the outcome of a call, in the loop's thread."""
        i = work.i
        self.loop.end_env(i)
        if work.operation != "call":
            self.replays[i].outcomes.append(outcome)
        if work.operation == "step" and self._resets_in_step and _ends_episode(outcome):
            try:
                # These are copied, because an env may reuse its arrays in reset().
                value = outcome[0]
                value = deep_copy(value[0]), *value[1:4], deep_copy(value[4])
            except Exception:
                pass  # the loop raises the same error, and answers with it
            else:
                self.replays[i].outcomes[0] = value, *outcome[1:]
                self._begin(i, "reset", self.loop.next_reset_arguments(i))
                return
        self._finish(i, outcome)


def _reset_env(env: Any, arguments: dict[str, Any]) -> Any:
    """Resets an env with copies of the options, or returns the reset to be awaited."""
    return env.reset(**{name: new_copy(value) for name, value in arguments.items()})


def _ends_episode(outcome: Outcome) -> bool:
    """Whether the outcome of a step says that an episode is over."""
    value, error, _ = outcome
    try:
        return error is None and len(value) == 5 and bool(value[2] or value[3])
    except Exception:  # the loop reports what is wrong with it
        return False


class EnvThread:
    """A thread in which an env is built, used and closed."""

    _count = 0

    def __init__(self, begin: Callable[[], object] = lambda: None) -> None:
        """Starts the thread, which calls ``begin`` first."""
        EnvThread._count += 1
        sys.setswitchinterval(
            max(sys.getswitchinterval(), _SWITCH_INTERVAL_PER_THREAD_S * EnvThread._count)
        )
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._calls.put(partial(try_call, begin))
        # It is a daemon, because the process must be able to end while an env hangs.
        threading.Thread(
            target=_run_calls, args=(self._calls,), name="shmvec env", daemon=True
        ).start()

    def put(self, call: Callable[[], object]) -> None:
        """Queues a call, which must not raise."""
        self._calls.put(call)

    def run(self, call: Callable[[], Any]) -> Any:
        """Queues a call, and waits for its result."""
        results: SimpleQueue[Result] = SimpleQueue()  # faster than a future
        self._calls.put(lambda: results.put(try_call(call)))
        return unwrap(results.get())

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queues a call; returns a future of its result."""
        future: Future[Any] = Future()
        self._calls.put(partial(_set_future, future, call))
        return future

    def end(self) -> None:
        """Ends the thread after the calls that are queued."""
        self._calls.put(None)


def _run_calls(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        end_forks()
        del call  # so that its objects are freed before the next call comes


def _set_future(future: Future[Any], call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        value, error = try_call(call)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
            del error, future  # otherwise its traceback would keep it alive


class EnvThreads(OverlappingExecutor):
    """A thread for each env.

    Attributes:
        threads: The threads.
    """

    def __init__(
        self, overlap: int | str, num_envs: int, begin: Callable[[], object] = lambda: None
    ) -> None:
        """Starts ``num_envs`` threads, each of which calls ``begin`` first."""
        super().__init__(overlap)
        self.threads = [EnvThread(begin) for _ in range(num_envs)]
        self._outcomes: deque[tuple[Work, Outcome]] = deque()
        self._alarm: Alarm

    def run_all(
        self, calls: Mapping[int, Callable[[], Any]], timeout_after_error: float | None = None
    ) -> dict[int, Result]:
        """Makes calls in the envs' threads, at once, and waits for all of them.

        An env that is still busy with an earlier call gets an error instead of being waited for.
        """
        futures = {i: self.threads[i].submit(call) for i, call in calls.items()}
        if timeout_after_error is not None:
            wait(futures.values(), return_when=FIRST_EXCEPTION)
            wait(futures.values(), timeout_after_error)
            return {i: try_call(future.result) for i, future in futures.items() if future.done()}
        wait(futures[i] for i in futures.keys() - self._busy)
        error = TimeoutError("it was not closed: what it was asked before does not end")
        return {
            i: (None, error) if future.cancel() else try_call(future.result)
            for i, future in futures.items()
        }

    def launch(self, work: Work) -> None:
        """Has the env's thread make the call."""
        self.threads[work.i].put(partial(self._run_work, work))

    def _run_work(self, work: Work) -> None:
        value, error = try_call(work.function)
        end_forks()  # before the alarm rings
        if error is None and inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()  # otherwise Python would warn that it was never awaited
            error = TypeError(
                f"{work.operation}() returned something to be awaited, and the env's own step and "
                "reset are no coroutine functions: it lives in a thread, without an event loop"
            )
        self._outcomes.append((work, (value, error, (work.start_ns, monotonic_ns()))))
        self._alarm.ring()

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one asks to close, or until the parent is gone."""
        self._alarm = alarm
        loop, outcomes, is_open = self.loop, self._outcomes, True
        while is_open or loop.num_busy:
            while outcomes:
                self.finish_work(*outcomes.popleft())
            is_open = is_open and loop.serve_pending()
            try:
                if loop.announce_sleep() and not outcomes and (is_open or loop.num_busy):
                    alarm.doze()
            finally:
                loop.end_sleep()
            if not alarm.parent_alive():
                return

    def end(self) -> None:
        """Ends the threads, once the envs are closed."""
        for thread in self.threads:
            thread.end()
