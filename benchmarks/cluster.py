"""Fragments from two nodes: the cost of Ray, compared with bare processes and RLlib's EnvRunners.

    python benchmarks/cluster.py                      # a minute and a half; Ray on this machine
    python benchmarks/cluster.py --workload HalfCheetah-v5 --num-envs 32
    python benchmarks/cluster.py --part size          # the cost of a fragment, by its size
    python benchmarks/cluster.py --part runners       # 1 to 8 runners: the driver's CPU time
    python benchmarks/cluster.py --part batch         # ClusterVectorEnv and bare calls

``rate``: contenders take turns of some seconds, while the others are idle. Each has two runners
with one worker each, bound to different cores:

- processes: the same runners in two processes, without Ray; the fragments are not sent;
- Collector: on two nodes of one core (``ray.cluster_utils.Cluster``), fragments come to the driver;
- EnvRunners: RLlib's, if it can be imported, as actors on the same nodes, with Gymnasium's
  SyncVectorEnv and the same network.

The policy is a network of 2 x 64 units in torch, which samples its actions.

``size``: one runner makes one fragment at a time, of envs that do nothing. The cost is the time
from asking to having it, less the time that the runner needed to make it.

``runners``: there are more runners than cores, so steps a second say nothing. The table has the CPU
time of the driver for each fragment.

``batch``: envs do nothing, so a batch of ClusterVectorEnv is all cost. Bare calls send the same
bytes without envs: an array of actions to an actor on each of two nodes, and arrays of results
back. The limit is the same calls to actors that step a ShmVectorEnv.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
from harness import Apart, arguments, heading, in_turns, write_results

import shmvec
from shmvec._commands.measuring import Slice, describe_machine, machine, table_line
from shmvec.cluster import ClusterVectorEnv, Collector
from shmvec.cluster.fragments import Runner

LENGTH = 128


def make_policy(workload: str, seed: int) -> Callable[[Any, Any], Any]:
    """Makes an untrained network of two layers of 64 units, which samples actions."""
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    with gym.make(workload) as env:
        space: Any = env.action_space
        discrete = isinstance(space, gym.spaces.Discrete)
        (inputs,) = env.observation_space.shape or ()
    outputs = int(space.n) if discrete else space.shape[0]
    draw = torch.Generator().manual_seed(seed)
    sizes, nn = (inputs, 64, 64), torch.nn
    hidden = [(nn.Linear(*pair), nn.Tanh()) for pair in zip(sizes, sizes[1:], strict=False)]
    layers = nn.Sequential(*hidden[0], *hidden[1], nn.Linear(64, outputs))

    @torch.no_grad()
    def policy(observations: Any, env_ids: Any) -> Any:
        answers = layers(torch.from_numpy(np.asarray(observations, np.float32)))
        if discrete:
            probabilities = answers.softmax(-1)
            actions = torch.multinomial(probabilities, 1, generator=draw)
            log_probs = probabilities.gather(1, actions)[:, 0].log()
            return actions[:, 0].numpy(), {"log_probs": log_probs.numpy()}
        noise = torch.randn(answers.shape, generator=draw)
        return (answers + noise).numpy(), {"log_probs": (-0.5 * noise**2).sum(-1).numpy()}

    return policy


def make_envs(workload: str, num_envs: int, core_of: Callable[[], int]) -> shmvec.ShmVectorEnv:
    """Makes the envs of a runner, on the runner's core."""
    os.sched_setaffinity(0, {core_of()})
    return shmvec.ShmVectorEnv([partial(gym.make, workload)] * num_envs, num_workers=1)


def cores() -> list[int]:
    """Two cores; the same one twice if there is no other."""
    known = sorted(os.sched_getaffinity(0))
    return [known[0], known[-1]]


@contextlib.contextmanager
def nodes(*cpus: int) -> Iterator[list[str]]:
    """Starts Ray's nodes with these numbers of CPUs, on this machine; yields their ids."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ.update(RAY_TMPDIR=folder, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    ray = import_module("ray")
    options = [{"num_cpus": count, "object_store_memory": 1 << 30} for count in cpus]
    cluster = import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"include_dashboard": False, **options[0]}
    )
    try:
        for each in options[1:]:
            cluster.add_node(**each)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        yield [node.node_id for node in cluster.list_all_nodes()]
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def on_node(node: str) -> dict[str, Any]:
    """Options that put an actor on a node."""
    placed = import_module("ray.util.scheduling_strategies")
    return {"scheduling_strategy": placed.NodeAffinitySchedulingStrategy(node, soft=False)}


def raced(
    contenders: dict[str, Callable[[], Slice]], rounds: int, reference: str, figure: str
) -> Iterator[tuple[str, float, dict[str, float]]]:
    """Races contenders; yields each one's median of a figure, and its spread and ratio."""
    results = in_turns(contenders, rounds)
    for name, result in results.items():
        ratio = result.ratio(results[reference], figure)
        spread = {"spread": result.spread, f"times_{reference}": ratio}
        yield name, getattr(result.median, figure), spread


# ---- rate ----------------------------------------------------------------------------------------


