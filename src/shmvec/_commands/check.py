"""Test whether an env may run in parallel, and name the option that fixes what is wrong.

    shmvec check my_env.py:MyEnv

Envs are made and stepped alone, with others in one process, in two processes at once and under each
start method, with the same seeds and actions. Their results are compared bit for bit. All of that
happens in workers, so a crash or a hang is a finding, too. Each line is ok, a note, or WRONG with
the option that fixes it. The exit status is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TextIO

from shmvec._commands.arguments import (
    add_env_arguments,
    add_json_option,
    find_env_fn,
    positive,
    report_lines,
    write_json,
)
from shmvec._commands.measuring import Progress
from shmvec._commands.probe import RESULT_PARTS, Event, Facts, Probe, ProbeError
from shmvec._processes.stacks import read_stack
from shmvec.exchange import Exchange
from shmvec.faults import FaultPolicy, WorkerCrashError

__all__ = [
    "SUMMARY",
    "CheckReport",
    "Finding",
    "add_arguments",
    "brief_check",
    "check",
    "main",
    "time_finding",
]

SUMMARY = "test whether your env may run in parallel, and which option fixes it"

_MAX_STEPPING_S = 1.0  # for the steps of one env alone
_CLOSE_TIMEOUT_S = 5.0
SLOW_S = 1.0  # making or closing an env is slow from there on

OK, NOTE, WRONG = "ok", "note", "wrong"


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        kind: The subject: "start method", "same seed", "other seeds", "spaces", "infos",
            "global generators", "buffers", "open files", "threads", "one process",
            "two processes", "close", "time" or "memory".
        verdict: "ok", "note" (some programs should fix it) or "wrong".
        seen: The observation.
        advice: What to do about it, and why; None: nothing.
        option: The option of ``ShmVectorEnv`` that fixes it, or what else has to be changed.
    """

    kind: str
    verdict: str
    seen: str
    advice: str | None = None
    option: str | None = None


@dataclass(frozen=True)
class CheckReport:
    """The findings of a check; printed, a table.

    Attributes:
        findings: The lines of the table.
    """

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong

    @property
    def wrong(self) -> list[Finding]:
        """The findings that are wrong."""
        return [finding for finding in self.findings if finding.verdict == WRONG]

    def __str__(self) -> str:
        """The table: a line for each finding, its advice below it, and the number of wrong ones."""
        rows = [
            (
                f"{each.verdict.upper() if each.verdict == WRONG else each.verdict:5}",
                each.kind,
                each.seen,
                each.advice and (f"{each.option}: " if each.option else "") + each.advice,
            )
            for each in self.findings
        ]
        end = f"Wrong: {len(self.wrong)}." if self.wrong else "Nothing is wrong."
        return "\n".join([*report_lines(rows), end])


@dataclass
class _Run:
    """The results of envs that were stepped in some processes.

    Attributes:
        events: Digests of each env's results, by its number.
        facts: The facts of each process.
        failure: The failure that ended the run early; "" if there was none.
        close_failure: The failure of ``close()``; "" if there was none.
        fork_failure: The failure in a fork; "" if there was none, or no fork.
        close_s: Duration of closing the envs, in all processes at once.
        seconds: Duration, with the start of the workers.
    """

    events: dict[int, list[Event]] = field(default_factory=dict)
    facts: list[Facts] = field(default_factory=list)
    failure: str = ""
    close_failure: str = ""
    fork_failure: str = ""
    close_s: float = 0.0
    seconds: float = 0.0


