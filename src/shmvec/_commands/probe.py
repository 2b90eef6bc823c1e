"""``Probe``: runs envs in a worker for the check command, and notes their side effects.

The check command has a :class:`Probe` in each worker of an Exchange, in place of an env. Its
methods make, reset and step one env or several, and return digests of the results. So processes can
be compared bit for bit without sending frames.
"""

from __future__ import annotations

import copy
import fcntl
import os
import random
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec._core import check_nesting
from shmvec._memory.layout import find_unshareable_part
from shmvec._pickling import dumps
from shmvec._processes.preloading import num_threads
from shmvec._processes.worker_process import SIGKILL_TIMEOUT_S

__all__ = ["RESULT_PARTS", "Event", "Facts", "Probe", "ProbeError", "leaves", "resident_bytes"]

RESULT_PARTS = ("observations", "rewards", "ends", "infos", "frames")

# A digest for each of RESULT_PARTS, of a reset or step; None if there is no frame.
Event = tuple[bytes | None, ...]

_NUM_SEEDS = 2
_FIRST_SEED = 20_000
_NUM_ACTIONS = 64
_MODES_WITHOUT_FRAMES = (None, "human")
_SPACES = ("observation_space", "action_space")


def seed_of(env: int) -> int:
    """The seed of an env. There are two, so only two envs need to be run alone."""
    return _FIRST_SEED + env % _NUM_SEEDS


class ProbeError(Exception):
    """An env has raised.

    Attributes:
        env: The number of the env.
        moment: A description of the call that raised.
        text: The exception, and the line that raised it.
    """

    def __init__(self, env: int, moment: str, text: str) -> None:
        """Takes the attributes."""
        super().__init__(env, moment, text)
        self.env, self.moment, self.text = env, moment, text


@dataclass
class Facts:
    """A probe's observations on its envs.

    Attributes:
        spaces: Faults of spaces.
        cast: Dtypes of an observation that has to be cast, and of its space; "" if there is none.
        needs_pickle: The part of observations that does not fit into shared memory; "" if all do.
        infos: Keys of infos that cannot be sent to another process, and why.
        generators: Global random generators that resets and steps have used.
        generators_of_build: Global random generators that making an env has used.
        buffers: How an env reuses memory that it has returned; "" if it does not.
        shared_buffers: Whether an env has changed a result of another env of this process.
        threads: Names of the Python threads that envs have started.
        native_threads: Number of other threads that they have started.
        files: Files that were open before, and whose offsets the envs have moved.
        build_s: Duration and CPU time of making each env.
        reset_us: Duration of each reset.
        step_us: Duration of each step.
        render_us: Duration of each frame.
        resident: Bytes of memory in use.
        render_mode: The render mode of the first env.
    """

    spaces: list[str] = field(default_factory=list)
    cast: str = ""
    needs_pickle: str = ""
    infos: dict[str, str] = field(default_factory=dict)
    generators: list[str] = field(default_factory=list)
    generators_of_build: list[str] = field(default_factory=list)
    buffers: str = ""
    shared_buffers: bool = False
    threads: list[str] = field(default_factory=list)
    native_threads: int = 0
    files: list[str] = field(default_factory=list)
    build_s: list[tuple[float, float]] = field(default_factory=list)
    reset_us: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    render_us: list[float] = field(default_factory=list)
    resident: int = 0
    render_mode: str | None = None

    def note_space(self, text: str) -> None:
        """Adds a fault of a space, once."""
        if text not in self.spaces and len(self.spaces) < 4:
            self.spaces.append(text)


class _ProbedEnv:
    """An env of the probe, with its actions and its last observation."""

    def __init__(self, number: int, env: Any) -> None:
        self.number = number
        self.env = env
        self.spaces = {name: _copy_space(getattr(env, name)) for name in _SPACES}
        self.actions = _actions(env.action_space, seed_of(number))
        self.num_steps = 0
        self.episode_over = False
        self.last_observation: Any = None
        self.last_digest = b""


