"""The systems that benchmarks/matrix.py compares: a function for each, and a table of them.

Each function takes functions that make envs, and returns a contender of a race, which steps envs
through the system's own public API. Functions import what they need, so that a system that is not
installed is left out. The table has the settings of each system, the likeliest first. PufferLib's
are those that its autotune tries for that number of envs; those of others are kinds of exchange,
numbers of workers and sizes of batches. An adapter is listed next to the system whose interface it
has.

All step random actions, except for Sample Factory, whose sampler needs a policy: it runs a small
network, on a CPU. RLlib's runner draws random actions, and makes episodes; it is used without Ray's
processes, which it does not need.

    pip install torchrl==0.14.1 'ray[rllib]==2.60.0' envpool==1.2.5

PufferLib 3.0.0 builds with C libraries that it downloads. Without them: unpack the sdist, add the
line `c_extension_paths = []` below `c_extensions = []` in its setup.py, and install it by
`NO_OCEAN=1 NO_TRAIN=1 pip install --no-deps --no-build-isolation .`, which needs Cython, torch,
gym, pygame and psutil. Its vector.Multiprocessing is Python and is complete then.

Sample Factory 2.1.1 requires an older Gymnasium, and with NumPy 2.4 its sampling fails unless it is
batched ("setting an array element with a sequence"). So it has its own virtual environment:
`pip install 'numpy<2.4' gymnasium torch cloudpickle` (and mujoco or ale-py), `pip install --no-deps
sample-factory signal-slot-mp faster-fifo`, and what is missing after that; `--python 'Sample
Factory=PATH'` names its interpreter.
"""

from __future__ import annotations

import importlib
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from harness import ENVPOOL, WORKLOADS, Apart

import shmvec
from shmvec._commands.measuring import Slice, Stepper, vector_env_stepper
from shmvec._cores import split_evenly, usable_cores

OURS, PARTIAL = "ShmVectorEnv", "ShmVectorEnv, partial"
CPP = " (C++)"  # in the names of systems that do not run Python envs
FRAGMENT = 64  # steps of each env that a sampler makes at once
MIN_FRAGMENTS = 16  # of a turn of a sampler that may have made some before it
LEAD_S = 0.02  # unmeasured start of a turn, in which a stopped process recovers
PATIENCE_S = 60
CACHE_LINE = 128  # bytes; different cores' numbers lie on different lines

Fns = Sequence[Callable[[], Any]]
# Makes a contender, in the process where it is called.
Start = Callable[..., Any]


# ---- ways to step --------------------------------------------------------------------------------


def in_batches(envs: Any, **reset: Any) -> Callable[[Any], Any]:
    """Steps partial batches by ``send`` and ``recv``: envs that are ready first come first."""
    envs.async_reset(**reset)
    ids = envs.recv()[-1]["env_id"]

    def step(actions: Any) -> Any:
        nonlocal ids
        envs.send(actions[: len(ids)], ids)
        _, _, terminated, truncated, infos = envs.recv()
        ids = infos["env_id"]
        return terminated | truncated, False, ids

    return step


def every_step(
    envs: Any, n: int, sample: Callable[[], Any], step: Callable[[Any], object] | None = None
) -> Stepper:
    """A contender that resets in the step that ends an episode, so that each step counts."""
    step = step or envs.step

    def one(actions: Any) -> None:
        step(actions)

    return Stepper(one, sample, n, close=envs.close)


def of_four(envs: Any, n: int) -> Stepper:
    """A contender with OpenAI baselines' or Stable-Baselines3's interface.

    Its step returns observations, rewards, dones and infos, and resets envs whose episode is over.
    """
    envs.action_space.seed(0)
    envs.reset()
    return every_step(envs, n, lambda: [envs.action_space.sample() for _ in range(n)])


