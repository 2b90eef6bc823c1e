"""Envs that hang in all ways, and say so on stderr: importable, for workers that are spawned."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time

import gymnasium as gym
import numpy as np


class Made:
    def __init__(self, until):
        while until and not os.path.exists(until):
            pass


class Hanging(gym.Env):
    """Hangs at a given place, until there is a file: in "make", "reset", "step", "close", ..."""

    observation_space = gym.spaces.Box(0, 1000, (1,), np.float64)
    action_space = gym.spaces.Discrete(10)

    def __init__(self, gate, where="step", how="in_python"):
        self.gate, self.where, self.how = gate, where, how
        self.count = 0.0
        self.hang("make")

    def hang(self, where):
        if where == self.where:
            print(f"it is in {where}", file=sys.stderr)
            getattr(self, self.how)()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0.0
        self.hang("reset")
        return np.zeros(1), {}

    def step(self, action):
        if action:
            self.hang("step")
        self.count += 1
        return np.array([self.count]), self.count, False, False, {}

    def called(self):
        self.hang("call")
        return self.count

    def close(self):
        self.hang("close")

    def in_python(self):
        while not os.path.exists(self.gate):
            pass

    def in_c(self):
        """With the GIL."""
        while not os.path.exists(self.gate):
            ctypes.PyDLL(None).usleep(100_000)

    def asleep(self):
        time.sleep(0.01)
        while not os.path.exists(self.gate):
            time.sleep(60)  # a stack that is read does not wake it

    def writing(self):
        while not os.path.exists(self.gate):
            os.write(2, b"x" * 999 + b"\n")

    def called_by_c(self):
        """All the time functions begin and end that C calls."""
        while not os.path.exists(self.gate):
            sorted(range(1000), key=lambda number: -number)

    def in_making(self):
        """An object, at a place of the code where Python knows its class well."""
        for until in [None] * 1000 + [self.gate]:
            Made(until)

    def stopped(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def without_descriptor(self):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                if "shmvec-stacks" in os.readlink(f"/proc/self/fd/{name}"):
                    os.close(int(name))
        self.in_python()

    def without_handler(self):
        for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
            signal.signal(number, signal.SIG_DFL)
        self.in_python()

    def with_a_handler_of_its_own(self):
        self.log = open(os.devnull, "w")
        for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
            faulthandler.register(number, self.log)
        self.in_python()

    def deaf(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
        self.in_python()

    def starting_threads(self):
        """That let no signal in."""

        def wait():
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(0.05)

        while not os.path.exists(self.gate):
            threading.Thread(target=wait).start()
            time.sleep(0.001)

    def in_company(self):
        ended = threading.Event()
        for _ in range(110):
            threading.Thread(target=ended.wait).start()
        while not os.path.exists(self.gate):
            pass
        ended.set()

    def half_deaf(self):
        """Now and then another thread must take the signal."""
        ended = threading.Event()
        threading.Thread(target=ended.wait).start()
        while not os.path.exists(self.gate):
            signal.pthread_sigmask(signal.SIG_BLOCK, range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
        ended.set()
