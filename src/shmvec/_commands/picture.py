"""What ``top`` shows on a terminal, drawn by rich: in colours, shares of time as bars."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import IO

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
from rich.table import Table
from rich.text import Text

from shmvec._commands.attaching import Look, printable
from shmvec.stats import Doing, Stats, Verdict, WorkerStats
from shmvec.stats import Table as Told

__all__ = ["Picture", "full_screen"]

_TICK_S = 0.25  # so soon a change of the terminal's size, or a signal, is noticed
_BAR = "time"
_BAR_COLUMNS = 10, 40  # at least and at most
# What a worker's time goes into: its letter, that where there are few, and colour.
_PARTS = {
    "in step": ("█", "#", "green"),
    "in reset": ("▓", "+", "cyan"),
    "no core": ("×", "x", "red"),
    "waiting": ("░", ".", "dim"),
}
_OF_COLUMNS = {"in step": "green", "in reset": "cyan", "pid": "dim", "envs": "bold"}
_PROBLEMS = ("straggler", "oversubscribed", "messages through pipes")
_STARVED = 0.1, 0.25  # shares of time that are worth a colour
_LONG = 8  # times as long as nearly all others
_LONG_S = 0.1  # what is shorter is no news
_HANGS_S = 10.0


@dataclass
class Picture:
    """What there is room for: what limits each vector env comes first."""

    looks: Sequence[Look]
    problems: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it for one terminal."""
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
        if len(lines) > options.max_height and len(heads) > 1:  # the other vector envs matter more
            lines = drawn(*(part for head in heads for part in (head, gap)), *problems)
        if (more := len(lines) - options.max_height) > 0:
            rest = _single(Text(f"... and {more + 1} more"))
            lines = [*lines[: options.max_height - 1], *drawn(rest)]
        for line in lines:
            yield from line
            yield Segment.line()


class _Pen:
    """Draws the parts for a terminal of this size and encoding."""

    def __init__(self, options: ConsoleOptions) -> None:
        self._columns = options.max_width
        try:
            "".join(letter for letter, _, _ in _PARTS.values()).encode(options.encoding)
            self._letter = 0
        except UnicodeEncodeError:
            self._letter = 1

    def head(self, look: Look) -> Iterator[Text]:
        """Which it is, and what limits it."""
        which, *total = look.heading()
        name, _, command = which.partition(": ")
        yield _single(Text.assemble((name, "bold"), ": ", command))
        yield from (_single(Text(line, "dim")) for line in total)
        speed = Text(Told.of(look.recent).sentences[0])
        speed.highlight_regex(r"[\d,]+ a second|\d+% of the limit", "bold")
        yield _single(speed)
        yield _verdict(look.recent.verdict)

    def body(self, look: Look) -> Iterator[RenderableType]:
        """Who did what."""
        told = Told.of(look.recent)
        yield from (_single(Text(line, "dim")) for line in told.sentences[1:])
        yield from self._workers(look, told)
        if told.hidden:
            yield Text(told.hidden)
        if told.timings:
            yield _timings(told.timings)
        if told.faults:
            yield _single(Text(told.faults, "red"))

    def _workers(self, look: Look, told: Told) -> Iterator[RenderableType]:
        """A row for each worker: what fits beside each other."""
        stats = look.recent
        columns = dict(told.columns)
        now = columns.pop("now")
        columns |= {_BAR: ["-" * _BAR_COLUMNS[0]] * len(now), "now": now}
        fitted = replace(told, columns=columns).fitted(self._columns)
        left = self._columns - fitted.width
        bar = min(_BAR_COLUMNS[0] + left, _BAR_COLUMNS[1])
        table = _empty(list(fitted.columns))
        for index in range(len(now)):
            worker = stats.workers[index]
            table.add_row(
                *(
                    self._bar(worker, stats.elapsed_s, bar)
                    if name == _BAR
                    else Text(cells[index], _style(name, index, look))
                    for name, cells in fitted.columns.items()
                )
            )
        yield table
        if _BAR in fitted.columns:
            letters = ((part[self._letter], part[2]) for part in _PARTS.values())
            keys = (
                Text.assemble(letter, f" {name}")
                for letter, name in zip(letters, _PARTS, strict=True)
            )
            yield _single(Text("  ").join(keys))

    def _bar(self, worker: WorkerStats, seconds: float, columns: int) -> Text:
        """What a worker's time went into; what is empty, into neither."""
        lacked = min(worker.lacked_s, worker.busy_s)
        with_core = 1 - lacked / worker.busy_s if worker.busy_s else 0.0
        parts = (worker.step_s * with_core, worker.reset_s * with_core, lacked, worker.waited_s)
        ends = [round(columns * min(1.0, end / max(seconds, 1e-9))) for end in accumulate(parts)]
        return Text.assemble(
            *(
                (part[self._letter] * (end - begin), part[2])
                for part, begin, end in zip(_PARTS.values(), [0, *ends], ends, strict=False)
            )
        )


