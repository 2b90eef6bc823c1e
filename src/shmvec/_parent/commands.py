"""The messages of commands to workers: one for each worker whose envs are named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shmvec._parent.supervisor import Workers

__all__ = ["packed_command", "packed_reset"]


def packed_reset(
    workers: Workers,
    envs: Sequence[int],
    seeds: Sequence[int | None] | None,
    options: Sequence[Any] | None,
) -> dict[int, Any]:
    """The message to each worker of envs that are reset with arguments."""
    rows = {env: row for row, env in enumerate(envs)}
    packed = {}
    for index, owned in enumerate(workers.ranges):
        if not any(env in rows for env in owned):
            continue
        payload = tuple(
            None if given is None else [given[rows[e]] if e in rows else None for e in owned]
            for given in (seeds, options)
        )
        mask = [env in rows for env in owned]
        packed[index] = workers.pack(("reset", (*payload, None if all(mask) else mask)))
    return packed


def packed_command(
    workers: Workers,
    envs: Sequence[int],
    name: str,
    payload: Any,
    is_out: Callable[[int], bool],
) -> dict[int, Any]:
    """The message to each worker of envs with which something is done.

    Args:
        workers: All of them.
        envs: Which.
        name: "call" or "set_attr".
        payload: See ``Exchange.command``.
        is_out: Whether an env was asked, and its answer was not taken.
    """
    named = set(envs)
    packed = {}
    for index, owned in enumerate(workers.ranges):
        mine = named.intersection(owned)
        if not mine:
            continue
        if name == "call":
            chose_all = len(mine) == len(owned)
            lent = chose_all or not any(map(is_out, owned))
            message = (*payload, None if chose_all else frozenset(mine), lent)
        else:
            attribute, values = payload
            message = attribute, {env: values[env] for env in mine if env in values}
        packed[index] = workers.pack((name, message))
    return packed
