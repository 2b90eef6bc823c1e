"""Statistics of a vector env: counts and times of its processes, a verdict on them, and a table."""

from __future__ import annotations

import html
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import reduce
from operator import add, sub
from statistics import median_low
from typing import TYPE_CHECKING, Any, TypeVar

from shmvec._core import COUNTERS

if TYPE_CHECKING:
    from shmvec._core import Insight

__all__ = [
    "Doing",
    "EnvStats",
    "FaultCounts",
    "Process",
    "Stats",
    "Table",
    "Timing",
    "Verdict",
    "Waits",
    "WorkerStats",
    "bits_of_options",
]

_T = TypeVar("_T", bound="_Counters")

# ---- what is counted -----------------------------------------------------------------------------


def _attribute(counter: str) -> str:
    """The name in stats of a counter of csrc/counters.h; times are in seconds in stats."""
    return f"{counter.removesuffix('_ns')}_s" if counter.endswith("_ns") else counter


def _values(counters: dict[str, int]) -> dict[str, float]:
    """Counters of csrc/counters.h, with the names and units of stats."""
    return {
        _attribute(name): 1e-9 * count if name.endswith("_ns") else count
        for name, count in counters.items()
    }


_ON_CORES = [_attribute(name) for name, _, _ in COUNTERS["on_cores"]]


