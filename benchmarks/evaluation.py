"""Exact evaluation compared with loops that people write and with libraries' own; many tasks.

    python benchmarks/evaluation.py                    # sleep and busy: four minutes
    python benchmarks/evaluation.py fast               # tasks whose steps take 1 ms: two minutes
    python benchmarks/evaluation.py tasks              # 40 tasks that start slowly: five minutes
    python benchmarks/evaluation.py pusht sb3 cleanrl  # five minutes

All contenders of a part are started first, and take turns; a turn is a whole evaluation.

`sleep`, `busy`: episodes have random lengths, the same for all contenders: shmvec.evaluate;
lockstep rounds by ShmVectorEnv with an episode in each env, in which an env that is done is masked
until the last one is; and the same with AsyncVectorEnv, where an env that is done is stepped on in
vain. In "sleep" a step sleeps, like an env that waits for a simulator, with a worker for each env;
the policy takes no time. In "busy" a step computes, in one worker, and the policy computes for as
long as the steps of half of the envs take, so doing one after the other needs twice the time. The
limit is the larger of the envs' work, divided by the workers, and the policy's, for batches of half
of the envs.

`fast`: six tasks whose steps compute for 1 ms, as a suite, and by an `evaluate` for each in turn.
The limit is the envs' work, spread over the cores.

`tasks`: 40 tasks that start in 1 to 5 s and play for 1 to 20 s (`--scale`), within a limit to
memory. Work is measured in CPU time, so that a shared machine changes how long it takes, but not
how much there is. The limit is the work, spread over the cores without a gap.

The others have policies with random weights. The first contender is the library's own way; the last
column says whether others return the same numbers: each episode's, and a digest of all actions if
the library shows them.

- pusht: LeRobot's ``eval_policy`` on envs of its ``make_env``, with and without
  ``use_async_envs``, and with ``shmvec.install()``; and ``shmvec.evaluate`` with the chunks of
  actions of examples/evaluate_lerobot.py. Random weights solve nothing, so an episode ends after a
  number of steps that follows from its seed, between a fifth of ``--steps`` and all. The envs are
  LeRobot's, with what its AsyncVectorEnv needs and would fail without: an id that each worker
  registers, and the attributes ``task`` and ``task_description``.
- sb3: ``evaluate_policy``, which ``EvalCallback`` calls, on Walker2d-v5 in DummyVecEnv, in
  SubprocVecEnv and in ``shmvec.adapters.sb3.ShmVecEnv``; and ``shmvec.evaluate``, whose episodes
  differ because each has a seed.
- cleanrl: a loop as in CleanRL's evaluations, with one env in a SyncVectorEnv until enough episodes
  have ended; the same with a ShmVectorEnv; and ``shmvec.evaluate`` with ``--envs``.

LeRobot 0.6 needs Python 3.12: pip install "lerobot[pusht,evaluation]".
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import io
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from harness import Calls, heading, in_turns, write_results

import shmvec
from shmvec._commands.measuring import Progress, describe_machine, machine, table_line
from shmvec._cores import usable_cores

EXAMPLES = Path(__file__).parents[1] / "examples"
SEED = 1000
NUM_ENVS = 10
SHORTEST, LONGEST = 60, 300
NUM_TASKS = 6  # of `fast`
MUJOCO = "Walker2d-v5"
OURS = "shmvec.evaluate"  # its batches vary in size, in which a network rounds differently

Numbers = list[tuple[Any, ...]]  # the results of an evaluation: a tuple for each episode


class Part(NamedTuple):
    """A comparison of contenders.

    Attributes:
        contenders: Functions that return numbers, by name; the first is the library's own way.
        envs: Number of envs of each.
        limit_s: The limit, in seconds; 0: not known.
        steps: Number of steps that are needed; 0: not known.
    """

    contenders: dict[str, Callable[[], Numbers]]
    envs: int
    limit_s: float = 0.0
    steps: int = 0


# ---- loops ---------------------------------------------------------------------------------------


class Timed(gym.Env[Any, Any]):
    """An env with a slow start, steps that compute or sleep, and random episode lengths."""

    observation_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self,
        step_s: float,
        sleeps: bool = False,
        lengths: tuple[int, int] = (SHORTEST, LONGEST),
        start_s: float = 0.0,
        mib: int = 0,
    ) -> None:
        """Takes ``start_s`` seconds of CPU time."""
        spend(start_s, False)
        self._memory = np.ones(mib << 17)
        self._step_s, self._sleeps, self._lengths = step_s, sleeps, lengths

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Draws the length."""
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(*self._lengths, endpoint=True))
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes its time."""
        spend(self._step_s, self._sleeps)
        self.left -= 1
        return np.zeros(8, np.float32), 1.0, self.left <= 0, False, {}


def spend(seconds: float, sleeps: bool) -> None:
    """Sleeps for these seconds, or computes for as much CPU time."""
    if sleeps:
        time.sleep(seconds)
        return
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@contextlib.contextmanager
def loops(options: argparse.Namespace, name: str) -> Iterator[Part]:
    """Compares with rounds of lockstep. Numbers: each episode's length, and all steps."""
    sleeps = name == "sleep"
    step_s = (options.sleep_ms if sleeps else options.busy_ms) / 1e3
    workers = NUM_ENVS if sleeps else 1
    policy_s = 0.0 if sleeps else step_s * NUM_ENVS / 2
    make = partial(Timed, step_s, sleeps)
    env, lengths = make(), []
    for seed in range(options.episodes):
        env.reset(seed=seed)
        lengths.append(env.left)

    def policy(observations: Any, env_ids: Any = None) -> npt.NDArray[np.int64]:
        """Computes for ``policy_s``; longer in proportion for more than half of the envs."""
        spend(policy_s * max(1.0, len(observations) / (NUM_ENVS / 2)), False)
        return np.zeros(len(observations), np.int64)

    def evaluate() -> Numbers:
        arguments: Any = {"seeds": 0, "num_envs": NUM_ENVS, "num_workers": workers}
        result = shmvec.evaluate(make, policy, options.episodes, **arguments)
        return [*((float(length),) for length in result.lengths), (result.steps,)]

    def rounds(start: Callable[[], Any], masked: bool) -> Numbers:
        """Plays rounds; envs that are done stand still if ``masked``, else are stepped on."""
        with contextlib.closing(start()) as envs:
            made, found = 0, np.zeros(options.episodes, int)
            for begin in range(0, options.episodes, NUM_ENVS):
                observations, _ = envs.reset(seed=begin)
                episodes = np.arange(begin, begin + NUM_ENVS)
                alive = episodes < options.episodes
                while alive.any():
                    some = {"mask": alive} if masked else {}
                    observations, _, over, *_ = envs.step(policy(observations), **some)
                    made += int(alive.sum()) if masked else NUM_ENVS
                    found[episodes[alive]] += 1
                    alive &= ~over
        return [*((float(length),) for length in found), (made,)]

    disabled: Any = {"num_workers": workers, "autoreset_mode": AutoresetMode.DISABLED}
    frozen = partial(shmvec.ShmVectorEnv, [make] * NUM_ENVS, **disabled)
    contenders = {
        "evaluate": evaluate,
        "frozen": partial(rounds, frozen, True),
        "stepped on": partial(rounds, partial(AsyncVectorEnv, [make] * NUM_ENVS), False),
    }
    steps = sum(lengths)
    limit_s = max(step_s * steps / workers, policy_s * steps / (NUM_ENVS / 2))
    yield Part(contenders, NUM_ENVS, limit_s, steps)


