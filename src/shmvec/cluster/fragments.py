"""Fragments of trajectories, and the runner on a node that makes them."""

from __future__ import annotations

import os
import pickle
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import numpy.typing as npt

from shmvec.exchange import Autoreset, AutoresetMode
from shmvec.pipeline import Pipeline
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Fragment", "Runner", "RunnerReport", "pickle_object", "share_cores", "unpickle"]

_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Fragment:
    """``T`` consecutive steps of ``N`` envs; its arrays are read-only.

    As in a rollout, index ``t + 1`` holds the results of ``actions[t]``, and index 0 the last
    results before. Fragments of a runner follow each other: the first index of one has the same
    content as the last index of its predecessor.

    Attributes:
        observations: ``(T + 1, N, ...)``, nested as the observation space is.
        actions: ``(T, N, ...)``, in the dtype of the action space.
        rewards: float64 ``(T + 1, N)``; with a ``reward_space`` of shape ``(k,)``, in its dtype,
            ``(T + 1, N, k)``.
        terminations: bool ``(T + 1, N)``.
        truncations: bool ``(T + 1, N)``.
        infos: ``T`` dicts, as ``step`` returned them: ``infos[t]`` came with index ``t + 1``.
        extras: The policy's arrays besides actions, ``(T, N, ...)`` each.
        runner: The number of the runner that has made it. No two runners have the same number.
        index: Number of fragments that this runner had made before.
        seed: Seed of the runner's only reset: env ``i`` was reset with ``seed + i``.
        version: The version of the weights that it was made with, as ``set_weights`` returned it;
            0: the weights that ``make_policy`` gave the policy.
        steps: Number of env steps in it, without resets.
        seconds: Seconds that it took to make it.
        autoreset_mode: The autoreset mode of the envs.
    """

    observations: Any
    actions: Any
    rewards: npt.NDArray[Any]
    terminations: _Flags
    truncations: _Flags
    infos: list[dict[str, Any]]
    extras: dict[str, npt.NDArray[Any]]
    runner: int
    index: int
    seed: int
    version: int
    steps: int
    seconds: float
    autoreset_mode: AutoresetMode

    @property
    def valid(self) -> _Flags:
        """Which steps are transitions, bool ``(T, N)``; the others are resets."""
        autoreset = Autoreset.of(self.autoreset_mode)
        return autoreset.transitions(self.terminations, self.truncations)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, without infos."""
        return sum(_nbytes(getattr(self, field.name)) for field in fields(self))


def _nbytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_nbytes, value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, tuple) else 0


@dataclass(frozen=True)
class RunnerReport:
    """A runner's description of its envs and its policy."""

    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    takes_weights: bool


def pickle_object(name: str, value: Any) -> bytes:
    """Pickles a user's object, such as a function, for other nodes.

    Raises:
        TypeError: The object cannot be pickled.
    """
    try:
        content: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{name} cannot be pickled, and so cannot be sent to other nodes: {error}. Make such "
            "objects inside the function, or import them there"
        ) from error
    return content


def unpickle(name: str, content: bytes) -> Any:
    """Unpickles an object of ``pickle_object`` on a node.

    Raises:
        RuntimeError: It cannot be unpickled on this node.
    """
    try:
        return pickle.loads(content)
    except Exception as error:
        raise RuntimeError(
            f"{name} cannot be unpickled here ({type(error).__name__}: {error}): install the "
            "modules that it needs on every node, or let Ray's runtime_env send them"
        ) from error


def share_cores(share: int, count: int, nodes: Path = Path("/sys/devices/system/node")) -> set[int]:
    """The cores of a share of this machine, of one NUMA node if they fit.

    Args:
        share: Index of the share.
        count: Number of cores of each share.
        nodes: The folder in which the system lists NUMA nodes.

    Raises:
        ValueError: There are not so many cores.
    """
    usable = os.sched_getaffinity(0)
    shares: list[list[int]] = []
    over: list[int] = []
    for cores in _numa_nodes(nodes) or [usable]:
        mine = sorted(cores & usable)
        while len(mine) >= count:
            shares.append(mine[:count])
            del mine[:count]
        over += mine
    shares += [over[i : i + count] for i in range(0, len(over), count)]
    if share >= len(shares) or len(shares[share]) < count:
        raise ValueError(
            f"pin_runners: there are no {count} cores for share {share} of this node, which has "
            f"{len(usable)} usable ones"
        )
    return set(shares[share])


