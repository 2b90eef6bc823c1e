"""Ctrl-C, held back for as long as it would do harm, and where it can do none."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["close_all", "uninterrupted"]


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds Ctrl-C back while two things are done of which none may be without the other.

    A second Ctrl-C is not held back.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        held.append((number, frame))
        if len(held) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])


def close_all(descriptors: list[int]) -> None:
    """Empties the list, and closes what was in it: each once, whatever comes in between.

    In C: a signal's handler that raises after one was taken out would lose it.
    """
    with contextlib.suppress(IndexError):  # it is empty
        deque(map(os.close, iter(descriptors.pop, None)), maxlen=0)
