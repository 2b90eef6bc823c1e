"""What the engine does without any product: a program, whose arguments are folders of packages.

Results are compared with SyncVectorEnv's. With a folder come modules, after commas, which must not
need what the package lacks. Nothing of the tests is imported, whose helpers may need products.
"""

import importlib
import os
import sys
import time
from contextlib import closing, suppress

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv

NUM_ENVS = 4


class Walk(gym.Env):
    observation_space = gym.spaces.Box(-1e3, 1e3, (3,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.steps = self.np_random.random(3), 0
        return self.at, {"begun": True}

    def step(self, action):
        if action == 2:
            raise ValueError("it refuses 2")
        self.at, self.steps = self.at + action, self.steps + 1
        return self.at, float(self.at.sum()), self.steps == 5, False, {"steps": self.steps}

    def die(self):
        os._exit(3)


def equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            equal(one.values(), other.values())
        else:
            np.testing.assert_array_equal(one, other)


def check_lockstep(shmvec, num_workers):
    with (
        closing(shmvec.ShmVectorEnv([Walk] * NUM_ENVS, num_workers=num_workers)) as envs,
        closing(SyncVectorEnv([Walk] * NUM_ENVS)) as reference,
    ):
        equal(envs.reset(seed=7), reference.reset(seed=7))
        rng = np.random.default_rng(1)
        for _ in range(12):
            actions = rng.integers(2, size=NUM_ENVS)
            equal(envs.step(actions), reference.step(actions))
        mask = np.arange(NUM_ENVS) % 2 == 0
        equal(*(each.reset(seed=3, options={"reset_mask": mask}) for each in (envs, reference)))
        try:
            envs.step([0, 2, 0, 0])
        except ValueError as error:
            assert "it refuses 2" in str(error)
        else:
            raise AssertionError("nothing was raised")


def check_partial(shmvec):
    with closing(shmvec.ShmVectorEnv([Walk] * NUM_ENVS, num_workers=2, batch_size=1)) as envs:
        envs.async_reset(seed=5)
        seen = set()
        while len(seen) < NUM_ENVS:
            ids = envs.recv()[-1]["env_id"]
            seen.update(ids.tolist())
            envs.send(np.zeros(len(ids), np.int64), ids)


def check_faults(shmvec):
    policy = shmvec.FaultPolicy(on_crash="restart")
    with closing(shmvec.ShmVectorEnv([Walk] * 2, num_workers=2, faults=policy)) as envs:
        envs.reset(seed=1)
        with suppress(shmvec.WorkerCrashError):
            envs.exchange.call("die", envs=[1])
        assert envs.step([0, 0])[3].tolist() == [False, True]
        pids = [process.pid for process in envs.exchange.processes]
    until = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < until, "a worker is left"
        time.sleep(0.01)


def main(folder, *modules):
    sys.path.insert(0, folder)
    import shmvec

    assert os.path.dirname(os.path.dirname(shmvec.__file__)) == folder, shmvec.__file__
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:  # what an adapter adapts to need not be installed
            assert not (error.name or "").startswith("shmvec"), (name, error)
    for name in shmvec.__all__:
        getattr(shmvec, name)
    check_lockstep(shmvec, 2)
    check_lockstep(shmvec, 0)
    check_partial(shmvec)
    check_faults(shmvec)


if __name__ == "__main__":
    for house in sys.argv[1:]:  # each in a fork, which need not import Gymnasium again
        if os.fork() == 0:
            main(*house.split(","))
            break
        if os.wait()[1] != 0:
            sys.exit(f"The package fails that is in {house.split(',')[0]}")
