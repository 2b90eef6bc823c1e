"""The costs of a batch step besides the envs, part by part.

    python benchmarks/costs.py split --workload CartPole-v1 HalfCheetah-v5 --json split.json
    python benchmarks/costs.py balance --workload ALE/Pong-v5 --num-envs 8 32
    python benchmarks/costs.py texts --what infos --length 64000
    python benchmarks/costs.py tracing --picture trace.json
    python benchmarks/costs.py noticing
    python benchmarks/costs.py counting
    python benchmarks/plot.py split.json trace.json --out figures

split: the parts of a batch step of real envs, in µs. Replays are measured, too: envs that return
what the real ones did, without computing.

    env          the limit: the time of as many steps in free-running loops, one a core
    infos        the replay with infos, less the replay without
    copying      the replay with observations and actions of that size, less that with tiny ones
    signalling   the replay with tiny ones, less its envs' own steps: requests, answers, wakes
    waiting      the rest: for the slowest worker, and what the envs suffer from each other

balance: the same by trace. A batch is done when the last worker is. `mean worker` is the mean time
of workers in steps and resets, `imbalance` is how much longer the slowest worker of each batch
needs, and `rest` is what is left: requests, waking, results. `without resets` is the imbalance of
the batches in which no env was reset. `step` and `reset` are the times of one env.

texts: long texts in observations, actions or infos, compared with Gymnasium's vector envs. Both
spaces are Text(65536), as with language models. Each step makes or takes a new text of that many
characters; other observations and actions have two characters. ASCII has a byte a character,
Japanese two (three in UTF-8). The caller keeps the results of a batch step until the next one, as a
training loop does. The limit makes a text and passes it on as a reference. So does SyncVectorEnv,
which is the faster one where envs do nothing else. AsyncVectorEnv has ``shared_memory=False``: in
shared memory it writes and reads a text character by character, up to the space's max_length.

tracing: one vector env steps in short slices, by turns without and with a trace. The lower quartile
of a slice's batch steps counts, because other programs only add to it. `on / off` divides a traced
slice by the mean of its two neighbours; the table has the median over the rounds and its 95 %
interval (by bootstrap). `off / off` divides one neighbour by the other, which shows chance.
--picture writes a trace of eight envs, one of them ten times slower than the others, and of a
caller that computes for a while between two steps.

noticing: how soon a waiting caller notices the death of a worker, and Ctrl-C. Two envs in two
workers would step for a minute; the time is from the signal until ``step`` raises.

counting: the ns that counting for stats() takes; a C compiler builds benchmarks/counting.c.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from harness import WORKLOADS, Row, arguments, heading, versions, write_results

from shmvec import ShmVectorEnv, WorkerCrashError
from shmvec._commands.measuring import (
    LIMIT,
    Stepper,
    cells,
    describe_machine,
    machine,
    race,
    table_line,
    vector_env_stepper,
)
from shmvec._cores import usable_cores


def headed(*columns: str) -> None:
    """Prints the machine, and the heading of a table."""
    print(describe_machine(machine()), "", heading(*columns), sep="\n")


# ---- split ---------------------------------------------------------------------------------------


class Replay(gym.Env[Any, Any]):
    """Returns recorded results, again and again, without computing."""

    def __init__(
        self, observation_space: Any, action_space: Any, results: Sequence[tuple[Any, ...]]
    ) -> None:
        """Takes the results that steps return."""
        self.observation_space = observation_space
        self.action_space = action_space
        self._results = results
        self._next = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns an observation."""
        return self._results[0][0], {}

    def step(self, action: Any) -> tuple[Any, ...]:
        """Returns the next results."""
        self._next = (self._next + 1) % len(self._results)
        return self._results[self._next]


def record(make: Callable[[], Any], steps: int = 64) -> tuple[Any, Any, list[tuple[Any, ...]]]:
    """Records a real env's spaces, and results of steps that do not end an episode."""
    env = make()
    env.action_space.seed(0)
    env.reset(seed=0)
    results: list[tuple[Any, ...]] = []
    while len(results) < steps:
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
        else:
            results.append((np.array(observation), reward, False, False, info))
    env.close()
    return env.observation_space, env.action_space, results


def calls(run: Callable[[], object]) -> Stepper:
    """A contender that repeats a call."""

    def step(_: Any) -> None:
        run()

    return Stepper(step, lambda: None)


