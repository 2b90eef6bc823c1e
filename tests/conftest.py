"""Every test has a deadline and leaves nothing behind: processes, descriptors, shared memory."""

import faulthandler
import gc
import itertools
import multiprocessing.resource_tracker
import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from shmvec._processes import fork_server

DEADLINE_S = 300
SETTLING_S = 20  # for what is ending to be gone
STDERR = pytest.StashKey[int]()  # pytest's own, not what it captures of a test
LASTING_COMMANDS = (
    "resource_tracker",
    "forkserver",
    "shmvec._processes.fork_server as it; it.serve",
)
DESCRIPTOR_KINDS = ("socket:", "pipe:", "memfd:", "/dev/shm", "pidfd")  # that vector envs open


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            pass
    return {descriptor for descriptor in found if _is_ours(descriptor)}


def _children() -> dict[int, str]:
    """Child processes, but not those that last (resource tracker, fork servers)."""
    children = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                pids = file.read().split()
        except OSError:
            continue  # the thread has ended meanwhile
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it has gone meanwhile
            if not any(word in command for word in LASTING_COMMANDS):
                children[int(pid)] = f"{status} {command}"
    return children


def _shared_memory() -> set[str]:
    """Files of shared memory with names of SharedMemory's or shmvec's: others are others'."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "shmvec"))}


def _leftovers(look, allowed):
    """What `look` shows beyond `allowed` for as long as what is ending may take to be gone."""
    until = time.monotonic() + SETTLING_S
    for looks in itertools.count():
        extra = set(look()) - allowed
        if not extra or time.monotonic() > until:
            return extra
        if looks % 10 == 1:
            gc.collect()  # only now: what is ending ends alone
        time.sleep(0.01)


def pytest_ignore_collect(collection_path, config):
    """By default a file in which all is deep is not imported: half of a collection's time."""
    if config.option.markexpr.strip() != "not deep" or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.deep\n" in collection_path.read_text() or None


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """A shell has Ctrl-C ignored by what runs in the background: here tests send it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)
    if hasattr(config, "workerinput"):
        _take_pipes_from_forks()


def _take_pipes_from_forks():
    """Forks of a process of xdist have none of its pipes, by which xdist sees that it has ended.

    What a test forks may outlive the process, stopped or hanging: xdist would wait for ever.
    """
    pipes = [int(each.split()[0]) for each in _descriptors() if "pipe:" in each]
    pipes = [pipe for pipe in pipes if pipe > 2]
    nothing = os.open(os.devnull, os.O_RDWR)

    def take():
        while pipes:  # a fork of a fork may have other things there
            os.dup2(nothing, pipes.pop(), inheritable=False)

    os.register_at_fork(after_in_child=take)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Ends the process of a test that hangs, also in a fixture of the session: xdist names it."""
    mark = item.get_closest_marker("deadline")
    seconds = mark.args[0] if mark else DEADLINE_S
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish():
    """Spares collections of garbage what stays: modules and tests, two hundred thousand objects.

    Else a collection, of which most tests have one, takes longer than most tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def logs_of_sb3(tmp_path_factory):
    """Where SB3 makes a folder for each run: not in /tmp, where it would stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SB3_LOGDIR", str(tmp_path_factory.mktemp("sb3")))
        yield


@pytest.fixture(scope="session")
def gpu_in_use():
    """For tests that use a GPU where there is one: what its driver opens then stays for good."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        torch.cuda.init()


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    # Started on first use, these stay for good; they are not the test's.
    multiprocessing.resource_tracker.ensure_running()
    before = _descriptors(), set(_children()), _shared_memory()
    yield
    assert not _leftovers(_children, before[1]), f"processes are left: {_children()}"
    assert not _leftovers(_shared_memory, before[2]), "shared memory is left"
    descriptors = _leftovers(_descriptors, before[0])
    assert not descriptors, f"descriptors are left: {descriptors}"


def _is_ours(descriptor: str) -> bool:
    """Whether a descriptor is of a kind that vector envs open, and not kept by multiprocessing."""
    number, target = descriptor.split(" -> ")
    if not any(kind in target for kind in DESCRIPTOR_KINDS):
        return False
    if "/pym-" in target:
        return False  # the heap behind the arrays of Gymnasium's AsyncVectorEnv: never freed
    if int(number) == forkserver._forkserver._forkserver_alive_fd:
        return False  # open as long as the fork server runs
    # The last ones are open likewise.
    return int(number) not in [server.fileno() for server in fork_server.servers()]
