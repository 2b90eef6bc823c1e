"""``ManagedEnv``: an env in a worker, with its manager's rules; failures go into its info.

Exceptions of the env, and results that do not fit into the slabs, travel in a note. This is a dict
in the info, with

- ``failure``: the exception of the env's step;
- ``reset failed``: the exception of the env's reset;
- ``abnormal``: the timestep (observation, reward, done), if the env's info calls it abnormal;
- ``reset``: if the same step has reset the env, (terminated, truncated), the last observation, and
  the reset's info;
- ``reward``: a reward that is an array.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import BuiltinMethodType, MethodType
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from shmvec.adapters._shared import AskedEnv
from shmvec.faults import Failure

NOTE_KEY = "shmvec.adapters.ding"  # the key of notes in infos


@dataclass(frozen=True)
class ResetSpec:
    """How an env is reset, now and automatically; passed as the options of its reset."""

    kwargs: dict[str, Any] | None  # of the env's `reset`
    dynamic_seed: bool | None  # whether every reset gets a new seed, derived from the first
    replay_path: str | None  # the folder in which the env saves replays
    replay_name: str  # prefix of the replays' names


class ManagedEnv(AskedEnv):
    """An env of a manager, as the core steps it."""

    def __init__(
        self,
        env: Any,
        observation_space: Any,
        action_space: Any,
        index: int,
        reset_inplace: bool,
        in_messages: bool,
        raises: tuple[type[Exception], ...],
    ) -> None:
        """Wraps an env."""
        action_space = to_gymnasium_space(action_space)
        self._discrete_rows = None
        # Gymnasium's envs take numbers, DI-engine's own take the arrays of its policies.
        if isinstance(action_space, gym.spaces.Discrete) and not isinstance(env, gym.Env):
            self._discrete_rows = action_space = DiscreteRows(action_space)
        super().__init__(env, to_gymnasium_space(observation_space), action_space)
        self.reward_space = None  # rewards that are arrays travel in infos
        self._index = index
        self._reset_inplace = reset_inplace
        self._in_messages = in_messages  # observations are messages, which are not checked
        self._raises = raises  # types of exceptions of a step that the Exchange handles
        self._reset_spec: ResetSpec | None = None
        # The manager's seed, or that of a new process, until a reset with it has succeeded.
        self._unused_seed: int | None = None
        self._seed: int | None = None  # the seed of the next reset
        self._seeds: Iterator[int | None] = itertools.repeat(None)  # the seeds of later resets
        self._recording_path: str | None = None

    # ---- called by the core ------------------------------------------------------------------

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Resets by the last spec; ``options`` is a new one.

        Without a spec, in a process that has replaced another, it does nothing, because the
        manager, which counts attempts, will ask for a reset.
        """
        self._reset_spec = arguments.get("options") or self._reset_spec
        if arguments.get("seed") is not None:
            self._unused_seed = arguments["seed"]
        if self._reset_spec is None:
            return self._placeholder, {}
        try:
            return self._reset(self._reset_spec)
        except BaseException as error:
            return self._placeholder, {NOTE_KEY: {"reset failed": self._failure(error, "reset")}}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps the env; its step may return four or five values."""
        if self._discrete_rows is not None:
            action = self._discrete_rows.action(action)
        try:
            result = self.env.step(action)
        except BaseException as error:
            if isinstance(error, self._raises):
                raise
            failure = self._failure(error, "step")
            return self._placeholder, 0.0, False, False, {NOTE_KEY: {"failure": failure}}
        if len(result) == 5:
            observation, reward, terminated, truncated, info = result
        else:  # an env of DI-engine's own, or of old Gym
            observation, reward, done, info = result
            truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
            terminated = bool(done) and not truncated
        if info.get("abnormal", False):
            timestep = observation, reward, bool(terminated) or bool(truncated)
            return self._placeholder, 0.0, False, False, {**info, NOTE_KEY: {"abnormal": timestep}}
        if self._in_messages:
            self._check(observation)
        note: dict[str, Any] = {}
        if isinstance(reward, np.ndarray) and reward.ndim > 0:
            note, reward = {"reward": reward.copy()}, 0.0
        if self._reset_inplace and (terminated or truncated):
            # These are copied, because an env may reuse its arrays in reset().
            last, info = deepcopy((observation, info))
            ended = bool(terminated), bool(truncated)
            observation, following = self.reset()
            if NOTE_KEY in following:
                observation, note = last, {**note, **following[NOTE_KEY]}
            else:  # for the core the episode continues, so that it does not reset the env
                note["reset"] = ended, last, following
                terminated = truncated = False
        if note:
            info = {**info, NOTE_KEY: note}
        return observation, reward, terminated, truncated, info

    # ---- called by a manager -----------------------------------------------------------------

    def shmvec_read(self, name: str) -> tuple[bool, Any]:
        """Whether an attribute is a method, and if not, its value."""
        value = self.shmvec_get_attr(name)
        if isinstance(value, (MethodType, BuiltinMethodType)):
            return True, None
        return False, value

    def shmvec_render(self) -> Any:
        """The env's frame."""
        render_mode = getattr(self.env, "render_mode", None)
        if render_mode not in ("rgb_array", "rgb_array_list"):
            raise ValueError(
                f"env {self._index} cannot render 'rgb_array': it was made with "
                f"render_mode={render_mode!r}; make it with render_mode='rgb_array'"
            )
        frames = self.env.render()
        return frames[-1] if isinstance(frames, list) else frames

    # ---- resets ------------------------------------------------------------------------------

    def _reset(self, spec: ResetSpec) -> tuple[Any, dict[str, Any]]:
        if spec.replay_path is not None and spec.replay_path != self._recording_path:
            self._start_recording(spec.replay_path, spec.replay_name)
        if self._unused_seed is not None:
            seed_env = self._find_method("seed")
            if seed_env is None:
                self._seeds = _seeds(self._unused_seed, spec.dynamic_seed)
            else:  # the env's own method derives the seeds of later resets
                dynamic_seed = [] if spec.dynamic_seed is None else [spec.dynamic_seed]
                seed_env(self._unused_seed, *dynamic_seed)
                self._seeds = itertools.repeat(None)
            self._seed = next(self._seeds)
        kwargs = dict(spec.kwargs or {})
        if self._seed is not None:
            kwargs.setdefault("seed", self._seed)
        result = self.env.reset(**kwargs)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        observation, info = result if is_pair else (result, {})  # DI-engine's own have no info
        self._check(observation)
        self._unused_seed, self._seed = None, next(self._seeds)
        return observation, info

    def _check(self, observation: Any) -> None:
        """Raises unless an observation can be put into a batch with others."""
        space = self.observation_space
        concatenate(space, [observation], create_empty_array(space, 1))  # type: ignore[arg-type]

    def _start_recording(self, path: str, name: str) -> None:
        """Makes the env save replays from now on."""
        enable = self._find_method("enable_save_replay")
        if enable is not None:
            enable(path)
        else:
            with warnings.catch_warnings():  # it warns if the folder exists, but envs may share it
                warnings.simplefilter("ignore")
                self.env = gym.wrappers.RecordVideo(
                    self.env, path, episode_trigger=lambda episode: True, name_prefix=name
                )
        self._recording_path = path

    def _find_method(self, name: str) -> Any:
        """A method of the env or of one of its wrappers, or None."""
        try:
            method = self.shmvec_get_attr(name)
        except AttributeError:
            return None
        return method if callable(method) else None

    def _failure(self, error: BaseException, operation: str) -> Failure:
        return Failure.of(error, self._index, -1, operation)

    @functools.cached_property
    def _placeholder(self) -> Any:
        """A value for the slab when the env has no observation; no caller sees it."""
        space = deepcopy(self.observation_space)
        space.seed(0)
        return space.sample()


