"""Damage to the segment ends in a clear error: no crash, no endless wait, no huge array."""

import multiprocessing
import struct
import sys
import time
from contextlib import closing, contextmanager

import gymnasium as gym
import numpy as np
import pytest
from echoing import duration
from envs import Counter
from processes import wait_until_dozing
from segment_map import (
    LINE,
    Map,
    forget_mappings,
    keep_mappings,
    other_memories,
    until_answered,
)
from tables import deep, first, paired

from shmvec import FaultPolicy, Replay, ShmVectorEnv, WorkerCrashError
from shmvec._core import COUNTERS, Segment
from shmvec._memory.layout import Layout

LATE = 16  # see protocol.pxd
COMMAND = 3
MANY = 20.0  # seconds that nothing here takes


@pytest.fixture(autouse=True)
def mappings(monkeypatch):
    keep_mappings(monkeypatch.setattr)
    yield
    forget_mappings()


class Damaging(Counter):
    """Damages the segment in its steps, as an env's own C code may."""

    def __init__(self, damage):
        super().__init__(length=1000)
        self.damage = damage

    def step(self, action):
        self.damage(Map())
        return super().step(action)


def make_counter():
    return Counter(length=1000)


def vector_env(num_workers, make=make_counter, num_envs=2, **arguments):
    """A vector env that was reset, in whose segment one can write."""
    envs = ShmVectorEnv([make] * num_envs, num_workers=num_workers, context="fork", **arguments)
    envs.reset() if envs.batch_size is None else envs.async_reset()
    return closing(envs)


def answered(envs, actions):
    """Asks for a step and waits until the answers are in the segment."""
    envs.step_async(actions)
    assert until_answered(MANY)
    return Map()


# ---- rings of records ---------------------------------------------------------------------------


@pytest.mark.parametrize("word", first(range(5)))
def test_a_damaged_answer(word):
    with vector_env(1) as envs:
        found = answered(envs, [0, 0])
        slot = found.slot(found.completions(0)) + 4 * word
        found.put(slot, found.get(slot) ^ LATE)  # of the flags: a message is on the pipe
        with pytest.raises(RuntimeError, match="the segment is damaged"):
            envs.step_wait()


@pytest.mark.deep
@pytest.mark.parametrize("word", [0, 2, 4])
def test_a_damaged_request(word):
    def damage(found):
        slot = found.slot(found.requests(0)) + 4 * word
        found.put(slot, found.get(slot) ^ (1 ^ COMMAND))  # the operation: read the pipe

    makers = [lambda: Damaging(damage), Counter]
    with closing(ShmVectorEnv(makers, num_workers=1, context="fork", batch_size=1)) as envs:
        envs.async_reset()
        envs.recv(), envs.recv()
        envs.send([0, 0])
        envs.recv()
        with pytest.raises(WorkerCrashError):
            envs.recv(timeout=MANY)
    assert not multiprocessing.active_children()


@pytest.mark.deep
def test_a_damaged_request_to_this_process():
    with vector_env(0) as envs:
        envs.step_async([0, 0])
        found = Map()
        found.put(found.slot(found.requests(0)) + 8, COMMAND)
        with pytest.raises(RuntimeError, match="the segment is damaged: the request ring"):
            envs.step_wait()


# ---- messages -----------------------------------------------------------------------------------

BYTES, TAG, ENV, KIND, SEQUENCE, SUM = range(6)  # words of a message
VALUES = 24  # bytes before its values
FINAL, OBSERVATION, ACTION = 1, 2, 3


def telling(info):
    class Telling(Counter):
        def step(self, action):
            return *super().step(action)[:4], dict(info)

    return Telling


def answered_with(envs, actions=(0, 0)):
    """A step's answers, and where the first info of it is."""
    found = answered(envs, list(actions))
    return found, found.message(found.infos(0), found.info_bytes)


