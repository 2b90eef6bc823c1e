"""What ``Stats`` tell, in sentences and columns: printed as they are, and drawn by ``top``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmvec.stats import Process, Stats, Timing

__all__ = [
    "LONGEST",
    "MOST_ROWS",
    "SPARE",
    "duration",
    "fitted",
    "hidden",
    "lines",
    "of_faults",
    "of_workers",
    "opening",
    "timings",
    "width_of",
]

MOST_ROWS = 16
# Columns that are left out where there is no room, the first first.
SPARE = (
    *("starved", "CPU", "in reset", "memory", "resets", "pid", "waiting"),
    *("steps", "envs", "in step"),
)
LONGEST = len("reset of env 100 for 2.63 ms")
_SLOWEST = 3  # envs that are named
_LONG_S = 0.1  # a wait that is worth a word

_Column = tuple[str, list[str]]


def lines(stats: Stats, width: int | None) -> list[str]:
    """All of it as plain text; columns that do not fit the width are left out."""
    columns = fitted(of_workers(stats), width, SPARE)
    return [
        *opening(stats),
        *_aligned(list(zip(*([name, *told] for name, told in columns), strict=True))),
        *hidden(stats),
        *_aligned(timings(stats)),
        *of_faults(stats),
    ]


def opening(stats: Stats) -> list[str]:
    """Sentences on all of them together."""
    seconds = max(stats.elapsed_s, 1e-9)
    steps = sum(worker.steps for worker in stats.workers)
    resets = sum(worker.resets for worker in stats.workers)
    waiting_s = stats.waiting_s or 0.0
    told = [
        f"{stats.elapsed_s:.3g} s: {steps:,} steps ({stats.steps_per_s:,.0f} a second, "
        f"{stats.share_of_limit:.0%} of the limit), {resets:,} resets; "
        f"{stats.num_workers} workers, {len(stats.envs)} envs, {stats.cores} cores",
        f"the caller waited {_percent(stats.parent.waited_s, seconds)} of the time "
        f"({stats.parent.parks:,} sleeps)"
        + (f", now for {duration(waiting_s)}" if waiting_s >= _LONG_S else ""),
    ]
    if stats.caller is not None:
        of_workers = "".join(f", workers {_bytes(pss)}" for pss in _pss_of_workers(stats))
        told.append(
            f"memory: caller {_memory(stats.caller)}{of_workers}, shared {_bytes(stats.shared)}"
        )
    return told


def of_workers(stats: Stats) -> list[_Column]:
    """Columns with a row for each worker: of the first ones, if there are many."""
    seconds = max(stats.elapsed_s, 1e-9)
    workers = stats.workers[:MOST_ROWS]
    processes = stats.processes[:MOST_ROWS]
    columns = [
        ("worker", [str(index) for index in range(len(workers))]),
        ("envs", [_range(worker.envs) for worker in workers]),
        ("pid", [str(each.pid) if each else "?" for each in processes]),
        ("steps", [f"{worker.steps:,}" for worker in workers]),
        ("resets", [f"{worker.resets:,}" for worker in workers]),
        ("in step", [_percent(worker.step_s, seconds) for worker in workers]),
        ("in reset", [_percent(worker.reset_s, seconds) for worker in workers]),
        ("waiting", [_percent(worker.waited_s, seconds) for worker in workers]),
        ("CPU", [_percent(worker.cpu_s, seconds) for worker in workers]),
        ("starved", [_percent(worker.starved_s, seconds) for worker in workers]),
        ("memory", [_memory(each) for each in processes]),
        ("now", [_now(stats, index) for index in range(len(workers))]),
    ]
    return [(name, told) for name, told in columns if told]


def fitted(columns: list[_Column], width: int | None, spare: Sequence[str]) -> list[_Column]:
    """Those that there is room for beside each other; the spare ones go first."""
    for name in spare:
        if width is None or width_of(columns) <= width:
            break
        columns = [column for column in columns if column[0] != name]
    return columns


def hidden(stats: Stats) -> list[str]:
    """That there are more workers than rows."""
    more = len(stats.workers) - MOST_ROWS
    return [f"... and {more} more"] if more > 0 else []


def timings(stats: Stats) -> list[tuple[str, ...]]:
    """Rows on how long steps and resets take: of all envs, and of the slowest."""
    rows = [
        (f"{who} {name}", *map(duration, (t.quantile(0.5), t.quantile(0.99), t.longest_s)))
        for name in ("step", "reset")
        for who, t in (("any env's", getattr(stats, name)), *_slowest(stats, name))
        if t.count
    ]
    return [("", "p50", "p99", "longest"), *rows] if rows else []


def of_faults(stats: Stats) -> list[str]:
    """What went wrong, if anything did."""
    counts = [(field.name, getattr(stats.faults, field.name)) for field in fields(stats.faults)]
    told = ", ".join(f"{count} {name}" for name, count in counts if count)
    return [f"faults: {told}"] if told else []


def duration(seconds: float) -> str:
    """A time, in the unit that it is best read in."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def _pss_of_workers(stats: Stats) -> list[int]:
    """Bytes that they have together; nothing, where that is not known."""
    known = [each.pss for each in stats.processes if each is not None and each.pss is not None]
    return [sum(known)] if known else []


def _now(stats: Stats, worker: int) -> str:
    """What a worker does."""
    if stats.processes and stats.processes[worker] is None:
        return "no process"
    return str(stats.doing[worker] or "-") if stats.doing else "-"


def _slowest(stats: Stats, name: str) -> list[tuple[str, Timing]]:
    """Those envs whose steps or resets take longest, where there are others."""
    if len(stats.envs) <= _SLOWEST:
        return []
    found = [(getattr(env, name), index) for index, env in enumerate(stats.envs)]
    worst = sorted(found, key=lambda each: -each[0].quantile(0.99))[:_SLOWEST]
    return [(f"env {index}'s", timing) for timing, index in worst]


def _percent(part: float | None, whole: float) -> str:
    return "?" if part is None else f"{100 * part / whole:.0f} %"


def _memory(process: Process | None) -> str:
    if process is None or process.pss is None:
        return "?"
    return _bytes(process.pss)


def _bytes(number: int) -> str:
    mib = number / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def _range(envs: range) -> str:
    """Its first and its last."""
    return "-".join(map(str, dict.fromkeys((envs[0], envs[-1])))) if envs else "?"


def width_of(columns: Sequence[_Column]) -> int:
    """Characters that columns take beside each other, whatever is done now."""
    widths = [LONGEST if name == "now" else max(map(len, (name, *told))) for name, told in columns]
    return sum(widths) + 2 * (len(columns) - 1)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, columns flush right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]
