"""Keeps the libraries in a worker to its share of the cores.

NumPy's BLAS, OpenMP, torch and OpenCV each start as many threads as the machine has cores, in every
process. With a worker on each core that makes cores squared: they take the cores from each other.

GNU's OpenMP runtime does not survive a fork: the threads that the parent had started are gone, a
child that uses them waits for them for ever. What a forked worker has inherited of it runs on one
thread, which needs nobody. (LLVM's and Intel's begin anew in a child, as does OpenBLAS.)
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec

__all__ = [
    "fresh_openmp",
    "inherited_openmp",
    "limit_threads",
    "loaded_openmp",
    "pin_to_core",
    "thread_variables",
]

_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)
# Optional; scikit-learn brings it. Looked for here, once: a search that finds nothing writes to a
# quarter megabyte of pages, which a forked worker then shares with its parent no more.
_THREADPOOLCTL = find_spec("threadpoolctl") is not None


def thread_variables(threads: int) -> dict[str, str]:
    """The libraries' environment variables, for processes that are started.

    Libraries read them when they are loaded, which in a spawned process is before any code of ours
    runs. What the user has set should stay as it is.

    Args:
        threads: How many; 0: there are none to set.
    """
    return dict.fromkeys(_VARIABLES, str(threads)) if threads > 0 else {}


_read: tuple[int, list[str]] = (-1, [])  # how many modules there were, and what was found then


def loaded_openmp() -> list[str]:
    """Paths of the copies of GNU's OpenMP runtime in this process; torch brings one of its own.

    Reading them takes milliseconds: a fork knows what was read before it.
    """
    global _read
    if _read[0] != len(sys.modules):
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            lines = {line.rstrip("\n").partition("/")[2] for line in maps if "libgomp" in line}
        paths = [f"/{path}" for path in sorted(lines)]
        found = [path for path in paths if os.path.basename(path).startswith("libgomp")]
        _read = len(sys.modules), found
    return _read[1]


_used_openmp: list[str] | None = None  # copies that the program may have used; None: all of them


@contextmanager
def fresh_openmp() -> Iterator[None]:
    """Copies of OpenMP that are loaded inside have no threads yet when processes are forked.

    ``loaded_openmp()`` after the last of them spares each process that.
    """
    global _used_openmp
    _used_openmp = loaded_openmp()
    try:
        yield
    finally:
        _used_openmp = None


def inherited_openmp() -> list[str]:
    """Copies of OpenMP that this process, forked just now, must not use with threads."""
    return loaded_openmp() if _used_openmp is None else _used_openmp


def limit_threads(threads: int, inherited: Sequence[str] = ()) -> None:
    """Limits libraries that are loaded in this process, as far as they let us.

    Args:
        threads: How many; 0 leaves everything alone that was not inherited.
        inherited: Copies of GNU's OpenMP runtime that were loaded before the fork.
    """
    if threads > 0:
        _limit_loaded(threads)
    for path in inherited:
        _limit_openmp(path, 1)
    if inherited:  # MKL inside it has a number of its own
        _set_in("torch", "set_num_threads", 1)


def _limit_openmp(path: str, threads: int) -> None:
    if "/torch/" in path and hasattr(sys.modules.get("torch"), "set_num_threads"):
        return  # which tells its own copy, with less ado
    with suppress(OSError, AttributeError):
        ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW).omp_set_num_threads(threads)


def _limit_loaded(threads: int) -> None:
    for name in _VARIABLES:  # for libraries loaded later, and for programs that envs start
        os.environ.setdefault(name, str(threads))
    threads = int(os.environ["OMP_NUM_THREADS"]) if _is_count("OMP_NUM_THREADS") else threads
    for path in loaded_openmp():  # before a fork, it may be, where the variables were others
        _limit_openmp(path, threads)
    if _THREADPOOLCTL:
        with suppress(ImportError):
            from threadpoolctl import threadpool_limits

            threadpool_limits(threads)
    _set_in("torch", "set_num_threads", threads)
    _set_in("cv2", "setNumThreads", threads)


def _set_in(module: str, function: str, threads: int) -> None:
    """Calls a function of a module that is loaded; what stands in its place may not have it."""
    with suppress(AttributeError):
        getattr(sys.modules.get(module), function)(threads)


def _is_count(name: str) -> bool:
    value = os.environ[name]
    return value.isdecimal() and int(value) > 0


def pin_to_core(index: int) -> None:
    """Binds this process to one of the cores that it may use: the ``index``-th, modulo."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
