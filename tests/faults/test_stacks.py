"""Stacks of workers, read from outside: where they are, whatever they do, undisturbed."""

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hanging import Hanging
from processes import gone
from tables import deep

from shmvec import EnvTimeoutError, FaultPolicy, ShmVectorEnv
from shmvec.__main__ import main
from shmvec._processes import stacks
from shmvec._processes.stacks import find_offer, find_offers, read_stack

CONTEXTS = ["fork", "spawn", "forkserver"]
LIMIT = 1.0  # what a loaded machine may take for a step that does nothing
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


def until_there(envs, where):
    """Until all workers are there, as their stacks say."""
    until = time.monotonic() + 100
    while not all(where in read_stack(process.pid) for process in envs.processes):
        assert time.monotonic() < until, [read_stack(process.pid) for process in envs.processes]
        time.sleep(0.02)


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


@pytest.fixture
def patient(monkeypatch):
    """A worker may have to wait for a core before it can write its stack."""
    monkeypatch.setattr(stacks, "STACK_TIMEOUT_S", 60)


@pytest.mark.parametrize(
    "context, how",
    [
        ("fork", "in_python"),
        *deep(("fork", "in_c"), ("fork", "asleep"), ("spawn", "in_c"), ("forkserver", "asleep")),
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
        kept = pickle.loads(pickle.dumps(error))
        assert vars(kept) == vars(error) and str(kept) == str(error)
        assert "in hang" in read_stack(envs.processes[1].pid)  # again: it is still there


@pytest.mark.deep
def test_a_worker_that_is_replaced_says_where_it_was(gate, caplog):
    policy = FaultPolicy(on_timeout="restart", step_timeout=LIMIT, backoff_s=0)
    with vector_env(gate, how="asleep", faults=policy) as envs:
        envs.reset(seed=0)
        fault = envs.step([1])[-1]["fault"]
        assert frames(fault["stack"][0])[0][0] == "asleep"
        assert fault["stderr"][0] == "it is in step"
        assert "in asleep" in caplog.text


@pytest.mark.deep
def test_one_that_is_interrupted_says_where_it_was(gate, caplog):
    policy = FaultPolicy(on_timeout="reset", step_timeout=LIMIT)
    with vector_env(gate, how="asleep", faults=policy) as envs:
        envs.reset(seed=0)
        assert envs.step([1])[-1]["fault"]["type"][0] == "EnvTimeoutError"
        (record,) = [record for record in caplog.records if "interrupted" in record.msg]
        assert "in asleep" in record.getMessage()


@pytest.mark.deep
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
        (
            "with_a_handler_of_its_own",
            "(its stack cannot be read: something in the process has it written elsewhere)",
        ),
        ("deaf", "(its stack cannot be read: its main thread blocks the signal)"),
    ],
)
def test_what_cannot_be_read_says_why(how, why, gate):
    with vector_env(gate, how=how, step_timeout=LIMIT) as envs:
        envs.reset(seed=0)
        if how == "stopped":
            envs.step_async([1])
        with pytest.raises(EnvTimeoutError) as raised:
            envs.step_wait() if how == "stopped" else envs.step([1])
        assert raised.value.stack == why
        os.kill(envs.processes[0].pid, 0)  # it lives


def hanging(envs, where):
    """A worker that hangs, as its stack says by these words."""
    envs.reset(seed=0)
    envs.step_async([1] * envs.num_envs)
    pid = envs.processes[0].pid
    until_there(envs, where)
    return pid


@pytest.mark.deep
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["starting_threads", "in_company"])
def test_threads_of_the_env_do_not_matter(how, gate):
    """Some begin and end, or let no signal in, or are more than Python shows."""
    with vector_env(gate, how=how) as envs:
        pid = hanging(envs, f"in {how}")
        for _ in range(100):
            found = read_stack(pid).splitlines()
            assert any(line.endswith(" in step") for line in found), found
            assert not any(line.startswith("Thread ") for line in found), found


