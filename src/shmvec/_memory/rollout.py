"""Rollouts: consecutive steps of all envs in shared memory, written there by the workers.

Two rollouts alternate in one block of memory, so that a program can learn from one while the other
fills.
"""

from __future__ import annotations

import gc
import importlib
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from shmvec._arguments import checked_count
from shmvec._core import Lease, MappedMemory, Results
from shmvec._memory.layout import Layout, Place, memory_placer, total_nbytes
from shmvec._memory.segment import reserve_memory
from shmvec.spaces import ARRAY_SPACES, mapped

if TYPE_CHECKING:
    from shmvec.exchange import Exchange

__all__ = ["Rollout", "Rollouts", "check_arrays", "store"]

_MAX_FRAMES = (1 << 24) - 64  # a request has 24 bits for the frame; 64 are left for the segment


class Rollout:
    """``length`` steps of all envs, which workers write as :meth:`step` makes them.

    Index ``t + 1`` holds the results of the action at index ``t``; index 0 holds the last results
    from before. The content beyond the last step made is not defined. The arrays are in shared
    memory: ``torch.from_numpy`` and DLPack take them as they are. They are yours to change.

    Attributes:
        length: Number of steps.
        observations: ``(length + 1, num_envs, ...)``, nested as the observation space is.
        rewards: float64 ``(length + 1, num_envs)``. ``actions[t]`` has earned ``rewards[t + 1]``.
            With a ``reward_space`` of shape ``(k,)`` there is an axis more.
        terminations: bool ``(length + 1, num_envs)``.
        truncations: bool ``(length + 1, num_envs)``. In autoreset mode NEXT_STEP, an env that has
            ended at ``t`` is reset by the next step, which ignores ``actions[t]``.
        actions: ``(length, num_envs, ...)``, in the dtype of the action space.
        steps: Number of steps made so far.
        within: The loan in which its steps are made; None without one.
    """

    def __init__(
        self,
        exchange: Exchange,
        gather: weakref.ref[Any],
        results: Results,
        first: int,
        length: int,
        lease: Lease,
        actions: Any,
    ) -> None:
        """Takes the frames from ``first`` on; ``ShmVectorEnv.rollout`` calls this."""
        self.length = length
        lead = length + 1, exchange.num_envs
        arrays = results.view(lease, lead)
        self.observations, self.rewards, self.terminations, self.truncations = arrays
        self.actions = actions
        self.steps = 0
        self.within: Any = None
        self._exchange, self._gather = exchange, gather
        self._results, self._first, self._lease = results, first, lease

    def _check_continues(self, first: int, last: int) -> None:
        """Raises RuntimeError unless the last results are at an index of ``first`` to ``last``."""
        if not self._exchange.frames.is_in_rollout_frames(
            self._results, self._first + first, self._first + last
        ):
            raise RuntimeError(
                "this rollout cannot be continued: another one was begun, the envs were stepped "
                "or reset without it, or its last step failed. Begin another one with rollout()"
            )

    def ask(self, envs: npt.NDArray[np.intp], part: Any, index: int, actions: Any) -> None:
        """Asks some envs for a step, and does not wait; other envs may be at other indexes.

        Args:
            envs: The envs.
            part: The same envs, as an index of the arrays.
            index: The index of the actions; results go to the next one.
            actions: The actions of these envs.

        Raises:
            RuntimeError: As :meth:`step`.
            Exception: As ``Exchange.ask``.
        """
        self._check_continues(0, self.length)
        frame = self._first + index + 1
        self._exchange.ask(envs, actions, frame=frame, together=True)
        store(self._exchange.single_action_space, self.actions, (index, part), actions)

    def set_steps(self, steps: int) -> None:
        """Notes that all envs have made so many steps, by :meth:`ask`."""
        self.steps = steps
        if steps == self.length:
            self._exchange.frames.copy_back_from_rollout()

    def step(
        self, actions: Any, *, meanwhile: Callable[[], object] | None = None
    ) -> dict[str, Any]:
        """Steps all envs; the results are at the next index.

        Args:
            actions: As for ``ShmVectorEnv.step``. A copy is kept in ``actions``.
            meanwhile: Called while the envs step.

        Returns:
            The infos, as ``ShmVectorEnv.step`` returns them.

        Raises:
            RuntimeError: The rollout is full, was released, or does not hold the last results any
                more: another one was begun, the envs were stepped or reset without it, or a step
                has failed. Nothing was sent.
            Exception: As for ``ShmVectorEnv.step``. The rollout cannot be continued.
        """
        if self.steps >= self.length:
            raise RuntimeError(
                f"all {self.length} steps of this rollout are made: begin the next one with "
                "rollout()"
            )
        if self.released:
            raise RuntimeError("this rollout was released: begin another one with rollout()")
        self._check_continues(self.steps, self.steps)

        def work() -> None:
            store(self._exchange.single_action_space, self.actions, self.steps, actions)
            if meanwhile is not None:
                meanwhile()

        *_, infos = self._exchange.step(
            actions,
            gather=self._gather(),
            arrays=False,
            frame=self._first + self.steps + 1,
            last=self.steps == self.length - 1,  # results at the last index become the user's
            meanwhile=work,
            within=self.within,
        )
        self.steps += 1
        return infos  # type: ignore[no-any-return]

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Which steps are transitions, bool ``(length, num_envs)``.

        In autoreset mode NEXT_STEP the others reset their env and ignore the action.
        """
        return self._exchange.autoreset.transitions(self.terminations, self.truncations)

    def __repr__(self) -> str:
        """The rollout's size, and how many of its steps were made."""
        return f"Rollout({self.steps} of {self.length} steps, {self.rewards.shape[1]} envs)"

    def release(self) -> None:
        """Gives the memory back for another rollout, which writes over these arrays.

        Not needed if no array of this rollout is left: then the memory is free, too.
        """
        self._lease.release()

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        released: bool = self._lease.released
        return released


