"""Evaluates LeRobot policies, which plan chunks of actions, by ``shmvec.evaluate``.

``lerobot-eval`` steps a batch until its slowest episode is over, because a policy has one queue of
planned actions for the whole batch. Here each env has its own queue and begins the next episode
when its own is over. The policy is asked for new chunks for the envs whose queue is empty.

    from lerobot.policies.act.modeling_act import ACTPolicy

    policy = ACTPolicy.from_pretrained("lerobot/act_aloha_sim_transfer_cube_human")
    chunks = Chunks(
        lambda batch: policy.predict_action_chunk(preprocess(batch)),
        num_actions=policy.config.n_action_steps,
        postprocess=postprocess,
    )
    result = shmvec.evaluate(make_env, chunks, episodes=50, seeds=1000, num_envs=10)
    print(result.success_rate, result)

``preprocess`` turns observations into the policy's input, and ``postprocess`` turns its output into
an action of the env: LeRobot's ``preprocess_observation`` and the policy's own processors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Chunks"]


class Chunks:
    """A policy for ``shmvec.evaluate`` that plans several actions at a time.

    Its ``reset`` empties the queues of envs in which episodes begin.
    """

    def __init__(
        self,
        predict: Callable[[Any], Any],
        num_actions: int,
        postprocess: Callable[[Any], Any] = np.asarray,
    ) -> None:
        """Takes a policy.

        Args:
            predict: Returns chunks ``(n, chunk, ...)`` for a batch of ``n`` observations: arrays,
                or tensors on any device.
            num_actions: How many of a chunk's actions are carried out.
            postprocess: Turns a chunk's actions ``(num_actions, ...)`` into those for the env.
        """
        self._predict = predict
        self._num_actions = num_actions
        self._postprocess = postprocess
        self._queues: dict[int, deque[Any]] = {}  # by env

    def reset(self, env_ids: npt.NDArray[np.int64]) -> None:
        """Drops the actions that were planned for these envs."""
        for env in env_ids.tolist():
            self._queues.pop(env, None)

    def __call__(self, observations: Any, env_ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Returns the next action of each env."""
        envs = env_ids.tolist()
        rows = [row for row, env in enumerate(envs) if not self._queues.get(env)]
        if rows:
            chunks = self._predict(_select(observations, rows))
            chunks = chunks.detach().cpu() if hasattr(chunks, "detach") else chunks
            for row, chunk in zip(rows, chunks, strict=True):
                actions = np.asarray(self._postprocess(chunk[: self._num_actions]))
                self._queues[envs[row]] = deque(actions)
        return np.stack([self._queues[env].popleft() for env in envs])


def _select(observations: Any, rows: list[int]) -> Any:
    """Some rows of a batch, which may be nested dicts."""
    if isinstance(observations, dict):
        return {key: _select(part, rows) for key, part in observations.items()}
    return observations[rows]