def shares(workload: str, num_envs: int, seconds: float) -> Row:
    """Measures the parts of a batch step, in µs."""
    fns = WORKLOADS[workload].fns(num_envs)
    observations, actions, results = record(fns[0])
    tiny = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    plain = [(*step[:4], {}) for step in results]
    least = [(np.zeros(1, np.float32), *step[1:4], {}) for step in results]
    replays = {
        "replay": partial(Replay, observations, actions, results),
        "plain": partial(Replay, observations, actions, plain),
        "least": partial(Replay, *tiny, least),
    }
    makes = {"real": fns} | {name: [make] * num_envs for name, make in replays.items()}
    found = race(
        {
            "call": partial(calls, lambda: None),
            "own": partial(calls, partial(replays["least"]().step, 0)),
            **{
                name: partial(vector_env_stepper, partial(ShmVectorEnv, fns))
                for name, fns in makes.items()
            },
        },
        seconds,
        limit=WORKLOADS[workload].kinds,
    )
    us = {name: result.median.batch_us for name, result in found.items()}
    steps = us["real"] * found["real"].median.steps_per_s / 1e6  # of a batch; resets are none
    in_parallel = num_envs / min(usable_cores(), num_envs)
    parts = {
        "env": steps * us[LIMIT],
        "infos": max(0.0, us["replay"] - us["plain"]),
        "copying": max(0.0, us["plain"] - us["least"]),
        "signalling": us["least"] - in_parallel * (us["own"] - us["call"]),
    }
    parts["waiting"] = max(0.0, us["real"] - sum(parts.values()))
    cell = {"workload": workload, "num_envs": num_envs, "spread": found["real"].spread}
    return {**cell, "batch_us": us["real"], **parts}


def split(options: argparse.Namespace) -> None:
    """Prints a row for each workload."""
    parts = "env", "infos", "copying", "signalling", "waiting"
    headed("workload", "envs", "spread", "batch step, µs", *parts)
    rows = []
    for workload, n in product(options.workload, options.num_envs):
        rows.append(row := shares(workload, n, options.seconds))
        figures = [f"{row[name]:,.1f}" for name in ("batch_us", *parts)]
        print(table_line(workload, n, f"{row['spread']:.0%}", *figures), flush=True)
        results = {"machine": {**machine(), "libraries": versions()}, "split": rows}
        write_results(options.json, results)


# ---- balance -------------------------------------------------------------------------------------

WARM_UP = 1000  # batch steps after which envs are at different points of their episodes


def events_of(file: Path) -> list[dict[str, Any]]:
    """The events of a trace."""
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def recorded(workload: str, n: int, seconds: float) -> tuple[list[float], list[dict[str, Any]]]:
    """Records when each batch step began, in µs, and the trace's steps and resets."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(ShmVectorEnv(WORKLOADS[workload].fns(n))) as envs,
    ):
        file = Path(folder) / "trace.json"
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
        return began, [each for each in events_of(file) if each.get("cat") in ("step", "reset")]


def by_worker(began: list[float], events: list[dict[str, Any]]) -> Iterator[str]:
    """Yields the cells of a row."""
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
        times = np.array([each["dur"] for each in events if each["cat"] == kind])
        yield f"{times.mean():,.0f} ± {times.std():,.0f}" if len(times) else ""


def balance(options: argparse.Namespace) -> None:
    """Prints a row for each workload."""
    columns = "batch step, µs", "mean worker", "imbalance", "without resets", "rest"
    headed("workload", "envs", *columns, "batches with resets", "step, µs", "reset, µs")
    for workload, n in product(options.workload, options.num_envs):
        print(
            table_line(workload, n, *by_worker(*recorded(workload, n, options.seconds))), flush=True
        )


# ---- texts ---------------------------------------------------------------------------------------

LONGEST = 65_536
WORDS = {
    "ASCII": "You are in a room. There is a door to the north. ",
    "Japanese": "あなたは部屋にいる。北に扉がある。",
}
PLACES = ["observations", "actions", "infos"]
TEXT_SYSTEMS: dict[str, Callable[[Any], Any]] = {
    "ShmVectorEnv": partial(ShmVectorEnv, num_workers=2),
    "AsyncVectorEnv": partial(AsyncVectorEnv, shared_memory=False),
    "SyncVectorEnv": SyncVectorEnv,
}


def text(length: int, words: str) -> str:
    """Repeats the words up to this number of characters."""
    return (words * (length // len(words) + 1))[:length]


class TextEnv(gym.Env[Any, Any]):
    """Returns a text in each step, or takes one."""

    def __init__(self, what: str, length: int, words: str) -> None:
        """Takes the place of the texts, one of PLACES, their length and their words."""
        charset = "".join(sorted(set("0123456789" + "".join(WORDS.values()))))
        self.observation_space = self.action_space = gym.spaces.Text(LONGEST, charset=charset)
        self._what, self._rest, self._count = what, text(length - 8, words), 0

    def _text(self, where: str) -> str:
        """A new text in the place of texts, else a short one."""
        return f"{self._count:08}{self._rest}" if where == self._what else "ok"

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the first observation."""
        return self._text("observations"), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns the next one."""
        self._count += 1
        info = {"text": self._text("infos")} if self._what == "infos" else {}
        return self._text("observations"), float(len(action)), False, False, info


class ConstantSpace(gym.Space[str]):
    """A space with one action, in place of a Text space, which is slow to sample."""

    def __init__(self, action: str) -> None:
        """Takes the action."""
        super().__init__((), str)
        self._action = action

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Returns the action."""
        return self._action


