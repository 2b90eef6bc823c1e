"""A hang is logged, once, with the stack of the worker; and the wait goes on."""

import logging
import multiprocessing
import threading
import time
from functools import partial

import pytest
from envs import Counter
from hanging import Hanging
from tables import deep

from shmvec import ShmVectorEnv

SOON = 0.1


def is_hang(message):
    """Whether it is of a Hanging env, and not of a machine that is busy with other things."""
    return any(f"in {how}\n" in message for how in ("in_python", "asleep"))


class Opening(logging.Handler):
    """Opens the gate as soon as a hang is logged: whatever waits then comes to its end."""

    def __init__(self, gate):
        super().__init__()
        self.gate, self.logged = gate, []

    def emit(self, record):
        if is_hang(record.getMessage()):
            self.logged.append(record.getMessage())
        self.gate.touch()  # else it was too soon, and each wait is logged once

    def until_logged(self, use):
        """Uses a vector env whose env hangs; once more if it was logged too soon: see is_hang."""
        for soon in (SOON, 10 * SOON, 100 * SOON):
            self.gate.unlink(missing_ok=True)
            use(soon)
            if self.logged:
                return soon
        raise AssertionError("it was not logged")


@pytest.fixture
def gate(tmp_path):
    return tmp_path / "gate"


@pytest.fixture
def opening(gate):
    handler = Opening(gate)
    logging.getLogger("shmvec").addHandler(handler)
    yield handler
    logging.getLogger("shmvec").removeHandler(handler)


def vector_env(gate, where, how="in_python", count=1, soon=SOON, **options):
    functions = [partial(Hanging, str(gate), where, how)] * count
    return ShmVectorEnv(functions, hang_warning_s=soon, context="fork", **options)


def in_reset(envs):
    assert envs.reset(seed=0)[0].tolist() == [[0.0]]


def in_step(envs):
    envs.reset(seed=0)
    assert envs.step([1])[0].tolist() == [[1.0]]


def in_partial_step(envs):
    envs.async_reset(seed=0)
    envs.recv()
    envs.send([1])
    assert envs.recv()[0].tolist() == [[1.0]]


def in_call(envs):
    envs.reset(seed=0)
    assert envs.call("called") == (0.0,)


@pytest.mark.parametrize(
    "use, where, what, function",
    [
        (in_step, "step", "env 0 of worker 0 has been in step() for ", "step"),
        *deep(
            (in_reset, "reset", "env 0 of worker 0 has been in reset() for ", "reset"),
            (in_partial_step, "step", "env 0 of worker 0 has been in step() for ", "step"),
            (in_call, "call", "env 0 of worker 0 has been in call() for ", "called"),
            (None, "make", "worker 0 (env 0) has been building its envs for ", "__init__"),
            (None, "close", "worker 0 (env 0) has been closing its envs for ", "close"),
        ),
    ],
)
def test_wherever_it_hangs(use, where, what, function, gate, opening):
    def once(soon):
        envs = vector_env(gate, where, soon=soon)
        if use is not None:
            use(envs)
        envs.close()

    soon = opening.until_logged(once)
    (message,) = opening.logged
    head, *lines = message.splitlines()
    assert head.startswith(what) and head.endswith(" s.")
    assert lines[0] == "The Python stack of its worker, most recent call first:"
    assert any(line.endswith("in in_python") for line in lines)
    assert any(line.endswith(f"in {function}") and "hanging.py" in line for line in lines)
    assert f"The last lines of its worker on stderr:\n    it is in {where}\n" in message
    assert lines[-1].startswith(f"The wait goes on. hang_warning_s={soon:g} ")


@pytest.mark.deep
def test_it_is_logged_once(gate, caplog):
    def logged():  # a step that is not begun yet is another matter
        return caplog.text.count("env 0 of worker 0 has been in step()")

    envs = vector_env(gate, "step", "asleep")
    envs.reset(seed=0)
    envs.send([1])
    seen = 0
    for _ in range(300):  # until it is logged, and some slices more
        with pytest.raises(multiprocessing.TimeoutError):
            envs.recv(timeout=0.2)
        if seen:
            break
        seen = logged()
    envs.close(terminate=True)
    assert logged() == 1


