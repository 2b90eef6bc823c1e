"""Compare ShmVectorEnv with AsyncVectorEnv, SyncVectorEnv and the limit, on real envs or yours.

    shmvec bench
    shmvec bench my_env.py:MyEnv --num-envs 8 32

They alternate every 50 ms, in seven rounds of one run. The table has medians over the rounds: the
time of a batch step, env steps a second (resets made by autoreset are not steps), the share of the
limit, and how many times faster it is than AsyncVectorEnv. The last two are medians of ratios, and
may differ a little from the ratio of the medians. The spread is (largest - smallest) / median of
the rounds' batch times. With --compute, "parent slowed by" says how much longer the parent's
computation takes than with SyncVectorEnv, which has no workers.

The limit is the speed of loops that only step: one env and one process a core, no communication,
wrappers compiled. A vector env of Python envs cannot be faster on these cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

import shmvec
from shmvec._commands.arguments import (
    ENV_HELP,
    add_kwargs_option,
    add_measuring_options,
    find_env_fn,
    positive,
    write_json,
)
from shmvec._commands.measuring import (
    LIMIT,
    MAX_SHARE_OF_LIMIT,
    Compute,
    EnvFn,
    Progress,
    busy_warning,
    cells,
    describe_machine,
    machine,
    race,
    table_line,
    vector_env_stepper,
)

__all__ = [
    "DEFAULT_WORKLOADS",
    "SUMMARY",
    "WORKLOADS",
    "NoopEnv",
    "Workload",
    "add_arguments",
    "main",
    "table",
]

SUMMARY = "compare with AsyncVectorEnv and SyncVectorEnv, on built-in envs or on yours"

_SHM, _ASYNC, _SYNC = "ShmVectorEnv", "AsyncVectorEnv", "SyncVectorEnv"


class NoopEnv(gym.Env[Any, Any]):
    """An env that does nothing: only the cost of vectorising is measured."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self._observation = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observation, 0.0, False, False, {}


class InfosEnv(NoopEnv):
    """An env that does nothing, with eight floats in its info, as many as MuJoCo's envs have."""

    def __init__(self) -> None:
        super().__init__()
        self._info = {f"reward_{part}": 0.5 for part in "abcdefgh"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observation, 0.0, False, False, self._info.copy()


def _make_cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def _make_half_cheetah() -> gym.Env[Any, Any]:
    import mujoco

    # MuJoCo 4 prints a deprecation warning for each env.
    mujoco.set_mju_user_warning(lambda message: None)
    return gym.make("HalfCheetah-v5")


def _make_pong() -> gym.Env[Any, Any]:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    env = gym.make("ALE/Pong-v5", frameskip=1)
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env), 4)


@dataclass(frozen=True)
class Workload:
    """An env to step, or several kinds of it.

    Attributes:
        make: Makes the env.
        modules: Modules that must be importable.
        others: Make envs of other kinds.
    """

    make: EnvFn
    modules: tuple[str, ...] = ()
    others: tuple[EnvFn, ...] = ()

    @property
    def kinds(self) -> tuple[EnvFn, ...]:
        """A function for each kind of env."""
        return (self.make, *self.others)

    def fns(self, num_envs: int) -> list[EnvFn]:
        """``num_envs`` functions, in a cycle of the kinds."""
        return list(islice(cycle(self.kinds), num_envs))

    def missing(self) -> list[str]:
        return [name for name in self.modules if importlib.util.find_spec(name) is None]


WORKLOADS = {
    "CartPole-v1": Workload(_make_cartpole),
    "HalfCheetah-v5": Workload(_make_half_cheetah, ("mujoco",)),
    "ALE/Pong-v5": Workload(_make_pong, ("ale_py", "cv2")),
    "Noop": Workload(NoopEnv),
    "Noop-8-infos": Workload(InfosEnv),
}
DEFAULT_WORKLOADS = ("CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5")


def _measure_workloads(
    workloads: Mapping[str, Workload], options: argparse.Namespace
) -> dict[str, Any]:
    """Measures workloads; returns "machine", "settings", "left_out" and "rows", for JSON."""
    compute = None if options.compute is None else Compute(options.compute)
    left_out, rows = {}, []
    pairs = [(name, n) for name in workloads for n in options.num_envs]
    for number, (name, n) in enumerate(pairs, 1):
        missing = workloads[name].missing()
        if missing:
            left_out[name] = f"{' and '.join(missing)} not installed; pip install 'shmvec[bench]'"
            continue
        say = Progress(sys.stderr, f"[{number}/{len(pairs)}] {name}, {n} envs")
        workers = None if options.num_workers is None else min(options.num_workers, n)
        rows += _measure_workload(name, workloads[name], n, workers, options.seconds, compute, say)
        say.done()
    return {
        "machine": machine(),
        "settings": {
            "num_workers": options.num_workers,
            "seconds": options.seconds,
            "compute_us": options.compute,
        },
        "left_out": left_out,
        "rows": rows,
    }


