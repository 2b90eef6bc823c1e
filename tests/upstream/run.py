"""Runs another system's own tests with our class in the place of theirs.

    python tests/upstream/run.py sb3
    python tests/upstream/run.py gymnasium --source ~/Gymnasium -- -k reset

The system must be installed beside shmvec. Its tests are those of the installed version: from its
source distribution, which pip downloads, or from a checkout where that has none.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import shmvec

HERE = Path(__file__).resolve().parent
DING = "ding.envs.env_manager.subprocess_env_manager"
OURS = Path(shmvec.__file__).resolve().parents[1]


@dataclass(frozen=True)
class System:
    """Where a system's tests are, and what stands for what in them."""

    distribution: str
    tests: tuple[str, ...]
    swaps: dict[str, tuple[str, ...]]
    """By the name of their class that of ours: the first that there is."""
    source: str = ""
    """What to clone, where the source distribution has no tests."""
    private: dict[str, str] = field(default_factory=dict)
    """Their private attributes that the tests look at, and where ours have the same."""


SYSTEMS = {
    "gymnasium": System(
        "gymnasium",
        ("tests/vector", "tests/wrappers/vector"),
        {"gymnasium.vector.async_vector_env:AsyncVectorEnv": ("shmvec:ShmVectorEnv",)},
        "https://github.com/Farama-Foundation/Gymnasium",
    ),
    "sb3": System(
        "stable-baselines3",
        tuple(f"tests/test_{name}.py" for name in ("vec_envs", "dict_env", "utils", "her")),
        {
            "stable_baselines3.common.vec_env.subproc_vec_env:SubprocVecEnv": (
                "shmvec.adapters.sb3:ShmVecEnv",
            )
        },
    ),
    "tianshou": System(
        "tianshou",
        ("test/base/test_env.py", "test/base/test_collector.py"),
        {
            "tianshou.env.venvs:SubprocVectorEnv": (
                "shmvec.adapters.tianshou:SubprocVectorEnv",
                "shmvec.adapters.tianshou:TianshouVectorEnv",
            ),
            "tianshou.env.venvs:ShmemVectorEnv": (
                "shmvec.adapters.tianshou:ShmemVectorEnv",
                "shmvec.adapters.tianshou:TianshouVectorEnv",
            ),
        },
        "https://github.com/thu-ml/tianshou",
    ),
    "di-engine": System(
        "di-engine",
        ("ding/envs/env_manager/tests/test_subprocess_env_manager.py",),
        {
            f"ding.envs.env_manager.subprocess_env_manager:{name}": (
                f"shmvec.adapters.ding:{name}",
            )
            for name in (
                "SyncSubprocessEnvManager",
                "AsyncSubprocessEnvManager",
                "SubprocessEnvManagerV2",
            )
        },
        private={
            "_closed": "closed",
            "_env_episode_count": "episode_count",
            "_env_ref": "env_ref",
            "_env_states": "env_states",
            **{
                f"_{name}": f"_config.{name}"
                for name in (
                    "connect_timeout",
                    "max_retry",
                    "reset_timeout",
                    "retry_type",
                    "step_timeout",
                )
            },
        },
    ),
    "plangym": System(
        "plangym",
        ("tests/vectorization/test_parallel.py", "tests/test_core.py"),
        {
            "plangym.vectorization.parallel:ParallelEnv": (
                "shmvec.adapters.plangym:ParallelEnv",
                "shmvec.planning:PlanningVectorEnv",
            )
        },
    ),
    "baselines": System(
        "baselines",
        ("baselines/common/vec_env/test_vec_env.py",),
        {
            "baselines.common.vec_env.subproc_vec_env:SubprocVecEnv": (
                "shmvec.adapters.baselines:SubprocVecEnv",
            )
        },
        "https://github.com/openai/baselines",
    ),
    "agilerl": System(
        "agilerl",
        ("tests/test_vector",),
        {
            "agilerl.vector.pz_async_vec_env:AsyncPettingZooVecEnv": (
                "shmvec.adapters.pettingzoo:ParallelVectorEnv",
            )
        },
        "https://github.com/AgileRL/AgileRL",
    ),
    # PettingZoo has no vector env; its tests of any env are run on one that lives in a worker.
    "pettingzoo": System(
        "pettingzoo",
        (str(HERE / "pettingzoo_api.py"),),
        {
            "shmvec.adapters.pettingzoo:ParallelVectorEnv": (
                "shmvec.adapters.pettingzoo:ParallelVectorEnv",
            )
        },
    ),
}


def download(system: System, version: str, folder: Path) -> Path:
    """Unpacks the source distribution; returns its root."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    requirement = f"{system.distribution}=={version}"
    subprocess.run(
        [*command, "--quiet", "--dest", str(folder), requirement], check=True, timeout=600
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (root,) = (path for path in folder.iterdir() if path.is_dir())
    return root


def run(name: str, source: Path | None, arguments: list[str], seconds: float) -> int:
    """Runs one system's tests in their root; the plugin `swap` prints what has come of them."""
    system = SYSTEMS[name]
    try:
        version = importlib.metadata.version(system.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"{system.distribution} is not installed beside shmvec: pip install "
            f"{system.distribution}, with the Python that runs this, {sys.executable}"
        ) from None
    with tempfile.TemporaryDirectory() as temporary:
        if source is None and system.source:
            raise SystemExit(
                f"{system.distribution}'s source distribution has no tests. Give a checkout:\n"
                f"  git clone --branch v{version} {system.source}\n"
                f"  {Path(sys.argv[0]).name} {name} --source {Path(system.source).name}"
            )
        outside = all(Path(test).is_absolute() for test in system.tests)
        root = source or (
            Path(temporary) if outside else download(system, version, Path(temporary))
        )
        tests = [test for test in system.tests if (root / test).exists()]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "swap", "-p", "no:cacheprovider"]
        if outside:
            command += ["-c", os.devnull]  # not this repository's configuration
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(OURS)]),
            "SHMVEC_UPSTREAM": json.dumps(
                {
                    "title": f"{system.distribution} {version}",
                    "swaps": system.swaps,
                    "private": system.private,
                }
            ),
        }
        process = subprocess.Popen(
            [*command, *arguments, *tests], cwd=root, env=environment, start_new_session=True
        )
        try:
            return process.wait(seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> None:
    """Reads the command line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # pytest ends, too
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=SYSTEMS)
    parser.add_argument("--source", type=Path, help="a checkout, or an unpacked distribution")
    parser.add_argument("--seconds", type=float, default=3600, help="ends the run after so long")
    parser.epilog = "What stands after -- are arguments for pytest."
    own = list(itertools.takewhile(lambda argument: argument != "--", sys.argv[1:]))
    asked = parser.parse_args(own)
    source = asked.source.resolve() if asked.source else None
    raise SystemExit(run(asked.name, source, sys.argv[len(own) + 2 :], asked.seconds))


if __name__ == "__main__":
    main()
