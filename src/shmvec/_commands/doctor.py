"""Test whether this machine lets workers run fast, and say what to change.

It reads cores, quotas, memory, descriptors and threads of libraries, and measures for two seconds
what it costs here to hand work from core to core. Each line is ok, or says what to change and why.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace

from shmvec._commands import measuring
from shmvec._commands.arguments import add_json, report_lines, write_json
from shmvec._commands.machine import Machine, Prices

__all__ = ["SUMMARY", "Finding", "add_arguments", "findings", "main", "report"]

SUMMARY = "test whether this machine lets workers run fast, and what to change"

# Descriptors of the parent: for a vector env, and for each worker (tests/test_doctor.py checks).
_DESCRIPTORS, _DESCRIPTORS_A_WORKER = 16, 6
_TASKS_A_WORKER = 2  # a process and its watchdog's thread
_ROOM_FOR = 64  # workers that limits should allow, or as many as there are cores
_LEAST_MEMORY = 1 << 30
_LEAST_SHM = 256 << 20

_US = 1e-6
# Costs beyond the first value point to a fault of the machine; the text is a healthy one's range.
_MOST_WAKE, _USUAL_WAKE = 160 * _US, "10 to 100 µs"
_MOST_SWITCH, _USUAL_SWITCH = 25 * _US, "3 to 12 µs"
_MOST_CLOCK, _USUAL_CLOCK = 0.2 * _US, "0.02 to 0.06 µs"
_MOST_STOLEN = 0.05
_LEAST_TOGETHER = 0.8


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        topic: The subject.
        found: What is there.
        change: What to change and why; None: it is ok.
    """

    topic: str
    found: str
    change: str | None = None


def findings(machine: Machine, prices: Prices) -> list[Finding]:
    """Judges a machine by what it offers and by its measured costs."""
    found = [
        *([Finding("packages", ", ".join(machine.versions))] if machine.versions else []),
        *_cores(machine),
        *_memory(machine),
        *_limits(machine),
        *_threads(machine),
        *_hand_overs(machine, prices),
    ]
    options = [f"{name}={value}" for name, value in machine.variables.items() if "SHMVEC_" in name]
    if options:
        found.append(Finding("options", f"{', '.join(options)} in the environment"))
    return found


def report(found: Sequence[Finding]) -> str:
    """The findings as text, and how many ask for a change."""
    marks = ["ok    " if finding.change is None else "CHANGE" for finding in found]
    rows = [(mark, *astuple(finding)) for mark, finding in zip(marks, found, strict=True)]
    changes = marks.count("CHANGE")
    end = "Nothing to change." if not changes else f"To change: {changes}."
    return "\n".join([*report_lines(rows), end])


def _cores(machine: Machine) -> Iterator[Finding]:
    allowed = len(machine.cores)
    found = f"{machine.usable} usable: {allowed} of {machine.online} by affinity"
    if machine.quota is not None:
        found += f", {machine.quota:g} by the cgroup's quota"
    for name in ("SLURM_CPUS_PER_TASK", "LOCAL_WORLD_SIZE"):
        if name in machine.variables:
            found += f", {name}={machine.variables[name]}"
    change = None
    if machine.usable == 1 and machine.online > 1:
        change = (
            "this process gets one core, which workers and your program share. Look for what "
            "limits it (taskset, KMP_AFFINITY, docker --cpus, Slurm's --cpus-per-task); where it "
            "must stay so, num_workers=0 saves the processes"
        )
    elif machine.usable == 1:
        change = "with one core nothing runs in parallel: num_workers=0 saves the processes"
    elif machine.quota is not None and machine.quota % 1 and machine.quota < allowed:
        change = (
            "a part of a core in a quota stops all processes for the rest of each period once it "
            "is used up: give whole cores (docker --cpuset-cpus, a whole number of CPUs)"
        )
    yield Finding("cores", found, change)
    if machine.physical < allowed:
        yield Finding(
            "hyperthreads",
            f"{allowed} on {machine.physical} physical cores: they do not add up to as many cores; "
            "python -m shmvec tune finds how many workers pay",
        )
    if machine.nodes > 1:
        yield Finding(
            "NUMA",
            f"cores of {machine.nodes} nodes",
            "memory of another node is slower to reach: bind a training run to one node "
            "(numactl --cpunodebind=0 --membind=0 python train.py), and run one on each",
        )
    if machine.load is not None:
        yield Finding(
            "other programs",
            f"{machine.load:.1f} processes ran at a time in the last minute",
            "they take the cores from workers, and from what is measured below"
            if _is_busy(machine)
            else None,
        )


def _is_busy(machine: Machine) -> bool:
    return (machine.load or 0.0) > max(0.5, 0.5 * len(machine.cores))


def _memory(machine: Machine) -> Iterator[Finding]:
    yield Finding(
        "memory",
        f"{_bytes(machine.memory)} free for this process",
        "each worker is a Python process with your env in it: free some, or raise the container's "
        "limit (docker run --memory=...)"
        if machine.memory < _LEAST_MEMORY
        else None,
    )
    if machine.memfd is None:
        yield Finding(
            "shared memory",
            f"/dev/shm, {_bytes(machine.shm)} free; memfd for a segment that leaves less than half",
        )
    else:
        yield Finding(
            "shared memory",
            f"/dev/shm, {_bytes(machine.shm)} free; no memfd: {machine.memfd}",
            "results and rollouts must fit in there: docker run --shm-size=2g, or let the sandbox "
            "allow memfd_create"
            if machine.shm < _LEAST_SHM
            else None,
        )


