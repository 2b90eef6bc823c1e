"""The compiled core: thin, typed Cython over csrc, and the two hot loops.

What Python code uses of it is imported from here. A compiled module is loaded when one of its names
is asked for: a worker needs less than the parent. To mypy they are of any type, but for those on
which types of users' names depend.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

_NAMES = {
    "caller": "Alarms Batch DEAD DONE Frames Guard Ledger Links Loan MESSAGE "
    "OVERDUE RAISED TIME_UP UP exclusive whole",
    "memory": "ACTION_ITEMSIZE ActionCodec ArrayCodec Blocks COUNTERS Codec DictCodec Insight "
    "Lease MappedMemory MessageCodec OtherShapeError Results Seeds Segment TEXT_HEAD TextCodec "
    "TupleCodec release reserve_pages segment_bytes",
    "messages": "Channel copied pickle_value",
    "process": "Descriptor Recorder buffer_c_lines flush_c guard_handler is_unhandled mark_process "
    "opened_pipe reap_marked signal_marked start_watchdog stop_watchdog",
    "worker": "FAULT_POINTS OverlappedLoop WorkerLoop die_at end_forks watch_forks",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)

if find_spec("shmvec._core.memory") is None:  # pragma: no cover - depends on the installation
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
    whole: Callable[[Method], Method]
    release: Callable[[Any], None]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
