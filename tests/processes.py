"""Scripts in processes of their own, and what can be seen of processes from outside."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run_script(body: str) -> subprocess.Popen:
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", script + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(*arguments, environ=(), timeout=250, **options):
    """What Python prints with these arguments, which must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **dict(environ)},
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_alone(code):
    """Runs code with these modules in a process of its own, which it may limit."""
    output_of("-c", code, cwd=Path(__file__).parent)


def gone(pids, deadline_s):
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in state(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def send_signal(process, number):
    """Sends it to a worker process, and to no other that has its id by now."""
    signal.pidfd_send_signal(process.sentinel, number)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def num_sleeps(pid):
    """How often a process has gone to sleep so far."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise AssertionError("no such line")


def wait_until_dozing(pids):
    """Until all of them have slept for six slices without waking up."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        before = [(state(pid), num_sleeps(pid)) for pid in pids]
        time.sleep(0.3)
        asleep = all(each == "S" for each, _ in before)  # not only without a core
        if asleep and before == [(state(pid), num_sleeps(pid)) for pid in pids]:
            return
    raise AssertionError("they still wake up")


def wait_until_envs_doze(envs):
    wait_until_dozing([process.pid for process in envs.processes])


def run_benchmark(script, folder, *arguments):
    """Runs one of benchmarks/; returns what it has printed and its JSON."""
    import shmvec  # not for scripts that import this file for other things

    file = folder / "results.json"
    package = {"PYTHONPATH": str(Path(shmvec.__file__).parents[1])}
    arguments = [*arguments, "--json", file]
    said = output_of(BENCHMARKS / script, *arguments, environ=package, cwd=folder)
    return said, json.loads(file.read_text())
