"""Envs for the tests of actorcritic's adapter, and what the tests do with handles."""

import os
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import gymnasium as gym
from envs import Counter

from shmvec import FaultPolicy
from shmvec.adapters.actorcritic import MultiEnv, SubprocessEnv, create_subprocess_envs

DEADLINE_S = 50.0  # what hangs does so for longer
AGAIN = FaultPolicy(on_crash="restart", backoff_s=0)


def counters(n, **options):
    return [partial(Counter, offset=10 * i, **options) for i in range(n)]


def multi_env(env_fns, **options):
    return closing(MultiEnv(create_subprocess_envs(env_fns, **options)))


def started(env_fn, **options):
    env = SubprocessEnv(env_fn, **options)
    env.start()
    env.initialize()
    return closing(env)


def process_of(env):
    return env.group.exchange.processes[env.index]


def kill(env):
    process = process_of(env)
    process.kill()
    process.join()


def wait_for(path):
    until = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.002)


class Together(Counter):
    """Makes a step only when all of its kind are in theirs."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier = barrier

    def step(self, action):
        self.barrier.wait(DEADLINE_S)
        return super().step(action)


class Mortal(Counter):
    """Kills its process in an operation, unless the file is there, which it makes first."""

    def __init__(self, operation, file, render_mode="rgb_array", **options):
        super().__init__(**options)
        self.operation, self.file, self.render_mode = operation, Path(file), render_mode

    def _die(self, operation):
        if operation == self.operation and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, **kwargs):
        if self.resets or self.operation == "reset":
            self._die("reset")
        return super().reset(**kwargs)

    def step(self, action):
        if self.count == 1:
            self._die("step")
        return super().step(action)

    def render(self):
        self._die("render")
        return self.count


class Chatty(Counter):
    """Logs what becomes of it, to a file; takes its time where asked to."""

    def __init__(self, log, close_s=0.0):
        super().__init__()
        self.log, self.close_s = Path(log), close_s

    def step(self, action):
        if action == 3:
            time.sleep(60)
        return super().step(action)

    def close(self):
        time.sleep(self.close_s)
        with self.log.open("a") as log:
            log.write("closed\n")


class Alone:
    """What a MultiEnv of these must return: each env by itself, reset by its next step."""

    def __init__(self, env_fns, seed):
        self.envs = [env_fn() for env_fn in env_fns]
        self.observations = [env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]
        self.over = [False] * len(self.envs)

    def step(self, actions):
        return [self._step(i, action) for i, action in enumerate(actions)]

    def _step(self, i, action):
        if action is None:
            return None, None, None, None
        began = self.envs[i].reset() if self.over[i] else None
        observation, reward, terminated, truncated, info = self.envs[i].step(action)
        info = dict(info)
        if began is not None:
            info["reset_observation"], info["reset_info"] = began
        if truncated:
            info["TimeLimit.truncated"] = not terminated
        self.over[i] = terminated or truncated
        return observation, reward, self.over[i], info


class Twice(gym.Wrapper):
    """Repeats the action, and knows when it was closed."""

    def __init__(self, env):
        super().__init__(env)
        self.closed = 0

    def step(self, action):
        first = self.env.step(action)
        if first[2] or first[3]:
            return first
        second = self.env.step(action)
        return second[0], first[1] + second[1], *second[2:]

    def close(self):
        self.closed += 1
        super().close()
