"""How soon a caller that waits notices the death of a worker, and Ctrl-C: in milliseconds.

    python benchmarks/noticing.py
    python benchmarks/noticing.py --times 50

Two envs that would step for a minute, a worker each. A thread kills one of the workers, or sends
this process SIGINT, while the caller has long been asleep in ``step``; the time ends when ``step``
raises.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable

import gymnasium as gym
import numpy as np

import shmvec
from shmvec._commands.measuring import described, machine

ASLEEP_S = 0.1


class Endless(gym.Env[np.ndarray, int]):
    """An env whose steps take a minute."""

    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, **_: object) -> tuple[np.ndarray, dict[str, object]]:
        """Always the same."""
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        """Takes a minute."""
        time.sleep(60)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def killed(envs: shmvec.ShmVectorEnv) -> None:
    """Kills a worker."""
    pid = envs.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def ctrl_c(envs: shmvec.ShmVectorEnv) -> None:
    """Interrupts this process."""
    os.kill(os.getpid(), signal.SIGINT)


def delay_s(make: Callable[[], shmvec.ShmVectorEnv], fault: Callable[..., None]) -> float:
    """The time from the fault to the exception."""
    envs = make()
    began = 0.0

    def cause() -> None:
        nonlocal began
        began = time.perf_counter()
        fault(envs)

    try:
        envs.reset(seed=0)
        timer = threading.Timer(ASLEEP_S, cause)
        timer.start()
        try:
            envs.step(np.zeros(2, np.int64))
        except (KeyboardInterrupt, shmvec.WorkerCrashError):
            return time.perf_counter() - began
        raise AssertionError("step() raised nothing")
    finally:
        timer.join()
        envs.close(terminate=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20, help="how often each is tried")
    times = parser.parse_args().times
    contenders: dict[str, tuple[Callable[[], shmvec.ShmVectorEnv], Callable[..., None]]] = {}
    for context in ("fork", "forkserver", "spawn"):

        def make(context: str = context) -> shmvec.ShmVectorEnv:
            return shmvec.ShmVectorEnv([Endless] * 2, num_workers=2, context=context)

        contenders[f"ShmVectorEnv, {context}: a death"] = make, killed
        contenders[f"ShmVectorEnv, {context}: Ctrl-C"] = make, ctrl_c
    delays: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(times):
        for name, contender in contenders.items():
            delays[name].append(1000 * delay_s(*contender))
    print(described(machine()))
    print(f"{'':32} {'median':>8} {'longest':>8}  ms, of {times}")
    for name, taken in delays.items():
        print(f"{name:32} {statistics.median(taken):8.2f} {max(taken):8.2f}")


if __name__ == "__main__":
    main()
