"""``stats().verdict``: what the time went into, in cases of which the answer is known."""

import os
import time
from contextlib import closing
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from tables import first

from shmvec import FaultPolicy, ShmVectorEnv
from shmvec.stats import Doing, EnvStats, FaultCounts, Stats, Timing, Waits, WorkerStats

MS = 1e-3
RESTARTS = FaultPolicy(on_crash="restart", max_restarts=9)


def timing(*taken):
    """Of so many times so long: (count, seconds)."""
    buckets = [0] * 30
    for count, seconds in taken:
        buckets[max(0, min(29, int(seconds * 1e9).bit_length() - 9))] += count
    return Timing(
        sum(count for count, _ in taken),
        sum(count * seconds for count, seconds in taken),
        max((seconds for _, seconds in taken), default=0.0),
        tuple(buckets),
    )


def made(envs, *, workers, waited, elapsed=10.0, cores=2, batches=1000, inline=False, **given):
    """Stats of such envs, split evenly; what is given of the workers is a list or for each."""
    each = []
    for index, its in enumerate(np.array_split(np.arange(len(envs)), workers)):
        one = {name: v[index] if isinstance(v, list) else v for name, v in given.items()}
        step = [envs[env].step for env in its]
        reset = [envs[env].reset for env in its]
        step_s, reset_s = sum(t.total_s for t in step), sum(t.total_s for t in reset)
        each.append(
            WorkerStats(
                **{
                    "requests": batches,
                    "waits": batches,
                    "pause_s": 0.0,
                    "yield_s": 0.0,
                    "park_s": max(0.0, elapsed - step_s - reset_s),
                    "parks": batches,
                    "late_wakes": 0,
                    "wakes": 0,
                    "steps": sum(t.count for t in step),
                    "step_s": step_s,
                    "resets": sum(t.count for t in reset),
                    "reset_s": reset_s,
                    "wrappers_s": 0.0,
                    "late": 0,
                    "cpu_s": step_s + reset_s,
                    "starved_s": 0.0,
                }
                | one
            )
        )
    parent = Waits(batches * workers, batches, 0.0, 0.0, waited, batches, 0, 0)
    faults = FaultCounts(0, 0, 0, 0, 0, 0.0)
    count = 0 if inline else workers
    return Stats(parent, tuple(each), faults, tuple(envs), elapsed, count, cores)


def env(*steps, resets=()):
    return EnvStats(timing(*steps), timing(*resets))


