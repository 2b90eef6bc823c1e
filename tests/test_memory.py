"""The segment's memory: reserved whole, nameless, and a clear error where there is none."""

import errno
import fcntl
import gc
import os
import re
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from envs import Counter
from tables import first

from shmvec import ShmVectorEnv
from shmvec._core import MappedMemory, Segment, reserve_pages, segment_bytes
from shmvec._memory import segment
from shmvec._memory.segment import open_shared_memory, reserve_memory, reserve_segment

WAYS = [reserve_segment, reserve_memory]


def names():
    """Of blocks of shared memory: semaphores and the like are other programs'."""
    found = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in found if name.startswith(("psm_", "shmvec"))}


def check_no_name_is_left(before):
    """Tests that run at the same time have names there, too, for a moment."""
    until = time.monotonic() + 60
    while left := names() - before:
        assert time.monotonic() < until, left
        time.sleep(0.01)


@pytest.fixture
def no_memfd(monkeypatch):
    def refuse(name, flags):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)


@pytest.fixture
def shm_of(monkeypatch):
    def pretend(total, free):
        status = SimpleNamespace(f_frsize=1, f_blocks=total, f_bavail=free)
        monkeypatch.setattr(os, "statvfs", lambda path: status)
        monkeypatch.setattr(os.path, "ismount", lambda path: total > 0)

    return pretend


@pytest.mark.parametrize("reserve", first(WAYS))
def test_shared_memory_has_no_name_and_is_private_to_the_user(reserve):
    before = names()
    descriptor = reserve(100_000)
    check_no_name_is_left(before)
    status = os.fstat(descriptor)
    assert status.st_size == 100_000 and status.st_blocks * 512 >= 100_000
    assert status.st_mode & 0o777 == 0o600
    memory = memoryview(MappedMemory(descriptor, 100_000))
    os.close(descriptor)
    memory[99_999] = 7
    assert memory[0] == 0


@pytest.mark.deep
@pytest.mark.parametrize(
    "total, free, expected",
    [
        (400_000, 400_000, "/dev/shm/shmvec-segm"),
        (400_000, 300_000, "/dev/shm/shmvec-segm"),
        (400_000, 299_999, "/memfd:shmvec-segm"),  # others would have less than half of it
        (64_000, 64_000, "/memfd:shmvec-segm"),
        (0, 0, "/memfd:shmvec-segm"),
    ],
)
def test_a_segment_leaves_half_of_dev_shm_to_others(total, free, expected, shm_of):
    shm_of(total, free)
    descriptor = reserve_segment(100_000)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(expected)
    os.close(descriptor)


@pytest.mark.deep
def test_a_block_that_cannot_be_reserved_is_a_memfd(monkeypatch):
    def full(descriptor, nbytes):
        if "/dev/shm/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve_pages(descriptor, nbytes)

    monkeypatch.setattr(segment, "reserve_pages", full)
    descriptor = reserve_segment(100_000)
    assert "memfd:" in os.readlink(f"/proc/self/fd/{descriptor}")
    os.close(descriptor)


@pytest.mark.deep
@pytest.mark.parametrize("reserve", WAYS)
def test_a_memfd_is_sealed(reserve, shm_of):
    shm_of(0, 0)
    descriptor = reserve(100_000)
    for nbytes in (0, 99_999, 100_001):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)


@pytest.mark.deep
def test_a_system_that_makes_no_memfd_gives_a_block_of_dev_shm(no_memfd):
    before = names()
    descriptor = reserve_memory(100_000)
    check_no_name_is_left(before)
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/shm/shmvec-")
    os.close(descriptor)


@pytest.mark.deep
def test_a_small_dev_shm_is_an_error_with_the_numbers(no_memfd, shm_of):
    shm_of(1234, 1234)
    for reserve in WAYS:
        with pytest.raises(OSError, match=r"needs [\d,]+ bytes .* 1,234 in /dev/shm") as caught:
            reserve(5000)
        assert caught.value.errno == errno.ENOSPC


@pytest.mark.deep
def test_the_segment_is_a_block_of_shared_memory_that_no_process_keeps_open_but_one():
    gc.collect()  # what tests before this one have left
    before, mapped = names(), segments_mapped("self")
    with closing(ShmVectorEnv([Counter] * 2, num_workers=2, context="fork")) as envs:
        check_no_name_is_left(before)
        for process in (None, *envs.processes):
            pid = "self" if process is None else process.pid
            others = mapped if process is None else 0
            assert segments_mapped(pid) == others + 1
            assert opened(pid) == (process is None)
        envs.reset(seed=1)
        assert envs.step([1, 1])[1].tolist() == [1, 1]


def segments_mapped(pid):
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "memfd:shmvec" not in maps
    return maps.count("/dev/shm/shmvec-segment")


def opened(pid):
    """How many descriptors of segments a process has; all memory is the user's alone."""
    found = 0
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        with suppress(FileNotFoundError):  # that of the listing itself
            name = os.readlink(path)
            found += "/dev/shm/shmvec-segment" in name
            assert ":shmvec" not in name or os.stat(path).st_mode & 0o777 == 0o600, name
    return found


@pytest.mark.deep
def test_no_file_in_dev_shm_is_removed():
    """Whatever its name, age and content: users keep checkpoints there."""
    theirs = [Path(f"/dev/shm/shmvec-{name}") for name in ("checkpoint.pt", "0123456789abcdef")]
    try:
        for path in theirs:
            path.touch(0o600)
            os.utime(path, (0, 0))
        for reserve in WAYS:
            os.close(reserve(100_000))
        assert all(path.exists() for path in theirs)
    finally:
        for path in theirs:
            path.unlink(missing_ok=True)