@dataclass(frozen=True)
class _Counters:
    """A dataclass with a field for each counter of some tables; see ``_counting``."""

    if TYPE_CHECKING:

        def __init__(self, *counts: float, **named: float | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __sub__(self: _T, earlier: _T) -> _T:
        """The counts between two calls of ``stats``."""
        names = [each.name for each in fields(self)]
        return replace(
            self,
            **{name: _less(name, getattr(self, name), getattr(earlier, name)) for name in names},
        )


def _less(name: str, now: Any, then: Any) -> Any:
    """The difference of a counter."""
    if now is None or then is None or name in ("first_env", "num_envs"):
        return now
    if name in _ON_CORES and now < then:
        return now  # the kernel's counts of a worker begin anew in its successor
    # The time of an operation under way is estimated, and may be a little too long.
    return max(0, now - then)


def _counting(*tables: str) -> Callable[[type[_T]], type[_T]]:
    """A decorator: makes a dataclass with a documented field for each counter of these tables."""

    def decorated(kind: type[_T]) -> type[_T]:
        lines = {_attribute(name): text for table in tables for name, _, text in COUNTERS[table]}
        kind.__annotations__ = dict.fromkeys(lines, "float") | kind.__annotations__
        for name, text in lines.items():
            default = None if name in _ON_CORES else MISSING
            setattr(kind, name, field(default=default, metadata={"help": text}))
        what, _, own = inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")
        attributes = [f"    {name}: {text}" for name, text in lines.items()]
        kind.__doc__ = "\n".join([what, "", "Attributes:", *attributes, own])
        return dataclass(frozen=True)(kind)

    return decorated


@_counting("waits")
class Waits(_Counters):
    """Waits of a process for the other side; csrc/wait.h explains the phases."""

    @property
    def waited_s(self) -> float:
        """Seconds that the process has waited, in all."""
        return float(self.pause_s + self.yield_s + self.park_s)


@_counting("work", "on_cores")
class WorkerStats(Waits):
    """Counts of a worker, its ``Waits`` included; None where the system does not report one.

    Attributes:
        first_env: The first of its envs.
        num_envs: Number of its envs.
    """

    first_env: int = 0
    num_envs: int = 0

    @property
    def envs(self) -> range:
        """The worker's envs."""
        return range(self.first_env, self.first_env + self.num_envs)

    @property
    def busy_s(self) -> float:
        """Seconds in its envs."""
        return float(self.step_s + self.reset_s)

    @property
    def lacked_s(self) -> float:
        """Seconds in which it was ready to run and had no core, less those of its yields."""
        return float(max(0.0, (self.starved_s or 0.0) - self.yield_s))

    def shares(self, elapsed_s: float) -> dict[str, float]:
        """The shares of this time that it spent in steps, in resets, without a core and waiting.

        Time without a core is a guess: the time that it lacked one, up to that in envs. All shares
        together are at most 1; what is missing is none of these.

        Args:
            elapsed_s: Seconds that the counts are of.
        """
        lacked = min(self.lacked_s, self.busy_s)
        with_core = 1 - lacked / self.busy_s if self.busy_s else 0.0
        parts = {
            "in step": self.step_s * with_core,
            "in reset": self.reset_s * with_core,
            "no core": lacked,
            "waiting": self.waited_s,
        }
        shares, left = {}, 1.0
        for name, seconds in parts.items():
            shares[name] = min(left, seconds / max(elapsed_s, 1e-9))
            left -= shares[name]
        return shares


@_counting("faults")
class FaultCounts(_Counters):
    """Numbers of faults that were handled as the ``FaultPolicy`` says, and what they took."""

    def __str__(self) -> str:
        """Those that there were, as text."""
        found = asdict(self)
        waited = found.pop("restart_s")
        counts = [f"{count} {name}" for name, count in found.items() if count]
        return ", ".join(counts + [f"{waited:.3g} s of restarts"] * bool(waited))


# ---- how long envs take, and what is being done --------------------------------------------------

_FIRST_S = 512e-9  # the end of the first bucket; each end is twice the last one: csrc/timings.h


@dataclass(frozen=True)
class Timing:
    """A histogram of durations.

    Attributes:
        count: The number of durations.
        total_s: Their sum, in seconds.
        longest_s: The longest, in seconds. In a difference of two Timings it is exact if it is the
            longest of all; otherwise it is the end of its bucket.
        buckets: The number of durations below 512 ns, of others below twice that, and so on; the
            last one counts 137 s and more.
    """

    count: int
    total_s: float
    longest_s: float
    buckets: tuple[int, ...]

    @classmethod
    def of(cls, words: Sequence[int]) -> Timing:
        """Makes a Timing from the core's words: the sum and the longest in ns, and the buckets."""
        total_ns, longest_ns, *buckets = words
        return cls(sum(buckets), 1e-9 * total_ns, 1e-9 * longest_ns, tuple(buckets))

    @property
    def mean_s(self) -> float:
        """The mean in seconds; 0 if there is no duration."""
        return self.total_s / self.count if self.count else 0.0

    @property
    def bounds(self) -> list[float]:
        """The end of each bucket, in seconds; that of the last one is infinite."""
        return [*(_bounds(bucket)[1] for bucket in range(len(self.buckets) - 1)), math.inf]

    def quantile(self, share: float) -> float:
        """A quantile of the durations, in seconds: this share of them took as long, or less.

        The bucket is exact and the place within it an estimate, so the result is right within a
        factor of two.

        Args:
            share: 0.5 for the median, 0.99 for what one in a hundred exceeds.

        Returns:
            Seconds; 0 if there is no duration.
        """
        wanted, seen = share * self.count, 0
        for number, count in enumerate(self.buckets):
            if count and seen + count >= wanted:
                begin, end = _bounds(number)
                within = (wanted - seen) / count
                return min(begin + within * (end - begin), self.longest_s)
            seen += count
        return 0.0

    def __add__(self, other: Timing) -> Timing:
        """The sum of both histograms."""
        return Timing(
            self.count + other.count,
            self.total_s + other.total_s,
            max(self.longest_s, other.longest_s),
            tuple(map(add, self.buckets, other.buckets)),
        )

    def __sub__(self, earlier: Timing) -> Timing:
        """The durations between two calls of ``stats``."""
        buckets = tuple(now - then for now, then in zip(self.buckets, earlier.buckets, strict=True))
        longest = 0.0
        if any(buckets):
            longest = self.longest_s
            if longest <= earlier.longest_s:
                last = max(number for number, count in enumerate(buckets) if count)
                longest = min(longest, _bounds(last)[1])
        return Timing(self.count - earlier.count, self.total_s - earlier.total_s, longest, buckets)


def _bounds(bucket: int) -> tuple[float, float]:
    """The begin and end of a bucket, in seconds."""
    return (_FIRST_S * 2 ** (bucket - 1) if bucket else 0.0), _FIRST_S * 2.0**bucket


@dataclass(frozen=True)
class EnvStats:
    """The durations of an env's steps and resets.

    Attributes:
        step: Durations of ``env.step``, writing its results included.
        reset: Durations of ``env.reset``.
    """

    step: Timing
    reset: Timing

    def __sub__(self, earlier: EnvStats) -> EnvStats:
        """The durations between two calls of ``stats``."""
        return EnvStats(self.step - earlier.step, self.reset - earlier.reset)


@dataclass(frozen=True)
class Doing:
    """The operation that a worker is in.

    Attributes:
        env: The index of its env.
        operation: "step", "reset", or "call": of a method or attribute.
        for_s: Seconds since it began.
        others: Number of further envs that it is busy with, not for as long.
    """

    env: int
    operation: str
    for_s: float
    others: int = 0

    def __str__(self) -> str:
        """The operation, env and duration in words."""
        others = f", {self.others} others" if self.others else ""
        return f"{self.operation} of env {self.env} for {_duration(self.for_s)}{others}"


@dataclass(frozen=True)
class Process:
    """A process and its memory; None where the system does not report it.

    Attributes:
        pid: The process id.
        rss: Resident bytes.
        pss: Resident bytes, where pages shared by n processes count as one nth.
    """

    pid: int
    rss: int | None
    pss: int | None


# ---- all of it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stats:
    """Counts and times since the vector env was made; the difference of two measures a part.

    ``print(envs.stats())`` shows a table and the verdict. A notebook's cell that ends with
    ``envs.stats()`` shows them, too.

    Attributes:
        parent: The waits of the calling process.
        workers: The counts of each worker.
        faults: The numbers of faults.
        envs: The durations of each env's steps and resets.
        elapsed_s: Seconds since the vector env was made.
        num_workers: Number of workers; 0 if the envs live in the calling process.
        cores: Number of cores that the program may use.
        doing: The operation that each worker was in when ``stats`` was called; None: none.
        waiting_s: Seconds for which the caller had waited for answers by then; None: it did not
            wait.
        processes: The workers' processes, None for one that is gone. Only ``python -m shmvec top``
            fills it: it is empty in ``stats()``.
        caller: The calling process; None in ``stats()``.
        shared: Bytes of the segment, which holds requests, results and counters.
        wrappers: Which of each env's wrappers are compiled, and what stops the others, in words,
            when its worker was started; "": it has none, or ``compile_wrappers=False``, or its
            worker has no room to say so, which is 1 KB for all kinds of its envs.
        caller_steps: Whether the calling process is the last worker.
        overlaps: Whether a worker may be busy with several envs at once. The times of its envs add
            up to more than its own then, and the time on cores is that of its first thread.
        options: Options that are set, of those that a verdict may advise.
    """

    parent: Waits
    workers: tuple[WorkerStats, ...]
    faults: FaultCounts
    envs: tuple[EnvStats, ...] = ()
    elapsed_s: float = 0.0
    num_workers: int = 0
    cores: int = 1
    doing: tuple[Doing | None, ...] = ()
    waiting_s: float | None = None
    processes: tuple[Process | None, ...] = ()
    caller: Process | None = None
    shared: int = 0
    wrappers: tuple[str, ...] = ()
    caller_steps: bool = False
    overlaps: bool = False
    options: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        insight: Insight,
        on_cores: Sequence[tuple[float | None, float | None]],
        processes: Sequence[Process | None] = (),
        caller: Process | None = None,
    ) -> Stats:
        """Makes Stats from the segment's counters and the kernel's times of the processes."""
        workers, before = insight.workers(), map(_values, insight.on_cores_before())
        now = on_cores or [(None, None)] * len(workers)
        return cls(
            Waits(**_values(insight.parent())),
            tuple(
                WorkerStats(
                    **_values(counters), **_since(spent, then), first_env=first, num_envs=count
                )
                for counters, spent, then, (first, count) in zip(
                    workers, now, before, insight.ranges(), strict=True
                )
            ),
            FaultCounts(**_values(insight.faults())),
            tuple(EnvStats(*map(Timing.of, kinds)) for kinds in insight.timings().tolist()),
            insight.elapsed_s,
            insight.num_workers,
            insight.cores,
            tuple(each and Doing(*each) for each in insight.doing()),
            insight.waiting(),
            tuple(processes),
            caller,
            insight.nbytes,
            tuple(insight.wrappers()),
            insight.caller_steps,
            insight.overlaps,
            tuple(name for bit, name in enumerate(_ADVISED) if insight.options >> bit & 1),
        )

    def __sub__(self, earlier: Stats) -> Stats:
        """The counts and times between two calls of ``stats``.

        Raises:
            ValueError: They are of different vector envs.
        """
        mine, theirs = ((len(each.workers), len(each.envs)) for each in (self, earlier))
        if mine != theirs:
            raise ValueError(
                "stats of one vector env can only be subtracted from those of the same; these have "
                f"{mine[0]} workers and {mine[1]} envs, and {theirs[0]} and {theirs[1]}"
            )
        return replace(
            self,
            parent=self.parent - earlier.parent,
            workers=tuple(map(sub, self.workers, earlier.workers)),
            faults=self.faults - earlier.faults,
            envs=tuple(map(sub, self.envs, earlier.envs)),
            elapsed_s=self.elapsed_s - earlier.elapsed_s,
        )

    @property
    def verdict(self) -> Verdict:
        """The judgement on what limits the speed and what to change, by these numbers alone."""
        return _judged(self)

    @property
    def steps_per_s(self) -> float:
        """Env steps a second."""
        steps = sum(worker.steps for worker in self.workers)
        return float(steps / max(self.elapsed_s, 1e-9))

    @property
    def share_of_limit(self) -> float:
        """Steps per second, as a share of the limit: free-running loops of steps, one on each core.

        It is the time that workers were in their envs, divided by the time on as many cores as the
        envs can use. It assumes that steps take as long in such loops as here: where workers share
        cores, steps take longer here, and the share is too high. Envs that sleep may reach more
        than 1.
        """
        busy = sum(worker.busy_s for worker in self.workers)
        return busy / (max(1, min(self.cores, len(self.envs))) * max(self.elapsed_s, 1e-9))

    def metrics(self) -> dict[str, float]:
        """The main numbers by name, for logging: times in seconds, and shares of all time.

        Example:
            >>> import shmvec
            >>> envs = shmvec.make_vec("CartPole-v1", num_envs=2)
            >>> sorted(envs.stats().metrics())[:3]
            ['caller_waited_share', 'crashes', 'errors']
            >>> envs.close()
        """
        seconds = max(self.elapsed_s, 1e-9)
        of_workers = seconds * max(1, len(self.workers))
        return {
            "steps_per_s": self.steps_per_s,
            "share_of_limit": self.share_of_limit,
            "caller_waited_share": self.parent.waited_s / seconds,
            "in_step_share": sum(worker.step_s for worker in self.workers) / of_workers,
            "in_reset_share": sum(worker.reset_s for worker in self.workers) / of_workers,
            "workers_waited_share": sum(worker.waited_s for worker in self.workers) / of_workers,
            **{
                f"{name}_{what}_s": seconds
                for name, timing in (("step", self.step), ("reset", self.reset))
                for what, seconds in (
                    ("p50", timing.quantile(0.5)),
                    ("p99", timing.quantile(0.99)),
                    ("longest", timing.longest_s),
                )
            },
            **asdict(self.faults),
        }

    @property
    def step(self) -> Timing:
        """The durations of all envs' steps."""
        return _together(env.step for env in self.envs)

    @property
    def reset(self) -> Timing:
        """The durations of all envs' resets."""
        return _together(env.reset for env in self.envs)

    def __str__(self) -> str:
        """The table and the verdict."""
        return f"{self.table()}\n{self.verdict}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same on IPython's terminal."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """The verdict and the table for a notebook."""
        return _as_html(self)

    def table(self, width: int | None = None) -> str:
        """The counts of each worker as a table.

        Args:
            width: About how many characters a line may have: columns that do not fit are left out.
        """
        return str(Table.of(self).fitted(width))


