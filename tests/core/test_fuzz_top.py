"""Whatever a segment holds, ``top`` shows something or says that it is damaged: it does not crash.

A copy of a real segment is damaged, and looked at by all ways of showing it, in a process of its
own, since what must not come is a signal. For longer, by hand, and to repeat a case that failed:

    python tests/core/test_fuzz_top.py --cases 5000
    python tests/core/test_fuzz_top.py --seed 17 --cases 1
"""

import argparse
import faulthandler
import fcntl
import io
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import traceback
from collections import Counter
from contextlib import closing, redirect_stdout

import gymnasium as gym
import pytest
from segment_map import HEADER, LINE, Map, forget_mappings, keep_mappings

import shmvec.__main__
from shmvec import ShmVectorEnv
from shmvec._commands import attaching
from shmvec._memory.segment import SEGMENT_NAME

pytestmark = pytest.mark.deep

CASES = 40
SEAL = fcntl.F_SEAL_SHRINK


class Copy:
    """A segment like a real one, in a file that this process has open and may damage."""

    def __init__(self, content, sealed=True):
        self.descriptor = os.memfd_create(SEGMENT_NAME, os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.descriptor, 0, len(content))
        if sealed:
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEAL)
        self.memory = mmap.mmap(self.descriptor, len(content))
        self.memory[:] = content

    def close(self):
        self.memory.close()
        os.close(self.descriptor)


def shown(*how):
    """What top prints of this process, and says of what it cannot."""
    out = io.StringIO()
    with redirect_stdout(out):
        status = shmvec.__main__.main(["top", str(os.getpid()), *how])
    assert status in (0, 1)
    return status, out.getvalue()


def look():
    """All ways of showing; whether anything was shown, and whether anything was said."""
    outcomes = Counter()
    for how in ((), ("--json",), ("--prometheus",), ("--interval", "1e-3")):
        status, text = shown(*how)
        outcomes["shown" if status == 0 else "refused"] += 1
        if "--json" in how:
            outcomes["said"] += bool(json.loads(text)["problems"])
    return outcomes


def scribble(rng, memory, regions):
    begin, end = rng.choice(regions)
    for _ in range(rng.choice((1, 1, 4, 64))):
        length = min(end - begin, rng.choice((1, 2, 4, 8, 8, 8, 64, 4096)))
        at = begin + rng.randrange((end - begin - length) // 8 + 1) * 8
        length = min(length, end - at)
        memory[at : at + length] = rng.choice(
            (rng.randbytes(length), bytes(length), b"\xff" * length, b"\x7f" * length)
        )


def real():
    """The content of a segment that is in use, and what lies where in it."""
    keep_mappings()
    with closing(ShmVectorEnv([lambda: gym.make("CartPole-v1")] * 3, num_workers=2)) as envs:
        envs.reset()
        for _ in range(3):
            envs.step([0] * 3)
        found = Map()
        content = bytes(found.memory[: found.total])
    forget_mappings()
    regions = [
        (0, HEADER.size),
        (0, HEADER.size),
        (found.notice, found.notice + LINE),
        (found.notice + LINE, found.counters),
        (found.counters, found.past),
        (found.past, found.timings),
        (found.timings, found.requests(0)),
        (0, found.requests(0)),
    ]
    return content, regions


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=CASES)
    arguments = parser.parse_args()
    faulthandler.enable()
    content, regions = real()
    sys.stderr = io.StringIO()
    # It looks for holders of a segment in all of /proc: here there is one.
    attaching.process_ids = lambda: iter([os.getpid()])
    outcomes = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        rng = random.Random(seed)
        copy = Copy(content, sealed=rng.random() < 0.8)
        try:
            outcomes["whole"] += look()["shown"]
            kind = rng.choice(("before", "before", "while", "cut"))
            if kind == "before":
                scribble(rng, copy.memory, regions)
                outcomes += look()
            elif kind == "while":
                over = threading.Event()
                memory = copy.memory

                def go_on(rng=rng, memory=memory, over=over):
                    while not over.is_set():
                        scribble(rng, memory, regions)

                thread = threading.Thread(target=go_on)
                thread.start()
                try:
                    outcomes += look()
                finally:
                    over.set()
                    thread.join()
            else:
                watch = attaching.Watcher(os.getpid())
                assert len(watch.take_snapshots()) == 1
                try:
                    os.ftruncate(copy.descriptor, rng.choice((0, 100, 1000)))
                    outcomes["cut"] += 1
                except PermissionError:  # sealed
                    assert len(watch.take_snapshots()) == 1
                else:
                    assert not watch.take_snapshots() and shown()[0] == 1
                del watch
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            print(f"FAILED: --seed {seed} --cases 1", file=sys.__stderr__)
            sys.exit(1)
        finally:
            copy.close()
    print(json.dumps(outcomes))


def test_fuzz():
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    for what in ("whole", "shown", "refused", "said", "cut"):
        assert outcomes[what] > 0, outcomes
    assert outcomes["whole"] == 4 * CASES


@pytest.mark.parametrize("bit", [0, 64, 8 * 16, 8 * 24, 8 * 60])
def test_a_damaged_header_is_reported(bit, capsys):
    with closing(ShmVectorEnv([lambda: gym.make("CartPole-v1")] * 2, num_workers=0)):
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                name = os.readlink(f"/proc/self/fd/{descriptor}")
            except FileNotFoundError:  # that of the listing, or one that is being closed
                continue
            if SEGMENT_NAME in name:
                with mmap.mmap(int(descriptor), 4096) as memory:
                    memory[bit // 8] ^= 1 << bit % 8
        assert shown()[0] == 1
        printed = capsys.readouterr()
        assert f"open in process {os.getpid()} cannot be read: it is damaged, or" in printed.err


if __name__ == "__main__":
    main()
