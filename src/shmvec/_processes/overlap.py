"""Envs of a worker that are in ``step`` or ``reset`` at once: in a thread each, or as coroutines.

An executor runs what the worker's loop has envs begin, and gives it replays of the envs in their
place: see ``shmvec._core.overlap``. ``EnvThreads`` keeps a thread for each env, in which the env is
built, used and closed. ``EnvCoroutines`` has one event loop for envs whose ``step`` or ``reset`` is
a coroutine function.

With ``spare_envs=k`` an env of the vector env is played by k + 1 copies in turn: its episode n by
copy n mod (k + 1). As an episode begins, the copies of the next k episodes are reset, so that the
next one begins at once when it ends. What episodes show does not depend on whether they were ready.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import monotonic_ns, process_time_ns
from typing import Any, Protocol

import gymnasium as gym

from shmvec._core import OverlappedLoop, copied, end_forks
from shmvec.faults import EnvTimeoutError, restart_seed

__all__ = [
    "Alarm",
    "Copy",
    "EnvCoroutines",
    "EnvThreads",
    "Executor",
    "Outcome",
    "Overlap",
    "Replay",
    "Work",
    "called",
    "copies_of",
    "is_asynchronous",
    "refuse_records",
]

Overlap = int | str | None

_RECORDS = (
    gym.wrappers.NormalizeObservation,
    gym.wrappers.NormalizeReward,
    gym.wrappers.RecordVideo,
)
# Each thread that waits for the interpreter wakes once in a switch interval, to no avail: with 500
# of them and the default of 5 ms, two thirds of a core went into that.
_SWITCH_S = 0.0001  # a thread
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


Result = tuple[Any, BaseException | None]  # what a call has returned, and raised
# What a call has returned, and raised, and when it began and ended, in ns of the monotonic clock.
Outcome = tuple[Any, BaseException | None, tuple[int, int]]


@dataclass(eq=False)
class Copy:
    """An env: the only one in its place, or one of several that play its episodes in turn.

    Attributes:
        env: The env.
        stepper: What has its ``step``: the env, or its compiled wrappers.
        lane: Where it lives: its number among all copies.
        following: The copy that plays the episode after; None: it is the only one.
        promised: The episode, and its seed, for which it is or was reset ahead.
        ahead: The outcome of that.
    """

    env: Any
    stepper: Any
    lane: int
    following: Copy | None = None
    promised: tuple[int, int | None] | None = None
    ahead: Outcome | None = None

    def reset(self, promised: tuple[int, int | None] | None, arguments: dict[str, Any]) -> Any:
        """Takes the reset that was made ahead for this episode; else makes it."""
        ahead, self.ahead = self.ahead, None
        if ahead is None or promised is None or promised != self.promised:
            return self.env.reset(**arguments)
        value, error, _ = ahead
        return value if error is None else _raise(error)


def copies_of(envs: Sequence[Any], steppers: Sequence[Any], number: int) -> list[list[Copy]]:
    """The copies of each env, in the order of their episodes, from all: so many of each env."""
    copies = [
        Copy(env, stepper, lane)
        for lane, (env, stepper) in enumerate(zip(envs, steppers, strict=True))
    ]
    found = [copies[first : first + number] for first in range(0, len(copies), number)]
    for each in found if number > 1 else ():
        for before, copy in zip(each, each[1:] + each[:1], strict=True):
            before.following = copy
    return found


def refuse_records(index: int, env: Any) -> None:
    """Raises ValueError for an env with a wrapper that keeps a record of all its episodes."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, _RECORDS):
            raise ValueError(
                f"env_fns[{index}]() returned an env in a {type(env).__name__}, which keeps a "
                "record of all episodes: with spare_envs they are played by several copies, each "
                "with a record of its own. Wrap the vector env, or leave spare_envs out."
            )
        env = env.env


@dataclass(eq=False)
class Work:
    """A call of a copy.

    Attributes:
        i: The place of its env among the worker's; -1: the reset is made ahead.
        what: "step", "reset" or "call".
        copy: The copy.
        function: What is called.
        arguments: With what.
        call: The command of a "call".
        began: When it began; 0: not yet.
    """

    i: int
    what: str
    copy: Copy
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    call: Any = None
    began: int = 0


