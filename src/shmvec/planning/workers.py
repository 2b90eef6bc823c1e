"""The planning workers, and the queue of tasks that they do one after another.

A task is a generator: it asks rows, yields a function that waits for their answers, and gets these
in return. Each task has a :class:`Promise` of its result.
"""

from __future__ import annotations

import inspect
import itertools
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from shmvec._cores import split_evenly
from shmvec.exchange import (
    Answers,
    AutoresetMode,
    Exchange,
    Guard,
    exclusive,
)
from shmvec.faults import WorkerCrashError, raise_failures
from shmvec.planning.batches import Batch, Batches
from shmvec.planning.rows import Row, SharedEnv

__all__ = ["Promise", "Task", "Workers"]

Result = TypeVar("Result")
Rows = npt.NDArray[np.intp]
Round = tuple[Rows, Rows]  # rows, and their places in the batch

Task = Generator[Callable[..., Answers], Answers, Result]

_RETRIES = 2  # of rows whose worker has died
_NUM_GROUPS = 2  # of rows: the workers step one while the parent takes the other's results
_MIN_ROUND_ROWS = 32  # with fewer, taking results costs too much


class Promise(Generic[Result]):
    """The result of a call that does not wait. Call the promise to wait for it.

    Promises may be waited for in any order, and more than once.
    """

    def __init__(
        self, task: Task[Result], resume: Callable[[float | None], None], guard: Guard
    ) -> None:
        """Makes a promise; ``resume`` runs the first task in the queue up to its next wait."""
        self._task = task
        self._resume = resume
        self.guard = guard
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None

    @exclusive
    def __call__(self, timeout: float | None = None) -> Result:
        """Waits, and returns the result of the call that has made the promise.

        Args:
            timeout: Seconds to wait. None: no limit.

        Raises:
            AlreadyPendingCallError: Another call is under way.
            multiprocessing.TimeoutError: The time is up. The promise can be called again.
            Exception: The exception of the call that has made the promise.
        """
        return self.result(timeout)

    def result(self, timeout: float | None = None) -> Result:
        """Waits as a call does, for methods that have entered the guard."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            self._resume(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        result: Result = self._result
        return result

    @property
    def done(self) -> bool:
        """Whether the result was fetched, which only a wait does."""
        return self._done


class Workers:
    """The rows of all workers, and the queue of tasks for them, of which the first is under way.

    An error of an env ends its task, and no other.

    Attributes:
        guard: Refuses a call of the user while another one is under way.
        count: Number of workers; 1 if the env is in this process.
        batches: Makes batches for the rows.
    """

    def __init__(
        self,
        shared: Sequence[Callable[[], SharedEnv]],
        num_workers: int,
        num_rows: int,
        list_infos: bool,
        guard: Guard,
        options: dict[str, Any],
    ) -> None:
        """Starts the workers; ``shared`` has one function for all of them, or one for each."""
        self.guard = guard
        env_fns: list[Any] = []
        ranges = split_evenly(num_rows, max(1, num_workers))
        for make, rows in zip(itertools.cycle(shared), ranges, strict=False):
            env_fns += [partial(Row, make())] * len(rows)
        self._exchange = exchange = Exchange(
            env_fns,
            name="PlanningVectorEnv",
            num_workers=num_workers,
            autoreset_mode=AutoresetMode.DISABLED,
            in_ranges=True,  # one request a worker, since nothing waits for single rows
            **options,
        )
        self.batches = Batches(
            exchange.single_observation_space, exchange.single_action_space, list_infos
        )
        self.count = len(ranges)
        self._min_rows = min(map(len, ranges))  # rows of a worker
        self._first_rows = np.array([rows.start for rows in ranges], np.intp)
        self._promises: deque[Promise[Any]] = deque()
        self._current_wait: Callable[..., Answers] | None = None  # yielded by the first task
        self._has_failed = False  # whether the last task has failed: then answers may be in flight

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return self._exchange.processes

    # ---- the queue of tasks ------------------------------------------------------------------

    def run_task(self, task: Task[Result], blocking: bool) -> Any:
        """Appends a task, and begins it if it is the first; returns its result or its promise."""
        promise = Promise(task, self._resume, self.guard)
        self._promises.append(promise)
        if len(self._promises) == 1 and not self._has_failed:
            self._advance(partial(next, task))
        return promise.result() if blocking else promise

    def _resume(self, timeout: float | None) -> None:
        """Runs the first task up to its next wait."""
        self._discard()
        task = self._promises[0]._task
        if inspect.getgeneratorstate(task) == inspect.GEN_CLOSED:
            # It has ended, and an interrupt came before `_finish_task`.
            error = RuntimeError("the result was lost: a wait for it was interrupted")
            self._finish_task(None, error)
            return
        if self._current_wait is None:  # it has not begun
            self._advance(partial(next, task))
            return
        try:
            answers = self._current_wait(timeout=timeout)
        except multiprocessing.TimeoutError:  # also that of an env: the caller may wait again
            raise
        except Exception as error:
            self._advance(partial(task.throw, error))
        else:
            self._advance(partial(task.send, answers))

    def _advance(self, advance: Callable[[], Any]) -> None:
        """Runs the first task up to its next wait; if it ends, begins the next one.

        A task that is interrupted, by Ctrl-C for instance, ends with that exception.
        """
        while True:
            try:
                self._current_wait = advance()
                return
            except StopIteration as end:
                self._finish_task(end.value)
            except BaseException as error:
                self._finish_task(None, error)
                if not isinstance(error, Exception):
                    raise
            if self._has_failed or not self._promises:
                return
            advance = partial(next, self._promises[0]._task)

    def _finish_task(self, result: Any, error: BaseException | None = None) -> None:
        """Ends the first task."""
        self._current_wait = None
        self._has_failed = error is not None
        promise = self._promises[0]
        promise._result, promise._error, promise._done = result, error, True
        self._promises.popleft()

    def _discard(self) -> None:
        """Discards the answers that a failed task has left, so that no other task gets them."""
        while self._promises and self._promises[0]._done:  # an interrupt came before its removal
            self._promises.popleft()
        exchange = self._exchange
        if self._has_failed and not exchange.closed:
            with suppress(WorkerCrashError):  # the exchange is closed then
                exchange.discard()
                ended = [row for row in range(exchange.num_envs) if exchange.over(row)]
                if ended:
                    exchange.ask_reset(np.array(ended, np.intp))
                    exchange.take()
        self._has_failed = False

    # ---- tasks -------------------------------------------------------------------------------

    def step_task(self, batch: Batch) -> Task[tuple[Any, ...]]:
        """Steps a batch, round by round; returns the results of ``step_batch``."""
        large = batch.count >= _NUM_GROUPS * _MIN_ROUND_ROWS and self._min_rows >= _NUM_GROUPS
        groups = _NUM_GROUPS if large else 1
        yield from self._step_in_rounds(batch, self._rounds(batch.count, groups), groups)
        return batch.results()

    def set_state_task(self, state: Any) -> Task[None]:
        """Sets a state in all workers."""
        rows = self._first_rows
        batch = self.batches.make_set_batch(state, len(rows))
        yield from self._step_in_rounds(batch, [(rows, np.arange(len(rows), dtype=np.intp))], 1)
        failed = np.count_nonzero(batch.results()[3])
        if failed:
            fault = batch.faults[-1]
            raise RuntimeError(
                f"the state could not be set in {failed} of {len(rows)} workers: {fault.type}: "
                f"{fault.message}"
            )

    def reset_task(
        self, workers: Rows, seeds: Sequence[int | None], options: Any, gather: bool = False
    ) -> Task[Answers]:
        """Resets the envs of some workers."""
        rows = self._first_rows[workers]
        self._exchange.ask_reset(rows, seeds, [options] * len(rows))
        return (yield from self._answers(rows, gather))

    def _answers(self, rows: Rows, gather: bool = True) -> Task[Answers]:
        """Waits for rows that were asked, and returns their answers."""
        gather = gather and not self.batches.list_infos
        answers = yield partial(self._exchange.take, rows, gather=gather or None)
        if answers.failures:
            raise_failures(answers.failures)
        if len(answers.envs) < len(rows):
            raise RuntimeError("results of this call were lost: a wait for them was interrupted")
        return self._exchange.delivered(answers)

    def _step_in_rounds(self, batch: Batch, rounds: Iterable[Round], groups: int) -> Task[None]:
        """Steps a batch round by round, with ``groups`` rounds in flight at a time."""
        waiting, in_flight = deque(rounds), deque[Round]()
        lost: list[tuple[Rows, Rows, int]] = []
        while waiting or in_flight:
            while waiting and not lost and len(in_flight) < groups:
                rows, places = waiting.popleft()
                self._exchange.ask(rows, batch.select(places))
                in_flight.append((rows, places))
            lost += yield from self._take_round(batch, *in_flight.popleft())
            while lost and not in_flight:  # before that, rows of a dead worker may be in flight
                yield from self._retry(batch, *lost.pop(0))

    def _take_round(
        self, batch: Batch, rows: Rows, places: Rows
    ) -> Task[list[tuple[Rows, Rows, int]]]:
        """Takes the answers of a round into a batch; returns lost rows with numbers of retries."""
        answers = yield from self._answers(rows)
        batch.put(places, answers)
        lost = np.flatnonzero(answers.truncations)  # only a fault truncates a row
        if len(lost) == 0:
            return []
        # When a worker dies, rows are lost that have no fault.
        faults = [report.fault for report in answers.reports.values()]
        batch.faults += faults
        may_retry = batch.sets_states and any(
            fault.done == "restart" or fault.type == "EnvTimeoutError" for fault in faults
        )
        return [(rows[lost], places[lost], _RETRIES if may_retry else 0)]

    def _retry(self, batch: Batch, rows: Rows, places: Rows, retries: int) -> Task[None]:
        """Retries lost rows; truncates them if no retry is left."""
        self._exchange.ask_reset(rows)
        yield from self._answers(rows)
        if retries == 0:
            batch.truncate(places)
            return
        self._exchange.ask(rows, batch.select(places))
        for lost, lost_places, max_retries in (yield from self._take_round(batch, rows, places)):
            # One by one, so that a row that kills its worker costs no other row.
            for row, place in zip(lost[:, None], lost_places[:, None], strict=True):
                yield from self._retry(batch, row, place, min(retries - 1, max_retries))

    def _rounds(self, count: int, groups: int) -> Iterator[Round]:
        """Rows for each round of a batch, and their places in the batch.

        The rows are split into groups, which rounds use in turn. Each round is spread evenly over
        the workers.
        """
        begin = group = 0
        while begin < count:
            first, end = (number * self._min_rows // groups for number in (group, group + 1))
            size = min(count - begin, (end - first) * self.count, -(-count // groups))
            shares = split_evenly(size, self.count)
            rows = [
                np.arange(start + first, start + first + len(share), dtype=np.intp)
                for start, share in zip(self._first_rows, shares, strict=True)
            ]
            yield np.concatenate(rows), np.arange(begin, begin + size, dtype=np.intp)
            begin += size
            group = (group + 1) % groups

    # ---- calls and end -----------------------------------------------------------------------

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Calls a method of every worker's env, or gets an attribute, after all tasks."""
        while self._promises:
            self._resume(None)
        self._discard()
        return tuple(self._exchange.call(name, args, kwargs, self._first_rows))

    def close(self, timeout: float | None, terminate: bool) -> None:
        """Ends the workers."""
        self._exchange.close(timeout=timeout, terminate=terminate)
