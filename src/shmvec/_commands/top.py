"""Show running vector envs: their speed, what each worker does, and what limits them.

    shmvec top
    shmvec top PID

The programs are not disturbed. PID is the program, one of its workers, or the process that has
started it, such as timeout, srun or a shell. Without PID, all your vector envs are shown. On a
terminal the picture is redrawn until Ctrl-C, and shows the time since the last one; this needs rich
(pip install 'shmvec[top]'). Elsewhere it is printed once, and shows the time since the vector env
was made, or the next --interval seconds.
"""

from __future__ import annotations

import argparse
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
from shmvec._commands.attaching import Snapshot, Watcher, printable
from shmvec.stats import FaultCounts, Stats, Timing, Waits, WorkerStats

__all__ = ["SUMMARY", "add_arguments", "prometheus_text", "main"]

SUMMARY = "show what running vector envs do, and what limits their speed"

_INTERVAL_S = 1.0


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


def _seconds(text: str) -> float:
    """An argparse type: seconds that can be slept."""
    value = float(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be positive, and at most a million, got {text}")
    return value


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status.

    It is 1 if there is no vector env; but 0 for Prometheus, whose text shows that there is none.
    """
    pid, interval = options.pid, options.interval
    watcher = Watcher(pid)
    try:
        if _can_redraw(sys.stdout) and not options.as_json and not options.prometheus:
            return _redraw(watcher, pid, interval or _INTERVAL_S)
        snapshots = watcher.take_snapshots()
        if interval is not None and snapshots:
            time.sleep(interval)
            snapshots = watcher.take_snapshots()
    except KeyboardInterrupt:
        return 1
    except OSError as error:
        _print_error(_error_message(pid, error))
        return 1
    if options.as_json:
        report = {"vector_envs": list(map(_as_dict, snapshots)), "problems": watcher.problems}
        print(json.dumps(report, indent=2))
    elif options.prometheus:
        print(prometheus_text([(snapshot.name, snapshot.total) for snapshot in snapshots]), end="")
        for problem in watcher.problems:
            _print_error(problem)
        return 0
    elif snapshots:
        print(_text_of(snapshots, watcher.problems))
    if not snapshots and not options.as_json:
        _print_error(_no_env_message(pid, watcher))
    return 0 if snapshots else 1


def _print_error(message: str) -> None:
    if sys.stderr is not None:  # else print would take stdout
        print(f"shmvec top: {message}", file=sys.stderr)


def _can_redraw(out: IO[str] | None) -> bool:
    """Whether the output is a terminal on which text can be overwritten."""
    # The terminal of a notebook's cell shows all that was ever written.
    in_notebook = "JPY_PARENT_PID" in os.environ
    if out is None or not out.isatty():
        return False
    return os.environ.get("TERM", "dumb") != "dumb" and not in_notebook


def _redraw(watcher: Watcher, pid: int | None, interval: float) -> int:
    """Redraws until Ctrl-C, or until no vector env is left; the last picture stays."""
    try:
        from shmvec._commands.picture import Picture, full_screen
    except ImportError:
        _print_error("a terminal needs rich: pip install 'shmvec[top]'")
        return 2
    snapshots = watcher.take_snapshots()
    if not snapshots:
        _print_error(_no_env_message(pid, watcher))
        return 1
    last = ""
    with full_screen(sys.stdout) as show:
        try:
            while snapshots:
                last = _text_of(snapshots, watcher.problems)
                show(Picture(snapshots, watcher.problems), interval)
                snapshots = watcher.take_snapshots()
            last += "\n\nIt has ended, or was closed."
        except KeyboardInterrupt:
            pass
        except (FileNotFoundError, ProcessLookupError):
            last += "\n\nIt has ended."
    print(last, flush=True)
    return 0


def _text_of(snapshots: Sequence[Snapshot], problems: Sequence[str]) -> str:
    """All looks as text, one below the other."""
    parts = ["\n".join([*snapshot.heading(), str(snapshot.recent)]) for snapshot in snapshots]
    return "\n\n".join([*parts, *map(printable, problems)])


def _error_message(pid: int | None, error: OSError) -> str:
    if isinstance(error, (FileNotFoundError, ProcessLookupError)):
        return f"there is no process {pid}"
    if isinstance(error, PermissionError):
        return f"process {pid} may not be read: it is another user's, or forbids it"
    return str(error)


def _no_env_message(pid: int | None, watcher: Watcher) -> str:
    """The message that there is no vector env, and why."""
    who = "no process of yours has a" if pid is None else f"process {pid} has no"
    return "\n".join([f"{who} vector env in use", *watcher.problems])


# ---- for programs --------------------------------------------------------------------------------


def _as_dict(snapshot: Snapshot) -> dict[str, Any]:
    entry = {
        "pid": snapshot.vector_env.pid,
        "number": snapshot.name[1],
        "command": snapshot.vector_env.command,
        **_summary(snapshot.total),
        "stats": asdict(snapshot.total),
    }
    if snapshot.seconds is not None:
        entry["recent"] = {"seconds": snapshot.seconds, **_summary(snapshot.recent)}
    return entry


def _summary(stats: Stats) -> dict[str, Any]:
    return {**stats.metrics(), "verdict": asdict(stats.verdict)}


def prometheus_text(vector_envs: Sequence[tuple[tuple[int, int], Stats]]) -> str:
    """Prometheus' text for vector envs, each named by its process and its number there."""
    lines = []
    metrics = [_metrics(stats) for _, stats in vector_envs]
    for (name, kind, text, _), *env_metrics in zip(_metrics(_EMPTY), *metrics, strict=True):
        lines += [f"# HELP shmvec_{name} {text}", f"# TYPE shmvec_{name} {kind}"]
        for ((pid, number), _), (*_, samples) in zip(vector_envs, env_metrics, strict=True):
            for suffix, labels, value in samples:
                if value is not None:
                    all_labels = {"pid": pid, "vector_env": number, **labels}
                    labels_text = ",".join(f'{key}="{word}"' for key, word in all_labels.items())
                    lines.append(f"shmvec_{name}{suffix}{{{labels_text}}} {value}")
    return "\n".join(lines) + "\n"


# Suffix of the metric's name, labels, and value; None: it is not known.
_Samples = Iterable[tuple[str, dict[str, Any], Any]]

# For the names, types and help texts of all metrics.
_EMPTY = Stats(Waits(*[0] * len(fields(Waits))), (), FaultCounts(*[0] * len(fields(FaultCounts))))


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
    waited_s = faults.pop("restart_s")
    yield "faults_total", "counter", text, [("", {"kind": kind}, faults[kind]) for kind in faults]
    text = "Time that the caller has waited for workers that were restarted."
    yield "restart_seconds_total", "counter", text, _one(waited_s)
    for counter in fields(Waits):
        text, value = counter.metadata["help"], getattr(stats.parent, counter.name)
        yield f"caller_{_metric_name(counter)}", "counter", text, _one(value)
    text = "Time that the caller has waited."
    yield "caller_waited_seconds_total", "counter", text, _one(stats.parent.waited_s)
    for counter in fields(WorkerStats):
        if text := counter.metadata.get("help", ""):
            values = [getattr(worker, counter.name) for worker in stats.workers]
            yield f"worker_{_metric_name(counter)}", "counter", text, _by_worker(values)
    text = "Time that the worker has waited."
    waited_s = [worker.waited_s for worker in stats.workers]
    yield "worker_waited_seconds_total", "counter", text, _by_worker(waited_s)
    text = "Number of the worker's envs; the first and last are labels."
    yield "worker_envs", "gauge", text, _num_envs_by_worker(stats)
    text = "Time since the worker began its step, reset or call; 0 outside."
    in_env_s = [now.for_s if now else 0.0 for now in stats.doing]
    yield "worker_in_env_seconds", "gauge", text, _by_worker(in_env_s)
    for name, kind, text in (
        ("resident_bytes", "rss", "Resident memory."),
        ("proportional_bytes", "pss", "Resident memory; shared pages count in part."),
    ):
        yield f"caller_{name}", "gauge", text, _one(getattr(stats.caller, kind, None))
        memory = [getattr(process, kind, None) for process in stats.processes]
        yield f"worker_{name}", "gauge", text, _by_worker(memory)
    yield "step_seconds", "histogram", "Duration of single steps.", _histogram(stats.step)
    yield "reset_seconds", "histogram", "Duration of single resets.", _histogram(stats.reset)


def _metric_name(counter: Field[Any]) -> str:
    return re.sub("_s$", "_seconds", counter.name) + "_total"


def _one(value: float | None) -> _Samples:
    return [("", {}, value)]


def _by_worker(values: Sequence[float | None]) -> _Samples:
    return [("", {"worker": worker}, value) for worker, value in enumerate(values)]


def _num_envs_by_worker(stats: Stats) -> _Samples:
    for index, worker in enumerate(stats.workers):
        if worker.envs:
            labels = {"worker": index, "first": worker.envs[0], "last": worker.envs[-1]}
            yield "", labels, worker.num_envs


def _histogram(timing: Timing) -> _Samples:
    cumulative = 0
    for bound, count in zip(timing.bounds, timing.buckets, strict=True):
        cumulative += count
        yield "_bucket", {"le": "+Inf" if bound == math.inf else f"{bound:.9g}"}, cumulative
    yield "_sum", {}, timing.total_s
    yield "_count", {}, timing.count
