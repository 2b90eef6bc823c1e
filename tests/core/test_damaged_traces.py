"""Damage to the rings of a trace: what makes no sense is left out, and the rest is written."""

import io
import random
import tracemalloc
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from envs import Counter
from timelines import Timeline

from shmvec import ShmVectorEnv
from shmvec import _trace as timeline
from shmvec._core import Recorder, read_trace, trace_bytes

NONSENSE = (0, 1, 0x7F, 0x80, 0xFF)


@pytest.fixture(scope="module")
def recorded():
    """A trace, and the memory into which it was recorded."""
    with closing(ShmVectorEnv([Counter] * 3, num_workers=0)) as envs:
        envs.reset()
        trace = envs.trace("/dev/null", size=64)
        with trace:
            for _ in range(30):
                envs.step([0] * 3)
            memory = bytes(trace._memory)
        yield trace, memory


def written(trace, memory):
    file = io.StringIO()
    timeline.write(file, trace._recorded(memory))
    return Timeline(file.getvalue())


def test_what_is_whole_is_there(recorded):
    trace, memory = recorded
    assert len(written(trace, bytearray(memory)).workers()) > 40


def test_envs_in_the_first_process_of_a_container(recorded):
    trace, memory = recorded
    told = trace._recorded(bytearray(memory))
    for entries in told.entries:
        entries["env"][entries["kind"] == timeline._ATTACH] = 1
    file = io.StringIO()
    timeline.write(file, replace(told, parent=1, pids=[(1, 1)], busy=[(0, "step", told.span[1])]))
    assert Timeline(file.getvalue()).names == {(1, 1): "parent", (1, 2): "worker 0: envs 0 to 2"}


def test_many_entries_are_written_in_little_memory(recorded):
    trace, memory = recorded
    told = trace._recorded(bytearray(memory))
    told.entries[0] = np.resize(told.entries[0], 1 << 13)
    with open("/dev/null", "w") as file:
        tracemalloc.start()
        try:
            timeline.write(file, told)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < told.entries[0].nbytes * 2


@pytest.mark.parametrize("seed", range(10))
def test_random_damage(recorded, seed):
    trace, memory = recorded
    rng = random.Random(seed)
    for _ in range(30):
        damaged = bytearray(memory)
        for _ in range(rng.choice([1, 10, 1000])):
            begin = rng.randrange(len(damaged))
            damaged[begin : begin + rng.choice([1, 2, 8])] = bytes([rng.choice(NONSENSE)])
            damaged += bytes(max(0, len(memory) - len(damaged)))
        written(trace, damaged)  # checks it


@pytest.mark.parametrize("tail", [0, 5, 1 << 31, (1 << 64) - 1])
def test_damaged_position(recorded, tail):
    trace, memory = recorded
    damaged = bytearray(memory)
    damaged[128:136] = tail.to_bytes(8, "little")
    timeline = written(trace, damaged)
    assert timeline.parent  # whose ring is whole


def test_a_ring_that_makes_no_sense_is_left_out(recorded):
    trace, memory = recorded
    damaged = bytearray(memory)
    damaged[256 : 256 + 64 * 24] = bytes([0xFF]) * 64 * 24
    timeline = written(trace, damaged)
    (waits,) = timeline.workers()  # as it does now, which no ring says
    assert waits["args"]["unfinished"] and timeline.parent


def test_rings_that_are_not_there():
    memory = bytearray(trace_bytes(2, 16))
    Recorder(memory, 2, 16, 1, 7)
    entries, lost = read_trace(memory, 2, 16, 1)
    assert entries["env"].tolist() == [7] and lost == 0
    for rings, size, index in [
        (2, 16, 2),
        (2, 16, -1),
        (3, 16, 0),
        (2, 32, 0),
        (2, 17, 0),
        (2, 8, 0),
    ]:
        with pytest.raises(ValueError, match="ring"):
            Recorder(memory, rings, size, index, 7)
        with pytest.raises(ValueError, match="ring"):
            read_trace(memory, rings, size, index)
    with pytest.raises((BufferError, ValueError)):
        Recorder(np.zeros(1 << 12, np.uint8)[::2], 2, 16, 1, 7)
