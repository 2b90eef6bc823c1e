"""Counts usable cores, splits envs among workers, and sets how long each side may wait.

csrc/wait.h explains the phases of a wait and why they are safe. Cores and processes are read from
/proc and /sys.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

__all__ = [
    "CGROUP_FILE",
    "CGROUP_ROOT",
    "WAIT_POLICIES",
    "WaitBudgets",
    "allowed_cores",
    "cgroup_quota",
    "current_budgets",
    "descendant_ids",
    "process_identity",
    "own_cgroups",
    "process_ids",
    "split_evenly",
    "process_status",
    "time_on_cores",
    "usable_cores",
    "wait_budgets",
]

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_FILE = Path("/proc/self/cgroup")


# How long a wait may pause, yield, linger and stay awake around its expected end, in ns; see
# csrc/wait.h.
Budget: TypeAlias = tuple[int, int, int, int]

WAIT_POLICIES = ("adaptive", "spin", "park")

_US = 1_000
# Less than the slice of 50 ms after which a waiter checks for signals and the other side. A park
# costs little after so long a wait, and an idle vector env sleeps in any case.
_SPIN_NS = 40_000 * _US
# A worker yields about as long as a parent runs a small network between steps.
_YIELD_NS = 600 * _US


def usable_cores(processes: Iterable[Any] = ()) -> int:
    """The number of cores that this process may use: its affinity, limited by the cgroup's quota.

    It is less where several processes share the cores: at most the CPUs of a Slurm task
    (``SLURM_CPUS_PER_TASK``) and of an actor or task of Ray (``num_cpus``, if it has any), and this
    rank's share of the host's cores if torchrun has started several ranks (``LOCAL_WORLD_SIZE``).

    Args:
        processes: Other processes, whose allowed cores count, too.
    """
    cores = _rank_share(len(allowed_cores(processes)), cgroup_quota())
    limits = _positive_int_in("SLURM_CPUS_PER_TASK"), _ray_cpus()
    return min([cores, *(max(1, math.ceil(limit)) for limit in limits if limit is not None)])


def _rank_share(cores: int, quota: float | None) -> int:
    """This rank's share of the cores that all of torchrun's ranks on the host have."""
    ranks = _positive_int_in("LOCAL_WORLD_SIZE") or 1
    host_cores = cores
    if ranks > 1:
        # Ranks may be bound to cores of their own, or some to the same cores. The process that has
        # started them has the cores of all.
        with suppress(OSError):
            host_cores = max(cores, len(os.sched_getaffinity(os.getppid())))
    share = min(cores, host_cores // ranks)
    if quota is not None:
        share = min(share, math.ceil(quota / ranks))
    return max(1, share)


def _positive_int_in(variable: str) -> int | None:
    """The positive number in an environment variable; None if there is none."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def _ray_cpus() -> float | None:
    """CPUs assigned to this process as an actor or task of Ray; None: it is none, or has none."""
    ray = sys.modules.get("ray")
    # This may fail in many ways: another version of Ray, no connection, a driver, a fork.
    with suppress(Exception):
        if ray is not None and ray.is_initialized():
            cpus = float(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))
            return cpus if cpus > 0 else None
    return None


def allowed_cores(processes: Iterable[Any] = ()) -> set[int]:
    """The cores in the affinity of this process or of one of ``processes``."""
    cores = os.sched_getaffinity(0)
    for process in processes:
        with suppress(OSError):  # it has ended
            cores |= os.sched_getaffinity(process.pid)
    return cores


def cgroup_quota(root: Path = CGROUP_ROOT, membership: Path = CGROUP_FILE) -> float | None:
    """The lowest CPU quota of this process's cgroups, in cores; None without a quota."""
    quotas = []
    for folder in own_cgroups("cpu", root, membership):
        with suppress(OSError, ValueError, ZeroDivisionError):
            limit, period = (folder / "cpu.max").read_text("utf-8").split()
            quotas.append(int(limit) / int(period))
        with suppress(OSError, ValueError, ZeroDivisionError):
            limit = (folder / "cpu.cfs_quota_us").read_text("utf-8")
            period = (folder / "cpu.cfs_period_us").read_text("utf-8")
            quotas.append(int(limit) / int(period))
    # Without a quota v2 has "max" and v1 has -1.
    return min((quota for quota in quotas if quota > 0), default=None)


def time_on_cores(pid: int | None) -> tuple[float | None, float | None]:
    """Seconds that a process's first thread has run, and has waited for a core.

    (None, None) if the system does not report them, or the process is gone.
    """
    with suppress(OSError, ValueError):
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text("utf-8").split()
        return 1e-9 * int(ran), 1e-9 * int(waited)
    return None, None


def split_evenly(num_envs: int, num_workers: int, pinned: bool = False) -> list[range]:
    """The envs of each worker: neighbours, and their numbers differ by one at most.

    With ``pinned``, workers are bound to cores in rotation: then the envs are split evenly among
    the cores, and those of a core among its workers. If there are three workers on two cores, the
    second has a core of its own and gets half of the envs.

    >>> split_evenly(7, 2)
    [range(0, 4), range(4, 7)]
    """
    cores = len(allowed_cores()) if pinned else num_workers
    ends = [0] * num_workers
    for core, share in enumerate(_shares(num_envs, min(cores, num_workers))):
        sharing = range(core, num_workers, cores)
        for worker, count in zip(sharing, _shares(share, len(sharing)), strict=True):
            ends[worker] = count
    ends = list(accumulate(ends))
    return list(map(range, [0, *ends], ends))


