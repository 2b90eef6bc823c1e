"""``trace()``: what was done is in the timeline, once, in order, on one axis."""

import io
import multiprocessing
import os
import resource
import signal
from collections import Counter as Counts
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from gymnasium.error import ClosedEnvironmentError
from processes import run_alone
from shmvec._core.trace import TRACE_KINDS
from tables import first
from timelines import Timeline, ns

from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError
from shmvec.exchange import AutoresetMode
from shmvec.trace import Recording, write

KILL, RAISE = 2, 3  # actions
TICKS_US = 50.0  # by which a worker's two clocks may differ here; order is put right below it


class Frail(Counter):
    """Dies, or raises, where its action says so."""

    def step(self, action):
        if action == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == RAISE:
            raise LookupError("as asked" + " at length" * 100)
        return super().step(action)


def vector_env(num_envs=4, num_workers=2, length=5, make=Counter, **options):
    options.setdefault("context", "fork")
    return ShmVectorEnv([lambda: make(length)] * num_envs, num_workers=num_workers, **options)


def in_stats(stats):
    """The same counts, by stats()."""
    counts = Counts()
    for env, each in enumerate(stats.envs):
        counts[f"step env {env}"] = each.step.count
        counts[f"reset env {env}"] = each.reset.count
    return +counts


@pytest.mark.parametrize("mode, num_workers", first(zip(AutoresetMode, [2, 0, 1], strict=True)))
def test_what_was_done_is_in_it(num_workers, mode, tmp_path):
    with closing(vector_env(num_workers=num_workers, autoreset_mode=mode)) as envs:
        envs.reset()
        envs.step([0] * 4)
        before = envs.stats()
        with envs.trace(tmp_path / "run.json") as trace:
            for _ in range(11):
                terminations = envs.step([0] * 4)[2]
                if mode is AutoresetMode.DISABLED and terminations.any():
                    envs.reset(options={"reset_mask": terminations})
            envs.reset(seed=3)
            envs.call("spec")
        done = envs.stats() - before
        envs.step([0] * 4)
        timeline = Timeline(tmp_path / "run.json")
        assert timeline.counts() == in_stats(done)
        assert trace.overwritten == [0] * (max(1, num_workers) + 1)
        kinds = Counts(span["cat"] for span in timeline.parent)
        assert kinds["send"] >= 13 and kinds["take"] >= 13 and kinds["caller"] >= 13
        calls = [span["name"] for span in timeline.workers() if span["cat"] == "call"]
        assert sorted(calls) == [f"call env {env}" for env in range(4)]
        pids = {pid for pid, _ in timeline.names}
        assert pids == {os.getpid(), *(process.pid for process in envs.processes)}
        assert len(timeline.names) == max(1, num_workers) + 1


@pytest.mark.deep
def test_waits_are_those_that_are_counted(tmp_path):
    with closing(vector_env()) as envs:
        envs.reset()
        with envs.trace(tmp_path / "run.json"):
            before = envs.stats()
            for _ in range(20):
                envs.step([0] * 4)
            waits = (envs.stats() - before).parent
        timeline = Timeline(tmp_path / "run.json")
    spans = {name: 0 for name in ("wait: spin", "wait: yield", "wait: park")}
    for span in timeline.parent:
        begin, end = ns(span)
        if span["cat"] == "wait":
            spans[span["name"]] += end - begin
    counted = waits.pause_s, waits.yield_s, waits.park_s
    assert list(spans.values()) == [round(1e9 * seconds) for seconds in counted]
    for spans in timeline.tracks("worker"):
        assert any(span["cat"] == "wait" for span in spans)


