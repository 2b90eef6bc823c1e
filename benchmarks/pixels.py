"""Whether envs of one process return their own pixels: simulators, several envs in a worker.

    python benchmarks/pixels.py                                 # all that is installed: 20 minutes
    python benchmarks/pixels.py --kind Cheetah --gl osmesa egl

Each kind is six envs, with two robots or games taking turns where their spaces allow it. They play
twice in lockstep, with the same seeds and random actions: in a process each, and as the column says
(in a process each again, in two workers, in one, in the calling process). Each frame of `render()`
and each observation that is a picture is compared, and where one differs a digest tells whether
another env has returned it, or the same env at another step. "rounding" is a difference of at most
two of 255. Each cell is a program of its own, with its `MUJOCO_GL`.
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
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from shmvec import ShmVectorEnv

NUM_ENVS = 6
PATIENCE_S = 240  # for a cell
COLUMNS = {"a process each": NUM_ENVS, "2 workers": 2, "1 worker": 1, "the calling process": 0}
ROUNDING = 2
MUJOCO = ("osmesa", "egl")


class Kind(NamedTuple):
    """Envs that are played together.

    Attributes:
        package: What has to be installed.
        env_fns: Makes one env each; envs take turns at them.
        renderers: Values of ``MUJOCO_GL``, if they matter.
    """

    package: str
    env_fns: list[Callable[[], Any]]
    renderers: tuple[str, ...] = ("",)


def made(name: str, module: str = "", **options: Any) -> gym.Env[Any, Any]:
    """An env that renders, after an import of the module that registers it."""
    if module:
        __import__(module)
    return gym.make(name, render_mode="rgb_array", **options)


def atari(name: str) -> gym.Env[Any, Any]:
    """A game with all actions: so the spaces of all games are the same."""
    return made(f"ALE/{name}-v5", "ale_py", full_action_space=True)


def robosuite(task: str) -> gym.Env[Any, Any]:
    """An arm whose observation is a picture."""
    import robosuite as suite
    from robosuite.wrappers import GymWrapper

    env = suite.make(
        task, robots="Panda", has_renderer=False, has_offscreen_renderer=True, use_camera_obs=True,
        camera_heights=96, camera_widths=96,
    )  # fmt: skip
    return GymWrapper(env, keys=["agentview_image"], flatten_obs=False)


class Pixels(gym.ObservationWrapper[Any, Any, Any]):
    """An env whose observation is its frame, drawn within the step."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        """Draws once, for the shape."""
        super().__init__(env)
        env.reset(seed=0)
        frame = np.asarray(env.render())
        self.observation_space = gym.spaces.Box(0, 255, frame.shape, np.uint8)

    def observation(self, observation: Any) -> Any:
        """The frame, in place of the observation."""
        return np.array(self.env.render())


def drawn(name: str, module: str = "", **options: Any) -> gym.Env[Any, Any]:
    """An env whose observation is its frame."""
    return Pixels(made(name, module, **options))


class Current(gym.Wrapper[Any, Any, Any, Any]):
    """An env of Gymnasium's with MuJoCo that draws in its own GL context.

    Gymnasium makes a context current when it is made only: all envs of a process draw in the last.
    """

    def render(self) -> Any:
        """The frame."""
        viewer = self.get_wrapper_attr("mujoco_renderer").viewer
        if viewer is not None:
            viewer.make_context_current()
        return self.env.render()


def mended(name: str, **options: Any) -> gym.Env[Any, Any]:
    """An env that draws in its own GL context."""
    return Current(made(name, **options))


class Bullet(gym.Env[Any, Any]):
    """A robot on a plane, in a PyBullet world of its own; its observation is the camera's picture.

    Args:
        robot: Its file.
        hardware: Whether Bullet's EGL plugin draws, in place of its TinyRenderer.
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
        x, y = self.np_random.uniform(-0.5, 0.5, 2)
        self._bullet.resetBasePositionAndOrientation(
            self._robot, [x, y, 0.6], [0, 0, 0, 1], **self._world
        )
        return self.render(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Pushes it, for five steps of the simulation."""
        for _ in range(5):
            force = [float(action[0]), float(action[1]), 0.0]
            self._bullet.applyExternalForce(
                self._robot, -1, force, [0, 0, 0], self._bullet.LINK_FRAME, **self._world
            )
            self._bullet.stepSimulation(**self._world)
        return self.render(), 0.0, False, False, {}

    def render(self) -> Any:
        """The camera's picture."""
        bullet = self._bullet
        view = bullet.computeViewMatrix([2, 2, 2], [0, 0, 0.4], [0, 0, 1])
        lens = bullet.computeProjectionMatrixFOV(60, 1, 0.1, 10)
        picture = bullet.getCameraImage(96, 96, view, lens, **self._camera)[2]
        return np.asarray(picture, np.uint8).reshape(96, 96, 4)[:, :, :3]

    def close(self) -> None:
        """Ends the world."""
        self._bullet.disconnect(**self._world)


def vizdoom(name: str) -> gym.Env[Any, Any]:
    """A map of Doom, of which the observation is the screen alone."""
    env = made(f"Vizdoom{name}-v1", "vizdoom.gymnasium_wrapper")
    return gym.wrappers.FilterObservation(env, ["screen"])


def metaworld(task: str) -> gym.Env[Any, Any]:
    """An arm at a task; where its things stand follows from the seed that it is made with."""
    return made("Meta-World/MT1", "metaworld", env_name=task, seed=1)


def kind(
    package: str, make: Callable[..., Any], *names: str, gl: bool = False, **options: Any
) -> Kind:
    """A kind whose envs are made by name."""
    fns = [partial(make, name, **options) for name in names]
    return Kind(package, fns, MUJOCO if gl else ("",))


SMALL: Any = {"gl": True, "width": 200, "height": 200}
TWO = "Walker2d-v5", "HalfCheetah-v5"
ROBOTS = "r2d2.urdf", "duck_vhacd.urdf"
KINDS: dict[str, Kind] = {
    "Walker2d-v5, HalfCheetah-v5": kind("mujoco", made, *TWO, **SMALL),
    "the same, each made current": kind("mujoco", mended, *TWO, **SMALL),
    "HalfCheetah-v5, large and small": Kind(
        "mujoco",
        [
            partial(made, "HalfCheetah-v5", width=800, height=600),
            partial(made, "HalfCheetah-v5", width=96, height=96),
        ],
        MUJOCO,
    ),
    "HalfCheetah-v5": kind("mujoco", drawn, "HalfCheetah-v5", **SMALL),
    "dm_control: cheetah-run, walker-walk": kind(
        "dm_control",
        drawn,
        "dm_control/cheetah-run-v0",
        "dm_control/walker-walk-v0",
        module="shimmy",
        gl=True,
    ),
    "gymnasium-robotics: AdroitHandDoor-v1": kind(
        "gymnasium_robotics", made, "AdroitHandDoor-v1", module="gymnasium_robotics", gl=True
    ),
    "Meta-World: reach-v3, push-v3": kind("metaworld", metaworld, "reach-v3", "push-v3", gl=True),
    "robosuite: Lift": kind("robosuite", robosuite, "Lift", gl=True),
    "ALE: Pong, Breakout": kind("ale_py", atari, "Pong", "Breakout"),
    "ViZDoom: Basic, DefendCenter": kind("vizdoom", vizdoom, "Basic", "DefendCenter"),
    "PyBullet, TinyRenderer": kind("pybullet", Bullet, *ROBOTS),
    "PyBullet, its EGL plugin": kind("pybullet", Bullet, *ROBOTS, hardware=True),
    "PyBullet, a camera without physicsClientId": kind("pybullet", Bullet, *ROBOTS, named=False),
    "panda-gym: PandaReach-v3": kind("panda_gym", made, "PandaReach-v3", module="panda_gym"),
    "CarRacing-v3 (pygame)": kind("Box2D", made, "CarRacing-v3"),
    "CartPole-v1 (pygame)": kind("pygame", made, "CartPole-v1"),
}


def pictures(envs: ShmVectorEnv, observations: Any) -> Iterator[tuple[str, int, Any]]:
    """All pictures of a step: the frame of each env, and what of its observation is one."""
    for env, frame in enumerate(envs.render()):
        yield "frame", env, np.asarray(frame)
    batches = observations if isinstance(observations, dict) else {"observation": observations}
    for name, batch in batches.items():
        if batch.dtype == np.uint8 and batch.ndim >= 3:
            for env, picture in enumerate(batch):
                yield name, env, picture


def played(envs: ShmVectorEnv, steps: int) -> Iterator[list[tuple[str, int, Any]]]:
    """The pictures of a reset and of each step of a game of random actions."""
    envs.action_space.seed(1)
    observations, _ = envs.reset(seed=1)
    yield list(pictures(envs, observations))
    for _ in range(steps):
        observations, *_ = envs.step(envs.action_space.sample())
        yield list(pictures(envs, observations))


def difference(
    ours: npt.NDArray[Any], theirs: npt.NDArray[Any], env: int, known: dict[bytes, tuple[int, int]]
) -> str:
    """How a picture of an env differs from that of the env in a process of its own."""
    if not ours.any():
        return "black"
    owner, _ = known.get(digest(ours), (-1, 0))
    if owner >= 0:
        return "its own of another step" if owner == env else "another env's"
    if ours.shape != theirs.shape:
        return "of another size"
    far = np.abs(ours.astype(int) - theirs.astype(int))
    return "rounding" if far.max() <= ROUNDING else "other pixels"


def digest(picture: npt.NDArray[Any]) -> bytes:
    """A digest of a picture and its shape."""
    return blake2b(repr(picture.shape).encode() + picture.tobytes(), digest_size=16).digest()


def compared(envs: Kind, num_workers: int, steps: int) -> str:
    """A cell of the table."""
    if envs.renderers == MUJOCO:  # once for all workers; it makes no GL context
        importlib.import_module("gymnasium.envs.mujoco.mujoco_env")
    fns = [envs.env_fns[i % len(envs.env_fns)] for i in range(NUM_ENVS)]
    known: dict[bytes, tuple[int, int]] = {}
    wrong: dict[int, Counter[str]] = {}
    first, count = 0, 0
    with (
        closing(ShmVectorEnv(fns, num_workers=NUM_ENVS)) as apart,
        closing(ShmVectorEnv(fns, num_workers=num_workers)) as together,
    ):
        both = zip(played(apart, steps), played(together, steps), strict=True)
        for step, (theirs, ours) in enumerate(both):
            for _, env, picture in theirs:
                known[digest(picture)] = env, step
            for (name, env, alone), (_, _, beside) in zip(theirs, ours, strict=True):
                count += 1
                if not np.array_equal(alone, beside):
                    first = first if wrong else step
                    how = f"{name}: {difference(beside, alone, env, known)}"
                    wrong.setdefault(env, Counter())[how] += 1
    if not wrong:
        return f"same ({count})"
    which = ", ".join(map(str, sorted(wrong)))
    hows = ", ".join(f"{how} ({n})" for how, n in sum(wrong.values(), Counter()).most_common())
    return f"DIFFERS from step {first} on: envs {which} of 0 to 5, of {count} pictures {hows}"


def cell(name: str, gl: str, num_workers: int, steps: int) -> str:
    """A cell of the table, made by a program of its own; its last words if it fails."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", nargs="*", help="parts of names of kinds (all)")
    parser.add_argument("--gl", nargs="*", default=MUJOCO, help="values of MUJOCO_GL")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cell", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cell:
        warnings.simplefilter("ignore")
        print(compared(KINDS[given.cell[0]], int(given.cell[1]), given.steps))
        return
    print("| kind | MUJOCO_GL | " + " | ".join(COLUMNS) + " |")
    print("|---" * (2 + len(COLUMNS)) + "|")
    for name, envs in KINDS.items():
        if given.kind is not None and not any(part in name for part in given.kind):
            continue
        if find_spec(envs.package) is None:
            print(f"| {name} | | {envs.package} is not installed" + " |" * len(COLUMNS))
            continue
        for gl in envs.renderers:
            if gl and gl not in given.gl:
                continue
            cells = [cell(name, gl, num, given.steps) for num in COLUMNS.values()]
            print(f"| {name} | {gl} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
