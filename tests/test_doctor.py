"""The doctor command: a machine that is well is, each ailment is named, nothing is left behind."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import shmvec.__main__
from shmvec import ShmVectorEnv
from shmvec._commands import doctor
from shmvec._commands.doctor import Machine, Prices

WELL = Machine(
    cores=tuple(range(8)),
    online=8,
    quota=None,
    usable=8,
    physical=8,
    nodes=1,
    load=0.2,
    memory=16 << 30,
    shm=64 << 20,  # as Docker gives it
    memfd=None,
    pidfd=None,
    descriptors=(1024, 4096, 10),
    processes=None,
    user_processes=None,
    contexts=("fork", "spawn", "forkserver"),
    variables={},
    torch=None,
    clock="tsc",
)
USUAL = Prices(wake=5e-5, switch=6e-6, clock=2.5e-8, together=7.8, stolen=0.0)


def changes(well=WELL, usual=USUAL):
    return [finding for finding in doctor.findings(well, usual) if finding.change is not None]


def test_a_machine_that_is_well():
    assert changes() == []
    text = doctor.report(doctor.findings(WELL, USUAL))
    assert "CHANGE" not in text and text.endswith("Nothing to change.")


# The topic of a finding, what is said of it, and the machine and its prices where it is made.
AILMENTS = [
    ("cores", "num_workers=0", {"usable": 1, "cores": (3,), "physical": 1}, {"together": 1.0}),
    ("cores", "--cpuset-cpus", {"quota": 1.5, "usable": 2}, {"together": 1.5}),
    (
        "cores",
        "nothing runs in parallel",
        {"usable": 1, "cores": (0,), "online": 1, "physical": 1},
        {"wake": None, "together": 1.0},
    ),
    ("NUMA", "numactl", {"nodes": 2}, {}),
    ("other programs", "take cores", {"load": 7.0}, {}),
    ("memory", "docker run --memory", {"memory": 200 << 20}, {}),
    ("shared memory", "--shm-size", {"memfd": "Function not implemented"}, {}),
    ("watching workers", "num_workers=0", {"pidfd": "Operation not permitted"}, {}),
    ("descriptors", "ulimit -n 4096", {"descriptors": (256, 4096, 10)}, {}),
    ("descriptors", "(as root)", {"descriptors": (256, 256, 10)}, {}),
    ("processes", "--pids-limit", {"processes": 100}, {}),
    ("processes", "ulimit -u", {"processes": 1000, "user_processes": 100}, {}),
    ("library threads", "in each of 8 workers", {"variables": {"OMP_NUM_THREADS": "4"}}, {}),
    ("library threads", "use 4 threads", {"variables": {"OMP_NUM_THREADS": "4, 2"}}, {}),
    ("library threads", "torch.set_num_threads(1)", {"torch": "2.13.0"}, {}),
    ("waking another core, twice", "sleep deeply", {}, {"wake": 4e-4}),
    ("switch on one core, twice", "gVisor", {}, {"switch": 1e-4}),
    ("clock (acpi_pm)", "clocksource=tsc", {"clock": "acpi_pm"}, {"clock": 1e-6}),
    ("all cores at once", "this should be 8", {}, {"together": 4.2}),
    ("stolen time", "hypervisor", {}, {"stolen": 0.2}),
]


def test_ailments_are_named():
    """And nothing else is."""
    for topic, says, facts, prices in AILMENTS:
        found = changes(replace(WELL, **facts), replace(USUAL, **prices))
        assert [finding.topic for finding in found] == [topic]
        assert says in found[0].change
        assert "To change: 1." in doctor.report(found)


@pytest.mark.deep
def test_what_is_no_ailment():
    """Hyperthreads, a whole quota, 64 MB of /dev/shm, one thread a library, given options."""
    threads = {"OMP_NUM_THREADS": "1", "SHMVEC_NUM_WORKERS": "4"}
    found = replace(WELL, physical=4, quota=4.0, usable=4, torch="2.13.0", variables=threads)
    assert changes(found, replace(USUAL, together=4.1)) == []
    text = doctor.report(doctor.findings(found, USUAL))
    assert "4 physical cores" in text and "4 by the cgroup's quota" in text
    assert "SHMVEC_NUM_WORKERS=4 in the environment" in text


def test_the_command(tmp_path, capsys):
    """In a program with threads, as a notebook is."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(60,))
    thread.start()
    try:
        file = tmp_path / "found.json"
        assert shmvec.__main__.main(["doctor", "--json", str(file)]) == 0
    finally:
        done.set()
        thread.join()
    written = json.loads(file.read_text())
    text = capsys.readouterr().out
    assert all(finding["found"] in text for finding in written["findings"])
    assert written["machine"]["cores"] == sorted(os.sched_getaffinity(0))
    assert written["machine"]["usable"] >= 1 and written["prices"]["clock"] > 0
    assert written["prices"]["together"] >= 0  # none where others have all cores
    assert f"numpy {np.__version__}" in written["machine"]["versions"]


UNMEASURED = """
import sys, shmvec.__main__, shmvec._commands.doctor
prices = shmvec._commands.doctor.Prices(*[1e-7] * 3, 8.0, 0.0)
shmvec._commands.doctor.Prices.measure = lambda cores: prices
sys.exit(shmvec.__main__.main(["doctor"]))
"""


