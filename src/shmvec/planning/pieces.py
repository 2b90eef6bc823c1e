"""Results of a batch that was stepped in rounds, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["fill", "joined_infos", "room_for"]


def room_for(piece: Any, count: int) -> Any:
    """Room for ``count`` values as in a piece: arrays ``(count, ...)``, or lists, nested."""
    if isinstance(piece, dict):
        return {key: room_for(part, count) for key, part in piece.items()}
    if isinstance(piece, np.ndarray):
        return np.empty((count, *piece.shape[1:]), piece.dtype)
    if _is_nested(piece):
        return tuple(room_for(part, count) for part in piece)
    return [None] * count


def fill(room: Any, where: Any, piece: Any) -> None:
    """Puts a piece into its place: the indices ``where`` of the batch, in this order."""
    if isinstance(piece, dict):
        for key, part in piece.items():
            fill(room[key], where, part)
    elif isinstance(piece, np.ndarray):
        room[where] = piece
    elif isinstance(room, tuple):
        for target, part in zip(room, piece, strict=True):
            fill(target, where, part)
    else:
        for index, value in zip(where.tolist(), piece, strict=True):
            room[index] = value


def _is_nested(piece: Any) -> bool:
    """Whether it is a tuple of batches, as of a Tuple space, and not one of values."""
    return (
        isinstance(piece, tuple)
        and len(piece) > 0
        and all(isinstance(part, (np.ndarray, dict)) for part in piece)
    )


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