CASES = {
    "nothing was done": (made([env()] * 4, workers=2, waited=0.0), "idle", ""),
    "infos of megabytes": (
        made([env((1000, MS))] * 4, workers=2, waited=9.0, late=1500),
        "messages through pipes",
        "shared_memory=True",
    ),
    "a large network": (made([env((1000, MS))] * 4, workers=2, waited=2.5), "policy-bound", ""),
    "a large network, no workers": (
        made([env((1000, MS))] * 2, workers=1, waited=0.0, inline=True),
        "policy-bound",
        "num_workers=1",
    ),
    "16 workers on two cores": (
        made([env((1000, MS))] * 16, workers=16, waited=9.0, starved_s=0.8),
        "too many workers",
        "num_workers=2",
    ),
    "another program on the cores": (
        made([env((1000, 4 * MS))] * 4, workers=2, waited=9.0, starved_s=4.0, cpu_s=4.0),
        "oversubscribed",
        "threads_per_worker=1",
    ),
    "resets that take as long as all steps": (
        made([env((1000, MS), resets=[(20, 80 * MS)])] * 4, workers=2, waited=9.0),
        "reset-bound",
        "batch_size=2",
    ),
    "resets by one worker": (
        made([env((1000, MS), resets=[(20, 80 * MS)])] * 4, workers=1, waited=9.0),
        "reset-bound",
        "num_workers=2",
    ),
    "resets without workers": (
        made([env((1000, MS), resets=[(20, 80 * MS)])] * 4, workers=1, waited=0.0, inline=True),
        "reset-bound",
        "num_workers=2",
    ),
    "resets that wait": (
        made([env((1000, MS), resets=[(20, 80 * MS)])] * 4, workers=2, waited=9.0, cpu_s=0.1),
        "reset-bound",
        'overlap="auto"',
    ),
    "a batch waits for envs that reset": (
        made([env((1000, MS), resets=[(10, 40 * MS)])] * 4, workers=4, waited=9.0, cores=4),
        "reset-bound",
        "batch_size=2",
    ),
    "one slow env": (
        made([env((1000, MS))] * 3 + [env((1000, 9 * MS))], workers=4, waited=9.5, cores=4),
        "straggler",
        "batch_size=2",
    ),
    "one slow env, and other programs on the cores": (
        made(
            [env((1000, 0.5 * MS))] * 5 + [env((1000, 4 * MS))] + [env((1000, 0.5 * MS))] * 2,
            workers=2,
            waited=9.5,
            cpu_s=[1.0, 2.5],
            starved_s=[3.0, 6.0],  # between its steps, too
        ),
        "straggler",
        "batch_size=4",
    ),
    "a worker whose core another program has": (
        made(
            [env((1000, MS))] * 4 + [env((1000, 2.4 * MS))] * 4,
            workers=2,
            waited=9.8,
            cpu_s=4.0,
            starved_s=[0.0, 5.6],
        ),
        "oversubscribed",
        "threads_per_worker=1",
    ),
    "two envs of four in one worker": (
        made([env((1000, 2 * MS))] * 4, workers=3, waited=4.5, elapsed=5.0, cores=3),
        "env-bound",
        "batch_size=2",
    ),
    "each batch another slow step": (
        made([env((950, MS), (50, 40 * MS))] * 8, workers=8, waited=9.5, cores=8),
        "straggler",
        "batch_size=4",
    ),
    "steps of microseconds": (
        made([env((1000, 2e-6))] * 4, workers=4, waited=9.0, cores=8),
        "too many workers",
        "num_workers=2",
    ),
    "steps of microseconds, two workers": (
        made([env((1000, 2e-6))] * 4, workers=2, waited=9.0),
        "too many workers",
        "caller_steps=True",
    ),
    "a step of a microsecond, and no policy": (
        made([env((500_000, 2e-6))], workers=1, waited=3.0, batches=500_000),
        "too many workers",
        "num_workers=0",
    ),
    "several envs, no workers": (
        made([env((1000, 4 * MS))] * 2, workers=1, waited=0.0, inline=True),
        "env-bound",
        "num_workers=2",
    ),
    "slow envs are not waited for": (
        made([env((1000, MS))] * 7 + [env((180, 50 * MS))], workers=8, waited=9.0, cores=8),
        "env-bound",
        "",
    ),
    "an idle core": (
        made([env((1000, 2 * MS))] * 4, workers=1, waited=9.0),
        "env-bound",
        "num_workers=2",
    ),
    "all cores used": (made([env((1000, 4.5 * MS))] * 4, workers=2, waited=9.5), "env-bound", ""),
    "many cores, all used, not all alike": (
        made([env((1000, 0.8 * MS))] * 128, workers=16, waited=9.0, cores=16, cpu_s=6.0),
        "env-bound",
        "batch_size=64",
    ),
    "envs that sleep": (
        made([env((1000, 2 * MS))] * 8, workers=2, waited=9.0, cpu_s=0.1),
        "env-bound",
        'overlap="auto"',
    ),
    "envs that sleep, on cores that others use all the time": (
        made([env((1000, 2 * MS))] * 16, workers=8, waited=9.0, cpu_s=0.1, starved_s=3.0),
        "oversubscribed",
        "threads_per_worker=1",
    ),
    "envs that compute, some of them in the caller": (
        replace(
            made([env((1000, 4 * MS))] * 4, workers=2, waited=1.0, cpu_s=[7.9, None]),
            caller_steps=True,
        ),
        "env-bound",
        "",
    ),
    "envs that compute, in a worker that has been replaced": (
        replace(
            made([env((1000, 2 * MS))] * 8, workers=2, waited=9.0, cpu_s=[7.9, 0.0]),
            faults=FaultCounts(1, 0, 0, 1, 0, 0.1),
        ),
        "env-bound",
        "",
    ),
    "the policy computes meanwhile": (
        made([env((1000, 4.5 * MS))] * 4, workers=2, waited=0.5),
        "env-bound",
        "",
    ),
    "a system that says nothing of cores": (
        made([env((1000, 4 * MS))] * 4, workers=2, waited=9.0, cpu_s=None, starved_s=None),
        "env-bound",
        "",
    ),
}


def test_known_cases():
    for case, (stats, kind, option) in CASES.items():
        verdict = stats.verdict
        assert (verdict.kind, verdict.option) == (kind, option), (case, verdict)
        assert str(verdict).startswith(f"{kind}: ") and verdict.reason in str(verdict), case
        assert option in verdict.advice, case
        assert str(stats).endswith(str(verdict)), case


@pytest.mark.deep
def test_restarts_that_take_much_of_the_time():
    for steps, waited, kind in [
        (200, 4.0, "restart-bound"),
        (0, 4.0, "restart-bound"),
        (200, 1.0, "straggler"),
    ]:
        envs = [env((steps, MS))] * 2 + [env((steps, 9 * MS))] * 2
        faults = FaultCounts(3, 0, 0, 3, 0, waited)
        stats = replace(made(envs, workers=2, waited=6.0), faults=faults)
        assert stats.verdict.kind == kind, stats
        assert f"faults: 3 crashes, 3 restarts, {waited:.3g} s of restarts\n" in str(stats)


