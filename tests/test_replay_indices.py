"""A replay's indices: the steps that envs have made last, and what is there still."""

import gc
import os

import gymnasium as gym
import numpy as np
import pytest

import shmvec


def made(mode, length=3):
    envs = shmvec.ShmVectorEnv(
        [lambda: gym.make("CartPole-v1", max_episode_steps=length)] * 2, autoreset_mode=mode
    )
    return envs, shmvec.Replay(envs, 60)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_the_latest_step_of_each_env(mode):
    envs, replay = made(mode)
    assert replay.latest().tolist() == [-1, -1]
    before = envs.reset(seed=0)[0]
    assert replay.latest().tolist() == [-1, -1]
    known = []
    for step in range(40):
        after, _, _, truncations, infos = envs.step([step % 2] * 2)
        latest = replay.latest()
        if mode == "SameStep" or latest.tolist() not in known[-1:]:
            known.append(latest.tolist())
            assert replay.holds(latest).all()
            batch = replay.at(latest)
            assert (batch.observations == before).all() and (batch.truncations == truncations).all()
            final = infos["final_obs"] if "final_obs" in infos else after
            assert (batch.next_observations == np.stack(list(final))).all()
        before = after
    everything = np.asarray(known).ravel()
    held = replay.holds(everything)
    assert held.sum() == len(replay) < len(held) and not replay.holds([-1, -5]).any()
    with pytest.raises(IndexError):
        replay.at(everything[~held][:1])
    with pytest.raises(IndexError):
        replay.at([-1])
    replay.close()
    envs.close()


def test_a_step_after_something_unknown_is_none():
    envs, replay = made("SameStep", 50)
    envs.reset(seed=0)
    envs.step([0, 1])
    assert (replay.latest() >= 0).all()
    replay.interrupt([1])
    envs.step([0, 1])
    assert (replay.latest() >= 0).tolist() == [True, False]
    replay.close()
    envs.close()


def test_a_replay_that_is_not_closed_leaves_no_descriptor():
    envs, replay = made("SameStep")
    envs.close()
    del envs, replay
    gc.collect()


def test_closing_twice_closes_nothing_of_others():
    envs, replay = made("SameStep")
    replay.close()
    strangers = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    replay.close()
    for stranger in strangers:
        os.close(stranger)
    envs.close()
