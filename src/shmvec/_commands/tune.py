"""Find the best settings of ShmVectorEnv for an env, by measuring them side by side.

    shmvec tune my_env.py:MyEnv

First it checks whether two envs in one process disturb each other. Then it measures numbers of envs
and workers, caller_steps, and overlap if the env sleeps; and for the best of these the wait
policies, copy=False and batch_size. It prints a table and the code to paste.

A setting wins against a simpler one if it is more than 3 % faster; more envs win if they are more
than 5 % faster. If rounds differ more than settings, no setting is best: measure for longer, or on
a quieter machine. copy=False and batch_size are measured, but are not part of the best setting:
only you know whether your code keeps observations, and can step batches of some envs. The limit is
the speed of loops that only step, one a core; envs that sleep have none.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from gymnasium.vector.utils import batch_space

from shmvec._commands.arguments import (
    add_env_arguments,
    add_measuring_options,
    find_env_fn,
    output_file,
    write_json,
)
from shmvec._commands.check import brief_check
from shmvec._commands.measuring import (
    DOUBTFUL_SPREAD,
    LIMIT,
    MAX_SHARE_OF_LIMIT,
    MIN_SPEEDUP,
    Compute,
    EnvFn,
    Progress,
    Stepper,
    busy_warning,
    cells,
    describe_machine,
    machine,
    race,
    simplest,
    table_line,
    vector_env_stepper,
)
from shmvec._commands.probe import leaves, resident_bytes
from shmvec._cores import WAIT_POLICIES, time_on_cores, usable_cores
from shmvec._processes.overlap import is_asynchronous
from shmvec.vector_env import ShmVectorEnv

__all__ = [
    "SUMMARY",
    "Setting",
    "add_arguments",
    "asleep_share",
    "is_best",
    "main",
    "plot",
    "report",
    "tune",
]

SUMMARY = "find the best numbers of envs and workers, and the best options, for your env"

_MIN_ASLEEP_SHARE = 0.5  # an env that sleeps for more of its time may overlap with others
_MIN_SPEEDUP_OF_MORE_ENVS = 1.05  # more envs are preferred if they are faster by this factor
_MAX_ENVS_WITH_OWN_WORKER = 32  # with more envs, a worker for each is not tried


@dataclass(frozen=True)
class Setting:
    """Arguments of ShmVectorEnv to try."""

    num_envs: int
    num_workers: int | None = None
    wait_policy: str = "adaptive"
    copy: bool = True
    caller_steps: bool = False
    overlap: str | None = None
    batch_size: int | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments that are not the defaults."""
        options = asdict(self)
        defaults = asdict(Setting(self.num_envs))
        return {name: value for name, value in options.items() if value != defaults[name]}

    def __str__(self) -> str:
        """The arguments that are not the defaults."""
        return str(self.options() or "the defaults")


def _measure_env(make_env: EnvFn, seconds: float) -> dict[str, Any]:
    """Costs of one env, measured in this process: times in µs, sizes in bytes."""
    env = make_env()
    if is_asynchronous(env):
        raise TypeError(
            f"the step or reset of {type(env).__name__} is a coroutine function, which only a "
            "vector env steps: print(envs.stats()) shows how long it takes"
        )
    resident = resident_bytes()
    others = [make_env() for _ in range(2)]  # they are measured, since the first loads libraries
    for other in others:
        other.reset(seed=0)
    memory = (resident_bytes() - resident) // len(others)
    for other in others:
        other.close()
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]
    clock = time.perf_counter
    start = clock()
    observation, _ = env.reset(seed=0)
    resets, infos = [clock() - start], 0
    steps: list[float] = []
    ends: list[int] = []  # the number of steps before each episode's end
    begin, cpu_start, without_core = clock(), time.process_time(), _time_without_core()
    while not steps or clock() - begin < seconds:
        start = clock()
        _, _, terminated, truncated, info = env.step(actions[len(steps) % len(actions)])
        steps.append(clock() - start)
        infos += len(info)
        if terminated or truncated:
            ends.append(len(steps))
        if terminated or truncated or clock() - begin >= seconds:
            start = clock()
            env.reset()
            resets.append(clock() - start)
    cpu_s, lacked_s = time.process_time() - cpu_start, _time_without_core() - without_core
    asleep = asleep_share(clock() - begin, cpu_s, lacked_s)
    env.close()
    step_us, reset_us = 1e6 * np.asarray(steps), 1e6 * np.asarray(resets)
    return {
        "step_us": float(step_us.mean()),
        "step_p50_us": float(np.percentile(step_us, 50)),
        "step_p99_us": float(np.percentile(step_us, 99)),
        "step_deviation_us": float(step_us.std()),
        "reset_us": float(np.median(reset_us)),
        "steps_per_episode": ends[-1] / len(ends) if ends else len(steps),
        "infos_per_step": infos / len(steps),
        "observation_bytes": sum(int(np.asarray(part).nbytes) for part in leaves(observation)),
        "memory_bytes": max(0, memory),
        "asleep": asleep,
    }