class Sampler:
    """A contender that makes many steps at once."""

    def __init__(
        self, n: int, sample: Callable[[], int], close: Callable[[], object], least: int = 1
    ) -> None:
        """Prepares to sample.

        Args:
            n: Number of envs.
            sample: Makes a fragment of some steps, and returns their number.
            close: Ends the sampler.
            least: The smallest number of fragments of a turn.
        """
        self._n, self._sample, self.close, self._least = n, sample, close, least

    def run(self, seconds: float) -> Slice:
        """Takes a turn of at least ``seconds``."""
        steps, fragments, start = 0, 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or fragments < self._least:
            steps += self._sample()
            fragments += 1
        return Slice(1e6 * elapsed * self._n / steps, steps / elapsed)


# ---- ours, and others with Gymnasium's interface -------------------------------------------------


def ours(fns: Fns, **options: Any) -> Stepper:
    """ShmVectorEnv in lockstep."""
    return vector_env_stepper(partial(shmvec.ShmVectorEnv, fns, **options))


def ours_in_batches(fns: Fns, **options: Any) -> Stepper:
    """ShmVectorEnv in partial batches."""
    envs = shmvec.ShmVectorEnv(fns, **options)
    envs.action_space.seed(0)
    sample = envs.action_space.sample
    return Stepper(in_batches(envs, seed=0), sample, len(fns), close=envs.close)


def our_singles(fns: Fns) -> Stepper:
    """ShmVectorEnv, used like a pool in TorchRL's benchmarks of single steps: any ready envs."""
    from gymnasium.vector import AutoresetMode

    n = len(fns)
    envs = shmvec.ShmVectorEnv(
        fns, num_workers=n, batch_size=n, autoreset_mode=AutoresetMode.SAME_STEP
    )
    envs.async_reset(seed=0)
    ids, no = envs.recv()[4]["env_id"], np.zeros(n, bool)  # no step is a reset

    def step(actions: Any) -> Any:
        nonlocal ids
        envs.send(actions[: len(ids)], ids)
        ids = envs.recv(min_envs=1)[4]["env_id"]
        return no[: len(ids)], False, ids

    return Stepper(step, envs.action_space.sample, n, close=envs.close)


def of_gymnasium(kind: Callable[[Fns], Any], fns: Fns) -> Stepper:
    """A vector env of Gymnasium's."""
    return vector_env_stepper(partial(kind, fns))


def ale(fns: Fns) -> Stepper:
    """ALE's own vector env."""
    from ale_py.vector_env import AtariVectorEnv

    return vector_env_stepper(partial(AtariVectorEnv, "pong", len(fns)))


def envpool(task: Any, fns: Fns) -> Stepper:
    """EnvPool's envs, by the name of a task."""
    import envpool

    envs, n = envpool.make_gymnasium(task, num_envs=len(fns)), len(fns)
    envs.action_space.seed(0)
    envs.reset()
    return Stepper(
        lambda actions: envs.step(actions)[2:4],
        lambda: np.array([envs.action_space.sample() for _ in range(n)]),
        n,
        close=envs.close,
    )


class Bound:
    """Processes that take turns on the cores without communication: a bound for as many workers.

    In its turn each process steps its envs once. Each has its own copy of all that an interpreter
    touches, so a step after another process's finds none of that in the core's caches. Only the
    stepping counts, as if handing a core over took no time: a batch step takes as long as the turns
    on the slowest core. No order of workers is faster, if each runs without a break on its core.
    """

    def __init__(self, fns: Fns, processes: int = 1) -> None:
        """Starts the processes, an equal number on each core."""
        context = multiprocessing.get_context("fork")
        cores = sorted(os.sched_getaffinity(0))
        self._num_envs, self._cores = len(fns), len(cores)
        self._turns = mmap.mmap(-1, CACHE_LINE * len(cores))  # the number of turns of each core
        self._pipes, self._processes = [], []
        for index, envs in enumerate(split_evenly(len(fns), processes)):
            core, place = index % len(cores), index // len(cores)
            count = len(range(core, processes, len(cores)))
            pipe, child_pipe = context.Pipe()
            number = np.frombuffer(self._turns, np.int64, 1, CACHE_LINE * core)
            args = (fns[envs.start : envs.stop], cores[core], number, place, count, child_pipe)
            process = context.Process(target=_take_turns, args=args, daemon=True)
            process.start()
            child_pipe.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, seconds: float) -> Slice:
        """Takes a turn: measures a batch step as if there were nothing but stepping."""
        self._turns[:] = bytes(len(self._turns))
        for pipe in self._pipes:
            pipe.send(seconds)
        turns_us = [pipe.recv() for pipe in self._pipes]
        batch_us = max(sum(turns_us[core :: self._cores]) for core in range(self._cores))
        return Slice(batch_us, 1e6 * self._num_envs / batch_us)

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()
            pipe.close()


