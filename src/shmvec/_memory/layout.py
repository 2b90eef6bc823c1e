"""Layout of the slabs: which array lies where in the segment, with which dtype and shape.

The parent makes the layout from the spaces and sends it to the workers, so that both sides agree
even if equal spaces list their keys in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import batch_space, create_shared_memory

from shmvec._core import (
    ACTION_ITEMSIZE,
    TEXT_HEAD,
    ActionCodec,
    ArrayCodec,
    Blocks,
    Codec,
    DictCodec,
    MessageCodec,
    OtherShapeError,
    Results,
    Seeds,
    Segment,
    TextCodec,
    TupleCodec,
)

__all__ = [
    "ActionRows",
    "Layout",
    "Place",
    "Slabs",
    "check_shared_memory",
    "has_fixed_size",
    "misfit_error",
    "total_nbytes",
    "sequential_placer",
    "memory_placer",
    "find_unshareable_part",
]


_ALIGNMENT = 128  # a cache line and its neighbour, as in csrc/platform.h
_ASSUMED_VALUE_BYTES = 8192  # assumed for a value of a space without a fixed size
_ASSUMED_MESSAGE_BYTES = 256  # assumed for a message, besides its value

# A function that takes an array's shape and dtype, and returns the array (or only adds up sizes).
Place = Callable[[tuple[int, ...], npt.DTypeLike], Any]


@dataclass(frozen=True)
class Slabs:
    """The arrays of a segment, ready to use.

    Attributes:
        results: Frames of results: observations, rewards (float64, or of their space's dtype) and
            flags (bool).
        actions: The codec of the actions.
        seeds: The seeds of resets that are asked for.
        next_seeds: The seeds of the next automatic resets.
        finals: The codec of the last observations of episodes; None unless resets overwrite them.
        blocks: Blocks to which observations are written as well; None: there are none.
    """

    results: Results
    actions: Codec
    seeds: Seeds
    next_seeds: Seeds
    finals: Codec | None
    blocks: Blocks | None


class ActionRows:
    """Splits a batch of actions of some envs, and refuses what the core would refuse."""

    def __init__(self, space: gym.Space[Any], num_envs: int) -> None:
        """Makes room for one action of each env."""
        layout = Layout(space, space, num_envs, action_messages=not has_fixed_size(space))
        self._codec: Codec = layout._actions(np.zeros, _construct)

    def of(self, envs: npt.NDArray[np.intp], actions: Any) -> list[Any]:
        """One action for each of these envs.

        Raises:
            ValueError: The number or the shape of the actions is wrong.
            TypeError: The dtype of the actions is wrong.
        """
        try:
            self._codec.put_rows(envs, actions)
        except OtherShapeError as error:  # these go to the envs as they are, as in Gymnasium
            return list(error.actions)
        return [self._codec.get(env) for env in envs.tolist()]


@dataclass(frozen=True)
class Layout:
    """The layout of the slabs of a segment.

    Attributes:
        observation_space: Observation space of one env.
        action_space: Action space of one env.
        num_envs: Number of envs, the first dimension of every array.
        observation_messages: Whether observations travel as messages, not in slabs.
        action_messages: Whether actions travel as messages.
        final_observations: Whether there is a slab for the last observations of episodes.
        num_frames: Number of frames of results.
        num_blocks: Number of blocks, which are lent to the user instead of copies of observations.
        reward_space: The space of one env's rewards; None: they are numbers.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    num_envs: int
    observation_messages: bool = False
    action_messages: bool = False
    final_observations: bool = False
    num_frames: int = 1
    num_blocks: int = 0
    reward_space: spaces.Box | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of slabs that the layout needs."""
        return total_nbytes(lambda place: self._slabs(place, None, _skip))

    def results_nbytes(self, num_frames: int) -> int:
        """The bytes that ``num_frames`` frames of results need."""
        return total_nbytes(lambda place: self._results(place, None, _skip, num_frames))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block for the observations of all envs."""
        return self._observations_nbytes(self.num_envs)

    @property
    def arrays_nbytes(self) -> int:
        """Bytes of the arrays in the observations of all envs, which are of fixed size."""
        leaves = _leaves(self.observation_space)
        arrays = [leaf for leaf in leaves if not isinstance(leaf, spaces.Text)]
        return self.num_envs * sum(
            math.prod(_shape(leaf)) * np.dtype(leaf.dtype).itemsize for leaf in arrays
        )

    def _observations_nbytes(self, rows: int) -> int:
        return total_nbytes(lambda place: self._observations(place, _skip, rows))

    @property
    def observation_message_bytes(self) -> int:
        """About how many bytes of messages an env's observation takes in a step."""
        if not self.observation_messages:
            return 0
        nbytes = _ASSUMED_MESSAGE_BYTES + self._value_nbytes(self.observation_space)
        return 2 * nbytes if self.final_observations else nbytes

    @property
    def action_message_bytes(self) -> int:
        """About how many bytes of messages an env's action takes."""
        if not self.action_messages:
            return 0
        return _ASSUMED_MESSAGE_BYTES + self._value_nbytes(self.action_space)

    @property
    def longest_text(self) -> int:
        """The most characters of a text in an observation or action; 0: there are no texts."""
        leaves = (*_leaves(self.observation_space), *_leaves(self.action_space))
        return max((leaf.max_length for leaf in leaves if isinstance(leaf, spaces.Text)), default=0)

    def _value_nbytes(self, space: gym.Space[Any]) -> int:
        if not has_fixed_size(space):
            return _ASSUMED_VALUE_BYTES
        return replace(self, observation_space=space)._observations_nbytes(1)

    def attach(self, segment: Segment) -> Slabs:
        """The slabs of a segment that was made with this layout's ``nbytes``."""
        slabs: Slabs = self._slabs(sequential_placer(segment.array), segment.memory, _construct)
        return slabs

    def map_results(self, memory: Any, num_frames: int) -> Results:
        """Frames of results over memory of ``results_nbytes``."""
        results: Results = self._results(memory_placer(memory), memory, _construct, num_frames)
        return results

    def _slabs(self, place: Place, memory: Any, make: Callable[..., Any]) -> Any:
        """Places every array of a segment, in the order in which they lie there."""
        n = self.num_envs
        return make(
            Slabs,
            self._results(place, memory, make, self.num_frames),
            self._actions(place, make),
            make(Seeds, place((n,), np.int64), place((n,), np.uint8)),
            make(Seeds, place((n,), np.int64), place((n,), np.uint8)),
            self._observations(place, make, n)
            if self.final_observations and not self.observation_messages
            else None,
            make(self._blocks, place((self._observations_nbytes(self.num_blocks * n),), np.uint8))
            if self.num_blocks > 0
            else None,
        )

    def _actions(self, place: Place, make: Callable[..., Any]) -> Any:
        n = self.num_envs

        def action(space: gym.Space[Any]) -> Any:
            shape = _shape(space)
            itemsize = max(ACTION_ITEMSIZE, np.dtype(space.dtype).itemsize)
            memory = place((n, math.prod(shape) * itemsize), np.uint8)
            return make(ActionCodec, memory, place((n,), np.uint8), shape, space.dtype, space)

        def batched_keys(space: spaces.Dict) -> Any:
            # Gymnasium's actions have the batched space's order of keys, which may be another.
            batched: Any = batch_space(space, 1)
            return batched.spaces

        if self.action_messages:
            return make(MessageCodec, self.action_space, n, None)
        return _build_codec(self.action_space, n, place, make, action, batched_keys)

    def _blocks(self, memory: npt.NDArray[np.uint8]) -> Blocks:
        rows = self.num_blocks * self.num_envs
        observations = self._observations(memory_placer(memory), _construct, rows)
        return Blocks(memory, observations, self.num_envs, self.num_blocks)

    def _results(self, place: Place, memory: Any, make: Callable[..., Any], num_frames: int) -> Any:
        rows, space = num_frames * self.num_envs, self.observation_space
        reward_space = self.reward_space
        return make(
            Results,
            memory,
            make(MessageCodec, space, self.num_envs, partial(first_misfit_error, space))
            if self.observation_messages
            else self._observations(place, make, rows),
            place((rows,), np.float64)
            if reward_space is None
            else place((rows, *reward_space.shape), reward_space.dtype),
            place((rows,), np.bool_),
            place((rows,), np.bool_),
            self.num_envs,
        )

    def _observations(self, place: Place, make: Callable[..., Any], rows: int) -> Any:
        def observation(space: gym.Space[Any]) -> Any:
            return make(ArrayCodec, place((rows, *_shape(space)), np.dtype(space.dtype)))

        space = self.observation_space
        return _build_codec(space, rows, place, make, observation, lambda s: s.spaces)


def _build_codec(
    space: gym.Space[Any],
    rows: int,
    place: Place,
    make: Callable[..., Any],
    leaf: Callable[[gym.Space[Any]], Any],
    keys: Callable[[spaces.Dict], Iterable[str]],
) -> Any:
    """A codec for a space of fixed size, nested as the space is."""

    # This does not call itself: that would be a cycle of references, which would keep the memory.
    def part(inner: gym.Space[Any]) -> Any:
        return _build_codec(inner, rows, place, make, leaf, keys)

    if isinstance(space, spaces.Dict):
        return make(DictCodec, {key: part(space.spaces[key]) for key in keys(space)})
    if isinstance(space, spaces.Tuple):
        return make(TupleCodec, [part(inner) for inner in space.spaces])
    if isinstance(space, spaces.Text):
        return make(TextCodec, place((rows, TEXT_HEAD + space.max_length), np.uint32))
    return leaf(space)


def _construct(kind: Callable[..., Any], *arguments: Any) -> Any:
    return kind(*arguments)


def _skip(kind: Callable[..., Any], *arguments: Any) -> None:
    """Makes nothing, because only sizes are added up."""


def total_nbytes(visit: Callable[[Place], object]) -> int:
    """The bytes of the arrays that ``visit`` places one after the other."""
    total = 0

    def place(shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        nonlocal total
        total = _aligned(total) + math.prod(shape) * np.dtype(dtype).itemsize

    visit(place)
    return _aligned(total)


def sequential_placer(
    array: Callable[[int, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]], offset: int = 0
) -> Place:
    """A function that places arrays one after the other; ``array`` makes them at offsets."""

    def place(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        nonlocal offset
        offset = _aligned(offset)
        result = array(offset, shape, dtype)
        offset += result.nbytes
        return result

    return place


def memory_placer(memory: Any, offset: int = 0) -> Place:
    """A function that makes arrays in memory, one after the other, from an offset on."""
    return sequential_placer(
        lambda offset, shape, dtype: np.ndarray(shape, dtype, memory, offset), offset
    )


class DynamicShapeError(TypeError, ValueError):
    """A space whose values have no fixed shape was to lie in shared memory.

    Gymnasium raises TypeError for these and ValueError for other spaces; code may catch either.
    """


def has_fixed_size(space: gym.Space[Any]) -> bool:
    """Whether values of the space can lie in a slab."""
    if isinstance(space, spaces.Dict):
        return all(map(has_fixed_size, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(has_fixed_size, space.spaces))
    return isinstance(
        space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Text)
    )


def _leaves(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    """The spaces without parts of which a space consists, at any depth."""
    parts: Iterable[gym.Space[Any]]
    if isinstance(space, spaces.Dict):
        parts = space.spaces.values()
    elif isinstance(space, (spaces.Tuple, spaces.OneOf)):
        parts = space.spaces
    elif isinstance(space, spaces.Sequence):
        parts = (space.feature_space,)
    else:
        yield space
        return
    for part in parts:
        yield from _leaves(part)


def check_shared_memory(space: gym.Space[Any]) -> None:
    """Raises what Gymnasium raises for an observation space under ``shared_memory=True``.

    Args:
        space: The space.

    Raises:
        ValueError: The space is of a class of the user's; for a Sequence or Graph the error is a
            TypeError too.
    """
    found = find_unshareable_part(space, "observation space")
    if found is None:
        return
    part, path = found
    advice = ""
    if isinstance(space, spaces.Dict):
        keys = [key for key, value in space.items() if find_unshareable_part(value, "") is None]
        if keys:
            advice = (
                " To do without that part, wrap each env in "
                f"gymnasium.wrappers.FilterObservation(env, {keys})."
            )
    if isinstance(part, (spaces.Graph, spaces.Sequence)):
        raise DynamicShapeError(
            f"As {part} has a dynamic shape so its not possible to make a static shared memory. "
            f"For `AsyncVectorEnv`, disable `shared_memory`. This is the {path}. For "
            "`ShmVectorEnv`, too, use `shared_memory=False`: observations then travel as messages, "
            f"which also go through shared memory.{advice}"
        )
    raise ValueError(
        "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this "
        "feature with `shared_memory=False` however this is slower. "
        f"The {path} is {part}, of a class that Gymnasium does not know.{advice}"
    ) from CustomSpaceError(
        f"Space of type `{type(part)}` doesn't have an registered `create_shared_memory` "
        f"function. Register `{type(part)}` for `create_shared_memory` to support it."
    )


def find_unshareable_part(space: gym.Space[Any], path: str) -> tuple[gym.Space[Any], str] | None:
    """The first part that cannot lie in shared memory, and its name; None if all parts can."""
    parts: Iterable[tuple[Any, gym.Space[Any]]] = ()
    if isinstance(space, spaces.Dict):
        parts = space.items()
    elif isinstance(space, (spaces.Tuple, spaces.OneOf)):
        parts = enumerate(space.spaces)
    elif (
        isinstance(space, (spaces.Graph, spaces.Sequence))
        or create_shared_memory.dispatch(type(space)) in _DEFAULT_HANDLERS
    ):
        return space, path
    results = (find_unshareable_part(part, f"{path}[{key!r}]") for key, part in parts)
    return next((result for result in results if result is not None), None)


_DEFAULT_HANDLERS = (
    create_shared_memory.dispatch(object),
    create_shared_memory.dispatch(gym.Space),
)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _shape(space: gym.Space[Any]) -> tuple[int, ...]:
    assert space.shape is not None
    return tuple(int(size) for size in space.shape)


def misfit_error(
    env: int,
    space: gym.Space[Any],
    value: Any,
    error: Exception,
    exact: bool = False,
    name: str = "observation",
) -> Exception:
    """The error for a value that does not fit its space; it names env and part of the space.

    Args:
        env: The env's index.
        space: The space, of observations or rewards of one env.
        value: What the env returned.
        error: The error of writing it. The new error has the same type, if possible.
        exact: Whether shapes must be equal, axes of length 1 included.
        name: What the value is.
    """
    what = _describe_misfit(space, value, name, exact) or f"{name}: {error}"
    kinds = (KeyError, IndexError, TypeError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), ValueError)
    return kind(f"env {env}: the {what}")


def first_misfit_error(
    space: gym.Space[Any], envs: Iterable[int], observations: Iterable[Any], error: Exception
) -> Exception:
    """The error for the first env whose observation does not fit; ``error`` if all fit."""
    for env, observation in zip(envs, observations, strict=True):
        if _describe_misfit(space, observation, "", exact=True):
            return misfit_error(env, space, observation, error, exact=True)
    return error


def _describe_misfit(space: gym.Space[Any], value: Any, path: str, exact: bool) -> str | None:
    """Why a value, or its first wrong part, does not fit its space; None if it fits."""
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(value, Mapping):
            return f"{path} is a {type(value).__name__}; its space {space} needs a mapping"
        return _part_misfit(space, space.spaces.items(), value, set(value), path, exact)
    if isinstance(space, gym.spaces.Tuple):
        if not isinstance(value, (tuple, list)):
            return f"{path} is a {type(value).__name__}; its space {space} needs a tuple"
        return _part_misfit(space, enumerate(space.spaces), value, range(len(value)), path, exact)
    if isinstance(space, gym.spaces.Text):
        if exact or (isinstance(value, str) and len(value) <= space.max_length):
            return None
        return f"{path} is {value!r}; its space {space} needs a str of that length at most"
    if value is None:
        return f"{path} is None; its space {space} needs {_needs(space)}"
    if space.shape is None or space.dtype is None:
        return None
    try:
        array = np.asarray(value)
    except Exception as error:
        kind = type(value).__name__
        return f"{path} is a {kind}, no array ({error}); its space {space} needs {_needs(space)}"
    casts = np.can_cast(array.dtype, space.dtype, "same_kind")
    if casts and (
        array.shape == space.shape
        if exact
        else [n for n in array.shape if n != 1] == [n for n in space.shape if n != 1]
    ):
        return None
    return (
        f"{path} has shape {array.shape} and dtype {array.dtype}; its space {space} needs "
        f"{_needs(space)}"
        + ("" if casts else f", to which {array.dtype} does not cast by NumPy's rule same_kind")
        + f". It is {_abbreviate(array)}"
    )


def _abbreviate(array: npt.NDArray[Any]) -> str:
    """The first and last elements of an array, in a line."""
    text = np.array2string(array, threshold=6, edgeitems=2, separator=", ")
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def _part_misfit(
    space: gym.Space[Any],
    parts: Iterable[tuple[Any, gym.Space[Any]]],
    value: Any,
    keys: Container[Any],
    path: str,
    exact: bool,
) -> str | None:
    for key, part in parts:
        if key not in keys:
            return f"{path} has no {key!r}, which its space {space} needs"
        wrong = _describe_misfit(part, value[key], f"{path}[{key!r}]", exact)
        if wrong is not None:
            return wrong
    return None


def _needs(space: gym.Space[Any]) -> str:
    if space.shape is None or space.dtype is None:
        return "a value"
    return f"shape {space.shape} and dtype {space.dtype}"
