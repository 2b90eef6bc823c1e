"""Measures contenders fairly: they take turns, beside the limit of what can be reached.

The limit is what free-running loops reach, one process a core, without any communication. They step
envs as workers do, wrappers compiled: a vector env of Python envs cannot be faster on these cores.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol, TextIO

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

import shmvec
from shmvec._cores import usable_cores
from shmvec._wrappers import compiled

__all__ = [
    "BUSY",
    "LIMIT",
    "OVER",
    "SIMPLER",
    "Compute",
    "Contender",
    "EnvFn",
    "Limit",
    "Progress",
    "Result",
    "Slice",
    "Stepper",
    "alternated",
    "caution",
    "cells",
    "described",
    "line",
    "machine",
    "race",
    "simplest",
    "spread",
    "turns",
    "vector_env",
]

EnvFn = Callable[[], "gym.Env[Any, Any]"]

LIMIT = "limit"  # the name of the limit among the contenders
BUSY = 0.5  # a spread that makes figures doubtful
OVER = 1.1  # share of the limit that only envs that sleep exceed
SIMPLER = 1.03  # a setting must be this much faster than a simpler one to be preferred

_WARM_UP_S = 0.1
_ROUNDS = 7
_TURN_S = 0.05  # so short that what disturbs a shared machine disturbs all contenders alike
_LOOK_S = 0.001  # of the limit's steps between two looks at the clock, at least
_CHUNK_S = 0.02  # of steps, after which the ends of episodes are counted outside the clock
_TO_CLOSE_S = 2.0  # for envs of the limit's processes
_ACTION_BATCHES = 16  # sampled beforehand, so that sampling is not measured


class Slice(NamedTuple):
    """One contender's turn, its turns of a round together, or medians over rounds.

    Attributes:
        batch_us: Mean time of a batch step, with the parent's computation after it.
        steps_per_s: Env steps a second; resets made by autoreset are not steps.
        compute_us: Mean time of the parent's computation after a batch step.
    """

    batch_us: float
    steps_per_s: float
    compute_us: float = 0.0


class Contender(Protocol):
    """A participant in a race."""

    def run(self, seconds: float) -> Slice:
        """Runs for at least so many seconds."""

    def close(self) -> object:
        """Ends the contender."""


@dataclass(frozen=True)
class Result:
    """The figures of a contender.

    Attributes:
        slices: One for each round.
    """

    slices: Sequence[Slice]

    @property
    def median(self) -> Slice:
        """The median of each figure."""
        return Slice(*map(statistics.median, zip(*self.slices, strict=True)))

    @property
    def spread(self) -> float:
        """The spread of the rounds' batch times."""
        return spread([one.batch_us for one in self.slices])

    def ratio(self, reference: Result, figure: str = "steps_per_s") -> float:
        """The median of the rounds' ratios of a figure: what disturbs a whole round cancels."""
        rounds = zip(self.slices, reference.slices, strict=True)
        return float(np.median([getattr(a, figure) / getattr(b, figure) for a, b in rounds]))

    def figures(self, limit: Result) -> dict[str, float]:
        """The figures that all tables have, by their names in JSON; see :func:`cells`."""
        return {
            "batch_us": self.median.batch_us,
            "spread": self.spread,
            "steps_per_s": self.median.steps_per_s,
            "share_of_limit": self.ratio(limit),
        }


def cells(row: Mapping[str, Any]) -> list[str]:
    """Batch step in µs, spread, steps/s and share of the limit; nothing where a row has none."""
    formats = {"batch_us": ",.1f", "spread": ".0%", "steps_per_s": ",.0f", "share_of_limit": ".2f"}
    return [format(row[name], how) if name in row else "" for name, how in formats.items()]


def line(*cells: object) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def spread(values: Sequence[float]) -> float:
    """The spread of values: (largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def caution(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What to say of rows of a table whose spread makes them doubtful: a line, or none."""
    widest = max((row.get("spread", 0.0) for row in rows), default=0.0)
    if widest > BUSY:
        yield (
            f"The machine was busy (spread {widest:.0%}): repeat this, "
            "or see what `python -m shmvec doctor` says."
        )


def simplest(rows: Iterable[Mapping[str, Any]], factor: float) -> Any:
    """The first row that none beats by more than ``factor``; rows are ordered simplest first."""
    known = list(rows)
    fastest = max(row["steps_per_s"] for row in known)
    return next(row for row in known if factor * row["steps_per_s"] >= fastest)


def turns(names: Iterable[Any], rounds: int) -> Iterator[list[Any]]:
    """The order of the contenders in each round.

    It changes from round to round, so that none always follows another, and is the same in each
    race.
    """
    everyone = list(names)
    for number in range(rounds):
        yield random.Random(number).sample(everyone, len(everyone))


