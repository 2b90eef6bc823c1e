"""Envs of a worker that are in ``step`` or ``reset`` at once: in a thread each, or as coroutines.

An executor runs what the worker's loop has envs begin, and gives it replays of the envs in their
place: see ``shmvec._core.overlap``. ``EnvThreads`` keeps a thread for each env, in which the env is
built, used and closed. ``EnvCoroutines`` has one event loop for envs whose ``step`` or ``reset`` is
a coroutine function.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import monotonic_ns, process_time_ns
from typing import TYPE_CHECKING, Any, Protocol

from shmvec._core import OverlappedLoop, copied, end_forks
from shmvec.faults import EnvTimeoutError

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Alarm", "EnvCoroutines", "EnvThreads", "Executor", "is_asynchronous"]

Overlap = int | str | None

_AWAKE = 0.7  # of a core: a process that uses less has room for more envs at once


class Alarm(Protocol):
    """What a worker that sleeps is woken by: its descriptor, and the end of its parent."""

    def ring(self) -> None:
        """Wakes the worker; any thread may call it."""

    def doze(self) -> None:
        """Sleeps until it rings, or the parent is gone."""

    def fileno(self) -> int:
        """A descriptor that is readable from when ``doze`` would return."""

    def silence(self) -> None:
        """Ends that, if it has rung."""

    def parent_alive(self) -> bool:
        """Whether the parent lives."""


def is_asynchronous(env: Any) -> bool:
    """Whether an env's ``step`` or ``reset`` is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (env.step, env.reset)))


class Replay:
    """An env whose calls were made already: returns what they returned, raises what they raised.

    Attributes:
        env: The env.
        stepper: What has its ``step``: the env, or its compiled wrappers.
        outcomes: What its calls have returned and raised, and when they began and ended.
        span: When its last step began and ended, in ns of the monotonic clock.
        reset_span: The same of its last reset.
    """

    def __init__(self, env: gym.Env[Any, Any], stepper: Any) -> None:
        """Takes an env that has made no call yet."""
        self.env, self.stepper = env, stepper
        self.outcomes: deque[tuple[Any, BaseException | None, tuple[int, int]]] = deque()
        self.span = self.reset_span = (0, 0)

    def step(self, action: Any) -> Any:
        """Returns what the env's step has returned."""
        value, error, self.span = self.outcomes.popleft()
        return value if error is None else _raise(error)

    def reset(self, **arguments: Any) -> Any:
        """Returns what the env's reset has returned."""
        value, error, self.reset_span = self.outcomes.popleft()
        return value if error is None else _raise(error)


def _raise(error: BaseException) -> Any:
    try:
        raise error
    finally:
        del error  # or its traceback would keep it alive


