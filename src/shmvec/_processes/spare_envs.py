"""Envs around copies: one copy plays an episode while the copies for the next ones are reset.

With ``spare_envs=k`` a worker steps ``ThreadSpares`` or ``CoroutineSpares`` around k + 1 copies of
an env: copy n mod (k + 1) plays its episode n. As an episode begins, the copies for the next k
episodes are reset, so that the next episode can begin as soon as this one ends. An episode is the
same whether its copy was ready or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym

from shmvec._core import deep_copy
from shmvec._pickling import new_copy
from shmvec._processes.event_loop import cancel_and_wait, try_await
from shmvec._processes.overlap import Result, unwrap
from shmvec.faults import derived_seed

__all__ = ["CoroutineSpares", "ThreadSpares", "refuse_recording_wrappers"]

_RECORDING_WRAPPERS = (
    gym.wrappers.NormalizeObservation,
    gym.wrappers.NormalizeReward,
    gym.wrappers.RecordVideo,
)
CLOSE_TIMEOUT_S = 10.0  # for a spare reset that runs when envs are closed

Episode = tuple[int, int | None]  # its number, and the seed of its reset
AUTOMATIC = object()  # stands for the options that were set for automatic resets


def refuse_recording_wrappers(index: int, env: Any) -> None:
    """Raises ValueError for an env with a wrapper that keeps a record of all its episodes."""
    while env is not None:
        if isinstance(env, _RECORDING_WRAPPERS):
            raise ValueError(
                f"env_fns[{index}]() returned an env in a {type(env).__name__}, which keeps a "
                "record of all episodes. With spare_envs several copies play them, each with a "
                "record of its own. Wrap the vector env, or leave spare_envs out."
            )
        env = vars(env).get("env") if hasattr(env, "__dict__") else None


@dataclass(eq=False)
class _EnvCopy:
    """One of the copies of an env.

    Attributes:
        env: The copy.
        owner: The thread in which it lives; for coroutines, a lock that admits one call at a time.
        stepper: The object that has its ``step``: the copy, or its compiled wrappers.
        episode: The episode for which it is or was reset as a spare.
        pending_reset: The future of that reset, until the episode begins.
        options: The options of that reset.
    """

    env: Any
    owner: Any
    stepper: Any
    episode: Episode | None = None
    pending_reset: Any = None
    options: Any = None


class _Spares:
    """The episodes of an env, and the copies that play them.

    Attributes:
        reset_options: Options of all automatic resets that are begun from now on.
    """

    def __init__(self, envs: Sequence[Any], owners: Sequence[Any]) -> None:
        """Takes the copies, and the owner of each."""
        self._copies = [_EnvCopy(env, owner, env) for env, owner in zip(envs, owners, strict=True)]
        self._number = -1  # of the current episode
        self._seed: tuple[int | None, int] = (None, 0)  # the last reset's, and that reset's episode
        self._was_explicit = False  # whether the last reset had a seed or options
        self._prepares_resets = True
        self.reset_options: Any = None

    def compile(self, compile_env: Callable[[Any], Any]) -> Any:
        """Compiles the wrappers of each copy; returns the stepper of the first."""
        for copy in self._copies:
            copy.stepper = compile_env(copy.env)
        return self._copies[0].stepper

    @property
    def _current_copy(self) -> _EnvCopy:
        """The copy that plays the current episode."""
        return self._copies[max(0, self._number) % len(self._copies)]

    def _episode(self, number: int) -> Episode:
        """The episode of a number, whose seed is derived from the last one that was given."""
        seed, since = self._seed
        return number, derived_seed(seed, 0, number - since)

    def _begin_episode(
        self, seed: int | None, options: Any
    ) -> tuple[_EnvCopy, Callable[[], Any] | None]:
        """Begins an episode.

        Returns:
            The copy that plays it, and its reset; None if it was reset as a spare.
        """
        self._number += 1
        is_automatic = options is AUTOMATIC
        is_empty = options is None or (isinstance(options, dict) and not options)
        has_options = not is_automatic and not is_empty
        is_explicit = seed is not None or has_options
        # If the user resets with seeds or options each time, resets of spares would be wasted.
        self._prepares_resets = not (is_explicit and self._was_explicit)
        self._was_explicit = is_explicit
        if seed is not None:
            self._seed = seed, self._number
        copy, episode = self._current_copy, self._episode(self._number)
        fits = copy.episode == episode and (is_automatic or copy.options is None)
        if not is_explicit and copy.pending_reset is not None and fits:
            return copy, None
        if copy.pending_reset is not None:
            copy.pending_reset.cancel()
        if is_automatic:
            options = self.reset_options
        elif not has_options:
            options = None
        return copy, _reset(copy, seed if seed is not None else episode[1], options)

    def _due_resets(self) -> Iterator[tuple[_EnvCopy, Callable[[], Any]]]:
        """The copies that must be reset for the next episodes, and their resets."""
        for number in range(self._number + 1, self._number + len(self._copies)):
            copy, episode = self._copies[number % len(self._copies)], self._episode(number)
            if self._prepares_resets and copy.episode != episode:
                copy.episode, copy.options = episode, self.reset_options
                yield copy, _reset(copy, episode[1], self.reset_options)

    def _attribute_calls(
        self, name: str, value: Any
    ) -> Iterator[tuple[_EnvCopy, Callable[[], Any]]]:
        """Each copy, beginning with the one that plays, and the call that sets its attribute."""
        current = self._copies.index(self._current_copy)
        for copy in self._copies[current:] + self._copies[:current]:
            yield copy, partial(copy.env.set_wrapper_attr, name, deep_copy(value))
        for copy in self._copies:  # reset() may read the attribute, so resets are repeated
            copy.episode = None


def _reset(copy: _EnvCopy, seed: int | None, options: Any) -> Callable[[], Any]:
    """A call that resets a copy with those arguments that are not None."""
    arguments = {"seed": seed, "options": new_copy(options)}
    return partial(copy.env.reset, **{k: v for k, v in arguments.items() if v is not None})


class ThreadSpares(_Spares):
    """An env around copies that live in a thread each."""

    def step(self, action: Any) -> Any:
        """Steps the copy that plays."""
        copy = self._current_copy
        return copy.owner.run(partial(copy.stepper.step, action))

    def reset(self, *, seed: int | None = None, options: Any = AUTOMATIC) -> Any:
        """Begins the next episode."""
        copy, reset = self._begin_episode(seed, options)
        try:
            return copy.pending_reset.result() if reset is None else copy.owner.run(reset)
        finally:
            copy.pending_reset = None
            self._start_resets()

    def _start_resets(self) -> None:
        for copy, reset in self._due_resets():
            copy.pending_reset = copy.owner.submit(reset)

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the copy that plays; a method is called where the copy lives."""
        if name == "set_wrapper_attr":
            return self.set_wrapper_attr
        copy = self._current_copy
        value = copy.owner.run(partial(copy.env.get_wrapper_attr, name))
        if not callable(value):
            return value
        return lambda *args, **kwargs: copy.owner.run(partial(value, *args, **kwargs))

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets an attribute in all copies."""
        for copy, call in self._attribute_calls(name, value):
            copy.owner.run(call)
        if self._number >= 0:
            self._start_resets()

    def close(self) -> None:
        """Closes the copies, except those whose reset does not end within some seconds."""
        for copy in self._copies:
            if copy.pending_reset is not None:
                copy.pending_reset.cancel()
        resets = [copy.pending_reset for copy in self._copies if copy.pending_reset is not None]
        hanging = wait(resets, CLOSE_TIMEOUT_S).not_done
        closable = [copy for copy in self._copies if copy.pending_reset not in hanging]
        closings = [copy.owner.submit(copy.env.close) for copy in closable]
        wait(closings)
        for closing in closings:
            closing.result()
        if hanging:
            raise TimeoutError("it was not closed: what it was asked before does not end")
        for copy in self._copies:
            copy.owner.end()


class CoroutineSpares(_Spares):
    """An env around copies whose ``step`` or ``reset`` is a coroutine function."""

    def __init__(self, envs: Sequence[Any]) -> None:
        """Takes the copies."""
        super().__init__(envs, [asyncio.Lock() for _ in envs])

    async def step(self, action: Any) -> Any:
        """Steps the copy that plays."""
        copy = self._current_copy
        return unwrap(await _call_exclusively(copy, partial(copy.stepper.step, action)))

    async def reset(self, *, seed: int | None = None, options: Any = AUTOMATIC) -> Any:
        """Begins the next episode."""
        copy, reset = self._begin_episode(seed, options)
        try:
            return unwrap(
                await (copy.pending_reset if reset is None else _call_exclusively(copy, reset))
            )
        finally:
            copy.pending_reset = None
            self._start_resets()

    def _start_resets(self) -> None:
        for copy, reset in self._due_resets():
            copy.pending_reset = asyncio.ensure_future(_call_exclusively(copy, reset))

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the copy that plays."""
        if name == "set_wrapper_attr":
            return self.set_wrapper_attr
        return self._current_copy.env.get_wrapper_attr(name)

    async def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets an attribute in all copies."""
        for copy, call in self._attribute_calls(name, value):
            unwrap(await _call_exclusively(copy, call))
        if self._number >= 0:
            self._start_resets()

    async def close(self) -> None:
        """Cancels the resets of spares, and closes the copies."""
        await cancel_and_wait(
            {copy.pending_reset for copy in self._copies if copy.pending_reset is not None}
        )
        for result in [await try_await(copy.env.close) for copy in self._copies]:
            unwrap(result)


async def _call_exclusively(copy: _EnvCopy, call: Callable[[], Any]) -> Result:
    """Makes a call of a copy once its other calls have ended."""
    async with copy.owner:
        return await try_await(call)
