"""Large observations are written where the user gets them, and are his like any other array."""

import copy
import ctypes
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import weakref
from contextlib import closing, suppress
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text, Tuple
from processes import run_alone
from tables import deep, first

from shmvec import FaultPolicy, ShmVectorEnv
from shmvec.exchange import Exchange

DEADLINE = 60
SHAPE = (128, 128)  # of bytes: 64 KiB for four envs, from where on blocks pay
N = 4


class Picture(gym.Env):
    """Observes how often it was stepped, in an array that it reuses; ends if its action says so."""

    action_space = Discrete(4)

    def __init__(self, shape=SHAPE):
        self.observation_space = Box(0, 255, shape, np.uint8)
        self.picture = np.zeros(shape, np.uint8)

    def reset(self, *, seed=None, options=None):
        self.picture[:] = 0
        return self.picture, {}

    def step(self, action):
        self.picture += 1
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 3:
            raise ValueError("as asked")
        return self.picture, 1.0, action == 1, False, {}


NOTHING = [0] * N


@pytest.fixture(params=[1, *deep(0)])
def envs(request):
    with_workers = ShmVectorEnv([Picture] * N, num_workers=request.param)
    with_workers.reset()
    yield with_workers
    with_workers.close()
    vars(with_workers).clear()  # pytest keeps what a fixture has given, and with 0 workers that all


def in_blocks(envs):
    """Where blocks are, if these were all freed: addresses of as many results as there are."""
    num_blocks = envs.exchange.layout.num_blocks
    assert num_blocks >= 2
    kept = [envs.step(NOTHING)[0] for _ in range(num_blocks)]
    return {array.ctypes.data for array in kept}


def test_nothing_is_copied(envs):
    blocks = in_blocks(envs)
    used = set()
    for _ in range(20):
        observations = envs.step(NOTHING)[0]
        used.add(observations.ctypes.data)
    assert used <= blocks and len(used) == 2  # one is looked at while the next is written


def test_it_is_an_array_like_any_other(envs):
    observations = envs.step(NOTHING)[0]
    assert type(observations) is np.ndarray
    usual = np.zeros((N, *SHAPE), np.uint8)
    assert observations.flags.carray == usual.flags.carray  # contiguous, aligned and writable
    assert observations.dtype == usual.dtype and observations.strides == usual.strides
    assert (pickle.loads(pickle.dumps(observations)) == observations).all()
    copied = copy.deepcopy(observations)
    observations[:] = 7
    assert (copied == 1).all() and (observations == 7).all()
    assert np.asarray(observations) is observations
    reference = weakref.ref(observations)
    del observations
    assert reference() is None


@pytest.mark.deep
def test_it_cannot_be_released(envs):
    observations = envs.step(NOTHING)[0]
    address = observations.ctypes.data
    envs.release(observations)  # as of any copy: nothing is done
    for _ in range(10):
        assert envs.step(NOTHING)[0].ctypes.data != address
    assert (observations == 1).all()


@pytest.mark.deep
def test_a_tensor_is_made_of_it_without_a_copy(envs):
    torch = pytest.importorskip("torch")
    observations = envs.step(NOTHING)[0]
    address = observations.ctypes.data
    tensor = torch.from_numpy(observations)
    del observations
    later = [envs.step(NOTHING)[0] for _ in range(10)]
    assert tensor.data_ptr() == address and bool((tensor == 1).all())
    assert address not in {array.ctypes.data for array in later}
    del tensor
    assert address in {envs.step(NOTHING)[0].ctypes.data for _ in range(2)}


@pytest.mark.deep
@pytest.mark.parametrize(
    "part", [lambda a: a[1:2], lambda a: a.T, memoryview, lambda a: iter(a[0])]
)
def test_what_was_made_of_it_keeps_it(envs, part):
    observations = envs.step(NOTHING)[0]
    address, kept = observations.ctypes.data, part(observations)
    del observations
    for _ in range(10):
        assert envs.step(NOTHING)[0].ctypes.data != address
    del kept
    assert address in {envs.step(NOTHING)[0].ctypes.data for _ in range(2)}


