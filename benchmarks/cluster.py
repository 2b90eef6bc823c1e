"""Fragments from two nodes: what Ray costs, beside processes without it and RLlib's EnvRunners.

    python benchmarks/cluster.py                      # a minute and a half; Ray on this machine
    python benchmarks/cluster.py --workload HalfCheetah-v5 --num-envs 32
    python benchmarks/cluster.py --part size          # what a fragment costs, by its size
    python benchmarks/cluster.py --part runners       # 1 to 8 runners: what the driver spends
    python benchmarks/cluster.py --part slow          # ClusterVectorEnv, with envs of 10 ms
    python benchmarks/cluster.py --part batch         # a batch of it beside a bare call of an actor

``rate``: contenders take turns of some seconds; the others have nothing to do. Two runners,
each with one worker, bound to a core of its own:

- processes: the same runners in two processes, without Ray; the fragments are not sent;
- Collector: on two nodes of one core (``ray.cluster_utils.Cluster``), fragments come to the driver;
- EnvRunners: RLlib's, as actors on the same nodes, with Gymnasium's SyncVectorEnv in them and the
  same network; where RLlib can be imported.

The policy is a network of 2 x 64 units in torch, which samples its actions.

``size``: one runner, one fragment at a time, of envs that do nothing; the cost is what passes
between the asking and the coming, less what the runner needed to make it.

``runners``: more runners than cores, so steps a second say nothing; what does is the CPU time of
the driver for each fragment.

``slow``: envs whose step sleeps for 10 ms, eight on each of two nodes with one worker each; batches
of a quarter. The limit is that of the workers, which do nothing else: 200 steps a second.

``batch``: what a batch of ClusterVectorEnv costs, with envs that do nothing, so all of it is cost.
Bare calls send the same bytes without envs: to an actor on each of two nodes an array of actions,
for arrays of results. The limit is the same calls of actors that step a ShmVectorEnv.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

import shmvec
from shmvec._commands.measuring import described, line, machine, spread, turns
from shmvec.cluster import ClusterVectorEnv, Collector
from shmvec.cluster.fragments import Runner

LENGTH = 128


class Network:
    """A policy: two layers of 64 units, which is not trained."""

    def __init__(self, inputs: int, outputs: int, discrete: bool, seed: int) -> None:
        """Makes the layers."""
        import torch

        torch.set_num_threads(1)
        self._torch, self._discrete = torch, discrete
        self._random = torch.Generator().manual_seed(seed)
        nn = torch.nn
        self._layers = nn.Sequential(
            *(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()),
            nn.Linear(64, outputs),
        )

    def __call__(self, observations: Any, env_ids: Any) -> Any:
        """Samples actions, and says their log-probabilities."""
        torch = self._torch
        with torch.no_grad():
            seen = torch.from_numpy(np.asarray(observations, np.float32))
            outputs = self._layers(seen)
            if self._discrete:
                probabilities = outputs.softmax(-1)
                actions = torch.multinomial(probabilities, 1, generator=self._random)
                log_probs = probabilities.gather(1, actions)[:, 0].log()
                return actions[:, 0].numpy(), {"log_probs": log_probs.numpy()}
            noise = torch.randn(outputs.shape, generator=self._random)
            return (outputs + noise).numpy(), {"log_probs": (-0.5 * noise**2).sum(-1).numpy()}


def make_network(workload: str, seed: int) -> Network:
    """For an env."""
    env = gym.make(workload)
    space = env.action_space
    discrete = isinstance(space, gym.spaces.Discrete)
    inputs, outputs = env.observation_space.shape[0], space.n if discrete else space.shape[0]
    env.close()
    return Network(inputs, int(outputs), discrete, seed)


def make_envs(workload: str, num_envs: int, core_of: Callable[[], int]) -> shmvec.ShmVectorEnv:
    """The envs of a runner, on one core with it."""
    os.sched_setaffinity(0, {core_of()})
    return shmvec.ShmVectorEnv([partial(gym.make, workload)] * num_envs, num_workers=1)


@contextlib.contextmanager
def nodes(cpus: list[int]) -> Iterator[list[str]]:
    """Ray's nodes with so many CPUs each, on this machine; their ids."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ.update(RAY_TMPDIR=folder, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ray = importlib.import_module("ray")
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": cpus[0],
            "include_dashboard": False,
            "object_store_memory": 1 << 30,
        },
    )
    try:
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count, object_store_memory=1 << 30)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield [node.node_id for node in cluster.list_all_nodes()]
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


