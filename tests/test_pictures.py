"""The pictures of the docs are drawn from the JSON beside them, which scripts write."""

import json
from pathlib import Path

import pytest
from processes import output_of

pytestmark = pytest.mark.deep

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PICTURES = ["cores", "learning", "shares", "split", "trace"]
PAGES = ["performance", "details/performance", "trace"]
DARK = [f"{name}-dark" for name in PICTURES]  # docs/conf.py shows these on dark pages


def run(script, *arguments):
    return output_of(BENCHMARKS / script, *arguments, environ={"OMP_NUM_THREADS": "1"})


def test_each_is_drawn_and_shown(tmp_path):
    pytest.importorskip("matplotlib")
    results = [BENCHMARKS / "results" / f"{name}.json" for name in PICTURES]
    run("plot.py", *results, "--out", tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(PICTURES + DARK)
    docs = BENCHMARKS.parent / "docs"
    pages = [(docs / f"{page}.md").read_text() for page in PAGES]
    for result in results:
        if result.stem != "trace":  # its file is as envs.trace() writes it
            assert {"cpu", "python", "libraries"} <= set(json.loads(result.read_text())["machine"])
        assert any(f"results/{result.stem}.png)" in page for page in pages)
        for name in (result.stem, f"{result.stem}-dark"):
            assert result.with_name(f"{name}.png").exists()


def test_a_learning_curve_while_workers_are_killed(tmp_path):
    file = tmp_path / "learning.json"
    run("soak.py", "learning", "--seeds", "1", "--rollouts", "2", "--json", file)
    whole, killed = json.loads(file.read_text())["learning"]
    assert (whole["restarts"], killed["restarts"]) == (0, 1)
    assert len(whole["lengths"]) == 2 and whole["lengths"][0] == killed["lengths"][0]
