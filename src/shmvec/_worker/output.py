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
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shmvec._core.output import buffer_c_lines, flush_c
from shmvec._shared.stacks import is_wanted

__all__ = ["finish_output", "take_output"]

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
