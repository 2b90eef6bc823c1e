"""shmvec: step ordinary Gymnasium environments in parallel, through shared memory.

``ShmVectorEnv`` replaces ``gymnasium.vector.AsyncVectorEnv``, and ``make_vec`` replaces
``gymnasium.make_vec``. ``install`` replaces ``AsyncVectorEnv`` in code that cannot be changed.

Where ``is_native`` is False, these are Gymnasium's own, and the rest needs Linux.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shmvec._core import is_native, needs_linux  # it says what to do if it was never built

if TYPE_CHECKING:
    from shmvec.entry import install, make_vec, uninstall
    from shmvec.evaluation import Evaluation, SuiteEvaluation, Task, evaluate
    from shmvec.faults import (
        EnvTimeoutError,
        FaultPolicy,
        RemoteTraceback,
        TooManyFaultsError,
        WorkerCrashError,
    )
    from shmvec.pipeline import Pipeline
    from shmvec.replay import Replay
    from shmvec.vector_env import ShmVectorEnv

__version__ = "0.2.0"  # pyproject.toml reads it here

__all__ = [
    "EnvTimeoutError",
    "Evaluation",
    "FaultPolicy",
    "Pipeline",
    "RemoteTraceback",
    "Replay",
    "ShmVectorEnv",
    "SuiteEvaluation",
    "Task",
    "TooManyFaultsError",
    "WorkerCrashError",
    "__version__",
    "evaluate",
    "install",
    "is_native",
    "make_vec",
    "uninstall",
]

# They are imported at first use: a worker needs none of them, and so starts sooner.
_MODULES = {
    "Evaluation": "shmvec.evaluation",
    "Pipeline": "shmvec.pipeline",
    "Replay": "shmvec.replay",
    "ShmVectorEnv": "shmvec.vector_env",
    "SuiteEvaluation": "shmvec.evaluation",
    "Task": "shmvec.evaluation",
    "evaluate": "shmvec.evaluation",
    "install": "shmvec.entry",
    "make_vec": "shmvec.entry",
    "uninstall": "shmvec.entry",
}


# `import shmvec` is enough to use them. `auto` is missing, because its import has effects.
_SUBMODULES = {
    "aio",
    "cluster",
    "evaluation",
    "exchange",
    "faults",
    "pipeline",
    "planning",
    "rendering",
    "replay",
    "spaces",
    "states",
    "stats",
    "testing",
    "trace",
    "vector_env",
}


# These need no Linux. Programs name the errors in `except` clauses, wherever they run.
_PORTABLE = {"shmvec._pure", "shmvec.entry", "shmvec.faults", "shmvec.spaces"}

if not is_native:  # `import *`, dir and help ask for every name
    _MODULES["ShmVectorEnv"] = "shmvec._pure"
    __all__[:] = [name for name in __all__ if _MODULES.get(name) in {None, *_PORTABLE}]


def __getattr__(name: str) -> Any:
    if name not in {*_SUBMODULES, *_MODULES, *__all__}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = f"shmvec.{name}" if name in _SUBMODULES else _MODULES.get(name, "shmvec.faults")
    if not is_native and path not in _PORTABLE:
        raise ImportError(needs_linux(f"shmvec.{name}"))
    module = import_module(path)
    if name in _SUBMODULES:
        return module
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
