"""Equality as users of a drop-in mean it: types, dtypes, orders of keys and NaN included."""

import inspect
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from shmvec import ShmVectorEnv
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
        if not isinstance(ours, np.ndarray):
            return False
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
        if theirs.dtype.hasobject or isinstance(theirs, np.ma.MaskedArray):
            return all(same(a, b) for a, b in zip(ours.ravel(), theirs.ravel(), strict=True))
        return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())
    if isinstance(theirs, (list, tuple)):
        return (
            type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
        )
    equal = ours == theirs or (ours != ours and theirs != theirs)
    return type(ours) is type(theirs) and bool(equal)


class Ungathered(Exception):
    """Infos that Gymnasium cannot gather, so that there is nothing to be equal to."""


def assert_same(ours, theirs):
    assert same(ours, theirs), f"\n{ours}\n{theirs}"


def assert_equals_sync(
    fns, mode=AutoresetMode.NEXT_STEP, steps=8, seed=3, parts=None, wrapper=None, **options
):
    """Steps ours, made with these options, beside a SyncVectorEnv: every result is the same.

    Args:
        fns: Functions that make an env; what they make keeps its actions, or not.
        mode: Of both.
        steps: How many both make, resets included where the mode leaves those to the caller.
        seed: Of the envs and of the actions.
        parts: ``by_masks`` or ``by_batches``: how ours is stepped.
        wrapper: What each of our envs is wrapped in.
        options: What only ours has.
    """
    theirs = sync_env(fns, mode)
    wrapped = [lambda fn=fn: wrapper(fn()) for fn in fns] if wrapper else fns
    ours = ShmVectorEnv(wrapped, autoreset_mode=mode, **options)
    with closing(theirs), closing(ours):
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.observation_space == theirs.observation_space
        assert_same_steps(ours, theirs, steps, seed, parts)


def assert_same_steps(ours, theirs, steps, seed=3, parts=None):
    """Steps both, of which theirs is a SyncVectorEnv."""
    reference = _gathered(lambda: theirs.reset(seed=seed))
    assert_same(ours.reset(seed=seed), reference)
    theirs.action_space.seed(seed)
    over = np.zeros(theirs.num_envs, bool)
    for _ in range(steps):
        if ours.metadata["autoreset_mode"] is AutoresetMode.DISABLED and over.any():
            # Two dicts: Gymnasium removes the mask from the caller's.
            results = [env.reset(options={"reset_mask": over.copy()}) for env in (ours, theirs)]
            assert_same(*results)
        actions = theirs.action_space.sample()
        reference = _gathered(lambda actions=actions: theirs.step(actions))
        if parts is None:
            assert_same(ours.step(actions), reference)
        else:
            parts(ours, actions, np.arange(theirs.num_envs) % 2 == 0, reference)
        over = reference[2] | reference[3]
    if all(theirs.call("has_wrapper_attr", "actions")):
        assert_same(ours.get_attr("actions"), theirs.get_attr("actions"))


def by_masks(envs, actions, mask, reference):
    """Envs that are left out keep their results, so that the second call shows all."""
    envs.step(actions, mask=mask)
    assert_same(envs.step(actions, mask=~mask)[:4], reference[:4])


def by_batches(envs, actions, mask, reference):
    """Two requests, and one batch with the envs in the order in which they are done."""
    single = envs.single_action_space
    given = list(iterate(envs.action_space, actions))
    for ids in (np.flatnonzero(mask), np.flatnonzero(~mask)):
        some = [given[i] for i in ids]
        envs.send(concatenate(single, some, create_empty_array(single, len(ids))), ids)
    observations, *arrays, infos = envs.recv(min_envs=len(mask))
    rows = zip(iterate(envs.observation_space, observations), *arrays, strict=True)
    found = dict(zip(infos["env_id"].tolist(), rows, strict=True))
    expected = zip(iterate(envs.observation_space, reference[0]), *reference[1:4], strict=True)
    for env, row in enumerate(expected):
        assert_same(found[env], row)


def _gathered(call):
    """What Gymnasium makes of these infos; some it cannot gather: an array under "_a"."""
    try:
        return call()
    except ValueError as error:
        if "array element with a sequence" not in str(error):
            raise
        raise Ungathered from error


def equal(ours, theirs):
    """Equality of nested values, NaN included, where scalars of an env's own may be of Python."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    if isinstance(theirs, np.ndarray):
        return np.shape(ours) == theirs.shape and all(map(equal, np.ravel(ours), theirs.ravel()))
    return bool(ours == theirs or (ours != ours and theirs != theirs))
