"""Measures contenders fairly: they take turns, and one of them is the limit.

The limit is the speed of free-running loops, one process a core, without any communication. They
step envs as workers do, wrappers compiled. A vector env of Python envs cannot be faster on these
cores.
"""

from __future__ import annotations

import contextlib
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TextIO

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

import shmvec
from shmvec._cores import usable_cores
from shmvec._wrappers import compile_env
from shmvec.exchange import Exchange

__all__ = [
    "DOUBTFUL_SPREAD",
    "LIMIT",
    "MAX_SHARE_OF_LIMIT",
    "MIN_SPEEDUP",
    "Compute",
    "Contender",
    "EnvFn",
    "Limit",
    "Progress",
    "Result",
    "Slice",
    "Stepper",
    "alternate",
    "busy_warning",
    "cells",
    "describe_machine",
    "table_line",
    "machine",
    "race",
    "simplest",
    "spread",
    "turn_orders",
    "vector_env_stepper",
]

EnvFn = Callable[[], "gym.Env[Any, Any]"]

LIMIT = "limit"  # the name of the limit among the contenders
DOUBTFUL_SPREAD = 0.5  # figures with a larger one are doubtful
MAX_SHARE_OF_LIMIT = 1.1  # only envs that sleep exceed it
MIN_SPEEDUP = 1.03  # a setting is preferred to a simpler one that it beats by this factor

_WARM_UP_S = 0.1
_ROUNDS = 7
_TURN_S = 0.05  # so short that other programs disturb all contenders alike
_CLOCK_INTERVAL_S = 0.001  # of the limit's steps between two looks at the clock, at least
_CHUNK_S = 0.02  # after a chunk of steps the ends of episodes are counted, outside the clock
_CLOSE_TIMEOUT_S = 2.0  # for envs of the limit
_ACTION_BATCHES = 16  # sampled beforehand, so that sampling is not measured


class Slice(NamedTuple):
    """The figures of a turn, of all turns of a round, or medians over rounds.

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
        """The median of the rounds' ratios of a figure, in which disturbances cancel."""
        rounds = zip(self.slices, reference.slices, strict=True)
        return float(np.median([getattr(a, figure) / getattr(b, figure) for a, b in rounds]))

    def figures(self, limit: Result) -> dict[str, float]:
        """The figures of all tables, by their names in JSON; see :func:`cells`."""
        return {
            "batch_us": self.median.batch_us,
            "spread": self.spread,
            "steps_per_s": self.median.steps_per_s,
            "share_of_limit": self.ratio(limit),
        }


def cells(row: Mapping[str, Any]) -> list[str]:
    """Batch step in µs, spread, steps/s and share of the limit; "" for those that a row lacks."""
    formats = {"batch_us": ",.1f", "spread": ".0%", "steps_per_s": ",.0f", "share_of_limit": ".2f"}
    return [format(row[name], spec) if name in row else "" for name, spec in formats.items()]


def table_line(*cells: object) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def spread(values: Sequence[float]) -> float:
    """The spread of values: (largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def busy_warning(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A line, if the spread of a row makes the figures doubtful; else none."""
    widest = max((row.get("spread", 0.0) for row in rows), default=0.0)
    if widest > DOUBTFUL_SPREAD:
        yield (
            f"The machine was busy (spread {widest:.0%}): repeat this, "
            "or see what `python -m shmvec doctor` says."
        )


def simplest(rows: Iterable[Mapping[str, Any]], factor: float) -> Any:
    """The first row that none beats by more than ``factor``; rows are ordered simplest first."""
    candidates = list(rows)
    fastest = max(row["steps_per_s"] for row in candidates)
    return next(row for row in candidates if factor * row["steps_per_s"] >= fastest)


