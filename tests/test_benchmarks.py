"""Scripts of benchmarks/ that have no tests of their own run, and have a row for each contender."""

import pytest
from processes import run_benchmark

pytestmark = pytest.mark.deep


def test_replay(tmp_path):
    few = "--workload HalfCheetah --only shmvec --kept 400 --seconds 0.02 --rounds 1".split()
    _, results = run_benchmark("replay.py", tmp_path, *few)
    limit, replay, prioritized, bare = results["rows"]
    assert [limit["system"], bare["system"]] == ["a copy of as many bytes", "not recorded"]
    for row in (replay, prioritized):
        assert row["sampling_us"] > [0] and row["later_us"] > [0] and "bytes" in row


def test_waiting(tmp_path):
    few = "--part asleep compute --num-envs 2 --seconds 0.05 --rounds 1".split()
    shown, results = run_benchmark("waiting.py", tmp_path, *few)
    parts = [row["part"] for row in results["rows"]]
    left_out = shown.count("was left out: ")
    assert parts.count("asleep") == 6 - left_out and parts.count("compute") == 4


def test_awaiting(tmp_path):
    few = "--num-envs 2 --seconds 0.05 --rounds 1".split()
    _, results = run_benchmark("awaiting.py", tmp_path, *few)
    assert len(results["rows"]) == 2 * 4 and all(row["steps_per_s"] > 0 for row in results["rows"])


def test_wrappers(tmp_path):
    few = "--chain CartPole --seconds 0.05".split()
    _, results = run_benchmark("wrappers.py", tmp_path, *few)
    assert [set(row) for row in results["rows"]] == [{"chain", "bare", "Python", "compiled"}] * 2
