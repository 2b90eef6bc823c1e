"""Damage to the rings of a trace: what makes no sense is left out, and the rest is written."""

import io
import random
import tracemalloc
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from envs import Counter
from shmvec._core.trace import TRACE_KINDS, read_trace, trace_bytes
from timelines import Timeline

from shmvec import ShmVectorEnv
from shmvec import trace as timeline
from shmvec._core import Recorder

pytestmark = pytest.mark.deep

NONSENSE = (0, 1, 0x7F, 0x80, 0xFF)


class Traced:
    """Traces of a vector env, in whose memory something is changed before they are written."""

    def __init__(self, envs, path):
        self.envs, self.path, self.recorded = envs, path, None

    def written(self, damage=lambda memory: None):
        """A trace of thirty steps, with this done to its memory."""
        damaged = None

        def read(memory, *which):
            nonlocal damaged
            if damaged is None:
                damaged = bytearray(memory)
                damage(damaged)
            return read_trace(damaged, *which)

        def noted(file, recorded):
            self.recorded = recorded
            write(file, recorded)

        write = timeline.write
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timeline, "read_trace", read)
            patch.setattr(timeline, "write", noted)
            with self.envs.trace(self.path, size=64):
                for _ in range(30):
                    self.envs.step([0] * 3)
        return Timeline(self.path)  # checks it


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    with closing(ShmVectorEnv([Counter] * 3, num_workers=0)) as envs:
        envs.reset()
        yield Traced(envs, tmp_path_factory.mktemp("traces") / "run.json")


@pytest.fixture
def recorded(traced):
    """What was recorded, as it is before it is written."""
    traced.written()
    return traced.recorded


def test_what_is_whole_is_there(traced):
    assert len(traced.written().workers()) > 40


def test_envs_in_the_first_process_of_a_container(recorded):
    (attach,) = [kind for kind, name in TRACE_KINDS.items() if name == "attach"]
    for entries in recorded.entries:
        entries["env"][entries["kind"] == attach] = 1
    file, unfinished = io.StringIO(), [("step", 0, recorded.span[1])]
    timeline.write(file, replace(recorded, parent=1, pids=[(1, 1)], unfinished=unfinished))
    assert Timeline(file.getvalue()).names == {(1, 1): "parent", (1, 2): "worker 0: envs 0 to 2"}


def test_many_entries_are_written_in_little_memory(recorded):
    recorded.entries[0] = np.resize(recorded.entries[0], 1 << 13)
    with open("/dev/null", "w") as file:
        tracemalloc.start()
        try:
            timeline.write(file, recorded)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < recorded.entries[0].nbytes * 2


def test_random_damage(traced):
    rng = random.Random(1)

    def damage(memory):
        size = len(memory)
        for _ in range(rng.choice([1, 10, 1000])):
            begin = rng.randrange(len(memory))
            memory[begin : begin + rng.choice([1, 2, 8])] = bytes([rng.choice(NONSENSE)])
            memory += bytes(max(0, size - len(memory)))

    for _ in range(30):
        traced.written(damage)


@pytest.mark.parametrize("tail", [0, (1 << 64) - 1])
def test_damaged_position(traced, tail):
    def damage(memory):
        memory[128:136] = tail.to_bytes(8, "little")

    assert traced.written(damage).parent  # whose ring is whole


def test_a_ring_that_makes_no_sense_is_left_out(traced):
    def damage(memory):
        memory[256 : 256 + 64 * 24] = bytes([0xFF]) * 64 * 24

    written = traced.written(damage)
    (waits,) = written.workers()  # as it does now, which no ring says
    assert waits["args"]["unfinished"] and written.parent


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
