"""Calls with large results (pictures, states) beside AsyncVectorEnv's.

    python benchmarks/calls.py                                # pictures of 84 x 84 to 680 x 680
    python benchmarks/calls.py --side 680 --num-envs 8 32

In each cell the contenders take turns in one run. A batch step is one call of every env, whose
result is an array of side x side x 3 bytes. In most rows an env only copies the picture that it
has, so that the way to the parent is what is measured; "CartPole-v1" draws one of 400 x 600, as
recording a video does. The limit are loops, one a core, that make the same calls and send nothing.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, VectorEnv
from harness import Work

import shmvec
from shmvec._commands.measuring import LIMIT, Stepper, cells, described, line, machine, race

ASYNC = "AsyncVectorEnv"


class Picture(Work):
    """An env that hands out copies of a picture."""

    def __init__(self, side: int) -> None:
        """Makes the picture."""
        super().__init__(0)
        self._picture = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)

    def render(self) -> Any:
        """A copy of it."""
        return self._picture.copy()


class Called(gym.Wrapper[Any, Any, Any, Any]):
    """Renders in place of stepping: what the limit's loops do."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Renders."""
        self.env.render()
        return None, 0.0, False, False, {}


def cartpole() -> gym.Env[Any, Any]:
    """CartPole, which draws."""
    return gym.make("CartPole-v1", render_mode="rgb_array")


def caller(make: Callable[[], VectorEnv[Any, Any, Any]]) -> Stepper:
    """Makes and resets a vector env whose envs are to render, all at once, again and again."""
    envs = make()
    envs.reset(seed=0)

    def call(_: Any) -> None:
        envs.call("render")

    return Stepper(call, lambda: None, envs.num_envs, close=envs.close)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-envs", nargs="+", type=int, default=[8])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contender")
    parser.add_argument("--side", nargs="+", type=int, default=[84, 210, 680])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of peers; none of ours
    print(described(machine()))
    print("\n| result | envs | system | call, µs | spread | calls/s | of the limit | × Async |")
    print("|---|--:|---" + "|--:" * 5 + "|")
    makes: dict[str, Callable[[], Any]] = {
        **{f"{side} x {side} x 3": partial(Picture, side) for side in options.side},
        "CartPole-v1": cartpole,
    }
    rows: list[dict[str, Any]] = []
    for (name, make), n in product(makes.items(), options.num_envs):
        fns = [make] * n
        results = race(
            {
                ASYNC: partial(caller, partial(AsyncVectorEnv, fns)),
                "ShmVectorEnv": partial(caller, partial(shmvec.ShmVectorEnv, fns)),
            },
            options.seconds,
            limit=[lambda make=make: Called(make())],
        )
        for system, result in results.items():
            row = {
                "result": name,
                "num_envs": n,
                "system": system,
                **result.figures(results[LIMIT]),
                "times_async": result.ratio(results[ASYNC]),
            }
            rows.append(row)
            print(line(name, n, system, *cells(row), f"{row['times_async']:.2f}"), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
