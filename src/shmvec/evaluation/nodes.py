"""Calls the function that plays on a cluster's nodes; the cluster's code registers it here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmvec.evaluation.episodes import Episode

__all__ = ["play_on_nodes", "register_player"]

_registered: list[Any] = []


def register_player(play: Any) -> Any:
    """Registers the function that :func:`play_on_nodes` calls."""
    _registered[:] = [play]
    return play


def play_on_nodes(
    make: Callable[[Any], tuple[Any, Callable[[], object]]],
    policy: Any,
    episodes: Sequence[Episode],
    on_settled: Callable[[Episode], object],
    actor_options: Mapping[str, Any],
) -> dict[str, str]:
    """Plays episodes on all nodes of a cluster, each episode on one node.

    Args:
        make: Called on each node with its policy: makes a :class:`Player` without episodes, and
            returns it and a function that closes its envs.
        policy: Chooses actions; each node has a copy.
        episodes: The episodes, to which their results are written.
        on_settled: Called with each episode that is over, or counts as failed.
        actor_options: Options for Ray's actors.

    Returns:
        By name, why a task cannot be played.

    Raises:
        ImportError: There is no code for clusters, or Ray is not installed.
        Exception: What the nodes' players raise.
    """
    if not _registered:
        importlib.import_module("shmvec.cluster.evaluation")
    failures: dict[str, str] = _registered[0](make, policy, episodes, on_settled, actor_options)
    return failures