@pytest.mark.deep
@pytest.mark.usefixtures("patient")
def test_at_any_moment(gate, capfd):
    """At some Python 3.11's and 3.12's faulthandler crashes, or shows another stack."""
    with vector_env(gate, how="called_by_c") as envs:
        pid = hanging(envs, "in called_by_c")
        for _ in range(300):
            names = [line.rpartition(" ")[2] for line in read_stack(pid).splitlines()]
            assert names[-3:] == ["called_by_c", "hang", "step"], names
        offer = find_offer(pid)
        for _ in range(1000):
            os.kill(pid, offer.number)
        os.kill(pid, signal.SIGABRT)
        assert gone([pid], 60)
        said, until = "", time.monotonic() + 60  # faulthandler tells of it as ever
        while "in step" not in said:
            assert time.monotonic() < until, said
            said += capfd.readouterr().err


@pytest.mark.deep
def test_the_main_thread_is_asked_whichever_gets_the_signal(gate):
    with vector_env(gate, how="half_deaf") as envs:
        pid = hanging(envs, "in half_deaf")
        found = [read_stack(pid) for _ in range(200)]
        read = [each for each in found if "blocks the signal" not in each]  # it had no core
        assert read and all(" in step" in each for each in read), found


@pytest.mark.deep
@pytest.mark.usefixtures("patient")
def test_a_stack_that_is_being_written_for_another_reader_is_read_whole(gate):
    with vector_env(gate) as envs:
        pid = hanging(envs, "in in_python")
        memory = Path(f"/proc/{pid}/fd/{find_offer(pid).descriptor}")
        with memory.open("ab") as file:
            file.write(b"Stack\n  its first half\n")
        assert "its first half" in read_stack(pid)
        assert "its first half" not in read_stack(pid)


@pytest.mark.deep
def test_one_that_has_ended(gate):
    with vector_env(gate) as envs:
        pid = hanging(envs, "in in_python")
        os.kill(pid, signal.SIGKILL)
        assert gone([pid], 60)
        assert read_stack(pid) == "(the process has ended)"


@pytest.mark.deep
def test_a_file_of_the_env_in_the_descriptors_place_is_left_alone(gate, tmp_path, monkeypatch):
    with vector_env(gate) as envs, open(tmp_path / "file", "w+") as file:
        file.write("what the env has written")
        file.flush()
        offer = replace(
            find_offer(envs.processes[0].pid), pid=os.getpid(), descriptor=file.fileno()
        )
        monkeypatch.setattr(stacks, "find_offer", lambda pid: offer)
        assert "it is not shared memory of shmvec's" in read_stack(os.getpid())
        file.seek(0)
        assert file.read() == "what the env has written"


@pytest.mark.deep
def test_a_stranger_prints_them_all(gate):
    with (
        vector_env(gate, 4, how="in_python", num_workers=2) as one,
        vector_env(gate, 1, how="in_c") as other,
    ):
        for envs, where in ((one, "in in_python"), (other, "in in_c")):
            hanging(envs, where)
        command = [sys.executable, "-m", "shmvec", "stacks", str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
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


@pytest.mark.deep
@pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="no namespace can be made",
)
def test_a_container_from_outside(gate, capsys):
    """Processes there have other ids than here."""
    code = f"""
import sys
sys.path.insert(0, {str(FILE.parent)!r})
from hanging import Hanging
from shmvec import ShmVectorEnv
envs = ShmVectorEnv([lambda: Hanging({str(gate)!r})], context="fork")
envs.reset(seed=0)
envs.step_async([1])
print("it hangs", flush=True)
envs.step_wait()
"""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            process.stdout.readline()
            task = f"/proc/{process.pid}/task/{process.pid}/children"
            (pid,) = map(int, Path(task).read_text().split())
            (offer,) = find_offers(pid)
            stack, until = "", time.monotonic() + 60
            while "in step" not in stack:  # it has been asked, and may not have begun
                assert time.monotonic() < until, stack
                assert main(["stacks", str(pid)]) == 0
                head, _, stack = capsys.readouterr().out.partition("\n")
                assert head == f"worker 0 (env 0), process {offer.pid}:"
        finally:
            process.kill()