@pytest.mark.deep
def test_of_another_process_nothing_but_memory_is_opened_and_only_read(tmp_path):
    """It may have anything under any name, and this process may be root's."""
    os.mkfifo(tmp_path / "pipe")
    memory = segment.memory_file("x")
    others = [os.open(path, os.O_RDWR) for path in (tmp_path / "pipe", "/dev/null")]
    others.append(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    anything = re.compile(".*")
    try:
        for descriptor in others:
            with pytest.raises(OSError, match="not shared memory"):
                open_shared_memory(os.getpid(), descriptor, anything)
        with pytest.raises(OSError, match="not shared memory"):
            open_shared_memory(os.getpid(), memory, re.compile("another"))
        others.append(open_shared_memory(os.getpid(), memory, anything))
        assert fcntl.fcntl(others[-1], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    finally:
        for descriptor in (memory, *others):
            os.close(descriptor)


def test_no_memory_is_an_error_with_the_numbers(monkeypatch):
    monkeypatch.setattr(segment, "free_memory", lambda: 5678)
    with pytest.raises(OSError, match=r"needs [\d,]+ bytes .* 5,678 bytes free") as caught:
        ShmVectorEnv([Counter] * 2, num_workers=2)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.deep
@pytest.mark.parametrize("reserve", WAYS)
def test_memory_that_is_taken_meanwhile_is_an_error_with_the_numbers(reserve, monkeypatch):
    def full(descriptor, nbytes):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(segment, "reserve_pages", full)
    with pytest.raises(OSError, match=r"needs 5,000 bytes") as caught:
        reserve(5000)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.deep
def test_descriptors_that_run_out_are_no_lack_of_memory(monkeypatch):
    def none_left(name, flags):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none_left)
    with pytest.raises(OSError, match="Too many open files"):
        reserve_memory(5000)


@pytest.mark.deep
def test_a_mapping_needs_no_descriptor_and_goes_with_its_last_view():
    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:shmvec")

    gc.collect()  # what tests before this one have left
    before = mapped()
    descriptor = reserve_memory(100_000)
    with pytest.raises(OSError, match="Invalid argument"):
        MappedMemory(descriptor, 100_001)
    array = np.frombuffer(MappedMemory(descriptor, 100_000), np.uint8)
    os.close(descriptor)
    assert mapped() == before + 1
    array[:] = 7
    del array
    assert mapped() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        MappedMemory(-1, 10)


@pytest.fixture
def cgroups(tmp_path):
    """A folder of cgroups to fill; what this process may have by it."""

    class Cgroups:
        def member(self, *lines):
            (tmp_path / "membership").write_text("".join(f"{line}\n" for line in lines))

        def limit(self, folder, most, used, stat=None):
            version_1 = folder.startswith("memory")
            limit, usage = ("limit_in_bytes", "usage_in_bytes") if version_1 else ("max", "current")
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / f"memory.{limit}").write_text(f"{most}\n")
            (tmp_path / folder / f"memory.{usage}").write_text(f"{used}\n")
            if stat is not None:
                (tmp_path / folder / "memory.stat").write_text(stat)

        def free(self):
            return segment.free_memory(tmp_path, tmp_path / "membership")

    return Cgroups()


@pytest.mark.deep
def test_a_container_sees_its_own_limit_as_the_root(cgroups):
    assert cgroups.free() > 10_000
    cgroups.limit(".", most=10_000, used=4_000)
    assert cgroups.free() == 6_000
    cgroups.limit(".", most=10_000, used=14_000)
    assert cgroups.free() == 0
    cgroups.limit(".", most="max", used=4_000)
    assert cgroups.free() > 10_000


@pytest.mark.deep
def test_the_tightest_limit_around_a_process_counts(cgroups):
    cgroups.member("0::/user/job")
    cgroups.limit("user/job", most=9_000, used=1_000)
    cgroups.limit("another", most=10, used=1)
    assert cgroups.free() == 8_000
    cgroups.limit("user", most=20_000, used=13_000)
    assert cgroups.free() == 7_000


@pytest.mark.deep
def test_version_1_has_limits_of_its_own(cgroups):
    cgroups.member("4:cpu,memory:/job", "1:name=systemd:/another", "0::/")
    cgroups.limit("memory", most=2**63 - 4096, used=4_000)
    assert cgroups.free() > 10_000
    cgroups.limit("memory/another", most=10, used=1)
    cgroups.limit("memory/job", most=5_000, used=2_000)
    assert cgroups.free() == 3_000


@pytest.mark.deep
def test_a_path_that_is_another_one_inside_the_container_leaves_the_root(cgroups):
    cgroups.member("4:memory:/docker/0123", "0::/docker/0123")
    cgroups.limit("memory", most=10_000, used=4_000)
    assert cgroups.free() == 6_000
    cgroups.limit(".", most=10_000, used=5_000)
    assert cgroups.free() == 5_000


@pytest.mark.deep
def test_cached_files_are_free(cgroups):
    """Data that was read fills a cgroup up to its limit, and goes when memory is asked for."""
    stat = "anon 3000\nshmem 500\ninactive_file 1500\nactive_file 4000\n"
    cgroups.limit(".", most=10_000, used=9_900, stat=stat)
    assert cgroups.free() == 5_600
    stat = "active_file 1\ninactive_file 1\ntotal_active_file 300\ntotal_inactive_file 50\n"
    cgroups.limit("memory", most=5_000, used=4_000, stat=stat)
    assert cgroups.free() == 1_350


@pytest.mark.deep
def test_reserve_reports_the_systems_error():
    with pytest.raises(OSError) as caught:
        reserve_pages(-1, 100)
    assert caught.value.errno == errno.EBADF


@pytest.mark.deep
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
