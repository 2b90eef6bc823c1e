"""The segment's memory: reserved whole, nameless, and a clear error where there is none."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from envs import Counter

import shmvec._shared.memory
from shmvec import ShmVectorEnv
from shmvec._core.segment import Segment, reserve, segment_bytes
from shmvec._shared.memory import map_memory, reserve_memory


def names():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def test_shared_memory_has_no_name_and_is_private_to_the_user():
    before = names()
    descriptor = reserve_memory(100_000)
    assert names() == before
    status = os.fstat(descriptor)
    assert status.st_size == 100_000 and status.st_blocks * 512 >= 100_000
    assert status.st_mode & 0o777 == 0o600
    memory = map_memory(descriptor, 100_000)
    os.close(descriptor)
    memory[99_999] = 7
    assert memory[0] == 0


@pytest.mark.parametrize("free", [0, 1000])
def test_a_small_dev_shm_falls_back_to_a_memfd(monkeypatch, free):
    monkeypatch.setattr(shmvec._shared.memory, "_free_shm", lambda: free)
    envs = ShmVectorEnv([Counter] * 2, num_workers=2)
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:shmvec" in maps
    envs.reset(seed=1)
    assert envs.step([1, 1])[1].tolist() == [1, 1]
    envs.close()


def test_a_full_dev_shm_falls_back_to_a_memfd(monkeypatch):
    def full(nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shmvec._shared.memory, "_shared_memory", full)
    descriptor = reserve_memory(5000)
    assert "memfd:shmvec" in os.readlink(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)


def test_no_memory_is_an_error_with_the_numbers(monkeypatch):
    monkeypatch.setattr(shmvec._shared.memory, "_free_shm", lambda: 1234)
    monkeypatch.setattr(shmvec._shared.memory, "_free_memory", lambda: 5678)
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes .*1,234 bytes free .*5,678") as caught:
        ShmVectorEnv([Counter] * 2, num_workers=2)
    assert caught.value.errno == errno.ENOSPC


def test_reserve_reports_the_systems_error():
    with pytest.raises(OSError) as caught:
        reserve(-1, 100)
    assert caught.value.errno == errno.EBADF


def test_segment():
    sizes = (2, 5, 10, 5000, 64, 1000)
    memory = bytearray(segment_bytes(*sizes))
    with pytest.raises(ValueError, match="no shmvec segment"):
        Segment.open(memory)
    created = Segment.create(memory, *sizes)
    opened = Segment.open(memory)
    assert (opened.num_workers, opened.num_envs) == (2, 5)
    array = created.array(128, (5, 3), np.int16)
    array[:] = 7
    assert (opened.array(128, (5, 3), np.int16) == 7).all()
    for offset, shape in ((-2, (1,)), (0, (501,)), (1000, (1,))):
        with pytest.raises((ValueError, TypeError)):
            created.array(offset, shape, np.int16)
    with pytest.raises(ValueError, match="needs"):
        Segment.create(memory[:-200], *sizes)
    for bad in ((0, 5, 10, 10, 9, 10), (2, 0, 10, 10, 9, 10), (2, 5, 2**40, 10, 9, 10)):
        with pytest.raises((ValueError, OverflowError)):
            segment_bytes(*bad)
    del array


def test_a_damaged_header_is_refused():
    sizes = (2, 5, 10, 5000, 64, 1000)
    memory = bytearray(segment_bytes(*sizes))
    Segment.create(memory, *sizes)
    for position in range(0, 100, 3):
        damaged = bytearray(memory)
        damaged[position] ^= 0x40
        with pytest.raises(ValueError, match="no shmvec segment"):
            Segment.open(damaged)