@contextlib.contextmanager
def fast(options: argparse.Namespace, name: str) -> Iterator[Part]:
    """Compares a suite of tasks whose steps take a millisecond with one task after the other."""
    make = partial(Timed, 1e-3, lengths=(LONGEST, LONGEST))
    suite = {f"task {number}": make for number in range(NUM_TASKS)}
    nothing = lambda observations, env_ids: np.zeros(len(env_ids), np.int64)  # noqa: E731

    def together() -> Numbers:
        result = shmvec.evaluate(suite, nothing, options.episodes, seeds=0)
        return [(sum(each.steps for each in result.values()),)]

    def one_by_one() -> Numbers:
        found = [shmvec.evaluate(make, nothing, options.episodes, seeds=0) for _ in suite]
        return [(sum(each.steps for each in found),)]

    steps = LONGEST * options.episodes * NUM_TASKS
    contenders = {"one after the other": one_by_one, "a suite": together}
    yield Part(contenders, 2 * usable_cores(), 1e-3 * steps / usable_cores(), steps)


@contextlib.contextmanager
def tasks(options: argparse.Namespace, name: str) -> Iterator[Part]:
    """Plays 40 tasks that start slowly, once."""
    options.rounds, options.episodes, step_s = 1, 10, 0.02
    draw = random.Random(0)
    suite, work, longest = {}, 0.0, 0.0
    for number in range(40):
        start_s, play_s = (options.scale * draw.uniform(1, most) for most in (5, 20))
        steps = max(1, round(play_s / options.episodes / step_s))
        arguments: Any = {"lengths": (steps, steps), "start_s": start_s}
        arguments["mib"] = draw.choice([50, 100, 200])
        suite[f"task {number}"] = partial(Timed, step_s, **arguments)
        work += start_s + options.episodes * steps * step_s
        longest = max(longest, start_s + steps * step_s)

    def evaluate() -> Numbers:
        nothing = lambda observations, env_ids: np.zeros(len(env_ids), np.int64)  # noqa: E731
        result = shmvec.evaluate(suite, nothing, options.episodes, seeds=0, memory=options.memory)
        assert result.complete
        return []

    yield Part({"evaluate": evaluate}, 0, max(work / usable_cores(), longest))


