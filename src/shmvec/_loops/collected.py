"""What a pipeline returns: rollouts and transitions; their infos are gathered when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from shmvec._core.told import Batch
from shmvec._parent.rollout import Rollout
from shmvec.exchange import Answers
from shmvec.spaces import mapped

__all__ = ["Collected", "Infos", "Said", "Transitions", "said_in", "with_row"]

Said = dict[int, list[dict[str, Any]]]  # what was said, by row


def said_in(answers: Answers) -> Said:
    """What envs have said, and what is told of their workers; nothing of those with nothing."""
    said: Said = {}
    if any(answers.infos):
        each = zip(answers.envs.tolist(), answers.infos, strict=True)
        said = {env: [info] for env, info in each if info}
    for env, told in answers.told.items():
        said.setdefault(env, []).append(told.info)
    return said


class Infos(Sequence[dict[str, Any]]):
    """Infos of several steps, each as ``ShmVectorEnv.step`` returns them.

    What nobody looks at is not made into arrays: ``infos[t]`` is gathered each time.
    """

    def __init__(self, num_rows: int, said: list[Said]) -> None:
        """Takes what was said at each step."""
        self._gatherer = Batch(num_rows)
        self._said = said
        self.gathered: dict[int, dict[str, Any]] = {}  # by step: as dicts of arrays already

    def __len__(self) -> int:
        """How many steps."""
        return len(self._said)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """A step's infos: Gymnasium's dict of arrays."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        said, infos = self._said[index], self.gathered.get(range(len(self))[index])
        if infos is not None:
            return infos
        infos = {}
        for row in sorted(said):
            for info in said[row]:
                infos = self._gatherer._add_info(infos, info, row)
        return infos


class Collected:
    """A rollout that :meth:`shmvec.Pipeline.collect` has filled; its arrays are yours to change.

    Index ``t + 1`` holds what the action at index ``t`` led to; index 0 holds the last results
    from before. The arrays are in shared memory: two rollouts alternate in it, as those of
    :meth:`shmvec.ShmVectorEnv.rollout` do, and the older one must be dropped before a third.

    Attributes:
        length: Number of steps.
        steps: The same, as soon as it is returned.
        observations: ``(length + 1, num_envs, ...)``, nested as the observation space is.
        rewards: float64 ``(length + 1, num_envs)``. That of ``actions[t]`` is ``rewards[t + 1]``.
        terminations: bool ``(length + 1, num_envs)``.
        truncations: bool ``(length + 1, num_envs)``. In autoreset mode NEXT_STEP, an env that has
            ended at ``t`` is reset by the next step, which ignores ``actions[t]``.
        actions: ``(length, num_envs, ...)``, in the dtype of the action space.
        extras: What the policy has returned besides actions, by name: ``(length, num_envs, ...)``.
        infos: ``infos[t + 1]`` is what ``ShmVectorEnv.step`` returns for ``actions[t]``;
            ``infos[0]`` is empty. They are gathered when you ask for them.
    """

    def __init__(self, rollout: Rollout) -> None:
        """Takes a rollout of which no step is made."""
        self._rollout = rollout
        self.length, self.steps = rollout.length, 0
        self.observations = rollout.observations
        self.rewards: Any = rollout.rewards
        self.terminations: Any = rollout.terminations
        self.truncations: Any = rollout.truncations
        self.actions = rollout.actions
        self.extras: dict[str, Any] = {}
        self._named = False  # whether a batch has said what these are
        self.num_envs = rollout.rewards.shape[1]
        self.said: list[Said] = [{} for _ in range(self.length + 1)]
        self.infos = Infos(self.num_envs, self.said)

    def ask(
        self, part: Any, index: int, envs: Any, actions: Any, extras: Mapping[str, Any]
    ) -> None:
        """Asks some envs for a step; see :meth:`shmvec._parent.rollout.Rollout.ask`."""
        self._rollout.ask(envs, part, index, actions)
        self.keep_extras(index, part, extras)

    def meet(self, steps: int) -> None:
        """Says that all envs have made so many steps, by :meth:`ask`."""
        self._rollout.meet(steps)
        self.steps = steps

    def step(self, envs: Any, actions: Any, extras: Mapping[str, Any]) -> None:
        """Steps all envs at once, to the next index."""
        keep = partial(self.keep_extras, self.steps, slice(None), extras)
        infos = self._rollout.step(actions, meanwhile=keep)
        self.steps += 1
        self.infos.gathered[self.steps] = infos

    def keep_extras(self, index: int, part: Any, extras: Mapping[str, Any]) -> None:
        """Keeps what came with some envs' actions.

        Raises:
            ValueError: These are not the names, shapes or dtypes that came first.
        """
        if not self._named:
            self._named = True
            for key, values in extras.items():
                shape = self.length, self.num_envs, *values.shape[1:]
                on_device = hasattr(values, "new_empty")
                self.extras[key] = (
                    values.new_empty(shape) if on_device else np.empty(shape, values.dtype)
                )
        if self.extras.keys() != extras.keys():
            raise ValueError(
                f"the policy has returned extras {list(extras)}, and {list(self.extras)} before"
            )
        for key, values in extras.items():
            kept = self.extras[key]
            if values.shape[1:] != kept.shape[2:] or values.dtype != kept.dtype:
                raise ValueError(
                    f"the policy has returned {key!r} of {values.dtype} {tuple(values.shape[1:])} "
                    f"for an env, and of {kept.dtype} {tuple(kept.shape[2:])} before"
                )
            kept[index, part] = values

    def release(self) -> None:
        """Gives the memory back for another rollout, which writes over these arrays.

        Not needed if no array of this rollout is left: then the memory is free, too.
        """
        self._rollout.release()

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._rollout.released


@dataclass(slots=True, eq=False)
class Transitions:
    """Steps of some envs, one each; what iterating over a :class:`shmvec.Pipeline` yields.

    Attributes:
        observations: From which the actions were chosen, batched as the observation space says.
        actions: Of these envs.
        rewards: float64 ``(n,)``.
        next_observations: What the actions led to: of an episode that has ended, its last ones, in
            each autoreset mode.
        terminations: bool ``(n,)``.
        truncations: bool ``(n,)``.
        infos: Gymnasium's dict of arrays, gathered when it is asked for.
        env_ids: int64 ``(n,)``; -1 of rows that only fill a batch.
        extras: What the policy has returned besides actions, by name, a row for each env.
        valid: bool ``(n,)``: False of what is no transition, which only ``batch="fixed"`` keeps: a
            step that was a reset, a row that fills the batch.
    """

    observations: Any
    actions: Any
    rewards: Any
    next_observations: Any
    terminations: Any
    truncations: Any
    env_ids: npt.NDArray[np.int64]
    extras: dict[str, Any]
    valid: Any
    said: Said

    @property
    def infos(self) -> dict[str, Any]:
        """See above."""
        return Infos(len(self.env_ids), [self.said])[0]

    def __len__(self) -> int:
        """How many rows."""
        return len(self.env_ids)


def with_row(space: gym.Space[Any], batch: Any, row: int, observation: Any) -> Any:
    """A batch of which a row is another observation; changes arrays in place."""
    return mapped(space, partial(_with_row, row), batch, observation)


def _with_row(row: int, batch: Any, observation: Any) -> Any:
    if isinstance(batch, np.ndarray):
        batch[row] = observation
        return batch
    return (*batch[:row], observation, *batch[row + 1 :])
