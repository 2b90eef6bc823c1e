"""Guards the speed: compares two builds of shmvec, and fails if the second is slower.

    python benchmarks/guard.py main                      # is this checkout slower than main?
    python benchmarks/guard.py ../base HEAD --workload cartpole-32 image-32

A build is a checkout with built extensions, or a commit, which is checked out elsewhere and built.
Each build steps the same envs in its own process, by shmvec's public names only. They take turns in
slices of one run, and sleep between their turns. The table has medians over the slices of a batch
step's mean time, their spread, and `after / before`: the median over the rounds of the ratio of the
two slices, so that what disturbs both cancels; above 1 is slower. The limit is the time of as many
env steps in free-running loops, one a core.

`before` runs twice: `again / before` shows chance. A loss is printed, and the exit status is 1, if
`after / before` is above `again / before` by more than the tolerance, and its whole confidence
interval is above the other's. All processes are started anew several times, because some are faster
than others for as long as they live.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contenders import in_batches
from harness import WORKLOADS as ENVS
from harness import Apart, heading

import shmvec
from shmvec._commands.measuring import (
    LIMIT,
    Result,
    Slice,
    Stepper,
    describe_machine,
    machine,
    race,
    table_line,
)

ROOT = Path(__file__).parents[1]


def build(tree: Path, start: Callable[[], Stepper]) -> Apart:
    """Starts the vector env of one build as a contender."""
    return Apart(partial(_start_in, str(tree), start), path=[str(tree)], patience=120).ready()


def _start_in(tree: str, start: Callable[[], Stepper]) -> Stepper:
    """Starts a contender, in the process of the build."""
    if not Path(shmvec.__file__).is_relative_to(tree):
        raise RuntimeError(f"shmvec comes from {shmvec.__file__}, not from {tree}")
    return start()


def stepping(
    env: Callable[[], Any], n: int, how: Callable[[Any], Any], **options: Any
) -> Callable[[], Stepper]:
    """Returns a function that starts a vector env, stepped in one of the ways below."""

    def start() -> Stepper:
        envs = shmvec.ShmVectorEnv([env] * n, **options)
        envs.action_space.seed(0)
        return Stepper(how(envs), envs.action_space.sample, n, close=envs.close)

    return start


def in_lockstep(envs: Any) -> Any:
    """Steps all envs."""
    envs.reset(seed=0)
    return lambda actions: envs.step(actions)[2:4]


def masked(envs: Any) -> Any:
    """Steps every second env."""
    envs.reset(seed=0)
    mask = np.arange(envs.num_envs) % 2 == 0
    ids = np.flatnonzero(mask)

    def step(actions: Any) -> Any:
        _, _, terminated, truncated, _ = envs.step(actions, mask=mask)
        return (terminated | truncated)[ids], False, ids

    return step


def calling(envs: Any) -> Any:
    """Gets a picture from all envs."""
    envs.reset(seed=0)

    def step(_: Any) -> None:
        envs.call("render")

    return step


def in_rollouts(envs: Any) -> Any:
    """Steps all envs in rollouts of 128 steps."""
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
    """Steps one env a call, by turns the first ``turns`` envs."""
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
    "cartpole-2": ("CartPole-v1", 2, in_lockstep, {}),
    "cartpole-8": ("CartPole-v1", 8, in_lockstep, {}),
    "cartpole-32": ("CartPole-v1", 32, in_lockstep, {}),
    "halfcheetah-32": ("HalfCheetah-v5", 32, in_lockstep, {}),
    "pong-8": ("ALE/Pong-v5", 8, in_lockstep, {}),
    "pong-32": ("ALE/Pong-v5", 32, in_lockstep, {}),
    "image-32": ("Noop-image", 32, in_lockstep, {}),
    "infos-32": ("Noop-8-infos", 32, in_lockstep, {}),
    "calls-8": ("Noop-image", 8, calling, {}),
    "3-workers": ("CartPole-v1", 32, in_lockstep, {"num_workers": 3}),
    "8-workers": ("CartPole-v1", 32, in_lockstep, {"num_workers": 8}),
    "32-workers": ("CartPole-v1", 32, in_lockstep, {"num_workers": 32}),
    "partial-8/4": ("CartPole-v1", 8, partial(in_batches, seed=0), {"batch_size": 4}),
    "partial-32/16": ("CartPole-v1", 32, partial(in_batches, seed=0), {"batch_size": 16}),
    "masked-16-of-32": ("CartPole-v1", 32, masked, {}),
    "rollout-128": ("CartPole-v1", 32, in_rollouts, {}),
    "one-by-one": ("Noop", 32, partial(one_by_one, turns=32), {"num_workers": 32}),
    "one-of-32": ("Noop", 32, partial(one_by_one, turns=1), {"num_workers": 32}),
}


@contextlib.contextmanager
def built(what: str, root: Path = ROOT) -> Iterator[Path]:
    """Yields the source tree of a checkout, or of a commit that is checked out and built.

    Args:
        what: A folder, or a name that git knows as a commit.
        root: The repository of commits.

    Raises:
        SystemExit: There is no such folder or commit, or it is not built.
    """
    folder = Path(what).resolve()
    if folder.is_dir():
        tree = folder / "src" if (folder / "src").is_dir() else folder
        if not list(tree.glob("shmvec/_core/*.so")):
            raise SystemExit(f"{what} is not built: run its setup.py build_ext --inplace")
        yield tree
        return
    git = ["git", "-C", str(root)]
    named = [*git, "rev-parse", "--verify", "--quiet", f"{what}^{{commit}}"]
    found = subprocess.run(named, capture_output=True, text=True)
    if found.returncode != 0:
        raise SystemExit(f"{what} is neither a folder nor a commit")
    with tempfile.TemporaryDirectory() as parent:
        checkout = Path(parent) / "checkout"
        added = [*git, "worktree", "add", "--detach", str(checkout), found.stdout.strip()]
        subprocess.run(added, check=True, capture_output=True)
        try:
            print(f"building {what}", file=sys.stderr)
            build = [sys.executable, "setup.py", "build_ext", "--inplace"]
            done = subprocess.run(build, cwd=checkout, capture_output=True, text=True)
            if done.returncode != 0:
                raise SystemExit(f"{what} cannot be built:\n{done.stderr}")
            yield checkout / "src"
        finally:
            removed = [*git, "worktree", "remove", "--force", str(checkout)]
            subprocess.run(removed, check=True, capture_output=True)


MIN_ROUNDS = 8  # in all: fewer have no 99 % interval


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 99 % confidence interval of the median, for any distribution."""
    n, outside, k = len(ratios), 2.0 ** -len(ratios), 0
    while 2 * (outside + math.comb(n, k + 1) * 2.0**-n) <= 0.01:
        k += 1
        outside += math.comb(n, k) * 2.0**-n
    ordered = sorted(ratios)
    return ordered[k], ordered[-1 - k]


