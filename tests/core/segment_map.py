"""The segment of a vector env, for tests that damage it: where it is, and what lies where in it."""

import ctypes
import struct
import time

import shmvec._processes.assembly
import shmvec._processes.worker
from shmvec._core import Ledger, MappedMemory

LINE = 128
HEADER = struct.Struct("=QII6IQ17Q")  # see csrc/segment.h
MAGIC = 0x316365766D6873FF

MAPPED = []  # the segments that this process has mapped
LEDGERS = []  # the ledger that it made last


def _mapped(descriptor, nbytes):
    MAPPED.append(MappedMemory(descriptor, nbytes))
    return MAPPED[-1]


def _made(*arguments):
    LEDGERS[:] = [Ledger(*arguments)]
    return LEDGERS[0]


def keep_mappings(setattr=setattr):
    """Keeps from now on what this process maps, and what workers map that it forks."""
    forget_mappings()
    setattr(shmvec._processes.assembly, "MappedMemory", _mapped)
    setattr(shmvec._processes.worker, "MappedMemory", _mapped)
    setattr(shmvec._processes.assembly, "Ledger", _made)


def forget_mappings():
    """Releases what was kept."""
    MAPPED.clear()
    LEDGERS.clear()


def until_answered(timeout):
    """Waits until all answers are in the segment, and takes none; False: the time is up first."""
    links, end = LEDGERS[0].links, time.monotonic() + timeout
    if links.workers.serve_inline is not None:
        links.workers.serve_inline()
    while not all(map(links.has_answered, range(len(links.workers.ranges)))):
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def other_memories():
    """What this process shares with others besides the segment."""
    found = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, rights, *_, name = line.split(maxsplit=5)
            if name == "/memfd:shmvec (deleted)\n" and rights.startswith("rw"):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                memory = (ctypes.c_ubyte * (end - begin)).from_address(begin)
                found.append(memoryview(memory).cast("B"))
    return found


class Map:
    """What lies where in the segment that was mapped last, as its header says."""

    def __init__(self):
        self.memory = memoryview(MAPPED[-1])
        (
            magic, _, _, self.num_workers, _, self.records, self.info_bytes, self.action_bytes, _,
            _, self.bell, self.completion, self.policy, self.notice, self.counters, self.past,
            self.timings, self.texts,
            self._requests, self._completions, self._record_stride, self._infos,
            self._info_stride, self._actions, self._action_stride, self.slabs, self.total,
        ) = HEADER.unpack_from(self.memory)  # fmt: skip
        assert magic == MAGIC
        self.slot_bytes = (self._record_stride - 2 * LINE) // self.records

    def requests(self, worker):
        """Where a ring begins: a line for the tail, one for the head, then its content."""
        return self._requests + worker * self._record_stride

    def completions(self, worker):
        return self._completions + worker * self._record_stride

    def infos(self, worker):
        return self._infos + worker * self._info_stride

    def actions(self, worker):
        return self._actions + worker * self._action_stride

    def slot(self, ring, back=1):
        """Where a record of a ring is: {first, count, operation, sequence}; the last one is 1."""
        place = (self.get(ring) - back) % self.records
        return ring + 2 * LINE + place * self.slot_bytes

    def message(self, ring, capacity):
        """Where the oldest message that was not taken is: {bytes, tag, env, kind, sequence}."""
        return ring + 2 * LINE + self.get(ring + LINE) % capacity

    def get(self, offset):
        return struct.unpack_from("=I", self.memory, offset)[0]

    def put(self, offset, *words):
        struct.pack_into(f"={len(words)}I", self.memory, offset, *(w % 2**32 for w in words))

    def seal(self, ring, back=1):
        """Makes a record look as if it had been put there as it is."""
        slot = self.slot(ring, back)
        first, count, operation, sequence = struct.unpack_from("=4I", self.memory, slot)
        sum = _mix(START + self.get(ring) - back, first | count << 32)
        self.put(slot + 16, _mix(sum, operation | sequence << 32))

    def seal_message(self, message):
        """The same of a packed message, which is one without pickles."""
        size, tag, env, kind, sequence = struct.unpack_from("=5I", self.memory, message)
        sum = _mix(_mix(START, size | tag << 32), env | kind << 32)
        self.put(message + 20, _mix(sum, sequence))


START = 0x243F6A8885A308D3  # see csrc/sum.h


def _mix(sum, word):
    sum = (sum ^ word) * 0x9E3779B97F4A7C15 % 2**64
    return sum ^ sum >> 32
