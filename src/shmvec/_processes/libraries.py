"""Sets up libraries in a worker before it builds envs: threads, random generators, registry."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.envs.registration import EnvSpec, WrapperSpec, registry

from shmvec._pickling import dumps_for_main, loads_in_main

__all__ = [
    "end_opencv_threads",
    "free_generators",
    "fresh_openmp",
    "inherited_openmp",
    "join_registry",
    "kept_registry",
    "limit_threads",
    "loaded_openmp",
    "packed_registry",
    "pin_to_core",
    "seed_generators",
    "state_of_generators",
    "thread_variables",
    "worker_seeds",
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
# threadpoolctl is optional; scikit-learn brings it. It is searched for once, here, because a search
# that finds nothing writes to a quarter megabyte of pages, which a fork then cannot share.
_THREADPOOLCTL = find_spec("threadpoolctl") is not None


def thread_variables(threads: int) -> dict[str, str]:
    """Environment variables for new processes that limit the threads of libraries.

    Libraries read them when they are loaded, which in a spawned process is before any code of ours
    runs. A variable that the user has set takes precedence.

    Args:
        threads: The limit; 0: no variables.
    """
    return dict.fromkeys(_VARIABLES, str(threads)) if threads > 0 else {}


_read: tuple[int, list[str]] = (-1, [])  # number of modules at the last reading, paths found then


def loaded_openmp() -> list[str]:
    """Paths of the copies of GNU's OpenMP runtime in this process; torch brings one of its own.

    Reading them takes milliseconds; a fork inherits the result of the last reading.
    """
    global _read
    if _read[0] != len(sys.modules):
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            lines = {line.rstrip("\n").partition("/")[2] for line in maps if "libgomp" in line}
        paths = [f"/{path}" for path in sorted(lines)]
        found = [path for path in paths if os.path.basename(path).startswith("libgomp")]
        _read = len(sys.modules), found
    return _read[1]


_used_openmp: list[str] | None = None  # copies that the program may have used; None: all


@contextmanager
def fresh_openmp() -> Iterator[None]:
    """A context for forks: copies of OpenMP that are loaded inside have no threads yet.

    A call of ``loaded_openmp()`` after the last import spares each fork that call.
    """
    global _used_openmp
    _used_openmp = loaded_openmp()
    try:
        yield
    finally:
        _used_openmp = None


def inherited_openmp() -> list[str]:
    """Copies of OpenMP that this process, a new fork, must not use with threads."""
    return loaded_openmp() if _used_openmp is None else _used_openmp


def end_opencv_threads() -> None:
    """Ends the threads that OpenCV has started in this process; its next use starts others.

    A fork has none of these threads, and would wait for them when it changes their number.
    """
    opencv = sys.modules.get("cv2")
    with suppress(AttributeError, TypeError):  # some other module has this name
        threads = opencv.getNumThreads()  # type: ignore[union-attr]
        if threads > 1:
            opencv.setNumThreads(1)  # type: ignore[union-attr]
            opencv.setNumThreads(threads)  # type: ignore[union-attr]


def limit_threads(threads: int, inherited: Sequence[str] = ()) -> None:
    """Limits the threads of libraries that are loaded in this process, as far as they can be.

    Args:
        threads: The limit; 0: only libraries that were inherited are limited.
        inherited: Copies of GNU's OpenMP runtime that were loaded before the fork.
    """
    if threads > 0:
        _limit_loaded(threads)
    for path in inherited:
        _limit_openmp(path, 1)
    if inherited:  # torch's MKL does not follow OpenMP's limit
        _set_in("torch", "set_num_threads", 1)


def _limit_openmp(path: str, threads: int) -> None:
    if "/torch/" in path and hasattr(sys.modules.get("torch"), "set_num_threads"):
        return  # torch sets the limit of its own copy
    with suppress(OSError, AttributeError):
        ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW).omp_set_num_threads(threads)


def _limit_loaded(threads: int) -> None:
    for name in _VARIABLES:  # they limit libraries loaded later, and programs that envs start
        os.environ.setdefault(name, str(threads))
    threads = int(os.environ["OMP_NUM_THREADS"]) if _is_count("OMP_NUM_THREADS") else threads
    for path in loaded_openmp():  # libraries may have read other variables before a fork
        _limit_openmp(path, threads)
    if _THREADPOOLCTL:
        with suppress(ImportError):
            from threadpoolctl import threadpool_limits

            threadpool_limits(threads)
    _set_in("torch", "set_num_threads", threads)
    _set_in("cv2", "setNumThreads", threads)


def _set_in(module: str, function: str, threads: int) -> None:
    """Calls a function of a module, if the module is loaded and has it."""
    with suppress(AttributeError):
        getattr(sys.modules.get(module), function)(threads)


def _is_count(name: str) -> bool:
    value = os.environ[name]
    return value.isdecimal() and int(value) > 0


def pin_to_core(index: int) -> None:
    """Binds this process to one of the cores that it may use: the ``index``-th, modulo."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})


