"""Makes docs/compatibility.md: kinds of env against SyncVectorEnv, and libraries under install().

    python tests/upstream/compatibility.py            # prints the rows of what is installed
    python tests/upstream/compatibility.py MiniGrid TorchRL --write docs/compatibility.md

Each cell is a process of its own with a deadline. What is not installed keeps the row it has.
"""

import argparse
import copy
import importlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gymnasium as gym  # noqa: E402
from equality import same  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

import shmvec  # noqa: E402

DEADLINE_S = 500


@dataclass(frozen=True)
class Kind:
    """Envs of one package."""

    distributions: tuple[str, ...]
    id: str
    module: str = ""
    """To import; its envs are registered then."""
    length: int = 12
    """Episodes are truncated after so many steps, so that all see resets."""


KINDS = {
    "ALE": Kind(("ale-py",), "ALE/Pong-v5", "ale_py"),
    "MuJoCo": Kind(("mujoco",), "HalfCheetah-v5"),
    "MiniGrid": Kind(("minigrid",), "MiniGrid-Empty-5x5-v0", "minigrid"),
    "ViZDoom": Kind(("vizdoom",), "VizdoomBasic-v1", "vizdoom.gymnasium_wrapper"),
    "dm_control": Kind(
        ("dm-control", "shimmy", "mujoco"), "dm_control/cartpole-swingup-v0", "shimmy"
    ),
    "highway-env": Kind(("highway-env",), "highway-v0", "highway_env", length=5),
    "Gymnasium-Robotics": Kind(
        ("gymnasium-robotics", "mujoco"), "FetchReach-v4", "gymnasium_robotics"
    ),
    "PyBullet": Kind(
        ("pybullet-envs-gymnasium", "pybullet"), "HopperBulletEnv-v0", "pybullet_envs_gymnasium"
    ),
    "NLE": Kind(("nle",), "NetHackScore-v0", "nle"),
    "MiniHack": Kind(("minihack", "nle"), "MiniHack-Room-5x5-v0", "minihack"),
}
LIBRARIES = {
    "CleanRL-shaped PPO": ("torch",),
    "TorchRL": ("torchrl", "torch"),
    "RLlib": ("ray", "torch"),
    "skrl": ("skrl", "torch"),
    "AgileRL": ("agilerl", "torch"),
    "Tianshou": ("tianshou", "torch"),
}


class WithoutDrawnAction(gym.Wrapper):
    """highway-env's reset puts an action into its info that no seed determines."""

    def reset(self, **kwargs):
        """Leaves it out."""
        observation, info = self.env.reset(**kwargs)
        return observation, {key: value for key, value in info.items() if key != "action"}


class SeededNetHack(gym.Wrapper):
    """NLE takes seeds by a method, before each reset, and no options that it does not know.

    Its observations are its own memory: SyncVectorEnv's `final_obs` would show the next episode.
    """

    def reset(self, *, seed=None, options=None):
        """Seeds each reset."""
        self.count = seed if seed is not None else self.count + 100
        self.unwrapped.seed(self.count, self.count, reseed=False)
        return copy.deepcopy(self.env.reset(seed=seed, options=options or None))

    def step(self, action):
        """Copies the observation."""
        return copy.deepcopy(self.env.step(action))


WRAPPERS = {
    "highway-env": WithoutDrawnAction,
    "NLE": SeededNetHack,
    "MiniHack": SeededNetHack,
}


def make_env(name: str) -> gym.Env:
    """One env, whose episodes are short, and as reproducible as it can be."""
    kind = KINDS[name]
    if kind.module:
        gym.register_envs(importlib.import_module(kind.module))
    env = gym.make(kind.id, max_episode_steps=kind.length)
    return WRAPPERS.get(name, lambda env: env)(env)


def record(envs, kind: Kind, mode: AutoresetMode) -> list:
    """All that some steps return."""
    results = [envs.reset(seed=1)]
    actions = envs.action_space
    actions.seed(1)
    for _ in range(3 * kind.length):
        results.append(envs.step(actions.sample()))
        over = results[-1][2] | results[-1][3]
        if mode is AutoresetMode.DISABLED and over.any():
            results.append(envs.reset(options={"reset_mask": over}))
    return results


