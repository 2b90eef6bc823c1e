"""What a worker has sent through its channel with an answer, read: see ``Late``."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

from shmvec._core.again import raises_again
from shmvec._parent.supervisor import Workers
from shmvec._shared.records import Late
from shmvec.faults import Failure

__all__ = ["Unreadable", "read_late"]


class Unreadable(Exception):
    """It is not what a worker sends."""


def read_late(workers: Workers, index: int, content: Any) -> Late:
    """Reads it; nothing of it lies in the worker's depot any more.

    Args:
        workers: One of which has sent it.
        index: That worker.
        content: What it has sent.

    Returns:
        Its messages, unpacked, failures, those of unpacking included, and results, which are still
        to be opened.

    Raises:
        Unreadable: It makes no sense.
        OSError: This process has no room for it: it can be read again.
        MemoryError: Likewise.
    """
    late, error = _tried(partial(workers.unpack, content))
    results = None
    if error is None and late.results is not None:
        results, error = _tried(partial(workers.collect, index, late.results))
    if isinstance(error, (OSError, MemoryError)):
        raise error
    if error is not None:
        raise Unreadable(repr(error))
    messages, failures = [], list(late.failures)
    for kind, env, packed in late.messages:
        message, error = _tried(partial(workers.unpack, packed))
        if error is not None:  # in a class of the user's
            failures.append(Failure.of(error, env, index, "info"))
            continue
        # Without a process it is the env's own.
        messages.append((kind, env, message if workers.inline is None else deepcopy(message)))
    return Late(messages, failures, results)


def _tried(read: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What is read, or why it cannot be; what a signal's handler raises is raised."""
    try:
        return read(), None
    except Exception as error:
        if raises_again(read):
            return None, error
        raise
