"""The env in a worker: it is reset by its manager's rules, and its failures go into its info.

What the slabs cannot hold, and what an env raises, travels in a note: a dict, in the info, with

- ``failure``: what the env's step has raised;
- ``reset failed``: what the env's reset has raised;
- ``abnormal``: the timestep (observation, reward, done) that the env's info calls abnormal;
- ``reset``: for an episode that was followed by a reset in the same step, (terminated, truncated),
  the last observation, and the reset's info;
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

from shmvec.exchange import HostedEnv
from shmvec.faults import Failure

NOTE = "shmvec.adapters.ding"  # the key of notes in infos
IMAGES = ("rgb_array", "depth_array")
_PLAIN, _NO_DIMENSION, _ONE_DIMENSION = range(3)  # the forms of a number: an int, or an array


@dataclass(frozen=True)
class Orders:
    """How an env is reset, now and automatically; passed as the options of its reset.

    Attributes:
        kwargs: Keyword arguments of the env's ``reset``.
        dynamic_seed: Whether every reset gets a new seed, derived from the first.
        replay_path: The folder in which the env saves replays.
        replay_name: Prefix of the replays' names.
    """

    kwargs: dict[str, Any] | None
    dynamic_seed: bool | None
    replay_path: str | None
    replay_name: str


class ManagedEnv(HostedEnv):
    """An env of a manager, in the form in which the core steps it."""

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
        """Takes the env.

        Args:
            env: The env.
            observation_space: The env's observation space.
            action_space: The env's action space.
            index: The env's index.
            reset_inplace: Whether the step that ends an episode also resets.
            in_messages: Whether observations travel as messages; a slab would check them.
            raises: Types of exceptions in a step that are raised, for the Exchange to handle.
        """
        action_space = of_gymnasium(action_space)
        self._numbers = None
        # Gymnasium's envs take numbers, DI-engine's own take what its policies return.
        if isinstance(action_space, gym.spaces.Discrete) and not isinstance(env, gym.Env):
            self._numbers = action_space = Numbers(action_space)
        super().__init__(env, of_gymnasium(observation_space), action_space)
        self._index = index
        self._inplace = reset_inplace
        self._in_messages = in_messages
        self._raises = raises
        self._orders: Orders | None = None
        self._given: int | None = None  # the manager's seed, until a reset with it has succeeded
        self._seed: int | None = None  # the seed of the next reset
        self._seeds: Iterator[int | None] = itertools.repeat(None)  # the seeds of later resets
        self._recording: str | None = None

    # ---- called by the core ------------------------------------------------------------------

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Resets by the last orders; ``options`` are new ones.

        Without orders, in a process that has replaced another, it does nothing: the manager, which
        counts attempts, will ask for a reset.
        """
        self._orders = arguments.get("options") or self._orders
        if arguments.get("seed") is not None:
            self._given = arguments["seed"]
        if self._orders is None:
            return self._nothing, {}
        try:
            return self._reset(self._orders)
        except BaseException as error:
            return self._nothing, {NOTE: {"reset failed": self._failure(error, "reset")}}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps the env, whose step may return four or five values."""
        if self._numbers is not None:
            action = self._numbers.action(action)
        try:
            result = self.env.step(action)
        except BaseException as error:
            if isinstance(error, self._raises):
                raise
            failure = self._failure(error, "step")
            return self._nothing, 0.0, False, False, {NOTE: {"failure": failure}}
        if len(result) == 5:
            observation, reward, terminated, truncated, info = result
        else:  # an env of DI-engine's own, or of old Gym
            observation, reward, done, info = result
            truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
            terminated = bool(done) and not truncated
        if info.get("abnormal", False):
            timestep = observation, reward, bool(terminated) or bool(truncated)
            return self._nothing, 0.0, False, False, {**info, NOTE: {"abnormal": timestep}}
        if self._in_messages:
            self._check(observation)
        note: dict[str, Any] = {}
        if isinstance(reward, np.ndarray) and reward.ndim > 0:
            note, reward = {"reward": reward.copy()}, 0.0
        if self._inplace and (terminated or truncated):
            # Copies, because an env may reuse its arrays in reset().
            last, info = deepcopy((observation, info))
            ended = bool(terminated), bool(truncated)
            observation, following = self.reset()
            if NOTE in following:
                observation, note = last, {**note, **following[NOTE]}
            else:  # for the core the episode goes on: it must not reset the env
                note["reset"] = ended, last, following
                terminated = truncated = False
        if note:
            info = {**info, NOTE: note}
        return observation, reward, terminated, truncated, info

    def get_wrapper_attr(self, name: str) -> Any:
        """One of the methods below, which a manager calls in a worker."""
        if name in ("read_attribute", "call_method", "picture"):
            return getattr(self, name)
        return super().get_wrapper_attr(name)

    def close(self) -> None:
        """Closes the env."""
        if hasattr(self.env, "close"):
            self.env.close()

    # ---- called by a manager -----------------------------------------------------------------

    def read_attribute(self, name: str) -> tuple[bool, Any]:
        """Whether an attribute is a method, and if not, its value."""
        value = super().get_wrapper_attr(name)
        if isinstance(value, (MethodType, BuiltinMethodType)):
            return True, None
        return False, value

    def call_method(self, name: str, args: Any, kwargs: Any) -> Any:
        """Calls a method of the env."""
        return super().get_wrapper_attr(name)(*args, **kwargs)

    def picture(self, mode: str) -> Any:
        """The env's frame."""
        own = getattr(self.env, "render_mode", None)
        if own not in (mode, f"{mode}_list"):
            raise ValueError(
                f"env {self._index} cannot render {mode!r}: it was made with render_mode={own!r}; "
                f"make it with render_mode={mode!r}"
            )
        frames = self.env.render()
        return frames[-1] if own != mode and isinstance(frames, list) else frames

    # ---- resets ------------------------------------------------------------------------------

    def _reset(self, orders: Orders) -> tuple[Any, dict[str, Any]]:
        if orders.replay_path is not None and orders.replay_path != self._recording:
            self._record(orders.replay_path, orders.replay_name)
        if self._given is not None:
            own = self._method("seed")
            if own is None:
                self._seeds = _seeds(self._given, orders.dynamic_seed)
            else:  # the env's own method derives the seeds of later resets
                own(self._given, *([] if orders.dynamic_seed is None else [orders.dynamic_seed]))
                self._seeds = itertools.repeat(None)
            self._seed = next(self._seeds)
        kwargs = dict(orders.kwargs or {})
        if self._seed is not None:
            kwargs.setdefault("seed", self._seed)
        result = self.env.reset(**kwargs)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        observation, info = result if is_pair else (result, {})  # DI-engine's own have no info
        self._check(observation)
        self._given, self._seed = None, next(self._seeds)
        return observation, info

    def _check(self, observation: Any) -> None:
        """Raises unless the parent can put an observation into a batch with others."""
        space = self.observation_space
        concatenate(space, [observation], create_empty_array(space, 1))  # type: ignore[arg-type]

    def _record(self, path: str, name: str) -> None:
        """Has the env save replays from now on."""
        own = self._method("enable_save_replay")
        if own is not None:
            own(path)
        else:
            with warnings.catch_warnings():  # it warns that the folder exists, which envs may share
                warnings.simplefilter("ignore")
                self.env = gym.wrappers.RecordVideo(
                    self.env, path, episode_trigger=lambda episode: True, name_prefix=name
                )
        self._recording = path

    def _method(self, name: str) -> Any:
        """A method of the env or of one of its wrappers, or None."""
        try:
            found = super().get_wrapper_attr(name)
        except AttributeError:
            return None
        return found if callable(found) else None

    def _failure(self, error: BaseException, operation: str) -> Failure:
        return Failure.of(error, self._index, -1, operation)

    @functools.cached_property
    def _nothing(self) -> Any:
        """A placeholder for the slab where the env has no observation; no caller sees it."""
        space = deepcopy(self.observation_space)
        space.seed(0)
        return space.sample()


