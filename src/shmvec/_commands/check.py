"""Test whether an env may run in parallel, and name the option that fixes what is wrong.

    shmvec check my_env.py:MyEnv

Envs are made and stepped alone, with others in one process, in two processes at once and under each
start method, with the same seeds and actions. Their results are compared bit for bit. All of it
happens in workers, so a crash or a hang is a finding. Each line is ok, a note, or WRONG with the
option that fixes it. The exit status is 1 if something is wrong.
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
    add_env,
    add_json,
    env_fn,
    positive,
    report_lines,
    write_json,
)
from shmvec._commands.measuring import Progress
from shmvec._commands.probe import PARTS, Event, Facts, Probe, Raised
from shmvec._commands.stacks import stacks_of
from shmvec.exchange import Exchange
from shmvec.faults import FaultPolicy, WorkerCrashError

__all__ = ["SUMMARY", "CheckReport", "Finding", "add_arguments", "brief", "check", "main"]

SUMMARY = "test whether your env may run in parallel, and which option fixes it"

_MOST_SECONDS = 1.0  # for the steps of one env alone
_TO_CLOSE_S = 5.0

OK, NOTE, WRONG = "ok", "note", "wrong"


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        kind: The subject: "start method", "same seed", "other seeds", "spaces", "infos",
            "global generators", "buffers", "open files", "threads", "one process",
            "two processes", "close", "time" or "memory".
        verdict: "ok", "note" (to know, or to fix for some programs) or "wrong".
        seen: What was seen.
        advice: What to do about it, and why; None: nothing.
        option: The option of ``ShmVectorEnv``, or the other thing, that fixes it.
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
        """The table: a line a finding, its advice below it, and the number of wrong ones."""
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
        facts: What was noticed in each process.
        trouble: The failure that ended the run early; "" if there was none.
        at_close: The failure of ``close()``; "" if there was none.
        in_fork: The failure in a fork, if one was made; "" if there was none.
        seconds: Duration, with the start of the workers.
    """

    events: dict[int, list[Event]] = field(default_factory=dict)
    facts: list[Facts] = field(default_factory=list)
    trouble: str = ""
    at_close: str = ""
    in_fork: str = ""
    seconds: float = 0.0


class _Examination:
    """Runs of an env in workers, each time in fresh ones."""

    def __init__(
        self, env_fns: Sequence[Callable[[], Any]], time_limit: float, steps: int, say: Progress
    ) -> None:
        self.env_fns = env_fns
        self.time_limit = time_limit
        self._say = say
        self.steps = steps
        self._counted = False

    def run(
        self,
        what: str,
        processes: Sequence[Sequence[int]],
        context: str,
        *,
        twice: bool = False,
        reseeds: bool = False,
        forks: bool = False,
    ) -> _Run:
        """Makes envs, resets and steps them in lockstep, and closes them.

        Args:
            what: The text of the progress line.
            processes: The numbers of the envs of each process.
            context: The start method.
            twice: Whether to reset and step them a second time.
            reseeds: Whether to do that with another seed.
            forks: Whether to fork each process at the end, and step an env in the fork.
        """
        self._say(what)
        found = _Run(events={number: [] for numbers in processes for number in numbers})
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
                left = max(0.01, deadline - time.monotonic())
                answers = exchange.call(name, arguments, timeout=left)
                failed = next((each for each in answers if isinstance(each, Raised)), None)
                if failed is not None:
                    which = f"env {failed.env + 1}, {failed.moment}"
                    if name == "finish":
                        found.at_close = f"{which}: {failed.text}"
                    else:
                        found.trouble = f"raises ({which}): {failed.text}"
                        break
                elif name == "advance":
                    for numbers, events in zip(processes, answers, strict=True):
                        for number, event in zip(numbers, events, strict=True):
                            found.events[number].append(event)
                elif name == "facts":
                    found.facts = answers
                elif name == "fork":
                    found.in_fork = answers[0]
        except multiprocessing.TimeoutError:
            found.trouble = f"hangs ({doing}, {self.time_limit:.3g} s)"
            if exchange is not None:
                found.trouble += _where(exchange)
        except WorkerCrashError as error:
            found.trouble = f"crashes ({doing}): {error.summary.rpartition(', in ')[0] or error}"
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            found.trouble = f"fails ({doing}): {type(error).__name__}: {text}"
        finally:
            if exchange is not None:
                with suppress(Exception):
                    exchange.close(_TO_CLOSE_S, terminate=bool(found.trouble))
        found.seconds = time.monotonic() - start
        return found

    def _calls(
        self, twice: bool, reseeds: bool, forks: bool
    ) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        """The calls of a run: a description, the probe's method, and its arguments."""
        yield "making envs", "build", ()
        for moment in ("reset", *["reset"] * twice, *["reset with another seed"] * reseeds):
            yield moment, "advance", (moment,)
            yield from self._steps()
        yield "looking at it", "facts", ()
        if forks:
            yield "a fork", "fork", (self.time_limit / 2,)
        yield "close", "finish", ()

    def _steps(self) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        """Steps: as many as the first env makes in ``_MOST_SECONDS``, at most those asked for."""
        begin = time.monotonic()
        for number in range(1, self.steps + 1):
            yield f"step {number}", "advance", ("step",)
            if not self._counted and time.monotonic() - begin > _MOST_SECONDS:
                self.steps = number
                break
        self._counted = True


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
    examination = _Examination(env_fns, time_limit, steps, say)
    try:
        return CheckReport(tuple(_findings(examination, _methods(contexts))))
    finally:
        say.done()


