"""Batches on a device: what it takes to have them there, and an actor's whole loop.

    python benchmarks/device.py                       # on a GPU if torch finds one, else on the CPU
    python benchmarks/device.py --envs 16 --device cpu

Two measurements, both of envs whose observations are (4, 84, 84) uint8:

- to a tensor: from arrays that `Exchange.take` has returned to tensors that can be computed with on
  the device, as `Pipeline(device=)` does it, and beside it one bare copy of as many bytes (to a GPU
  from page-locked memory; on the CPU, where nothing is copied, none). In µs; "beyond" is the
  difference.
- actor: `Pipeline(device=).collect(32)` with a convolutional network as its policy, in steps of
  envs a second; beside it the rate of the envs alone, stepped in lockstep with the same action, and
  that of the network alone, asked about the groups' observations, which are on the device already.
  None can be faster than the slower of the two; "share" is what of that is reached.

Systems take turns in one run; figures are medians of rounds. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import shmvec
from shmvec._commands.measuring import Progress, Slice, described, line, machine, race
from shmvec._cores import usable_cores
from shmvec.pipeline import Tensors

SHAPE = (4, 84, 84)
LENGTH = 32


class Frames(gym.Env[Any, Any]):
    """Shows a frame that it has made before: what is measured is what comes after it."""

    observation_space = gym.spaces.Box(0, 255, SHAPE, np.uint8)
    action_space = gym.spaces.Discrete(6)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Draws some frames."""
        super().reset(seed=seed)
        self._frames = self.np_random.integers(0, 256, (4, *SHAPE), np.uint8)
        self._turn = 0
        return self._frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Shows the next one."""
        self._turn = (self._turn + 1) % 4
        return self._frames[self._turn], 1.0, False, False, {}


def network(device: torch.device) -> nn.Module:
    """Mnih et al.'s (2015), with a policy's and a value's end."""
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 7)).to(device)


class Policy:
    """The network, asked for the most probable actions and for values."""

    def __init__(self, device: torch.device) -> None:
        """Makes one."""
        torch.manual_seed(0)
        self._network = network(device)

    @torch.no_grad()
    def __call__(self, observations: Any, env_ids: Any) -> tuple[Any, dict[str, Any]]:
        """Chooses."""
        answer = self._network(observations.float() / 255)
        return answer[:, :6].argmax(1), {"values": answer[:, 6]}


class Timed:
    """Calls something that makes so many steps, for the time given."""

    def __init__(self, call: Callable[[], int], close: Callable[[], object] = lambda: None) -> None:
        """Takes it."""
        self._call, self.close = call, close

    def run(self, seconds: float) -> Slice:
        """One turn."""
        steps = calls = 0
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds or not calls:
            steps += self._call()
            calls += 1
        return Slice(1e6 * elapsed / calls, steps / elapsed)


def make(num_envs: int, workers: int) -> shmvec.ShmVectorEnv:
    """The envs, reset."""
    envs = shmvec.ShmVectorEnv([Frames] * num_envs, num_workers=workers)
    envs.reset(seed=0)
    return envs


def actor(num_envs: int, workers: int, device: torch.device) -> Timed:
    """Our subject."""
    envs = make(num_envs, workers)
    pipeline = shmvec.Pipeline(envs, Policy(device), device=device)

    def collect() -> int:
        pipeline.collect(LENGTH)
        return LENGTH * num_envs

    return Timed(collect, envs.close)


def envs_alone(num_envs: int, workers: int) -> Timed:
    """How fast the envs are."""
    envs = make(num_envs, workers)
    actions = np.zeros(num_envs, np.int64)

    def collect() -> int:
        rollout = envs.rollout(LENGTH)
        for _ in range(LENGTH):
            rollout.step(actions)
        return LENGTH * num_envs

    return Timed(collect, envs.close)


def network_alone(num_envs: int, device: torch.device) -> Timed:
    """How fast the network is."""
    policy, half = Policy(device), max(1, num_envs // 2)
    observations = torch.zeros((half, *SHAPE), dtype=torch.uint8, device=device)

    def ask() -> int:
        policy(observations, None)[0].cpu()  # as the envs need them
        return half

    return Timed(ask)


def to_a_tensor(num_envs: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """The first measurement."""
    tensors = Tensors(device)
    space = Frames.observation_space
    batch = np.zeros((num_envs, *SHAPE), np.uint8)
    on_gpu = device.type == "cuda"
    source = torch.from_numpy(batch).pin_memory() if on_gpu else torch.from_numpy(batch)
    target = torch.empty_like(source, device=device)

    def timed(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
        return 1e6 * (time.perf_counter() - begin)

    def move() -> None:
        tensors.moved(space, batch)

    def copy() -> None:
        if on_gpu:
            target.copy_(source, non_blocking=True)

    moved, copied = [], []
    for _ in range(100 * rounds):
        moved.append(timed(move))
        copied.append(timed(copy))
    warm = 10
    found = {"moved_us": median(moved[warm:]), "copy_us": median(copied[warm:])}
    return {**found, "beyond_us": found["moved_us"] - found["copy_us"]}


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--workers", type=int, default=None, help="as many as there are cores")
    parser.add_argument("--seconds", type=float, default=6, help="of each system")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    workers = options.workers or min(usable_cores(), options.envs)
    progress = Progress(sys.stderr, "device")
    progress("to a tensor")
    moving = to_a_tensor(options.envs, device, options.rounds)
    results = race(
        {
            "actor": partial(actor, options.envs, workers, device),
            "envs alone": partial(envs_alone, options.envs, workers),
            "network alone": partial(network_alone, options.envs, device),
        },
        options.seconds,
        options.rounds,
        say=progress,
    )
    progress.done()
    best = min(results[name].median.steps_per_s for name in ("envs alone", "network alone"))
    on = machine()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{described(on)}, torch {torch.__version__}, device {name}")
    print(f"{options.envs} envs, {workers} workers, observations {SHAPE} uint8\n")
    print(
        f"to a tensor: {moving['moved_us']:,.1f} µs, one copy {moving['copy_us']:,.1f} µs, beyond "
        f"it {moving['beyond_us']:,.1f} µs\n"
    )
    print(line("system", "steps/s", "spread", "share"))
    print(line("---", *["--:"] * 3))
    for system, result in results.items():
        rate = result.median.steps_per_s
        print(line(system, f"{rate:,.0f}", f"{result.spread:.0%}", f"{rate / best:.2f}"))
    if options.json is not None:
        rows = {system: result.median.steps_per_s for system, result in results.items()}
        found = {"machine": on, "device": name, "to_a_tensor": moving, "steps_per_s": rows}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
