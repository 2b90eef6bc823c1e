"""Test whether this machine lets workers run fast, and say what to change.

It reads cores, quotas, memory, descriptors and threads of libraries. For two seconds it measures
the cost of handing work from core to core. Each line is ok, or says what to change and why.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from timeit import timeit
from typing import TypeVar

from shmvec._commands import measuring
from shmvec._commands.arguments import add_json_option, report_lines, write_json
from shmvec._cores import (
    allowed_cores,
    cgroup_quota,
    own_cgroups,
    process_ids,
    process_status,
    usable_cores,
)
from shmvec._memory.segment import free_memory, free_shm
from shmvec._processes.libraries import thread_variables
from shmvec._processes.worker_process import reap_child

__all__ = ["SUMMARY", "Finding", "Machine", "Prices", "add_arguments", "findings", "main", "report"]

SUMMARY = "test whether this machine lets workers run fast, and what to change"

# Descriptors that the parent has open for a vector env, and for each worker of it.
_BASE_DESCRIPTORS, _DESCRIPTORS_PER_WORKER = 16, 6
_TASKS_PER_WORKER = 2  # a process and its watchdog's thread
_MIN_WORKERS = 64  # limits should allow so many, and a worker for each core
_MIN_FREE_MEMORY = 1 << 30
_MIN_FREE_SHM = 256 << 20

_US = 1e-6
# Higher costs point to a fault of the machine; the text is the range of healthy machines.
_MAX_WAKE_S, _USUAL_WAKE = 240 * _US, "15 to 150 µs"
_MAX_SWITCH_S, _USUAL_SWITCH = 40 * _US, "5 to 20 µs"
_MAX_CLOCK_S, _USUAL_CLOCK = 0.4 * _US, "0.03 to 0.2 µs"
_MAX_STOLEN = 0.05
_MIN_PARALLEL_SHARE = 0.8

_T = TypeVar("_T")

_SYSTEM = Path("/sys/devices/system")
# Bug reports need their versions.
_PACKAGES = "numpy cloudpickle threadpoolctl mujoco ale-py opencv-python torch ray".split()
_ROUNDS = 6  # each measures every cost once
_MEASURE_S = 0.04
_FORK_S = 0.005  # a fork takes at most so long
_HANG_S = 1.0  # a fork that is later than this hangs
_CLOCK_READINGS = 100_000
_MAX_CORES = 256  # more are not measured at once
_LIMIT_CAPABILITIES = 1 << 21 | 1 << 24  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        topic: The subject.
        found: The observation.
        change: What to change and why; None: it is ok.
    """

    topic: str
    found: str
    change: str | None = None