def brief(env_fn: Callable[[], Any], seconds: float = 2.0) -> str | None:
    """A short check: whether two envs in one process return what each returns alone.

    Args:
        env_fn: Makes one env.
        seconds: How long it may take; an env that takes a quarter of it alone is not checked.

    Returns:
        A line, if something is wrong.
    """
    examination = _Examination([env_fn], seconds / 4, 10, Progress(None, ""))
    method = _methods(None)[0]
    alone = examination.run("alone", [[0]], method, twice=True)
    if alone.trouble or alone.seconds > seconds / 4:
        return None
    examination.time_limit = 2 * seconds  # even on a busy machine only what hangs takes longer
    other = examination.run("alone, with another seed", [[1]], method)
    company = examination.run("two in one process", [[0, 1]], method)
    reference, repeated = _references(alone, other)
    unstable = set(_differing(reference[0], repeated))
    found = _difference(reference, company, unstable)
    if other.trouble or not found:
        return None
    return f"two envs in one process do not act as each does alone: {found}"


def _methods(contexts: Sequence[str] | None) -> list[str]:
    """The start methods to try; the first is the one that the user means to use."""
    known = multiprocessing.get_all_start_methods()  # the first is the default
    if contexts is None:
        usual = multiprocessing.get_start_method(allow_none=True) or known[0]
        return [usual, *(method for method in known if method != usual)]
    for method in contexts:
        if method not in known:
            raise ValueError(f"there is no start method {method!r}: {', '.join(known)}")
    return list(contexts)


def _findings(examination: _Examination, methods: Sequence[str]) -> Iterator[Finding]:
    """Runs the env alone and beside others, and judges what was seen."""
    wanted = methods[0]
    runs: dict[str, _Run] = {}
    for method in methods:
        twice = all(run.trouble for run in runs.values())
        runs[method] = examination.run(f"alone, by {method}", [[0]], method, twice=twice)
    working = [method for method in methods if not runs[method].trouble]
    yield from _start_methods(runs, working, wanted)
    if not working:
        return
    method = working[0]
    alone, rest = runs[method], [runs[other] for other in working[1:]]
    second = examination.run("alone, a second time", [[0]], method)
    other = examination.run("alone, with another seed", [[1]], method, reseeds=True)
    company = examination.run("two in one process", [[0, 1]], method)
    four = None
    if not company.trouble:  # the last one is of the first kind, if there are two
        four = examination.run("four in one process", [[0, 1, 3, 2]], method)
    apart = examination.run("two processes at once", [[0], [1]], method)

    reference, repeated = _references(alone, other)
    unstable, finding = _same_seed(reference[0], repeated, second, rest)
    yield finding
    yield _other_seeds(reference[1], other.events[1][len(reference[1]) :])
    if len(examination.env_fns) > 1:
        again = examination.run("the other one, a second time", [[1]], method)
        unstable.update(_differing(reference[1], again.events[1]))
    facts = alone.facts[0]
    everywhere = [each for run in (alone, company, four) if run is not None for each in run.facts]
    yield from _spaces(facts, everywhere)
    yield _infos(everywhere)
    yield _generators(facts)
    yield _buffers(everywhere)
    if "fork" in working:
        yield _open_files(runs["fork"].facts[0], wanted)
    one = _difference(reference, company, unstable)
    if not one and four is not None:
        one = _difference(reference, four, unstable)
    two = _difference(reference, apart, unstable)
    if other.trouble:
        one = one or f"another seed: {other.trouble}"
    yield from _beside_others(one, two, facts, unstable)
    if not one and "fork" in working:
        forked = examination.run(
            "a fork of a program that has made an env", [[0]], "fork", forks=True
        )
        yield _threads(facts, forked, wanted)
    closes = [run.at_close for run in (alone, company, apart) if run.at_close]
    if closes:
        advice = (
            "an exception of close() is raised by the vector env's close(), at the end of a run"
        )
        yield Finding("close", WRONG, closes[0], advice, "the env's close()")
    yield _times(facts, alone)
    yield _memory(company, four)


