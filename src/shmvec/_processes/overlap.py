"""Envs of a worker that are in ``step`` or ``reset`` at once: in a thread each, or as coroutines.

An executor runs what the worker's loop has envs begin, and gives it replays of the envs in their
place: see ``_core/worker.pyx``. ``EnvThreads`` keeps a thread for each env, in which the env is
built, used and closed. ``event_loop`` has the executor of envs of coroutine functions.

With ``spare_envs=k`` an env of the vector env is played by k + 1 copies in turn: its episode n by
copy n mod (k + 1). As an episode begins, the copies of the next k episodes are reset, so that the
next one begins at once when it ends. What episodes show does not depend on whether they were ready.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, monotonic_ns, process_time_ns
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium as gym

from shmvec._core import copied, end_forks
from shmvec._pickling import Copies, copied_from
from shmvec.faults import derived_seed

if TYPE_CHECKING:
    from shmvec._core import OverlappedLoop

__all__ = [
    "Alarm",
    "Copy",
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
PATIENCE_S = 10.0  # for a reset that was made ahead, as envs are closed
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
    """Whether the ``step`` or ``reset`` of an env, its class or an env within is a coroutine's."""
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
class Copy:
    """An env: the only one in its place, or one of several that play its episodes in turn.

    It does one thing at a time.

    Attributes:
        env: The env.
        stepper: What has its ``step``: the env, or its compiled wrappers.
        lane: Where it lives: its number among all copies.
        following: The copy that plays the episode after; None: it is the only one.
        running: The work that is being done.
        queue: The work that follows.
        promised: The episode, and its seed, for which it is or was reset ahead.
        ahead: The outcome of that.
    """

    env: Any
    stepper: Any
    lane: int
    following: Copy | None = None
    running: Work | None = None
    queue: deque[Work] = field(default_factory=deque)
    promised: tuple[int, int | None] | None = None
    ahead: Outcome | None = None


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
    while env is not None:
        if isinstance(env, _RECORDS):
            raise ValueError(
                f"env_fns[{index}]() returned an env in a {type(env).__name__}, which keeps a "
                "record of all episodes: with spare_envs they are played by several copies, each "
                "with a record of its own. Wrap the vector env, or leave spare_envs out."
            )
        env = vars(env).get("env") if hasattr(env, "__dict__") else None


