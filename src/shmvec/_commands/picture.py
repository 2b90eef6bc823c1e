"""What is shown of running vector envs: as text, and as lines that a terminal has room for.

It is drawn by rich, if that is installed (the extra `top`), otherwise as plain text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shmvec._commands.attaching import Seen
from shmvec.stats import Stats

__all__ = ["Look", "Picture", "arranged", "as_text", "heading", "picture", "plain", "printable"]


@dataclass
class Look:
    """At one vector env.

    Attributes:
        seen: Which.
        name: What it is called here: its process, and which of that one's it is.
        total: Since it was made.
        recent: Since the last look; the same, if there was none.
        seconds: How long ago that was.
    """

    seen: Seen
    name: tuple[int, int]
    total: Stats
    recent: Stats
    seconds: float | None


class Picture(Protocol):
    """Draws looks, and what is to be said of those that cannot be looked at."""

    def __call__(
        self, looks: Sequence[Look], problems: Sequence[str], encoding: str, columns: int, rows: int
    ) -> list[str]:
        """Lines: at most so many rows, none wider than so many columns."""


def picture() -> Picture:
    """The one to be drawn here."""
    try:
        from shmvec._commands.coloured import coloured
    except ImportError:
        return plain
    return coloured


def as_text(looks: Sequence[Look], problems: Sequence[str]) -> str:
    """All of them, one below the other."""
    parts = ["\n".join([*heading(look), str(look.recent)]) for look in looks]
    return "\n\n".join([*parts, *map(printable, problems)])


def plain(
    looks: Sequence[Look], problems: Sequence[str], encoding: str, columns: int, rows: int
) -> list[str]:
    """What a terminal has room for, as plain text."""
    told = []
    for look in looks:
        first, *table = look.recent.table(columns).splitlines()
        verdict = textwrap.wrap(str(look.recent.verdict), columns)
        told.append(([*heading(look), first, *verdict], table))
    said = [line for problem in problems for line in textwrap.wrap(printable(problem), columns)]
    return [line[:columns] for line in arranged(told, said, columns, rows)]


def arranged(
    told: Sequence[tuple[list[str], list[str]]], problems: Sequence[str], columns: int, rows: int
) -> list[str]:
    """What there is room for: what limits them comes first.

    Args:
        told: Of each vector env, lines on what limits it, and the others.
        problems: Lines on those that cannot be looked at.
        columns: How wide the terminal is,
        rows: and how high.
    """
    lines = [line for head, table in told for line in (*head, *table, "")]
    if len(lines) + len(problems) > rows and len(told) > 1:  # who else is there matters more
        lines = [line for head, _ in told for line in (*head, "")]
    lines = [*lines, *problems] if problems else lines[:-1]
    if len(lines) <= rows:
        return lines
    room = max(0, rows - 1)
    return [*lines[:room], f"... and {len(lines) - room} more"[:columns]]


def heading(look: Look) -> list[str]:
    """Which it is, and what it has done in all."""
    pid, number = look.name
    which = f", vector env {number}" if number > 1 else ""
    told = [f"process {pid}{which}: {look.seen.command}"]
    if look.seconds is not None:
        total = look.total
        steps = sum(worker.steps for worker in total.workers)
        faults = total.faults
        told.append(
            f"ready for {_clock(total.elapsed_s)}: {steps:,} steps, {faults.restarts} restarts, "
            f"{faults.crashes + faults.errors + faults.timeouts} faults; of that the last"
        )
    return told


def printable(told: str) -> str:
    """What another process says, so that it cannot steer the terminal."""
    return "".join(c if c.isprintable() else "?" for c in told)


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
