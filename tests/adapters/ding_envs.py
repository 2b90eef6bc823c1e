"""For the tests of DI-engine's managers: envs that fail on demand, and their managers."""

import multiprocessing
import os
import pickle
import time
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from tables import deep

from shmvec.adapters.ding import (
    AsyncSubprocessEnvManager,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
)

DEADLINE = 60.0
WAIT, RAISE, KILL, HANG, ABNORMAL, UNREADABLE, NO_INFO, UNPICKLABLE, TRUNCATE, END, ARRAY = range(
    10, 21
)  # actions


class NotToBePickled:
    def __reduce__(self):
        raise TypeError("not me")


class OnDemand(Exception):
    """What an env raises on demand, with more arguments than one."""

    def __init__(self, env, where):
        super().__init__(f"env {env} in {where}")
        self.env = env


class Obedient(gym.Env):
    """Observes [index, resets, steps, a draw]; episodes last `length` steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gym.spaces.Discrete(100)
    metadata = {"render_modes": ["rgb_array", "depth_array"], "render_fps": 30}

    def __init__(self, index=0, length=4, gate=None, render_mode=None):
        self.index, self.length, self.gate, self.render_mode = index, length, gate, render_mode
        self.pid = os.getpid()
        self.resets = self.asked = 0
        self.seeds, self.stats = [], []
        self.closed = False
        self._name = f"name{index}"

    def reset(self, *, seed=None, options=None, stat=None):
        assert not self.closed
        super().reset(seed=seed)
        self.resets += 1
        self.seeds.append(seed)
        self.stats.append(stat)
        if stat == "error" or (stat == "error once" and self.stats.count(stat) == 1):
            raise OnDemand(self.index, "reset")
        if stat == "error later" and self.resets == 2:
            raise OnDemand(self.index, "reset")
        if stat == "kill":
            os._exit(5)
        if stat == "kill later" and self.resets > 1:
            os._exit(5)
        if stat == "hang" or (stat == "hang once" and not self._been_there(options)):
            time.sleep(DEADLINE)
        if stat == "gate":
            assert self.gate.wait(DEADLINE)
        self.count = 0
        return self._observe(), {"stat": stat, "options": options}

    def _been_there(self, path):
        """Whether this was asked before, by any process."""
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True
        return False

    def step(self, action):
        assert not self.closed
        self.asked += 1
        self.count += 1
        info = {"count": self.count, "ratio": self.count if self.index % 2 else self.count / 2}
        observation, reward = self._observe(), float(action)
        over, cut = self.count >= self.length, False
        if action == WAIT:
            assert self.gate.wait(DEADLINE)
        elif action == RAISE:
            raise OnDemand(self.index, "step")
        elif action == KILL:
            os._exit(3)
        elif action == HANG:
            time.sleep(DEADLINE)
        elif action == ABNORMAL:
            return None, None, True, False, {"abnormal": True, "why": "on demand"}
        elif action == UNREADABLE:
            observation = np.zeros(7)
        elif action == NO_INFO:
            info = None
        elif action == UNPICKLABLE:
            info = {"x": NotToBePickled()}
        elif action == TRUNCATE:
            over, cut = False, True
        elif action == END:
            over = True
        elif action == ARRAY:
            reward = np.array([1.0, self.index])
        return observation, reward, over, cut, info

    def _observe(self):
        draw = float(self.np_random.random())
        return np.array([self.index, self.resets, getattr(self, "count", 0), draw])

    def render(self):
        return np.full((2, 3, 3), 10 * self.index + self.count, np.uint8)

    def user_defined(self, plus=0):
        return self.index + plus

    def close(self):
        self.closed = True


def obedient(num_envs, **options):
    return [lambda i=i: Obedient(i, **options) for i in range(num_envs)]


class OfDIEngine:
    """An env in DI-engine's own shapes: resets without info, four results, `seed` and replays."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)
    reward_space = gym.spaces.Box(0, 1, (1,), np.float32)

    def __init__(self):
        self.seeded, self.replays, self.count = [], [], 0

    def seed(self, seed, dynamic_seed=True):
        self.seeded.append((seed, dynamic_seed))

    def enable_save_replay(self, replay_path):
        self.replays.append((replay_path, self.count))

    def reset(self):
        self.count = 0
        return np.zeros(2, np.float32)

    def step(self, action):
        self.count += 1
        self.action = action
        done = self.count == 2
        info = {"TimeLimit.truncated": True} if done and action == 2 else {}
        return np.full(2, self.count, np.float32), np.array([0.5], np.float32), done, info

    def close(self):
        pass


