"""Suites: how near to the limit, within what memory, and whether the numbers survive being killed.

    python benchmarks/suites.py tasks                 # 40 tasks that start slowly: five minutes
    python benchmarks/suites.py tasks --scale 0.1     # the same, ten times as short
    python benchmarks/suites.py atari                 # 8 games, killed at three moments and resumed
    python benchmarks/suites.py metaworld             # MT10 likewise (needs metaworld)

"tasks" measures its work in CPU time, so that a shared machine changes what that costs, and not
what there is to do: the limit is the work, spread over the cores without a gap. The others play the
same episodes one after the other, too, in one process, and compare all numbers.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import shmvec
from shmvec import SuiteEvaluation, Task
from shmvec._commands.measuring import described, machine
from shmvec._cores import descendants, usable_cores
from shmvec.evaluation.tasks import env_fn_of

GAMES = "Pong Breakout Seaquest SpaceInvaders BeamRider Qbert Enduro MsPacman".split()
MT10 = (
    "reach-v3 push-v3 pick-place-v3 door-open-v3 drawer-open-v3 drawer-close-v3 "
    "button-press-topdown-v3 peg-insert-side-v3 window-open-v3 window-close-v3"
).split()
KILLS = 3
_STEP_S = 0.02
_LOOK_S = 0.5


# ---- 40 tasks that start slowly ------------------------------------------------------------------


def busy(seconds: float) -> None:
    """Computes for so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class SlowStart(gym.Env[Any, Any]):
    """Takes CPU time to start and to play, and memory."""

    observation_space = gym.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, start_s: float, steps: int, mib: int) -> None:
        """Starts."""
        busy(start_s)
        self._memory = np.ones(mib << 17)
        self._steps = steps

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begins an episode."""
        super().reset(seed=seed)
        self._left = self._steps
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> Any:
        """Computes."""
        busy(_STEP_S)
        self._left -= 1
        return np.zeros(8, np.float32), float(self.np_random.normal()), self._left == 0, False, {}


class Memory(threading.Thread):
    """Measures the memory of all processes below this one: their own, and their part of shared."""

    def __init__(self) -> None:
        """Begins."""
        super().__init__(daemon=True)
        self.most = 0
        self._going = True
        self.start()

    def run(self) -> None:
        """Measures, until it is stopped."""
        while self._going:
            self.most = max(self.most, sum(map(self._of, descendants(os.getpid()))))
            time.sleep(_LOOK_S)

    def _of(self, pid: int) -> int:
        with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
        return 0

    def stop(self) -> None:
        """Stops."""
        self._going = False
        self.join()


def slow_tasks(scale: float, episodes: int, memory: str) -> None:
    """Plays 40 tasks that start in 1 to 5 s and play for 1 to 20 s, within a limit to memory."""
    draw = random.Random(0)
    suite, work, longest = {}, 0.0, 0.0
    for number in range(40):
        start_s, play_s = scale * draw.uniform(1, 5), scale * draw.uniform(1, 20)
        steps = max(1, round(play_s / episodes / _STEP_S))
        suite[f"task {number}"] = partial(SlowStart, start_s, steps, draw.choice([50, 100, 200]))
        work += start_s + episodes * steps * _STEP_S
        longest = max(longest, start_s + steps * _STEP_S)
    limit = max(work / usable_cores(), longest)
    watch = Memory()
    begin = time.monotonic()
    result = shmvec.evaluate(suite, nothing, episodes, seeds=0, memory=memory)
    seconds = time.monotonic() - begin
    watch.stop()
    assert result.complete
    print("| tasks | episodes each | s | the limit | × the limit | peak memory | allowed |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    print(
        f"| {len(suite)} | {episodes} | {seconds:.1f} | {limit:.1f} | {seconds / limit:.2f} | "
        f"{watch.most / 2**20:.0f} MiB | {memory} |"
    )


def nothing(observations: Any, env_ids: Any) -> Any:
    """A policy that does nothing."""
    return np.zeros(len(env_ids), np.int64)


# ---- the numbers ---------------------------------------------------------------------------------


def atari() -> dict[str, Task]:
    """Eight games."""
    import ale_py  # noqa: F401  # registers them

    return {game: Task(f"ale_py:ALE/{game}-v5") for game in GAMES}


class Seeded(gym.Wrapper[Any, Any, Any, Any]):
    """Seeds each episode: Meta-World's reset() passes its seed over, and has a method for it."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begins the episode that follows from the seed."""
        if seed is not None:
            self.env.unwrapped.seed(seed)  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)