class Replay:
    """An env whose calls were made already: returns what they returned, raises what they raised.

    Attributes:
        outcomes: What its calls were.
        span: When its last step began and ended.
        reset_span: When its last reset did.
    """

    def __init__(self) -> None:
        """Prepares for an env that has made no call yet."""
        self.outcomes: deque[Outcome] = deque()
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
    """Runs the envs of a worker, at most so many at once, and resets copies ahead.

    Attributes:
        loop: The worker's loop.
        replays: A replay of each env.
    """

    def __init__(self, most: int | None, num_envs: int) -> None:
        """Takes how many of so many envs may be busy at once; None: that is learned."""
        self._num_envs = num_envs
        self._learns = most is None
        self._most = most or 1
        self._waiting: deque[tuple[int, str, Any]] = deque()
        self._num_running = 0
        # When a measurement began, in two clocks, and how many envs are still to end in it.
        self._window: tuple[int, int, int] | None = None
        self.loop: OverlappedLoop
        self.replays = [Replay() for _ in range(num_envs)]

    def attach(
        self,
        loop: OverlappedLoop,
        first_env: int,
        resets_in_step: bool,
        copies: Sequence[Sequence[Copy]],
    ) -> None:
        """Takes the worker's loop, the index of its first env, who resets an env, and the envs."""
        self.loop, self._first_env, self._resets_in_step = loop, first_env, resets_in_step
        self._copies = copies
        self._episodes = [-1] * self._num_envs
        # The last seed that a reset was given, and the episode that it began.
        self._seeded: list[tuple[int | None, int]] = [(None, 0)] * self._num_envs
        loop.execute_by(self)

    # ---- which envs are busy -----------------------------------------------------------------

    def start(self, i: int, what: str, argument: Any) -> None:
        """Has an env begin, now or when others have ended."""
        self._waiting.append((i, what, argument))
        self._begin_more()

    def _begin_more(self) -> None:
        while self._waiting and self._num_running < self._most:
            self._num_running += 1
            self._begin(*self._waiting.popleft())
        if self._learns and self._waiting and self._window is None:
            self._window = monotonic_ns(), process_time_ns(), self._most

    def _finish(self, i: int, outcome: Outcome) -> None:
        self._num_running -= 1
        if self._learns:
            self._learn()
        self._begin_more()
        self.loop.finish(i, outcome[:2])

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

    # ---- what they do ------------------------------------------------------------------------

    def _now(self, i: int) -> Copy:
        """The copy that plays an env's present episode."""
        copies = self._copies[i]
        return copies[max(0, self._episodes[i]) % len(copies)]

    def _begin(self, i: int, what: str, argument: Any) -> None:
        self.replays[i].outcomes.clear()
        if what == "step":
            copy = self._now(i)
            self.launch(Work(i, what, copy, copy.stepper.step, (argument,)))
        elif what == "reset":
            self._begin_reset(i, argument)
        else:
            self._call(i, argument, self._now(i))

    def _call(self, i: int, call: Any, copy: Copy) -> None:
        self.launch(Work(i, "call", copy, call.run, (copy.env, self._first_env + i), call))

    def _begin_reset(self, i: int, arguments: dict[str, Any]) -> None:
        """Begins the next episode."""
        self._episodes[i] += 1
        copy = self._now(i)
        promised = None
        if len(self._copies[i]) > 1:
            seed = arguments.get("seed")
            if seed is not None:
                self._seeded[i] = seed, self._episodes[i]
            elif not arguments.get("options"):
                promised = self._promise(i, self._episodes[i])
                arguments = _seeded(promised)
        work = Work(i, "reset", copy, copy.reset, (promised, arguments))
        if len(self._copies[i]) > 1:  # it may have to wait for what the copy is doing
            work.began = monotonic_ns()
            self.loop.begin(i, "reset")
        self.launch(work)

    def _promise(self, i: int, episode: int) -> tuple[int, int | None]:
        """An episode, and the seed for it that follows from the last one that was given."""
        seed, since = self._seeded[i]
        return episode, restart_seed(seed, episode - since)

    def _reset_ahead(self, i: int) -> None:
        """Has the copies of the next episodes reset, once each."""
        copies, episode = self._copies[i], self._episodes[i]
        for later in range(episode + 1, episode + len(copies)):
            copy, promised = copies[later % len(copies)], self._promise(i, later)
            if copy.promised != promised:
                copy.promised = promised
                self.launch(Work(-1, "reset", copy, copy.reset, (None, _seeded(promised))))

    def launch(self, work: Work) -> None:
        """Has work done where its copy lives, after what that was asked before, and ``ended``."""
        raise NotImplementedError

    def ended(self, work: Work, outcome: Outcome) -> None:
        """Takes the outcome of work, in the loop's thread."""
        i = work.i
        if i < 0:
            return
        if work.what == "call":
            later = work.copy.following if work.call.for_copies else None
            if later is not None and later is not self._now(i) and outcome[1] is None:
                self._call(i, work.call, later)
                return
        else:
            self.replays[i].outcomes.append(outcome)
        if work.what == "step" and self._resets_in_step and _is_over(outcome):
            try:
                # Copies: an env may reuse its arrays in reset().
                value = outcome[0]
                value = copied(value[0]), *value[1:4], copied(value[4])
            except Exception:
                pass  # the loop finds the same error, which is the answer
            else:
                self.replays[i].outcomes[0] = value, *outcome[1:]
                self._begin_reset(i, {})
                return
        if work.what == "reset":
            self._reset_ahead(i)
        self._finish(i, outcome)

    async def _done(self, work: Work, before: asyncio.Future[Any] | None = None) -> Outcome:
        """Calls what work says, after a future, and waits for what can be awaited."""
        i, value, error = work.i, None, None
        if i >= 0:
            self.loop.begin(i, work.what)
        work.began = work.began or monotonic_ns()
        try:
            if before is not None:
                await asyncio.wait([before])
            value = work.function(*work.arguments)
            if inspect.isawaitable(value):
                value = await value
        except BaseException as raised:
            error = self._meant(work, raised)
        ended = monotonic_ns()
        end_forks()
        if i >= 0:
            self.loop.end(i)
        else:
            work.copy.ahead = value, error, (work.began, ended)
        try:
            return value, error, (work.began, ended)
        finally:
            del error  # or its traceback, in which this frame is, would keep it alive

    def _meant(self, work: Work, error: BaseException) -> BaseException:
        """The error to report for what an env has raised."""
        return error

    # ---- the worker's life -------------------------------------------------------------------

    def run_all(self, calls: Mapping[int, Callable[[], Any]]) -> dict[int, Result]:
        """Makes calls where copies live, by their lanes, at once; waits for all of them."""
        raise NotImplementedError

    def run(self, lane: int, call: Callable[[], Any]) -> Any:
        """Makes a call where a copy lives, and waits for it."""
        value, error = self.run_all({lane: call})[lane]
        return value if error is None else _raise(error)

    def interrupt(self, limits: tuple[float | None, float | None]) -> None:
        """Interrupts what takes longer than its limit, where that can be done."""

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one to close, or until the parent is gone."""
        raise NotImplementedError

    def end(self) -> None:
        """Ends what runs envs, once they are closed."""


def _seeded(promised: tuple[int, int | None]) -> dict[str, Any]:
    """The arguments of a reset for an episode."""
    seed = promised[1]
    return {} if seed is None else {"seed": seed}


def _is_over(outcome: Outcome) -> bool:
    """Whether the outcome of a step says that an episode is over."""
    value, error, _ = outcome
    try:
        return error is None and len(value) == 5 and bool(value[2] or value[3])
    except Exception:  # the loop finds what is wrong with it
        return False


class EnvThreads(Executor):
    """A thread for each copy."""

    def __init__(self, most: int | None, num_envs: int) -> None:
        """Prepares for envs; each thread starts when its copy is built."""
        super().__init__(most, num_envs)
        self._inboxes: list[SimpleQueue[Callable[[], None] | None]] = []
        self._outcomes: deque[tuple[Work, Outcome]] = deque()
        self._alarm: Alarm

    def run_all(self, calls: Mapping[int, Callable[[], Any]]) -> dict[int, Result]:
        """Makes calls in copies' threads, at once, and waits for all of them."""
        answers: SimpleQueue[tuple[int, Result]] = SimpleQueue()

        def answer(lane: int) -> None:
            answers.put((lane, called(calls[lane])))

        for lane in calls:
            self._thread(lane).put(partial(answer, lane))
        return dict(answers.get() for _ in calls)

    def _thread(self, lane: int) -> SimpleQueue[Callable[[], None] | None]:
        """The inbox of a copy's thread."""
        while len(self._inboxes) <= lane:
            sys.setswitchinterval(max(sys.getswitchinterval(), _SWITCH_S * len(self._inboxes)))
            inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
            self._inboxes.append(inbox)
            name = f"env {len(self._inboxes) - 1} of this worker"
            # A daemon: the process must end although an env hangs.
            threading.Thread(target=_obey, args=(inbox,), name=name, daemon=True).start()
        return self._inboxes[lane]

    def launch(self, work: Work) -> None:
        """Puts work into the inbox of its copy's thread."""
        self._inboxes[work.copy.lane].put(lambda: self._work(work))

    def _work(self, work: Work) -> None:
        try:
            self._done(work).send(None)  # nothing in it waits
        except StopIteration as end:
            self._outcomes.append((work, end.value))
        self._alarm.ring()

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one to close, or until the parent is gone."""
        loop, outcomes, is_open = self.loop, self._outcomes, True
        self._alarm = alarm
        while is_open or loop.in_progress:
            while outcomes:
                self.ended(*outcomes.popleft())
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
    """The main function of a copy's thread."""
    while (call := inbox.get()) is not None:
        call()
        del call  # not kept until the next one comes


