"""docs/inside.md: each program runs as it stands there."""

import importlib.util
import re
from pathlib import Path

import pytest
from processes import output_of

pytestmark = pytest.mark.deep

PAGE = (Path(__file__).parents[1] / "docs" / "inside.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.parametrize("code", PROGRAMS, ids=["stats", "tensorboard", "wandb"])
def test_the_program_runs(code, tmp_path):
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.M):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    said = output_of("-c", code, cwd=tmp_path)
    if "SummaryWriter" in code:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(tmp_path / "runs" / "inside"))
        found.Reload()
        logged = found.Scalars("envs/steps_per_s")
        assert [each.step for each in logged] == [0, 1, 2] and logged[0].value > 0
        assert "envs/step_p99_s" in found.Tags()["scalars"]
    if "wandb" in code:
        assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    if "print" in code:
        assert "of the limit)" in said
