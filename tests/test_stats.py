"""``stats()``: what was counted is what was done."""

import os
import re
import threading
import time
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from envs import Counter
from tables import deep, first
from test_verdicts import CASES, env, made

from shmvec import ShmVectorEnv
from shmvec.exchange import AutoresetMode
from shmvec.stats import Doing, FaultCounts, Process, Timing


class Timed(Counter):
    """Knows how long it was in `step` and `reset`."""

    def __init__(self, length):
        super().__init__(length)
        self.in_step = self.in_reset = 0.0

    def step(self, action):
        start = time.perf_counter()
        result = super().step(action)
        self.in_step += time.perf_counter() - start
        return result

    def reset(self, **kwargs):
        start = time.perf_counter()
        result = super().reset(**kwargs)
        self.in_reset += time.perf_counter() - start
        return result


MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP]


@pytest.mark.parametrize("num_workers, mode", first([(3, MODES[0]), (0, MODES[1])]))
def test_counts(num_workers, mode):
    envs = ShmVectorEnv(
        [lambda: Timed(2), lambda: Timed(50), lambda: Timed(50)],
        autoreset_mode=mode,
        num_workers=num_workers,
    )
    with closing(envs):
        envs.reset()
        before = envs.stats()
        for _ in range(6):
            envs.step([0, 0, 0])
        stats = envs.stats() - before
        assert len(stats.workers) == max(1, num_workers)
        resets = 2 if mode is AutoresetMode.NEXT_STEP else 3
        steps = 18 - resets if mode is AutoresetMode.NEXT_STEP else 18
        assert sum(worker.resets for worker in stats.workers) == resets
        assert sum(worker.steps for worker in stats.workers) == steps
        assert all(worker.requests == 6 for worker in stats.workers)
        assert stats.parent.requests == 6 * len(stats.workers)
        # What the envs say themselves is part of what was measured around them.
        whole = envs.stats()
        assert sum(worker.step_s for worker in whole.workers) >= sum(envs.get_attr("in_step"))
        assert sum(worker.reset_s for worker in whole.workers) >= sum(envs.get_attr("in_reset"))
        if num_workers == 0:
            assert not any(worker.waits for worker in whole.workers)
        # Each step and each reset is in its env's histogram, and all their time in the workers'.
        assert sum(env.step.count for env in stats.envs) == steps
        assert [env.reset.count for env in stats.envs] == [resets, 0, 0]
        # (Measured by ticks, whose length is known about.)
        assert whole.step.total_s <= 1.01 * sum(worker.step_s for worker in whole.workers)
        assert whole.step.total_s >= 0.99 * sum(envs.get_attr("in_step"))
        assert whole.reset.total_s == pytest.approx(sum(w.reset_s for w in whole.workers))
        assert whole.num_workers == num_workers and 0 < stats.elapsed_s < whole.elapsed_s


def spin(seconds):
    """Computes for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.deep
def test_waits_are_counted_by_phase():
    with closing(ShmVectorEnv([Counter] * 2, num_workers=2)) as envs:
        envs.reset()
        for _ in range(50):
            envs.step([0, 0])
        until = time.monotonic() + 60
        while not all(each.parks >= 2 and each.park_s > 0.05 for each in envs.stats().workers):
            assert time.monotonic() < until
            time.sleep(0.12)  # more than a slice: the workers sleep
            envs.step([0, 0])
            envs.step([0, 0])  # publishes what the wait before it was like
        stats = envs.stats()
        for worker in stats.workers:
            assert 0 < worker.waits <= worker.requests
            assert worker.late_wakes <= worker.parks
            assert worker.pause_s + worker.yield_s + worker.park_s < 60
        assert stats.parent.wakes >= 1


def stepped_until_all(envs, have):
    """Both sides, once each has done something: which finds the other ready is the machine's."""
    until = time.monotonic() + 60
    while True:
        stats = envs.stats()
        sides = [stats.parent, *stats.workers]
        if all(getattr(side, have) for side in sides):
            return sides
        assert time.monotonic() < until, stats
        envs.step([0, 0])


@pytest.mark.parametrize("policy", ["park", *deep("adaptive", "spin")])
def test_wait_policies_spend_their_waits_as_named(policy):
    with closing(ShmVectorEnv([Counter] * 2, num_workers=1, wait_policy=policy)) as envs:
        assert envs.wait_policy == policy
        envs.reset()
        for step in range(1, 30):
            assert envs.step([0, 1])[0][:, 0].tolist() == [step % 6] * 2
        for side in stepped_until_all(envs, "parks" if policy == "park" else "waits"):
            if policy == "spin":
                assert side.pause_s > 0 and side.yield_s == 0
            if policy == "park":
                assert side.pause_s == side.yield_s == 0


