"""Commands to envs as messages to their workers, and the late messages that workers send.

This is the parent's side; in a worker :class:`EnvHost` receives and sends these messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from shmvec._pickling import EMPTY_DICT, CopySource
from shmvec._processes.control import LateParts
from shmvec._processes.supervisor import Supervisor

__all__ = ["UnreadableError", "prepare_copies", "pack_command", "read_late"]

_IMMUTABLE_TYPES = (type(None), bool, int, float, str, bytes)


def prepare_copies(workers: Supervisor, values: Sequence[Any] | None) -> list[Any] | None:
    """Prepares values, of which each env takes its own copy, before anything changes them.

    Without worker processes, envs share what cannot be pickled.
    """
    if values is None:
        return None
    prepared: dict[int, Any] = {}  # one value may be for many envs
    for value in values:
        if id(value) not in prepared:
            is_immutable = type(value) in _IMMUTABLE_TYPES
            prepared[id(value)] = value if is_immutable else _prepare_copy(workers, value)
    return [prepared[id(value)] for value in values]


def _prepare_copy(workers: Supervisor, value: Any) -> Any:
    if type(value) is dict and not value:
        return EMPTY_DICT
    try:
        return CopySource(value)
    except Exception:
        if workers.processes:
            raise
        return value


def pack_command(
    workers: Supervisor,
    envs: Sequence[int],
    name: str,
    payload: Any,
    is_in_flight: Callable[[int], bool],
) -> dict[int, Any]:
    """Packs a command on envs into messages, by worker.

    Args:
        workers: All workers of the vector env.
        envs: The envs that the command is for.
        name: "call" or "set_attr".
        payload: For "call": (name, args, kwargs). For "set_attr": (name, {env: value}).
        is_in_flight: Whether an env is in flight.
    """
    envs_of_call = set(envs)
    packed = {}
    if name == "call":
        attribute, *arguments = payload
        arguments = [_prepare_copy(workers, arguments)] if any(arguments) else [None]
    else:
        attribute, values = payload
        values = dict(zip(values, prepare_copies(workers, values.values()) or (), strict=True))
    for index, worker_envs in enumerate(workers.ranges):
        chosen = envs_of_call.intersection(worker_envs)
        if not chosen:
            continue
        if name == "call":
            has_all = len(chosen) == len(worker_envs)
            uses_depot = has_all or not any(map(is_in_flight, worker_envs))
            message = (attribute, *arguments, None if has_all else frozenset(chosen), uses_depot)
        else:
            message = attribute, {env: values[env] for env in chosen if env in values}
        packed[index] = workers.pack((name, message))
    return packed


class UnreadableError(Exception):
    """A message is not what a worker sends."""


def read_late(workers: Supervisor, index: int, content: Any) -> LateParts:
    """Reads a late message, and copies the parts of it that lie in the worker's depot.

    Args:
        workers: All workers of the vector env.
        index: The worker that sent the message.
        content: The packed message.

    Returns:
        Its messages; its failures; and its results, which the caller opens.

    Raises:
        UnreadableError: The message makes no sense.
        OSError: This process has no room for it; the caller may retry.
        MemoryError: Likewise.
    """

    def read() -> tuple[LateParts, Any]:
        late = workers.unpack(content)
        return late, None if late.results is None else workers.collect(index, late.results)

    try:
        late, results = read()
    except (OSError, MemoryError):
        raise
    except Exception as error:
        try:
            read()
        except Exception:
            raise UnreadableError(repr(error)) from None
        raise  # it can be read: a signal's handler has raised this
    # A message that is not packed is the env's own object, and must be copied.
    messages = [
        (kind, env, deepcopy(message) if isinstance(message, dict) else message)
        for kind, env, message in late.messages
    ]
    return LateParts(messages, late.failures, results)
