"""Helpers of several adapters: forwarded attributes, ends of episodes, steps in two calls."""

from __future__ import annotations

from typing import Any

from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from shmvec.exchange import Answers, Exchange, OwnsProcesses


def forwarded(to: str, name: str) -> Any:
    """A property that returns the attribute or method ``name`` of the attribute ``to``."""
    return property(lambda self: getattr(getattr(self, to), name), doc=f"``{to}.{name}``.")


def split_end(infos: list[Any], env: int) -> tuple[Any, dict[str, Any]]:
    """Puts the last step's info of an episode in place of the info of the reset after it.

    Returns:
        The episode's last observation, None if it is not known, and the info of the reset.
    """
    reset_info: dict[str, Any] = infos[env]
    infos[env] = reset_info.pop("final_info", {})
    return reset_info.pop("final_obs", None), reset_info


class TwoCallSteps(OwnsProcesses):
    """Steps of all envs of an exchange, each in two calls; and resets, which end a step.

    Attributes:
        waiting: Whether a step was begun and not waited for.
    """

    waiting = False
    _exchange: Exchange

    def _idle(self, name: str) -> Exchange:
        """The exchange, once results of interrupted steps are discarded, so no env is in flight.

        Raises:
            AlreadyPendingCallError: A step was begun and not waited for.
        """
        if self.waiting:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `step` to complete.", "step"
            )
        if self._exchange.num_in_flight:
            self._exchange.discard()
        return self._exchange

    def _begin_step(self, actions: Any) -> None:
        """Begins a step of all envs, which are idle; actions are batched."""
        self._exchange.recycle()
        self._exchange.ask(None, actions)
        self.waiting = True

    def _finish_step(self) -> Answers:
        """Waits for the step that was begun.

        Raises:
            NoAsyncCallError: No step was begun.
        """
        if not (self.waiting or self._exchange.closed):
            raise NoAsyncCallError("Calling `step_wait` without any prior `step_async`.", "step")
        self.waiting = False
        return self._exchange.delivered(self._exchange.take())

    def _reset_envs(self, seeds: Any, options: Any) -> Answers:
        """Resets all envs, with a seed and options each; discards a step in flight."""
        self.waiting = False
        self._exchange.discard()
        self._exchange.ask_reset(None, seeds, options)
        return self._exchange.delivered(self._exchange.take(everyone=True))
