"""Forks of a program that has used OpenMP: workers must not wait for threads that it had."""

import importlib.util
import subprocess

import pytest
from scripts import succeeds

ENV = """
    import gymnasium as gym
    import numpy as np
    from shmvec import FaultPolicy, ShmVectorEnv

    class Env(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.full(1, work()), {}

        def step(self, action):
            return np.full(1, work()), 0.0, False, False, {}
"""

# The parent has started a team of two threads before its workers are forked, and has asked for two
# in each; envs would use as many.
BODY = """
    before = work()

    def check(context, threads, **options):
        envs = ShmVectorEnv(
            [Env], num_workers=1, context=context, threads_per_worker=threads, **options
        )
        assert envs.reset()[0] == before
        for _ in range(3):
            assert envs.step([0])[0] == before
        return envs

    for threads in (None, 0, 2):
        check("fork", threads).close()
    envs = check("fork", 2, faults=FaultPolicy(on_crash="restart"))
    envs.restart([0])
    envs.step([0])
    assert envs.step([0])[0] == before
    envs.close()
"""

SUM = """
#include <omp.h>
double sum(void) {
    double total = 0;
#pragma omp parallel for reduction(+ : total)
    for (int i = 0; i < 1000; i++) total += i;
    return total;
}
int threads(void) { return omp_get_max_threads(); }
"""


def test_a_library_that_uses_openmp(tmp_path, monkeypatch):
    """OMP_NUM_THREADS, which the user has set, holds in libraries that the worker loads itself."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (tmp_path / "sum.c").write_text(SUM)
    library = tmp_path / "sum.so"
    command = ["gcc", "-shared", "-fPIC", "-fopenmp", "-o", library, tmp_path / "sum.c"]
    if subprocess.run(command, capture_output=True, timeout=250).returncode:
        pytest.skip("gcc has no OpenMP here")
    work = f"""
    import ctypes
    library = ctypes.CDLL({str(library)!r})
    library.sum.restype = ctypes.c_double
    work = library.sum
    """
    threads = """
    class Tells(Env):
        def reset(self, *, seed=None, options=None):
            return np.full(1, library.threads()), {}

    with contextlib.closing(ShmVectorEnv([Tells], num_workers=1, context="fork")) as envs:
        assert envs.reset()[0] == 1
    """
    succeeds(work, ENV, BODY, "    import contextlib\n", threads, fresh=True)


@pytest.mark.deep
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_torch():
    """Sums of whole numbers: they are the same on any number of threads."""
    work = """
    import torch
    torch.set_num_threads(2)

    def work():
        square = torch.ones(256, 256) @ torch.ones(256, 256)
        return float(torch.floor(torch.arange(1_000_000) / 2).double().sum() + square.sum())
    """
    succeeds(work, ENV, BODY, fresh=True)


@pytest.mark.deep
def test_opencv():
    """Its own threads, which the number that a worker is given would end."""
    pytest.importorskip("cv2")
    work = """
    import time
    import cv2
    cv2.setNumThreads(3)

    def work():
        return float(cv2.resize(np.ones((2000, 2000), np.float32), (1500, 1500)).sum())
    """
    threads = """
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and len(os.listdir("/proc/self/task")) < 3:
        work()
    assert cv2.getNumThreads() == 3
    time.sleep(0.1)  # until they sleep
    check("fork", 1).close()
    assert cv2.getNumThreads() == 3 and work() == before
    """
    succeeds("    import numpy as np\n", work, ENV, BODY, threads, fresh=True)


@pytest.mark.deep
@pytest.mark.parametrize("context, expected", [("fork", 1), ("forkserver", 3)])
def test_a_library_that_is_first_loaded_for_the_workers(context, expected, tmp_path, monkeypatch):
    """With "fork" by the program, whose copy gets one thread, whether it is used there or not."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "sum.c").write_text(SUM)
    library = tmp_path / "sum.so"
    command = ["gcc", "-shared", "-fPIC", "-fopenmp", "-o", library, tmp_path / "sum.c"]
    if subprocess.run(command, capture_output=True, timeout=250).returncode:
        pytest.skip("gcc has no OpenMP here")
    (tmp_path / "sums.py").write_text(
        f"import ctypes\nlibrary = ctypes.CDLL({str(library)!r})\n"
        "library.sum.restype = ctypes.c_double"
    )
    work = f"""
    import sys
    sys.path.insert(0, {str(tmp_path)!r})

    def work():
        import sums

        return sums.library.threads() if sums.library.sum() == 499500 else -1
    """
    threads = f"""
    import contextlib

    policy = FaultPolicy(on_crash="restart")
    options = dict(context={context!r}, threads_per_worker=3, faults=policy, preload=["sums"])
    with contextlib.closing(ShmVectorEnv([Env], num_workers=1, **options)) as envs:
        assert envs.reset()[0] == {expected}
        import sums

        sums.library.sum()  # now this process has threads of it
        envs.restart([0])
        assert envs.reset()[0] == {expected}
    """
    succeeds(work, ENV, threads, fresh=True)
