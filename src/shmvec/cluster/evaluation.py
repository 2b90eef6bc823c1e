"""Episodes played on all nodes: the engine of ``shmvec.evaluate(..., cluster=True)``."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from shmvec.cluster.crew import SLICE_S, TRIES, Crew, Lost, Member, Node, Ticket, dismiss
from shmvec.cluster.fragments import opened, pickled
from shmvec.cluster.ray_crew import RayCrew

__all__ = ["play_on_nodes"]

# Episodes that are over, the number of steps made, and why tasks are given up.
Played: TypeAlias = tuple[list[Any], int, dict[str, str]]

_ROOM_S = 120.0  # for the first node to have room


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
class _Hired:
    """The caller's record of a player on a node."""

    node: Node
    member: Member
    awaited: Ticket | None  # first the one for its start
    num_envs: int = 0  # 0 until it has started
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
    crew = RayCrew(actor_options)
    made = tuple(map(crew.put, content))
    players: list[_Hired] = []
    tried: Counter[Node] = Counter()

    def hire() -> None:
        """Begins to start a player on each node that has none, unless too many were lost there."""
        for node in crew.nodes():
            cpus, taken = math.floor(node.cpus), any(player.node == node for player in players)
            if cpus and not taken and tried[node] < TRIES:
                tried[node] += 1
                name = f"evaluation on {node.name}"
                begun = crew.start(name, Player, *made, node=node, cpus=cpus, gpus=0.0)
                players.append(_Hired(node, *begun))

    try:
        hire()
        given_up = {} if given_up is None else given_up
        return _play(crew, players, hire, deque(episodes), how, finished, given_up)
    finally:
        dismiss(
            crew,
            [
                (each.member, ([each.awaited] if each.awaited else []) if each.num_envs else None)
                for each in players
            ],
        )


def _play(
    crew: Crew,
    players: list[_Hired],
    hire: Callable[[], None],
    waiting: deque[Any],
    how: Mapping[str, Any],
    finished: Callable[[Any], object],
    given_up: dict[str, str],
) -> int:
    steps = 0
    lost = ""
    deadline = time.monotonic() + _ROOM_S
    while waiting or any(player.playing for player in players):
        awaited = {player.awaited: player for player in players if player.awaited is not None}
        if not awaited:
            raise RuntimeError(
                f"the cluster has no node left to play episodes on: there is {crew.room()}{lost}"
            )
        if time.monotonic() > deadline and not any(player.num_envs for player in players):
            raise RuntimeError(
                f"an evaluation needs all CPUs of a node, or num_cpus of actor_options, and none "
                f"has had these free within {_ROOM_S:g} s: there is {crew.room()}{lost}"
            )
        for ticket in crew.ready(list(awaited), SLICE_S):
            player = awaited[ticket]
            player.awaited = None
            try:
                result = ticket.result()
            except Lost as error:
                lost = f"; the player on {player.member.where()} was lost: {error}"
                for episode in reversed(player.playing):
                    episode.repeats += 1
                    waiting.appendleft(episode)
                players.remove(player)
                player.member.end()
                hire()
                deadline = time.monotonic() + _ROOM_S
                continue
            if player.num_envs:
                over, made, failures = result
                steps += made
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
            else:
                player.num_envs = result
            _give(player, players, waiting, how)
        for player in players:  # idle players play the episodes that were lost with another one
            if player.awaited is None and waiting:
                _give(player, players, waiting, how)
    return steps


def _note(episode: Any, played: Any) -> None:
    for name in ("return_", "length", "info", "terminated", "finished", "failed", "seconds"):
        setattr(episode, name, getattr(played, name))
    episode.repeats += played.repeats
    episode.steps += played.steps


def _give(
    player: _Hired, players: Sequence[_Hired], waiting: deque[Any], how: Mapping[str, Any]
) -> None:
    """Gives a node its share of half of the episodes left, at least as many as it has envs."""
    share: list[Any] = []
    if len(player.playing) < player.num_envs:
        size = max(player.num_envs, len(waiting) // (2 * len(players)))
        share = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        player.playing += share
    if player.playing:
        # Copies, because a member in this process would write into the caller's own.
        player.awaited = player.member.ask("play", list(map(copy.copy, share)), dict(how))
