"""Traces in which something goes wrong: Ctrl-C, time limits, workers that are replaced."""

import os
import resource
import signal
import stat
from contextlib import closing
from pathlib import Path

import pytest
from echoing import Echo, Moments
from scripts import succeeds
from timelines import Timeline

from shmvec import FaultPolicy, ShmVectorEnv

pytestmark = pytest.mark.deep

HANG = 7  # an action


class Hanging(Echo):
    """Hangs where its action says so."""

    def step(self, action):
        if action == HANG:
            signal.pause()
        return super().step(action)


def vector_env(num_workers=2, **options):
    options.setdefault("context", "fork")
    return ShmVectorEnv([Hanging] * 4, num_workers=num_workers, **options)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


# Between open() and `with` Python itself closes the file; which file, it says.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_ctrl_c_at_any_moment(tmp_path):
    def mapped():
        return Path(f"/proc/{envs.processes[0].pid}/maps").read_text().count("memfd:shmvec")

    path = tmp_path / "run.json"

    def traced():
        with envs.trace(path, size=16):
            envs.step([0] * 4)

    def step():
        return envs.step([1] * 4)[0][:, 1].tolist()

    with closing(vector_env()) as envs:
        envs.reset()
        traced()
        assert step() == [1] * 4
        usual = mapped()
        moments = Moments(stride=115, by=ctrl_c)
        while moments.interrupt(traced):
            assert step() == [1] * 4
            Timeline(path)  # it is whole: this one's, or one's before it
            # Recording has ended, and another trace can be begun.
            assert mapped() == usual
            with envs.trace(tmp_path / "whole.json"):
                assert step() == [1] * 4
            assert sum(Timeline(tmp_path / "whole.json").counts().values()) == 4
            assert step() == [1] * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ctrl_c_within_it(num_workers, tmp_path):
    with closing(vector_env(num_workers)) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt), envs.trace(tmp_path / "run.json"):
            envs.step([0] * 4)
            ctrl_c()
        timeline = Timeline(tmp_path / "run.json")
        assert sum(timeline.counts().values()) == 4
        assert [each["name"] for each in timeline.moments if each["s"] == "g"] == [
            "raised: KeyboardInterrupt"
        ]


def test_one_that_was_forgotten_is_in_nobodys_way(tmp_path):
    with closing(vector_env()) as envs:
        envs.reset()
        envs.trace(tmp_path / "forgotten.json").start()
        with envs.trace(tmp_path / "run.json"):
            envs.step([0] * 4)
        assert sum(Timeline(tmp_path / "run.json").counts().values()) == 4


def test_an_env_that_takes_too_long(tmp_path):
    policy = FaultPolicy(on_timeout="restart", step_timeout=1.0, backoff_s=0)
    with closing(vector_env(faults=policy)) as envs:
        envs.reset(seed=0)
        old = envs.processes[0].pid
        with envs.trace(tmp_path / "run.json"):
            envs.step([0, HANG, 0, 0])
            for _ in range(3):  # a truncation, a reset, a step
                envs.step([0] * 4)
        new = envs.processes[0].pid
        timeline = Timeline(tmp_path / "run.json")
    (moment,) = [each for each in timeline.moments if each["s"] == "g"]
    assert moment["name"] == "restart of worker 0" and moment["args"]["type"] == "EnvTimeoutError"
    # The one that hung was ended by a signal that its worker heeds, if it came to that in time.
    counts = timeline.counts(timeline.spans[old, old])
    assert counts | {"step env 1": 1} == {"step env 0": 1, "step env 1": 1}
    counts = timeline.counts(timeline.spans[new, new])
    assert counts == {"reset env 0": 1, "reset env 1": 1, "step env 0": 1, "step env 1": 1}


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_no_forks(context, tmp_path):
    with closing(vector_env(1, context=context)) as envs:
        envs.reset(seed=0)
        with envs.trace(tmp_path / "run.json"):
            envs.step([0] * 4)
            envs.restart()
            envs.step([0] * 4)  # is answered by a truncation
            envs.step([0] * 4)  # resets
        timeline = Timeline(tmp_path / "run.json")
        assert len(timeline.tracks("worker")) == 2
        assert sum(timeline.counts().values()) == 8
        assert {pid for pid, _ in timeline.names} > {os.getpid(), envs.processes[0].pid}


def test_a_file_is_whole_or_as_it_was(tmp_path):
    """After a full disk, or a trace that is never ended."""
    succeeds(f"import pathlib, test_traces_broken_off as it; it.fill_disk(pathlib.{tmp_path!r})")


def fill_disk(tmp_path):
    path = tmp_path / "run.json"
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(vector_env()) as envs:
        envs.reset()
        with envs.trace(path):
            envs.step([0] * 4)
        whole = path.read_text()
        with pytest.raises(OSError, match="too large"), envs.trace(path):
            envs.step([0] * 4)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert path.read_text() == whole
        envs.trace(path).start()  # and is forgotten
        assert path.read_text() == whole
        assert os.listdir(tmp_path) == ["run.json"]
        with envs.trace(path):
            envs.step([0] * 4)
        assert sum(Timeline(path).counts().values()) == 4
        assert path.read_text() != whole


def test_files_of_other_kinds(tmp_path, monkeypatch):
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("before")
    real.chmod(0o640)
    link.symlink_to("real.json")
    os.mkfifo(pipe)

    def traced(path):
        with envs.trace(path):
            envs.step([0] * 4)
        assert sorted(os.listdir(tmp_path)) == ["link.json", "pipe", "real.json"]

    with closing(vector_env()) as envs:
        envs.reset()
        traced(link)
        assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
        assert sum(Timeline(real).counts().values()) == 4
        with pytest.raises(OSError, match="No such device"):  # it has no reader
            traced(pipe)
        traced("/dev/null")
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
        real.write_text("before")
        monkeypatch.setattr(os, "replace", lambda *paths: os.rename(real, tmp_path))  # fails
        traced(os.fsencode(real))
        assert sum(Timeline(real).counts().values()) == 4
        real.write_text("before")
        monkeypatch.setattr(os, "access", lambda *request: False)
        traced(real)
        assert sum(Timeline(real).counts().values()) == 4


class Opens(Echo):
    """Has too many files open where its action says so."""

    def step(self, action):
        few, most = (1, 2)
        if action in (few, most):
            limit = 3 if action == few else self.usual[0]
            self.usual = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, self.usual[1]))
        return super().step(action)


def test_a_worker_with_too_many_open_files_goes_without(tmp_path):
    with closing(ShmVectorEnv([Opens] * 2, num_workers=2, context="fork")) as envs:
        envs.reset()
        envs.step([1, 0])
        with envs.trace(tmp_path / "run.json"):
            envs.step([0] * 2)
        assert Timeline(tmp_path / "run.json").counts() == {"step env 1": 1}
        envs.step([2, 0])
        with envs.trace(tmp_path / "run.json"):
            envs.step([0] * 2)
        assert sum(Timeline(tmp_path / "run.json").counts().values()) == 2


def test_an_error_without_words(tmp_path):
    class Silent(Exception):
        def __str__(self):
            raise LookupError

    with closing(vector_env()) as envs:
        envs.reset()
        with pytest.raises(Silent), envs.trace(tmp_path / "run.json"):
            raise Silent
        (moment,) = [m for m in Timeline(tmp_path / "run.json").moments if m["s"] == "g"]
        assert moment["args"] == {"type": "Silent", "message": ""}
