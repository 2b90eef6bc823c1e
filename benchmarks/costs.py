"""What a batch step costs besides the envs, and where its time goes.

    python benchmarks/costs.py                    # ns an env, by part
    python benchmarks/costs.py --split cartpole halfcheetah ant pong --json FILE

The first table steps envs that only hand out ready-made results, in this process (num_workers=0),
so that neither processes nor waiting are in it, and measures each part alone: decoding an action,
writing an observation, taking an info and gathering it, both sides together. `rest` is what is left
of the whole: rewards, flags, the loop, and the parent's copy of the observation. `a batch` is what
does not depend on the number of envs: the request's way through both rings, and the parent's calls
and arrays.

The second table splits the batch step of real envs in worker processes, in µs. It steps replays
beside them: envs that return what the real ones did, without computing.

    env          as in free-running loops, one a core
    infos        what the replay takes longer with infos than without
    copying      what it takes longer with observations and actions of that size than with tiny ones
    signalling   the replay with tiny ones, less its envs' own steps: requests, answers, wakes
    waiting      the rest: for the slowest worker, and what the envs suffer from each other
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from workloads import WORKLOADS

import shmvec
from shmvec._commands.measuring import Limit, Slice, VectorContender, machine
from shmvec._shared.layout import Layout
from shmvec._shared.scheduling import usable_cores

NUM_ENVS = 32
REPEATS = 9
SECONDS = 0.1


class Replay(gym.Env[Any, Any]):
    """Returns recorded results, again and again, without computing."""

    def __init__(
        self, observation_space: Any, action_space: Any, results: Sequence[tuple[Any, ...]]
    ) -> None:
        """Takes what steps return."""
        self.observation_space = observation_space
        self.action_space = action_space
        self._results = results
        self._next = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns an observation."""
        return self._results[0][0], {}

    def step(self, action: Any) -> tuple[Any, ...]:
        """Returns the next results."""
        self._next = (self._next + 1) % len(self._results)
        return self._results[self._next]


