"""shmvec where there is no Linux: Gymnasium's vector envs under its names.

``SHMVEC_PURE=1`` takes that way here. Needs no checkout: wheels.yml runs it on macOS and Windows by
``pytest --noconftest``.
"""

import os
import subprocess
import sys

import pytest

# What neither Windows nor macOS has, and what Windows lacks, is taken from Python.
LACKING = """
import multiprocessing, os, signal, sys
import gymnasium

sys.modules.update(dict.fromkeys("fcntl grp pwd resource termios".split()))
for module, names in (
    (os, "eventfd fork memfd_create pidfd_open register_at_fork sched_getaffinity waitid"),
    (signal, "SIGKILL pidfd_send_signal pthread_kill"),
):
    for name in names.split():
        vars(module).pop(name, None)
"""


def run(tmp_path, program, *arguments, **environ):
    script = tmp_path / "program.py"
    script.write_text(program)
    return subprocess.run(
        [sys.executable, *arguments, script],
        cwd=tmp_path,
        env={**os.environ, "SHMVEC_PURE": "1", **environ},
        capture_output=True,
        text=True,
        timeout=250,
    )


def succeeds(tmp_path, program, *arguments, **environ):
    done = run(tmp_path, program, *arguments, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_programs_run_by_gymnasiums_vector_envs(tmp_path):
    """Where fork and the modules of Linux are missing, with a warning in all."""
    program = f"""
{LACKING}
import warnings
import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
import shmvec
from shmvec import ShmVectorEnv, install, make_vec

assert not shmvec.is_native and not {{"fork", "sched_getaffinity"}} & set(dir(os))
if __name__ == "__main__":
    options = dict(shared_memory=False, copy=False, context="spawn", daemon=False)
    with warnings.catch_warnings(record=True) as caught:
        opened = make_vec("CartPole-v1", 2, **options)
    with opened as envs:
        assert isinstance(envs, AsyncVectorEnv) and isinstance(envs, ShmVectorEnv)
        for name, value in options.items():
            assert getattr(envs, name, value) == value, name  # 1.0 notes not all
        right = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
        assert (envs.reset(seed=1)[0] == right.reset(seed=1)[0]).all()
        for seen, expected in zip(envs.step([0, 1])[:4], right.step([0, 1])[:4]):
            assert (seen == expected).all()
        right.close()
        assert envs.num_workers == 2 and envs.spec.id == "CartPole-v1"
        assert not hasattr(envs, "stats")
        try:
            envs.rollout(8)
        except AttributeError as error:
            assert "has no attribute 'rollout'" in str(error) and "needs Linux" in str(error)
    (warning,) = caught
    assert issubclass(warning.category, UserWarning)
    for word in ("needs Linux", "AsyncVectorEnv", "Replay", "evaluate", "__name__"):
        assert word in str(warning.message), word

    warnings.simplefilter("error")
    make_env = lambda: gym.make("CartPole-v1")
    modes = getattr(gym.vector, "AutoresetMode", None)  # not in Gymnasium 1.0
    mode = modes.SAME_STEP if modes else "NextStep"
    options = dict(num_workers=0, context="spawn", autoreset_mode=mode)
    with ShmVectorEnv([make_env] * 2, **options) as envs:
        assert isinstance(envs, SyncVectorEnv) and envs.num_workers == 0
        assert envs.autoreset_mode is mode if modes else not hasattr(envs, "autoreset_mode")
        assert envs.reset(seed=1)[0].shape == (2, 4)
    with install(num_workers=0):
        envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="async")
        assert isinstance(envs, SyncVectorEnv)
        envs.close()
    assert gym.vector.AsyncVectorEnv is AsyncVectorEnv
    import shmvec.auto
    assert gym.vector.AsyncVectorEnv is ShmVectorEnv
    shmvec.uninstall()
    print("done")
"""
    assert succeeds(tmp_path, program).stdout == "done\n"


def test_what_gymnasium_lacks_is_refused_by_name(tmp_path):
    program = """
import inspect, os
import pytest
import gymnasium as gym
import shmvec
from shmvec import ShmVectorEnv, install, make_vec

made = []
class Env(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    def __init__(self):
        made.append(self)

def refused(error, words, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    assert words in str(caught.value), caught.value
    assert "needs Linux" in str(caught.value) or error is not TypeError

with pytest.warns(UserWarning, match="shmvec needs Linux"):
    with ShmVectorEnv([Env], num_workers=0, shared_memory=True):
        pass
made.clear()
parameters = inspect.signature(ShmVectorEnv).parameters
assert {"env_fns", "num_workers", "batch_size"} <= parameters.keys()
theirs = inspect.signature(gym.vector.AsyncVectorEnv).parameters
options = parameters.keys() - theirs.keys() - {"num_workers"}
assert len(options) > 20, options
defaults = {name: parameters[name].default for name in options}
for name, default in defaults.items():
    for value in (object(), default + 1 if isinstance(default, (int, float)) else "spin"):
        refused(TypeError, f"the option {name} needs", ShmVectorEnv, [Env] * 2, **{name: value})
        refused(TypeError, f"the option {name} needs", install, **{name: value})
refused(TypeError, "num_workers=1 needs", ShmVectorEnv, [Env] * 2, num_workers=1)
refused(TypeError, "num_workers=2 needs", install, num_workers=2)
refused(TypeError, "`worker` function", ShmVectorEnv, [Env], num_workers=0, worker=lambda *a: 0)
refused(TypeError, "the option overlap", make_vec, "CartPole-v1", 2, overlap=3)
with pytest.raises(TypeError, match="Did you mean 'shared_memory'"):
    ShmVectorEnv([Env], shared_memoy=True)
with pytest.raises(ValueError, match="env_fns is empty"):
    ShmVectorEnv([])
os.environ["SHMVEC_STEP_TIMEOUT"] = "3"
refused(ValueError, "SHMVEC_STEP_TIMEOUT='3' in the environment: the option", ShmVectorEnv, [Env])
assert not made  # no env, and no process
del os.environ["SHMVEC_STEP_TIMEOUT"]
os.environ["SHMVEC_NUM_WORKERS"] = "0"

class Mine(ShmVectorEnv):
    def __init__(self, count):
        super().__init__([Env] * count)

refused(TypeError, "num_workers=0 in a subclass", Mine, 2)
ShmVectorEnv([Env] * 2, **defaults).close()
ShmVectorEnv([Env] * 2, **dict.fromkeys(options)).close()
ShmVectorEnv([Env] * 2, hang_warning_s=30, pin_workers=0).close()
assert len(made) == 6

there = []
for name in [*shmvec.__all__, *shmvec._MODULES]:
    try:
        getattr(shmvec, name)
    except ImportError as error:
        assert f"shmvec.{name} needs Linux" in str(error) and "AsyncVectorEnv" in str(error)
    else:
        there.append(name)
print(*there)
for name in ("exchange", "vector_env", "planning", "cluster", "testing", "adapters.baselines"):
    if name != "adapters.baselines":
        with pytest.raises(ImportError, match=f"shmvec.{name} needs Linux"):
            getattr(shmvec, name)
    with pytest.raises(ImportError, match="needs Linux"):
        __import__(f"shmvec.{name}")
with pytest.raises(ImportError, match="shmvec.evaluate needs Linux"):
    from shmvec import evaluate
with pytest.raises(AttributeError, match="no attribute 'evalute'"):
    shmvec.evalute
"""
    assert set(succeeds(tmp_path, program).stdout.split()) == {
        "__version__", "install", "is_native", "make_vec", "uninstall", "ShmVectorEnv",
        "EnvTimeoutError", "FaultPolicy", "RemoteTraceback", "TooManyFaultsError",
        "WorkerCrashError",
    }  # fmt: skip


def test_modules_are_there_or_say_why_not(tmp_path):
    """Before they miss a module of Linux's, or a library; what lists the names finds no others."""
    program = f"""
{LACKING}
import inspect, pkgutil, pydoc
import shmvec
from shmvec import *

assert ShmVectorEnv is shmvec.ShmVectorEnv and "evaluate" not in dir(shmvec)
assert {{"make_vec", "FaultPolicy"}} <= dict(inspect.getmembers(shmvec)).keys()
assert "make_vec" in pydoc.render_doc(shmvec)
there = []
for module in pkgutil.walk_packages(shmvec.__path__, "shmvec.", onerror=lambda name: None):
    if "._" not in module.name:
        try:
            __import__(module.name)
        except ImportError as error:
            assert "needs Linux" in str(error), (module.name, error)
        else:
            there.append(module.name.removeprefix("shmvec."))
print(*there)
"""
    done = succeeds(tmp_path, program)
    assert done.stdout == "auto entry faults rendering spaces states\n"


@pytest.mark.skipif(sys.platform != "linux", reason="shows another system's way on Linux")
def test_which_way_is_taken(tmp_path):
    """Other systems take it by themselves, Linux by the variable only."""
    asks = "import shmvec; print(shmvec.is_native)"
    assert succeeds(tmp_path, asks, SHMVEC_PURE="0").stdout == "True\n"
    other = f"import gymnasium, sys; sys.platform = 'win32'; {asks}"
    assert succeeds(tmp_path, other, SHMVEC_PURE="").stdout == "False\n"
    wrong = run(tmp_path, asks, SHMVEC_PURE="yes")
    assert "ValueError: SHMVEC_PURE='yes' in the environment: it must be 0 or 1" in wrong.stderr
    command = run(tmp_path, "", "-m", "shmvec", "doctor")
    assert command.returncode == 1 and "the command line needs Linux" in command.stderr
