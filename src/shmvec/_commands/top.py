"""Show what running vector envs do: their speed, what each worker is in, and what limits them.

    shmvec top
    shmvec top PID

The programs are neither stopped nor changed. PID is the program, one of its workers, or what has
started it (timeout, srun, a shell). Without PID, all your vector envs are shown. On a terminal the
picture is redrawn until Ctrl-C, with what has happened since the last one (by rich: pip install
'shmvec[top]'). Elsewhere it is printed once, with what has happened since the vector env was made,
or within --interval.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import Field, asdict, fields
from typing import IO, Any

from shmvec._commands.arguments import positive
from shmvec._commands.attaching import Look, Watch, printable
from shmvec.stats import FaultCounts, Stats, Timing, Waits, WorkerStats

__all__ = ["SUMMARY", "add_arguments", "exposition", "main", "run"]

SUMMARY = "show what running vector envs do, and what limits their speed"

_INTERVAL_S = 1.0


def run(
    pid: int | None,
    *,
    as_json: bool = False,
    prometheus: bool = False,
    interval: float | None = None,
    out: IO[str] | None = None,
) -> int:
    """Shows vector envs.

    Args:
        pid: Show those of this process; None: all.
        as_json: Whether to print JSON, once.
        prometheus: Whether to print Prometheus' text, once.
        interval: Seconds between two looks.
        out: Where to write; None: standard output.

    Returns:
        An exit status: 1 if there is no vector env, but 0 for Prometheus, whose text shows that.
    """
    out = out or sys.stdout or io.StringIO()  # standard output may have been closed
    watch = Watch(pid)
    try:
        if _is_screen(out) and not as_json and not prometheus:
            return _redrawn(watch, pid, interval or _INTERVAL_S, out)
        looks = watch.look()
        if interval is not None and looks:
            time.sleep(interval)
            looks = watch.look()
    except KeyboardInterrupt:
        return 1
    except OSError as error:
        _complain(_reason(pid, error))
        return 1
    if as_json:
        shown = {"vector_envs": list(map(_as_dict, looks)), "problems": watch.problems}
        print(json.dumps(shown, indent=2), file=out)
    elif prometheus:
        out.write(exposition([(look.name, look.total) for look in looks]))
        for problem in watch.problems:
            _complain(problem)
        return 0
    elif looks:
        print(_as_text(looks, watch.problems), file=out)
    if not looks and not as_json:
        _complain(_none(pid, watch))
    return 0 if looks else 1


def _complain(message: str) -> None:
    """Prints what is wrong on stderr."""
    if sys.stderr is not None:  # else print would take stdout
        print(f"shmvec top: {message}", file=sys.stderr)


def _is_screen(out: IO[str]) -> bool:
    """Whether the output is a terminal on which text can be overwritten."""
    # A command of a notebook's cell has a terminal that shows all that was ever written.
    in_notebook = "JPY_PARENT_PID" in os.environ
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not in_notebook


def _redrawn(watch: Watch, pid: int | None, interval: float, out: IO[str]) -> int:
    """Redraws until Ctrl-C, or until there is nothing more to see; the last picture stays."""
    try:
        from shmvec._commands.picture import Picture, full_screen
    except ImportError:
        _complain("to draw on a terminal it needs rich: pip install 'shmvec[top]'")
        return 2
    looks = watch.look()
    if not looks:
        _complain(_none(pid, watch))
        return 1
    last = ""
    with full_screen(out) as show:
        try:
            while looks:
                last = _as_text(looks, watch.problems)
                show(Picture(looks, watch.problems), interval)
                looks = watch.look()
            last += "\n\nIt has ended, or was closed."
        except KeyboardInterrupt:
            pass
        except (FileNotFoundError, ProcessLookupError):
            last += "\n\nIt has ended."
    print(last, file=out, flush=True)
    return 0


def _as_text(looks: Sequence[Look], problems: Sequence[str]) -> str:
    """All looks as text, one below the other."""
    parts = ["\n".join([*look.heading(), str(look.recent)]) for look in looks]
    return "\n\n".join([*parts, *map(printable, problems)])


def _reason(pid: int | None, error: OSError) -> str:
    """The message that a process could not be read."""
    if isinstance(error, (FileNotFoundError, ProcessLookupError)):
        return f"there is no process {pid}"
    if isinstance(error, PermissionError):
        return f"process {pid} may not be read: it is another user's, or forbids it"
    return str(error)


def _none(pid: int | None, watch: Watch) -> str:
    """The message that there is no vector env, and why."""
    who = "no process of yours has a" if pid is None else f"process {pid} has no"
    return "\n".join([f"{who} vector env in use", *watch.problems])


# ---- for programs --------------------------------------------------------------------------------


def _as_dict(look: Look) -> dict[str, Any]:
    shown = {
        "pid": look.seen.pid,
        "number": look.name[1],
        "command": look.seen.command,
        **_summary(look.total),
        "stats": asdict(look.total),
    }
    if look.seconds is not None:
        shown["recent"] = {"seconds": look.seconds, **_summary(look.recent)}
    return shown


def _summary(stats: Stats) -> dict[str, Any]:
    return {**stats.metrics(), "verdict": asdict(stats.verdict)}


def exposition(named: Sequence[tuple[tuple[int, int], Stats]]) -> str:
    """Prometheus' text for vector envs, each named by its process and its number there."""
    lines = []
    of_each = [_metrics(stats) for _, stats in named]
    for (name, kind, text, _), *found in zip(_metrics(_NOTHING), *of_each, strict=True):
        lines += [f"# HELP shmvec_{name} {text}", f"# TYPE shmvec_{name} {kind}"]
        for ((pid, number), _), (*_, samples) in zip(named, found, strict=True):
            for suffix, labels, value in samples:
                if value is not None:
                    all_labels = {"pid": pid, "vector_env": number, **labels}
                    shown = ",".join(f'{key}="{word}"' for key, word in all_labels.items())
                    lines.append(f"shmvec_{name}{suffix}{{{shown}}} {value}")
    return "\n".join(lines) + "\n"


