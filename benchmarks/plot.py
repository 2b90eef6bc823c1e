"""Draw the JSON results of other benchmarks.

    python benchmarks/matrix.py settings --compute 0 --json shares.json
    python benchmarks/matrix.py cores --json cores.json
    python benchmarks/costs.py split --json split.json
    python benchmarks/costs.py tracing --picture trace.json
    python benchmarks/plot.py shares.json cores.json split.json trace.json --out figures

shares.png: each system's share of the limit against the number of envs, with a panel for each
workload and a parent that computes nothing. split.png: the parts of a batch step, with a bar for
each workload. cores.png: each system's share of the limit against the number of cores, with the
largest number of envs that was measured for each. learning.png: learning curves with and without
killed workers. trace.png: some batches of a trace. Files of the same kind go into one picture. They
must be of one machine; the last file names it.

Each picture is drawn twice: shares.png for a light page and shares-dark.png, without a background,
for a dark one. A system looks the same in all pictures. Its colour has a contrast of 3:1 or more to
both pages, and markers and line styles tell systems apart without colours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from shmvec._commands.measuring import LIMIT, describe_machine

PARTS = ("env", "infos", "copying", "signalling", "waiting")
PART_COLOURS = ("#2f80ed", "#e66100", "#8e5bd0", "#1a8a4a", "#7a7a7a")
BLUE, ORANGE, GREY = "#2f80ed", "#e66100", "#7a7a7a"
LOOKS = {  # colour, line, marker
    "ShmVectorEnv": (BLUE, "-", "o"),
    "ShmVectorEnv, partial": (BLUE, "--", "s"),
    "ShmVectorEnv, 1 workers": (BLUE, "--", "v"),
    "ShmVectorEnv, a worker an env": (BLUE, ":", "^"),
    "AsyncVectorEnv": (ORANGE, "-", "s"),
    "SyncVectorEnv": ("#8e5bd0", "-", "D"),
    "SB3 SubprocVecEnv": ("#0f8b8d", "-", "P"),
    "Tianshou SubprocVectorEnv": (GREY, "-", "v"),
    "Tianshou ShmemVectorEnv": (GREY, ":", "^"),
    "EnvPool (C++)": ("#d6336c", "-", "X"),
    "ALE AtariVectorEnv (C++)": ("#c9473c", "--", "X"),
    "PufferLib Multiprocessing": ("#8a8a00", "-", "<"),
    "PufferLib Serial": ("#8a8a00", ":", ">"),
    "TorchRL ParallelEnv": ("#1a8a4a", "-", "p"),
    "TorchRL AsyncEnvPool": ("#1a8a4a", ":", "h"),
    "RLlib SingleAgentEnvRunner": ("#a0651a", "-", "d"),
    "Sample Factory": ("#d94ba8", "--", "*"),
}
OTHERS = ("#c9473c", "-.", ".")
NAMES = {"ShmVectorEnv, 1 workers": "ShmVectorEnv, 1 worker"}


def page(text: str, lines: str, background: str) -> dict[str, Any]:
    """Matplotlib's settings for a page whose text has this colour."""
    names = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    frame = ("axes.edgecolor", "xtick.color", "ytick.color", "legend.edgecolor")
    faces = ("figure.facecolor", "savefig.facecolor", "axes.facecolor", "legend.facecolor")
    return {
        **dict.fromkeys(names, text),
        **dict.fromkeys(frame, lines),
        **dict.fromkeys(faces, background),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "font.size": 11,
    }


PAGES = {"": page("#1f2328", "#6e7781", "white"), "-dark": page("#e0e3e7", "#8b949e", "none")}


def shares(rows: list[dict[str, Any]], title: str) -> Figure:
    """Share of the limit against the number of envs."""
    return _panels([row for row in rows if row["compute_us"] == 0], title, "num_envs", "envs")


