"""A worker's stderr as its parent has it: passed on at once, and its last lines kept."""

from __future__ import annotations

import re

from shmvec._core.channel import Channel
from shmvec._core.output import Tee
from shmvec._shared.stacks import OURS

__all__ = ["LastWords", "excerpt"]

_PATIENCE_S = 1.0  # with a stderr that takes nothing
_MOST_LINES = 20
_MOST_BYTES = 4096
_LONGEST_LINE = 200
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
        line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"
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
