"""Calls out of the middle of a call: a handler of a signal or of log records uses the vector env.

It is refused what would mix with the call that it came in, as AsyncVectorEnv refuses it in its
waits, and that call goes on as if nothing had been.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from envs import Counter
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from tables import deep, first, paired

import shmvec
from shmvec import ShmVectorEnv

DEADLINE_S = 100
SLICE_S = 0.05


class Calling(Counter):
    """In its step it is seen to that a handler runs in the caller, and that it has run."""

    def __init__(self, done, signalled):
        super().__init__(99)
        self.done, self.signalled = done, signalled
        self.caller = os.getpid()
        self.first = True

    def step(self, action):
        if self.first:
            self.first = False
            if self.signalled:
                os.kill(self.caller, signal.SIGUSR1)
            until = time.monotonic() + DEADLINE_S
            while not self.done.exists() and time.monotonic() < until:
                time.sleep(0.001)
        return super().step(action)


class Handler(logging.Handler):
    """Does something at the first record."""

    def __init__(self, run):
        super().__init__()
        self.emit = run


ASKING = {
    "step": lambda envs: envs.step([1] * 2),
    "masked": lambda envs: envs.step([1, None]),
    "step_async": lambda envs: envs.step_async([1] * 2),
    "reset": lambda envs: envs.reset(),
    "call": lambda envs: envs.call("count"),
    "set_attr": lambda envs: envs.set_attr("length", 7),
    "send": lambda envs: envs.send([1] * 2),
    "recv": lambda envs: envs.recv(),
    "rollout": lambda envs: envs.rollout(2),
    "restart": lambda envs: envs.restart([0]),
    "take": lambda envs: envs.exchange.take(),
    "discard": lambda envs: envs.exchange.discard(),
}


@pytest.fixture
def called(tmp_path):
    """Makes a vector env in whose first step a handler does something, once; and its outcome."""
    made, became = [], []
    armed = threading.Event()

    def make(within, how, num_workers):
        done = tmp_path / "done"

        def run(*_):
            if done.exists() or not armed.is_set():
                return  # a busy machine's start and reset may be logged, too
            try:
                became.append(within(made[0]))
            except Exception as error:
                became.append((type(error), str(error)))  # not what its frames hold
            done.touch()

        limit = None
        if how == "log":
            handler, limit = Handler(run), 0.05
            logger = logging.getLogger("shmvec")
            logger.addHandler(handler)
            cleanups.append(partial(logger.removeHandler, handler))
        else:
            before = signal.signal(signal.SIGUSR1, run)
            cleanups.append(partial(signal.signal, signal.SIGUSR1, before))
        inline = how == "signal" and num_workers == 0
        env_fns = [partial(Calling, done, inline), partial(Calling, done, False)]
        envs = ShmVectorEnv(env_fns, num_workers=num_workers, context="fork", hang_warning_s=limit)
        made.append(envs)
        # Of each worker, and not of this process: the envs are built there.
        envs.set_attr("caller", os.getpid())
        envs.reset(seed=1)
        armed.set()
        if how == "signal" and not inline:
            teller = threading.Thread(target=tell, args=(envs.exchange, threading.get_ident()))
            cleanups.append(teller.join)
            teller.start()
        return envs, became

    def tell(exchange, thread):
        """Has the handler run in the step's wait: by itself it might before that, or after."""
        until = time.monotonic() + DEADLINE_S
        while not exchange.num_in_flight and time.monotonic() < until:
            time.sleep(0.001)
        signal.pthread_kill(thread, signal.SIGUSR1)

    cleanups = []
    try:
        yield make
    finally:
        for envs in made:
            envs.close()
        for cleanup in reversed(cleanups):
            cleanup()
        made.clear()


WAYS = [("signal", 2), ("signal", 0), ("log", 2)]


@pytest.mark.parametrize(
    "name, way",
    [*paired(ASKING, WAYS), ("step", ("log", 2))],
)
def test_what_would_mix_with_the_call_is_refused(called, name, way):
    envs, became = called(ASKING[name], *way)
    assert envs.step([1] * 2)[0][:, 0].tolist() == [1, 1]
    ((kind, message),) = became
    assert kind is AlreadyPendingCallError and "handler" in message
    assert envs.step([1] * 2)[0][:, 0].tolist() == [2, 2]
    envs.async_reset()
    assert envs.recv()[0][:, 0].tolist() == [0, 0]


def traced(envs):
    with tempfile.TemporaryDirectory() as folder:
        trace = envs.trace(Path(folder, "run.json"))
        trace.start()
        trace.stop()
        return json.loads(Path(folder, "run.json").read_text())["traceEvents"]


