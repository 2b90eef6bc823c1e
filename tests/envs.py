"""Envs for the tests: importable, so that spawned workers find them."""

import asyncio
import os
import time
from copy import deepcopy

import gymnasium as gym
import numpy as np


class Counter(gym.Env):
    """Counts its steps; every observation, reward and info says which env and step it is."""

    def __init__(self, length=5, offset=0, size=4, infos=True):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float64)
        self.action_space = gym.spaces.Discrete(4)
        self.length = length
        self.offset = offset
        self.infos = infos
        self.resets = 0
        self.received = []

    def _observation(self, action=-1):
        observation = np.zeros(self.observation_space.shape)
        observation[:3] = self.count, action, self.noise
        return observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.resets += 1
        self.noise = self.np_random.random()
        self.received.append(options)
        return self._observation(), {"reset": self.resets} if self.infos else {}

    def step(self, action):
        self.count += 1
        self.noise = self.np_random.random()
        terminated = self.count >= self.length
        info = {"count": self.count, "action": action} if self.infos else {}
        return self._observation(action), self.count + self.offset, terminated, False, info


class Spaces(gym.Env):
    """Samples observations of any space; takes actions of any space and shows them in its info."""

    def __init__(self, observation_space, action_space=None, length=3, seed=0):
        self.observation_space = observation_space
        self.action_space = gym.spaces.Discrete(2) if action_space is None else action_space
        self.length = length
        self.observation_space.seed(seed)
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.count += 1
        self.actions.append(action)
        return self.observation_space.sample(), 1.0, self.count >= self.length, False, {}


