"""Commands to envs as messages to their workers, and the late messages that workers send.

This is the parent's side; in a worker :class:`EnvHost` receives and sends these messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from shmvec._pickling import EMPTY, Copies
from shmvec._processes.control import Late
from shmvec._processes.inline import Workers

__all__ = ["Unreadable", "copies_of_each", "packed_command", "read_late"]

_UNCHANGING = (type(None), bool, int, float, str, bytes)


def copies_of_each(workers: Workers, values: Sequence[Any] | None) -> list[Any] | None:
    """Values for envs as what each takes a copy of its own from, before anything changes them.

    Without worker processes, envs share what cannot be pickled.
    """
    if values is None:
        return None
    made: dict[int, Any] = {}  # one value may be for many envs
    for value in values:
        if id(value) not in made:
            made[id(value)] = value if type(value) in _UNCHANGING else _copies_of(workers, value)
    return [made[id(value)] for value in values]


def _copies_of(workers: Workers, value: Any) -> Any:
    if type(value) is dict and not value:
        return EMPTY
    try:
        return Copies(value)
    except Exception:
        if workers.processes:
            raise
        return value


def packed_command(
    workers: Workers,
    envs: Sequence[int],
    name: str,
    payload: Any,
    is_out: Callable[[int], bool],
) -> dict[int, Any]:
    """Messages, by worker, that carry out a command on envs.

    Args:
        workers: All workers of the vector env.
        envs: The envs that the command is for.
        name: "call" or "set_attr".
        payload: For "call": (name, args, kwargs). For "set_attr": (name, {env: value}).
        is_out: Whether an env is in flight.
    """
    named = set(envs)
    packed = {}
    if name == "call":
        attribute, *arguments = payload
        arguments = [_copies_of(workers, arguments)] if any(arguments) else [None]
    else:
        attribute, values = payload
        values = dict(zip(values, copies_of_each(workers, values.values()) or (), strict=True))
    for index, owned in enumerate(workers.ranges):
        mine = named.intersection(owned)
        if not mine:
            continue
        if name == "call":
            chose_all = len(mine) == len(owned)
            lent = chose_all or not any(map(is_out, owned))
            message = (attribute, *arguments, None if chose_all else frozenset(mine), lent)
        else:
            message = attribute, {env: values[env] for env in mine if env in values}
        packed[index] = workers.pack((name, message))
    return packed


class Unreadable(Exception):
    """A message is not what a worker sends."""


def read_late(workers: Workers, index: int, content: Any) -> Late:
    """Reads a late message, and copies the parts of it that lie in the worker's depot.

    Args:
        workers: All workers of the vector env.
        index: The worker that sent the message.
        content: The packed message.

    Returns:
        Its messages, unpacked; its failures, with those of unpacking; and its results, which the
        caller opens.

    Raises:
        Unreadable: The message makes no sense.
        OSError: This process has no room for it; the caller may retry.
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
    # A message that is not packed is the env's own object, and must be copied.
    messages = [
        (kind, env, deepcopy(message) if isinstance(message, dict) else message)
        for kind, env, message in late.messages
    ]
    return Late(messages, late.failures, results)


def _tried(read: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result, or the exception raised; an exception of a signal's handler passes through."""
    try:
        return read(), None
    except Exception as error:
        try:
            read()
        except Exception:
            return None, error
        raise