def one_worker(*steps, resets=()):
    return made([env(*steps, resets=resets)], workers=1, waited=0.0, cores=4)


def test_who_hangs_is_named():
    nothing = CASES["nothing was done"][0]
    one = replace(nothing, doing=(None, Doing(3, "step", 40.0))).verdict
    assert (one.kind, one.option) == ("straggler", "step_timeout=")
    assert "worker 1 has been in step of env 3 for 40 s" in one.reason
    both = replace(nothing, doing=(Doing(0, "reset", 41.0), Doing(3, "step", 40.0))).verdict
    assert both.kind == "env-bound" and "worker 0 has been in reset of env 0" in both.reason
    call = replace(nothing, doing=(Doing(0, "call", 41.0), None)).verdict
    assert (call.kind, call.option) == ("straggler", "") and "shmvec stacks" in call.advice
    assert "worker 0 has been in call of env 0 for 41 s" in call.reason
    inline = replace(one_worker(), num_workers=0, doing=(Doing(0, "reset", 41.0),)).verdict
    assert inline.option == "num_workers=1" and "reset_timeout=" in inline.advice


@pytest.mark.deep
def test_who_hangs_while_others_go_on():
    others, _, _ = CASES["slow envs are not waited for"]
    idle = (None,) * 7
    verdict = replace(others, doing=(*idle, Doing(7, "step", 600.0))).verdict
    assert (verdict.kind, verdict.option) == ("straggler", "step_timeout=")
    assert "worker 7 has been in step of env 7 for 600 s; the longest step" in verdict.reason
    slow = replace(others, doing=(*idle, Doing(7, "step", 9.0))).verdict
    assert slow.kind == "env-bound"
    reset = replace(others, doing=(*idle, Doing(7, "reset", 600.0))).verdict
    assert reset.kind == "straggler" and reset.reason.endswith("; no reset has ended")
    call = replace(others, doing=(*idle, Doing(7, "call", 600.0))).verdict
    assert call.kind == "env-bound"  # who knows how long they take


@pytest.mark.deep
def test_the_share_of_the_limit():
    assert CASES["nothing was done"][0].share_of_limit == 0
    assert CASES["all cores used"][0].share_of_limit == pytest.approx(0.9)
    assert CASES["an idle core"][0].share_of_limit == pytest.approx(0.4)
    assert "(400 a second, 40% of the limit)" in str(CASES["an idle core"][0])


@pytest.mark.deep
def test_envs_that_wait_at_once_are_not_told_to():
    asleep = made([env((1000, 9 * MS))] * 8, workers=2, waited=9.5, cpu_s=0.1)
    assert asleep.verdict.option == 'overlap="auto"'
    assert replace(asleep, overlaps=True).verdict.option == ""
    assert "of the limit" not in str(replace(asleep, overlaps=True))


@pytest.mark.deep
def test_no_verdict_on_a_few_steps():
    few = [env((4, MS), resets=[(1, MS)])] * 2
    early = made(few, workers=2, waited=0.01, elapsed=0.02, batches=4).verdict
    assert (early.kind, early.option) == ("too early", "")
    assert early.reason == "only 10 steps and resets have been made"
    assert made(few, workers=2, waited=9.9, batches=4).verdict.kind != "too early"


def test_how_bad_it_is():
    for case, severity in {
        "nothing was done": "none",
        "all cores used": "good",
        "an idle core": "change",
        "envs that sleep": "change",
        "another program on the cores": "problem",
    }.items():
        assert CASES[case][0].verdict.severity == severity, case
    hanging = replace(one_worker(), doing=(Doing(0, "step", 41.0),)).verdict
    assert (hanging.kind, hanging.severity) == ("env-bound", "problem")


def test_the_slowest_envs_are_in_the_table():
    assert "env 3's step" in str(CASES["one slow env"][0])


def test_a_verdict_that_is_not_sure_says_what_would_tell():
    replaced = CASES["envs that compute, in a worker that has been replaced"][0].verdict
    assert "stats() - before of a time without restarts" in replaced.advice
    assert "on a quieter machine" in CASES["another program on the cores"][0].verdict.advice
    few = made([env((4, MS))] * 2, workers=2, waited=0.01, elapsed=0.02, batches=4).verdict
    assert few.kind == "too early" and "at least 5 steps" in few.advice


def test_a_straggler_is_named():
    stats, _, _ = CASES["one slow env"]
    assert "worker 3" in stats.verdict.reason and "env 3" in stats.verdict.reason
    # Also while it is in its first step: its worker's time counts that already.
    timed = (*(replace(each, step=timing((2, MS))) for each in stats.envs[:3]), env())
    begun = replace(stats, envs=timed, doing=(None, None, None, Doing(3, "step", 9.0))).verdict
    assert begun.kind == "straggler" and "a step of env 3 takes 9e+03 ms" in begun.reason