@pytest.mark.deep
def test_each_hang_is_logged(gate, opening):
    envs = vector_env(gate, "step")
    envs.reset(seed=0)
    for _ in range(100):  # not at each where it is logged too soon
        gate.unlink(missing_ok=True)
        envs.step([1])
        if len(opening.logged) > 1:
            break
    envs.close()
    assert len(opening.logged) == 2


@pytest.mark.deep
def test_those_that_hang_together(gate, caplog):
    envs = vector_env(gate, "step", count=6, num_workers=6)
    envs.reset(seed=0)
    envs.step_async([1, 1, 0, 1, 1, 1])
    text = ""
    wanted = [f"env {env} of worker {env} has been in step()" for env in (0, 1, 3, 4, 5)]
    for _ in range(100):
        with pytest.raises(multiprocessing.TimeoutError):
            envs.exchange.take(timeout=0.3)
        text = " ".join(record.getMessage() for record in caplog.records)
        if all(each in text for each in wanted[:4]) and (wanted[4] in text or "s 5 as" in text):
            break
    else:
        raise AssertionError(text)
    gate.touch()
    envs.step_wait()
    envs.close()


@pytest.mark.deep
@pytest.mark.parametrize("never", [None, 0, 1e12])
def test_not_where_it_is_switched_off(never, gate, caplog):
    envs = ShmVectorEnv([partial(Hanging, str(gate))], hang_warning_s=never, context="fork")
    envs.reset(seed=0)
    envs.step_async([1])
    with pytest.raises(multiprocessing.TimeoutError):
        envs.step_wait(timeout=0.3)
    gate.touch()
    envs.close()
    assert not caplog.records


@pytest.mark.deep
def test_no_workers_do_not_hang(gate, caplog):
    envs = ShmVectorEnv([partial(Hanging, str(gate))], hang_warning_s=SOON, num_workers=0)
    envs.reset(seed=0)
    opener = threading.Timer(3 * SOON, gate.touch)
    opener.start()
    envs.step([1])
    opener.join()
    envs.close()
    assert not caplog.records


@pytest.mark.deep
def test_by_the_environment(gate, opening, monkeypatch):
    def once(soon):
        monkeypatch.setenv("SHMVEC_HANG_WARNING_S", str(soon))
        envs = ShmVectorEnv([partial(Hanging, str(gate))], context="fork")
        in_step(envs)
        envs.close()

    opening.until_logged(once)
    assert len(opening.logged) == 1


@pytest.mark.deep
def test_a_thread_that_runs_on_is_not_called_an_env_that_closes(caplog, tmp_path):
    gate = tmp_path / "gate"

    class Leaving(Counter):
        def close(self):
            threading.Thread(target=self.run_on).start()

        def run_on(self):
            while not gate.exists():
                time.sleep(0.01)

    class Opening(logging.Handler):
        def emit(self, record):
            if "exit hook" in record.getMessage():
                gate.touch()

    envs = ShmVectorEnv([Leaving], num_workers=1, context="fork", hang_warning_s=0.2)
    envs.reset()
    log, opening = logging.getLogger("shmvec"), Opening()
    log.addHandler(opening)
    try:
        envs.close()
    finally:
        log.removeHandler(opening)
        gate.touch()
    said = [record.getMessage() for record in caplog.records if record.name == "shmvec"]
    # On a busy machine all else may take as long as well.
    (text,) = [text for text in said if "a thread or an exit hook" in text]
    assert text.startswith("worker 0 (env 0) has closed its envs, but a thread or an exit hook has")


@pytest.mark.deep
def test_an_env_that_has_closed_late_is_not_called_a_thread_that_runs_on(gate, opening, caplog):
    def once(soon):
        envs = vector_env(gate, "close", soon=soon)
        envs.reset()
        envs.close()

    opening.until_logged(once)
    assert "has been closing its envs" in caplog.text
    assert "exit hook" not in caplog.text
