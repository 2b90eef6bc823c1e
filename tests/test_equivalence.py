"""Whatever its settings, a vector env returns what SyncVectorEnv returns, bit for bit."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Coroutines, Counter, Infos, SameArrays, Scripted, Words
from equality import MODES, Ungathered, assert_equals_sync, by_batches, by_masks
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Sequence, Text, Tuple
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from strategies import infos, leaves, spaces, unsized_leaves
from tables import row

from shmvec import FaultPolicy
from shmvec.exchange import AutoresetMode

SETTINGS = {
    "workers": {"num_workers": 2},
    "this process": {"num_workers": 0},
    "messages": {"num_workers": 2, "shared_memory": False},
    "messages in this process": {"num_workers": 0, "shared_memory": False},
    "views": {"num_workers": 2, "copy": False},
    "masks": {"num_workers": 2, "parts": by_masks},
    "batches": {"num_workers": 2, "parts": by_batches},
    "batches in this process": {"num_workers": 0, "parts": by_batches},
    "batches of messages": {"num_workers": 2, "shared_memory": False, "parts": by_batches},
    "caller steps": {"num_workers": 3, "caller_steps": True},
    "caller steps, messages": {"num_workers": 2, "caller_steps": True, "shared_memory": False},
    "threads": {"num_workers": 2, "overlap": 2},
    "threads, messages": {"num_workers": 2, "overlap": "auto", "shared_memory": False},
    "coroutines": {"num_workers": 2, "wrapper": Coroutines},
    "coroutines, messages": {
        "num_workers": 2,
        "wrapper": Coroutines,
        "overlap": 2,
        "shared_memory": False,
    },
    "faults": {"num_workers": 2, "faults": FaultPolicy(on_crash="restart")},
}
# Of those that share nearly all of their code with another one, one is tried by default.
LIKE_ANOTHER = {each for each in SETTINGS if "messages" in each and each != "messages"}
LIKE_ANOTHER |= {"views", "batches in this process", "faults"}

LARGE = [{"large": np.ones(300_000), "n": 1}, {}, {"nested": {"a": "text"}}, {"b": b"b" * 300_000}]
PICTURE = Box(0, 255, (128, 128), np.uint8)  # of four envs a batch is handed out as it lies there
NESTED = Dict(a=Box(0, 1, (3,)), b=Discrete(4), c=Tuple([Text(20), MultiBinary(3)]), d=Box(0, 1))
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode
ENVS = {  # and the modes in which they show something; in SAME_STEP those that use their arrays
    # again have other final observations than with SyncVectorEnv, which are right: test_modes.py
    "counters": ([partial(Counter, n) for n in (2, 5, 3, 4, 6)], MODES),
    "the same arrays": ([partial(SameArrays, n) for n in (1, 2, 3)], [NEXT_STEP]),
    "the same arrays of another dtype": (
        [partial(SameArrays, n, np.float64) for n in (1, 2, 3)],
        [DISABLED],
    ),
    "large infos": ([partial(Infos, LARGE[i:] + LARGE[:i]) for i in range(3)], [NEXT_STEP]),
    "large final infos": (
        [partial(Scripted, Box(0, 1), Discrete(2), [n], LARGE[::3]) for n in (1, 2, 3)],
        [SAME_STEP],
    ),
    "nested": ([partial(Scripted, NESTED, NESTED, [n, 2]) for n in (1, 3, 2)], MODES),
    "pictures": (
        [partial(Scripted, PICTURE, Discrete(2), [n, 2]) for n in (1, 2, 3, 4)],
        [NEXT_STEP, SAME_STEP],
    ),
    "CartPole": ([partial(gym.make, "CartPole-v1")] * 5, [NEXT_STEP]),
    "Blackjack": ([partial(gym.make, "Blackjack-v1")] * 3, [SAME_STEP]),
    # Those that only messages hold.
    "sequences": (
        [partial(Scripted, Sequence(Discrete(5)), Sequence(Box(0, 1)), [2])] * 3,
        [NEXT_STEP, SAME_STEP],
    ),
    "words": ([partial(Scripted, Words(), Words(), [2])] * 3, [DISABLED]),
}
UNSIZED = ["sequences", "words"]


def rows():
    """Each setting with one env by default, another one each time; the other envs are deep."""
    for number, setting in enumerate(SETTINGS):
        holds = [env for env in ENVS if env not in UNSIZED or "messages" in setting]
        shown = holds[number % len(holds)]
        marks = pytest.mark.deep if setting in LIKE_ANOTHER else ()
        yield pytest.param(setting, [shown], id=f"{setting}: {shown}", marks=marks)
        others = [env for env in holds if env != shown]
        yield pytest.param(setting, others, id=f"{setting}: others", marks=pytest.mark.deep)


@pytest.mark.parametrize("setting, envs", list(rows()))
def test_each_setting_with_each_env(setting, envs):
    for env in envs:
        fns, modes = ENVS[env]
        for mode in modes:
            if mode in MODES:
                with row(env, mode):
                    assert_equals_sync(fns, mode, **SETTINGS[setting])


@pytest.mark.deep
def test_more_workers_than_cores_for_longer_than_their_rings():
    fns = [partial(Counter, 3 + i % 5) for i in range(40)]
    assert_equals_sync(fns, steps=300, num_workers=12)


lengths = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=7)
# Infos of one env; one type a key, as Gymnasium wants it.
several_infos = st.lists(st.lists(infos(), min_size=1, max_size=3), min_size=1, max_size=3)


def plain(found):
    """Whether Gymnasium itself can gather these infos in any order."""
    types = {}
    for env in found:
        for info in env:
            for key, value in info.items():
                kind = (type(value), getattr(value, "dtype", None), getattr(value, "shape", None))
                if isinstance(value, dict) or types.setdefault(key, kind) != kind:
                    return False
    return True


def any_env(examples):
    """Draws everything: spaces, infos, lengths of episodes, modes, settings, numbers of workers."""
    common = settings(deadline=None, max_examples=examples, suppress_health_check=list(HealthCheck))

    def decorate(test):
        return common(given(st.data())(test))

    return decorate


def check_any_env(data):
    setting = data.draw(st.sampled_from(list(SETTINGS)), label="setting")
    options = dict(SETTINGS[setting])
    messages = options.get("shared_memory") is False
    space = spaces(unsized_leaves if messages else leaves)
    observations, actions = data.draw(space), data.draw(space)
    per_env_infos = data.draw(several_infos.filter(plain))
    fns = [
        partial(Scripted, observations, actions, n, per_env_infos[i % len(per_env_infos)])
        for i, n in enumerate(data.draw(lengths, label="lengths"))
    ]
    if options["num_workers"]:
        least = 2 if options.get("caller_steps") else 1
        fns *= 1 + (len(fns) < least)
        options["num_workers"] = data.draw(st.integers(least, len(fns)), label="workers")
    if len(fns) == 1:
        options.pop("parts", None)
    options.setdefault("copy", data.draw(st.booleans(), label="copy"))
    mode, seed = data.draw(st.sampled_from(MODES)), data.draw(st.integers(0, 99))
    try:
        assert_equals_sync(fns, mode, seed=seed, **options)
    except Ungathered:
        reject()


@any_env(20)
def test_any_env(data):
    check_any_env(data)


@pytest.mark.deep
@any_env(60)
def test_any_env_in_more_examples(data):
    check_any_env(data)
