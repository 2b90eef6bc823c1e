"""Workers keep to their share of the cores."""

import os
import sys
import types
from contextlib import closing
from unittest.mock import MagicMock

import pytest
from envs import Counter
from tables import deep
from threadpoolctl import threadpool_info, threadpool_limits

from shmvec import ShmVectorEnv


def opencv():
    import cv2

    return cv2


class Loads(Counter):
    """Loads a library with threads of its own, and tells what it finds."""

    def variable(self, name):
        return os.environ.get(name)

    def opencv_threads(self):
        return opencv().getNumThreads()

    def cores(self):
        return sorted(os.sched_getaffinity(0))


class LoadsWhenMade(Loads):
    def __init__(self):
        super().__init__()
        opencv()


@pytest.mark.parametrize("context", ["fork", *deep("spawn", "forkserver")])
def test_variables_of_libraries_are_set_in_workers_only(context, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    before = dict(os.environ)
    envs = ShmVectorEnv([Loads] * 4, context=context, num_workers=2, threads_per_worker=5)
    with closing(envs):
        assert envs.call("variable", "OMP_NUM_THREADS") == ("5",) * 4
        assert envs.call("variable", "MKL_NUM_THREADS") == ("5",) * 4
        assert envs.call("variable", "OPENBLAS_NUM_THREADS") == ("3",) * 4  # the user's
        assert dict(os.environ) == before


@pytest.mark.deep
def test_the_default_is_the_share_of_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for num_workers in (1, 4):
        with closing(ShmVectorEnv([Loads] * 4, num_workers=num_workers)) as envs:
            # No quota can be tighter than one core.
            share = int(envs.call("variable", "OMP_NUM_THREADS")[0])
            assert 1 <= share <= max(1, cores // num_workers)


@pytest.mark.deep
def test_opting_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with closing(ShmVectorEnv([Loads] * 2, threads_per_worker=0)) as envs:
        assert envs.call("variable", "OMP_NUM_THREADS") == (None, None)
    with closing(ShmVectorEnv([Loads] * 2, num_workers=0)) as envs:  # this process is the user's
        assert envs.call("variable", "OMP_NUM_THREADS") == (None, None)


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_opencv_is_limited_though_it_heeds_no_variable_once_loaded(context, monkeypatch):
    pytest.importorskip("cv2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    envs = ShmVectorEnv([LoadsWhenMade], context=context, threads_per_worker=1)
    with closing(envs):
        assert envs.call("opencv_threads") == (1,)


class Blas(Counter):
    def threads(self):
        """Those that NumPy's may use, and those of this process but Python's and the watchdog's."""
        (most,) = {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}
        return most, len(os.listdir("/proc/self/task")) - 2


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_blas_is_limited_unless_the_program_has_loaded_it_before_a_fork(context, monkeypatch):
    """Then it is left alone, and has no threads in a worker that does not use it."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with (
        threadpool_limits(3),
        closing(ShmVectorEnv([Blas], context=context, threads_per_worker=1)) as envs,
    ):
        (found,) = envs.call("threads")
        assert found == (3, 0) if context == "fork" else (1, 0)


@pytest.mark.deep
def test_pinning():
    cores = sorted(os.sched_getaffinity(0))
    with closing(ShmVectorEnv([Loads] * 3, num_workers=3, pin_workers=True)) as envs:
        envs.reset()
        envs.step([0, 0, 0])
        assert envs.call("cores") == tuple([cores[i % len(cores)]] for i in range(3))
    assert sorted(os.sched_getaffinity(0)) == cores


def test_bad_numbers_of_threads():
    for threads, error, message in (
        (-1, ValueError, "must not be negative, got -1"),
        ("2", TypeError, "int or None, got '2'"),
    ):
        with pytest.raises(error, match=message):
            ShmVectorEnv([Counter], threads_per_worker=threads)


@pytest.mark.deep
@pytest.mark.parametrize(
    "stub", [None, types.ModuleType("stub"), MagicMock()], ids=["None", "module", "mock"]
)
def test_what_stands_in_the_place_of_a_library(stub, monkeypatch):
    """None: a program that forbids it. A module, or a mock: tests and documentation of others."""
    for name in ("torch", "cv2"):
        monkeypatch.setitem(sys.modules, name, stub)
    with closing(ShmVectorEnv([Counter] * 2, num_workers=1, context="fork")) as envs:
        envs.reset()