def test_all_lie_on_one_axis(tmp_path):
    """Each step lies between the parent's sending of its batch and its going back to the caller."""
    with closing(vector_env(num_envs=4, num_workers=2)) as envs:
        envs.reset()
        with envs.trace(tmp_path / "run.json"):
            for _ in range(20):
                envs.step([0] * 4)
        timeline = Timeline(tmp_path / "run.json")
    batches, begin = [], None
    for span in timeline.parent:
        if span["cat"] == "send":
            begin = ns(span)[0]
        elif span["cat"] == "caller" and begin is not None:
            answered = [each for each in timeline.parent if ns(each)[0] >= begin]
            if any(each["cat"] == "take" and ns(each)[1] <= ns(span)[0] for each in answered):
                batches.append((begin, ns(span)[0]))
                begin = None
    assert len(batches) == 20
    for spans in timeline.tracks("worker"):
        theirs = [span for span in spans if " env " in span["name"]]
        assert len(theirs) == 40
        slack = 1000 * TICKS_US
        for i, span in enumerate(theirs):
            asked, taken = batches[i // 2]
            assert asked - slack <= ns(span)[0] and ns(span)[1] <= taken + slack


@pytest.mark.deep
def test_the_oldest_entries_are_overwritten(tmp_path):
    with closing(vector_env(length=10_000)) as envs:
        envs.reset()
        with envs.trace(tmp_path / "run.json", size=100) as trace:
            for _ in range(200):
                envs.step([0] * 4)
        timeline = Timeline(tmp_path / "run.json")
    assert trace.size == 128
    assert all(lost > 0 for lost in trace.overwritten)
    assert list(timeline.overwritten.values()) == trace.overwritten
    for index, spans in enumerate(timeline.tracks("worker")):
        assert trace.overwritten[index] >= 400 - 127
        assert sum(span["name"] != "wait" for span in spans) <= 127
        name = f"{trace.overwritten[index]} older entries were overwritten"
        marks = [each for each in timeline.moments if each["name"] == name]
        assert (spans[0]["tid"], spans[0]["ts"]) in [(mark["tid"], mark["ts"]) for mark in marks]
        counts = timeline.counts(spans)
        # The last ones are there, none is missing in between.
        assert set(counts) == {f"step env {env}" for env in (2 * index, 2 * index + 1)}
        assert abs(counts[f"step env {2 * index}"] - counts[f"step env {2 * index + 1}"]) <= 1


@pytest.mark.deep
def test_partial_batches_while_envs_are_out(tmp_path):
    with closing(vector_env(batch_size=2)) as envs:
        envs.async_reset(seed=0)
        with envs.trace(tmp_path / "run.json"):
            for _ in range(30):
                ids = envs.recv()[4]["env_id"]
                envs.send([0] * len(ids), ids)
            for _ in range(2):
                envs.recv()
        # What was asked before it began is before it in each worker's ring.
        assert sum(Timeline(tmp_path / "run.json").counts().values()) == 60


@pytest.mark.deep
def test_workers_give_the_memory_back(tmp_path):
    def mapped(envs):
        return Path(f"/proc/{envs.processes[0].pid}/maps").read_text().count("memfd:shmvec")

    with closing(vector_env()) as envs:
        envs.restart()  # a fork of a process that has mapped the segment
        envs.reset()
        usual = mapped(envs)
        for _ in range(3):
            with envs.trace(tmp_path / "run.json"):
                envs.step([0] * 4)
                assert mapped(envs) == usual + 1
            envs.step([0] * 4)
            assert mapped(envs) == usual
        envs.restart()
        assert mapped(envs) == usual


@pytest.mark.deep
def test_rollouts_and_restarts_share_what_is_handed_over(tmp_path):
    with closing(vector_env(faults=FaultPolicy(on_crash="restart"), make=Frail)) as envs:
        envs.reset(seed=0)
        with envs.trace(tmp_path / "run.json"):
            rollout = envs.rollout(6)
            rollout.step([0] * 4)
            envs.restart([0])
            envs.step([0] * 4)
            rollout = envs.rollout(6)
            for _ in range(6):
                rollout.step([0] * 4)
        timeline = Timeline(tmp_path / "run.json")
    counts = timeline.counts()
    assert counts["step env 3"] + counts["reset env 3"] == 8
    assert rollout.observations.shape[0] == 7


def test_a_worker_that_dies_leaves_what_it_has_recorded(tmp_path):
    with closing(vector_env(faults=FaultPolicy(on_crash="restart"), make=Frail)) as envs:
        envs.reset(seed=0)
        old = envs.processes[0].pid
        with envs.trace(tmp_path / "run.json"):
            envs.step([0] * 4)
            envs.step([0, KILL, 0, 0])
            envs.step([0] * 4)
            envs.step([0] * 4)
        new = envs.processes[0].pid
        timeline = Timeline(tmp_path / "run.json")
    of = timeline.spans
    # Env 0's second step was answered in no completion, but it was made.
    assert timeline.counts(of[old, old]) == {"step env 0": 2, "step env 1": 1}
    assert timeline.counts(of[new, new]) == {
        "reset env 0": 1,
        "reset env 1": 1,
        "step env 0": 1,
        "step env 1": 1,
    }
    (moment,) = [moment for moment in timeline.moments if moment["s"] == "g"]
    assert moment["name"] == "restart of worker 0" and moment["args"]["type"] == "WorkerCrashError"
    attached = [moment["pid"] for moment in timeline.moments if moment["name"] == "attach"]
    assert attached.count(old) == attached.count(new) == 1


PARENT, WORKER = 1001, 1002
BEGAN, ENDED = 1_000_000, 2_000_000


def shown(*entries, unfinished):
    """Of a worker: the names, beginnings and ends that are shown of (kind, env, begin, end)."""
    of_kind = {name: number for number, name in TRACE_KINDS.items()}
    rows = [(begin, end, env, of_kind[kind]) for kind, env, begin, end in entries]
    ring = np.array(rows, [("begin", "i8"), ("end", "i8"), ("env", "u4"), ("kind", "u4")])
    span, processes = (BEGAN, ENDED), [[WORKER]]
    recording = Recording(
        [ring, ring[:0]], [0, 0], [range(2)], span, processes, PARENT, [unfinished], []
    )
    file = io.StringIO()
    write(file, recording)
    spans = Timeline(file.getvalue()).workers()
    return [(span["name"], *(BEGAN + at for at in ns(span))) for span in spans]


@pytest.mark.deep
def test_what_has_just_ended_is_not_unfinished():
    """A read while an env's step ends may see both."""
    step = ("step", 0, 1_500_000, 1_600_000)
    (once,) = shown(step, unfinished=("step", 0, 1_500_000))
    assert once == ("step env 0", 1_500_000, 1_600_000)
    # The next one began before the last one had ended, by one of a worker's clocks.
    assert shown(step, unfinished=("step", 0, 1_599_000))[1:] == [("step env 0", 1_600_000, ENDED)]
    assert shown(step, unfinished=("step", 1, 1_599_000))[1:] == [("step env 1", 1_600_000, ENDED)]
    assert shown(step, unfinished=("reset", 0, 1_500_000))[1:] == [
        ("reset env 0", 1_600_000, ENDED)
    ]


@pytest.mark.deep
def test_the_last_wait(tmp_path):
    """It has not ended when the trace does, so it is not recorded."""
    step = ("step", 0, 1_500_000, 1_600_000)
    assert shown(step, unfinished=("wait", 0, BEGAN))[1:] == [("wait", 1_600_000, ENDED)]
    with closing(vector_env()) as envs:
        with envs.trace(tmp_path / "run.json"):
            envs.reset()
        timeline = Timeline(tmp_path / "run.json")
        for spans in timeline.tracks("worker"):
            assert spans[-1]["name"] == "wait" and spans[-1]["args"] == {"unfinished": True}
        ends = {ns(spans[-1])[1] for spans in timeline.tracks("worker")}
        assert len(ends) == 1 and ends.pop() >= ns(timeline.parent[-1])[1]


@pytest.mark.deep
def test_errors_are_moments(tmp_path):
    with closing(vector_env(faults=FaultPolicy(on_error="reset"), make=Frail)) as envs:
        envs.reset(seed=0)
        with envs.trace(tmp_path / "run.json"):
            envs.step([0, 0, RAISE, 0])
            envs.step([0] * 4)
        timeline = Timeline(tmp_path / "run.json")
        names = [moment["name"] for moment in timeline.moments]
        assert names.count("error env 2") == 1 and names.count("fault of worker 1") == 1
        (fault,) = [m for m in timeline.moments if m["name"] == "fault of worker 1"]
        assert len(fault["args"]["message"]) == 500


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_is_written_if_the_block_raises(num_workers, tmp_path):
    with closing(vector_env(make=Frail, num_workers=num_workers)) as envs:
        envs.reset()
        with pytest.raises(LookupError), envs.trace(tmp_path / "run.json"):
            envs.step([0] * 4)
            envs.step([RAISE, 0, 0, 0])
        timeline = Timeline(tmp_path / "run.json")
        assert timeline.counts()["step env 0"] == 2
        assert [m["name"] for m in timeline.moments if m["s"] == "g"] == ["raised: LookupError"]
        envs.reset()
        envs.step([0] * 4)
    if num_workers:
        envs = vector_env(make=Frail)
        envs.reset()
        with pytest.raises(WorkerCrashError), envs.trace(tmp_path / "run.json"):
            envs.step([KILL, 0, 0, 0])
        assert envs.closed
        assert Timeline(tmp_path / "run.json").counts()["step env 3"] <= 1


def refused(envs):
    envs.reset()
    with pytest.raises(ValueError, match="actions"):
        envs.step([0] * 3)


def refused_in_part(envs):
    envs.async_reset()
    ids = envs.recv()[4]["env_id"]
    with pytest.raises(ValueError, match="actions"):
        envs.send([0], ids)


def timed_out(envs):
    envs.reset()
    envs.step_async([0] * 4)
    with suppress(multiprocessing.TimeoutError):  # without workers there is nothing to wait for
        envs.step_wait(timeout=0)


def raised(envs):
    envs.reset()
    with pytest.raises(LookupError):
        envs.step([0, 0, RAISE, 0])


def wrong_call(envs):
    with pytest.raises(AttributeError):
        envs.call("nothing")


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")
@pytest.mark.parametrize("call", [refused, refused_in_part, timed_out, raised, wrong_call])
def test_after_a_call_that_fails_the_caller_is_at_work(call, tmp_path):
    size = 2 if call is refused_in_part else None
    with closing(vector_env(make=Frail, batch_size=size)) as envs:
        with envs.trace(tmp_path / "run.json"):
            call(envs)
        assert Timeline(tmp_path / "run.json").parent[-1]["cat"] == "caller"


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [0, 2])
def test_close_within_it(num_workers, tmp_path):
    envs = vector_env(num_workers=num_workers)
    with envs.trace(tmp_path / "run.json"):
        envs.reset()
        envs.step([0] * 4)
        envs.close()
    assert sum(Timeline(tmp_path / "run.json").counts().values()) == 8
    with pytest.raises(ClosedEnvironmentError):
        envs.trace(tmp_path / "run.json")