# Suffix of the metric's name, labels, and value; None: it is not known.
_Samples = Iterable[tuple[str, dict[str, Any], Any]]

# Of no vector env: for the names, types and helps of all metrics.
_NOTHING = Stats(Waits(*[0] * len(fields(Waits))), (), FaultCounts(*[0] * len(fields(FaultCounts))))


def _metrics(stats: Stats) -> Iterator[tuple[str, str, str, _Samples]]:
    """Name, type, help and samples of each metric."""
    yield "elapsed_seconds", "gauge", "Time since the vector env was made.", _one(stats.elapsed_s)
    yield "envs", "gauge", "Number of envs.", _one(len(stats.envs))
    yield "workers", "gauge", "Number of worker processes.", _one(stats.num_workers)
    yield "cores", "gauge", "Cores that the program may use.", _one(stats.cores)
    text = "Shared memory for requests, results and counters."
    yield "shared_bytes", "gauge", text, _one(stats.shared)
    text = "Share of the steps that free-running loops would make; above 1 if envs sleep."
    yield "share_of_limit", "gauge", text, _one(stats.share_of_limit)
    text = "What has limited the speed since the vector env was made."
    yield "verdict", "gauge", text, [("", {"kind": stats.verdict.kind}, 1)]
    text = "Faults that were handled, by kind."
    faults = asdict(stats.faults)
    waited = faults.pop("restart_s")
    yield "faults_total", "counter", text, [("", {"kind": kind}, faults[kind]) for kind in faults]
    text = "Time that the caller has waited for workers that were restarted."
    yield "restart_seconds_total", "counter", text, _one(waited)
    for counter in fields(Waits):
        text, value = counter.metadata["help"], getattr(stats.parent, counter.name)
        yield f"caller_{_total(counter)}", "counter", text, _one(value)
    text = "Time that the caller has waited."
    yield "caller_waited_seconds_total", "counter", text, _one(stats.parent.waited_s)
    for counter in fields(WorkerStats):
        if text := counter.metadata.get("help", ""):
            values = [getattr(worker, counter.name) for worker in stats.workers]
            yield f"worker_{_total(counter)}", "counter", text, _of_workers(values)
    text = "Time that the worker has waited."
    waited = [worker.waited_s for worker in stats.workers]
    yield "worker_waited_seconds_total", "counter", text, _of_workers(waited)
    text = "Number of the worker's envs; the first and last are labels."
    yield "worker_envs", "gauge", text, _envs_of_workers(stats)
    text = "Time since the worker began its step, reset or call; 0 outside."
    inside = [now.for_s if now else 0.0 for now in stats.doing]
    yield "worker_in_env_seconds", "gauge", text, _of_workers(inside)
    for name, kind, text in (
        ("resident_bytes", "rss", "Resident memory."),
        ("proportional_bytes", "pss", "Resident memory; shared pages count in part."),
    ):
        yield f"caller_{name}", "gauge", text, _one(getattr(stats.caller, kind, None))
        memory = [getattr(process, kind, None) for process in stats.processes]
        yield f"worker_{name}", "gauge", text, _of_workers(memory)
    yield "step_seconds", "histogram", "Duration of single steps.", _histogram(stats.step)
    yield "reset_seconds", "histogram", "Duration of single resets.", _histogram(stats.reset)


def _total(counter: Field[Any]) -> str:
    return re.sub("_s$", "_seconds", counter.name) + "_total"


def _one(value: float | None) -> _Samples:
    return [("", {}, value)]


def _of_workers(values: Sequence[float | None]) -> _Samples:
    return [("", {"worker": worker}, value) for worker, value in enumerate(values)]


def _envs_of_workers(stats: Stats) -> _Samples:
    for index, worker in enumerate(stats.workers):
        if worker.envs:
            labels = {"worker": index, "first": worker.envs[0], "last": worker.envs[-1]}
            yield "", labels, worker.num_envs


def _histogram(timing: Timing) -> _Samples:
    seen = 0
    for bound, count in zip(timing.bounds, timing.buckets, strict=True):
        seen += count
        yield "_bucket", {"le": "+Inf" if bound == math.inf else f"{bound:.9g}"}, seen
    yield "_sum", {}, timing.total_s
    yield "_count", {}, timing.count


# ---- the command ---------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    which = command.add_mutually_exclusive_group()
    which.add_argument(
        "pid", nargs="?", type=positive(int), metavar="PID", help="process id of the program"
    )
    which.add_argument("--all", action="store_true", help="all your vector envs (the default)")
    command.add_argument(
        "--interval", type=_seconds, metavar="S", help="seconds between two pictures"
    )
    how = command.add_mutually_exclusive_group()
    how.add_argument("--json", dest="as_json", action="store_true", help="print JSON, once")
    how.add_argument(
        "--prometheus", action="store_true", help="print Prometheus' text format, once"
    )


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    return run(
        options.pid,
        as_json=options.as_json,
        prometheus=options.prometheus,
        interval=options.interval,
    )


def _seconds(text: str) -> float:
    """An argparse type: seconds that can be slept."""
    value = float(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be positive, and at most a million, got {text}")
    return value