class EnvCoroutines(Executor):
    """One event loop, in the worker's main thread, for envs with coroutine functions."""

    def __init__(self, most: int | None, num_envs: int) -> None:
        """Makes the event loop."""
        super().__init__(most, num_envs)
        self._events = asyncio.new_event_loop()
        self._tasks: dict[Work, asyncio.Task[None]] = {}
        self._last: dict[int, asyncio.Task[None]] = {}  # by lane
        self._overdue: dict[Work, EnvTimeoutError] = {}
        self._rung = asyncio.Event()
        self._broken: BaseException | None = None

    def run_all(self, calls: Mapping[int, Callable[[], Any]]) -> dict[int, Result]:
        """Makes calls, and waits for all that they return and that can be awaited, at once."""

        async def all_made() -> list[Result]:
            return await asyncio.gather(*map(_awaited, calls.values()))

        return dict(zip(calls, self._events.run_until_complete(all_made()), strict=True))

    def launch(self, work: Work) -> None:
        """Makes a task of work, which waits for the last one of its copy."""
        before = self._last.get(work.copy.lane)
        if before is not None and before.done():
            before = None
        task = self._events.create_task(self._task(work, before))
        self._tasks[work] = self._last[work.copy.lane] = task

    async def _task(self, work: Work, before: asyncio.Task[None] | None) -> None:
        try:
            outcome = await self._done(work, before)
            del self._tasks[work]
            self.ended(work, outcome)
        except BaseException as error:  # not an env's: the worker cannot go on
            self._broken = error
        if self._broken is not None or self.loop.in_progress == 0:
            self._rung.set()

    def _meant(self, work: Work, error: BaseException) -> BaseException:
        """The time limit for which work was cancelled."""
        return self._overdue.pop(work, error)

    def interrupt(self, limits: tuple[float | None, float | None]) -> None:
        """Cancels what takes longer than its limit; a signal's handler may call it."""
        self._events.call_soon_threadsafe(self._cancel, *limits)

    def _cancel(self, step_limit: float | None, reset_limit: float | None) -> None:
        limits = {"step": step_limit, "reset": reset_limit}
        for work in [work for work in self._tasks if work.i >= 0 and work.began]:
            limit = limits.get(work.what)
            if limit is None or monotonic_ns() - work.began <= 1e9 * limit:
                continue
            self._overdue[work] = EnvTimeoutError(self._first_env + work.i, work.what, limit)
            for each, task in self._tasks.items():
                if each.copy is work.copy:  # a reset may wait for one that is made ahead
                    task.cancel()

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one to close, or until the parent is gone."""
        self._events.add_reader(alarm.fileno(), self._rung.set)
        try:
            self._events.run_until_complete(self._serve(alarm))
        finally:  # before the descriptor is closed, whose number a socket of an env may get
            self._events.remove_reader(alarm.fileno())

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
        for task in self._tasks.values():  # resets that are made ahead
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
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


async def _awaited(call: Callable[[], Any]) -> Result:
    """Makes a call, and waits for what it returns if that can be awaited."""
    try:
        value = call()
        return await value if inspect.isawaitable(value) else value, None
    except BaseException as error:
        return None, error


def called(call: Callable[[], Any]) -> Result:
    """Makes a call."""
    try:
        return call(), None
    except BaseException as error:
        return None, error
