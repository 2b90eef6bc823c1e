"""Draws what benchmarks/matrix.py, costs.py, cores.py and learning.py have written as JSON.

    python benchmarks/matrix.py --compute 0 --json matrix.json
    python benchmarks/costs.py --split CartPole-v1 HalfCheetah-v5 ALE/Pong-v5 --json costs.json
    python benchmarks/cores.py --json cores.json
    python benchmarks/learning.py --json learning.json
    python benchmarks/plot.py matrix.json costs.json cores.json learning.json --out figures

shares.png: each system's share of the limit against the number of envs, one panel a workload, where
the parent computes nothing. split.png: where a batch step's time goes, one bar a workload.
cores.png: each system's share of the limit against the number of cores, with the most envs that a
number of cores was measured with. learning.png: learning
curves with and without workers being killed. Files of the same kind go
into one picture; they are of one machine, which the last one names.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from shmvec._commands.measuring import LIMIT, described

PARTS = ("env", "infos", "copying", "signalling", "waiting")


def shares(rows: list[dict[str, Any]], title: str) -> Figure:
    """Share of the limit against the number of envs."""
    return _panels([row for row in rows if row["compute_us"] == 0], title, "num_envs", "envs")


def cores(rows: list[dict[str, Any]], title: str) -> Figure:
    """Share of the limit against the number of cores, of each system's best setting."""
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
    """Share of the limit against something, one panel a workload."""
    rows = [row for row in rows if row["system"] != LIMIT]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    columns = min(3, len(workloads))
    lines = -(-len(workloads) // columns)
    figure = Figure(figsize=(4 * columns, 3 * lines + 1), layout="constrained")
    figure.suptitle(title, fontsize="small")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    systems = list(dict.fromkeys(row["system"] for row in rows))
    handles: dict[str, Any] = {}
    for workload, panel in zip(workloads, panels, strict=False):
        for number, system in enumerate(systems):
            points = [
                (row[across], row["share_of_limit"])
                for row in rows
                if row["workload"] == workload and row["system"] == system
            ]
            if points:
                ours = system == "ShmVectorEnv"
                (handles[system],) = panel.plot(
                    *zip(*sorted(points), strict=True),
                    marker="o",
                    color=f"C{number % 10}",
                    linestyle="-" if number < 10 else ":",
                    linewidth=2.5 if ours else 1,
                    zorder=3 if ours else 2,
                )
        panel.set_title(workload)
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, None)
        panel.axhline(1, color="grey", linestyle="--", linewidth=0.8)
        panel.set(xlabel=label, ylabel="share of the limit")
        counts = sorted({row[across] for row in rows})
        panel.set_xticks(counts, [str(count) for count in counts])
    for panel in panels:  # what is left of the last line
        panel.set_axis_off()
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def split(rows: list[dict[str, Any]], title: str) -> Figure:
    """Where the time of a batch step goes."""
    figure = Figure(figsize=(7, 1 + 0.7 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    axes = figure.add_subplot()
    names = [f"{row['workload']}\n{row['num_envs']} envs" for row in rows]
    left = [0.0] * len(rows)
    for part in PARTS:
        wholes = [sum(row[name] for name in PARTS) for row in rows]
        widths = [row[part] / whole for row, whole in zip(rows, wholes, strict=True)]
        axes.barh(names, widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="share of a batch step", xlim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(PARTS))
    return figure


def learning(rows: list[dict[str, Any]], title: str) -> Figure:
    """Lengths of episodes while learning, with workers killed and without: mean and all runs."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    figure.suptitle(title, fontsize="small")
    axes = figure.add_subplot()
    for number, kills in enumerate((False, True)):
        runs = [row for row in rows if row["kills"] == kills]
        restarts = sum(run["restarts"] for run in runs) / len(runs)
        for run in runs:
            axes.plot(run["lengths"], color=f"C{number}", linewidth=0.5, alpha=0.5)
        mean = [
            sum(each) / len(runs) for each in zip(*(run["lengths"] for run in runs), strict=True)
        ]
        axes.plot(mean, color=f"C{number}", linewidth=2.5, label=f"{restarts:.0f} restarts a run")
    axes.set(xlabel="rollouts learned from", ylabel="steps an episode", ylim=(0, None))
    axes.legend()
    return figure


FIGURES = {
    "rows": ("shares.png", shares),
    "split": ("split.png", split),
    "cores": ("cores.png", cores),
    "learning": ("learning.png", learning),
}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(), help="folder (default: this one)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in options.files:
        results = json.loads(file.read_text())
        title = described(results["machine"])
        for key in set(results) & set(FIGURES):
            found[key] = found.get(key, []) + results[key]
    for key, rows in found.items():
        name, draw = FIGURES[key]
        draw(rows, title).savefig(options.out / name, dpi=120)
        print(options.out / name)


if __name__ == "__main__":
    main()