@pytest.mark.deep
def test_who_holds_all_gets_ordinary_arrays(envs):
    blocks = in_blocks(envs)
    begin = int(envs.step(NOTHING)[0][0, 0, 0])
    kept = [envs.step(NOTHING)[0] for _ in range(3 * len(blocks))]
    for turn, array in enumerate(kept, begin + 1):
        assert (array == turn).all() and array.flags.writeable
    assert blocks <= {array.ctypes.data for array in kept}
    kept[0][:] = 200  # is not in anybody's way
    assert (kept[1] == begin + 2).all() and (envs.step(NOTHING)[0] == begin + 13).all()
    kept.clear()
    assert envs.step(NOTHING)[0].ctypes.data in blocks


def test_one_env_has_blocks_too():
    with closing(ShmVectorEnv([partial(Picture, (256, 256))])) as envs:
        envs.reset()
        assert envs.exchange.layout.num_blocks >= 2
        kept = [envs.step([0])[0] for _ in range(4)]
        assert [int(array[0, 0, 0]) for array in kept] == [1, 2, 3, 4]


def test_what_the_user_does_to_it_is_not_seen_in_later_results(envs):
    observations = envs.step(NOTHING)[0]
    observations[:] = 99
    mask = np.array([False, True, False, False])
    rows = envs.reset(options={"reset_mask": mask})[0][:, 0, 0].tolist()
    assert rows == [1, 0, 1, 1]
    observations = envs.step(NOTHING)[0]
    observations[:] = 99
    rows = envs.step([0, None, None, 0])[0][:, 0, 0].tolist()
    assert rows == [3, 1, 2, 3]
    envs.step(NOTHING)[0][:] = 99
    rollout = envs.rollout(2)
    assert rollout.observations[0, :, 0, 0].tolist() == [4, 2, 3, 4]
    rollout.step(NOTHING)
    envs.step(NOTHING)  # leaves the rollout
    assert envs.step(NOTHING)[0][:, 0, 0].tolist() == [7, 5, 6, 7]


