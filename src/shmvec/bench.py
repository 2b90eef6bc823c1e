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

import contextlib
import importlib.util
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TextIO

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

import shmvec
from shmvec.scheduling import usable_cores

__all__ = ["DEFAULT_WORKLOADS", "WORKLOADS", "Limit", "machine", "run", "table"]

_ROUNDS = 7  # slices of each contender
_WARM_UP_S = 0.1
_CHUNK_S = 0.02  # between two looks at the clock
_ACTION_BATCHES = 16  # sampled beforehand, so that sampling is not measured

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


@dataclass(frozen=True)
class _Slice:
    """One turn of one contender."""

    batch_us: float
    steps_per_s: float
    compute_us: float = 0.0


class _Compute:
    """A fixed amount of work for the parent, of about so many µs when nothing disturbs it."""

    def __init__(self, us: float) -> None:
        self._turns = 1000
        self._turns = max(1, int(self._turns * us / min(self() for _ in range(200))))

    def __call__(self) -> float:
        """Works; returns how long it took, in µs."""
        start = time.perf_counter_ns()
        for _ in range(self._turns):
            pass
        return (time.perf_counter_ns() - start) / 1000


class _VectorContender:
    """A vector env that is stepped with random actions."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], compute: _Compute | None) -> None:
        self.envs = envs
        self._compute = compute
        envs.action_space.seed(0)
        self._actions = [envs.action_space.sample() for _ in range(_ACTION_BATCHES)]
        envs.reset(seed=0)
        self._done = np.zeros(envs.num_envs, bool)
        self._chunk = 1
        self.run(_WARM_UP_S)

    def run(self, seconds: float) -> _Slice:
        envs, actions, compute = self.envs, self._actions, self._compute
        batches = steps = 0
        elapsed = computed = 0.0
        while elapsed < seconds:
            ends = []
            start = time.perf_counter()
            for turn in range(self._chunk):
                _, _, terminations, truncations, _ = envs.step(actions[turn % _ACTION_BATCHES])
                ends.append((terminations, truncations))
                if compute is not None:
                    computed += compute()
            taken = time.perf_counter() - start
            elapsed += taken
            batches += self._chunk
            for terminations, truncations in ends:
                steps += envs.num_envs - int(self._done.sum())
                self._done = terminations | truncations
            self._chunk = max(1, min(10_000, int(self._chunk * _CHUNK_S / taken)))
        return _Slice(1e6 * elapsed / batches, steps / elapsed, computed / batches)

    def close(self) -> None:
        self.envs.close()


class Limit:
    """Free-running loops, one process a core: what no vector env can exceed on these cores."""

    def __init__(self, makes: Sequence[Callable[[], gym.Env[Any, Any]]], cores: int) -> None:
        """Starts the processes.

        Args:
            makes: Make the envs that each process steps, by turns.
            cores: How many processes.
        """
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for _ in range(cores):
            mine, theirs = context.Pipe()
            process = context.Process(target=_free_run, args=(list(makes), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.run(_WARM_UP_S)

    def run(self, seconds: float) -> _Slice:
        """One turn: the steps a second of all processes together."""
        for pipe in self._pipes:
            pipe.send(seconds)
        rate = 0.0
        for pipe in self._pipes:
            steps, elapsed = pipe.recv()
            rate += steps / elapsed
        return _Slice(0.0, rate)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _free_run(makes: Sequence[Callable[[], gym.Env[Any, Any]]], pipe: Connection) -> None:
    """Steps envs for as long as told, again and again; answers (steps, seconds)."""
    envs = [make() for make in makes]
    envs[0].action_space.seed(0)
    actions = [envs[0].action_space.sample() for _ in range(64)]
    turns = [(envs[turn % len(envs)], action) for turn, action in enumerate(actions)]
    for env in envs:
        env.reset(seed=0)
    while (seconds := pipe.recv()) is not None:
        steps = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            for env, action in turns:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            steps += len(turns)
        pipe.send((steps, time.perf_counter() - start))
    for env in envs:
        env.close()


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
    compute = None if compute_us is None else _Compute(compute_us)
    left_out, rows = {}, []
    cells = [(name, n) for name in workloads for n in nums_envs]
    for number, (name, n) in enumerate(cells, 1):
        missing = WORKLOADS[name].missing()
        if missing:
            left_out[name] = f"{' and '.join(missing)} not installed; pip install 'shmvec[bench]'"
            continue
        say = _Progress(progress, f"[{number}/{len(cells)}] {name}, {n} envs")
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
    compute: _Compute | None,
    cores: int,
    say: _Progress,
) -> list[dict[str, Any]]:
    """One cell: every contender, by turns."""
    make = WORKLOADS[name].make
    fns = [make] * n
    workers = None if num_workers is None else min(num_workers, n)
    contenders: dict[str, Limit | _VectorContender] = {}
    slices: dict[str, list[_Slice]] = {}
    try:
        for contender, build in (
            (_LIMIT, lambda: Limit([make], cores)),
            (
                _SHM,
                lambda: _VectorContender(shmvec.ShmVectorEnv(fns, num_workers=workers), compute),
            ),
            (_ASYNC, lambda: _VectorContender(AsyncVectorEnv(fns), compute)),
            (_SYNC, lambda: _VectorContender(SyncVectorEnv(fns), compute)),
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


class _Progress:
    """A line that says what is being done: rewritten on a terminal, else printed once."""

    def __init__(self, stream: TextIO | None, title: str) -> None:
        self._stream = stream
        self._title = title
        if stream is not None and not stream.isatty():
            print(title, file=stream, flush=True)

    def __call__(self, what: str) -> None:
        if self._stream is not None and self._stream.isatty():
            print(f"\r\x1b[K{self._title}: {what}", end="", file=self._stream, flush=True)

    def done(self) -> None:
        if self._stream is not None and self._stream.isatty():
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def machine() -> dict[str, Any]:
    """What a measurement belongs to: processor, cores and versions."""
    return {
        "cpu": _cpu_model(),
        "usable_cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "shmvec": shmvec.__version__,
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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
