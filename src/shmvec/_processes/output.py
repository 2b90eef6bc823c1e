"""What a worker prints: line by line, whole, once; and to a stderr that the parent follows.

Processes that write to the same pipe, file or terminal at the same time do not get into each
other's lines if each writes a line at once. Python's own streams write a line at once to a terminal
only, C's as well; so this makes all of them do it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shmvec._core import Channel, Tee, buffer_c_lines, flush_c
from shmvec._processes.stacks import OURS, is_wanted

__all__ = ["LastWords", "excerpt", "finish_output", "take_output"]


_LONGEST_LINE = 1 << 20  # that is kept until it is whole


def take_output(forked: bool, descriptors: Sequence[int]) -> None:
    """Orders the output of this process.

    Args:
        forked: Whether it is a fork, in which what the parent had not yet written lies as well.
        descriptors: What takes the place of stderr.
    """
    with _discarding(1) if forked else contextlib.nullcontext():
        buffer_c_lines()
    for name, number in (("stdout", 1), ("stderr", 2)):
        ours = vars(sys)[f"__{name}__"]
        current = vars(sys)[name]
        if ours is not None and ours is not current:
            _order(ours, forked)
        setattr(sys, name, _order(current, forked) or _anew(current, number))
    for descriptor in descriptors:
        _redirect(descriptor)
    if is_wanted():
        with contextlib.suppress(OSError, ValueError):  # there is no stderr
            # A crash in C says where in Python it was; not by 2, which envs silence.
            faulthandler.enable([2, *descriptors][-1])


def finish_output() -> None:
    """Writes what is not a whole line yet."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    flush_c()


def _order(stream: Any, forked: bool) -> Any:
    """Has a stream write line by line; None: this is none that does so here."""
    if not isinstance(stream, io.TextIOWrapper):
        # A buffer in memory, or what sends the text somewhere by the parent's threads (IPython). A
        # class of the user's own does as it likes, on streams that were ordered.
        return None if stream is None or isinstance(stream, io.TextIOBase) else stream
    try:
        number = stream.fileno()
        with _discarding(number) if forked else contextlib.nullcontext():
            io.TextIOWrapper.flush(stream)  # whatever the program has put in place of flush()
            stream.reconfigure(line_buffering=True, write_through=False)
    except (OSError, ValueError):  # it is closed, or in memory (pytest)
        return None
    with contextlib.suppress(AttributeError):
        stream._CHUNK_SIZE = _LONGEST_LINE  # type: ignore[attr-defined]
    return stream


def _anew(stream: Any, number: int) -> Any:
    """A stream of a descriptor in place of one that leads nowhere; that itself if there is none."""
    try:
        os.fstat(number)
    except OSError:
        return stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    errors = getattr(stream, "errors", None) or "backslashreplace"
    made = open(number, "w", buffering=1, encoding=encoding, errors=errors, closefd=False)
    made._CHUNK_SIZE = _LONGEST_LINE  # type: ignore[attr-defined]
    return made


@contextlib.contextmanager
def _discarding(number: int) -> Iterator[None]:
    """What is written to a descriptor meanwhile goes nowhere."""
    try:
        kept = os.dup(number)
    except OSError:  # it is closed
        yield
        return
    inheritable = os.get_inheritable(number)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, number, inheritable)
        yield
    finally:
        os.dup2(kept, number, inheritable)
        os.close(nowhere)
        os.close(kept)


def _redirect(descriptor: int) -> None:
    """Puts what a descriptor leads to in the place of stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # Where pytest captures, sys.stderr has a descriptor of its own for what 2 means.
        number = sys.stderr.fileno()
        if number > 2 and os.path.sameopenfile(number, 2):
            os.dup2(descriptor, number, inheritable=False)
    os.dup2(descriptor, 2)


_PATIENCE_S = 1.0  # with a stderr that takes nothing
_MOST_LINES = 20
_MOST_BYTES = 4096
_LONGEST_SHOWN = 200
_FATAL = "Fatal Python error"
_UNENDED = re.compile(rf"(?<=[^\n]){_FATAL}: ")  # a line that it was written behind
_HEADS = ("Current thread 0x", "Stack (")  # not Python 3.14's "Current thread's C stack trace"


class LastWords:
    """Those of one worker process. Its stderr is a pipe; what comes out goes to this process's."""

    def __init__(self, channel: Channel) -> None:
        """Sends the worker its end of the pipe."""
        self._tee = Tee(2)
        try:
            channel.put(0, b"", [self._tee.end])
        finally:
            self._tee.close_end()

    _patience = _PATIENCE_S  # all write to the same stderr

    def text(self) -> str:
        """The last lines so far; empty if there are none."""
        return excerpt(self._tee.last())

    def close(self) -> None:
        """The worker has ended: what it has written is on stderr, if that takes it.

        What it has started may go on writing.
        """
        settled = self._tee.settle(LastWords._patience)
        LastWords._patience = _PATIENCE_S if settled else 0.0
        self._tee.close()

    def disown(self) -> None:
        """They are those of the parent's worker."""
        self._tee.close()


def excerpt(written: bytes) -> str:
    """What of a worker's last output says why it has ended.

    The last lines; of faulthandler's words the first, where the crash is: no other threads, and not
    how the worker has come to the env.
    """
    whole = _UNENDED.sub("\n\\g<0>", written.decode(errors="replace").replace("\r", "\n"))
    lines = [
        line if len(line) <= _LONGEST_SHOWN else line[: _LONGEST_SHOWN - 1] + "…"
        for line in whole.splitlines()
    ]
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if fatal:
        words = _crash_of(lines[fatal[-1] :])[:_MOST_LINES]
        lines = [*lines[: fatal[-1]], *words]
    text = "\n".join(lines[-_MOST_LINES:]).strip("\n").encode()
    return text[-_MOST_BYTES:].decode(errors="ignore")


def _crash_of(words: list[str]) -> list[str]:
    """What happened, and the stack of the thread in which it did, as far as it is the env's.

    Of a thread that runs no Python there is none: then that of the one that steps envs.
    """
    heads = [number for number, line in enumerate(words) if line.startswith(_HEADS)]
    ours = [number for number, line in enumerate(words) if OURS in line]
    if not heads and ours:
        heads = [number for number in range(ours[0]) if words[number].startswith("Thread ")][-1:]
    crash = [words[0]]
    for line in words[heads[0] :] if heads else words[1:]:
        if not line or OURS in line:
            break
        crash.append(line)
    return crash