def _seeds(seed: int, dynamic: bool | None) -> Iterator[int | None]:
    """The seeds of successive resets; None: the env's generator goes on."""
    if dynamic:  # drawn as DI-engine's envs do, but not from NumPy's global generator
        draws = np.random.RandomState(seed % 2**32)
        while True:
            yield seed + 100 * int(draws.randint(1, 1000))
    yield seed
    yield from itertools.repeat(None)


# ---- spaces ------------------------------------------------------------------------------------


def of_gymnasium(space: Any) -> Any:
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
    "Tuple": lambda space: spaces.Tuple([of_gymnasium(each) for each in space.spaces]),
    "Dict": lambda space: spaces.Dict({k: of_gymnasium(v) for k, v in space.spaces.items()}),
}


class Numbers(spaces.Box):
    """Space of rows for actions of a Discrete space: a number, and the form that it had.

    DI-engine's policies return arrays of one dimension or of none, and some of its envs take only
    arrays.

    Attributes:
        space: The Discrete space.
    """

    def __init__(self, space: spaces.Discrete) -> None:
        """Takes the space of the numbers."""
        limits = np.iinfo(np.int64)
        super().__init__(limits.min, limits.max, (2,), np.int64)
        self.space = space

    def rows(self, actions: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Actions as the core takes them."""
        rows = np.empty((len(actions), 2), np.int64)
        for row, action in enumerate(actions):
            form = _PLAIN
            if isinstance(action, np.ndarray):
                form = _ONE_DIMENSION if action.ndim == 1 else _NO_DIMENSION
            number = np.asarray(action)
            kind = number.dtype.kind
            if number.size != 1 or number.ndim > 1 or kind not in "biu":
                error = TypeError if number.size == 1 else ValueError
                raise error(
                    f"wrong actions: {action!r} is no integer, as {self.space} needs. Nothing was "
                    "sent to any env."
                )
            rows[row] = number.item(), form
        return rows

    def action(self, row: npt.NDArray[np.int64]) -> Any:
        """The action of a row."""
        form = row[1]
        if form == _PLAIN:
            return row[0]
        return row[:1] if form == _ONE_DIMENSION else row[0:1].reshape(())

    def __eq__(self, other: object) -> bool:
        """Whether the Discrete spaces are equal."""
        return isinstance(other, Numbers) and self.space == other.space

    def __repr__(self) -> str:
        """The text of the Discrete space."""
        return repr(self.space)
