"""Runs envs for the check command, in a worker: digests of their results, and their side effects.

The check command runs a :class:`Probe` in each worker of an Exchange, in place of an env. When it
is called it makes, resets and steps one env or several, and returns digests of their results, so
that processes can be compared bit for bit without sending frames.
"""

from __future__ import annotations

import copy
import fcntl
import os
import random
import select
import signal
import stat
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec._memory.layout import unshareable_part
from shmvec._pickling import dumps
from shmvec._processes.preloading import num_threads
from shmvec._processes.worker_process import child_status

__all__ = ["PARTS", "Event", "Facts", "Probe", "Raised", "resident_bytes", "seed_of"]

PARTS = ("observations", "rewards", "ends", "infos", "frames")

# Digests of one reset or step, one for each of PARTS; None where there is no frame.
Event = tuple[bytes | None, ...]

_NUM_SEEDS = 2
_FIRST_SEED = 20_000
_NUM_ACTIONS = 64
_NEVER_RENDERED = (None, "human")


def seed_of(env: int) -> int:
    """The seed of an env; there are two, so that two envs alone are enough to compare with."""
    return _FIRST_SEED + env % _NUM_SEEDS


@dataclass(frozen=True)
class Raised:
    """An exception of an env.

    Attributes:
        env: The number of the env.
        moment: The call that raised it, in words.
        text: The exception, and the line that raised it.
    """

    env: int
    moment: str
    text: str


@dataclass
class Facts:
    """Observations of a probe on its envs.

    Attributes:
        spaces: Faults of spaces.
        cast: An observation's dtype and its space's, if it has to be cast; "" if none has to.
        needs_pickle: The part of observations that does not fit into shared memory; "" if all do.
        infos: Keys of infos that cannot be sent to another process, and why.
        generators: Global random generators that resets and steps have used.
        generators_built: Global random generators that making an env has used.
        buffers: How an env reuses memory that it has returned; "" if it does not.
        shared_buffers: Whether an env has changed a result of another one of this process.
        threads: Names of Python's threads that envs have started.
        native_threads: Number of other threads that they have started.
        files: Files that were open before, and whose offsets the envs have moved.
        reset_us: Time of each reset.
        step_us: Time of each step.
        render_us: Time of each frame.
        resident: Bytes of memory in use.
        render_mode: The render mode of the first env.
    """

    spaces: list[str] = field(default_factory=list)
    cast: str = ""
    needs_pickle: str = ""
    infos: dict[str, str] = field(default_factory=dict)
    generators: list[str] = field(default_factory=list)
    generators_built: list[str] = field(default_factory=list)
    buffers: str = ""
    shared_buffers: bool = False
    threads: list[str] = field(default_factory=list)
    native_threads: int = 0
    files: list[str] = field(default_factory=list)
    reset_us: list[float] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    render_us: list[float] = field(default_factory=list)
    resident: int = 0
    render_mode: str | None = None

    def note_space(self, text: str) -> None:
        """Adds a fault of a space, once."""
        if text not in self.spaces and len(self.spaces) < 4:
            self.spaces.append(text)


class _Subject:
    """One env of the probe, with its actions and its last observation."""

    def __init__(self, number: int, env: Any) -> None:
        self.number = number
        self.env = env
        self.spaces = _kept((env.observation_space, env.action_space))
        self.actions = _actions(env.action_space, seed_of(number))
        self.num_steps = 0
        self.over = False
        self.last: Any = None
        self.digest = b""