class Scripted(gym.Env):
    """Samples observations; episodes of the given lengths, infos as given, one a reset or step."""

    def __init__(self, observation_space, action_space, lengths, infos=({},)):
        self.observation_space = deepcopy(observation_space)
        self.action_space = action_space
        self.lengths = list(lengths)
        self.infos = list(infos)
        self.turn = 0
        self.episode = 0
        self.actions = []

    def _info(self):
        self.turn += 1
        return self.infos[self.turn % len(self.infos)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        self.episode += 1
        return self.observation_space.sample(), self._info()

    def step(self, action):
        self.count += 1
        self.actions.append(action)
        over = self.count >= self.lengths[self.episode % len(self.lengths)]
        terminated = over and self.episode % 2 == 0
        reward = float(self.np_random.random())
        return self.observation_space.sample(), reward, terminated, over != terminated, self._info()


class SameArrays(gym.Env):
    """Returns the same array and info each time, overwritten, perhaps not of its space's dtype."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,))
    action_space = gym.spaces.Discrete(4)

    def __init__(self, length=3, dtype=np.float32):
        self.length = length
        self.observation = np.zeros(2, dtype)
        self.info = {"parts": np.zeros(2)}

    def _fill(self, value):
        self.observation[:] = value
        self.info["parts"][:] = value
        return self.observation, self.info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._fill(-1)

    def step(self, action):
        self.count += 1
        observation, info = self._fill(self.count + action)
        return observation, 1.0, self.count >= self.length, False, info


class Coroutines(gym.Wrapper):
    """The env within, whose reset and step are coroutines."""

    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        return self.env.reset(seed=seed, options=options)

    async def step(self, action):
        await asyncio.sleep(0)
        return self.env.step(action)


class Story(gym.Env):
    """Tells, in every result, which env it is, what it was given and how often it was asked."""

    action_space = gym.spaces.Discrete(1000)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (5,), np.float64)

    def __init__(self, index, turns=0, length=7):
        self.index, self.turns, self.length = index, turns, length
        self.asked = self.episode = self.seed = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seed = seed
        self.count = 0
        self.episode += 1
        return self._observation(-1), {"episode": self.episode, "text": "reset"}

    def step(self, action):
        for _ in range(int(self.np_random.integers(self.turns + 1))):
            pass
        self.asked += 1
        self.count += 1
        over = self.count == self.length + self.index % 3
        info = {"asked": self.asked, "nested": {"x": np.float32(action)}}
        if self.asked % 3 == 0:
            info["text"] = f"{self.index}:{self.asked}"
        if self.asked % 5 == 0:
            info["thing"] = (self.index, self.asked)
        return self._observation(action), float(action), over, self.asked % 11 == 0, info

    def _observation(self, action):
        draw = float(self.np_random.random())
        return np.array([self.index, self.asked, self.seed, action, draw])


def stories(num_envs, turns=0):
    return [lambda i=i: Story(i, turns) for i in range(num_envs)]


class CountEnv(gym.Env):
    """Observes how often it was stepped, in an array that it reuses."""

    action_space = gym.spaces.Discrete(16)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def reset(self, *, seed=None, options=None):
        self.observation = np.zeros(1)
        return self.observation, {}

    def step(self, action):
        self.observation[0] += 1
        return self.observation, 0.0, False, False, {}


class Fails(Story):
    """Raises where its action is 13."""

    def step(self, action):
        if action == 13:
            raise LookupError("thirteen", self.index)
        return super().step(action)


class Nested(Story):
    """The story in a Dict of arrays; actions are a Dict, too."""

    observation_space = gym.spaces.Dict(
        text=gym.spaces.Box(-np.inf, np.inf, (5,), np.float64),
        pair=gym.spaces.Tuple([gym.spaces.Discrete(50), gym.spaces.Box(-1, 1, (2, 2))]),
    )
    action_space = gym.spaces.Dict(
        z=gym.spaces.Discrete(1000), a=gym.spaces.Box(-1, 1, (2,), np.float32)
    )

    def step(self, action):
        return super().step(int(action["z"]))

    def _observation(self, action):
        text = super()._observation(action)
        return {"text": text, "pair": (self.index, np.full((2, 2), text[-1], np.float32))}


class Speaks(Story):
    """Its observations are texts."""

    observation_space = gym.spaces.Text(5)

    def _observation(self, action):
        return "a"


class Words(gym.Space):
    """A space of a class of the user's, which Gymnasium does not know."""

    def __init__(self):
        super().__init__()

    def sample(self, mask=None, probability=None):
        return ("word", self.np_random.integers(10).item())

    def contains(self, x):
        return isinstance(x, tuple)

    def __eq__(self, other):
        return isinstance(other, Words)

    __hash__ = None


class Infos(gym.Env):
    """Returns the infos it is given, one a step."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, infos):
        self.sequence = list(infos)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        info = self.sequence[self.turn % len(self.sequence)]
        self.turn += 1
        return np.zeros(1, np.float32), 0.0, False, False, info


class TwoArguments(Exception):
    """An exception whose constructor does not take what ends up in `args`."""

    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("not me")


class Unreadable(str):
    """Can be pickled, and not unpickled."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise LookupError("cannot be read")


class Gated(Counter):
    """Waits until a file is there: in each step, or in those with one action."""

    def __init__(self, gate, action=None):
        super().__init__(length=999)
        self.gate, self.action = gate, action

    def step(self, action):
        until = time.monotonic() + 60
        while self.action in (None, action) and not self.gate.exists():
            assert time.monotonic() < until
            time.sleep(0.001)
        return super().step(action)


class Failing(Counter):
    """Raises, exits or dies in the given operation, at the given count of steps or resets."""

    def __init__(self, operation, error, at=2):
        super().__init__(length=1000)
        self.operation, self.error, self.at = operation, error, at

    def _fail(self):
        if self.error == "kill":
            os.kill(os.getpid(), 9)
        if self.error == "exit":
            os._exit(3)
        raise self.error

    def reset(self, **kwargs):
        if self.operation == "reset" and self.resets + 1 == self.at:
            self.resets += 1
            self._fail()
        return super().reset(**kwargs)

    def step(self, action):
        if self.operation == "step" and self.count + 1 == self.at:
            self.count += 1
            self._fail()
        return super().step(action)

    def close(self):
        if self.operation == "close":
            self._fail()
