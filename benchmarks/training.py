"""Whole training runs: wall clock to so many steps, and where the time goes.

    pip install 'shmvec[bench,examples]' envpool         # EnvPool is left out where it is missing
    python benchmarks/training.py                        # all runs
    python benchmarks/training.py --run cheetah --threads 1 2 1,2 --system sync ours rollout
    python benchmarks/training.py --run pong --num-envs 128 --steps 65536 --device cuda

PPO in the shape of CleanRL's single-file scripts, on envs wrapped as those do it: collect with all
envs, then learn, by turns. DQN and SAC have one env, or --num-envs, and a learner that computes
between steps. The envs of "dqn-1ms" are CartPoles that compute for a millisecond.
The contenders are SyncVectorEnv, AsyncVectorEnv, ShmVectorEnv, ShmVectorEnv with rollouts (workers
write where the learner reads), shmvec's Pipeline (some envs step while the policy computes; its
policy is asked about some at a time, so its curve is another) and EnvPool's C++ envs, where it has
the env: bare, and HalfCheetah also with Gymnasium's vector wrappers in place of the envs' own. DQN
and SAC begin a step, learn, and take its results then; "waits" means that they call step() before
they learn instead. What they learn from is the same; but for "Replay", that draws it from a
shmvec.Replay of as many steps, where the others copy: its draws, and so its curve, are others.

Each contender is a process of its own, with torch and its envs loaded. They take turns; a turn is a
whole training run, from the same seed. The clock starts after the first reset: what starting costs,
benchmarks/start.py measures. For each: the median wall clock and its spread, (largest - smallest) /
median; the median ratio to SyncVectorEnv and AsyncVectorEnv of the same round; the time spent in
the envs, in the policy, learning, and handling data; and CPU-seconds used by the learner's main
thread, by its other threads (EnvPool's envs are among them) and by workers, by wall clock: their
shares of a core. "return" is the mean over the last quarter of the episodes. "curve" is a digest of
all episodes' returns and the sum of the weights at the end, of the first turn. (Later ones differ
where wrappers go on normalising.) Runs on the same envs with the same number of threads must agree
in every turn: else the script fails.

--device says where PPO's networks are, and what they learn from: on a GPU sums may be added in
another order in each run, and other curves are no failure. What --json's file has of other runs,
systems and devices stays there, with all returns of first turns; it is written after each turn.

--threads says how many threads torch has within an operation: "1,2" is 1 while it collects and 2
while it learns. Other numbers of threads add in another order, and learn something else in the end.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from harness import (
    WORKLOADS,
    Apart,
    Row,
    cartpole,
    cheetah,
    clipped,
    cpu_s,
    merged,
    pong,
    read_rows,
    slow_cartpole,
    write_results,
)
from learner import PARTS, Recipe, Threads, Training
from offpolicy import BUFFER, DQN, SAC, OffPolicy, PixelDQN

import shmvec
from shmvec._commands.measuring import described, line, machine, spread, turns
from shmvec._cores import descendants


def bare_cheetah() -> gym.Env[Any, Any]:
    """HalfCheetah as it is."""
    return WORKLOADS["HalfCheetah-v5"].make()


def recorded_cheetah() -> gym.Env[Any, Any]:
    """HalfCheetah as CleanRL's sac_continuous_action.py wraps it."""
    return gym.wrappers.RecordEpisodeStatistics(bare_cheetah())


class Run:
    """A kind of training run."""

    def __init__(
        self,
        make: Callable[[], gym.Env[Any, Any]],
        steps: int,
        recipe: Any,
        workload: str,
        task: str,
        num_envs: int = 1,
    ) -> None:
        """What is trained on and how.

        Args:
            make: Makes one env.
            steps: How many steps a run makes, of all envs.
            recipe: How it learns: a Recipe for PPO, else a class of offpolicy.py.
            workload: Says what has to be installed.
            task: What EnvPool has; nothing if it has no such env.
            num_envs: Number of envs, unless its recipe says it.
        """
        self.make, self.steps, self.recipe = make, steps, recipe
        self.missing, self.task = WORKLOADS[workload].missing(), task
        self.num_envs = recipe.num_envs if self.ppo else num_envs

    def of(self, num_envs: int | None) -> Run:
        """The same with so many envs."""
        if num_envs is None:
            return self
        changed = copy.copy(self)
        changed.num_envs = num_envs
        if self.ppo:
            changed.recipe = replace(self.recipe, num_envs=num_envs)
        return changed

    @property
    def ppo(self) -> bool:
        """Whether it collects, and then learns."""
        return isinstance(self.recipe, Recipe)


_CHEETAH = Recipe(num_envs=16, epochs=10, minibatches=32, learning_rate=3e-4, entropy=0.0)