def _measure_workload(
    name: str,
    workload: Workload,
    n: int,
    workers: int | None,
    seconds: float,
    compute: Compute | None,
    say: Progress,
) -> list[dict[str, Any]]:
    """Measures all contenders with one number of envs."""
    fns = workload.fns(n)
    contenders: dict[str, Callable[[], VectorEnv[Any, Any, Any]]] = {
        _SHM: lambda: shmvec.ShmVectorEnv(fns, num_workers=workers),
        _ASYNC: lambda: AsyncVectorEnv(fns),
        _SYNC: lambda: SyncVectorEnv(fns),
    }
    starts = {key: partial(vector_env_stepper, make, compute) for key, make in contenders.items()}
    results = race(starts, seconds, limit=workload.kinds, say=say)
    rows = []
    for system, result in results.items():
        row = {"env": name, "num_envs": n, "system": system, **result.figures(results[LIMIT])}
        if system == LIMIT:
            del row["batch_us"], row["spread"]
        else:
            row["times_async"] = results[_ASYNC].ratio(result, "batch_us")
            row["times_sync"] = results[_SYNC].ratio(result, "batch_us")
            if compute is not None:
                row["compute_us"] = result.median.compute_us
                row["compute_slowdown"] = result.ratio(results[_SYNC], "compute_us") - 1
        rows.append(row)
    return rows


def table(results: dict[str, Any]) -> str:
    """The report: the machine, a Markdown table, and a sentence for each number of envs."""
    return "\n".join(_table_lines(results))


def _table_lines(results: dict[str, Any]) -> Iterator[str]:
    yield describe_machine(results["machine"])
    yield ""
    computing = results["settings"]["compute_us"] is not None
    head = ["env", "envs", "system", "batch step, µs", "spread", "steps/s", "of the limit"]
    head += ["× Async"] + (["parent slowed by"] if computing else [])
    yield table_line(*head)
    yield "|" + "|".join(["---", "--:", "---"] + ["--:"] * (len(head) - 3)) + "|"
    for row in results["rows"]:
        row_cells = [row["env"], row["num_envs"], row["system"], *cells(row)]
        row_cells += [f"{row['times_async']:.1f}" if "times_async" in row else ""]
        if computing:
            slowdown = row.get("compute_slowdown")
            row_cells += ["" if slowdown is None else f"{slowdown:+.1%}"]
        yield table_line(*row_cells)
    yield ""
    yield "Of the limit and × Async: medians of the rounds' ratios, not quotients of medians."
    for row in results["rows"]:
        if row["system"] == _SHM:
            yield _summary(row)
    yield from busy_warning(results["rows"])
    for name, why in results["left_out"].items():
        yield f"\n{name} is left out: {why}"


def _summary(row: Mapping[str, Any]) -> str:
    """A sentence on a row of ShmVectorEnv, with advice."""
    figures = (
        f"{row['env']}, {row['num_envs']} envs: {row['times_async']:.1f} × AsyncVectorEnv, "
        f"{row['times_sync']:.1f} × SyncVectorEnv, {row['share_of_limit']:.2f} of the limit"
    )
    if row["times_sync"] < 1:
        return f"{figures}. Without workers it is as fast as SyncVectorEnv: num_workers=0."
    if row["share_of_limit"] > MAX_SHARE_OF_LIMIT:
        return (
            f"{figures}. The envs sleep while they step, or other programs use the cores: more "
            "workers than cores may be faster."
        )
    return f"{figures}."


# ---- the command ---------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    command.add_argument(
        "env",
        nargs="*",
        metavar="ENV",
        help=f"{ENV_HELP}, or one of the built-in {', '.join(WORKLOADS)} (Noop does "
        f"nothing); default: {' '.join(DEFAULT_WORKLOADS)}",
    )
    add_kwargs_option(command)
    command.add_argument(
        "--num-workers",
        type=positive(int),
        metavar="W",
        help="workers of ShmVectorEnv, at most one for each env (default: one for each core)",
    )
    add_measuring_options(command, [1, 2, 8, 32], 2.0)


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    workloads = {}
    for name in options.env or DEFAULT_WORKLOADS:
        if name in WORKLOADS and not options.kwargs:
            workloads[name] = WORKLOADS[name]
        else:
            workloads[name] = Workload(find_env_fn(name, options.kwargs)[0])
    results = _measure_workloads(workloads, options)
    print(table(results))
    write_json(options, results)
    return 0 if results["rows"] else 1