def _take_turns(
    fns: Fns, core: int, number: Any, place: int, processes: int, pipe: Connection
) -> None:
    """Steps envs in its turns, for as long as the pipe says; sends back µs a turn."""
    os.sched_setaffinity(0, {core})
    envs = [make() for make in fns]
    envs[0].action_space.seed(0)
    actions = [envs[0].action_space.sample() for _ in range(64)]
    for env in envs:
        env.reset(seed=0)
    clock, give_way = time.perf_counter_ns, os.sched_yield
    while (seconds := pipe.recv()) is not None:
        count = stepping_ns = 0
        end = clock() + int(1e9 * seconds)
        while (now := clock()) < end:
            if number[0] % processes != place:
                give_way()
                continue
            action = actions[count % 64]
            for env in envs:
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            stepping_ns += clock() - now
            count += 1
            number[0] += 1
        pipe.send(stepping_ns / 1e3 / max(1, count))
    for env in envs:
        env.close()


# ---- frameworks ----------------------------------------------------------------------------------


def _torchrl_env(make: Callable[[], Any]) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(make())


def torchrl_parallel(fns: Fns, workers: int = 1) -> Stepper:
    """TorchRL's ParallelEnv, in shared memory."""
    import torch
    from torchrl.envs import ParallelEnv, SerialEnv

    torch.set_num_threads(1)
    n, one = len(fns), partial(_torchrl_env, fns[0])
    if workers < n:
        one = partial(SerialEnv, n // workers, one)
    envs = ParallelEnv(workers, one, mp_start_method="fork")
    root = envs.reset()

    def step(action: Any) -> None:
        nonlocal root
        _, root = envs.step_and_maybe_reset(root.set("action", action))

    return Stepper(step, envs.action_spec.rand, n, close=envs.close)


def torchrl_async(fns: Fns, batch: int = 1, **options: Any) -> Stepper:
    """TorchRL's AsyncEnvPool."""
    import torch
    from torchrl.envs import AsyncEnvPool

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # spawn imports for 3 s in each process
    made = [partial(_torchrl_env, fn) for fn in fns]
    envs = AsyncEnvPool(made, backend="multiprocessing", exchange="shm", **options)
    root = envs.reset()

    def step(action: Any) -> None:
        nonlocal root
        envs.async_step_and_maybe_reset_send(root.set("action", action[: len(root)]))
        _, root = envs.async_step_and_maybe_reset_recv(min_get=batch, max_get=batch)

    return Stepper(step, envs.action_spec.rand, batch, close=envs.close)


def torchrl_singles(fns: Fns) -> Stepper:
    """TorchRL's AsyncEnvPool, used as in its own benchmarks of single steps: any ready envs."""
    import torch
    from tensordict import set_capture_non_tensor_stack
    from torchrl.envs import AsyncEnvPool

    torch.set_num_threads(1)
    setting = ExitStack()
    setting.enter_context(set_capture_non_tensor_stack(False))
    made = [partial(_torchrl_env, fn) for fn in fns]
    envs = AsyncEnvPool(made, backend="multiprocessing", exchange="shm")
    n, root = len(fns), envs.reset()
    no, none = np.zeros(n, bool), np.zeros(0, np.intp)

    def step(action: Any) -> Any:
        nonlocal root
        if root is not None:
            root["action"] = action[: len(root)]
            envs.async_step_and_maybe_reset_send(root)
        try:
            _, root = envs.async_step_and_maybe_reset_recv(min_get=1, max_get=n, timeout=1e-3)
        except TimeoutError:  # no env is ready
            root = None
            return no[:0], no[:0], none
        return no[: len(root)], no[: len(root)], np.arange(len(root))

    def close() -> None:
        envs._maybe_shutdown()
        setting.close()

    return Stepper(step, envs.action_spec.rand, n, close=close)


def _puffer_env(make: Callable[[], Any], buf: Any = None, seed: int = 0) -> Any:
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env=make(), buf=buf)


