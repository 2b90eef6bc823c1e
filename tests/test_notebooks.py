"""The notebooks of examples/ run with small settings; they are stored without a machine's paths."""

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import notebooks
import pytest

import shmvec

pytestmark = pytest.mark.deep

SMALL = {  # variables of the cell that is tagged "parameters"
    "atari_ppo": {"NUM_ENVS": 2, "NUM_STEPS": 16, "UPDATES": 2, "VIDEO_STEPS": 10},
    "evaluate_a_suite": {"EPISODES": 2},
    "half_cheetah_rollouts": {"NUM_ENVS": 2, "LENGTH": 100, "TOTAL_STEPS": 2400},
    "my_env_crashes": {"STEPS": 60},
    "what_limits_my_speed": {"BATCHES": 20, "TUNE_SECONDS": 0.02, "TUNE_ENVS": [2]},
}
RUN = ("nbclient", "ipykernel", "matplotlib")
NEEDS = {
    "atari_ppo": ("torch", "tensorboard", "ale_py", "cv2", "moviepy"),
    "half_cheetah_rollouts": ("torch", "mujoco"),
}
MOST_BYTES = 300_000
OF_A_MACHINE = re.compile(r"/(home|root|tmp|usr|opt|work|var|content|kaggle)/|site-packages")


of_each = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)


def test_all_are_known():
    assert [path.stem for path in notebooks.NOTEBOOKS] == sorted(SMALL)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_it_runs(name, tmp_path):
    for module in (*RUN, *NEEDS.get(name, ())):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed (the notebooks extra has it)")
    path = next(path for path in notebooks.NOTEBOOKS if path.stem == name)
    done = subprocess.run(
        [sys.executable, notebooks.__file__, str(path), "--set", json.dumps(SMALL[name])],
        env={**os.environ, "PYTHONPATH": str(Path(shmvec.__file__).parents[1])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@of_each
def test_it_is_stored_clean(path):
    notebook = notebooks.read(path)
    assert path.stat().st_size < MOST_BYTES
    assert notebook == notebooks.cleaned(notebook), "store it by tests/notebooks.py"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1)), "it was not run from top to bottom"
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            text = "".join(texts(output))
            assert "Warning" not in text and not OF_A_MACHINE.search(text), text


def texts(output):
    """What can be read of an output: images and films are left out."""
    parts = {"text/plain": output.get("text", ""), **output.get("data", {})}
    for kind, part in parts.items():
        part = "".join(part)
        if kind.startswith("image/"):
            assert b"/tmp/" not in base64.b64decode(part)
        else:
            yield re.sub(r"base64,[\w+/=\s]+", "", part)


@of_each
def test_it_begins_with_what_it_needs_and_says_what_it_is(path):
    first, title, *_ = notebooks.read(path)["cells"]
    assert notebooks.source(first) == "# %pip install 'shmvec[notebooks]'"
    assert notebooks.source(title).startswith("# ")
    place, settings = notebooks.parameters(notebooks.read(path))
    assert settings.keys() >= SMALL[path.stem].keys()


@of_each
def test_its_links_lead_somewhere(path):
    for cell in notebooks.read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\(([^)\s#]+)", notebooks.source(cell)):
                assert target.startswith("http") or (path.parent / target).exists(), target