def doctor_says(before, **environ):
    """What it says in a process of its own, in which this runs first; prices are given."""
    done = subprocess.run(
        [sys.executable, "-c", before + UNMEASURED],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


@pytest.mark.deep
def test_under_slurm_and_with_few_descriptors():
    """A job of one CPU on a machine of more, which may open 200 files."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
    said = doctor_says(limit, SLURM_CPUS_PER_TASK="1")
    assert "1 usable" in said and "SLURM_CPUS_PER_TASK=1" in said
    assert "200, " in said and "ulimit -n" in said


def room(topic, **facts):
    """How many workers there is room for, as the doctor says."""
    (found,) = [
        each.found for each in doctor.findings(replace(WELL, **facts), USUAL) if each.topic == topic
    ]
    return int(re.search(r"([\d,]+) workers", found)[1])


@pytest.mark.deep
def test_room_for_workers_is_counted_rightly():
    """Descriptors that a vector env takes, and processes and threads, are at most as foretold."""
    before = len(os.listdir("/proc/self/fd"))
    makes = [lambda: gym.make("CartPole-v1")] * 5
    with closing(ShmVectorEnv(makes, num_workers=5)) as envs:
        envs.reset(seed=1)
        opened = len(os.listdir("/proc/self/fd")) - before
        tasks = [len(os.listdir(f"/proc/{process.pid}/task")) for process in envs.processes]
    assert room("descriptors", descriptors=(opened - 1, 4096, 0)) < 5
    assert room("processes", processes=5 * max(tasks) - 1) < 5


@pytest.fixture
def system(monkeypatch):
    """Files of /proc and /sys, by their paths; where none is given, they are the system's own."""
    files, read_text, glob = {}, Path.read_text, Path.glob

    def read(path, *arguments, **named):
        return files[str(path)] if str(path) in files else read_text(path, *arguments, **named)

    def found(path, pattern):
        return [Path(name) for name in files if fnmatch(name, f"{path}/{pattern}")] or glob(
            path, pattern
        )

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(Path, "glob", found)
    return files


@pytest.mark.deep
def test_lists_of_cores(system, monkeypatch):
    """As the kernel writes them: of hyperthreads, and of NUMA nodes, of which one has no cores."""
    for core in (0, 2, 3, 7):
        siblings = "3,7\n" if core in (3, 7) else f"{core}\n"
        system[f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"] = siblings
    for node, cores in (("node0", "0-1,3\n"), ("node1", "4-7\n"), ("node2", "\n")):
        system[f"/sys/devices/system/node/{node}/cpulist"] = cores
    for cores, physical, nodes in (({0, 3}, 2, 1), ({3, 7}, 1, 2), ({0, 2, 3, 7}, 3, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores)
        found = Machine.read()
        assert (found.physical, found.nodes) == (physical, nodes)


@pytest.mark.deep
def test_a_system_that_says_nothing():
    """Neither /proc nor /sys: what is not known is left out."""
    hidden = """
import os
from pathlib import Path

def refuse(*_):
    raise OSError(2, "there is nothing")

was = os.listdir, Path.read_text
os.listdir = lambda path=".": refuse() if str(path).startswith("/proc") else was[0](path)
Path.read_text = lambda path, *a, **k: (
    refuse() if str(path).startswith(("/proc", "/sys")) else was[1](path, *a, **k)
)
os.getloadavg = refuse
"""
    said = doctor_says(hidden)
    assert "usable" in said and "other programs" not in said


@pytest.mark.deep
def test_limits_of_processes(tmp_path, monkeypatch):
    for folder, limit in (("inner", "max"), ("outer", "500")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "pids.max").write_text(f"{limit}\n")
        (tmp_path / folder / "pids.current").write_text("120\n")
    folders = [tmp_path / "inner", tmp_path / "outer", tmp_path / "none"]
    monkeypatch.setattr(doctor, "own_cgroups", lambda controller: folders)
    assert Machine.read().processes == 380
    monkeypatch.setattr(doctor, "own_cgroups", lambda controller: folders[:1])
    assert Machine.read().processes is None
    (tmp_path / "inner" / "pids.max").write_bytes(b"\xff\n")
    assert Machine.read().processes is None


@pytest.mark.deep
@pytest.mark.parametrize(
    "uid, capabilities, limit, left",
    [(7, 0, 100, 95), (7, 0, 1, 0), (7, 0x1FFFFFFFFFF, 100, None), (0, 0, 100, None)],
)
def test_limits_of_what_a_user_runs(uid, capabilities, limit, left, system, monkeypatch):
    """Of all their processes, with the threads; a user who may exceed it has none."""

    def status(uid, threads):
        return (
            f"Name:\tx\nUid:\t{uid}\t7\t7\t7\nCapEff:\t{capabilities:016x}\nThreads:\t{threads}\n"
        )

    monkeypatch.setattr(doctor, "process_ids", lambda: [1, 2, 3, 4])
    system["/proc/self/status"] = status(uid, 2)
    for pid, owner, threads in ((1, 0, 9), (2, 7, 2), (3, 7, 3)):  # and 4 has just ended
        system[f"/proc/{pid}/status"] = status(owner, threads)
    system["/proc/4/status"] = ""
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (limit, 200))
    assert Machine.read().user_processes == left


@pytest.mark.deep
def test_a_core_that_there_is_not():
    """Its fork ends, and the other one gives up in time."""
    prices = Prices.measure([min(os.sched_getaffinity(0)), 10**5])
    assert prices.wake is None and prices.switch > 0
