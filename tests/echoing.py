"""For scripts: an env whose answers say what they answer, and signals at any moment of a call."""

import contextlib
import dis
import os
import random
import signal
import sys
import time

import gymnasium as gym
import numpy as np


class Echo(gym.Env):
    """Observations are (number of the step, action, a number drawn by the seed); never ends."""

    action_space = gym.spaces.Discrete(1_000_000)

    def __init__(self, size=3):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float64)
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._observation(-1), {}

    def step(self, action):
        self.count += 1
        return self._observation(action), float(action), False, False, {"action": action}

    def _observation(self, action):
        observation = np.zeros(self.observation_space.shape)
        observation[:3] = self.count, action, self.np_random.random()
        return observation

    def echo(self, value):
        return value


def drawn(seed):
    """The number in the first observation after a reset with this seed."""
    return gym.utils.seeding.np_random(seed)[0].random()


class Interrupted(Exception):
    """What the handler raises."""


def is_lost(frame):
    """Whether an exception raised in this frame is printed and lost, as in any `__del__`.

    The others are callbacks: of a weak reference, and Hypothesis's of the garbage collector; and
    the standard library's between a file's opening and its `with`, which leaves a ResourceWarning.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("__del__", "remove", "_remove", "gc_callback"):
            return True
        if code.co_name in ("open", "read_text") and "pathlib" in code.co_filename:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def interrupted(after_s):
    """Ctrl-C after a while, and once more where Python would lose it; the block is ended by it."""

    def ctrl_c(number, frame):
        if not is_lost(frame):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ctrl_c)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s, 0.01)
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    raise AssertionError("it was not interrupted")


class Signals:
    """Signals at random moments, whose handler raises."""

    def __init__(self, seed=0):
        self._random = random.Random(seed)
        self._window_s = 0.001
        self._armed = False
        self.num_raised = 0
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, number, frame):
        if self._armed and not is_lost(frame):
            self._armed = False
            self.num_raised += 1
            raise Interrupted

    def after(self, delay_s, call):
        """Makes a call, to be interrupted after so many seconds; returns whether it came first."""
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-6))
            call()
            return True
        except Interrupted:
            return False
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def during(self, call):
        """The same at a random moment of the time that the call takes, or a little later."""
        whole = self.after(self._random.uniform(0, self._window_s), call)
        self._window_s *= 0.95 if whole else 1.02  # which makes three of four come in time
        return whole


_OPCODES_BEFORE_HANDLERS = "RESUME", "CALL", "JUMP_BACKWARD", "JUMP_ABSOLUTE"


class Moments:
    """Moments of a call, one after the other, at which Python may run a signal's handler.

    Then `by` is called: it raises Interrupted, or has a signal come. What it raised is kept if
    `keeps` says so: then the frames that it has left stay as they are, as while it is handled.
    """

    def __init__(self, stride=1, by=None, keeps=False):
        self._by = by
        self._owner = os.getpid()
        self._keeps, self._kept = keeps, None
        self._stride = stride
        self._moment = 0
        self._left = 0

    def interrupt(self, call):
        """Calls it, to be interrupted at the next moment; False: it is over before that."""
        self._left = self._moment
        self._moment += self._stride
        # Python 3.12 traces opcodes only if some frame has asked for them before settrace.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter)
        try:
            call()
        except (Interrupted, KeyboardInterrupt) as error:
            self._kept = error if self._keeps else None
        finally:
            sys.settrace(None)
        return self._left < 0

    def _enter(self, frame, event, arg):
        code, previous = frame.f_code.co_code, ""

        def trace(frame, event, arg):
            nonlocal previous
            if event == "exception":  # what raises it is left at once, without a look
                previous = ""
            elif event == "opcode":
                # It looks for signals where a function begins, after calls, and after jumps back.
                # What ends a discarded generator (CALL_INTRINSIC) would lose what is raised.
                looks = previous.startswith(_OPCODES_BEFORE_HANDLERS)
                if looks and not previous.startswith("CALL_INTRINSIC"):
                    self._left -= 1
                    if self._left < 0 and not is_lost(frame):
                        sys.settrace(None)
                        if os.getpid() != self._owner:
                            return None  # a worker, which was forked
                        if self._by is None:
                            raise Interrupted
                        self._by()
                previous = dis.opname[code[frame.f_lasti]]
            return trace

        # In this order: from 3.13 on, opcodes are traced where there is something to call.
        frame.f_trace = trace
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace


def duration(call, times=20):
    """Seconds that a call takes: the median."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[times // 2]