@dataclass(eq=False)
class Work:
    """A call of a copy.

    Attributes:
        i: The place of its env among the worker's; -1: a reset that is made ahead.
        what: "step", "reset" or "call".
        copy: The copy.
        function: What is called.
        call: The command of a "call".
        promised: Of a reset: the episode and seed for which it may have been made ahead.
        began: When it began.
    """

    i: int
    what: str
    copy: Copy
    function: Callable[[], Any]
    call: Any = None
    promised: tuple[int, int | None] | None = None
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
        self._copies: Sequence[Sequence[Copy]] = ()
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
        self._given = [False] * self._num_envs  # whether the last reset was given something
        self._looks_ahead = [True] * self._num_envs
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
            self._launch(Work(i, what, copy, partial(copy.stepper.step, argument)))
        elif what == "reset":
            self._begin_reset(i, argument)
        else:
            self._call(i, argument, self._now(i))

    def _call(self, i: int, call: Any, copy: Copy) -> None:
        function = partial(call.run, copy.env, self._first_env + i)
        self._launch(Work(i, "call", copy, function, call))

    def _begin_reset(self, i: int, arguments: dict[str, Any]) -> None:
        """Begins the next episode."""
        self._episodes[i] += 1
        copy, promised = self._now(i), None
        if copy.following is not None:
            seed = arguments.get("seed")
            options = arguments.get("options")
            empty = options is None or (isinstance(options, Copies) and options.empty)
            given = seed is not None or not empty
            # Where all resets are given seeds, none is made ahead.
            self._looks_ahead[i] = not (given and self._given[i])
            self._given[i] = given
            if seed is not None:
                self._seeded[i] = seed, self._episodes[i]
            if given:
                if seed is None:
                    arguments = arguments | _seeded(self._promise(i, self._episodes[i]))
                copy.queue.clear()
                if copy.running is not None:
                    self.abandon(copy.running)
            else:
                promised = self._promise(i, self._episodes[i])
                arguments = _seeded(promised)
        function = partial(_reset, copy.env, arguments)
        self._launch(Work(i, "reset", copy, function, promised=promised))

    def _promise(self, i: int, episode: int) -> tuple[int, int | None]:
        """An episode, and the seed for it that follows from the last one that was given."""
        seed, since = self._seeded[i]
        return episode, derived_seed(seed, 0, episode - since)

    def _reset_ahead(self, i: int) -> None:
        """Has the copies of the next episodes reset, once each."""
        copies, episode = self._copies[i], self._episodes[i]
        for later in range(episode + 1, episode + len(copies)) if self._looks_ahead[i] else ():
            copy, promised = copies[later % len(copies)], self._promise(i, later)
            if copy.promised != promised:
                copy.promised, copy.ahead = promised, None
                function = partial(copy.env.reset, **_seeded(promised))
                self._launch(Work(-1, "reset", copy, function, promised=promised))

    def _launch(self, work: Work) -> None:
        """Has work done after what its copy has to do before."""
        copy = work.copy
        copy.queue.append(work)
        if copy.running is None:
            self._go_on(copy)
        elif work.i >= 0:  # what it waits for is what takes its time
            self.loop.begin(work.i, "reset", copy.running.began)

    def _go_on(self, copy: Copy) -> None:
        """Begins the next thing that a copy has to do."""
        while copy.queue and copy.queue[0].i < 0 and copy.queue[0].promised != copy.promised:
            copy.queue.popleft()  # it is for an episode that has begun without it
        if not copy.queue:
            return
        work = copy.running = copy.queue.popleft()
        work.began = monotonic_ns()
        for waiting in copy.queue if work.i < 0 else ():
            if waiting.i >= 0:
                self.loop.begin(waiting.i, "reset", work.began)
        if work.i >= 0:
            self.loop.begin(work.i, work.what, work.began)
            ahead = copy.ahead
            if work.what == "reset":
                copy.ahead = None
                if ahead is not None and work.promised == copy.promised is not None:
                    self.deliver(work, (*ahead[:2], (work.began, work.began)))
                    return
        self.launch(work)

    def launch(self, work: Work) -> None:
        """Has work done where its copy lives, and ``deliver`` called."""
        raise NotImplementedError

    def deliver(self, work: Work, outcome: Outcome) -> None:
        """Has ``ended`` called soon, in the loop's thread."""
        raise NotImplementedError

    def abandon(self, work: Work) -> None:
        """Ends work whose outcome is of no use, where that can be done."""

    def ended(self, work: Work, outcome: Outcome) -> None:
        """Takes the outcome of work, in the loop's thread."""
        i, copy = work.i, work.copy
        if copy.running is work:
            copy.running = None
            if i < 0 and work.promised == copy.promised:
                copy.ahead = outcome
            self._go_on(copy)
        if i < 0:
            return
        self.loop.end(i)
        if work.what == "call":
            if not self._has_called(work, outcome):
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

    def _has_called(self, work: Work, outcome: Outcome) -> bool:
        """Whether a call is done in all copies that it is for; has the next one make it."""
        i, now = work.i, self._now(work.i)
        later = work.copy.following
        if later is None or not work.call.for_copies:
            return True
        if later is not now and outcome[1] is None:
            self._call(i, work.call, later)
            return False
        for copy in self._copies[i]:  # reset() may read what was set
            if copy is not now:
                copy.promised = copy.ahead = None
        if self._episodes[i] >= 0:
            self._reset_ahead(i)
        return True

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


def _reset(env: Any, arguments: dict[str, Any]) -> Any:
    """Resets an env, with options of its own; of a coroutine function, begins that."""
    return env.reset(**{name: copied_from(value) for name, value in arguments.items()})


