"""What users of a wheel rely on. Needs no checkout: each wheel is tested by it, too."""

import importlib.metadata
import pkgutil
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
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readmes_example(tmp_path):
    (tmp_path / "example.py").write_text(README)
    assert succeeds("example.py", cwd=tmp_path) == "(32, 4)\n"


@pytest.mark.deep
def test_the_version_is_the_distributions(tmp_path):
    try:
        distribution = importlib.metadata.distribution("shmvec")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("it is not installed")
    if Path(str(distribution.locate_file("shmvec/__init__.py"))) != Path(shmvec.__file__):
        pytest.skip("it is installed as a link to a checkout")
    assert distribution.version == shmvec.__version__
    assert "bench" in succeeds("-m", "shmvec", "--help", cwd=tmp_path)


@pytest.mark.deep
def test_all_of_it_is_there_without_what_gymnasium_has_since_1_1(tmp_path):
    """Gymnasium 1.0 has no AutoresetMode. Commands import what they need, too."""
    modules = [f"shmvec.{m.name}" for m in pkgutil.iter_modules(shmvec.__path__)]
    modules.remove("shmvec.auto")  # installs ours
    program = f"""
import gymnasium.vector
mode = vars(gymnasium.vector).pop("AutoresetMode", None)
import {", ".join(modules)}
if mode is not None:  # Gymnasium's own envs import it
    gymnasium.vector.AutoresetMode = mode
result = shmvec.evaluate("CartPole-v1", lambda observations, envs: [0] * len(envs), episodes=3)
print(len(result.returns))
"""
    assert succeeds("-c", program, cwd=tmp_path) == "3\n"


WORKER = """
import gymnasium as gym

class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)

    @property
    def gil(self):
        return sys._is_gil_enabled()
"""


@pytest.mark.deep
@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="Python has its GIL always"
)
def test_a_free_threaded_python_stays_so(tmp_path):
    """With every extension imported, and in the workers."""
    program = f"""
import importlib, pkgutil, sys, shmvec, shmvec._core
for module in pkgutil.iter_modules(shmvec._core.__path__):
    importlib.import_module("shmvec._core." + module.name)
assert not sys._is_gil_enabled()

{WORKER}
if __name__ == "__main__":
    for context in ("fork", "forkserver", "spawn"):
        envs = shmvec.ShmVectorEnv([Env] * 2, num_workers=1, context=context)
        print(envs.get_attr("gil"))
        envs.close()
"""
    assert succeeds("-W", "error", "-c", program, cwd=tmp_path) == "(False, False)\n" * 3