def pufferlib(backend: str, fns: Fns, **options: Any) -> Stepper:
    """PufferLib's vector envs."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # it leaves a link in the working directory when it is imported
        try:
            import pufferlib.vector
        finally:
            os.chdir(here)

    n, kind = len(fns), getattr(pufferlib.vector, backend)
    one = partial(_puffer_env, fns[0])
    envs = pufferlib.vector.make(one, num_envs=n, backend=kind, **options)
    envs.async_reset(0)
    ids = envs.recv()[5]

    def step(actions: Any) -> Any:
        nonlocal ids
        envs.send(actions)
        _, _, terminations, truncations, _, ids, _ = envs.recv()
        return terminations.copy(), truncations.copy(), ids  # the next step writes to the originals

    return Stepper(step, envs.action_space.sample, n, close=envs.close)


def rllib(mode: str, fns: Fns) -> Sampler:
    """RLlib's SingleAgentEnvRunner."""
    import logging

    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    logging.disable(logging.WARNING)
    n = len(fns)
    gym.register("measured-v0", fns[0], order_enforce=False, disable_env_checker=True)
    config = PPOConfig().environment("measured-v0", disable_env_checking=True)
    config.env_runners(
        num_env_runners=0, num_envs_per_env_runner=n, gym_env_vectorize_mode=mode
    ).training(train_batch_size=FRAGMENT * n)
    runner = SingleAgentEnvRunner(config=config)

    def sample() -> int:
        return sum(map(len, runner.sample(num_timesteps=FRAGMENT * n, random_actions=True)))

    return Sampler(n, sample, runner.stop)


class Packed:
    """A function that any pickler can pickle, for processes that cannot import benchmarks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Takes the function."""
        self._function = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the function."""
        return self._function(*arguments, **named)

    def __reduce__(self) -> Any:
        """Unpickles as the function itself."""
        return cloudpickle.loads, (cloudpickle.dumps(self._function),)


def _made(
    make: Callable[[], Any],
    name: str,
    config: Any = None,
    env_config: Any = None,
    render_mode: Any = None,
) -> Any:
    """Takes what Sample Factory passes, and makes an env."""
    return make()


def sample_factory(fns: Fns, workers: int = 1, splits: int = 1, batched: bool = True) -> Sampler:
    """Sample Factory's sampler."""
    from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
    from sample_factory.algo.utils.env_info import extract_env_info
    from sample_factory.algo.utils.make_env import make_env_func_batched
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.utils.attr_dict import AttrDict
    from sample_factory.utils.utils import log

    log.setLevel("ERROR")
    folder = tempfile.TemporaryDirectory()
    register_env("measured", Packed(partial(_made, fns[0])))
    arguments = [
        *("--env=measured", "--experiment=measured", f"--train_dir={folder.name}", "--device=cpu"),
        *(f"--num_workers={workers}", f"--num_envs_per_worker={len(fns) // workers}"),
        *(f"--worker_num_splits={splits}", f"--batched_sampling={batched}", "--rollout=32"),
        *("--batch_size=1024", "--use_rnn=False", "--normalize_input=False"),
        *("--encoder_mlp_layers", "64", "64"),
    ]
    parser, _ = parse_sf_args(arguments)
    config = parse_full_cfg(parser, arguments)
    with closing(
        make_env_func_batched(config, AttrDict(worker_index=0, vector_index=0, env_id=0))
    ) as env:
        info = extract_env_info(env, config)
    sampler = SyncSamplingAPI(config, info)
    sampler.start()

    def close() -> None:
        sampler.stop()
        folder.cleanup()
        os._exit(0)  # its threads and queues do not end by themselves

    def sample() -> int:
        return sampler.get_trajectories_sync()["rewards"].numel()

    return Sampler(len(fns), sample, close, MIN_FRAGMENTS)


