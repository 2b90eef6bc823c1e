"""What a replay does beside errors, threads, forks, and others that use its folder."""

import gc
import os
import signal
import threading
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, TransformObservation

import shmvec

pytestmark = pytest.mark.deep


class Telling(gym.Env):
    """Tells in its observations which env, episode and step it is, and the action."""

    action_space = gym.spaces.Box(-1e9, 1e9, (1,), np.float64)

    def __init__(self, number=0, width=8):
        self.observation_space = gym.spaces.Box(-1e9, 1e9, (width,), np.float64)
        self.number = number
        self.episode = self.t = 0

    def told(self, action):
        observation = np.full(self.observation_space.shape, self.t, np.float64)
        observation[:4] = self.number, self.episode, self.t, action
        return observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        return self.told(0), {}

    def step(self, action):
        self.t += 1
        return self.told(action[0]), float(self.t), self.t >= 7, False, {}


def wrong(batch):
    """The number of transitions that no env has made."""
    before, after = batch.observations, batch.next_observations
    right = (before[:, :2] == after[:, :2]).all(1) & (before[:, 2] + 1 == after[:, 2])
    right &= (batch.actions[:, 0] == after[:, 3]) & (batch.rewards == after[:, 2])
    for observations in (before, after):
        right &= (observations[:, 4:] == observations[:, 2:3]).all(1)
    return int((~right).sum())


def of_two(width=8):
    return shmvec.ShmVectorEnv([partial(Telling, number, width) for number in range(2)])


def walk(envs, steps, first=0.5):
    for step in range(steps):
        envs.step(np.full((envs.num_envs, 1), first + step))


@pytest.mark.parametrize(
    "width, num_workers, prioritized", [(8, 1, 0.6), (8, 0, None), (20_000, 1, None)]
)
def test_threads_sample_while_another_steps(width, num_workers, prioritized):
    """Each has a batch of its own, of its own size."""
    fns = [partial(Telling, number, width) for number in range(2)]
    errors, ended = [], threading.Event()
    with shmvec.ShmVectorEnv(fns, num_workers=num_workers) as envs:
        capacity = 32 if width == 8 else 400
        replay = shmvec.Replay(envs, capacity, prioritized=prioritized, seed=0)
        envs.reset(seed=0)
        walk(envs, 60)

        def draw(size):
            while not ended.is_set():
                try:
                    batch = replay.sample(size)
                    assert len(batch.indices) == size
                    if prioritized:
                        replay.update_priorities(batch.indices, batch.rewards + 1)
                    errors.append(wrong(batch) + int((~np.isfinite(batch.weights)).sum()))
                except BaseException as error:
                    errors.append(error)

        sizes = (1000, 5) if width == 8 else (64, 5)
        drawing = [threading.Thread(target=draw, args=(size,)) for size in sizes]
        for thread in drawing:
            thread.start()
        until = time.monotonic() + 1
        while time.monotonic() < until:
            walk(envs, 20)
        ended.set()
        for thread in drawing:
            thread.join()
        assert set(errors) == {0}
        replay.close()


def test_a_folder_is_saved_while_another_thread_steps(tmp_path):
    """What is overwritten meanwhile is not in it."""
    with of_two(width=1000) as envs, of_two(width=1000) as others:
        replay = shmvec.Replay(envs, 8000, seed=0)
        envs.reset(seed=0)
        walk(envs, 4100)
        until = time.monotonic() + 200
        overwritten = 0
        while overwritten < 200:  # else it was sooner than the steps
            assert time.monotonic() < until
            before = replay.recorded
            saving = threading.Thread(target=replay.save, args=(tmp_path,))
            saving.start()
            while saving.is_alive() and replay.recorded - before < 4000:  # half of it
                walk(envs, 10)
            saving.join()
            overwritten = replay.recorded - before
        replay.close()
        again = shmvec.Replay.load(tmp_path, others)
        indices = np.arange(2 * before)
        indices = indices[again.holds(indices)]
        assert len(indices) > 100 and wrong(again.at(indices)) == 0
        again.close()


