"""Envs that run alone, and of which each fails in its own way beside others; one that is well."""

import os
import random
import signal
import socket
import tempfile
import threading
import time
import zlib
from itertools import count
from pathlib import Path
from queue import Queue

import gymnasium as gym
import numpy as np

SHARED = Path(tempfile.gettempdir())  # a test gives each check a folder of its own
KNOWN_TO_THE_PROGRAM = None  # a test sets it


class Well(gym.Env):
    """A walk on a line, of 20 steps; a subclass is sick in one place."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float64)
    action_space = gym.spaces.Discrete(3)
    render_mode = "rgb_array"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = self.noise(), 0
        return self.observation(), self.info()

    def step(self, action):
        self.at += float(action) - 1 + self.noise()
        self.steps += 1
        return self.observation(), self.at, self.steps == 20, False, self.info()

    def noise(self):
        return float(self.np_random.random())

    def observation(self):
        return np.array([self.at, self.steps, 0.0])

    def info(self):
        return {"at": self.at}

    def render(self):
        return np.full((4, 4, 3), int(self.at * 10) % 256, np.uint8)


class SharesAClassAttribute(Well):
    places = [0.0]

    def noise(self):
        self.places[0] += 0.5
        return self.places[0]

    def reset(self, *, seed=None, options=None):
        self.places[0] = 0.0
        return super().reset(seed=seed)


_world = {"steps": 0}


class SharesAGlobal(Well):
    def reset(self, *, seed=None, options=None):
        _world["steps"] = 0
        return super().reset(seed=seed)

    def observation(self):
        _world["steps"] += 1
        return np.array([self.at, self.steps, _world["steps"]])


class RendersAnothersFrame(Well):
    """As an env does that draws into the process's only context."""

    screen = np.zeros((4, 4, 3), np.uint8)

    def observation(self):
        self.screen[...] = int(self.at * 10) % 256
        return super().observation()

    def render(self):
        return self.screen.copy()


class DrawsInTheLastContext(Well):
    """As Gymnasium's MuJoCo envs: each draws with the textures of the one that first drew last."""

    texture = 1
    context = 0

    def __init__(self):
        self.is_new = True

    def render(self):
        if self.is_new:
            DrawsInTheLastContext.context, self.is_new = self.texture, False
        return super().render() ^ np.uint8(self.context)


class HasAnotherTexture(DrawsInTheLastContext):
    texture = 2


class WellAndAnother(Well):
    def render(self):
        return 255 - super().render()


class HangsAsSecond(Well):
    number = count()

    def __init__(self):
        if next(self.number) > 0:
            threading.Event().wait()


class CrashesAsSecond(Well):
    number = count()

    def __init__(self):
        self.is_second = next(self.number) > 0

    def step(self, action):
        if self.is_second:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(action)


class ReturnsAnothersBuffer(Well):
    buffer = np.zeros(3)

    def observation(self):
        self.buffer[:] = super().observation()
        return self.buffer


class FixedPort(Well):
    def __init__(self):
        self.socket = socket.socket(socket.AF_UNIX)  # a port, whose name no other program has
        self.socket.bind(f"\0{zlib.crc32(bytes(SHARED))}")

    def close(self):
        self.socket.close()


class FixedFile(Well):
    def reset(self, *, seed=None, options=None):
        (SHARED / "state.txt").write_text("0")
        return super().reset(seed=seed)

    def noise(self):
        file = SHARED / "state.txt"
        file.write_text(str(int(file.read_text() or 0) + 1))
        return float(file.read_text() or 0)

    def close(self):
        (SHARED / "state.txt").unlink(missing_ok=True)


# All its bytes are equal: whether workers read where another has left it is a race.
_FILE = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
_FILE.write(bytes(16000))


class ReadsAnOpenFile(Well):
    def noise(self):
        _FILE.seek(self.np_random.integers(8000))
        return super().noise() + _FILE.read(1)[0]


class SameWhateverTheSeed(Well):
    def reset(self, *, seed=None, options=None):
        self.generator = np.random.default_rng(7)
        return super().reset(seed=seed)

    def noise(self):
        return float(self.generator.random())


