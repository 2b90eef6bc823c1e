"""What a batch step costs besides the envs, and where its time goes.

    python benchmarks/costs.py                    # ns an env, by part
    python benchmarks/costs.py --split CartPole-v1 HalfCheetah-v5 Ant-v5 ALE/Pong-v5 --json FILE

The first table steps envs that only hand out ready-made results, in this process (num_workers=0),
so that neither processes nor waiting are in it, and measures each part alone: decoding an action,
writing an observation, taking an info and gathering it, both sides together. `rest` is what is left
of the whole: rewards, flags, the loop, and the parent's copy of the observation. `a batch` is what
does not depend on the number of envs: the request's way through both rings, and the parent's calls
and arrays. All that a row is made of takes turns, in slices; `spread` is the widest among it.

The second table splits the batch step of real envs in worker processes, in µs. It steps replays
beside them: envs that return what the real ones did, without computing.

    env          the limit: as long as that many steps take in free-running loops, one a core
    infos        what the replay takes longer with infos than without
    copying      what it takes longer with observations and actions of that size than with tiny ones
    signalling   the replay with tiny ones, less its envs' own steps: requests, answers, wakes
    waiting      the rest: for the slowest worker, and what the envs suffer from each other
"""

from __future__ import annotations

import argparse
import json
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from harness import WORKLOADS, versions

import shmvec
from shmvec._commands.measuring import LIMIT, Stepper, described, line, machine, race, vector_env
from shmvec._cores import usable_cores
from shmvec._memory.layout import Layout

NUM_ENVS = 32


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


def calls(run: Callable[[], object]) -> Callable[[], Stepper]:
    """What starts a contender that only makes a call, as often as it can."""

    def step(_: Any) -> None:
        run()

    return lambda: Stepper(step, lambda: None)


def batches(make: Callable[[], Any], num_envs: int) -> Stepper:
    """Batch steps without workers."""
    return vector_env(partial(shmvec.ShmVectorEnv, [make] * num_envs, num_workers=0))


def parts(seconds: float) -> None:
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
    print(
        "ns an env                    whole | action  observation  infos  rest |   ns a batch"
        " | spread"
    )
    for name, (observation_space, action_space, info) in cases.items():
        observation, action = observation_space.sample(), action_space.sample()
        make = partial(Replay, observation_space, action_space, results(observation, info))
        plain = partial(Replay, observation_space, action_space, results(observation, {}))
        layout = Layout(observation_space, action_space, 1, False, False, False)
        segment = _segment(layout)
        slabs = layout.attach(segment)
        slabs.actions.put_rows(np.arange(1), np.asarray([action]))
        found = race(
            {
                "call": calls(lambda: None),
                "alone": calls(partial(make().step, action)),
                "many": partial(batches, make, NUM_ENVS),
                "few": partial(batches, make, 1),
                "many, plain": partial(batches, plain, NUM_ENVS),
                "few, plain": partial(batches, plain, 1),
                "decoding": calls(partial(slabs.actions.get, 0)),
                "writing": calls(partial(slabs.results.observations.put, 0, observation)),
            },
            seconds,
        )
        ns = {
            part: 1000 * (result.median.batch_us - found["call"].median.batch_us)
            for part, result in found.items()
        }
        slope = (ns["many"] - ns["few"]) / (NUM_ENVS - 1)  # what one env more costs
        whole = slope - ns["alone"]
        bare = (ns["many, plain"] - ns["few, plain"]) / (NUM_ENVS - 1)
        infos = slope - bare if info else 0.0
        rest = whole - ns["decoding"] - ns["writing"] - infos
        print(
            f"{name:25} {whole:8.0f} |{ns['decoding']:7.0f} {ns['writing']:12.0f} {infos:6.0f} "
            f"{rest:5.0f} | {ns['few'] - ns['alone'] - whole:12.0f} "
            f"| {max(result.spread for result in found.values()):6.0%}",
            flush=True,
        )


def _segment(layout: Layout) -> Any:
    """Private memory with the slabs of one env."""
    from shmvec._core import Segment, segment_bytes

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
    fns = WORKLOADS[workload].fns(num_envs)
    observations, actions, taken = record(fns[0])
    tiny = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)
    plain = [(*step[:4], {}) for step in taken]
    least = [(np.zeros(1, np.float32), *step[1:4], {}) for step in taken]
    replays = {
        "replay": partial(Replay, observations, actions, taken),
        "plain": partial(Replay, observations, actions, plain),
        "least": partial(Replay, *tiny, least),
    }
    makes = {"real": fns} | {name: [make] * num_envs for name, make in replays.items()}
    found = race(
        {
            "call": calls(lambda: None),
            "own": calls(partial(replays["least"]().step, 0)),
            **{
                name: partial(vector_env, partial(shmvec.ShmVectorEnv, fns))
                for name, fns in makes.items()
            },
        },
        seconds,
        limit=WORKLOADS[workload].makes,
    )
    us = {name: result.median.batch_us for name, result in found.items()}
    steps = us["real"] * found["real"].median.steps_per_s / 1e6  # of a batch; resets are none
    in_parallel = num_envs / min(usable_cores(), num_envs)
    parts = {
        "env": steps * us[LIMIT],
        "infos": max(0.0, us["replay"] - us["plain"]),
        "copying": max(0.0, us["plain"] - us["least"]),
        "signalling": us["least"] - in_parallel * (us["own"] - us["call"]),
    }
    parts["waiting"] = max(0.0, us["real"] - sum(parts.values()))
    cell = {"workload": workload, "num_envs": num_envs, "spread": found["real"].spread}
    return {**cell, "batch_us": us["real"], **parts}


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
    print(described(machine()))
    if not options.split:
        parts(options.seconds)
        return
    print(
        "\n| workload | envs | spread | batch step, µs | env | infos | copying | signalling ",
        end="",
    )
    print("| waiting |\n|---" + "|--:" * 8 + "|")
    rows = []
    for workload in options.split:
        row = split(workload, options.num_envs, options.seconds)
        rows.append(row)
        figures = [f"{row[name]:,.1f}" for name in list(row)[3:]]
        print(line(workload, row["num_envs"], f"{row['spread']:.0%}", *figures), flush=True)
    if options.json is not None:
        setup = {**machine(), "libraries": versions()}
        options.json.write_text(json.dumps({"machine": setup, "split": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
