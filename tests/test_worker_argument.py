"""``worker=``: worker functions written for AsyncVectorEnv."""

import itertools
import os
from contextlib import closing

import gymnasium as gym
import pytest
from envs import Counter, Failing, Scripted, TwoArguments
from equality import same, sync_env
from gymnasium.vector.async_vector_env import _async_worker
from tables import deep, first

from shmvec import ShmVectorEnv, _options
from shmvec.exchange import AutoresetMode

WORKERS = pytest.mark.parametrize("num_workers", [2, *deep(0)])


def plain(*args):
    _async_worker(*args)


@pytest.mark.parametrize("mode, num_workers", first(itertools.product(AutoresetMode, [2, 0])))
def test_gymnasiums_own_worker_gives_the_results_of_sync(num_workers, mode):
    make = [lambda: Scripted(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), [9])] * 3
    if mode is not AutoresetMode.DISABLED:
        make[1] = lambda: Scripted(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2), [2, 3])
    options = {"worker": plain, "autoreset_mode": mode, "num_workers": num_workers}
    with closing(sync_env(make, mode)) as sync, closing(ShmVectorEnv(make, **options)) as envs:
        assert envs.worker is plain and envs.metadata == {**sync.metadata, "autoreset_mode": mode}
        assert same(envs.reset(seed=1), sync.reset(seed=1))
        for _ in range(6):
            mine, reference = envs.step([0, 1, 0]), sync.step([0, 1, 0])
            # AsyncVectorEnv, and so its worker, puts the final info before the observation.
            assert mine[4].keys() == reference[4].keys()
            for key, value in reference[4].items():
                assert same(mine[4][key], value)
            assert same(mine[:4], reference[:4])


def resets_twice(index, env_fn, pipe, parent_pipe, *others):
    """A worker with rules of its own: a reset takes two, and it knows no "_setattr"."""
    env = env_fn()
    parent_pipe.close()
    while True:
        command, data = pipe.recv()
        if command == "reset":
            env.reset(**data)
            pipe.send((env.reset(), True))
        elif command == "step":
            pipe.send((env.step(data), True))
        elif command == "_call":
            name, args, kwargs = data
            found = env.get_wrapper_attr(name)
            pipe.send((found(*args, **kwargs) if callable(found) else found, True))
        elif command == "close":
            env.close()
            pipe.send((None, True))
            return
        else:
            raise NotImplementedError(f"no {command} for env {index}")


@pytest.mark.deep
@WORKERS
def test_a_worker_with_rules_of_its_own(num_workers):
    envs = ShmVectorEnv([lambda: Counter(2)] * 3, worker=resets_twice, num_workers=num_workers)
    with closing(envs):
        _, infos = envs.reset(seed=1)
        assert infos["reset"].tolist() == [2, 2, 2]
        for count in (1, 2, 3):  # no env is reset
            assert envs.step([0, 0, 0])[0][:, 0].tolist() == [count] * 3
        assert envs.get_attr("offset") == (0, 0, 0)
        assert envs.call("get_wrapper_attr", "count") == (3, 3, 3)
        with pytest.raises(NotImplementedError, match="no _setattr for env 0"):
            envs.set_attr("offset", 1)


@pytest.mark.deep
@WORKERS
def test_set_attr_and_masked_resets(num_workers):
    import numpy as np

    envs = ShmVectorEnv([Counter] * 2, worker=plain, num_workers=num_workers)
    with closing(envs):
        envs.reset()
        envs.set_attr("offset", [10, 20])
        assert envs.step([0, 0])[1].tolist() == [11, 21]
        observations, _ = envs.reset(options={"reset_mask": np.array([False, True])})
        assert observations[:, 0].tolist() == [1, 0]


@pytest.mark.deep
@WORKERS
def test_errors_keep_their_type(num_workers):
    make = [Counter, lambda: Failing("step", TwoArguments(3, "reasons"))]
    envs = ShmVectorEnv(make, worker=plain, num_workers=num_workers)
    with closing(envs):
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(TwoArguments, match="3: reasons"):
            envs.step([0, 0])
        with pytest.raises(RuntimeError, match="custom worker of env 1 has returned"):
            envs.step([0, 0])


def too_few(index, env_fn, pipe):
    pass


def test_a_worker_with_other_arguments_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"A custom `worker` must accept \d arguments"):
        ShmVectorEnv([Counter], worker=too_few)
    monkeypatch.setattr(_options, "NUM_WORKER_ARGUMENTS", 3)  # what another Gymnasium's own takes
    assert _options.checked_worker(too_few) is too_few


@pytest.mark.deep
@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_worker_that_is_given_no_mode_resets_at_the_next_step(mode, monkeypatch):
    monkeypatch.setattr(_options, "NUM_WORKER_ARGUMENTS", 6)  # Gymnasium 1.0's
    with pytest.raises(ValueError, match=f"{mode} needs Gymnasium 1.1 or newer"):
        ShmVectorEnv([Counter], worker=lambda *arguments: None, autoreset_mode=mode)


def test_max_concurrency_limits_the_workers():
    envs = ShmVectorEnv([Counter] * 4, worker=plain, max_concurrency=1)
    with closing(envs):
        assert envs.num_workers == 1 and envs.max_concurrency == 1
        envs.reset()
        envs.step([0] * 4)
    with closing(ShmVectorEnv([Counter] * 4, max_concurrency=64)) as envs:
        assert 1 <= envs.num_workers <= min(4, os.cpu_count())
    for bad, message in (
        (0, "must be a positive or None, got 0"),
        (2.0, "must be an integer or None, got <class 'float'>"),
        ("2", "must be an integer or None, got <class 'str'>"),
    ):
        with pytest.raises(ValueError, match=f"`max_concurrency` {message}"):
            ShmVectorEnv([Counter], max_concurrency=bad)
    with pytest.raises(ValueError, match="num_workers=3 would step 3 envs at a time"):
        ShmVectorEnv([Counter] * 4, max_concurrency=2, num_workers=3)