# ---- other libraries -----------------------------------------------------------------------------


class Solved(gym.Wrapper[Any, Any, Any, Any]):
    """Ends an episode as solved after a number of steps that follows from its seed.

    LeRobot asks for the attributes in each step.
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
        """Steps; the last step of an episode says that the task is solved."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._left -= 1
        over = self._left <= 0
        return observation, reward, terminated or over, truncated, {**info, "is_success": over}


def make_solved(steps: int, **kwargs: Any) -> gym.Env[Any, Any]:
    """Makes an env of LeRobot's in Solved."""
    importlib.import_module("gym_pusht")
    return Solved(gym.make("gym_pusht/PushT-v0", disable_env_checker=True, **kwargs), steps)


# AsyncVectorEnv's workers import this file, and so know this id.
gym.register("gym_pusht/Solved-v0", entry_point=make_solved, order_enforce=False)


def example(name: str) -> Any:
    """Imports a module of examples/."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def lerobot(options: argparse.Namespace, name: str) -> Iterator[Part]:
    """LeRobot's evaluation of an ACT policy."""
    import torch
    from lerobot.envs import make_env, make_env_pre_post_processors, preprocess_observation
    from lerobot.envs.configs import PushtEnv
    from lerobot.policies import make_policy, make_pre_post_processors
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.scripts.lerobot_eval import eval_policy

    class Short(PushtEnv):  # type: ignore[misc]
        """The configuration of envs that end as solved."""

        type = "pusht"

        @property
        def gym_kwargs(self) -> dict[str, Any]:
            """The arguments of the env."""
            return {**super().gym_kwargs, "steps": options.steps}

    config = Short(task="Solved-v0", episode_length=options.steps)
    torch.manual_seed(SEED)
    small = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 32, "n_encoder_layers": 1}
    chunks = {"chunk_size": 8, "n_action_steps": 8}
    acting = ACTConfig(
        device="cpu", pretrained_backbone_weights=None, push_to_hub=False, **small, **chunks
    )
    policy = make_policy(acting, env_cfg=config).eval()
    before, after = make_pre_post_processors(policy_cfg=acting)
    env_before, env_after = make_env_pre_post_processors(config, acting)
    select = policy.select_action

    def run(envs: VectorEnv) -> Numbers:
        """Runs LeRobot's own evaluation."""
        digest = hashlib.sha256()

        def selected(batch: Any) -> Any:
            actions = select(batch)
            digest.update(actions.numpy().tobytes())
            return actions

        policy.select_action = selected
        processors = env_before, env_after, before, after
        with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
            found = eval_policy(envs, policy, *processors, options.episodes, start_seed=SEED)
        kept = "seed", "sum_reward", "max_reward", "success"
        numbers: Numbers = [tuple(each[key] for key in kept) for each in found["per_episode"]]
        return [*numbers, (digest.hexdigest(),)]

    def predict(observations: Any) -> Any:
        batch = preprocess_observation(observations)
        batch["task"] = [Solved.task] * len(observations["agent_pos"])
        with torch.inference_mode():
            return policy.predict_action_chunk(before(env_before(batch)))

    def evaluate(envs: shmvec.ShmVectorEnv) -> Numbers:
        """Runs shmvec.evaluate, with a queue of planned actions for each env."""
        planned = example("evaluate_lerobot").Chunks(predict, acting.n_action_steps, after)
        found = shmvec.evaluate(envs, planned, options.episodes, seeds=SEED)
        return list(zip(found.seeds.tolist(), found.returns.tolist(), strict=True))

    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], Numbers]] = {}
        for system in ("SyncVectorEnv", "AsyncVectorEnv", "shmvec.install()"):
            with shmvec.install() if "shmvec" in system else contextlib.nullcontext():
                made = make_env(config, options.envs, use_async_envs=system != "SyncVectorEnv")
            envs = stack.enter_context(contextlib.closing(made[config.type][0]))
            contenders[system] = partial(run, envs)
        settings = {"autoreset_mode": AutoresetMode.DISABLED, "disable_env_checker": True}
        ours: Any = shmvec.make_vec(config.gym_id, options.envs, **settings, **config.gym_kwargs)
        contenders[OURS] = partial(evaluate, stack.enter_context(ours))
        yield Part(contenders, options.envs)


