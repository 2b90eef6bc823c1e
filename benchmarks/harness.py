"""What all benchmarks share: envs to step, contenders apart, files of results, use of processes.

How contenders are measured is shmvec's own: `shmvec._commands.measuring`.

- Workloads: bench's envs, some of known cost, some as training scripts wrap them; and the part of a
  command line that chooses them.
- Contenders that call something over and over, or have one long turn a round; a table's head.
- A contender in a process of its own: what it imports, starts or sets is no other's.
- Results made in parts, by runs that may be killed: a JSON file, a line a row.
- What /proc says of processes: memory and CPU time.
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
from shmvec._commands.measuring import Result, Slice, alternated

# ---- workloads -----------------------------------------------------------------------------------


class Work(gym.Env[Any, Any]):
    """An env of known cost: it computes checksums of so many bytes."""

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
        """A picture, of its own."""
        return self._observation.copy()


class Asleep(Work):
    """An env whose steps and resets sleep, as in TorchRL's own benchmarks of pools."""

    def __init__(self, step_s: float, reset_s: float, length: int) -> None:
        """Takes how long, and after how many steps an episode ends."""
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
    """Of which a checksum is computed while nothing disturbs it."""
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
    """An env each of whose steps computes for so many seconds more, of a core's time."""

    def __init__(self, env: gym.Env[Any, Any], more_s: float) -> None:
        super().__init__(env)
        self._more_s = more_s

    def step(self, action: Any) -> Any:
        end = time.thread_time() + self._more_s
        while time.thread_time() < end:
            pass
        return self.env.step(action)


def slow_cartpole() -> gym.Env[Any, Any]:
    """``cartpole``, whose steps take a millisecond more."""
    return _Longer(cartpole(), 1e-3)


def cheetah() -> gym.Env[Any, Any]:
    """HalfCheetah as CleanRL's ppo_continuous_action.py wraps it."""
    env: Any = gym.wrappers.RecordEpisodeStatistics(REAL["HalfCheetah-v5"].make())
    env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(env))
    env = gym.wrappers.TransformObservation(env, clipped, env.observation_space)
    return gym.wrappers.TransformReward(gym.wrappers.NormalizeReward(env), clipped)


def clipped(value: Any) -> Any:
    """Between -10 and 10."""
    return value.clip(-10, 10)


def pong() -> gym.Env[Any, Any]:
    """Pong as CleanRL's ppo_atari.py wraps it: 84 x 84, four frames."""
    env = gym.wrappers.RecordEpisodeStatistics(REAL["ALE/Pong-v5"].make())
    return gym.wrappers.TransformReward(env, _sign)


def _sign(reward: Any) -> float:
    return float((reward > 0) - (reward < 0))


_US = _bytes_per_us()  # measured once: all contenders get the same amounts, which disturbance slows
_FAST, _SLOW = (partial(Work, int(us * _US)) for us in (20, 200))

ASLEEP = "Asleep"  # many fit on a core: its limit is a loop an env
WORKLOADS = {
    **REAL,
    "Noop-image": Workload(partial(Work, 0, shape=(84, 84, 4))),
    **{f"Work-{us}": Workload(partial(Work, int(us * _US))) for us in (20, 50, 1000)},
    "Uneven": Workload(_FAST, others=(*[_FAST] * 6, _SLOW)),  # one of eight is ten times slower
    "Slow-resets": Workload(partial(Work, int(20 * _US), int(1000 * _US), length=100)),
    ASLEEP: Workload(partial(Asleep, 1e-3, 0.2, 200)),
    "Ant-v5": Workload(_ant, ("mujoco",)),
    "CartPole-wrapped": Workload(cartpole),  # these as training scripts have them
    "HalfCheetah-wrapped": Workload(cheetah, ("mujoco",)),
    "Pong-wrapped": Workload(pong, REAL["ALE/Pong-v5"].modules),
}

# What EnvPool has of them.
ENVPOOL = {"CartPole-v1": "CartPole-v1", "HalfCheetah-v5": "HalfCheetah-v4", "Ant-v5": "Ant-v4"}


def arguments(
    doc: str,
    workloads: Sequence[str] = (),
    nums_envs: Sequence[int] = (),
    seconds: float = 2.0,
    parser: argparse.ArgumentParser | None = None,
) -> argparse.ArgumentParser:
    """A command line, or a given one, with what benchmarks let the user choose, and these defaults.

    Of workloads and numbers of envs only if there is a default.
    """
    parser = parser or argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if workloads:
        parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(workloads))
    if nums_envs:
        parser.add_argument("--num-envs", nargs="+", type=int, default=list(nums_envs))
    parser.add_argument("--seconds", type=float, default=seconds, help="for each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results, written to a file")
    return parser


# ---- contenders that call -----------------------------------------------------------------------


