"""Two builds of shmvec side by side: what a change has made faster or slower.

    python benchmarks/before_after.py --before ../base/src      # beside this tree
    python benchmarks/before_after.py --before ../base/src --after ../other/src --workload noop-1

Each build is a source tree with its built extensions. Each steps the same envs in a process of its
own, by shmvec's public names only; the two take turns, in slices, in one run, and whose turn it is
not sleeps. Given are medians over the slices of a batch step's mean time, their spread, and
`after / before`: the median over the rounds of the ratio of their two slices, so that what disturbs
both cancels; above 1 is slower. How much of that is chance shows a build beside itself. The limit
is what as many env steps take in free-running loops, one a core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from workloads import WORKLOADS as ENVS

import shmvec
from shmvec._commands import bench, measuring
from shmvec._commands.measuring import LIMIT, Slice, Stepper, described, line, machine, race

PATIENCE_S = 120  # to start, and longer than a slice should take

# What a build's process runs: a function that comes as a pickle, for its tree may have no such one.
CHILD = """
import sys
from multiprocessing.connection import Connection
import cloudpickle
pipe = Connection(int(sys.argv[1]))
cloudpickle.loads(pipe.recv_bytes())(pipe)
"""


class Build:
    """One build's vector env, in a process of its own: a contender."""

    def __init__(self, tree: Path, start: Callable[[], Stepper]) -> None:
        """Starts the process."""
        self._tree = tree
        self._pipe, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": str(tree)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._pipe.send_bytes(cloudpickle.dumps(partial(serve, str(tree), start)))
        try:
            self._answer(0.0)
        except BaseException:
            self.close()
            raise

    def run(self, seconds: float) -> Slice:
        """One turn."""
        self._pipe.send(seconds)
        return Slice(*self._answer(seconds))

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds + PATIENCE_S):
            raise TimeoutError(f"the build in {self._tree} does not answer")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the build in {self._tree} has failed: see above") from None

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()


def serve(tree: str, start: Callable[[], Stepper], pipe: Any) -> None:
    """In a build's process: runs slices until the pipe is closed."""
    if not Path(shmvec.__file__).is_relative_to(tree):
        raise SystemExit(f"shmvec comes from {shmvec.__file__}, not from {tree}")
    contender = start()
    try:
        pipe.send(None)
        while True:
            pipe.send(tuple(contender.run(pipe.recv())))
    except EOFError:
        pass
    finally:
        contender.close()


def stepping(
    env: Callable[[], Any], n: int, how: Callable[[Any], Any], **options: Any
) -> Callable[[], Stepper]:
    """What starts a vector env of one build, stepped in one of the ways below."""

    def start() -> Stepper:
        envs = shmvec.ShmVectorEnv([env] * n, **options)
        envs.action_space.seed(0)
        return Stepper(how(envs), envs.action_space.sample, n, close=envs.close)

    return start


def in_lockstep(envs: Any) -> Any:
    """Steps all."""
    envs.reset(seed=0)
    return lambda actions: envs.step(actions)[2:4]


def in_batches(envs: Any) -> Any:
    """Partial batches: who is ready first is stepped first."""
    envs.async_reset(seed=0)
    ids = envs.recv()[-1]["env_id"]

    def step(actions: Any) -> Any:
        nonlocal ids
        envs.send(actions[: len(ids)], ids)
        _, _, terminated, truncated, infos = envs.recv()
        ids = infos["env_id"]
        return terminated | truncated, False, ids

    return step


def masked(envs: Any) -> Any:
    """Steps every second env."""
    envs.reset(seed=0)
    mask = np.arange(envs.num_envs) % 2 == 0
    ids = np.flatnonzero(mask)

    def step(actions: Any) -> Any:
        _, _, terminated, truncated, _ = envs.step(actions, mask=mask)
        return (terminated | truncated)[ids], False, ids

    return step


def in_rollouts(envs: Any) -> Any:
    """Steps all into the memory of rollouts of 128 steps."""
    envs.reset(seed=0)
    rollout, made = envs.rollout(128), 0

    def step(actions: Any) -> Any:
        nonlocal rollout, made
        if made == 128:
            rollout, made = envs.rollout(128), 0
        rollout.step(actions)
        made += 1
        return rollout.terminations[made] | rollout.truncations[made], False

    return step


def one_by_one(envs: Any, turns: int) -> Any:
    """Steps one env a call: by turns so many of them."""
    envs.reset(seed=0)
    count = 0

    def step(actions: Any) -> Any:
        nonlocal count
        ids = [count % turns]
        count += 1
        envs.send(actions[:1], ids)
        _, _, terminated, truncated, _ = envs.recv(min_envs=1)
        return terminated | truncated, False, ids

    return step


# The env, the number of envs, how they are stepped, and options of the vector env.
WORKLOADS: dict[str, tuple[str, int, Callable[[Any], Any], dict[str, Any]]] = {
    "noop-1": ("Noop", 1, in_lockstep, {}),
    "noop-32": ("Noop", 32, in_lockstep, {}),
    "cartpole-8": ("CartPole-v1", 8, in_lockstep, {}),
    "cartpole-32": ("CartPole-v1", 32, in_lockstep, {}),
    "halfcheetah-32": ("HalfCheetah-v5", 32, in_lockstep, {}),
    "32-workers": ("CartPole-v1", 32, in_lockstep, {"num_workers": 32}),
    "partial-32/16": ("CartPole-v1", 32, in_batches, {"batch_size": 16}),
    "masked-16-of-32": ("CartPole-v1", 32, masked, {}),
    "rollout-128": ("CartPole-v1", 32, in_rollouts, {}),
    "one-by-one": ("Noop", 32, partial(one_by_one, turns=32), {"num_workers": 32}),
    "one-of-32": ("Noop", 32, partial(one_by_one, turns=1), {"num_workers": 32}),
}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ours = Path(__file__).parents[1] / "src"
    parser.add_argument("--before", type=Path, required=True, metavar="TREE")
    parser.add_argument("--after", type=Path, default=ours, metavar="TREE", help="default: this")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=6.0, help="for each build")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    for module in (bench, measuring):  # they are not the builds' own, which may have none
        cloudpickle.register_pickle_by_value(module)
    print(described(machine()))
    print("\n| workload | before, µs | spread | after, µs | spread | after / before | limit, µs |")
    print("|---" + "|--:" * 6 + "|")
    for name in options.workload:
        env, n, how, keywords = WORKLOADS[name]
        start = stepping(ENVS[env].make, n, how, **keywords)
        results = race(
            {build: partial(Build, tree, start) for build, tree in trees.items()},
            options.seconds,
            options.rounds,
            limit=ENVS[env].makes,
        )
        before, after, limit = results["before"], results["after"], results[LIMIT].median
        us = (f"{one.median.batch_us:,.1f} | {one.spread:.0%}" for one in (before, after))
        steps = after.median.batch_us * after.median.steps_per_s / 1e6  # of a batch
        ratio = f"{after.ratio(before, 'batch_us'):.3f}"
        print(line(name, *us, ratio, f"{steps * limit.batch_us:,.2f}"), flush=True)


if __name__ == "__main__":
    main()