def bits_of_options(settings: Any) -> int:
    """A bit for each option that a verdict may advise, and that is set: ``Stats.options``."""
    values = {name: getattr(settings, name, None) for name in _ADVISED}
    values["threads_per_worker"] = values["threads_per_worker"] == 1  # what is advised
    return sum(1 << bit for bit, value in enumerate(values.values()) if value not in (None, False))


def _together(timings: Iterable[Timing]) -> Timing:
    return reduce(add, timings, Timing(0, 0.0, 0.0, (0,) * 30))


def _since(spent: tuple[float | None, ...], before: dict[str, float]) -> dict[str, float | None]:
    """The kernel's times of a process, less those from before it was a worker."""
    return {
        name: None if now is None else max(0.0, now - before[name])
        for name, now in zip(_ON_CORES, spent, strict=True)
    }


# ---- the verdict ---------------------------------------------------------------------------------

# Shares and ratios from which a verdict is given.
_LATE = 0.05  # messages through sockets / all steps
_POLICY = 0.5  # time in which the caller waits / all time: less is policy-bound
_STARVED = 0.25  # time without a core / time in envs
_OURS = 0.5  # time on cores / that of all cores while the caller waits: less, and others have them
_UNEVEN = 1.5  # time in envs of the busiest worker / of the others
_SLOW = 3  # a step of the slowest env / of the median env: is named, whatever the verdict
_RESETS = 0.5  # time in resets / time in envs
_FEW_RESETS = 0.25  # the same, where workers wait for each other
_IDLE = 0.7  # time in envs / time in which workers could have been in them: less is idle
_TAIL = 8  # the slowest hundredth of steps / the median
_EVEN = 0.85  # the same as _IDLE, where workers are as even as cores that others share allow
_TAKEN_S = 2e-6  # what an env costs the caller, in batches of some
_OWN_S = 30e-6  # time a batch of a call of step itself, and of the loop around it
_SMALL_S = 20e-6  # work of a request that is not worth a worker
_HANGS_S = 10.0  # an operation hangs from so many seconds,
_HANGS = 10  # if they are so many times the longest that has ended
_AWAKE = 0.5  # time on a core / time in envs: less is asleep
_EARLY = 5  # steps of an env, and
_EARLY_S = 1.0  # seconds, before which a verdict would be a guess
_NOTHING = ("idle", "too early")
_RESTARTING = 0.2  # of the time: a share of restarts that is worth a word
_PROBLEMS = ("restart-bound", "straggler", "oversubscribed", "messages through pipes")
_OVER = 1.05  # share of the limit that only envs that sleep exceed
_IF_IT_HANGS = "If it hangs"  # begins the advice on what may be over in a moment, or never
# Options that a verdict may advise, and which the segment knows of: a bit each, in this order.
_ADVISED = ("batch_size", "shared_memory", "step_timeout", "reset_timeout", "threads_per_worker")


