"""Where a lockstep batch step goes, by trace: the mean worker, the slowest one, and the rest.

    python benchmarks/balance.py                              # Pong, 8 and 32 envs
    python benchmarks/balance.py --workload HalfCheetah-v5 --num-envs 8

In each batch step a worker steps its envs one after the other, and the batch is done when the last
worker is. `mean worker` is the time that workers spend in steps and resets on average, `imbalance`
what the slowest worker of each batch needs beyond that, `rest` what is left: requests, waking,
results. `without resets` is the imbalance of the batches in which no env was reset. All of it is of
the batch step's time; `step` and `reset` are what one of an env takes.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from harness import WORKLOADS, arguments

from shmvec import ShmVectorEnv
from shmvec._commands.measuring import described, line, machine

WARM_UP = 1000  # batch steps, after which envs are at different places of their episodes


def recorded(workload: str, n: int, seconds: float) -> tuple[list[float], list[dict[str, float]]]:
    """When each batch step began, in µs, and the steps and resets in the trace."""
    envs = ShmVectorEnv([WORKLOADS[workload].make] * n)
    file = Path(tempfile.mkdtemp()) / "trace.json"
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(64)]
    envs.reset(seed=0)
    for step in range(WARM_UP):
        envs.step(actions[step % 64])
    with envs.trace(file, size=1 << 20):
        began = [1e6 * time.monotonic()]
        while began[-1] < began[0] + 1e6 * seconds:
            envs.step(actions[len(began) % 64])
            began.append(1e6 * time.monotonic())
    envs.close()
    events = json.loads(file.read_text())["traceEvents"]
    return began, [each for each in events if each.get("cat") in ("step", "reset")]


def shares(began: list[float], events: list[dict[str, float]]) -> Iterator[str]:
    """The cells of a row."""
    edges = np.array(began)
    offset = min(each["ts"] for each in events) - edges[0]  # traces count from their first entry
    workers = sorted({each["tid"] for each in events})
    busy = np.zeros((len(edges) - 1, len(workers)))
    resets = np.zeros(len(edges) - 1, bool)
    for each in events:
        middle = each["ts"] - offset + each["dur"] / 2
        batch = int(np.searchsorted(edges, middle)) - 1
        if 0 <= batch < len(busy):
            busy[batch, workers.index(each["tid"])] += each["dur"]
            resets[batch] |= each["cat"] == "reset"
    took, mean, most = np.diff(edges), busy.mean(axis=1), busy.max(axis=1)
    usual = ~resets
    yield f"{took.mean():,.0f}"
    yield f"{mean.sum() / took.sum():.1%}"
    yield f"{(most - mean).sum() / took.sum():.1%}"
    yield f"{(most - mean)[usual].sum() / took[usual].sum():.1%}"
    yield f"{(took - most).sum() / took.sum():.1%}"
    yield f"{resets.mean():.1%}"
    for kind in ("step", "reset"):
        each = np.array([each["dur"] for each in events if each["cat"] == kind])
        yield f"{each.mean():,.0f} ± {each.std():,.0f}" if len(each) else ""


def main() -> None:
    """Runs the command line."""
    options = arguments(str(__doc__), ["ALE/Pong-v5"], [8, 32], 10.0).parse_args()
    print(described(machine()))
    head = "workload", "envs", "batch step, µs", "mean worker", "imbalance", "without resets"
    print("", line(*head, "rest", "batches with resets", "step, µs", "reset, µs"), sep="\n")
    print("|---|--:" + "|--:" * 8 + "|")
    for workload in options.workload:
        for n in options.num_envs:
            cells = shares(*recorded(workload, n, options.seconds))
            print(line(workload, n, *cells), flush=True)


if __name__ == "__main__":
    main()
