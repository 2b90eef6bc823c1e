"""What it costs to record a trace, and a picture of one.

    python benchmarks/tracing.py              # on / off: how much longer a batch step takes
    python benchmarks/tracing.py --picture docs/trace.svg

One vector env steps in short slices, not traced, traced, not traced, and so on. Of each slice the
lower quartile of its batch steps counts, as whatever else the machine does only adds to them.
`on / off` is the median over the rounds of a traced slice's over that of its two neighbours, with
its 95 % interval (by bootstrap); `off / off` is the one neighbour's over the other's: what is
chance. Beginning a trace and writing it are outside of the slices, and are given by themselves.

The picture is of a real trace: eight envs of which one is ten times slower than the others, and a
caller that computes a while between two steps.
"""

from __future__ import annotations

import contextlib
import html
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import WORKLOADS, arguments

import shmvec
from shmvec._commands.measuring import described, line, machine

CELLS = [("CartPole-v1", 32), ("HalfCheetah-v5", 8)]
SLICE_S = 0.05
COMPUTE_S = 0.0003  # of the caller in the picture
BATCHES = 4  # in the picture
KINDS = {  # of spans, and how they are drawn
    "step": "#4c9f70",
    "reset": "#d1495b",
    "send": "#3066be",
    "take": "#7a9be0",
    "caller": "#f0b34a",
    "wait: spin": "#9a9a9a",
    "wait: yield": "#9a9a9a",
    "wait: park": "#cfcfcf",
}


def batch_step(envs: Any, actions: Any) -> float:
    """Steps for a while; the lower quartile of the times of a batch step."""
    for _ in range(5):
        envs.step(actions)  # awake again
    times = [time.perf_counter()]
    while times[-1] - times[0] < SLICE_S:
        envs.step(actions)
        times.append(time.perf_counter())
    return float(np.quantile(np.diff(times), 0.25))


def measured(workload: str, num_envs: int, seconds: float, path: Path) -> list[str]:
    """A row: the cost of tracing one workload."""
    on, off, usual, beginning, writing = [], [], [], [], []
    with contextlib.closing(shmvec.ShmVectorEnv(WORKLOADS[workload].fns(num_envs))) as envs:
        envs.reset(seed=0)
        actions = envs.action_space.sample()
        for _ in range(5):
            before = batch_step(envs, actions)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before = batch_step(envs, actions)
            trace = envs.trace(path)
            begin = time.perf_counter()
            trace.start()
            beginning.append(time.perf_counter() - begin)
            during = batch_step(envs, actions)
            begin = time.perf_counter()
            trace.stop()
            writing.append(time.perf_counter() - begin)
            after = batch_step(envs, actions)
            on.append(2 * during / (before + after))
            off.append(after / before)
            usual.append(before)
    return [
        f"{workload}, {num_envs} envs",
        str(len(on)),
        f"{1e6 * statistics.median(usual):.1f}",
        interval(on),
        interval(off),
        f"{1e3 * statistics.median(beginning):.1f}",
        f"{statistics.median(writing):.2f}",
    ]


def interval(ratios: list[float]) -> str:
    """The median, and where it may lie."""
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(ratios, len(ratios))) for _ in range(1000)]
    low, high = np.quantile(medians, [0.025, 0.975])
    return f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def traced(path: Path) -> list[dict[str, Any]]:
    """The events of a trace of uneven envs."""
    env_fns = WORKLOADS["Uneven"].fns(8)
    with contextlib.closing(shmvec.ShmVectorEnv(env_fns, num_workers=2)) as envs:
        envs.reset(seed=0)
        actions = envs.action_space.sample()
        with envs.trace(path):
            for _ in range(200):
                envs.step(actions)
                end = time.perf_counter() + COMPUTE_S
                while time.perf_counter() < end:
                    pass
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def colour_of(event: dict[str, Any]) -> str:
    """How an event is drawn."""
    return KINDS.get(event["cat"]) or KINDS[event["name"]]


def picture(events: list[dict[str, Any]]) -> str:
    """Some batches of a trace, as SVG: to be read on a phone, too, in the light and in the dark."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    sends = sorted(e["ts"] for e in events if e.get("cat") == "send")[100 : 101 + BATCHES]
    begin, end = sends[0] - 50, sends[-1]
    width, margin, height, label = 520, 8, 30, 24
    scale = (width - 2 * margin) / (end - begin)
    rows = {
        tid: label + row * (height + label + 4)
        for row, (tid, _) in enumerate(sorted(names.items(), key=lambda item: item[1]))
    }
    drawn, keys = [], {}
    for tid, y in rows.items():
        drawn.append(f'<text x="{margin}" y="{y - 6}">{html.escape(names[tid])}</text>')
    for event in events:
        if event["ph"] != "X" or event["ts"] + event["dur"] < begin or event["ts"] > end:
            continue
        x = max(0.0, event["ts"] - begin) * scale
        to = min(event["ts"] + event["dur"] - begin, end - begin) * scale
        colour = colour_of(event)
        names_of = keys.setdefault(colour, [])
        kind = event["name"] if event["cat"] == "wait" else event["cat"]
        if kind not in names_of:
            names_of.append(kind)
        drawn.append(
            f'<rect x="{margin + x:.1f}" y="{rows[event["tid"]]}" '
            f'width="{max(to - x, 0.4):.1f}" height="{height}" fill="{colour}">'
            f"<title>{html.escape(event['name'])}: {event['dur']:.1f} µs</title></rect>"
        )
    y = max(rows.values()) + height + 18
    for us in range(0, int(end - begin), 500):
        x = margin + us * scale
        drawn.append(f'<text x="{x:.0f}" y="{y}">{us} µs</text>')
    x, y = margin, y + 14
    for colour in dict.fromkeys(colour for colour in KINDS.values() if colour in keys):
        kinds = ", ".join(sorted(keys[colour])).replace(", wait:", ",")
        if x + 8 * len(kinds) + 40 > width:
            x, y = margin, y + 24
        drawn.append(f'<rect x="{x}" y="{y}" width="16" height="16" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 22}" y="{y + 13}">{kinds}</text>')
        x += 8 * len(kinds) + 40
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 26}" '
        'font-family="sans-serif" font-size="15">',
        "<style>svg { background: #fff } text { fill: #222 } rect { stroke: #fff; "
        "stroke-width: 0.4 } @media (prefers-color-scheme: dark) { svg { background: #0d1117 } "
        "text { fill: #ddd } rect { stroke: #0d1117 } }</style>",
    ]
    return "\n".join([*head, *drawn, "</svg>"]) + "\n"


def main() -> None:
    """Measures, or draws."""
    parser = arguments(__doc__ or "", list(WORKLOADS), [8, 32], seconds=20.0)
    parser.add_argument("--picture", type=Path, help="an SVG to write instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        if options.picture is not None:
            options.picture.write_text(picture(traced(path)), encoding="utf-8")
            return
        print(described(machine()))
        head = ("", "rounds", "off, µs", "on / off", "off / off", "begin, ms", "write, s")
        print(line(*head), line(*["---"] * len(head)), sep="\n")
        cells = [(w, n) for w in options.workload for n in options.num_envs] or CELLS
        for workload, num_envs in cells:
            print(line(*measured(workload, num_envs, options.seconds, path)), flush=True)


if __name__ == "__main__":
    main()