class _Examiner:
    """Runs envs in workers, in new ones for each run."""

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], time_limit: float, steps: int, say: Progress
    ) -> None:
        self.env_fns = env_fns
        self.time_limit = time_limit
        self._say = say
        self.steps = steps
        self._num_steps_known = False

    def run(
        self,
        text: str,
        processes: Sequence[Sequence[int]],
        context: str,
        *,
        twice: bool = False,
        reseeds: bool = False,
        forks: bool = False,
    ) -> _Run:
        """Makes envs, resets and steps them in lockstep, and closes them.

        Args:
            text: The text of the progress line.
            processes: The numbers of the envs of each process.
            context: The start method.
            twice: Whether to reset and step them a second time.
            reseeds: Whether to do that with another seed.
            forks: Whether to fork each process at the end, and step an env in the fork.
        """
        self._say(text)
        run = _Run(events={number: [] for numbers in processes for number in numbers})
        start = time.monotonic()
        doing = "starting the worker"
        exchange: Exchange | None = None
        try:
            exchange = Exchange(
                [partial(Probe, self.env_fns, numbers) for numbers in processes],
                name="the check",
                num_workers=len(processes),
                context=context,
                threads_per_worker=1,
                hang_warning_s=0,
                faults=FaultPolicy(),
            )
            deadline = time.monotonic() + self.time_limit
            for doing, name, arguments in self._calls(twice, reseeds, forks):  # noqa: B007
                begin = time.monotonic()
                left = max(0.01, deadline - begin)
                answers = exchange.call(name, arguments, timeout=left)
                if name == "advance":
                    for numbers, events in zip(processes, answers, strict=True):
                        for number, event in zip(numbers, events, strict=True):
                            run.events[number].append(event)
                elif name == "facts":
                    run.facts = answers
                elif name == "finish":
                    run.close_s = time.monotonic() - begin
                elif name == "fork":
                    run.fork_failure = answers[0]
        except ProbeError as error:
            which = f"env {error.env + 1}, {error.moment}"
            if doing == "close":
                run.close_failure = f"{which}: {error.text}"
            else:
                run.failure = f"raises ({which}): {error.text}"
        except multiprocessing.TimeoutError:
            run.failure = f"hangs ({doing}, {self.time_limit:.3g} s)"
            if exchange is not None:
                run.failure += _hang_location(exchange)
        except WorkerCrashError as error:
            run.failure = f"crashes ({doing}): {error.summary.rpartition(', in ')[0] or error}"
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            run.failure = f"fails ({doing}): {type(error).__name__}: {text}"
        finally:
            if exchange is not None:
                with suppress(Exception):
                    exchange.close(_CLOSE_TIMEOUT_S, terminate=bool(run.failure))
        run.seconds = time.monotonic() - start
        return run

    def _calls(
        self, twice: bool, reseeds: bool, forks: bool
    ) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        """The calls of a run: for each a description, the probe's method, and its arguments."""
        yield "making envs", "build", ()
        for moment in ("reset", *["reset"] * twice, *["reset with another seed"] * reseeds):
            yield moment, "advance", (moment,)
            yield from self._steps()
        yield "looking at it", "facts", ()
        if forks:
            yield "a fork", "fork", (self.time_limit / 2,)
        yield "close", "finish", ()

    def _steps(self) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        """``steps`` steps, or as many as the first run can make in ``_MAX_STEPPING_S``."""
        begin = time.monotonic()
        for number in range(1, self.steps + 1):
            yield f"step {number}", "advance", ("step",)
            if not self._num_steps_known and time.monotonic() - begin > _MAX_STEPPING_S:
                self.steps = number
                break
        self._num_steps_known = True


def check(
    env_fn: Callable[[], Any],
    *,
    beside: Callable[[], Any] | None = None,
    contexts: Sequence[str] | None = None,
    steps: int = 50,
    time_limit: float = 20.0,
    progress: TextIO | None = None,
) -> CheckReport:
    """Checks whether an env may run in parallel; see :func:`shmvec.testing.check_env_fn`."""
    say = Progress(progress, "checking the env")
    env_fns = [env_fn] if beside is None else [env_fn, beside]
    examiner = _Examiner(env_fns, time_limit, steps, say)
    try:
        return CheckReport(tuple(_findings(examiner, _methods(contexts))))
    finally:
        say.done()


def brief_check(env_fn: Callable[[], Any], seconds: float = 2.0) -> str | None:
    """A sentence, if two envs in one process return other results than each alone.

    An env that takes a quarter of ``seconds`` alone is not checked.
    """
    examiner = _Examiner([env_fn], seconds / 4, 10, Progress(None, ""))
    method = _methods(None)[0]
    alone = examiner.run("alone", [[0]], method, twice=True)
    if alone.failure or alone.seconds > seconds / 4:
        return None
    examiner.time_limit = 2 * seconds  # only an env that hangs takes longer
    other = examiner.run("alone, with another seed", [[1]], method)
    pair = examiner.run("two in one process", [[0, 1]], method)
    reference, repeated = _references(alone, other)
    unstable = set(_differing_parts(reference[0], repeated))
    difference = _first_difference(reference, pair, unstable)
    if other.failure or not difference:
        return None
    return f"two envs in one process do not return what each returns alone: {difference}"


