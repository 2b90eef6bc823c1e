"""What many cores and a GPU are worth: all of it in pieces, each of which ends in time.

    python benchmarks/scaling.py --list                 # the pieces
    python benchmarks/scaling.py --out FOLDER           # all, one after the other
    python benchmarks/scaling.py --out FOLDER --piece ppo --minutes 8
    python benchmarks/scaling.py --out FOLDER --show    # the tables of what is there so far

A piece consists of commands, each for one cell: benchmarks/cores.py, workers.py and training.py,
and pytest. Each gets a share of the piece's time, by what it steps. One that takes more than
twice its share, or lasts to the piece's end, is interrupted, and killed some seconds later with all
that it has started. Output goes to scaling.log, rows to a file that is written after each of
them, and how it has ended to scaling.json. A piece that is run again does what has not ended well
yet: to measure all anew, name another folder. No network is needed; what is not installed is named.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import Row, write_results

HERE = Path(__file__).resolve().parent
GRACE_S = 20.0  # from the interruption to the end of all, or a quarter of the time
LEAST_S = 5.0  # less is not worth a start
PATIENCE_S = 20.0  # a command may take as long, whatever its share: it has to start
BARE = "CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5"
WRAPPED = "CartPole-wrapped", "HalfCheetah-wrapped", "Pong-wrapped"
SYSTEMS = "ShmVectorEnv", "ShmVectorEnv, partial", "AsyncVectorEnv"
CPP = "EnvPool (C++)", "ALE AtariVectorEnv (C++)"
PPO = "ours", "async", "rollout", "pipeline", "envpool"


class Cell(NamedTuple):
    """A command.

    Attributes:
        name: What it measures.
        command: Its words.
        weight: Its share of the time beside those of others.
        takes: The option that says how long it measures, and its unit in shares of the time.
        lacks: Why it cannot be run.
    """

    name: str
    command: Sequence[object] = ()
    weight: float = 1.0
    takes: tuple[str, float] | None = None
    lacks: str = ""


def _by_cores(options: argparse.Namespace, workloads: Any, *systems: str) -> Iterator[Cell]:
    for cores in options.cores:
        for workload in workloads:
            for n in (8 * cores, 2 * cores):
                where = "--workload", workload, "--cores", cores, "--num-envs", n
                what = "--json", options.out / "cores.json", "--system", *systems
                command = HERE / "cores.py", *where, *what
                name = f"{workload}, {cores} cores, {n} envs"
                weight = (1 + n / 32) * _weight(workload)
                yield Cell(name, command, weight, ("--minutes", 0.8 / 60))


def _weight(workload: str) -> float:
    """Pong takes long to start and to step."""
    return 3.0 if "Pong" in workload else 1.0


def bare(options: argparse.Namespace) -> Iterator[Cell]:
    """Envs as they are, 2 and 8 a core, on 1 to 16 cores: cores.py."""
    return _by_cores(options, BARE, *SYSTEMS, *CPP)


def wrapped(options: argparse.Namespace) -> Iterator[Cell]:
    """The same as training scripts wrap them."""
    return _by_cores(options, WRAPPED, *SYSTEMS)


def workers(options: argparse.Namespace) -> Iterator[Cell]:
    """1 to 16 workers with 128 envs, and what they could reach: workers.py."""
    for workload in BARE:
        for count in options.cores:
            where = "--workload", workload, "--num-envs", 128, "--num-workers", count
            command = HERE / "workers.py", *where, "--json", options.out / "workers.json"
            # Of four contenders each; the rest of the time is for their start.
            name, weight = f"{workload}, {count} workers", _weight(workload)
            yield Cell(name, command, weight, ("--seconds", 1 / 12))


def ppo(options: argparse.Namespace) -> Iterator[Cell]:
    """PPO on Pong from pixels, 2 and 8 envs a core, on a GPU if torch finds one: training.py."""
    try:
        import torch
    except ImportError:
        yield Cell("PPO", lacks="torch is not installed")
        return
    device, rollouts = ("cuda", 4) if torch.cuda.is_available() else ("cpu", 1)
    for n in (2 * options.cores[0], 8 * options.cores[0]):
        what = "--run", "pong", "--num-envs", n, "--steps", rollouts * 128 * n, "--system", *PPO
        where = "--device", device, "--json", options.out / "training.json"
        command = HERE / "training.py", *what, *where
        yield Cell(f"{n} envs, {device}", command, 1 + n / 32, ("--seconds", 1 / 2))


def tests(options: argparse.Namespace) -> Iterator[Cell]:
    """The tests, in as many processes as there are cores."""
    lacks = [f"no {name}" for name in ("pytest", "xdist") if not importlib.util.find_spec(name)]
    if not options.tests.is_dir():
        lacks.append(f"no folder {options.tests}, see --tests")
    where = "-n", options.cores[0], "--dist", "worksteal", "-p", "no:cacheprovider", options.tests
    command = "-m", "pytest", "-q", *where
    yield Cell(f"-n {options.cores[0]}", command, lacks=", ".join(lacks))


# Those that say most first.
PIECES: dict[str, Callable[[argparse.Namespace], Iterator[Cell]]] = {
    made.__name__: made for made in (ppo, wrapped, bare, workers, tests)
}


def bounded(command: Sequence[object], seconds: float, log: Path) -> tuple[str, str]:
    """Runs a command of Python's for so long at most.

    Returns:
        How it has ended, "done" if well, and the last line that it has printed.
    """
    late, grace = False, min(GRACE_S, seconds / 4)
    with log.open("ab") as out:
        begin = out.tell()
        # A session has all that a command starts, in whatever process group.
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=out, stderr=out, start_new_session=True
        )
        try:
            process.wait(seconds - grace)
        except subprocess.TimeoutExpired:
            late = True
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
        finally:
            for stat in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):
                    if int(stat.read_text().rpartition(")")[2].split()[3]) == process.pid:
                        os.kill(int(stat.parent.name), signal.SIGKILL)
            process.wait()
    lines = log.read_bytes()[begin:].decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    ended = "done" if process.returncode == 0 else f"failed, {process.returncode}"
    return "no more time" if late else ended, last


def run(piece: str, options: argparse.Namespace, deadline: float) -> None:
    """Runs what has not ended well yet, until the deadline, by `time.monotonic`."""
    file = options.out / "scaling.json"
    known = state(options.out)
    todo = {f"{piece}: {cell.name}": cell for cell in PIECES[piece](options)}
    todo = {name: todo[name] for name in todo if known.get(name, {}).get("ended") != "done"}
    weight = sum(cell.weight for cell in todo.values())
    for number, (name, cell) in enumerate(todo.items(), 1):
        begin = time.monotonic()
        left = deadline - begin
        share = left * cell.weight / weight
        weight -= cell.weight
        print(f"[{number}/{len(todo)}] {name}: ", end="", flush=True)
        ended, said = "left out", cell.lacks
        if not said and left < LEAST_S:
            ended = "no time"
        elif not said:
            takes = [f"{cell.takes[0]}={share * cell.takes[1]:.4f}"] if cell.takes else []
            most = min(left, max(2 * share, PATIENCE_S))
            ended, said = bounded([*cell.command, *takes], most, options.out / "scaling.log")
        known[name] = {"ended": ended, "seconds": round(time.monotonic() - begin, 1), "said": said}
        print(f"{ended}, {known[name]['seconds']} s", flush=True)
        write_results(file, {"scaling": known})


def state(out: Path) -> dict[str, Row]:
    """How each cell has ended so far."""
    file = out / "scaling.json"
    known: dict[str, Row] = json.loads(file.read_text())["scaling"] if file.exists() else {}
    return known


def show(out: Path) -> Iterator[str]:
    """The lines of all tables."""
    import cores
    import workers

    from shmvec._commands.measuring import described

    tables: dict[str, Callable[[list[Row]], Iterator[str]]] = {
        "cores": cores.table,
        "workers": workers.table,
        "training": trained,
    }
    for name, table in tables.items():
        if (file := out / f"{name}.json").exists():
            results = json.loads(file.read_text())
            setup = results["machine"]
            more = [f"{key} {setup[key]}" for key in ("torch", "gpu") if key in setup]
            yield ", ".join([described(setup), *more])
            yield from ["", *table(results[name]), ""]
    for name, row in state(out).items():
        if row["ended"] != "done" or name.startswith("tests"):
            yield f"{name}: {row['ended']}, {row['seconds']} s: {row['said']}"


def trained(rows: list[Row]) -> Iterator[str]:
    """Lines: how fast each system trains, and the parts of its time."""
    from shmvec._commands.measuring import line

    parts = "env", "policy", "learning", "handling"
    yield line("run", "envs", "device", "system", "steps/s", "spread", "runs", "× Async", *parts)
    yield "|---|--:|---|---" + "|--:" * 8 + "|"
    for row in rows:
        rate = row["steps"] / row["wall_s"]
        times = "" if row["times_async"] is None else f"{row['times_async']:.2f}"
        yield line(
            *(row[name] for name in ("run", "num_envs", "device", "system")),
            *(f"{rate:,.0f}", f"{row['spread']:.0%}", row["rounds"], times),
            *(f"{row[part + '_s'] / row['wall_s']:.0%}" for part in parts),
        )


def main() -> None:
    """Runs the command line."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usable = len(os.sched_getaffinity(0))
    counts = [count for count in (16, 8, 4, 2, 1) if count <= usable]
    parser.add_argument("--out", type=Path, help="folder of results")
    parser.add_argument("--piece", nargs="+", choices=PIECES, default=list(PIECES))
    parser.add_argument("--minutes", type=float, default=5.0, help="for each piece, at most")
    parser.add_argument("--cores", nargs="+", type=int, default=counts, help="and workers")
    parser.add_argument("--tests", type=Path, default=HERE.parent / "tests", help="folder of tests")
    parser.add_argument("--list", action="store_true", help="name the pieces, run nothing")
    parser.add_argument("--show", action="store_true", help="print what is there, run nothing")
    options = parser.parse_args()
    if options.list:
        print(*(f"{name}: {piece.__doc__}" for name, piece in PIECES.items()), sep="\n")
        return
    if options.out is None:
        parser.error("where to? --out FOLDER")
    options.out = options.out.resolve()
    if options.show:
        print(*show(options.out), sep="\n")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    options.cores.sort(reverse=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # and so what is running
    for piece in options.piece:
        run(piece, options, begin + 60 * options.minutes)
        begin = time.monotonic()


if __name__ == "__main__":
    main()
