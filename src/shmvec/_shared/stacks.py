"""The Python stack of a worker, read from outside: without its help, whatever it is doing.

A worker has faulthandler write its stacks, when a signal comes, into a memfd that only it has open.
That needs neither the GIL nor the env, only that the process runs at all. The memfd's name says
whose it is. Who wants to read finds it in /proc, where the kernel lets in who may trace the
process: the same user. So the parent needs no descriptor for it, however many workers there are, it
takes no memory until somebody asks, and the parent reads as ``python -m shmvec stacks`` does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from time import monotonic, sleep

from shmvec._core.handler import is_free, keep_errno

__all__ = ["OURS", "Offer", "is_wanted", "offer_of", "offer_stacks", "offers_of", "stack_of"]

OURS = f"{os.sep}shmvec{os.sep}_worker{os.sep}"  # in paths of frames below those of an env
# SIGRTMAX - 2 is Java's; from SIGRTMIN on others begin to count.
_SIGNALS = range(signal.SIGRTMAX - 7, signal.SIGRTMIN, -1)
_NAME = "shmvec-stacks:{}:{}:{}:{}:{}:{}"
_LINK = re.compile("/memfd:" + _NAME.format(*["([0-9]{1,10})"] * 6) + r" \(deleted\)")
_PATIENCE_S = 2.0
_PAUSE_S = 0.0005
_MOST_BYTES = 1 << 20
_MOST_STATUS = 1 << 14
_MOST_LINES = 20
_LONGEST_LINE = 200
_STATES = {
    "T": "it is stopped, by a signal such as SIGSTOP",
    "t": "it is stopped, by a debugger",
    "Z": "it has ended",
    "X": "it has ended",
}


# ---- in a worker -------------------------------------------------------------------------------


def is_wanted() -> bool:
    """Whether the user leaves faulthandler to us."""
    return os.environ.get("PYTHONFAULTHANDLER", "1") not in ("", "0")


def offer_stacks(parent: int, worker: int, envs: range) -> None:
    """Lets others read the stacks of this process from now on; not where that is impossible.

    Args:
        parent: Process id of the parent.
        worker: The worker's index.
        envs: Its envs.
    """
    if not is_wanted():
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError, StopIteration):
        number = next(filter(is_free, _SIGNALS))
        name = _NAME.format(os.getpid(), parent, worker, envs.start, envs.stop, number)
        memory = os.memfd_create(name, os.MFD_CLOEXEC)
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)  # readers empty it
        # Not chained: only so has it SA_RESTART, by which most system calls go on.
        faulthandler.register(number, file=memory, all_threads=True, chain=False)
        keep_errno(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])


# ---- outside -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """A worker whose stacks can be read.

    Attributes:
        pid: Its process.
        parent: The process that has started it.
        worker: Its index.
        envs: Its envs.
        number: The signal upon which it writes them,
        descriptor: and where to.
    """

    pid: int
    parent: int
    worker: int
    envs: range
    number: int
    descriptor: int


class _NoStackError(Exception):
    """Why there is none."""


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
            # Else it is inherited: this is a fork of the worker's.
            if owner == pid and number in _SIGNALS:
                return Offer(pid, parent, worker, range(first, stop), number, int(descriptor))
    return None


def offers_of(parent: int) -> list[Offer]:
    """What the workers of a process offer, those that this process may look at."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            offer = offer_of(int(name))
            if offer is not None and offer.parent == parent:
                found.append(offer)
    return sorted(found, key=lambda offer: offer.pid)


def stack_of(pid: int, most_lines: int = _MOST_LINES, patience_s: float = _PATIENCE_S) -> str:
    """The Python stack of a worker, most recent call first, as far as it is the env's.

    Args:
        pid: Its process.
        most_lines: Of each thread.
        patience_s: How long it may take to answer.

    Returns:
        Lines as faulthandler writes them; in parentheses, why there are none.
    """
    try:
        return _excerpt(_written(pid, monotonic() + patience_s), most_lines)
    except ProcessLookupError:
        return "(the process has ended)"
    except (OSError, ValueError, _NoStackError) as error:
        return f"(its stack cannot be read: {error})"


