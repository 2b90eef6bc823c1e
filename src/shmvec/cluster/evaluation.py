"""Episodes played on all nodes: the engine of ``shmvec.evaluate(..., cluster=True)``."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shmvec.cluster.crew import Lost
from shmvec.cluster.fragments import opened, pickled
from shmvec.cluster.hirings import Hiring, Hirings

__all__ = ["play_on_nodes"]

# Episodes that are over, the number of steps made, and why tasks are given up.
Played: TypeAlias = tuple[list[Any], int, dict[str, str]]


class Player:
    """Envs and a policy on a node, which plays the episodes that it is given."""

    def __init__(self, make_envs: bytes, policy: bytes, play: bytes) -> None:
        """Makes the envs. All arguments are pickled.

        Args:
            make_envs: A function that returns what ``play`` gets: it has ``num_envs`` and
                ``close()``.
            policy: The policy.
            play: The function that plays episodes, as for ``play_on_nodes``.
        """
        self._play = opened("evaluation", play)
        make, self._policy = opened("what makes the envs", make_envs), opened("policy", policy)
        self._envs = make()

    def report(self) -> int:
        """The number of envs, and so of episodes that are played at a time."""
        num_envs: int = self._envs.num_envs
        return num_envs

    def play(self, episodes: list[Any], how: Mapping[str, Any]) -> Played:
        """Plays episodes; returns as ``play`` of :func:`play_on_nodes`."""
        played: Played = self._play(self._envs, self._policy, episodes, how)
        return played

    def close(self) -> None:
        """Closes the envs."""
        self._envs.close()


@dataclass(eq=False)
class _Player(Hiring):
    """The caller's record of a node's player, whose report is its number of envs."""

    playing: list[Any] = field(default_factory=list)


def play_on_nodes(
    make_envs: Callable[[], Any],
    policy: Any,
    play: Callable[..., Played],
    episodes: Sequence[Any],
    how: Mapping[str, Any],
    finished: Callable[[Any], object],
    actor_options: Mapping[str, Any],
    given_up: dict[str, str] | None = None,
) -> int:
    """Plays episodes on all nodes that have room, in shares that become smaller towards the end.

    Args:
        make_envs: Function that makes the envs of a node, with ``num_envs`` and ``close()``.
        policy: The policy; each node has a copy.
        play: Function, called on a node with envs, policy, further episodes and ``how``, that plays
            them, wholly or for a while. It returns those that are over, the number of steps made,
            and, by name, why tasks are given up.
        episodes: The episodes to play; their results are written into them.
        how: Further arguments of ``evaluate``.
        finished: Called with each episode that is over.
        actor_options: Options for Ray's actors.
        given_up: Where the tasks that nodes give up are written; their episodes are not played.

    Returns:
        The number of steps made.

    Raises:
        ImportError: Ray is not installed.
        TypeError: Envs or policy cannot be pickled.
        RuntimeError: There is no room, or no node is left.
        Exception: What envs or the policy raise; the cause names the node.
    """
    content = (
        pickled("what makes the envs", make_envs),
        pickled("policy", policy),
        pickled("evaluation", play),
    )
    players = Hirings(_Player, "player", options=actor_options)
    made = tuple(map(players.crew.put, content))
    players.places = players.on_nodes()
    try:
        given_up = {} if given_up is None else given_up
        return _play(players, made, deque(episodes), how, finished, given_up)
    finally:
        players.close()


def _play(
    players: Hirings[_Player],
    made: tuple[Any, ...],
    waiting: deque[Any],
    how: Mapping[str, Any],
    finished: Callable[[Any], object],
    given_up: dict[str, str],
) -> int:
    steps = 0
    while waiting or any(player.playing for player in players.places):
        players.fill(lambda player: ("player", Player, *made))
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
                over, made_steps, failures = result
                steps += made_steps
                by_key = {(episode.task, episode.number): episode for episode in player.playing}
                for played in over:
                    episode = by_key.pop((played.task, played.number))
                    _note(episode, played)
                    finished(episode)
                given_up.update(failures)
                player.playing = [each for each in by_key.values() if each.task not in failures]
                for _ in range(len(waiting)):
                    if (episode := waiting.popleft()).task not in given_up:
                        waiting.append(episode)
        for player in players.places:
            if player.report is not None and not player.calls:
                _give(player, players, waiting, how)
    return steps


def _note(episode: Any, played: Any) -> None:
    for name in ("return_", "length", "info", "terminated", "finished", "failed", "seconds"):
        setattr(episode, name, getattr(played, name))
    episode.repeats += played.repeats
    episode.steps += played.steps


def _give(
    player: _Player, players: Hirings[_Player], waiting: deque[Any], how: Mapping[str, Any]
) -> None:
    """Gives a node its share of half of the episodes left, at least as many as it has envs."""
    share: list[Any] = []
    if len(player.playing) < player.report:
        size = max(player.report, len(waiting) // (2 * len(players.places)))
        share = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        player.playing += share
    if player.playing:
        # Copies, because an actor in this process would write into the caller's own.
        players.ask(player, "play", list(map(copy.copy, share)), dict(how))