@dataclass(frozen=True)
class Verdict:
    """The judgement on what limits the speed.

    Attributes:
        kind: "env-bound", "policy-bound", "straggler", "reset-bound", "restart-bound",
            "oversubscribed", "messages through pipes", "too many workers"; "idle": nothing was
            stepped; or "too early": too little was stepped.
        reason: The numbers that show it.
        advice: What to do about it; empty if there is nothing.
        option: The option of ``ShmVectorEnv`` to change, as it is written; empty: none helps.
    """

    kind: str
    reason: str
    advice: str = ""
    option: str = ""

    @property
    def severity(self) -> str:
        """How bad it is: "none" (nothing to say), "good", "change" (what to) or "problem"."""
        if self.kind in _NOTHING:
            return "none"
        if self.kind in _PROBLEMS or self.advice.startswith(_IF_IT_HANGS):
            return "problem"
        return "good" if self.kind == "env-bound" and not self.option else "change"

    def __str__(self) -> str:
        """The verdict on one line."""
        return f"{self.kind}: {self.reason}." + (f" {self.advice}." if self.advice else "")


def _judged(stats: Stats) -> Verdict:
    """The verdict on these numbers: the first kind that applies."""
    workers = stats.workers
    done = sum(worker.steps + worker.resets for worker in workers)
    if done == 0:
        nothing = Verdict("idle", "nothing was stepped or reset")
        return _restarting(stats) or _hanging(stats, done) or nothing
    if (hanging := _hanging(stats, done)) is not None:
        return hanging
    most = max(env.step.count for env in stats.envs)
    if most < _EARLY and stats.elapsed_s < _EARLY_S:
        return Verdict(
            "too early",
            f"only {done} steps and resets have been made",
            f"Make at least {_EARLY} steps of an env, or some for a second",
        )
    if (restarting := _restarting(stats)) is not None:
        return restarting
    late = sum(worker.late for worker in workers)
    if late > _LATE * done:
        pipes = "shared_memory" not in stats.options
        advice = "; observations in a space of fixed size need no messages, with shared_memory=True"
        return Verdict(
            "messages through pipes",
            f"{late:,} observations, infos or actions of {done:,} steps and resets did not fit the "
            "rings in shared memory",
            "Return less in infos" + advice * pipes,
            "shared_memory=True" * pipes,
        )
    busy = [worker.busy_s for worker in workers]
    waited = sum(busy) if not stats.num_workers else stats.parent.waited_s
    if stats.caller_steps:
        waited += busy[-1]
    used = _used(busy, waited)
    return (
        _policy(stats, max(busy), waited)
        or _slow_env(stats, busy, waited)
        or _without_cores(stats, sum(busy))
        or _resets(stats, sum(busy), used)
        or _slow_steps(stats, used)
        or _too_little(stats, sum(busy), used)
        or _envs(stats, sum(busy), used)
    )


def _used(times: list[float], waited: float) -> float:
    """The share of the caller's waiting time that workers spent in such times."""
    return sum(times) / (len(times) * max(waited, *times, 1e-9))


def _hanging(stats: Stats, done: int) -> Verdict | None:
    """The verdict where an env's step or reset does not return, or the first of all has not yet."""
    found = [
        (now.for_s, worker, now, ended)
        for worker, now in enumerate(stats.doing)
        if now is not None
        for ended in [stats.reset if now.operation == "reset" else stats.step]
        if not done or now.operation != "call"
        if not done or now.for_s > max(_HANGS_S, _HANGS * ended.longest_s)
    ]
    if not found:
        return None
    _, worker, now, ended = max(found, key=lambda each: each[0])
    others = f"no {now.operation} has ended"
    if ended.count:
        longest = f"the longest {now.operation} that has ended"
        others = f"{longest} took {1e3 * ended.longest_s:.3g} ms"
    return Verdict(
        "straggler" if len(found) < len(stats.workers) else "env-bound",
        f"worker {worker} has been in {now}; {others}",
        *_if_it_hangs(stats, now.operation),
    )


