from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

class Turn:
    """Held during a call, by one thread: another one is refused with a RuntimeError."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class Loan(Generic[_T]):
    """A turn in which ``begin()`` is lent, and the owner's ``_state`` is another."""

    def __init__(self, turn: Turn, begin: Callable[[], _T], owner: Any, state: object) -> None: ...
    def __enter__(self) -> _T: ...
    def __exit__(self, *error: object) -> None: ...