def test_a_fork_cannot_draw_and_does_not_hang():
    fns = [partial(Telling, number, 20_000) for number in range(2)]
    with shmvec.ShmVectorEnv(fns, num_workers=1) as envs:
        replay = shmvec.Replay(envs, 400, seed=0)
        envs.reset(seed=0)
        walk(envs, 60)
        for _ in range(5):
            replay.sample(300)  # and the next batch is begun
            child = os.fork()
            if child == 0:
                signal.alarm(100)
                try:
                    replay.sample(300)
                except RuntimeError:
                    replay.close()
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert wrong(replay.sample(300)) == 0
        replay.close()


def test_a_folder_is_the_same_by_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("kept")
    with of_two() as envs:
        replay = shmvec.Replay(envs, 400, on_disk="kept")
        envs.reset(seed=0)
        walk(envs, 20)
        replay.save(tmp_path / "kept")  # which must not put another file in its place
        replay.save("link")
        walk(envs, 20, 20.5)
        count = len(replay)
        replay.close()
        replay = shmvec.Replay.load("kept", envs, on_disk=tmp_path / "link")
        assert len(replay) == count > 60
        replay.close()


def test_two_replays_do_not_write_to_one_folder(tmp_path):
    with of_two() as envs, of_two() as others:
        replay = shmvec.Replay(envs, 400, on_disk=tmp_path, seed=0)
        envs.reset(seed=0)
        walk(envs, 20)
        with pytest.raises(FileExistsError, match="holds a replay"):
            shmvec.Replay(others, 400, on_disk=tmp_path)
        with pytest.raises(OSError, match="another replay writes this file"):
            shmvec.Replay.load(tmp_path, others, on_disk=tmp_path)
        with pytest.raises(OSError, match="another replay writes this file"):
            shmvec.Replay.load(tmp_path, others)
        assert wrong(replay.sample(100)) == 0
        replay.close()
        replay = shmvec.Replay.load(tmp_path, others, on_disk=tmp_path)
        assert len(replay) > 30
        replay.close()


def test_a_replay_is_closed_twice():
    with of_two() as envs:
        replay = shmvec.Replay(envs, 400)
        replay.close()
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
        replay.close()
        for descriptor in others:
            os.close(descriptor)


def test_a_replay_that_is_dropped_leaves_no_descriptor():
    """Not only once garbage is collected: nothing keeps it in a cycle."""
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with of_two() as envs:
                shmvec.Replay(envs, 400)
            del envs
        until = time.monotonic() + 60  # the thread that copies stderr closes its own
        while len(os.listdir("/proc/self/fd")) > before + 2:  # of what is started once
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        gc.enable()


def test_a_replay_that_is_dropped_makes_room_for_another():
    with of_two() as envs:
        shmvec.Replay(envs, 400)
        gc.collect()
        replay = shmvec.Replay(envs, 400, seed=0)
        with pytest.raises(ValueError, match="another replay"):
            shmvec.Replay(envs, 400)
        envs.reset(seed=0)
        walk(envs, 20)
        assert wrong(replay.sample(100)) == 0
        replay.close()


def test_a_replay_is_closed_while_a_call_waits():
    with of_two() as envs:
        replay = shmvec.Replay(envs, 40, seed=0)
        envs.reset(seed=0)
        walk(envs, 30)
        envs.step_async(np.full((2, 1), 1.5))
        replay.close()
        envs.step_wait()
        for turn in range(4):
            walk(envs, 5, 100 * turn + 0.5)
            assert wrong(replay.sample(100)) == 0
        following = shmvec.Replay(envs, 40, seed=0)
        replay.close()
        envs.reset(seed=0)
        walk(envs, 10)
        assert wrong(following.sample(100)) == wrong(replay.sample(100)) == 0
        following.close()


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_observations_and_actions_may_be_empty(shape):
    class Empty(gym.Env):
        observation_space = gym.spaces.Dict(a=gym.spaces.Box(0, 1, shape), b=gym.spaces.Discrete(3))
        action_space = gym.spaces.Box(0, 1, shape)

        def reset(self, *, seed=None, options=None):
            return {"a": np.zeros(shape, np.float32), "b": 0}, {}

        def step(self, action):
            return {"a": np.zeros(shape, np.float32), "b": 1}, 1.0, False, False, {}

    with shmvec.ShmVectorEnv([Empty, Empty]) as envs:
        replay = shmvec.Replay(envs, 64)
        envs.reset(seed=0)
        envs.step(np.zeros((2, *shape), np.float32))
        batch = replay.sample(5)
        assert batch.observations["a"].shape == batch.actions.shape == (5, *shape)
        assert (batch.next_observations["b"] == 1).all()
        replay.close()