def _methods(contexts: Sequence[str] | None) -> list[str]:
    """The start methods to try; the first is the user's."""
    known = multiprocessing.get_all_start_methods()  # the first is the default
    if contexts is None:
        usual = multiprocessing.get_start_method(allow_none=True) or known[0]
        return [usual, *(method for method in known if method != usual)]
    for method in contexts:
        if method not in known:
            raise ValueError(f"there is no start method {method!r}: {', '.join(known)}")
    return list(contexts)


def _findings(examiner: _Examiner, methods: Sequence[str]) -> Iterator[Finding]:
    """Runs the env alone and with others, and judges the results."""
    preferred = methods[0]
    runs: dict[str, _Run] = {}
    for method in methods:
        twice = all(run.failure for run in runs.values())
        runs[method] = examiner.run(f"alone, by {method}", [[0]], method, twice=twice)
    working = [method for method in methods if not runs[method].failure]
    yield from _start_method_findings(runs, working, preferred)
    if not working:
        return
    method = working[0]
    alone, rest = runs[method], [runs[other] for other in working[1:]]
    second = examiner.run("alone, a second time", [[0]], method)
    other = examiner.run("alone, with another seed", [[1]], method, reseeds=True)
    pair = examiner.run("two in one process", [[0, 1]], method)
    four = None
    if not pair.failure:  # the last env is of the first kind again, if there are two kinds
        four = examiner.run("four in one process", [[0, 1, 3, 2]], method)
    two_processes = examiner.run("two processes at once", [[0], [1]], method)

    reference, repeated = _references(alone, other)
    unstable, finding = _same_seed_finding(reference[0], repeated, second, rest)
    yield finding
    yield _other_seeds_finding(reference[1], other.events[1][len(reference[1]) :])
    if len(examiner.env_fns) > 1:
        again = examiner.run("the other one, a second time", [[1]], method)
        unstable.update(_differing_parts(reference[1], again.events[1]))
    facts = alone.facts[0]
    everywhere = [each for run in (alone, pair, four) if run is not None for each in run.facts]
    yield from _space_findings(facts, everywhere)
    yield _infos_finding(everywhere)
    yield _generators_finding(facts)
    yield _buffers_finding(everywhere)
    if "fork" in working:
        yield _open_files_finding(runs["fork"].facts[0], preferred)
    one = _first_difference(reference, pair, unstable)
    if not one and four is not None:
        one = _first_difference(reference, four, unstable)
    two = _first_difference(reference, two_processes, unstable)
    if other.failure:
        one = one or f"another seed: {other.failure}"
    yield from _process_findings(one, two, facts, unstable)
    if not one and "fork" in working:
        forked = examiner.run("a fork of a program that has made an env", [[0]], "fork", forks=True)
        yield _threads_finding(facts, forked, preferred)
    closes = [run.close_failure for run in (alone, pair, two_processes) if run.close_failure]
    if closes:
        advice = (
            "an exception of close() is raised by the vector env's close(), at the end of a run"
        )
        yield Finding("close", WRONG, closes[0], advice, "the env's close()")
    yield time_finding(facts, alone.seconds, alone.close_s, pair.facts)
    yield _memory_finding(pair, four)


def _references(alone: _Run, other: _Run) -> tuple[dict[int, list[Event]], list[Event]]:
    """Events of an env alone: with each of the two seeds, and with the first one again."""
    events = alone.events[0]
    middle = len(events) // 2
    return {0: events[:middle], 1: other.events[1][:middle]}, events[middle:]


def _start_method_findings(
    runs: dict[str, _Run], working: list[str], preferred: str
) -> Iterator[Finding]:
    for method, run in runs.items():
        if not run.failure:
            yield Finding("start method", OK, f"{method}: works, in {run.seconds:.1f} s")
        elif not working:
            advice = "it fails alone, in a worker of each start method"
            yield Finding("start method", WRONG, f"{method}: {run.failure}", advice, "the env")
        else:
            names = " or ".join(f'context="{each}"' for each in working)
            advice = "where this one fails; " + (
                "under fork workers have the program's memory, but none of its threads"
                if method == "fork"
                else "workers are new processes, and have only what env_fn holds and imports: set "
                "the rest in env_fn, or in worker_init="
            )
            verdict = WRONG if method == preferred else NOTE
            yield Finding("start method", verdict, f"{method}: {run.failure}", advice, names)


