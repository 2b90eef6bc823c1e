"""Batches taken apart and put together, as their space says: a tuple may be parts, or values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec.spaces import mapped

__all__ = ["chosen", "fill", "filled", "joined_infos", "room_for", "single_info"]


def room_for(space: gym.Space[Any], piece: Any, count: int) -> Any:
    """Room for ``count`` values as in a piece: arrays ``(count, ...)``, or lists, nested."""

    def room(values: Any) -> Any:
        if isinstance(values, np.ndarray):
            return np.empty((count, *values.shape[1:]), values.dtype)
        return [None] * count

    return mapped(space, room, piece)


def fill(space: gym.Space[Any], room: Any, where: Any, piece: Any) -> None:
    """Puts a piece into its place: the indices ``where`` of the batch, in this order."""

    def put(target: Any, values: Any) -> None:
        if isinstance(target, np.ndarray):
            target[where] = values
        else:
            for index, value in zip(where.tolist(), values, strict=True):
                target[index] = value

    mapped(space, put, room, piece)


def filled(space: gym.Space[Any], room: Any) -> Any:
    """The batch that a room has become: as Gymnasium makes one, with tuples for its lists."""
    return mapped(space, lambda values: tuple(values) if isinstance(values, list) else values, room)


def chosen(space: gym.Space[Any], values: Any, which: Any) -> Any:
    """Some of a batch, of indices that grow or are all the same."""
    first, last = which[0], which[-1]

    def of_part(part: Any) -> Any:
        if isinstance(part, np.ndarray):  # a view will often do
            return part[first : last + 1] if len(which) == last + 1 - first else part[which]
        return tuple(part[index] for index in which.tolist())

    return mapped(space, of_part, values)


def joined_infos(pieces: Sequence[tuple[dict[str, Any], Any]], count: int) -> dict[str, Any]:
    """Infos of a batch, from those of its pieces and their places; later ones go over earlier."""
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for infos, _ in pieces for key in infos):
        having = [(infos[key], where) for infos, where in pieces if key in infos]
        if all(isinstance(value, dict) for value, _ in having):
            joined[key] = joined_infos(having, count)
            continue
        arrays = [(np.asarray(value), where) for value, where in having]
        joined[key] = room = _empty([array for array, _ in arrays], count)
        for array, where in arrays:
            room[where] = array
    return joined


def _empty(arrays: Sequence[Any], count: int) -> Any:
    """Zeros, or Nones, as Gymnasium has them for envs that say nothing."""
    shapes = {array.shape[1:] for array in arrays}
    dtypes = {array.dtype for array in arrays}
    dtype: Any = dtypes.pop()
    for other in dtypes:
        numeric = dtype.kind in "biufc" and other.kind in "biufc"
        dtype = np.result_type(dtype, other) if numeric else np.dtype(object)
    if len(shapes) > 1 or dtype.kind == "O":
        return np.full((count, *(shapes.pop() if len(shapes) == 1 else ())), None, object)
    return np.zeros((count, *shapes.pop()), dtype)


def single_info(infos: dict[str, Any]) -> dict[str, Any]:
    """The info of the first env, of infos as Gymnasium gathers them."""
    return {
        key: single_info(value) if isinstance(value, dict) else value[0]
        for key, value in infos.items()
        if not (key.startswith("_") and key[1:] in infos)
    }