def limit_env(make: Callable[[], TextEnv], action: str) -> TextEnv:
    """Makes an env of the limit, whose actions are sampled quickly."""
    env = make()
    env.action_space = ConstantSpace(action)  # type: ignore[assignment]
    return env


def text_stepper(make: Callable[[], Any], actions: tuple[str, ...]) -> Stepper:
    """Makes and resets a vector env that is stepped with these actions."""
    envs = make()
    results: list[Any] = [envs.reset(seed=0)]

    def step(_: Any) -> None:
        results[0] = envs.step(actions)

    return Stepper(step, lambda: None, envs.num_envs, close=envs.close)


def texts(options: argparse.Namespace) -> None:
    """Prints a row for each system."""
    headed(
        "texts in", "characters", "system", "batch step, µs", "spread", "steps/s", "of the limit"
    )
    rows: list[Row] = []
    lengths = product(options.places, WORDS.items(), options.length, options.num_envs)
    for what, (name, words), length, n in lengths:
        make = partial(TextEnv, what, length, words)
        action = text(length if what == "actions" else 2, words)
        starts = {
            system: partial(text_stepper, partial(kind, [make] * n), (action,) * n)
            for system, kind in TEXT_SYSTEMS.items()
        }
        results = race(starts, options.seconds, limit=[partial(limit_env, make, action)])
        for system, result in results.items():
            cell = {"what": what, "words": name, "length": length, "num_envs": n}
            rows.append(row := {**cell, "system": system, **result.figures(results[LIMIT])})
            print(table_line(what, f"{length:,} {name}", system, *cells(row)), flush=True)
        write_results(options.json, {"machine": machine(), "texts": rows})


# ---- tracing -------------------------------------------------------------------------------------

SLICE_S = 0.05
COMPUTE_S = 0.0003  # for which the caller in the picture computes


def batch_step(envs: Any, actions: Any) -> float:
    """Steps for a while; returns the lower quartile of a batch step's times."""
    for _ in range(5):
        envs.step(actions)  # wakes the workers
    times = [time.perf_counter()]
    while times[-1] - times[0] < SLICE_S:
        envs.step(actions)
        times.append(time.perf_counter())
    return float(np.quantile(np.diff(times), 0.25))


def on_and_off(workload: str, num_envs: int, seconds: float, path: Path) -> Iterator[str]:
    """Yields the cells of a row: the cost of tracing one workload."""
    on, off, usual = [], [], []
    with contextlib.closing(ShmVectorEnv(WORKLOADS[workload].fns(num_envs))) as envs:
        envs.reset(seed=0)
        actions = envs.action_space.sample()
        for _ in range(5):
            batch_step(envs, actions)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before = batch_step(envs, actions)
            with envs.trace(path):
                during = batch_step(envs, actions)
            after = batch_step(envs, actions)
            on.append(2 * during / (before + after))
            off.append(after / before)
            usual.append(before)
    yield str(len(on))
    yield f"{1e6 * statistics.median(usual):.1f}"
    rng = np.random.default_rng(0)
    for ratios in (on, off):
        medians = [np.median(rng.choice(ratios, len(ratios))) for _ in range(1000)]
        low, high = np.quantile(medians, [0.025, 0.975])
        yield f"{np.median(ratios):.3f} [{low:.3f}, {high:.3f}]"