def findings(machine: Machine, prices: Prices) -> list[Finding]:
    """Judges a machine by its resources and its measured costs."""
    result = [
        *([Finding("packages", ", ".join(machine.versions))] if machine.versions else []),
        *_core_findings(machine),
        *_memory_findings(machine),
        *_limit_findings(machine),
        *_thread_findings(machine),
        *_cost_findings(machine, prices),
    ]
    options = [f"{name}={value}" for name, value in machine.variables.items() if "SHMVEC_" in name]
    if options:
        result.append(Finding("options", f"{', '.join(options)} in the environment"))
    return result


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, and the number of those that ask for a change."""
    marks = ["ok    " if finding.change is None else "CHANGE" for finding in findings]
    rows = [(mark, *astuple(finding)) for mark, finding in zip(marks, findings, strict=True)]
    changes = marks.count("CHANGE")
    end = "Nothing to change." if not changes else f"To change: {changes}."
    return "\n".join([*report_lines(rows), end])


def _core_findings(machine: Machine) -> Iterator[Finding]:
    allowed = len(machine.cores)
    fact = f"{machine.usable} usable: {allowed} of {machine.online} by affinity"
    if machine.quota is not None:
        fact += f", {machine.quota:g} by the cgroup's quota"
    for name in ("SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE"):
        if name in machine.variables:
            fact += f", {name}={machine.variables[name]}"
    change = None
    if machine.usable == 1 and machine.online > 1:
        change = (
            "this process gets one core, which workers and your program share. Look for the limit "
            "(taskset, KMP_AFFINITY, docker --cpus, Slurm's --cpus-per-task); if it must stay, "
            "num_workers=0 saves the processes"
        )
    elif machine.usable == 1:
        change = "with one core nothing runs in parallel: num_workers=0 saves the processes"
    elif machine.quota is not None and machine.quota % 1 and machine.quota < allowed:
        change = (
            "a quota stops all processes for the rest of each period once it is used up: give "
            "whole cores (docker --cpuset-cpus, a whole number of CPUs)"
        )
    yield Finding("cores", fact, change)
    if machine.physical < allowed:
        yield Finding(
            "hyperthreads",
            f"{allowed} on {machine.physical} physical cores, so they are not as fast as {allowed} "
            "cores; python -m shmvec tune finds how many workers are best",
        )
    if machine.nodes > 1:
        yield Finding(
            "NUMA",
            f"cores of {machine.nodes} nodes",
            "memory of another node is slower: bind a training run to one node "
            "(numactl --cpunodebind=0 --membind=0 python train.py), and run one on each",
        )
    if machine.load is not None:
        yield Finding(
            "other programs",
            f"{machine.load:.1f} processes ran at a time in the last minute",
            "they take cores from workers, and from the measurements below"
            if _is_busy(machine)
            else None,
        )


def _is_busy(machine: Machine) -> bool:
    return (machine.load or 0.0) > max(0.5, 0.5 * len(machine.cores))


def _memory_findings(machine: Machine) -> Iterator[Finding]:
    yield Finding(
        "memory",
        f"{_format_bytes(machine.memory)} free for this process",
        "each worker is a Python process with your env in it: free some, or raise the container's "
        "limit (docker run --memory=...)"
        if machine.memory < _MIN_FREE_MEMORY
        else None,
    )
    if machine.memfd is None:
        yield Finding(
            "shared memory",
            f"/dev/shm, {_format_bytes(machine.shm)} free; memfd for a segment that would leave "
            "less than half of it free",
        )
    else:
        yield Finding(
            "shared memory",
            f"/dev/shm, {_format_bytes(machine.shm)} free; no memfd: {machine.memfd}",
            "results and rollouts must fit into it: docker run --shm-size=2g, or let the sandbox "
            "allow memfd_create"
            if machine.shm < _MIN_FREE_SHM
            else None,
        )


def _limit_findings(machine: Machine) -> Iterator[Finding]:
    yield Finding(
        "watching workers",
        "pidfd" if machine.pidfd is None else f"no pidfd: {machine.pidfd}",
        "workers need it: use Linux 5.3 or newer, and a seccomp filter that allows pidfd_open (a "
        "newer Docker's does); or num_workers=0"
        if machine.pidfd is not None
        else None,
    )
    num_workers = max(_MIN_WORKERS, machine.usable)
    soft, hard, used = machine.descriptors
    room = max(0, soft - used - _BASE_DESCRIPTORS) // _DESCRIPTORS_PER_WORKER
    needed = used + _BASE_DESCRIPTORS + num_workers * _DESCRIPTORS_PER_WORKER
    yield Finding(
        "descriptors",
        f"{soft:,}, {used} in use: room for {room:,} workers",
        f"ulimit -n {needed if needed > hard else hard}" + (" (as root)" if needed > hard else "")
        if room < num_workers
        else None,
    )
    for whose, left, change in (
        (
            "the cgroup's",
            machine.processes,
            "docker run --pids-limit=..., or the cgroup's pids.max",
        ),
        ("the user's", machine.user_processes, "ulimit -u, of all that this user runs here"),
    ):
        if left is not None:
            room = left // _TASKS_PER_WORKER
            yield Finding(
                "processes",
                f"{left:,} more by {whose} limit: {room:,} workers",
                change if room < num_workers else None,
            )
    yield Finding("start methods", ", ".join(machine.contexts))


def _thread_findings(machine: Machine) -> Iterator[Finding]:
    limits = {
        name: value
        for name, value in machine.variables.items()
        if name.endswith(("_NUM_THREADS", "_MAXIMUM_THREADS", "_THREADS_NUM"))
    }
    limits_text = ", ".join(f"{name}={value}" for name, value in limits.items())
    # OpenMP's list has a number for each level of nested regions; the first one counts.
    outer_counts = [value.split(",")[0].strip() for value in limits.values()]
    too_many = {value for value in outer_counts if value.isdecimal() and int(value) > 1}
    change = None
    if too_many and machine.usable > 1:
        change = (
            f"workers obey it, too: libraries use {max(too_many, key=int)} threads in each of "
            f"{machine.usable} workers. Unset it, and set threads_per_worker= for workers, and "
            "torch.set_num_threads in your program"
        )
    elif machine.torch is not None and "OMP_NUM_THREADS" not in limits and machine.usable > 1:
        change = (
            f"torch {machine.torch} computes on {machine.physical} threads in your program, which "
            "take the workers' cores: call torch.set_num_threads(1) if networks are small "
            "(docs/training.md has measurements)"
        )
    yield Finding(
        "library threads",
        limits_text or "no limit is set; workers use their share of the cores",
        change,
    )


def _cost_findings(machine: Machine, prices: Prices) -> Iterator[Finding]:
    results = [
        _cost_finding(
            "waking another core, twice",
            prices.wake,
            _MAX_WAKE_S,
            _USUAL_WAKE,
            "idle cores sleep deeply (governor performance; cpupower idle-set -D 20), or a "
            'hypervisor wakes them slowly: with spare cores, wait_policy="spin" avoids it',
        ),
        _cost_finding(
            "switch on one core, twice",
            prices.switch,
            _MAX_SWITCH_S,
            _USUAL_SWITCH,
            "system calls are slow (a sandbox such as gVisor, a tracer, an audit rule): run "
            'outside of it, with at most as many workers as cores, or with wait_policy="park"',
        ),
        _cost_finding(
            f"clock ({machine.clock or 'unknown'})",
            prices.clock,
            _MAX_CLOCK_S,
            _USUAL_CLOCK,
            "each reading of the clock is a system call: boot with clocksource=tsc, if the "
            "processor has a steady one",
        ),
    ]
    cores = min(machine.physical, machine.quota or machine.physical)
    results += [
        Finding(
            "all cores at once",
            f"are {prices.together:.2f} times as fast as one alone",
            f"this should be {cores:g}: look for a hypervisor that shares the cores, or a power "
            "limit; more workers than that do not help"
            if prices.together < _MIN_PARALLEL_SHARE * cores
            else None,
        ),
        Finding(
            "stolen time",
            f"{100 * prices.stolen:.0f} %",
            "the hypervisor gives these cores to others: use a machine with its own cores"
            if prices.stolen > _MAX_STOLEN
            else None,
        ),
    ]
    for finding in results:
        if finding.change is not None and _is_busy(machine):
            finding = replace(finding, change="repeat this when no other programs run")
        yield finding


def _cost_finding(
    topic: str, seconds: float | None, limit: float, usual: str, change: str
) -> Finding:
    if seconds is None:
        return Finding(topic, "not measured: there is one core")
    fact = f"{1e6 * seconds:.3g} µs (usual: {usual})"
    return Finding(topic, fact, change if seconds > limit else None)


def _format_bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


# ---- the machine and its costs -------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """The part of the machine that this process may use. None: the system does not report it.

    Attributes:
        cores: Numbers of the cores that its affinity allows.
        online: Number of cores of the system.
        quota: Cores by the cgroup's quota; None: there is no quota.
        usable: Cores for workers, by affinity, quota, Slurm, Ray and torchrun.
        physical: Number of physical cores of the allowed ones.
        nodes: Number of NUMA nodes of the allowed cores.
        load: Mean number of processes that ran or were ready, in the last minute.
        memory: Free bytes of memory, within the cgroup's limit.
        shm: Free bytes of /dev/shm.
        memfd: The error of making a memfd; None: it works.
        pidfd: The error of opening a pidfd; None: it works.
        descriptors: Soft limit, hard limit, and number of open descriptors of this process.
        processes: Number of processes that the cgroups' limits still allow; None: no limit.
        user_processes: The same by the user's limit (``ulimit -u``).
        contexts: Start methods of multiprocessing.
        variables: Environment variables on threads of libraries, cores, and shmvec's options.
        torch: Version of the installed torch; None: it is not installed.
        clock: The clock's source.
        versions: Names and versions of packages that envs use.
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
        cores = tuple(sorted(allowed_cores()))
        variables = [*thread_variables(1), "SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE"]
        variables += [name for name in sorted(os.environ) if name.startswith("SHMVEC_")]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        installed = {name: _known(partial(metadata.version, name)) for name in _PACKAGES}
        return cls(
            cores=cores,
            online=os.cpu_count() or len(cores),
            quota=cgroup_quota(),
            usable=usable_cores(),
            physical=len({_siblings(core) for core in cores}),
            nodes=max(1, sum(not on.isdisjoint(cores) for on in _numa_nodes())),
            load=_known(lambda: os.getloadavg()[0]),
            memory=free_memory(),
            shm=free_shm(),
            memfd=_error_of(lambda: os.memfd_create("shmvec")),
            pidfd=_error_of(lambda: os.pidfd_open(os.getpid())),
            descriptors=(soft, hard, _known(lambda: len(os.listdir("/proc/self/fd"))) or 0),
            processes=_processes_left(),
            user_processes=_user_processes_left(),
            contexts=tuple(multiprocessing.get_all_start_methods()),
            variables={name: os.environ[name] for name in variables if name in os.environ},
            torch=installed["torch"],
            clock=_read_text(_SYSTEM / "clocksource/clocksource0/current_clocksource"),
            versions=tuple(f"{name} {version}" for name, version in installed.items() if version),
        )


