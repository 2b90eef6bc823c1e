"""Envs that hang in all ways, and say so on stderr: importable, for workers that are spawned."""

import contextlib
import ctypes
import os
import signal
import sys
import time

import gymnasium as gym
import numpy as np


class Hanging(gym.Env):
    """Hangs where it is told to, until there is a file: in "make", "reset", "step", "close", ..."""

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
