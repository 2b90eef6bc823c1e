"""What whoever has installed it relies on. Needs no checkout: each wheel is tested by it, too."""

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import shmvec

README = """
import shmvec

envs = shmvec.make_vec("CartPole-v1", num_envs=32)
observations, infos = envs.reset(seed=1)
for _ in range(100):
    actions = envs.action_space.sample()
    observations, rewards, terminations, truncations, infos = envs.step(actions)
envs.close()
print(observations.shape)
"""


def succeeds(*arguments, cwd):
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readmes_example(tmp_path):
    (tmp_path / "example.py").write_text(README)
    assert succeeds("example.py", cwd=tmp_path) == "(32, 4)\n"


def test_the_version_is_the_distributions(tmp_path):
    try:
        distribution = importlib.metadata.distribution("shmvec")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("it is not installed")
    if Path(str(distribution.locate_file("shmvec/__init__.py"))) != Path(shmvec.__file__):
        pytest.skip("it is installed as a link to a checkout")
    assert distribution.version == shmvec.__version__
    assert "bench" in succeeds("-m", "shmvec", "--help", cwd=tmp_path)


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="Python has its GIL always"
)
def test_a_free_threaded_python_gets_its_gil_back_and_is_told_so(tmp_path):
    """docs/compatibility.md says why."""
    program = "import sys, shmvec; print(sys._is_gil_enabled())"
    assert succeeds("-W", "ignore", "-c", program, cwd=tmp_path) == "True\n"
    warned = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert "The global interpreter lock (GIL) has been enabled" in warned.stderr