def _references(alone: _Run, other: _Run) -> tuple[dict[int, list[Event]], list[Event]]:
    """Events of an env alone with each of the two seeds, and with the first one repeated."""
    events = alone.events[0]
    middle = len(events) // 2
    return {0: events[:middle], 1: other.events[1][:middle]}, events[middle:]


def _start_methods(runs: dict[str, _Run], working: list[str], wanted: str) -> Iterator[Finding]:
    """Whether an env can be made and stepped alone, in a worker of each start method."""
    for method, run in runs.items():
        if not run.trouble:
            yield Finding("start method", OK, f"{method}: works, in {run.seconds:.1f} s")
        elif not working:
            advice = "it fails alone, in a worker of each start method that was tried"
            yield Finding("start method", WRONG, f"{method}: {run.trouble}", advice, "the env")
        else:
            names = " or ".join(f'context="{each}"' for each in working)
            advice = "where this one fails; " + (
                "under fork workers have the program's memory, but none of its threads"
                if method == "fork"
                else "workers are new processes that know what env_fn carries and imports, and "
                "nothing that the program has set since: put that into env_fn, or into worker_init="
            )
            verdict = WRONG if method == wanted else NOTE
            yield Finding("start method", verdict, f"{method}: {run.trouble}", advice, names)


def _same_seed(
    reference: list[Event], repeated: list[Event], second: _Run, others: Sequence[_Run]
) -> tuple[set[str], Finding]:
    """Whether an env alone returns the same twice, with the same seed and actions.

    Returns:
        The parts that differ between fresh processes, and so cannot be compared with those of envs
        beside others; and the finding.
    """
    kind, unstable = "same seed", set[str]()
    differ = _differing(reference, repeated)
    seen = f"a second reset with the seed, in the same env: {_in_words(differ)}" if differ else ""
    differing = set(differ)
    for run in (second, *others):
        differ = _differing(reference, run.events[0])
        unstable.update(differ)
        where = "in another process" if run is second else "under another start method"
        seen = seen or (f"{where}: {_in_words(differ)}" if differ else "")
    differing |= unstable
    if second.trouble:
        advice = "what the first process leaves behind (a file, a port, a lock) is in the way"
        return unstable, Finding(kind, WRONG, f"a second time: {second.trouble}", advice, "close()")
    if not differing:
        steps = f"{len(reference) - 1} steps, twice in one env and in fresh processes: the same"
        return unstable, Finding(kind, OK, steps)
    if differing == {"infos"}:
        advice = "times and counts may differ; what you log and compare should not"
        return unstable, Finding(kind, NOTE, seen, advice)
    advice = (
        "super().reset(seed=seed) seeds it; draw from nothing else: no generators of your own, no "
        "space's sample(), the clock, the order of sets, or what the last episode has left"
    )
    return unstable, Finding(kind, WRONG, seen, advice, "self.np_random")


def _other_seeds(reference: list[Event], reseeded: list[Event]) -> Finding:
    """Whether the same actions after a reset with another seed give another episode."""
    kind = "other seeds"
    if not reseeded:
        return Finding(kind, OK, "were not compared")
    if {"observations", "rewards", "ends"} & set(_differing(reference, reseeded)):
        return Finding(kind, OK, "another seed gives another episode")
    seen = f"another seed gives the same episode ({len(reseeded) - 1} steps, the same actions)"
    advice = (
        "all envs play one episode over and over; right only if nothing in the env is random: "
        "super().reset(seed=seed) seeds it, a generator of your own with a fixed seed does not"
    )
    return Finding(kind, NOTE, seen, advice, "self.np_random")


def _differing(reference: Sequence[Event], events: Sequence[Event]) -> dict[str, int]:
    """The parts of results that differ, each with the number of the first event that differs."""
    differ: dict[str, int] = {}
    for number, (one, other) in enumerate(zip(reference, events, strict=False)):
        for part, a, b in zip(PARTS, one, other, strict=True):
            if a != b:
                differ.setdefault(part, number)
    return differ


