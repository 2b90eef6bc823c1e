"""shmvec: step ordinary Gymnasium environments in parallel, through shared memory.

``ShmVectorEnv`` takes the place of ``gymnasium.vector.AsyncVectorEnv``; ``make_vec`` that of
``gymnasium.make_vec``. ``install`` puts the former in that place for code that cannot be changed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shmvec import _core  # noqa: F401  # says what to do if it was never built

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

__version__ = "0.2.0"  # the only place that says so; pyproject.toml reads it here

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
    "make_vec",
    "uninstall",
]

# Imported when they are asked for: a worker needs none of them, and begins the sooner.
_WHERE = {
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


# Public modules, so that `import shmvec` is enough; not `auto`, which acts when it is imported.
_MODULES = {
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


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"shmvec.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_WHERE.get(name, "shmvec.faults")), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