class GlobalNumpy(Well):
    def reset(self, *, seed=None, options=None):
        if seed is not None:
            np.random.seed(seed)
        return super().reset(seed=seed)

    def noise(self):
        return float(np.random.random())


class NeverSeeded(Well):
    def noise(self):
        return float(np.random.random())


class GlobalRandom(Well):
    def reset(self, *, seed=None, options=None):
        if seed is not None:
            random.seed(seed)
        return super().reset(seed=seed)

    def noise(self):
        return random.random()


class NotDeterministic(Well):
    def noise(self):
        return time.time() % 1


class GoesOnWhereItWas(Well):
    """What a reset leaves of the last episode."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        self.episodes += 1
        return result

    def observation(self):
        return np.array([self.at, self.steps, self.episodes])


class GoesOnAndShares(SharesAGlobal):
    """Observations, which alone show what it shares, differ in the second episode, too."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        self.episodes += 1
        return result

    def observation(self):
        return super().observation() + self.episodes


class OwnSpace(gym.spaces.Space):
    """As MiniGrid's of missions: Gymnasium does not know how to lay it out."""

    def contains(self, x):
        return isinstance(x, str)

    def __eq__(self, other):
        return isinstance(other, OwnSpace)


class SpaceOfItsOwn(Well):
    observation_space = gym.spaces.Dict({"at": Well.observation_space, "mission": OwnSpace()})

    def observation(self):
        return {"at": super().observation(), "mission": "go on"}


class TimeInInfo(Well):
    def info(self):
        return {"elapsed": time.time()}


class SameBuffer(Well):
    def __init__(self):
        self.buffer = np.zeros(3)

    def observation(self):
        self.buffer[:] = super().observation()
        return self.buffer


class OutsideItsSpace(Well):
    observation_space = gym.spaces.Box(0, 255, (3,), np.uint8)


class OtherDtype(Well):
    observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float32)


class SpaceChanges(Well):
    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        self.observation_space = gym.spaces.Box(-2e6, 2e6, (3,), np.float64)
        return result


class ActionSpaceChanges(Well):
    def reset(self, *, seed=None, options=None):
        self.action_space = gym.spaces.Discrete(7)
        return super().reset(seed=seed)


class SpacesDiffer(Well):
    number = count()

    def __init__(self):
        self.observation_space = gym.spaces.Box(
            -1e6, 1e6 * (1 + next(self.number)), (3,), np.float64
        )


class NoFixedSize(Well):
    observation_space = gym.spaces.Sequence(gym.spaces.Discrete(100))

    def observation(self):
        return tuple(range(self.steps))


class InfoWithALock(Well):
    def info(self):
        return {"engine": threading.Lock()}


class InfoContainsItself(Well):
    def info(self):
        inner = {}
        inner["self"] = inner
        return {"tree": inner}


class NeedsItsThread(Well):
    """A thread of the class computes; it is not there in a fork."""

    thread = None
    questions, answers = Queue(), Queue()

    def __init__(self):
        if self.thread is None:
            type(self).thread = threading.Thread(target=self.serve, daemon=True, name="engine")
            self.thread.start()

    @classmethod
    def serve(cls):
        while True:
            cls.answers.put(cls.questions.get() + 1)

    def step(self, action):
        self.questions.put(1)
        self.answers.get()
        return super().step(action)


class HasAThread(Well):
    def __init__(self):
        self.over = threading.Event()
        threading.Thread(target=self.over.wait, daemon=True, name="logger").start()

    def close(self):
        self.over.set()


class NeedsTheProgram(Well):
    def __init__(self):
        if KNOWN_TO_THE_PROGRAM is None:
            raise LookupError("the program has not said where the data are")


class OldGym(Well):
    def step(self, action):
        return super().step(action)[1:]


class SlowToMake(Well):
    def __init__(self):
        super().__init__()
        time.sleep(0.25)


class FailsToClose(Well):
    def close(self):
        raise OSError("it is closed already")
