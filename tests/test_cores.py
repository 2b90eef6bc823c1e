"""benchmarks/cores.py and benchmarks/frameworks.py: they run, and leave out what is missing."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from processes import BENCHMARKS, run_benchmark

import shmvec


def test_frameworks(tmp_path):
    arguments = ["--workload", "Noop", "--num-envs", "2", "--seconds", "0.1"]
    systems = ["ShmVectorEnv", "ShmVectorEnv, partial", "PufferLib"]
    shown, results = run_benchmark("frameworks.py", tmp_path, *arguments, "--system", *systems)
    best = [row["system"] for row in results["frameworks"] if row["best"]]
    missing = "PufferLib" not in best
    assert best == systems[: 3 - missing]
    assert missing == ("left out: PufferLib" in shown)
    assert all(row["steps_per_s"] > 0 for row in results["frameworks"])


def test_cores(tmp_path):
    systems = ["ShmVectorEnv", "ShmVectorEnv, partial", "SyncVectorEnv"]
    arguments = ["--workload", "Noop", "--cores", "1", "1000", "--minutes", "0.1"]
    shown, results = run_benchmark(
        "cores.py", tmp_path, *arguments, "--envs-per-core", "2", "--system", *systems
    )
    assert "not run, there are no more cores: 1000" in shown
    rows = results["cores"]
    assert [row["system"] for row in rows] == ["ShmVectorEnv", "ShmVectorEnv, partial"] + (
        ["SyncVectorEnv"]
    )
    assert all(row["cores"] == 1 and row["num_envs"] == 8 for row in rows)
    assert all(row["numa_nodes"] == 1 and row["share_of_limit"] > 0 for row in rows)
    if importlib.util.find_spec("matplotlib") is not None:
        command = [sys.executable, str(BENCHMARKS / "plot.py"), "results.json"]
        environ = {**os.environ, "PYTHONPATH": str(Path(shmvec.__file__).parents[1])}
        subprocess.run(command, env=environ, cwd=tmp_path, check=True, timeout=60)
        assert (tmp_path / "cores.png").read_bytes().startswith(b"\x89PNG")
