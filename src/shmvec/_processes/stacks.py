"""Reads the Python stack of a worker from outside, whatever the worker is doing.

On a signal, faulthandler adds the worker's stack to a memfd that only the worker has open. That
needs neither the GIL nor the env, only a running process. The memfd's name identifies the worker. A
reader finds it in /proc, where the kernel admits processes that may trace the worker: those of the
same user. The parent reads it there, too, as ``python -m shmvec stacks`` does, so it needs no
descriptor. No memory is used before the first stack. A reader writes nothing, because a process of
another user may give that name to anything.

The pipe for stderr would not do: the parent reads it, which may be stopped, and a worker would have
to wait while it is full.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from time import monotonic, sleep

from shmvec._core import guard_handler, is_unhandled
from shmvec._cores import descendant_ids, process_identity, process_ids, process_status
from shmvec._memory.segment import memory_file, open_shared_memory

__all__ = [
    "CRASHING_VERSION",
    "MAX_LINES",
    "OWN_PATH",
    "Offer",
    "find_offer",
    "find_offers",
    "may_use_faulthandler",
    "offer_stacks",
    "read_stack",
    "shorten_lines",
    "waits_for_lock",
]


OWN_PATH = f"{os.sep}shmvec{os.sep}_processes{os.sep}"  # in the paths of the frames below an env's
MAX_LINES = 20  # of a stack, or of a worker's last lines, in a message
# SIGRTMAX - 2 is Java's; other programs count up from SIGRTMIN.
_SIGNALS = range(signal.SIGRTMAX - 7, signal.SIGRTMIN, -1)
_MEMORY_NAME = "shmvec-stacks:{}:{}:{}:{}:{}:{}"
_MEMORY_LINK = re.compile("/memfd:" + _MEMORY_NAME.format(*["([0-9]{1,10})"] * 6) + r" \(deleted\)")
STACK_TIMEOUT_S = 2.0
_POLL_INTERVAL_S = 0.0005
_MAX_STACK_BYTES = 1 << 20
# The version in which faulthandler may crash as a function returns: CPython issue 123967.
CRASHING_VERSION = (3, 13, 0)
_UNREADY_FRAME = b"\1"  # csrc/handler.h
_INVALID_FRAME = b"<invalid frame>\n"  # Python 3.14 writes it for a frame in no line of code
_INVALID_FRAME_TEXT = b"(Python does not show what called this)\n"
_MAX_ATTEMPTS = 20
_MAX_LINE_CHARS = 200
_SIGNAL_BLOCKED = "its main thread blocks the signal"
_STOPPED_STATES = {
    "T": "it is stopped, by a signal such as SIGSTOP",
    "t": "it is stopped, by a debugger",
}


# ---- in a worker -------------------------------------------------------------------------------


def may_use_faulthandler() -> bool:
    """Whether the user lets this package use faulthandler."""
    return os.environ.get("PYTHONFAULTHANDLER", "1") not in ("", "0")


def offer_stacks(parent: int, worker: int, envs: range) -> None:
    """Lets other processes read the stacks of this one, where that is possible.

    Args:
        parent: Process id of the parent.
        worker: The worker's index.
        envs: Its envs.
    """
    if not may_use_faulthandler() or sys.version_info[:3] == CRASHING_VERSION:
        return
    with contextlib.suppress(OSError, ValueError, RuntimeError, StopIteration):
        number = next(filter(is_unhandled, _SIGNALS))
        name = _MEMORY_NAME.format(os.getpid(), parent, worker, envs.start, envs.stop, number)
        memory = memory_file(name)
        fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)  # its handler may empty it
        # With all_threads, a thread that begins or ends meanwhile would crash it. With chain, the
        # handler would lack SA_RESTART, by which most system calls go on.
        faulthandler.register(number, file=memory, all_threads=False, chain=False)
        guard_handler(number, memory)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])


# ---- outside -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """A worker whose stacks can be read.

    Attributes:
        pid: Its process.
        parent: The id, in its container, of the process that has started it.
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


