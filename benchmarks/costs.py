"""What a batch step costs besides the envs, part by part.

    python benchmarks/costs.py split --workload CartPole-v1 HalfCheetah-v5 --json split.json
    python benchmarks/costs.py balance --workload ALE/Pong-v5 --num-envs 8 32
    python benchmarks/costs.py texts --what infos --length 64000
    python benchmarks/costs.py tracing --picture trace.json
    python benchmarks/costs.py noticing
    python benchmarks/costs.py counting
    python benchmarks/plot.py split.json trace.json --out figures

split: where the batch step of real envs goes, in µs. Beside them are stepped replays: envs that
return what the real ones did, without computing.

    env          the limit: as long as that many steps take in free-running loops, one a core
    infos        what the replay takes longer with infos than without
    copying      what it takes longer with observations and actions of that size than with tiny ones
    signalling   the replay with tiny ones, less its envs' own steps: requests, answers, wakes
    waiting      the rest: for the slowest worker, and what the envs suffer from each other

balance: the same by trace. A batch is done when the last worker is. `mean worker` is the time that
workers spend in steps and resets on average, `imbalance` what the slowest worker of each batch
needs beyond that, `rest` what is left: requests, waking, results. `without resets` is the imbalance
of the batches in which no env was reset. `step` and `reset` are what one of an env takes.

texts: long texts in observations, actions or infos, beside Gymnasium's vector envs. Both spaces are
Text(65536), as with language models, and each step makes a new text of so many characters, or takes
one; else observation and action are of two characters. ASCII has a byte a character, Japanese two
(in UTF-8: three). The caller keeps what a batch step returns until the next one, as a training loop
does. The limit makes a text and passes it on as a reference; so does SyncVectorEnv, which is the
faster one where envs do nothing else. AsyncVectorEnv has ``shared_memory=False``: in shared memory
it writes and reads a text character by character, as many as the space's max_length.

tracing: one vector env steps in short slices, not traced, traced, not traced, and so on. Of each
the lower quartile of its batch steps counts, as whatever else the machine does only adds to them.
`on / off` is the median over the rounds of a traced slice's over that of its two neighbours, with
its 95 % interval (by bootstrap); `off / off` is the one neighbour's over the other's: what is
chance. --picture writes a trace of eight envs of which one is ten times slower than the others, and
of a caller that computes a while between two steps.

noticing: how soon a caller that waits notices the death of a worker, and Ctrl-C. Two envs would
step for a minute, a worker each; the time is from the signal until ``step`` raises.

counting: ns that counting for stats() takes; a C compiler builds benchmarks/counting.c.
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
    described,
    line,
    machine,
    race,
    vector_env,
)
from shmvec._cores import usable_cores


def headed(*columns: str) -> None:
    """Prints the machine, and the head of a table."""
    print(described(machine()), "", heading(*columns), sep="\n")


# ---- split ---------------------------------------------------------------------------------------


class Replay(gym.Env[Any, Any]):
    """Returns recorded results, again and again, without computing."""

    def __init__(
        self, observation_space: Any, action_space: Any, results: Sequence[tuple[Any, ...]]
    ) -> None:
        """Takes what steps return."""
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
    """Spaces, and what steps of a real env return; none of them ends an episode."""
    env = make()
    env.action_space.seed(0)
    env.reset(seed=0)
    taken: list[tuple[Any, ...]] = []
    while len(taken) < steps:
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
        else:
            taken.append((np.array(observation), reward, False, False, info))
    env.close()
    return env.observation_space, env.action_space, taken


def calls(run: Callable[[], object]) -> Stepper:
    """A contender that only makes a call, as often as it can."""

    def step(_: Any) -> None:
        run()

    return Stepper(step, lambda: None)


def shares(workload: str, num_envs: int, seconds: float) -> Row:
    """Where the time of a batch step goes, in µs."""
    fns = WORKLOADS[workload].fns(num_envs)
    observations, actions, taken = record(fns[0])
    tiny = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    plain = [(*step[:4], {}) for step in taken]
    least = [(np.zeros(1, np.float32), *step[1:4], {}) for step in taken]
    replays = {
        "replay": partial(Replay, observations, actions, taken),
        "plain": partial(Replay, observations, actions, plain),
        "least": partial(Replay, *tiny, least),
    }
    makes = {"real": fns} | {name: [make] * num_envs for name, make in replays.items()}
    found = race(
        {
            "call": partial(calls, lambda: None),
            "own": partial(calls, partial(replays["least"]().step, 0)),
            **{
                name: partial(vector_env, partial(ShmVectorEnv, fns)) for name, fns in makes.items()
            },
        },
        seconds,
        limit=WORKLOADS[workload].makes,
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
    """Prints a row a workload."""
    parts = "env", "infos", "copying", "signalling", "waiting"
    headed("workload", "envs", "spread", "batch step, µs", *parts)
    rows = []
    for workload, n in product(options.workload, options.num_envs):
        rows.append(row := shares(workload, n, options.seconds))
        figures = [f"{row[name]:,.1f}" for name in ("batch_us", *parts)]
        print(line(workload, n, f"{row['spread']:.0%}", *figures), flush=True)
        results = {"machine": {**machine(), "libraries": versions()}, "split": rows}
        write_results(options.json, results)


# ---- balance -------------------------------------------------------------------------------------

WARM_UP = 1000  # batch steps, after which envs are at different places of their episodes


def events_of(file: Path) -> list[dict[str, Any]]:
    """What a trace has."""
    events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def recorded(workload: str, n: int, seconds: float) -> tuple[list[float], list[dict[str, Any]]]:
    """When each batch step began, in µs, and the steps and resets in the trace."""
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
        times = np.array([each["dur"] for each in events if each["cat"] == kind])
        yield f"{times.mean():,.0f} ± {times.std():,.0f}" if len(times) else ""


def balance(options: argparse.Namespace) -> None:
    """Prints a row a workload."""
    columns = "batch step, µs", "mean worker", "imbalance", "without resets", "rest"
    headed("workload", "envs", *columns, "batches with resets", "step, µs", "reset, µs")
    for workload, n in product(options.workload, options.num_envs):
        print(line(workload, n, *by_worker(*recorded(workload, n, options.seconds))), flush=True)


# ---- texts ---------------------------------------------------------------------------------------

LONGEST = 65_536
WORDS = {
    "ASCII": "You are in a room. There is a door to the north. ",
    "Japanese": "あなたは部屋にいる。北に扉がある。",
}
PLACES = ["observations", "actions", "infos"]
BESIDE: dict[str, Callable[[Any], Any]] = {
    "ShmVectorEnv": partial(ShmVectorEnv, num_workers=2),
    "AsyncVectorEnv": partial(AsyncVectorEnv, shared_memory=False),
    "SyncVectorEnv": SyncVectorEnv,
}


def text(length: int, words: str) -> str:
    """A text of these words, cut at so many characters."""
    return (words * (length // len(words) + 1))[:length]


class Tells(gym.Env[Any, Any]):
    """Tells a text in each step, or is told one."""

    def __init__(self, what: str, length: int, words: str) -> None:
        """Takes where the texts are: one of PLACES."""
        charset = "".join(sorted(set("0123456789" + "".join(WORDS.values()))))
        self.observation_space = self.action_space = gym.spaces.Text(LONGEST, charset=charset)
        self._what, self._rest, self._count = what, text(length - 8, words), 0

    def _text(self, where: str) -> str:
        """A text that no one has seen before, where they belong."""
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


class Given(gym.Space[str]):
    """A source of actions in place of a Text space's, which takes long to sample."""

    def __init__(self, action: str) -> None:
        """Takes what is always sampled."""
        super().__init__((), str)
        self._action = action

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """The same text each time."""
        return self._action


