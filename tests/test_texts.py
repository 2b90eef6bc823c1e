"""Texts arrive as they do in SyncVectorEnv: of any characters, length and place."""

import platform
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from equality import MODES, same, sync_env
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import output_of
from tables import first

from shmvec import ShmVectorEnv
from shmvec.exchange import AutoresetMode, FaultPolicy

RESETTING = [mode for mode in MODES if mode is not AutoresetMode.DISABLED]
LONGEST = 700  # from 512 bytes on memory is not Python's own


class Word(str):
    """A str of another class."""


# Of each number of bytes that a character may have, with the first and last character of each.
letters = st.sampled_from("a\0\x7f\x80\xe9\xff\u0100\u65e5\ud800\udfff\uffff\U00010000\U0010ffff")
texts = st.one_of(
    st.text(letters, max_size=6),
    st.builds(lambda letter, n: letter * n, letters, st.integers(500, LONGEST)),
    st.builds(lambda letter, n: "a" * n + letter, letters, st.integers(0, LONGEST - 1)),
    st.text(st.characters(), max_size=20),
)
# NumPy's pickles cut zeros off the end.
strings = st.one_of(texts, texts.map(lambda text: np.str_(text.rstrip("\0"))), texts.map(Word))

SPACES = {
    "text": Text(LONGEST),
    "beside arrays": Dict(text=Text(LONGEST), box=Box(0, 9, (2,)), pair=Tuple([Text(LONGEST)] * 2)),
    "beside large arrays": Dict(text=Text(LONGEST), box=Box(0, 9, (20_000,))),
    "in a tuple": Tuple([Discrete(9), Text(LONGEST)]),
}


def filled(space, text):
    """A value of a space, all of whose texts are this one."""
    if isinstance(space, Dict):
        return {key: filled(part, text) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple(filled(part, text) for part in space.spaces)
    if isinstance(space, Text):
        return text
    return np.full(space.shape, len(text) % 9, space.dtype) if space.shape else np.int64(1)


class Tells(gym.Env):
    """Returns texts one after the other, and with each the last action as an info."""

    def __init__(self, space, told):
        self.observation_space = self.action_space = space
        self.told, self.count = told, 0

    def reset(self, *, seed=None, options=None):
        return filled(self.observation_space, self.told[0]), {"text": self.told[0]}

    def step(self, action):
        self.count += 1
        text = self.told[self.count % len(self.told)]
        info = {"text": text, "action": repr(action), "kind": type(action).__name__}
        over = self.count % 3 == 0
        return filled(self.observation_space, text), 1.0, over, False, info


def results(envs, actions):
    with closing(envs):
        return [envs.reset(seed=1), *(envs.step(action) for action in actions)]


def plain(value):
    """The same with every text of a class of its own as a str, as observations and actions are."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    return str(value) if isinstance(value, str) else value


@pytest.mark.deep
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_texts_arrive_as_in_gymnasium(data):
    space = SPACES[data.draw(st.sampled_from(list(SPACES)), label="space")]
    told = data.draw(st.lists(texts, min_size=1, max_size=4), label="told")
    sent = data.draw(st.lists(texts, min_size=2, max_size=2), label="sent")
    mode = data.draw(st.sampled_from(RESETTING), label="mode")
    options = data.draw(
        st.sampled_from(
            [
                {"num_workers": 2},
                {"num_workers": 0},
                {"num_workers": 1, "shared_memory": False},
                {"num_workers": 2, "faults": FaultPolicy(on_crash="restart")},
            ]
        ),
        label="options",
    )
    made = [partial(Tells, space, told[i:] + told[:i]) for i in range(2)]
    each = [filled(space, text) for text in sent]
    actions = [concatenate(space, each, create_empty_array(space, 2))] * 4
    ours = results(ShmVectorEnv(made, autoreset_mode=mode, **options), actions)
    assert same(ours, results(sync_env(made, mode), actions))


@pytest.mark.deep
@settings(deadline=None, max_examples=25)
@given(st.lists(strings, min_size=1, max_size=4))
def test_classes_of_strings(told):
    """Observations are str; infos keep their class."""
    made = [partial(Tells, Text(LONGEST), told)] * 2
    ours = results(ShmVectorEnv(made, num_workers=1), [("a", "b")] * 3)
    theirs = results(sync_env(made), [("a", "b")] * 3)
    for (mine, *_, infos), (other, *_, expected) in zip(ours, theirs, strict=True):
        assert same(mine, plain(other)) and same(infos, expected)


@pytest.mark.parametrize("bad", first(["a" * (LONGEST + 1), b"a", 3, None]))
def test_what_is_no_text_of_the_space_is_refused(bad):
    made = [partial(Tells, Text(LONGEST), [bad])]
    with closing(ShmVectorEnv(made)) as envs, pytest.raises((TypeError, ValueError), match="env 0"):
        envs.reset()


@pytest.mark.deep
@pytest.mark.parametrize("letter", "a\u65e5")
def test_long_texts_in_infos_stay_in_shared_memory(letter):
    """The rings have room for as long texts as the spaces have."""
    made = [partial(Tells, Text(64_000), [letter * 64_000])] * 8
    with closing(ShmVectorEnv(made, num_workers=2)) as envs:
        envs.reset()
        for _ in range(5):
            infos = envs.step(("a",) * 8)[-1]
            assert infos["text"].tolist() == [letter * 64_000] * 8
        assert sum(worker.late for worker in envs.stats().workers) == 0


@pytest.mark.deep
def test_lone_surrogates_in_infos_are_not_pickled():
    text = "\ud800" * 1700  # 5,100 bytes in a pickle, of 4,096 that an env has in the ring
    made = [partial(Tells, Discrete(2), [text])] * 64
    with closing(ShmVectorEnv(made, num_workers=1)) as envs:
        envs.reset()
        envs.step(np.zeros(64, int))
        assert sum(worker.late for worker in envs.stats().workers) == 0


@pytest.mark.deep
def test_blocks_are_for_arrays():
    """Texts are copied in any case, so workers write them once."""
    for space, has_blocks in (
        (Text(60_000), False),
        (SPACES["beside arrays"], False),
        (SPACES["beside large arrays"], True),
    ):
        made = [partial(Tells, space, ["a"])] * 4
        with closing(ShmVectorEnv(made, num_workers=2)) as envs:
            assert (envs.exchange.layout.num_blocks > 0) == has_blocks


MEMORY = """
import resource
import gymnasium as gym
from shmvec import ShmVectorEnv

class Tells(gym.Env):
    observation_space, action_space = gym.spaces.Text(60_000), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return "a" * 60_000, {}
    def step(self, action):
        return "a" * 60_000, 0.0, False, False, {}

if __name__ == "__main__":
    envs = ShmVectorEnv([Tells] * 64, num_workers=1)
    for turn in range(25):
        if turn == 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        observations = envs.reset()[0]
        del observations
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 20)
    envs.close()
"""


@pytest.mark.deep
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_the_memory_of_long_texts_is_used_again(tmp_path):
    """64 texts of 60,000 bytes fill 940 pages: these are not new ones in each batch."""
    script = tmp_path / "memory.py"
    script.write_text(MEMORY)
    assert int(output_of(script)) < 100