@pytest.mark.deep
@pytest.mark.parametrize(
    "info, num_workers", paired([{"a": 1, "b": "text"}, {3: "pickled"}], [0, 1])
)
def test_a_damaged_head_of_an_info(num_workers, info):
    for word in range(6):
        for change in (1, 1 << 31):
            with vector_env(num_workers, telling(info)) as envs:
                envs.step([0, 0])
                found, message = answered_with(envs)
                word_at = message + 4 * word
                found.put(word_at, found.get(word_at) ^ change)
                with pytest.raises(RuntimeError, match="the segment is damaged: a message of"):
                    envs.step_wait()


@pytest.mark.parametrize(
    ("word", "value"),
    first(
        [(KIND, FINAL), (KIND, OBSERVATION), (KIND, ACTION), (KIND, 4), (KIND, 2**32 - 1)]
        + [(ENV, 2), (ENV, 2**32 - 1), (TAG, 2), (TAG, 0x7FFFFFFC)]
        + [(BYTES, 0), (BYTES, 15), (BYTES, 16), (BYTES, 23)]
    ),
)
@pytest.mark.parametrize("batch_size", [None, *deep(2)])
def test_indices_are_checked_whatever_the_sum_says(word, value, batch_size):
    """FINAL would be read by a codec that is not there, for one."""
    with vector_env(0, telling({"a": 1}), batch_size=batch_size) as envs:
        if batch_size is None:
            envs.step([0, 0])
            envs.step_async([0, 0])
            finish = envs.step_wait
        else:
            for _ in range(2):
                envs.recv()
                envs.send([0, 0])
            finish = envs.recv
        until_answered(MANY)
        found = Map()
        message = found.message(found.infos(0), found.info_bytes)
        found.seal_message(message)
        found.put(message + 4 * word, value)
        found.seal_message(message)
        with pytest.raises(RuntimeError, match="the segment is damaged: a message of worker 0"):
            finish()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("word", "value"),
    [(0, 1), (0, 2), (0, 2**32 - 1), (0, 2**32 - 2), (1, 0), (1, 3), (1, 2**32 - 1), (3, 77)],
)
@pytest.mark.parametrize("env", [0, 1])
def test_answers_are_checked_whatever_the_sum_says(word, value, env):
    with vector_env(0, batch_size=2) as envs:
        envs.recv()
        envs.send([0], [env])
        until_answered(MANY)
        found = Map()
        slot = found.slot(found.completions(0))
        found.put(slot + 4 * word, value if word else env + value)
        found.seal(found.completions(0))
        with pytest.raises(RuntimeError, match="the segment is damaged"):
            envs.recv(min_envs=1)


@pytest.mark.parametrize("info", first([{3: "pickled"}, {"a": ("pickled", 1)}]))
def test_damaged_pickles_are_not_unpickled(info):
    make = telling(info)
    with vector_env(0, make) as envs:
        envs.step([0, 0])
        found, message = answered_with(envs)
        length = found.get(message + 4 * BYTES) - 16
        envs.step_wait()
        for place in range(0, length, 3):
            found, message = answered_with(envs)
            found.memory[message + VALUES + place] ^= 0x55
            with pytest.raises(RuntimeError, match="the segment is damaged: a message of worker 0"):
                envs.step_wait()
            if 3 in info:  # it stays in the ring, and in the way
                found.memory[message + VALUES + place] ^= 0x55
            assert envs.step([0, 0])[0].shape == (2, 4)


@pytest.mark.deep
def test_a_damaged_schema():
    with vector_env(1, telling({"a": 1, "b": [1]})) as envs:
        found, message = answered_with(envs)  # the first step's: the schema comes first
        assert found.get(message + 4 * TAG) == 0x7FFFFFFD
        found.memory[message + VALUES + 60] ^= 1
        with pytest.raises(RuntimeError, match="the segment is damaged: a message of worker 0"):
            envs.step_wait()