def told(make: Callable[[], Tells], action: str) -> Tells:
    """An env of the limit, whose actions are sampled quickly."""
    env = make()
    env.action_space = Given(action)  # type: ignore[assignment]
    return env


def telling(make: Callable[[], Any], actions: tuple[str, ...]) -> Stepper:
    """Makes and resets a vector env that is stepped with these actions."""
    envs = make()
    kept: list[Any] = [envs.reset(seed=0)]

    def step(_: Any) -> None:
        kept[0] = envs.step(actions)

    return Stepper(step, lambda: None, envs.num_envs, close=envs.close)


def texts(options: argparse.Namespace) -> None:
    """Prints a row for each system."""
    headed(
        "texts in", "characters", "system", "batch step, µs", "spread", "steps/s", "of the limit"
    )
    rows: list[Row] = []
    lengths = product(options.places, WORDS.items(), options.length, options.num_envs)
    for what, (name, words), length, n in lengths:
        make = partial(Tells, what, length, words)
        action = text(length if what == "actions" else 2, words)
        starts = {
            system: partial(telling, partial(kind, [make] * n), (action,) * n)
            for system, kind in BESIDE.items()
        }
        results = race(starts, options.seconds, limit=[partial(told, make, action)])
        for system, result in results.items():
            cell = {"what": what, "words": name, "length": length, "num_envs": n}
            rows.append(row := {**cell, "system": system, **result.figures(results[LIMIT])})
            print(line(what, f"{length:,} {name}", system, *cells(row)), flush=True)
        write_results(options.json, {"machine": machine(), "texts": rows})


