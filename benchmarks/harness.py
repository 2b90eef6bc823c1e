"""Shared by all benchmarks: envs, contenders in other processes, files of results, /proc.

`shmvec._commands.measuring` measures the contenders.

- Workloads: bench's envs, some of known cost, some wrapped as in training scripts; and the part of
  a command line that chooses them.
- Contenders that repeat a call, or have one long turn a round; the heading of a table.
- A contender in its own process, which shares no imports, settings or threads with others.
- Results of runs that may be killed: a JSON file with a line for each row.
- Memory and CPU time of processes, from /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np

from shmvec._commands import bench, measuring
from shmvec._commands.bench import WORKLOADS as REAL
from shmvec._commands.bench import Workload
from shmvec._commands.measuring import Result, Slice, alternate

# ---- workloads -----------------------------------------------------------------------------------


class Work(gym.Env[Any, Any]):
    """An env of known cost: it computes checksums of a number of bytes."""

    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, step: int, reset: int = 0, shape: tuple[int, ...] = (4,), length: int = 0
    ) -> None:
        """Takes the bytes of work of a step and of a reset; episodes of 0 steps never end."""
        kind = np.uint8 if len(shape) > 1 else np.float32
        self.observation_space = gym.spaces.Box(0, 1, shape, kind)
        self._observation = np.zeros(shape, kind)
        self._step, self._reset = bytes(step), bytes(reset)
        self._length = length
        self._count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Works as long as a reset takes."""
        if self._reset:
            zlib.crc32(self._reset)
        self._count = 0
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Works as long as a step takes."""
        if self._step:
            zlib.crc32(self._step)
        self._count += 1
        return self._observation, 0.0, self._count == self._length, False, {}

    def render(self) -> Any:
        """Returns a new picture."""
        return self._observation.copy()


class Asleep(Work):
    """An env whose steps and resets sleep, as in TorchRL's own benchmarks of pools."""

    def __init__(self, step_s: float, reset_s: float, length: int) -> None:
        """Takes the times to sleep, and the number of steps of an episode."""
        super().__init__(0, shape=(1,), length=length)
        self._step_s, self._reset_s = step_s, reset_s

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        """Sleeps as long as a reset takes."""
        time.sleep(self._reset_s)
        return super().reset(**given)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleeps as long as a step takes."""
        time.sleep(self._step_s)
        return super().step(action)


def _bytes_per_us() -> float:
    """The number of bytes of which a checksum is computed in a µs, undisturbed."""
    probe = bytes(1 << 16)
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        zlib.crc32(probe)
        best = min(best, time.perf_counter() - start)
    return len(probe) / (1e6 * best)


def _ant() -> gym.Env[Any, Any]:
    import mujoco

    mujoco.set_mju_user_warning(lambda message: None)
    return gym.make("Ant-v5")


def cartpole() -> gym.Env[Any, Any]:
    """CartPole as CleanRL's ppo.py and dqn.py wrap it."""
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))


class _Longer(gym.Wrapper[Any, Any, Any, Any]):
    """An env whose steps take additional CPU time."""

    def __init__(self, env: gym.Env[Any, Any], extra_s: float) -> None:
        super().__init__(env)
        self._extra_s = extra_s

    def step(self, action: Any) -> Any:
        end = time.thread_time() + self._extra_s
        while time.thread_time() < end:
            pass
        return self.env.step(action)


def slow_cartpole() -> gym.Env[Any, Any]:
    """``cartpole`` with steps that take a millisecond more."""
    return _Longer(cartpole(), 1e-3)


def cheetah() -> gym.Env[Any, Any]:
    """HalfCheetah as CleanRL's ppo_continuous_action.py wraps it."""
    env: Any = gym.wrappers.RecordEpisodeStatistics(REAL["HalfCheetah-v5"].make())
    env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(env))
    env = gym.wrappers.TransformObservation(env, clipped, env.observation_space)
    return gym.wrappers.TransformReward(gym.wrappers.NormalizeReward(env), clipped)


