"""The threads of native libraries in a worker: BLAS, OpenMP, torch, OpenCV."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from typing import Any

__all__ = ["end_opencv_threads", "limit_threads", "note_libraries", "thread_variables"]

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)
# The variables of libraries whose limit can be changed in a fork, by threadpoolctl's names.
# OpenBLAS is not one of them: given a limit in a fork, it first starts a thread for each core.
_VARIABLE_BY_API = {
    "openmp": "OMP_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}


def thread_variables(threads: int) -> dict[str, str]:
    """Environment variables for new processes that limit the threads of libraries.

    Libraries read them when they are loaded, which may be before any code of shmvec's runs. A
    variable that the user has set takes precedence.

    Args:
        threads: The limit; 0: no variables.
    """
    return dict.fromkeys(_THREAD_VARIABLES, str(threads)) if threads > 0 else {}


_controller: Any = None  # threadpoolctl's controller


def note_libraries() -> None:
    """Notes which libraries the program has loaded, which takes milliseconds, before it is forked.

    threadpoolctl is imported here, so that importing shmvec does not import it.
    """
    global _controller
    from threadpoolctl import ThreadpoolController

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that two libraries are incompatible
        _controller = ThreadpoolController()


def end_opencv_threads() -> None:
    """Ends the threads that OpenCV has started in this process; its next use starts others.

    A fork has none of these threads, and would wait for them when it changes their number.
    threadpoolctl does not know OpenCV.
    """
    opencv = sys.modules.get("cv2")
    with suppress(AttributeError, TypeError):  # another module may have this name
        threads = opencv.getNumThreads()  # type: ignore[union-attr]
        if threads > 1:
            opencv.setNumThreads(1)  # type: ignore[union-attr]
            opencv.setNumThreads(threads)  # type: ignore[union-attr]


def limit_threads(threads: int) -> None:
    """Limits the threads of libraries in this process, a fork of a program that has loaded them.

    Libraries that a worker or a fork server loads itself read the variables instead.

    Args:
        threads: The limit; 0: none, except for a library that would wait for threads of the
            program.
    """
    if threads:
        for name, variable in _VARIABLE_BY_API.items():
            _controller.select(internal_api=name).limit(limits=_thread_limit(variable, threads))
        _call_if_loaded("cv2", "setNumThreads", _thread_limit("OPENCV_FOR_THREADS_NUM", threads))
    # GNU's OpenMP would wait for the program's threads. With a limit of one it does not.
    gnu = _controller.select(prefix="libgomp", threading_layer=["gnu", "openmp"])
    gnu.limit(limits=1)
    # MKL is linked into torch, where threadpoolctl does not find it.
    if gnu.info():
        _call_if_loaded("torch", "set_num_threads", 1)
    elif threads:
        _call_if_loaded("torch", "set_num_threads", _thread_limit("OMP_NUM_THREADS", threads))


def _thread_limit(variable: str, default: int) -> int:
    """The number that a variable holds, or the default."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() and int(value) > 0 else default


def _call_if_loaded(module: str, function: str, threads: int) -> None:
    with suppress(AttributeError):
        getattr(sys.modules.get(module), function)(threads)
