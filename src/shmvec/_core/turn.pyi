from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, NoReturn, TypeVar

from shmvec._core.trace import Recorder

_T = TypeVar("_T")

class Turn:
    """Held during a call, by one thread: another one is refused with a RuntimeError.

    So is the same one in the middle of a wait, with an AlreadyPendingCallError.
    """

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    @property
    def depth(self) -> int:
        """How often this thread has taken it, and not given it back."""

    def give_back(self, left: int) -> None:
        """Gives back what nobody else will, until it is taken so often."""

    def refuse(self, what: str) -> NoReturn:
        """Raises an AlreadyPendingCallError: this was tried in the middle of a call."""

    def aside(self) -> AbstractContextManager[None]:
        """A turn that this thread may take in the middle of a wait, too: nothing is asked in it."""

    def hold(self) -> AbstractContextManager[None]:
        """In its turn: until the end others' code may run, whose calls are refused as in a wait."""

    def record(self, recorder: Recorder | None) -> None:
        """Has a trace told when it ends: from then on the caller is at work; None: not any more."""

class Loan(Generic[_T]):
    """A turn in which ``begin()`` is lent, and the owner's ``_state`` is another."""

    def __init__(self, turn: Turn, begin: Callable[[], _T], owner: Any, state: object) -> None: ...
    def __enter__(self) -> _T: ...
    def __exit__(self, *error: object) -> None: ...
