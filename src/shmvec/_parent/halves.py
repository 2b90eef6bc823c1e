"""One call at a time, as its users know it: at once, or in two halves, of which the first returns.

A call that ends by a time limit, or is broken off, leaves envs that have not answered. The next one
waits for these first, and drops what they answer.
"""

from __future__ import annotations

import inspect
import multiprocessing
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector.async_vector_env import AsyncState

from shmvec.exchange import Answers, Exchange
from shmvec.faults import raise_as_gymnasium_does

__all__ = ["CALL", "DEFAULT", "RESET", "STEP", "Halves", "StepResults", "results_of"]

DEFAULT = AsyncState.DEFAULT
STEP = AsyncState.WAITING_STEP
RESET = AsyncState.WAITING_RESET
CALL = AsyncState.WAITING_CALL

# Observations, rewards, terminations, truncations, infos.
StepResults: TypeAlias = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
]


class Halves:
    """A vector env's exchange, and the call of which answers are still to be taken.

    Attributes:
        exchange: What asks the envs.
    """

    # Of the class: close() and __del__ must work whatever fails in __init__.
    _exchange: Exchange | None = None
    _state: AsyncState | SimpleNamespace = DEFAULT
    _held: Callable[[], object] | None = None
    _in_call = False  # what is out is of a call that was broken off, and is dropped

    @property
    def exchange(self) -> Exchange:
        """What this is a translation to: envs asked and answered for one by one, and more."""
        assert self._exchange is not None
        return self._exchange

    def _assert_is_running(self) -> None:
        """Raises ClosedEnvironmentError after ``close``; wrappers of Gymnasium's call it."""
        self.exchange.check_open()

    def _ready(
        self, name: str, asking: bool = False, settle: bool = True, depth: int = 1
    ) -> Exchange:
        """The exchange, for a call to the method ``name``, unless another one is pending.

        Envs may still be out if the call is ``asking`` them, too. Answers to a call that was broken
        off are waited for and dropped, if it is to ``settle`` that: of one that is not under way,
        which is told by how often this one has taken its turn, ``depth``. One that has not taken
        it yet (0) goes on in another call of this vector env in no case.
        """
        exchange = self._exchange
        assert exchange is not None
        if exchange.closed:
            exchange.check_open()
        if self._state is not DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._state.value}` to "
                "complete.",
                str(self._state.value),
            )
        if self._in_call or not depth:
            if exchange.turn.depth > depth:
                self._check_depth(exchange, depth, f"Calling `{name}` of a vector env")
            if self._in_call and settle:
                self._settle(exchange)
        elif not asking and exchange.num_asked:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while envs are out: take the results of all that were asked to "
                "step or reset, with `recv`, or `drop()` the Pipeline that has asked them, first.",
                "recv",
            )
        return exchange

    def _check_depth(self, exchange: Exchange, depth: int, what: str) -> None:
        """Raises AlreadyPendingCallError in the middle of a call that has taken the turn before."""
        if self._is_in(inspect.currentframe()):
            exchange.turn.refuse(what)
        # Python 3.14 looks for signals between a call of `__enter__` and the block of its `with`:
        # what a handler has raised there has left a turn that nobody gives back. Where no call was
        # broken off it is the user's, or of a subclass's method.
        if self._in_call:
            exchange.turn.give_back(depth)

    def _is_in(self, frame: FrameType | None) -> bool:
        """Whether a call goes on below those that are on top of the stack.

        What a subclass's half does once it has its results goes on in none.
        """
        others, at_once = False, Halves._at_once.__code__
        while frame is not None and (self._in_call or frame.f_code is not at_once):
            whose = frame.f_locals.get("self")
            ours = whose is self or whose is self._exchange
            if ours and not self._in_call:
                ours = str(frame.f_globals.get("__name__")).startswith("shmvec.")
            if ours and others:
                return True
            others = others or not ours
            frame = frame.f_back
        return False

    def _settle(self, exchange: Exchange) -> None:
        """Waits for results that nobody wants any more: of a call that was broken off."""
        exchange.drop()
        self._in_call = False

    def _at_once(self, begin: Callable[[], object], finish: Callable[[], Any]) -> Any:
        """Both halves of a call; if it is broken off, no half of it is pending."""
        exchange = self.exchange
        with exchange.turn:
            pending = self._state is not DEFAULT  # another's half, which stays
            if self._in_call and not pending and exchange.turn.depth > 1:
                self._check_depth(exchange, 1, "Using a vector env")
            try:
                begin()
                results = finish()
            except BaseException:
                if not pending:
                    self._state, self._held = DEFAULT, None
                raise
        return results

    def _begin(self, state: AsyncState, ask: Callable[[], object]) -> None:
        """Sends a request; later, if results of a call that timed out are still to come."""
        exchange = self.exchange
        if self._in_call:
            if not exchange.wait(0.0):
                self._held, self._state = ask, state
                return
            self._settle(exchange)
        self._in_call = True
        ask()
        self._state = state

    def _check_state(self, state: AsyncState) -> None:
        """Raises unless such a call is pending."""
        self._assert_is_running()
        if self._state is not state:
            raise NoAsyncCallError(
                f"Calling `{state.value}_wait` without any prior call to `{state.value}_async`.",
                state.value,
            )

    def _finish(self, state: AsyncState, timeout: float | None) -> Answers:
        """Waits for the answers to a request; of a reset, with the observations of all envs."""
        exchange = self.exchange
        with exchange.turn:
            if exchange.closed or self._state is not state:
                self._check_state(state)
            self._state = DEFAULT
            if timeout is not None or self._held is not None:
                self._wait_until_sent(exchange, state, timeout)
            answers = self._answers(exchange, arrays=state is STEP, observe=state is RESET)
            if state is STEP:
                exchange.recycle()
            return answers

    def _wait_until_sent(
        self, exchange: Exchange, state: AsyncState, timeout: float | None
    ) -> None:
        """Waits for all; raises TimeoutError, with the results left to be dropped, at the end."""
        held, self._held = self._held, None
        begin = time.monotonic()
        done = exchange.wait(timeout)
        if done and held is not None:
            self._settle(exchange)  # of a call that timed out
            self._in_call = True
            held()
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))
            done = exchange.wait(left)
        if not done:
            raise multiprocessing.TimeoutError(
                f"The call to `{state.value}_wait` has timed out after {timeout} second(s)."
            )

    def _taken(self, exchange: Exchange, arrays: bool = True) -> StepResults:
        """The results of this call."""
        taken: Any = exchange.take_regular(self, arrays)
        if taken is None:
            return results_of(self._answers(exchange, arrays))
        self._in_call = False
        return taken  # type: ignore[no-any-return]

    def _answers(self, exchange: Exchange, arrays: bool = True, observe: bool = False) -> Answers:
        """Takes the answers of all that were asked by this call; raises what envs have raised.

        Args:
            exchange: Where from.
            arrays: Whether they have arrays.
            observe: Whether they have the last observations of all envs.
        """
        answers = exchange.take(gather=self, everyone=True, arrays=arrays)
        if observe and not answers.failures:
            answers.observations = exchange.observe()
        self._in_call = False
        if answers.failures:
            raise_as_gymnasium_does(answers.failures)
        return answers


def results_of(answers: Answers) -> StepResults:
    """Answers, as what Gymnasium's ``step`` returns."""
    flags = answers.terminations, answers.truncations
    return answers.observations, answers.rewards, *flags, answers.infos