def _numa_nodes(folder: Path) -> list[set[int]]:
    nodes = []
    for path in sorted(folder.glob("node[0-9]*/cpulist")):
        cores: set[int] = set()
        for part in filter(None, path.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
        nodes.append(cores)
    return nodes


class Runner:
    """Envs and a policy on a node, which make one fragment after the other."""

    def __init__(
        self,
        make_envs: bytes,
        make_policy: bytes,
        length: int,
        number: int,
        seed: int,
        share: tuple[int, int] | None = None,
    ) -> None:
        """Makes envs and policy, and resets the envs.

        Args:
            make_envs: A pickled function that returns the envs.
            make_policy: A pickled function that takes a seed and returns the policy.
            length: Steps of a fragment.
            number: The runner's number.
            seed: The seed of the first env, and of the policy.
            share: Index of the runner's share of the node's cores, and the number of cores of each
                share: the runner is bound to these. None: it is not bound.

        Raises:
            TypeError: A function returns no ShmVectorEnv, or no policy; extras are no arrays.
            ValueError: The autoreset mode is DISABLED.
            Exception: A function, or unpickling it, has raised it.
        """
        if share is not None:
            os.sched_setaffinity(0, share_cores(*share))
        makers = unpickle("make_envs", make_envs), unpickle("make_policy", make_policy)
        self._length, self._number, self._seed = length, number, seed
        self._version = self._index = 0
        envs = makers[0]()
        if not isinstance(envs, ShmVectorEnv):
            if callable(getattr(envs, "close", None)):
                envs.close()
            raise TypeError(f"make_envs() must return a ShmVectorEnv, and returned {envs!r}")
        self._envs = envs
        try:
            policy = makers[1](seed)
            if not callable(policy):
                raise TypeError(
                    "make_policy(seed) must return a policy, policy(observations, env_ids), and "
                    f"returned {policy!r}"
                )
            self._policy = policy
            # In lockstep the policy's batches do not depend on timing.
            self._pipeline = Pipeline(envs, policy, groups=1)
            self._pipeline.reset(seed=[seed + env for env in range(envs.num_envs)])
        except BaseException:
            envs.close()
            raise

    def report(self) -> RunnerReport:
        """Describes the envs to the learner."""
        envs = self._envs
        return RunnerReport(
            (envs.single_observation_space, envs.single_action_space),
            callable(getattr(self._policy, "set_weights", None)),
        )

    def collect(self, version: int, weights: Any = None) -> Fragment:
        """Makes a fragment.

        Args:
            version: The version of the weights to use.
            weights: The weights, if the last fragment was made with others.

        Returns:
            The fragment. Its arrays are shared memory, which the fragment after the next one
            overwrites.

        Raises:
            Exception: An env or the policy has raised it.
        """
        begin = time.perf_counter()
        index, self._index = self._index, self._index + 1  # an interrupted call leaves a gap
        if version != self._version:
            self._policy.set_weights(weights)
            self._version = version
        rollout, mode = self._pipeline.collect(self._length), self._envs.autoreset_mode
        return Fragment(
            rollout.observations,
            rollout.actions,
            rollout.rewards,
            rollout.terminations,
            rollout.truncations,
            rollout.infos[1:],
            rollout.extras,
            runner=self._number,
            index=index,
            seed=self._seed,
            version=self._version,
            steps=int(np.count_nonzero(rollout.valid)),
            seconds=time.perf_counter() - begin,
            autoreset_mode=mode,
        )

    def close(self) -> None:
        """Closes the envs."""
        self._envs.close()