def _in_words(differ: dict[str, int]) -> str:
    """The differing parts as text, each with its first step."""
    return ", ".join(
        f"{part} differ from {f'step {number}' if number else 'the reset'} on"
        for part, number in differ.items()
    )


def _spaces(facts: Facts, everywhere: Sequence[Facts]) -> Iterator[Finding]:
    wrong = list(dict.fromkeys(text for each in everywhere for text in each.spaces))
    if wrong:
        differ = all(text.startswith("the ") and text.endswith("differs") for text in wrong)
        if differ:
            advice = "for spaces that differ in their bounds alone"
            yield Finding("spaces", WRONG, wrong[0], advice, 'observation_mode="different"')
        else:
            advice = (
                "that returns what the space says (gymnasium.wrappers.TransformObservation), or a "
                "space that says what is returned and stays: workers share memory laid out by it"
            )
            yield Finding("spaces", WRONG, "; ".join(wrong), advice, "a wrapper")
    elif facts.cast:
        advice = "vector envs cast it at every step (gymnasium.wrappers.DtypeObservation does so)"
        yield Finding("spaces", NOTE, f"observations are {facts.cast}", advice, "a wrapper")
    else:
        yield Finding("spaces", OK, "observations are inside, and spaces stay")
    if facts.needs_pickle:
        advice = (
            "observations are pickled then; or a wrapper that leaves this part out "
            "(of a Dict: gymnasium.wrappers.FilterObservation)"
        )
        seen = f"not for shared memory, which needs a fixed size: {facts.needs_pickle}"
        yield Finding("spaces", WRONG, seen, advice, "shared_memory=False")


def _infos(everywhere: Sequence[Facts]) -> Finding:
    stuck = {key: why for each in everywhere for key, why in each.infos.items()}
    if not stuck:
        return Finding("infos", OK, "can be sent to another process")
    seen = "; ".join(f"{key}: {why}" for key, why in list(stuck.items())[:3])
    advice = "that takes it out of the info, or num_workers=0: workers send infos to the program"
    return Finding("infos", WRONG, seen, advice, "a wrapper")


def _generators(facts: Facts) -> Finding:
    if facts.generators:
        advice = (
            "the envs of one process share it, and workers may begin alike; draw from "
            "self.np_random, or seed it in each worker and use num_workers=num_envs"
        )
        seen = f"resets or steps use the global state of {', '.join(facts.generators)}"
        return Finding("global generators", WRONG, seen, advice, "worker_init=")
    if facts.generators_built:
        seen = f"making an env uses the global state of {', '.join(facts.generators_built)}"
        return Finding("global generators", NOTE, seen)
    return Finding("global generators", OK, "are not used")


def _buffers(everywhere: Sequence[Facts]) -> Finding:
    shared = any(each.shared_buffers for each in everywhere)
    seen = next((each.buffers for each in everywhere if each.buffers), "")
    if shared:
        seen = "an env changes the observation that another one of its process has returned"
        advice = (
            "or a wrapper that copies: SyncVectorEnv, and code that collects observations, would "
            "see the last one in place of both"
        )
        return Finding("buffers", WRONG, seen, advice, "num_workers=num_envs")
    if seen:
        advice = (
            "that copies, where code keeps observations of the env itself (a frame stack, a list); "
            "a ShmVectorEnv has copied them before the next step"
        )
        return Finding("buffers", NOTE, seen, advice, "a wrapper")
    return Finding("buffers", OK, "each step returns arrays of its own")


def _open_files(facts: Facts, wanted: str) -> Finding:
    """Whether envs in a fork read from files that the program has opened."""
    if not facts.files:
        return Finding("open files", OK, "are not read from")
    seen = f"envs read from a file that is open before workers are forked: {facts.files[0]}"
    advice = (
        "workers share its offset, so one reads where another has left it; open it in the env, or "
        "read by os.pread"
    )
    return Finding("open files", WRONG if wanted == "fork" else NOTE, seen, advice, "the env")


def _difference(reference: dict[int, list[Event]], run: _Run, unstable: set[str]) -> str:
    """The first difference of envs beside others from those alone; "" if there is none."""
    if run.trouble:
        return run.trouble
    for number, events in run.events.items():
        differ = _differing(reference[number % 2], events)
        differ = {part: since for part, since in differ.items() if part not in unstable}
        if differ:
            found = f"env {number + 1} of {len(run.events)}: {_in_words(differ)}"
            return found + _whose(reference, events, number % 2, differ)
    return ""