class Executor:
    """Runs the envs of a worker, at most so many at once.

    Attributes:
        loop: The worker's loop.
        replays: A replay of each env.
    """

    def __init__(self, overlap: Overlap, num_envs: int) -> None:
        """Takes the option ``overlap``; None: all envs at once."""
        self._num_envs = num_envs
        self._learns = overlap == "auto"
        self._most = 1 if self._learns else overlap if isinstance(overlap, int) else num_envs
        self._waiting: deque[tuple[int, str, Any]] = deque()
        self._num_running = 0
        # When a measurement began, in two clocks, and how many envs are still to end in it.
        self._window: tuple[int, int, int] | None = None
        self._doing: dict[int, tuple[str, int]] = {}  # what envs are in, and since when
        self.loop: OverlappedLoop
        self.replays: list[Replay] = []

    def prepare(self, envs: Sequence[gym.Env[Any, Any]], steppers: Sequence[Any] | None) -> None:
        """Makes the replays."""
        self.replays = [
            Replay(env, stepper) for env, stepper in zip(envs, steppers or envs, strict=True)
        ]

    def attach(self, loop: OverlappedLoop, first_env: int, resets_in_step: bool) -> None:
        """Takes the worker's loop, the index of its first env, and who resets an env."""
        self.loop, self._first_env, self._resets_in_step = loop, first_env, resets_in_step
        loop.execute_by(self)

    def start(self, i: int, what: str, argument: Any) -> None:
        """Has an env begin, now or when others have ended."""
        self._waiting.append((i, what, argument))
        self._begin_more()

    def _begin_more(self) -> None:
        while self._waiting and self._num_running < self._most:
            self._num_running += 1
            self._launch(*self._waiting.popleft())
        if self._learns and self._waiting and self._window is None:
            self._window = monotonic_ns(), process_time_ns(), self._most

    def _launch(self, i: int, what: str, argument: Any) -> None:
        """Runs ``_play`` where the env lives, and ``_ended`` in the loop's thread."""
        raise NotImplementedError

    def _ended(self, i: int, outcome: Any) -> None:
        self._num_running -= 1
        if self._learns:
            self._learn()
        self._begin_more()
        self.loop.finish(i, outcome)

    def _learn(self) -> None:
        """Doubles the number of envs at once if others wait and the process uses little of a core.

        It looks when as many have ended as may be busy at once, or when none waits any more.
        """
        if self._window is None:
            return
        began, used, left = self._window
        self._window = began, used, left - 1
        if left > 1 and self._waiting:
            return
        if process_time_ns() - used < _AWAKE * (monotonic_ns() - began):
            self._most = min(2 * self._most, self._num_envs)
        self._window = None

    async def _play(self, i: int, what: str, argument: Any) -> Any:
        """Makes a call of an env, and the reset that its step's mode wants; keeps what they return.

        Returns:
            The outcome of a "call"; None for others, whose outcomes are in the env's replay.
        """
        replay = self.replays[i]
        if what == "call":
            return (await self._made(i, what, argument, replay.env, self._first_env + i))[:2]
        replay.outcomes.clear()
        if what == "reset":
            replay.outcomes.append(await self._made(i, what, _reset, replay.env, argument))
            return None
        value, error, span = await self._made(i, what, replay.stepper.step, argument)
        if self._resets_in_step and error is None and _is_over(value):
            try:
                # Copies: an env may reuse its arrays in reset().
                value = copied(value[0]), *value[1:4], copied(value[4])
            except Exception:
                reset = None  # the loop finds the same error, which is the answer
            else:
                reset = await self._made(i, "reset", _reset, replay.env, {})
            replay.outcomes.append((value, error, span))
            if reset is not None:
                replay.outcomes.append(reset)
        else:
            replay.outcomes.append((value, error, span))
        return None

    async def _made(
        self, i: int, what: str, function: Callable[..., Any], *arguments: Any
    ) -> tuple[Any, BaseException | None, tuple[int, int]]:
        """Calls a function of an env; returns its value, its error, and when it began and ended."""
        value = error = None
        self.loop.begin(i, what)
        began = monotonic_ns()
        self._doing[i] = what, began
        try:
            value = function(*arguments)
            if inspect.isawaitable(value):
                value = await value
        except BaseException as raised:
            error = self._meant(i, raised)
        ended = monotonic_ns()
        end_forks()
        self.loop.end(i)
        try:
            return value, error, (began, ended)
        finally:
            del error  # or its traceback, in which this frame is, would keep it alive

    def _meant(self, i: int, error: BaseException) -> BaseException:
        """The error to report for what an env has raised."""
        return error

    # ---- the worker's life -------------------------------------------------------------------

    def run(self, i: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function where an env lives, and waits for it."""
        return function(*arguments)

    def interrupt(self, limits: tuple[float | None, float | None]) -> None:
        """Interrupts what takes longer than its limit, where that can be done."""

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one to close, or until the parent is gone."""
        raise NotImplementedError

    def end(self) -> None:
        """Ends what runs envs, once they are closed."""


def _reset(env: Any, arguments: dict[str, Any]) -> Any:
    return env.reset(**arguments)


def _is_over(value: Any) -> bool:
    """Whether the value of a step says that an episode is over."""
    try:
        return len(value) == 5 and bool(value[2] or value[3])
    except Exception:  # the loop finds what is wrong with it
        return False


class EnvThreads(Executor):
    """A thread for each env."""

    def __init__(self, overlap: Overlap, num_envs: int) -> None:
        """Starts a thread when its env is built."""
        super().__init__(overlap, num_envs)
        self._inboxes: list[SimpleQueue[Callable[[], None] | None]] = []
        self._outcomes: deque[tuple[int, Any]] = deque()
        self._alarm: Alarm

    def run(self, i: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in an env's thread, and waits for it."""
        answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def call() -> None:
            try:
                answer.put((function(*arguments), None))
            except BaseException as error:
                answer.put((None, error))

        while len(self._inboxes) <= i:
            inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            self._inboxes.append(inbox)
            name = f"env {len(self._inboxes) - 1} of this worker"
            # A daemon: the process must end although an env hangs.
            threading.Thread(target=_obey, args=(inbox,), name=name, daemon=True).start()
        self._inboxes[i].put(call)
        value, error = answer.get()
        if error is not None:
            raise error
        return value

    def _launch(self, i: int, what: str, argument: Any) -> None:
        self._inboxes[i].put(lambda: self._play_here(i, what, argument))

    def _play_here(self, i: int, what: str, argument: Any) -> None:
        try:
            self._play(i, what, argument).send(None)  # nothing in it waits
        except StopIteration as end:
            self._outcomes.append((i, end.value))
        self._alarm.ring()

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one to close, or until the parent is gone."""
        loop, outcomes, is_open = self.loop, self._outcomes, True
        self._alarm = alarm
        while is_open or loop.in_progress:
            while outcomes:
                self._ended(*outcomes.popleft())
            is_open = is_open and loop.serve_pending()
            try:
                if loop.sleep() and not outcomes and (is_open or loop.in_progress):
                    alarm.doze()
            finally:
                loop.awake()
            if not alarm.parent_alive():
                return
        loop.close()

    def end(self) -> None:
        """Ends the threads, once the envs are closed."""
        for inbox in self._inboxes:
            inbox.put(None)


def _obey(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
    """The main function of an env's thread."""
    while (call := inbox.get()) is not None:
        call()
        del call  # not kept until the next one comes


class EnvCoroutines(Executor):
    """One event loop, in the worker's main thread, for envs with coroutine functions."""

    def __init__(self, overlap: Overlap, num_envs: int) -> None:
        """Makes the event loop."""
        super().__init__(overlap, num_envs)
        self._events = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._overdue: dict[int, EnvTimeoutError] = {}
        self._rung = asyncio.Event()
        self._broken: BaseException | None = None

    def run(self, i: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function, and waits for what it returns if that can be awaited."""
        value = function(*arguments)
        if inspect.isawaitable(value):
            value = self._events.run_until_complete(_awaited(value))
        return value

    def _launch(self, i: int, what: str, argument: Any) -> None:
        self._overdue.pop(i, None)
        self._tasks[i] = self._events.create_task(self._task(i, what, argument))

    async def _task(self, i: int, what: str, argument: Any) -> None:
        try:
            outcome = await self._play(i, what, argument)
            del self._tasks[i]
            self._ended(i, outcome)
        except BaseException as error:  # not an env's: the worker cannot go on
            self._broken = error
        if self._broken is not None or self.loop.in_progress == 0:
            self._rung.set()

    def _meant(self, i: int, error: BaseException) -> BaseException:
        """The time limit for which an env was cancelled."""
        if isinstance(error, asyncio.CancelledError) and i in self._overdue:
            return self._overdue.pop(i)
        return error

    def interrupt(self, limits: tuple[float | None, float | None]) -> None:
        """Cancels what takes longer than its limit; a signal's handler may call it."""
        self._events.call_soon_threadsafe(self._cancel, *limits)

    def _cancel(self, step_limit: float | None, reset_limit: float | None) -> None:
        limits = {"step": step_limit, "reset": reset_limit}
        for i, task in self._tasks.items():
            what, began = self._doing.get(i, ("", 0))  # it may not have begun
            limit = limits.get(what)
            if limit is not None and monotonic_ns() - began > 1e9 * limit:
                self._overdue[i] = EnvTimeoutError(self._first_env + i, what, limit)
                task.cancel()

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one to close, or until the parent is gone."""
        self._events.run_until_complete(self._serve(alarm))

    async def _serve(self, alarm: Alarm) -> None:
        loop, rung, is_open = self.loop, self._rung, True
        self._events.add_reader(alarm.fileno(), rung.set)
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
        loop.close()

    def end(self) -> None:
        """Closes the event loop, once the envs are closed."""
        tasks = asyncio.all_tasks(self._events)
        for task in tasks:
            task.cancel()
        if tasks:
            self._events.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self._events.run_until_complete(self._events.shutdown_asyncgens())
        self._events.close()


async def _awaited(value: Any) -> Any:
    return await value