def state_of_generators() -> int:
    """A number derived from the states of this process's generators; nothing is drawn from them."""
    states = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)), protocol=4)
    digest = hashlib.sha256(states)
    generator = _of_torch()
    if generator is not None:
        digest.update(generator.get_state().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def worker_seeds(state: int, first_env: int, starts: int) -> npt.NDArray[np.uint32]:
    """Seeds for a worker's generators, uint32 ``(8,)``.

    Args:
        state: The parent's ``state_of_generators``.
        first_env: Index of the worker's first env.
        starts: How often the worker was started before.
    """
    return np.random.SeedSequence([state, first_env, starts]).generate_state(8).astype(np.uint32)


def seed_generators(seeds: npt.NDArray[np.uint32]) -> None:
    """Seeds the global generators of this process, a worker."""
    random.seed(seeds.tobytes())
    with suppress(TypeError):  # the program has set a generator that takes no seeds
        np.random.seed(seeds)
    generator = _of_torch()
    if generator is not None:
        generator.manual_seed(int(seeds[0]))


def free_generators() -> None:
    """Frees the locks of the global generators in a fork; threads may have held them at the fork.

    Raises:
        RuntimeError: A thread held torch's, which nothing can free.
    """
    with suppress(AttributeError):  # the program has set a generator of its own kind
        lock: Any = np.random.mtrand.get_bit_generator().lock
        lock._at_fork_reinit()
    if _of_torch() is None:
        return
    # It waits without the GIL, so that this thread can stop waiting for it.
    draw = threading.Thread(target=sys.modules["torch"].rand, args=(1,), daemon=True)
    draw.start()
    draw.join(_DRAW_S)
    if draw.is_alive():
        raise RuntimeError(
            "a thread of the program drew from torch's global generator as this worker was forked, "
            "and its lock is never released in the fork. context='forkserver' starts workers "
            "without the program's threads; or have the thread draw from a torch.Generator of its "
            "own"
        )


def _of_torch() -> Any:
    """The generator of torch; None if torch is not loaded, or another module has its name."""
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    kind = getattr(torch, "Generator", None)
    return generator if isinstance(kind, type) and isinstance(generator, kind) else None


_DRAW_S = 5.0  # for a thread to draw a number on a busy machine
_MAIN = ("__main__", "__mp_main__")  # the latter in a process that multiprocessing has spawned


@dataclass
class _Unpickled:
    """Replaces the entry point of a spec that could not be sent."""

    name: str
    why: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"the env id {self.name!r} cannot be sent to this worker: it was registered with an "
            f"object that cannot be pickled: {self.why}. Give an entry_point that can be: "
            "'module:Class', or a function of a module or script; or use context='fork'."
        )


def packed_registry() -> bytes:
    """Packs all specs of this process's registry, and the objects of ``__main__`` they name."""
    specs = dict(registry)
    try:
        return _packed(specs)
    except Exception:
        return _packed({name: _sendable(spec) for name, spec in specs.items()})


def _packed(specs: dict[str, EnvSpec]) -> bytes:
    found = {name: vars(sys.modules["__main__"]).get(name) for name in _names_of_main(specs)}
    return dumps_for_main((specs, found))


def _names_of_main(specs: dict[str, EnvSpec]) -> Iterator[str]:
    """Names in ``__main__`` that entry points refer to."""
    for spec in specs.values():
        wrappers: tuple[WrapperSpec, ...] = spec.additional_wrappers
        points = [spec.entry_point, spec.vector_entry_point, *(w.entry_point for w in wrappers)]
        for point in points:
            module, _, name = point.partition(":") if isinstance(point, str) else ("", "", "")
            if module in _MAIN:
                yield name.partition(".")[0]


def _sendable(spec: EnvSpec) -> EnvSpec:
    """The spec; or one that, when it is used, raises why the spec could not be sent."""
    try:
        _packed({spec.id: spec})
    except Exception as error:
        bad = _Unpickled(spec.id, f"{type(error).__name__}: {error}")
        return replace(
            spec, entry_point=bad, vector_entry_point=bad, additional_wrappers=(), kwargs={}
        )
    return spec


def join_registry(packed: bytes) -> None:
    """Registers the parent's specs, which replace this process's of the same ids."""
    # Modules that registered ids in the parent may be imported here, and register them too.
    warnings.filterwarnings("ignore", r".*Overriding environment .* already in registry")
    specs, found = loads_in_main(packed)
    vars(sys.modules["__main__"]).update(found)
    registry.update(specs)


@contextmanager
def kept_registry() -> Iterator[None]:
    """A context in which new ids can be registered, and no id is replaced."""
    before = dict(registry)
    try:
        yield
    finally:
        registry.update(before)
