"""Episodes played on all nodes: what ``shmvec.evaluate(..., cluster=True)`` calls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shmvec.cluster.crew import Lost
from shmvec.cluster.fragments import opened, pickled
from shmvec.cluster.hirings import Hiring, Hirings
from shmvec.evaluation.episodes import Episode
from shmvec.evaluation.nodes import on_nodes

__all__ = ["play_on_nodes"]

_SLICE_S = 1.0  # after which a node returns the episodes that are over


class NodePlayer:
    """A player of ``shmvec.evaluation`` on a node, which plays the episodes that it is given."""

    def __init__(self, make: bytes, policy: bytes) -> None:
        """Makes it, and its envs; both arguments are pickled."""
        made = opened("what makes the envs", make)
        self._player, self.close = made(opened("policy", policy))

    def report(self) -> int:
        """The number of envs, and so of episodes that are played at a time."""
        num_envs: int = self._player.num_envs
        return num_envs

    def play(self, episodes: list[Episode]) -> tuple[list[Episode], dict[str, str]]:
        """Plays for a while; returns what is over, and the tasks that are given up.

        Args:
            episodes: Further episodes to play.
        """
        over: list[Episode] = []
        self._player.add(episodes)
        self._player.play(over.append, pause=time.monotonic() + _SLICE_S)
        return over, self._player.given_up


@dataclass(eq=False)
class _Player(Hiring):
    """The caller's record of a node's player, whose report is its number of envs."""

    playing: list[Episode] = field(default_factory=list)


@on_nodes
def play_on_nodes(
    make: Callable[[Any], Any],
    policy: Any,
    episodes: Sequence[Episode],
    settled: Callable[[Episode], object],
    actor_options: Mapping[str, Any],
) -> dict[str, str]:
    """Plays as :func:`shmvec.evaluation.nodes.play_on_nodes` says.

    Nodes that have room get shares of the episodes, which become smaller towards the end.

    Raises:
        ImportError: Ray is not installed.
        TypeError: Envs or policy cannot be pickled.
        RuntimeError: There is no room, or no node is left.
        Exception: What envs or the policy raise; the cause names the node.
    """
    content = pickled("what makes the envs", make), pickled("policy", policy)
    players = Hirings(_Player, "player", options=actor_options)
    made = tuple(map(players.crew.put, content))
    players.places = players.on_nodes()
    try:
        return _play(players, made, deque(episodes), settled)
    finally:
        players.close()


def _play(
    players: Hirings[_Player],
    made: tuple[Any, ...],
    waiting: deque[Episode],
    settled: Callable[[Episode], object],
) -> dict[str, str]:
    given_up: dict[str, str] = {}
    while waiting or any(player.playing for player in players.places):
        players.fill(lambda player: ("player", NodePlayer, *made))
        for player in players.wait(players.places):
            has_started = player.report is not None
            try:
                result = players.take(player)
            except Lost as error:
                for episode in reversed(player.playing):
                    episode.repeats += 1
                    waiting.appendleft(episode)
                player.playing.clear()
                players.lose(player, error)
                continue
            if has_started:
                over, failures = result
                by_key = {(episode.task, episode.number): episode for episode in player.playing}
                for played in over:
                    episode = by_key.pop((played.task, played.number))
                    _note(episode, played)
                    settled(episode)
                given_up.update(failures)
                player.playing = [each for each in by_key.values() if each.task not in failures]
                for _ in range(len(waiting)):
                    if (episode := waiting.popleft()).task not in given_up:
                        waiting.append(episode)
        for player in players.places:
            if player.report is not None and not player.calls:
                _give(player, players, waiting)
    return given_up


def _note(episode: Episode, played: Episode) -> None:
    for name in ("return_", "length", "info", "terminated", "finished", "failed", "seconds"):
        setattr(episode, name, getattr(played, name))
    episode.repeats += played.repeats
    episode.steps += played.steps


def _give(player: _Player, players: Hirings[_Player], waiting: deque[Episode]) -> None:
    """Gives a node its share of half of the episodes left, at least as many as it has envs."""
    share: list[Episode] = []
    if len(player.playing) < player.report:
        size = max(player.report, len(waiting) // (2 * len(players.places)))
        share = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        player.playing += share
    if player.playing:
        # Copies, because an actor in this process would write into the caller's own.
        players.ask(player, "play", [replace(episode, repeats=0) for episode in share])