@contextlib.contextmanager
def sb3(options: argparse.Namespace, name: str) -> Iterator[Part]:
    """Stable-Baselines3's evaluate_policy of PPO's policy."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from shmvec.adapters.sb3 import ShmVecEnv

    model = PPO("MlpPolicy", MUJOCO, seed=SEED, device="cpu")

    def run(envs: Any) -> Numbers:
        """Runs Stable-Baselines3's own evaluation."""
        envs.seed(SEED)
        found = evaluate_policy(model, envs, options.episodes, return_episode_rewards=True)
        return list(zip(*found, strict=True))

    def evaluate(envs: shmvec.ShmVectorEnv) -> Numbers:
        """Runs the evaluation of examples/evaluate_sb3.py."""
        theirs = example("evaluate_sb3").evaluate_policy
        found = theirs(model, envs, options.episodes, return_episode_rewards=True, seeds=SEED)
        return list(zip(*found, strict=True))

    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], Numbers]] = {}
        for kind in (DummyVecEnv, SubprocVecEnv, ShmVecEnv):
            made = make_vec_env(MUJOCO, options.envs, seed=SEED, vec_env_cls=kind)
            stack.callback(made.close)
            contenders[kind.__name__] = partial(run, made)
        ours = shmvec.make_vec(MUJOCO, options.envs, autoreset_mode=AutoresetMode.DISABLED)
        contenders[OURS] = partial(evaluate, stack.enter_context(ours))
        yield Part(contenders, options.envs)


@contextlib.contextmanager
def cleanrl(options: argparse.Namespace, name: str) -> Iterator[Part]:
    """One env until enough episodes have ended, as in CleanRL."""
    import torch
    from torch import nn

    def make_env() -> gym.Env[Any, Any]:
        return gym.wrappers.RecordEpisodeStatistics(gym.make(MUJOCO))

    env = make_env()
    inputs, outputs = (space.shape[0] for space in (env.observation_space, env.action_space))
    torch.manual_seed(SEED)
    layers = nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    agent = nn.Sequential(*layers)

    def policy(observations: Any, env_ids: Any = None) -> Any:
        with torch.no_grad():
            return agent(torch.as_tensor(observations, dtype=torch.float32)).numpy()

    def run(envs: VectorEnv) -> Numbers:
        """Runs a loop over steps."""
        numbers: Numbers = []
        observations, _ = envs.reset(seed=SEED)
        while len(numbers) < options.episodes:
            observations, _, _, _, infos = envs.step(policy(observations))
            if "final_info" in infos:
                ended, episode = infos["_final_info"], infos["final_info"]["episode"]
                numbers += zip(episode["r"][ended], episode["l"][ended], strict=True)
        return numbers

    def evaluate(envs: shmvec.ShmVectorEnv) -> Numbers:
        """Runs shmvec.evaluate."""
        found = shmvec.evaluate(envs, policy, options.episodes, seeds=SEED)
        return list(zip(found.returns.tolist(), found.lengths.tolist(), strict=True))

    one: Any = {"env_fns": [make_env], "autoreset_mode": AutoresetMode.SAME_STEP}
    many = [make_env] * options.envs
    with (
        contextlib.closing(SyncVectorEnv(**one)) as theirs,
        shmvec.ShmVectorEnv(**one) as ours,
        shmvec.ShmVectorEnv(many, autoreset_mode=AutoresetMode.DISABLED) as disabled,
    ):
        running: dict[str, Callable[[], Numbers]] = {
            "SyncVectorEnv, one env": partial(run, theirs),
            "ShmVectorEnv, one env": partial(run, ours),
            OURS: partial(evaluate, disabled),
        }
        yield Part(running, options.envs)