class Slow(Counter):
    """Sleeps for the times given."""

    def __init__(self, step_s=0.0, reset_s=0.0, length=1000):
        super().__init__(length)
        self.step_s, self.reset_s = step_s, reset_s

    def step(self, action):
        time.sleep(self.step_s)
        return super().step(action)

    def reset(self, **kwargs):
        time.sleep(self.reset_s)
        return super().reset(**kwargs)


class Talkative(gym.Wrapper):
    """Its infos fit no ring."""

    def step(self, action):
        *result, _ = self.env.step(action)
        return *result, {"all": np.zeros(1_000_000)}


class Deadly(Slow):
    """Its process dies in each step."""

    def step(self, action):
        os._exit(1)


def judged(env_fns, batches, policy_s=0.0, **options):
    with closing(ShmVectorEnv(env_fns, **options)) as envs:
        envs.reset()
        before = envs.stats()
        for _ in range(batches):
            envs.step([0] * len(env_fns))
            time.sleep(policy_s)
        stats = envs.stats() - before
    # Others on this machine are not what is judged here.
    return replace(stats, workers=tuple(replace(w, starved_s=0.0) for w in stats.workers))


REAL = {
    "policy-bound": dict(env_fns=[Counter] * 2, batches=20, policy_s=0.02, num_workers=2),
    "env-bound": dict(env_fns=[lambda: Slow(0.05)] * 2, batches=10, num_workers=2),
    "straggler": dict(env_fns=[Slow, lambda: Slow(0.05)], batches=20, num_workers=2),
    "reset-bound": dict(env_fns=[lambda: Slow(0, 0.05, 2)] * 2, batches=12, num_workers=2),
    "messages through pipes": dict(
        env_fns=[lambda: Talkative(Counter())] * 2, batches=5, num_workers=2
    ),
    "restart-bound": dict(env_fns=[Slow, Deadly], batches=8, num_workers=2, faults=RESTARTS),
    "idle": dict(env_fns=[Counter], batches=0, num_workers=1),
}


@pytest.mark.deep
@pytest.mark.parametrize("kind", first(REAL))
def test_a_real_run(kind):
    for _ in range(5):  # on a busy machine other things may take longer than what is meant to
        stats = judged(**REAL[kind])
        if stats.verdict.kind == kind:
            return
    raise AssertionError(stats)


@pytest.mark.deep
def test_an_option_that_is_set_is_not_advised():
    for case, (stats, _, option) in CASES.items():
        name = option.split("=")[0]
        if name in ("batch_size", "shared_memory", "threads_per_worker"):
            verdict = replace(stats, options=(name,)).verdict
            assert name not in verdict.advice and not verdict.option.startswith(name), case


@pytest.mark.deep
def test_a_time_limit_that_is_set_is_not_advised():
    hangs = replace(CASES["nothing was done"][0], doing=(None, Doing(3, "reset", 40.0)))
    assert hangs.verdict.option == "reset_timeout="
    verdict = replace(hangs, options=("reset_timeout",)).verdict
    assert verdict.option == "" and verdict.severity == "problem"
    assert "shmvec stacks" in verdict.advice
    assert replace(hangs, options=("step_timeout",)).verdict.option == "reset_timeout="


@pytest.mark.deep
def test_the_options_that_are_set_are_known():
    given = dict(num_workers=2, step_timeout=9, batch_size=1, threads_per_worker=1)
    for options, known in (
        (given, {"batch_size", "shared_memory", "step_timeout", "threads_per_worker"}),
        (dict(num_workers=1, shared_memory=False, threads_per_worker=2), set()),
    ):
        with closing(ShmVectorEnv([Counter] * 2, **options)) as envs:
            assert set(envs.stats().options) == known


@pytest.mark.deep
def test_a_slow_env_is_named_whatever_the_verdict():
    hidden = CASES["one slow env, and other programs on the cores"][0]
    several = replace(hidden, options=("batch_size",)).verdict
    assert several.kind == "oversubscribed" and "a step of env 5 takes 4 ms" in several.reason
    alone = made([env((1000, MS))] * 3 + [env((1000, 5 * MS))], workers=1, waited=9, cores=1)
    assert (
        alone.verdict.kind == "env-bound" and "a step of env 3 takes 5 ms" in alone.verdict.reason
    )
    even = CASES["all cores used"][0].verdict
    assert "of the median env" not in even.reason


@pytest.mark.deep
def test_no_advice_is_what_caller_steps_refuses():
    for name, case in CASES.items():
        stats = replace(case[0], caller_steps=True)
        assert not stats.verdict.option.startswith(("batch_size", "step_timeout")), name
