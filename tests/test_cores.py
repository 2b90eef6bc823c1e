"""benchmarks/cores.py: one table, made in parts, in which a row says what is not there."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import BENCHMARKS, run_benchmark

import shmvec

pytestmark = pytest.mark.deep


def cores(folder, *arguments):
    arguments = ["--workload", "Noop", "--cores", "1", "--seconds", "0.05", *arguments]
    shown, results = run_benchmark("cores.py", folder, *arguments)
    rows = {(row["system"], row["setting"]): row for row in results["cores"]}
    assert len(rows) == len(results["cores"])
    return shown, rows


def test_what_is_not_there_has_a_row_that_says_so(tmp_path):
    """Also of a system with an interpreter of its own, which has neither shmvec nor benchmarks."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    puffer = "PufferLib Multiprocessing"
    arguments = ["--system", puffer, "EnvPool (C++)", "--python", f"{puffer}={python}"]
    shown, rows = cores(tmp_path, *arguments, "--num-envs", "2")
    assert "| EnvPool (C++) | it has no such env | " in shown
    assert rows["EnvPool (C++)", ""]["reason"] == "it has no such env"
    row = rows[puffer, "1 workers, batch 2"]
    if importlib.util.find_spec("pufferlib") is None:
        # That interpreter may not find Gymnasium either, where a path has all packages.
        assert re.fullmatch("No module named '(pufferlib|gymnasium)'", row["reason"])
    else:
        assert row["steps_per_s"] > 0


def test_cores_in_parts(tmp_path):
    ours = ["ShmVectorEnv", "ShmVectorEnv, partial"]
    sizes = ["--envs-per-core", "2", "--cores", "1", "1000"]
    shown, first = cores(tmp_path, *sizes, "--system", *ours)
    assert "not run, there are no more cores: 1000" in shown
    shown, both = cores(tmp_path, *sizes, "--system", "SyncVectorEnv")
    assert [system for system, _ in both] == [*ours, "SyncVectorEnv"]
    assert {key: both[key] for key in first} == first
    assert all(row["cores"] == 1 and row["num_envs"] == 8 for row in both.values())
    assert all(row["numa_nodes"] == 1 and row["share_of_limit"] > 0 for row in both.values())
    again, anew = cores(tmp_path, *sizes, "--show")
    assert anew == both and again in shown
    if importlib.util.find_spec("matplotlib") is not None:
        command = [sys.executable, str(BENCHMARKS / "plot.py"), "results.json"]
        environ = {**os.environ, "PYTHONPATH": str(Path(shmvec.__file__).parents[1])}
        subprocess.run(command, env=environ, cwd=tmp_path, check=True, timeout=60)
        assert (tmp_path / "cores.png").read_bytes().startswith(b"\x89PNG")
