"""The compiled core: typed Cython over csrc, a module for each side of a step.

    caller: Ledger -> actions into slabs -> one request a worker into its ring -> bell
    worker: bell -> request -> env.step() -> results into slabs -> one completion into its ring
    caller: Ledger <- completions off the rings; results out of the slabs

- caller: the guard, the ends of all rings, frames of results, infos, the ledger
- worker: the loop of a worker, for envs one after the other or several at once
- memory, messages: what both have; the segment and values in slabs; packed messages and channels
- process: what is done to a process; trace: reads a trace; replay: the log of a replay

Python code imports from here. A module is loaded when one of its names is first used, because a
worker needs fewer modules than the caller. To mypy its names have type Any, except those on which
types of users' code depend.

The core exists on Linux only. ``is_native`` is False elsewhere, and with ``SHMVEC_PURE=1``.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

_NAMES = {
    "caller": "Alarms DEAD DONE Frames Guard Ledger Links Loan MESSAGE "
    "OVERDUE RAISED TIME_UP VectorEnvStub WORKERS_UP exclusive round_trip",
    "memory": "ACTION_ITEMSIZE ActionCodec ArrayCodec Blocks COUNTERS Codec DictCodec Insight "
    "Lease MappedMemory MessageCodec OtherShapeError Results Seeds Segment TEXT_HEAD TextCodec "
    "TupleCodec release reserve_pages segment_bytes",
    "messages": "Channel check_nesting deep_copy open_channel pickle_value",
    "process": "Descriptor Recorder buffer_c_lines flush_c fork guard_handler is_unhandled "
    "mark_process open_pipe reap_marked signal_marked start_watchdog stop_watchdog write_lines",
    "worker": "FAULT_POINTS OverlappedLoop WorkerLoop die_at end_forks watch_forks",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["is_native", "needs_linux", *_MODULES]

if (_pure := os.environ.get("SHMVEC_PURE", "").strip()) not in ("", "0", "1"):
    raise ValueError(f"SHMVEC_PURE={_pure!r} in the environment: it must be 0 or 1")
is_native: bool = sys.platform == "linux" and _pure != "1"

if (
    is_native and find_spec("shmvec._core.memory") is None
):  # pragma: no cover - depends on the installation
    raise ImportError(
        "shmvec's compiled core is missing for this Python. In a source tree build it with "
        "`pip install -e .` or `python setup.py build_ext --inplace`; an installed package "
        "must be reinstalled."
    )

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Method = TypeVar("Method", bound=Callable[..., Any])
    exclusive: Callable[[Method], Method]
    round_trip: Callable[[Method], Method]
    release: Callable[[Any], None]


def needs_linux(what: str) -> str:
    """The message that `what` needs Linux."""
    here = "SHMVEC_PURE=1 is set" if sys.platform == "linux" else f"this is {sys.platform}"
    return (
        f"{what} needs Linux, and {here} (shmvec.is_native is False). ShmVectorEnv, make_vec and "
        "install are Gymnasium's AsyncVectorEnv here; all of shmvec runs in WSL 2 and in Linux "
        "containers"
    )


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_native:
        raise ImportError(needs_linux("this part of shmvec"))
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
