"""What steps envs inside larger frameworks, each with its settings, and ShmVectorEnv beside it.

    pip install torchrl 'ray[rllib]' sample-factory pufferlib
    python benchmarks/frameworks.py --workload CartPole-v1 HalfCheetah-v5 --num-envs 32

TorchRL's ParallelEnv (shared memory) and AsyncEnvPool, PufferLib's vector.Multiprocessing,
Sample Factory's sampler and RLlib's SingleAgentEnvRunner. Each is tried with several settings:
PufferLib with those that its autotune tries for so many envs, the others with their kinds of
exchange, numbers of workers and sizes of batches. All take turns, each in a process of its own,
with the limit beside them; the table has the best setting of each, and --json all of them.

The first three step random actions. Sample Factory's sampler has no way to do without a policy:
it runs a small network, on a CPU. RLlib's runner draws random actions, and makes episodes.

PufferLib 3.0.0 builds with C libraries that it downloads. Without them: unpack the sdist, add the
line `c_extension_paths = []` below `c_extensions = []` in its setup.py, and install it by
`NO_OCEAN=1 NO_TRAIN=1 pip install --no-deps --no-build-isolation .`, which wants Cython, torch,
gym, pygame and psutil. Sample Factory 2.1.1 asks for an older Gymnasium: `pip install --no-deps
sample-factory signal-slot-mp faster-fifo`, and what is then missing; its workers fail with
NumPy 2.4.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from apart import Apart
from guard import in_batches, in_lockstep, stepping
from workloads import WORKLOADS, arguments

from shmvec._commands import bench, measuring
from shmvec._commands.measuring import (
    LIMIT,
    Slice,
    Stepper,
    cells,
    described,
    line,
    machine,
    race,
)
from shmvec._shared.scheduling import usable_cores

__all__ = ["BY_VALUE", "apart", "frameworks"]

ROUNDS = 5
FRAGMENT = 64  # steps of each env that a sampler is asked for at once

# Makes a contender, in the process where it is called.
Start = Callable[[], Any]

_Make = Callable[[], Any]


class Sampler:
    """A contender that is asked for many steps at once."""

    def __init__(self, n: int, sample: Callable[[], int], close: Callable[[], object]) -> None:
        """Takes the number of envs, what makes some steps and counts them, and what ends it."""
        self._n, self._sample, self.close = n, sample, close

    def run(self, seconds: float) -> Slice:
        """One turn, of at least so many seconds."""
        steps, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or not steps:
            steps += self._sample()
        return Slice(1e6 * elapsed * self._n / steps, steps / elapsed)


def _torchrl_env(make: _Make) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(make())


def _parallel_env(make: _Make, n: int, **options: Any) -> Stepper:
    import torch
    from torchrl.envs import ParallelEnv

    torch.set_num_threads(1)
    envs = ParallelEnv(n, partial(_torchrl_env, make), mp_start_method="fork", **options)
    root = envs.reset()

    def step(action: Any) -> None:
        nonlocal root
        _, root = envs.step_and_maybe_reset(root.set("action", action))

    return Stepper(step, envs.action_spec.rand, n, close=envs.close)


def _async_env_pool(make: _Make, n: int, batch: int, **options: Any) -> Stepper:
    import torch
    from torchrl.envs import AsyncEnvPool

    torch.set_num_threads(1)
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

    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.tune.registry import register_env

    logging.disable(logging.WARNING)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    register_env("measured", lambda context: make())
    config = PPOConfig().environment("measured", disable_env_checking=True)
    config.env_runners(
        num_env_runners=0, num_envs_per_env_runner=n, gym_env_vectorize_mode=mode
    ).training(train_batch_size=FRAGMENT * n)
    runner = SingleAgentEnvRunner(config=config)

    def sample() -> int:
        return sum(map(len, runner.sample(num_timesteps=FRAGMENT * n, random_actions=True)))

    def close() -> None:
        runner.stop()
        ray.shutdown()

    return Sampler(n, sample, close)


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
    register_env("measured", partial(_made, make))
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

    return Sampler(n, lambda: sampler.get_trajectories_sync()["rewards"].numel(), close)


def _made(
    make: _Make, name: str, config: Any = None, env_config: Any = None, render_mode: Any = None
) -> Any:
    """As Sample Factory calls it."""
    return make()


def frameworks(make: _Make, n: int) -> dict[str, dict[str, Start]]:
    """What starts each, with each of its settings."""
    cores = min(n, usable_cores())
    halves = [n] if n % 2 else [n, n // 2]
    even = [count for count in sorted({1, cores}) if n % count == 0]
    lockstep: dict[str, Start] = {"": stepping(make, n, in_lockstep)}
    batches = {
        f"batch {n // 2}": stepping(make, n, in_batches, batch_size=n // 2) for _ in halves[1:]
    }
    puffers: dict[str, Start] = {"Serial": partial(_pufferlib, make, n, "Serial")}
    for count in even:
        for batch in halves:
            if batch % (n // count) == 0:
                puffers[f"{count} workers, batch {batch}"] = partial(
                    *(_pufferlib, make, n, "Multiprocessing"), num_workers=count, batch_size=batch
                )
    return {
        "ShmVectorEnv": lockstep,
        "ShmVectorEnv, partial": batches,
        "PufferLib": puffers,
        "TorchRL ParallelEnv": {"a worker an env": partial(_parallel_env, make, n)},
        "TorchRL AsyncEnvPool": {
            f"{-(-n // size)} workers, batch {batch}": partial(
                _async_env_pool, make, n, batch, envs_per_worker=size
            )
            for size in sorted({-(-n // cores), n})
            for batch in halves
        },
        "RLlib SingleAgentEnvRunner": {
            mode: partial(_rllib, make, n, mode) for mode in ("sync", "async")
        },
        "Sample Factory": {
            f"{cores} workers, {splits} splits{', batched' * batched}": partial(
                _sample_factory, make, n, cores, splits, batched
            )
            for splits, batched in ((1, False), (2, False), (1, True))
            if n % cores == 0 and n // cores % splits == 0
        },
    }


# What processes of their own take along by value: the benchmarks' folder is not on their path.
BY_VALUE = (bench, measuring)


def apart(system: str, start: Start) -> Apart:
    """Starts one in a process of its own; samplers that go on while nobody asks are stopped."""
    process = Apart(start, stopped=system == "Sample Factory")
    try:
        return process.ready()
    except BaseException:
        process.close()
        raise


def measure(
    workload: str, n: int, systems: Sequence[str], seconds: float, left_out: dict[str, str]
) -> list[dict[str, Any]]:
    """One cell: all settings of all, by turns; those that fail to start are left out."""
    make = WORKLOADS[workload].make
    starts = {
        (system, setting): partial(apart, system, start)
        for system, settings in frameworks(make, n).items()
        if system in systems
        for setting, start in settings.items()
    }
    running: dict[Any, Apart] = {}
    with contextlib.ExitStack() as stack:
        for key, start in starts.items():
            try:
                running[key] = stack.enter_context(contextlib.closing(start()))
            except (ImportError, RuntimeError, TimeoutError) as error:
                left_out[" ".join(key)] = f"{type(error).__name__}: {error}"
        results = race(
            {key: partial(_given, one) for key, one in running.items()},
            seconds,
            ROUNDS,
            limit=[make],
        )
    limit = results.pop(LIMIT)
    rows: list[dict[str, Any]] = [
        {
            "workload": workload,
            "num_envs": n,
            "system": system,
            "setting": setting,
            **result.figures(limit),
        }
        for (system, setting), result in results.items()
    ]
    for row in rows:
        fastest = max(one["steps_per_s"] for one in rows if one["system"] == row["system"])
        row["best"] = row["steps_per_s"] == fastest
    return rows


def _given(contender: Apart) -> Apart:
    return contender


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, ["CartPole-v1", "HalfCheetah-v5"], [32])
    names = list(frameworks(WORKLOADS["Noop"].make, 2))
    parser.add_argument("--system", nargs="+", choices=names, default=names)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    print(described(machine()))
    print("\n| workload | envs | system | setting | batch, µs | spread | steps/s | of the limit |")
    print("|---|--:|---|---|--:|--:|--:|--:|", flush=True)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for workload in options.workload:
        for n in options.num_envs:
            cell = measure(workload, n, options.system, options.seconds, left_out)
            rows += cell
            for row in cell:
                if row["best"]:
                    names = row["workload"], row["num_envs"], row["system"], row["setting"]
                    print(line(*names, *cells(row)), flush=True)
            if options.json is not None:
                results = {"machine": machine(), "left_out": left_out, "frameworks": rows}
                options.json.write_text(json.dumps(results, indent=2) + "\n")
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")


if __name__ == "__main__":
    main()
