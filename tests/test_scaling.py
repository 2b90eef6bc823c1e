"""benchmarks/scaling.py: its pieces end in time, keep what they have, and go on with the rest."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from processes import BENCHMARKS, gone

import shmvec

pytestmark = pytest.mark.deep


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import scaling

    return scaling


ENVIRON = {**os.environ, "PYTHONPATH": str(Path(shmvec.__file__).parents[1])}
COMMAND = [sys.executable, str(BENCHMARKS / "scaling.py"), "--out", "."]


def shown(folder, *arguments):
    done = subprocess.run(
        [*COMMAND, *(arguments or ["--show"])],
        env=ENVIRON,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0
    return done.stdout


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"], preexec_fn=os.setpgrp
)
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def test_a_piece_ends_in_time_and_goes_on(scaling, monkeypatch, tmp_path):
    """Also one whose command ignores Ctrl-C; nothing that this has started is left."""
    cells = [
        scaling.Cell("good", ["-c", "print('a'); print('b')"], takes=("--seconds", 0.5)),
        scaling.Cell("bad", ["-c", "raise SystemExit('why')"]),
        scaling.Cell("missing", lacks="no such thing"),
        scaling.Cell("stubborn", ["-c", STUBBORN]),
        scaling.Cell("late", ["-c", ""]),
    ]
    monkeypatch.setattr(scaling, "LEAST_S", 2.0)
    monkeypatch.setitem(scaling.PIECES, "piece", lambda options: iter(cells))
    begin = time.monotonic()
    scaling.run("piece", Namespace(out=tmp_path), begin + 6)
    assert time.monotonic() - begin < 30  # and not 600
    known = scaling.state(tmp_path)
    assert {name: (row["ended"], row["said"]) for name, row in known.items()} == {
        "piece: good": ("done", "b"),
        "piece: bad": ("failed, 1", "why"),
        "piece: missing": ("left out", "no such thing"),
        "piece: stubborn": ("no more time", known["piece: stubborn"]["said"]),
        "piece: late": ("no time", ""),
    }
    assert gone(map(int, known["piece: stubborn"]["said"].split()), 5)
    cells[3:4] = []
    scaling.run("piece", Namespace(out=tmp_path), time.monotonic() + 20)
    again = scaling.state(tmp_path)
    assert again["piece: good"] == known["piece: good"]  # it was not run again
    assert again["piece: late"]["ended"] == "done"
    assert shown(tmp_path).splitlines() == [
        f"{name}: {row['ended']}, {row['seconds']} s: {row['said']}"
        for name, row in again.items()
        if row["ended"] != "done"
    ]


def test_a_killed_piece_keeps_its_rows(tmp_path):
    bare = ["--piece", "bare", "--cores", "1", "--minutes"]
    with subprocess.Popen([*COMMAND, *bare, "1"], env=ENVIRON, cwd=tmp_path) as process:
        until = time.monotonic() + 60
        while not (tmp_path / "scaling.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 1
    rows = json.loads((tmp_path / "cores.json").read_text())["cores"]
    assert "CartPole-v1" in {row["workload"] for row in rows}
    again = shown(tmp_path, *bare, "0.5")
    assert "CartPole-v1, 1 cores, 8 envs" not in again and "CartPole-v1, 1 cores, 2 envs" in again
    assert "| CartPole-v1 | 1 | 1 | 8 | ShmVectorEnv |" in shown(tmp_path)