def _same_seed_finding(
    reference: list[Event], repeated_events: list[Event], second: _Run, others: Sequence[_Run]
) -> tuple[set[str], Finding]:
    """Whether an env alone returns the same twice, with the same seed and actions.

    Also returns the parts that differ between new processes, which later comparisons leave out.
    """
    kind, unstable = "same seed", set[str]()
    differ = _differing_parts(reference, repeated_events)
    seen = f"a second reset with the seed, in the same env: {_in_words(differ)}" if differ else ""
    differing = set(differ)
    for run in (second, *others):
        differ = _differing_parts(reference, run.events[0])
        unstable.update(differ)
        where = "in another process" if run is second else "under another start method"
        seen = seen or (f"{where}: {_in_words(differ)}" if differ else "")
    differing |= unstable
    if second.failure:
        advice = "the first process leaves something behind (a file, a port, a lock)"
        seen = f"a second time: {second.failure}"
        return unstable, Finding(kind, WRONG, seen, advice, "close()")
    if not differing:
        steps = f"{len(reference) - 1} steps, twice in one env and in fresh processes: the same"
        return unstable, Finding(kind, OK, steps)
    if differing == {"infos"}:
        advice = "times and counts may differ; what you log and compare should not"
        return unstable, Finding(kind, NOTE, seen, advice)
    advice = (
        "super().reset(seed=seed) seeds it. Use nothing else: no generators of your own, no "
        "sample() of a space, not the clock, the order of sets, or leftovers of the last episode"
    )
    return unstable, Finding(kind, WRONG, seen, advice, "self.np_random")


def _other_seeds_finding(reference: list[Event], reseeded_events: list[Event]) -> Finding:
    kind = "other seeds"
    if not reseeded_events:
        return Finding(kind, OK, "were not compared")
    if {"observations", "rewards", "ends"} & set(_differing_parts(reference, reseeded_events)):
        return Finding(kind, OK, "another seed gives another episode")
    steps = len(reseeded_events) - 1
    seen = f"another seed gives the same episode ({steps} steps, the same actions)"
    advice = (
        "all envs play one episode over and over, which is right only if nothing in the env is "
        "random. super().reset(seed=seed) seeds it; a generator of your own needs a seed from it"
    )
    return Finding(kind, NOTE, seen, advice, "self.np_random")


def _differing_parts(reference: Sequence[Event], events: Sequence[Event]) -> dict[str, int]:
    """The parts of results that differ, each with the number of its first such event."""
    differ: dict[str, int] = {}
    for number, (one, other) in enumerate(zip(reference, events, strict=False)):
        for part, a, b in zip(RESULT_PARTS, one, other, strict=True):
            if a != b:
                differ.setdefault(part, number)
    return differ


def _in_words(differ: dict[str, int]) -> str:
    return ", ".join(
        f"{part} differ from {f'step {number}' if number else 'the reset'} on"
        for part, number in differ.items()
    )


def _space_findings(facts: Facts, everywhere: Sequence[Facts]) -> Iterator[Finding]:
    wrong = list(dict.fromkeys(text for each in everywhere for text in each.spaces))
    if wrong:
        differ = all(text.startswith("the ") and text.endswith("differs") for text in wrong)
        if differ:
            advice = "for spaces that differ in their bounds alone"
            yield Finding("spaces", WRONG, wrong[0], advice, 'observation_mode="different"')
        else:
            advice = (
                "that makes observations fit the space (gymnasium.wrappers.TransformObservation), "
                "or a space that fits and does not change: shared memory is laid out by it"
            )
            yield Finding("spaces", WRONG, "; ".join(wrong), advice, "a wrapper")
    elif facts.cast:
        advice = "vector envs cast it at every step (gymnasium.wrappers.DtypeObservation does so)"
        yield Finding("spaces", NOTE, f"observations are {facts.cast}", advice, "a wrapper")
    else:
        yield Finding("spaces", OK, "observations fit, and spaces do not change")
    if facts.needs_pickle:
        advice = (
            "pickles observations; or leave this part out by a wrapper (of a Dict: "
            "gymnasium.wrappers.FilterObservation)"
        )
        seen = f"shared memory needs a fixed size, but {facts.needs_pickle}"
        yield Finding("spaces", WRONG, seen, advice, "shared_memory=False")


def _infos_finding(everywhere: Sequence[Facts]) -> Finding:
    unpicklable = {key: why for each in everywhere for key, why in each.infos.items()}
    if not unpicklable:
        return Finding("infos", OK, "can be sent to another process")
    seen = "; ".join(f"{key}: {why}" for key, why in list(unpicklable.items())[:3])
    advice = "that removes it from the info, or num_workers=0: workers send infos to the program"
    return Finding("infos", WRONG, seen, advice, "a wrapper")


