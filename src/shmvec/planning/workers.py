"""The workers and their works, done one after another, each with a promise of its result."""

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

__all__ = ["Promise", "Work", "Workers"]

Result = TypeVar("Result")
Rows = npt.NDArray[np.intp]
Round = tuple[Rows, Rows]  # rows, and which of the batch they get

# Asks rows, then yields what waits for their answers, and gets these; returns the result.
Work = Generator[Callable[..., Answers], Answers, Result]

_TRIES = 2  # retries of rows whose worker has died
_TURNS = 2  # rounds under way at a time: while the parent takes one, the workers have the other
_LEAST = 32  # rows of a round; taking its results costs the parent as much as some steps


class Promise(Generic[Result]):
    """A result that is still to come. Call it to wait for it.

    Promises may be waited for in any order, and more than once.
    """

    def __init__(
        self, work: Work[Result], go_on: Callable[[float | None], None], guard: Guard
    ) -> None:
        """Takes what leads to the result, what lets works go on by one wait, and its guard."""
        self._work = work
        self._go_on = go_on
        self.guard = guard
        self._done = False
        self._result: Any = None
        self._error: BaseException | None = None

    @exclusive
    def __call__(self, timeout: float | None = None) -> Result:
        """Waits, and returns the result.

        Args:
            timeout: Seconds to wait. None: as long as it takes.

        Raises:
            AlreadyPendingCallError: Another call is under way.
            multiprocessing.TimeoutError: The time is up. Nothing is lost: call again.
            Exception: Whatever the call has raised.
        """
        return self.result(timeout)

    def result(self, timeout: float | None = None) -> Result:
        """As a call of the promise, within a call that is guarded."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._done:
            self._go_on(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._error is not None:
            raise self._error
        result: Result = self._result
        return result

    @property
    def done(self) -> bool:
        """Whether the result is there. This does not look for it: only waiting brings it."""
        return self._done


class Workers:
    """The rows of all workers, and the queue of works to do with them.

    The first work is under way. An error of an env ends the work that it happened in, and no other.

    Attributes:
        guard: Refuses a call of its user while another one is under way.
        count: Number of workers; 1 if the env lives in this process.
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
        """Starts the workers: ``shared`` makes the env of each, or that of all."""
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
            in_ranges=True,  # a worker's rows of a round: no caller waits for single ones
            **options,
        )
        self.batches = Batches(
            exchange.single_observation_space, exchange.single_action_space, list_infos
        )
        self.count = len(ranges)
        self._fewest = min(map(len, ranges))  # rows of a worker
        self._first_rows = np.array([rows.start for rows in ranges], np.intp)
        self._promises: deque[Promise[Any]] = deque()
        self._wait: Callable[..., Answers] | None = None  # what the first work has yielded
        self._spoiled = False  # by a work that has failed: answers of its may be still to come

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return self._exchange.processes

    # ---- one work after another --------------------------------------------------------------

    def do(self, work: Work[Result], blocking: bool) -> Any:
        """Begins a work, or leaves it for when those before it are done: its result or promise."""
        promise = Promise(work, self._go_on, self.guard)
        self._promises.append(promise)
        if len(self._promises) == 1 and not self._spoiled:
            self._advance(partial(next, work))
        return promise.result() if blocking else promise

    def _go_on(self, timeout: float | None) -> None:
        """Lets the first work go on by one wait."""
        self._forget()
        work = self._promises[0]._work
        if (
            inspect.getgeneratorstate(work) == inspect.GEN_CLOSED
        ):  # it has ended, and Ctrl-C came before that was noted
            self._settle(None, RuntimeError("the result was lost: a wait for it was interrupted"))
            return
        if self._wait is None:  # it has not begun
            self._advance(partial(next, work))
            return
        try:
            answers = self._wait(timeout=timeout)
        except multiprocessing.TimeoutError:  # that of an env, too: one can wait once more
            raise
        except Exception as error:
            self._advance(partial(work.throw, error))
        else:
            self._advance(partial(work.send, answers))

    def _advance(self, go_on: Callable[[], Any]) -> None:
        """Lets the first work go on to its next wait; if it ends, the one after it, and so on.

        A work that is interrupted, by Ctrl-C for instance, ends with that exception.
        """
        while True:
            try:
                self._wait = go_on()
                return
            except StopIteration as end:
                self._settle(end.value)
            except BaseException as error:
                self._settle(None, error)
                if not isinstance(error, Exception):
                    raise
            if self._spoiled or not self._promises:
                return
            go_on = partial(next, self._promises[0]._work)

    def _settle(self, result: Any, error: BaseException | None = None) -> None:
        """Ends the first work."""
        self._wait = None
        self._spoiled = error is not None
        promise = self._promises[0]
        promise._result, promise._error, promise._done = result, error, True
        self._promises.popleft()

    def _forget(self) -> None:
        """Takes what a work that has failed has left; other works must not get its faults."""
        while self._promises and self._promises[0]._done:  # Ctrl-C came before it was removed
            self._promises.popleft()
        exchange = self._exchange
        if self._spoiled and not exchange.closed:
            with suppress(WorkerCrashError):  # which has closed it
                exchange.discard()
                rows = range(exchange.num_envs)
                left = [row for row in rows if exchange.over(row)]
                if left:
                    exchange.ask_reset(np.array(left, np.intp))
                    exchange.take()
        self._spoiled = False

    # ---- works -------------------------------------------------------------------------------

    def stepping(self, batch: Batch) -> Work[tuple[Any, ...]]:
        """Steps a batch, in as many rounds as it takes: what ``step_batch`` returns."""
        turns = _TURNS if batch.count >= _TURNS * _LEAST and self._fewest >= _TURNS else 1
        yield from self._in_rounds(batch, self._rounds(batch.count, turns), turns)
        return batch.results()

    def setting(self, state: Any) -> Work[None]:
        """Sets a state in all workers."""
        rows = self._first_rows
        batch = self.batches.to_set(state, len(rows))
        yield from self._in_rounds(batch, [(rows, np.arange(len(rows), dtype=np.intp))], 1)
        *_, truncated, infos = batch.results()
        failed = np.flatnonzero(truncated)
        if len(failed):
            row = failed[0]
            fault = (
                infos[row]["fault"]
                if self.batches.list_infos
                else {key: values[row] for key, values in infos["fault"].items()}
            )
            raise RuntimeError(
                f"the state could not be set in {len(failed)} of {len(rows)} workers: "
                f"{fault['type']}: {fault['message']}"
            )

    def resetting(
        self, workers: Rows, seeds: Sequence[int | None], options: Any, gathered: bool = False
    ) -> Work[Answers]:
        """Resets the envs of some workers."""
        rows = self._first_rows[workers]
        self._exchange.ask_reset(rows, seeds, [options] * len(rows))
        return (yield from self._answers(rows, gathered))

    def _answers(self, rows: Rows, gathered: bool = True) -> Work[Answers]:
        """Waits for rows that were asked."""
        gathered = gathered and not self.batches.list_infos
        answers = yield partial(self._exchange.take, rows, gather=gathered or None)
        if answers.failures:
            raise_failures(answers.failures)
        if len(answers.envs) < len(rows):
            raise RuntimeError("results of this call were lost: a wait for them was interrupted")
        if not gathered:
            for row, report in answers.reports.items():
                answers.infos[answers.envs.tolist().index(row)].update(report.info)
        return answers

    def _in_rounds(self, batch: Batch, rounds: Iterable[Round], turns: int) -> Work[None]:
        """Asks rows what a batch says, ``turns`` rounds at a time."""
        waiting, flying = deque(rounds), deque[Round]()
        lost: list[tuple[Rows, Rows, int]] = []
        while waiting or flying:
            while waiting and not lost and len(flying) < turns:
                rows, where = waiting.popleft()
                self._exchange.ask(rows, batch.part(where))
                flying.append((rows, where))
            lost += yield from self._put(batch, *flying.popleft())
            while lost and not flying:  # until then rows of theirs may be in flight
                yield from self._repeat(batch, *lost.pop(0))

    def _put(self, batch: Batch, rows: Rows, where: Rows) -> Work[list[tuple[Rows, Rows, int]]]:
        """Puts answers into a batch; returns what was lost, and how often to retry it."""
        answers = yield from self._answers(rows)
        batch.put(where, answers)
        lost = np.flatnonzero(answers.truncations)  # nothing but a fault does that to a row
        if len(lost) == 0:
            return []
        # Rows that have done nothing wrong are lost with others of their worker.
        innocent = batch.sets_states and any(
            report.fault.done == "restart" or report.fault.type == "EnvTimeoutError"
            for report in answers.reports.values()
        )
        return [(rows[lost], where[lost], _TRIES if innocent else 0)]

    def _repeat(self, batch: Batch, rows: Rows, where: Rows, tries: int) -> Work[None]:
        """Retries rows that were lost; gives them up after enough retries."""
        self._exchange.ask_reset(rows)
        yield from self._answers(rows)
        if tries == 0:
            batch.give_up(where)
            return
        self._exchange.ask(rows, batch.part(where))
        for lost, places, most in (yield from self._put(batch, rows, where)):
            # Those behind the row that kills its worker are lost with it: now one by one.
            for row, place in zip(lost[:, None], places[:, None], strict=True):
                yield from self._repeat(batch, row, place, min(tries - 1, most))

    def _rounds(self, count: int, turns: int) -> Iterator[Round]:
        """Rows for each round of a batch, and which of the batch they get.

        Rounds take turns with parts of the rows. Each is spread evenly over the workers.
        """
        begin = turn = 0
        while begin < count:
            first, end = (place * self._fewest // turns for place in (turn, turn + 1))
            size = min(count - begin, (end - first) * self.count, -(-count // turns))
            shares = split_evenly(size, self.count)
            rows = [
                np.arange(start + first, start + first + len(share), dtype=np.intp)
                for start, share in zip(self._first_rows, shares, strict=True)
            ]
            yield np.concatenate(rows), np.arange(begin, begin + size, dtype=np.intp)
            begin += size
            turn = (turn + 1) % turns

    # ---- the rest ----------------------------------------------------------------------------

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Calls a method of every worker's env, or gets an attribute."""
        while self._promises:
            self._go_on(None)
        self._forget()
        return tuple(self._exchange.call(name, args, kwargs, self._first_rows))

    def close(self, timeout: float | None, terminate: bool) -> None:
        """Ends the workers."""
        self._exchange.close(timeout=timeout, terminate=terminate)
