"""A rollout of LeRobot's on top of ``shmvec.evaluate``: policies that plan chunks of actions.

``lerobot-eval`` steps a batch until its slowest episode is over, since a policy's queue of planned
actions is one for the whole batch. Here each env has a queue of its own, so that one whose episode
is over begins the next at once: the policy is asked for new chunks for those whose queue is empty.

    from lerobot.policies.act.modeling_act import ACTPolicy

    policy = ACTPolicy.from_pretrained("lerobot/act_aloha_sim_transfer_cube_human")
    chunks = Chunks(
        lambda batch: policy.predict_action_chunk(preprocess(batch)),
        num_actions=policy.config.n_action_steps,
        postprocess=postprocess,
    )
    result = shmvec.evaluate(make_env, chunks, episodes=50, seeds=1000, num_envs=10)
    print(result.success_rate, result)

``preprocess`` makes of observations what the policy takes, ``postprocess`` of an action what the
env takes: LeRobot's ``preprocess_observation`` and the processors that belong to a policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Chunks"]


class Chunks:
    """A policy for ``shmvec.evaluate`` that asks for several actions at a time.

    It has ``reset``, which empties the queues of envs in which episodes begin.
    """

    def __init__(
        self,
        predict: Callable[[Any], Any],
        num_actions: int,
        postprocess: Callable[[Any], Any] = np.asarray,
    ) -> None:
        """Takes a policy.

        Args:
            predict: Makes chunks ``(n, chunk, ...)`` of a batch of ``n`` observations: arrays, or
                tensors of any device.
            num_actions: How many of a chunk's actions are carried out.
            postprocess: Makes of a chunk's actions ``(num_actions, ...)`` those for the env.
        """
        self._predict = predict
        self._num_actions = num_actions
        self._postprocess = postprocess
        self._planned: dict[int, deque[Any]] = {}  # by env

    def reset(self, env_ids: npt.NDArray[np.int64]) -> None:
        """What was planned for these envs is void."""
        for env in env_ids.tolist():
            self._planned.pop(env, None)

    def __call__(self, observations: Any, env_ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The next action of each env."""
        envs = env_ids.tolist()
        rows = [row for row, env in enumerate(envs) if not self._planned.get(env)]
        if rows:
            chunks = self._predict(_of(observations, rows))
            chunks = chunks.detach().cpu() if hasattr(chunks, "detach") else chunks
            for row, chunk in zip(rows, chunks, strict=True):
                actions = np.asarray(self._postprocess(chunk[: self._num_actions]))
                self._planned[envs[row]] = deque(actions)
        return np.stack([self._planned[env].popleft() for env in envs])


def _of(observations: Any, rows: list[int]) -> Any:
    """Some rows of a batch, of nested dicts, too."""
    if isinstance(observations, dict):
        return {key: _of(part, rows) for key, part in observations.items()}
    return observations[rows]
