"""Replay buffers: what a batch step's insertion costs, a sample, and the memory of a transition.

    python benchmarks/replay.py                      # two workloads: seven minutes
    python benchmarks/replay.py --memory             # Atari: 50,000 kept, and 10^6 by arithmetic
    python benchmarks/replay.py --workload HalfCheetah --only shmvec SB3

All contenders get what the same vector env returns: eight envs whose observations never change, of
the shapes of HalfCheetah (17 numbers, 6 actions) and of Atari (four frames of 84 x 84), in
SAME_STEP mode, with episodes of 500 steps. What is an episode's last observation is put in place
outside the clock. Of the others `insertion` is their own `add` or `extend`, and what makes its
arguments of the results. `shmvec.Replay` has no such call: its insertion is the difference between
the batch steps of two vector envs, one recorded and one not, which take turns; so what its workers
do while the caller waits counts. cpprb's `next_of` and `stack_compress` take each transition for
the next one's predecessor: they get a buffer an env, each of which is added to and sampled.

`sampling` is a call that returns 256 transitions, in the type that the buffer returns: tensors of
SB3 and TorchRL, arrays of cpprb and `shmvec.Replay`. Calls follow one another at once; `after 5 ms`
each comes when the caller has slept for so long, as one does whose GPU learns: what was prepared
meanwhile costs it nothing. `held` is for how long a sample stops a thread that counts in Python: it
holds the GIL for that long, or takes it so often (an idle machine is needed for that). With
priorities, `priorities` is what it takes to set those of the sample anew. The limit is a copy of as
many bytes, by a thread or by one a core, whichever is faster: of a batch step's results, and of a
sample. Torch has one thread (`--torch-threads`): a second one makes TorchRL's samples of Atari
faster where both cores are idle, and all of them many times slower where they are not.

`bytes` is by how much the memory of all processes has grown, shared memory and mapped files
included, when the buffer was full, for each transition. The other figures are medians over turns,
which contenders take in one process, in random order; beside them are the least and the largest.

What is not installed gets a row that says so. All of them, beside the packages of `bench`:

    pip install torch stable-baselines3 torchrl tensordict cpprb

TorchRL's priorities need its extension, which fits one version of torch (0.14.1: not 2.13).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

import shmvec
from shmvec._commands.measuring import Progress, Slice, described, line, machine, race
from shmvec._cores import descendants, usable_cores

NUM_ENVS = 8
SAMPLED = 256
STEPS = 500  # of an episode
STACK = 4
ALPHA, BETA = 0.6, 0.4
ROUNDS = 9
PAUSE_S = 0.005
LIMIT, BARE, OURS = "a copy of as many bytes", "not recorded", "shmvec.Replay"


# ---- what is kept --------------------------------------------------------------------------------


class Still(gym.Env[Any, Any]):
    """An env that takes no time: its observation never changes."""

    def __init__(self, observation: Any, actions: gym.Space[Any], high: float) -> None:
        """Takes the observation and the action space."""
        kind = observation.dtype.type
        low = 0 if kind is np.uint8 else -high
        self.observation_space = gym.spaces.Box(low, high, observation.shape, kind)
        self.action_space = actions
        self._observation = observation
        self._step = self._episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begins an episode."""
        self._step = 0
        self._episode += 1
        return self._observation, {}

    def step(self, action: Any) -> Any:
        """Ends every other episode by a termination, and those between by a truncation."""
        self._step += 1
        over = self._step == STEPS
        terminated = over and self._episode % 2 == 0
        return self._observation, 1.0, terminated, over and not terminated, {}


def cheetah() -> gym.Env[Any, Any]:
    """Numbers of HalfCheetah's shapes."""
    numbers = np.random.default_rng(0).normal(size=17)
    return Still(numbers, gym.spaces.Box(-1, 1, (6,), np.float32), np.inf)