def _time_without_core() -> float:
    """Seconds in which this process was ready to run and had no core; 0 if unknown."""
    return time_on_cores(os.getpid())[1] or 0.0


def asleep_share(elapsed: float, ran: float, without_core: float) -> float:
    """The share of ``elapsed`` in which an env neither computed nor waited for a core."""
    return max(0.0, 1 - (ran + without_core) / elapsed)


def _worker_counts(num_envs: int, cores: int) -> list[int | None]:
    """Numbers of workers to try; None is the default, one a core."""
    counts = {0, 1, 2, cores // 2, cores - 1, 2 * cores}
    if num_envs <= _MAX_ENVS_WITH_OWN_WORKER:  # more processes get more of cores that are shared
        counts.add(num_envs)
    counts_to_try = {count for count in counts if count <= num_envs} - {min(cores, num_envs)}
    return [None, *sorted(counts_to_try)]


def tune(
    make_env: EnvFn,
    nums_envs: Sequence[int],
    *,
    seconds: float = 1.0,
    compute_us: float | None = None,
    progress: TextIO | None = None,
) -> dict[str, Any]:
    """Measures an env and tries settings of ShmVectorEnv on it; see the command's arguments.

    Returns:
        A dict that can be written as JSON: "machine"; "check", a fault of two envs in one process,
        or None; "env"; "limit", in steps/s; "rows", one for each setting; "best", the arguments to
        use, or None if rounds differ too much; and "batch", the row of a batch_size that is faster
        still, or None.
    """
    cores = usable_cores()
    compute = None if compute_us is None else Compute(compute_us)
    say = Progress(progress, "measuring the env alone")
    problem = brief_check(make_env)
    env = _measure_env(make_env, min(1.0, seconds))
    say.done()
    rows: list[dict[str, Any]] = []
    winners: list[dict[str, Any]] = []  # one for each number of envs
    races: list[list[dict[str, Any]]] = []  # those that they have won
    limits: list[float] = []
    for number, num_envs in enumerate(sorted(set(nums_envs)), 1):
        say = Progress(progress, f"[{number}/{len(set(nums_envs))}] {num_envs} envs")
        settings = [Setting(num_envs, count) for count in _worker_counts(num_envs, cores)]
        if min(num_envs, cores) > 1:
            settings.append(Setting(num_envs, caller_steps=True))
        if env["asleep"] > _MIN_ASLEEP_SHARE and num_envs > 1:
            settings.append(Setting(num_envs, overlap="auto"))
        first = _measure_settings(make_env, settings, seconds, compute, limits, say)
        best = _setting_of(simplest(first, MIN_SPEEDUP))
        policies = () if best.num_workers == 0 else WAIT_POLICIES[1:]
        rest = [replace(best, wait_policy=policy) for policy in policies]
        rest.append(replace(best, copy=False))
        in_workers = best if policies and not best.caller_steps else Setting(num_envs)
        rest += [replace(in_workers, batch_size=size) for size in _batch_sizes(num_envs)]
        # These are measured again, because only figures of one race can be compared.
        again = dict.fromkeys([Setting(num_envs), best])
        second = _measure_settings(make_env, [*again, *rest], seconds, compute, limits, say)
        remeasured = set(map(_setting_of, second))
        rows += [row for row in first if _setting_of(row) not in remeasured] + second
        usable = [row for row in second if row["copy"] and not row["batch_size"]]
        winners.append(simplest(usable, MIN_SPEEDUP))
        races.append(second)
        say.done()
    best_row = simplest(winners, _MIN_SPEEDUP_OF_MORE_ENVS)
    for row in rows:
        row["best"] = any(row is winner for winner in winners)
    last_race = next(race for race in races if best_row in race)
    simpler = last_race[: last_race.index(best_row)]
    batches = [row for row in last_race if row["batch_size"] and _is_faster(row, best_row)]
    return {
        "machine": machine(),
        "check": problem,
        "settings": {"seconds": seconds, "compute_us": compute_us},
        "env": env,
        "limit": statistics.median(limits),
        "rows": rows,
        "best": asdict(_setting_of(best_row)) if is_best(best_row, simpler) else None,
        "batch": max(batches, key=lambda row: row["steps_per_s"], default=None),
    }


def _batch_sizes(num_envs: int) -> list[int]:
    return [size for size in (num_envs // 2, num_envs // 4) if size]


def _is_faster(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a row was faster in all rounds but one, which is no accident."""
    rounds = list(zip(row["rounds"], other["rounds"], strict=True))
    return bool(sum(rate > other_rate for rate, other_rate in rounds) >= len(rounds) - 1)


def is_best(best: dict[str, Any], simpler: Sequence[dict[str, Any]]) -> bool:
    """Whether the rounds confirm a setting that is the best by its median."""
    if not simpler:  # the defaults
        return bool(best["spread"] <= DOUBTFUL_SPREAD)
    return all(_is_faster(best, other) for other in simpler)


def _setting_of(row: dict[str, Any]) -> Setting:
    return Setting(**{name: row[name] for name in Setting.__dataclass_fields__})


def _measure_settings(
    make_env: EnvFn,
    settings: Sequence[Setting],
    seconds: float,
    compute: Compute | None,
    limits: list[float],
    say: Progress,
) -> list[dict[str, Any]]:
    """Measures settings in one race; appends the limit of each round to ``limits``."""
    starts = {}
    for setting in settings:
        envs = partial(ShmVectorEnv, [make_env] * setting.num_envs, **setting.options())
        start = vector_env_stepper if setting.batch_size is None else _batch_stepper
        starts[setting] = partial(start, envs, compute)
    results = race(starts, seconds, limit=[make_env], say=say)
    limit = results.pop(LIMIT)
    limits += [one.steps_per_s for one in limit.slices]
    return [
        {
            **asdict(setting),
            **result.figures(limit),
            "rounds": [one.steps_per_s for one in result.slices],
        }
        for setting, result in results.items()
    ]


def _batch_stepper(make: Callable[[], ShmVectorEnv], compute: Compute | None = None) -> Stepper:
    """Makes and resets a vector env; the contender steps the envs that are ready first."""
    envs = make()
    actions = batch_space(envs.single_action_space, envs.batch_size or 1)
    actions.seed(0)
    envs.async_reset(seed=0)

    def step(actions: Any) -> Any:
        _, _, terminations, truncations, infos = envs.recv()
        envs.send(actions, infos["env_id"])
        return terminations, truncations, infos["env_id"]

    return Stepper(step, actions.sample, envs.num_envs, compute=compute, close=envs.close)


def report(results: dict[str, Any], code: str) -> str:
    """The results of :func:`tune` as text: the env's costs, the table, and code to paste."""
    return "\n".join(_report_lines(results, code))


def _report_lines(results: dict[str, Any], code: str) -> Iterator[str]:
    env = results["env"]
    yield describe_machine(results["machine"])
    yield ""
    if results["check"]:
        yield f"WRONG: {results['check']}: python -m shmvec check names the option that fixes it."
        yield ""
    yield (
        f"One env: a step takes {env['step_us']:,.1f} µs (± {env['step_deviation_us']:,.1f}, "
        f"p99 {env['step_p99_us']:,.1f}), a reset {env['reset_us']:,.1f} µs "
        f"every {env['steps_per_episode']:,.0f} steps;"
    )
    yield (
        f"an observation has {env['observation_bytes']:,} bytes, an info "
        f"{env['infos_per_step']:.3g} keys; an env takes {env['memory_bytes'] / 2**20:,.1f} MiB."
    )
    yield ""
    yield "| envs | workers | policy | copy | batch step, µs | spread | steps/s | of the limit | |"
    yield "|--:|--:|---|---|--:|--:|--:|--:|---|"
    for row in results["rows"]:
        workers = "one a core" if row["num_workers"] is None else str(row["num_workers"])
        workers += ", one the caller" if row["caller_steps"] else ""
        workers += f", overlap={row['overlap']!r}" if row["overlap"] else ""
        workers += f", batch_size={row['batch_size']}" if row["batch_size"] else ""
        setting = row["num_envs"], workers, row["wait_policy"], row["copy"]
        if row["share_of_limit"] > MAX_SHARE_OF_LIMIT:
            row = {name: value for name, value in row.items() if name != "share_of_limit"}
        yield table_line(*setting, *cells(row), "best" if row["best"] and results["best"] else "")
    yield ""
    yield from busy_warning(results["rows"])
    if results["best"] is None:
        yield "No best setting: rounds differ more than settings. Use the defaults, or repeat this"
        yield "with more --seconds or on a quieter machine."
        return
    if results["batch"]:
        size = results["batch"]["batch_size"]
        yield f"Faster: batch_size={size} makes {results['batch']['steps_per_s']:,.0f} steps/s, in"
        yield f"batches of the {size} envs that are ready first: docs/partial-batches.md."
    best = Setting(**results["best"])
    if (best.num_workers or 0) > results["machine"]["usable_cores"]:
        yield "More workers than cores: best where envs sleep, or other programs use the cores."
    options = best.options()
    arguments = "".join(f", {name}={value!r}" for name, value in options.items())
    yield "Best" + ("" if options else ", and the defaults") + ":"
    yield ""
    yield code
    yield f"envs = shmvec.ShmVectorEnv([make_env] * {best.num_envs}{arguments})"


def plot(results: dict[str, Any], file: Path) -> None:
    """Draws steps/s against the number of workers, a line for each number of envs.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    cores = results["machine"]["usable_cores"]
    for num_envs in sorted({row["num_envs"] for row in results["rows"]}):
        points = sorted(
            (min(cores, num_envs) if row["num_workers"] is None else row["num_workers"], rate)
            for row in results["rows"]
            if row["num_envs"] == num_envs and row["wait_policy"] == "adaptive" and row["copy"]
            if not row["caller_steps"] and not row["overlap"] and not row["batch_size"]
            for rate in [row["steps_per_s"]]
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{num_envs} envs")
    axes.axhline(results["limit"], color="grey", linestyle="--", label="limit")
    axes.set(xlabel="workers (0: the calling process)", ylabel="env steps a second", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(file)


# ---- the command ---------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_env_arguments(command)
    add_measuring_options(command, [8, 32, 128], 1.0)
    command.add_argument(
        "--plot", type=output_file, metavar="FILE", help="plot them (needs matplotlib)"
    )


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentError(
            None, "--plot: matplotlib is not installed; pip install 'shmvec[plot]'"
        )
    make_env, code = find_env_fn(options.env, options.kwargs)
    results = tune(
        make_env,
        options.num_envs,
        seconds=options.seconds,
        compute_us=options.compute,
        progress=sys.stderr,
    )
    print(report(results, code))
    write_json(options, results)
    if options.plot is not None:
        plot(results, options.plot)
    return 0