class Probe(gym.Env[Any, Any]):
    """An env that makes and steps other envs when it is called, and catches their exceptions."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, env_fns: Sequence[Callable[[], Any]], numbers: Sequence[int]) -> None:
        """Prepares; no env is made yet.

        Args:
            env_fns: Each makes one env; the envs take turns at them, by their numbers.
            numbers: A number for each env of this process; its seed follows from it.
        """
        self._env_fns = env_fns
        self._numbers = numbers
        self._subjects: list[_Subject] = []
        self._facts = Facts()

    def build(self) -> Raised | None:
        """Makes the envs; returns the exception of the first one that fails."""
        self._threads = set(threading.enumerate())
        self._tasks = num_threads()
        self._offsets = _offsets()
        before = _generators()
        for number in self._numbers:
            try:
                env_fn = self._env_fns[number % len(self._env_fns)]
                self._subjects.append(_Subject(number, env_fn()))
            except Exception as error:
                return _raised(number, "being made", error)
        self._facts.generators_built = _changed(before)
        self._before = _generators()
        first = self._subjects[0].env
        self._facts.render_mode = getattr(first, "render_mode", None)
        for name in ("observation_space", "action_space"):
            space = getattr(first, name)
            if any(getattr(subject.env, name) != space for subject in self._subjects):
                self._facts.note_space(f"the {name} of two envs differs")
        unshareable = unshareable_part(first.observation_space, "the observation space")
        if unshareable is not None:
            part, path = unshareable
            self._facts.needs_pickle = f"{path} is of type {type(part).__name__}"
        return None

    def advance(self, moment: str) -> list[Event] | Raised:
        """Resets the envs, or steps each once ("step"); returns digests of the results.

        The moments of resets are "reset", and "reset with another seed". An env whose episode is
        over is reset in place of the step.
        """
        events = []
        for subject in self._subjects:
            try:
                events.append(self._moved(subject, moment))
            except Exception as error:
                return _raised(subject.number, f"its {moment}", error)
        for subject in self._subjects:
            if _digest(subject.last) != subject.digest:
                self._facts.shared_buffers = True
        frames: list[bytes | None] = []
        for subject in self._subjects:  # only now: the others may have drawn meanwhile
            try:
                frames.append(self._frame(subject.env))
            except Exception as error:
                return _raised(subject.number, "its render", error)
        return [(*event, frame) for event, frame in zip(events, frames, strict=True)]

    def _frame(self, env: Any) -> bytes | None:
        if getattr(env, "render_mode", None) in _NEVER_RENDERED:
            return None
        start = time.perf_counter()
        frame = env.render()
        self._facts.render_us.append(1e6 * (time.perf_counter() - start))
        return _digest(frame)

    def _moved(self, subject: _Subject, moment: str) -> Event:
        env, before = subject.env, (subject.last, subject.digest)
        start = time.perf_counter()
        seeded = moment != "step"
        if seeded or subject.over:
            number = subject.number + (moment != "reset")
            seed = {"seed": seed_of(number)} if seeded else {}
            observation, info = env.reset(**seed)
            self._facts.reset_us.append(1e6 * (time.perf_counter() - start))
            reward, terminated, truncated = 0.0, False, False
            if seeded:
                subject.num_steps = 0
        else:
            action = subject.actions[subject.num_steps % _NUM_ACTIONS]
            subject.num_steps += 1
            observation, reward, terminated, truncated, info = env.step(action)
            self._facts.step_us.append(1e6 * (time.perf_counter() - start))
        ends = [bool(terminated), bool(truncated)]
        subject.over = any(ends)
        subject.last, subject.digest = observation, _digest(observation)
        if seeded and before[0] is not None:
            before = (None, b"")
        self._look(subject, observation, info, before)
        return subject.digest, _digest(reward), _digest(ends), _digest(info)

    def _look(
        self, subject: _Subject, observation: Any, info: Any, before: tuple[Any, bytes]
    ) -> None:
        """Notes faults of an observation and its info; ``before``: the last one and its digest."""
        facts, space = self._facts, subject.env.observation_space
        for name, kept in zip(("observation_space", "action_space"), subject.spaces, strict=True):
            if kept is not None and getattr(subject.env, name) != kept:
                facts.note_space(f"the {name} has become another one, {_short(space)}")
        if not _contained(space, observation):
            cast = _cast(space, observation)
            if cast is not None and _contained(space, cast):
                facts.cast = facts.cast or f"{np.asarray(observation).dtype} for {space.dtype}"
            else:
                facts.note_space(f"an observation is not in its space: {_short(observation)}")
        if before[0] is not None and not facts.buffers:
            if _digest(before[0]) != before[1]:
                facts.buffers = "a step changes the observation that the one before has returned"
            elif _overlap(before[0], observation):
                facts.buffers = "two steps return the same memory"
        for key, why in _stuck(info):
            facts.infos.setdefault(key, why)

    def facts(self) -> Facts:
        """All that was noticed until now."""
        facts = self._facts
        facts.generators = _changed(self._before)
        new = [thread for thread in threading.enumerate() if thread not in self._threads]
        facts.threads = [thread.name for thread in new]
        facts.native_threads = max(0, num_threads() - self._tasks - len(new))
        now = _offsets()
        moved = [file for file, offset in self._offsets.items() if now.get(file, offset) != offset]
        facts.files = [name for _, name in moved]
        facts.resident = resident_bytes()
        return facts

    def fork(self, seconds: float) -> str:
        """Forks this process, as a program that has made an env may, and steps an env there.

        Returns:
            The failure in the fork; "" if there was none.
        """
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: whether they matter is tested here
            pid = os.fork()
        if pid == 0:
            try:
                os.close(reader)
                os.write(writer, self._in_fork().encode()[:4000] or b"\0")
            finally:
                os._exit(0)
        os.close(writer)
        try:
            if not select.select([reader], [], [], seconds)[0]:
                return f"hangs ({seconds:.0f} s)"
            failure = os.read(reader, 4096)
            return failure.decode().strip("\0") if failure else "crashes"
        finally:
            os.close(reader)
            os.kill(pid, signal.SIGKILL)
            child_status(pid)

    def _in_fork(self) -> str:
        other = Probe(self._env_fns, [self._numbers[0] + 1])
        failed = other.build()
        for moment in ("reset", "step", "step", "step"):
            if failed is None:
                found = other.advance(moment)
                failed = found if isinstance(found, Raised) else None
        return "" if failed is None else f"raises at {failed.moment}: {failed.text}"

    def finish(self) -> Raised | None:
        """Closes the envs; returns the exception of the first one that fails."""
        for subject in self._subjects:
            try:
                subject.env.close()
            except Exception as error:
                return _raised(subject.number, "its close", error)
        return None


def _raised(env: int, moment: str, error: Exception) -> Raised:
    """Describes an exception of an env, with the line that raised it unless that is here."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename != __file__]
    where = f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
    text = " ".join(str(error).split())
    return Raised(env, moment, f"{type(error).__name__}: {text[:200]}{where}")