@pytest.mark.deep
def test_one_at_a_time(tmp_path):
    with closing(vector_env()) as envs, closing(vector_env()) as others:
        with envs.trace(tmp_path / "run.json") as trace:
            second = envs.trace(tmp_path / "second.json")
            with pytest.raises(RuntimeError, match=r"recorded already, to .*run\.json"):
                second.start()
            with pytest.raises(RuntimeError, match="recorded already"):
                trace.start()
            assert not (tmp_path / "second.json").exists()
            with others.trace(tmp_path / "others.json"):
                others.reset()
            envs.reset()
        assert sum(Timeline(tmp_path / "run.json").counts().values()) == 4
        assert sum(Timeline(tmp_path / "others.json").counts().values()) == 4
        second.start()
        envs.step([0] * 4)
        second.stop()
        second.stop()  # is no error
        assert sum(Timeline(tmp_path / "second.json").counts().values()) == 4


def test_what_cannot_be_begun(tmp_path, monkeypatch):
    with closing(vector_env()) as envs:
        envs.reset()
        with pytest.raises(FileNotFoundError):
            envs.trace(tmp_path / "missing" / "run.json").start()
        with pytest.raises(IsADirectoryError):
            envs.trace(tmp_path).start()
        with pytest.raises(ValueError, match="size"):
            envs.trace(tmp_path / "run.json", size=0)
        with pytest.raises(TypeError, match="size"):
            envs.trace(tmp_path / "run.json", size="all")

        def full(nbytes):
            raise OSError(28, "no room")

        monkeypatch.setattr("shmvec.trace.reserve_memory", full)
        with pytest.raises(OSError, match="no room"):
            envs.trace(tmp_path / "run.json").start()
        assert not (tmp_path / "run.json").exists()
        monkeypatch.undo()
        envs.step([0] * 4)
        with envs.trace(tmp_path / "run.json"):
            envs.step([0] * 4)
        assert sum(Timeline(tmp_path / "run.json").counts().values()) == 4