def _whose(
    reference: dict[int, list[Event]], events: list[Event], own: int, differ: dict[str, int]
) -> str:
    """Says of frames that differ whether they are those of the env with the other seed."""
    since, part = differ.get("frames"), PARTS.index("frames")
    if since is None or len(reference[1 - own]) <= since:
        return ""
    same = events[since][part] == reference[1 - own][since][part]
    return " (another env's)" if same else ""


def _beside_others(one: str, two: str, facts: Facts, unstable: set[str]) -> Iterator[Finding]:
    """Judges the differences of envs in one process (``one``) and in two at once (``two``)."""
    left_out = []
    if unstable:
        parts = ", ".join(part for part in PARTS if part in unstable)
        left_out.append(f"not compared: {parts}, which differ alone, too")
    if facts.render_mode in (None, "human"):
        left_out.append(f"frames were not compared: render_mode is {facts.render_mode!r}")
    alike = "as alone, bit for bit" + (f" ({'; '.join(left_out)})" if left_out else "")
    verdict, then = OK, None
    if "observations" in unstable or "rewards" in unstable:
        verdict, then = NOTE, 'first fix what "same seed" says, then check again'
    if not one:
        yield Finding("one process", verdict, f"two and four envs: {alike}", then)
    elif two and not facts.generators:
        advice = "and a process for each is not enough: see the next line"
        yield Finding("one process", WRONG, one, advice, "worker_environ=")
    else:
        advice = (
            "a process for each env: in one process they share something (a class attribute, a "
            "module's global, a library's only context)"
        )
        yield Finding("one process", WRONG, one, advice, "num_workers=num_envs")
    if not two:
        yield Finding("two processes", verdict, f"at once: {alike}", then)
        return
    if facts.generators:
        advice = 'first fix what "global generators" says, then check again'
        yield Finding("two processes", NOTE, two, advice)
        return
    advice = (
        "processes share something outside (a port, a file, a lock, a device): give each its own, "
        "by variables of each worker (worker_environ=lambda worker: {...}, with "
        "num_workers=num_envs), or by the env's number in its env_fn (partial(make, port=5000 + i))"
    )
    yield Finding("two processes", WRONG, two, advice, "worker_environ=")


def _threads(facts: Facts, forked: _Run, wanted: str) -> Finding:
    """Whether a fork works after the program has made an env, as many do to see its spaces."""
    names = ", ".join(facts.threads[:4]) + (", ..." if len(facts.threads) > 4 else "")
    started = f"an env starts {len(facts.threads)} Python threads ({names})" if names else ""
    failed = forked.in_fork or forked.trouble
    advice = (
        "a fork has none of the program's threads, nor those of its libraries (a renderer's): a "
        "program that makes an env and then forks workers fails like this"
    )
    if failed:
        seen = f"an env in a fork of a process that has made one {failed}"
        seen += f"; {started}" if started else ""
        verdict = WRONG if wanted == "fork" else NOTE
        return Finding("threads", verdict, seen, advice, 'context="forkserver"')
    if started:
        return Finding("threads", NOTE, started, advice, 'context="forkserver"')
    others = f" (libraries have {facts.native_threads})" if facts.native_threads else ""
    seen = f"an env starts no Python threads{others}; it works in a fork of a process with an env"
    return Finding("threads", OK, seen)


def _times(facts: Facts, alone: _Run) -> Finding:
    times = {"a step": facts.step_us, "a reset": facts.reset_us, "a frame": facts.render_us}
    shown = [f"{what} {statistics.median(us):,.0f} µs" for what, us in times.items() if us]
    seen = f"{', '.join(shown)}; a worker with one env ran {alone.seconds:.1f} s"
    return Finding("time", OK, seen)


def _memory(company: _Run, four: _Run | None) -> Finding:
    if four is None or not four.facts or not company.facts:
        return Finding("memory", OK, "not measured")
    copy = max(0, four.facts[0].resident - company.facts[0].resident) / 2
    worker = company.facts[0].resident / 2**20
    seen = f"{copy / 2**20:,.1f} MiB for one more env; a worker with two {worker:,.0f} MiB"
    return Finding("memory", OK, seen)


def _where(exchange: Exchange) -> str:
    """The env's line of code in which the first worker hangs; "" if no stack shows it."""
    for process in exchange.processes:
        with suppress(Exception):
            for stack in stacks_of(process.pid):
                for line in stack.splitlines():
                    if line.startswith("  File") and "_commands/probe.py" not in line:
                        return f" in {line.strip()}"
    return ""


# ---- the command ---------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_env(command)
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
    add_json(command, "findings")


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    make, _ = env_fn(options.env, options.kwargs)
    beside = options.beside and env_fn(options.beside, options.kwargs)[0]
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
