"""shmvec: step ordinary Gymnasium environments in parallel, through shared memory.

``ShmVectorEnv`` takes the place of ``gymnasium.vector.AsyncVectorEnv``; ``make_vec`` that of
``gymnasium.make_vec``. ``install`` puts the former in that place for code that cannot be changed.
"""

from shmvec._ways_in.install import install, uninstall
from shmvec._ways_in.make_vec import make_vec
from shmvec.faults import (
    EnvTimeoutError,
    FaultPolicy,
    RemoteTraceback,
    TooManyFaultsError,
    WorkerCrashError,
)
from shmvec.vector_env import ShmVectorEnv

__version__ = "0.1.0"

__all__ = [
    "EnvTimeoutError",
    "FaultPolicy",
    "RemoteTraceback",
    "ShmVectorEnv",
    "TooManyFaultsError",
    "WorkerCrashError",
    "__version__",
    "install",
    "make_vec",
    "uninstall",
]
