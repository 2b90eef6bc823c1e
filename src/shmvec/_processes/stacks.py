"""Reads the Python stack of a worker from outside, whatever the worker is doing.

On a signal, faulthandler adds the worker's stack to a memfd that only the worker has open. That
needs neither the GIL nor the env, only a running process. The memfd's name identifies the worker. A
reader finds it in /proc, where the kernel admits processes that may trace the worker: those of the
same user. So the parent needs no descriptor for it, it takes no memory before the first stack, and
the parent reads it as ``python -m shmvec stacks`` does. A reader writes nothing: what it finds by
that name in a process of another user may be anything.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import math
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep

from shmvec._core import guard_handler, is_unhandled
from shmvec._cores import identity, processes
from shmvec._memory.segment import memory_file, shared_memory_of
from shmvec.faults import envs_in_words

__all__ = [
    "CRASHES",
    "OURS",
    "Busy",
    "Hangs",
    "Offer",
    "Watch",
    "is_wanted",
    "offer_of",
    "offer_stacks",
    "offers_of",
    "stack_of",
    "waits_for_lock",
]


OURS = f"{os.sep}shmvec{os.sep}_processes{os.sep}"  # in paths of frames below those of an env
# SIGRTMAX - 2 is Java's; other programs count up from SIGRTMIN.
_SIGNALS = range(signal.SIGRTMAX - 7, signal.SIGRTMIN, -1)
_NAME = "shmvec-stacks:{}:{}:{}:{}:{}:{}"
_LINK = re.compile("/memfd:" + _NAME.format(*["([0-9]{1,10})"] * 6) + r" \(deleted\)")
_PATIENCE_S = 2.0
_PAUSE_S = 0.0005
_BLOCKED_S = 0.25  # longer than threads block signals while they start a thread or handle a signal
_MOST_BYTES = 1 << 20
CRASHES = (3, 13, 0)  # where faulthandler may crash as a function returns: CPython issue 123967
_UNREADY = b"\1"  # csrc/handler.h
_CUT = b"<invalid frame>\n"  # Python 3.14 writes it for a frame in no line of code
_CUT_SHOWN = b"(what called this, Python does not show)\n"
_TRIES = 20
_MOST_STATUS = 1 << 14
_MOST_LINES = 20
_LONGEST_LINE = 200
_STATES = {
    "T": "it is stopped, by a signal such as SIGSTOP",
    "t": "it is stopped, by a debugger",
}


# ---- in a worker -------------------------------------------------------------------------------


def is_wanted() -> bool:
    """Whether the user lets this package use faulthandler."""
    return os.environ.get("PYTHONFAULTHANDLER", "1") not in ("", "0")


def offer_stacks(parent: int, worker: int, envs: range) -> None:
    """Lets other processes read the stacks of this one from now on, where that is possible.

    Args:
        parent: Process id of the parent.
        worker: The worker's index.
        envs: Its envs.
    """
    if not is_wanted() or sys.version_info[:3] == CRASHES:
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError, StopIteration):
        number = next(filter(is_unhandled, _SIGNALS))
        name = _NAME.format(os.getpid(), parent, worker, envs.start, envs.stop, number)
        memory = memory_file(name)
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)  # its handler may empty it
        # Not all_threads: threads that begin or end meanwhile would crash it. Not chain: only
        # without it the handler has SA_RESTART, so that most system calls go on.
        faulthandler.register(number, file=memory, all_threads=False, chain=False)
        guard_handler(number, memory)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])


# ---- outside -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """A worker whose stacks can be read.

    Attributes:
        pid: Its process.
        parent: The id of the process that has started it, in its container.
        worker: Its index.
        envs: Its envs.
        number: The signal on which it writes its stack.
        descriptor: The descriptor to which it writes its stack.
    """

    pid: int
    parent: int
    worker: int
    envs: range
    number: int
    descriptor: int


class _NoStackError(Exception):
    """There is no stack; the message says why."""


def offer_of(pid: int) -> Offer | None:
    """What a process offers; None: it is no worker.

    Raises:
        OSError: There is no such process, or this one may not look at it.
    """
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found = _LINK.fullmatch(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            if found is None:
                continue
            owner, parent, worker, first, stop, number = map(int, found.groups())
            # Otherwise the descriptor is inherited, by a fork of the worker's.
            if owner == _within(pid)[1] and number in _SIGNALS:
                return Offer(pid, parent, worker, range(first, stop), number, int(descriptor))
    return None


def offers_of(parent: int) -> list[Offer]:
    """What the workers of a process offer, those that this process may look at."""
    found = []
    its, user = _within(parent), _user(parent)
    for pid in processes():
        with contextlib.suppress(OSError, ValueError):
            offer = offer_of(pid)
            # Another user's process may say that it is a worker of this one.
            if offer and (_within(pid)[0], offer.parent) == its and _user(pid) == user:
                found.append(offer)
    return sorted(found, key=lambda offer: offer.pid)


def _user(pid: int) -> str:
    """The user who has started a process (real), of its status."""
    return _field(_status(pid), "Uid").split()[0]


def _within(pid: int) -> tuple[str, int]:
    """A process's pid namespace, and its id there, which in a container is another one."""
    return identity(pid) or ("", pid)


