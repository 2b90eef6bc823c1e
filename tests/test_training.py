"""benchmarks/training.py: its runs learn the same, and its rows are whole."""

import pytest
from processes import BENCHMARKS, run_benchmark

pytestmark = pytest.mark.deep

pytest.importorskip("torch", reason="the examples extra")


def test_by_a_pipeline_and_with_other_envs(tmp_path):
    """Its curve is its own; what the file has of other numbers of envs stays there."""
    few = ["--run", "cartpole", "--rounds", "1", "--system", "rollout", "pipeline"]
    for n in ("2", "4"):
        _, results = run_benchmark("training.py", tmp_path, *few, "--num-envs", n, "--steps", "512")
    names = ["ShmVectorEnv, rollouts", "ShmVectorEnv, Pipeline"]
    rows = results["training"]
    assert [(row["num_envs"], row["system"]) for row in rows] == [
        (n, name) for n in (2, 4) for name in names
    ]
    assert all(400 < row["steps"] <= 512 and row["episodes"] > 5 for row in rows)


def test_by_a_replay(tmp_path):
    few = ["--run", "dqn", "--rounds", "2", "--system", "sync", "replay", "--steps", "700"]
    _, results = run_benchmark("training.py", tmp_path, *few)
    rows = results["training"]
    assert [row["system"] for row in rows] == ["SyncVectorEnv", "ShmVectorEnv, Replay"]
    assert len(set(rows[1]["curves"])) == 1 and rows[1]["episodes"] > 5


@pytest.mark.parametrize("kind", ["cartpole", "dqn", "dqn-1ms"])
def test_the_same_curve(tmp_path, kind):
    arguments = ["--run", kind, "--system", "sync", "async", "ours", "rollout", "ours-waits"]
    shown, results = run_benchmark(
        "training.py", tmp_path, *arguments, "--steps", "1024", "--rounds", "1"
    )
    rows = results["training"]
    assert [row["system"] for row in rows] == [
        "SyncVectorEnv",
        "AsyncVectorEnv",
        "ShmVectorEnv",
    ] + (["ShmVectorEnv, rollouts"] if kind == "cartpole" else ["ShmVectorEnv, waits"])
    assert len({tuple(row["curves"]) for row in rows}) == 1 and rows[0]["episodes"] > 10
    assert len([line for line in shown.splitlines() if line.startswith(f"| {kind} |")]) == 4
    for row in rows:
        assert 900 < row["steps"] <= 1024
        parts = sum(row[f"{part}_s"] for part in ("env", "policy", "learning", "handling"))
        assert parts == pytest.approx(row["wall_s"], rel=0.1, abs=0.05)
        assert (row["workers_cpu_s"] > 0) == (row["system"] != "SyncVectorEnv")


def test_other_curves_are_reported(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from training import disagreements

    row = {"run": "cartpole", "threads": "1", "system": "ShmVectorEnv", "options": ""}
    same = [{**row, "curves": ["a", "b"]}, {**row, "system": "sync", "curves": ["a", "b"]}]
    assert not list(disagreements(same))
    (message,) = disagreements([*same, {**row, "system": "async", "curves": ["b", "a"]}])
    assert "cartpole" in message and "not the same" in message
