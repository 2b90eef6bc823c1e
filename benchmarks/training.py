"""Whole training runs: the wall clock for a number of steps, and where the time goes.

    pip install 'shmvec[bench,examples]' envpool         # EnvPool is left out where it is missing
    python benchmarks/training.py                        # all runs
    python benchmarks/training.py --run cheetah --threads 1 2 1,2 --system sync ours rollout
    python benchmarks/training.py --run pong --num-envs 128 --steps 65536 --device cuda
    python benchmarks/training.py tune CartPole-v1 --num-envs 8
    python benchmarks/training.py tune my_env.py:MyEnv --num-envs 16 --kwargs '{"level": 3}'

PPO has the shape and the wrapped envs of CleanRL's single-file scripts: it collects with all envs
and learns by turns. DQN and SAC have one env, or --num-envs, and a learner that computes between
steps. The envs of "dqn-1ms" are CartPoles that compute for a millisecond.

The contenders are SyncVectorEnv, AsyncVectorEnv, ShmVectorEnv, ShmVectorEnv with rollouts (workers
write where the learner reads), shmvec's Pipeline (some envs step while the policy computes) and
EnvPool's C++ envs, if it has the env: bare, and HalfCheetah also with Gymnasium's vector wrappers
in place of the envs' own. DQN and SAC begin a step, learn, and then take its results; "waits" means
that they call step() before they learn. "Replay" learns from a shmvec.Replay of as many steps; the
others learn from copies. All learn the same, except for the Pipeline, whose policy is asked about
some envs at a time, and Replay, which draws other batches.

Each contender has its own process, with torch and its envs loaded. They take turns; a turn is a
whole training run, from the same seed. The clock starts after the first reset; benchmarks/start.py
measures starts. For each contender the table has the median wall clock and its spread, (largest -
smallest) / median; the median ratio to SyncVectorEnv and AsyncVectorEnv of the same round; the time
spent in the envs, in the policy, learning, and handling data; and CPU-seconds of the learner's main
thread, of its other threads (which include EnvPool's) and of workers, divided by the wall clock.
"return" is the mean over the last quarter of the episodes. "curve" is a digest of all episodes'
returns and the final sum of the weights, in the first turn. (Later ones differ if wrappers go on
normalising.) If runs on the same envs with the same number of threads differ in any turn, the
script fails. --seconds limits each kind of run: if its rounds take longer, there are fewer.

--device is the device of PPO's networks and their data. On a GPU, sums may be added in another
order in each run, so different curves are no failure. Results of other runs, systems and devices
stay in --json's file, with all returns of first turns; it is written after each turn.

--threads is the number of torch's threads within an operation: "1,2" is 1 while PPO collects and 2
while it learns. Other numbers of threads add in another order, and learn something else in the end.

tune finds the best workers and threads for an env whose learner uses the same cores. PPO trains
with SyncVectorEnv and the candidates by turns, in slices, in one run: numbers of workers, each with
several numbers of threads while it collects and while it learns, and wait policies for the best of
these. Collecting and learning alternate, so workers and the learner's threads need the same cores
at different times; threads that spin when they have no work (OpenMP's) take cores from the others.
A candidate is preferred to a simpler one only if it is more than 3 % faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import gymnasium as gym
import torch
from gymnasium.vector import SyncVectorEnv
from harness import (
    WORKLOADS,
    Apart,
    Row,
    arguments,
    cartpole,
    cheetah,
    clipped,
    cpu_s,
    heading,
    merged,
    pong,
    read_rows,
    slow_cartpole,
    write_results,
)
from learner import BUFFER, DQN, PARTS, PPO, SAC, Learner, PixelDQN, Recipe, Threads

import shmvec
from shmvec._commands.measuring import (
    MIN_SPEEDUP,
    EnvFn,
    Progress,
    Slice,
    describe_machine,
    machine,
    race,
    simplest,
    spread,
    table_line,
    turn_orders,
)
from shmvec._cores import WAIT_POLICIES, descendant_ids, usable_cores
from shmvec._named import find_env

# ---- runs ----------------------------------------------------------------------------------------


def recorded_cheetah() -> gym.Env[Any, Any]:
    """HalfCheetah as CleanRL's sac_continuous_action.py wraps it."""
    return gym.wrappers.RecordEpisodeStatistics(WORKLOADS["HalfCheetah-v5"].make())


