"""Envs whose episodes and faults are known: for evaluations. It imports little: workers do, too."""

import fcntl
import os
import signal
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Walk(gym.Env):
    """Its seed and options say how long an episode lasts, and all numbers depend on the actions."""

    observation_space = Box(-np.inf, np.inf, (3,), np.float64)
    action_space = Discrete(5)

    def __init__(self, die_in=None):
        self.steps_made = self.resets_made = 0
        self.die_in = die_in

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets_made += 1
        self.seed = seed
        self.left = int(self.np_random.integers(1, 12)) + (options or {}).get("more", 0)
        self.state = self.np_random.normal(size=3)
        return self.state.copy(), {"options": options}

    def step(self, action):
        if self.seed == self.die_in and self.left == 3 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps_made += 1
        self.left -= 1
        self.state += self.np_random.normal(size=3) * (1 + action)
        info = {"is_success": bool(self.state[0] > 0), "left": self.left, "word": str(action)}
        return self.state.copy(), float(self.state[1]), self.left <= 0, self.left == 2, info


class Deadly(Walk):
    """Dies once, near the end of the episode of a seed."""

    def __init__(self, mark, die_in):
        super().__init__(die_in)
        self.mark = mark


def act(observations, env_ids):
    return (np.abs(observations[:, 0] * 7).astype(np.int64)) % 5


def one_after_the_other(make, seeds, options=None):
    """What `act` plays, without any vector env."""
    played = []
    env = make()
    for i, seed in enumerate(seeds):
        observation, _ = env.reset(seed=int(seed), options=options[i] if options else None)
        returned, length, over = 0.0, 0, False
        while not over:
            action = act(observation[None], None)[0]
            observation, reward, terminated, truncated, info = env.step(action)
            returned += reward
            length += 1
            over = terminated or truncated
        played.append((returned, length, terminated, info["is_success"], info["left"]))
    env.close()
    return played


def rows(result, *keys):
    return list(
        zip(
            result.returns.tolist(),
            result.lengths.tolist(),
            result.terminated.tolist(),
            *(result.infos[key].tolist() for key in ("is_success", *keys)),
            strict=True,
        )
    )


class Wide(Walk):
    """A walk whose observations have another shape."""

    observation_space = Box(-np.inf, np.inf, (4,), np.float64)

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return np.append(observation, 1.0), info

    def step(self, action):
        observation, *rest = super().step(action)
        return np.append(observation, 1.0), *rest


class Broken(gym.Env):
    """Cannot be built."""

    def __init__(self):
        raise OSError("no assets")


class Dying(Walk):
    """Dies in the episodes of some seeds, as often as there is no mark for it."""

    def __init__(self, folder, seeds, times):
        super().__init__()
        self.folder, self.seeds, self.times = Path(folder), seeds, times

    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def step(self, action):
        if self.seed in self.seeds:
            marks = len(list(self.folder.glob(f"{self.seed}-*")))
            if marks < self.times:
                (self.folder / f"{self.seed}-{marks}").touch()
                self.fail()
        return super().step(action)


class Raising(Dying):
    """Raises instead."""

    def fail(self):
        raise ArithmeticError("lost its balance")


class Hanging(Dying):
    """Hangs instead."""

    def fail(self):
        time.sleep(1000)


def lengthened(more):
    return partial(Longer, more)


class Longer(Walk):
    def __init__(self, more):
        super().__init__()
        self.more = more

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options={"more": self.more, **(options or {})})


class MayDie(Longer):
    """Dies once, with all in its process, if another env is there."""

    made = 0

    def __init__(self, more):
        super().__init__(more)
        MayDie.made += 1

    def reset(self, *, seed=None, options=None):
        self.mark = options["dies"]
        return super().reset(seed=seed)

    def step(self, action):
        if MayDie.made > 1 and self.left == 9 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class SlowToBuild(Walk):
    def __init__(self):
        time.sleep(1000)


class FailsToClose(Walk):
    def close(self):
        raise ValueError("never mind")


class Large(Walk):
    def __init__(self, folder, mib, meet=False):
        """`meet`: its first step waits for another one to run, unless some have met before."""
        super().__init__()
        self.meet = meet
        self.memory = np.ones(mib << 17)
        self.folder = Path(folder)
        (self.folder / str(os.getpid())).touch()

    def step(self, action):
        until = time.monotonic() + 60
        while self.meet and self.running() < 2 and not (self.folder / "met").exists():
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        else:
            (self.folder / "met").touch()
        time.sleep(0.02)
        results = super().step(action)
        results[-1]["running"] = self.running()
        return results

    def running(self):
        return sum(map(self.is_large, os.listdir(self.folder)))

    def is_large(self, pid):
        """Whether a process has the memory of an env: one that ends may be there without it."""
        try:
            pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        except OSError:
            return False
        return int(pages) * os.sysconf("SC_PAGESIZE") > self.memory.nbytes


class Growing(Walk):
    def __init__(self, mib):
        super().__init__()
        self.mib = mib
        self.memory = []

    def step(self, action):
        if self.seed == 2:
            self.memory.append(np.ones(self.mib << 16))
        time.sleep(0.1)
        return super().step(action)


class Slow(Walk):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return super().step(action)


class SlowToClose(Walk):
    def close(self):
        time.sleep(2)


taken = []


def take_alone(folder, name):
    """Takes what only one process can have."""
    taken.append(open(f"{folder}/{name}", "w"))  # noqa: SIM115
    fcntl.flock(taken[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)


class Alone(Slow):
    """Of which there can be only one at a time."""

    def __init__(self, folder, seconds=0.02):
        super().__init__(seconds)
        take_alone(folder, "alone")


class DiesLate(Longer):
    """Dies once, in its first step once there is a file; its episodes are long."""

    def __init__(self, folder):
        super().__init__(60)
        self.folder = Path(folder)

    def step(self, action):
        if (self.folder / "late").exists():
            try:
                (self.folder / "died").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