@pytest.mark.parametrize("how, num_workers", first(WAYS))
@pytest.mark.parametrize(
    "looks", [traced, *deep(lambda envs: envs.stats())], ids=["a trace", "stats"]
)
def test_looking_is_not_refused(called, looks, how, num_workers):
    envs, became = called(looks, how, num_workers)
    assert envs.step([1] * 2)[0][:, 0].tolist() == [1, 1]
    assert became[0] and not isinstance(became[0], tuple)
    assert envs.step([1] * 2)[0][:, 0].tolist() == [2, 2]


@pytest.mark.parametrize("how, num_workers", first(WAYS))
def test_it_can_be_closed(called, how, num_workers):
    envs, became = called(lambda envs: envs.close(terminate=True), how, num_workers)
    with pytest.raises(ClosedEnvironmentError):
        envs.step([1] * 2)
    assert became == [None]


class InTwo(ShmVectorEnv):
    """A vector env whose steps are made of step_async and step_wait."""

    def step_async(self, actions):
        super().step_async(actions)


def _rolled(envs):
    rollout = envs.rollout(1)
    try:
        rollout.step([1] * 2)
    except RuntimeError:  # nothing comes between the last results and a rollout's first step
        rollout = envs.rollout(1)
        rollout.step([1] * 2)
    return rollout.observations[1][:, 0].copy().tolist()


def _received(envs):
    try:
        envs.send([1] * 2)
    except ValueError as error:  # the other call has asked them
        raise AlreadyPendingCallError(str(error), "send") from error
    return envs.recv()[0][:, 0].tolist()


CALLS = {
    "recv": _received,
    "step": lambda envs: envs.step([1] * 2)[0][:, 0].tolist(),
    "masked": lambda envs: envs.step([1] * 2, mask=np.ones(2, bool))[0][:, 0].tolist(),
    "rollout": _rolled,
    "call": lambda envs: [count + 1 for count in envs.call("increased")],
}


class Increased(Counter):
    def increased(self):
        self.count += 1
        return self.count - 1


def at_each_line(outer, inner):
    """Makes a call again and again, with another one at its first line, its second, and so on.

    Yields what the call returns, what the other does, "refused", or None if it was not made, and
    how many seconds both took.
    """
    package = os.path.dirname(shmvec.__file__)
    line = at = 0

    def trace(frame, event, _):
        nonlocal line, became
        if not frame.f_code.co_filename.startswith(package):
            return None
        if event == "line":
            line += 1
            if line == at:
                sys.settrace(None)
                try:
                    became = inner()
                except AlreadyPendingCallError:
                    became = "refused"
        return trace

    usual = sys.gettrace()
    while line >= at:  # the last call had as many lines
        at, line, became = at + 1, 0, None
        begin = time.monotonic()
        sys.settrace(trace)
        try:
            result = outer()
        finally:
            sys.settrace(usual)
        yield result, became, time.monotonic() - begin


@pytest.mark.deep
@pytest.mark.parametrize(
    "outer, kind, inner",
    [
        *((outer, ShmVectorEnv, "step") for outer in CALLS),
        ("recv", ShmVectorEnv, "recv"),
        *(("step", kind, inner) for kind in (ShmVectorEnv, InTwo) for inner in ("masked", "call")),
        ("call", InTwo, "step"),
    ],
)
def test_at_any_line_of_a_call_another_is_refused_or_comes_before_or_after_it(outer, kind, inner):
    """A handler runs between any two of Python's instructions; here at the start of each line."""
    with closing(kind([partial(Increased, 10**6)] * 2, num_workers=1)) as envs:
        envs.reset(seed=1)
        count, becames = 0, []
        for result, became, seconds in at_each_line(
            lambda: CALLS[outer](envs), lambda: CALLS[inner](envs)
        ):
            made = [result[0]] if became in (None, "refused") else sorted((result[0], became[0]))
            becames.append(became)
            assert made == list(range(count + 1, count + 1 + len(made))), (becames, result)
            assert result == [result[0]] * 2
            count += len(made)
            if (outer, kind) == ("step", ShmVectorEnv):
                # It has no line of Python between its request and its results, unless these take
                # longer than a slice: then it looks after its workers.
                assert became != "refused" or seconds > SLICE_S, (becames, seconds)
        if (outer, kind) != ("step", ShmVectorEnv):
            assert len(becames) > 10 and "refused" in becames


@pytest.mark.deep
@pytest.mark.parametrize("masked", [False, True])
def test_at_any_line_of_a_reset_what_it_returns_is_of_the_reset(masked):
    options = {"reset_mask": np.array([True, True])} if masked else None
    with closing(ShmVectorEnv([partial(Counter, 10**6)] * 2, num_workers=1)) as envs:
        envs.reset(seed=1)
        lines = 0
        for (observations, _), *_ in at_each_line(
            lambda: envs.reset(options=options), lambda: envs.step([1] * 2)
        ):
            assert observations[:, 0].tolist() == [0, 0]
            assert envs.step([1] * 2)[0][0, 0] in (1, 2)
            lines += 1
        assert lines > 10