class Late(OfDIEngine):
    """One that makes its spaces in its first reset, or says that it has none yet."""

    def __init__(self, says_none):
        super().__init__()
        self.says_none, self.resets, self._spaces = says_none, 0, {}

    def _space(self, name):
        return self._spaces.get(name) if self.says_none else self._spaces[name]

    observation_space = property(lambda self: self._space("observation"))
    action_space = property(lambda self: self._space("action"))
    reward_space = property(lambda self: self._space("reward"))

    def seed(self, seed):
        self.seeded.append((seed,))

    def reset(self):
        self.resets += 1
        for name in ("observation", "action", "reward"):
            self._spaces[name] = getattr(OfDIEngine, f"{name}_space")
        return super().reset()


def _of_gym(name, **attributes):
    """A space with a name and attributes of gym's."""
    return type(name, (), {"__module__": f"gym.spaces.{name.lower()}", **attributes})()


class OfGym(OfDIEngine):
    """One with spaces of gym."""

    observation_space = _of_gym(
        "Dict",
        spaces={
            "seen": _of_gym(
                "Box",
                low=np.full(2, -1, np.float32),
                high=np.full(2, 1, np.float32),
                shape=(2,),
                dtype=np.dtype(np.float32),
            ),
            "bits": _of_gym("MultiBinary", n=2),
        },
    )
    action_space = _of_gym("Discrete", n=3)
    reward_space = _of_gym(
        "Tuple",
        spaces=(_of_gym("MultiDiscrete", nvec=np.array([2, 3]), dtype=np.dtype(np.int64)),),
    )

    def reset(self):
        return self._observe()

    def step(self, action):
        assert isinstance(action, np.ndarray)
        return self._observe(), np.array([0.5], np.float32), False, {}

    def _observe(self):
        return {"seen": np.full(2, 0.5, np.float32), "bits": np.array([1, 0], np.int8)}


class Sampled(gym.Env):
    """Samples its observations; tells in its info what it was given."""

    def __init__(self, index, observation_space, action_space):
        self.observation_space = pickle.loads(pickle.dumps(observation_space))
        self.action_space = action_space
        self.length = 2 + index

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.count += 1
        over = self.count == self.length
        observation = self.observation_space.sample()
        return observation, self.np_random.random(), over, self.count % 5 == 4, {"given": action}


MANAGERS = [AsyncSubprocessEnvManager, SyncSubprocessEnvManager, SubprocessEnvManagerV2]
KINDS = pytest.mark.parametrize("kind", [SyncSubprocessEnvManager, AsyncSubprocessEnvManager])
WORKERS = pytest.mark.parametrize("num_workers", [2, *deep(0)])
KINDS_AND_WORKERS = pytest.mark.parametrize(
    "kind, num_workers",
    [
        (SyncSubprocessEnvManager, 2),
        *deep((SyncSubprocessEnvManager, 0), (AsyncSubprocessEnvManager, 2)),
    ],
)
INFINITE = float("inf")


def manager(kind=SyncSubprocessEnvManager, num_envs=4, env_fns=None, **cfg):
    env_fns = obedient(num_envs) if env_fns is None else env_fns
    return closing(kind(env_fns, cfg))


def gate():
    """What envs wait at, closed."""
    return multiprocessing.get_context("fork").Event()