class Run(NamedTuple):
    """A kind of training run.

    Attributes:
        make: Makes one env.
        steps: Number of steps of all envs.
        recipe: A Recipe for PPO, else a class of learner.py.
        workload: The workload that knows what has to be installed.
        task: EnvPool's name of the env; empty if it has none.
        envs: Number of envs, unless the recipe has it.
    """

    make: EnvFn
    steps: int
    recipe: Any
    workload: str
    task: str
    envs: int = 1

    @property
    def ppo(self) -> bool:
        """Whether the learner is PPO."""
        return isinstance(self.recipe, Recipe)

    @property
    def num_envs(self) -> int:
        """Number of envs."""
        return self.recipe.num_envs if self.ppo else self.envs

    def with_envs(self, num_envs: int | None) -> Run:
        """The same run with another number of envs; None: with its own."""
        if num_envs is None:
            return self
        recipe = replace(self.recipe, num_envs=num_envs) if self.ppo else self.recipe
        return self._replace(recipe=recipe, envs=num_envs)


_CHEETAH = Recipe(num_envs=16, epochs=10, minibatches=32, learning_rate=3e-4, entropy=0.0)
_LARGE = replace(_CHEETAH, minibatches=4)  # the same, in larger minibatches

RUNS = {
    "cartpole": Run(cartpole, 16_384, Recipe(), "CartPole-v1", "CartPole-v1"),
    "cheetah": Run(cheetah, 8_192, _CHEETAH, "HalfCheetah-v5", "HalfCheetah-v4"),
    "cheetah-large": Run(cheetah, 16_384, _LARGE, "HalfCheetah-v5", "HalfCheetah-v4"),
    "pong": Run(pong, 1_024, Recipe(), "ALE/Pong-v5", "Pong-v5"),
    "dqn": Run(cartpole, 6_000, DQN, "CartPole-v1", "CartPole-v1"),
    "dqn-1ms": Run(slow_cartpole, 6_000, DQN, "CartPole-v1", "", envs=8),
    "dqn-pong": Run(pong, 2_000, PixelDQN, "ALE/Pong-v5", "Pong-v5"),
    "sac": Run(recorded_cheetah, 400, SAC, "HalfCheetah-v5", "HalfCheetah-v4"),
}

NAMES = {
    "sync": "SyncVectorEnv",
    "async": "AsyncVectorEnv",
    "async-waits": "AsyncVectorEnv, waits",
    "ours": "ShmVectorEnv",
    "ours-waits": "ShmVectorEnv, waits",
    "rollout": "ShmVectorEnv, rollouts",
    "pipeline": "ShmVectorEnv, Pipeline",
    "replay": "ShmVectorEnv, Replay",
    "envpool": "EnvPool (C++)",
    "envpool-normalised": "EnvPool (C++), normalised",
}


def systems(run: Run) -> Iterator[str]:
    """Yields the systems that have such a run."""
    for name in NAMES:
        if name == "envpool-normalised" and run.make is not cheetah:
            continue
        if name.startswith("envpool") and not run.task:
            continue
        of_ppo, of_others = name in ("rollout", "pipeline"), name.endswith(("-waits", "replay"))
        if not (of_others if run.ppo else of_ppo):
            yield name


def vector_env(system: str, run: Run, options: dict[str, Any]) -> Any:
    """Makes the envs."""
    fns = [run.make] * run.num_envs
    if system.startswith("envpool"):
        import envpool

        envs = _EnvPool(envpool.make_gymnasium(run.task, num_envs=run.num_envs, seed=1))
        return normalised(envs) if system == "envpool-normalised" else envs
    if system == "sync":
        return SyncVectorEnv(fns)
    if system.startswith("async"):
        return gym.vector.AsyncVectorEnv(fns)
    return shmvec.ShmVectorEnv(fns, **options)


def normalised(envs: Any) -> Any:
    """Wraps a vector env as ``cheetah`` wraps an env, by Gymnasium's vector wrappers."""
    from gymnasium.wrappers import vector

    envs = vector.NormalizeObservation(vector.ClipAction(vector.RecordEpisodeStatistics(envs)))
    envs = vector.TransformObservation(envs, clipped)
    return vector.TransformReward(vector.NormalizeReward(envs), clipped)


