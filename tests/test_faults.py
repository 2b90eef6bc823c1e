"""What happens when processes die or waits are interrupted, on either side."""

import contextlib
import dataclasses
import logging
import multiprocessing
import os
import signal
import threading
from functools import partial

import numpy as np
import pytest
from envs import Counter, Failing
from processes import gone, run_script, wait_until_envs_doze
from tables import paired

from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError

DEADLINE_S = 60


def make_counter():
    return Counter(99)


class EndsIt:
    """Ends the process in which it is pickled."""

    def __reduce__(self):
        os._exit(3)


@pytest.mark.deep
def test_a_worker_that_ends_instead_of_saying_what_an_env_raised():
    make = [lambda: Failing("step", ValueError(EndsIt()), at=1)] * 2
    envs = ShmVectorEnv(make, num_workers=1, context="fork")
    envs.reset()
    with pytest.raises(WorkerCrashError, match="exit code 3"):
        envs.step([0, 0])


@pytest.mark.deep
def test_a_worker_that_dies_as_its_envs_close_is_logged(caplog):
    class Dies(Counter):
        def close(self):
            os.write(2, b"the licence server is gone\n")
            os._exit(3)

    envs = ShmVectorEnv([make_counter, make_counter, Dies, Dies], num_workers=2)
    envs.reset()
    with caplog.at_level(logging.WARNING, "shmvec"):
        envs.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("before all envs were closed: worker 1 (envs 2 to 3) exit code 3"), line
    assert "the licence server is gone" in line


def test_an_exception_in_close_names_its_env():
    failing = partial(Failing, "close", ValueError("late"))
    envs = ShmVectorEnv([make_counter, failing], num_workers=1)
    envs.reset()
    with pytest.raises(ValueError, match="late") as raised:
        envs.close()
    assert "In close() of env 1, worker 0" in str(raised.value.__cause__)


def test_close_kills_a_worker_that_ignores_sigterm():
    class Deaf(Counter):
        def step(self, action):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Event().wait()

    envs = ShmVectorEnv([Deaf], num_workers=1)
    envs.reset()
    processes = envs.processes
    envs.exchange.ask(None, [0])
    envs.close(timeout=0.2)
    assert processes[0].exitcode in (-signal.SIGKILL, -signal.SIGTERM)


class Interrupted(Counter):
    """Ctrl-C comes in the middle of an operation, once it is named."""

    operation = None

    def _interrupt(self, operation):
        if self.operation == operation:
            self.operation = None
            signal.raise_signal(signal.SIGINT)

    def reset(self, **arguments):
        self._interrupt("reset")
        return super().reset(**arguments)

    def step(self, action):
        self._interrupt("step")
        return super().step(action)


CALLS = {
    "step": lambda envs: envs.step([1, 1]),
    "step of some": lambda envs: envs.step([1, 1], mask=np.array([True, False])),
    "recv": lambda envs: (envs.send([1, 1]), envs.recv()),
    "reset": lambda envs: envs.reset(seed=1),
}


@pytest.mark.deep
@pytest.mark.parametrize("what, on_error", paired(CALLS, ["reset", "restart"]))
def test_ctrl_c_in_an_env_in_this_process_is_not_mended(what, on_error):
    policy = FaultPolicy(on_error=on_error, backoff_s=0)
    envs = ShmVectorEnv([Interrupted] * 2, num_workers=0, faults=policy)
    try:
        envs.reset(seed=0)
        envs.set_attr("operation", "reset" if what == "reset" else "step", env_id=[0])
        with pytest.raises(KeyboardInterrupt):
            CALLS[what](envs)
        assert not any(dataclasses.astuple(envs.stats().faults))
    finally:
        envs.close(terminate=True)


class Interrupting(Failing):
    """Interrupts the program, and fails once that has left the call."""

    def _fail(self):
        os.kill(os.getppid(), signal.SIGINT)
        assert gate.wait(DEADLINE_S)
        super()._fail()


gate = multiprocessing.get_context("fork").Event()