def cores(rows: list[dict[str, Any]], title: str) -> Figure:
    """Share of the limit of each system's best setting against the number of cores."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    envs: dict[tuple[str, int], int] = {}
    for row in rows:
        where = row["workload"], row["cores"]
        envs[where] = max(envs.get(where, 0), row["num_envs"])
    for row in rows:
        if row["num_envs"] < envs[row["workload"], row["cores"]]:
            continue
        key = row["workload"], row["system"], row["cores"]
        if row.get("share_of_limit", -1) > best.get(key, {}).get("share_of_limit", -1):
            best[key] = row
    return _panels(list(best.values()), title, "cores", "cores")


def _panels(rows: list[dict[str, Any]], title: str, across: str, label: str) -> Figure:
    """Share of the limit against the column ``across``, with a panel for each workload."""
    rows = [row for row in rows if row["system"] != LIMIT]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    columns = min(2, len(workloads))
    lines = -(-len(workloads) // columns)
    present = list(dict.fromkeys(row["system"] for row in rows))
    systems = [name for name in LOOKS if name in present]
    systems += [name for name in present if name not in LOOKS]
    entries = 3 if columns > 1 else 2
    height = 2.6 * lines + 0.5 + 0.25 * -(-len(systems) // entries)
    figure = Figure(figsize=(3.7 * columns, height), layout="constrained")
    figure.suptitle(title, fontsize="small")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    handles: dict[str, Any] = {}
    for workload, panel in zip(workloads, panels, strict=False):
        for system in systems:
            points = [
                (row[across], row["share_of_limit"])
                for row in rows
                if row["workload"] == workload and row["system"] == system
            ]
            if points:
                ours = system == "ShmVectorEnv"
                colour, line, marker = LOOKS.get(system, OTHERS)
                (handles[NAMES.get(system, system)],) = panel.plot(
                    *zip(*sorted(points), strict=True),
                    marker=marker,
                    color=colour,
                    linestyle=line,
                    linewidth=3 if ours else 1.3,
                    markersize=7 if ours else 6,
                    zorder=3 if ours else 2,
                )
        panel.set_title(workload, fontsize="medium")
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, None)
        panel.axhline(1, color=GREY, linestyle="--", linewidth=0.8)
        panel.set(xlabel=label, ylabel="share of the limit")
        panel.minorticks_off()
        counts = sorted({row[across] for row in rows})
        panel.set_xticks(counts, [str(count) for count in counts])
    for panel in panels:  # the unused ones of the last line
        panel.set_axis_off()
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=entries,
        fontsize="small",
    )
    return figure


def split(rows: list[dict[str, Any]], title: str) -> Figure:
    """The parts of a batch step."""
    figure = Figure(figsize=(7.4, 1.2 + 0.7 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    axes = figure.add_subplot()
    names = [f"{row['workload']}\n{row['num_envs']} envs" for row in rows]
    left = [0.0] * len(rows)
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        wholes = [sum(row[name] for name in PARTS) for row in rows]
        widths = [row[part] / whole for row, whole in zip(rows, wholes, strict=True)]
        axes.barh(names, widths, left=left, label=part, color=colour, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="share of a batch step", xlim=(0, 1))
    figure.legend(loc="outside lower center", ncols=len(PARTS), fontsize="small")
    return figure


def learning(rows: list[dict[str, Any]], title: str) -> Figure:
    """Lengths of episodes while learning, with and without killed workers: mean and all runs."""
    figure = Figure(figsize=(7.4, 3.5), layout="constrained")
    figure.suptitle(title, fontsize="small")
    axes = figure.add_subplot()
    for kills, colour, line in ((False, BLUE, "-"), (True, ORANGE, "--")):
        runs = [row for row in rows if row["kills"] == kills]
        restarts = sum(run["restarts"] for run in runs) / len(runs)
        for run in runs:
            axes.plot(run["lengths"], color=colour, linewidth=0.5, alpha=0.6)
        mean = [
            sum(each) / len(runs) for each in zip(*(run["lengths"] for run in runs), strict=True)
        ]
        label = f"{restarts:.0f} restarts a run"
        axes.plot(mean, color=colour, linestyle=line, linewidth=2.5, label=label)
    axes.set(xlabel="rollouts learned from", ylabel="steps an episode", ylim=(0, None))
    axes.legend()
    return figure


SPANS = {  # colours of a trace's spans
    "step": "#4c9f70",
    "reset": "#d1495b",
    "send": "#3066be",
    "take": "#7a9be0",
    "caller": "#f0b34a",
    "wait: yield": "#9a9a9a",
    "wait: park": "#cfcfcf",
}


def trace(events: list[dict[str, Any]], title: str) -> Figure:
    """Some batches of a trace, with a line for each process."""
    names = sorted(
        (event["args"]["name"], event["tid"]) for event in events if event["name"] == "thread_name"
    )
    begin, *_, end = sorted(e["ts"] for e in events if e.get("cat") == "send")[-5:]
    figure = Figure(figsize=(7.4, 1 + 0.6 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    for kind, colour in SPANS.items():
        label: str | None = kind
        for row, (_, tid) in enumerate(names):
            spans = [
                (event["ts"] - begin, event["dur"])
                for event in events
                if event["ph"] == "X" and event["tid"] == tid
                if kind == (event["name"] if event["cat"] == "wait" else event["cat"])
                if event["ts"] + event["dur"] > begin and event["ts"] < end
            ]
            if spans:
                look = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.4}
                axes.broken_barh(spans, (row - 0.4, 0.8), label=label, **look)
                label = None
    axes.invert_yaxis()
    axes.set(xlabel="µs", xlim=(0, end - begin))
    axes.set_yticks(range(len(names)), [name for name, _ in names])
    figure.legend(loc="outside lower center", ncols=len(SPANS), fontsize="small")
    return figure


FIGURES = {
    "rows": ("shares", shares),
    "split": ("split", split),
    "cores": ("cores", cores),
    "learning": ("learning", learning),
    "traceEvents": ("trace", trace),
}


def drawn(
    found: dict[str, tuple[list[dict[str, Any]], str]],
) -> Iterator[tuple[str, Figure]]:
    """Yields file names and pictures, for a light and for a dark page."""
    for key, (rows, title) in found.items():
        name, draw = FIGURES[key]
        for suffix, settings in PAGES.items():
            with matplotlib.rc_context(settings):
                yield f"{name}{suffix}.png", draw(rows, title)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(), help="folder (default: this one)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, tuple[list[dict[str, Any]], str]] = {}
    for file in options.files:
        results = json.loads(file.read_text())
        title = describe_machine(results["machine"]) if "machine" in results else ""
        for key in set(results) & set(FIGURES):
            rows, _ = found.get(key, ([], ""))
            found[key] = rows + results[key], title
    for name, figure in drawn(found):
        figure.savefig(options.out / name, dpi=150, facecolor=figure.get_facecolor())
        print(options.out / name)


if __name__ == "__main__":
    main()
