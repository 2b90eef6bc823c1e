"""Large results of commands: they come as they were returned, through memory that is lent again."""

import fcntl
import os
import resource
import signal
import tracemalloc
from contextlib import closing

import numpy as np
import pytest
from envs import Counter
from processes import run_alone
from tables import deep

from shmvec import FaultPolicy, ShmVectorEnv, WorkerCrashError
from shmvec._memory.parcels import Depot, Parcel
from shmvec._processes import recovery
from shmvec.exchange import Exchange

LARGE = 1_000_000  # bytes of a result
DEPOT = 1 << 26  # bytes that the memory for results has at most

_picture = np.zeros(LARGE, np.uint8)  # one for all envs of a worker


class Painter(Counter):
    """Returns large results."""

    def __init__(self, index=0):
        super().__init__(99)
        self.index = index

    def paint(self, value=0, nbytes=LARGE):
        """An array that no other object has."""
        return np.full(nbytes, value + self.index, np.uint8)

    def repaint(self, value):
        """An array that the worker's other envs paint over."""
        _picture[:] = value + self.index
        return _picture

    def paint_or_fail(self):
        if self.index == 1:
            raise LookupError("no paint")
        return self.paint()

    def paint_without_descriptors(self):
        _limit_descriptors(3)  # and for ever: the result is packed later
        return self.paint()

    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)