# ---- the table -----------------------------------------------------------------------------------

PARTS: dict[str, Any] = {"sleep": loops, "busy": loops, "fast": fast, "tasks": tasks}
PARTS |= {"pusht": lerobot, "sb3": sb3, "cleanrl": cleanrl}


def compared(numbers: Numbers, reference: Numbers) -> str:
    """Says whether all numbers are the same, or the returns, else the returns' means."""
    if numbers == reference:
        return "yes"
    place = 1 if isinstance(reference[0][0], int) else 0  # LeRobot's have their seeds first
    returns = [
        np.array([each[place] for each in of if not isinstance(each[0], str)])
        for of in (numbers, reference)
    ]
    if np.allclose(*returns, rtol=1e-9):
        return "the returns"
    return "no: mean {:.6g} for {:.6g}".format(*(each.mean() for each in returns))


def measure(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each contender."""
    numbers: dict[str, Numbers] = {}

    def played(system: str, play: Callable[[], Numbers]) -> None:
        found = play()
        if numbers.setdefault(system, found) != found and system != OURS:
            raise RuntimeError(f"{system} returns other numbers each time")

    progress = Progress(sys.stderr, name)
    with PARTS[name](options, name) as part:
        calls = {
            system: partial(Calls(partial(played, system, play)).run, 0.0)
            for system, play in part.contenders.items()
        }
        results = in_turns(calls, options.rounds, progress)
    progress.done()
    first = next(iter(results))
    made = {system: found.pop()[0] for system, found in numbers.items() if part.steps}
    for system, result in results.items():
        seconds = 1e-6 * result.median.batch_us
        row = {"part": name, "system": system, "envs": part.envs, "episodes": options.episodes}
        row |= {"seconds": seconds, "spread": result.spread}
        row["speedup"] = result.ratio(results[first])
        if part.limit_s:
            row["of_limit"] = seconds / part.limit_s
        if part.steps:
            row |= {"steps": made[system], "of_steps": made[system] / part.steps}
        if numbers[system]:
            row["same"] = compared(numbers[system], numbers[first])
        yield row


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)} (default: sleep busy)")
    parser.add_argument("--envs", type=int, default=4, help="of the libraries")
    parser.add_argument("--episodes", type=int, help="(default: 50 in loops, else 16)")
    parser.add_argument(
        "--steps", type=int, default=100, help="at most, of an episode of LeRobot's"
    )
    parser.add_argument("--sleep-ms", type=float, default=20.0, help="of a step that sleeps")
    parser.add_argument("--busy-ms", type=float, default=0.5, help="of a step that computes")
    parser.add_argument("--scale", type=float, default=1.0, help="of the times of tasks")
    parser.add_argument("--memory", default="2 GiB", help="of tasks")
    options = parser.parse_args()
    if unknown := set(options.part) - set(PARTS):
        parser.error(f"no part {unknown.pop()!r}")
    warnings.filterwarnings("ignore", "pkg_resources|.*task_description")
    print(f"{describe_machine(machine())}\n")
    names = "evaluation", "contender", "envs", "episodes", "s", "spread", "speed-up"
    print(heading(*names, "× the limit", "× the steps needed", "the same numbers"), flush=True)
    rows = []
    for name in options.part or ("sleep", "busy"):
        if name in ("pusht", "sb3", "cleanrl"):
            importlib.import_module("torch").set_num_threads(1)
        episodes = options.episodes or (50 if PARTS[name] is loops else 16)
        part = argparse.Namespace(**{**vars(options), "episodes": episodes})
        for row in measure(name, part):
            rows.append(row)
            figures = {"seconds": ".2f", "spread": ".0%", "speedup": ".2f"}
            figures |= {"of_limit": ".2f", "of_steps": ".2f", "same": ""}
            cells = [format(row[key], how) if key in row else "" for key, how in figures.items()]
            print(table_line(*list(row.values())[:4], *cells), flush=True)
    write_results(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
