"""Reads what a machine offers to many processes, and measures its costs, for the doctor command."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from shmvec._core.probe import clock_cost, core_rates, core_round_trip
from shmvec._cores import (
    allowed_cores,
    cgroup_quota,
    own_cgroups,
    processes,
    usable_cores,
)
from shmvec._memory.segment import free_memory, free_shm
from shmvec._processes.libraries import thread_variables

__all__ = ["Machine", "Prices"]

_SYSTEM = Path("/sys/devices/system")
# Packages whose versions a report of a fault needs.
_PACKAGES = "numpy", "cloudpickle", "mujoco", "ale-py", "opencv-python", "torch", "ray"
_ROUNDS = 6  # in each, every cost is measured once
_SLICE_S = 0.04
_MOST_CORES = 256  # that are measured at once
_MAY_EXCEED = 1 << 21 | 1 << 24  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE


@dataclass(frozen=True)
class Machine:
    """What this process may use of the machine. None: the system does not report it.

    Attributes:
        cores: Numbers of the cores that its affinity allows.
        online: Number of cores of the system.
        quota: Cores by the cgroup's quota; None: there is no quota.
        usable: Cores for workers, by these and by Slurm, Ray and torchrun.
        physical: Physical cores that the allowed ones belong to.
        nodes: NUMA nodes that have allowed cores.
        load: Processes that ran or were ready to, on average of the last minute.
        memory: Free bytes of memory, within the cgroup's limit.
        shm: Free bytes of /dev/shm.
        memfd: The error of making a memfd; None: it works.
        pidfd: The error of opening a pidfd; None: it works.
        descriptors: Soft limit, hard limit, and number of open descriptors of this process.
        processes: Processes that the cgroups' limits still allow; None: there is no limit.
        user_processes: The same by the user's limit (``ulimit -u``).
        contexts: Start methods of multiprocessing.
        variables: Environment variables about threads of libraries, cores, and shmvec's options.
        torch: Version of the installed torch; None: it is not installed.
        clock: The clock's source.
        versions: Of packages that envs use, with their names.
    """

    cores: tuple[int, ...]
    online: int
    quota: float | None
    usable: int
    physical: int
    nodes: int
    load: float | None
    memory: int
    shm: int
    memfd: str | None
    pidfd: str | None
    descriptors: tuple[int, int, int]
    processes: int | None
    user_processes: int | None
    contexts: tuple[str, ...]
    variables: dict[str, str]
    torch: str | None
    clock: str | None
    versions: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> Machine:
        """Reads the machine."""
        cores = tuple(sorted(allowed_cores()))
        variables = [*thread_variables(1), "SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE"]
        variables += [name for name in sorted(os.environ) if name.startswith("SHMVEC_")]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(
            cores=cores,
            online=os.cpu_count() or len(cores),
            quota=cgroup_quota(),
            usable=usable_cores(),
            physical=len({_siblings(core) for core in cores}),
            nodes=max(1, sum(not on.isdisjoint(cores) for on in _nodes())),
            load=_load(),
            memory=free_memory(),
            shm=free_shm(),
            memfd=_refused(lambda: os.memfd_create("shmvec")),
            pidfd=_refused(lambda: os.pidfd_open(os.getpid())),
            descriptors=(soft, hard, _open_descriptors()),
            processes=_processes_left(),
            user_processes=_user_processes_left(),
            contexts=tuple(multiprocessing.get_all_start_methods()),
            variables={name: os.environ[name] for name in variables if name in os.environ},
            torch=_version("torch"),
            clock=_text(_SYSTEM / "clocksource/clocksource0/current_clocksource"),
            versions=tuple(
                f"{package} {version}"
                for package in _PACKAGES
                if (version := _version(package)) is not None
            ),
        )


@dataclass(frozen=True)
class Prices:
    """Measured costs of the machine, in seconds unless an attribute says otherwise.

    Attributes:
        wake: A process wakes one on another core, and that wakes it; None: there is only one core.
        switch: The same between two processes on one core.
        clock: A reading of the clock.
        together: Work that all cores do at once, in units of one core: less than their number where
            two are hyperthreads of one, or others use them.
        stolen: Share of the time that the hypervisor gave to others meanwhile.
    """

    wake: float | None
    switch: float | None
    clock: float
    together: float
    stolen: float

    @classmethod
    def measured(cls, cores: Collection[int]) -> Prices:
        """Measures for about two seconds.

        The best of several times counts, since other programs only add to it.
        """
        first, *others = sorted(cores)[:_MOST_CORES]
        # Not a hyperthread of the same core, if there is a choice.
        apart = [core for core in others if _siblings(core) != _siblings(first)]
        other = next(iter(apart or others), None)
        before = _stolen()
        wakes, switches, clocks = [], [], []
        alone, together = [], []
        for _ in range(_ROUNDS):
            if other is not None:
                wakes.append(core_round_trip(first, other, _SLICE_S))
            switches.append(core_round_trip(first, first, _SLICE_S))
            alone += core_rates([first], _SLICE_S)
            together.append(sum(core_rates([first, *others], _SLICE_S)))
            clocks.append(clock_cost(_SLICE_S / 4))
        after = _stolen()
        return cls(
            wake=_best(wakes),
            switch=_best(switches),
            clock=min(clocks),
            together=max(together) / max(alone) if max(alone) > 0 else 0.0,
            stolen=(after[0] - before[0]) / max(1, after[1] - before[1]),
        )


def _best(values: list[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _refused(attempt: Callable[[], int]) -> str | None:
    """Opens a descriptor, and closes it; returns the error if that fails, else None."""
    try:
        os.close(attempt())
    except OSError as error:
        return str(error.strerror)
    return None


def _load() -> float | None:
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return None


def _open_descriptors() -> int:
    """Number of open descriptors of this process; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return 0


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace").strip()
    return None


