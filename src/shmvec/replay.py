"""A replay: transitions of a vector env in shared memory, written by its workers, sampled in C.

It differs from an ordinary replay buffer (Lin 1992; Mnih et al. 2015) in three ways. Nobody adds to
it: workers record what their envs do. Each observation is stored once, not for two transitions, and
so is each frame of a stack. Batches are filled by compiled code; large ones by threads without
the GIL, before the call that asks for them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from shmvec._arguments import checked_count, existing_env_ids
from shmvec._core import MappedMemory
from shmvec._core.replay import Sampler
from shmvec._cores import usable_cores
from shmvec._memory.log import LogLayout, PiecewiseReservation, open_log
from shmvec._memory.rollout import check_arrays
from shmvec._memory.segment import memory_file
from shmvec.exchange import Exchange
from shmvec.spaces import mapped  # isort: split

import fcntl  # last: Windows lacks it, and learns before that shmvec needs Linux

__all__ = ["Replay", "ReplayBatch", "ReplayStats"]

_MIN_DEPTH = 16  # records of an env; of fewer the sampler could draw none
_MAX_SPARE = 64  # oldest records that are not drawn, because workers may be overwriting them
_PREFETCH_BYTES = 1 << 20  # smaller batches are put together faster than a thread wakes up
_MAX_THREADS = 4
_FORMAT = 1  # of saved replays
_ROWS_FILE, _INFO_FILE, _PRIORITIES_FILE = "rows.bin", "replay.json", "priorities.npz"
# What json, NumPy and zipfile raise when they read a damaged file.
_READ_ERRORS = ValueError, TypeError, KeyError, EOFError, OverflowError, RuntimeError, BadZipFile
_METADATA_KEYS = {"num_envs", "depth", "newest", "frame_stack", "zeros", "n_step", "discount"}
_METADATA_KEYS |= {"prioritized", "arrays"}
_MAX_RECORDS = 1 << 48  # that an env can have made; a file that says more is damaged
_MIN_PRIORITY = 1e-6
_MAX_PRIORITY = 1e100  # with the exponent applied; then sums and quotients are finite


@dataclass(frozen=True)
class ReplayBatch:
    """A batch of transitions: NumPy arrays, or torch tensors, of ``size`` rows.

    Attributes:
        observations: ``(size, ...)``, nested as the observation space is.
        actions: ``(size, ...)``, in the dtype of the action space.
        rewards: float32 ``(size,)``: the discounted sum over the steps of the transition. With a
            ``reward_space`` of shape ``(k,)``: ``(size, k)``.
        next_observations: As ``observations``: those after the last of these steps. At an episode's
            end, its final observation.
        terminations: bool ``(size,)``: whether the last step has terminated the episode.
        truncations: bool ``(size,)``: whether the last step has truncated the episode.
        discounts: float32 ``(size,)``: the factor of the value of ``next_observations``: 0 where
            the episode has terminated, else ``discount ** steps``.
        indices: int64 ``(size,)``: always a NumPy array, for ``update_priorities`` and ``at``.
        weights: float32 ``(size,)``: importance weights, of which the largest is 1. Without
            priorities all are 1.
    """

    observations: Any
    actions: Any
    rewards: Any
    next_observations: Any
    terminations: Any
    truncations: Any
    discounts: Any
    indices: npt.NDArray[np.int64]
    weights: Any


@dataclass(frozen=True)
class ReplayStats:
    """What a replay holds, and how fast it is filled and drawn from.

    Attributes:
        capacity: Number of records that fit. A record is a step, or an observation that begins an
            episode.
        records: Number of records in it.
        transitions: Number of transitions in it.
        recorded: Number of records made so far, overwritten ones included.
        sampled: Number of transitions drawn so far.
        recorded_per_s: Records made per second, since the replay was made.
        sampled_per_s: Transitions drawn per second, since the replay was made.
        oldest: Age of the oldest record, in records of its env.
        nbytes: Size of a full replay in bytes.
        reserved: Bytes of memory, or of the disk, that are reserved so far.
    """

    capacity: int
    records: int
    transitions: int
    recorded: int
    sampled: int
    recorded_per_s: float
    sampled_per_s: float
    oldest: int
    nbytes: int
    reserved: int


class Replay:
    """The last steps of all envs of a vector env, of which batches are drawn at random.

    As soon as it is made, it records all steps and resets of the envs, no matter what asks for
    them: a loop over ``step``, partial batches, a Pipeline, a rollout. The workers record them: the
    caller neither copies nor waits. No transition spans two episodes, or includes a step that was
    lost with its worker. In lockstep the batches are the same for any number of workers.

    An env's newest record can be drawn once its results were taken. Its oldest records, up to 64,
    cannot, since they are about to be overwritten. Batches of more than 1 MB are drawn one call
    ahead: ``sample`` returns what the call before has drawn, if the arguments are the same. With
    priorities no batch is drawn ahead, so each follows the latest priorities.

    Attributes:
        capacity: Number of records that fit, of all envs together.
        n_step: Largest number of steps whose rewards are summed.
        discount: The factor by which a reward counts less for each step that it comes later.
        frame_stack: Frames of an observation; 1 if observations are stored as they are.

    Example:
        >>> import shmvec
        >>> envs = shmvec.make_vec("CartPole-v1", 4)
        >>> replay = shmvec.Replay(envs, 10_000, seed=0)
        >>> _ = envs.reset(seed=0)
        >>> for _ in range(50):
        ...     _ = envs.step([0, 1, 0, 1])
        >>> batch = replay.sample(256)
        >>> batch.observations.shape, batch.actions.shape, batch.rewards.dtype
        ((256, 4), (256,), dtype('float32'))
        >>> replay.close()
        >>> envs.close()
    """

    def __init__(
        self,
        envs: Any,
        capacity: int,
        *,
        n_step: int = 1,
        discount: float = 0.99,
        frame_stack: int | str = "auto",
        padding: str = "auto",
        prioritized: float | None = None,
        on_disk: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> None:
        """Begins to record.

        Args:
            envs: A :class:`~shmvec.ShmVectorEnv`, or an object with its ``exchange``, without
                wrappers around it. No env may be in flight.
            capacity: Number of records to keep, of all envs together. It is rounded up to a
                multiple of the number of envs. An episode of n steps has n + 1 records.
            n_step: Number of steps whose rewards are summed; at an episode's end there are fewer.
            discount: The factor by which a reward counts less for each step that it comes later.
            frame_stack: Number of frames in an observation. If the envs' observations have that
                many along their first axis, only the last frame of each is stored; else each
                observation is one frame, and batches have stacks of them. "auto": as many as the
                envs' FrameStackObservation has. 1: observations are stored as they are.
            padding: The frames of a stack that precede an episode: "reset", copies of its first
                frame, or "zero". "auto": as FrameStackObservation does.
            prioritized: The exponent of priorities, alpha in Schaul et al. 2016, who take 0.6.
                None: all transitions are equally likely.
            on_disk: A folder in which the records are kept, in a file that is mapped into memory.
                It can be loaded after a crash. None: the records are in shared memory.
            seed: Seed of the draws.

        Raises:
            ValueError: A number is out of range; envs are in flight; another replay records these
                envs.
            TypeError: ``envs`` is wrapped, or not one of shmvec's; observations or actions are
                not arrays of fixed size in shared memory.
            OSError: There is not enough free memory, or space on the disk, for the capacity; or the
                folder holds a replay already (FileExistsError).
            ClosedEnvironmentError: The vector env was closed.
            AlreadyPendingCallError: Another call of the vector env is under way.
        """
        exchange = _exchange_of(envs)
        self._set_parameters(n_step, discount, prioritized)
        check_arrays(exchange.layout, "a replay")
        space = exchange.layout.observation_space
        self.frame_stack, zeros = _frame_stack(exchange, space, frame_stack, padding)
        newest = self.frame_stack > 1 and _is_stacked(space, self.frame_stack)
        depth = -(-checked_count("capacity", capacity) // exchange.num_envs)
        min_depth = self._min_depth
        if depth < min_depth:
            raise ValueError(
                f"capacity must be at least {min_depth * exchange.num_envs:,}, {min_depth} for "
                f"each of {exchange.num_envs} envs, got {capacity:,}"
            )
        layout = LogLayout.for_segment(exchange.layout, depth, newest, zeros)
        self._start_recording(exchange, layout, on_disk, seed)

    # ---- making it ---------------------------------------------------------------------------

    def _set_parameters(self, n_step: Any, discount: Any, prioritized: Any) -> None:
        self.n_step = checked_count("n_step", n_step)
        if not 0.0 < discount <= 1.0:
            raise ValueError(f"discount must be above 0 and at most 1, got {discount!r}")
        if prioritized is not None and not 0.0 < prioritized < float("inf"):
            raise ValueError(f"prioritized must be None or above 0, got {prioritized!r}")
        self.discount = float(discount)
        self._alpha = None if prioritized is None else float(prioritized)

    @property
    def _min_depth(self) -> int:
        """The number of records of an env, of which at least one transition can be drawn."""
        return max(_MIN_DEPTH, 2 * (self.n_step + self.frame_stack))

    def _start_recording(
        self,
        exchange: Exchange,
        layout: LogLayout,
        on_disk: str | os.PathLike[str] | None,
        seed: int | None,
        source: Path | None = None,
    ) -> None:
        """Makes the log, fills it from the ``source`` folder, and has the workers write to it."""
        self.capacity = layout.depth * layout.num_envs
        self._exchange, self._layout = exchange, layout
        self._folder = None if on_disk is None else Path(on_disk).resolve()
        self._rng = np.random.default_rng(seed)
        if exchange.log is not None and not exchange.log.ended:
            raise ValueError("another replay records these envs: close() it first")
        in_place = self._folder is not None and source == self._folder
        if self._folder is not None and not in_place and (self._folder / _INFO_FILE).exists():
            raise FileExistsError(
                f"{self._folder} holds a replay: continue it by Replay.load(folder, envs, "
                "on_disk=folder), or take another folder, or remove this one"
            )
        with exchange.lend("replay"):
            descriptor = _open_file(self._folder, new=not in_place)
            folder = None if self._folder is None else str(self._folder)
            self._storage = PiecewiseReservation(descriptor, layout, folder)
            try:
                memory = np.asarray(MappedMemory(descriptor, layout.nbytes))
                self._log = layout.make_log(memory, Sampler)
                if source is not None:
                    self._read_rows(source, copy=not in_place)
                observations, actions = self._log.arrays
                self._log.prepare(
                    _leaves(layout.observation_space, observations),
                    _leaves(layout.action_space, actions),
                    self._storage.reserve,
                    n_step=self.n_step,
                    discount=self.discount,
                    stack=self.frame_stack,
                    prioritized=self._alpha is not None,
                    threads=min(_MAX_THREADS, max(1, usable_cores() // 4)),
                    spare=min(_MAX_SPARE, layout.depth // 8),
                )
                if self._folder is not None:
                    _write_metadata(self._folder, self._metadata())
                sizes = layout.depth, int(layout.last_frame_only), int(layout.zero_padded)
                exchange.share("log", (layout.nbytes, open_log, *sizes), descriptor)
                exchange.log = self._log
            except BaseException:
                self._storage.close()
                raise
        self._lock = threading.Lock()  # one batch is drawn at a time
        self._next_batch: tuple[tuple[int, Any, float], Any] | None = None  # arguments, batch
        self._sampled = 0
        self._start_time = time.monotonic()
        self._initial_records = self.recorded

    def close(self) -> None:
        """Ends the recording. What was recorded can still be sampled.

        If envs are in flight, the workers go on recording until another replay is made, this one is
        closed again, or the envs are closed.
        """
        self._log.finish()
        exchange = self._exchange
        if exchange.log is self._log:
            exchange.catch_up()
            self._log.ended = True
            with contextlib.suppress(Exception), exchange.lend("replay"):
                exchange.share("log")
                exchange.log = None
        if exchange.log is not self._log:
            self._storage.close()

    def __del__(self) -> None:
        """Lets another replay record the envs."""
        if hasattr(self, "_log"):
            self._log.ended = True

    def interrupt(self, env_ids: npt.ArrayLike | None = None) -> None:
        """Separates the next steps of envs from their records, for envs whose states you have set.

        Args:
            env_ids: The envs, int ``(n,)``, none of them in flight. None: all.

        Raises:
            ValueError: There is no such env, or it is named twice.
        """
        num_envs = self._exchange.num_envs
        envs = np.arange(num_envs) if env_ids is None else existing_env_ids(env_ids, num_envs)
        for env in envs.tolist():
            self._log.interrupt(env)

    # ---- drawing -----------------------------------------------------------------------------

    @property
    def recorded(self) -> int:
        """The number of records made so far, overwritten ones included."""
        self._exchange.catch_up()
        return int(self._log.counts.sum())

    def __len__(self) -> int:
        """The number of transitions in it.

        With ``n_step`` or stacked frames, a few of an env's oldest and newest cannot be drawn.
        """
        self._exchange.catch_up()
        return int(self._log.num_transitions)

    def sample(self, size: int, *, device: Any = None, beta: float = 0.4) -> ReplayBatch:
        """Draws transitions at random, with replacement.

        Args:
            size: Number of transitions.
            device: A torch device, on which the batch's tensors are. None: the batch has NumPy
                arrays.
            beta: The exponent of importance weights, if the replay has priorities.

        Returns:
            The batch, whose arrays no later call changes.

        Raises:
            RuntimeError: There is no transition yet, or no such device.
            ImportError: torch is not installed.
            ValueError: ``size`` is not positive, or ``beta`` is not from 0 to 1.
        """
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"beta must be from 0 to 1, got {beta!r}")
        key = checked_count("size", size), device, beta
        nbytes = self._layout.row_nbytes * self.frame_stack * size
        with self._lock:
            self._exchange.catch_up()
            if self._next_batch is not None and self._next_batch[0] == key:
                pending = self._next_batch[1]
            else:
                pending = self._draw(*key)
            self._next_batch = None
            self._log.finish()
            if self._alpha is None and nbytes > _PREFETCH_BYTES:
                self._next_batch = key, self._draw(*key)
            self._sampled += size
        return pending.batch()  # type: ignore[no-any-return]

    def at(self, indices: npt.ArrayLike) -> ReplayBatch:
        """The transitions with these indices, as ``sample`` has returned them.

        Raises:
            IndexError: A transition was overwritten, or there never was one of that index.
        """
        numbers = _checked_indices(indices)
        with self._lock:
            self._exchange.catch_up()
            self._next_batch = None
            draw = partial(self._log.choose, numbers)
            pending = _PendingBatch(self, len(numbers), None, 0.0, draw)
            self._log.finish()
        return pending.batch()

    def holds(self, indices: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether ``at`` can return each of these transitions; false for negative indices."""
        self._exchange.catch_up()
        present: npt.NDArray[np.bool_] = self._log.holds(_checked_indices(indices))
        return present

    def latest(self) -> npt.NDArray[np.int64]:
        """The index of each env's newest transition.

        Returns:
            int64 ``(num_envs,)``; -1 for an env that has made no transition, or whose last step was
            none. A step that is in flight does not count.
        """
        self._exchange.catch_up()
        latest: npt.NDArray[np.int64] = self._log.latest()
        return latest

    def update_priorities(self, indices: npt.ArrayLike, priorities: npt.ArrayLike) -> None:
        """Sets the priorities of transitions, for example the absolute errors of their values.

        Args:
            indices: int ``(n,)``, of a batch. Transitions that were overwritten are skipped.
            priorities: float ``(n,)``, not negative.

        Raises:
            ValueError: The replay has no priorities; the shapes differ; or a priority is negative
                or not finite.
        """
        if self._alpha is None:
            raise ValueError("this replay has no priorities: make it with prioritized=0.6")
        numbers = _checked_indices(indices)
        if hasattr(priorities, "detach"):
            priorities = priorities.detach().cpu()
        values = np.asarray(priorities, np.float64)
        if numbers.ndim != 1 or values.shape != numbers.shape:
            raise ValueError(
                f"there must be one priority for each index, got {numbers.shape} indices and "
                f"{values.shape} priorities"
            )
        if not (np.isfinite(values).all() and (values >= 0).all() and (numbers >= 0).all()):
            raise ValueError("priorities must be finite and not negative, and so must indices")
        with np.errstate(over="ignore"):
            powers = (values + _MIN_PRIORITY) ** self._alpha
        powers = np.maximum(powers, 1 / _MAX_PRIORITY)  # with 0 it could never be drawn
        if (powers > _MAX_PRIORITY).any():
            raise ValueError(
                f"priorities to the power of {self._alpha} must be at most {_MAX_PRIORITY}, got "
                f"the priority {values.max()}"
            )
        self._log.update(numbers, powers)

    def _draw(self, size: int, device: Any, beta: float) -> _PendingBatch:
        return _PendingBatch(self, size, device, beta, partial(self._log.draw, self._rng, size))

    # ---- statistics --------------------------------------------------------------------------

    def stats(self) -> ReplayStats:
        """What it holds, and how fast it is filled and drawn from."""
        recorded = self.recorded
        elapsed = max(time.monotonic() - self._start_time, 1e-9)
        records = np.minimum(self._log.counts, self._layout.depth)
        return ReplayStats(
            capacity=self.capacity,
            records=int(records.sum()),
            transitions=int(self._log.num_transitions),
            recorded=recorded,
            sampled=self._sampled,
            recorded_per_s=(recorded - self._initial_records) / elapsed,
            sampled_per_s=self._sampled / elapsed,
            oldest=int(records.max(initial=0)),
            nbytes=self._layout.nbytes,
            reserved=self._storage.nbytes,
        )

    def __repr__(self) -> str:
        """The number of transitions, and the capacity."""
        return f"Replay({len(self):,} transitions, capacity={self.capacity:,})"

    # ---- saving ------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves what was recorded so far, without the steps in flight.

        Another thread may step the envs meanwhile: the oldest records, which that overwrites, are
        not saved either. The folder gets ``rows.bin``, a copy of the memory, and ``replay.json``,
        which says where its arrays lie: docs/details/replay.md describes them. If the call is
        interrupted, the folder has what it had before.

        Raises:
            OSError: The folder cannot be written.
        """
        self._exchange.catch_up()
        with self._lock:
            self._log.finish()
            self._next_batch = None
            counts, priorities, largest = self._log.snapshot()
            metadata = self._metadata() | {"random": self._rng.bit_generator.state}
        folder = Path(folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if folder != self._folder:
            with _replacing(folder / _ROWS_FILE) as file:
                self._write_rows(file, counts)
        if priorities is not None:
            with _replacing(folder / _PRIORITIES_FILE) as file:
                np.savez(file, priorities=priorities, counts=counts, largest=largest)
        _write_metadata(folder, metadata)

    def _write_rows(self, file: IO[bytes], counts: npt.NDArray[np.int64]) -> None:
        """Writes the memory as it was when the envs had made ``counts`` records."""
        memory = memoryview(self._log.memory)
        ranges = self._storage.ranges
        file.truncate(self._layout.nbytes)
        for offset, nbytes in ranges:
            file.seek(offset)
            file.write(memory[offset : offset + nbytes])
        # Records that were overwritten during the copy are marked as broken.
        (committed, _), (first_kind, num_rows) = ranges[0], ranges[3]
        file.seek(first_kind)
        kinds = np.frombuffer(bytearray(file.read(num_rows)), np.uint8)
        self._log.mark_overwritten(kinds, counts)
        file.seek(first_kind)
        file.write(kinds.tobytes())
        file.seek(committed)
        file.write(counts.tobytes())

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        envs: Any,
        *,
        on_disk: str | os.PathLike[str] | None = None,
        seed: int | None = None,
    ) -> Replay:
        """A replay that continues a saved one, or one that had ``on_disk``.

        Args:
            folder: The folder of the saved replay.
            envs: As for ``Replay``. Their number and spaces must be those of the saved replay. The
                records of their next steps are separate from the saved ones, even if the envs'
                states were restored.
            on_disk: As for ``Replay``. With the same folder, the replay continues in it.
            seed: As for ``Replay``. None: the draws continue as if it had not been saved.

        Raises:
            ValueError: The saved replay is of other envs, of another version, or damaged.
            OSError: It cannot be read; and as for ``Replay``.
        """
        folder = Path(folder).resolve()
        self = cls.__new__(cls)
        exchange = _exchange_of(envs)
        with _reporting_damage(folder / _INFO_FILE):
            metadata = json.loads((folder / _INFO_FILE).read_text("utf-8"))
        if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
            raise ValueError(f"{folder} holds no replay of this version of shmvec")
        with _reporting_damage(folder / _INFO_FILE):
            if missing := _METADATA_KEYS - metadata.keys():
                raise ValueError(f"it lacks {sorted(missing)}")
            self._set_parameters(metadata["n_step"], metadata["discount"], metadata["prioritized"])
            self.frame_stack = checked_count("frame_stack", metadata["frame_stack"])
            depth = checked_count("depth", metadata["depth"])
            newest, zeros = metadata["newest"], metadata["zeros"]
            layout = LogLayout.for_segment(exchange.layout, depth, newest, zeros)
            rng = np.random.default_rng(seed)
            if seed is None and "random" in metadata:
                rng.bit_generator.state = metadata["random"]
        if metadata["arrays"] != _array_table(layout):
            raise ValueError(
                f"{folder} holds a replay of {metadata['num_envs']} envs with other observations, "
                f"actions or rewards than these {exchange.num_envs}"
            )
        space = exchange.layout.observation_space
        stacked = self.frame_stack > 1 and _is_stacked(space, self.frame_stack)
        if depth < self._min_depth or layout.last_frame_only != stacked:
            raise ValueError(f"{folder / _INFO_FILE} is damaged: its numbers contradict each other")
        priorities = None
        if self._alpha is not None and (folder / _PRIORITIES_FILE).exists():
            priorities = _read_priorities(folder / _PRIORITIES_FILE, layout)
        self._start_recording(exchange, layout, on_disk, seed, folder)
        self._rng = rng
        if priorities is not None:
            self._log.set_priorities(*priorities)
        return self

    def _read_rows(self, folder: Path, copy: bool) -> None:
        """Checks the rows of a saved replay; copies them, unless its file is mapped."""
        rows = folder / _ROWS_FILE
        if rows.stat().st_size != self._layout.nbytes:
            raise ValueError(f"{rows} is damaged: its size is wrong")
        memory = memoryview(self._log.memory)
        with rows.open("rb") as file:
            if copy:
                _lock_file(file.fileno(), rows, fcntl.LOCK_SH)

            def read() -> None:
                for offset, nbytes in self._storage.ranges if copy else ():
                    file.seek(offset)
                    file.readinto(memory[offset : offset + nbytes])

            read()  # the counts, which say how many rows there are
            counts = self._log.counts
            if counts.min() < 0 or counts.max() > _MAX_RECORDS:
                raise ValueError(f"{rows} is damaged: it says that envs have {counts} records")
            self._storage.reserve(min(int(counts.max()) + 2, self._layout.depth))
            read()

    def _metadata(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "num_envs": self._layout.num_envs,
            "depth": self._layout.depth,
            "newest": self._layout.last_frame_only,
            "frame_stack": self.frame_stack,
            "zeros": self._layout.zero_padded,
            "n_step": self.n_step,
            "discount": self.discount,
            "prioritized": self._alpha,
            "arrays": _array_table(self._layout),
        }


class _PendingBatch:
    """A batch that is being put together."""

    def __init__(
        self, replay: Replay, size: int, device: Any, beta: float, draw: Callable[[], Any]
    ) -> None:
        """Allocates the arrays, draws, and has the threads fill them."""
        self._device = device
        self._torch = None
        if device is not None:
            import torch

            self._torch = torch
            self._device = torch.device(device)
        self._space = replay._layout.observation_space
        self._action_space = replay._layout.action_space
        observations, actions = replay._log.arrays
        stack = (replay.frame_stack,) if replay.frame_stack > 1 else ()
        empty = partial(self._empty_array, replay._log, count(), size)
        observed = mapped(self._space, partial(empty, stack), observations)
        next_observed = mapped(self._space, partial(empty, stack), observations)
        actions = mapped(self._action_space, partial(empty, ()), actions)
        self._nested = observed, next_observed, actions
        targets = [_leaves(self._space, each) for each in (observed, next_observed)]
        targets.append(_leaves(self._action_space, actions))
        while True:
            rewards, discounts, terminations, truncations, self._indices, probabilities = draw()
            if replay._log.begin(*targets):
                break
        if probabilities is None:
            weights = np.ones(size, np.float32)
        else:
            weights = (probabilities / probabilities.min()) ** -beta
        self._per_row = [rewards, terminations, truncations, discounts, weights.astype(np.float32)]

    def _empty_array(
        self,
        log: Sampler,
        numbers: Iterator[int],
        size: int,
        stack: tuple[int, ...],
        rows: npt.NDArray[Any],
    ) -> Any:
        """An array of ``size`` rows, page-locked if it is to be copied to a GPU."""
        shape = size, *stack, *rows.shape[1:]
        if self._torch is None or self._device.type == "cpu":
            return log.output_array(next(numbers), shape, rows.dtype)
        like = self._torch.from_numpy(rows[:0]).dtype
        return self._torch.empty(shape, dtype=like, pin_memory=True).numpy()

    def batch(self) -> ReplayBatch:
        """The batch, once the threads have filled its arrays."""
        observations, next_observations, actions = self._nested
        rewards, terminations, truncations, discounts, weights = map(self._to_device, self._per_row)
        return ReplayBatch(
            mapped(self._space, self._to_device, observations),
            mapped(self._action_space, self._to_device, actions),
            rewards,
            mapped(self._space, self._to_device, next_observations),
            terminations,
            truncations,
            discounts,
            self._indices,
            weights,
        )

    def _to_device(self, array: npt.NDArray[Any]) -> Any:
        if self._torch is None:
            return array
        # The array may be freed meanwhile: torch reuses page-locked memory only after the copy.
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)


def _leaves(space: gym.Space[Any], arrays: Any) -> list[npt.NDArray[Any]]:
    """The arrays that are nested as a space is, in order."""
    leaves: list[npt.NDArray[Any]] = []
    mapped(space, leaves.append, arrays)
    return leaves


def _checked_indices(indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
    array = np.asarray(indices)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"indices must be integers, got {array.dtype}")
    return np.ascontiguousarray(array, np.int64)


def _exchange_of(envs: Any) -> Exchange:
    exchange = envs
    if not isinstance(envs, Exchange) and hasattr(type(envs), "exchange"):  # wrappers have none
        exchange = envs.exchange
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "a replay records a ShmVectorEnv, without wrappers around it, got "
            f"{type(envs).__name__}: wrap the single envs instead, or record the vector env below "
            "the wrappers: envs.unwrapped"
        )
    exchange.check_open()
    return exchange


def _frame_stack(
    exchange: Exchange, space: gym.Space[Any], frames: Any, padding: str
) -> tuple[int, bool]:
    """The number of frames of an observation, and whether zeros precede an episode."""
    if padding not in ("auto", "reset", "zero"):
        raise ValueError(f'padding must be "auto", "reset" or "zero", got {padding!r}')
    wrapper = None  # the frames and the padding of the envs' FrameStackObservation
    if frames == "auto" or padding == "auto":
        with contextlib.suppress(AttributeError):
            wrapper = (
                exchange.call("stack_size", envs=[0])[0],
                exchange.call("padding_type", envs=[0])[0],
            )
    exact = wrapper is None or wrapper[1] == "reset" or (wrapper[1] == "zero" and _has_zero(space))
    if frames == "auto":
        frames = 1
        if wrapper is not None and _is_stacked(space, wrapper[0]) and exact:
            frames = wrapper[0]
    frames = checked_count("frame_stack", frames)
    if frames > 1 and not isinstance(space, spaces.Box):
        raise TypeError(f"frame_stack={frames} needs observations of a Box space, got {space}")
    if padding == "auto":
        if frames > 1 and not exact:
            raise ValueError(
                f"frame_stack={frames}: the envs' FrameStackObservation pads an episode with "
                "neither its first frame nor zeros. Take frame_stack=1, or choose by padding="
            )
        padding = "reset" if wrapper is None else wrapper[1]
    return frames, padding == "zero"


def _is_stacked(space: gym.Space[Any], frames: int) -> bool:
    """Whether observations have ``frames`` frames along their first axis."""
    return isinstance(space, spaces.Box) and len(space.shape) > 1 and space.shape[0] == frames


def _has_zero(space: gym.Space[Any]) -> bool:
    """Whether zeros are in a space; if not, FrameStackObservation pads with the nearest values."""
    return isinstance(space, spaces.Box) and bool(((space.low <= 0) & (space.high >= 0)).all())


@contextlib.contextmanager
def _reporting_damage(path: Path) -> Iterator[None]:
    """Turns the errors of reading a damaged file into ValueErrors that name it."""
    try:
        yield
    except OSError:
        raise
    except _READ_ERRORS as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _open_file(folder: Path | None, new: bool) -> int:
    """A descriptor of the file of rows in a folder; without a folder, of new memory."""
    if folder is None:
        return memory_file()
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / _ROWS_FILE
    descriptor = _open_locked(rows)
    if new:  # a replay that was closed may have the old file mapped
        rows.unlink()
        os.close(descriptor)
        descriptor = _open_locked(rows)
    return descriptor


def _open_locked(rows: Path) -> int:
    """A descriptor of a file of rows, which stays locked while it is open or mapped."""
    descriptor = os.open(rows, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock_file(descriptor, rows, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock_file(descriptor: int, rows: Path, lock: int) -> None:
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = "another replay writes this file: close() it first, or take another folder"
        raise OSError(error.errno, message, str(rows)) from None
    except OSError:
        pass  # this file system has no locks


def _array_table(layout: LogLayout) -> list[list[Any]]:
    """The name, offset, dtype and shape of each array."""
    first = ["committed", "written", "interrupted", "kinds", "rewards"]
    names = chain(first, repeat("observations and actions"))
    return [
        [name, array.offset, array.dtype.str, list(array.shape)]
        for name, array in zip(names, layout.array_places, strict=False)
    ]


def _read_priorities(
    path: Path, layout: LogLayout
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], float]:
    """The saved priorities of all rows, the number of records of each env, and the largest."""
    with _reporting_damage(path), path.open("rb") as file, np.load(file) as arrays:
        priorities = arrays["priorities"].astype(np.float64, casting="safe")
        counts = arrays["counts"].astype(np.int64, casting="safe")
        largest = float(arrays["largest"])
        if (
            priorities.shape != (layout.depth * layout.num_envs,)
            or counts.shape != (layout.num_envs,)
            or not ((priorities >= 0) & (priorities <= largest)).all()
            or not 0 < largest <= _MAX_PRIORITY
        ):
            raise ValueError("they do not fit the replay's transitions")
    return priorities, counts, largest


def _write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    with _replacing(folder / _INFO_FILE) as file:
        file.write(json.dumps(metadata, indent=1).encode())


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which replaces ``path`` at once when it is complete, and is removed if not."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w+b") as file:
            yield file
        os.replace(new, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink()
        if isinstance(error, OSError) and error.filename is None:  # of a write, for example
            reason = error.strerror or str(error)
            raise OSError(error.errno or errno.EIO, reason, str(path)) from error
        raise