def _verdict(verdict: Verdict) -> Text:
    """What limits a vector env, in a colour for how bad that is."""
    kind, told = verdict.kind, str(verdict)
    if kind == "idle":
        style = "bold"
    elif kind in _PROBLEMS or verdict.option == "step_timeout=":
        style = "bold red"
    else:
        style = "bold green" if kind == "env-bound" else "bold yellow"
    shown = Text(told)
    shown.stylize(style, 0, len(kind))
    if verdict.advice:
        begin = told.rindex(verdict.advice)
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
    """The style of what a worker does: bold where it takes longer than it used to."""
    if now is None:
        return "dim"
    timing = stats.step if now.operation == "step" else stats.reset
    if now.for_s < max(_LONG_S, _LONG * timing.quantile(0.99)):
        return ""
    return "bold red" if now.for_s > _HANGS_S else "bold yellow"


def _timings(rows: Sequence[Sequence[str]]) -> Table:
    """How long steps and resets take."""
    names, *told = rows
    table = _empty(names)
    for who, *times in told:
        of_all = who.startswith("any")
        table.add_row(*(Text(word, "bold" if of_all else "") for word in (who, *times)))
    return table


def _empty(names: Sequence[str]) -> Table:
    """A table of columns with these names, without rows: numbers end beneath each other."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in names:
        justify: JustifyMethod = "left" if name in (_BAR, "now") else "right"
        table.add_column(Text(name), justify=justify, no_wrap=True, overflow="crop")
    return table


def _single(line: Text) -> Text:
    """Cut where the terminal ends."""
    line.no_wrap, line.overflow = True, "crop"
    return line


@contextlib.contextmanager
def full_screen(out: IO[str]) -> Iterator[Callable[[Picture, float], None]]:
    """Takes a terminal's screen, and gives it back whatever ends or stops this process.

    Returns:
        Shows a picture for so many seconds.
    """
    console = Console(
        file=out,
        force_terminal=True,  # whose kind TERM, COLORTERM and NO_COLOR say
        force_jupyter=False,
        legacy_windows=False,
        # What is shown is text of others, and no markup.
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
    # An exception in the middle of rich's calls would leave the screen taken.
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
            signal.raise_signal(signal.SIGTSTP)  # here it stands until it is to go on
            signal.signal(signal.SIGTSTP, note)
            live.start()

    def show(picture: Picture, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            # The terminal's own, whatever LINES and COLUMNS were when it began.
            with contextlib.suppress(OSError, ValueError):
                columns, rows = os.get_terminal_size(out.fileno())
                console.size = columns or 80, rows or 24
            live.update(picture, refresh=True)
            time.sleep(min(left, _TICK_S))
            obey()

    ending = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP
    before = {number: signal.getsignal(number) for number in ending}
    # Not where nohup says otherwise.
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
