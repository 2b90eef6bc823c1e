"""The evaluations of LeRobot, Stable-Baselines3 and CleanRL, with their vector envs and with ours.

    python benchmarks/evaluation_elsewhere.py pusht sb3 cleanrl    # five minutes
    MUJOCO_GL=egl python benchmarks/evaluation_elsewhere.py aloha --envs 2 --episodes 2 --steps 8

Policies have random weights. All contenders of a cell are open at once and take turns; what is
measured is an evaluation of the same episodes, without making envs. The first contender is the
library's own way, and the last column says whether the others return the same numbers: each
episode's, and a digest of all actions where the library shows them.

- pusht, aloha: LeRobot's ``eval_policy`` on what its ``make_env`` makes, with and without
  ``use_async_envs``, and with ``shmvec.install()``; and ``shmvec.evaluate`` with the chunks of
  actions of examples/evaluate_lerobot.py. Since random weights solve nothing, an episode ends
  after a number of steps that its seed says: between a fifth of ``--steps`` and all.
  The envs are LeRobot's but for what its AsyncVectorEnv needs: an id that each worker registers,
  and the attributes ``task`` and ``task_description``. Without them it fails.
- sb3: ``evaluate_policy``, which ``EvalCallback`` calls, on Walker2d-v5 in DummyVecEnv, in
  SubprocVecEnv and in ``shmvec.adapters.sb3.ShmVecEnv``; and ``shmvec.evaluate``, which plays other
  episodes: each has a seed.
- cleanrl: a loop as in CleanRL's evaluations: one env in a SyncVectorEnv, until enough episodes
  have ended; with ShmVectorEnv in its place; and ``shmvec.evaluate`` with ``--envs``.

LeRobot 0.6 needs Python 3.12: pip install "lerobot[pusht,aloha,evaluation]".
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

import shmvec
from shmvec._commands.measuring import Progress, described, line, machine, spread, turns

EXAMPLES = Path(__file__).parents[1] / "examples"
SEED = 1000
MUJOCO = "Walker2d-v5"
OURS = "shmvec.evaluate"  # a network rounds differently in other batches, and these are not fixed

Numbers = list[tuple[Any, ...]]  # an evaluation's: a tuple for each episode
Contenders = dict[str, Callable[[], Numbers]]


class Solved(gym.Wrapper[Any, Any, Any, Any]):
    """Ends an episode after a number of steps that its seed says, as a policy would that solves it.

    The attributes are those that LeRobot asks for in each step.
    """

    task = task_description = "a task"

    def __init__(self, env: gym.Env[Any, Any], steps: int) -> None:
        """Takes the largest number of steps."""
        super().__init__(env)
        self._steps = steps
        self._lengths = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Draws the length."""
        if seed is not None:
            self._lengths = np.random.default_rng(seed)
        self._left = int(self._lengths.integers(self._steps // 5, self._steps + 1))
        return self.env.reset(seed=seed)

    def step(self, action: Any) -> Any:
        """Says after so many steps that the task is solved."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._left -= 1
        over = self._left <= 0
        return observation, reward, terminated or over, truncated, {**info, "is_success": over}


def make_solved(module: str, id: str, steps: int, **kwargs: Any) -> gym.Env[Any, Any]:
    """An env of LeRobot's that ends as Solved says."""
    importlib.import_module(module)
    return Solved(gym.make(f"{module}/{id}", disable_env_checker=True, **kwargs), steps)


# AsyncVectorEnv's workers import this file, and know these ids then.
for _module, _id in (("gym_pusht", "PushT-v0"), ("gym_aloha", "AlohaInsertion-v0")):
    gym.register(
        f"{_module}/Solved-v0", entry_point=partial(make_solved, _module, _id), order_enforce=False
    )


def example(name: str) -> Any:
    """A module of examples/."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def lerobot(options: argparse.Namespace, cell: str) -> Iterator[Contenders]:
    """LeRobot's evaluation of an ACT policy."""
    from lerobot.envs import make_env, make_env_pre_post_processors, preprocess_observation
    from lerobot.envs.configs import AlohaEnv, PushtEnv
    from lerobot.policies import make_policy, make_pre_post_processors
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.scripts.lerobot_eval import eval_policy

    class Short(PushtEnv if cell == "pusht" else AlohaEnv):  # type: ignore[misc]
        """The env's configuration, whose envs end."""

        type = cell

        @property
        def gym_kwargs(self) -> dict[str, Any]:
            """The arguments of the env."""
            return {**super().gym_kwargs, "steps": options.steps}

    config = Short(task="Solved-v0", episode_length=options.steps)
    torch.manual_seed(SEED)
    acting = ACTConfig(
        device="cpu",
        dim_model=32,
        n_heads=2,
        dim_feedforward=32,
        n_encoder_layers=1,
        chunk_size=8,
        n_action_steps=8,
        pretrained_backbone_weights=None,
        push_to_hub=False,
    )
    policy = make_policy(acting, env_cfg=config).eval()
    before, after = make_pre_post_processors(policy_cfg=acting)
    env_before, env_after = make_env_pre_post_processors(config, acting)
    select = policy.select_action

    def run(envs: VectorEnv) -> Numbers:
        """LeRobot's own evaluation."""
        digest = hashlib.sha256()

        def selected(batch: Any) -> Any:
            actions = select(batch)
            digest.update(actions.numpy().tobytes())
            return actions

        policy.select_action = selected
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            found = eval_policy(
                envs,
                policy,
                env_before,
                env_after,
                before,
                after,
                options.episodes,
                start_seed=SEED,
            )
        kept = "seed", "sum_reward", "max_reward", "success"
        numbers: Numbers = [tuple(each[key] for key in kept) for each in found["per_episode"]]
        return [*numbers, (digest.hexdigest(),)]

    def predict(observations: Any) -> Any:
        batch = preprocess_observation(observations)
        batch["task"] = [Solved.task] * len(observations["agent_pos"])
        with torch.inference_mode():
            return policy.predict_action_chunk(before(env_before(batch)))

    def evaluate(envs: shmvec.ShmVectorEnv) -> Numbers:
        """Ours, with a queue of planned actions for each env."""
        chunks = example("evaluate_lerobot").Chunks(predict, acting.n_action_steps, after)
        found = shmvec.evaluate(envs, chunks, options.episodes, seeds=SEED)
        return list(zip(found.seeds.tolist(), found.returns.tolist(), strict=True))

    with contextlib.ExitStack() as stack:
        envs = {}
        for name in ("SyncVectorEnv", "AsyncVectorEnv", "shmvec.install()"):
            with shmvec.install() if "shmvec" in name else contextlib.nullcontext():
                made = make_env(config, options.envs, use_async_envs=name != "SyncVectorEnv")
            envs[name] = stack.enter_context(contextlib.closing(made[config.type][0]))
        ours = stack.enter_context(
            shmvec.make_vec(
                config.gym_id,
                options.envs,
                autoreset_mode=AutoresetMode.DISABLED,
                disable_env_checker=True,
                **config.gym_kwargs,
            )
        )
        yield {
            **{name: partial(run, vector) for name, vector in envs.items()},
            OURS: partial(evaluate, ours),
        }


@contextlib.contextmanager
def sb3(options: argparse.Namespace, cell: str) -> Iterator[Contenders]:
    """Stable-Baselines3's evaluate_policy of PPO's policy."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from shmvec.adapters.sb3 import ShmVecEnv

    model = PPO("MlpPolicy", MUJOCO, seed=SEED, device="cpu")

    def run(envs: Any) -> Numbers:
        """Theirs."""
        envs.seed(SEED)
        found = evaluate_policy(model, envs, options.episodes, return_episode_rewards=True)
        return list(zip(*found, strict=True))

    def evaluate(envs: shmvec.ShmVectorEnv) -> Numbers:
        """Ours, with the same interface."""
        theirs = example("evaluate_sb3").evaluate_policy
        found = theirs(model, envs, options.episodes, return_episode_rewards=True, seeds=SEED)
        return list(zip(*found, strict=True))

    with contextlib.ExitStack() as stack:
        contenders: Contenders = {}
        for kind in (DummyVecEnv, SubprocVecEnv, ShmVecEnv):
            made = make_vec_env(MUJOCO, options.envs, seed=SEED, vec_env_cls=kind)
            stack.callback(made.close)
            contenders[kind.__name__] = partial(run, made)
        free = shmvec.make_vec(MUJOCO, options.envs, autoreset_mode=AutoresetMode.DISABLED)
        ours = stack.enter_context(free)
        yield {**contenders, OURS: partial(evaluate, ours)}


@contextlib.contextmanager
def cleanrl(options: argparse.Namespace, cell: str) -> Iterator[Contenders]:
    """One env until enough episodes have ended, as in CleanRL."""

    def make_env() -> gym.Env[Any, Any]:
        return gym.wrappers.RecordEpisodeStatistics(gym.make(MUJOCO))

    env = make_env()
    size, actions = env.observation_space.shape, env.action_space.shape
    assert size is not None and actions is not None
    torch.manual_seed(SEED)
    agent = torch.nn.Sequential(
        torch.nn.Linear(*size, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, *actions),
    )

    def policy(observations: Any, env_ids: Any = None) -> Any:
        with torch.no_grad():
            return agent(torch.as_tensor(observations, dtype=torch.float32)).numpy()

    def run(envs: VectorEnv) -> Numbers:
        """A loop over steps."""
        numbers: Numbers = []
        observations, _ = envs.reset(seed=SEED)
        while len(numbers) < options.episodes:
            observations, _, _, _, infos = envs.step(policy(observations))
            if "final_info" in infos:
                ended, episode = infos["_final_info"], infos["final_info"]["episode"]
                numbers += zip(episode["r"][ended], episode["l"][ended], strict=True)
        return numbers

    def evaluate(envs: shmvec.ShmVectorEnv) -> Numbers:
        """Ours."""
        found = shmvec.evaluate(envs, policy, options.episodes, seeds=SEED)
        return list(zip(found.returns.tolist(), found.lengths.tolist(), strict=True))

    with (
        contextlib.closing(
            SyncVectorEnv([make_env], autoreset_mode=AutoresetMode.SAME_STEP)
        ) as one,
        shmvec.ShmVectorEnv([make_env], autoreset_mode=AutoresetMode.SAME_STEP) as ours,
        shmvec.ShmVectorEnv(
            [make_env] * options.envs, autoreset_mode=AutoresetMode.DISABLED
        ) as many,
    ):
        yield {
            "SyncVectorEnv": partial(run, one),
            "ShmVectorEnv": partial(run, ours),
            OURS: partial(evaluate, many),
        }


CELLS = {"pusht": lerobot, "aloha": lerobot, "sb3": sb3, "cleanrl": cleanrl}


def compared(numbers: Numbers, reference: Numbers) -> str:
    """Whether they are the same; or at least the returns; or the returns' means."""
    if numbers == reference:
        return "yes"
    place = 1 if isinstance(reference[0][0], int) else 0  # LeRobot's have their seeds first
    returns = [
        np.array([each[place] for each in of if len(each) > 1]) for of in (numbers, reference)
    ]
    if np.allclose(*returns, rtol=1e-9):
        return "the returns"
    return "no: mean {:.6g} for {:.6g}".format(*(each.mean() for each in returns))


def measure(cell: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders of a cell, in turn: one row for each."""
    progress = Progress(sys.stderr, cell)
    with CELLS[cell](options, cell) as contenders:
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        numbers: dict[str, Numbers] = {}
        for order in turns(contenders, options.rounds):
            for name in order:
                progress(name)
                begin = time.perf_counter()
                found = contenders[name]()
                seconds[name].append(time.perf_counter() - begin)
                if numbers.setdefault(name, found) != found and name != OURS:
                    raise RuntimeError(f"{name} returns other numbers each time")
    progress.done()
    first = next(iter(seconds))
    return [
        {
            "cell": cell,
            "system": name,
            "envs": 1 if cell == "cleanrl" and name != OURS else options.envs,
            "episodes": options.episodes,
            "seconds": median(taken),
            "spread": spread(taken),
            "speedup": median(a / b for a, b in zip(seconds[first], taken, strict=True)),
            "same": compared(numbers[name], numbers[first]),
        }
        for name, taken in seconds.items()
    ]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cell", nargs="+", choices=CELLS)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100, help="most of an episode of LeRobot's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "pkg_resources|.*task_description")
    rows = []
    for cell in options.cell:
        rows += measure(cell, options)
    on = machine()
    print(f"{described(on)}\n")
    names = ["evaluation", "vector env", "envs", "episodes", "s", "spread", "speed-up"]
    print(line(*names, "the same numbers"))
    print(line("---", "---", *["--:"] * 5, "---"))
    for row in rows:
        times = f"{row['seconds']:.2f}", f"{row['spread']:.0%}", f"{row['speedup']:.2f}"
        named = (row[key] for key in ("cell", "system", "envs", "episodes"))
        print(line(*named, *times, row["same"]))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": on, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