def test_it_outlives_its_vector_env():
    envs = ShmVectorEnv([Picture] * N, num_workers=1)
    envs.reset()
    kept = [envs.step(NOTHING)[0] for _ in range(10)]
    view = kept[1][2:]
    del kept[1]
    envs.close()
    del envs
    gc.collect()
    assert [int(array.max()) for array in kept] == [1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (view == 2).all()
    view[:] = 8
    kept[0][:] = 9
    assert (view == 8).all() and (kept[0] == 9).all()


def segments():
    """KiB of memory of vector envs that this process looks at."""
    found, total = False, 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if "-" in line.split()[0]:
                found = "/dev/shm/shmvec" in line
            elif found and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total


@pytest.mark.deep
@pytest.mark.parametrize("workers", [0, 1])
def test_the_memory_goes_with_the_last_array(workers):
    gc.collect()  # what tests before this one have left
    before = segments()
    envs = ShmVectorEnv([Picture] * (16 * N), num_workers=workers)
    try:
        envs.reset()
        kept = [envs.step([0] * 16 * N)[0] for _ in range(4)]
        assert [int(array.max()) for array in kept] == [1, 2, 3, 4]  # all pages are looked at
        held = kept.pop(1)
    finally:
        envs.close()
    kept.clear()
    assert segments() > before
    assert (held == 2).all()
    del held, envs
    assert segments() == before


def in_a_fork(function):
    """What a function returns in a fork: a bool."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if function() else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_fork_has_its_own(envs):
    blocks = in_blocks(envs)
    kept = [envs.step(NOTHING)[0] for _ in range(2)]
    before = [array.copy() for array in kept]
    read, write = os.pipe()
    go, go_on = os.pipe()

    def look():
        os.read(go, 1)
        same = all((a == b).all() for a, b in zip(kept, before, strict=True))
        kept[0][:] = 55
        os.write(write, b"1")
        return same

    pid = os.fork()
    if pid == 0:
        os._exit(0 if look() else 1)
    kept[1][:] = 66  # not seen there
    del kept[1]  # its block is written again
    for _ in range(5):
        envs.step(NOTHING)
    os.write(go_on, b"1")
    os.read(read, 1)
    assert (kept[0] == before[0]).all()  # what was written there is not seen here
    assert os.waitpid(pid, 0)[1] == 0
    for descriptor in (read, write, go, go_on):
        os.close(descriptor)
    kept.clear()
    used = {envs.step(NOTHING)[0].ctypes.data for _ in range(10)}
    assert used <= blocks  # and nothing is copied, as before


@pytest.mark.deep
def test_forks_lose_nothing_that_another_thread_writes():
    """A fork cannot know that another thread is at work on an array."""
    many = 64 * N
    envs = ShmVectorEnv([Picture] * many, num_workers=1)
    try:
        envs.reset()
        for _ in range(10):
            observations = envs.step([0] * many)[0]
            observations[:] = 0
            written, begun, enough = 0, threading.Event(), threading.Event()

            def write(array, begun=begun, enough=enough):
                nonlocal written
                while not enough.is_set():
                    np.add(array, 1, out=array)  # without the GIL
                    written += 1
                    begun.set()

            writer = threading.Thread(target=write, args=(observations,))
            writer.start()
            try:
                assert begun.wait(DEADLINE)
                in_a_fork(lambda: True)
            finally:
                enough.set()
                writer.join()
            assert (observations == written % 256).all()
    finally:
        envs.close()


@pytest.mark.deep
def test_a_fork_by_c_code_has_its_own(envs):
    observations = envs.step(NOTHING)[0]
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        observations[:] = 55
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (observations == 1).all()


@pytest.mark.deep
@pytest.mark.parametrize("workers", [0, 1])
def test_a_fork_where_memory_is_short_leaves_both_what_they_hold(workers):
    """What cannot be copied is no block any more."""
    run_alone(f"import test_blocks as it; it.fork_where_memory_is_short({workers})")


def limit_addresses(nbytes):
    """Lets this process map no more than so many further bytes; returns the limits before."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, limits[1]))
    return limits


def fork_where_memory_is_short(workers):
    with ShmVectorEnv([Picture] * N, num_workers=workers) as envs:
        envs.reset()
        observations = envs.step(NOTHING)[0]
        address = observations.ctypes.data
        limits = limit_addresses(0)
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert os.waitpid(pid, 0)[1] == 0
        del observations
        for _ in range(10):
            assert envs.step(NOTHING)[0].ctypes.data != address


@pytest.mark.deep
def test_a_step_that_is_broken_off_writes_to_nothing_that_is_held(envs):
    kept = [envs.step(NOTHING)[0] for _ in range(2)]
    for turn in range(3, 30):
        envs.step_async(NOTHING)
        if turn % 3 == 0:
            with suppress(multiprocessing.TimeoutError):
                envs.step_wait(timeout=0)
            continue
        kept = [*kept[-1:], envs.step_wait()[0]]
        assert (kept[-1] == turn).all()
    assert [int(array[0, 0, 0]) for array in kept] == [28, 29]


@pytest.mark.parametrize("action", first([2, 3]))
@pytest.mark.parametrize("policy", first(["restart", "reset"]))
def test_faults_write_to_nothing_that_is_held(action, policy):
    policy = FaultPolicy(on_crash="restart", on_error="restart" if policy == "restart" else "reset")
    envs = ShmVectorEnv([Picture] * N, num_workers=2, faults=policy)
    try:
        envs.reset()
        kept = [envs.step(NOTHING)[0] for _ in range(3)]
        for array in kept[:2]:
            array[:] = 99
        observations, _, _, truncations, _ = envs.step([0, 0, 0, action])
        assert truncations[3] and not truncations[:2].any()
        assert observations[:2, 0, 0].tolist() == [4, 4] and observations[3, 0, 0] == 3
        before = observations.copy()
        for turn in range(5, 15):
            rows = envs.step(NOTHING)[0]
            assert (rows[:2] == turn).all() and (rows[3] == turn - 5).all()
        assert [int(array[0, 0, 0]) for array in kept] == [99, 99, 3]
        assert (observations == before).all()
    finally:
        envs.close()


class Parts(gym.Env):
    """Observes a Dict of a large array, a small one, none, a number and a text."""

    observation_space = Dict(
        large=Box(0, 255, SHAPE, np.uint8),
        rest=Tuple([Box(-1, 1, (3,), np.float32), Box(0, 1, (0,), np.float32)]),
        count=Discrete(1000),
        text=Text(8),
    )
    action_space = Discrete(2)

    def _observe(self):
        return {
            "large": np.full(SHAPE, self.count % 256, np.uint8),
            "rest": (np.full(3, self.count / 1000, np.float32), np.zeros(0, np.float32)),
            "count": self.count,
            "text": f"n{self.count}",
        }

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        return self._observe(), 0.0, False, False, {}


@pytest.mark.deep
@pytest.mark.parametrize("workers", [0, 2])
def test_spaces_of_parts(workers):
    envs = ShmVectorEnv([Parts] * N, num_workers=workers)
    try:
        assert envs.exchange.layout.num_blocks > 0
        envs.reset()
        kept = [envs.step([0] * N)[0] for _ in range(9)]
        for turn, batch in enumerate(kept, 1):
            assert set(batch) == {"count", "large", "rest", "text"}
            assert (batch["large"] == turn).all() and (batch["count"] == turn).all()
            assert (batch["rest"][0] == np.float32(turn / 1000)).all()
            assert batch["rest"][1].shape == (N, 0) and batch["text"] == (f"n{turn}",) * N
        small = kept[0]["rest"][0]  # one part holds its block
        kept.clear()
        for _ in range(9):
            envs.step([0] * N)
        assert (small == np.float32(0.001)).all()
    finally:
        envs.close()


@pytest.mark.deep
def test_exchanges_hand_out_blocks_too():
    exchange = Exchange([Picture] * N, num_workers=2)
    try:
        exchange.ask_reset()
        exchange.take()
        kept = []
        for turn in range(1, 9):
            exchange.ask(None, NOTHING)
            kept.append(exchange.take().observations)
            exchange.ask([1], [0])
            assert (exchange.take([1]).observations == 2 * turn).all()
        assert [int(array[0, 0, 0]) for array in kept] == list(range(1, 9))
    finally:
        exchange.close()


@pytest.mark.deep
@pytest.mark.parametrize(
    "options", [{"copy": False}, {"shared_memory": False}, {"batch_size": 2, "copy": False}]
)
def test_none_where_nothing_is_copied_or_shared(options):
    envs = ShmVectorEnv([Picture] * N, num_workers=1, **options)
    try:
        assert envs.exchange.layout.num_blocks == 0
    finally:
        envs.close()


@pytest.mark.deep
def test_small_observations_are_copied():
    envs = ShmVectorEnv([Picture] * (N - 1), num_workers=1)
    try:
        assert envs.exchange.layout.num_blocks == 0
    finally:
        envs.close()


@pytest.mark.deep
def test_where_memory_is_short_there_are_none(monkeypatch):
    import shmvec._processes.assembly as assembly

    reserve = assembly.reserve_segment
    asked = []

    def short(nbytes):
        asked.append(nbytes)
        if len(asked) == 1:
            raise OSError("no room")
        return reserve(nbytes)

    monkeypatch.setattr(assembly, "reserve_segment", short)
    envs = ShmVectorEnv([Picture] * N, num_workers=1)
    try:
        assert asked[0] - asked[1] > 2 * N * SHAPE[0] * SHAPE[1]
        envs.reset()
        kept = [envs.step(NOTHING)[0] for _ in range(6)]
        assert [int(array[0, 0, 0]) for array in kept] == [1, 2, 3, 4, 5, 6]
    finally:
        envs.close()


@pytest.mark.deep
@pytest.mark.parametrize("workers", [0, 1])
def test_where_addresses_are_limited_there_are_none(workers):
    run_alone(f"import test_blocks as it; it.step_where_addresses_are_limited({workers})")


def step_where_addresses_are_limited(workers):
    import shmvec._processes.assembly as assembly

    reserve, limits = assembly.reserve_segment, []

    def limited(nbytes):
        descriptor = reserve(nbytes)
        if not limits:
            limits.append(limit_addresses(nbytes - 1))
        return descriptor

    assembly.reserve_segment = limited
    envs = ShmVectorEnv([Picture] * (64 * N), num_workers=workers)
    resource.setrlimit(resource.RLIMIT_AS, limits[0])
    try:
        assert envs.exchange.layout.num_blocks == 0
        envs.reset()
        kept = [envs.step([0] * 64 * N)[0] for _ in range(3)]
        assert [int(array.max()) for array in kept] == [1, 2, 3]
    finally:
        envs.close()


@pytest.mark.deep
def test_no_page_faults():
    envs = ShmVectorEnv([Picture] * N, num_workers=1)
    try:
        envs.reset()
        blocks = in_blocks(envs)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(200):
            observations = envs.step(NOTHING)[0]
            observations.sum()
            assert observations.ctypes.data in blocks
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < 200 * 8  # of 16 pages a step
    finally:
        envs.close()