def _if_it_hangs(stats: Stats, operation: str) -> tuple[str, str]:
    """What to do about an env that may hang in this, and by which option."""
    limit = f"{operation}_timeout="
    if operation == "call":
        return f"{_IF_IT_HANGS}: no time limit ends a call; python -m shmvec stacks says where", ""
    if limit[:-1] in stats.options:
        return f"{_IF_IT_HANGS}: {limit} names it; python -m shmvec stacks says where", ""
    advice, option = _permitted(stats, limit)
    if stats.num_workers == 0:
        option = "num_workers=1"
        advice = f"{option} and {limit}"
    return f"{_IF_IT_HANGS}: {advice} names such an env, and a FaultPolicy replaces it", option


def _permitted(stats: Stats, option: str) -> tuple[str, str]:
    """An option, and the one to change first: caller_steps refuses some."""
    if stats.caller_steps:
        return f"caller_steps=False and {option}", "caller_steps=False"
    return option, option


def _restarting(stats: Stats) -> Verdict | None:
    """The verdict where much of the time goes into restarts of workers."""
    waited = stats.faults.restart_s
    if waited <= _RESTARTING * max(0.0, stats.elapsed_s):
        return None
    share = waited / max(waited, stats.elapsed_s)  # it counts once it is over
    return Verdict(
        "restart-bound",
        f"{share:.0%} of the time went into restarts of workers",
        "The log says of which envs, and why",
    )


def _policy(stats: Stats, busiest: float, waited: float) -> Verdict | None:
    """The verdict where the caller computes while no env is stepped."""
    elapsed = max(stats.elapsed_s, 1e-9)
    batches = stats.parent.requests / len(stats.workers)
    if (
        waited >= _POLICY * elapsed
        or busiest >= _IDLE * elapsed
        or elapsed - waited < _OWN_S * batches
    ):
        return None
    advice, option = "Make the policy faster", ""
    if len(stats.envs) > 1:
        option = "" if stats.num_workers else "num_workers=1"
        advice += ", or let it compute while envs are stepped: "
        advice += f"{option} and shmvec.Pipeline" if option else "shmvec.Pipeline"
    return Verdict(
        "policy-bound",
        f"the caller computed for {1 - waited / elapsed:.0%} of the time, and waited for the "
        "envs for the rest",
        advice,
        option,
    )


def _without_cores(stats: Stats, busy: float) -> Verdict | None:
    """The verdict where workers lack cores: there are too many, or other programs."""
    starved = sum(worker.lacked_s for worker in stats.workers)
    # Envs that sleep need few cores, however many workers they have.
    if stats.num_workers == 0 or starved <= _STARVED * max(0.0, busy) or _asleep(stats):
        return None
    lacked = f"workers were ready to run and had no core for {starved:.3g} s, "
    share = starved / max(busy, 1e-9)
    lacked += (
        f"{share:.0%} of their time in envs"
        if share < 1
        else f"{share:.1f} times as long as they were in envs"
    )
    used = sum(worker.cpu_s or 0.0 for worker in stats.workers)
    if stats.num_workers > stats.cores and used > _OURS * stats.cores * stats.parent.waited_s:
        option = f"num_workers={stats.cores}"
        return Verdict(
            "too many workers",
            f"{stats.num_workers} share {stats.cores} cores: {lacked}",
            f"{option}; where other programs use the cores, more workers may get more of them",
            option,
        )
    option = "threads_per_worker=1" * ("threads_per_worker" not in stats.options)
    return Verdict(
        "oversubscribed",
        f"{lacked}: other programs or threads have the cores{_slow_step(stats)}",
        (f"{option} if they are the envs' own libraries; " if option else "")
        + "torch.set_num_threads for the policy's; otherwise end other programs: what limits the "
        "envs shows on a quieter machine. More workers may get more of contended cores, as "
        "python -m shmvec tune measures",
        option,
    )


def _resets(stats: Stats, busy: float, used: float) -> Verdict | None:
    """The verdict where resets take much of the time."""
    resets = sum(worker.reset_s for worker in stats.workers) / busy if busy else 0.0
    if resets < (_FEW_RESETS if used < _IDLE else _RESETS):
        return None
    remedy, option = _remedy(stats, stats.num_workers > 1)
    return Verdict(
        "reset-bound",
        f"{resets:.0%} of the workers' time went into {stats.reset.count:,} resets, of "
        f"{1e3 * stats.reset.mean_s:.3g} ms each (a step: {1e3 * stats.step.mean_s:.3g} ms)",
        f"{remedy}; or make env.reset cheaper" if remedy else "Make env.reset cheaper",
        option,
    )


def _remedy(stats: Stats, late: bool) -> tuple[str, str]:
    """What makes slow envs of use to the caller sooner, and by which option; "": nothing does.

    Args:
        stats: What was measured.
        late: Whether workers wait for the last of each batch.
    """
    most = min(stats.cores, len(stats.envs))
    if stats.num_workers < most > 1:
        option = f"num_workers={most}"
        return f"There are {stats.cores} cores: {option}", option
    if 0 < stats.num_workers < len(stats.envs) and not stats.overlaps and _asleep(stats):
        how, option = _permitted(stats, 'overlap="auto"')
        return (
            f"Most of it was asleep, and envs of a worker can wait at the same time: {how}",
            option,
        )
    return _half(stats) if late and len(stats.envs) > 1 and _in_lockstep(stats) else ("", "")


def _in_lockstep(stats: Stats) -> bool:
    """Whether all envs were stepped equally often; if not, slow ones are not waited for."""
    if "batch_size" in stats.options:
        return False
    # A reset replaces a step, or is part of one; and some envs may be one step ahead.
    for resets in (0, 1):
        asked = [env.step.count + resets * env.reset.count for env in stats.envs]
        if max(asked) <= 2 * min(asked) + 2:
            return True
    return False


