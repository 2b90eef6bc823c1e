"""Rows of PettingZoo agents as Stable-Baselines3's ``VecEnv``: PPO and the like learn on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    from stable_baselines3.common.vec_env import VecEnv
    from stable_baselines3.common.vec_env.base_vec_env import (
        VecEnvIndices,
        VecEnvObs,
        VecEnvStepReturn,
    )
except ImportError as error:
    raise ImportError(
        "rows as a VecEnv need Stable-Baselines3, which cannot be imported "
        f"({error}): pip install stable-baselines3"
    ) from error

from shmvec.adapters.pettingzoo import AgentRows
from shmvec.exchange import AutoresetMode

__all__ = ["AgentVecEnv"]


class AgentVecEnv(VecEnv):
    """:class:`shmvec.adapters.pettingzoo.AgentRows`, with SB3's four values and lists of infos.

    What is asked of a row is asked of its env: ``get_attr``, ``env_method`` and ``set_attr`` reach
    each env once, however many of its rows are named.

    Attributes:
        rows: The rows, for ``alive`` and for ``rows.parallel``, the envs.
    """

    def __init__(self, rows: AgentRows) -> None:
        """See :meth:`shmvec.adapters.pettingzoo.ParallelVectorEnv.as_rows`.

        Raises:
            ValueError: Envs are not reset in the step that ends an episode.
        """
        mode = rows.parallel.envs.autoreset_mode
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                "SB3 has envs reset in the step that ends an episode: make it "
                f'ParallelVectorEnv(..., autoreset_mode="SameStep"), not "{mode.value}"'
            )
        self.rows = rows
        self.num_envs = rows.num_envs  # the base class asks the envs for attributes
        super().__init__(rows.num_envs, rows.single_observation_space, rows.single_action_space)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seeds the next reset: env ``e`` with ``seed + e``, as the rows of Gymnasium's are.

        Returns:
            For each row the seed of its env.
        """
        first: Any = super().seed(seed)[0]
        count = self.rows.parallel.num_agents
        self._seeds = [first + row // count for row in range(self.num_envs)]
        return self._seeds

    def reset(self) -> VecEnvObs:
        """Resets all envs, with the seeds that ``seed`` has set, and the options of first rows."""
        seeds = self._seeds if any(seed is not None for seed in self._seeds) else None
        options: Any = self._options if any(self._options) else None
        self.rows.waiting = False
        results = self.rows.begin(seed=seeds, options=options)
        self.reset_infos = results.infos
        self._reset_seeds()
        self._reset_options()
        return results.observations

    def step_async(self, actions: Any) -> None:
        """Starts to step all rows; arguments and exceptions as of ``AgentRows.step``."""
        self.rows.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Waits for the step that ``step_async`` began.

        Returns:
            Observations; rewards, float32; dones; infos, a list of dicts, each as its env returned
            it for the agent, with ``TimeLimit.truncated`` and, if done, ``terminal_observation``.
        """
        results = self.rows.take()
        dones = results.terminations | results.truncations
        infos = results.infos
        for row in dones.nonzero()[0].tolist():
            told, infos[row] = infos[row], infos[row].pop("final_info")
            infos[row]["terminal_observation"] = told.pop("final_obs")
            self.reset_infos[row] = told
        for info, terminated, done in zip(infos, results.terminations, dones, strict=True):
            info["TimeLimit.truncated"] = bool(done and not terminated)
        return results.observations, results.rewards.astype(np.float32), dones, infos

    def close(self) -> None:
        """Closes the envs and ends the workers."""
        self.rows.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The attribute of the env of each of these rows."""
        return self._asked(indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Sets an attribute of the envs of these rows."""
        envs = sorted(set(self._envs_of(indices)))
        self.rows.parallel.envs.set_attr(attr_name, [value] * len(envs), envs)

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Calls a method of the envs of these rows; what it returned, for each row."""
        return self._asked(indices, method_name, *method_args, **method_kwargs)

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        """None is: wrappers of Gymnasium's are not around envs of many agents."""
        return [False] * len(self._envs_of(indices))

    def get_images(self) -> Sequence[Any]:
        """A frame of each env, for all its agents."""
        return self.rows.render()

    def _envs_of(self, indices: VecEnvIndices) -> list[int]:
        rows = np.atleast_1d(np.arange(self.num_envs)[slice(None) if indices is None else indices])
        envs: list[int] = (rows // self.rows.parallel.num_agents).tolist()
        return envs

    def _asked(self, indices: VecEnvIndices, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        envs = self._envs_of(indices)
        each = sorted(set(envs))
        results = self.rows.parallel.envs.call_some(each, name, *args, **kwargs)
        found = dict(zip(each, results, strict=True))
        return [found[env] for env in envs]