def write_trace(path: Path) -> None:
    """Writes a trace of uneven envs."""
    envs = ShmVectorEnv(WORKLOADS["Uneven"].fns(8), num_workers=2)
    with contextlib.closing(envs), envs.trace(path):
        envs.reset(seed=0)
        actions = envs.action_space.sample()
        for _ in range(200):
            envs.step(actions)
            end = time.perf_counter() + COMPUTE_S
            while time.perf_counter() < end:
                pass


def tracing(options: argparse.Namespace) -> None:
    """Prints a row for each workload, or writes a trace."""
    if options.picture is not None:
        write_trace(options.picture)
        return
    headed("workload", "envs", "rounds", "off, µs", "on / off", "off / off")
    with tempfile.TemporaryDirectory() as folder:
        for workload, n in product(options.workload, options.num_envs):
            row = on_and_off(workload, n, options.seconds, Path(folder) / "run.json")
            print(table_line(workload, n, *row), flush=True)


# ---- noticing ------------------------------------------------------------------------------------

ASLEEP_S = 0.1


class Endless(gym.Wrapper[Any, Any, Any, Any]):
    """An env whose steps take a minute."""

    def step(self, action: Any) -> Any:
        """Takes a minute."""
        time.sleep(60)
        return super().step(action)


def delay_s(context: str, killed: bool) -> float:
    """The time from a signal to a worker or to this process until the exception."""
    make = partial(Endless, WORKLOADS["Noop"].make())
    envs = ShmVectorEnv([make] * 2, num_workers=2, context=context)
    began = 0.0

    def cause() -> None:
        nonlocal began
        began = time.perf_counter()
        os.kill(*((envs.processes[0].pid, signal.SIGKILL) if killed else (me, signal.SIGINT)))

    me, timer = os.getpid(), threading.Timer(ASLEEP_S, cause)
    try:
        envs.reset(seed=0)
        timer.start()
        try:
            envs.step(np.zeros(2, np.int64))
        except (KeyboardInterrupt, WorkerCrashError):
            return time.perf_counter() - began
        raise AssertionError("step() raised nothing")
    finally:
        timer.join()
        envs.close(terminate=True)


def noticing(options: argparse.Namespace) -> None:
    """Prints a row for each start method and fault."""
    faults = list(product(("fork", "forkserver", "spawn"), (True, False)))
    delays: dict[Any, list[float]] = {fault: [] for fault in faults}
    for _ in range(options.times):
        for fault in faults:
            delays[fault].append(1000 * delay_s(*fault))
    headed("start method", "what", "median, ms", "longest, ms")
    for (context, killed), taken in delays.items():
        what = "a death" if killed else "Ctrl-C"
        print(table_line(context, what, f"{statistics.median(taken):.2f}", f"{max(taken):.2f}"))


# ---- counting ------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]


def counting(options: argparse.Namespace) -> None:
    """Builds the C program and runs it."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("no C compiler: set CC")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "counting"
        sources = [ROOT / "benchmarks" / "counting.c", *sorted((ROOT / "csrc").glob("*.c"))]
        includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'tests'}"]
        command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-O2", *includes]
        command += [f"-DREPEATS={options.repeats}", *map(str, sources)]
        subprocess.run([*command, "-pthread", "-o", str(program)], check=True)
        subprocess.run([str(program)], check=True)


# ---- the command line ----------------------------------------------------------------------------


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    both = ["CartPole-v1", "HalfCheetah-v5"]
    arguments("", [*both, "ALE/Pong-v5"], [32], parser=what.add_parser("split"))
    arguments("", ["ALE/Pong-v5"], [8, 32], 10.0, parser=what.add_parser("balance"))
    one = arguments("", (), [256], 3.0, parser=what.add_parser("texts"))
    one.add_argument("--what", nargs="+", choices=PLACES, default=PLACES, dest="places")
    one.add_argument("--length", nargs="+", type=int, default=[20, 1000, 16_000, 64_000])
    one = arguments("", both, [8, 32], 20.0, parser=what.add_parser("tracing"))
    one.add_argument("--picture", type=Path, metavar="FILE", help="write a trace to draw instead")
    one = what.add_parser("noticing")
    one.add_argument("--times", type=int, default=20, help="how often each is tried")
    one = what.add_parser("counting")
    one.add_argument("--repeats", type=int, default=9, help="of each measurement")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # those of other systems; shmvec gives none
    parts = {part.__name__: part for part in (split, balance, texts, tracing, noticing, counting)}
    parts[options.what](options)


if __name__ == "__main__":
    main()
