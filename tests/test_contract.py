"""The contract that we offer to others: ours keeps it, and so do both of Gymnasium's."""

import inspect

import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from tables import deep

from shmvec import ShmVectorEnv
from shmvec.testing import VectorEnvContract

# Gymnasium's own keep it since 1.1, with which autoreset modes came.
SINCE_MODES = pytest.mark.skipif(
    "autoreset_mode" not in inspect.signature(SyncVectorEnv).parameters, reason="Gymnasium is 1.0"
)


@pytest.mark.deep
@SINCE_MODES
class TestSyncVectorEnv(VectorEnvContract):
    def make_vector_env(self, env_fns, **kwargs):
        return SyncVectorEnv(env_fns, **kwargs)


@pytest.mark.deep
@SINCE_MODES
class TestAsyncVectorEnv(VectorEnvContract):
    def make_vector_env(self, env_fns, **kwargs):
        return AsyncVectorEnv(env_fns, **kwargs)


@pytest.mark.deep
class TestShmVectorEnv(VectorEnvContract):
    def make_vector_env(self, env_fns, **kwargs):
        return ShmVectorEnv(env_fns, **kwargs)


@pytest.mark.deep
class TestShmVectorEnvInThisProcess(VectorEnvContract):
    def make_vector_env(self, env_fns, **kwargs):
        return ShmVectorEnv(env_fns, num_workers=0, **kwargs)


class InOneWorker(VectorEnvContract):
    def make_vector_env(self, env_fns, **kwargs):
        return ShmVectorEnv(env_fns, num_workers=1, **kwargs)


def test_ours_keeps_it():
    """Each test by its first values; all of them, of all classes, are deep."""
    for name, test in inspect.getmembers(InOneWorker(), inspect.ismethod):
        if name.startswith("test_"):
            marks = getattr(test, "pytestmark", ())
            columns = [mark.args for mark in marks if mark.name == "parametrize"]
            test(**{argument: next(iter(values)) for argument, values in columns})


BREACHES = {
    "test_results": lambda results: (*results[:1], results[1].astype("f4"), *results[2:]),
    "test_observation_spaces": lambda results: (results[0], results[1] + 1, *results[2:]),
    "test_infos": lambda results: (*results[:4], {}),
    "test_results_are_fresh": None,
    "test_the_step_after_an_end_is_a_reset": lambda results: (*results[:2], *results[3:1:-1], {}),
}


@SINCE_MODES
@pytest.mark.parametrize("name", ["test_results", *deep(*list(BREACHES)[1:])])
def test_a_breach_is_found(name):
    class Breaching(SyncVectorEnv):
        def step(self, actions):
            change = BREACHES[name]
            results = super().step(actions)
            return results if change is None else change(results)

    class Contract(VectorEnvContract):
        def make_vector_env(self, env_fns, **kwargs):
            if name == "test_results_are_fresh":
                kwargs["copy"] = False
            return Breaching(env_fns, **kwargs)

    test = getattr(Contract(), name)
    parameters = {
        "test_observation_spaces": ["Box"],
        "test_infos": [[{"a": 1}, {"b": 2}, {}]],
    }.get(name, [])
    assert len(inspect.signature(test).parameters) == len(parameters)
    with pytest.raises(AssertionError):
        test(*parameters)
