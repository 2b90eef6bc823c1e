"""Steps real envs with ShmVectorEnv beside its peers and beside the limit, and prints a table.

The contenders take turns, in slices, in one run. For each the median over the slices is given:
the time of a batch step, env steps a second (resets made by autoreset are not steps), the share of
the limit, and how many times faster than AsyncVectorEnv. The spread is that of the slices' batch
times: (largest - smallest) / median. With --compute, "parent slowed by" compares the parent's
computing with that beside SyncVectorEnv, which has no workers.

The limit: free-running loops, one env and one process a core, without any communication. A vector
env cannot be faster on these cores.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

import shmvec
from shmvec._commands.measuring import Compute, Limit, Progress, Slice, VectorContender, machine
from shmvec._shared.scheduling import usable_cores

__all__ = ["DEFAULT_WORKLOADS", "WORKLOADS", "run", "table"]

_ROUNDS = 7  # slices of each contender

_LIMIT, _SHM, _ASYNC, _SYNC = "limit", "ShmVectorEnv", "AsyncVectorEnv", "SyncVectorEnv"


class NoopEnv(gym.Env[Any, Any]):
    """An env that does nothing: what is left is the cost of vectorising."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        """Makes the one observation that it ever returns."""
        self._observation = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Does nothing."""
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Does nothing."""
        return self._observation, 0.0, False, False, {}


class InfosEnv(NoopEnv):
    """An env that does nothing but return eight floats in its info, as MuJoCo's do."""

    def __init__(self) -> None:
        """Makes the one info of which it returns copies."""
        super().__init__()
        self._info = {f"reward_{part}": 0.5 for part in "abcdefgh"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Copies the info."""
        return self._observation, 0.0, False, False, self._info.copy()


def _make_cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def _make_half_cheetah() -> gym.Env[Any, Any]:
    import mujoco

    # MuJoCo 4 prints a deprecation for each copy of Gymnasium's model file.
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
    """An env to step.

    Attributes:
        make: Makes one.
        modules: What must be importable.
    """

    make: Callable[[], gym.Env[Any, Any]]
    modules: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [name for name in self.modules if importlib.util.find_spec(name) is None]


WORKLOADS = {
    "CartPole-v1": Workload(_make_cartpole),
    "HalfCheetah-v5": Workload(_make_half_cheetah, ("mujoco",)),
    "ALE/Pong-v5": Workload(_make_pong, ("ale_py", "cv2")),
    "Noop": Workload(NoopEnv),
    "Noop-8-infos": Workload(InfosEnv),
}
DEFAULT_WORKLOADS = ("CartPole-v1", "HalfCheetah-v5", "ALE/Pong-v5")


def run(
    workloads: Sequence[str],
    nums_envs: Sequence[int],
    *,
    num_workers: int | None = None,
    seconds: float = 2.0,
    compute_us: float | None = None,
    progress: TextIO | None = None,
) -> dict[str, Any]:
    """Measures all contenders on some workloads and numbers of envs.

    Args:
        workloads: Keys of ``WORKLOADS``. One whose packages are missing is left out, by name.
        nums_envs: Numbers of envs.
        num_workers: Workers of ShmVectorEnv; None: its default.
        seconds: How long each contender is measured in each cell.
        compute_us: What the parent computes between steps.
        progress: Where to say what is being done.

    Returns:
        A dict that can be written as JSON: "machine", "settings", "left_out" and "rows".
    """
    cores = usable_cores()
    compute = None if compute_us is None else Compute(compute_us)
    left_out, rows = {}, []
    cells = [(name, n) for name in workloads for n in nums_envs]
    for number, (name, n) in enumerate(cells, 1):
        missing = WORKLOADS[name].missing()
        if missing:
            left_out[name] = f"{' and '.join(missing)} not installed; pip install 'shmvec[bench]'"
            continue
        say = Progress(progress, f"[{number}/{len(cells)}] {name}, {n} envs")
        rows += _measure(name, n, num_workers, seconds, compute, cores, say)
        say.done()
    for name, why in left_out.items():
        if progress is not None:
            print(f"{name} is left out: {why}", file=progress)
    return {
        "machine": machine(),
        "settings": {
            "num_workers": num_workers,
            "seconds": seconds,
            "compute_us": compute_us,
            "rounds": _ROUNDS,
        },
        "left_out": left_out,
        "rows": rows,
    }


def _measure(
    name: str,
    n: int,
    num_workers: int | None,
    seconds: float,
    compute: Compute | None,
    cores: int,
    say: Progress,
) -> list[dict[str, Any]]:
    """One cell: every contender, by turns."""
    make = WORKLOADS[name].make
    fns = [make] * n
    workers = None if num_workers is None else min(num_workers, n)
    contenders: dict[str, Limit | VectorContender] = {}
    slices: dict[str, list[Slice]] = {}
    try:
        for contender, build in (
            (_LIMIT, lambda: Limit([make], cores)),
            (
                _SHM,
                lambda: VectorContender(shmvec.ShmVectorEnv(fns, num_workers=workers), compute),
            ),
            (_ASYNC, lambda: VectorContender(AsyncVectorEnv(fns), compute)),
            (_SYNC, lambda: VectorContender(SyncVectorEnv(fns), compute)),
        ):
            say(f"starting {contender}")
            contenders[contender] = build()
        for turn in range(_ROUNDS):
            say(f"round {turn + 1} of {_ROUNDS}")
            for contender, runner in contenders.items():
                slices.setdefault(contender, []).append(runner.run(seconds / _ROUNDS))
    finally:
        for runner in contenders.values():
            runner.close()

    limit = statistics.median(s.steps_per_s for s in slices[_LIMIT])
    reference = statistics.median(s.batch_us for s in slices[_ASYNC])
    rows = []
    for contender, measured in slices.items():
        batch = [s.batch_us for s in measured]
        median = statistics.median(batch)
        rate = statistics.median(s.steps_per_s for s in measured)
        row: dict[str, Any] = {
            "env": name,
            "num_envs": n,
            "system": contender,
            "steps_per_s": rate,
            "share_of_limit": rate / limit,
        }
        if contender != _LIMIT:
            row["batch_us"] = median
            row["spread"] = (max(batch) - min(batch)) / median
            row["times_async"] = reference / median
            if compute is not None:
                row["compute_us"] = statistics.median(s.compute_us for s in measured)
                row["compute_slowdown"] = statistics.median(
                    mine.compute_us / undisturbed.compute_us - 1
                    for mine, undisturbed in zip(measured, slices[_SYNC], strict=True)
                )
        rows.append(row)
    return rows


def table(results: dict[str, Any]) -> str:
    """The results of :func:`run` as a Markdown table, below a line about the machine."""
    return "\n".join(_lines(results))


def _lines(results: dict[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    yield (
        f"{machine['cpu']}, {machine['usable_cores']} usable cores, Python {machine['python']}, "
        f"Gymnasium {machine['gymnasium']}, shmvec {machine['shmvec']}"
    )
    yield ""
    computing = results["settings"]["compute_us"] is not None
    head = ["env", "envs", "system", "batch step, µs", "spread", "steps/s", "of the limit"]
    head += ["× Async"] + (["parent slowed by"] if computing else [])
    yield "| " + " | ".join(head) + " |"
    yield "|" + "|".join(["---", "--:", "---"] + ["--:"] * (len(head) - 3)) + "|"
    for row in results["rows"]:
        cells = [row["env"], str(row["num_envs"]), row["system"]]
        if "batch_us" in row:
            cells += [f"{row['batch_us']:,.1f}", f"{row['spread']:.0%}"]
        else:
            cells += ["", ""]
        cells += [f"{row['steps_per_s']:,.0f}", f"{row['share_of_limit']:.2f}"]
        cells += [f"{row['times_async']:.1f}" if "times_async" in row else ""]
        if computing:
            slowdown = row.get("compute_slowdown")
            cells += ["" if slowdown is None else f"{slowdown:+.1%}"]
        yield "| " + " | ".join(cells) + " |"
    for name, why in results["left_out"].items():
        yield f"\n{name} is left out: {why}"