def _half(stats: Stats) -> tuple[str, str]:
    """What to do so that a batch does not wait for all envs, and by which option."""
    how, option = _permitted(stats, f"batch_size={max(1, len(stats.envs) // 2)}")
    return f"Do not wait for it: {how} with send and recv", option


def _slow_env(stats: Stats, busy: list[float], waited: float) -> Verdict | None:
    """The verdict where all envs wait for the same slow one, whoever else has the cores."""
    if stats.num_workers < 2 or not _in_lockstep(stats):
        return None
    # Other programs delay workers, and one of them more than others: that is nobody's step.
    own = [max(w.busy_s - w.lacked_s, min(w.busy_s, w.cpu_s or 0.0)) for w in stats.workers]
    worker = own.index(max(own))
    uneven = [max(own) > _UNEVEN * _rest(own), busy[worker] > _UNEVEN * _rest(busy)]
    slow = _slow_step(stats, stats.workers[worker].envs, _UNEVEN)
    if not all(uneven) or not slow or _used(own, waited) >= _IDLE:
        return None
    return Verdict(
        "straggler",
        f"worker {worker} was in its envs for {busy[worker]:.3g} s, others for "
        f"{_rest(busy):.3g} s on average{slow}",
        *_half(stats),
    )


def _rest(times: list[float]) -> float:
    """The mean of all but the largest."""
    return (sum(times) - max(times)) / (len(times) - 1)


def _slow_step(stats: Stats, envs: Sequence[int] = (), factor: float = _SLOW) -> str:
    """What the slowest of these envs takes, all by default, if so many times the usual; or ""."""
    means = [env.step.mean_s for env in stats.envs]
    for now in stats.doing:  # a step that is not over may be what all wait for
        if now is not None and now.operation == "step":
            means[now.env] = max(means[now.env], now.for_s)
    slowest, usual = max(envs or range(len(means)), key=means.__getitem__), median_low(means)
    if means[slowest] <= factor * usual:
        return ""
    return (
        f"; a step of env {slowest} takes {1e3 * means[slowest]:.3g} ms, of the median env "
        f"{1e3 * usual:.3g} ms"
    )


def _slow_steps(stats: Stats, used: float) -> Verdict | None:
    """The verdict where each batch waits for a slow step, of another env each time."""
    usual, slow = stats.step.quantile(0.5), stats.step.quantile(0.99)
    if stats.num_workers < 2 or used >= _IDLE or not _in_lockstep(stats) or slow <= _TAIL * usual:
        return None
    return Verdict(
        "straggler",
        f"the slowest hundredth of all steps takes {1e3 * slow:.3g} ms and more, the median "
        f"{1e3 * usual:.3g} ms: each batch waits for its slowest",
        *_half(stats),
    )


def _too_little(stats: Stats, busy: float, used: float) -> Verdict | None:
    """The verdict where requests are too small to be worth so many workers."""
    requests = sum(worker.requests for worker in stats.workers)
    work = busy / max(1, requests)
    if stats.num_workers == 0 or work > _SMALL_S or used >= _IDLE:
        return None
    option = f"num_workers={0 if stats.caller_steps else stats.num_workers // 2}"
    if stats.num_workers == 2 and not stats.caller_steps:
        option = "caller_steps=True"
    return Verdict(
        "too many workers",
        f"what a worker is asked at a time takes {1e6 * work:.3g} µs, less than asking it",
        f"{option}, or more envs",
        option,
    )


def _envs(stats: Stats, busy: float, used: float) -> Verdict:
    """The verdict where the envs themselves limit the speed."""
    small = busy < _SMALL_S * sum(worker.requests for worker in stats.workers)
    # The more workers, the later the last is, however alike their envs are.
    late = stats.num_workers > 2 and used < _EVEN and _in_lockstep(stats)
    late = late and stats.step.mean_s > stats.num_workers * _TAKEN_S
    inline = stats.num_workers == 0 and small
    remedy, option = ("", "") if inline else _remedy(stats, late)
    reason = f"{busy / max(stats.elapsed_s, 1e-9):.2g} workers were in their envs at a time"
    reason += f"; a step takes {1e3 * stats.step.mean_s:.3g} ms{_slow_step(stats)}"
    if late:
        reason += f"; {1 - used:.0%} of the time workers waited for the last of each batch"
    if remedy:
        return Verdict("env-bound", reason, f"{remedy}; or make env.step faster", option)
    asleep = _asleep(stats)
    if asleep and stats.overlaps:
        reason += "; most of it was asleep, at the same time as others"
    spare = inline or asleep or min(stats.cores, len(stats.envs)) < stats.cores
    more = "step more envs at a time" if spare else "use more cores"
    if asleep is None:
        more += "; whether they sleep shows in stats() - before of a time without restarts"
    return Verdict("env-bound", reason, f"Make env.step faster, or {more}")


def _asleep(stats: Stats) -> bool | None:
    """Whether envs waited for most of their time, and not for a core; None: nobody knows."""
    known = [worker for worker in stats.workers if worker.cpu_s is not None]
    awake = sum(worker.cpu_s + worker.lacked_s for worker in known)
    if awake >= _AWAKE * sum(worker.busy_s for worker in known):
        return False
    # The time on cores is that of the last process only, the time in envs that of all.
    return None if stats.faults.restarts else True


# ---- the table -----------------------------------------------------------------------------------

_MOST_ROWS = 16
_MOST_ALIKE = 4  # kinds of envs whose wrappers are described
# Columns by importance: where there is no room, unnamed ones are left out first, then the last.
_IMPORTANCE = (
    *("worker", "now", "in step", "envs", "steps", "pid", "time", "waiting", "resets", "memory"),
    *("in reset", "CPU", "starved"),
)
_LONGEST = len("reset of env 100 for 2.63 ms")
_SLOWEST = 3  # envs that are named
_LONG_S = 0.1  # a shorter wait of the caller is not shown


