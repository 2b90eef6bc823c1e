"""A replay: transitions of a vector env in shared memory, written by its workers, sampled in C.

Like a replay buffer (Lin 1992; Mnih et al. 2015) with these differences: nobody adds to it, for
workers record what their envs do; an observation is stored once, not as one transition's next
observation and another's observation; of a stack of frames, each frame once; and batches are put
together by compiled code, large ones by threads without the GIL and ahead of the call that asks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
from shmvec._memory.log import LogLayout, Piecewise, open_log
from shmvec._memory.rollout import check_arrays
from shmvec._memory.segment import memory_file
from shmvec.exchange import Exchange
from shmvec.spaces import mapped

__all__ = ["Replay", "ReplayBatch", "ReplayStats"]

_LEAST_DEPTH = 16  # records of an env; fewer than the sampler leaves alone would leave none
_SPARE_MOST = 64  # records that are not drawn, so that batches can be put together meanwhile
_AHEAD_BYTES = 1 << 20  # smaller batches are put together sooner than a thread is woken
_THREADS_MOST = 4
_FORMAT = 1  # of saved replays
_ROWS, _ABOUT, _PRIORITIES = "rows.bin", "replay.json", "priorities.npz"
_DAMAGES = ValueError, TypeError, KeyError, EOFError, OverflowError, RuntimeError  # of readers
_KEYS = {"num_envs", "depth", "newest", "frame_stack", "zeros", "n_step", "discount"}
_KEYS |= {"prioritized", "arrays"}
_RECORDS_MOST = 1 << 48  # of an env, ever
_LEAST_PRIORITY = 1e-6
_LARGEST_PRIORITY = 1e100  # so that sums of them are finite, and quotients


@dataclass(frozen=True)
class ReplayBatch:
    """Transitions that were drawn: arrays, or torch's tensors, of ``size`` rows.

    Attributes:
        observations: ``(size, ...)``, nested as the observation space is.
        actions: ``(size, ...)``, in the dtype of the action space.
        rewards: float32 ``(size,)``: the discounted sum over the steps of the transition.
        next_observations: As ``observations``: those after the last of these steps. At an episode's
            end, its final observation.
        terminations: bool ``(size,)``: whether the last step has terminated the episode.
        truncations: bool ``(size,)``.
        discounts: float32 ``(size,)``: what the value of ``next_observations`` counts, 0 where the
            episode has terminated, else ``discount ** steps``.
        indices: int64 ``(size,)``: NumPy's in any case, for ``update_priorities`` and ``at``.
        weights: float32 ``(size,)``: importance weights, the largest is 1; 1 without priorities.
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
    """What a replay holds.

    Attributes:
        capacity: Records that it holds at most: steps, and observations that begin episodes.
        records: Records that it holds.
        transitions: Transitions that it holds.
        recorded: Records that were made so far, those that were overwritten included.
        sampled: Transitions that were drawn so far.
        recorded_per_s: Records a second, since it was made.
        sampled_per_s: Transitions drawn a second, since it was made.
        oldest: How many records ago the oldest record of an env was made.
        nbytes: Bytes of all of it.
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

    From its making on, all steps and resets of the envs are recorded, no matter what asks for them:
    a loop over ``step``, partial batches, a Pipeline, a rollout. They are recorded by the workers:
    the caller neither copies nor waits. A transition is never of two episodes, nor of a step that
    was lost with its worker. In lockstep batches are the same for any number of workers.

    Of each env the newest record is drawn once its results were taken. The oldest records, up to 64
    of an env, are not, since they are about to be overwritten. Batches of more than 1 MB are put
    together ahead: what ``sample`` returns was drawn at the call before, if that asked for as much.
    With priorities each batch is drawn by the latest ones.

    Attributes:
        capacity: Number of records that are kept, of all envs together.
        n_step: Steps whose rewards are summed, at most.
        discount: The factor of a reward that comes a step later.
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
            envs: A :class:`~shmvec.ShmVectorEnv`, or what has its ``exchange``, without wrappers
                around it. No call may wait for its results.
            capacity: Number of records to keep, of all envs together, rounded up to as many of
                each. An episode of n steps has n + 1.
            n_step: Steps whose rewards are summed, at most: fewer at an episode's end.
            discount: The factor of a reward that comes a step later.
            frame_stack: Frames of an observation, along its first axis, of which the last one is
                stored. If the first axis of the envs' observations is another, they are the frames.
                "auto": as many as the envs' FrameStackObservation has. 1: all is stored as it is.
            padding: What precedes an episode in a stack: "reset", its first frame, or "zero".
                "auto": as FrameStackObservation does.
            prioritized: The exponent of priorities, alpha in Schaul et al. 2016; 0.6 there.
                None: all transitions are drawn alike.
            on_disk: A folder in which the records are kept, in a file that is mapped into memory.
                It can be loaded after a crash. None: they are in shared memory.
            seed: Seed of the draws.

        Raises:
            ValueError: A number is out of range; another replay records these envs.
            TypeError: The vector env is wrapped, or none of shmvec's; observations or actions are
                not arrays of fixed size in shared memory.
            OSError: The capacity does not fit into the memory that is free, or onto the disk; or
                the folder holds a replay already (FileExistsError).
            ClosedEnvironmentError: The vector env was closed.
            AlreadyPendingCallError: A call waits for its results.
        """
        exchange = _exchange_of(envs)
        self._set(n_step, discount, prioritized)
        check_arrays(exchange.layout, "a replay")
        space = exchange.layout.observation_space
        self.frame_stack, zeros = _stack(exchange, space, frame_stack, padding)
        newest = self.frame_stack > 1 and _is_stacked(space, self.frame_stack)
        depth = -(-checked_count("capacity", capacity) // exchange.num_envs)
        least = self._least_depth
        if depth < least:
            raise ValueError(
                f"capacity must be at least {least * exchange.num_envs:,}, {least} for each of "
                f"{exchange.num_envs} envs, got {capacity:,}"
            )
        self._begin(exchange, LogLayout.of(exchange.layout, depth, newest, zeros), on_disk, seed)

    # ---- making it ---------------------------------------------------------------------------

    def _set(self, n_step: Any, discount: Any, prioritized: Any) -> None:
        """Checks and keeps numbers."""
        self.n_step = checked_count("n_step", n_step)
        if not 0.0 < discount <= 1.0:
            raise ValueError(f"discount must be above 0 and at most 1, got {discount!r}")
        if prioritized is not None and not 0.0 < prioritized < float("inf"):
            raise ValueError(f"prioritized must be None or above 0, got {prioritized!r}")
        self.discount = float(discount)
        self._alpha = None if prioritized is None else float(prioritized)

    @property
    def _least_depth(self) -> int:
        """Records of an env, of which some can be drawn."""
        return max(_LEAST_DEPTH, 2 * (self.n_step + self.frame_stack))

    def _begin(
        self,
        exchange: Exchange,
        layout: LogLayout,
        on_disk: str | os.PathLike[str] | None,
        seed: int | None,
        saved: Path | None = None,
    ) -> None:
        """Makes the log, with what was saved, and has the workers write there."""
        self.capacity = layout.depth * layout.num_envs
        self._exchange, self._layout = exchange, layout
        self._folder = None if on_disk is None else Path(on_disk).resolve()
        self._rng = np.random.default_rng(seed)
        if exchange.log is not None and not exchange.log.ended:
            raise ValueError("another replay records these envs: close() it first")
        there = self._folder is not None and saved == self._folder
        if self._folder is not None and not there and (self._folder / _ABOUT).exists():
            raise FileExistsError(
                f"{self._folder} holds a replay: Replay.load(folder, envs, on_disk=folder) goes on "
                "with it; else take another folder, or remove this one"
            )
        with exchange.lend("replay"):
            descriptor = _file(self._folder, anew=not there)
            folder = None if self._folder is None else str(self._folder)
            self._pieces = Piecewise(descriptor, layout, folder)
            try:
                memory = np.asarray(MappedMemory(descriptor, layout.nbytes))
                self._log = layout.log(memory, Sampler)
                if saved is not None:
                    self._fill(saved, copied=not there)
                observations, actions = self._log.arrays
                self._log.prepare(
                    _parts(layout.observation_space, observations),
                    _parts(layout.action_space, actions),
                    self._pieces.reserve,
                    n_step=self.n_step,
                    discount=self.discount,
                    stack=self.frame_stack,
                    prioritized=self._alpha is not None,
                    threads=min(_THREADS_MOST, max(1, usable_cores() // 4)),
                    spare=min(_SPARE_MOST, layout.depth // 8),
                )
                if self._folder is not None:
                    _write_about(self._folder, self._about())
                sizes = layout.depth, int(layout.newest), int(layout.zeros)
                exchange.share("log", (layout.nbytes, open_log, *sizes), descriptor)
                exchange.log = self._log
            except BaseException:
                self._pieces.close()
                raise
        self._lock = threading.Lock()  # of the batch that is drawn and put together
        self._ahead: tuple[tuple[int, Any, float], Any] | None = None
        self._sampled = 0
        self._since = time.monotonic()
        self._before = self.recorded

    def close(self) -> None:
        """Ends the recording. What was recorded can be sampled still.

        While a call waits for its results workers do not learn of it: they go on until another
        replay is made, this one is closed again, or the envs are.
        """
        self._log.finish()
        exchange = self._exchange
        recorded = exchange.log is self._log
        if recorded:
            exchange.catch_up()
            self._log.ended = True
            with contextlib.suppress(Exception), exchange.lend("replay"):
                exchange.share("log")
                exchange.log = None
        if exchange.log is not self._log:
            self._pieces.close()

    def __del__(self) -> None:
        """Lets another replay record the envs."""
        if hasattr(self, "_log"):
            self._log.ended = True

    def interrupt(self, env_ids: npt.ArrayLike | None = None) -> None:
        """Notes that the next steps of envs follow no record: something has set their states.

        Args:
            env_ids: Which, int ``(n,)``; none of them is in flight. None: all.

        Raises:
            ValueError: There is no such env, or it is named twice.
        """
        num_envs = self._exchange.num_envs
        which = np.arange(num_envs) if env_ids is None else existing_env_ids(env_ids, num_envs)
        for env in which.tolist():
            self._log.interrupt(env)

    # ---- drawing -----------------------------------------------------------------------------

    @property
    def recorded(self) -> int:
        """Records that were made so far, those that were overwritten included."""
        self._exchange.catch_up()
        return int(self._log.counts.sum())

    def __len__(self) -> int:
        """The number of transitions that are kept.

        With ``n_step`` or stacked frames the oldest and the newest few of an env cannot be drawn.
        """
        self._exchange.catch_up()
        return int(self._log.num_transitions)

    def sample(self, size: int, *, device: Any = None, beta: float = 0.4) -> ReplayBatch:
        """Draws transitions at random, with replacement.

        Args:
            size: How many.
            device: None: the batch is of NumPy's arrays. Else a torch device: of tensors there.
            beta: The exponent of importance weights, of a replay with priorities.

        Returns:
            The batch; its arrays are yours.

        Raises:
            RuntimeError: There is no transition yet, or no such device.
            ImportError: torch is not installed.
            ValueError: The size is no positive number.
        """
        if not 0.0 <= beta <= 1.0:
            raise ValueError(f"beta must be from 0 to 1, got {beta!r}")
        key = checked_count("size", size), device, beta
        nbytes = self._layout.row_nbytes * self.frame_stack * size
        with self._lock:
            self._exchange.catch_up()
            if self._ahead is not None and self._ahead[0] == key:
                begun = self._ahead[1]
            else:
                begun = self._drawn(*key)
            self._ahead = None
            self._log.finish()
            if self._alpha is None and nbytes > _AHEAD_BYTES:
                self._ahead = key, self._drawn(*key)
            self._sampled += size
        return begun.batch()  # type: ignore[no-any-return]

    def at(self, indices: npt.ArrayLike) -> ReplayBatch:
        """The transitions of these indices, as ``sample`` returned them.

        Raises:
            IndexError: One of them was overwritten, or never was.
        """
        chosen = _indices(indices)
        with self._lock:
            self._exchange.catch_up()
            self._ahead = None
            begun = _Begun(self, len(chosen), None, 0.0, partial(self._log.choose, chosen))
            self._log.finish()
        return begun.batch()

    def holds(self, indices: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each of these transitions is there, for ``at``; false for negative indices."""
        self._exchange.catch_up()
        there: npt.NDArray[np.bool_] = self._log.holds(_indices(indices))
        return there

    def latest(self) -> npt.NDArray[np.int64]:
        """The indices of the transitions that the envs have made last, one for each env.

        Returns:
            int64 ``(num_envs,)``; -1 for an env whose last step is no transition, or that has made
            none. An env that is in flight has made what was taken before.
        """
        self._exchange.catch_up()
        latest: npt.NDArray[np.int64] = self._log.latest()
        return latest

    def update_priorities(self, indices: npt.ArrayLike, priorities: npt.ArrayLike) -> None:
        """Sets the priorities of transitions, for example the absolute errors of their values.

        Args:
            indices: int ``(n,)``, of a batch. Those that were overwritten are passed over.
            priorities: float ``(n,)``, not negative.

        Raises:
            ValueError: The replay has no priorities; the shapes differ; or a priority is negative
                or not finite.
        """
        if self._alpha is None:
            raise ValueError("this replay has no priorities: make it with prioritized=0.6")
        chosen = _indices(indices)
        if hasattr(priorities, "detach"):
            priorities = priorities.detach().cpu()
        values = np.asarray(priorities, np.float64)
        if chosen.ndim != 1 or values.shape != chosen.shape:
            raise ValueError(
                f"there must be one priority for each index, got {chosen.shape} indices and "
                f"{values.shape} priorities"
            )
        if not (np.isfinite(values).all() and (values >= 0).all() and (chosen >= 0).all()):
            raise ValueError("priorities must be finite and not negative, and so must indices")
        with np.errstate(over="ignore"):
            powers = (values + _LEAST_PRIORITY) ** self._alpha
        powers = np.maximum(powers, 1 / _LARGEST_PRIORITY)  # 0: it could never be drawn
        if (powers > _LARGEST_PRIORITY).any():
            raise ValueError(
                f"priorities must be at most {_LARGEST_PRIORITY} to the power of {self._alpha}, "
                f"got {values.max()}"
            )
        self._log.update(chosen, powers)

    def _drawn(self, size: int, device: Any, beta: float) -> _Begun:
        """A batch that is being put together."""
        return _Begun(self, size, device, beta, partial(self._log.draw, self._rng, size))

    # ---- what there is -----------------------------------------------------------------------

    def stats(self) -> ReplayStats:
        """What it holds, and how fast it is filled and drawn from."""
        recorded = self.recorded
        elapsed = max(time.monotonic() - self._since, 1e-9)
        kept = np.minimum(self._log.counts, self._layout.depth)
        return ReplayStats(
            capacity=self.capacity,
            records=int(kept.sum()),
            transitions=int(self._log.num_transitions),
            recorded=recorded,
            sampled=self._sampled,
            recorded_per_s=(recorded - self._before) / elapsed,
            sampled_per_s=self._sampled / elapsed,
            oldest=int(kept.max(initial=0)),
            nbytes=self._layout.nbytes,
            reserved=self._pieces.nbytes,
        )

    def __repr__(self) -> str:
        """How full it is."""
        return f"Replay({len(self):,} transitions, capacity={self.capacity:,})"

    # ---- saving ------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Saves what was recorded so far; what is in flight is not in it.

        Another thread may step the envs meanwhile: the oldest records that this overwrites are not
        in it either. The folder has ``rows.bin``, the memory as it is, and ``replay.json``, which
        says where its arrays lie: docs/details/replay.md describes them. An interrupted call leaves
        what was there before.

        Raises:
            OSError: It cannot be written.
        """
        self._exchange.catch_up()
        with self._lock:
            self._log.finish()
            self._ahead = None
            counts, priorities, largest = self._log.moment()
            about = self._about() | {"random": self._rng.bit_generator.state}
        folder = Path(folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if folder != self._folder:
            with _replacing(folder / _ROWS) as file:
                self._write_rows(file, counts)
        if priorities is not None:
            with _replacing(folder / _PRIORITIES) as file:
                np.savez(file, priorities=priorities, counts=counts, largest=largest)
        _write_about(folder, about)

    def _write_rows(self, file: IO[bytes], counts: npt.NDArray[np.int64]) -> None:
        """Writes the memory as it was when envs had so many records."""
        memory = memoryview(self._log.whole)
        ranges = self._pieces.ranges
        file.truncate(self._layout.nbytes)
        for offset, nbytes in ranges:
            file.seek(offset)
            file.write(memory[offset : offset + nbytes])
        # Envs may have been stepped meanwhile.
        (committed, _), (first_kind, num_rows) = ranges[0], ranges[3]
        file.seek(first_kind)
        kinds = np.frombuffer(bytearray(file.read(num_rows)), np.uint8)
        self._log.break_overwritten(kinds, counts)
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
        """A replay that goes on with what was saved, or what another one with ``on_disk`` has left.

        Args:
            folder: Where it is.
            envs: As for ``Replay``: as many, of the same spaces. Their next steps follow no record,
                also where their states were restored.
            on_disk: As for ``Replay``. The same folder: it goes on there.
            seed: As for ``Replay``. None: it goes on as it was saved.

        Raises:
            ValueError: It is of other envs, or of another version.
            OSError: It cannot be read; or as for ``Replay``.
        """
        folder = Path(folder).resolve()
        self = cls.__new__(cls)
        exchange = _exchange_of(envs)
        with _damages(folder / _ABOUT):
            about = json.loads((folder / _ABOUT).read_text("utf-8"))
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise ValueError(f"{folder} holds no replay of this version of shmvec")
        with _damages(folder / _ABOUT):
            if missing := _KEYS - about.keys():
                raise ValueError(f"it lacks {sorted(missing)}")
            self._set(about["n_step"], about["discount"], about["prioritized"])
            self.frame_stack = checked_count("frame_stack", about["frame_stack"])
            depth = checked_count("depth", about["depth"])
            layout = LogLayout.of(exchange.layout, depth, about["newest"], about["zeros"])
            rng = np.random.default_rng(seed)
            if seed is None and "random" in about:
                rng.bit_generator.state = about["random"]
        if about["arrays"] != _described(layout):
            raise ValueError(
                f"{folder} holds a replay of {about['num_envs']} envs with other observations or "
                f"actions than these {exchange.num_envs}"
            )
        space = exchange.layout.observation_space
        stacked = self.frame_stack > 1 and _is_stacked(space, self.frame_stack)
        if depth < self._least_depth or layout.newest != stacked:
            raise ValueError(f"{folder / _ABOUT} is damaged: its numbers contradict each other")
        priorities = None
        if self._alpha is not None and (folder / _PRIORITIES).exists():
            priorities = _read_priorities(folder / _PRIORITIES, layout)
        self._begin(exchange, layout, on_disk, seed, folder)
        self._rng = rng
        if priorities is not None:
            self._log.set_priorities(*priorities)
        return self

    def _fill(self, saved: Path, copied: bool) -> None:
        """Takes over the rows of a saved replay."""
        rows = saved / _ROWS
        if rows.stat().st_size != self._layout.nbytes:
            raise ValueError(f"{rows} is not whole")
        memory = memoryview(self._log.whole)
        with rows.open("rb") as file:
            if copied:
                _hold(file.fileno(), rows, fcntl.LOCK_SH)

            def copy() -> None:
                for offset, nbytes in self._pieces.ranges if copied else ():
                    file.seek(offset)
                    file.readinto(memory[offset : offset + nbytes])

            copy()  # the counts, which say how many rows there are
            counts = self._log.counts
            if counts.min() < 0 or counts.max() > _RECORDS_MOST:
                raise ValueError(f"{rows} is damaged: it says that envs have {counts} records")
            self._pieces.reserve(min(int(counts.max()) + 2, self._layout.depth))
            copy()

    def _about(self) -> dict[str, Any]:
        """What replay.json says."""
        return {
            "format": _FORMAT,
            "num_envs": self._layout.num_envs,
            "depth": self._layout.depth,
            "newest": self._layout.newest,
            "frame_stack": self.frame_stack,
            "zeros": self._layout.zeros,
            "n_step": self.n_step,
            "discount": self.discount,
            "prioritized": self._alpha,
            "arrays": _described(self._layout),
        }


class _Begun:
    """A batch that is being put together."""

    def __init__(
        self, replay: Replay, size: int, device: Any, beta: float, draw: Callable[[], Any]
    ) -> None:
        """Makes room for it, draws, and has the threads begin."""
        self._device = device
        self._torch = None
        if device is not None:
            import torch

            self._torch = torch
            self._device = torch.device(device)
        self._space = replay._layout.observation_space
        self._acted = replay._layout.action_space
        observations, actions = replay._log.arrays
        stack = (replay.frame_stack,) if replay.frame_stack > 1 else ()
        room = partial(self._room, replay._log, count(), size)
        before = mapped(self._space, partial(room, stack), observations)
        after = mapped(self._space, partial(room, stack), observations)
        acted = mapped(self._acted, partial(room, ()), actions)
        self._large = before, after, acted
        seen = _parts(self._space, before), _parts(self._space, after)
        while True:
            rewards, discounts, terminations, truncations, self._indices, chances = draw()
            if replay._log.begin(*seen, _parts(self._acted, acted)):
                break
        if chances is None:
            weights = np.ones(size, np.float32)
        else:
            weights = (chances / chances.min()) ** -beta
        self._small = [rewards, terminations, truncations, discounts, weights.astype(np.float32)]

    def _room(
        self,
        log: Sampler,
        numbers: Iterator[int],
        size: int,
        stack: tuple[int, ...],
        rows: npt.NDArray[Any],
    ) -> Any:
        """An array for so many rows, page-locked if it is to go to a GPU."""
        shape = size, *stack, *rows.shape[1:]
        if self._torch is None or self._device.type == "cpu":
            return log.room(next(numbers), shape, rows.dtype)
        like = self._torch.from_numpy(rows[:0]).dtype
        return self._torch.empty(shape, dtype=like, pin_memory=True).numpy()

    def batch(self) -> ReplayBatch:
        """The batch, when it is complete."""
        before, after, acted = self._large
        rewards, terminations, truncations, discounts, weights = map(self._sent, self._small)
        return ReplayBatch(
            mapped(self._space, self._sent, before),
            mapped(self._acted, self._sent, acted),
            rewards,
            mapped(self._space, self._sent, after),
            terminations,
            truncations,
            discounts,
            self._indices,
            weights,
        )

    def _sent(self, array: npt.NDArray[Any]) -> Any:
        if self._torch is None:
            return array
        # Torch reuses page-locked memory of its own only when the copy is complete.
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)


def _parts(space: gym.Space[Any], arrays: Any) -> list[npt.NDArray[Any]]:
    """The arrays in those that are nested as a space is, in order."""
    parts: list[npt.NDArray[Any]] = []
    mapped(space, parts.append, arrays)
    return parts


def _indices(indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Indices as the log takes them."""
    found = np.asarray(indices)
    if found.dtype.kind not in "iu" and found.size:
        raise TypeError(f"indices must be integers, got {found.dtype}")
    return np.ascontiguousarray(found, np.int64)


def _exchange_of(envs: Any) -> Exchange:
    """The exchange of a vector env, which is open; a wrapper has none of its own."""
    exchange = envs
    if not isinstance(envs, Exchange) and hasattr(type(envs), "exchange"):
        exchange = envs.exchange
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "a replay records a ShmVectorEnv, without wrappers around it, got "
            f"{type(envs).__name__}: wrap the envs, or have it record what is below the wrappers: "
            "envs.unwrapped"
        )
    exchange.check_open()
    return exchange


def _stack(
    exchange: Exchange, space: gym.Space[Any], frames: Any, padding: str
) -> tuple[int, bool]:
    """The number of frames of an observation, and whether zeros precede an episode."""
    if padding not in ("auto", "reset", "zero"):
        raise ValueError(f'padding must be "auto", "reset" or "zero", got {padding!r}')
    found = None
    if frames == "auto" or padding == "auto":
        with contextlib.suppress(AttributeError):
            found = (
                exchange.call("stack_size", envs=[0])[0],
                exchange.call("padding_type", envs=[0])[0],
            )
    exact = found is None or found[1] == "reset" or (found[1] == "zero" and _has_zero(space))
    if frames == "auto":
        frames = 1
        if found is not None and _is_stacked(space, found[0]) and exact:
            frames = found[0]
    frames = checked_count("frame_stack", frames)
    if frames > 1 and not isinstance(space, spaces.Box):
        raise TypeError(f"frame_stack={frames} needs observations of a Box space, got {space}")
    if padding == "auto":
        if frames > 1 and not exact:
            raise ValueError(
                f"frame_stack={frames}: the envs' FrameStackObservation begins an episode with "
                "neither its first frame nor zeros. Take frame_stack=1, or say which by padding="
            )
        padding = "reset" if found is None else found[1]
    return frames, padding == "zero"


def _is_stacked(space: gym.Space[Any], frames: int) -> bool:
    """Whether observations have so many frames along their first axis."""
    return isinstance(space, spaces.Box) and len(space.shape) > 1 and space.shape[0] == frames


def _has_zero(space: gym.Space[Any]) -> bool:
    """Whether zeros are in a space: else FrameStackObservation pads with what is nearest."""
    return isinstance(space, spaces.Box) and bool(((space.low <= 0) & (space.high >= 0)).all())


@contextlib.contextmanager
def _damages(path: Path) -> Iterator[None]:
    """Raises ValueError with a file's name for whatever is wrong with its content."""
    try:
        yield
    except OSError:
        raise
    except (*_DAMAGES, BadZipFile) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _file(folder: Path | None, anew: bool) -> int:
    """A descriptor of memory, or of the file of rows in a folder."""
    if folder is None:
        return memory_file()
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / _ROWS
    descriptor = _held(rows)
    if anew:  # another file: a replay that was closed may have this one mapped
        rows.unlink()
        os.close(descriptor)
        descriptor = _held(rows)
    return descriptor


def _held(rows: Path) -> int:
    """A descriptor of a file of rows, which is locked as long as it is open or mapped."""
    descriptor = os.open(rows, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _hold(descriptor, rows, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _hold(descriptor: int, rows: Path, lock: int) -> None:
    """Locks a file of rows for its descriptor, unless another replay has it."""
    try:
        fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = "another replay writes there: close() it first, or take another folder"
        raise OSError(error.errno, message, str(rows)) from None
    except OSError:
        pass  # this kind of disk has no locks


def _described(layout: LogLayout) -> list[list[Any]]:
    """Where each array lies: its name, offset, dtype and shape."""
    first = ["committed", "written", "interrupted", "kinds", "rewards"]
    names = chain(first, repeat("observations and actions"))
    return [
        [name, array.offset, array.dtype.str, list(array.shape)]
        for name, array in zip(names, layout.places, strict=False)
    ]


def _read_priorities(
    path: Path, layout: LogLayout
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64], float]:
    """Priorities that were saved, of all rows, how many records envs had then, and the largest."""
    with _damages(path), path.open("rb") as file, np.load(file) as arrays:
        priorities = arrays["priorities"].astype(np.float64, casting="safe")
        counts = arrays["counts"].astype(np.int64, casting="safe")
        largest = float(arrays["largest"])
        if (
            priorities.shape != (layout.depth * layout.num_envs,)
            or counts.shape != (layout.num_envs,)
            or not ((priorities >= 0) & (priorities <= largest)).all()
            or not 0 < largest <= _LARGEST_PRIORITY
        ):
            raise ValueError("they are no priorities of its transitions")
    return priorities, counts, largest


def _write_about(folder: Path, about: dict[str, Any]) -> None:
    """Writes replay.json at once: a crash leaves the old one or the new one."""
    with _replacing(folder / _ABOUT) as file:
        file.write(json.dumps(about, indent=1).encode())


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which replaces another one when it is whole; a failure leaves nothing of it."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w+b") as file:
            yield file
        os.replace(new, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink()
        if isinstance(error, OSError) and error.filename is None:  # as of a write
            reason = error.strerror or str(error)
            raise OSError(error.errno or errno.EIO, reason, str(path)) from error
        raise
