"""What plays on a cluster's nodes: the cluster's code, which registers it here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmvec.evaluation.episodes import Episode

__all__ = ["on_nodes", "play_on_nodes"]

_registered: list[Any] = []


def on_nodes(play: Any) -> Any:
    """Registers a function as what :func:`play_on_nodes` calls."""
    _registered[:] = [play]
    return play


def play_on_nodes(
    make: Callable[[Any], tuple[Any, Callable[[], object]]],
    policy: Any,
    episodes: Sequence[Episode],
    settled: Callable[[Episode], object],
    actor_options: Mapping[str, Any],
) -> dict[str, str]:
    """Plays episodes on all nodes of a cluster, as wholes.

    Args:
        make: Called on each node with its policy: makes a :class:`Player`, which has no episodes
            yet, and returns that and a function which closes its envs.
        policy: Chooses actions; each node has a copy.
        episodes: The episodes, into which their results are written.
        settled: Called with each that is over, or counts as failed.
        actor_options: Options for Ray's actors.

    Returns:
        The tasks that are given up, and why.

    Raises:
        ImportError: There is no code for clusters, or Ray is not installed.
        Exception: What the nodes' players raise.
    """
    if not _registered:
        importlib.import_module("shmvec.cluster.evaluation")
    given_up: dict[str, str] = _registered[0](make, policy, episodes, settled, actor_options)
    return given_up