@dataclass(frozen=True)
class Table:
    """The parts of a table of stats: ``str`` joins them as text, ``top`` draws them.

    Attributes:
        sentences: Sentences on all workers together.
        columns: Cells by name of column, one for each of the first workers.
        hidden: Text on how many more workers there are; empty: none.
        timings: Rows on durations of steps and resets, of all envs and of the slowest; the first
            row has the headings.
        faults: Text on the faults; empty: none.
    """

    sentences: tuple[str, ...]
    columns: dict[str, list[str]]
    hidden: str
    timings: tuple[tuple[str, ...], ...]
    faults: str

    @classmethod
    def of(cls, stats: Stats) -> Table:
        """The table of these stats."""
        more = len(stats.workers) - _MOST_ROWS
        faults = str(stats.faults)
        return cls(
            tuple(_sentences(stats)),
            _columns(stats),
            f"... and {more} more" if more > 0 else "",
            tuple(_timings(stats)),
            f"faults: {faults}" if faults else "",
        )

    @property
    def width(self) -> int:
        """Characters that the columns take side by side, with the longest text in "now"."""
        widths = [
            _LONGEST if name == "now" else max(map(len, (name, *cells)))
            for name, cells in self.columns.items()
        ]
        return sum(widths) + 2 * (len(widths) - 1)

    def fitted(self, width: int | None) -> Table:
        """This table without the least important columns, so that it fits; None: all of it."""
        table = self
        for name in sorted(self.columns, key=_unimportance, reverse=True)[:-1]:
            if width is None or table.width <= width:
                break
            columns = {key: cells for key, cells in table.columns.items() if key != name}
            table = replace(self, columns=columns)
        return table

    def __str__(self) -> str:
        """The table as text."""
        workers = [(name, *cells) for name, cells in self.columns.items()]
        return "\n".join(
            [
                *self.sentences,
                *_aligned(list(zip(*workers, strict=True))),
                *filter(None, [self.hidden]),
                *_aligned(self.timings),
                *filter(None, [self.faults]),
            ]
        )


def _unimportance(column: str) -> int:
    return _IMPORTANCE.index(column) if column in _IMPORTANCE else len(_IMPORTANCE)


def _sentences(stats: Stats) -> list[str]:
    steps = sum(worker.steps for worker in stats.workers)
    resets = sum(worker.resets for worker in stats.workers)
    waiting_s = stats.waiting_s or 0.0
    share = stats.share_of_limit
    has_limit = share < _OVER and not stats.overlaps  # envs that sleep have none
    limit = f", {share:.0%} of the limit" if has_limit else ""
    sentences = [
        f"{stats.elapsed_s:.3g} s: {steps:,} steps ({stats.steps_per_s:,.0f} a second{limit}), "
        f"{resets:,} resets; "
        f"{stats.num_workers} workers, {len(stats.envs)} envs, {stats.cores} cores",
        f"the caller waited {_percent(stats.parent.waited_s, stats.elapsed_s)} of the time "
        f"({stats.parent.parks:,} sleeps)"
        + (f", now for {_duration(waiting_s)}" if waiting_s >= _LONG_S else ""),
    ]
    sentences += [f"wrappers{whose}: {words}" for whose, words in _alike(stats.wrappers)]
    if spent := sum(worker.wrappers_s for worker in stats.workers):
        cost = f"{_duration(spent / max(1, steps))} a step"
        sentences.append(f"wrappers that are not compiled, around those that are: {cost}")
    if stats.caller is not None:
        known = [each.pss for each in stats.processes if each is not None and each.pss is not None]
        of_workers = f", workers {_bytes(sum(known))}" if known else ""
        sentences.append(
            f"memory: caller {_memory(stats.caller)}{of_workers}, shared {_bytes(stats.shared)}"
        )
    return sentences


def _alike(wrappers: Sequence[str]) -> list[tuple[str, str]]:
    """Descriptions of envs' wrappers, each with the envs that share it."""
    envs: dict[str, list[int]] = {}
    for env, words in enumerate(wrappers):
        envs.setdefault(words, []).append(env)
    if len(envs) == 1:
        return [("", words) for words in envs if words]
    shown = [(_some(which), words) for words, which in envs.items() if words]
    more = len(shown) - _MOST_ALIKE
    return shown[:_MOST_ALIKE] + [("", f"{more} other kinds of envs")] * (more > 0)


def _some(envs: list[int]) -> str:
    """Envs as a short text."""
    if len(envs) == 1:
        return f" of env {envs[0]}"
    if envs[-1] - envs[0] == len(envs) - 1:
        return f" of envs {envs[0]}-{envs[-1]}"
    return f" of env {envs[0]} and {len(envs) - 1} others"


def _columns(stats: Stats) -> dict[str, list[str]]:
    workers = stats.workers[:_MOST_ROWS]
    processes = stats.processes[:_MOST_ROWS]
    columns = {
        "worker": [str(index) for index in range(len(workers))],
        "envs": [_range(worker.envs) for worker in workers],
        "pid": [str(each.pid) if each else "?" for each in processes],
        **_counted(stats, "work"),
        "waiting": [_percent(worker.waited_s, stats.elapsed_s) for worker in workers],
        **_counted(stats, "waits"),
        **_counted(stats, "on_cores"),
        "memory": [_memory(each) for each in processes],
        "now": [_now(stats, index) for index in range(len(workers))],
    }
    return {name: cells for name, cells in columns.items() if cells}


def _counted(stats: Stats, table: str) -> dict[str, list[str]]:
    """Columns of the counters that have a heading; times are shares."""
    columns = {}
    for counter, heading, _ in COUNTERS[table]:
        name = _attribute(counter)
        counts = [getattr(worker, name) for worker in stats.workers[:_MOST_ROWS]]
        if heading and counter.endswith("_ns"):
            columns[heading] = [_percent(count, stats.elapsed_s) for count in counts]
        elif heading:
            columns[heading] = [f"{count:,}" for count in counts]
    return columns