def _written(pid: int, deadline: float) -> str:
    """What a worker writes when it is asked."""
    process = os.pidfd_open(pid)  # first: it is this process that is looked at
    try:
        offer = offer_of(pid)
        if offer is None:
            raise _NoStackError("the process does not offer it (any more)")
        with (
            FileIO(f"/proc/{pid}/fd/{offer.descriptor}", "r+") as memory,
            _alone(memory, deadline),
        ):
            _ask(process, offer, memory, deadline)
            memory.seek(0)
            text = memory.read(_MOST_BYTES).decode(errors="replace")
            return "".join(each for each in text if each.isprintable() or each == "\n")
    finally:
        os.close(process)


@contextlib.contextmanager
def _alone(memory: FileIO, deadline: float) -> Iterator[None]:
    """One reader at a time, who leaves nothing behind."""
    while True:
        try:
            fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if monotonic() > deadline:
                raise _NoStackError("somebody else is about to read it") from None
            sleep(_PAUSE_S)
    try:
        memory.truncate(0)
        yield
    finally:
        memory.truncate(0)  # the lock goes with the descriptor


def _ask(process: int, offer: Offer, memory: FileIO, deadline: float) -> None:
    """Has a worker write, and waits until it has.

    It has once something is there and no thread is in the signal's handler, where it is blocked.
    """
    bit = 1 << (offer.number - 1)
    status = _status(offer.pid)
    if not _mask(status, "SigCgt") & bit:  # it would end the process
        raise _NoStackError("something in the process has taken its signal's handler away")
    state = _field(status, "State")
    if state[0] in _STATES:
        raise _NoStackError(_STATES[state[0]])
    blocking = _blocking(offer.pid, bit)
    if not _mask(status, "ShdPnd") & bit:  # asked before, it has not come to it
        signal.pidfd_send_signal(process, offer.number)
    while os.fstat(memory.fileno()).st_size == 0 or not _blocking(offer.pid, bit) <= blocking:
        if monotonic() > deadline:
            state = _field(_status(offer.pid), "State")
            raise _NoStackError(_STATES.get(state[0], f"it does not answer; its state is {state}"))
        sleep(_PAUSE_S)


def _blocking(pid: int, bit: int) -> set[str]:
    """Threads of a process that block a signal."""
    found = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if _mask(_status(pid, f"/task/{thread}"), "SigBlk") & bit:
                found.add(thread)
    return found


def _status(pid: int, thread: str = "") -> bytes:
    """What the system says of a process, or of one of its threads."""
    descriptor = os.open(f"/proc/{pid}{thread}/status", os.O_RDONLY)
    try:
        return os.read(descriptor, _MOST_STATUS)
    finally:
        os.close(descriptor)


def _field(status: bytes, name: str) -> str:
    """What it says by this name.

    Raises:
        ValueError: Nothing, as in some sandboxes.
    """
    begin = status.index(b"\n%s:\t" % name.encode()) + len(name) + 3
    return status[begin : status.index(b"\n", begin)].decode(errors="replace")


def _mask(status: bytes, name: str) -> int:
    """Signals of which a status says this, as bits."""
    return int(_field(status, name), 16)


def _excerpt(written: str, most_lines: int) -> str:
    """The stacks of the threads that are in code of an env's; the one that is asked comes first."""
    found: list[tuple[str, list[str]]] = []
    for part in written.strip("\n").split("\n\n"):
        head, *frames = part.splitlines() or [""]
        ends = [number for number, line in enumerate(frames) if OURS in line]
        theirs = frames[: ends[0]] if ends else frames
        if len(theirs) > most_lines:
            theirs = [*theirs[: most_lines - 1], f"  and {len(theirs) - most_lines + 1} more"]
        theirs = [
            line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…"
            for line in theirs
        ]
        if theirs:
            found.insert(0 if head.startswith("Current") else len(found), (head, theirs))
    if not found:
        return "(it runs no code of an env's)"
    lines = found[0][1] if found[0][0].startswith("Current") else []
    for head, theirs in found[1 if lines else 0 :]:
        lines = [*lines, head, *theirs]
    return "\n".join(lines)