def _seeds(seed: int, dynamic: bool | None) -> Iterator[int | None]:
    """The seeds of successive resets; None: the env's generator continues."""
    if dynamic:  # as DI-engine's envs draw them, but not from NumPy's global generator
        draws = np.random.RandomState(seed % 2**32)
        while True:
            yield seed + 100 * int(draws.randint(1, 1000))
    yield seed
    yield from itertools.repeat(None)


# ---- spaces ------------------------------------------------------------------------------------


def to_gymnasium_space(space: Any) -> Any:
    """A space of old Gym as Gymnasium's; any other space unchanged."""
    if isinstance(space, gym.Space):
        return space
    for base in type(space).__mro__:
        if base.__module__.partition(".")[0] == "gym" and base.__name__ in _SPACES_OF_GYM:
            return _SPACES_OF_GYM[base.__name__](space)
    return space  # the core raises an error if it is no space


_SPACES_OF_GYM: dict[str, Callable[[Any], Any]] = {
    "Box": lambda space: spaces.Box(space.low, space.high, space.shape, space.dtype),
    "Discrete": lambda space: spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0))),
    "MultiDiscrete": lambda space: spaces.MultiDiscrete(space.nvec, space.dtype),
    "MultiBinary": lambda space: spaces.MultiBinary(space.n),
    "Tuple": lambda space: spaces.Tuple([to_gymnasium_space(each) for each in space.spaces]),
    "Dict": lambda space: spaces.Dict({k: to_gymnasium_space(v) for k, v in space.spaces.items()}),
}


class DiscreteRows(spaces.Box):
    """Space of rows for actions of a Discrete space: a number, and the dimensions of its array.

    These are -1 if it is no array. DI-engine's policies return arrays of one or no dimension, and
    some of its envs take only arrays.

    Attributes:
        space: The Discrete space.
    """

    def __init__(self, space: spaces.Discrete) -> None:
        """Makes the space of rows for actions of ``space``."""
        limits = np.iinfo(np.int64)
        super().__init__(limits.min, limits.max, (2,), np.int64)
        self.space = space

    def rows(self, actions: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Rows for actions."""
        rows = np.empty((len(actions), 2), np.int64)
        for row, action in enumerate(actions):
            number = np.asarray(action)
            if number.size != 1 or number.ndim > 1 or number.dtype.kind not in "biu":
                error = TypeError if number.size == 1 else ValueError
                raise error(
                    f"wrong actions: {action!r} is no integer, as {self.space} needs. Nothing was "
                    "sent to any env."
                )
            rows[row] = number.item(), action.ndim if isinstance(action, np.ndarray) else -1
        return rows

    def action(self, row: npt.NDArray[np.int64]) -> Any:
        """The action of a row."""
        return row[0] if row[1] < 0 else row[:1].reshape((1,) * int(row[1]))

    def __eq__(self, other: object) -> bool:
        """Whether the Discrete spaces are equal."""
        return isinstance(other, DiscreteRows) and self.space == other.space

    def __repr__(self) -> str:
        """The text of the Discrete space."""
        return repr(self.space)