def results(observation: Any, info: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Those of one step that is repeated."""
    return [(observation, 1.0, False, False, info)]


def ns(run: Callable[[], object]) -> float:
    """Median over the repeats of the mean time of a call."""
    means = []
    for _ in range(REPEATS):
        calls, start = 0, time.perf_counter()
        while (taken := time.perf_counter() - start) < SECONDS:
            for _ in range(10):
                run()
            calls += 10
        means.append(1e9 * taken / calls)
    return statistics.median(means)


def batch_ns(make: Callable[[], Any], num_envs: int) -> float:
    """A batch step without workers."""
    envs = shmvec.ShmVectorEnv([make] * num_envs, num_workers=0)
    envs.reset()
    actions = envs.action_space.sample()
    taken = ns(lambda: envs.step(actions))
    envs.close()
    return taken


def per_env(many: float, few: float) -> float:
    """What one env more costs, from batch steps of NUM_ENVS and of one."""
    return (many - few) / (NUM_ENVS - 1)


def parts() -> None:
    """Prints the first table."""
    box, discrete = gym.spaces.Box, gym.spaces.Discrete
    number = np.float64(1.5)
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "4 floats, Discrete": (box(-1, 1, (4,)), discrete(2), {}),
        "17 doubles, 6 floats": (box(-1, 1, (17,), np.float64), box(-1, 1, (6,)), {}),
        "... and 4 float infos": (
            box(-1, 1, (17,), np.float64),
            box(-1, 1, (6,)),
            {f"key{i}": number for i in range(4)},
        ),
        "... and 8 float infos": (
            box(-1, 1, (17,), np.float64),
            box(-1, 1, (6,)),
            {f"key{i}": number for i in range(8)},
        ),
        "84x84x4 bytes, Discrete": (box(0, 255, (4, 84, 84), np.uint8), discrete(6), {}),
    }
    call = ns(lambda: None)
    print("ns an env                    whole | action  observation  infos  rest |   ns a batch")
    for name, (observation_space, action_space, info) in cases.items():
        observation = observation_space.sample()
        make = partial(Replay, observation_space, action_space, results(observation, info))
        plain = partial(Replay, observation_space, action_space, results(observation, {}))
        env, action = make(), action_space.sample()
        alone = ns(lambda env=env, action=action: env.step(action)) - call
        many, few = batch_ns(make, NUM_ENVS), batch_ns(make, 1)
        slope = per_env(many, few)
        whole = slope - alone
        infos = slope - per_env(batch_ns(plain, NUM_ENVS), batch_ns(plain, 1)) if info else 0.0
        layout = Layout(observation_space, action_space, 1, False, False, False)
        segment = _segment(layout)
        slabs = layout.attach(segment)
        slabs.actions.put_rows(np.arange(1), np.asarray([action]))
        decoding = ns(lambda codec=slabs.actions: codec.get(0)) - call
        writing = (
            ns(lambda codec=slabs.results.observations, value=observation: codec.put(0, value))
            - call
        )
        rest = whole - decoding - writing - infos
        print(
            f"{name:25} {whole:8.0f} |{decoding:7.0f} {writing:12.0f} {infos:6.0f} {rest:5.0f} "
            f"| {few - alone - whole:12.0f}"
        )


def _segment(layout: Layout) -> Any:
    """Private memory with the slabs of one env."""
    from shmvec._core.segment import Segment, segment_bytes

    sizes = (1, 1, 4, 4096, 64, layout.nbytes)
    return Segment.create(mmap.mmap(-1, segment_bytes(*sizes)), *sizes)


def record(make: Callable[[], Any], steps: int = 64) -> tuple[Any, Any, list[tuple[Any, ...]]]:
    """Spaces, and what steps of a real env return; none of them ends an episode."""
    env = make()
    env.action_space.seed(0)
    env.reset(seed=0)
    taken: list[tuple[Any, ...]] = []
    while len(taken) < steps:
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
        else:
            taken.append((np.array(observation), reward, False, False, info))
    env.close()
    return env.observation_space, env.action_space, taken


def split(workload: str, num_envs: int, seconds: float) -> dict[str, Any]:
    """Where the time of a batch step goes, in µs."""
    fns = WORKLOADS[workload](num_envs)
    observations, actions, taken = record(fns[0])
    tiny = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    plain = [(*step[:4], {}) for step in taken]
    least = [(np.zeros(1, np.float32), *step[1:4], {}) for step in taken]
    bare = Replay(*tiny, least)
    contenders: dict[str, Limit | VectorContender] = {}
    slices: dict[str, list[Slice]] = {}
    try:
        contenders["limit"] = Limit(list(WORKLOADS[workload](8)), usable_cores())
        for name, makes in (
            ("real", list(fns)),
            ("replay", [partial(Replay, observations, actions, taken)] * num_envs),
            ("plain", [partial(Replay, observations, actions, plain)] * num_envs),
            ("least", [partial(Replay, *tiny, least)] * num_envs),
        ):
            contenders[name] = VectorContender(shmvec.ShmVectorEnv(makes), None)
        for _ in range(REPEATS):
            for name, contender in contenders.items():
                slices.setdefault(name, []).append(contender.run(seconds / REPEATS))
    finally:
        for contender in contenders.values():
            contender.close()

    def batch(name: str) -> float:
        return statistics.median(one.batch_us for one in slices[name])

    rate = statistics.median(one.steps_per_s for one in slices["limit"])
    steps = statistics.median(one.steps_per_s * one.batch_us for one in slices["real"]) / 1e6
    in_parallel = num_envs / min(usable_cores(), num_envs)
    own = in_parallel * ns(lambda: bare.step(0)) / 1000
    found = {
        "env": 1e6 * steps / rate,
        "infos": max(0.0, batch("replay") - batch("plain")),
        "copying": max(0.0, batch("plain") - batch("least")),
        "signalling": batch("least") - own,
    }
    found["waiting"] = max(0.0, batch("real") - sum(found.values()))
    return {"workload": workload, "num_envs": num_envs, "batch_us": batch("real"), **found}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", nargs="+", choices=WORKLOADS, default=[], metavar="WORKLOAD")
    parser.add_argument("--num-envs", type=int, default=NUM_ENVS)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for benchmarks/plot.py")
    options = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    if not options.split:
        parts()
        return
    print("\n| workload | envs | batch step, µs | env | infos | copying | signalling | waiting |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    rows = []
    for workload in options.split:
        row = split(workload, options.num_envs, options.seconds)
        rows.append(row)
        figures = [f"{row[name]:,.1f}" for name in list(row)[2:]]
        print(f"| {workload} | {row['num_envs']} | " + " | ".join(figures) + " |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "split": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