class Sleeper(Counter):
    """Its third step takes longer."""

    def step(self, action):
        if self.count == 2:
            time.sleep(0.03)
        return super().step(action)


@pytest.mark.deep
def test_an_envs_histogram():
    with closing(ShmVectorEnv([lambda: Counter(50), lambda: Sleeper(50)], num_workers=2)) as envs:
        envs.reset()
        for _ in range(40):
            envs.step([0, 0])
        quick, slow = (env.step for env in envs.stats().envs)
        assert quick.count == slow.count == 40 == sum(slow.buckets)
        assert sum(slow.buckets[16:]) >= 1  # 17 ms and more
        assert 0.029 <= slow.longest_s <= slow.total_s
        assert slow.quantile(0) < slow.quantile(0.5) <= slow.quantile(1) <= slow.longest_s
        before = envs.stats()
        envs.step([0, 0])
        whole = envs.stats()
        after, slow = (whole - before).envs[1].step, whole.envs[1].step
        # The longest of all is not in it: its bucket says how long it was at most.
        assert after.count == 1 and after.total_s <= after.longest_s <= slow.longest_s


@pytest.mark.deep
def test_an_env_whose_worker_is_restarted_keeps_its_histogram():
    with closing(ShmVectorEnv([Counter] * 2, num_workers=2)) as envs:
        envs.reset()
        for _ in range(5):
            envs.step([0, 0])
        envs.restart([1])
        envs.reset()
        envs.step([0, 0])
        stats = envs.stats()
        assert [env.step.count for env in stats.envs] == [6, 6]
        assert [env.reset.count for env in stats.envs] == [2, 2]
        assert sum(worker.steps for worker in stats.workers) == 12
        assert (envs.stats() - stats).envs[0].step.longest_s == 0


@pytest.mark.deep
def test_a_histogram_is_right_within_its_buckets():
    assert Timing.of([0] * 32).quantile(0.5) == Timing.of([0] * 32).mean_s == 0
    timing = Timing.of([6_000, 3_000, 0, 0, 3, *[0] * 27])  # three times 1024 to 2047 ns
    assert timing.mean_s == pytest.approx(2e-6)
    assert (
        1.024e-6 <= timing.quantile(0.01) <= timing.quantile(0.5) <= timing.quantile(1) <= 2.048e-6
    )
    assert (timing + timing).count == 6 and (timing + timing - timing).buckets == timing.buckets


class Held(Counter):
    """Is in `step`, in a reset with options or in a call until a file is there."""

    def _wait(self, path):
        until = time.monotonic() + 60
        while not os.path.exists(path):
            assert time.monotonic() < until
            time.sleep(0.001)

    def step(self, action):
        if action == 1:
            self._wait(self.gate)
        return super().step(action)

    def reset(self, *, seed=None, options=None):
        if options:
            self._wait(options["gate"])
        return super().reset(seed=seed)

    def called(self, env, gate):
        if self.env == env:
            self._wait(gate)


def once_doing(envs, worker):
    until = time.monotonic() + 60
    while (doing := envs.stats().doing)[worker] is None:
        assert time.monotonic() < until
    return doing


@pytest.mark.deep
def test_a_request_in_progress_is_counted(tmp_path):
    """Where a batch takes longer than the reader will wait for it."""
    with closing(ShmVectorEnv([Held] * 4, num_workers=2)) as envs:
        envs.reset()
        gate = str(tmp_path / "gate")
        envs.set_attr("gate", gate)
        before = envs.stats()
        envs.step_async([0, 0, 0, 1])
        caller = threading.Thread(target=envs.step_wait)
        caller.start()
        until = time.monotonic() + 60
        try:
            while True:
                now = envs.stats() - before
                if now.doing[1] and now.doing[1].env == 3 and now.waiting_s:
                    break
                assert time.monotonic() < until
            time.sleep(0.05)
            later = envs.stats() - before
        finally:
            open(gate, "w").close()
            caller.join()
        assert [worker.steps for worker in later.workers] == [2, 1]
        assert later.workers[1].step_s >= now.workers[1].step_s + 0.05
        assert later.parent.waited_s >= now.parent.waited_s + 0.05
        after = envs.stats()
        assert [worker.steps for worker in (after - before).workers] == [2, 2]
        assert (before - after).parent.waited_s == 0  # and never less than nothing


