"""Replay buffers: the costs of inserting a batch step and of sampling, and bytes a transition.

    python benchmarks/replay.py                      # two workloads: six minutes
    python benchmarks/replay.py --workload HalfCheetah --only shmvec SB3
    python benchmarks/replay.py --workload Atari --only shmvec --kept 50000

All contenders get the results of the same vector env: eight envs whose observations never change,
of the shapes of HalfCheetah (17 numbers, 6 actions) and of Atari (four frames of 84 x 84), in
SAME_STEP mode, with episodes of 500 steps. An episode's last observation is put in place outside of
the measured time. `insertion` of the others is their own `add` or `extend`, with the preparation of
its arguments. `shmvec.Replay` has no such call: its insertion is the difference between the batch
steps of two vector envs, one recorded and one not, which take turns. So the time counts for which
workers make the caller wait. cpprb's `next_of` and `stack_compress` take each transition for the
next one's predecessor, so each env has its own buffer, and all are added to and sampled.

`sampling` is a call that returns 256 transitions, in the buffer's own type: tensors for SB3 and
TorchRL, arrays for cpprb and `shmvec.Replay`. Calls follow one another at once. With `after 5 ms`
the caller sleeps before each call, as if its GPU learned, so what is prepared meanwhile is free.
The limit is a copy of as many bytes, by one thread or by one for each core, whichever is faster: of
a batch step's results, and of a sample. Torch has one thread. A second one makes TorchRL's samples
of Atari faster if both cores are idle, and all of them many times slower if they are not.

`bytes` is the growth of all processes' memory, with shared memory and mapped files, when the buffer
is full, divided by the number of transitions. The other figures are medians over turns, which
contenders take in one process, in random order; next to them are the least and the largest.

Contenders that are not installed get a row that says so. To install all, besides `bench`'s
packages:

    pip install torch stable-baselines3 torchrl tensordict cpprb

TorchRL's priorities need its extension, which fits one version of torch (0.14.1: not 2.13).
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from harness import Calls, arguments, heading, memory, write_results

import shmvec
from shmvec._commands.measuring import Progress, describe_machine, machine, race, table_line
from shmvec._cores import descendant_ids, usable_cores

SAMPLED = 256
STEPS = 500  # of an episode
STACK = 4
ALPHA, BETA = 0.6, 0.4
PAUSE_S = 0.005
LIMIT, BARE, OURS = "a copy of as many bytes", "not recorded", "shmvec.Replay"


# ---- the transitions -----------------------------------------------------------------------------


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
        """Steps; episodes end by a termination and by a truncation in turn."""
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


WORKLOADS = {"HalfCheetah": (cheetah, 100_000), "Atari": (atari, 20_000)}


class Batch(NamedTuple):
    """The transitions of a batch step: of each env one."""

    observations: Any
    actions: Any
    rewards: Any
    next_observations: Any
    terminations: Any
    truncations: Any


class Source:
    """A vector env and the transitions that it makes."""

    def __init__(self, make: Callable[[], gym.Env[Any, Any]], num_envs: int) -> None:
        """Starts it."""
        self.envs = shmvec.ShmVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
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
        next_observations = observations
        if "_final_obs" in infos:
            next_observations = observations.copy()
            ended = infos["_final_obs"]
            next_observations[ended] = np.stack(infos["final_obs"][ended])
        before, self._observations = self._observations, observations
        return Batch(before, actions, rewards, next_observations, terminations, truncations)


# ---- contenders ----------------------------------------------------------------------------------


class Buffer(NamedTuple):
    """A replay buffer.

    Attributes:
        sample: Returns SAMPLED transitions.
        insert: Adds a batch step's transitions; None: the workers of its source do.
        close: Ends what would outlive the buffer.
    """

    sample: Callable[[], Any]
    insert: Callable[[Batch], object] | None = None
    close: Callable[[], object] = lambda: None


def ours(source: Source, capacity: int, prioritized: bool = False) -> Buffer:
    """shmvec.Replay, into which the workers of its own vector env write."""
    alpha = ALPHA if prioritized else None
    replay = shmvec.Replay(source.envs, capacity, prioritized=alpha, seed=0)
    source.envs.reset(seed=0)
    return Buffer(partial(replay.sample, SAMPLED, beta=BETA), close=replay.close)


def sb3(source: Source, capacity: int, optimized: bool = False) -> Buffer:
    """Stable-Baselines3's buffer, which takes infos as dicts."""
    envs = source.envs
    buffer = import_module("stable_baselines3.common.buffers").ReplayBuffer(
        *(capacity, envs.single_observation_space, envs.single_action_space, "cpu", envs.num_envs),
        optimize_memory_usage=optimized,
        handle_timeout_termination=not optimized,
    )

    def insert(batch: Batch) -> None:
        infos = [{"TimeLimit.truncated": each} for each in batch.truncations.tolist()]
        dones = batch.terminations | batch.truncations
        results = batch.actions, batch.rewards, dones, infos
        buffer.add(batch.observations, batch.next_observations, *results)

    return Buffer(partial(buffer.sample, SAMPLED), insert)