class Probe(gym.Env[Any, Any]):
    """An env whose methods make and step other envs; ProbeError says that one has raised."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, env_fns: Sequence[Callable[[], Any]], numbers: Sequence[int]) -> None:
        """Envs take turns at the functions by their numbers, which determine their seeds, too."""
        self._env_fns = env_fns
        self._numbers = numbers
        self._envs: list[_ProbedEnv] = []
        self._facts = Facts()

    def build(self) -> None:
        """Makes the envs."""
        self._threads_before = set(threading.enumerate())
        self._num_threads_before = num_threads()
        self._file_offsets = _file_offsets()
        states = _generator_states()
        for number in self._numbers:
            with _reporting(number, "being made"):
                env_fn = self._env_fns[number % len(self._env_fns)]
                start, cpu_start = time.perf_counter(), time.process_time()
                env = env_fn()
                duration = time.perf_counter() - start, time.process_time() - cpu_start
                self._facts.build_s.append(duration)
                self._envs.append(_ProbedEnv(number, env))
        self._facts.generators_of_build = _changed_generators(states)
        self._states_before = _generator_states()
        first = self._envs[0].env
        self._facts.render_mode = getattr(first, "render_mode", None)
        for name in _SPACES:
            space = getattr(first, name)
            if any(getattr(probed.env, name) != space for probed in self._envs):
                self._facts.note_space(f"the {name} of two envs differs")
        unshareable = find_unshareable_part(first.observation_space, "the observation space")
        if unshareable is not None:
            part, path = unshareable
            self._facts.needs_pickle = f"{path} is of type {type(part).__name__}"

    def advance(self, moment: str) -> list[Event]:
        """Resets or steps each env once; returns digests of the results.

        Args:
            moment: "step", "reset" or "reset with another seed". An env whose episode is over is
                reset in place of a step.
        """
        events = []
        for probed in self._envs:
            with _reporting(probed.number, f"its {moment}"):
                events.append(self._advance_one(probed, moment))
        for probed in self._envs:
            if _digest(probed.last_observation) != probed.last_digest:
                self._facts.shared_buffers = True
        frames: list[bytes | None] = []
        for probed in self._envs:  # all are stepped first, since one may draw into another's frame
            with _reporting(probed.number, "its render"):
                frames.append(self._frame(probed.env))
        return [(*event, frame) for event, frame in zip(events, frames, strict=True)]

    def _frame(self, env: Any) -> bytes | None:
        if getattr(env, "render_mode", None) in _MODES_WITHOUT_FRAMES:
            return None
        start = time.perf_counter()
        frame = env.render()
        self._facts.render_us.append(1e6 * (time.perf_counter() - start))
        return _digest(frame)

    def _advance_one(self, probed: _ProbedEnv, moment: str) -> Event:
        env, seeded = probed.env, moment != "step"
        previous = (None, b"") if seeded else (probed.last_observation, probed.last_digest)
        start = time.perf_counter()
        if seeded or probed.episode_over:
            number = probed.number + (moment != "reset")
            seed = {"seed": seed_of(number)} if seeded else {}
            observation, info = env.reset(**seed)
            self._facts.reset_us.append(1e6 * (time.perf_counter() - start))
            reward, terminated, truncated = 0.0, False, False
            if seeded:
                probed.num_steps = 0
        else:
            action = probed.actions[probed.num_steps % _NUM_ACTIONS]
            probed.num_steps += 1
            observation, reward, terminated, truncated, info = env.step(action)
            self._facts.step_us.append(1e6 * (time.perf_counter() - start))
        ends = [bool(terminated), bool(truncated)]
        probed.episode_over = any(ends)
        probed.last_observation, probed.last_digest = observation, _digest(observation)
        self._note_faults(probed, observation, info, previous)
        return probed.last_digest, _digest(reward), _digest(ends), _digest(info)

    def _note_faults(
        self, probed: _ProbedEnv, observation: Any, info: Any, previous: tuple[Any, bytes]
    ) -> None:
        """Notes faults of results; ``previous``: the last observation and its digest."""
        facts, space = self._facts, probed.env.observation_space
        for name, original in probed.spaces.items():
            now = getattr(probed.env, name)
            if original is not None and now != original:
                facts.note_space(f"the {name} has become another one, {_shorten(now)}")
        if not _contains(space, observation):
            cast = _cast_to_space(space, observation)
            if cast is not None and _contains(space, cast):
                facts.cast = facts.cast or f"{np.asarray(observation).dtype} for {space.dtype}"
            else:
                facts.note_space(f"an observation is not in its space: {_shorten(observation)}")
        if previous[0] is not None and not facts.buffers:
            if _digest(previous[0]) != previous[1]:
                facts.buffers = "a step changes the observation that the one before has returned"
            elif _share_memory(previous[0], observation):
                facts.buffers = "two steps return the same memory"
        for key, why in _unpicklable_entries(info):
            facts.infos.setdefault(key, why)

    def facts(self) -> Facts:
        facts = self._facts
        facts.generators = _changed_generators(self._states_before)
        new_threads = [each for each in threading.enumerate() if each not in self._threads_before]
        facts.threads = [thread.name for thread in new_threads]
        facts.native_threads = max(0, num_threads() - self._num_threads_before - len(new_threads))
        now, before = _file_offsets(), self._file_offsets
        facts.files = [file[1] for file in before if now.get(file, before[file]) != before[file]]
        facts.resident = resident_bytes()
        return facts

    def fork(self, seconds: float) -> str:
        """Forks this process, and steps an env in the fork; returns the failure, or ""."""
        receiver, sender = Pipe(duplex=False)
        process = get_context("fork").Process(target=lambda: sender.send(self._step_in_fork()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, whose effect is tested here
            process.start()
        sender.close()
        try:
            failure: str = receiver.recv() if receiver.poll(seconds) else f"hangs ({seconds:.0f} s)"
            return failure
        except EOFError:
            return "crashes"
        finally:
            process.kill()
            process.join(SIGKILL_TIMEOUT_S)

    def _step_in_fork(self) -> str:
        other = Probe(self._env_fns, [self._numbers[0] + 1])
        try:
            other.build()
            for moment in ("reset", "step", "step", "step"):
                other.advance(moment)
        except ProbeError as error:
            return f"raises at {error.moment}: {error.text}"
        return ""

    def finish(self) -> None:
        """Closes the envs."""
        for probed in self._envs:
            with _reporting(probed.number, "its close"):
                probed.env.close()


@contextmanager
def _reporting(env: int, moment: str) -> Iterator[None]:
    """Raises ProbeError for what an env raises, with the line of the env that raised it."""
    try:
        yield
    except Exception as error:
        places = [
            f" ({Path(frame.filename).name}:{frame.lineno})"
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__
        ]
        text = " ".join(str(error).split())[:200]
        where = places[-1] if places else ""
        raise ProbeError(env, moment, f"{type(error).__name__}: {text}{where}") from None


def _actions(space: gym.Space[Any], seed: int) -> list[Any]:
    """Actions that depend on the seed alone, of a copy of the space where possible."""
    space = _copy_space(space) or space
    space.seed(seed)
    return [space.sample() for _ in range(_NUM_ACTIONS)]


def _copy_space(space: gym.Space[Any]) -> gym.Space[Any] | None:
    """A copy; None if the space cannot be copied."""
    with suppress(Exception):
        return copy.deepcopy(space)
    return None


def _generator_states() -> dict[str, bytes]:
    """Digests of the states of global random generators, by their names."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": np.random.get_state()}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state().numpy()
    return {name: _digest(state) for name, state in states.items()}