def _members(text: str) -> Iterator[int]:
    """Numbers of a list as the kernel writes it: ``0-3,8``."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _siblings(core: int) -> frozenset[int]:
    """The hyperthreads of the physical core that this one belongs to."""
    text = _text(_SYSTEM / f"cpu/cpu{core}/topology/thread_siblings_list")
    return frozenset(_members(text)) if text else frozenset([core])


def _nodes() -> list[set[int]]:
    """The cores of each NUMA node."""
    texts = [_text(path) for path in (_SYSTEM / "node").glob("node[0-9]*/cpulist")]
    return [set(_members(text)) for text in texts if text is not None]


def _processes_left() -> int | None:
    """How many processes and threads may still be started, by the cgroups' limits."""
    left = []
    for folder in own_cgroups("pids"):
        limit, used = _text(folder / "pids.max"), _text(folder / "pids.current")
        with contextlib.suppress(ValueError):  # no such file, or "max"
            left.append(int(limit or "") - int(used or ""))
    return max(0, min(left)) if left else None


def _user_processes_left() -> int | None:
    """How many processes the user's limit still allows; None: none, as for administrators."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    own = _status("self")
    if limit == resource.RLIM_INFINITY or own is None:
        return None
    user = own["Uid"].split()[0]
    if user == "0" or int(own["CapEff"], 16) & _MAY_EXCEED:
        return None
    each = (_status(str(pid)) for pid in processes())
    used = sum(
        int(status["Threads"])
        for status in each
        if status is not None and status["Uid"].split()[0] == user
    )
    return max(0, limit - used)


def _status(process: str) -> dict[str, str] | None:
    """The fields of /proc/PID/status; None: the process is gone, or hidden."""
    text = _text(Path("/proc") / process / "status")
    status = dict(line.partition(":\t")[::2] for line in (text or "").splitlines())
    return status if {"Uid", "CapEff", "Threads"} <= set(status) else None


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _stolen() -> tuple[int, int]:
    """Time that the hypervisor has given to others, and all time, in ticks of all cores."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as lines:
        ticks = [int(number) for number in next(lines).split()[1:9]]
        return ticks[7], sum(ticks)
    return 0, 0