@pytest.mark.deep
def test_a_program_that_is_stopped(gate, capsys):
    """Nobody reads what the worker writes then, which waits in the middle of that."""
    code = f"""
import sys
sys.path.insert(0, {str(FILE.parent)!r})
from hanging import Hanging
from shmvec import ShmVectorEnv
envs = ShmVectorEnv([lambda: Hanging({str(gate)!r}, how="writing")], context="fork")
envs.reset(seed=0)
envs.step_async([1])
print("it hangs", flush=True)
envs.step_wait()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            seen, until = 0, time.monotonic() + 60
            while seen < 4:
                assert main(["stacks", str(process.pid)]) == 0
                head, innermost, *_ = capsys.readouterr().out.splitlines()
                assert head.startswith("worker 0 (env 0), process ")
                assert time.monotonic() < until, innermost
                # Until the pipe is full, it is now and then on its way to the next write.
                seen = seen + 1 if innermost.endswith(" in writing") else 0
                time.sleep(0.2)
        finally:
            process.kill()


@pytest.mark.deep
def test_one_worker_of_two(gate, capsys):
    with vector_env(gate, 2, num_workers=2) as envs:
        envs.reset(seed=0)
        pid = envs.processes[1].pid
        until_there(envs, "(the main thread runs no Python code of an env's)")
        assert main(["stacks", str(pid)]) == 0
        what = "(the main thread runs no Python code of an env's)"
        out = f"worker 1 (env 1), process {pid}:\n{what}\n\n"
        assert capsys.readouterr().out == out


@pytest.mark.deep
@pytest.mark.parametrize("pid, said", [(2**22 + 1, "There is no process"), (None, "has none")])
def test_processes_that_have_no_workers(pid, said, capsys):
    assert main(["stacks", str(pid or os.getpid())]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.deep
def test_faulthandler_is_left_alone_if_the_user_says_so(gate, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONFAULTHANDLER", "0")
    with vector_env(gate) as envs:
        assert find_offer(envs.processes[0].pid) is None
        assert main(["stacks", str(envs.processes[0].pid)]) == 1
        assert "PYTHONFAULTHANDLER=0" in capsys.readouterr().err


@pytest.mark.deep
@pytest.mark.parametrize(
    "answer, shown",
    [
        (b"\1", "(its stack cannot be read: Python is about to change it, whenever it is read)"),
        (
            b"Stack\n  File\n  <invalid frame>\n",
            "  File\n  (Python does not show what called this)",
        ),
    ],
)
def test_what_python_cannot_walk_through_is_asked_for_again(answer, shown, gate, monkeypatch):
    with vector_env(gate) as envs:
        pid = hanging(envs, "in in_python")
        answers, read = [answer, answer], os.pread
        monkeypatch.setattr(
            os, "pread", lambda *given: answers.pop() + b"\0" if answers else read(*given)
        )
        assert frames(read_stack(pid))[-1][0] == "step" and not answers
        monkeypatch.setattr(os, "pread", lambda *given: answer + b"\0")
        assert read_stack(pid) == shown


@pytest.mark.deep
def test_an_object_that_is_about_to_be_made(gate):
    """Python 3.14 takes what has it made for a frame that it cannot show, as long as it is."""
    with vector_env(gate, how="in_making") as envs:
        stack = read_stack(hanging(envs, "in __init__"))
        assert f'{FILE}", line ' in stack and "invalid" not in stack, stack
        assert stack.endswith((" in step", "(Python does not show what called this)")), stack


@pytest.mark.deep
def test_a_python_that_would_crash_is_not_asked(gate, monkeypatch):
    monkeypatch.setattr(stacks, "CRASHING_VERSION", sys.version_info[:3])
    with vector_env(gate) as envs:
        pid = envs.processes[0].pid
        assert "does not offer it" in read_stack(pid) and find_offer(pid) is None


@pytest.mark.deep
def test_what_a_worker_forks_is_no_worker(gate):
    with vector_env(gate) as envs:
        assert [offer.pid for offer in find_offers(os.getpid())] == [envs.processes[0].pid]


@pytest.mark.deep
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("asked", ["by signals", "by readers"])
def test_a_healthy_worker_loses_nothing(asked):
    """Signals in the midst of each step, or readers that get in each other's way."""
    functions = [partial(gym.make, "CartPole-v1")] * 4
    envs = ShmVectorEnv(functions, num_workers=2, context="fork")
    expected = gym.vector.SyncVectorEnv(functions)
    offers = [find_offer(process.pid) for process in envs.processes]
    ended, found = threading.Event(), []

    def read():
        while not ended.wait(0.005):
            found.extend(read_stack(offer.pid) for offer in offers)

    readers = [threading.Thread(target=read) for _ in range(2)] if asked == "by readers" else []
    for reader in readers:
        reader.start()
    try:
        for each in (envs, expected):
            each.reset(seed=1)
            each.action_space.seed(1)
        for _ in range(300):
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