class Calls:
    """A contender that calls something over and over."""

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
            num_envs: How many steps a batch has.
            batches: How many of these a call makes.
            before: Makes the call's argument, outside the clock.
        """
        self._call, self.close, self._before = call, close, before
        self._num_envs, self._batches = num_envs, batches

    def run(self, seconds: float) -> Slice:
        """Calls for at least so many seconds, what is outside the clock included."""
        call, before, clock = self._call, self._before, time.perf_counter
        calls, taken, end = 0, 0.0, clock() + seconds
        while not calls or clock() < end:
            arguments = () if before is None else (before(),)
            begin = clock()
            call(*arguments)
            taken += clock() - begin
            calls += 1
        batches = calls * self._batches
        return Slice(1e6 * taken / batches, batches * self._num_envs / taken)


class _Turn(NamedTuple):
    """A contender whose turn takes as long as it takes."""

    turn: Callable[[], Slice]

    def run(self, seconds: float) -> Slice:
        """One turn."""
        return self.turn()

    def close(self) -> None:
        """Nothing: it has other owners."""


def in_turns(
    turns: Mapping[Any, Callable[[], Slice]],
    rounds: int,
    say: Callable[[str], object] = lambda what: None,
) -> dict[Any, Result]:
    """Races contenders of which each has one turn a round, however long that is."""
    contenders = {name: _Turn(turn) for name, turn in turns.items()}
    return alternated(contenders, 1e-6 * rounds, rounds, say)


def heading(*columns: str) -> str:
    """The first two lines of a Markdown table."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


# ---- contenders apart ----------------------------------------------------------------------------

# What its interpreter runs: functions that come as a pickle, for it may not find this file.
_CHILD = """
import sys
from multiprocessing.connection import Connection
import cloudpickle
pipe = Connection(int(sys.argv[1]))
serve, packed = cloudpickle.loads(pipe.recv_bytes())
serve(packed, pipe)
"""

_END_S = 30  # to close


class Apart:
    """A process with an object that has ``run`` and ``close``; it rests between its turns.

    Its interpreter and its path may be others: another build of shmvec, other versions of
    libraries, no shmvec at all. So nothing is handed on but what makes the object, as a pickle,
    with the modules that it may not find there by value (`cloudpickle.register_pickle_by_value`).
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
        """Begins to start it.

        Args:
            start: Makes the object, there.
            python: The interpreter. It needs cloudpickle.
            path: Where it looks for modules before it does in its own places. None: where this
                process does, if the interpreter is the same.
            stopped: Whether the process, and all that it starts, is stopped between turns: for
                those that go on working.
            patience: How many seconds it may take to start, and for a turn.
        """
        self._stopped, self._patience, self._ready = stopped, patience, False
        self._pipe, theirs = Pipe()
        if path is None:
            path = [entry for entry in sys.path if entry] if python == sys.executable else []
        self._process = subprocess.Popen(
            [python, "-c", _CHILD, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            pass_fds=[theirs.fileno()],
            stdout=2,  # what it prints is no part of a table
        )
        theirs.close()
        with contextlib.suppress(BrokenPipeError):  # it has ended: ready() says so
            self._pipe.send_bytes(cloudpickle.dumps((_serve, cloudpickle.dumps(start))))

    def ready(self) -> Apart:
        """Waits until it has started; one that fails is ended.

        Raises:
            ImportError: Something is not installed.
            RuntimeError: It has failed, and why.
            TimeoutError: It takes too long.
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
        """One turn: what the object's ``run`` returns."""
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
        """Ends it, and what it has started, at once."""
        self._process.kill()
        with contextlib.suppress(ProcessLookupError):  # it is too young to have a group, or gone
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
        """Ends it, and if that takes too long, with force; and whatever it has left behind."""
        self._pipe.close()
        self._signal(signal.SIGCONT)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        finally:
            self._kill()
            self._process.wait()


def _serve(packed: bytes, pipe: Any) -> None:
    """In the process: runs turns until the pipe is closed."""
    os.setpgid(0, 0)
    warnings.simplefilter("ignore")  # of envs and peers; none of ours
    try:
        with contextlib.closing(cloudpickle.loads(packed)()) as contender:
            pipe.send((None, None))
            while True:
                try:
                    arguments = pipe.recv()
                except (EOFError, ConnectionError):
                    return
                turn = contender.run(*arguments)
                # A Slice goes as what it holds: here its class may be another one.
                pipe.send((None, tuple(turn) if isinstance(turn, tuple) else turn))
    except ImportError as error:
        pipe.send((ImportError, str(error)))
    except Exception as error:
        pipe.send((RuntimeError, f"{type(error).__name__}: {error}"))
        raise


# ---- files of results ----------------------------------------------------------------------------

Row = dict[str, Any]


def read_rows(file: Path | None, name: str, setup: Mapping[str, Any]) -> list[Row]:
    """The rows of that name that are there.

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
    """All rows; of a cell, which these columns name, that was measured anew the new ones."""

    def key(row: Row) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in cell)

    anew = set(map(key, new))
    return [*(row for row in old if key(row) not in anew), *new]


def write_results(file: Path | None, results: Mapping[str, Any]) -> None:
    """Replaces the file at once, so that it is whole whenever its writer is killed."""
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


# Libraries whose versions are printed, where they are installed.
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
    """What an interpreter has of the libraries."""
    done = subprocess.run([python, "-c", VERSIONS], stdout=subprocess.PIPE, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


# ---- processes -----------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Memory of a process, in MB.

    Attributes:
        pss: Its pages, each divided by the number of those that have it.
        private: Pages that no other process has.
    """

    pss: float
    private: float


def memory(pid: int) -> Memory:
    """What a process has; nothing if it has ended."""
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
    """What processes have used so far, those of their threads that have ended excepted."""
    total = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except OSError:
                continue
    return 1e-9 * total


# Processes of contenders may not find these: what they need of them goes by value.
for _module in (bench, measuring, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(_module)
