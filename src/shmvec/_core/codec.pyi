from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

ACTION_ITEMSIZE: int

class OtherShapeError(ValueError):
    """As many actions as there are envs, but of another shape than their space says."""

    actions: npt.NDArray[Any]

class Codec:
    """Reads and writes values of one space, for one env or for all."""

    def put(self, env: int, value: Any) -> None:
        """Writes the value of one env."""
    def get(self, env: int) -> Any:
        """The value of one env, as a copy."""
    def put_rows(self, envs: npt.NDArray[np.intp], values: Any) -> None:
        """Writes the values of some envs.

        Raises:
            ValueError: Their number or shape is wrong.
            TypeError: Their dtype is.
        """

class ArrayCodec(Codec):
    """Observations of spaces that are one array."""

    def __init__(self, array: npt.NDArray[Any]) -> None: ...

class ActionCodec(Codec):
    """Actions of spaces that are one array, in the dtype of the caller."""

    def __init__(
        self,
        memory: npt.NDArray[Any],
        codes: npt.NDArray[Any],
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        space: gym.Space[Any],
    ) -> None: ...

class TextCodec(Codec):
    """Strings of Text spaces."""

    def __init__(self, array: npt.NDArray[Any]) -> None: ...

class DictCodec(Codec):
    """Dict spaces."""

    def __init__(self, codecs: Mapping[str, Codec]) -> None: ...

class TupleCodec(Codec):
    """Tuple spaces."""

    def __init__(self, codecs: Sequence[Codec]) -> None: ...

class MessageCodec(Codec):
    """Values that are in no slab: they came, or go, as messages."""

    def __init__(
        self,
        space: gym.Space[Any],
        num_envs: int,
        explain: Callable[[Iterable[int], list[Any], Exception], tuple[int | None, Exception]]
        | None,
    ) -> None: ...