@pytest.mark.deep
def test_a_text_that_is_none():
    with vector_env(1, telling({"a": "text"})) as envs:
        envs.step([0, 0])
        found, message = answered_with(envs)
        found.memory[message + VALUES + 8] = 0xFF
        with pytest.raises(RuntimeError, match=r"damaged: .* worker 0 .* no text \(env 0\)"):
            envs.step_wait()
        assert envs.step([0, 0])[4]["a"].tolist() == ["text"] * 2


@pytest.mark.deep
def test_a_text_that_is_too_long():
    with vector_env(1, telling({"a": "text"})) as envs:
        envs.step([0, 0])
        found, message = answered_with(envs)
        found.put(message + VALUES, 2**32 - 1)
        with pytest.raises(RuntimeError, match=r"damaged: .* cut short \(env 0\)"):
            envs.step_wait()


@pytest.mark.deep
def test_lost_infos():
    with vector_env(1, telling({"a": 1})) as envs:
        envs.step([0, 0])
        found, _ = answered_with(envs)
        found.put(found.infos(0), found.get(found.infos(0) + LINE))
        with pytest.raises(RuntimeError, match="the segment is damaged: .* is not there"):
            envs.step_wait()


@pytest.mark.deep
def test_lost_actions():
    def lose(found):
        found.put(found.actions(0), found.get(found.actions(0) + LINE))

    makers = [lambda: Damaging(lose), Counter]
    with closing(
        ShmVectorEnv(makers, num_workers=1, context="fork", batch_size=1, shared_memory=False)
    ) as envs:
        envs.async_reset()
        envs.recv(), envs.recv()
        envs.send([0, 0])
        envs.recv()
        with pytest.raises(WorkerCrashError):
            envs.recv(timeout=MANY)


# ---- a replay -----------------------------------------------------------------------------------


class DamagesCounts(Counter):
    """Damages the replay's number of records of all envs in its ninth step."""

    def __init__(self, damage):
        super().__init__(length=1000)
        self.damage = damage

    def step(self, action):
        result = super().step(action)
        if self.count == 9:
            for memory in other_memories():
                struct.pack_into("=2q", memory, LINE, self.damage, self.damage)
        return result


@pytest.mark.deep
@pytest.mark.parametrize("count", [1 << 62, -5, 9 + 200])
def test_a_damaged_number_of_records(count):
    """It was a loop's end and, of rows, an index."""
    makers = [lambda: DamagesCounts(count), Counter]
    with closing(ShmVectorEnv(makers, num_workers=1, context="fork")) as envs:
        replay = Replay(envs, 200, seed=1)
        envs.reset()
        damaged = 0
        for _ in range(40):
            try:
                envs.step([0, 0])
            except RuntimeError as error:
                assert str(error).startswith("the segment is damaged: the number of records of env")
                damaged += 1
        assert damaged == 1 and len(replay) > 60
        batch = replay.sample(64)
        assert np.array_equal(batch.next_observations[:, 0], batch.rewards)
        replay.close()


# ---- slabs --------------------------------------------------------------------------------------


def slabs(observation_space, action_space):
    layout = Layout(observation_space, action_space, 3)
    memory = bytearray(layout.nbytes + 100_000)
    segment = Segment.create(memory, 1, 3, 64, 4096, 64, layout.nbytes)
    return memory, layout.attach(segment)


KINDS = {"text": 0x7F, "tëxt": 0xFF, "τext": 0xFFFF, "te\U0010ffff": 0x10FFFF}


def head(length, bound):
    return length.to_bytes(4, sys.byteorder) + bound.to_bytes(4, sys.byteorder)