class Rollouts:
    """The memory of the rollouts of one vector env, in which two of them alternate."""

    def __init__(self, exchange: Exchange, gather: weakref.ref[Any]) -> None:
        """Prepares for rollouts.

        Args:
            exchange: The exchange that asks the envs.
            gather: The vector env, which gathers infos.
        """
        self._exchange, self._gather = exchange, gather
        self._layout = exchange.layout
        self._action_space = exchange.single_action_space
        self._memory_options: tuple[int, bool] | None = None
        self._part = 1

    def begin(self, length: Any, pin: bool) -> Rollout:
        """A rollout whose index 0 holds the last results.

        Raises:
            TypeError: The length is no integer; the spaces are not of arrays only.
            ValueError: The length is below 1; or the autoreset mode leaves resets to the caller.
            BufferError: Two rollouts are still in use.
            OSError: There is not enough shared memory.
            RuntimeError: The memory cannot be page-locked; or an env was never reset.
        """
        length = checked_count("length", length)
        check_arrays(self._layout, "a rollout")
        if not self._exchange.autoreset.by_worker:
            raise ValueError(
                "a rollout needs envs that are reset when their episodes end: use AutoresetMode "
                "NEXT_STEP or SAME_STEP"
            )
        never_reset = ~self._exchange.moves().any(axis=0)
        if never_reset.any():
            raise RuntimeError(
                f"env {never_reset.argmax()} was never reset, and a rollout begins with what envs "
                "have returned last: call reset() first"
            )
        if self._memory_options != (length, pin):
            self._reserve(length, pin)
        frames = self._exchange.frames
        results = frames.rollouts
        assert results is not None
        count = (length + 1) * self._layout.num_envs
        self._part = self._free_part(results, count)
        lease = results.lease(self._part * count, count)
        first = self._part * (length + 1)
        frames.start_rollout(first)
        offset = self._layout.results_nbytes(2 * (length + 1))
        offset += self._part * self._actions_nbytes(length)
        actions = self._actions(length, memory_placer(lease, offset))
        return Rollout(self._exchange, self._gather, results, first, length, lease, actions)

    def _free_part(self, results: Results, count: int) -> int:
        """The free part of the memory; if both are free, the one not used last time."""
        parts = 1 - self._part, self._part
        for generation in (None, 0, 1, 2):
            if generation is not None:  # cycles, mostly young ones, may keep the arrays alive
                gc.collect(generation)
            for part in parts:
                if not results.is_leased(part * count, count):
                    return part
        raise BufferError(
            "two rollouts are still in use: before a third, delete the arrays and tensors of the "
            "older one (copy what you keep), or call its release()"
        )

    def _reserve(self, length: int, pin: bool) -> None:
        """Reserves memory for two rollouts and hands it to the workers."""
        num_frames = 2 * (length + 1)
        if num_frames > _MAX_FRAMES:
            raise ValueError(
                f"length must be at most {_MAX_FRAMES // 2 - 1:,}, got {length:,}: take several "
                "rollouts"
            )
        # Cleared first, as an interruption may leave workers with other memory than the parent.
        self._memory_options = None
        self._exchange.frames.set_rollouts(None)
        nbytes = self._layout.results_nbytes(num_frames) + 2 * self._actions_nbytes(length)
        descriptor = reserve_memory(nbytes)
        try:
            # An array, whose finalizers run before the memory is unmapped, unlike a mapping's.
            memory = np.asarray(MappedMemory(descriptor, nbytes))
            if pin:
                _page_lock(memory)
            self._exchange.share("rollout", (nbytes, num_frames), descriptor)
        finally:
            os.close(descriptor)
        self._exchange.frames.set_rollouts(self._layout.map_results(memory, num_frames))
        self._memory_options = length, pin
        self._part = 1

    def _actions(self, length: int, place: Place) -> Any:
        """Arrays for the actions of a rollout."""

        def stacked(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
            return place((length, *shape), dtype)

        return create_empty_array(self._action_space, self._layout.num_envs, stacked)

    def _actions_nbytes(self, length: int) -> int:
        return total_nbytes(lambda place: self._actions(length, place))


def check_arrays(layout: Layout, what: str) -> None:
    """Raises TypeError unless actions are arrays and observations are arrays in shared memory."""
    _check_space(layout.observation_space, "observation", what)
    _check_space(layout.action_space, "action", what)
    if layout.observation_messages:
        raise TypeError(f"{what} needs observations in shared memory: shared_memory=True")


def _check_space(space: gym.Space[Any], name: str, what: str) -> None:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for part in parts:
            _check_space(part, name, what)
    elif not isinstance(space, ARRAY_SPACES):
        raise TypeError(f"{what} takes only arrays, and the {name} space holds {space}")


def store(space: gym.Space[Any], arrays: Any, index: Any, values: Any) -> None:
    """Copies a batch to an index of arrays for several batches."""

    def put(array: npt.NDArray[Any], part: Any) -> None:
        array[index] = part

    mapped(space, put, arrays, values)


def _page_lock(memory: npt.NDArray[np.uint8]) -> None:
    """Page-locks memory for transfers to a GPU, until it goes.

    Raises:
        RuntimeError: There is no torch, no CUDA, or CUDA refuses.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise RuntimeError("pin=True page-locks memory by torch, which is not installed") from None
    if not torch.cuda.is_available():
        raise RuntimeError("pin=True page-locks memory for CUDA, which torch does not find here")
    cudart = torch.cuda.cudart()
    address = memory.ctypes.data
    error = int(cudart.cudaHostRegister(address, memory.nbytes, 0))
    if error != 0:
        raise RuntimeError(f"CUDA could not page-lock {memory.nbytes:,} bytes: error {error}")
    finalizer = weakref.finalize(memory, cudart.cudaHostUnregister, address)
    finalizer.atexit = False  # CUDA may have ended before the program's exit
