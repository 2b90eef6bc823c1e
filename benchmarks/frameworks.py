"""What steps envs inside larger frameworks, each with several settings, as contenders of a race.

TorchRL's ParallelEnv (shared memory) and AsyncEnvPool, PufferLib's vector.Multiprocessing,
Sample Factory's sampler and RLlib's SingleAgentEnvRunner. benchmarks/cores.py measures them, each
in a process of its own. PufferLib gets the settings that its autotune tries for so many envs, the
others their kinds of exchange, numbers of workers and sizes of batches.

The first three step random actions. Sample Factory's sampler has no way to do without a policy: it
runs a small network, on a CPU. RLlib's runner draws random actions, and makes episodes; it is used
as it is, without Ray's processes, which it does not need.

    pip install torchrl==0.14.1 'ray[rllib]==2.60.0' envpool==1.2.5

PufferLib 3.0.0 builds with C libraries that it downloads. Without them: unpack the sdist, add the
line `c_extension_paths = []` below `c_extensions = []` in its setup.py, and install it by
`NO_OCEAN=1 NO_TRAIN=1 pip install --no-deps --no-build-isolation .`, which wants Cython, torch,
gym, pygame and psutil. Its vector.Multiprocessing is Python and has all of its parts so.

Sample Factory 2.1.1 asks for an older Gymnasium, and with NumPy 2.4 its sampling fails unless it is
batched ("setting an array element with a sequence"). So it has a virtual environment of its own:
`pip install 'numpy<2.4' gymnasium torch cloudpickle` (and mujoco or ale-py), `pip install --no-deps
sample-factory signal-slot-mp faster-fifo`, and what is then missing; `--python 'Sample
Factory=PATH'` names its interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import peers
from harness import Apart

from shmvec._commands import bench, measuring
from shmvec._commands.measuring import Slice, Stepper
from shmvec._cores import usable_cores

__all__ = ["Start", "apart", "frameworks"]

FRAGMENT = 64  # steps of each env that a sampler is asked for at once
QUEUED = 16  # fragments of a turn, where some have been made before it
LEAD_S = 0.02  # of a turn, not measured: one that was stopped finds its way back
PATIENCE_S = 60

# Makes a contender, in the process where it is called.
Start = Callable[[], Any]

_Make = Callable[[], Any]


class Packed:
    """A function that any pickler takes, for processes that cannot import benchmarks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Takes the function."""
        self._function = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls it."""
        return self._function(*arguments, **named)

    def __reduce__(self) -> Any:
        """Unpacked, it is the function."""
        return cloudpickle.loads, (cloudpickle.dumps(self._function),)


class Sampler:
    """A contender that is asked for many steps at once."""

    def __init__(
        self, n: int, sample: Callable[[], int], close: Callable[[], object], least: int = 1
    ) -> None:
        """Prepares to sample.

        Args:
            n: Number of envs.
            sample: Makes some steps, a fragment, and counts them.
            close: Ends it.
            least: The fewest fragments of a turn.
        """
        self._n, self._sample, self.close, self._least = n, sample, close, least

    def run(self, seconds: float) -> Slice:
        """One turn, of at least so many seconds."""
        steps, fragments, start = 0, 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or fragments < self._least:
            steps += self._sample()
            fragments += 1
        return Slice(1e6 * elapsed * self._n / steps, steps / elapsed)


def _torchrl_env(make: _Make) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(make())


def _parallel_env(make: _Make, n: int, workers: int) -> Stepper:
    import torch
    from torchrl.envs import ParallelEnv, SerialEnv

    torch.set_num_threads(1)
    one: Any = partial(_torchrl_env, make)
    if workers < n:
        one = partial(SerialEnv, n // workers, one)
    envs = ParallelEnv(workers, one, mp_start_method="fork")
    root = envs.reset()

    def step(action: Any) -> None:
        nonlocal root
        _, root = envs.step_and_maybe_reset(root.set("action", action))

    return Stepper(step, envs.action_spec.rand, n, close=envs.close)


def _async_env_pool(make: _Make, n: int, batch: int, **options: Any) -> Stepper:
    import torch
    from torchrl.envs import AsyncEnvPool

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # torchrl's spawn: 3 s of imports each
    envs = AsyncEnvPool(
        [partial(_torchrl_env, make)] * n, backend="multiprocessing", exchange="shm", **options
    )
    root = envs.reset()

    def step(action: Any) -> None:
        nonlocal root
        envs.async_step_and_maybe_reset_send(root.set("action", action[: len(root)]))
        _, root = envs.async_step_and_maybe_reset_recv(min_get=batch, max_get=batch)

    return Stepper(step, envs.action_spec.rand, batch, close=envs.close)


def _puffer_env(make: _Make, buf: Any = None, seed: int = 0) -> Any:
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env=make(), buf=buf)


def _pufferlib(make: _Make, n: int, backend: str, **options: Any) -> Stepper:
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # it leaves a link in the working directory when it is imported
        try:
            import pufferlib.vector
        finally:
            os.chdir(here)

    kind = getattr(pufferlib.vector, backend)
    envs = pufferlib.vector.make(partial(_puffer_env, make), num_envs=n, backend=kind, **options)
    envs.async_reset(0)
    ids = envs.recv()[5]

    def step(actions: Any) -> Any:
        nonlocal ids
        envs.send(actions)
        _, _, terminations, truncations, _, ids, _ = envs.recv()
        return terminations.copy(), truncations.copy(), ids  # views of what is written next

    return Stepper(step, envs.action_space.sample, n, close=envs.close)