# ---- adapters, and the systems that they adapt to ------------------------------------------------


def sb3(where: str, kind: str, fns: Fns) -> Stepper:
    """A VecEnv with Stable-Baselines3's interface, whose processes are forked.

    By default each worker would import torch first, which takes minutes for 32.
    """
    make = getattr(importlib.import_module(where), kind)
    envs = make(list(fns), *["fork"] * (kind != "DummyVecEnv"))
    return of_four(envs, len(fns))


def tianshou(where: str, kind: str, fns: Fns) -> Stepper:
    """A vector env with Tianshou's interface, whose users reset envs."""
    envs, n = getattr(importlib.import_module(where), kind)(list(fns)), len(fns)
    envs.action_space[0].seed(0)
    envs.reset()

    def step(actions: Any) -> None:
        results = envs.step(actions)
        done = results[2] | results[3]
        if done.any():
            envs.reset(np.flatnonzero(done))

    def sample() -> Any:
        return np.array([envs.action_space[0].sample() for _ in range(n)])

    return every_step(envs, n, sample, step)


def our_baselines(fns: Fns) -> Stepper:
    """Our SubprocVecEnv for OpenAI baselines; the original does not run with Gymnasium."""
    from shmvec.adapters.baselines import SubprocVecEnv

    return of_four(SubprocVecEnv(fns, context="fork"), len(fns))


def our_actorcritic(fns: Fns) -> Stepper:
    """Our MultiEnv for actorcritic; the original does not run with Gymnasium."""
    from shmvec.adapters.actorcritic import MultiEnv, create_subprocess_envs

    return of_four(MultiEnv(create_subprocess_envs(fns)), len(fns))


def _ding(manager: Any, space: Any, n: int) -> Stepper:
    """An env manager with DI-engine's interface, which waits for all envs and resets in place."""
    manager.launch()

    def step(actions: Any) -> None:
        manager.step({env: actions[env] for env in manager.ready_obs})

    return every_step(manager, n, lambda: [space.sample() for _ in range(n)], step)


def our_ding(fns: Fns) -> Stepper:
    """Our env manager for DI-engine."""
    from shmvec.adapters.ding import SyncSubprocessEnvManager

    manager = SyncSubprocessEnvManager(fns, {"reset_inplace": True})
    return _ding(manager, fns[0]().action_space, len(fns))


def ding(fns: Fns) -> Stepper:
    """DI-engine's own env manager."""
    from ding.envs import BaseEnvTimestep, SyncSubprocessEnvManager

    class Wrapped(gym.Wrapper[Any, Any, Any, Any]):
        """An env as DI-engine's managers need it."""

        reward_space = None

        def reset(self, **_: Any) -> Any:
            return self.env.reset()[0]

        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = self.env.step(action)
            return BaseEnvTimestep(observation, reward, terminated or truncated, info)

    config = SyncSubprocessEnvManager.default_config()
    config.reset_inplace = True
    manager = SyncSubprocessEnvManager([lambda fn=fn: Wrapped(fn()) for fn in fns], config)
    return _ding(manager, fns[0]().action_space, len(fns))


