"""Stacks of workers, read from outside: where they are, whatever they do, undisturbed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hanging import Hanging
from processes import dozing

from shmvec import EnvTimeoutError, FaultPolicy, ShmVectorEnv
from shmvec.__main__ import main
from shmvec._shared.stacks import offer_of, offers_of, stack_of

CONTEXTS = ["fork", "spawn", "forkserver"]
LIMIT = 0.3  # what a loaded machine may take for a step that does nothing
FILE = Path(__file__).parent / "hanging.py"
LINES = {number: line.strip() for number, line in enumerate(FILE.read_text().splitlines(), 1)}
IN_LOOPS = {
    "in_python": "pass",
    "in_c": "ctypes.PyDLL(None).usleep(100_000)",
    "asleep": "time.sleep(60)  # a stack that is read does not wake it",
}


@contextlib.contextmanager
def vector_env(gate, count=1, context="fork", where="step", how="in_python", **options):
    functions = [partial(Hanging, str(gate), where, how)] * count
    envs = ShmVectorEnv(functions, context=context, **options)
    try:
        yield envs
    finally:
        gate.touch()
        with contextlib.suppress(ProcessLookupError):
            for process in envs.processes:
                os.kill(process.pid, signal.SIGCONT)
        envs.exchange.close(terminate=True)  # which does not warn that calls are pending


def frames(stack):
    """(Function, line of code) of each frame of a stack, all but exists() in hanging.py."""
    found = []
    for line in stack.splitlines():
        if line.endswith((" in exists", " in __init__", " in __getattr__", " in __getitem__")):
            continue  # what hanging.py calls
        match = re.fullmatch(r'\s+File "(.*)", line (\d+) in (\w+)', line)
        assert match and match[1] == str(FILE), stack
        found.append((match[3], LINES[int(match[2])]))
    return found


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


@pytest.mark.parametrize(
    "context, how",
    [
        ("fork", "in_python"),
        ("fork", "in_c"),
        ("fork", "asleep"),
        ("spawn", "in_c"),
        ("forkserver", "asleep"),
    ],
)
def test_a_time_limit_says_where_the_env_is(context, how, gate):
    with vector_env(gate, 3, context, how=how, num_workers=2, step_timeout=LIMIT) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvTimeoutError) as raised:
            envs.step([0, 0, 1])
        error = raised.value
        (innermost, line), *others = frames(error.stack)
        assert innermost == how and "gate" in line or line in IN_LOOPS[how]
        assert others == [("hang", "getattr(self, self.how)()"), ("step", 'self.hang("step")')]
        assert error.stderr == "it is in step"
        for line in ["The Python stack of its worker", *error.stack.splitlines(), error.stderr]:
            assert line in str(error)
        assert "in hang" in stack_of(envs.processes[1].pid)  # again: it is still there


def test_a_worker_that_is_replaced_says_where_it_was(gate, caplog):
    policy = FaultPolicy(on_timeout="restart", step_timeout=LIMIT, backoff_s=0)
    with vector_env(gate, how="asleep", faults=policy) as envs:
        envs.reset(seed=0)
        fault = envs.step([1])[-1]["fault"]
        assert frames(fault["stack"][0])[0][0] == "asleep"
        assert fault["stderr"][0] == "it is in step"
        assert "in asleep" in caplog.text


def test_one_that_is_interrupted_says_where_it_was(gate, caplog):
    policy = FaultPolicy(on_timeout="reset", step_timeout=LIMIT)
    with vector_env(gate, how="asleep", faults=policy) as envs:
        envs.reset(seed=0)
        assert envs.step([1])[-1]["fault"]["type"][0] == "EnvTimeoutError"
        (record,) = [record for record in caplog.records if "interrupted" in record.msg]
        assert "in asleep" in record.getMessage()


@pytest.mark.parametrize(
    "how, why",
    [
        ("stopped", "(its stack cannot be read: it is stopped, by a signal such as SIGSTOP)"),
        (
            "without_descriptor",
            "(its stack cannot be read: the process does not offer it (any more))",
        ),
        (
            "without_handler",
            "(its stack cannot be read: something in the process has taken its "
            "signal's handler away)",
        ),
    ],
)
def test_what_cannot_be_read_says_why(how, why, gate):
    with vector_env(gate, how=how, step_timeout=LIMIT) as envs:
        envs.reset(seed=0)
        if how == "stopped":
            envs.step_async([1])
            envs.exchange.wait(0.0)
        with pytest.raises(EnvTimeoutError) as raised:
            envs.step_wait() if how == "stopped" else envs.step([1])
        assert raised.value.stack == why
        os.kill(envs.processes[0].pid, 0)  # it lives


def test_a_stranger_prints_them_all(gate):
    with (
        vector_env(gate, 4, how="in_python", num_workers=2) as one,
        vector_env(gate, 1, how="in_c") as other,
    ):
        for envs in (one, other):
            envs.reset(seed=0)
            envs.step_async([1] * envs.num_envs)
        stacks = {}
        until = threading.Event()
        for _ in range(200):
            stacks = {process.pid: stack_of(process.pid) for process in one.processes}
            stacks |= {process.pid: stack_of(process.pid) for process in other.processes}
            if all("in hang" in stack for stack in stacks.values()):
                break
            until.wait(0.02)
        command = [sys.executable, "-m", "shmvec", "stacks", str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stderr
        heads = re.findall(r"^worker \d \(env.*\), process \d+:$", done.stdout, re.M)
        first, second, third = [p.pid for p in [*one.processes, *other.processes]]
        assert sorted(heads) == sorted(
            [
                f"worker 0 (envs 0 to 1), process {first}:",
                f"worker 1 (envs 2 to 3), process {second}:",
                f"worker 0 (env 0), process {third}:",
            ]
        )
        assert done.stdout.count("in step\n") == 3


def test_one_worker_of_two(gate, capsys):
    with vector_env(gate, 2, num_workers=2) as envs:
        envs.reset(seed=0)
        dozing(envs)
        pid = envs.processes[1].pid
        assert main(["stacks", str(pid)]) == 0
        out = f"worker 1 (env 1), process {pid}:\n(it runs no code of an env's)\n\n"
        assert capsys.readouterr().out == out


@pytest.mark.parametrize("pid, said", [(2**22 + 1, "There is no process"), (None, "has none")])
def test_processes_that_have_no_workers(pid, said, capsys):
    assert main(["stacks", str(pid or os.getpid())]) == 1
    assert said in capsys.readouterr().err


def test_faulthandler_is_left_alone_if_the_user_says_so(gate, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONFAULTHANDLER", "0")
    with vector_env(gate) as envs:
        assert offer_of(envs.processes[0].pid) is None
        assert main(["stacks", str(envs.processes[0].pid)]) == 1
        assert "PYTHONFAULTHANDLER=0" in capsys.readouterr().err


def test_what_a_worker_forks_is_no_worker(gate):
    with vector_env(gate) as envs:
        assert [offer.pid for offer in offers_of(os.getpid())] == [envs.processes[0].pid]


@pytest.mark.parametrize("asked", ["by signals", "by readers"])
def test_a_healthy_worker_loses_nothing(asked):
    """Signals in the midst of each step, or readers that get in each other's way."""
    functions = [partial(gym.make, "CartPole-v1")] * 4
    envs = ShmVectorEnv(functions, num_workers=2, context="fork")
    expected = gym.vector.SyncVectorEnv(functions)
    offers = [offer_of(process.pid) for process in envs.processes]
    ended, found = threading.Event(), []

    def read():
        while not ended.wait(0.005):
            found.extend(stack_of(offer.pid) for offer in offers)

    readers = [threading.Thread(target=read) for _ in range(2)] if asked == "by readers" else []
    for reader in readers:
        reader.start()
    try:
        for each in (envs, expected):
            each.reset(seed=1)
            each.action_space.seed(1)
        for _ in range(1000):
            envs.step_async(envs.action_space.sample())
            for offer in () if readers else offers:
                os.kill(offer.pid, offer.number)
            theirs = expected.step(expected.action_space.sample())
            for mine, its in zip(envs.step_wait()[:4], theirs[:4], strict=True):
                np.testing.assert_array_equal(mine, its)
    finally:
        ended.set()
        for reader in readers:
            reader.join()
        envs.close()
        expected.close()
    assert not any(stack.startswith("(its") for stack in found), found
