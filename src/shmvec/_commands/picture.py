"""Draws the screen of ``top`` on a terminal, by rich, with colours and bars."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from shmvec._commands.attaching import Snapshot, printable
from shmvec.stats import Doing, Stats, Table, Verdict

__all__ = ["Picture", "full_screen"]

_SIGNAL_CHECK_S = 0.25  # delay until a signal or a change of the terminal's size is noticed
_BAR_COLOURS = {"█": "green", "▓": "cyan", "×": "red", "░": "dim"}  # of letters of bars
_VERDICT_STYLES = {
    "none": "bold",
    "good": "bold green",
    "change": "bold yellow",
    "problem": "bold red",
}
_SLOW_FACTOR = 8  # an operation longer than so many times the 99 % quantile is bold
_MIN_SLOW_S = 0.1  # a shorter one never is
_HANG_S = 10.0  # a longer one is red


@dataclass
class Picture:
    """The screen: all vector envs; where there is little room, the verdicts come first.

    Attributes:
        snapshots: One for each vector env.
        problems: Messages on segments that could not be read.
    """

    snapshots: Sequence[Snapshot]
    problems: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the picture for one terminal."""
        width, gap = options.max_width, Text("")
        tables = [Table.of(each.recent, bars=True).fitted(width) for each in self.snapshots]
        heads = [list(_head(*pair)) for pair in zip(self.snapshots, tables, strict=True)]
        bodies = [list(_body(*pair)) for pair in zip(self.snapshots, tables, strict=True)]
        problems = [Text(printable(problem), "yellow") for problem in self.problems]

        def rendered_lines(*texts: Text) -> list[list[Segment]]:
            room = options.update(height=None)
            return [line for text in texts for line in console.render_lines(text, room, pad=False)]

        parts = zip(heads, bodies, strict=True)
        lines = rendered_lines(*(t for head, body in parts for t in (*head, *body, gap)), *problems)
        if len(lines) > options.max_height and len(heads) > 1:  # heads of all before any body
            lines = rendered_lines(*(text for head in heads for text in (*head, gap)), *problems)
        if (more := len(lines) - options.max_height) > 0:
            rest = _one_line(Text(f"... and {more + 1} more"))
            lines = [*lines[: options.max_height - 1], *rendered_lines(rest)]
        for line in lines:
            yield from line
            yield Segment.line()


def _head(snapshot: Snapshot, table: Table) -> Iterator[Text]:
    """The vector env's name, its speed, and the verdict."""
    which, *total = snapshot.heading()
    name, _, command = which.partition(": ")
    yield _one_line(Text.assemble((name, "bold"), ": ", command))
    yield from (_one_line(Text(line, "dim")) for line in total)
    speed = Text(table.sentences[0])
    speed.highlight_regex(r"[\d,]+ a second|\d+% of the limit", "bold")
    yield _one_line(speed)
    yield _verdict_text(snapshot.recent.verdict)


def _body(snapshot: Snapshot, table: Table) -> Iterator[Text]:
    """The workers, the times of steps and resets, and the faults."""
    yield from (Text(line, "dim") for line in table.sentences[1:])
    yield from map(_one_line, _worker_lines(snapshot, table))
    if table.hidden:
        yield Text(table.hidden)
    for number, line in enumerate(table.timing_lines):
        is_of_all = number == 0 or line.lstrip().startswith("any")
        yield _one_line(Text(line, "bold" if is_of_all else ""))
    if table.faults:
        yield _one_line(Text(table.faults, "red"))


def _worker_lines(snapshot: Snapshot, table: Table) -> Iterator[Text]:
    """A line for each worker, and the keys of the bars."""
    doing, now = snapshot.recent.doing, table.columns.get("now")
    names, *rows = table.worker_lines
    yield Text(names, "bold")
    for index, row in enumerate(rows):
        line = _colour_bars(row)
        if doing and now is not None:
            line.stylize(_style_of(doing[index], snapshot.total), len(row) - len(now[index]))
        yield line
    if table.keys:
        yield _colour_bars(table.keys)


def _colour_bars(line: str) -> Text:
    text = Text(line)
    for letter, colour in _BAR_COLOURS.items():
        text.highlight_regex(f"{letter}+", colour)
    return text


def _verdict_text(verdict: Verdict) -> Text:
    """A verdict; the colour of its kind shows how bad it is."""
    style = _VERDICT_STYLES[verdict.severity]
    text = Text.assemble((verdict.kind, style), f": {verdict.reason}.")
    return text.append(f" {verdict.advice}.", "bold") if verdict.advice else text


def _style_of(now: Doing | None, stats: Stats) -> str:
    """The style of a worker's operation: bold if it takes longer than usual."""
    if now is None:
        return "dim"
    timing = stats.step if now.operation == "step" else stats.reset
    if now.for_s < max(_MIN_SLOW_S, _SLOW_FACTOR * timing.quantile(0.99)):
        return ""
    return "bold red" if now.for_s > _HANG_S else "bold yellow"


def _one_line(line: Text) -> Text:
    """A line that is cut at the terminal's edge."""
    line.no_wrap, line.overflow = True, "crop"
    return line


@contextlib.contextmanager
def full_screen(out: IO[str]) -> Iterator[Callable[[Picture, float], None]]:
    """Takes a terminal's screen, and restores it when the block, or a signal, ends or stops this.

    Returns:
        A function that shows a picture for a number of seconds.
    """
    console = Console(
        file=out,
        force_terminal=True,  # its kind follows from TERM, COLORTERM and NO_COLOR
        force_jupyter=False,
        legacy_windows=False,
        # Text of other processes must not be read as markup.
        markup=False,
        emoji=False,
        highlight=False,
    )
    live = Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    # Handlers only note signals, since an exception within rich would leave the screen taken.
    pending: list[int] = []

    def note_signal(number: int, frame: object) -> None:
        pending.append(number)

    def obey_signals() -> None:
        for number in pending:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            if number != signal.SIGTSTP:
                raise SystemExit(128 + number)
        if pending:
            pending.clear()
            live.stop()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)  # the process stops here until SIGCONT
            signal.signal(signal.SIGTSTP, note_signal)
            live.start()

    def show(picture: Picture, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            # rich would use LINES and COLUMNS, which have the size at the start.
            with contextlib.suppress(OSError, ValueError):
                columns, rows = os.get_terminal_size(out.fileno())
                console.size = columns or 80, rows or 24
            live.update(picture, refresh=True)
            time.sleep(min(left, _SIGNAL_CHECK_S))
            obey_signals()

    ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP
    old_handlers = {number: signal.getsignal(number) for number in ending}
    # Signals that are ignored, as by nohup, stay ignored.
    handled = [number for number in ending if old_handlers[number] != signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, note_signal)
        live.start()
        yield show
    except OSError:  # the terminal is gone
        obey_signals()
        raise
    finally:
        with contextlib.suppress(OSError):
            live.stop()
        for number in handled:
            signal.signal(number, old_handlers[number])