RUNS = {
    "cartpole": Run(cartpole, 16_384, Recipe(), "CartPole-v1", "CartPole-v1"),
    "cheetah": Run(cheetah, 8_192, _CHEETAH, "HalfCheetah-v5", "HalfCheetah-v4"),
    "cheetah-large": Run(  # the same, in larger minibatches
        cheetah, 16_384, replace(_CHEETAH, minibatches=4), "HalfCheetah-v5", "HalfCheetah-v4"
    ),
    "pong": Run(pong, 1_024, Recipe(), "ALE/Pong-v5", "Pong-v5"),
    "dqn": Run(cartpole, 6_000, DQN, "CartPole-v1", "CartPole-v1"),
    "dqn-1ms": Run(slow_cartpole, 6_000, DQN, "CartPole-v1", "", num_envs=8),
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
    """Those that have such a run."""
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
        return gym.vector.SyncVectorEnv(fns)
    if system.startswith("async"):
        return gym.vector.AsyncVectorEnv(fns)
    return shmvec.ShmVectorEnv(fns, **options)


def normalised(envs: Any) -> Any:
    """What ``cheetah`` does to an env, done to a vector env by Gymnasium's wrappers of those."""
    from gymnasium.wrappers import vector

    envs = vector.NormalizeObservation(vector.ClipAction(vector.RecordEpisodeStatistics(envs)))
    envs = vector.TransformObservation(envs, clipped)
    return vector.TransformReward(vector.NormalizeReward(envs), clipped)


class _EnvPool(gym.vector.VectorEnv[Any, Any, Any]):
    """EnvPool with what Gymnasium's vector envs have besides."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self.num_envs = envs.config["num_envs"]
        self.single_observation_space = envs.observation_space
        self.single_action_space = envs.action_space
        batch = partial(gym.vector.utils.batch_space, n=self.num_envs)
        self.observation_space = batch(envs.observation_space)
        self.action_space = batch(envs.action_space)
        self._kind = envs.action_space.dtype

    def reset(self, **_: Any) -> Any:
        """Resets all; seeds are given when it is made."""
        return self._envs.reset()[0], {}

    def step(self, actions: Any) -> Any:
        """Steps all, with actions of the dtype that it wants."""
        observations, rewards, terminations, truncations, _ = self._envs.step(
            actions.astype(self._kind)
        )
        return observations, rewards, terminations, truncations, {}

    def close_extras(self, **_: Any) -> None:
        """Ends it."""
        self._envs.close()


def trained(
    envs: Any, run: Run, system: str, threads: Threads, steps: int, device: str, seed: int
) -> dict[str, Any]:
    """One training run."""
    waits = system.endswith("-waits") or system.startswith(("sync", "envpool"))
    training: Training | OffPolicy
    if run.ppo:
        training = Training(
            envs,
            run.recipe,
            rollouts=system == "rollout",
            pipeline=system == "pipeline",
            device=device,
            threads=threads,
        )
        iterations = -(-steps // run.recipe.steps)
    else:
        replay = shmvec.Replay(envs, BUFFER, seed=seed) if system == "replay" else None
        training = run.recipe(envs, waits=waits, threads=threads.learning, seed=seed, replay=replay)
        iterations = -(-steps // run.num_envs)
    workers = descendants(os.getpid())
    me, learner = os.getpid(), threading.get_native_id()
    begin = time.perf_counter()
    before = _cpu(me, learner), cpu_s(workers)
    for _ in range(iterations):
        training.iterate()
    wall = time.perf_counter() - begin
    (main, others), theirs = _cpu(me, learner), cpu_s(workers)
    if system == "replay":
        replay.close()
    return {
        "wall_s": wall,
        **{f"{part}_s": seconds for part, seconds in training.clock.seconds.items()},
        "main_cpu_s": main - before[0][0],
        "threads_cpu_s": others - before[0][1],
        "workers_cpu_s": theirs - before[1],
        "steps": training.steps,
        "episodes": len(training.returns),
        "return": statistics.fmean(training.returns[-1 - len(training.returns) // 4 :] or [0.0]),
        "returns": training.returns,
        "curve": f"{training.digest()} {training.weights():.9g}",
    }


def _cpu(pid: int, main: int) -> tuple[float, float]:
    """CPU-seconds of a thread, and of the others of its process."""
    all_of_them = cpu_s([pid])
    used = int(Path(f"/proc/{pid}/task/{main}/schedstat").read_text().split()[0]) * 1e-9
    return used, all_of_them - used


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
        self._run = partial(trained, self._envs, run, system, threads, device=device, seed=seed)
        self._steps = steps
        self._run(steps=min(steps, run.num_envs * 8))

    def run(self) -> dict[str, Any]:
        """One turn: a whole run."""
        return self._run(steps=self._steps)

    def close(self) -> None:
        """Ends the envs."""
        self._envs.close()


def measure(
    name: str,
    options: argparse.Namespace,
    left_out: dict[str, str],
    keep: Callable[[list[Row]], object],
) -> list[Row]:
    """One kind of run: every contender, by turns; keeps all rows after each."""
    run = RUNS[name].of(options.num_envs)
    steps = options.steps or run.steps
    device = options.device if run.ppo else "cpu"
    running: dict[tuple[str, Threads, str], Apart] = {}
    with contextlib.ExitStack() as stack:
        keys = []
        for system, threads in product(options.system, options.threads):
            if system in systems(run):
                ours = system in ("ours", "ours-waits", "rollout", "pipeline", "replay")
                variants = options.ours if ours else [{}]
                keys += [(system, threads, variant) for variant in variants]
        for system, threads, variant in keys:
            start = partial(Trainer, system, run, variant, threads, steps, device, options.seed)
            process = Apart(start, patience=3600)
            running[system, threads, _shown(variant)] = stack.enter_context(
                contextlib.closing(process)
            )
        for key, process in list(running.items()):
            try:
                process.ready()
            except ImportError as error:
                left_out[NAMES[key[0]]] = str(error)
                del running[key]
        runs: dict[Any, list[dict[str, Any]]] = {key: [] for key in running}
        begin = time.perf_counter()
        for number, order in enumerate(turns(running, options.rounds)):
            spent = time.perf_counter() - begin
            if number and options.seconds and spent * (number + 1) / number > options.seconds:
                break
            for key in order:
                runs[key].append(running[key].run())
                keep(rows(name, run, device, runs))
    return rows(name, run, device, runs)


def rows(name: str, run: Run, device: str, runs: dict[Any, list[dict[str, Any]]]) -> list[Row]:
    """A row for each contender that has had a turn."""
    return [
        {
            "run": name,
            "num_envs": run.num_envs,
            "device": device,
            "system": NAMES[system],
            "options": variant,
            "threads": str(threads),
            **_medians(results),
            "rounds": len(results),
            "spread": spread([one["wall_s"] for one in results]),
            "times_sync": _ratio(runs, "sync", threads, results),
            "times_async": _ratio(runs, "async", threads, results),
            "curves": [one["curve"] for one in results],
            "returns": [round(each, 1) for each in results[0]["returns"]],
        }
        for (system, threads, variant), results in runs.items()
        if results
    ]


def _shown(variant: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in variant.items())


def _medians(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        key: statistics.median(one[key] for one in results)
        for key, value in results[0].items()
        if isinstance(value, int | float)
    }


def _ratio(runs: dict[Any, Any], system: str, threads: Threads, results: Any) -> float | None:
    """How many times faster than another one in the same round."""
    rounds = zip(runs.get((system, threads, ""), []), results, strict=False)
    ratios = [other["wall_s"] / one["wall_s"] for other, one in rounds]
    return statistics.median(ratios) if ratios else None


def disagreements(rows: Sequence[Row]) -> Iterator[str]:
    """Runs from the same seed that did not learn the same, turn by turn."""
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
HEAD = [
    "run",
    "envs",
    "system",
    "threads",
    "wall, s",
    "spread",
    "runs",
    "× Sync",
    "× Async",
    *PARTS,
]
HEAD += ["main", "threads", "workers", "episodes", "return", "curve"]


def row_line(row: Row) -> str:
    """A row of the table."""
    ratios = [row[f"times_{name}"] for name in ("sync", "async")]
    system = f"{row['system']} {row['options']}".strip()
    return line(
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


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--system", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument(
        "--threads", nargs="+", type=_threads, default=[Threads()], metavar="T", help="torch's"
    )
    parser.add_argument(
        "--ours",
        nargs="+",
        type=json.loads,
        default=[{}],
        metavar="JSON",
        help='options of ShmVectorEnv to try, each as {"num_workers": 1}',
    )
    parser.add_argument("--num-envs", type=int, help="(default: by the run)")
    parser.add_argument("--device", default="cpu", help="torch's name of it")
    parser.add_argument("--steps", type=int, help="of a run (default: by the run)")
    parser.add_argument("--seed", type=int, default=1, help="of DQN and SAC")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, help="for each kind of run: fewer rounds if they take longer"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    setup = {**machine(), "torch": torch.__version__}
    if options.device.startswith("cuda"):
        setup["gpu"] = torch.cuda.get_device_name(options.device)
    there = read_rows(options.json, "training", setup)
    print(f"{described(setup)}, torch {setup['torch']}, {setup.get('gpu', 'no GPU')}\n")
    print(line(*HEAD) + "\n|" + "---|" * len(HEAD), flush=True)
    found: list[Row] = []
    left_out: dict[str, str] = {}

    def keep(new: list[Row]) -> None:
        everything = merged(there, [*found, *new], CELL)
        write_results(
            options.json, {"machine": setup, "left_out": left_out, "training": everything}
        )

    for name in options.run:
        if RUNS[name].missing:
            left_out[name] = f"{' and '.join(RUNS[name].missing)} not installed"
            continue
        found += measure(name, options, left_out, keep)
        print("\n".join(row_line(row) for row in found if row["run"] == name), flush=True)
        keep([])
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    if complaints := list(disagreements(found)):
        print("\n".join(complaints))
        sys.exit(options.device == "cpu")


if __name__ == "__main__":
    main()