class _EnvPool(gym.vector.VectorEnv[Any, Any, Any]):
    """Adds to EnvPool what Gymnasium's vector envs have besides."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self.num_envs = envs.config["num_envs"]
        self.single_observation_space = envs.observation_space
        self.single_action_space = envs.action_space
        batch = partial(gym.vector.utils.batch_space, n=self.num_envs)
        self.observation_space = batch(envs.observation_space)
        self.action_space = batch(envs.action_space)

    def reset(self, **_: Any) -> Any:
        """Resets all envs; EnvPool takes seeds only in its constructor."""
        return self._envs.reset()[0], {}

    def step(self, actions: Any) -> Any:
        """Steps all envs, with actions of EnvPool's dtype."""
        return *self._envs.step(actions.astype(self.single_action_space.dtype))[:4], {}

    def close_extras(self, **_: Any) -> None:
        """Closes EnvPool."""
        self._envs.close()


class Trainer:
    """A contender: envs, and training runs on them."""

    def __init__(
        self,
        system: str,
        run: Run,
        options: dict[str, Any],
        threads: Threads,
        steps: int,
        device: str,
        seed: int,
    ) -> None:
        """Makes the envs, and warms up."""
        torch.set_num_threads(threads.learning)
        self._envs = vector_env(system, run, options)
        self.close = self._envs.close
        self._run, self._system, self._threads = run, system, threads
        self._device, self._seed, self._steps = device, seed, steps
        self.run(min(steps, run.num_envs * 8))

    def run(self, steps: int | None = None) -> dict[str, Any]:
        """Takes a turn: a whole run."""
        run, system, steps = self._run, self._system, steps or self._steps
        with contextlib.ExitStack() as stack:
            learner: Learner
            if run.ppo:
                kinds = {"rollouts": system == "rollout", "pipeline": system == "pipeline"}
                options: Any = {**kinds, "device": self._device, "threads": self._threads}
                learner = PPO(self._envs, run.recipe, **options)
                iterations = -(-steps // run.recipe.steps)
            else:
                options = {"threads": self._threads.learning, "seed": self._seed}
                options["waits"] = system.startswith(("sync", "envpool")) or "-waits" in system
                if system == "replay":
                    replay = shmvec.Replay(self._envs, BUFFER, seed=self._seed)
                    options["replay"] = stack.enter_context(contextlib.closing(replay))
                learner = run.recipe(self._envs, **options)
                iterations = -(-steps // run.num_envs)
            return _timed(learner, iterations)


def _timed(learner: Learner, iterations: int) -> dict[str, Any]:
    """Makes iterations; returns times of parts and CPU times of threads and workers."""
    workers = descendant_ids(os.getpid())
    begin, before = time.perf_counter(), _cpu(workers)
    for _ in range(iterations):
        learner.iterate()
    wall, after = time.perf_counter() - begin, _cpu(workers)
    returns = learner.returns
    return {
        "wall_s": wall,
        **{f"{part}_s": seconds for part, seconds in learner.clock.seconds.items()},
        **{f"{who}_cpu_s": after[who] - before[who] for who in after},
        "steps": learner.steps,
        "episodes": len(returns),
        "return": statistics.fmean(returns[-1 - len(returns) // 4 :] or [0.0]),
        "returns": returns,
        "curve": f"{learner.digest()} {learner.weights():.9g}",
    }


def _cpu(workers: Sequence[int]) -> dict[str, float]:
    """CPU-seconds of this thread, of the others of its process, and of workers."""
    pid, thread = os.getpid(), threading.get_native_id()
    main = int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) * 1e-9
    return {"main": main, "threads": cpu_s([pid]) - main, "workers": cpu_s(workers)}


def measure(
    name: str,
    options: argparse.Namespace,
    left_out: dict[str, str],
    keep: Callable[[list[Row]], object],
) -> list[Row]:
    """Measures one kind of run by turns; calls ``keep`` with all rows after each turn."""
    run = RUNS[name].with_envs(options.num_envs)
    steps = options.steps or run.steps
    device = options.device if run.ppo else "cpu"
    running: dict[tuple[str, Threads, str], Apart] = {}
    with contextlib.ExitStack() as stack:
        for system, threads in product(options.system, options.threads):
            if system not in systems(run):
                continue
            for variant in options.ours if NAMES[system].startswith("ShmVectorEnv") else [{}]:
                start = partial(Trainer, system, run, variant, threads, steps, device, options.seed)
                process = stack.enter_context(contextlib.closing(Apart(start, patience=3600)))
                shown = " ".join(f"{option}={value}" for option, value in variant.items())
                running[system, threads, shown] = process
        for key, process in list(running.items()):
            try:
                process.ready()
            except ImportError as error:
                left_out[NAMES[key[0]]] = str(error)
                del running[key]
        runs: dict[Any, list[dict[str, Any]]] = {key: [] for key in running}
        begin = time.perf_counter()
        for number, order in enumerate(turn_orders(running, options.rounds)):
            spent = time.perf_counter() - begin
            if number and options.seconds and spent * (number + 1) / number > options.seconds:
                break
            for key in order:
                runs[key].append(running[key].run())
                keep(rows(name, run, device, runs))
    return rows(name, run, device, runs)


def rows(name: str, run: Run, device: str, runs: dict[Any, list[dict[str, Any]]]) -> list[Row]:
    """A row for each contender that has had a turn."""

    def medians(results: Sequence[dict[str, Any]]) -> dict[str, float]:
        numbers = [key for key, value in results[0].items() if isinstance(value, int | float)]
        return {key: statistics.median(one[key] for one in results) for key in numbers}

    def ratio(system: str, threads: Threads, results: Any) -> float | None:
        """How many times faster than another one in the same round."""
        rounds = zip(runs.get((system, threads, ""), []), results, strict=False)
        ratios = [other["wall_s"] / one["wall_s"] for other, one in rounds]
        return statistics.median(ratios) if ratios else None

    return [
        {
            "run": name,
            "num_envs": run.num_envs,
            "device": device,
            "system": NAMES[system],
            "options": variant,
            "threads": str(threads),
            **medians(results),
            "rounds": len(results),
            "spread": spread([one["wall_s"] for one in results]),
            "times_sync": ratio("sync", threads, results),
            "times_async": ratio("async", threads, results),
            "curves": [one["curve"] for one in results],
            "returns": [round(each, 1) for each in results[0]["returns"]],
        }
        for (system, threads, variant), results in runs.items()
        if results
    ]


def disagreements(rows: Sequence[Row]) -> Iterator[str]:
    """Describes runs from the same seed that did not learn the same in some turn."""
    cells: dict[Any, dict[str, tuple[str, ...]]] = {}
    for row in rows:
        others = NAMES["envpool"], NAMES["pipeline"], NAMES["replay"]
        if not row["system"].startswith(others):
            name = f"{row['system']} {row['options']}".strip()
            cells.setdefault((row["run"], row["threads"]), {})[name] = tuple(row["curves"])
    for (run, threads), curves in cells.items():
        if len(set(curves.values())) > 1:
            yield f"{run}, {threads} threads: not the same curve: {curves}"


CELL = ("run", "num_envs", "device", "system", "options", "threads")
HEAD = ["run", "envs", "system", "threads", "wall, s", "spread", "runs", "× Sync", "× Async"]
HEAD += [*PARTS, "main", "threads", "workers", "episodes", "return", "curve"]


def row_line(row: Row) -> str:
    """A row of the table."""
    ratios = [row[f"times_{name}"] for name in ("sync", "async")]
    system = f"{row['system']} {row['options']}".strip()
    return table_line(
        *(row["run"], row["num_envs"], system, row["threads"]),
        *(f"{row['wall_s']:.2f}", f"{row['spread']:.0%}", row["rounds"]),
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        *(f"{row[part + '_s']:.2f}" for part in PARTS),
        *(f"{row[f'{who}_cpu_s'] / row['wall_s']:.2f}" for who in ("main", "threads", "workers")),
        *(f"{row['episodes']:.0f}", f"{row['return']:.1f}", row["curves"][0]),
    )


def _threads(text: str) -> Threads:
    """An argparse type: one number, or two."""
    return Threads(*(int(part) for part in (text.split(",") * 2)[:2]))


def compare() -> None:
    """Runs the command line without a subcommand."""
    parser = arguments(__doc__, seconds=0.0)
    parser.add_argument("--run", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--system", nargs="+", choices=NAMES, default=list(NAMES))
    several: Any = {"nargs": "+", "type": _threads, "default": [Threads()]}
    parser.add_argument("--threads", metavar="T", help="torch's", **several)
    several |= {"type": json.loads, "default": [{}]}
    options_help = 'options of ShmVectorEnv to try, each as {"num_workers": 1}'
    parser.add_argument("--ours", metavar="JSON", help=options_help, **several)
    parser.add_argument("--num-envs", type=int, help="(default: by the run)")
    parser.add_argument("--device", default="cpu", help="torch's name of it")
    parser.add_argument("--steps", type=int, help="of a run (default: by the run)")
    parser.add_argument("--seed", type=int, default=1, help="of DQN and SAC")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    setup = {**machine(), "torch": torch.__version__}
    if options.device.startswith("cuda"):
        setup["gpu"] = torch.cuda.get_device_name(options.device)
    old_rows = read_rows(options.json, "training", setup)
    print(f"{describe_machine(setup)}, torch {setup['torch']}, {setup.get('gpu', 'no GPU')}\n")
    print(heading(*HEAD), flush=True)
    found: list[Row] = []
    left_out: dict[str, str] = {}

    def keep(new: list[Row]) -> None:
        everything = merged(old_rows, [*found, *new], CELL)
        results = {"machine": setup, "left_out": left_out, "training": everything}
        write_results(options.json, results)

    for name in options.run:
        if missing := WORKLOADS[RUNS[name].workload].missing():
            left_out[name] = f"{' and '.join(missing)} not installed"
            continue
        found += measure(name, options, left_out, keep)
        print("\n".join(row_line(row) for row in found if row["run"] == name), flush=True)
        keep([])
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    if complaints := list(disagreements(found)):
        print("\n".join(complaints))
        sys.exit(options.device == "cpu")


# ---- tune ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """A setting that is measured; simpler ones come first."""

    system: str
    threads: Threads
    num_workers: int | None = None
    wait_policy: str = WAIT_POLICIES[0]

    def __str__(self) -> str:
        """The text of a progress line."""
        return f"{self.system}, {self.num_workers} workers, {self.wait_policy}, {self.threads}"


class TrainingRun:
    """A contender whose training run continues in each turn."""

    def __init__(self, make: EnvFn, recipe: Recipe, candidate: _Candidate) -> None:
        """Begins the run."""
        fns = [make] * recipe.num_envs
        settings = {"num_workers": candidate.num_workers, "wait_policy": candidate.wait_policy}
        sync = candidate.system == NAMES["sync"]
        envs = SyncVectorEnv(fns) if sync else shmvec.ShmVectorEnv(fns, **settings)
        self.close = envs.close
        self.recipe = recipe
        try:
            self.training = PPO(envs, recipe, threads=candidate.threads)
        except BaseException:
            envs.close()
            raise

    def run(self, seconds: float) -> Slice:
        """Takes a turn of at least ``seconds``."""
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
        seconds: Time for which each candidate is measured.
        progress: A stream for progress lines.

    Returns:
        A dict that can be written as JSON: "machine", "recipe", "rows", one for each candidate,
        and "best", one of these.
    """
    cores = usable_cores()
    recipe = Recipe(num_envs=num_envs, num_steps=32)
    counts = {0, 1, cores - 1, 2 * cores} - {min(cores, num_envs)}
    workers = [None, *sorted(count for count in counts if 0 <= count <= num_envs)]
    threads = [Threads()] + [Threads(1, cores), Threads(cores, cores)] * (cores > 1)
    sync = [_Candidate(NAMES["sync"], each) for each in threads]
    ours = [_Candidate(NAMES["ours"], each, count) for count, each in product(workers, threads)]
    say = Progress(progress, f"training with {num_envs} envs")
    rows = train_candidates(make, recipe, sync + ours, seconds, say)
    best = simplest(rows[len(sync) :], MIN_SPEEDUP)
    candidate = (sync + ours)[rows.index(best)]
    if candidate.num_workers != 0:
        # The winner runs again with them, so that all that is compared ran at the same time.
        policies = [replace(candidate, wait_policy=policy) for policy in WAIT_POLICIES]
        again = train_candidates(make, recipe, sync + policies, seconds, say)[len(sync) :]
        rows = [row for row in rows if row is not best] + again
        best = simplest(again, MIN_SPEEDUP)
    say.done()
    return {"machine": machine(), "recipe": asdict(recipe), "rows": rows, "best": best}


def train_candidates(
    make: EnvFn, recipe: Recipe, candidates: Sequence[_Candidate], seconds: float, say: Progress
) -> list[Row]:
    """Trains with candidates by turns."""
    running: dict[Any, Any] = {}
    starts = {candidate: partial(TrainingRun, make, recipe, candidate) for candidate in candidates}
    results = race(starts, seconds, say=say, started=running.update)
    # SyncVectorEnv with its best number of threads, which may be more than ours.
    sync = max(
        (result for candidate, result in results.items() if candidate.system == NAMES["sync"]),
        key=lambda result: result.median.steps_per_s,
    )
    rows = []
    for candidate, result in results.items():
        spent = running[candidate].training.clock.seconds
        batch_us, rate, _ = result.median
        row = {**asdict(candidate), "batch_us": batch_us, "spread": result.spread}
        row |= {"steps_per_s": rate, "times_sync": result.ratio(sync)}
        rows.append({**row, **{part: spent[part] / sum(spent.values()) for part in PARTS}})
    return rows


def report(results: dict[str, Any], code: str) -> Iterator[str]:
    """Yields lines on the results of :func:`tune`: the machine, the table, and code to paste."""
    recipe, sync = results["recipe"], NAMES["sync"]
    yield f"{describe_machine(results['machine'])}\n"
    yield (
        f"PPO, {recipe['num_envs']} envs x {recipe['num_steps']} steps, {recipe['epochs']} epochs "
        f"of {recipe['minibatches']} minibatches.\n"
    )
    head = "workers", "policy", "torch's threads", "a step of all, µs", "spread", "steps/s"
    yield heading(*head, "× Sync", *PARTS)
    for row in results["rows"]:
        ours = row["system"] != sync
        workers = "one a core" if row["num_workers"] is None else str(row["num_workers"])
        yield table_line(
            workers if ours else sync,
            row["wait_policy"] if ours and row["num_workers"] != 0 else "",
            Threads(**row["threads"]),
            *(f"{row['batch_us']:,.0f}", f"{row['spread']:.0%}", f"{row['steps_per_s']:,.0f}"),
            f"{row['times_sync']:.2f}",
            *(f"{row[part]:.0%}" for part in PARTS),
        )
    best, cores = results["best"], results["machine"]["usable_cores"]
    usual = asdict(_Candidate(NAMES["ours"], Threads(cores, cores))).items()
    (defaults,) = (row for row in results["rows"] if usual <= row.items())
    yield (
        f"\nBest, {best['times_sync']:.2f} × {sync}, "
        f"{best['times_sync'] / defaults['times_sync']:.2f} × "
        f"the defaults of shmvec and torch ({cores} threads):\n"
    )
    threads, count = Threads(**best["threads"]), best["num_workers"]
    yield f"import torch\n{code}"
    if threads.collecting == threads.learning:
        yield f"torch.set_num_threads({threads.collecting})"
    else:
        yield f"# before you collect: torch.set_num_threads({threads.collecting})"
        yield f"# before you learn: torch.set_num_threads({threads.learning})"
    chosen = "" if count is None else f", num_workers={count}"
    if best["wait_policy"] != WAIT_POLICIES[0]:
        chosen += f", wait_policy={best['wait_policy']!r}"
    yield f"envs = shmvec.ShmVectorEnv([make_env] * {recipe['num_envs']}{chosen})"
    if best["times_sync"] < 1:
        yield f"# {sync} is faster here: workers are worth {best['times_sync']:.2f} of it"


def find_best(rest: Sequence[str]) -> None:
    """Runs the command line of ``tune``."""
    parser = arguments(__doc__, nums_envs=[8, 32, 128], seconds=1.0)
    parser.add_argument("env", metavar="ENV", help="as of python -m shmvec tune")
    parser.add_argument("--kwargs", type=json.loads, default={}, metavar="JSON", help="of the env")
    options = parser.parse_args(rest)
    make, code = find_env(options.env, options.kwargs)
    found = []
    for num_envs in options.num_envs:
        results = tune(make, num_envs, seconds=options.seconds, progress=sys.stderr)
        print(*report(results, code), sep="\n")
        found.append(results)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["tune"]:
        find_best(sys.argv[2:])
    else:
        compare()