def meta_env(name: str) -> gym.Env[Any, Any]:
    """An env of Meta-World, as Gymnasium's registry has it, whose goals are always the same."""
    return Seeded(gym.make("metaworld:Meta-World/MT1", env_name=name, seed=0))


def metaworld() -> dict[str, Task]:
    """The ten tasks of MT10."""
    return {name: Task(partial(meta_env, name), instruction=name) for name in MT10}


SUITES = {"atari": (atari, 10), "metaworld": (metaworld, 5)}


class Hashing:
    """A policy whose actions follow from each observation alone, whatever the task."""

    def __init__(self, suite: dict[str, Task]) -> None:
        """Takes the tasks; finds out their action spaces when it is asked."""
        self._suite = suite
        self._spaces: dict[str, gym.Space[Any]] = {}  # in this process only, as is the policy

    def __call__(self, observations: Any, env_ids: Any, *, task: Any) -> Any:
        """Acts."""
        return np.array(
            [self.act(each.name, row) for each, row in zip(task, observations, strict=True)]
        )

    def act(self, name: str, observation: Any) -> Any:
        """The action for one observation."""
        if name not in self._spaces:
            env = env_fn_of(self._suite[name])()
            self._spaces[name] = env.action_space
            env.close()
        space = self._spaces[name]
        number = zlib.crc32(np.ascontiguousarray(observation))
        if isinstance(space, gym.spaces.Discrete):
            return number % space.n
        assert isinstance(space, gym.spaces.Box) and space.shape == (4,)
        return np.array([number >> shift & 255 for shift in (0, 8, 16, 24)], np.float32) / 128 - 1


def one_after_the_other(suite: dict[str, Task], episodes: int) -> dict[str, list[Any]]:
    """Returns and lengths of the episodes of all tasks, each played in this process."""
    policy = Hashing(suite)
    found: dict[str, list[Any]] = {}
    for name, task in suite.items():
        env = env_fn_of(task)()
        found[name] = []
        for seed in range(episodes):
            observation, _ = env.reset(seed=seed)
            returned, length, over = 0.0, 0, False
            while not over:
                action = policy.act(name, observation)
                observation, reward, terminated, truncated, _ = env.step(action)
                returned, length = returned + float(reward), length + 1
                over = terminated or truncated
            found[name].append((returned, length))
        env.close()
    return found


def numbers(result: SuiteEvaluation) -> dict[str, list[Any]]:
    """Returns and lengths of the episodes of all tasks."""
    return {
        name: list(zip(each.returns.tolist(), each.lengths.tolist(), strict=True))
        for name, each in result.items()
    }


def lines(record: Path) -> int:
    """The number of lines that a record has."""
    return record.read_bytes().count(b"\n") if record.exists() else 0


def survives(which: str) -> None:
    """Kills an evaluation at three moments, resumes it, and compares it with one in one process."""
    make, episodes = SUITES[which]
    begin = time.monotonic()
    expected = one_after_the_other(make(), episodes)
    alone_s = time.monotonic() - begin
    begin = time.monotonic()
    whole = shmvec.evaluate(make(), Hashing(make()), episodes, seeds=0)
    whole_s = time.monotonic() - begin
    print(f"one after the other {alone_s:.1f} s, as a suite {whole_s:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.jsonl"
        for kill in range(KILLS):
            command = [sys.executable, __file__, which, "--record", str(record)]
            program = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            wanted = lines(record) + random.randint(1, episodes * len(expected) // 4)
            while lines(record) < wanted and program.poll() is None:
                time.sleep(random.uniform(0.0, 0.5))
            program.send_signal(signal.SIGKILL)
            program.wait()
            played = max(0, lines(record) - 1 - len(expected))
            print(f"killed {kill + 1}: {played} episodes recorded", flush=True)
        again = shmvec.evaluate(make(), Hashing(make()), episodes, seeds=0, record=record)
    print(f"{again}\n")
    for what, result in (("uninterrupted", whole), ("killed and resumed", again)):
        same = numbers(result) == expected
        print(f"{what}: {'the same numbers as' if same else 'OTHER NUMBERS THAN'} one by one")


def main() -> None:
    """Runs one piece."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("piece", choices=["tasks", *SUITES])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--memory", default="2 GiB")
    parser.add_argument("--record", help="only play, and record")
    options = parser.parse_args()
    if options.record is not None:
        make, episodes = SUITES[options.piece]
        shmvec.evaluate(make(), Hashing(make()), episodes, seeds=0, record=options.record)
        return
    print(described(machine()))
    if options.piece == "tasks":
        slow_tasks(options.scale, options.episodes, options.memory)
    else:
        survives(options.piece)


if __name__ == "__main__":
    main()