def _actions(space: gym.Space[Any], seed: int) -> list[Any]:
    """Actions that depend on the seed alone; a copy of the space is sampled where possible."""
    space = _kept((space,))[0] or space
    space.seed(seed)
    return [space.sample() for _ in range(_NUM_ACTIONS)]


def _kept(spaces: Sequence[gym.Space[Any]]) -> list[gym.Space[Any] | None]:
    """Copies of spaces; None of one that cannot be copied."""
    copies: list[gym.Space[Any] | None] = []
    for space in spaces:
        try:
            copies.append(copy.deepcopy(space))
        except Exception:
            copies.append(None)
    return copies


def _generators() -> dict[str, bytes]:
    """The states of the global random generators of the libraries that are loaded."""
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": np.random.get_state()}
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state().numpy()
    return {name: _digest(state) for name, state in states.items()}


def _changed(before: dict[str, bytes]) -> list[str]:
    return [name for name, state in _generators().items() if before.get(name, state) != state]


def _offsets() -> dict[tuple[int, str], int]:
    """Offsets of the open files that can be read, by descriptor and name."""
    offsets: dict[tuple[int, str], int] = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it was that of the folder itself
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            readable = flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_APPEND
            if descriptor > 2 and readable and stat.S_ISREG(os.fstat(descriptor).st_mode):
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                offsets[descriptor, name] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return offsets


def _contained(space: gym.Space[Any], value: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(space.contains(value))
        except Exception:
            return False


def _cast(space: gym.Space[Any], value: Any) -> Any:
    """The value in the space's dtype, as a vector env casts it; None if it would refuse."""
    if not isinstance(space, gym.spaces.Box):
        return None
    try:
        return np.asarray(value).astype(space.dtype, casting="same_kind")
    except (TypeError, ValueError):
        return None


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _overlap(one: Any, other: Any) -> bool:
    """Whether arrays of both, in the same place, share memory that may be written."""
    return any(
        isinstance(a, np.ndarray)
        and isinstance(b, np.ndarray)
        and a.flags.writeable
        and np.may_share_memory(a, b)
        for a, b in zip(_leaves(one), _leaves(other), strict=False)
    )


def _stuck(info: Any) -> Iterator[tuple[str, str]]:
    """The keys of an info that cannot be sent to another process, and why."""
    if not isinstance(info, dict):
        yield "the info", f"is a {type(info).__name__}, not a dict"
        return
    for key, value in info.items():
        if type(value) in (int, float, bool, str, np.ndarray) and getattr(value, "dtype", 0) != "O":
            continue
        if _contains_itself(value, (id(info),)):
            yield repr(key), "contains itself"
            continue
        try:
            dumps(value)
        except Exception as error:
            yield repr(key), " ".join(str(error).split())[:120] or type(error).__name__


def _contains_itself(value: Any, above: tuple[int, ...]) -> bool:
    if not isinstance(value, (dict, list, tuple)) or len(above) > 500:
        return False
    if id(value) in above:
        return True
    inner = value.values() if isinstance(value, dict) else value
    return any(_contains_itself(each, (*above, id(value))) for each in inner)


def _digest(value: Any) -> bytes:
    """A digest; those of two values are equal if the values are, in types and bits, too."""
    known = blake2b(digest_size=8)
    with suppress(RecursionError):
        _feed(known.update, value, ())
    return known.digest()


def _feed(add: Callable[[bytes], None], value: Any, above: tuple[int, ...]) -> None:
    kind = type(value)
    add(f"{kind.__module__}.{kind.__qualname__}".encode())
    if id(value) in above:
        return
    inside = (*above, id(value))
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        add(f"{array.dtype} {array.shape}".encode())
        if array.dtype.hasobject:
            for each in array.ravel().tolist():
                _feed(add, each, inside)
        else:
            add(np.ascontiguousarray(array).tobytes())
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        add(repr(value).encode())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            add(repr(key).encode())
            _feed(add, value[key], inside)
    elif isinstance(value, (list, tuple)):
        add(str(len(value)).encode())
        for each in value:
            _feed(add, each, inside)
    elif isinstance(value, (set, frozenset)):
        for text in sorted(map(repr, value)):
            add(text.encode())
    elif hasattr(value, "__dict__") and not callable(value):
        _feed(add, vars(value), inside)


def _short(value: Any) -> str:
    """A value on one line: an array by its range, if it is not small."""
    if isinstance(value, np.ndarray) and value.size > 6 and value.dtype.kind in "biuf":
        return f"{value.dtype} {value.shape} from {value.min()} to {value.max()}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def resident_bytes() -> int:
    """Bytes of memory that this process has in use; 0 where the system does not say."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
