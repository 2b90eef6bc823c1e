"""Finds the best workers and threads for an env whose learner shares the cores with it.

PPO trains small networks by torch with ShmVectorEnv, the candidates by turns, in slices, in one
run, SyncVectorEnv beside them: numbers of workers, each with several numbers of threads that torch
uses within an operation while it collects and while it learns. Collecting and learning alternate,
so workers and the learner's threads want the same cores at different times; threads that spin for
more work when theirs is done (OpenMP's) want them at the wrong one. A candidate must be more than
3 % faster than a simpler one to be preferred to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any, TextIO

from gymnasium.vector import SyncVectorEnv

from shmvec._commands.learner import PARTS, Recipe, Threads, Training
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
from shmvec._shared.scheduling import usable_cores
from shmvec.vector_env import ShmVectorEnv

__all__ = ["report", "tune"]

_ROUNDS = 5
_SYNC = "SyncVectorEnv"


class _Trained:
    """A contender: a training run that goes on in each turn."""

    def __init__(self, make: EnvFn, recipe: Recipe, workers: int | None, threads: Threads) -> None:
        fns = [make] * recipe.num_envs
        envs: Any = SyncVectorEnv(fns) if workers == -1 else ShmVectorEnv(fns, num_workers=workers)
        self.close = envs.close
        self._recipe = recipe
        try:
            self.training = Training(envs, recipe, threads=threads)
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
        batches = count * self._recipe.num_steps
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
    say = Progress(progress, f"training with {num_envs} envs")
    start = partial(_Trained, make, recipe)
    keys = [(-1, each) for each in threads] + list(product(workers, threads))
    starts = {key: partial(start, *key) for key in keys}
    running: dict[Any, Any] = {}
    results = race(starts, seconds, _ROUNDS, say=say, started=running.update)
    say.done()
    # The best that it can do with each: SyncVectorEnv may have more threads than we.
    sync = max((results[-1, each] for each in threads), key=lambda one: one.median.steps_per_s)
    rows = []
    for (count, each), result in results.items():
        spent = running[count, each].training.clock.seconds
        rows.append(
            {
                "system": _SYNC if count == -1 else "ShmVectorEnv",
                "num_workers": None if count == -1 else count,
                "threads": asdict(each),
                "batch_us": result.median.batch_us,
                "spread": result.spread,
                "steps_per_s": result.median.steps_per_s,
                "times_sync": result.ratio(sync),
                **{part: spent[part] / sum(spent.values()) for part in PARTS},
            }
        )
    ours = [row for row in rows if row["system"] != _SYNC]
    best = simplest(ours, SIMPLER)
    return {"machine": machine(), "recipe": asdict(recipe), "rows": rows, "best": best}


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
    head = ["workers", "torch's threads", "a step of all, µs", "spread", "steps/s", "× Sync"]
    yield line(*head, *PARTS)
    yield "|" + "--:|" * (len(head) + len(PARTS))
    for row in results["rows"]:
        workers = "one a core" if row["num_workers"] is None else str(row["num_workers"])
        yield line(
            _SYNC if row["system"] == _SYNC else workers,
            Threads(**row["threads"]),
            f"{row['batch_us']:,.0f}",
            f"{row['spread']:.0%}",
            f"{row['steps_per_s']:,.0f}",
            f"{row['times_sync']:.2f}",
            *(f"{row[part]:.0%}" for part in PARTS),
        )
    best = results["best"]
    yield ""
    yield "Best:"
    yield ""
    yield code
    collecting, learning = best["threads"]["collecting"], best["threads"]["learning"]
    if collecting == learning:
        yield f"torch.set_num_threads({collecting})"
    else:
        yield f"# before you collect: torch.set_num_threads({collecting})"
        yield f"# before you learn: torch.set_num_threads({learning})"
    workers = "" if best["num_workers"] is None else f", num_workers={best['num_workers']}"
    yield f"envs = shmvec.ShmVectorEnv([make_env] * {recipe['num_envs']}{workers})"
    if best["times_sync"] < 1:
        yield f"# SyncVectorEnv is faster here: workers are worth {best['times_sync']:.2f} of it"