def _changed_generators(before: dict[str, bytes]) -> list[str]:
    return [name for name, state in _generator_states().items() if before.get(name, state) != state]


def _file_offsets() -> dict[tuple[int, str], int]:
    """Offsets of readable open files, by descriptor and name."""
    offsets: dict[tuple[int, str], int] = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the folder is closed by now
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            readable = flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_APPEND
            if descriptor > 2 and readable and stat.S_ISREG(os.fstat(descriptor).st_mode):
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                offsets[descriptor, name] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return offsets


def _contains(space: gym.Space[Any], value: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(space.contains(value))
        except Exception:
            return False


def _cast_to_space(space: gym.Space[Any], value: Any) -> Any:
    """The value, cast to the space's dtype as by vector envs; None if they refuse it."""
    if not isinstance(space, gym.spaces.Box):
        return None
    try:
        return np.asarray(value).astype(space.dtype, casting="same_kind")
    except (TypeError, ValueError):
        return None


def leaves(value: Any) -> Iterator[Any]:
    """The parts of a value that is nested in dicts, tuples and lists."""
    if isinstance(value, dict):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def _share_memory(one: Any, other: Any) -> bool:
    """Whether arrays at the same place of both values share writable memory."""
    return any(
        isinstance(a, np.ndarray)
        and isinstance(b, np.ndarray)
        and a.flags.writeable
        and np.may_share_memory(a, b)
        for a, b in zip(leaves(one), leaves(other), strict=False)
    )


def _unpicklable_entries(info: Any) -> Iterator[tuple[str, str]]:
    """The entries of an info that cannot be sent to another process: key and reason."""
    if not isinstance(info, dict):
        yield "the info", f"is a {type(info).__name__}, not a dict"
        return
    for key, value in info.items():
        if type(value) in (int, float, bool, str, np.ndarray) and getattr(value, "dtype", 0) != "O":
            continue
        try:
            check_nesting({key: value})
            dumps(value)
        except Exception as error:
            yield repr(key), " ".join(str(error).split())[:120] or type(error).__name__


def _digest(value: Any) -> bytes:
    """A digest; it is equal for values that are equal in types and bits."""
    digest = blake2b(digest_size=8)
    with suppress(RecursionError):
        _feed_digest(digest.update, value, ())
    return digest.digest()


def _feed_digest(add: Callable[[bytes], None], value: Any, ancestors: tuple[int, ...]) -> None:
    kind = type(value)
    add(f"{kind.__module__}.{kind.__qualname__}".encode())
    if id(value) in ancestors:
        return
    ancestors_and_value = (*ancestors, id(value))
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        add(f"{array.dtype} {array.shape}".encode())
        if array.dtype.hasobject:
            for each in array.ravel().tolist():
                _feed_digest(add, each, ancestors_and_value)
        else:
            add(np.ascontiguousarray(array).tobytes())
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        add(repr(value).encode())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            add(repr(key).encode())
            _feed_digest(add, value[key], ancestors_and_value)
    elif isinstance(value, (list, tuple)):
        add(str(len(value)).encode())
        for each in value:
            _feed_digest(add, each, ancestors_and_value)
    elif isinstance(value, (set, frozenset)):
        for text in sorted(map(repr, value)):
            add(text.encode())
    elif hasattr(value, "__dict__") and not callable(value):
        _feed_digest(add, vars(value), ancestors_and_value)


def _shorten(value: Any) -> str:
    """A value on one line; a large array is described by its range."""
    if isinstance(value, np.ndarray) and value.size > 6 and value.dtype.kind in "biuf":
        return f"{value.dtype} {value.shape} from {value.min()} to {value.max()}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def resident_bytes() -> int:
    """Bytes of memory in use by this process; 0 where the system does not say."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
