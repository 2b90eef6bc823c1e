"""Finds the best workers and threads for an env whose learner shares the cores with it.

    python benchmarks/tune_training.py CartPole-v1 --num-envs 8
    python benchmarks/tune_training.py my_env.py:MyEnv --num-envs 16 --kwargs '{"level": 3}'

PPO trains small networks by torch with ShmVectorEnv, the candidates by turns, in slices, in one
run, SyncVectorEnv beside them: numbers of workers, each with several numbers of threads that torch
uses within an operation while it collects and while it learns, and for the best of these the wait
policies. Collecting and learning alternate, so workers and the learner's threads want the same
cores at different times; threads that spin for more work when theirs is done (OpenMP's) want them
at the wrong one. A candidate must be more than 3 % faster than a simpler one to be preferred to it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TextIO

from gymnasium.vector import SyncVectorEnv
from learner import PARTS, Recipe, Threads, Training

from shmvec._commands.measuring import (
    SIMPLER,
    EnvFn,
    Progress,
    Slice,
    described,
    line,
    machine,
    race,
    simplest,
)
from shmvec._cores import WAIT_POLICIES, usable_cores
from shmvec._named import find_env
from shmvec.vector_env import ShmVectorEnv

_SYNC = "SyncVectorEnv"
_OURS = "ShmVectorEnv"


@dataclass(frozen=True)
class _Candidate:
    """What is tried; the first that are made are the simplest."""

    system: str
    threads: Threads
    num_workers: int | None = None
    wait_policy: str = WAIT_POLICIES[0]

    def envs(self, make: EnvFn, num_envs: int) -> Any:
        fns = [make] * num_envs
        if self.system == _SYNC:
            return SyncVectorEnv(fns)
        return ShmVectorEnv(fns, num_workers=self.num_workers, wait_policy=self.wait_policy)

    def __str__(self) -> str:
        """For the line that says what is being done."""
        return f"{self.system}, {self.num_workers} workers, {self.wait_policy}, {self.threads}"


class Trained:
    """A contender: a training run that goes on in each turn."""

    def __init__(self, make: EnvFn, recipe: Recipe, candidate: _Candidate) -> None:
        """Begins it."""
        envs = candidate.envs(make, recipe.num_envs)
        self.close = envs.close
        self.recipe = recipe
        try:
            self.training = Training(envs, recipe, threads=candidate.threads)
        except BaseException:
            envs.close()
            raise

    def run(self, seconds: float) -> Slice:
        """One turn, of at least so many seconds."""
        steps, count = self.training.steps, 0
        self.training.clock.resume()
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds or not count:
            self.training.iterate()
            count += 1
        batches = count * self.recipe.num_steps
        return Slice(1e6 * elapsed / batches, (self.training.steps - steps) / elapsed)


def tune(
    make: EnvFn, num_envs: int, *, seconds: float = 1.0, progress: TextIO | None = None
) -> dict[str, Any]:
    """Trains with each number of workers and threads, by turns.

    Args:
        make: Makes one env, with observations in a Box of one dimension, or images (c, 84, 84).
        num_envs: Number of envs.
        seconds: How long each candidate is measured.
        progress: Where to say what is being done.

    Returns:
        A dict that can be written as JSON: "machine", "recipe", "rows", one a candidate, and
        "best", one of these.
    """
    cores = usable_cores()
    recipe = Recipe(num_envs=num_envs, num_steps=32)
    counts = {0, 1, cores - 1, 2 * cores} - {min(cores, num_envs)}
    workers = [None, *sorted(count for count in counts if 0 <= count <= num_envs)]
    threads = [Threads()] + [Threads(1, cores), Threads(cores, cores)] * (cores > 1)
    sync = [_Candidate(_SYNC, each) for each in threads]
    ours = [_Candidate(_OURS, each, count) for count, each in product(workers, threads)]
    say = Progress(progress, f"training with {num_envs} envs")
    rows = measure(make, recipe, sync + ours, seconds, say)
    best = simplest(rows[len(sync) :], SIMPLER)
    candidate = (sync + ours)[rows.index(best)]
    if candidate.num_workers != 0:
        # The winner runs again beside them: what is compared was measured at the same time.
        policies = [replace(candidate, wait_policy=policy) for policy in WAIT_POLICIES]
        again = measure(make, recipe, sync + policies, seconds, say)[len(sync) :]
        rows = [row for row in rows if row is not best] + again
        best = simplest(again, SIMPLER)
    say.done()
    return {"machine": machine(), "recipe": asdict(recipe), "rows": rows, "best": best}


def measure(
    make: EnvFn, recipe: Recipe, candidates: Sequence[_Candidate], seconds: float, say: Progress
) -> list[dict[str, Any]]:
    """Trains with candidates by turns."""
    running: dict[Any, Any] = {}
    starts = {candidate: partial(Trained, make, recipe, candidate) for candidate in candidates}
    results = race(starts, seconds, say=say, started=running.update)
    # The best that it can do with each: SyncVectorEnv may have more threads than we.
    sync = max(
        (result for candidate, result in results.items() if candidate.system == _SYNC),
        key=lambda result: result.median.steps_per_s,
    )
    rows = []
    for candidate, result in results.items():
        spent = running[candidate].training.clock.seconds
        rows.append(
            {
                **asdict(candidate),
                "batch_us": result.median.batch_us,
                "spread": result.spread,
                "steps_per_s": result.median.steps_per_s,
                "times_sync": result.ratio(sync),
                **{part: spent[part] / sum(spent.values()) for part in PARTS},
            }
        )
    return rows


def report(results: dict[str, Any], code: str) -> str:
    """The results of :func:`tune`: what was measured, the table, and code to paste."""
    return "\n".join(_lines(results, code))


def _lines(results: dict[str, Any], code: str) -> Iterator[str]:
    recipe = results["recipe"]
    yield described(results["machine"])
    yield ""
    yield (
        f"PPO, {recipe['num_envs']} envs x {recipe['num_steps']} steps, {recipe['epochs']} epochs "
        f"of {recipe['minibatches']} minibatches."
    )
    yield ""
    head = ["workers", "policy", "torch's threads", "a step of all, µs", "spread", "steps/s"]
    head += ["× Sync", *PARTS]
    yield line(*head)
    yield "|" + "--:|" * len(head)
    for row in results["rows"]:
        ours = row["system"] != _SYNC
        workers = "one a core" if row["num_workers"] is None else str(row["num_workers"])
        yield line(
            workers if ours else _SYNC,
            row["wait_policy"] if ours and row["num_workers"] != 0 else "",
            Threads(**row["threads"]),
            f"{row['batch_us']:,.0f}",
            f"{row['spread']:.0%}",
            f"{row['steps_per_s']:,.0f}",
            f"{row['times_sync']:.2f}",
            *(f"{row[part]:.0%}" for part in PARTS),
        )
    best = results["best"]
    threads, count = Threads(**best["threads"]), best["num_workers"]
    arguments = "" if count is None else f", num_workers={count}"
    if best["wait_policy"] != WAIT_POLICIES[0]:
        arguments += f", wait_policy={best['wait_policy']!r}"
    yield ""
    yield f"Best, {_worth(results)}:"
    yield ""
    yield f"import torch\n{code}"
    if threads.collecting == threads.learning:
        yield f"torch.set_num_threads({threads.collecting})"
    else:
        yield f"# before you collect: torch.set_num_threads({threads.collecting})"
        yield f"# before you learn: torch.set_num_threads({threads.learning})"
    yield f"envs = shmvec.ShmVectorEnv([make_env] * {recipe['num_envs']}{arguments})"
    if best["times_sync"] < 1:
        yield f"# SyncVectorEnv is faster here: workers are worth {best['times_sync']:.2f} of it"


def _worth(results: dict[str, Any]) -> str:
    """How much faster the best is than what one has without it: a line."""
    best, cores = results["best"], results["machine"]["usable_cores"]
    usual = _Candidate(_OURS, Threads(cores, cores))
    (row,) = (
        row
        for row in results["rows"]
        if all(row[name] == value for name, value in asdict(usual).items())
    )
    return (
        f"{best['times_sync']:.2f} × SyncVectorEnv, {best['times_sync'] / row['times_sync']:.2f} × "
        f"the defaults of shmvec and torch ({cores} threads)"
    )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("env", metavar="ENV", help="as of python -m shmvec tune")
    parser.add_argument("--kwargs", type=json.loads, default={}, metavar="JSON", help="of the env")
    parser.add_argument("--num-envs", nargs="+", type=int, default=[8, 32, 128], metavar="N")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each candidate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    options = parser.parse_args()
    make, code = find_env(options.env, options.kwargs)
    found = []
    for num_envs in options.num_envs:
        results = tune(make, num_envs, seconds=options.seconds, progress=sys.stderr)
        print(report(results, code))
        found.append(results)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