def _limit_descriptors(limit):
    """Lets this process open no more than it has, if it has so many; returns the limit before."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return before


def painters(count=4):
    return [lambda index=index: Painter(index) for index in range(count)]


def painted(values, nbytes=LARGE):
    return [np.full(nbytes, value, np.uint8) for value in values]


@pytest.fixture
def sides():
    """The worker's and the parent's view of a depot."""
    depot = Depot.create()
    worker = Depot(os.dup(depot.descriptor))
    worker.lend(True)
    yield worker, depot
    worker.close()
    depot.close()


def collected(parent, parcel):
    return parent.collect([parcel])[0].open()


def _readonly(array):
    array.flags.writeable = False
    return array


RESULTS = {
    "nothing": lambda: None,
    "small": lambda: np.arange(9),
    "in C's order": lambda: np.arange(60_000, dtype=np.float32).reshape(100, 200, 3),
    "in Fortran's": lambda: np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "every other one": lambda: np.arange(200_000)[::2],
    "turned": lambda: np.arange(60_000).reshape(100, 200, 3).transpose(1, 0, 2),
    "objects": lambda: np.array([{"a": 1}, None] * 5_000, object),
    "fields": lambda: np.zeros(9_000, [("a", np.int32), ("b", np.float64)]),
    "read only": lambda: _readonly(np.arange(60_000)),
    "bytes": lambda: bytes(range(256)) * 500,
    "bytearray": lambda: bytearray(range(256)) * 500,
    "text": lambda: "ä" * 100_000,
    "within others": lambda: {"a": [np.arange(60_000), "x" * 50_000], "b": (np.ones((200, 200)),)},
}


@pytest.mark.parametrize(
    "name", ["within others", *deep(*[each for each in RESULTS if each != "within others"])]
)
def test_a_result_comes_as_it_was_packed(sides, name):
    worker, parent = sides
    parcel = worker.pack(RESULTS[name]())
    others = worker.pack(np.ones(LARGE))
    np.testing.assert_equal(collected(parent, others), np.ones(LARGE))
    (copy,) = parent.collect([parcel])
    worker.lend(True)
    worker.pack(np.ones(LARGE))  # in the same place
    result = copy.open()
    np.testing.assert_equal(result, RESULTS[name]())
    assert type(result) is type(RESULTS[name]())
    if isinstance(result, np.ndarray):
        assert result.dtype == RESULTS[name]().dtype
        assert result.flags.writeable is (name != "read only")


@pytest.mark.deep
def test_a_result_is_pickled_once_and_a_function_of_a_script_too(sides):
    pickled = []

    class Counted:
        def __reduce__(self):
            pickled.append(1)
            return int, (3,)

    worker, parent = sides
    assert collected(parent, worker.pack([Counted(), "x" * 50_000])) == [3, "x" * 50_000]
    assert pickled == [1]
    assert collected(parent, worker.pack(lambda: 4))() == 4


@pytest.mark.deep
def test_what_cannot_be_pickled_takes_no_room(sides):
    worker, parent = sides
    for _ in range(200):
        with pytest.raises(TypeError):
            worker.pack([np.ones(LARGE), (one for one in "generator")])
    assert not isinstance(worker.pack(bytes(LARGE)).pickled, bytes)


@pytest.mark.deep
@pytest.mark.parametrize("why", ["not lent", "too large", "no memory"])
def test_what_has_no_room_goes_with_the_message(sides, monkeypatch, why):
    worker, parent = sides
    if why == "not lent":
        worker.lend(False)
    elif why == "no memory":

        def none(*_):
            raise OSError("no memory")

        monkeypatch.setattr(os, "posix_fallocate", none)
    array = np.ones(DEPOT + 1 if why == "too large" else LARGE, np.uint8)
    parcel = worker.pack({"a": array})
    assert isinstance(parcel.pickled, bytes) and parcel.buffers == []
    assert os.fstat(parent.descriptor).st_size == 0
    np.testing.assert_equal(collected(parent, parcel)["a"], array)


@pytest.mark.deep
@pytest.mark.parametrize("span", [(0, 1 << 30), (-8, 8), (1 << 40, 8), (8, -16)])
def test_no_more_is_read_than_there_is(sides, span):
    worker, parent = sides
    worker.pack(bytes(20_000))
    for parcel in (Parcel(span, []), Parcel(b"", [span])):
        with pytest.raises(ValueError, match="memory for results"):
            parent.collect([parcel])


@pytest.mark.deep
def test_a_pickle_that_was_damaged_is_not_unpickled(sides):
    worker, parent = sides
    parcel = worker.pack(["x" * 50_000])
    os.pwrite(parent.descriptor, b"c", parcel.pickled[0] + 20_000)
    with pytest.raises(RuntimeError, match="the segment is damaged"):
        parent.collect([parcel])


@pytest.mark.deep
def test_a_program_that_has_no_descriptor_left_gets_its_results_later():
    run_alone("import test_parcels as it; it.call_without_descriptors()")


def call_without_descriptors():
    with closing(ShmVectorEnv(painters(2), num_workers=1)) as envs:
        before = _limit_descriptors(3)
        with pytest.raises(OSError, match="Too many open files"):
            envs.call("paint")
        _limit_descriptors(before)
        np.testing.assert_equal(envs.call("paint", 3), tuple(painted([3, 4])))


@pytest.mark.deep
def test_a_worker_that_has_no_descriptor_left_sends_its_results_with_the_message():
    with closing(ShmVectorEnv(painters(2), num_workers=1)) as envs:
        result = envs.call("paint_without_descriptors")
        np.testing.assert_equal(result, tuple(painted([0, 1])))


@pytest.mark.deep
def test_memory_that_takes_no_seals(monkeypatch):
    def none(*_):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", none)
        depot = Depot.create()
    with closing(depot):
        assert "memfd:shmvec" in os.readlink(f"/proc/self/fd/{depot.descriptor}")


@pytest.mark.deep
def test_a_sandbox_without_memfd(monkeypatch):
    def none(*_):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", none)
        envs = ShmVectorEnv(painters(), num_workers=2)
    with closing(envs):
        np.testing.assert_equal(envs.call("paint", 5), tuple(painted([5, 6, 7, 8])))


@pytest.mark.parametrize("num_workers", [2, *deep(0, 1, 4)])
def test_results_are_those_of_each_env_and_call(num_workers):
    with closing(ShmVectorEnv(painters(), num_workers=num_workers)) as envs:
        calls = [envs.call("paint", 10 * turn) for turn in range(5)]
        for turn, results in enumerate(calls):
            np.testing.assert_equal(results, tuple(painted(range(10 * turn, 10 * turn + 4))))
            for result in results:
                result[:] = 0  # it is the caller's


@pytest.mark.deep
def test_a_result_is_taken_as_it_was_returned():
    with closing(ShmVectorEnv(painters(), num_workers=2)) as envs:
        np.testing.assert_equal(envs.call("repaint", 3), tuple(painted([3, 4, 5, 6])))


@pytest.mark.deep
def test_large_results_do_not_go_through_the_channel(monkeypatch):
    lengths = []
    read = recovery.read_late

    def watched(workers, index, content):
        lengths.append(len(content))
        return read(workers, index, content)

    monkeypatch.setattr(recovery, "read_late", watched)
    with closing(ShmVectorEnv(painters(), num_workers=2)) as envs:
        for _ in range(3):
            envs.call("paint")
        assert len(lengths) == 6 and max(lengths) < LARGE / 100
        # What the depot has no room for comes all the same.
        nbytes = DEPOT // 2 + 1
        np.testing.assert_equal(envs.call("paint", 0, nbytes), tuple(painted(range(4), nbytes)))


@pytest.mark.deep
def test_a_worker_that_takes_the_place_of_another_gets_its_depot():
    policy = FaultPolicy(on_crash="restart", backoff_s=0)
    with closing(ShmVectorEnv(painters(), num_workers=2, faults=policy)) as envs:
        envs.reset()
        for turn in range(3):
            np.testing.assert_equal(envs.call("paint", turn), tuple(painted(range(turn, turn + 4))))
            with pytest.raises(WorkerCrashError, match="there is no result"):
                envs.call_some([turn], "end")
        np.testing.assert_equal(envs.call("paint", 7), tuple(painted(range(7, 11))))


@pytest.mark.deep
def test_failures_beside_large_results():
    asked = Exchange(painters(), num_workers=1)
    with closing(asked):
        with pytest.raises(LookupError, match="no paint"):
            asked.call("paint_or_fail", timeout=60)
        envs = [0, 2, 3]
        np.testing.assert_equal(asked.call("paint_or_fail", envs=envs), painted(envs))


@pytest.mark.deep
def test_memory_of_results_that_nobody_has_is_used_again(sides):
    worker, parent = sides

    def results(value, sizes=(LARGE, LARGE)):
        worker.lend(True)
        packed = [worker.pack(np.full(size, value, np.uint8)) for size in sizes]
        opened = [
            parcel.open() for parcel in parent.collect([packed[0], None, *packed[1:]]) if parcel
        ]
        np.testing.assert_equal(opened, [np.full(size, value, np.uint8) for size in sizes])
        return opened

    def places(arrays):
        return {array.ctypes.data for array in arrays}

    first = results(1)
    kept, part = first[0], first[1][10:20]
    where = places(first)
    del first
    assert not where & places(second := results(2))  # a part of it is enough
    where_second = places(second)
    del part, second
    again = places(results(3))
    assert again <= where | where_second and kept.ctypes.data not in again
    results(4, sizes=(LARGE // 2,) * 3)
    results(5, sizes=(30_000, LARGE))
    np.testing.assert_equal(kept, np.full(LARGE, 1, np.uint8))


@pytest.mark.deep
def test_no_more_memory_is_kept_than_two_calls_need(sides):
    worker, parent = sides
    result, everything = np.ones(LARGE), []

    def blocks():
        return round(tracemalloc.get_traced_memory()[0] / result.nbytes)

    tracemalloc.start()
    try:
        for _ in range(10):
            worker.lend(True)
            (parcel,) = parent.collect([worker.pack(result)])
            everything.append(parcel.open())
        assert blocks() == 10
        del parcel
        everything.clear()
        assert blocks() == 2
        assert parent.collect([worker.pack(3)])[0].open() == 3
        assert blocks() == 2
        parent.close()  # a vector env that is closed may live for long
        assert blocks() == 0
    finally:
        tracemalloc.stop()
