"""ShmVectorEnv beside every peer that is installed, over envs of all speeds and many settings.

    python benchmarks/matrix.py                              # all of it: hours
    python benchmarks/matrix.py --workload noop work20 --num-envs 8 32 --seconds 1

Each cell is a workload, a number of envs and what the parent computes between steps. In it the
contenders take turns, in slices, in one run: ShmVectorEnv with each number of workers and each wait
policy asked for, Gymnasium's vector envs, Stable-Baselines3's SubprocVecEnv, Tianshou's
SubprocVectorEnv and ShmemVectorEnv, EnvPool's C++ envs (the ceiling, where it has the env). A peer
that is not installed is left out, by name.

For each: median and spread of the batch step, its p50 and p99, env steps a second, their share of
the limit (free-running loops, one a core), and CPU-seconds (parent and workers) per million env
steps. Steps are counted as Gymnasium does: a step that only resets is none. `lost` at the end names
the cells in which a Python peer was faster than ShmVectorEnv's default.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import shmvec
from shmvec import bench
from shmvec.scheduling import WAIT_POLICIES, usable_cores

ROUNDS = 5
CHUNK_S = 0.02


class Work(gym.Env[Any, Any]):
    """An env of known cost: so many µs of work a step, more in some envs or in resets."""

    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, step_us: float, shape: tuple[int, ...] = (4,), reset_times: float = 1, length: int = 0
    ) -> None:
        """Calibrates the work once; afterwards it is the same whatever else runs."""
        kind = np.uint8 if len(shape) > 1 else np.float32
        self.observation_space = gym.spaces.Box(0, 1, shape, kind)
        self._observation = np.zeros(shape, kind)
        self._step, self._reset = _work(step_us), _work(step_us * reset_times)
        self._length = length
        self._count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Works as long as a reset takes."""
        zlib.crc32(self._reset)
        self._count = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Works as long as a step takes."""
        zlib.crc32(self._step)
        self._count += 1
        return self._observation, 0.0, self._count == self._length, False, {}


def _work(us: float) -> bytes:
    """Bytes whose checksum takes about so many µs; an amount, so that disturbance adds to it."""
    if us <= 0:
        return b""
    probe = bytes(1 << 16)
    best = min(_timed(zlib.crc32, probe) for _ in range(50))
    return bytes(int(len(probe) * us / (1e6 * best)))


def _timed(run: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def _works(step_us: float, **kwargs: Any) -> Callable[[int], list[Callable[[], Any]]]:
    return lambda n: [partial(Work, step_us, **kwargs)] * n


def _uneven(n: int) -> list[Callable[[], Any]]:
    """One env in eight takes ten times longer."""
    return [partial(Work, 200 if i % 8 == 7 else 20) for i in range(n)]


def _ant() -> gym.Env[Any, Any]:
    import mujoco

    mujoco.set_mju_user_warning(lambda message: None)
    return gym.make("Ant-v5")


WORKLOADS: dict[str, Callable[[int], list[Callable[[], Any]]]] = {
    "noop": _works(0),
    "noop-image": _works(0, shape=(84, 84, 4)),
    "work20": _works(20),
    "work50": _works(50),
    "work1000": _works(1000),
    "uneven": _uneven,
    "slow-resets": _works(20, reset_times=50, length=100),
    "cartpole": lambda n: [bench.WORKLOADS["CartPole-v1"].make] * n,
    "halfcheetah": lambda n: [bench.WORKLOADS["HalfCheetah-v5"].make] * n,
    "ant": lambda n: [_ant] * n,
    "pong": lambda n: [bench.WORKLOADS["ALE/Pong-v5"].make] * n,
}
ENVPOOL = {"cartpole": "CartPole-v1", "halfcheetah": "HalfCheetah-v4", "ant": "Ant-v4"}


class Contender:
    """A vector env of some system: steps with actions that were sampled beforehand."""

    def __init__(
        self,
        name: str,
        step: Callable[[Any], np.ndarray],
        actions: list[Any],
        close: Callable[[], object],
        resets_are_steps: bool,
        compute: bytes,
    ) -> None:
        """Takes what steps it: ``step`` returns which envs are done."""
        self.name, self._step, self._actions, self.close = name, step, actions, close
        self._resets_are_steps = resets_are_steps
        self._compute = compute
        self._done = np.zeros(len(actions[0]), bool)
        self._chunk = 1
        self.batches: list[list[float]] = []
        self.rates: list[float] = []
        self.cpu: list[float] = []

    def run(self, seconds: float, keep: bool = True) -> None:
        """One slice."""
        step, actions, compute = self._step, self._actions, self._compute
        times: list[float] = []
        steps = 0
        cpu, begin = _cpu_seconds(), time.perf_counter()
        while time.perf_counter() - begin < seconds:
            start = time.perf_counter()
            done = step(actions[len(times) % len(actions)])
            times.append(time.perf_counter() - start)
            # An env that was done is only reset by the next step, unless the system counts so.
            steps += len(done) - (0 if self._resets_are_steps else int(self._done.sum()))
            self._done = done
            if compute:
                zlib.crc32(compute)
        elapsed = time.perf_counter() - begin
        if keep:
            self.batches.append(times)
            self.rates.append(steps / elapsed)
            self.cpu.append(1e6 * (_cpu_seconds() - cpu) / max(1, steps))

    def row(self, limit: float) -> dict[str, Any]:
        """The figures of all slices."""
        medians = [1e6 * statistics.median(times) for times in self.batches]
        means = [1e6 * statistics.fmean(times) for times in self.batches]
        everything = np.concatenate([np.asarray(times) for times in self.batches])
        median = statistics.median(means)
        return {
            "system": self.name,
            "batch_us": median,
            "spread": (max(means) - min(means)) / median,
            "p50_us": statistics.median(medians),
            "p99_us": 1e6 * float(np.percentile(everything, 99)),
            "steps_per_s": statistics.median(self.rates),
            "share_of_limit": statistics.median(self.rates) / limit,
            "cpu_s_per_million": statistics.median(self.cpu),
        }


def _cpu_seconds() -> float:
    """CPU time of this process and of its living children."""
    total = time.process_time()
    ticks = os.sysconf("SC_CLK_TCK")
    for child in multiprocessing.active_children():
        try:
            fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def _gymnasium(name: str, envs: Any, compute: bytes) -> Contender:
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(16)]
    envs.reset(seed=0)

    def step(action: Any) -> np.ndarray:
        results = envs.step(action)
        return results[2] | results[3]

    return Contender(name, step, actions, envs.close, False, compute)


def _sb3(fns: list[Any], compute: bytes) -> Contender:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    envs = SubprocVecEnv(fns)
    envs.action_space.seed(0)
    actions = [
        np.array([envs.action_space.sample() for _ in fns]) for _ in range(16)
    ]  # it resets in the same step
    envs.reset()
    return Contender(
        "SB3 SubprocVecEnv", lambda a: envs.step(a)[2], actions, envs.close, True, compute
    )


def _tianshou(name: str, fns: list[Any], compute: bytes) -> Contender:
    import tianshou.env

    envs = getattr(tianshou.env, name)(fns)
    space = envs.action_space[0]
    space.seed(0)
    actions = [np.array([space.sample() for _ in fns]) for _ in range(16)]
    envs.reset()

    def step(action: Any) -> np.ndarray:
        results = envs.step(action)
        done = results[2] | results[3]
        if done.any():  # its user resets
            envs.reset(np.flatnonzero(done))
        return done

    return Contender(f"Tianshou {name}", step, actions, envs.close, True, compute)


def _envpool(workload: str, n: int, compute: bytes) -> Contender:
    import envpool

    envs = envpool.make_gymnasium(ENVPOOL[workload], num_envs=n)
    space = envs.action_space
    space.seed(0)
    actions = [np.array([space.sample() for _ in range(n)]) for _ in range(16)]
    envs.reset()

    def step(action: Any) -> np.ndarray:
        results = envs.step(action)
        return np.asarray(results[2] | results[3])

    return Contender("EnvPool (C++)", step, actions, envs.close, False, compute)


def contenders(
    workload: str, n: int, compute: bytes, options: argparse.Namespace, left_out: dict[str, str]
) -> list[Contender]:
    """Starts them all; what is not installed is named in `left_out`."""
    fns = WORKLOADS[workload](n)
    made = [_gymnasium("ShmVectorEnv", shmvec.ShmVectorEnv(fns), compute)]
    for count in sorted({min(count, n) for count in options.num_workers or []}):
        envs = shmvec.ShmVectorEnv(fns, num_workers=count)
        made.append(_gymnasium(f"ShmVectorEnv, {count} workers", envs, compute))
    for policy in options.policy:
        envs = shmvec.ShmVectorEnv(fns, wait_policy=policy)
        made.append(_gymnasium(f"ShmVectorEnv, {policy}", envs, compute))
    peers: dict[str, Callable[[], Contender]] = {
        "AsyncVectorEnv": lambda: _gymnasium(
            "AsyncVectorEnv", gym.vector.AsyncVectorEnv(fns), compute
        ),
        "SyncVectorEnv": lambda: _gymnasium(
            "SyncVectorEnv", gym.vector.SyncVectorEnv(fns), compute
        ),
        "stable_baselines3": lambda: _sb3(fns, compute),
        "tianshou (Subproc)": lambda: _tianshou("SubprocVectorEnv", fns, compute),
        "tianshou (Shmem)": lambda: _tianshou("ShmemVectorEnv", fns, compute),
    }
    if workload in ENVPOOL:
        peers["envpool"] = lambda: _envpool(workload, n, compute)
    for name, make in peers.items():
        try:
            made.append(make())
        except ImportError as error:
            left_out[name] = str(error)
    return made


def measure(
    workload: str, n: int, compute_us: float, options: argparse.Namespace, left_out: dict[str, str]
) -> list[dict[str, Any]]:
    """One cell."""
    limit = bench.Limit(WORKLOADS[workload](8), usable_cores())  # 8: what is uneven repeats
    limits = []
    running: list[Contender] = []
    burner = multiprocessing.Process(target=_burn, daemon=True) if options.burner else None
    try:
        running = contenders(workload, n, _work(compute_us), options, left_out)
        if burner is not None:
            burner.start()
        for contender in running:
            contender.run(0.1, keep=False)
        for _ in range(ROUNDS):
            limits.append(limit.run(options.seconds / ROUNDS).steps_per_s)
            for contender in running:
                contender.run(options.seconds / ROUNDS)
    finally:
        if burner is not None and burner.pid is not None:
            burner.kill()
            burner.join()
        limit.close()
        for contender in running:
            contender.close()
    reached = statistics.median(limits)
    cell = {"workload": workload, "num_envs": n, "compute_us": compute_us, "limit": reached}
    return [{**cell, **contender.row(reached)} for contender in running]


def _burn() -> None:
    """A foreign process that takes a core."""
    while True:
        pass


def lost(rows: list[dict[str, Any]]) -> list[str]:
    """Cells in which a Python peer was faster than ShmVectorEnv with its defaults."""
    found = []
    for ours in rows:
        if ours["system"] != "ShmVectorEnv":
            continue
        cell = ("workload", "num_envs", "compute_us")
        for peer in rows:
            same = all(peer[key] == ours[key] for key in cell)
            python = "ShmVectorEnv" not in peer["system"] and "C++" not in peer["system"]
            if same and python and peer["batch_us"] < ours["batch_us"]:
                found.append(
                    f"{ours['workload']}, {ours['num_envs']} envs, parent computes "
                    f"{ours['compute_us']:.0f} µs: {peer['system']} {peer['batch_us']:.1f} µs, "
                    f"ShmVectorEnv {ours['batch_us']:.1f} µs"
                )
    return found


def _line(row: dict[str, Any]) -> str:
    return (
        f"| {row['workload']} | {row['num_envs']} | {row['compute_us']:.0f} | {row['system']} "
        f"| {row['batch_us']:,.1f} | {row['spread']:.0%} | {row['p50_us']:,.1f} "
        f"| {row['p99_us']:,.1f} | {row['steps_per_s']:,.0f} | {row['share_of_limit']:.2f} "
        f"| {row['cpu_s_per_million']:,.1f} |"
    )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[1, 2, 8, 32, 128])
    parser.add_argument("--num-workers", nargs="*", type=int, help="besides the default number")
    parser.add_argument("--policy", nargs="*", choices=WAIT_POLICIES[1:], default=[])
    parser.add_argument("--compute", nargs="+", type=float, default=[0, 200, 2000], metavar="US")
    parser.add_argument("--burner", action="store_true", help="let a foreign process burn a core")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contender")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers; none of ours

    machine = bench.machine()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print("\n| workload | envs | parent, µs | system | batch, µs | spread | p50 | p99 ", end="")
    print("| steps/s | of the limit | CPU s/10⁶ |\n|" + "---|" * 11)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for workload in options.workload:
        for n in options.num_envs:
            for compute_us in options.compute:
                print(f"{workload}, {n} envs, {compute_us} µs", file=sys.stderr, flush=True)
                cell = measure(workload, n, compute_us, options, left_out)
                rows += cell
                print("\n".join(map(_line, cell)), flush=True)
                if options.json is not None:
                    results = {"machine": machine, "left_out": left_out, "rows": rows}
                    options.json.write_text(json.dumps(results, indent=2) + "\n")
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    for line in lost(rows):
        print(f"lost: {line}")


if __name__ == "__main__":
    main()