def clipped(value: Any) -> Any:
    """Clips a value to [-10, 10]."""
    return value.clip(-10, 10)


def pong() -> gym.Env[Any, Any]:
    """Pong as CleanRL's ppo_atari.py wraps it: 84 x 84, four frames."""
    env = gym.wrappers.RecordEpisodeStatistics(REAL["ALE/Pong-v5"].make())
    return gym.wrappers.TransformReward(env, _sign)


def _sign(reward: Any) -> float:
    return float((reward > 0) - (reward < 0))


_US = _bytes_per_us()  # measured once, so that all contenders get the same amount of work
_FAST, _SLOW = (partial(Work, int(us * _US)) for us in (20, 200))

ASLEEP = "Asleep"  # many fit on a core, so its limit has a loop for each env
WORKLOADS = {
    **REAL,
    "Noop-image": Workload(partial(Work, 0, shape=(84, 84, 4))),
    **{f"Work-{us}": Workload(partial(Work, int(us * _US))) for us in (20, 50, 1000)},
    "Uneven": Workload(_FAST, others=(*[_FAST] * 6, _SLOW)),  # one of eight is ten times slower
    "Slow-resets": Workload(partial(Work, int(20 * _US), int(1000 * _US), length=100)),
    ASLEEP: Workload(partial(Asleep, 1e-3, 0.2, 200)),
    "Ant-v5": Workload(_ant, ("mujoco",)),
    "CartPole-wrapped": Workload(cartpole),  # from here on: as training scripts wrap them
    "HalfCheetah-wrapped": Workload(cheetah, ("mujoco",)),
    "Pong-wrapped": Workload(pong, REAL["ALE/Pong-v5"].modules),
}

# EnvPool's names of the envs that it has.
ENVPOOL = {"CartPole-v1": "CartPole-v1", "HalfCheetah-v5": "HalfCheetah-v4", "Ant-v5": "Ant-v4"}


def arguments(
    doc: str,
    workloads: Sequence[str] = (),
    nums_envs: Sequence[int] = (),
    seconds: float = 2.0,
    parser: argparse.ArgumentParser | None = None,
) -> argparse.ArgumentParser:
    """Makes or extends a command line with the arguments that benchmarks share, and defaults.

    Workloads and numbers of envs are arguments only if they have a default.
    """
    parser = parser or argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if workloads:
        parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(workloads))
    if nums_envs:
        parser.add_argument("--num-envs", nargs="+", type=int, default=list(nums_envs))
    parser.add_argument("--seconds", type=float, default=seconds, help="for each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results to a file")
    return parser


# ---- contenders that call -----------------------------------------------------------------------


class Calls:
    """A contender that repeats a call."""

    def __init__(
        self,
        call: Callable[..., object],
        close: Callable[[], object] = lambda: None,
        *,
        num_envs: int = 1,
        batches: float = 1,
        before: Callable[[], Any] | None = None,
    ) -> None:
        """Takes the call.

        Args:
            call: Makes steps.
            close: Ends the contender.
            num_envs: Number of steps of a batch.
            batches: Number of batches of a call.
            before: Makes the call's argument; its time does not count.
        """
        self._call, self.close, self._before = call, close, before
        self._num_envs, self._batches = num_envs, batches

    def run(self, seconds: float) -> Slice:
        """Calls for at least ``seconds``, including the time of ``before``."""
        call, before, clock = self._call, self._before, time.perf_counter
        calls, elapsed, end = 0, 0.0, clock() + seconds
        while not calls or clock() < end:
            arguments = () if before is None else (before(),)
            begin = clock()
            call(*arguments)
            elapsed += clock() - begin
            calls += 1
        batches = calls * self._batches
        return Slice(1e6 * elapsed / batches, batches * self._num_envs / elapsed)


