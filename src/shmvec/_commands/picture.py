"""Draws what ``top`` shows on a terminal, by rich: in colours, shares of time as bars."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import IO

from rich import table as rich_table
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    JustifyMethod,
    RenderableType,
    RenderResult,
)
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from shmvec._commands.attaching import Look, printable
from shmvec.stats import Doing, Stats, Table, Verdict, WorkerStats

__all__ = ["Picture", "full_screen"]

_TICK_S = 0.25  # the delay with which a signal or a change of the terminal's size is noticed
_BAR = "time"
_BAR_COLUMNS = 10, 40  # at least and at most
# The parts of a worker's time: letter, letter of poorer encodings, and colour.
_PARTS = {
    "in step": ("█", "#", "green"),
    "in reset": ("▓", "+", "cyan"),
    "no core": ("×", "x", "red"),
    "waiting": ("░", ".", "dim"),
}
_OF_COLUMNS = {"in step": "green", "in reset": "cyan", "pid": "dim", "envs": "bold"}
_OF_VERDICTS = {
    "none": "bold",
    "good": "bold green",
    "change": "bold yellow",
    "problem": "bold red",
}
_STARVED = 0.1, 0.25  # shares of time from which it is yellow, and red
_LONG = 8  # times the 99 % quantile: from there an operation is bold
_LONG_S = 0.1  # a shorter operation never is
_HANGS_S = 10.0  # from there it is red


@dataclass
class Picture:
    """One screen on all vector envs; what limits each comes first where room is scarce.

    Attributes:
        looks: One for each vector env.
        problems: Messages on those that could not be read.
    """

    looks: Sequence[Look]
    problems: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the picture for one terminal."""
        pen = _Pen(options)
        heads = [Group(*pen.head(look)) for look in self.looks]
        bodies = [Group(*pen.body(look)) for look in self.looks]
        problems = [Text(printable(problem), "yellow") for problem in self.problems]

        def drawn(*parts: RenderableType) -> list[list[Segment]]:
            room = options.update(height=None)
            return [line for part in parts for line in console.render_lines(part, room, pad=False)]

        gap = Text("")
        whole = [part for pair in zip(heads, bodies, strict=True) for part in (*pair, gap)]
        lines = drawn(*whole, *problems)
        if len(lines) > options.max_height and len(heads) > 1:  # heads of all before any body
            lines = drawn(*(part for head in heads for part in (head, gap)), *problems)
        if (more := len(lines) - options.max_height) > 0:
            rest = _single(Text(f"... and {more + 1} more"))
            lines = [*lines[: options.max_height - 1], *drawn(rest)]
        for line in lines:
            yield from line
            yield Segment.line()


class _Pen:
    """Draws parts of a picture for a terminal of this size and encoding."""

    def __init__(self, options: ConsoleOptions) -> None:
        self._columns = options.max_width
        try:
            "".join(letter for letter, _, _ in _PARTS.values()).encode(options.encoding)
            self._letter = 0
        except UnicodeEncodeError:
            self._letter = 1

    def head(self, look: Look) -> Iterator[Text]:
        """The vector env's name, its speed, and what limits it."""
        which, *total = look.heading()
        name, _, command = which.partition(": ")
        yield _single(Text.assemble((name, "bold"), ": ", command))
        yield from (_single(Text(line, "dim")) for line in total)
        speed = Text(Table.of(look.recent).sentences[0])
        speed.highlight_regex(r"[\d,]+ a second|\d+% of the limit", "bold")
        yield _single(speed)
        yield _verdict(look.recent.verdict)

    def body(self, look: Look) -> Iterator[RenderableType]:
        """The workers, the times of steps and resets, and the faults."""
        table = Table.of(look.recent)
        yield from (Text(line, "dim") for line in table.sentences[1:])
        yield from self._workers(look, table)
        if table.hidden:
            yield Text(table.hidden)
        if table.timings:
            yield _timings(table.timings)
        if table.faults:
            yield _single(Text(table.faults, "red"))

    def _workers(self, look: Look, table: Table) -> Iterator[RenderableType]:
        """A row for each worker, of the columns that fit, and the keys of the bars."""
        stats = look.recent
        columns = dict(table.columns)
        now = columns.pop("now")
        columns |= {_BAR: ["-" * _BAR_COLUMNS[0]] * len(now), "now": now}
        fitted = replace(table, columns=columns).fitted(self._columns)
        bar = min(_BAR_COLUMNS[0] + self._columns - fitted.width, _BAR_COLUMNS[1])
        drawn = _empty(list(fitted.columns))
        for index in range(len(now)):
            drawn.add_row(
                *(
                    self._bar(stats.workers[index], stats.elapsed_s, bar)
                    if name == _BAR
                    else Text(cells[index], _style(name, index, look))
                    for name, cells in fitted.columns.items()
                )
            )
        yield drawn
        if _BAR in fitted.columns:
            keys = (
                Text.assemble((part[self._letter], part[2]), f" {name}")
                for name, part in _PARTS.items()
            )
            yield _single(Text("  ").join(keys))

    def _bar(self, worker: WorkerStats, seconds: float, columns: int) -> Text:
        """A worker's time as a bar; what it spent on none of the parts stays empty."""
        ends = [round(columns * end) for end in accumulate(worker.shares(seconds).values())]
        return Text.assemble(
            *(
                (part[self._letter] * (end - begin), part[2])
                for part, begin, end in zip(_PARTS.values(), [0, *ends], ends, strict=False)
            )
        )


