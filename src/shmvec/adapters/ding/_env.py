"""The env as it runs in a worker: it resets as its manager says, and reports what went wrong.

What the slabs cannot hold, and what an env raises, travels in a note: a dict, in the info, with

- ``failure``: what its step has raised;
- ``reset failed``: what its reset has raised;
- ``abnormal``: the timestep (observation, reward, done) that its info calls abnormal;
- ``reset``: of an episode that was followed by a reset in the same step: (terminated, truncated),
  the last observation, the reset's info;
- ``reward``: one that is an array.
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

from shmvec.adapters._shared import attribute
from shmvec.exchange import HostedEnv
from shmvec.faults import Failure

NOTE = "shmvec.adapters.ding"  # the key of notes in infos
IMAGES = ("rgb_array", "depth_array")
_PLAIN, _NO_DIMENSION, _ONE_DIMENSION = range(3)  # the forms of a number: an int, arrays


@dataclass(frozen=True)
class Orders:
    """How an env is reset, now and automatically: the options of its reset.

    Attributes:
        kwargs: Keyword arguments of its ``reset``.
        dynamic_seed: Whether every reset is seeded anew, by numbers that the seed determines.
        replay_path: Where it saves replays.
        replay_name: What their names begin with.
    """

    kwargs: dict[str, Any] | None
    dynamic_seed: bool | None
    replay_path: str | None
    replay_name: str


class ManagedEnv(HostedEnv):
    """An env as the core steps it."""

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
            observation_space: The env's own.
            action_space: The env's own.
            index: Its index.
            reset_inplace: Whether the step that ends an episode also resets.
            in_messages: Whether observations are in no slab, which would check them.
            raises: Exceptions in a step that are raised, for the Exchange to handle.
        """
        action_space = of_gymnasium(action_space)
        self._numbers = None
        # Gymnasium's want numbers, DI-engine's own what its policies give.
        if isinstance(action_space, gym.spaces.Discrete) and not isinstance(env, gym.Env):
            self._numbers = action_space = Numbers(action_space)
        super().__init__(env, of_gymnasium(observation_space), action_space)
        self._index = index
        self._inplace = reset_inplace
        self._in_messages = in_messages
        self._raises = raises
        self._orders: Orders | None = None
        self._given: int | None = None  # the seed of the next reset, until one has succeeded
        self._seed: int | None = None  # what that is seeded with,
        self._seeds: Iterator[int | None] = itertools.repeat(None)  # and the resets after it
        self._recording: str | None = None

    # ---- what the core calls -----------------------------------------------------------------

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Resets as the last orders say: ``options`` are new ones.

        Without orders, in a process that takes another's place, it does nothing: the manager, which
        counts attempts, asks again.
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
        """Steps; takes results of four or five values."""
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
        else:  # DI-engine's own, and Gym's of old
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
            # Copies: an env may use its arrays again in reset().
            last, info = deepcopy((observation, info))
            ended = bool(terminated), bool(truncated)
            observation, following = self.reset()
            if NOTE in following:
                observation, note = last, {**note, **following[NOTE]}
            else:  # to the core it goes on: the next step is one like all others
                note["reset"] = ended, last, following
                terminated = truncated = False
        if note:
            info = {**info, NOTE: note}
        return observation, reward, terminated, truncated, info

    def get_wrapper_attr(self, name: str) -> Any:
        """What a manager calls in a worker."""
        if name in ("read_attribute", "call_method", "picture"):
            return getattr(self, name)
        return attribute(self.env, name)

    def close(self) -> None:
        """Closes the env."""
        if hasattr(self.env, "close"):
            self.env.close()

    # ---- what a manager calls ----------------------------------------------------------------

    def read_attribute(self, name: str) -> tuple[bool, Any]:
        """Whether an attribute is a method, and if not, its value."""
        value = attribute(self.env, name)
        if isinstance(value, (MethodType, BuiltinMethodType)):
            return True, None
        return False, value

    def call_method(self, name: str, args: Any, kwargs: Any) -> Any:
        """Calls a method of the env."""
        return attribute(self.env, name)(*args, **kwargs)

    def picture(self, mode: str) -> Any:
        """The env's frame.

        Raises:
            ValueError: It was not made to render so.
        """
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
            own = _method(self.env, "seed")
            if own is None:
                self._seeds = _seeds(self._given, orders.dynamic_seed)
            else:  # it knows what to do with it
                own(self._given, *([] if orders.dynamic_seed is None else [orders.dynamic_seed]))
                self._seeds = itertools.repeat(None)
            self._seed = next(self._seeds)
        kwargs = dict(orders.kwargs or {})
        if self._seed is not None:
            kwargs.setdefault("seed", self._seed)
        result = self.env.reset(**kwargs)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        observation, info = result if is_pair else (result, {})  # as DI-engine's own return
        self._check(observation)
        self._given, self._seed = None, next(self._seeds)
        return observation, info

    def _check(self, observation: Any) -> None:
        """Raises unless the parent can put an observation into a batch with others."""
        space = self.observation_space
        concatenate(space, [observation], create_empty_array(space, 1))  # type: ignore[arg-type]

    def _record(self, path: str, name: str) -> None:
        """Saves replays from now on."""
        own = _method(self.env, "enable_save_replay")
        if own is not None:
            own(path)
        else:
            with warnings.catch_warnings():  # that the folder exists: envs may share it
                warnings.simplefilter("ignore")
                self.env = gym.wrappers.RecordVideo(
                    self.env, path, episode_trigger=lambda episode: True, name_prefix=name
                )
        self._recording = path

    def _failure(self, error: BaseException, operation: str) -> Failure:
        return Failure.of(error, self._index, -1, operation)

    @functools.cached_property
    def _nothing(self) -> Any:
        """What lies in the slab where an env has given no observation; no caller sees it."""
        space = deepcopy(self.observation_space)
        space.seed(0)
        return space.sample()


