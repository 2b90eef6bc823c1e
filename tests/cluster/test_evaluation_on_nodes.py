"""Evaluation on nodes, with nodes that are in this process: what is said when none is left."""

import pytest

import shmvec
from shmvec.cluster.crew import LocalCrew, LocalMember, Lost


def balance(observations, env_ids):
    return (observations[:, 2] > 0).astype(int)


def test_what_the_last_node_was_lost_of_is_said(monkeypatch):
    def lost(member, until):
        raise Lost("it was unplugged")

    monkeypatch.setattr("shmvec.cluster.evaluation.RayCrew", lambda options: LocalCrew())
    monkeypatch.setattr(LocalMember, "do", lost)
    with pytest.raises(RuntimeError, match="no node left to play episodes on: it was unplugged"):
        shmvec.evaluate("CartPole-v1", balance, 4, cluster=True)