def loses(after: Sequence[float], again: Sequence[float], tolerance: float) -> bool:
    """Whether a build is slower than another one by more than the other differs from itself.

    Args:
        after: Ratios of the build's times to the other's, by round.
        again: Ratios of the other's times in a second process, by round.
        tolerance: The share that is not a loss.
    """
    return interval(after)[0] > interval(again)[1] and bool(
        np.median(after) > (1 + tolerance) * np.median(again)
    )


def ratios(result: Result, reference: Result) -> list[float]:
    """Ratios of batch times, by round."""
    pairs = zip(result.slices, reference.slices, strict=True)
    return [a.batch_us / b.batch_us for a, b in pairs]


def main() -> int:
    """Runs the command line; returns 1 if there is a loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="BEFORE", help="a checkout or a commit")
    parser.add_argument(
        "after", metavar="AFTER", nargs="?", default=str(ROOT), help="default: this checkout"
    )
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=6.0, help="for each process, in all")
    parser.add_argument("--rounds", type=int, default=24, help="in all")
    parser.add_argument("--starts", type=int, default=3, help="how often all processes are started")
    parser.add_argument("--tolerance", type=float, default=0.02, help="default: 0.02, that is 2 %%")
    options = parser.parse_args()
    rounds = options.rounds // options.starts
    if rounds * options.starts < MIN_ROUNDS:
        parser.error(f"--rounds must be at least {MIN_ROUNDS}")
    lost = []
    with built(options.before) as before, built(options.after) as after:
        trees = {"before": before, "again": before, "after": after}
        print(describe_machine(machine()))
        columns = "workload", "before, µs", "spread", "after, µs", "spread", "after / before"
        print("", heading(*columns, "again / before", "limit, µs", ""), sep="\n")
        for name in options.workload:
            env, n, how, keywords = WORKLOADS[name]
            if missing := ENVS[env].missing():
                print(table_line(name, f"needs {', '.join(missing)}", *[""] * 7), flush=True)
                continue
            start = stepping(ENVS[env].make, n, how, **keywords)
            slices: dict[str, list[Slice]] = {}
            for _ in range(options.starts):
                raced = race(
                    {who: partial(build, tree, start) for who, tree in trees.items()},
                    options.seconds / options.starts,
                    rounds,
                    limit=ENVS[env].kinds,
                )
                for who, result in raced.items():
                    slices.setdefault(who, []).extend(result.slices)
            results = {who: Result(turns) for who, turns in slices.items()}
            one, other, limit = results["before"], results["after"], results[LIMIT].median
            changed, chance = ratios(other, one), ratios(results["again"], one)
            us = (f"{each.median.batch_us:,.1f} | {each.spread:.0%}" for each in (one, other))
            steps = other.median.batch_us * other.median.steps_per_s / 1e6  # of a batch
            shown = (f"{np.median(each):.3f}" for each in (changed, chance))
            loses_here = loses(changed, chance, options.tolerance)
            verdict = "LOSS" if loses_here else ""
            print(
                table_line(name, *us, *shown, f"{steps * limit.batch_us:,.2f}", verdict), flush=True
            )
            lost += [name] * loses_here
    if lost:
        print(f"\nslower than {options.before}: {', '.join(lost)}")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