class Team:
    """A PettingZoo parallel env in which each agent has its own env.

    An agent whose episode is over begins the next one, so that no agent ever dies.
    """

    metadata: dict[str, Any] = {}
    render_mode = None

    def __init__(self, fns: Fns) -> None:
        """Builds the agents' envs."""
        self._envs = {f"agent_{index}": fn() for index, fn in enumerate(fns)}
        self.agents = self.possible_agents = list(self._envs)
        self.unwrapped = self

    def observation_space(self, agent: str) -> Any:
        """The space of the agent's env."""
        return self._envs[agent].observation_space

    def action_space(self, agent: str) -> Any:
        """The space of the agent's env."""
        return self._envs[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """Resets all agents' envs."""
        observations = {agent: env.reset(seed=seed)[0] for agent, env in self._envs.items()}
        return observations, {agent: {} for agent in observations}

    def step(self, actions: dict[str, Any]) -> Any:
        """Steps all agents' envs."""
        observations, rewards = {}, {}
        for agent, action in actions.items():
            env = self._envs[agent]
            observations[agent], rewards[agent], terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                observations[agent] = env.reset()[0]
        no = dict.fromkeys(actions, False)
        return observations, rewards, no, dict(no), {agent: {} for agent in actions}

    def close(self) -> None:
        """Closes all agents' envs."""
        for env in self._envs.values():
            env.close()


def _our_teams(teams: Fns) -> Any:
    from shmvec.adapters.pettingzoo import ParallelVectorEnv

    return ParallelVectorEnv(teams)


def _agilerl(teams: Fns) -> Any:
    from agilerl.vector.pz_async_vec_env import AsyncPettingZooVecEnv

    return AsyncPettingZooVecEnv(teams)


def _supersuit(teams: Fns) -> Any:
    import supersuit
    from pettingzoo import ParallelEnv

    class Named(Team, ParallelEnv):  # type: ignore[misc]
        unwrapped = None

    team = supersuit.pettingzoo_env_to_vec_env_v1(Named(teams[0].args[0]))  # type: ignore
    cores = min(usable_cores(), len(teams))
    return supersuit.concat_vec_envs_v1(team, len(teams), num_cpus=cores, base_class="gymnasium")


def teams(make: Callable[[Fns], Any], fns: Fns) -> Stepper:
    """A vector env of teams of four agents; a step is a step of one agent."""
    envs = make([partial(Team, fns[first : first + 4]) for first in range(0, len(fns), 4)])
    envs.reset(seed=0)

    def sample() -> Any:
        if hasattr(envs, "possible_agents"):
            return {agent: envs.action_space(agent).sample() for agent in envs.possible_agents}
        return np.array([envs.action_space.sample() for _ in fns])

    return every_step(envs, len(fns), sample)


# ---- the table -----------------------------------------------------------------------------------

PEERS = ("AsyncVectorEnv", "SyncVectorEnv", "SB3 SubprocVecEnv", "Tianshou SubprocVectorEnv")
PEERS += ("Tianshou ShmemVectorEnv", "EnvPool" + CPP, "ALE AtariVectorEnv" + CPP)
IN_PROCESS = (OURS, PARTIAL, *PEERS[:2])  # run in the process of matrix.py itself
SINGLES = ("ShmVectorEnv, single steps", "TorchRL AsyncEnvPool, single steps")

_SB3, _TIANSHOU = "stable_baselines3.common.vec_env", "tianshou.env"
# By interface: the adapter, and the systems that it is compared with.
ADAPTERS: dict[str, dict[str, Start]] = {
    "sb3": {
        "SB3 ShmVecEnv": partial(sb3, "shmvec.adapters.sb3", "ShmVecEnv"),
        "SB3 SubprocVecEnv": partial(sb3, _SB3, "SubprocVecEnv"),
        "SB3 DummyVecEnv": partial(sb3, _SB3, "DummyVecEnv"),
    },
    "tianshou": {
        "TianshouVectorEnv": partial(tianshou, "shmvec.adapters.tianshou", "TianshouVectorEnv"),
        "Tianshou SubprocVectorEnv": partial(tianshou, _TIANSHOU, "SubprocVectorEnv"),
        "Tianshou ShmemVectorEnv": partial(tianshou, _TIANSHOU, "ShmemVectorEnv"),
        "Tianshou DummyVectorEnv": partial(tianshou, _TIANSHOU, "DummyVectorEnv"),
    },
    "baselines": {"shmvec SubprocVecEnv": our_baselines},
    "actorcritic": {"shmvec MultiEnv": our_actorcritic},
    "ding": {
        "ding SyncSubprocessEnvManager, shmvec's": our_ding,
        "ding SyncSubprocessEnvManager, DI-engine's": ding,
    },
    "pettingzoo": {
        "ParallelVectorEnv": partial(teams, _our_teams),
        "AgileRL AsyncPettingZooVecEnv": partial(teams, _agilerl),
        "SuperSuit concat_vec_envs_v1": partial(teams, _supersuit),
    },
}


def systems(workload: str, n: int) -> dict[str, dict[str, Start]]:
    """Functions that start each system, by setting, ours first; no setting if it lacks the env."""
    fns = WORKLOADS[workload].fns(n)
    cores = min(n, usable_cores())
    batches = [n] if n % 2 else [n, n // 2]
    even = [count for count in sorted({1, cores}) if n % count == 0]
    share = -(-n // cores)
    starts: dict[str, dict[str, Start]] = {
        OURS: {"": ours},
        PARTIAL: {f"batch {n // 2}": partial(ours_in_batches, batch_size=n // 2)} if n > 1 else {},
        "AsyncVectorEnv": {"": partial(of_gymnasium, AsyncVectorEnv)},
        "SyncVectorEnv": {"": partial(of_gymnasium, SyncVectorEnv)},
        **{name: {"": start} for of in ADAPTERS.values() for name, start in of.items()},
        "EnvPool" + CPP: {"": partial(envpool, ENVPOOL.get(workload))}
        if workload in ENVPOOL
        else {},
        "ALE AtariVectorEnv" + CPP: {"": ale} if workload == "ALE/Pong-v5" else {},
        # Its parent spins, too: on two cores, two workers are one too many.
        "PufferLib Multiprocessing": {
            f"{count} workers, batch {batch}": partial(
                pufferlib, "Multiprocessing", num_workers=count, batch_size=batch
            )
            for count in sorted(even, reverse=cores > 2)
            for batch in batches
            if batch % (n // count) == 0
        },
        "PufferLib Serial": {"": partial(pufferlib, "Serial")},
        "TorchRL ParallelEnv": {
            f"{count} workers": partial(torchrl_parallel, workers=count)
            for count in dict.fromkeys([*even[-1:], n])
        },
        "TorchRL AsyncEnvPool": {
            f"{-(-n // size)} workers, batch {batch}": partial(
                torchrl_async, batch=batch, envs_per_worker=size
            )
            for size, batch in dict.fromkeys(
                [(share, batches[-1]), (1, batches[-1]), (n, batches[-1]), (share, n)]
            )
        },
        "RLlib SingleAgentEnvRunner": {mode: partial(rllib, mode) for mode in ("sync", "async")},
        "Sample Factory": {
            f"{cores} workers, {splits} splits{', batched' * batched}": partial(
                sample_factory, workers=cores, splits=splits, batched=batched
            )
            for splits, batched in ((2, False), (1, True), (1, False))
            if n % cores == 0 and n // cores % splits == 0
        },
        SINGLES[0]: {"": our_singles},
        SINGLES[1]: {"": torchrl_singles},
    }
    return {
        system: {setting: partial(start, fns) for setting, start in settings.items()}
        for system, settings in starts.items()
    }


class _LeadIn:
    """A contender whose turns begin with some unmeasured steps."""

    def __init__(self, start: Start) -> None:
        """Starts it."""
        self._contender = start()
        self.close = self._contender.close

    def run(self, seconds: float) -> Any:
        """One turn."""
        self._contender.run(LEAD_S)
        return self._contender.run(seconds)


def apart(start: Start, python: str = sys.executable) -> Apart:
    """Starts a system in its own process, which is stopped between turns.

    Samplers, and workers that spin, would go on between turns.
    """
    return Apart(partial(_LeadIn, start), python=python, stopped=True, patience=PATIENCE_S).ready()


# Other interpreters have neither shmvec nor the benchmarks.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