class Alone:
    """A runner without Ray, in its own process."""

    def __init__(self, workload: str, num_envs: int, core: int) -> None:
        """Starts the runner."""
        make = partial(make_envs, workload, num_envs, lambda: core)
        packed = map(import_module("cloudpickle").dumps, (make, partial(make_policy, workload)))
        self._runner = Runner(*packed, LENGTH, core, 0)
        self.close = self._runner.close

    def run(self, seconds: float) -> float:
        """Measures steps a second."""
        begin, steps = time.monotonic(), 0
        while (taken := time.monotonic() - begin) < seconds:
            steps += self._runner.collect(0).steps
        return steps / taken


def env_runners(workload: str, num_envs: int, nodes: list[str]) -> list[Any]:
    """Starts RLlib's EnvRunners, one on each node."""
    ray: Any = import_module("ray")
    ppo = import_module("ray.rllib.algorithms.ppo")
    runner = import_module("ray.rllib.env.single_agent_env_runner")
    module = import_module("ray.rllib.core.rl_module.default_model_config")
    model = module.DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh")
    config = ppo.PPOConfig().environment(workload).rl_module(model_config=model)
    config.env_runners(num_envs_per_env_runner=num_envs, rollout_fragment_length=LENGTH)

    class Bound(runner.SingleAgentEnvRunner):  # type: ignore[misc]
        def __init__(self, core: int, **options: Any) -> None:
            os.sched_setaffinity(0, {core})
            import_module("torch").set_num_threads(1)
            super().__init__(**options)

        def fragment(self) -> Any:
            episodes = self.sample()
            return sum(len(episode) for episode in episodes), episodes

    actor = ray.remote(num_cpus=0)(Bound)
    actors = [
        actor.options(**on_node(node)).remote(core, config=config, worker_index=index + 1)
        for index, (node, core) in enumerate(zip(nodes, cores(), strict=True))
    ]
    ray.get([each.fragment.remote() for each in actors])
    return actors


