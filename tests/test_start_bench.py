"""benchmarks/start.py: its rows are whole and say the same in both forms, and nothing stays."""

import contextlib
import json
import os
import time
import uuid
from pathlib import Path

import pytest
from processes import output_of

import shmvec

pytestmark = pytest.mark.deep

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "start.py"
SMALL = ["--env", "CartPole-v1", "--num-envs", "2", "--rounds", "1", "--no-torch"]


def marked(mark):
    """Living processes whose environment has a mark."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ends meanwhile
            if mark.encode() in Path("/proc", pid, "environ").read_bytes():
                yield int(pid)


@pytest.fixture
def run(tmp_path):
    """Runs it with some arguments; returns what it has printed and its JSON."""

    def run(*arguments):
        mark, file = f"mark-{uuid.uuid4()}", tmp_path / "results.json"
        environ = {"PYTHONPATH": str(Path(shmvec.__file__).parents[1]), "MARK": mark}
        said = output_of(PROGRAM, *SMALL, "--json", file, *arguments, environ=environ, cwd=tmp_path)
        until = time.monotonic() + 60  # a fork server ends once its program has
        while left := list(marked(mark)):
            assert time.monotonic() < until, left
            time.sleep(0.01)
        return said, json.loads(file.read_text())

    return run


def test_rows(run):
    shown, results = run("--method", "forkserver", "--made", "yes", "--system", "shmvec-n", "async")
    head, _, *lines = (line for line in shown.splitlines() if line.startswith("|"))
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    rows = results["rows"]
    names = ["limit", "ShmVectorEnv, a worker an env", "AsyncVectorEnv"]
    assert [row["system"] for row in rows] == names
    assert [row["workers"] for row in rows] == [2, 2, 2]
    for line, row in zip(lines, rows, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == len(columns)
        assert cells[:5] == ["CartPole-v1", "2", "forkserver", "yes", row["system"]]
        assert float(cells[columns.index("first obs, s")]) == pytest.approx(
            row["first_s"], abs=0.01
        )
        assert row["first_s"] > 0 and row["close_s"] > 0
        assert row["pss_mb"] > row["private_mb"] > 0
    theirs = rows[2]
    assert theirs["times_async"] == theirs["pss_async"] == theirs["private_async"] == 1
    assert theirs["cpu_async"] == 1 and theirs["cpu_s"] > 0 and theirs["server_mb"] > 0


def test_a_sample_that_takes_too_long_is_ended_with_its_workers(run):
    arguments = ["--method", "spawn", "--made", "no", "--system", "async", "--num-envs", "32"]
    shown, results = run(*arguments, "--sample-limit", "0.7")
    errors = {row["system"]: row.get("error") for row in results["rows"]}
    assert errors["AsyncVectorEnv"] == "over 0.7 s"
    assert "| AsyncVectorEnv |  | over 0.7 s |" in shown
