"""benchmarks/matrix.py: all systems in one table, in which a row says what is not there."""

import importlib.util
import os
import re
import sys

import pytest
from processes import run_benchmark

pytestmark = pytest.mark.deep


def cores(folder, *arguments):
    arguments = ["cores", "--workload", "Noop", "--cores", "1", "--seconds", "0.05", *arguments]
    shown, results = run_benchmark("matrix.py", folder, *arguments)
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


def test_settings(tmp_path):
    few = ["--workload", "Noop", "--num-envs", "2", "--num-workers", "N", "1", "--policy", "park"]
    names = ["--system", "SyncVectorEnv", "ShmVectorEnv, single steps", "--adapter", "baselines"]
    what = [*names, "--compute", "50", "--bound", "--seconds", "0.05"]
    shown, results = run_benchmark("matrix.py", tmp_path, "settings", *few, *what)
    rows = {row["system"]: row for row in results["rows"]}
    ours = ["ShmVectorEnv", "ShmVectorEnv, 1 workers", "ShmVectorEnv, a worker an env"]
    assert {"limit", "bound, 1", *ours, "ShmVectorEnv, park", *names[1:3]} < set(rows)
    assert "shmvec SubprocVecEnv" in rows
    assert all(
        row["steps_per_s"] > 0 and row["cycle_us"] >= row["batch_us"] for row in rows.values()
    )
    assert rows["ShmVectorEnv"]["cpu_s_per_million"] > 0
    assert rows.keys() - {"limit"} <= set(re.findall(r"\| Noop \| 2 \| 50 \| (.*?) \|", shown))


def test_by_gymnasiums_own_ruler(tmp_path):
    performance = pytest.importorskip("gymnasium.utils.performance")
    if not hasattr(performance, "benchmark_vector_step"):
        pytest.skip("Gymnasium 1.4 has it")
    few = ["gymnasium", "--num-envs", "2", "--seconds", "0.1", "--rounds", "2"]
    shown, results = run_benchmark("matrix.py", tmp_path, *few)
    names = ["ShmVectorEnv", "AsyncVectorEnv", "SyncVectorEnv"]
    assert [row["system"] for row in results["gymnasium"]] == names
    assert all(row["steps_per_s"] > 0 for row in results["gymnasium"])
    assert "| CartPole-v1 | 2 | AsyncVectorEnv | " in shown


def test_what_has_no_time_is_said(tmp_path):
    with pytest.raises(AssertionError, match="there was no time for some"):
        cores(tmp_path, "--minutes", "0", "--system", "SyncVectorEnv")
    assert os.listdir(tmp_path) == ["results.json"]