def rates(workload: str, num_envs: int, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields a row for each contender."""
    with nodes(1, 1) as ids, contextlib.ExitStack() as stack:
        ray: Any = import_module("ray")
        bound = dict(zip(ids, cores(), strict=True))
        make = partial(make_envs, workload, num_envs, lambda: bound[node_of_this()])
        policy = partial(make_policy, workload)
        collector = stack.enter_context(Collector(make, policy, LENGTH))
        starts = [partial(Alone, workload, num_envs, core) for core in cores()]
        alone = [stack.enter_context(contextlib.closing(Apart(each))) for each in starts]
        at_once = stack.enter_context(ThreadPoolExecutor(len(alone)))
        for each in alone:
            each.ready()

        def rested(rate: float) -> Slice:
            time.sleep(0.5)  # long enough for fragments that are still being made
            return Slice(1e6 * num_envs / rate, rate)

        def processes() -> Slice:
            return rested(sum(at_once.map(lambda each: each.run(seconds), alone)))

        def collecting() -> Slice:
            for _ in range(4):  # fragments that were made before
                next(collector)
            begin, steps = time.monotonic(), 0
            while (taken := time.monotonic() - begin) < seconds:
                steps += next(collector).steps
            return rested(steps / taken)

        def sampling(actors: list[Any]) -> Slice:
            """Measures with one sample of each actor under way."""
            waiting = {each.fragment.remote(): each for each in actors}
            begin, steps = time.monotonic(), 0
            while (taken := time.monotonic() - begin) < seconds or waiting:
                (done, *_), _ = ray.wait(list(waiting))
                actor = waiting.pop(done)
                steps += ray.get(done)[0]
                if taken < seconds:
                    waiting[actor.fragment.remote()] = actor
            return rested(steps / (time.monotonic() - begin))

        contenders = {"processes": processes, "Collector": collecting}
        try:
            actors = env_runners(workload, num_envs, ids)
            contenders["RLlib's EnvRunners"] = partial(sampling, actors)
        except ImportError as error:
            print(f"no RLlib: {error}", file=sys.stderr)
        for name, rate, others in raced(contenders, rounds, "processes", "steps_per_s"):
            what = {"workload": workload, "num_envs": num_envs, "system": name}
            yield {**what, "steps_per_s": rate, **others}


def node_of_this() -> str:
    """The id of the node that this process runs on."""
    node: str = import_module("ray").get_runtime_context().get_node_id()
    return node


# ---- size, runners, batch ------------------------------------------------------------------------


class Still(gym.Env[Any, Any]):
    """An env that does nothing; its observation has a given number of bytes."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, nbytes: int) -> None:
        """Makes the observation."""
        self.observation_space = gym.spaces.Box(0, 255, (nbytes,), np.uint8)
        self._observation = np.zeros(nbytes, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Returns the observation."""
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Returns the observation."""
        return self._observation, 0.0, False, False, {}


def still(nbytes: int, count: int = 8) -> shmvec.ShmVectorEnv:
    """Makes a vector env of these."""
    return shmvec.ShmVectorEnv([partial(Still, nbytes)] * count, num_workers=1)


def idle(seed: int) -> Callable[[Any, Any], Any]:
    """A policy that does nothing."""
    return lambda observations, env_ids: np.zeros(len(env_ids), np.int64)


def sizes() -> Iterator[dict[str, Any]]:
    """Yields the costs of fragments from each of two nodes, by their size."""
    with nodes(1, 1) as ids:
        for nbytes in (16, 1 << 10, 1 << 14, 1 << 17):
            row: dict[str, Any] = {}
            for name, node in zip(("same_node_ms", "other_node_ms"), ids, strict=True):
                make, costs = partial(still, nbytes), []
                with Collector(make, idle, 16, 1, 1, actor_options=on_node(node)) as collector:
                    for _ in range(40):
                        begin = time.perf_counter()
                        fragment = next(collector)
                        costs.append(time.perf_counter() - begin - fragment.seconds)
                        row["nbytes"] = fragment.nbytes
                        del fragment
                row[name] = 1e3 * median(costs[10:])
            yield row


def numbers() -> Iterator[dict[str, Any]]:
    """Yields the driver's CPU time for a fragment, by the number of runners."""
    with nodes(8):
        for count in (1, 2, 4, 8):
            with Collector(partial(still, 64), idle, 128, count, cpus_per_runner=1) as collector:
                for _ in range(4 * count):
                    next(collector)
                begin, used = time.monotonic(), time.process_time()
                fragments = 0
                while (taken := time.monotonic() - begin) < 3:
                    next(collector)
                    fragments += 1
                cpu_ms = 1e3 * (time.process_time() - used) / fragments
                rate = {"fragments_per_s": fragments / taken, "driver_cpu_ms": cpu_ms}
                yield {"runners": count, **rate}


class Actors:
    """Actors that get actions, and return results of as many envs."""

    def __init__(self, count: int, nbytes: int, nodes: list[str], stepping: bool) -> None:
        """Starts an actor on each node, with a vector env if ``stepping``."""
        self._ray: Any = import_module("ray")
        share = count // len(nodes)

        class Echo:
            def __init__(self) -> None:
                flags = np.zeros(share, bool)
                self._results = np.zeros((share, nbytes), np.uint8), np.zeros(share), flags, flags
                if stepping:
                    self._envs = still(nbytes, share)
                    self._envs.reset()

            def step(self, actions: Any) -> Any:
                return self._envs.step(actions) if stepping else (*self._results, {})

        actor = self._ray.remote(num_cpus=0)(Echo)
        self._actors = [actor.options(**on_node(node)).remote() for node in nodes]

    def step(self, actions: Any) -> Any:
        """Calls all actors, and waits for all."""
        parts = np.split(actions, len(self._actors))
        calls = [actor.step.remote(part) for actor, part in zip(self._actors, parts, strict=True)]
        return self._ray.get(calls)

    def close(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


def batches(rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields milliseconds a batch, by the number of envs and the bytes of observations."""

    def turn(step: Callable[[], object]) -> Slice:
        taken, until = [], time.perf_counter() + seconds
        while (begin := time.perf_counter()) < until:
            step()
            taken.append(time.perf_counter() - begin)
        return Slice(1e6 * median(taken), 1 / median(taken))

    with nodes(1, 1) as ids:
        for count, nbytes in ((2, 1000), (16, 1000), (128, 1000), (16, 100_000)):
            with contextlib.ExitStack() as stack:
                envs = ClusterVectorEnv([partial(Still, nbytes)] * count, num_workers=1)
                running: dict[str, Any] = {
                    "bare_calls": Actors(count, nbytes, ids, stepping=False),
                    "limit": Actors(count, nbytes, ids, stepping=True),
                    "ClusterVectorEnv": envs,
                }
                for each in running.values():
                    stack.callback(each.close)
                envs.reset()
                actions = np.zeros(count, np.int64)
                for each in [*running.values()] * 20:
                    each.step(actions)  # until all have started, and their first calls are over
                turns = {
                    name: partial(turn, partial(x.step, actions)) for name, x in running.items()
                }
                for name, us, others in raced(turns, rounds, "bare_calls", "batch_us"):
                    what = {"num_envs": count, "nbytes": nbytes, "system": name}
                    yield {**what, "ms_a_batch": us / 1e3, **others}


def main() -> None:
    """Runs from the command line."""
    parser = arguments(__doc__, seconds=2.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", choices=("rate", "size", "runners", "batch"), default="rate")
    parser.add_argument("--workload", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=128)
    options = parser.parse_args()
    print(describe_machine(machine()), f"Ray {import_module('ray').__version__}", sep=", ")
    turns = options.rounds, options.seconds
    part: Callable[[], Iterator[dict[str, Any]]] = {
        "rate": partial(rates, options.workload, options.num_envs, *turns),
        "size": sizes,
        "runners": numbers,
        "batch": partial(batches, *turns),
    }[options.part]
    rows: list[dict[str, Any]] = []
    for row in part():
        if not rows:
            print(heading(*row))
        rows.append(row)
        shown = [f"{value:,.3g}" if isinstance(value, float) else value for value in row.values()]
        print(table_line(*shown), flush=True)
    write_results(options.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
