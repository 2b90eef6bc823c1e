"""Evaluation on nodes, with nodes that are in this process: what is said when none is left."""

import time
from functools import partial

import pytest
import unplugged
from short_walks import (
    Alone,
    Broken,
    Slow,
    Walk,
    Wide,
    act,
    lengthened,
    one_after_the_other,
    rows,
)

import shmvec
from shmvec.cluster.backend import ActorLostError, LocalBackend, Node
from shmvec.cluster.evaluation import NodePlayer


class Two(LocalBackend):
    """Two nodes with room."""

    def nodes(self):
        return [Node(name, name, 1.0, 0.0) for name in "ab"]


def balance(observations, env_ids):
    return (observations[:, 2] > 0).astype(int)


@pytest.mark.deep
def test_what_the_last_node_was_lost_of_is_said(monkeypatch):
    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", lambda options: LocalBackend())
    monkeypatch.setattr(LocalBackend, "result", unplugged.lost)
    with pytest.raises(
        RuntimeError,
        match=r"3 players were lost one after the other, the last one on this process: it was unp",
    ):
        shmvec.evaluate("CartPole-v1", balance, 4, cluster=True)


@pytest.mark.deep
def test_a_player_that_is_lost_is_started_again_a_few_times(monkeypatch):
    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", unplugged.Nodes)
    monkeypatch.setattr(LocalBackend, "ready", lambda backend, tickets, timeout: list(tickets))
    assert shmvec.evaluate("CartPole-v1", balance, 200, num_envs=1, cluster=True).steps > 0
    assert unplugged.TRIED == [*"abbb"]


def test_a_suite_on_nodes_has_the_same_numbers(monkeypatch, tmp_path):
    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", lambda options: Two())
    suite = {"a": Walk, "b": lengthened(9), "wide": Wide}
    here = shmvec.evaluate(suite, act, 9, seeds=3)
    record = tmp_path / "run.jsonl"
    there = shmvec.evaluate(suite, act, 9, seeds=3, cluster=True, max_envs=2, record=record)
    assert there.complete
    again = shmvec.evaluate(suite, act, 9, seeds=3, record=record)
    for name in suite:
        for other in (there, again):
            assert rows(here[name]) == rows(other[name])
            assert here[name].seeds.tolist() == other[name].seeds.tolist()


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*task")
def test_a_task_that_fails_on_nodes_is_given_up(monkeypatch):
    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", lambda options: LocalBackend())
    suite = {"bad": Broken, "good": Walk}
    result = shmvec.evaluate(suite, act, 5, seeds=3, cluster=True, max_envs=2, retries=0)
    assert result.failures == {"bad": "OSError: no assets"}
    assert rows(result["good"]) == [row[:4] for row in one_after_the_other(Walk, range(3, 8))]


@pytest.mark.deep
def test_a_node_that_is_lost_costs_a_suite_what_it_had_under_way(monkeypatch, tmp_path):
    """What it has returned is not played again."""

    calls, play = [], NodePlayer.play

    def lost_once(player, *arguments):
        calls.append(player)
        if len(calls) == 4:
            raise ActorLostError("it was unplugged")
        return play(player, *arguments)

    def slowly(observations, env_ids):
        time.sleep(0.005)
        return act(observations, env_ids)

    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", lambda options: Two())
    monkeypatch.setattr(NodePlayer, "play", lost_once)
    suite = {"a": lengthened(50), "b": lengthened(40)}
    seen = []
    result = shmvec.evaluate(
        suite, slowly, 12, seeds=3, cluster=True, max_envs=2, progress=seen.append
    )
    keys = [(episode.task, episode.number) for episode in seen]
    assert len(keys) == len(set(keys)) == 24 and result.complete
    assert sum(each.repeats for each in result.values()) > 0
    for name, more in (("a", 50), ("b", 40)):
        expected = one_after_the_other(lengthened(more), range(3, 15))
        assert rows(result[name]) == [row[:4] for row in expected]


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*task")
def test_a_task_of_which_a_node_can_build_only_one_env(monkeypatch, tmp_path):
    monkeypatch.setattr("shmvec.cluster.actor_pool.RayBackend", lambda options: Two())
    suite = {"a": partial(Alone, tmp_path), "b": partial(Slow, 0.02)}
    result = shmvec.evaluate(suite, act, 20, seeds=3, cluster=True, max_envs=2)
    expected = [row[:4] for row in one_after_the_other(Walk, range(3, 23))]
    assert rows(result["b"]) == expected
    assert set(rows(result["a"])) <= set(expected)  # one of the nodes has it
