"""benchmarks/start.py: its rows are whole and say the same in both forms, and nothing stays."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

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
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *SMALL, "--json", str(file), *arguments],
            env={**os.environ, "PYTHONPATH": str(Path(shmvec.__file__).parents[1]), "MARK": mark},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert not list(marked(mark))
        return done.stdout, json.loads(file.read_text()) if file.exists() else None

    return run


def test_rows(run):
    systems = ["shmvec-n", "async", "torchrl"]
    shown, results = run("--method", "fork", "forkserver", "--made", "yes", "--system", *systems)
    head, _, *lines = (
        line for line in shown.splitlines() if line.startswith("| ") or "|--" in line
    )
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    rows = results["rows"]
    assert len(rows) == len(lines)
    names = ["limit", "ShmVectorEnv, a worker an env", "AsyncVectorEnv"]
    for method in ("fork", "forkserver"):
        cell = [row for row in rows if row["method"] == method]
        assert [row["system"] for row in cell][:3] == names
        assert [row["workers"] for row in cell[:3]] == [2, 2, 2]
    for line, row in zip(lines, rows, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == len(columns)
        assert cells[:5] == ["CartPole-v1", "2", row["method"], "yes", row["system"]]
        assert float(cells[columns.index("first obs, s")]) == pytest.approx(
            row["first_s"], abs=0.01
        )
        assert row["first_s"] > 0 and row["close_s"] > 0
        assert row["pss_mb"] > row["private_mb"] > 0
        if row["system"] == "AsyncVectorEnv":
            assert row["times_async"] == row["pss_async"] == row["private_async"] == 1
            assert row["cpu_async"] == 1 and row["cpu_s"] > 0
            assert (row["server_mb"] > 0) == (row["method"] == "forkserver")
    assert "limit: CartPole-v1, 2 envs: one import " in shown
    missing = "TorchRL ParallelEnv" in results["left_out"]
    assert missing == ("left out: TorchRL ParallelEnv (" in shown)
    assert len(rows) == 2 * (3 if missing else 4)


def test_a_sample_that_takes_too_long_is_ended_with_its_workers(run):
    arguments = ["--method", "spawn", "--made", "no", "--system", "async", "--num-envs", "32"]
    shown, results = run(*arguments, "--sample-limit", "0.7")
    errors = {row["system"]: row.get("error") for row in results["rows"]}
    assert errors["AsyncVectorEnv"] == "over 0.7 s"
    assert "| AsyncVectorEnv |  | over 0.7 s |" in shown


def test_what_there_was_no_time_for_is_said(run):
    shown, results = run("--method", "fork", "spawn", "--time-limit", "0")
    assert results is None
    assert shown.count("left out: CartPole-v1, 2 envs, ") == 4
    assert "spawn, made before: no (0 s are over)" in shown


def test_an_error_is_a_row(run):
    shown, results = run(
        "--env", "Noop", "--method", "fork", "--made", "no", "--system", "async", "--num-envs", "0"
    )
    errors = {row["system"]: row["error"] for row in results["rows"]}
    assert "AsyncVectorEnv" in errors
    assert f"| {errors['AsyncVectorEnv']} |" in shown