def _limits(machine: Machine) -> Iterator[Finding]:
    yield Finding(
        "watching workers",
        "pidfd" if machine.pidfd is None else f"no pidfd: {machine.pidfd}",
        "workers cannot be started without it: Linux 5.3 or newer, and a seccomp filter that "
        "allows pidfd_open (a newer Docker's does); or num_workers=0"
        if machine.pidfd is not None
        else None,
    )
    wanted = max(_ROOM_FOR, machine.usable)
    soft, hard, used = machine.descriptors
    room = max(0, soft - used - _DESCRIPTORS) // _DESCRIPTORS_A_WORKER
    needed = used + _DESCRIPTORS + wanted * _DESCRIPTORS_A_WORKER
    yield Finding(
        "descriptors",
        f"{soft:,}, {used} in use: room for {room:,} workers",
        f"ulimit -n {needed if needed > hard else hard}" + (" (as root)" if needed > hard else "")
        if room < wanted
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
            room = left // _TASKS_A_WORKER
            yield Finding(
                "processes",
                f"{left:,} more by {whose} limit: {room:,} workers",
                change if room < wanted else None,
            )
    yield Finding("start methods", ", ".join(machine.contexts))


def _threads(machine: Machine) -> Iterator[Finding]:
    many = {
        name: value
        for name, value in machine.variables.items()
        if name.endswith(("_NUM_THREADS", "_MAXIMUM_THREADS", "_THREADS_NUM"))
    }
    limits = ", ".join(f"{name}={value}" for name, value in many.items())
    outer = [value.split(",")[0].strip() for value in many.values()]  # without nested regions
    too_many = {value for value in outer if value.isdecimal() and int(value) > 1}
    change = None
    if too_many and machine.usable > 1:
        change = (
            f"workers keep to it, too: {machine.usable} of them run libraries on "
            f"{max(too_many, key=int)} threads each. Unset it; threads_per_worker= is for workers, "
            "torch.set_num_threads for your program"
        )
    elif machine.torch is not None and "OMP_NUM_THREADS" not in many and machine.usable > 1:
        change = (
            f"torch {machine.torch} computes on {machine.physical} threads in your program, which "
            "take the workers' cores: torch.set_num_threads(1) where networks are small "
            "(docs/training.md measures it)"
        )
    yield Finding(
        "library threads",
        limits or "no limit set; workers keep to their share of the cores",
        change,
    )


def _hand_overs(machine: Machine, prices: Prices) -> Iterator[Finding]:
    found = [
        _price(
            "waking another core, twice",
            prices.wake,
            _MOST_WAKE,
            _USUAL_WAKE,
            "idle cores sleep deeply (governor performance; cpupower idle-set -D 20), or a "
            'hypervisor is slow to wake them: with cores to spare, wait_policy="spin" avoids it',
        ),
        _price(
            "switch on one core, twice",
            prices.switch,
            _MOST_SWITCH,
            _USUAL_SWITCH,
            "system calls are slow here (a sandbox such as gVisor, a tracer, an audit rule): run "
            'outside of it, with at most as many workers as cores, or with wait_policy="park"',
        ),
        _price(
            f"clock ({machine.clock or 'unknown'})",
            prices.clock,
            _MOST_CLOCK,
            _USUAL_CLOCK,
            "each look at the clock is a system call: boot with clocksource=tsc where the "
            "processor has a steady one",
        ),
    ]
    cores = min(machine.physical, machine.quota or machine.physical)
    found += [
        Finding(
            "all cores at once",
            f"do {prices.together:.2f} times what one does alone",
            f"there should be {cores:g}: a hypervisor that shares them, a power limit; more "
            "workers than that do not help"
            if prices.together < _LEAST_TOGETHER * cores
            else None,
        ),
        Finding(
            "stolen time",
            f"{100 * prices.stolen:.0f} %",
            "the hypervisor gives these cores to others: a machine with cores of its own"
            if prices.stolen > _MOST_STOLEN
            else None,
        ),
    ]
    for finding in found:
        if finding.change is not None and _is_busy(machine):
            finding = replace(finding, change="repeat this when no other programs run")
        yield finding


def _price(topic: str, seconds: float | None, most: float, usual: str, change: str) -> Finding:
    if seconds is None:
        return Finding(topic, "not measured: there is one core")
    found = f"{1e6 * seconds:.3g} µs (usual: {usual})"
    return Finding(topic, found, change if seconds > most else None)


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


# ---- the command ---------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_json(command, "findings")


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    machine = Machine.read()
    prices = Prices.measured(machine.cores)
    found = findings(machine, prices)
    print(f"{measuring.described(measuring.machine())}\n{report(found)}")
    shown = {
        "machine": asdict(machine),
        "prices": asdict(prices),
        "findings": list(map(asdict, found)),
    }
    write_json(options, shown)
    return 0