def _is_over(outcome: Outcome) -> bool:
    """Whether the outcome of a step says that an episode is over."""
    value, error, _ = outcome
    try:
        return error is None and len(value) == 5 and bool(value[2] or value[3])
    except Exception:  # the loop finds what is wrong with it
        return False


class EnvThreads(Executor):
    """A thread for each copy."""

    def __init__(
        self, most: int | None, num_envs: int, begin: Callable[[], object] = lambda: None
    ) -> None:
        """Prepares for envs; each thread starts when its copy is built.

        Args:
            most: As for an Executor.
            num_envs: Likewise.
            begin: What each thread calls first.
        """
        super().__init__(most, num_envs)
        self._begin_thread = begin
        self._patience_s = 0.0
        self._inboxes: list[SimpleQueue[Callable[[], object] | None]] = []
        self._outcomes: deque[tuple[Work, Outcome]] = deque()
        self._alarm: Alarm

    def run_all(self, calls: Mapping[int, Callable[[], Any]]) -> dict[int, Result]:
        """Makes calls in copies' threads, at once, and waits for all of them.

        A copy that is still being reset ahead is waited for for some seconds, and then given up.
        """
        answers: SimpleQueue[tuple[int, Result]] = SimpleQueue()
        late = {copy.lane for copies in self._copies for copy in copies if copy.running}

        def answer(lane: int) -> None:
            late.discard(lane)
            answers.put((lane, called(calls[lane])))

        for lane in calls:
            self._thread(lane).put(partial(answer, lane))
        found: dict[int, Result] = {}
        end = monotonic() + self._patience_s
        while len(found) < len(calls):
            try:
                lane, result = answers.get(timeout=max(0.01, end - monotonic()) if late else None)
            except Empty:
                if not calls.keys() <= found.keys() | late:
                    continue
                error = TimeoutError("it was not closed: what it was asked before does not end")
                return {lane: (None, error) for lane in calls} | found
            found[lane] = result
        return found

    def _thread(self, lane: int) -> SimpleQueue[Callable[[], object] | None]:
        """The inbox of a copy's thread."""
        while len(self._inboxes) <= lane:
            sys.setswitchinterval(max(sys.getswitchinterval(), _SWITCH_S * len(self._inboxes)))
            inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
            inbox.put(partial(called, self._begin_thread))
            self._inboxes.append(inbox)
            # A daemon: the process must end although an env hangs.
            threading.Thread(target=_obey, args=(inbox,), name="shmvec env", daemon=True).start()
        return self._inboxes[lane]

    def launch(self, work: Work) -> None:
        """Puts work into the inbox of its copy's thread."""
        self._inboxes[work.copy.lane].put(partial(self._work, work))

    def _work(self, work: Work) -> None:
        value, error = called(work.function)
        end_forks()
        if error is None and inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()  # or it would be warned about
            error = TypeError(
                f"{work.what}() returned something to be awaited, and the env's own step and reset "
                "are no coroutine functions: it lives in a thread, without an event loop"
            )
        self._outcomes.append((work, (value, error, (work.began, monotonic_ns()))))
        self._alarm.ring()

    def deliver(self, work: Work, outcome: Outcome) -> None:
        """Has ``ended`` called soon."""
        self._outcomes.append((work, outcome))

    def serve(self, alarm: Alarm) -> None:
        """Serves requests until one to close, or until the parent is gone."""
        self._alarm = alarm
        self._serve(alarm)
        self._patience_s = PATIENCE_S  # else it broke, and envs may be in the middle of anything

    def _serve(self, alarm: Alarm) -> None:
        loop, outcomes, is_open = self.loop, self._outcomes, True
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

    def end(self) -> None:
        """Ends the threads, once the envs are closed."""
        for inbox in self._inboxes:
            inbox.put(None)


def _obey(inbox: SimpleQueue[Callable[[], object] | None]) -> None:
    """The main function of a copy's thread."""
    while (call := inbox.get()) is not None:
        call()
        del call  # not kept until the next one comes


def called(call: Callable[[], Any]) -> Result:
    """Makes a call; returns what it has returned, and raised."""
    try:
        return call(), None
    except BaseException as error:
        return None, error
