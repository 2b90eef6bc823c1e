"""Resets, calls and attributes of some of the envs, each with arguments of its own."""

import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from envs import Counter
from gymnasium.error import AlreadyPendingCallError
from tables import deep, first, row

import shmvec

NUM_ENVS = 5


WORKERS = pytest.mark.parametrize("num_workers", [2, *deep(0, 5)])


def vector_env(num_workers):
    return closing(shmvec.ShmVectorEnv([Counter] * NUM_ENVS, num_workers=num_workers))


@WORKERS
def test_reset_of_some_envs_gives_each_its_own_seed_and_options(num_workers):
    with vector_env(num_workers) as envs:
        envs.reset(seed=0)
        envs.async_reset([7, None], [{"a": 1}, None], env_id=[3, 1])
        envs.send([0, 0, 0], env_id=[0, 2, 4])
        infos = envs.recv()[4]
        assert sorted(infos["env_id"].tolist()) == list(range(NUM_ENVS))
        assert envs.get_attr("resets") == (1, 2, 1, 2, 1)
        assert [given[-1] for given in envs.get_attr("received")] == [
            None,
            None,
            None,
            {"a": 1},
            None,
        ]
        alone = Counter()
        alone.reset(seed=7)
        assert envs.get_attr("noise", env_id=[3]) == (alone.noise,)


@pytest.mark.deep
@WORKERS
def test_an_int_seed_counts_from_the_first_env(num_workers):
    with vector_env(num_workers) as envs:
        envs.async_reset(10, env_id=[4, 2])
        envs.recv(min_envs=2)
        for env in (2, 4):
            alone = Counter()
            alone.reset(seed=10 + env)
            assert envs.get_attr("noise", env_id=[env]) == (alone.noise,)


@pytest.mark.deep
@WORKERS
def test_reset_takes_a_list_of_options(num_workers):
    with vector_env(num_workers) as envs:
        options = [{"env": env} for env in range(NUM_ENVS)]
        envs.reset(options=options)
        assert [given[-1] for given in envs.get_attr("received")] == options
        with pytest.raises(ValueError, match="number of envs, 5, but it is 2"):
            envs.reset(options=[{}, {}])


class Takes(Counter):
    """Changes in place what it is given."""

    held = taken = None

    def reset(self, *, seed=None, options=None):
        self.taken = (options.pop("level", None), options["where"].pop())
        return super().reset(seed=seed)

    def take(self, where, *, level):
        level["seen"] = level.get("seen", 0) + 1
        where += 1
        return where.tolist(), level["seen"]

    def held_value(self):
        self.held["where"] += 1
        return self.held["where"].tolist()


@pytest.mark.parametrize(
    "options",
    first(
        [
            {"num_workers": 1},
            {"num_workers": 0},
            {"num_workers": 2, "caller_steps": True},
            {"num_workers": 1, "overlap": 2},
            {"num_workers": 1, "spare_envs": 1},
        ]
    ),
    ids=lambda options: " ".join(options),
)
def test_what_envs_are_given_is_their_own(options):
    """What one env changes in it changes no other's: results depend on no number of workers."""
    with closing(shmvec.ShmVectorEnv([Takes] * 4, **options)) as envs:
        given = {"level": 3, "where": [1, 2]}
        envs.reset(options=given)
        assert envs.get_attr("taken") == ((3, 2),) * 4
        envs.reset(options=[{"level": env, "where": given["where"]} for env in range(4)])
        assert envs.get_attr("taken") == tuple((env, 2) for env in range(4))
        assert given == {"level": 3, "where": [1, 2]}
        where, level = np.zeros(2), {}
        assert envs.call("take", where, level=level) == (([1, 1], 1),) * 4
        envs.set_attr("held", {"where": where})
        assert envs.call("held_value") == ([1, 1],) * 4
        envs.set_attr("held", [{"where": where}] * 4)
        assert envs.call_some([3, 1], "held_value") == ([1, 1],) * 2
        assert where.tolist() == [0, 0] and level == {}


@WORKERS
def test_call_some_calls_only_these_envs_in_the_order_asked_for(num_workers):
    with vector_env(num_workers) as envs:
        envs.reset()
        envs.step([0] * 5, mask=np.arange(5) == 4)
        seen = envs.call_some([4, 1], "_observation", action=3)
        assert [observation.tolist()[:2] for observation in seen] == [[1, 3], [0, 3]]
        envs.set_attr("offset", [40, 10], env_id=[4, 1])
        assert envs.get_attr("offset") == (0, 10, 0, 0, 40)
        envs.set_attr("offset", 7, env_id=[0])
        assert envs.get_attr("offset", env_id=[1, 0]) == (10, 7)


@pytest.mark.deep
@WORKERS
def test_only_the_envs_that_are_called_can_fail(num_workers):
    with vector_env(num_workers) as envs:
        with pytest.raises(AttributeError, match="nothing"):
            envs.call_some([2], "nothing")
        envs.set_attr("special", 1, env_id=[2])
        assert envs.call_some([2], "special") == (1,)
        with pytest.raises(AttributeError):
            envs.call("special")


@WORKERS
def test_bad_env_ids_are_refused_before_anything_is_sent(num_workers):
    with vector_env(num_workers) as envs:
        envs.reset(seed=1)
        for env_id, error, message in [
            ([5], ValueError, "0 to 4"),
            ([-1], ValueError, "0 to 4"),
            ([1, 1], ValueError, "twice"),
            ([], ValueError, "indices"),
            ([0.5], TypeError, "integers"),
        ]:
            for call in (
                partial(envs.async_reset, env_id=env_id),
                partial(envs.call_some, env_id, "render"),
                partial(envs.set_attr, "offset", 1, env_id=env_id),
                partial(envs.get_attr, "offset", env_id=env_id),
            ):
                with row(call), pytest.raises(error, match=message):
                    call()
        assert envs.get_attr("resets") == (1,) * NUM_ENVS
        np.testing.assert_array_equal(envs.step([0] * NUM_ENVS)[0][:, 0], 1)


@pytest.mark.deep
@WORKERS
def test_wrong_numbers_of_values_are_refused(num_workers):
    with vector_env(num_workers) as envs:
        with pytest.raises(ValueError, match="`2` values for 3"):
            envs.set_attr("offset", [1, 2], env_id=[0, 1, 2])
        with pytest.raises(ValueError, match="length"):
            envs.async_reset([1, 2], env_id=[0, 1, 2])
        with pytest.raises(ValueError, match="number of envs, 3, but it is 1"):
            envs.async_reset(None, [{}], env_id=[0, 1, 2])


@pytest.mark.deep
@WORKERS
def test_envs_that_are_out_cannot_be_called_or_reset(num_workers):
    with vector_env(num_workers) as envs:
        envs.reset()
        envs.send([0], [1])
        with pytest.raises(ValueError, match="env 1 has been asked already"):
            envs.async_reset(env_id=[1])
        with pytest.raises(AlreadyPendingCallError):
            envs.call_some([0], "render")
        envs.recv(min_envs=1)


def test_each_worker_whose_envs_are_asked_is_woken():
    """One that is not finds out nearly 50 ms later, each time."""
    with closing(shmvec.ShmVectorEnv([Counter] * 4, num_workers=4, wait_policy="park")) as envs:
        envs.reset()
        took = []
        while min(took, default=1) >= 0.02 and len(took) < 100:  # it may wait for a core
            time.sleep(0.005)  # all of them sleep
            begin = time.perf_counter()
            envs.step([0, 0], [0, 2])
            took.append(time.perf_counter() - begin)
        assert min(took) < 0.02, took