def _rllib(make: _Make, n: int, mode: str) -> Sampler:
    import logging

    import gymnasium as gym
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    logging.disable(logging.WARNING)
    gym.register("measured-v0", make, order_enforce=False, disable_env_checker=True)
    config = PPOConfig().environment("measured-v0", disable_env_checking=True)
    config.env_runners(
        num_env_runners=0, num_envs_per_env_runner=n, gym_env_vectorize_mode=mode
    ).training(train_batch_size=FRAGMENT * n)
    runner = SingleAgentEnvRunner(config=config)

    def sample() -> int:
        return sum(map(len, runner.sample(num_timesteps=FRAGMENT * n, random_actions=True)))

    return Sampler(n, sample, runner.stop)


def _sample_factory(make: _Make, n: int, workers: int, splits: int, batched: bool) -> Sampler:
    from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
    from sample_factory.algo.utils.env_info import extract_env_info
    from sample_factory.algo.utils.make_env import make_env_func_batched
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.utils.attr_dict import AttrDict
    from sample_factory.utils.utils import log

    log.setLevel("ERROR")
    folder = tempfile.TemporaryDirectory()
    register_env("measured", Packed(partial(_made, make)))
    arguments = [
        *("--env=measured", "--experiment=measured", f"--train_dir={folder.name}", "--device=cpu"),
        *(f"--num_workers={workers}", f"--num_envs_per_worker={n // workers}"),
        *(f"--worker_num_splits={splits}", f"--batched_sampling={batched}", "--rollout=32"),
        *("--batch_size=1024", "--use_rnn=False", "--normalize_input=False"),
        *("--encoder_mlp_layers", "64", "64"),
    ]
    parser, _ = parse_sf_args(arguments)
    config = parse_full_cfg(parser, arguments)
    env = make_env_func_batched(config, AttrDict(worker_index=0, vector_index=0, env_id=0))
    info = extract_env_info(env, config)
    env.close()
    sampler = SyncSamplingAPI(config, info)
    sampler.start()

    def close() -> None:
        sampler.stop()
        folder.cleanup()
        os._exit(0)  # its threads and queues do not end by themselves

    return Sampler(n, lambda: sampler.get_trajectories_sync()["rewards"].numel(), close, QUEUED)


def _made(
    make: _Make, name: str, config: Any = None, env_config: Any = None, render_mode: Any = None
) -> Any:
    """As Sample Factory calls it."""
    return make()


def frameworks(make: _Make, n: int) -> dict[str, dict[str, Start]]:
    """What starts each, with each of its settings, the likeliest first; none fits some numbers."""
    cores = min(n, usable_cores())
    batches = [n] if n % 2 else [n, n // 2]
    even = [count for count in sorted({1, cores}) if n % count == 0]
    share = -(-n // cores)
    puffers: dict[str, Start] = {}
    # Its parent spins as its workers do: on two cores, two workers have one too few.
    for count in sorted(even, reverse=cores > 2):
        for batch in batches:
            if batch % (n // count) == 0:
                puffers[f"{count} workers, batch {batch}"] = partial(
                    *(_pufferlib, make, n, "Multiprocessing"), num_workers=count, batch_size=batch
                )
    return {
        "PufferLib Multiprocessing": puffers,
        "PufferLib Serial": {"": partial(_pufferlib, make, n, "Serial")},
        "TorchRL ParallelEnv": {
            f"{count} workers": partial(_parallel_env, make, n, count)
            for count in dict.fromkeys([*even[-1:], n])
        },
        "TorchRL AsyncEnvPool": {
            f"{-(-n // size)} workers, batch {batch}": partial(
                _async_env_pool, make, n, batch, envs_per_worker=size
            )
            for size, batch in dict.fromkeys(
                [(share, batches[-1]), (1, batches[-1]), (n, batches[-1]), (share, n)]
            )
        },
        "RLlib SingleAgentEnvRunner": {
            mode: partial(_rllib, make, n, mode) for mode in ("sync", "async")
        },
        "Sample Factory": {
            f"{cores} workers, {splits} splits{', batched' * batched}": partial(
                _sample_factory, make, n, cores, splits, batched
            )
            for splits, batched in ((2, False), (1, True), (1, False))
            if n % cores == 0 and n // cores % splits == 0
        },
    }


class _Led:
    """A contender whose turns begin with some steps that do not count."""

    def __init__(self, start: Start) -> None:
        """Starts it."""
        self._contender = start()

    def run(self, seconds: float) -> Any:
        """One turn."""
        self._contender.run(LEAD_S)
        return self._contender.run(seconds)

    def close(self) -> None:
        """Ends it."""
        self._contender.close()


def apart(start: Start, python: str = sys.executable) -> Apart:
    """Starts one in a process of its own, which is stopped between turns.

    Samplers, and workers that spin, go on while they are not asked.
    """
    return Apart(partial(_Led, start), python=python, stopped=True, patience=PATIENCE_S).ready()


# Interpreters of their own have neither shmvec nor the benchmarks.
for _module in (bench, measuring, peers, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(_module)
