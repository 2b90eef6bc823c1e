"""Keeps the libraries in a worker to its share of the cores.

NumPy's BLAS, OpenMP, torch and OpenCV each start as many threads as the machine has cores, in every
process. With a worker on each core that makes cores squared: they take the cores from each other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["limit_threads", "pin_to_core", "thread_variables"]

_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)


@contextmanager
def thread_variables(threads: int) -> Iterator[None]:
    """Sets the libraries' environment variables, for processes that are started inside.

    Libraries read them when they are loaded, which in a spawned process is before any code of ours
    runs. What the user has set stays as it is.

    Args:
        threads: How many; 0 leaves everything alone.
    """
    ours = [name for name in _VARIABLES if threads > 0 and name not in os.environ]
    os.environ.update(dict.fromkeys(ours, str(threads)))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def limit_threads(threads: int) -> None:
    """Limits libraries that are loaded in this process, as far as they let us.

    Args:
        threads: How many; 0 leaves everything alone.
    """
    if threads <= 0:
        return
    for name in _VARIABLES:  # for libraries loaded later, and for programs that envs start
        os.environ.setdefault(name, str(threads))
    threads = int(os.environ["OMP_NUM_THREADS"]) if _is_count("OMP_NUM_THREADS") else threads
    with suppress(ImportError):
        from threadpoolctl import threadpool_limits  # optional; scikit-learn brings it

        threadpool_limits(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(threads)


def _is_count(name: str) -> bool:
    value = os.environ[name]
    return value.isdecimal() and int(value) > 0


def pin_to_core(index: int) -> None:
    """Binds this process to one of the cores that it may use: the ``index``-th, modulo."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
