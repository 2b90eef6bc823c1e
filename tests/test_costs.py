"""benchmarks/costs.py: each part runs, and its table has a row for each cell."""

import pytest
from processes import BENCHMARKS, output_of, run_benchmark

pytestmark = pytest.mark.deep

FEW = ["--workload", "CartPole-v1", "--num-envs", "2", "--seconds", "0.05"]


def test_where_the_time_goes(tmp_path):
    shown, results = run_benchmark("costs.py", tmp_path, "split", *FEW)
    (row,) = results["split"]
    parts = ("env", "infos", "copying", "signalling", "waiting")
    assert row["env"] > 0 and all(row[part] >= 0 for part in parts[1:3])
    assert "| CartPole-v1 | 2 | " in shown and {"cpu", "libraries"} <= set(results["machine"])


def test_texts(tmp_path):
    few = ["--what", "infos", "--length", "20", "--num-envs", "2", "--seconds", "0.05"]
    shown, results = run_benchmark("costs.py", tmp_path, "texts", *few)
    names = ["limit", "ShmVectorEnv", "AsyncVectorEnv", "SyncVectorEnv"]
    assert [row["system"] for row in results["texts"]] == names * 2
    assert "| infos | 20 Japanese | ShmVectorEnv | " in shown


@pytest.mark.parametrize(
    ("part", "few", "row"),
    [
        ("balance", FEW, "| CartPole-v1 | 2 | "),
        ("tracing", FEW, "| CartPole-v1 | 2 | "),
        ("counting", ["--repeats", "1"], "an env's step  "),
        ("noticing", ["--times", "1"], "| spawn | Ctrl-C | "),
    ],
)
def test_parts_that_only_print(part, few, row):
    assert row in output_of(BENCHMARKS / "costs.py", part, *few)