def stack_of(pid: int, whole: bool = False) -> str:
    """The Python stack of a worker, most recent call first, as far as it is the env's.

    Args:
        pid: The worker's process.
        whole: Whether all frames are wanted, or as many as fit a message.

    Returns:
        Lines as faulthandler writes them; or, in parentheses, why there are none.
    """
    try:
        return _excerpt(_written(pid, monotonic() + _PATIENCE_S), whole)
    except ProcessLookupError:
        return "(the process has ended)"
    except (OSError, ValueError, _NoStackError) as error:
        return f"(its stack cannot be read: {error})"


def waits_for_lock(pid: int) -> bool:
    """Whether the main thread of a process waits for a lock, or something like one."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan", encoding="ascii") as wchan:
        return "futex" in wchan.read()
    return False


def _printable(text: str) -> str:
    return "".join(each for each in text if each.isprintable() or each == "\n")


def _written(pid: int, deadline: float) -> str:
    """Asks a worker for its stack, and returns what it writes."""
    process = os.pidfd_open(pid)  # first, so that a reuse of the id is noticed
    try:
        offer = offer_of(pid)
        if offer is None:
            raise _NoStackError("the process does not offer it (any more)")
        memory = shared_memory_of(pid, offer.descriptor, _LINK)
        try:
            for _ in range(_TRIES):
                answer = _answer(process, offer, memory, deadline)
                if answer and not answer.endswith((_UNREADY, _CUT)):
                    break
                sleep(_PAUSE_S)
        finally:
            os.close(memory)
        if not answer:
            raise _NoStackError("something in the process has it written elsewhere")
        if answer == _UNREADY:
            raise _NoStackError("Python is about to change it, whenever it is read")
        return _printable(answer.replace(_CUT, _CUT_SHOWN).decode(errors="replace"))
    except Exception as error:
        if _has_ended(process, pid):
            raise ProcessLookupError from error
        raise
    finally:
        os.close(process)


def _has_ended(process: int, pid: int) -> bool:
    """Whether a process has ended, or its main thread has."""
    ended = select.poll()
    ended.register(process, select.POLLIN)
    with contextlib.suppress(ValueError):
        try:
            return bool(ended.poll(0)) or _field(_status(pid), "State")[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return True
    return False


def _answer(process: int, offer: Offer, memory: int, deadline: float) -> bytes:
    """Has a worker add its stack to the memory, and waits for the zero byte at the end."""
    status = _status(offer.pid)
    bit = 1 << (offer.number - 1)
    state = _field(status, "State")
    if state[0] in _STATES:
        raise _NoStackError(_STATES[state[0]])
    if not _mask(status, "SigCgt") & bit:  # the signal would end the process
        raise _NoStackError("something in the process has taken its signal's handler away")
    patience = monotonic() + _BLOCKED_S
    while _mask(status, "SigBlk") & bit:
        if monotonic() > patience:
            raise _NoStackError("its main thread blocks the signal")
        sleep(_PAUSE_S)
        status = _status(offer.pid)
    # After the last zero byte: another reader's stack may be being written, and does as well.
    begin = os.pread(memory, _MOST_BYTES, 0).rfind(b"\0") + 1
    if not (_mask(status, "ShdPnd") | _mask(status, "SigPnd")) & bit:  # else a request is pending
        signal.pidfd_send_signal(process, offer.number)
    while True:
        if os.fstat(memory).st_size < begin:  # the worker has emptied it
            begin = 0
        written = os.pread(memory, _MOST_BYTES, begin)
        if b"\0" in written or len(written) == _MOST_BYTES:
            return written.partition(b"\0")[0]
        if monotonic() > deadline:
            state = _field(_status(offer.pid), "State")
            raise _NoStackError(_STATES.get(state[0], f"it does not answer; its state is {state}"))
        sleep(_PAUSE_S)


def _status(pid: int) -> bytes:
    """The status of a process, from /proc."""
    descriptor = os.open(f"/proc/{pid}/status", os.O_RDONLY)
    try:
        return os.read(descriptor, _MOST_STATUS)
    finally:
        os.close(descriptor)


def _field(status: bytes, name: str) -> str:
    """A field of a status.

    Raises:
        ValueError: The field is missing, as in some sandboxes.
    """
    begin = status.index(b"\n%s:\t" % name.encode()) + len(name) + 3
    return status[begin : status.index(b"\n", begin)].decode(errors="replace")


def _mask(status: bytes, name: str) -> int:
    """The signals in a field of a status, as bits."""
    return int(_field(status, name), 16)


def _excerpt(written: str, whole: bool) -> str:
    """The frames of an env and of the functions that it calls."""
    frames = written.strip("\n").splitlines()[1:]
    ends = [number for number, line in enumerate(frames) if OURS in line]
    theirs = frames[: ends[0]] if ends else frames
    if len(theirs) > _MOST_LINES and not whole:
        theirs = [*theirs[: _MOST_LINES - 1], f"  and {len(theirs) - _MOST_LINES + 1} more"]
    lines = [
        line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…" for line in theirs
    ]
    return "\n".join(lines) or "(the main thread runs no Python code of an env's)"


log = logging.getLogger("shmvec")

_MOST_LOGGED = 4  # number of workers whose stacks are logged; the others are only named

# A worker; its env and operation ("step", "reset" or "call"), or None; and for how many seconds.
Busy = tuple[int, tuple[int, str] | None, float]
# Describes where a worker is, in lines that follow a message.
Where = Callable[[int], str]


class Hangs:
    """Logs which workers of one vector env hang, and where."""

    def __init__(self, after_s: float | None, ranges: Sequence[range]) -> None:
        """Prepares to log them.

        Args:
            after_s: Seconds after which a worker counts as hanging; None: none does.
            ranges: The envs of each worker.
        """
        self.after_s = after_s
        self._ranges = ranges

    def log_busy(self, hanging: Sequence[Busy], doing: str, where: Where) -> None:
        """Logs where workers are that take too long to answer this command."""
        whats = []
        for worker, at, seconds in hanging:
            if at is None:
                what = f"{self.named(worker)} has not answered to {doing!r}"
            else:
                env, operation = at
                what = f"env {env} of worker {worker} has been in {operation}()"
            whats.append((worker, what, seconds))
        self.log_hangs(whats, where)

    def named(self, worker: int) -> str:
        """A worker and its envs, in words."""
        return f"worker {worker} ({envs_in_words(self._ranges[worker])})"

    def log_hangs(self, hanging: Sequence[tuple[int, str, float]], where: Where) -> None:
        """Logs what workers are doing, for how many seconds, and where."""
        lines = [
            f"{what} for {seconds:.3g} s.{where(worker)}\n"
            for worker, what, seconds in hanging[:_MOST_LOGGED]
        ]
        others = ", ".join(str(worker) for worker, *_ in hanging[_MOST_LOGGED:])
        if others:
            lines.append(f"Workers {others} as well: python -m shmvec stacks PID says where.\n")
        log.warning(
            "%sThe wait goes on. hang_warning_s=%g sets when this is logged; 0: never.",
            "".join(lines),
            self.after_s,
        )


class Watch:
    """A wait for workers to start or end; each that takes too long is logged once."""

    def __init__(self, hangs: Hangs, doing: str) -> None:
        """Prepares the wait; ``doing`` says what the workers have been doing."""
        self._hangs = hangs
        self._doing = doing
        self._began: dict[int, float] = {}  # by worker, when its wait began; inf: it was logged

    def look(self, waiting: Iterable[int], where: Where) -> None:
        """Logs which of these workers have been waited for too long, and where they are.

        The wait for a worker begins with the first look at it.
        """
        if self._hangs.after_s is None:
            return
        now, late = time.monotonic(), []
        for worker in waiting:
            seconds = now - self._began.setdefault(worker, now)
            if seconds > self._hangs.after_s:
                late.append((worker, f"{self._hangs.named(worker)} {self._doing}", seconds))
                self._began[worker] = math.inf
        if late:
            self._hangs.log_hangs(late, where)