class _Turn(NamedTuple):
    """A contender whose turns have no set duration."""

    turn: Callable[[], Slice]

    def run(self, seconds: float) -> Slice:
        """Takes a turn."""
        return self.turn()

    def close(self) -> None:
        """Does nothing: the contender has another owner."""


def in_turns(
    turns: Mapping[Any, Callable[[], Slice]],
    rounds: int,
    say: Callable[[str], object] = lambda what: None,
) -> dict[Any, Result]:
    """Races contenders with one turn a round each, however long a turn is."""
    contenders = {name: _Turn(turn) for name, turn in turns.items()}
    return alternate(contenders, 1e-6 * rounds, rounds, say)


def heading(*columns: str) -> str:
    """The first two lines of a Markdown table."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


# ---- contenders in other processes ---------------------------------------------------------------

# The program of the process. Functions come as pickles, because it may not find this file.
_CHILD = """
import sys
from multiprocessing.connection import Connection
import cloudpickle
pipe = Connection(int(sys.argv[1]))
serve, packed = cloudpickle.loads(pipe.recv_bytes())
serve(packed, pipe)
"""

_CLOSE_S = 30  # time to close before a process is killed


class Apart:
    """A process with an object that has ``run`` and ``close``; it is idle between its turns.

    It may have another interpreter and path: another build of shmvec, other versions of libraries,
    no shmvec at all. So it gets only the function that makes the object, as a pickle, which holds
    modules by value that it may not find (`cloudpickle.register_pickle_by_value`).
    """

    def __init__(
        self,
        start: Callable[[], Any],
        *,
        python: str = sys.executable,
        path: Sequence[str] | None = None,
        stopped: bool = False,
        patience: float = 300.0,
    ) -> None:
        """Begins to start the process.

        Args:
            start: Makes the object, in the process.
            python: The interpreter. It needs cloudpickle.
            path: Folders in which it looks for modules first. None: this process's path, if the
                interpreter is the same.
            stopped: Whether the process and its children are stopped between turns, because they
                would go on working.
            patience: Seconds that the start and a turn may take.
        """
        self._stopped, self._patience, self._ready = stopped, patience, False
        self._pipe, child_pipe = Pipe()
        if path is None:
            path = [entry for entry in sys.path if entry] if python == sys.executable else []
        self._process = subprocess.Popen(
            [python, "-c", _CHILD, str(child_pipe.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            pass_fds=[child_pipe.fileno()],
            stdout=2,  # so that its output is not in a table
        )
        child_pipe.close()
        with contextlib.suppress(BrokenPipeError):  # if it has ended, ready() says so
            self._pipe.send_bytes(cloudpickle.dumps((_serve, cloudpickle.dumps(start))))

    def ready(self) -> Apart:
        """Waits until it has started; if that fails, the process is ended.

        Raises:
            ImportError: Something is not installed.
            RuntimeError: The start failed.
            TimeoutError: The start takes too long.
        """
        if not self._ready:
            try:
                self._answer()
            except BaseException:
                self.close()
                raise
            self._ready = True
            self._signal(signal.SIGSTOP)
        return self

    def run(self, *arguments: Any) -> Any:
        """Takes a turn; returns what the object's ``run`` returns."""
        self.ready()
        self._signal(signal.SIGCONT)
        self._pipe.send(arguments)
        try:
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, what: signal.Signals) -> None:
        if self._stopped and self._ready:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, what)

    def _kill(self) -> None:
        """Kills the process and its children."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):  # it has no group yet, or has ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self) -> Any:
        if not self._pipe.poll(self._patience):
            self._kill()
            raise TimeoutError(f"no answer in {self._patience:.0f} s")
        try:
            error, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError("its process has ended: see above") from None
        if error is not None:
            raise error(answer)
        return Slice(*answer) if isinstance(answer, tuple) else answer

    def close(self) -> None:
        """Ends the process, by force if that takes too long, and what it has left behind."""
        self._pipe.close()
        self._signal(signal.SIGCONT)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_S)
        finally:
            self._kill()
            self._process.wait()


def _serve(packed: bytes, pipe: Any) -> None:
    """Runs turns in the process until the pipe is closed."""
    os.setpgid(0, 0)
    warnings.simplefilter("ignore")  # those of envs and other systems; shmvec gives none
    try:
        with contextlib.closing(cloudpickle.loads(packed)()) as contender:
            pipe.send((None, None))
            while True:
                try:
                    arguments = pipe.recv()
                except (EOFError, ConnectionError):
                    return
                turn = contender.run(*arguments)
                # A Slice is sent as a tuple, because its class may differ here.
                pipe.send((None, tuple(turn) if isinstance(turn, tuple) else turn))
    except ImportError as error:
        pipe.send((ImportError, str(error)))
    except Exception as error:
        pipe.send((RuntimeError, f"{type(error).__name__}: {error}"))
        raise


# ---- files of results ----------------------------------------------------------------------------

Row = dict[str, Any]


def read_rows(file: Path | None, name: str, setup: Mapping[str, Any]) -> list[Row]:
    """Reads the rows of a name from a file, if there is one.

    Raises:
        SystemExit: They are of another machine or other versions.
    """
    if file is None or not file.exists():
        return []
    results = json.loads(file.read_text())
    if results["machine"] != setup:
        raise SystemExit(f"{file} is of another machine or other versions")
    rows: list[Row] = results[name]
    return rows


def merged(old: Sequence[Row], new: Sequence[Row], cell: Sequence[str]) -> list[Row]:
    """Old and new rows; new rows replace all old ones of their cell, which these columns name."""

    def key(row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in cell)

    anew = set(map(key, new))
    return [*(row for row in old if key(row) not in anew), *new]


def write_results(file: Path | None, results: Mapping[str, Any]) -> None:
    """Replaces the file atomically, so that it is whole even if its writer is killed."""
    if file is None:
        return
    parts = []
    for name, part in results.items():
        if isinstance(part, list):
            text = "[\n" + ",\n".join(map(json.dumps, part)) + "\n]"
        else:
            text = json.dumps(part, indent=1)
        parts.append(f"{json.dumps(name)}: {text}")
    new = file.with_name(file.name + ".new")
    new.write_text("{" + ",\n".join(parts) + "}\n")
    os.replace(new, file)


# Libraries whose versions are printed if they are installed.
LIBRARIES = (
    *("numpy", "gymnasium", "mujoco", "ale-py", "envpool", "stable-baselines3", "tianshou"),
    *("torch", "torchrl", "tensordict", "pufferlib", "sample-factory", "ray"),
)
VERSIONS = f"""
import importlib.metadata as metadata, json
found = {{}}
for name in {LIBRARIES}:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(python: str = sys.executable) -> dict[str, str]:
    """The versions of the libraries that an interpreter has."""
    done = subprocess.run([python, "-c", VERSIONS], stdout=subprocess.PIPE, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


# ---- processes -----------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Memory of a process, in MB.

    Attributes:
        pss: All pages, each divided by the number of processes that have it.
        private: Pages that no other process has.
    """

    pss: float
    private: float


def memory(pid: int) -> Memory:
    """The memory of a process; 0 if it has ended."""
    kb = dict.fromkeys(("Pss:", "Private_Clean:", "Private_Dirty:", "Private_Hugetlb:"), 0)
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return Memory(0.0, 0.0)
    for line in lines:
        name, *values = line.split()
        if name in kb:
            kb[name] = int(values[0])
    pss, *private = kb.values()
    return Memory(pss / 1024, sum(private) / 1024)


def cpu_s(pids: Iterable[int]) -> float:
    """The CPU time of processes so far, without threads that have ended."""
    total = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except OSError:
                continue
    return 1e-9 * total


# Processes of contenders may not find these modules, so they are pickled by value.
for _module in (bench, measuring, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(_module)