def test_what_workers_do_now(tmp_path):
    with closing(ShmVectorEnv([Held] * 4, num_workers=2)) as envs:
        envs.reset()
        assert envs.stats().doing == (None, None)
        step, reset, call = (str(tmp_path / name) for name in ("step", "reset", "call"))
        envs.set_attr("gate", step)
        envs.set_attr("env", [0, 1, 2, 3])
        envs.step_async([0, 0, 0, 1])
        _, doing = once_doing(envs, 1)
        while doing.env == 2:  # which comes first
            _, doing = once_doing(envs, 1)
        assert (doing.env, doing.operation) == (3, "step") and doing.for_s >= 0
        later = envs.stats()
        assert later.doing[1].for_s > doing.for_s and "step of env 3 for" in str(later)
        open(step, "w").close()
        envs.step_wait()
        assert envs.stats().doing == (None, None)
        envs.async_reset(options={"gate": reset}, env_id=[0])
        doing, nothing = once_doing(envs, 0)
        assert (doing.env, doing.operation, nothing) == (0, "reset", None)
        open(reset, "w").close()
        envs.recv(min_envs=1)
        assert envs.stats().doing == (None, None)
        before = envs.stats()
        envs.call_async("called", 3, call)
        _, doing = once_doing(envs, 1)
        while doing.env == 2:
            _, doing = once_doing(envs, 1)
        assert (doing.env, doing.operation) == (3, "call")
        now = envs.stats()
        assert "call of env 3 for" in str(now)
        assert (now - before).workers[1].busy_s == 0  # neither a step nor a reset
        open(call, "w").close()
        envs.call_wait()
        assert envs.stats().doing == (None, None)


# ---- in a notebook -------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would show: texts, the cells of lines, and what is coloured."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.coloured = [], set(), [], []
        self.feed(text)
        self.close()
        assert not self.open
        lines = "worker  " + "".join(self.texts).partition("worker  ")[2]
        self.rows = [re.split(r" {2,}", line.strip()) for line in lines.split("\n")]

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open[-1] == "span":
            self.coloured.append(data)


def column(page, name):
    place = page.rows[0].index(name)
    return [row[place] for row in page.rows[1:] if row[0].isdecimal()]


def test_in_a_notebook_it_is_a_table_and_the_verdict():
    with closing(ShmVectorEnv([Counter] * 5, num_workers=2)) as envs:
        envs.reset()
        for _ in range(20):
            envs.step([0] * 5)
        stats = envs.stats()
    page = Page(stats._repr_html_())
    assert page.tags == {"div", "b", "pre", "span"}
    assert column(page, "worker") == ["0", "1"] and column(page, "envs") == ["0-2", "3-4"]
    assert column(page, "steps") == [f"{worker.steps:,}" for worker in stats.workers]
    assert page.texts[0] == stats.verdict.kind
    shown = "".join(page.texts)
    assert stats.verdict.reason in shown and f"{stats.elapsed_s:.3g} s: " in shown
    assert "any env's step" in [row[0] for row in page.rows]
    assert {bar[0] for bar in page.coloured} == set("█▓×░")  # those of the keys at least
    on_terminals = []
    stats._repr_pretty_(SimpleNamespace(text=on_terminals.append), False)
    assert on_terminals == [str(stats)]


@pytest.mark.deep
def test_every_verdict_can_be_shown_in_a_notebook():
    for case, (stats, *_) in CASES.items():
        page = Page(stats._repr_html_())
        assert page.texts[0] == stats.verdict.kind, case
        assert stats.verdict.reason in "".join(page.texts), case
        numbers = [str(index) for index in range(len(stats.workers[:16]))]
        assert column(page, "worker") == numbers, case


HOSTILE = "<script>alert('x')</script>&amp;\"><img src=x onerror=y>"


def test_nothing_in_it_is_read_as_html():
    envs = [env((1000, 1e-3))] * 4
    stats = replace(
        made(envs, workers=2, waited=9.0, first_env=[0, 2], num_envs=[2, 2]),
        wrappers=(HOSTILE,) * 4,
        doing=(None, Doing(3, HOSTILE, 12.5)),
        processes=(Process(4711, 2**24, 2**24), None),
        faults=FaultCounts(1, 2, 0, 3, 4, 0.5),
    )
    page = Page(stats._repr_html_())
    assert not page.tags & {"script", "img"} and f"wrappers: {HOSTILE}" in page.texts
    assert "faults: 1 " in "".join(page.texts)
    assert re.search(r"\d+ MiB", column(page, "memory")[0])
