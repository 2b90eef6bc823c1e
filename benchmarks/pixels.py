"""Checks whether several envs of a simulator in one process return their own pixels.

    python benchmarks/pixels.py                                 # all that is installed: 20 minutes
    python benchmarks/pixels.py --kind Cheetah --gl osmesa egl

Each kind has six envs, which alternate between two robots or games if their spaces allow it. They
play twice in lockstep, with the same seeds and random actions: once in a process for each env, and
once as the column says (in a process each again, in two workers, in one, in the calling process).
Each frame of `render()` and each observation that is a picture is compared. Each cell is measured
by a separate program, with its own `MUJOCO_GL`; it counts the pictures, and names the envs whose
pictures differ.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np
from harness import heading

from shmvec import ShmVectorEnv
from shmvec._commands.measuring import table_line

NUM_ENVS = 6
PATIENCE_S = 240  # for a cell
COLUMNS = {"a process each": NUM_ENVS, "2 workers": 2, "1 worker": 1, "the calling process": 0}
MUJOCO = ("osmesa", "egl")


def make(name: str, module: str = "", **options: Any) -> gym.Env[Any, Any]:
    """Makes an env that renders, after importing the module that registers it."""
    if module:
        importlib.import_module(module)
    return gym.make(name, render_mode="rgb_array", **options)


def make_pixel_env(name: str, module: str = "", **options: Any) -> gym.Env[Any, Any]:
    """Makes an env whose observation is its frame, drawn within the step."""
    env = make(name, module, **options)
    env.reset(seed=0)
    space = gym.spaces.Box(0, 255, np.shape(env.render()), np.uint8)
    return gym.wrappers.TransformObservation(env, lambda _: np.array(env.render()), space)


class Current(gym.Wrapper[Any, Any, Any, Any]):
    """Makes a MuJoCo env of Gymnasium's draw in its own GL context.

    Gymnasium makes a context current only when it creates it, so all envs of a process draw in the
    last one.
    """

    def render(self) -> Any:
        """Draws the frame."""
        viewer = self.get_wrapper_attr("mujoco_renderer").viewer
        if viewer is not None:
            viewer.make_context_current()
        return self.env.render()


class Bullet(gym.Env[Any, Any]):
    """A robot on a plane in its own PyBullet world; the observation is the camera's picture.

    Args:
        robot: The robot's file.
        hardware: Whether Bullet's EGL plugin draws, not its TinyRenderer.
        named: Whether the camera's call names this world (``physicsClientId``).
    """

    action_space = gym.spaces.Box(-20, 20, (2,), np.float32)
    observation_space = gym.spaces.Box(0, 255, (96, 96, 3), np.uint8)
    render_mode = "rgb_array"

    def __init__(self, robot: str, *, hardware: bool = False, named: bool = True) -> None:
        """Loads the world."""
        import pkgutil

        import pybullet
        import pybullet_data

        self._bullet = pybullet
        self._world = {"physicsClientId": pybullet.connect(pybullet.DIRECT)}
        self._camera = self._world if named else {}
        if hardware:
            file: Any = pkgutil.get_loader("eglRenderer")
            pybullet.loadPlugin(file.get_filename(), "_eglRendererPlugin", **self._world)
        pybullet.setAdditionalSearchPath(pybullet_data.getDataPath(), **self._world)
        pybullet.setGravity(0, 0, -9.8, **self._world)
        pybullet.loadURDF("plane.urdf", **self._world)
        self._robot = pybullet.loadURDF(robot, [0, 0, 0.6], **self._world)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Puts the robot somewhere."""
        super().reset(seed=seed)
        place = [*self.np_random.uniform(-0.5, 0.5, 2), 0.6]
        self._bullet.resetBasePositionAndOrientation(
            self._robot, place, [0, 0, 0, 1], **self._world
        )
        return self.render(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Pushes the robot for five steps of the simulation."""
        force = [float(action[0]), float(action[1]), 0.0]
        for _ in range(5):
            pushed = self._robot, -1, force, [0, 0, 0], self._bullet.LINK_FRAME
            self._bullet.applyExternalForce(*pushed, **self._world)
            self._bullet.stepSimulation(**self._world)
        return self.render(), 0.0, False, False, {}

    def render(self) -> Any:
        """Takes the camera's picture."""
        bullet = self._bullet
        view = bullet.computeViewMatrix([2, 2, 2], [0, 0, 0.4], [0, 0, 1])
        lens = bullet.computeProjectionMatrixFOV(60, 1, 0.1, 10)
        picture = bullet.getCameraImage(96, 96, view, lens, **self._camera)[2]
        return np.asarray(picture, np.uint8).reshape(96, 96, 4)[:, :, :3]

    def close(self) -> None:
        """Ends the world."""
        self._bullet.disconnect(**self._world)


def vizdoom(name: str) -> gym.Env[Any, Any]:
    """Makes a map of Doom, with only the screen as its observation."""
    env = make(f"Vizdoom{name}-v1", "vizdoom.gymnasium_wrapper")
    return gym.wrappers.FilterObservation(env, ["screen"])


def metaworld(task: str) -> gym.Env[Any, Any]:
    """Makes an arm at a task; the places of things follow from the seed here."""
    return make("Meta-World/MT1", "metaworld", env_name=task, seed=1)


CHEETAH, SMALL = "HalfCheetah-v5", {"width": 200, "height": 200}
TWO = "Walker2d-v5", CHEETAH
CONTROL = "dm_control/cheetah-run-v0", "dm_control/walker-walk-v0"
ROBOTS = "r2d2.urdf", "duck_vhacd.urdf"


def each(make: Callable[..., Any], *names: str, **options: Any) -> list[Callable[[], Any]]:
    """Functions that make envs by name."""
    return [partial(make, name, **options) for name in names]


# By name: the package that has to be installed, and functions between which the envs alternate.
KINDS: dict[str, tuple[str, list[Callable[[], Any]]]] = {
    "Walker2d-v5, HalfCheetah-v5": ("mujoco", each(make, *TWO, **SMALL)),
    "the same, each made current": (
        "mujoco",
        each(lambda name: Current(make(name, **SMALL)), *TWO),
    ),
    "HalfCheetah-v5, large and small": (
        "mujoco",
        [
            partial(make, CHEETAH, width=800, height=600),
            partial(make, CHEETAH, width=96, height=96),
        ],
    ),
    "HalfCheetah-v5, frames": ("mujoco", each(make_pixel_env, CHEETAH, **SMALL)),
    "dm_control: cheetah-run, walker-walk": (
        "dm_control",
        each(make_pixel_env, *CONTROL, module="shimmy"),
    ),
    "Meta-World: reach-v3, push-v3": ("metaworld", each(metaworld, "reach-v3", "push-v3")),
    "ALE: Pong, Breakout": (  # with all actions, so that all games have the same spaces
        "ale_py",
        each(make, "ALE/Pong-v5", "ALE/Breakout-v5", module="ale_py", full_action_space=True),
    ),
    "ViZDoom: Basic, DefendCenter": ("vizdoom", each(vizdoom, "Basic", "DefendCenter")),
    "PyBullet, TinyRenderer": ("pybullet", each(Bullet, *ROBOTS)),
    "PyBullet, its EGL plugin": ("pybullet", each(Bullet, *ROBOTS, hardware=True)),
    "PyBullet, without physicsClientId": ("pybullet", each(Bullet, *ROBOTS, named=False)),
    "panda-gym: PandaReach-v3": ("panda_gym", each(make, "PandaReach-v3", module="panda_gym")),
    "CarRacing-v3 (pygame)": ("Box2D", each(make, "CarRacing-v3")),
    "CartPole-v1 (pygame)": ("pygame", each(make, "CartPole-v1")),
}
WITH_GL = ("mujoco", "dm_control", "metaworld")  # for which MUJOCO_GL matters


def pictures(envs: ShmVectorEnv, steps: int) -> Iterator[tuple[int, Any]]:
    """Yields envs and their pictures, after a reset and after each of some random steps."""
    envs.action_space.seed(1)
    observations, _ = envs.reset(seed=1)
    for _ in range(steps + 1):
        yield from enumerate(envs.render())
        batches = observations.values() if isinstance(observations, dict) else [observations]
        for batch in batches:
            if batch.dtype == np.uint8 and batch.ndim >= 3:
                yield from enumerate(batch)
        observations, *_ = envs.step(envs.action_space.sample())


def compared(package: str, env_fns: list[Callable[[], Any]], num_workers: int, steps: int) -> str:
    """Measures a cell of the table."""
    if package in WITH_GL:  # imported once for all workers; that makes no GL context
        importlib.import_module("gymnasium.envs.mujoco.mujoco_env")
    fns = [env_fns[i % len(env_fns)] for i in range(NUM_ENVS)]
    count, wrong = 0, Counter[int]()
    with (
        closing(ShmVectorEnv(fns, num_workers=NUM_ENVS)) as apart,
        closing(ShmVectorEnv(fns, num_workers=num_workers)) as together,
    ):
        both = zip(pictures(apart, steps), pictures(together, steps), strict=True)
        for (env, alone), (_, beside) in both:
            count += 1
            wrong[env] += not np.array_equal(alone, beside)
    found = [f"{times} of env {env}" for env, times in sorted(wrong.items()) if times]
    return f"DIFFER: {', '.join(found)}, of {count}" if found else f"same ({count})"


def cell(name: str, gl: str, num_workers: int, steps: int) -> str:
    """Has a program measure a cell of the table; its last line of stderr if it fails."""
    command = [sys.executable, __file__, "--cell", name, str(num_workers), "--steps", str(steps)]
    environ = {**os.environ, "MUJOCO_GL": gl} if gl else None
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return f"hangs ({PATIENCE_S} s)"
    if done.returncode == 0:
        return done.stdout.splitlines()[-1]
    return f"fails ({done.returncode}): {' '.join(done.stderr.splitlines()[-1:])[:200]}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="*", default=[""], help="parts of names of kinds (all)")
    parser.add_argument("--gl", nargs="*", default=MUJOCO, help="values of MUJOCO_GL")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        warnings.simplefilter("ignore")
        name, num_workers = options.cell
        print(compared(*KINDS[name], int(num_workers), options.steps))
        return
    print(heading("kind", "MUJOCO_GL", *COLUMNS), flush=True)
    for name, (package, _) in KINDS.items():
        if not any(part in name for part in options.kind):
            continue
        if find_spec(package) is None:
            print(table_line(name, "", f"{package} is not installed", *[""] * (len(COLUMNS) - 1)))
            continue
        for gl in options.gl if package in WITH_GL else [""]:
            cells = (cell(name, gl, workers, options.steps) for workers in COLUMNS.values())
            print(table_line(name, gl, *cells), flush=True)


if __name__ == "__main__":
    main()