def _verdict(verdict: Verdict) -> Text:
    """A verdict as text, its kind in a colour for how bad it is."""
    text = str(verdict)
    shown = Text(text)
    shown.stylize(_OF_VERDICTS[verdict.severity], 0, len(verdict.kind))
    if verdict.advice:
        begin = text.rindex(verdict.advice)
        shown.stylize("bold", begin, begin + len(verdict.advice))
    return shown


def _style(name: str, index: int, look: Look) -> str:
    """The style of a worker's cell."""
    stats = look.recent
    if name == "now":
        return _style_of(stats.doing[index], look.total) if stats.doing else ""
    if name == "starved":
        share = stats.workers[index].lacked_s / max(stats.elapsed_s, 1e-9)
        return "red" if share >= _STARVED[1] else "yellow" if share >= _STARVED[0] else ""
    return _OF_COLUMNS.get(name, "")


def _style_of(now: Doing | None, stats: Stats) -> str:
    """The style of what a worker does: bold where it takes longer than usual."""
    if now is None:
        return "dim"
    timing = stats.step if now.operation == "step" else stats.reset
    if now.for_s < max(_LONG_S, _LONG * timing.quantile(0.99)):
        return ""
    return "bold red" if now.for_s > _HANGS_S else "bold yellow"


def _timings(rows: Sequence[Sequence[str]]) -> rich_table.Table:
    """The times of steps and resets as a table; those of all envs in bold."""
    names, *timings = rows
    table = _empty(names)
    for row in timings:
        style = "bold" if row[0].startswith("any") else ""
        table.add_row(*(Text(word, style) for word in row))
    return table


def _empty(names: Sequence[str]) -> rich_table.Table:
    """A table with columns of these names and no rows; numbers are flush right."""
    table = rich_table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in names:
        justify: JustifyMethod = "left" if name in (_BAR, "now") else "right"
        table.add_column(Text(name), justify=justify, no_wrap=True, overflow="crop")
    return table


def _single(line: Text) -> Text:
    """Cuts a line where the terminal ends."""
    line.no_wrap, line.overflow = True, "crop"
    return line


@contextlib.contextmanager
def full_screen(out: IO[str]) -> Iterator[Callable[[Picture, float], None]]:
    """Takes a terminal's screen, and restores it whatever ends or stops this process.

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
    # Handlers only note a signal: an exception amid rich's calls would leave the screen taken.
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)

    def obey() -> None:
        for number in came:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            if number != signal.SIGTSTP:
                raise SystemExit(128 + number)
        if came:
            came.clear()
            live.stop()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)  # the process stops here until SIGCONT
            signal.signal(signal.SIGTSTP, note)
            live.start()

    def show(picture: Picture, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            # The terminal's own size: LINES and COLUMNS are those at the start.
            with contextlib.suppress(OSError, ValueError):
                columns, rows = os.get_terminal_size(out.fileno())
                console.size = columns or 80, rows or 24
            live.update(picture, refresh=True)
            time.sleep(min(left, _TICK_S))
            obey()

    ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP
    before = {number: signal.getsignal(number) for number in ending}
    # Signals that are ignored stay so: nohup does that.
    taken = [number for number in ending if before[number] != signal.SIG_IGN]
    try:
        for number in taken:
            signal.signal(number, note)
        live.start()
        yield show
    except OSError:  # the terminal is gone
        obey()
        raise
    finally:
        with contextlib.suppress(OSError):
            live.stop()
        for number in taken:
            signal.signal(number, before[number])