def atari() -> gym.Env[Any, Any]:
    """Frames as AtariPreprocessing makes them, four in a stack."""
    frame = np.random.default_rng(0).integers(256, size=(84, 84), dtype=np.uint8)
    frames = Still(frame, gym.spaces.Discrete(6), 255)
    return gym.wrappers.FrameStackObservation(frames, STACK)


class Workload(NamedTuple):
    """What is kept, and how much of it."""

    make: Callable[[], gym.Env[Any, Any]]
    capacity: int
    stacked: bool


WORKLOADS = {
    "HalfCheetah": Workload(cheetah, 100_000, False),
    "Atari": Workload(atari, 20_000, True),
}


class Batch(NamedTuple):
    """The transitions of a batch step: of each env one."""

    observations: Any
    actions: Any
    rewards: Any
    following: Any
    terminations: Any
    truncations: Any


class Source:
    """A vector env and the transitions that it makes."""

    def __init__(self, workload: Workload, num_envs: int) -> None:
        """Starts it."""
        self.envs = shmvec.ShmVectorEnv(
            [workload.make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
        )
        self.close = self.envs.close
        self.envs.action_space.seed(0)
        self._actions = [self.envs.action_space.sample() for _ in range(16)]
        self._steps = 0
        self._observations, _ = self.envs.reset(seed=0)

    def step(self) -> tuple[Any, ...]:
        """Makes a batch step, and returns its actions and results."""
        actions = self._actions[self._steps % 16]
        self._steps += 1
        return actions, *self.envs.step(actions)

    def batch(self) -> Batch:
        """Makes a batch step, and returns its transitions."""
        actions, observations, rewards, terminations, truncations, infos = self.step()
        following = observations
        if "_final_obs" in infos:
            following = observations.copy()
            ended = infos["_final_obs"]
            following[ended] = np.stack(infos["final_obs"][ended])
        before, self._observations = self._observations, observations
        return Batch(before, actions, rewards, following, terminations, truncations)


# ---- contenders ----------------------------------------------------------------------------------


class Buffer:
    """A replay buffer, filled by a source."""

    prioritized = False

    def __init__(self, source: Source, capacity: int) -> None:
        """Makes it, of so many transitions."""
        raise NotImplementedError

    def insert(self, batch: Batch) -> None:
        """Adds a batch step's transitions."""
        raise NotImplementedError

    def sample(self) -> Any:
        """Returns SAMPLED transitions."""
        raise NotImplementedError

    def prioritize(self, sample: Any, priorities: Any) -> None:
        """Sets the priorities of a sample's transitions."""
        raise NotImplementedError

    def fill(self, source: Source, steps: int) -> None:
        """Adds so many batch steps."""
        for _ in range(steps):
            self.insert(source.batch())

    def close(self) -> None:
        """Lets its memory go."""
        self.__dict__.clear()


class SB3(Buffer):
    """Stable-Baselines3's."""

    def __init__(self, source: Source, capacity: int, optimized: bool = False) -> None:
        """Makes it, with or without ``optimize_memory_usage``."""
        from stable_baselines3.common.buffers import ReplayBuffer

        envs = source.envs
        self._buffer = ReplayBuffer(
            capacity,
            envs.single_observation_space,
            envs.single_action_space,
            "cpu",
            envs.num_envs,
            optimize_memory_usage=optimized,
            handle_timeout_termination=not optimized,
        )
        self._infos = [[{"TimeLimit.truncated": truncated}] for truncated in (False, True)]

    def insert(self, batch: Batch) -> None:
        """Adds; it takes infos as lists of dicts."""
        infos = [{"TimeLimit.truncated": each} for each in batch.truncations.tolist()]
        dones = batch.terminations | batch.truncations
        self._buffer.add(
            batch.observations, batch.following, batch.actions, batch.rewards, dones, infos
        )

    def sample(self) -> Any:
        """Tensors."""
        return self._buffer.sample(SAMPLED)


class TorchRL(Buffer):
    """TorchRL's TensorDictReplayBuffer."""

    def __init__(
        self, source: Source, capacity: int, storage: str, prioritized: bool = False
    ) -> None:
        """Makes it, with a storage of one of its classes."""
        torch = import_module("torch")
        rb = import_module("torchrl.data.replay_buffers")
        self._dict = import_module("tensordict").TensorDict
        self._tensor = torch.from_numpy
        try:
            sampler = rb.PrioritizedSampler(capacity, ALPHA, BETA) if prioritized else None
        except RuntimeError as error:
            raise ImportError(f"its extension does not fit torch {torch.__version__}") from error
        self.prioritized = prioritized
        self._folder = tempfile.TemporaryDirectory() if storage == "LazyMemmapStorage" else None
        options = {} if self._folder is None else {"scratch_dir": self._folder.name}
        self._buffer = rb.TensorDictReplayBuffer(
            storage=getattr(rb, storage)(capacity, **options),
            sampler=sampler,
            batch_size=SAMPLED,
            priority_key="priority",
        )

    def insert(self, batch: Batch) -> None:
        """Adds; it takes tensors in a TensorDict, as TorchRL's envs return them."""
        tensor, num = self._tensor, len(batch.rewards)
        following = {
            "observation": tensor(batch.following),
            "reward": tensor(batch.rewards),
            "terminated": tensor(batch.terminations),
            "truncated": tensor(batch.truncations),
            "done": tensor(batch.terminations | batch.truncations),
        }
        transitions = {
            "observation": tensor(batch.observations),
            "action": tensor(batch.actions),
            "next": self._dict(following, [num]),
        }
        self._buffer.extend(self._dict(transitions, [num]))

    def sample(self) -> Any:
        """A TensorDict."""
        return self._buffer.sample()

    def prioritize(self, sample: Any, priorities: Any) -> None:
        """Sets them by index."""
        self._buffer.update_priority(sample["index"], self._tensor(priorities))

    def close(self) -> None:
        """Removes its files, too."""
        folder = self._folder
        super().close()
        if folder is not None:
            gc.collect()
            folder.cleanup()


class Cpprb(Buffer):
    """cpprb's, one for all envs."""

    def __init__(self, source: Source, capacity: int, prioritized: bool = False) -> None:
        """Makes it."""
        cpprb = import_module("cpprb")
        self.prioritized = prioritized
        fields = self.fields(source)
        fields["next_obs"] = dict(fields["obs"])
        if prioritized:
            self._buffer = cpprb.PrioritizedReplayBuffer(capacity, fields, alpha=ALPHA)
        else:
            self._buffer = cpprb.ReplayBuffer(capacity, fields)

    @staticmethod
    def fields(source: Source) -> dict[str, dict[str, Any]]:
        """What it keeps of a transition, besides the next observation."""
        spaces = {
            "obs": source.envs.single_observation_space,
            "act": source.envs.single_action_space,
        }
        fields: dict[str, dict[str, Any]] = {
            name: {"shape": space.shape or 1, "dtype": space.dtype}
            for name, space in spaces.items()
        }
        return {**fields, "rew": {"dtype": np.float32}, "done": {"dtype": np.bool_}}

    def insert(self, batch: Batch) -> None:
        """Adds; it has no field of its own for truncations."""
        self._buffer.add(
            obs=batch.observations,
            act=batch.actions,
            rew=batch.rewards,
            next_obs=batch.following,
            done=batch.terminations,
        )

    def sample(self) -> Any:
        """A dict of arrays."""
        return (
            self._buffer.sample(SAMPLED, BETA) if self.prioritized else self._buffer.sample(SAMPLED)
        )

    def prioritize(self, sample: Any, priorities: Any) -> None:
        """Sets them by index."""
        self._buffer.update_priorities(sample["indexes"], priorities)


class CpprbApart(Cpprb):
    """cpprb's, one an env: what it derives from a transition's neighbours, it derives by index."""

    def __init__(self, source: Source, capacity: int, stacked: bool = False) -> None:
        """Makes them, with ``next_of`` and perhaps with ``stack_compress``."""
        cpprb = import_module("cpprb")
        num = source.envs.num_envs
        fields = self.fields(source)
        self._stacked = stacked
        if stacked:  # it stacks along the last axis
            fields["obs"]["shape"] = (*fields["obs"]["shape"][1:], STACK)
        options = {"stack_compress": "obs"} if stacked else {}
        self._buffers = [
            cpprb.ReplayBuffer(capacity // num, fields, next_of="obs", **options)
            for _ in range(num)
        ]

    def insert(self, batch: Batch) -> None:
        """Adds to each; it must be told of ends."""
        observations, following = batch.observations, batch.following
        if self._stacked:
            observations, following = (
                np.moveaxis(observations, 1, -1),
                np.moveaxis(following, 1, -1),
            )
        for env, buffer in enumerate(self._buffers):
            buffer.add(
                obs=observations[env],
                act=batch.actions[env],
                rew=batch.rewards[env],
                next_obs=following[env],
                done=batch.terminations[env],
            )
            if batch.terminations[env] or batch.truncations[env]:
                buffer.on_episode_end()

    def sample(self) -> Any:
        """Of each env as many, put together."""
        share = SAMPLED // len(self._buffers)
        parts = [buffer.sample(share) for buffer in self._buffers]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class Ours(Buffer):
    """shmvec's: the workers of a vector env of its own write into it."""

    def __init__(
        self, source: Source, capacity: int, prioritized: bool = False, **options: Any
    ) -> None:
        """Attaches it."""
        from shmvec import Replay

        self.prioritized = prioritized
        self._replay = Replay(
            source.envs, capacity, prioritized=ALPHA if prioritized else None, seed=0, **options
        )
        source.envs.reset(seed=0)

    def fill(self, source: Source, steps: int) -> None:
        """Steps its envs."""
        for _ in range(steps):
            source.step()

    def sample(self) -> Any:
        """Arrays."""
        return self._replay.sample(SAMPLED, beta=BETA)

    def prioritize(self, sample: Any, priorities: Any) -> None:
        """Sets them by index."""
        self._replay.update_priorities(sample.indices, priorities)

    def close(self) -> None:
        """Ends the recording."""
        self._replay.close()
        super().close()


Make = Callable[[Source, int], Buffer]


def contenders(workload: Workload) -> dict[str, Make]:
    """What makes each buffer, by name."""
    makes: dict[str, Make] = {
        OURS: Ours,
        f"{OURS}, prioritized": partial(Ours, prioritized=True),
        "SB3 ReplayBuffer": SB3,
        "SB3, optimize_memory_usage": partial(SB3, optimized=True),
        "TorchRL, LazyMemmapStorage": partial(TorchRL, storage="LazyMemmapStorage"),
        "TorchRL, LazyTensorStorage": partial(TorchRL, storage="LazyTensorStorage"),
        "TorchRL, PrioritizedSampler": partial(
            TorchRL, storage="LazyTensorStorage", prioritized=True
        ),
        "cpprb ReplayBuffer": Cpprb,
        "cpprb, next_of": CpprbApart,
    }
    if workload.stacked:
        makes["cpprb, stack_compress"] = partial(CpprbApart, stacked=True)
    makes["cpprb PrioritizedReplayBuffer"] = partial(Cpprb, prioritized=True)
    return makes


# ---- measuring -----------------------------------------------------------------------------------


class Timed:
    """A contender of a race: a call, made over and over."""

    def __init__(
        self, call: Callable[[Any], object], before: Callable[[], Any] = lambda: None
    ) -> None:
        """Takes the call, and what makes its argument outside the clock."""
        self._call, self._before = call, before

    def run(self, seconds: float) -> Slice:
        """Calls for so many seconds, what is outside the clock included."""
        call, before, clock = self._call, self._before, time.perf_counter
        calls, taken, end = 0, 0.0, clock() + seconds
        while clock() < end or not calls:
            argument = before()
            start = clock()
            call(argument)
            taken += clock() - start
            calls += 1
        return Slice(1e6 * taken / calls, 0.0)

    def close(self) -> None:
        """Nothing: what it calls has other owners."""


def _seconds(call: Callable[[], object]) -> float:
    """What a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Copier:
    """A copy of so many bytes, by one thread or by one a core, whichever is faster."""

    def __init__(self, size: int) -> None:
        """Takes the memory, much more to copy from than a cache holds."""
        self._size = size
        self._source = np.ones(max(1 << 28, 4 * size), np.uint8)
        self._target = np.ones(size, np.uint8)
        self._threads = usable_cores()
        self._pool = ThreadPoolExecutor(self._threads)
        self._at = 0
        times = {}
        for threads in (usable_cores(), 1):
            self._threads = threads
            times[threads] = statistics.median(_seconds(self) for _ in range(50))
        self._threads = min(times, key=lambda threads: times[threads])

    def __call__(self) -> None:
        """Copies the next bytes."""
        self._at = (self._at + self._size) % (len(self._source) - self._size)
        source = self._source[self._at : self._at + self._size]
        if self._threads == 1:
            np.copyto(self._target, source)
        else:
            parts = [np.array_split(each, self._threads) for each in (self._target, source)]
            list(self._pool.map(np.copyto, *parts))

    def close(self) -> None:
        """Ends its threads."""
        self._pool.shutdown()


class Counting(threading.Thread):
    """A thread that counts in Python, and notes for how long it has slept: it wanted the GIL.

    While it only waits for a core it does not sleep, as the system says by its context switches.
    """

    def __init__(self) -> None:
        """Begins."""
        super().__init__(daemon=True)
        self.slept_us = 0.0
        self._going = True
        self.start()

    def run(self) -> None:
        """Counts; a gap of more than 5 µs is no work of its own."""
        clock, usage, own = time.perf_counter_ns, resource.getrusage, resource.RUSAGE_THREAD
        last, sleeps = clock(), usage(own).ru_nvcsw
        while self._going:
            now = clock()
            if now - last > 5000:
                if (slept := usage(own).ru_nvcsw) != sleeps:
                    self.slept_us += (now - last) / 1000
                    sleeps = slept
                now = clock()
            last = now

    def close(self) -> None:
        """Ends."""
        self._going = False
        self.join()


def held_us(call: Callable[[], object], seconds: float) -> float:
    """For how long a call holds the GIL: for so long another thread cannot count."""
    with contextlib.closing(Counting()) as counting:
        time.sleep(0.1)
        start, before, calls = time.perf_counter(), counting.slept_us, 0
        while time.perf_counter() - start < seconds or not calls:
            call()
            calls += 1
        return (counting.slept_us - before) / calls


def memory() -> int:
    """Bytes of this process and all below it, each shared one counted once."""
    return sum(map(_memory_of, [os.getpid(), *descendants(os.getpid())]))


def _memory_of(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return sum(int(each.split()[1]) << 10 for each in file if each.startswith("Pss:"))
    return 0


class Filled(NamedTuple):
    """A full buffer.

    Attributes:
        buffer: It.
        source: What has filled it.
        size: By how many bytes all memory has grown.
    """

    buffer: Buffer
    source: Source
    size: int


@contextlib.contextmanager
def filled(make: Make, source: Source, capacity: int) -> Iterator[Filled]:
    """A buffer that was filled.

    Raises:
        ImportError: What it needs is not installed.
    """
    make(source, 64 * source.envs.num_envs).close()  # imports
    gc.collect()
    before = memory()
    with contextlib.closing(make(source, capacity)) as buffer:
        buffer.fill(source, -(-capacity // source.envs.num_envs) + STEPS)
        yield Filled(buffer, source, memory() - before)


def wanted(name: str, only: Sequence[str] | None) -> bool:
    """Whether a contender's name has one of these in it."""
    return only is None or any(each.lower() in name.lower() for each in only)


def figures(values: Sequence[float]) -> list[str]:
    """Two cells: the median, and the least and the largest."""
    shown = ".2f" if max(map(abs, values)) < 10 else ",.0f"
    least, most = format(min(values), shown), format(max(values), shown)
    return [format(statistics.median(values), shown), f"{least} to {most}"]


COLUMNS = (
    *("insertion, µs", "", "sampling, µs", "", f"after {PAUSE_S * 1e3:.0f} ms, µs", ""),
    *("held, µs", "priorities, µs", "", "bytes"),
)


def without(call: Callable[[], object]) -> Callable[[object], object]:
    """A call that takes an argument, and passes none on."""

    def called(_: object) -> object:
        return call()

    return called


def measure(workload: Workload, options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Prints a row for each contender."""
    rows: dict[str, list[str]] = {}
    full: dict[str, Filled] = {}
    with contextlib.ExitStack() as stack:

        def started() -> Source:
            return stack.enter_context(contextlib.closing(Source(workload, options.num_envs)))

        source, bare = started(), started()
        for name, make in contenders(workload).items():
            if not wanted(name, options.only):
                continue
            say(f"filling {name}")
            own = started() if name.startswith(OURS) else source
            try:
                full[name] = stack.enter_context(filled(make, own, workload.capacity))
            except ImportError as error:
                rows[name] = [str(error)]
        batch = source.batch()
        observed, acted = batch.observations.nbytes, batch.actions.nbytes
        sizes = observed + acted, SAMPLED * (2 * observed + acted) // options.num_envs
        step, sample = (stack.enter_context(contextlib.closing(Copier(size))) for size in sizes)

        inserting: dict[str, Callable[[], Timed]] = {
            LIMIT: partial(Timed, without(step), bare.batch),
            BARE: partial(Timed, without(bare.step)),
        }
        samplers: dict[str, Callable[[], object]] = {LIMIT: sample}
        prioritizing: dict[str, Callable[[], Timed]] = {}
        priorities = np.random.default_rng(0).random(SAMPLED).astype(np.float32) + 0.1
        for name, each in full.items():
            if isinstance(each.buffer, Ours):
                inserting[name] = partial(Timed, without(each.source.step))
            else:
                inserting[name] = partial(Timed, each.buffer.insert, source.batch)
            samplers[name] = each.buffer.sample
            if each.buffer.prioritized:
                setting = partial(each.buffer.prioritize, priorities=priorities)
                prioritizing[name] = partial(Timed, setting, each.buffer.sample)

        def times(contenders: Mapping[str, Callable[[], Timed]]) -> dict[str, list[float]]:
            results = race(contenders, options.seconds, options.rounds, say=say)
            return {
                name: [turn.batch_us for turn in result.slices] for name, result in results.items()
            }

        inserted = times(inserting)
        at_once = {name: partial(Timed, without(call)) for name, call in samplers.items()}
        sampled = times(at_once)
        pause = partial(time.sleep, PAUSE_S)
        later = times({name: partial(start, before=pause) for name, start in at_once.items()})
        prioritized = times(prioritizing)
        say("the GIL")
        for name, call in samplers.items():
            turns = inserted[name]
            if name.startswith(OURS):
                turns = [one - other for one, other in zip(turns, inserted[BARE], strict=True)]
            rows[name] = [
                *(*figures(turns), *figures(sampled[name]), *figures(later[name])),
                f"{held_us(call, options.seconds / 4):,.0f}",
                *(figures(prioritized[name]) if name in prioritized else ["", ""]),
                f"{full[name].size / workload.capacity:,.0f}" if name in full else "",
            ]
        rows[BARE] = [f"({cell})" for cell in figures(inserted[BARE])]
    for name in [LIMIT, *contenders(workload), BARE]:
        if name in rows:
            print(line(name, *rows[name], *[""] * (len(COLUMNS) - len(rows[name]))), flush=True)


# ---- a million Atari transitions -----------------------------------------------------------------

MILLION = 1_000_000
FRAME = 84 * 84
PAIR = 2 * STACK * FRAME


def sums() -> dict[str, tuple[str, float]]:
    """What each contender keeps of an Atari transition, in words and in bytes."""
    return {
        OURS: ("frame, action, reward, kind", FRAME + 8 + 8 + 1),
        "SB3 ReplayBuffer": ("2 stacks, action, 3 float32", PAIR + 8 + 3 * 4),
        "SB3, optimize_memory_usage": ("stack, action, 3 float32", PAIR / 2 + 8 + 3 * 4),
        "TorchRL, LazyMemmapStorage": ("2 stacks, action, reward, 3 flags", PAIR + 8 + 8 + 3),
        "TorchRL, LazyTensorStorage": ("2 stacks, action, reward, 3 flags", PAIR + 8 + 8 + 3),
        "cpprb ReplayBuffer": ("2 stacks, action, float32, flag", PAIR + 8 + 4 + 1),
        "cpprb, next_of": ("stack, action, float32, flag", PAIR / 2 + 8 + 4 + 1),
        "cpprb, stack_compress": (
            f"frame, action, float32, flag; {STACK} x 2 stacks an episode",
            FRAME + 8 + 4 + 1 + STACK * PAIR / STEPS,
        ),
    }


def weigh(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Prints by how much memory grows, and what a million would need."""
    workload = WORKLOADS["Atari"]._replace(capacity=options.transitions)
    print(f"\nAtari: {options.transitions:,} kept, {options.num_envs} envs\n")
    columns = ("GiB, grown", "bytes of one", "by arithmetic", "", f"GB of {MILLION:,}")
    print(line("", *columns))
    print(line("---", *["--:"] * 3, "---", "--:"), flush=True)
    makes = contenders(workload)
    for name, (text, size) in sums().items():
        if not wanted(name, options.only):
            continue
        say(name)
        try:
            with (
                contextlib.closing(Source(workload, options.num_envs)) as source,
                filled(makes[name], source, workload.capacity) as full,
            ):
                grown = full.size
        except ImportError as error:
            print(line(name, str(error), *[""] * 4), flush=True)
            continue
        each = f"{grown / workload.capacity:,.0f}", f"{size:,.0f}", text
        million = f"{size * MILLION / 1e9:.1f}"
        print(line(name, f"{grown / 2**30:.2f}", *each, million), flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--only", nargs="+", help="contenders with one of these in their names")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="for each contender, in each race"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--num-envs", type=int, default=NUM_ENVS)
    parser.add_argument("--memory", action="store_true", help="only the memory, of Atari")
    parser.add_argument("--transitions", type=int, default=50_000, help="with --memory")
    parser.add_argument("--torch-threads", type=int, default=1)
    options = parser.parse_args()
    with contextlib.suppress(ImportError):
        import_module("torch").set_num_threads(options.torch_threads)
    print(described(machine()))
    if options.memory:
        weigh(options, Progress(sys.stderr))
        return
    for name in options.workload:
        workload = WORKLOADS[name]
        print(f"\n{name}: {workload.capacity:,} kept, {options.num_envs} envs\n")
        print(line("", *COLUMNS))
        print(line("---", *["--:"] * len(COLUMNS)), flush=True)
        progress = Progress(sys.stderr, name)
        measure(workload, options, progress)
        progress.done()


if __name__ == "__main__":
    main()