def turn_orders(names: Iterable[Any], rounds: int) -> Iterator[list[Any]]:
    """The order of the contenders in each round.

    It changes from round to round, so that none always follows the same one. It is the same in
    each race.
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
        seconds: As for :func:`alternate`.
        rounds: Likewise.
        limit: Functions that make the envs of the limit, which takes part as LIMIT.
        left_out: Gets the names of contenders that are not installed, and why. None: a missing one
            is an error.
        say: Called with a progress text.
        started: Called with all contenders before their first turn.
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
        return alternate(running, seconds, rounds, say)


def alternate(
    running: Mapping[Any, Contender],
    seconds: float,
    rounds: int,
    say: Callable[[str], object] = lambda what: None,
) -> dict[Any, Result]:
    """Lets contenders take turns of 50 ms, and sums up the turns of each round.

    Turns are short, so that other programs disturb all contenders of a round. They are summed, so
    that a slow event such as a reset counts as often as it happens. Each contender runs for
    ``seconds`` in all, divided among the rounds.
    """
    slices_of: dict[Any, list[Slice]] = {name: [] for name in running}
    share = seconds / rounds
    turn = min(_TURN_S, share)
    for number, order in enumerate(turn_orders(running, rounds), 1):
        say(f"round {number} of {rounds}")
        parts: dict[Any, list[tuple[float, Slice]]] = {name: [] for name in running}
        while due := [name for name in order if _total_time(parts[name]) < share - turn / 2]:
            for name in due:
                begin = time.perf_counter()
                result = running[name].run(turn)
                parts[name].append((time.perf_counter() - begin, result))
        for name, turns in parts.items():
            slices_of[name].append(_merge(turns))
    return {name: Result(slices) for name, slices in slices_of.items()}


def _total_time(parts: Sequence[tuple[float, Slice]]) -> float:
    return sum(duration for duration, _ in parts)


def _merge(parts: Sequence[tuple[float, Slice]]) -> Slice:
    """Merges turns, each with its duration, into one slice."""
    batches = [duration / turn.batch_us for duration, turn in parts]
    steps = sum(duration * turn.steps_per_s for duration, turn in parts)
    computed = sum(count * turn.compute_us for count, (_, turn) in zip(batches, parts, strict=True))
    seconds = _total_time(parts)
    return Slice(seconds / sum(batches), steps / seconds, computed / sum(batches))


class Compute:
    """A fixed amount of work for the parent, which takes about ``us`` µs when undisturbed."""

    def __init__(self, us: float) -> None:
        """Finds how many iterations of a loop take so long."""
        self._iterations = 1000
        self._iterations = max(1, int(1000 * us / min(self() for _ in range(200))))

    def __call__(self) -> float:
        """Does the work; returns its duration in µs."""
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
            step: Makes a batch step with actions. It returns None if every env has made a step.
                Otherwise it returns terminations and truncations, after which the next step of an
                env is a reset and does not count; and the indices of the stepped envs, unless all
                were.
            sample: Samples actions for a batch step.
            num_envs: Number of envs.
            compute: The parent's work between steps.
            close: Closes the envs.
        """
        self.close = close
        self.step = step
        self._compute = compute
        self._actions = [sample() for _ in range(_ACTION_BATCHES)]
        self._episode_over = np.zeros(num_envs, bool)
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
            steps += sum(map(self._count_steps, ends))
            self._chunk = max(1, min(10_000, int(self._chunk * _CHUNK_S / taken)))
        return Slice(1e6 * elapsed / batches, steps / elapsed, computed / batches)

    def _count_steps(self, ends: tuple[Any, ...] | None) -> int:
        """The number of env steps in a batch step, from the result of ``step``."""
        if ends is None:
            return len(self._episode_over)
        terminations, truncations, *indices = ends
        rows = indices[0] if indices else slice(None)
        resets = np.count_nonzero(self._episode_over[rows])
        self._episode_over[rows] = terminations | truncations
        return len(terminations) - int(resets)


def vector_env_stepper(
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
    """Free-running loops, one process a core; no vector env is faster on these cores.

    Attributes:
        exchange: Its workers run the loops.
    """

    def __init__(self, env_fns: Sequence[EnvFn], cores: int) -> None:
        """Starts a process for each core, which steps an env of each of ``env_fns`` alternately."""
        self.exchange = Exchange(
            [partial(_FreeRunningEnv, list(env_fns))] * cores,
            name="the limit",
            num_workers=cores,
            wait_policy="park",  # spinning would take a core from the loops
            hang_warning_s=0,
        )

    def run(self, seconds: float) -> Slice:
        """Runs all processes at once, and adds up their steps a second; a batch is one step."""
        rate = sum(self.exchange.call("run", (seconds,)))
        return Slice(1e6 / rate, rate)

    def close(self) -> None:
        """Ends the processes."""
        self.exchange.close(_CLOSE_TIMEOUT_S)


class _FreeRunningEnv(gym.Env[Any, Any]):
    """Its method ``run`` steps other envs alternately, as a worker steps them."""

    observation_space = action_space = gym.spaces.Discrete(2)

    def __init__(self, env_fns: Sequence[EnvFn]) -> None:
        self._envs = envs = [make() for make in env_fns]
        envs[0].action_space.seed(0)
        actions = [envs[0].action_space.sample() for _ in range(64)]
        self._calls = [(number % len(envs), action) for number, action in enumerate(actions)]
        self._steppers = [compile_env(env) for env in envs]
        for env in envs:
            env.reset(seed=0)
        self._position, self._chunk = 0, 1

    def run(self, seconds: float) -> float:
        """Steps for at least so many seconds; returns the steps a second."""
        envs, steppers, calls = self._envs, self._steppers, self._calls
        position, chunk, steps = self._position, self._chunk, 0
        start = now = time.perf_counter()
        while now - start < seconds:
            some, before = calls[position : position + chunk], now
            for env, action in some:
                _, _, terminated, truncated, _ = steppers[env].step(action)
                if terminated or truncated:
                    envs[env].reset()
            steps += len(some)
            position = (position + len(some)) % len(calls)
            now = time.perf_counter()
            if now - before < _CLOCK_INTERVAL_S:
                chunk = min(2 * chunk, len(calls))
        self._position, self._chunk = position, chunk
        return steps / (now - start)

    def close(self) -> None:
        """Closes the envs."""
        for env in self._envs:
            env.close()


class Progress:
    """A progress line: rewritten on a terminal, printed elsewhere, but only at milestones."""

    def __init__(self, stream: TextIO | None, title: str = "") -> None:
        """Begins a task; without a terminal its title is printed at once."""
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
    """Facts that a measurement depends on: processor, cores and versions."""
    return {
        "cpu": _cpu_model(),
        "usable_cores": usable_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "shmvec": shmvec.__version__,
        "gymnasium": gym.__version__,
        "numpy": np.__version__,
    }


def describe_machine(machine: Mapping[str, Any]) -> str:
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
