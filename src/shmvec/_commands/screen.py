"""A terminal's screen, taken to draw on: it comes back, whatever ends or stops this process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

__all__ = ["Screen", "encoding_of", "full_screen"]

# Lines that are too long, while its size changes, are cut there and not continued on the next one.
_FULL = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_NORMAL = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _EMPTY_LINE = "\x1b[H", "\x1b[2K"


class Screen:
    """One that is taken."""

    def __init__(self, out: IO[str], changes: int) -> None:
        """Draws to `out`; from `changes` it can be read that a signal came."""
        self._out = out
        self._changes = changes

    def show(self, lines: Callable[[int, int], Sequence[str]], seconds: float) -> None:
        """Shows lines for so long, and nothing else; anew whenever its size changes.

        Args:
            lines: Makes them for so many columns and rows.
            seconds: How long.
        """
        until = time.monotonic() + seconds
        while True:
            columns, rows = self._size()
            self._draw(lines(columns, rows), rows)
            left = max(0.0, until - time.monotonic())
            if not select.select([self._changes], [], [], left)[0]:
                return
            os.read(self._changes, 1 << 16)

    def _size(self) -> tuple[int, int]:
        """Columns and rows: the terminal's own, whatever LINES and COLUMNS were when it began."""
        try:
            columns, rows = os.get_terminal_size(self._out.fileno())
        except (OSError, ValueError):  # it is none, or has no descriptor
            columns = rows = 0
        return columns or 80, rows or 24

    def _draw(self, lines: Sequence[str], rows: int) -> None:
        lines = [*lines, *[""] * (rows - len(lines))]
        drawn = "\n".join(_EMPTY_LINE + line for line in lines)  # after the last it would scroll
        self._out.write(_HOME + drawn)
        self._out.flush()


@contextlib.contextmanager
def full_screen(out: IO[str]) -> Iterator[Screen]:
    """Takes a terminal's screen; the one before comes back, whatever ends or stops this process."""
    # Of any signal, at once: its handler may come too late for a wait that is just about to begin.
    changes, changed = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    woken = signal.set_wakeup_fd(changed, warn_on_full_buffer=False)

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    def stop(number: int, frame: object) -> None:
        os.write(out.fileno(), _NORMAL.encode())  # `out` itself may be in a write
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)  # here it stands until it is to go on
        signal.signal(number, stop)
        os.write(out.fileno(), _FULL.encode())

    def change(number: int, frame: object) -> None:
        """Nothing is left to do."""

    handlers = {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGQUIT: end,
        signal.SIGTSTP: stop,
        signal.SIGWINCH: change,
    }
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        for number, handler in handlers.items():
            if before[number] == signal.SIG_DFL:  # not where nohup says otherwise
                signal.signal(number, handler)
        out.write(_FULL)
        out.flush()
        yield Screen(out, changes)
    finally:
        with contextlib.suppress(OSError):  # the terminal is gone
            out.write(_NORMAL)
            out.flush()
        for number, was in before.items():
            signal.signal(number, was)
        signal.set_wakeup_fd(woken)
        os.close(changes)
        os.close(changed)


def encoding_of(out: IO[str]) -> str:
    """What is written there in."""
    return getattr(out, "encoding", None) or "utf-8"
