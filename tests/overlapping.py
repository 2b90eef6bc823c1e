"""Envs that wait, as threads and as coroutines: importable, so that spawned workers find them."""

import asyncio
import os
import signal
import socket
import threading
import time

import gymnasium as gym
import numpy as np
from envs import Counter

DEADLINE = 100.0
HANG, RAISE, DIE = 7, 8, 9  # actions
_entered = []  # the envs of this process that have begun a step with action 1
_meeting = {"build": [], "close": []}  # those that are or were being built, and closed
_lock = threading.Lock()


class Waiter(gym.Env):
    """An env that waits: for another env of its process, for a file, or for nothing.

    Action 1: until two envs of its process are in such a step; 2: until its file is there. The
    observation is (steps of this episode, action, a number drawn by the seed).
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(10)

    def __init__(self, file=None, length=5):
        self.file, self.length = file, length
        self.threads = [threading.get_ident()]
        self.cancelled = self.resets = 0

    def _begin(self, action):
        self.threads.append(threading.get_ident())
        if action == RAISE:
            raise LookupError("as asked")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 1:
            _entered.append(self)
            self.partner = len(_entered) + len(_entered) % 2  # the second of two envs
        self.deadline = time.monotonic() + DEADLINE

    def _waits(self, action):
        assert time.monotonic() < self.deadline
        if action == 1:
            return len(_entered) < self.partner
        if action == 2:
            return not os.path.exists(self.file)
        return action == HANG

    def _end(self, action):
        self.count += 1
        over = self.count >= self.length
        return self._observation(action), float(action), over, False, {"count": self.count}

    def _observation(self, action):
        return np.array([self.count, action, self.np_random.random()])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.threads.append(threading.get_ident())
        self.count = 0
        self.resets += 1
        return self._observation(-1), {"reset": self.resets}

    def step(self, action):
        self._begin(action)
        while self._waits(action):
            time.sleep(0.001)
        return self._end(action)

    def where(self):
        return threading.get_ident()

    def close(self):
        self.threads.append(threading.get_ident())
        if self.file and os.path.isdir(self.file):
            assert len(set(self.threads)) == 1


class AsyncWaiter(Waiter):
    """The same as coroutines."""

    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        self._begin(action)
        try:
            while self._waits(action):
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self._end(action)

    async def where(self):
        await asyncio.sleep(0)
        return threading.get_ident()

    async def close(self):
        await asyncio.sleep(0)
        super().close()


class AsyncCounter(Counter):
    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


class TalksAtItsEnd(AsyncCounter):
    """Waits for a socket in its close()."""

    async def close(self):
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            loop.call_later(0.01, theirs.send, b"x")
            assert await asyncio.wait_for(loop.sock_recv(ours, 1), DEADLINE) == b"x"


class UsesSignals(Counter):
    def step(self, action):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return super().step(action)


class Meets(Counter):
    """Waits for another env of its process as it is built and as it is closed, but for the first.

    Attributes:
        together: How many were built at once so far.
    """

    busy = together = 0

    def __init__(self, file=None, builds="well", closes="well"):
        super().__init__()
        self.file, self.builds, self.closes = file, builds, closes

    @classmethod
    def made(cls, *arguments):
        env = cls(*arguments)
        for _ in env._building():
            time.sleep(0.001)
        return env

    @classmethod
    async def awaited(cls, *arguments):
        env = cls(*arguments)
        for _ in env._building():
            await asyncio.sleep(0.001)
        return env

    def _building(self):
        with _lock:
            Meets.busy += 1
            Meets.together = max(Meets.together, Meets.busy)
        if self.builds == "well":
            yield from self._meet("build")
        elif self.builds == "late":  # after another one has failed
            yield from self._until(lambda: os.path.exists(f"{self.file}-soon"))
            raise LookupError("late")
        elif self.builds == "soon":
            with open(f"{self.file}-soon", "w"):
                raise LookupError("soon")
        else:
            yield from self._until(lambda: False)
        with _lock:
            Meets.busy -= 1

    def _meet(self, what):
        _meeting[what].append(self)
        pairs = len(_meeting[what]) // 2  # behind the first
        yield from self._until(lambda: len(_meeting[what]) > 2 * pairs)

    def _until(self, condition):
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline
            yield

    def together_at_most(self):
        return Meets.together

    def close(self):
        if self.closes == "raise":
            raise LookupError("as it was closed")
        if self.file:
            with open(self.file, "a") as file:
                file.write("closed\n")
        else:
            for _ in self._meet("close"):
                time.sleep(0.001)


class AsyncMeets(Meets):
    async def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=options)

    async def close(self):
        if self.closes == "raise" or self.file:
            super().close()
        else:
            for _ in self._meet("close"):
                await asyncio.sleep(0.001)