def _shares(total: int, parts: int) -> list[int]:
    """Splits a number into parts that differ by one at most."""
    size, remainder = divmod(total, parts)
    return [size + (part < remainder) for part in range(parts)]


@dataclass(frozen=True)
class WaitBudgets:
    """How long each side may wait in each phase.

    Attributes:
        parent: The budget of the parent, which waits for a batch step.
        worker: The budget of a worker, which waits for a request.
        homing: Whether each worker sleeps bound to a core of its own.
        cores: How many workers may linger.
        usable: The number of usable cores.
    """

    parent: Budget
    worker: Budget
    homing: bool
    cores: int = 0
    usable: int = 0


def current_budgets(policy: str, num_workers: int, processes: Iterable[Any]) -> WaitBudgets:
    """Budgets for these workers on the cores that are usable now."""
    cores = usable_cores(processes)
    return replace(wait_budgets(num_workers, cores, policy), usable=cores)


def wait_budgets(num_workers: int, cores: int, policy: str = "adaptive") -> WaitBudgets:
    """Budgets for workers and their parent, by the number of usable cores.

    If each worker and the parent has a core, all may pause, and the parent for long, on a core that
    no worker wants. Workers pause for about the cost of a park, and then yield: while they wait,
    the parent may be computing, with as many threads as there are cores. With as many workers as
    cores, or more, a pause would take a core from a process that has work: all yield instead. With
    more workers than cores, only the last to finish in a batch step yield, as many as there are
    cores; the others park.

    Args:
        num_workers: Number of worker processes.
        cores: Number of usable cores.
        policy: "adaptive", as above; "spin": all pause, for up to 40 ms, even if other processes
            want the core; "park": all sleep at once.
    """
    if policy == "spin":
        return WaitBudgets(parent=(_SPIN_NS, 0, 0, 0), worker=(_SPIN_NS, 0, 0, 0), homing=False)
    if policy == "park":
        return WaitBudgets(parent=(0, 0, 0, 0), worker=(0, 0, 0, 0), homing=False)
    if num_workers > cores:
        return WaitBudgets(
            parent=(0, 50 * _US, 50 * _US, 0),
            worker=(0, 50 * _US, _YIELD_NS, 0),
            homing=False,
            cores=cores,
        )
    pause, linger, window = 50 * _US, 50 * _US, 800 * _US
    if num_workers < cores:
        return WaitBudgets(
            parent=(8 * pause, pause, 0, window), worker=(pause, _YIELD_NS, 0, window), homing=False
        )
    # Not under a quota: then there are more cores than workers, and other programs use the first.
    homing = num_workers == len(allowed_cores())
    return WaitBudgets(
        parent=(0, 50 * _US, linger if num_workers > 1 else 0, window),
        worker=(0, _YIELD_NS, 0, window),
        homing=homing,
    )


def own_cgroups(
    controller: str, root: Path = CGROUP_ROOT, membership: Path = CGROUP_FILE
) -> list[Path]:
    """The folders of this process's cgroups and of all that contain them, of v2 and v1.

    The limits of all of them apply. Not every folder exists: a container usually sees its own
    cgroup as the root, while the file may have the path outside the container.

    Args:
        controller: Which of v1's hierarchies, for example "cpu".
        root: Where the hierarchies are mounted.
        membership: The file that names the process's cgroups.
    """
    cgroups = {root: Path(), root / controller: Path()}  # by hierarchy
    with suppress(OSError):
        for line in membership.read_text("utf-8", "surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            cgroup = Path(path.removeprefix("/"))
            if not controllers:
                cgroups[root] = cgroup
            elif controller in controllers.split(","):
                cgroups[root / controller] = cgroup
    return [top / folder for top, cgroup in cgroups.items() for folder in (cgroup, *cgroup.parents)]


def process_ids() -> Iterator[int]:
    """The ids of all processes."""
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def process_status(pid: int | str) -> dict[str, str]:
    """The fields of /proc/PID/status; a sandbox may lack some of them.

    Raises:
        OSError: The process is gone, or hidden.
    """
    lines = Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines()
    return dict(line.partition(":\t")[::2] for line in lines)


def descendant_ids(pid: int) -> list[int]:
    """The ids of all processes below a process: its children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for each in process_ids():
        with suppress(OSError, IndexError, ValueError):  # it has ended
            stat = Path(f"/proc/{each}/stat").read_text("utf-8", "replace")
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(each)
    descendants: list[int] = []
    generation = [pid]
    while generation:
        generation = [child for each in generation for child in children.pop(each, [])]
        descendants += generation
    return descendants


def process_identity(pid: int) -> tuple[str, int] | None:
    """A process's namespace of ids (its container's), and its id there.

    None if the process is gone, or the system does not report it.
    """
    with suppress(OSError, KeyError):
        inner_id = int(process_status(pid)["NSpid"].split()[-1])
        return os.readlink(f"/proc/{pid}/ns/pid"), inner_id
    return None