def test_damaged_priorities_are_refused_and_hold_no_envs(tmp_path):
    with of_two() as envs:
        replay = shmvec.Replay(envs, 400, prioritized=0.6)
        envs.reset(seed=0)
        walk(envs, 20)
        replay.save(tmp_path)
        replay.close()
        with np.load(tmp_path / "priorities.npz") as arrays:
            saved = dict(arrays)
        for damage in (
            {"priorities": np.full(400, np.nan)},
            {"priorities": np.ones((2, 3))},
            {"priorities": np.full(400, 2.0)},  # more than the largest
            {"counts": np.ones(3, np.int64)},
            {"largest": np.inf},
        ):
            np.savez(tmp_path / "priorities.npz", **saved | damage)
            with pytest.raises(ValueError, match="damaged"):
                shmvec.Replay.load(tmp_path, envs)
        shmvec.Replay(envs, 400).close()


def test_sums_of_priorities_stay_finite():
    with of_two() as envs:
        with pytest.raises(ValueError, match="prioritized"):
            shmvec.Replay(envs, 400, prioritized=float("inf"))
        replay = shmvec.Replay(envs, 400, prioritized=2.0, seed=0)
        envs.reset(seed=0)
        walk(envs, 20)
        indices = replay.sample(10).indices
        with pytest.raises(ValueError, match="at most"):
            replay.update_priorities(indices, np.full(10, 1e200))
        replay.update_priorities(indices, np.full(10, 1e40))
        assert np.isfinite(replay.sample(100).weights).all()
        replay.close()


class Pictures(gym.Env):
    """Each frame has its number."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, low=0):
        self.observation_space = gym.spaces.Box(low, 255, (3, 3), np.float32)
        self.count = 0

    def frame(self):
        self.count += 1
        return np.full((3, 3), self.count, np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.frame(), {}

    def step(self, action):
        self.t += 1
        return self.frame(), 1.0, self.t >= 6, False, {}


def transformed():
    stacked = FrameStackObservation(Pictures(), 4)
    space = gym.spaces.Box(-1e9, 1e9, (4, 3, 3), np.float32)
    return TransformObservation(stacked, lambda frames: frames[::-1], space)


def padded(kind, low=0):
    return FrameStackObservation(Pictures(low), 4, padding_type=kind)


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_stack_of_the_frames_before_is_refused():
    with shmvec.ShmVectorEnv([transformed, transformed]) as envs:
        replay = shmvec.Replay(envs, 400)
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="frame_stack=1"):
            for _ in range(4):
                envs.step(np.array([0, 0]))
        replay.close()
        replay = shmvec.Replay(envs, 400, frame_stack=1)
        envs.reset(seed=0)
        envs.step(np.array([0, 0]))
        replay.close()


@pytest.mark.parametrize(
    "fn", [partial(padded, np.full((3, 3), 9, np.float32)), partial(padded, "zero", 1)]
)
def test_stacks_with_other_padding_are_stored_as_they_are(fn):
    with shmvec.ShmVectorEnv([fn, fn]) as envs:
        replay = shmvec.Replay(envs, 400)
        assert replay.frame_stack == 1
        replay.close()
        with pytest.raises(ValueError, match="padding="):
            shmvec.Replay(envs, 400, frame_stack=4)