# ---- tracing -------------------------------------------------------------------------------------

SLICE_S = 0.05
COMPUTE_S = 0.0003  # of the caller in the picture


def batch_step(envs: Any, actions: Any) -> float:
    """Steps for a while; the lower quartile of the times of a batch step."""
    for _ in range(5):
        envs.step(actions)  # awake again
    times = [time.perf_counter()]
    while times[-1] - times[0] < SLICE_S:
        envs.step(actions)
        times.append(time.perf_counter())
    return float(np.quantile(np.diff(times), 0.25))


def on_and_off(workload: str, num_envs: int, seconds: float, path: Path) -> Iterator[str]:
    """The cells of a row: the cost of tracing one workload."""
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
    """A trace of uneven envs."""
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
    """Prints a row a workload, or writes a trace."""
    if options.picture is not None:
        write_trace(options.picture)
        return
    headed("workload", "envs", "rounds", "off, µs", "on / off", "off / off")
    with tempfile.TemporaryDirectory() as folder:
        for workload, n in product(options.workload, options.num_envs):
            row = on_and_off(workload, n, options.seconds, Path(folder) / "run.json")
            print(line(workload, n, *row), flush=True)


# ---- noticing ------------------------------------------------------------------------------------

ASLEEP_S = 0.1


class Endless(gym.Wrapper[Any, Any, Any, Any]):
    """An env whose steps take a minute."""

    def step(self, action: Any) -> Any:
        """Takes a minute."""
        time.sleep(60)
        return super().step(action)


def delay_s(context: str, killed: bool) -> float:
    """The time from a signal, to a worker or to this process, to the exception."""
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
        print(line(context, what, f"{statistics.median(taken):.2f}", f"{max(taken):.2f}"))


# ---- counting ------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]


def counting(options: argparse.Namespace) -> None:
    """Builds the C program, and runs it."""
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
    one.add_argument("--picture", type=Path, metavar="FILE", help="a trace to draw, instead")
    one = what.add_parser("noticing")
    one.add_argument("--times", type=int, default=20, help="how often each is tried")
    one = what.add_parser("counting")
    one.add_argument("--repeats", type=int, default=9, help="of each measurement")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers; none of ours
    parts = {part.__name__: part for part in (split, balance, texts, tracing, noticing, counting)}
    parts[options.what](options)


if __name__ == "__main__":
    main()