def compare(name: str, mode: AutoresetMode) -> str:
    """Ours and Gymnasium's, one after the other, three envs each."""
    kind = KINDS[name]
    env_fns = [partial(make_env, name)] * 3
    note = ""
    try:
        ours = shmvec.ShmVectorEnv(env_fns, num_workers=2, autoreset_mode=mode)
    except (TypeError, ValueError) as error:
        if "shared_memory=False" not in str(error):
            raise
        note = " (`shared_memory=False`)"
        ours = shmvec.ShmVectorEnv(env_fns, num_workers=2, autoreset_mode=mode, shared_memory=False)
    with closing(ours):
        mine = record(ours, kind, mode)
    references = []
    for _ in range(2):
        with closing(SyncVectorEnv(env_fns, autoreset_mode=mode)) as theirs:
            references.append(record(theirs, kind, mode))
    if same(mine, references[0]):
        return f"equal{note}"
    if not same(*references):
        return "two SyncVectorEnv differ: not reproducible"
    pairs = zip(mine, references[0], strict=False)  # in DISABLED, masked resets make it longer
    first = next((i for i, pair in enumerate(pairs) if not same(*pair)), "their end")
    return f"DIFFERENT from result {first}"


def program(name: str) -> str:
    """One library's program with Gymnasium's class, then with ours: what it learns is the same."""
    import programs

    script = programs.PROGRAMS[name]
    theirs = script(False)
    made = programs.count(shmvec.ShmVectorEnv)
    ours = script(True)
    if not made:
        return "our class was not used"
    return "equal" if same(ours, theirs) else f"DIFFERENT: {ours} {theirs}"


def alone(*arguments: str) -> str:
    """One cell, in a process group of its own: what it says last, or how it failed."""
    command = [sys.executable, str(HERE / "compatibility.py"), "--cell", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(shmvec.__file__).resolve().parents[1])}
    with tempfile.TemporaryDirectory() as folder:  # ViZDoom leaves a file where it runs
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            return f"FAILED: no answer in {DEADLINE_S} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    answers = [line.removeprefix("CELL ") for line in said.splitlines() if line.startswith("CELL ")]
    if answers:
        return answers[-1]
    print(said, file=sys.stderr)
    return f"FAILED: {said.strip().splitlines()[-1] if said.strip() else process.returncode}"


def versions(distributions: tuple[str, ...]) -> str:
    """Of what a row is about. Raises PackageNotFoundError if it is not installed."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in distributions)


def rows(names: list[str]):
    """A table's row for each that is installed."""
    common = f"{importlib.metadata.version('gymnasium')} | {time.strftime('%Y-%m-%d')} |"
    for name in names:
        try:
            used = versions(KINDS[name].distributions if name in KINDS else LIBRARIES[name])
        except importlib.metadata.PackageNotFoundError as missing:
            print(f"{name}: {missing.name} is not installed", file=sys.stderr)
            continue
        if name in KINDS:
            cells = " | ".join(alone(name, mode.name) for mode in AutoresetMode)
            yield name, f"| {name} | `{KINDS[name].id}` | {used} | {cells} | {common}"
        else:
            yield name, f"| {name} | {used} | {alone(name)} | {common}"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join([*KINDS, *LIBRARIES]))
    parser.add_argument("--write", type=Path, help="the page whose rows to replace")
    parser.add_argument("--cell", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        name, *mode = asked.cell
        said = compare(name, AutoresetMode[mode[0]]) if mode else program(name)
        print(f"CELL {said}", flush=True)
        return
    for name, row in rows(asked.names or [*KINDS, *LIBRARIES]):
        print(row, flush=True)
        if asked.write:
            text = asked.write.read_text()
            old = rf"^\| {re.escape(name)} \|.*$"
            asked.write.write_text(re.sub(old, row.replace("\\", r"\\"), text, flags=re.M))


if __name__ == "__main__":
    main()