def _timings(stats: Stats) -> list[tuple[str, ...]]:
    rows = [
        (f"{who} {name}", *map(_duration, (t.quantile(0.5), t.quantile(0.99), t.longest_s)))
        for name in ("step", "reset")
        for who, t in (("any env's", getattr(stats, name)), *_slowest(stats, name))
        if t.count
    ]
    return [("", "p50", "p99", "longest"), *rows] if rows else []


def _duration(seconds: float) -> str:
    """A duration as text, in the unit that reads best."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def _now(stats: Stats, worker: int) -> str:
    """The operation that a worker is in, as text."""
    if stats.processes and stats.processes[worker] is None:
        return "no process"
    return str(stats.doing[worker] or "-") if stats.doing else "-"


def _slowest(stats: Stats, name: str) -> list[tuple[str, Timing]]:
    """The envs whose steps or resets take longest, if there are more than so many."""
    if len(stats.envs) <= _SLOWEST:
        return []
    found = [(getattr(env, name), index) for index, env in enumerate(stats.envs)]
    worst = sorted(found, key=lambda each: -each[0].quantile(0.99))[:_SLOWEST]
    return [(f"env {index}'s", timing) for timing, index in worst]


def _percent(part: float | None, whole: float) -> str:
    return "?" if part is None else f"{100 * part / max(whole, 1e-9):.0f} %"


def _memory(process: Process | None) -> str:
    if process is None or process.pss is None:
        return "?"
    return _bytes(process.pss)


def _bytes(number: int) -> str:
    mib = number / 2**20
    return f"{mib:,.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def _range(envs: range) -> str:
    """The first and last env of a range, as text."""
    return "-".join(map(str, dict.fromkeys((envs[0], envs[-1])))) if envs else "?"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, columns flush right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in rows]


# ---- the table in a notebook ---------------------------------------------------------------------

# Colours are in the elements, and text has that of the page: notebooks and sites may be dark.
_BADGES = {"none": "#616161", "good": "#2e7d32", "change": "#8a5a00", "problem": "#c62828"}
_BARS = {"in step": "#43a047", "in reset": "#00acc1", "no core": "#e53935", "waiting": "#9e9e9e66"}
_NOT_IN_HTML = ("pid",)
_STYLE = "font-variant-numeric:tabular-nums;font-size:0.9em;line-height:1.5;overflow-x:auto"
_CELL = "padding:0.1em 0.7em;text-align:right;white-space:nowrap"
_TABLE = "border-collapse:collapse;margin:0.4em 0;width:auto;font-size:inherit;color:inherit"
_ROW = "background:none"  # where a page has rows of other colours


def _as_html(stats: Stats) -> str:
    """The verdict, the workers with their time as bars, and the times of steps and resets."""
    table, verdict = Table.of(stats), stats.verdict
    badge = f"background:{_BADGES[verdict.severity]};color:#fff;border-radius:0.3em;padding:0 0.5em"
    said = f'<b style="{badge}">{html.escape(verdict.kind)}</b> {html.escape(verdict.reason)}.'
    said += f" <b>{html.escape(verdict.advice)}.</b>" if verdict.advice else ""
    parts = [
        said,
        *map(html.escape, table.sentences),
        _workers_as_html(stats, table),
        html.escape(table.hidden),
        _rows_as_html([[html.escape(cell) for cell in row] for row in table.timings]),
        html.escape(table.faults),
    ]
    shown = "".join(f"<div>{part}</div>" for part in parts if part)
    return f'<div style="{_STYLE}">{shown}</div>'


def _workers_as_html(stats: Stats, table: Table) -> str:
    """A row for each worker, without columns that say nothing, and the keys of the bars."""
    columns = {
        name: [html.escape(cell) for cell in cells]
        for name, cells in table.columns.items()
        if name not in _NOT_IN_HTML and not {*cells} <= {"?", "-"}
    }
    bars = [_bar_as_html(worker.shares(stats.elapsed_s)) for worker in stats.workers[:_MOST_ROWS]]
    rows = [(name, *cells) for name, cells in columns.items()]
    rows.insert(2, ("time", *bars))
    square = "display:inline-block;width:0.8em;height:0.8em;margin:0 0.3em 0 0.8em"
    keys = "".join(
        f'<span style="{square};background:{colour}"></span>{name}'
        for name, colour in _BARS.items()
    )
    return f"{_rows_as_html(list(zip(*rows, strict=True)))}<div>time:{keys}</div>"


def _bar_as_html(shares: dict[str, float]) -> str:
    """A worker's time as a bar, and its words for those who cannot see it."""
    words = ", ".join(f"{name} {_percent(share, 1)}" for name, share in shares.items())
    parts = "".join(
        f'<span style="width:{100 * share:.1f}%;background:{_BARS[name]}"></span>'
        for name, share in shares.items()
    )
    style = "display:flex;width:10em;height:0.9em;border:1px solid #9e9e9e"
    return f'<div role="img" aria-label="{words}" title="{words}" style="{style}">{parts}</div>'


def _rows_as_html(rows: Sequence[Sequence[str]]) -> str:
    """A table of rows of HTML, the first of them headings; "" if there are none."""
    if not rows:
        return ""
    drawn = []
    for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False):
        cells = "".join(f'<{tag} style="{_CELL}">{cell}</{tag}>' for cell in row)
        drawn.append(f'<tr style="{_ROW}">{cells}</tr>')
    head, body = drawn[0], "".join(drawn[1:])
    return f'<table style="{_TABLE}"><thead>{head}</thead><tbody>{body}</tbody></table>'
