"""Batches for torch, on a device. Needs torch.

In main memory nothing is copied. To a GPU, all copies are made on a stream of their own, from
page-locked memory, and the policy's stream waits for them: this thread does not. It waits once a
batch, for the actions.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec._loops.collected import Collected
from shmvec.spaces import mapped

__all__ = ["Mirror", "Tensors"]

Space = gym.Space[Any]


class Tensors:
    """Makes tensors of arrays, and arrays of tensors.

    Attributes:
        on_host: Whether the device is main memory.
    """

    def __init__(self, device: Any) -> None:
        """Takes a device: what ``torch.device`` takes.

        Raises:
            ImportError: torch is not installed.
            RuntimeError: There is no such device.
        """
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise ImportError("device= needs torch, which is not installed") from error
        self.device = self._torch.device(device)
        self.on_host: bool = self.device.type == "cpu"
        if not self.on_host:
            if self.device.type != "cuda":
                raise RuntimeError(f"device must be 'cpu' or of CUDA, got {device!r}")
            if not self._torch.cuda.is_available():
                raise RuntimeError(f"device={device!r}, and torch finds no CUDA here")
            self._stream = self._torch.cuda.Stream(self.device)

    # ---- what the policy answers -------------------------------------------------------------

    def read(self, actions: Any) -> Any:
        """Actions as an array: here the thread waits for the device."""
        if isinstance(actions, self._torch.Tensor):
            actions = actions.detach().cpu()
        return np.asarray(actions)

    def keep(self, values: Any) -> Any:
        """What came with them, as a tensor on the device."""
        return self._torch.as_tensor(values).detach().to(self.device, non_blocking=True)

    # ---- what it is asked about --------------------------------------------------------------

    def wrapped(self, array: Any) -> Any:
        """A tensor of the same memory; what is no array stays what it is."""
        return self._torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    def moved(self, space: Space, batch: Any) -> Any:
        """A batch on the device. Its arrays are nobody else's: nothing changes them."""
        if self.on_host:
            return mapped(space, self.wrapped, batch)
        with self.copying() as asking:
            return mapped(space, partial(self._sent, asking), batch)

    def _sent(self, asking: Any, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        # Torch's page-locked memory is used again when the copy is made, and not before.
        sent = self.wrapped(array).pin_memory().to(self.device, non_blocking=True)
        sent.record_stream(asking)  # nor is this, before that stream has done with it
        return sent

    def small(self, array: Any) -> Any:
        """A small array on the device."""
        return self.wrapped(array).to(self.device)

    @contextlib.contextmanager
    def copying(self) -> Any:
        """Copies are made on the stream for them; the caller's waits for these, this thread not."""
        asking = self._torch.cuda.current_stream(self.device)
        self._stream.wait_stream(asking)  # what the memory was used for before
        with self._torch.cuda.stream(self._stream):
            yield asking
        asking.wait_stream(self._stream)

    def finish(self) -> None:
        """Waits for all copies: page-locked memory may be written again."""
        if not self.on_host:
            self._stream.synchronize()

    def empty(self, array: Any) -> Any:
        """A tensor on the device for what is in an array."""
        like = self.wrapped(array)
        return like if self.on_host else self._torch.empty_like(like, device=self.device)


class Mirror:
    """A rollout's tensors, which are filled as the policy is asked: they need no copy later."""

    def __init__(self, tensors: Tensors, rollout: Collected, seen: Space, acted: Space) -> None:
        """Makes tensors for a rollout of which no step is made."""
        self._tensors, self._rollout, self._seen, self._acted = tensors, rollout, seen, acted
        self._host = rollout.observations
        self._observations = mapped(seen, tensors.empty, rollout.observations)

    def observations(self, index: int, part: Any, runs: Sequence[slice]) -> Any:
        """Those of a step of some envs.

        Args:
            index: The step.
            part: The envs, as an index.
            runs: The same as slices.
        """
        self._copy(index, runs)
        return mapped(self._seen, lambda tensor: tensor[index][part], self._observations)

    def _copy(self, index: int, runs: Sequence[slice]) -> None:
        if self._tensors.on_host:
            return
        with self._tensors.copying():
            for run in runs:
                mapped(
                    self._seen, partial(self._copy_run, index, run), self._observations, self._host
                )

    def _copy_run(self, index: int, run: slice, target: Any, source: Any) -> None:
        wrapped = self._tensors.wrapped(source[index, run])
        target[index, run].copy_(wrapped, non_blocking=True)

    def finish(self) -> None:
        """Makes all that the rollout holds tensors."""
        rollout, tensors = self._rollout, self._tensors
        self._copy(rollout.length, [slice(None)])
        rollout.observations = self._observations
        rollout.actions = mapped(self._acted, tensors.small, rollout.actions)
        rollout.rewards = tensors.small(rollout.rewards)
        rollout.terminations = tensors.small(rollout.terminations)
        rollout.truncations = tensors.small(rollout.truncations)
        tensors.finish()
