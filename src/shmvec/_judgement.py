"""What a vector env's time went into, as its ``Stats`` tell, and the option to change.

One question after another, the plainest first; the first that is answered yes is the verdict. The
limits are where a change pays, on the workloads of tests/test_verdicts.py, and no more exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmvec.stats import Stats

__all__ = ["Verdict", "judged"]

_LATE = 0.05  # messages through sockets, of all steps
_POLICY = 0.5  # the caller's own time, of all
_STARVED = 0.25  # time without a core, of that in envs
_UNEVEN = 1.5  # the busiest worker's time in envs, by the others'
_RESETS = 0.5  # time in resets, of that in envs
_FEW_RESETS = 0.25  # the same, where workers wait for each other
_IDLE = 0.7  # workers' time in envs, of that in which they could have been there
_TAIL = 8  # the slowest hundredth of steps, by the median
_OWN_S = 30e-6  # of a batch: what a call of step takes itself, and the loop around it
_SMALL_S = 20e-6  # work of a request that is not worth a worker of its own
_HANGS_S = 10.0  # in one step or reset,
_HANGS = 10  # that many times as long as the longest that has ended
_AWAKE = 0.5  # time on a core, of that in envs
_IF_IT_HANGS = "step_timeout= and reset_timeout= name such an env, and a FaultPolicy replaces it"
_NO_LIMIT = "No time limit ends a call: python -m shmvec stacks says where it is"


@dataclass(frozen=True)
class Verdict:
    """What the time went into.

    Attributes:
        kind: "env-bound", "policy-bound", "straggler", "reset-bound", "oversubscribed",
            "messages through pipes", "too many workers", or "idle": nothing was stepped.
        reason: The numbers that say so.
        advice: What to do about it; empty if there is nothing.
        option: The option of ``ShmVectorEnv`` to change, as it is written; empty: none helps.
    """

    kind: str
    reason: str
    advice: str = ""
    option: str = ""

    def __str__(self) -> str:
        """One line."""
        return f"{self.kind}: {self.reason}." + (f" {self.advice}." if self.advice else "")


def judged(stats: Stats) -> Verdict:
    """The verdict on what was done."""
    workers, parent = stats.workers, stats.parent
    done = sum(worker.steps + worker.resets for worker in workers)
    if done == 0:
        return _nothing_done(stats)
    if (hanging := _hanging(stats)) is not None:
        return hanging
    late = sum(worker.late for worker in workers)
    if late > _LATE * done:
        return Verdict(
            "messages through pipes",
            f"{late:,} observations, infos or actions of {done:,} steps and resets did not fit the "
            "rings in shared memory",
            "Return less in infos; observations in a space of fixed size need no messages, with "
            "shared_memory=True",
            "shared_memory=True",
        )
    busy = [worker.busy_s for worker in workers]
    waited = sum(busy) if not stats.num_workers else parent.waited_s
    # How much of the time in which the caller waited the workers were in their envs.
    used = sum(busy) / (len(workers) * max(waited, *busy, 1e-9))
    return (
        _policy(stats, max(busy), waited)
        or _without_cores(stats, sum(busy))
        or _resets(stats, sum(busy), used)
        or _straggler(stats, busy, used)
        or _too_little(stats, sum(busy), used)
        or _envs(stats, sum(busy))
    )


def _nothing_done(stats: Stats) -> Verdict:
    """Nothing was asked, or what was asked is not done."""
    inside = [(now.for_s, index) for index, now in enumerate(stats.doing) if now is not None]
    if not inside:
        return Verdict("idle", "nothing was stepped or reset")
    _, worker = max(inside)
    now = stats.doing[worker]
    return Verdict(
        "straggler" if len(inside) < len(stats.workers) else "env-bound",
        f"nothing was finished: worker {worker} has been in {now}",
        *((_NO_LIMIT,) if now is not None and now.operation == "call" else _if_it_hangs(stats)),
    )


def _hanging(stats: Stats) -> Verdict | None:
    """One does not come back."""
    for worker, now in enumerate(stats.doing):
        if now is None or now.operation == "call" or now.for_s <= _HANGS_S:
            continue
        ended = stats.step if now.operation == "step" else stats.reset
        if now.for_s > _HANGS * ended.longest_s:
            others = f"no {now.operation} has ended"
            if ended.count:
                longest = f"the longest {now.operation} that has ended"
                others = f"{longest} took {1e3 * ended.longest_s:.3g} ms"
            return Verdict(
                "straggler" if len(stats.workers) > 1 else "env-bound",
                f"worker {worker} has been in {now}; {others}",
                *_if_it_hangs(stats),
            )
    return None


def _if_it_hangs(stats: Stats) -> tuple[str, str]:
    """What to do about an env that may hang, and by which option."""
    if stats.num_workers == 0:
        return f"If it hangs: num_workers=1, as {_IF_IT_HANGS}", "num_workers=1"
    return f"If it hangs: {_IF_IT_HANGS}", "step_timeout="


def _policy(stats: Stats, busiest: float, waited: float) -> Verdict | None:
    """The caller has other things to do, and is not waited for while the envs are stepped."""
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
    """Too many workers for the cores, or others on them."""
    starved = sum(worker.lacked_s for worker in stats.workers)
    if stats.num_workers == 0 or starved <= _STARVED * max(0.0, busy):
        return None
    lacked = f"workers were ready to run and had no core for {starved:.3g} s, "
    lacked += f"{starved / max(busy, 1e-9):.0%} of their time in envs"
    if stats.num_workers > stats.cores:
        return Verdict(
            "too many workers",
            f"{stats.num_workers} share {stats.cores} cores: {lacked}",
            f"num_workers={stats.cores}",
            f"num_workers={stats.cores}",
        )
    return Verdict(
        "oversubscribed",
        f"{lacked}: other programs or threads have the cores",
        "threads_per_worker=1 if they are the envs' own libraries; torch.set_num_threads for the "
        "policy's; otherwise fewer programs, or num_workers= as many cores as are free",
        "threads_per_worker=1",
    )


def _resets(stats: Stats, busy: float, used: float) -> Verdict | None:
    resets = sum(worker.reset_s for worker in stats.workers) / busy if busy else 0.0
    if resets < (_FEW_RESETS if used < _IDLE else _RESETS):
        return None
    advice, option = "Make env.reset cheaper", ""
    if stats.num_workers < 2 <= min(stats.cores, len(stats.envs)):
        option = f"num_workers={min(stats.cores, len(stats.envs))}"
        advice += f"; or reset several envs at a time: {option}"
    elif len(stats.envs) > 1 and stats.num_workers > 1 and _in_lockstep(stats):
        option = _half(stats)
        advice += f"; or do not wait for envs that reset: {option} with send and recv"
    return Verdict(
        "reset-bound",
        f"{resets:.0%} of the workers' time went into {stats.reset.count:,} resets, of "
        f"{1e3 * stats.reset.mean_s:.3g} ms each (a step: {1e3 * stats.step.mean_s:.3g} ms)",
        advice,
        option,
    )


def _in_lockstep(stats: Stats) -> bool:
    """Whether all envs were asked as often: else those that are slow are not waited for."""
    # A reset takes the place of a step, or is part of one; and some may be one ahead.
    for resets in (0, 1):
        asked = [env.step.count + resets * env.reset.count for env in stats.envs]
        if max(asked) <= 2 * min(asked) + 2:
            return True
    return False


def _half(stats: Stats) -> str:
    """The option with which a batch does not wait for all envs."""
    return f"batch_size={max(1, len(stats.envs) // 2)}"


def _straggler(stats: Stats, busy: list[float], used: float) -> Verdict | None:
    """One env that all others wait for, or in each batch another."""
    if stats.num_workers < 2 or used >= _IDLE or not _in_lockstep(stats):
        return None
    half = _half(stats)
    others = f"Do not wait for it: {half} with send and recv"
    means = [env.step.mean_s for env in stats.envs]
    for now in stats.doing:  # a step that is not over may be what all wait for
        if now is not None and now.operation == "step":
            means[now.env] = max(means[now.env], now.for_s)
    rest = (sum(busy) - max(busy)) / (len(busy) - 1)
    if max(busy) > _UNEVEN * rest:
        slowest = max(range(len(means)), key=means.__getitem__)
        return Verdict(
            "straggler",
            f"worker {busy.index(max(busy))} was in its envs for {max(busy):.3g} s, others for "
            f"{rest:.3g} s on average; a step of env {slowest} takes "
            f"{1e3 * means[slowest]:.3g} ms, of the median env {1e3 * median(means):.3g} ms",
            others,
            half,
        )
    usual, slow = stats.step.quantile(0.5), stats.step.quantile(0.99)
    if slow > _TAIL * usual:
        return Verdict(
            "straggler",
            f"the slowest hundredth of all steps takes {1e3 * slow:.3g} ms and more, the median "
            f"{1e3 * usual:.3g} ms: each batch waits for its slowest",
            others,
            half,
        )
    return None


def _too_little(stats: Stats, busy: float, used: float) -> Verdict | None:
    requests = sum(worker.requests for worker in stats.workers)
    work = busy / max(1, requests)
    if stats.num_workers == 0 or work > _SMALL_S or used >= _IDLE:
        return None
    option = f"num_workers={stats.num_workers // 2}"
    return Verdict(
        "too many workers",
        f"what a worker is asked at a time takes {1e6 * work:.3g} µs, less than asking it",
        f"{option}, or more envs",
        option,
    )


def _envs(stats: Stats, busy: float) -> Verdict:
    most = min(stats.cores, len(stats.envs))
    reason = f"{busy / max(stats.elapsed_s, 1e-9):.2g} workers were in their envs at a time"
    reason += f"; a step takes {1e3 * stats.step.mean_s:.3g} ms"
    requests = max(1, sum(worker.requests for worker in stats.workers))
    if stats.num_workers == 0 and (len(stats.envs) == 1 or busy / requests < _SMALL_S):
        return Verdict("env-bound", reason, "Make env.step faster, or step more envs at a time")
    if stats.num_workers < most:
        option = f"num_workers={most}"
        return Verdict("env-bound", reason, f"There are {stats.cores} cores: {option}", option)
    cpu = [worker.cpu_s for worker in stats.workers if worker.cpu_s is not None]
    asleep = bool(cpu) and sum(cpu) < _AWAKE * busy
    if asleep and stats.num_workers < len(stats.envs):
        option = f"num_workers={min(len(stats.envs), 2 * stats.num_workers)}"
        return Verdict(
            "env-bound",
            f"{reason}, most of it asleep",
            f"More workers than cores can wait at the same time: {option}",
            option,
        )
    more = "step more envs at a time" if asleep or most < stats.cores else "use more cores"
    return Verdict("env-bound", reason, f"Make env.step faster, or {more}")