def find_offer(pid: int) -> Offer | None:
    """What a process offers; None: it is no worker.

    Raises:
        OSError: There is no such process, or this one may not look at it.
    """
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            match = _MEMORY_LINK.fullmatch(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
            if match is None:
                continue
            owner, parent, worker, first, stop, number = map(int, match.groups())
            # Otherwise a fork of the worker has inherited the descriptor.
            if owner == _id_in_namespace(pid)[1] and number in _SIGNALS:
                return Offer(pid, parent, worker, range(first, stop), number, int(descriptor))
    return None


def find_offers(pid: int) -> list[Offer]:
    """The offer of a worker, or those of all workers of a process and its descendants.

    Workers that this process may not look at are left out, and those of another user, whose offers
    need not be true.

    Raises:
        OSError: There is no such process, or this one may not look at it.
    """
    own_offer = find_offer(pid)
    if own_offer is not None:
        return [own_offer]
    parents, user = {_id_in_namespace(each) for each in (pid, *descendant_ids(pid))}, _user(pid)
    offers = []
    for each in process_ids():
        with contextlib.suppress(OSError):
            offer = find_offer(each)
            if (
                offer
                and (_id_in_namespace(each)[0], offer.parent) in parents
                and _user(each) == user
            ):
                offers.append(offer)
    return sorted(offers, key=lambda offer: offer.pid)


def _user(pid: int) -> list[str]:
    """The real user id of a process."""
    return process_status(pid).get("Uid", "").split()[:1]


def _id_in_namespace(pid: int) -> tuple[str, int]:
    """A process's pid namespace, and its id there, which differs in a container."""
    return process_identity(pid) or ("", pid)


def read_stack(pid: int, whole: bool = False) -> str:
    """The Python stack of a worker, most recent call first, as far as it is the env's.

    Args:
        pid: The worker's process.
        whole: Whether all frames are returned, or only as many as fit a message.

    Returns:
        Lines as faulthandler writes them; or, in parentheses, why there are none.
    """
    try:
        return _env_frames(_request_stack(pid, monotonic() + STACK_TIMEOUT_S), whole)
    except ProcessLookupError:
        return "(the process has ended)"
    except (OSError, LookupError, ValueError, _NoStackError) as error:
        return f"(its stack cannot be read: {error})"


def waits_for_lock(pid: int) -> bool:
    """Whether the main thread of a process waits for a lock, or another futex."""
    with contextlib.suppress(OSError):
        return "futex" in Path(f"/proc/{pid}/wchan").read_text("ascii")
    return False


def _request_stack(pid: int, deadline: float) -> str:
    """Asks a worker for its stack, and returns what it writes."""
    process = os.pidfd_open(pid)  # first, so that a reuse of the id is noticed
    try:
        offer = find_offer(pid)
        if offer is None:
            raise _NoStackError("the process does not offer it (any more)")
        memory = open_shared_memory(pid, offer.descriptor, _MEMORY_LINK)
        try:
            for _ in range(_MAX_ATTEMPTS):
                answer = _wait_for_stack(process, offer, memory, deadline)
                if not answer.endswith((_UNREADY_FRAME, _INVALID_FRAME)):
                    break
                sleep(_POLL_INTERVAL_S)
        finally:
            os.close(memory)
        if not answer:
            raise _NoStackError("something in the process has it written elsewhere")
        if answer == _UNREADY_FRAME:
            raise _NoStackError("Python is about to change it, whenever it is read")
        text = answer.replace(_INVALID_FRAME, _INVALID_FRAME_TEXT).decode(errors="replace")
        return "".join(each for each in text if each.isprintable() or each == "\n")
    except Exception as error:
        if _has_ended(process, pid):
            raise ProcessLookupError from error
        raise
    finally:
        os.close(process)


def _has_ended(process: int, pid: int) -> bool:
    """Whether a process has ended, or its main thread has."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    try:
        return bool(poll.poll(0)) or process_status(pid).get("State", "?")[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _wait_for_stack(process: int, offer: Offer, memory: int, deadline: float) -> bytes:
    """Has a worker add its stack to the memory, and waits for the zero byte at the end."""
    obstacle = _obstacle(offer)
    if obstacle and obstacle != _SIGNAL_BLOCKED:  # the block may end
        raise _NoStackError(obstacle)
    # The stack begins after the last zero byte. If one for another reader is being written there,
    # that will do.
    begin = os.pread(memory, _MAX_STACK_BYTES, 0).rfind(b"\0") + 1
    signal.pidfd_send_signal(process, offer.number)
    while True:
        if os.fstat(memory).st_size < begin:  # the worker has emptied it
            begin = 0
        written = os.pread(memory, _MAX_STACK_BYTES, begin)
        if b"\0" in written or len(written) == _MAX_STACK_BYTES:
            return written.partition(b"\0")[0]
        if monotonic() > deadline:
            state = process_status(offer.pid)["State"]
            raise _NoStackError(_obstacle(offer) or f"it does not answer; its state is {state}")
        sleep(_POLL_INTERVAL_S)


def _obstacle(offer: Offer) -> str:
    """Why a worker would not handle the signal now; empty if it would."""
    fields = process_status(offer.pid)
    bit = 1 << (offer.number - 1)
    if not int(fields["SigCgt"], 16) & bit:  # the signal would end the process
        return "something in the process has taken its signal's handler away"
    if int(fields["SigBlk"], 16) & bit:
        return _SIGNAL_BLOCKED
    return _STOPPED_STATES.get(fields["State"][0], "")


def shorten_lines(lines: Sequence[str]) -> list[str]:
    """The lines, with the ends of long ones cut off."""
    return [
        line if len(line) <= _MAX_LINE_CHARS else f"{line[: _MAX_LINE_CHARS - 1]}…"
        for line in lines
    ]


def _env_frames(written: str, whole: bool) -> str:
    """The frames of an env and of the functions that it calls."""
    frames = written.strip("\n").splitlines()[1:]
    lines = list(takewhile(lambda line: OWN_PATH not in line, frames))
    if len(lines) > MAX_LINES and not whole:
        lines = [*lines[: MAX_LINES - 1], f"  and {len(lines) - MAX_LINES + 1} more"]
    return "\n".join(shorten_lines(lines)) or "(the main thread runs no Python code of an env's)"