def _seeds(seed: int, dynamic: bool | None) -> Iterator[int | None]:
    """The seeds of resets, one after the other; None: the env's generator goes on."""
    if dynamic:  # as DI-engine's envs draw theirs, but from a generator of their own
        draws = np.random.RandomState(seed % 2**32)
        while True:
            yield seed + 100 * int(draws.randint(1, 1000))
    yield seed
    yield from itertools.repeat(None)


def _method(env: Any, name: str) -> Any:
    """A method of an env or of one of its wrappers, or None."""
    try:
        found = attribute(env, name)
    except AttributeError:
        return None
    return found if callable(found) else None


# ---- spaces ------------------------------------------------------------------------------------


def of_gymnasium(space: Any) -> Any:
    """A space as Gymnasium's, if it is one of gym's; any other as it is."""
    if isinstance(space, gym.Space):
        return space
    for base in type(space).__mro__:
        if base.__module__.partition(".")[0] == "gym" and base.__name__ in _SPACES_OF_GYM:
            return _SPACES_OF_GYM[base.__name__](space)
    return space  # the core says what is wrong


_SPACES_OF_GYM: dict[str, Callable[[Any], Any]] = {
    "Box": lambda space: spaces.Box(space.low, space.high, space.shape, space.dtype),
    "Discrete": lambda space: spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0))),
    "MultiDiscrete": lambda space: spaces.MultiDiscrete(space.nvec, space.dtype),
    "MultiBinary": lambda space: spaces.MultiBinary(space.n),
    "Tuple": lambda space: spaces.Tuple([of_gymnasium(each) for each in space.spaces]),
    "Dict": lambda space: spaces.Dict({k: of_gymnasium(v) for k, v in space.spaces.items()}),
}


class Numbers(spaces.Box):
    """Space of rows in which actions of a Discrete space travel: a number, and the form it had.

    DI-engine's policies give arrays of one dimension or of none, and some of its envs take nothing
    but arrays.

    Attributes:
        space: The Discrete space.
    """

    def __init__(self, space: spaces.Discrete) -> None:
        """Takes the space of the numbers."""
        limits = np.iinfo(np.int64)
        super().__init__(limits.min, limits.max, (2,), np.int64)
        self.space = space

    def rows(self, actions: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Actions as the core takes them.

        Raises:
            ValueError: One is no single number.
            TypeError: One is no integer.
        """
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
        """Whether the actions are of equal spaces."""
        return isinstance(other, Numbers) and self.space == other.space

    def __repr__(self) -> str:
        """As the space of the actions."""
        return repr(self.space)