def torchrl(source: Source, capacity: int, storage: str, prioritized: bool = False) -> Buffer:
    """TorchRL's TensorDictReplayBuffer, with a storage of this class."""
    torch = import_module("torch")
    rb = import_module("torchrl.data.replay_buffers")
    of, tensor = import_module("tensordict").TensorDict, torch.from_numpy
    try:
        sampler = rb.PrioritizedSampler(capacity, ALPHA, BETA) if prioritized else None
    except RuntimeError as error:
        raise ImportError(f"its extension does not fit torch {torch.__version__}") from error
    folder = tempfile.TemporaryDirectory()
    scratch = {"scratch_dir": folder.name} if storage == "LazyMemmapStorage" else {}
    store = getattr(rb, storage)(capacity, **scratch)
    options = {"sampler": sampler, "batch_size": SAMPLED, "priority_key": "priority"}
    buffer = rb.TensorDictReplayBuffer(storage=store, **options)

    def insert(batch: Batch) -> None:
        """Adds a TensorDict, as TorchRL's envs return it."""
        next_observations = {
            "observation": tensor(batch.next_observations),
            "reward": tensor(batch.rewards),
            "terminated": tensor(batch.terminations),
            "truncated": tensor(batch.truncations),
            "done": tensor(batch.terminations | batch.truncations),
        }
        size = [len(batch.rewards)]
        observed, acted = tensor(batch.observations), tensor(batch.actions)
        buffer.extend(
            of(
                {"observation": observed, "action": acted, "next": of(next_observations, size)},
                size,
            )
        )

    return Buffer(buffer.sample, insert, folder.cleanup)


def _fields(source: Source) -> dict[str, dict[str, Any]]:
    """The fields of a transition in cpprb, without the next observation."""
    observations, actions = source.envs.single_observation_space, source.envs.single_action_space
    return {
        "obs": {"shape": observations.shape, "dtype": observations.dtype},
        "act": {"shape": actions.shape or 1, "dtype": actions.dtype},
        "rew": {"dtype": np.float32},
        "done": {"dtype": np.bool_},
    }


def cpprb(source: Source, capacity: int, prioritized: bool = False) -> Buffer:
    """The one buffer of cpprb for all envs; it has no field for truncations."""
    module, fields = import_module("cpprb"), _fields(source)
    fields["next_obs"] = dict(fields["obs"])
    if prioritized:
        buffer = module.PrioritizedReplayBuffer(capacity, fields, alpha=ALPHA)
    else:
        buffer = module.ReplayBuffer(capacity, fields)

    def insert(batch: Batch) -> None:
        seen = {"obs": batch.observations, "next_obs": batch.next_observations}
        buffer.add(act=batch.actions, rew=batch.rewards, done=batch.terminations, **seen)

    return Buffer(partial(buffer.sample, SAMPLED, *[BETA] * prioritized), insert)