def _generators_finding(facts: Facts) -> Finding:
    if facts.generators:
        advice = (
            "the envs of one process share it, and workers may begin with equal states: use "
            "self.np_random, or seed it in each worker and use num_workers=num_envs"
        )
        seen = f"resets or steps use the global state of {', '.join(facts.generators)}"
        return Finding("global generators", WRONG, seen, advice, "worker_init=")
    if facts.generators_of_build:
        seen = f"making an env uses the global state of {', '.join(facts.generators_of_build)}"
        return Finding("global generators", NOTE, seen)
    return Finding("global generators", OK, "are not used")


def _buffers_finding(everywhere: Sequence[Facts]) -> Finding:
    shared = any(each.shared_buffers for each in everywhere)
    seen = next((each.buffers for each in everywhere if each.buffers), "")
    if shared:
        seen = "an env changes the observation that another one of its process has returned"
        advice = (
            "or a wrapper that copies: SyncVectorEnv, and code that collects observations, gets "
            "the last one twice"
        )
        return Finding("buffers", WRONG, seen, advice, "num_workers=num_envs")
    if seen:
        advice = (
            "that copies, if code in the env keeps observations (a frame stack, a list); a "
            "ShmVectorEnv copies them before the next step"
        )
        return Finding("buffers", NOTE, seen, advice, "a wrapper")
    return Finding("buffers", OK, "each step returns new arrays")


def _open_files_finding(facts: Facts, preferred: str) -> Finding:
    if not facts.files:
        return Finding("open files", OK, "are not read from")
    seen = f"envs read from a file that is open before workers are forked: {facts.files[0]}"
    advice = (
        "workers share its offset, so each continues where another has stopped: open it in the "
        "env, or read by os.pread"
    )
    return Finding("open files", WRONG if preferred == "fork" else NOTE, seen, advice, "the env")


def _first_difference(reference: dict[int, list[Event]], run: _Run, unstable: set[str]) -> str:
    """The first difference of envs in company from those alone; "" if there is none."""
    if run.failure:
        return run.failure
    for number, events in run.events.items():
        differ = _differing_parts(reference[number % 2], events)
        differ = {part: since for part, since in differ.items() if part not in unstable}
        if differ:
            text = f"env {number + 1} of {len(run.events)}: {_in_words(differ)}"
            return text + _frame_owner(reference, events, number % 2, differ)
    return ""


def _frame_owner(
    reference: dict[int, list[Event]], events: list[Event], index: int, differ: dict[str, int]
) -> str:
    """A remark, if the frames that differ are those of the env with the other seed."""
    since, part = differ.get("frames"), RESULT_PARTS.index("frames")
    if since is None or len(reference[1 - index]) <= since:
        return ""
    same = events[since][part] == reference[1 - index][since][part]
    return " (another env's)" if same else ""


def _process_findings(
    difference: str, apart_difference: str, facts: Facts, unstable: set[str]
) -> Iterator[Finding]:
    """Judges differences between envs in one process (``one``), and in two at once (``two``)."""
    caveats = []
    if unstable:
        parts = ", ".join(part for part in RESULT_PARTS if part in unstable)
        caveats.append(f"not compared: {parts}, which differ alone, too")
    if facts.render_mode in (None, "human"):
        caveats.append(f"frames were not compared: render_mode is {facts.render_mode!r}")
    alike = "the same results as alone, bit for bit"
    if caveats:
        alike += f" ({'; '.join(caveats)})"
    verdict, recheck = OK, None
    if "observations" in unstable or "rewards" in unstable:
        verdict, recheck = NOTE, 'first fix what "same seed" says, then check again'
    if not difference:
        yield Finding("one process", verdict, f"two and four envs: {alike}", recheck)
    elif apart_difference and not facts.generators:
        advice = "because a process for each is not enough: see the next line"
        yield Finding("one process", WRONG, difference, advice, "worker_environ=")
    else:
        advice = (
            "gives each env a process: in one process they share something (a class attribute, a "
            "global variable, a library's only context)"
        )
        yield Finding("one process", WRONG, difference, advice, "num_workers=num_envs")
    if not apart_difference:
        yield Finding("two processes", verdict, f"at once: {alike}", recheck)
        return
    if facts.generators:
        advice = 'first fix what "global generators" says, then check again'
        yield Finding("two processes", NOTE, apart_difference, advice)
        return
    advice = (
        "processes share something outside (a port, a file, a lock, a device). Give each its own: "
        "by variables of each worker (worker_environ=lambda worker: {...}, with "
        "num_workers=num_envs), or by the env's number in its env_fn "
        "(partial(make, port=5000 + i))"
    )
    yield Finding("two processes", WRONG, apart_difference, advice, "worker_environ=")


