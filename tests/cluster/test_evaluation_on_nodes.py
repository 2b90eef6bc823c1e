"""Evaluation on nodes, with nodes that are in this process: what is said when none is left."""

import pytest
import unplugged

import shmvec
from shmvec.cluster.crew import LocalCrew, LocalMember, Lost, Node


def balance(observations, env_ids):
    return (observations[:, 2] > 0).astype(int)


def test_what_the_last_node_was_lost_of_is_said(monkeypatch):
    def lost(member, until):
        raise Lost("it was unplugged")

    monkeypatch.setattr("shmvec.cluster.evaluation.RayCrew", lambda options: LocalCrew())
    monkeypatch.setattr(LocalMember, "do", lost)
    with pytest.raises(
        RuntimeError,
        match=r"no node left to play episodes on: there is this process; the player on this "
        r"process was lost: it was unplugged",
    ):
        shmvec.evaluate("CartPole-v1", balance, 4, cluster=True)


def test_a_player_that_is_lost_is_started_again_a_few_times(monkeypatch):
    monkeypatch.setattr("shmvec.cluster.evaluation.RayCrew", unplugged.Nodes)
    monkeypatch.setattr(LocalCrew, "ready", lambda crew, tickets, timeout: list(tickets))
    assert shmvec.evaluate("CartPole-v1", balance, 200, num_envs=1, cluster=True).steps > 0
    assert unplugged.TRIED == [*"abbb"]


def test_a_node_without_room_is_not_waited_for_at_the_end(monkeypatch):
    class Nodes(LocalCrew):
        def nodes(self):
            return [Node(name, name, 1.0, 0.0) for name in "ab"]

    finished, finish = [], LocalMember.finish

    def finishes(member, asked):
        finished.append(member.where())
        return finish(member, asked)

    monkeypatch.setattr("shmvec.cluster.evaluation.RayCrew", lambda options: Nodes())
    monkeypatch.setattr(LocalMember, "finish", finishes)  # the second one has not started
    assert shmvec.evaluate("CartPole-v1", balance, 1, num_envs=1, cluster=True).steps > 0
    assert len(finished) == 1