def cpprb_per_env(source: Source, capacity: int, stacked: bool = False) -> Buffer:
    """One buffer of cpprb for each env, which finds a transition's neighbours by index."""
    module, fields, num = import_module("cpprb"), _fields(source), source.envs.num_envs
    options = {"next_of": "obs"}
    if stacked:  # it stacks along the last axis
        fields["obs"]["shape"] = (*fields["obs"]["shape"][1:], STACK)
        options["stack_compress"] = "obs"
    buffers = [module.ReplayBuffer(capacity // num, fields, **options) for _ in range(num)]

    def insert(batch: Batch) -> None:
        """Adds to each buffer, and tells it of episodes' ends."""
        seen = batch.observations, batch.next_observations
        if stacked:
            seen = np.moveaxis(seen[0], 1, -1), np.moveaxis(seen[1], 1, -1)
        for env, buffer in enumerate(buffers):
            buffer.add(
                obs=seen[0][env],
                act=batch.actions[env],
                rew=batch.rewards[env],
                next_obs=seen[1][env],
                done=batch.terminations[env],
            )
            if batch.terminations[env] or batch.truncations[env]:
                buffer.on_episode_end()

    def sample() -> Any:
        """Samples as many from each buffer, and joins them."""
        parts = [buffer.sample(SAMPLED // num) for buffer in buffers]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    return Buffer(sample, insert)


CONTENDERS: dict[str, Callable[[Source, int], Buffer]] = {
    OURS: ours,
    f"{OURS}, prioritized": partial(ours, prioritized=True),
    "SB3 ReplayBuffer": sb3,
    "SB3, optimize_memory_usage": partial(sb3, optimized=True),
    "TorchRL, LazyMemmapStorage": partial(torchrl, storage="LazyMemmapStorage"),
    "TorchRL, PrioritizedSampler": partial(torchrl, storage="LazyTensorStorage", prioritized=True),
    "cpprb ReplayBuffer": cpprb,
    "cpprb, next_of": cpprb_per_env,
    "cpprb, stack_compress": partial(cpprb_per_env, stacked=True),  # only for Atari
    "cpprb PrioritizedReplayBuffer": partial(cpprb, prioritized=True),
}


# ---- measuring -----------------------------------------------------------------------------------


class Copier:
    """Copies a number of bytes, by one thread or by one for each core, whichever is faster."""

    def __init__(self, size: int) -> None:
        """Allocates memory, with a source that is much larger than caches."""
        self._size, self._at = size, 0
        self._source = np.ones(max(1 << 28, 4 * size), np.uint8)
        self._target = np.ones(size, np.uint8)
        self._pool = ThreadPoolExecutor(usable_cores())
        times = {}
        for self._threads in (usable_cores(), 1):
            times[self._threads] = statistics.median(Calls(self).run(0).batch_us for _ in range(50))
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
        """Ends the threads."""
        self._pool.shutdown()


def memory_mb() -> float:
    """The memory of this process and its descendants, with each shared page counted once."""
    return sum(memory(pid).pss for pid in (os.getpid(), *descendant_ids(os.getpid())))


def filled(
    make: Callable[[Source, int], Buffer], source: Source, capacity: int
) -> tuple[Buffer, float]:
    """Makes and fills a buffer; returns it and the bytes of a transition.

    Raises:
        ImportError: Something that the buffer needs is not installed.
    """
    make(source, 64 * source.envs.num_envs).close()  # imports
    gc.collect()
    before = memory_mb()
    buffer = make(source, capacity)
    for _ in range(-(-capacity // source.envs.num_envs) + STEPS):
        if buffer.insert is None:
            source.step()
        else:
            buffer.insert(source.batch())
    return buffer, (memory_mb() - before) * 2**20 / capacity


def measure(
    name: str, only: Sequence[str], kept: int | None, num_envs: int, seconds: float, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yields a row for each contender."""
    make, usual = WORKLOADS[name]
    capacity = kept or usual
    say = Progress(sys.stderr, name)
    chosen = [
        system
        for system in CONTENDERS
        if any(part.lower() in system.lower() for part in only)
        and (name == "Atari" or "stack_compress" not in system)
    ]
    left_out: dict[str, str] = {}
    full: dict[str, tuple[Buffer, float]] = {}
    with contextlib.ExitStack() as stack:

        def started() -> Source:
            return stack.enter_context(contextlib.closing(Source(make, num_envs)))

        source, bare = started(), started()
        batch = source.batch()
        observed, acted = batch.observations.nbytes, batch.actions.nbytes
        sizes = observed + acted, SAMPLED * (2 * observed + acted) // num_envs
        step, sample = (stack.enter_context(contextlib.closing(Copier(size))) for size in sizes)
        inserting = {
            LIMIT: partial(Calls, lambda _: step(), before=bare.batch),
            BARE: partial(Calls, bare.step),
        }
        samplers: dict[str, Callable[[], object]] = {LIMIT: sample}
        for system in chosen:
            say(f"filling {system}")
            own = started() if system.startswith(OURS) else source
            try:
                full[system] = buffer, _ = filled(CONTENDERS[system], own, capacity)
            except ImportError as error:
                left_out[system] = str(error)
                continue
            stack.callback(buffer.close)
            if buffer.insert is None:
                inserting[system] = partial(Calls, own.step)
            else:
                inserting[system] = partial(Calls, buffer.insert, before=source.batch)
            samplers[system] = buffer.sample

        def later(call: Callable[[], object]) -> Calls:
            return Calls(lambda _: call(), before=partial(time.sleep, PAUSE_S))

        found = {
            column: {
                system: [turn.batch_us for turn in result.slices]
                for system, result in race(contenders, seconds, rounds, say=say).items()
            }
            for column, contenders in (
                ("insertion_us", inserting),
                (
                    "sampling_us",
                    {system: partial(Calls, call) for system, call in samplers.items()},
                ),
                ("later_us", {system: partial(later, call) for system, call in samplers.items()}),
            )
        }
        say.done()
    unrecorded = found["insertion_us"][BARE]
    for system in [LIMIT, *chosen, BARE]:
        row: dict[str, Any] = {"workload": name, "system": system}
        if system in left_out:
            row["left_out"] = left_out[system]
        row |= {column: times[system] for column, times in found.items() if system in times}
        if system in full:
            row["bytes"] = full[system][1]
            if full[system][0].insert is None:
                pairs = zip(row["insertion_us"], unrecorded, strict=True)
                row["insertion_us"] = [recorded - one for recorded, one in pairs]
        yield row


def cells(row: dict[str, Any]) -> Iterator[str]:
    """Yields the median, the least and the largest of each figure, and the bytes."""
    for name in ("insertion_us", "sampling_us", "later_us"):
        values = row.get(name, [])
        if values:
            shown = ".2f" if max(map(abs, values)) < 10 else ",.0f"
            yield format(statistics.median(values), shown)
            yield f"{format(min(values), shown)} to {format(max(values), shown)}"
        else:
            yield from ("", "")
    yield f"{row['bytes']:,.0f}" if "bytes" in row else row.get("left_out", "")


def main() -> None:
    """Prints the tables."""
    parser = arguments(__doc__, seconds=3.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--only", nargs="+", default=[""], help="contenders with one of these in their names"
    )
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--kept", type=int, help="transitions (default: by the workload)")
    options = parser.parse_args()
    with contextlib.suppress(ImportError):
        import_module("torch").set_num_threads(1)
    print(f"{describe_machine(machine())}, {options.num_envs} envs\n")
    columns = "insertion, µs", "", "sampling, µs", "", f"after {PAUSE_S * 1e3:.0f} ms, µs", ""
    print(heading("workload", "", *columns, "bytes"), flush=True)
    rows = []
    for name in options.workload:
        chosen = options.only, options.kept, options.num_envs, options.seconds, options.rounds
        for row in measure(name, *chosen):
            rows.append(row)
            print(table_line(name, row["system"], *cells(row)), flush=True)
    write_results(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