@pytest.mark.deep
@pytest.mark.parametrize(("text", "bound"), KINDS.items())
def test_damaged_texts(text, bound):
    memory, found = slabs(gym.spaces.Text(5, charset="ab"), gym.spaces.Discrete(2))
    texts = found.results.observations
    texts.put(1, text)
    row = memory.index(head(len(text), bound))
    assert texts.get(1) == text
    good = bytes(memory[row : row + 32])

    def is_no_text():
        for read in (texts.get, lambda env: texts.batch(True)):
            with pytest.raises(RuntimeError, match="the segment is damaged: .* row 1 is no text"):
                read(1)
        memory[row : row + 32] = good

    for length in (6, 2**31, 2**32 - 1):
        memory[row : row + 4] = length.to_bytes(4, sys.byteorder)
        is_no_text()
    for wrong in {0, 1, 0x7E, 0x100, 0x10FFFE, 0x110000, 2**31, 2**32 - 1}:
        memory[row + 4 : row + 8] = wrong.to_bytes(4, sys.byteorder)
        is_no_text()
    if bound == 0x7F:  # what no ASCII is
        memory[row + 9] = 0x80
        is_no_text()
    elif bound == 0x10FFFF:  # beyond Unicode
        memory[row + 8 + 2] = 0x11
        is_no_text()
    for smaller in set(KINDS.values()) - {bound}:  # these bytes are a text, too, or they are none
        memory[row + 4 : row + 8] = smaller.to_bytes(4, sys.byteorder)
        try:
            other = texts.get(1)
        except RuntimeError as error:
            assert "row 1 is no text" in str(error)
        else:
            assert "".join(map(chr, map(ord, other))) == other  # of the kind that such strings are
        memory[row : row + 32] = good
    memory[row : row + 4] = (5).to_bytes(4, sys.byteorder)
    assert texts.get(1) == text.ljust(5, "\0")


@pytest.mark.deep
@pytest.mark.parametrize("shape", [(), (3,)])
def test_damaged_action_formats(shape):
    space = gym.spaces.Box(0, 1, shape, np.float32)
    memory, found = slabs(space, space)
    found.actions.put_rows(np.arange(3), np.full((3, *shape), 0.5, np.float32))
    codes = memory.index(bytes([10] * 3))
    for code in range(256):
        memory[codes + 2] = code
        if code < 12:
            assert found.actions.get(2).shape == shape
        else:  # 12: long double, for which there is no room
            with pytest.raises(RuntimeError, match=f"damaged: action format {code} of env 2"):
                found.actions.get(2)


def test_a_damaged_flag_of_a_seed():
    """It says that a message has the seed, and there is none."""
    with vector_env(0) as envs:
        envs.reset_async(seed=[1 << 40, 1 << 41])
        memory = Map().memory
        content = bytes(memory)
        seeds = content.index(struct.pack("=qq", 1 << 40, 1 << 41))
        memory[content.index(bytes([1, 1]), seeds)] = 4
        with pytest.raises(RuntimeError, match="segment is damaged: env 0 was sent no seed"):
            envs.reset_wait()


# ---- hints: the count, tails, the bell, what a worker is busy with ------------------------------


@pytest.mark.parametrize("damage, num_workers", paired([1, -1, 2**20, 2**31], [2, 0, 1]))
def test_a_damaged_count(num_workers, damage):
    """The rings show which envs have answered; the count is right again from then on."""
    with vector_env(num_workers) as envs:
        for when in ("before", "after", "after", "both"):
            found = Map()
            if when != "after":
                found.put(found.completion + 4, found.get(found.completion + 4) + damage)
            envs.step_async([1, 2])
            if when != "before":
                until_answered(0.5)
                found.put(found.completion + 4, found.get(found.completion + 4) - damage)
            assert envs.step_wait()[0][:, 1].tolist() == [1, 2]

        def step():
            assert envs.step([2, 3])[0][:, 1].tolist() == [2, 3]

        # A slice is 50 ms, of every step; the machine may be busy now and then.
        assert any(duration(step, 5) < 0.04 for _ in range(5)), "it still waits for slices"


