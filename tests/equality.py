"""Equality as users of a drop-in mean it: types, dtypes, orders of keys and NaN included."""

import inspect

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from shmvec.exchange import AutoresetMode

# Those that this Gymnasium's SyncVectorEnv has: 1.0 resets at the next step.
MODES = list(AutoresetMode)[: None if hasattr(gym.vector, "AutoresetMode") else 1]


def sync_env(env_fns, mode=AutoresetMode.NEXT_STEP, **options):
    """Gymnasium's SyncVectorEnv in this mode; skips the test where Gymnasium has no other."""
    if AutoresetMode(mode) is not AutoresetMode.NEXT_STEP:
        options["autoreset_mode"] = mode
    unknown = options.keys() - inspect.signature(SyncVectorEnv).parameters.keys()
    if unknown:
        pytest.skip(f"this Gymnasium's SyncVectorEnv has no {', '.join(sorted(unknown))}")
    return SyncVectorEnv(env_fns, **options)


def same(ours, theirs):
    """Equality that knows dtypes, orders of keys and NaN."""
    if isinstance(theirs, dict):
        return (
            type(ours) is type(theirs)
            and list(ours) == list(theirs)
            and all(same(ours[key], theirs[key]) for key in theirs)
        )
    if isinstance(theirs, np.ndarray):
        return (
            isinstance(ours, np.ndarray)
            and ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and all(same(a, b) for a, b in zip(ours.ravel(), theirs.ravel(), strict=True))
        )
    if isinstance(theirs, (list, tuple)):
        return (
            type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
        )
    equal = ours == theirs or (ours != ours and theirs != theirs)
    return type(ours) is type(theirs) and bool(equal)


def assert_same_episodes(envs, sync, mode):
    """Steps both, which have five envs with four actions, through some episodes of each."""
    assert same(envs.reset(seed=3), sync.reset(seed=3))
    for step in range(15):
        actions = np.arange(5) % 4
        ours, theirs = envs.step(actions), sync.step(actions)
        assert same(ours, theirs), step
        over = theirs[2] | theirs[3]
        if mode.value == "Disabled" and over.any():
            options = {"reset_mask": over}
            assert same(envs.reset(options=dict(options)), sync.reset(options=dict(options)))


def equal(ours, theirs):
    """Equality of nested values, where scalars of an env's own may be of Python."""
    if isinstance(theirs, dict):
        return all(equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, tuple):
        return all(map(equal, ours, theirs))
    return np.array_equal(ours, theirs)