def _threads_finding(facts: Facts, forked: _Run, preferred: str) -> Finding:
    """Whether a fork works after the program has made an env, as many do to get its spaces."""
    names = ", ".join(facts.threads[:4]) + (", ..." if len(facts.threads) > 4 else "")
    started = f"an env starts {len(facts.threads)} Python threads ({names})" if names else ""
    failure = forked.fork_failure or forked.failure
    advice = (
        "a fork has no threads of the program or of its libraries, such as a renderer: a program "
        "that makes an env and then forks workers fails like this"
    )
    if failure:
        seen = f"an env in a fork of a process that has made one {failure}"
        seen += f"; {started}" if started else ""
        verdict = WRONG if preferred == "fork" else NOTE
        return Finding("threads", verdict, seen, advice, 'context="forkserver"')
    if started:
        return Finding("threads", NOTE, started, advice, 'context="forkserver"')
    others = f" (libraries have {facts.native_threads})" if facts.native_threads else ""
    seen = f"an env starts no Python threads{others}; it works in a fork of a process with an env"
    return Finding("threads", OK, seen)


def time_finding(facts: Facts, seconds: float, close_s: float, pair: Sequence[Facts]) -> Finding:
    """How long an env takes.

    Args:
        facts: Facts of an env alone.
        seconds: Duration of its run.
        close_s: Duration of closing it.
        pair: Facts of processes with several envs.
    """
    times = {"a step": facts.step_us, "a reset": facts.reset_us, "a frame": facts.render_us}
    medians = [f"{what} {statistics.median(us):,.0f} µs" for what, us in times.items() if us]
    seen = f"{', '.join(medians)}; a worker with one env ran {seconds:.1f} s"
    # The second env of a process counts, since making the first one may import modules.
    durations = [duration for each in pair for duration in each.build_s[1:]]
    build_s, busy_s = max(durations or facts.build_s, default=(0.0, 0.0))
    if max(build_s, close_s) < SLOW_S:
        return Finding("time", OK, seen)
    seen += f"; an env is made in {build_s:.1f} s and closed in {close_s:.1f} s"
    advice = "a worker makes and closes its envs one after the other"
    if busy_s > build_s / 2:
        return Finding("time", NOTE, seen, f"{advice}; more workers share them", "num_workers=")
    return Finding("time", NOTE, seen, f"{advice}, unless this is set", 'overlap="auto"')


def _memory_finding(pair: _Run, four: _Run | None) -> Finding:
    if four is None or not four.facts or not pair.facts:
        return Finding("memory", OK, "not measured")
    copy = max(0, four.facts[0].resident - pair.facts[0].resident) / 2
    worker = pair.facts[0].resident / 2**20
    seen = f"{copy / 2**20:,.1f} MiB for one more env; a worker with two {worker:,.0f} MiB"
    return Finding("memory", OK, seen)


def _hang_location(exchange: Exchange) -> str:
    """The line of the env in which the first worker hangs; "" if no stack shows it."""
    for process in exchange.processes:
        for line in read_stack(process.pid, whole=True).splitlines():
            if line.startswith("  File") and "_commands/probe.py" not in line:
                return f" in {line.strip()}"
    return ""


# ---- the command ---------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_env_arguments(command)
    command.add_argument(
        "--beside",
        metavar="ENV",
        help="another kind of env, to run in the same processes (default: the same kind)",
    )
    command.add_argument(
        "--context",
        nargs="+",
        choices=multiprocessing.get_all_start_methods(),
        metavar="METHOD",
        help="start methods to try; put the one you use first (default: all)",
    )
    command.add_argument(
        "--steps", type=positive(int), default=50, help="steps of each env (default: %(default)s)"
    )
    command.add_argument(
        "--time-limit",
        type=positive(float),
        default=20.0,
        metavar="S",
        help="seconds after which a run of envs counts as hanging (default: %(default)g)",
    )
    add_json_option(command, "findings")


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    make, _ = find_env_fn(options.env, options.kwargs)
    beside = options.beside and find_env_fn(options.beside, options.kwargs)[0]
    report = check(
        make,
        beside=beside,
        contexts=options.context,
        steps=options.steps,
        time_limit=options.time_limit,
        progress=sys.stderr,
    )
    print(report)
    write_json(options, {"ok": report.ok, "findings": list(map(asdict, report.findings))})
    return 0 if report.ok else 1