# ---- rate ------------------------------------------------------------------------------------


def run_alone(make: bytes, policy: bytes, core: int, pipe: Any) -> None:
    """A runner in a process: makes fragments for so many seconds, when it is asked to."""
    os.environ["BENCHMARK_CORE"] = str(core)
    runner = Runner(make, policy, LENGTH, core, 0)
    pipe.send(0)
    while (seconds := pipe.recv()) is not None:
        until, steps = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            steps += runner.collect(0).steps
        pipe.send((steps, time.monotonic() - until + seconds))
    runner.close()


class Alone:
    """Two runners in processes."""

    def __init__(self, workload: str, num_envs: int) -> None:
        """Starts them."""
        core = lambda: int(os.environ["BENCHMARK_CORE"])  # noqa: E731
        make = cloudpickle.dumps(partial(make_envs, workload, num_envs, core))
        policy = cloudpickle.dumps(partial(make_network, workload))
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for each in cores():
            pipe, theirs = context.Pipe()
            process = context.Process(target=run_alone, args=(make, policy, each, theirs))
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def rate(self, seconds: float) -> float:
        """Steps a second of both."""
        for pipe in self._pipes:
            pipe.send(seconds)
        return sum(steps / taken for steps, taken in (pipe.recv() for pipe in self._pipes))

    def close(self) -> None:
        """Ends them."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


class Collecting:
    """The collector."""

    def __init__(self, workload: str, num_envs: int, nodes: list[str]) -> None:
        """Starts it."""
        core = partial(core_of_node, dict(zip(nodes, cores(), strict=True)))
        self._collector = Collector(
            partial(make_envs, workload, num_envs, core),
            partial(make_network, workload),
            LENGTH,
        )

    def rate(self, seconds: float) -> float:
        """Steps a second that the driver gets, once those that have waited are taken."""
        for _ in range(4):
            next(self._collector)
        begin, steps = time.monotonic(), 0
        while (taken := time.monotonic() - begin) < seconds:
            steps += next(self._collector).steps
        return steps / taken

    def close(self) -> None:
        """Ends it."""
        self._collector.close()


class EnvRunners:
    """RLlib's, one on each node."""

    def __init__(self, workload: str, num_envs: int, nodes: list[str]) -> None:
        """Starts them."""
        self._ray: Any = importlib.import_module("ray")
        ppo = importlib.import_module("ray.rllib.algorithms.ppo")
        runner = importlib.import_module("ray.rllib.env.single_agent_env_runner")
        placed = importlib.import_module("ray.util.scheduling_strategies")
        module = importlib.import_module("ray.rllib.core.rl_module.default_model_config")
        config = (
            ppo.PPOConfig()
            .environment(workload)
            .env_runners(
                num_envs_per_env_runner=num_envs,
                rollout_fragment_length=LENGTH,
            )
            .rl_module(
                model_config=module.DefaultModelConfig(
                    fcnet_hiddens=[64, 64], fcnet_activation="tanh"
                )
            )
        )

        class Bound(runner.SingleAgentEnvRunner):
            def __init__(self, core: int, **options: Any) -> None:
                os.sched_setaffinity(0, {core})
                importlib.import_module("torch").set_num_threads(1)
                super().__init__(**options)

            def fragment(self) -> Any:
                episodes = self.sample()
                return sum(len(episode) for episode in episodes), episodes

        actor = self._ray.remote(num_cpus=0)(Bound)
        self._actors = [
            actor.options(
                scheduling_strategy=placed.NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote(core, config=config, worker_index=index + 1)
            for index, (node, core) in enumerate(zip(nodes, cores(), strict=True))
        ]
        self._ray.get([each.fragment.remote() for each in self._actors])

    def rate(self, seconds: float) -> float:
        """Steps a second that the driver gets; one sample of each is under way."""
        ray = self._ray
        waiting = {each.fragment.remote(): each for each in self._actors}
        begin, steps = time.monotonic(), 0
        while (taken := time.monotonic() - begin) < seconds or waiting:
            (done, *_), _ = ray.wait(list(waiting))
            actor = waiting.pop(done)
            count, _ = ray.get(done)
            steps += count
            if taken < seconds:
                waiting[actor.fragment.remote()] = actor
        return steps / (time.monotonic() - begin)

    def close(self) -> None:
        """Ends them."""
        for actor in self._actors:
            self._ray.kill(actor)


def core_of_node(cores: dict[str, int]) -> int:
    """The core of the node that this is."""
    return cores[importlib.import_module("ray").get_runtime_context().get_node_id()]


def cores() -> list[int]:
    """Two, the same one twice where there is no other."""
    known = sorted(os.sched_getaffinity(0))
    return [known[0], known[-1]]


def rates(workload: str, num_envs: int, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each contender."""
    with nodes([1, 1]) as ids, contextlib.ExitStack() as stack:
        contenders: dict[str, Any] = {
            "processes": Alone(workload, num_envs),
            "Collector": Collecting(workload, num_envs, ids),
        }
        try:
            contenders["RLlib's EnvRunners"] = EnvRunners(workload, num_envs, ids)
        except ImportError as error:
            print(f"no RLlib: {error}", file=sys.stderr)
        for each in contenders.values():
            stack.callback(each.close)
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for order in turns(contenders, rounds):
            for name in order:
                found[name].append(contenders[name].rate(seconds))
                time.sleep(0.5)  # what is under way for it takes less
        for name, values in found.items():
            ratio = median(a / b for a, b in zip(values, found["processes"], strict=True))
            yield {
                "workload": workload,
                "num_envs": num_envs,
                "system": name,
                "steps_per_s": median(values),
                "spread": spread(values),
                "of_processes": ratio,
            }


# ---- size, runners -----------------------------------------------------------------------------


class Still(gym.Env[Any, Any]):
    """Does nothing; shows so many bytes."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, nbytes: int) -> None:
        """Makes the observation."""
        self.observation_space = gym.spaces.Box(0, 255, (nbytes,), np.uint8)
        self._shown = np.zeros(nbytes, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Shows it."""
        return self._shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Likewise."""
        return self._shown, 0.0, False, False, {}


def still(nbytes: int) -> shmvec.ShmVectorEnv:
    """Eight of these."""
    return shmvec.ShmVectorEnv([partial(Still, nbytes)] * 8, num_workers=1)


def idle(seed: int) -> Callable[[Any, Any], Any]:
    """A policy that does nothing."""
    return lambda observations, env_ids: np.zeros(len(env_ids), np.int64)


def sizes() -> Iterator[dict[str, Any]]:
    """What a fragment costs beyond its making, from each of two nodes, by its size."""
    with nodes([1, 1]) as ids:
        for nbytes in (16, 1 << 10, 1 << 14, 1 << 17):
            costs: dict[bool, list[float]] = {True: [], False: []}
            for here in (True, False):
                node = ids[0 if here else 1]
                options = {
                    "scheduling_strategy": importlib.import_module(
                        "ray.util.scheduling_strategies"
                    ).NodeAffinitySchedulingStrategy(node, soft=False)
                }
                with Collector(
                    partial(still, nbytes), idle, 16, 1, 1, actor_options=options
                ) as collector:
                    for turn in range(40):
                        begin = time.perf_counter()
                        fragment = next(collector)
                        taken = time.perf_counter() - begin - fragment.seconds
                        if turn >= 10:
                            costs[here].append(taken)
                        moved = fragment.nbytes
                        del fragment
            yield {
                "nbytes": moved,
                "same_node_ms": 1e3 * median(costs[True]),
                "other_node_ms": 1e3 * median(costs[False]),
            }


def numbers() -> Iterator[dict[str, Any]]:
    """What the driver spends on a fragment, by the number of runners."""
    with nodes([8]):
        for count in (1, 2, 4, 8):
            with Collector(partial(still, 64), idle, 128, count, cpus_per_runner=1) as collector:
                for _ in range(4 * count):
                    next(collector)
                begin, used = time.monotonic(), time.process_time()
                fragments = 0
                while time.monotonic() - begin < 3:
                    next(collector)
                    fragments += 1
                taken = time.monotonic() - begin
                yield {
                    "runners": count,
                    "fragments_per_s": fragments / taken,
                    "driver_cpu_ms": 1e3 * (time.process_time() - used) / fragments,
                }


class Sleeping(Still):
    """A step takes 10 ms."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleeps."""
        time.sleep(0.01)
        return super().step(action)


def slow(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Steps a second of ClusterVectorEnv on two nodes, and of ShmVectorEnv with as many workers."""
    functions = [partial(Sleeping, 1000)] * 16
    with nodes([1, 1]), contextlib.ExitStack() as stack:
        contenders: dict[str, Any] = {
            "ShmVectorEnv": shmvec.ShmVectorEnv(functions, num_workers=2, batch_size=4),
            "ClusterVectorEnv": ClusterVectorEnv(functions, batch_size=4, num_workers=1),
        }
        for each in contenders.values():
            stack.callback(each.close)
            each.async_reset(seed=0)
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for order in turns(contenders, rounds):
            for name in order:
                envs, steps, begin = contenders[name], 0, time.monotonic()
                while (taken := time.monotonic() - begin) < seconds:
                    ids = envs.recv()[-1]["env_id"]
                    envs.send(np.zeros(len(ids), np.int64), ids)
                    steps += len(ids)
                found[name].append(steps / taken)
        for name, values in found.items():
            yield {
                "system": name,
                "steps_per_s": median(values),
                "spread": spread(values),
                "of_limit": median(values) / 200,
            }


class Bare:
    """Actors that are sent actions, and answer with results of as many envs."""

    def __init__(self, count: int, nbytes: int, nodes: list[str], stepping: bool) -> None:
        """Starts an actor on each node, with a vector env if it is to step one."""
        self._ray: Any = importlib.import_module("ray")
        placed = importlib.import_module("ray.util.scheduling_strategies")
        share = count // len(nodes)

        class Echo:
            def __init__(self) -> None:
                self._results = (
                    *(np.zeros((share, nbytes), np.uint8), np.zeros(share)),
                    *(np.zeros(share, bool), np.zeros(share, bool), {}),
                )
                if stepping:
                    functions = [partial(Still, nbytes)] * share
                    self._envs = shmvec.ShmVectorEnv(functions, num_workers=1)
                    self._envs.reset()

            def step(self, actions: Any) -> Any:
                return self._envs.step(actions) if stepping else self._results

        self._actors = [
            self._ray.remote(num_cpus=0)(Echo)
            .options(scheduling_strategy=placed.NodeAffinitySchedulingStrategy(node, soft=False))
            .remote()
            for node in nodes
        ]

    def step(self, actions: Any) -> Any:
        """Calls all, and waits for all."""
        parts = np.split(actions, len(self._actors))
        calls = [actor.step.remote(part) for actor, part in zip(self._actors, parts, strict=True)]
        return self._ray.get(calls)

    def close(self) -> None:
        """Ends them."""
        for actor in self._actors:
            self._ray.kill(actor)


def batches(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Milliseconds a batch, by the number of envs and the bytes of their observations."""
    with nodes([1, 1]) as ids:
        for count, nbytes in ((2, 1000), (16, 1000), (128, 1000), (16, 100_000)):
            with contextlib.ExitStack() as stack:
                contenders: dict[str, Any] = {
                    "bare calls": Bare(count, nbytes, ids, stepping=False),
                    "limit": Bare(count, nbytes, ids, stepping=True),
                    "ClusterVectorEnv": ClusterVectorEnv(
                        [partial(Still, nbytes)] * count, num_workers=1
                    ),
                }
                for each in contenders.values():
                    stack.callback(each.close)
                contenders["ClusterVectorEnv"].reset()
                actions = np.zeros(count, np.int64)
                for each in [*contenders.values()] * 20:
                    each.step(actions)  # until all have started, and their first calls are over
                found: dict[str, list[float]] = {name: [] for name in contenders}
                for order in turns(contenders, rounds):
                    for name in order:
                        taken, until = [], time.perf_counter() + seconds
                        while (begin := time.perf_counter()) < until:
                            contenders[name].step(actions)
                            taken.append(time.perf_counter() - begin)
                        found[name].append(median(taken))
                for name, values in found.items():
                    ratio = median(a / b for a, b in zip(values, found["bare calls"], strict=True))
                    yield {
                        "num_envs": count,
                        "nbytes": nbytes,
                        "system": name,
                        "ms_a_batch": 1e3 * median(values),
                        "spread": spread(values),
                        "of_bare_calls": ratio,
                    }


# ---- the table ---------------------------------------------------------------------------------


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", choices=("rate", "size", "runners", "slow", "batch"), default="rate"
    )
    parser.add_argument("--workload", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.5, help="of a turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(described(machine()), f"Ray {importlib.import_module('ray').__version__}", sep=", ")
    part = {
        "rate": partial(rates, options.workload, options.num_envs, options.rounds, options.seconds),
        "size": sizes,
        "runners": numbers,
        "slow": partial(slow, options.rounds, options.seconds),
        "batch": partial(batches, options.rounds, options.seconds),
    }[options.part]
    rows = []
    for row in part():
        if not rows:
            print(line(*row), line(*("--:" for _ in row)), sep="\n")
        rows.append(row)
        shown = [f"{value:,.3g}" if isinstance(value, float) else value for value in row.values()]
        print(line(*shown), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