def race(
    contenders: Mapping[Any, Callable[[], Contender]],
    seconds: float,
    rounds: int = _ROUNDS,
    *,
    limit: Sequence[EnvFn] = (),
    left_out: dict[Any, str] | None = None,
    say: Callable[[str], object] = lambda what: None,
    started: Callable[[Mapping[Any, Contender]], object] = lambda running: None,
) -> dict[Any, Result]:
    """Starts contenders, lets them take turns, and closes them.

    Args:
        contenders: The function that starts each contender, by its name.
        seconds: How long each runs, in all.
        rounds: The number of rounds, in each of which they alternate; see :func:`alternated`.
        limit: Functions that make the envs of the limit, which takes part as LIMIT.
        left_out: A dict that gets the names of contenders that are not installed, and why. None:
            that is an error.
        say: Called with a text on what is being done.
        started: Called with all contenders before their first turn.

    Returns:
        The result of each contender that took part, by its name, the limit first.
    """
    starts = dict(contenders)
    if limit:
        starts = {LIMIT: partial(Limit, limit, usable_cores()), **starts}
    running: dict[Any, Contender] = {}
    with contextlib.ExitStack() as stack:
        for name, start in starts.items():
            say(f"starting {name}")
            try:
                running[name] = stack.enter_context(contextlib.closing(start()))
            except ImportError as error:
                if left_out is None:
                    raise
                left_out[name] = str(error)
        started(running)
        for contender in running.values():
            contender.run(_WARM_UP_S)
        return alternated(running, seconds, rounds, say)


def alternated(
    running: Mapping[Any, Contender],
    seconds: float,
    rounds: int,
    say: Callable[[str], object] = lambda what: None,
) -> dict[Any, Result]:
    """Lets contenders take turns of 50 ms, and sums up the turns of each round.

    Turns are short, so that what disturbs the machine disturbs all contenders of a round; sums, so
    that what is slow and happens in each round, such as a reset, counts as often as it happens.

    Args:
        running: The contenders, by name.
        seconds: How long each runs, in all.
        rounds: The number of rounds.
        say: Called with a text on what is being done.
    """
    found: dict[Any, list[Slice]] = {name: [] for name in running}
    share = seconds / rounds
    turn = min(_TURN_S, share)
    for number, order in enumerate(turns(running, rounds), 1):
        say(f"round {number} of {rounds}")
        parts: dict[Any, list[tuple[float, Slice]]] = {name: [] for name in running}
        while due := [name for name in order if _taken(parts[name]) < share - turn / 2]:
            for name in due:
                begin = time.perf_counter()
                one = running[name].run(turn)
                parts[name].append((time.perf_counter() - begin, one))
        for name, its in parts.items():
            found[name].append(_together(its))
    return {name: Result(slices) for name, slices in found.items()}


def _taken(parts: Sequence[tuple[float, Slice]]) -> float:
    return sum(taken for taken, _ in parts)


def _together(parts: Sequence[tuple[float, Slice]]) -> Slice:
    """Turns, each with the time it has taken, as one."""
    batches = [taken / one.batch_us for taken, one in parts]
    steps = sum(taken * one.steps_per_s for taken, one in parts)
    computed = sum(many * one.compute_us for many, (_, one) in zip(batches, parts, strict=True))
    taken = _taken(parts)
    return Slice(taken / sum(batches), steps / taken, computed / sum(batches))


class Compute:
    """A fixed amount of work for the parent, which takes about ``us`` µs when undisturbed."""

    def __init__(self, us: float) -> None:
        """Finds the number of iterations of a loop that takes so long."""
        self._iterations = 1000
        self._iterations = max(1, int(1000 * us / min(self() for _ in range(200))))

    def __call__(self) -> float:
        """Does the work; returns how long it took, in µs."""
        start = time.perf_counter_ns()
        for _ in range(self._iterations):
            pass
        return (time.perf_counter_ns() - start) / 1000


