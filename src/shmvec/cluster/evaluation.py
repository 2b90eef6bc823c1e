"""Plays episodes on all nodes, for ``shmvec.evaluate(..., cluster=True)``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shmvec.cluster.actor_pool import ActorPool, Place
from shmvec.cluster.backend import ActorLostError
from shmvec.cluster.fragments import pickle_object, unpickle
from shmvec.evaluation.episodes import Episode

__all__ = ["play_on_nodes"]

_PLAY_SLICE_S = 1.0  # a node returns finished episodes that often


class NodePlayer:
    """A player of ``shmvec.evaluation`` on a node."""

    def __init__(self, make: bytes, policy: bytes) -> None:
        """Makes the player and its envs; both arguments are pickled."""
        make_player = unpickle("the function that makes the envs", make)
        self._player, self.close = make_player(unpickle("policy", policy))

    def report(self) -> int:
        """The number of envs: so many episodes are played at a time."""
        num_envs: int = self._player.num_envs
        return num_envs

    def play(self, episodes: list[Episode]) -> tuple[list[Episode], dict[str, str]]:
        """Plays for a while; returns finished episodes, and why tasks cannot be played.

        Args:
            episodes: Further episodes to play.
        """
        finished: list[Episode] = []
        self._player.add(episodes)
        self._player.play(finished.append, pause=time.monotonic() + _PLAY_SLICE_S)
        return finished, self._player.failures


@dataclass(eq=False)
class _PlayerPlace(Place):
    """The caller's record of a player; its report is its number of envs."""

    playing: list[Episode] = field(default_factory=list)


def play_on_nodes(
    actor_options: Mapping[str, Any],
    make: Callable[[Any], tuple[Any, Callable[[], object]]],
    policy: Any,
    episodes: Sequence[Episode],
    settled: Callable[[Episode], object],
) -> dict[str, str]:
    """Plays episodes on all nodes of a cluster, each episode on one node.

    Nodes with room get shares of the episodes, which become smaller towards the end.

    Args:
        actor_options: Options for Ray's actors.
        make: Called on each node with its policy: makes a player without episodes, and returns it
            and a function that closes its envs.
        policy: Chooses actions; each node has a copy.
        episodes: The episodes, to which their results are written.
        settled: Called with each episode that is over, or counts as failed.

    Returns:
        By name, why a task cannot be played.

    Raises:
        ImportError: Ray is not installed.
        TypeError: Envs or policy cannot be pickled.
        RuntimeError: There is no room, or no node is left.
        Exception: An env or the policy has raised it; the cause names the node.
    """
    content = [pickle_object("the function that makes the envs", make)]
    content.append(pickle_object("policy", policy))
    players = ActorPool(_PlayerPlace, "player", options=actor_options)
    makers = tuple(map(players.backend.put, content))
    players.places = players.places_on_nodes()
    try:
        return _play(players, makers, deque(episodes), settled)
    finally:
        players.close()


def _play(
    players: ActorPool[_PlayerPlace],
    makers: tuple[Any, ...],
    queue: deque[Episode],
    settled: Callable[[Episode], object],
) -> dict[str, str]:
    given_up: dict[str, str] = {}
    while queue or any(player.playing for player in players.places):
        players.start_missing(lambda player: ("player", NodePlayer, *makers))
        for player in players.wait(players.places):
            has_started = player.report is not None
            try:
                result = players.take(player)
            except ActorLostError as error:
                for episode in reversed(player.playing):
                    episode.repeats += 1
                    queue.appendleft(episode)
                player.playing.clear()
                players.drop_lost(player, error)
                continue
            if has_started:
                finished, failures = result
                unfinished = {(episode.task, episode.number): episode for episode in player.playing}
                for result_of_episode in finished:
                    episode = unfinished.pop((result_of_episode.task, result_of_episode.number))
                    _copy_results(episode, result_of_episode)
                    settled(episode)
                given_up.update(failures)
                player.playing = [each for each in unfinished.values() if each.task not in failures]
                for _ in range(len(queue)):
                    if (episode := queue.popleft()).task not in given_up:
                        queue.append(episode)
        for player in players.places:
            if player.report is not None and not player.calls:
                _send_share(player, players, queue)
    return given_up


def _copy_results(episode: Episode, played: Episode) -> None:
    for name in ("return_", "length", "info", "terminated", "finished", "failed", "seconds"):
        setattr(episode, name, getattr(played, name))
    episode.repeats += played.repeats
    episode.steps += played.steps


def _send_share(
    player: _PlayerPlace, players: ActorPool[_PlayerPlace], queue: deque[Episode]
) -> None:
    """Gives a node its share of half of the episodes left, at least as many as it has envs."""
    share: list[Episode] = []
    if len(player.playing) < player.report:
        size = max(player.report, len(queue) // (2 * len(players.places)))
        share = [queue.popleft() for _ in range(min(size, len(queue)))]
        player.playing += share
    if player.playing:
        # These are copies, because an actor in this process would change the caller's episodes.
        players.ask(player, "play", [replace(episode, repeats=0) for episode in share])