@pytest.mark.deep
def test_what_is_no_file(tmp_path):
    reader, writer = os.pipe()
    try:
        with closing(vector_env(num_workers=0)) as envs:
            with envs.trace(f"/proc/self/fd/{writer}"):  # as /dev/stdout is, or a shell's >(gzip)
                envs.reset()
        assert sum(Timeline(os.read(reader, 1 << 16).decode()).counts().values()) == 4
    finally:
        os.close(reader)
        os.close(writer)
    with closing(vector_env(num_workers=0)) as envs:
        with pytest.raises(OSError, match="No space left"), envs.trace("/dev/full"):
            envs.reset()
        with envs.trace("/dev/null"):
            envs.reset()


@pytest.mark.deep
def test_what_fails_leaves_no_file(tmp_path):
    """Where there was none; what there was is left as it was."""
    run_alone(f"import pathlib, test_trace as it; it.fail_to_write(pathlib.{tmp_path!r})")


def fail_to_write(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link.json").symlink_to("linked.json")
    with closing(vector_env(num_workers=0)) as envs:
        for name in ("run.json", "old.json", "link.json"):
            trace = envs.trace(tmp_path / name)
            trace.start()
            envs.reset()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            with pytest.raises(OSError, match="File too large"):
                trace.stop()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in tmp_path.iterdir()} == {"old.json", "link.json"}
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.mark.deep
def test_a_fork_writes_nothing(tmp_path):
    with closing(vector_env()) as envs:
        envs.reset()
        with envs.trace(tmp_path / "run.json") as trace:
            envs.step([0] * 4)
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    trace.stop()
                    status = int((tmp_path / "run.json").exists())
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            envs.step([0] * 4)
        assert sum(Timeline(tmp_path / "run.json").counts().values()) == 8


class Slow(gym.Env):
    """Whose step takes until it is let go."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, gate):
        self.gate = gate

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.wait()
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def wait(self):
        os.read(self.gate, 1)


@contextmanager
def one_slow():
    """A vector env of one whose steps end when they are let go, reset; and what ends a step."""
    gate, opened = os.pipe()
    try:
        with closing(ShmVectorEnv([lambda: Slow(gate)], num_workers=1, context="fork")) as envs:
            envs.reset()
            yield envs, lambda: os.write(opened, b"x")
    finally:
        os.close(gate)
        os.close(opened)


def begin_step(envs):
    """Has the env be in a step."""
    envs.step_async([0])
    while envs.stats().doing[0] is None:
        pass


@pytest.mark.deep
def test_a_step_that_has_not_ended_is_in_it(tmp_path):
    with one_slow() as (envs, end_step):
        with envs.trace(tmp_path / "run.json"):
            begin_step(envs)
        end_step()
        envs.step_wait()
    (step,) = [s for s in Timeline(tmp_path / "run.json").workers() if s["cat"] == "step"]
    assert step["args"] == {"unfinished": True}