class Stepper:
    """A contender that steps envs, a batch a call, with actions that were sampled beforehand."""

    def __init__(
        self,
        step: Callable[[Any], Any],
        sample: Callable[[], Any],
        num_envs: int = 1,
        *,
        compute: Compute | None = None,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        """Samples actions.

        Args:
            step: Makes a batch step with actions. Returns None if every env has made a step. Else
                it returns terminations and truncations, whose envs are reset by their next step,
                which does not count; and, if not all envs were stepped, which were.
            sample: Samples actions for a batch step.
            num_envs: Number of envs.
            compute: The parent's work between steps.
            close: Closes the envs.
        """
        self.close = close
        self.step = step
        self._compute = compute
        self._actions = [sample() for _ in range(_ACTION_BATCHES)]
        self._over = np.zeros(num_envs, bool)
        self._chunk = 1

    def run(self, seconds: float) -> Slice:
        """Steps the envs for at least so many seconds."""
        step, actions, compute = self.step, self._actions, self._compute
        batches = steps = 0
        elapsed = computed = 0.0
        while elapsed < seconds:
            ends = []
            start = time.perf_counter()
            for batch in range(self._chunk):
                ends.append(step(actions[batch % _ACTION_BATCHES]))
                if compute is not None:
                    computed += compute()
            taken = time.perf_counter() - start
            elapsed += taken
            batches += self._chunk
            steps += sum(map(self._count, ends))
            self._chunk = max(1, min(10_000, int(self._chunk * _CHUNK_S / taken)))
        return Slice(1e6 * elapsed / batches, steps / elapsed, computed / batches)

    def _count(self, ends: tuple[Any, ...] | None) -> int:
        """The number of env steps in a batch step, from what ``step`` has returned."""
        if ends is None:
            return len(self._over)
        terminations, truncations, *some = ends
        which = some[0] if some else slice(None)
        resets = np.count_nonzero(self._over[which])
        self._over[which] = terminations | truncations
        return len(terminations) - int(resets)


def vector_env(
    make: Callable[[], VectorEnv[Any, Any, Any]], compute: Compute | None = None
) -> Stepper:
    """Makes and resets a vector env; the contender steps it with random actions."""
    envs = make()
    envs.action_space.seed(0)
    envs.reset(seed=0)

    def step(actions: Any) -> Any:
        _, _, terminations, truncations, _ = envs.step(actions)
        return terminations, truncations

    return Stepper(step, envs.action_space.sample, envs.num_envs, compute=compute, close=envs.close)


class Limit:
    """Free-running loops, one process a core: what no vector env can exceed on these cores."""

    def __init__(self, makes: Sequence[EnvFn], cores: int) -> None:
        """Starts the processes.

        Args:
            makes: Make the envs that each process steps alternately.
            cores: Number of processes.
        """
        context = multiprocessing.get_context("spawn")
        packed = cloudpickle.dumps(list(makes))
        resource_tracker.ensure_running()  # its start would admit signals again
        self._pipes, self._processes = [], []
        for _ in range(cores):
            mine, theirs = context.Pipe()
            process = context.Process(target=_free_run, args=(packed, theirs), daemon=True)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:  # Ctrl-C is for the program, which ends the process
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, seconds: float) -> Slice:
        """Runs all processes at once; adds up their steps a second. A batch is one step."""
        for pipe in self._pipes:
            pipe.send(seconds)
        rate = sum(pipe.recv() for pipe in self._pipes)
        return Slice(1e6 / rate, rate)

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended with an error already
                pipe.send(None)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.join(_TO_CLOSE_S)
            process.kill()  # its env hangs, or it has ended
            process.join()
            pipe.close()


def _free_run(packed: bytes, pipe: Connection) -> None:
    """Steps envs for as many seconds as each message says; answers with the steps a second."""
    envs = [make() for make in cloudpickle.loads(packed)]
    envs[0].action_space.seed(0)
    actions = [envs[0].action_space.sample() for _ in range(64)]
    steppers = [compiled(env) for env in envs]  # as workers step them
    calls = [(number % len(envs), action) for number, action in enumerate(actions)]
    for env in envs:
        env.reset(seed=0)
    place, many = 0, 1
    while (seconds := pipe.recv()) is not None:
        steps = 0
        start = now = time.perf_counter()
        while now - start < seconds:
            some, before = calls[place : place + many], now
            for env, action in some:
                _, _, terminated, truncated, _ = steppers[env].step(action)
                if terminated or truncated:
                    envs[env].reset()
            steps += len(some)
            place = (place + len(some)) % len(calls)
            now = time.perf_counter()
            if now - before < _LOOK_S:
                many = min(2 * many, len(calls))
        pipe.send(steps / (now - start))
    for env in envs:
        env.close()


class Progress:
    """A progress line: rewritten on a terminal, elsewhere printed only at milestones."""

    def __init__(self, stream: TextIO | None, title: str = "") -> None:
        """Begins a task named ``title``; where there is no terminal the title is printed."""
        self._stream = stream
        self._on_terminal = stream is not None and stream.isatty()
        self._title = f"{title}: " if title else ""
        if title and not self._on_terminal:
            self._print(title, "\n")

    def __call__(self, what: str, milestone: bool = False) -> None:
        """Shows what is being done now."""
        if self._on_terminal:
            self._print(f"\r\x1b[K{self._title}{what}", "")
        elif milestone:
            self._print(f"{self._title}{what}", "\n")

    def done(self) -> None:
        """Removes the line."""
        if self._on_terminal:
            self._print("\r\x1b[K", "")

    def _print(self, text: str, end: str) -> None:
        if self._stream is not None:
            print(text, end=end, file=self._stream, flush=True)


def machine() -> dict[str, Any]:
    """The circumstances of a measurement: processor, cores and versions."""
    return {
        "cpu": _cpu_model(),
        "usable_cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "shmvec": shmvec.__version__,
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
    }


def described(machine: Mapping[str, Any]) -> str:
    """The result of :func:`machine` as a line."""
    return (
        f"{machine['cpu']}, {machine['usable_cores']} usable cores, Python {machine['python']}, "
        f"Gymnasium {machine['gymnasium']}, shmvec {machine['shmvec']}"
    )


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