@pytest.mark.deep
@pytest.mark.parametrize("fault", [SystemExit(5), "kill"])
def test_what_an_interrupted_step_raised_is_dropped_but_a_death_is_not(fault):
    gate.clear()
    make = [lambda: Interrupting("step", fault, at=1), make_counter]
    envs = ShmVectorEnv(make, num_workers=2, context="fork")
    try:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            envs.step([0, 0])
        gate.set()
        if fault == "kill":
            with pytest.raises(WorkerCrashError):
                envs.reset()
        else:
            assert envs.reset(seed=2)[0][:, 0].tolist() == [0, 0]
    finally:
        gate.set()
        envs.close()


@pytest.mark.deep
def test_ctrl_c_ends_a_script_without_a_word_from_the_workers():
    parent = run_script("""
        from envs import Counter
        import shmvec
        if __name__ == "__main__":
            envs = shmvec.ShmVectorEnv([Counter] * 3, num_workers=3)
            envs.reset()
            try:
                print(*[process.pid for process in envs.processes], flush=True)
                while True:
                    envs.step([0, 0, 0])
            except KeyboardInterrupt:
                envs.close()
                print("closed", flush=True)
    """)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    for pid in [*pids, parent.pid]:  # a terminal sends it to the whole group
        os.kill(pid, signal.SIGINT)
    out, err = parent.communicate(timeout=DEADLINE_S)
    assert (out, err) == ("closed\n", "")
    assert gone(pids, deadline_s=DEADLINE_S)


@pytest.mark.deep
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_an_env_that_is_open_at_exit(context):
    parent = run_script(f"""
        from envs import Counter
        import shmvec
        if __name__ == "__main__":
            envs = shmvec.ShmVectorEnv([Counter] * 2, num_workers=2, context={context!r})
            envs.reset()
            print(*[process.pid for process in envs.processes], flush=True)
    """)
    out, err = parent.communicate(timeout=DEADLINE_S)
    assert err == "" and parent.returncode == 0
    assert gone([int(pid) for pid in out.split()], deadline_s=DEADLINE_S)


def test_a_fork_of_the_parent_cannot_use_it():
    envs = ShmVectorEnv([make_counter] * 2, num_workers=2)
    try:
        envs.reset()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = b"nothing"
            try:
                envs.step([0, 0])
            except BaseException as error:
                said = str(error).encode()
            os.write(write, said)
            del envs
            os._exit(0)
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0
        with os.fdopen(read) as reader:
            assert f"belongs to process {os.getpid()}" in reader.read()
        assert envs.step([0, 0])[0][:, 0].tolist() == [1, 1]  # and its workers are still there
    finally:
        envs.close()


@pytest.mark.deep
def test_ctrl_c_as_those_who_doze_are_roused(monkeypatch):
    """The bell has rung, and an env that was replaced is to be answered for."""
    policy = FaultPolicy(on_crash="restart", backoff_s=0)
    envs = ShmVectorEnv([make_counter] * 2, num_workers=2, faults=policy)
    try:
        envs.reset()
        envs.restart([0])
        wait_until_envs_doze(envs)
        with monkeypatch.context() as patch:
            patch.setattr(os, "eventfd_write", lambda *_: signal.raise_signal(signal.SIGINT))
            with contextlib.suppress(KeyboardInterrupt):
                envs.step([0, 0])
        envs.reset()
        assert envs.step([0, 0])[0][:, 0].tolist() == [1, 1]
    finally:
        envs.close()


class Interrupts:
    """Interrupts the program when it is pickled, which is once for all workers."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGINT)
        return int, ()


@pytest.mark.deep
@pytest.mark.parametrize("what", ["reset", "set_attr"])
def test_ctrl_c_before_a_message_is_sent(what):
    envs = ShmVectorEnv([make_counter] * 2, num_workers=2)
    try:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            if what == "reset":
                envs.reset(seed=3, options={"mark": Interrupts()})
            else:
                envs.set_attr("mark", Interrupts())
        assert envs.reset(seed=4)[0][:, 0].tolist() == [0, 0]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        envs.close()