@pytest.mark.deep
@pytest.mark.parametrize("damage, num_workers", paired([1, -1, 2**20, 2**31], [2, 0]))
def test_a_damaged_count_in_batches(num_workers, damage):
    with vector_env(num_workers, num_envs=4, batch_size=2) as envs:
        for turn in range(16):
            if turn % 4 == 0:
                found = Map()
                found.put(found.completion + 4, found.get(found.completion + 4) + damage)
            infos = envs.recv()[4]
            envs.send([turn % 4] * 2, infos["env_id"])
        assert envs.stats().parent.requests


@pytest.mark.deep
def test_an_answer_that_a_damaged_tail_hides():
    with vector_env(2) as envs:
        found = answered(envs, [1, 2])
        ring = found.completions(1)
        found.put(ring, found.get(ring + LINE))
        assert envs.step_wait()[0][:, 1].tolist() == [1, 2]


@pytest.mark.deep
@pytest.mark.parametrize("which", ["requests", "completions"])
def test_nobody_waits_for_this_process(which):
    """Without workers nothing is announced a second time."""
    with vector_env(0) as envs:
        envs.step_async([0, 0])
        if which == "completions":
            until_answered(MANY)
        ring = getattr(Map(), which)(0)
        Map().put(ring, Map().get(ring + LINE))
        with pytest.raises(RuntimeError, match="the segment is damaged: .* is lost"):
            envs.step_wait()


@contextmanager
def dozing():
    with vector_env(2) as envs:
        wait_until_dozing([process.pid for process in envs.processes])
        found = Map()
        found.put(found.bell, 0, 0)  # no waiter sleeps, it says, and none dozes
        yield envs
    assert not multiprocessing.active_children()


@pytest.mark.deep
def test_a_bell_that_has_forgotten_who_dozes():
    with dozing() as envs:
        assert envs.step([1, 2])[0][:, 1].tolist() == [1, 2]


@pytest.mark.deep
def test_a_request_that_a_damaged_tail_hides():
    with dozing() as envs:
        envs.step_async([1, 2])
        found = Map()
        for worker in range(2):
            ring = found.requests(worker)
            found.put(ring, found.get(ring + LINE))
        assert envs.step_wait()[0][:, 1].tolist() == [1, 2]


@pytest.mark.deep
def test_commands_to_workers_that_doze():
    with dozing() as envs:
        envs.set_attr("payload", b"x" * 1_000_000)  # more than a pipe takes at once
        assert [len(payload) for payload in envs.get_attr("payload")] == [1_000_000] * 2


@pytest.mark.deep
def test_closing_workers_that_doze():
    with dozing() as envs:
        envs.close()


@pytest.mark.deep
def test_a_worker_that_is_busy_with_nonsense():
    def damage(found):
        words = len(COUNTERS["waits"]) + len(COUNTERS["work"])
        busy = found.counters + 8 * words  # since when, and with what
        found.memory[busy : busy + 16] = (1).to_bytes(8, "little") + (2000).to_bytes(8, "little")
        time.sleep(3)

    with vector_env(1, lambda: Damaging(damage), 1, step_timeout=1.0) as envs:
        with pytest.raises(RuntimeError, match="the segment is damaged: worker 0 is busy with"):
            envs.step([0])


@pytest.mark.deep
def test_stats_of_counters_and_histograms_that_are_nonsense():
    with vector_env(2) as envs:
        before = envs.stats()
        found = Map()
        for begin, end in (
            (found.counters, found.timings),
            (found.timings, found.requests(0)),
        ):
            found.memory[begin:end] = b"\xff" * (end - begin)
        stats = envs.stats()
        assert stats.doing == (None, None)
        for changed in (stats, stats - before, before - stats):
            assert changed.verdict.kind and str(changed)


@pytest.mark.deep
def test_a_worker_that_is_restarted_under_a_damaged_header():
    faults = FaultPolicy(on_crash="restart", max_restarts=1)
    with vector_env(2, faults=faults) as envs:
        Map().put(8, 0, 0, 0)
        envs.processes[1].kill()
        assert envs.step([0, 0])[3].tolist() == [False, True]
        assert envs.step([0, 0])[3].tolist() == [False, False]