@dataclass(frozen=True)
class Prices:
    """Measured costs of the machine, in seconds unless an attribute says otherwise.

    Attributes:
        wake: A process wakes one on another core, and is woken by it; None: there is one core.
        switch: The same between two processes on one core.
        clock: A reading of the clock.
        together: Speed of all cores at once, in units of one core: less than their number if two
            are hyperthreads of one, or other programs use them.
        stolen: Share of the time that the hypervisor gave to others meanwhile.
    """

    wake: float | None
    switch: float | None
    clock: float
    together: float
    stolen: float

    @classmethod
    def measure(cls, cores: Collection[int]) -> Prices:
        """Measures for about two seconds.

        The best of several values counts, since other programs only make values worse.
        """
        first, *others = sorted(cores)[:_MAX_CORES]
        # Hyperthreads of the first core are used only if there are no others.
        other_cores = [core for core in others if _siblings(core) != _siblings(first)]
        other = next(iter(other_cores or others), None)
        before = _stolen_ticks()
        wakes, switches, clocks = [], [], []
        alone, together = [], []
        for _ in range(_ROUNDS):
            if other is not None:
                wakes.append(_round_trip_s(first, other))
            switches.append(_round_trip_s(first, first))
            alone += _run_on_cores([first], _loop_rate)
            together.append(sum(_run_on_cores([first, *others], _loop_rate)))
            clocks.append(timeit(time.perf_counter, number=_CLOCK_READINGS) / _CLOCK_READINGS)
        after = _stolen_ticks()
        return cls(
            wake=min(filter(None, wakes), default=None),
            switch=min(filter(None, switches), default=None),
            clock=min(clocks),
            together=max(together) / max(alone) if max(alone) > 0 else 0.0,
            stolen=(after[0] - before[0]) / max(1, after[1] - before[1]),
        )


