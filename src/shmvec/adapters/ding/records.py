"""``SubprocessEnvManagerV2``: arrays in, a stacked array and a list of records out."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector.utils import create_empty_array

from shmvec.adapters.ding.manager import SyncSubprocessEnvManager

__all__ = ["Record", "SubprocessEnvManagerV2"]


@functools.cache
def _treetensor() -> Any:
    """The package, or None. With it comes torch: it is imported when trees are first made."""
    with warnings.catch_warnings():  # of its own imports
        warnings.simplefilter("ignore")
        try:
            import treetensor.numpy
        except ImportError:  # the records are then ours
            return None
    return treetensor.numpy


class Record(dict[str, Any]):
    """A dict whose entries are attributes as well, as in treetensor's."""

    def __getattr__(self, key: str) -> Any:
        """The entry of this key."""
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


class SubprocessEnvManagerV2(SyncSubprocessEnvManager):
    """The synchronous manager for DI-engine's task pipeline.

    Trees (records, observations that are dicts) are treetensor's if that is installed, and ours,
    which read the same, if it is not.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.ding import SubprocessEnvManagerV2
        >>> manager = SubprocessEnvManagerV2([lambda: gym.make("CartPole-v1")] * 3)
        >>> manager.launch()
        >>> manager.ready_obs.shape
        (3, 4)
        >>> records = manager.step([0, 1, 0])
        >>> [int(record.env_id) for record in records], float(records[0].reward)
        ([0, 1, 2], 1.0)
        >>> manager.close()
    """

    _shown: Sequence[int] | None = None  # the envs of the last ready_obs: actions are for these

    @property
    def ready_obs(self) -> Any:
        """The next observations of all envs that are ready, stacked: ``(n, ...)``.

        Waits as ``AsyncSubprocessEnvManager.ready_obs`` does; of no envs if none will be ready.
        """
        observations = [self._slots[env].observation for env in self._wait_for_ready()]
        if not observations:
            return create_empty_array(self.observation_space, 0)
        return _stacked(observations)

    def step(self, actions: Any) -> Any:
        """Steps the envs whose observations ``ready_obs`` has returned last.

        Args:
            actions: One for each of them, in the order of ``ready_obs_id``: an array or a list.

        Returns:
            A record for each env: ``obs``, ``reward``, ``done``, ``info``, ``env_id``. In infos,
            keys are made identifiers ("TimeLimit_truncated"), and texts are left out, as
            DI-engine does.

        Raises:
            ValueError: There are more or fewer actions than envs. Nothing was sent.
            Exception: As ``AsyncSubprocessEnvManager.step``.
        """
        self._open()
        if isinstance(actions, Mapping):
            raise TypeError("step() takes one action for each env that is ready, not a dict")
        ready = self.ready_env
        envs = ready if self._shown is None or not set(self._shown) <= set(ready) else self._shown
        self._shown = None
        actions = list(actions)
        if len(actions) != len(envs):
            raise ValueError(
                f"there are {len(actions)} actions for the {len(envs)} envs that are ready, "
                f"{list(envs)}. Nothing was sent to any env."
            )
        timesteps = super().step(dict(zip(envs, actions, strict=True)))
        return [
            _tree(dict(obs=obs, reward=reward, done=done, info=_readable(info), env_id=env))
            for env, (obs, reward, done, info) in timesteps.items()
        ]

    def _wait_for_ready(self) -> list[int]:
        self._shown = ready = super()._wait_for_ready()
        return list(ready)


def _tree(value: Any) -> Any:
    """A dict, and all that are in it, as trees."""
    if not isinstance(value, dict):
        return value
    tnp = _treetensor()
    return Record({k: _tree(v) for k, v in value.items()}) if tnp is None else tnp.array(value)


def _stacked(observations: Sequence[Any]) -> Any:
    first = observations[0]
    if isinstance(first, dict):
        tnp = _treetensor()
        if tnp is not None:
            return tnp.stack([_tree(observation) for observation in observations])
        return Record({key: _stacked([each[key] for each in observations]) for key in first})
    if isinstance(first, tuple):
        return tuple(_stacked(parts) for parts in zip(*observations, strict=True))
    return np.stack(observations)


def _readable(info: dict[str, Any]) -> dict[str, Any]:
    """An info as DI-engine makes it: every key an identifier, no texts."""
    return {
        ("_" + key if key[:1].isdigit() else key).replace(".", "_"): value
        for key, value in info.items()
        if not isinstance(value, str)
    }
