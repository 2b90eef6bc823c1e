"""What is shown of running vector envs on a terminal, drawn by rich: in colours, shares as bars."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from rich.console import Console, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from shmvec._commands.picture import Look, arranged, heading, printable
from shmvec.stats import Doing, Stats, Verdict, WorkerStats
from shmvec.stats import Table as Told

__all__ = ["coloured"]

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


def coloured(
    looks: Sequence[Look], problems: Sequence[str], encoding: str, columns: int, rows: int
) -> list[str]:
    """What a terminal has room for, with its own sequences for colours."""
    pen = _Pen(columns, encoding)
    told = [(pen.lines(*pen.head(look)), pen.lines(*pen.body(look))) for look in looks]
    said = pen.lines(*(Text(printable(problem), "yellow") for problem in problems))
    return arranged(told, said, columns, rows)


class _Pen:
    """Draws for one terminal."""

    def __init__(self, columns: int, encoding: str) -> None:
        """Of so many columns, that understands this encoding."""
        self._columns = columns
        try:
            "".join(letter for letter, _, _ in _PARTS.values()).encode(encoding)
            self._letter = 0
        except UnicodeEncodeError:
            self._letter = 1

    def lines(self, *told: RenderableType) -> list[str]:
        """As the terminal is to be sent them."""
        file = io.StringIO()
        console = Console(
            file=file,
            force_terminal=True,  # whose kind TERM, COLORTERM and NO_COLOR say
            force_jupyter=False,
            legacy_windows=False,
            width=self._columns,
            # What is shown is text of others, and no markup.
            markup=False,
            emoji=False,
            highlight=False,
        )
        for each in told:
            cut = isinstance(each, Text) and each.no_wrap  # print does not ask the text
            console.print(each, no_wrap=cut, overflow="crop" if cut else None)
        return file.getvalue().split("\n")[:-1]

    def head(self, look: Look) -> Iterator[Text]:
        """Which it is, and what limits it."""
        which, *total = heading(look)
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
    """What limits it, by how bad that is."""
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
    """Of a worker's cell."""
    stats = look.recent
    if name == "now":
        return _style_of(stats.doing[index], look.total) if stats.doing else ""
    if name == "starved":
        share = stats.workers[index].lacked_s / max(stats.elapsed_s, 1e-9)
        return "red" if share >= _STARVED[1] else "yellow" if share >= _STARVED[0] else ""
    return _OF_COLUMNS.get(name, "")


def _style_of(now: Doing | None, stats: Stats) -> str:
    """Of what a worker does: whether it takes longer than that has taken so far."""
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
    line.no_wrap = True
    return line