def _run_on_cores(cores: Sequence[int], run: Callable[[int, float], float]) -> list[float]:
    """Calls a function in forks of this process, all at once, each bound to one of these cores.

    Args:
        cores: A core for each fork.
        run: Takes the fork's number, and the time to begin, by ``time.perf_counter``.

    Returns:
        The result of each call; 0 if there is no such core, or it hangs.
    """
    begin = time.perf_counter() + _FORK_S * len(cores)
    forks = []
    for number, core in enumerate(cores):
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads, which these forks do not need
            pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, begin - time.perf_counter() + _HANG_S)
                os.sched_setaffinity(0, {core})
                os.write(writer, repr(run(number, begin)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        forks.append((pid, reader))
    results = []
    for pid, reader in forks:
        with open(reader, encoding="ascii") as pipe:
            results.append(float(pipe.read() or 0))
        reap_child(pid)
    return results


def _round_trip_s(first: int, other: int) -> float:
    """Seconds in which two processes, each on a core, wake each other by pipes; 0: unknown."""
    ping, pong = os.pipe(), os.pipe()

    def run(number: int, begin: float) -> float:
        if number == 1:  # it returns each byte until a zero comes
            while (message := os.read(ping[0], 1)) != b"\0":
                os.write(pong[1], message)
            return 0.0
        time.sleep(max(0.0, begin - time.perf_counter()))
        rounds, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) - begin < _MEASURE_S:
            os.write(ping[1], b"\1")
            os.read(pong[0], 1)
            rounds += 1
        os.write(ping[1], b"\0")
        return (now - begin) / rounds

    try:
        return _run_on_cores([first, other], run)[0]
    finally:
        for descriptor in (*ping, *pong):
            os.close(descriptor)


def _loop_rate(number: int, begin: float) -> float:
    """Iterations of a loop a second."""
    while time.perf_counter() < begin:
        pass
    done, begin = 0, time.perf_counter()
    while (now := time.perf_counter()) - begin < _MEASURE_S:
        for _ in range(100):
            done += 1
    return done / (now - begin)


def _error_of(open_descriptor: Callable[[], int]) -> str | None:
    """Opens a descriptor, and closes it; returns the error, or None."""
    try:
        os.close(open_descriptor())
    except OSError as error:
        return str(error.strerror)
    return None


def _known(read: Callable[[], _T]) -> _T | None:
    """What a function reads; None: the system does not report it."""
    with contextlib.suppress(OSError, metadata.PackageNotFoundError):
        return read()
    return None


def _read_text(path: Path) -> str | None:
    return _known(lambda: path.read_text("utf-8", "replace").strip())


def _parse_cpu_list(text: str) -> Iterator[int]:
    """The numbers of a list of the kernel's, such as ``0-3,8``."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _siblings(core: int) -> frozenset[int]:
    """The hyperthreads of this one's physical core."""
    text = _read_text(_SYSTEM / f"cpu/cpu{core}/topology/thread_siblings_list")
    return frozenset(_parse_cpu_list(text)) if text else frozenset([core])


def _numa_nodes() -> list[set[int]]:
    texts = [_read_text(path) for path in (_SYSTEM / "node").glob("node[0-9]*/cpulist")]
    return [set(_parse_cpu_list(text)) for text in texts if text is not None]


def _processes_left() -> int | None:
    """How many processes and threads the cgroups' limits still allow."""
    left = []
    for folder in own_cgroups("pids"):
        limit, used = _read_text(folder / "pids.max"), _read_text(folder / "pids.current")
        with contextlib.suppress(ValueError):  # no such file, or "max"
            left.append(int(limit or "") - int(used or ""))
    return max(0, min(left)) if left else None


def _user_processes_left() -> int | None:
    """How many processes the user's limit still allows; None: there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    own = _status_fields("self")
    if limit == resource.RLIM_INFINITY or own is None:
        return None
    user = own["Uid"].split()[0]
    if user == "0" or int(own["CapEff"], 16) & _LIMIT_CAPABILITIES:
        return None
    used = sum(
        int(fields["Threads"])
        for fields in map(_status_fields, process_ids())
        if fields is not None and fields["Uid"].split()[0] == user
    )
    return max(0, limit - used)


def _status_fields(pid: int | str) -> dict[str, str] | None:
    """A process's status; None if the process is gone or hidden, or fields are missing."""
    fields = _known(partial(process_status, pid)) or {}
    return fields if {"Uid", "CapEff", "Threads"} <= set(fields) else None


def _stolen_ticks() -> tuple[int, int]:
    """The time that the hypervisor has given to others, and all time, in ticks of all cores."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as lines:
        ticks = [int(number) for number in next(lines).split()[1:9]]
        return ticks[7], sum(ticks)
    return 0, 0


# ---- the command ---------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_json_option(command, "findings")


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    machine = Machine.read()
    prices = Prices.measure(machine.cores)
    results = findings(machine, prices)
    print(f"{measuring.describe_machine(measuring.machine())}\n{report(results)}")
    content = {
        "machine": asdict(machine),
        "prices": asdict(prices),
        "findings": list(map(asdict, results)),
    }
    write_json(options, content)
    return 0
