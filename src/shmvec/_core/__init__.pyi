from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv
from typing_extensions import Buffer

from shmvec._autoreset import Autoreset
from shmvec.faults import Failure, Fault, Report

# The segment

def segment_bytes(
    num_workers: int,
    num_envs: int,
    records: int,
    info_bytes: int,
    action_bytes: int,
    slab_bytes: int,
) -> int:
    """Bytes of memory that such a segment needs.

    Args:
        num_workers: Number of workers, each with rings of its own.
        num_envs: Number of envs.
        records: Requests and completions that each ring has room for.
        info_bytes: Room of each ring of messages from a worker to the parent.
        action_bytes: Room of each ring of messages from the parent to a worker.
        slab_bytes: Room for the arrays.

    Raises:
        ValueError: A size is out of range.
    """

def reserve_pages(descriptor: int, nbytes: int) -> None:
    """Sizes a shared-memory descriptor and reserves all its pages.

    Raises:
        OSError: There is not that much memory (``ENOSPC``), or the descriptor is unfit.
    """

class MappedMemory:
    """Shared memory, mapped as long as this object or an array over it lives."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Maps the memory and keeps no descriptor of it.

        Raises:
            OSError: The descriptor is unfit, or has fewer bytes (``EINVAL``).
        """
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

class Segment:
    """A mapping that holds a segment; csrc/segment.h describes its layout."""

    memory: Buffer
    @staticmethod
    def create(
        memory: Buffer,
        num_workers: int,
        num_envs: int,
        records: int,
        info_bytes: int,
        action_bytes: int,
        slab_bytes: int,
    ) -> Segment:
        """Formats zeroed memory of at least :func:`segment_bytes` as a segment."""
    @staticmethod
    def open(memory: Buffer) -> Segment:
        """Attaches to a segment that another process created, after validating it.

        Raises:
            ValueError: The memory holds no intact segment of this version.
        """
    @staticmethod
    def look(memory: Buffer, nbytes: int) -> Segment:
        """Looks at a segment from outside, for an ``Insight`` only.

        Args:
            memory: The begin of it, read-only or a copy: its header, or all of the ``front``.
            nbytes: How large all of it is.

        Raises:
            ValueError: The memory holds no intact segment of this version.
        """
    @property
    def front(self) -> int:
        """Number of bytes at the begin; onlookers read only these."""
    @property
    def num_workers(self) -> int: ...
    @property
    def num_envs(self) -> int: ...
    def array(
        self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> np.ndarray[Any, np.dtype[Any]]:
        """An array over ``offset`` of the slabs; it keeps the mapping alive."""

COUNTERS: dict[str, list[tuple[str, str, str]]]
"""The tables of csrc/counters.h: lines of a counter's name, its heading and its help."""

class Insight:
    """A view of what a segment says about its vector env.

    Attributes:
        in_use: Whether it was made ready, and not closed.
        process: The parent's process id, as the parent sees it.
        processes: Likewise those of its workers; 0: the worker is being started. Empty if there
            are none.
        number: Its number among the vector envs of its process, from 1, closed ones included.
        options: A bit for each option that is set, of those that stats.py may advise. Only the
            parent sets it.
        nbytes: Bytes of the segment.
        num_workers: Workers; 0: the envs live in the parent.
        caller_steps: Whether the parent is the last worker.
        overlaps: Whether a worker may be busy with several envs at once.
        num_envs: Envs.
        cores: Number of cores that parent and workers may use.
        elapsed_s: Seconds since it was made ready.
    """

    def __init__(self, segment: Segment) -> None:
        """Takes a segment; reads it only, and only its ``front``.

        Raises:
            ValueError: There are fewer bytes.
        """
    @property
    def in_use(self) -> bool:
        """Whether the segment was made ready, and is not closed.

        Raises:
            ValueError: It is damaged.
        """
    @property
    def process(self) -> int: ...
    @property
    def processes(self) -> list[int]: ...
    @property
    def number(self) -> int: ...
    options: int
    @property
    def nbytes(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def caller_steps(self) -> bool: ...
    @property
    def num_envs(self) -> int: ...
    @property
    def cores(self) -> int: ...
    @property
    def elapsed_s(self) -> float: ...
    def parent(self) -> dict[str, int]:
        """SV_WAITS of the parent, the present wait included."""
    def workers(self) -> list[dict[str, int]]:
        """SV_WAITS and SV_WORK of each worker and its predecessors, present request included."""
    def ranges(self) -> list[tuple[int, int]]:
        """The envs of each worker: the first, and how many."""
    def on_cores_before(self) -> list[dict[str, int]]:
        """SV_ON_CORES of each worker's process before it began to serve."""
    def faults(self) -> dict[str, int]:
        """SV_FAULTS: what went wrong, and how often."""
    def wrappers(self) -> list[str]:
        """The words about each env that its worker has published; "": there are none."""
    def timings(self) -> npt.NDArray[np.uint64]:
        """How long each env's steps and resets have taken.

        Returns:
            For each env, steps and resets: their sum and the longest, in ns, and the buckets of
            csrc/timings.h.
        """
    @property
    def overlaps(self) -> bool: ...
    def doing(self, at: int | None = None) -> list[tuple[int, str, float, int] | None]:
        """What each worker does now: (env, "step", "reset" or "call", seconds, number of others).

        None: nothing. Of a worker that is busy with several envs: what takes longest so far.

        Args:
            at: Up to when seconds are counted, in ns of the monotonic clock; None: now.
        """
    def waiting(self) -> float | None:
        """Seconds for which the parent has been waiting; None: it is not waiting."""

# Values of spaces

ACTION_ITEMSIZE: int
TEXT_HEAD: int

class OtherShapeError(ValueError):
    """Actions with the right number of envs, but another shape than their space says."""

    actions: npt.NDArray[Any]

class Codec:
    """Reads and writes values of one space, for one env or for all."""

    def put(self, env: int, value: Any) -> None:
        """Writes the value of one env."""
    def get(self, env: int) -> Any:
        """The value of one env, as a copy."""
    def put_rows(self, envs: npt.NDArray[np.intp], values: Any) -> None:
        """Writes the values of some envs.

        Raises:
            ValueError: Their number or shape is wrong.
            TypeError: Their dtype is wrong.
        """

class ArrayCodec(Codec):
    """Observations of spaces that are one array."""

    def __init__(self, array: npt.NDArray[Any]) -> None: ...

class ActionCodec(Codec):
    """Actions of spaces that are one array, in the dtype of the caller."""

    def __init__(
        self,
        memory: npt.NDArray[Any],
        codes: npt.NDArray[Any],
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        space: gym.Space[Any],
    ) -> None: ...

class TextCodec(Codec):
    """Strings of Text spaces."""

    def __init__(self, array: npt.NDArray[Any]) -> None: ...

class DictCodec(Codec):
    """Dict spaces."""

    def __init__(self, codecs: Mapping[str, Codec]) -> None: ...

class TupleCodec(Codec):
    """Tuple spaces."""

    def __init__(self, codecs: Sequence[Codec]) -> None: ...

class MessageCodec(Codec):
    """Values that are in no slab: they come, or go, as messages."""

    def __init__(
        self,
        space: gym.Space[Any],
        num_envs: int,
        explain: Callable[[Iterable[int], list[Any], Exception], Exception] | None,
    ) -> None: ...

# Results, and memory that is lent to the user

class Lender:
    """Rows in shared memory, and which of them are lent."""

    def __init__(self, memory: Any, num_rows: int) -> None: ...
    def leased(self, first: int, count: int) -> bool:
        """Whether one of these rows is lent."""
    def lease(self, first: int, count: int) -> Lease:
        """Lends rows, which are not written until the lease is released, or gone."""

class Lease:
    """Marks rows as lent while it lives; the base of the arrays that show them."""

    def release(self) -> None:
        """Lets the rows be written, even if arrays still show them."""
    @property
    def released(self) -> bool: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def release(array: Any) -> None:
    """Ends the lease of a batch or a rollout, given one of its arrays or a view of one.

    Raises:
        TypeError: The argument is no array.
    """

class Results(Lender):
    """Frames of what steps return, with a row for each env: frame * num_envs + env."""

    observations: Codec
    rewards: npt.NDArray[np.float64]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]
    num_envs: int
    num_frames: int
    def __init__(
        self,
        memory: Any,
        observations: Codec,
        rewards: npt.NDArray[np.float64],
        terminations: npt.NDArray[np.bool_],
        truncations: npt.NDArray[np.bool_],
        num_envs: int,
    ) -> None:
        """Takes arrays ``(num_frames * num_envs, ...)``, and the memory in which they lie."""
    def view(
        self, lease: Lease, lead: tuple[int, ...]
    ) -> tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Arrays ``(*lead, ...)`` over the rows of a lease, which keep it."""
    def copy_rows(self, source: Results, rows: npt.NDArray[np.intp], first: int) -> None:
        """Copies rows of other frames to those from ``first`` on."""

class Blocks(Lender):
    """Blocks for observations of all envs, each of which becomes an array of the user's."""

    def __init__(self, memory: Any, observations: Codec, num_envs: int, num_blocks: int) -> None:
        """Takes the memory of all blocks, and observations ``(num_blocks * num_envs, ...)``."""

class Frames:
    """Register of where each env's results are."""

    away: int
    rollouts: Results | None

    def __init__(
        self,
        home: Results,
        copy: bool = True,
        leasing: bool = False,
        keep_last: bool = False,
        blocks: Blocks | None = None,
        hold_batches: int | None = None,
    ) -> None:
        """Takes the frames of the segment.

        Args:
            home: The frames of the segment.
            copy: Whether observations are returned as copies.
            leasing: Whether batches are returned as views.
            keep_last: Whether new results leave the last ones in place.
            blocks: Where observations of all envs are written as well, to be lent.
            hold_batches: Number of further batches after which a batch's lease ends.
        """

    def take_rollouts(self, rollouts: Results | None) -> None:
        """Takes the frames of rollouts, in place of any before; None: there are none."""

    def start_rollout(self, frame: int) -> None:
        """Puts the last results into a frame of the rollouts."""

    def meet(self, frame: int) -> None:
        """Notes that the last results of all envs are, or will be, in a frame of a rollout."""

    def come_home(self) -> None:
        """Copies the last results to a frame at home: the rollout's is the user's from now on."""

    def observe(self) -> Any:
        """The last observations of all envs, as ``copy`` says."""

# Messages

class ChannelMessage:
    """A message that came through a channel.

    Attributes:
        sequence: Number of the request it belongs to.
        goodbye: Whether it is the last one.
        content: What the sender put.
        descriptors: The ones that came with it. The taker of the message closes them.
        whole: Whether all of these have come: the kernel drops those for which this process may
            not open another file.
    """

    sequence: int
    goodbye: bool
    content: bytes
    descriptors: list[int]
    whole: bool

class Channel:
    """One end of a control channel."""

    descriptor: int
    broken: str | None

    def __init__(self, descriptor: int) -> None:
        """Takes over a stream socket."""

    def put(
        self,
        sequence: int,
        content: bytes,
        descriptors: Sequence[int] = (),
        goodbye: bool = False,
    ) -> None:
        """Sends a request's message, now or as soon as there is room; never blocks."""

    def pump(self) -> bool:
        """Writes and reads without blocking; whether more is to be written, or any was read."""

    def find(self, sequence: int) -> ChannelMessage | None:
        """The message of a request, or None if it has not come; older ones are discarded."""

    def take(self, sequence: int) -> ChannelMessage | None:
        """Finds a message likewise, and gives it to the caller, with its descriptors."""

    def fail(self, why: str) -> None:
        """Notes that data from this channel can no longer be trusted."""

    @property
    def unsent(self) -> bool:
        """Whether a message has not been written yet."""

    @property
    def farewell(self) -> bytes | None:
        """The goodbye of the other side, if it has come; other messages are discarded."""

    def fileno(self) -> int:
        """The descriptor, for ``select``."""

    def close(self) -> None:
        """Closes the channel, and the descriptors in messages that were not taken."""

def pickle_value(value: Any) -> bytes:
    """Pickle a value: fast if its type can be imported, else by value (cloudpickle)."""

def copied(value: Any) -> Any:
    """A deep copy of an info or an observation."""

# Traces

TRACE_KINDS: dict[int, str]  # what an entry may be of, and its name

class Recorder:
    """A writer's end of a trace ring; its first entry names the writer."""

    def __init__(
        self, memory: Buffer, rings: int, size: int, index: int, pid: int, takes: bool = False
    ) -> None:
        """Takes a ring.

        Args:
            memory: Where the rings are; it is kept as long as this object.
            rings: Number of rings.
            size: Number of entries of each ring; a power of two.
            index: The ring to take.
            pid: The process's number.
            takes: Whether the writer takes results after its waits, as the parent does.

        Raises:
            ValueError: There is no such ring, or the memory is too small.
        """

def trace_bytes(rings: int, size: int) -> int:
    """Bytes of memory that so many rings need."""

class TraceSwitch:
    """Switch that keeps writers of a trace going until it is turned off or freed."""

    def __init__(self, memory: Buffer) -> None:
        """Takes and keeps the memory that holds the rings."""

    def off(self) -> None:
        """Has writers release the memory when they next come to it."""

def read_trace(
    memory: Buffer, rings: int, size: int, index: int
) -> tuple[npt.NDArray[np.void], int]:
    """Entries of a ring, oldest first, and how many older ones are gone.

    Returns:
        An array with fields ``begin`` and ``end``, in ns of the monotonic clock, ``env`` and
        ``kind``; they make no sense if the memory was damaged.
    """

# Both sides

class Slabs(Protocol):
    """The arrays of a segment: the part of `shmvec._memory.layout.Slabs` used here."""

    @property
    def results(self) -> Results: ...
    @property
    def actions(self) -> Codec: ...
    @property
    def finals(self) -> Codec | None: ...
    @property
    def blocks(self) -> Blocks | None: ...

# The worker's side

# Seeds, options and mask (which envs to reset), one item an env.
ResetArguments = tuple[Sequence[int | None] | None, Sequence[Any] | None, Sequence[bool] | None]

class Host(Protocol):
    """The rare cases that the loop leaves to Python."""

    def command(self, sequence: int) -> tuple[ResetArguments | None, Any]:
        """Takes a command from its channel: (arguments of a reset or None, results)."""
    def trace(self, sequence: int) -> None:
        """Takes the memory of a trace from its channel."""
    def misfit(self, env: int, observation: Any, error: Exception) -> Exception:
        """The error to raise for an observation that could not be written."""
    def late_actions(self, sequence: int) -> list[tuple[int, Any]]:
        """Takes from its channel the actions (env, action) that did not fit the ring."""
    def send_late(
        self,
        sequence: int,
        messages: list[tuple[int, int, dict[str, Any]]],
        failures: list[tuple[int, str, BaseException]],
        results: Any,
    ) -> None:
        """Sends the parent what does not fit the rings; messages are (kind, env, message)."""

FAULT_POINTS: range

def die_at(point: int) -> None:
    """Has this process killed when it next reaches a point of the protocol: see csrc/fault.h."""

def watch_forks() -> None:
    """Has forks of this process end when they return from an env: they are no workers."""

def end_forks() -> None:
    """Ends a process that an env has forked and that returns from the env."""

class WorkerLoop:
    """Serves the envs ``first_env`` and up from a worker's request ring."""

    def __init__(
        self,
        segment: Segment,
        index: int,
        first_env: int,
        envs: Sequence[gym.Env[Any, Any]],
        host: Host,
        slabs: Slabs,
        autoreset: Autoreset,
        timed: bool = False,
        mends: bool = False,
        resets: Sequence[tuple[int | None, Any] | None] | None = None,
        steppers: Sequence[Any] | None = None,
    ) -> None:
        """Takes over the envs.

        Args:
            segment: Where requests come from and results go.
            index: The worker's index.
            first_env: Index of its first env.
            envs: The envs.
            host: Handles the rare cases.
            slabs: The arrays of the segment.
            autoreset: Who resets an env whose episode has ended, and when.
            timed: Whether there are time limits.
            mends: Whether an env that has raised is reset instead of given up.
            resets: For a worker that replaces another: seed and options for each env's next reset
                that has none.
            steppers: What has each env's ``step``; None: the envs.
        """
    def action_of(self, env: int) -> Any:
        """The last action of an env."""
    def busy(self) -> tuple[int, str, float] | None:
        """The present call of an env: (env, "step", "reset" or "call", seconds); None: none."""
    def begin_call(self, env: int) -> None:
        """Notes that a method of an env is called now, or an attribute got or set."""
    def end_call(self, env: int) -> None:
        """Notes that this call has ended."""
    def take_rollouts(self, rollouts: Results | None) -> None:
        """Takes the frames of rollouts, in place of any before; None: there are none."""
    def take_log(self, log: ReplayLog | None) -> None:
        """Records the steps of its envs for a replay; None: no more."""
    def record(self, recorder: Recorder | None) -> None:
        """Starts recording a trace; None stops it."""
    def publish_words(self, words: Sequence[str]) -> None:
        """Publishes what is compiled of each env's wrappers."""
    def serve(self, parent_alive: Callable[[], bool], doze: Callable[[], object] | None) -> bool:
        """Serves until a request to close (True) or until the parent is gone (False).

        Args:
            parent_alive: Asked between slices of sleep.
            doze: Sleeps until the parent sends something or is gone; called after half a second
                without a request. None: go on sleeping in slices.
        """
    def serve_pending(self) -> bool:
        """Serves the requests that are there; False after a request to close."""

class OverlappedLoop(WorkerLoop):
    """Serves the envs ``first_env`` and up, several at once: see ``_processes.overlap``."""

    @property
    def in_progress(self) -> int:
        """The number of envs that are busy."""
    def execute_by(self, executor: Any) -> None:
        """Takes the executor, whose ``start(i, what, argument)`` has an env begin something."""
    def sleep(self) -> bool:
        """Announces that this worker sleeps on its alarm; False: it has requests to serve."""
    def awake(self) -> None:
        """Ends what ``sleep`` has announced, whatever that returned."""
    def begin(self, i: int, doing: str, since: int) -> None:
        """Publishes what env i does since when, in ns of the monotonic clock."""
    def end(self, i: int) -> None:
        """Publishes that env i is done."""
    def finish(self, i: int, outcome: Any = None) -> None:
        """Notes that env i has come to its end; answers its request if it was the last one."""
    def close(self) -> None:
        """Answers the request to close."""

# The parent's side

class Alarms:
    """Descriptors that wake dozing workers, one for each."""

    def __init__(self, count: int = 0) -> None: ...
    def __getitem__(self, index: int) -> int: ...
    def close(self) -> None:
        """Closes the descriptors; from then on waking workers does nothing."""

class Links:
    """The parent's ends of the rings and channels of all workers."""

    waiting: bool
    closed: bool

    def __init__(
        self,
        segment: Segment,
        ranges: Sequence[range],
        channels: list[Any],
        guard: Guard,
        look: Callable[[], None],
        alarms: Alarms,
        budgets: Callable[[], Any],
        limits: tuple[float | None, float | None] = (None, None),
        inline: Callable[[], None] | None = None,
        hang_after: float | None = None,
        hung: Callable[[list[tuple[int, tuple[int, str] | None, float]]], None] | None = None,
    ) -> None:
        """Attaches to the rings.

        Args:
            segment: Where they are.
            ranges: The envs of each worker.
            channels: The control channel of each worker; the list may change.
            guard: Guards the calls that ask, take or wait.
            look: Raises if a worker has ended; called in every slice of a wait.
            alarms: Wake workers that doze.
            budgets: Says how to wait.
            limits: Seconds that a step and a reset of one env may take.
            inline: Serves requests if there are no worker processes.
            hang_after: Seconds; None: for ever.
            hung: Called once about each worker that is busy for longer: its index, what it does
                ((env, "step", "reset" or "call"); None: something else), and the seconds.
        """

    def remind(self) -> None:
        """Wakes all workers once more."""

    def ask_to_close(self, workers: Sequence[int] | None = None) -> None:
        """Asks workers to close their envs and end, and does not wait; for any thread.

        Args:
            workers: Which. None: all.

        Raises:
            RuntimeError: A request ring is full.
        """

    def look_around(self) -> None:
        """Checks signals, channels, ended workers and time limits."""

    def look_if_due(self) -> int:
        """Looks around if the last time was a slice ago."""

    def is_idle(self, worker: int) -> bool:
        """Whether all requests to a worker were answered, and the answers taken."""
    def has_answered(self, worker: int) -> bool:
        """Whether a worker has answered all requests, whether taken or not."""

    def steps_of(self, worker: int) -> int:
        """Steps of envs made by the worker's present process."""

    def insight(self) -> Insight:
        """What the segment says about the vector env now."""

    def record(
        self,
        recorder: Recorder | None,
        workers: Sequence[int] = (),
        packed: Any = None,
        descriptor: int = -1,
    ) -> None:
        """Starts recording a trace; None stops it.

        Args:
            recorder: The recorder of this side.
            workers: The workers that record, too; they do not answer.
            packed: The message to them.
            descriptor: The descriptor of the memory, sent with the message.

        Raises:
            RuntimeError: Too many such requests to a worker are pending. Nothing was sent, then.
        """

    def count_fault(self, name: str, number: int = 1) -> None:
        """Counts faults by their name in csrc/counters.h.

        Raises:
            ValueError: There is no such counter.
        """

Envs = npt.NDArray[np.intp]

DONE: int
TIME_UP: int

class Ledger:
    """What was asked of each env, and what has come back."""

    def catch_up(self) -> None:
        """Has the log of a replay accept what was recorded of all envs that are not in flight."""

    links: Links
    frames: Frames
    log: Sampler | None
    num_ready: int
    num_in_flight: int
    incomplete: Sequence[int]
    failures: list[Failure]
    raised: list[Failure]
    resets: npt.NDArray[np.int64]
    asked_with: list[tuple[int | None, Any]]
    last_seeds: list[int | None]

    def __init__(
        self,
        links: Links,
        frames: Frames,
        slabs: Slabs,
        autoreset: Autoreset,
        pack: Callable[[Any], Any],
        may_step_over: bool = True,
        in_ranges: bool = False,
    ) -> None:
        """Takes the ways of requests and the places of results.

        Args:
            links: The rings and channels to the workers.
            frames: The frames of results.
            slabs: The arrays of the segment.
            autoreset: Who resets an env whose episode has ended, and when.
            pack: Makes a message of actions that do not fit a worker's ring.
            may_step_over: Whether an env may be stepped after its episode is over.
            in_ranges: Whether neighbours are asked together.
        """

    def in_flight(self, env: int) -> bool:
        """Whether an env was asked and its answer not taken."""
    def has_failed(self, env: int) -> bool:
        """Whether an env has raised, and nothing is decided about it yet."""
    def is_over(self, env: int) -> bool:
        """Whether an env's episode is over, or its next step is answered by a truncation."""
    def num_missing(self, envs: Envs) -> int:
        """At least how many requests to these envs are pending."""
    def check(self, envs: Envs) -> None:
        """Raises ValueError unless each of these is an env, once, and may be asked something."""
    def step_all(self, actions: Any, rollout_frame: int = -1) -> int:
        """Writes actions and asks every env to step."""
    def step(
        self,
        envs: Envs,
        actions: Any,
        rollout_frame: int | None = None,
        together: bool = False,
    ) -> None:
        """Writes actions and asks each of these envs to step."""
    def reset(self, envs: Envs) -> None:
        """Asks each of these envs to reset, without seed or options."""
    def command(
        self,
        envs: Envs,
        packed: dict[int, Any],
        resets: list[tuple[int | None, Any]] | None = None,
        descriptors: Sequence[int] = (),
        repeat: bool = True,
    ) -> None:
        """Asks the workers of these envs to carry out a command.

        Args:
            envs: Which, in order.
            packed: The message of each worker whose envs these are.
            resets: (seed, options) of each, of a command that resets them; None: it has results.
            descriptors: Descriptors sent with each message.
            repeat: Whether a lost reset is repeated with its seed and options.
        """
    def wait_all(self, timeout: float | None) -> bool:
        """Waits until all requests are answered; False if the time is up first."""
    def wait_ready(
        self, wanted: int, envs: Envs | None = None, timeout: float | None = None
    ) -> int:
        """Waits until so many envs are ready (-1: all in flight), or these have answered.

        Returns:
            DONE; TIME_UP; or neither: a message must be read, or an env has raised.
        """
    def take_all(self, vector_env: Any, arrays: bool = True) -> tuple[Any, ...] | None:
        """Takes a lockstep request's four arrays and infos; None in an exceptional case."""
    def sequence_awaited(self, worker: int) -> int:
        """The number of the request whose message must come next from a worker."""
    def deliver(
        self,
        worker: int,
        messages: list[tuple[int, int, Any]],
        failures: list[Failure],
        results: list[Any] | None,
    ) -> None:
        """Takes the next message of a worker."""
    def lose(self, worker: int) -> None:
        """Notes that a worker is dead; its complete answers remain valid."""
    def is_lost(self, worker: int) -> bool:
        """Whether a worker is dead and has no successor."""
    def settle_failure(self, failure: Failure) -> None:
        """Removes an env's failure from those about which nothing is decided."""
    def retire(self, worker: int) -> None:
        """Notes that a worker is dead and gets no successor: its envs are not waited for."""
    def lost_resets(self, worker: int) -> list[int]:
        """Envs of a dead worker that were lost in a reset by the caller, or raised in it."""
    def revive(self, worker: int, fault: Fault) -> None:
        """Notes that a worker has a successor, and repeats or answers what was lost."""
    def mend(self, failure: Failure, fault: Fault) -> None:
        """Answers in place of an env that has raised."""
    def give_up(self, failure: Failure) -> None:
        """Leaves an env's exception to the caller."""
    def discard(self) -> None:
        """Discards all answers, none of which is pending."""
    def oldest(self, count: int) -> Envs:
        """The envs that have been ready for longest, at most so many of them."""
    def ready_among(self, envs: Envs) -> Envs:
        """The ready ones of these envs."""
    def ready(self) -> Envs:
        """All ready envs, by index."""
    def take(
        self,
        envs: Envs,
        vector_env: Any,
        everyone: bool,
        arrays: bool,
        among: Collection[int] | None,
    ) -> tuple[
        Envs,
        tuple[Any, ...],
        tuple[dict[int, Report], list[Any], dict[int, Any], list[int]],
    ]:
        """Takes ready envs.

        Returns:
            The envs; their results: four arrays and infos; and the reports of faults, failures,
            results of a command, and envs whose command was lost.
        """

class Batch(VectorEnv[Any, Any, Any]):
    """Stand-in for a vector env of so many envs, so that Gymnasium gathers their infos."""

    def __init__(self, num_envs: int) -> None: ...

_T = TypeVar("_T")

class Guard:
    """Refuses re-entrant calls and other threads'; keeps what is pending and abandoned."""

    pending: Any
    abandoned: bool

    def beside(self, function: Callable[[], _T]) -> _T:
        """Calls a function, even within a call by this thread; refused in another thread's call."""

    def leave_pending(self, pending: object, held: Callable[[], None] | None = None) -> None:
        """Notes what was begun, for another call to take, and its request, if that was not sent."""

    def claim(self, pending: object) -> tuple[Callable[[], None] | None] | None:
        """The request that was not sent, of what is pending; None: that is not.

        The call that is under way takes it, or abandons it.
        """

    def disown(self) -> None:
        """In a fork: the call that is under way is the parent's."""

    def abandon(self) -> None:
        """Has the next call discard what is in flight."""

    def settled(self) -> None:
        """Notes that it was discarded."""

    def both(self, begin: Callable[[], object], finish: Callable[[], _T]) -> _T:
        """Calls both, one after the other; if one raises, what was asked is abandoned."""

    def record(self, recorder: Recorder | None) -> None:
        """Has a trace note the end of each call, when the caller goes on; None stops it."""

class BatchSteps:
    """Base of the Exchange, with its ``step``: a batch step in one compiled call."""

    guard: Guard
    _ledger: Ledger | None
    _workers: Any
    _recovery: Any
    _left: set[int]
    _recycles: bool

    def step(
        self,
        actions: Any,
        gather: Any = None,
        envs: Envs | None = None,
        *,
        frame: int = -1,
        last: bool = False,
        arrays: bool = True,
        meanwhile: Callable[[], object] | None = None,
        within: Any = None,
    ) -> tuple[Any, ...]:
        """Steps all envs, or some, none of which may be in flight."""

    def ask(self, envs: Any, actions: Any, *, frame: int = -1, together: bool = False) -> None:
        """Asks envs to step, and does not wait."""

    def take_batch(
        self,
        count: int,
        gather: Any = None,
        least: int | None = None,
        timeout: float | None = None,
    ) -> tuple[Any, Envs, list[Failure]]:
        """Takes the envs that have been ready for longest."""

_Method = TypeVar("_Method", bound=Callable[..., Any])

def exclusive(method: _Method) -> _Method:
    """Decorate a method of an object with a ``guard``: refused during another call."""

def whole(method: _Method) -> _Method:
    """Decorate likewise; if the method raises, what it asked and did not take is abandoned."""

class Loan(Generic[_T]):
    """Lends what ``begin()`` returns, in a ``with`` block; ``pending`` is the guard's meanwhile."""

    def __init__(
        self, guard: Guard, begin: Callable[[], _T], pending: object, keeps: bool
    ) -> None: ...
    def __enter__(self) -> _T: ...
    def __exit__(self, *error: object) -> None: ...

def start_watchdog(descriptor: int, mark: int) -> None:
    """Has this process killed when the process of a pidfd is gone, with its family.

    Args:
        descriptor: The pidfd; it must stay open until ``stop``.
        mark: The mark of the family; its process group is killed, too, if it leads one.

    Raises:
        OSError: It is no pidfd, a watchdog runs already, or there can be no more threads.
    """

def stop_watchdog() -> None:
    """Ends the watch, if there is one."""

class Descriptor:
    """A file descriptor, closed when nothing refers to this object any more.

    Opening and closing are in C: what a signal's handler raises loses no descriptor.

    Attributes:
        number: The descriptor; -1 once it is closed.
    """

    number: int

    def __init__(self, opens: Callable[..., int], *arguments: Any) -> None:
        """Calls a builtin function that opens a descriptor, and owns that."""
    def close(self) -> None:
        """Closes it, unless that was done."""

def mark_process(mark: int) -> None:
    """Marks this process, and so what it starts from now on.

    Args:
        mark: From 2**62 up to 2**63.

    Raises:
        OSError: The hard limit that the mark must be below is too low.
    """

def opened_pipe() -> list[Descriptor]:
    """Opens a pipe; returns its read end and its write end."""

def reap_marked(marks: Sequence[int]) -> None:
    """Waits for ended children with one of these marks, if this process gets others' orphans."""

def signal_marked(marks: Sequence[int], number: int, spared: int = 0) -> int:
    """Sends a signal to every process with one of these marks, except this one.

    Args:
        marks: The marks.
        number: Of the signal; 0: none.
        spared: Another process that gets no signal.

    Returns:
        How many there are.
    """

def is_unhandled(number: int) -> bool:
    """Whether this process neither handles nor ignores a signal, in Python or C."""

def guard_handler(number: int, descriptor: int) -> None:
    """Puts a handler around the one that a signal has, which writes to a descriptor.

    It leaves errno as it was, runs in the first thread, writes a zero byte after what that one has
    written, and does not call it once the descriptor means another file; nor while the interpreter
    counts a call in, if it cannot be walked through then: a byte 1 comes before the zero byte. It
    empties a file of more than 256 KiB first.
    """

def buffer_c_lines() -> None:
    """Has C's stdout pass on whole lines; what is in its buffer goes out first."""

def flush_c() -> None:
    """Passes on what C's stdout holds."""

# The machine

def core_round_trip(core: int, other: int, sleeping: bool, seconds: float) -> float | None:
    """Hands a cache line from core to core and back, for so long.

    Args:
        core: A core that this process may use.
        other: Another one; or the same, of players that sleep.
        sleeping: Each player sleeps until the other wakes it; otherwise it spins.
        seconds: How long.

    Returns:
        Seconds there and back; None: the players could not be started there.
    """

def core_rates(cores: Sequence[int], seconds: float) -> list[float]:
    """What a process on each of these cores gets done when all compute at once.

    Returns:
        For each core its rate, in a unit that is the same for all; 0 where none could be started.
    """

def yield_cost(seconds: float) -> float:
    """Seconds of a ``sched_yield``, measured for so long."""

def clock_cost(seconds: float) -> float:
    """Seconds of a reading of the clock, measured for so long."""

# A replay

class ReplayLog:
    """The records of all envs, in memory that the parent and the workers have."""

    def __init__(
        self,
        memory: Buffer,
        counts: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        interrupted: npt.NDArray[np.uint8],
        kinds: npt.NDArray[np.uint8],
        rewards: npt.NDArray[np.float64],
        arrays: tuple[Any, Any],
        codecs: tuple[Codec, Codec],
        newest: bool,
        zeros: bool,
    ) -> None:
        """Takes what `LogLayout.arrays` has placed.

        Args:
            memory: The memory of all arrays.
            counts: Of each env: records committed, records written.
            interrupted: Of each env: whether what precedes its next step is unknown.
            kinds: Of each row: what it is.
            rewards: Of each row.
            arrays: Of observations and of actions, nested as their spaces are.
            codecs: Of the same.
            newest: Whether of an observation, a stack of frames, the last frame is kept.
            zeros: Whether zeros precede an episode in a stack, not its first frame.
        """

class Sampler(ReplayLog):
    """The parent's side of a log: what can be drawn, and the batch that is being put together."""

    whole: Buffer
    arrays: tuple[Any, Any]
    counts: npt.NDArray[np.int64]
    num_transitions: int
    largest: float
    spare: int
    ended: bool

    def prepare(
        self,
        observations: Sequence[npt.NDArray[Any]],
        actions: Sequence[npt.NDArray[Any]],
        reserve: Callable[[int], int],
        *,
        n_step: int,
        discount: float,
        stack: int,
        prioritized: bool,
        threads: int,
        spare: int,
    ) -> None:
        """Prepares for sampling: replay.pyx says how."""
    def moment(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64] | None, float]:
        """The counts of records, the priorities of all rows, and the largest, of one moment."""
    def break_overwritten(
        self, kinds: npt.NDArray[np.uint8], counts: npt.NDArray[np.int64]
    ) -> None:
        """Marks what may have been overwritten since envs had so many records."""
    def set_priorities(
        self,
        priorities: npt.NDArray[np.float64],
        counts: npt.NDArray[np.int64],
        largest: float,
    ) -> None:
        """Sets the priorities of all rows that hold transitions."""
    def interrupt(self, env: int) -> None:
        """Notes that what precedes the next step of an env is unknown."""
    def draw(self, rng: np.random.Generator, size: int) -> tuple[Any, ...]:
        """Draws transitions: rewards, discounts, flags, indices, probabilities."""
    def choose(self, indices: npt.NDArray[np.int64]) -> tuple[Any, ...]:
        """Likewise, of given transitions."""
    def holds(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether each of these transitions is there."""
    def latest(self) -> npt.NDArray[np.int64]:
        """The index of each env's last step; -1: it is no transition, or there is none."""
    def update(self, indices: npt.NDArray[np.int64], priorities: npt.NDArray[np.float64]) -> None:
        """Sets priorities; transitions that are gone are passed over."""
    def room(self, key: object, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array for a part of a batch; the key says for which."""
    def begin(
        self,
        observations: Sequence[npt.NDArray[Any]],
        after: Sequence[npt.NDArray[Any]],
        actions: Sequence[npt.NDArray[Any]],
    ) -> bool:
        """Begins to fill the large arrays of the batch that was drawn last; False: draw again."""
    def finish(self) -> int:
        """Waits until the batch is complete, and helps."""
