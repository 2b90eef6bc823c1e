"""Suites: many tasks, each as it would be alone, whatever fails, however often it is resumed."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from short_walks import (
    Alone,
    Broken,
    DiesLate,
    Dying,
    FailsToClose,
    Growing,
    Hanging,
    Large,
    Longer,
    MayDie,
    Raising,
    Slow,
    SlowToBuild,
    SlowToClose,
    Walk,
    Wide,
    act,
    lengthened,
    one_after_the_other,
    rows,
    take_alone,
)
from tables import deep, row

import shmvec.__main__
from shmvec import Evaluation, ShmVectorEnv, SuiteEvaluation, Task, evaluate
from shmvec._processes.supervisor import Supervisor
from shmvec.evaluation.memory import Budget, MemoryMeter, parse_bytes
from shmvec.evaluation.record import to_plain
from shmvec.evaluation.tasks import identity_of


def same(one, other):
    """Whether two results of suites have the same numbers."""
    return list(one) == list(other) and all(
        repr(one[name].columns()) == repr(other[name].columns()) for name in one
    )


# ---- exactness -----------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    more=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    episodes=st.integers(1, 6),
    max_envs=st.integers(1, 5),
    batch_size=st.integers(1, 5),
    batch=st.sampled_from(["ready", "fixed"]),
    across=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_as_one_after_the_other(more, episodes, max_envs, batch_size, batch, across, seed):
    result = evaluate(
        {f"task {i}": lengthened(each) for i, each in enumerate(more)},
        act,
        episodes,
        seeds=seed,
        max_envs=max_envs,
        batch_size=batch_size,
        batch=batch,
        batch_across_tasks=across,
        info_keys=["left"],
    )
    assert result.complete
    for i, each in enumerate(more):
        expected = one_after_the_other(lengthened(each), range(seed, seed + episodes))
        assert rows(result[f"task {i}"], "left") == expected


@pytest.mark.deep
def test_one_batch_for_several_tasks_where_spaces_agree():
    batches = []

    def policy(observations, env_ids, task):
        assert len(task) == len(env_ids) == len(observations)
        batches.append({each.name for each in task})
        time.sleep(0.005)  # meanwhile other envs become ready
        assert all(len(each) == 4 for each in batches[-1]) == (observations.shape[1] == 4)
        return act(observations, env_ids)

    tasks = {"one": lengthened(30), "two": lengthened(30), "wide": Wide}
    result = evaluate(tasks, policy, 6, seeds=1, max_envs=6, batch="fixed", batch_size=2)
    assert any(len(each) == 2 for each in batches)
    assert not any("wide" in each and len(each) > 1 for each in batches)
    assert rows(result["wide"]) == [row[:4] for row in one_after_the_other(Wide, range(1, 7))]
    batches.clear()
    again = evaluate(tasks, policy, 6, seeds=1, max_envs=6, batch_across_tasks=False)
    assert all(len(each) == 1 for each in batches)
    assert same(result, again)


def test_a_policy_with_states_and_tasks():
    class Policy:
        def __init__(self):
            self.tasks, self.seen = {}, set()

        def reset(self, env_ids, task):
            for number, each in zip(env_ids.tolist(), task, strict=True):
                self.tasks[number] = each.name, each.instruction, each.index
            self.seen.update(self.tasks.values())

        def __call__(self, observations, env_ids, *, task):
            told = [(each.name, each.instruction, each.index) for each in task]
            assert told == [self.tasks[number] for number in env_ids.tolist()]
            return act(observations, env_ids)

    suite = {"a": Task(Walk, instruction="walk"), "b": Task(lengthened(3), instruction=("run", 1))}
    policy = Policy()
    result = evaluate(suite, policy, 5, seeds=3, max_envs=3)
    assert result.complete
    assert policy.seen == {("a", "walk", 0), ("b", ("run", 1), 1)}


@pytest.mark.deep
def test_tasks_by_id_list_and_pattern(tmp_path):
    def policy(observations, env_ids):
        return np.zeros(len(env_ids), np.int64)

    listed = evaluate(["CartPole-v1", "Acrobot-v1"], policy, 2, seeds=1, max_envs=2)
    assert list(listed) == ["CartPole-v1", "Acrobot-v1"]
    found = evaluate("CartPole-v[1-9]", policy, 2, seeds=1, max_envs=1)
    assert list(found) == ["CartPole-v1"]
    alone = evaluate("CartPole-v1", policy, 2, seeds=1)
    for each in (listed, found):
        assert each["CartPole-v1"].returns.tolist() == alone.returns.tolist()
    (tmp_path / "mine.py").write_text(
        "import gymnasium\n\ndef make(length=3):\n"
        "    return gymnasium.make('CartPole-v1', max_episode_steps=length)\n"
    )
    file = f"{tmp_path}/mine.py:make"
    result = evaluate({"a": file, "b": Task(file, kwargs={"length": 5})}, policy, 2, seeds=1)
    assert [each.lengths.tolist() for each in result.values()] == [[3, 3], [5, 5]]


@pytest.mark.deep
def test_one_env_with_a_record_is_one_result(tmp_path):
    result = evaluate(Walk, act, 4, seeds=2, record=tmp_path / "run.jsonl")
    assert isinstance(result, Evaluation)
    assert rows(result) == [row[:4] for row in one_after_the_other(Walk, range(2, 6))]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 6


@pytest.mark.deep
def test_nothing_is_built_in_the_parent():
    class Where(Walk):
        def __init__(self, pid):
            super().__init__()
            assert os.getpid() != pid

    assert evaluate({"a": partial(Where, os.getpid())}, act, 1, seeds=0).complete


# ---- records -------------------------------------------------------------------------------------


@pytest.mark.deep
def test_resumed_wherever_it_was_cut_off(tmp_path):
    suite = {"a": Walk, "b": lengthened(5), "c": Wide}
    file, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    options = dict(options=[None, {"more": 2}, None, {"more": 1}], info_keys=["word"])
    whole = evaluate(suite, act, 4, seeds=7, record=file, max_envs=3, **options)
    content = file.read_bytes()
    for cut in range(0, len(content) + 1, 397):
        part.write_bytes(content[:cut])
        again = evaluate(suite, act, 4, seeds=7, record=part, max_envs=3, **options)
        assert same(whole, again), cut
        lines = [json.loads(line) for line in part.read_bytes().splitlines()]
        played = [(line["task"], line["episode"]) for line in lines if "episode" in line]
        assert len(played) == len(set(played)) == 12
    assert same(whole, SuiteEvaluation.read(part))


@pytest.mark.deep
def test_a_torn_end_is_cut_off(tmp_path):
    file = tmp_path / "run.jsonl"
    whole = evaluate({"a": Walk}, act, 3, seeds=1, record=file)
    before = file.read_bytes()
    for tail in (b"\0" * 100, b'{"task": "a", "epi', b"\n", b'{"task"}\n'):
        file.write_bytes(before + tail)
        assert same(whole, evaluate({"a": Walk}, act, 3, seeds=1, record=file)), tail
        assert file.read_bytes() == before, tail


@pytest.mark.deep
def test_short_episodes_of_a_record_do_not_count_for_more(tmp_path):
    file = tmp_path / "run.jsonl"
    whole = evaluate({"a": Walk}, act, 6, seeds=1, record=file)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"episode": 2,' not in line))
    part = SuiteEvaluation.read(file)
    assert rows(part["a"]) == rows(whole["a"])[:2] and not part.complete
    again = evaluate({"a": Walk}, act, 6, seeds=1, record=file, time_limit=1e-9)
    assert rows(again["a"]) == rows(part["a"])
    assert same(whole, evaluate({"a": Walk}, act, 6, seeds=1, record=file))
    assert same(whole, SuiteEvaluation.read(file))


@pytest.mark.deep
def test_a_record_knows_the_key_of_success(tmp_path):
    file = tmp_path / "run.jsonl"
    result = evaluate({"a": Walk}, act, 4, seeds=1, record=file, success_key="left")
    read = SuiteEvaluation.read(file)
    assert read.score == result.score == "success" and read.mean == result.mean > 1
    assert SuiteEvaluation.read(file, success_key="is_success").score == "return"


@pytest.mark.deep
def test_seeds_that_were_drawn_are_resumed(tmp_path):
    file = tmp_path / "run.jsonl"
    first = evaluate({"a": Walk}, act, 3, record=file)
    more = evaluate({"a": Walk, "b": lengthened(1)}, act, 5, record=file)
    assert more["a"].seeds[:3].tolist() == first["a"].seeds.tolist()
    assert more["a"].returns[:3].tolist() == first["a"].returns.tolist()
    assert more["a"].seeds.tolist() == more["b"].seeds.tolist()
    again = evaluate({"a": Walk, "b": lengthened(1)}, act, 5, record=file)
    assert same(more, again)


def test_a_record_of_something_else_is_refused(tmp_path):
    file = tmp_path / "run.jsonl"
    evaluate({"a": Walk}, act, 3, seeds=1, record=file)
    content = file.read_text()
    for wrong, words in (
        (dict(seeds=2), "with seed 1 and options None, and not with 2"),
        (dict(seeds=1, options={"more": 1}), "options"),
        (dict(seeds=1, info_keys=["left"]), "another info_keys"),
        (dict(), "was recorded with seeds="),
    ):
        with pytest.raises(ValueError, match=words):
            evaluate({"a": Walk}, act, 3, record=file, **wrong)
    with pytest.raises(ValueError, match="another env of task 'a'"):
        evaluate({"a": Wide}, act, 3, seeds=1, record=file)
    assert file.read_text() == content
    lines = content.splitlines(keepends=True)
    file.write_text(lines[0] + lines[1] + "{oh}\n" + lines[2])
    with pytest.raises(ValueError, match="line 3 is damaged"):
        evaluate({"a": Walk}, act, 3, seeds=1, record=file)
    for other in ("hello\n", '{"a": 1}\n', "[1]\n" * 3):
        file.write_text(other)
        with pytest.raises(ValueError, match="not a record of an evaluation"):
            evaluate({"a": Walk}, act, 3, seeds=1, record=file)
        assert file.read_text() == other


class Thing:
    pass


@pytest.mark.deep
@pytest.mark.parametrize("make", [lambda: np.nan, lambda: (1, np.arange(3)), Thing])
def test_the_same_options_are_accepted_again(tmp_path, make):
    file = tmp_path / "run.jsonl"
    first = evaluate({"a": Walk}, act, 2, seeds=1, record=file, options={"goal": make()})
    content = file.read_bytes()
    assert same(
        first, evaluate({"a": Walk}, act, 2, seeds=1, record=file, options={"goal": make()})
    )
    assert file.read_bytes() == content


@pytest.mark.deep
def test_other_arguments_make_another_env(tmp_path):
    file = tmp_path / "run.jsonl"
    evaluate({"a": lengthened(3)}, act, 2, seeds=1, record=file)
    with pytest.raises(ValueError, match="another env of task 'a'"):
        evaluate({"a": lengthened(4)}, act, 2, seeds=1, record=file)
    values = np.zeros(5000)
    one = identity_of(Task("CartPole-v1", {"map": values}))
    assert one == identity_of(Task("CartPole-v1", {"map": values.copy()}))
    assert one != identity_of(Task("CartPole-v1", {"map": np.eye(1, 5000, 2500)[0]}))
    assert identity_of(Task(partial(act, Thing()))) == identity_of(Task(partial(act, Thing())))


@pytest.mark.deep
def test_what_is_refused_leaves_a_record_as_it_was(tmp_path):
    file = tmp_path / "run.jsonl"
    evaluate({"a": Walk}, act, 2, seeds=1, record=file)
    content = file.read_bytes()
    with pytest.raises(ValueError, match="another env of task 'a'"):
        evaluate({"new": Walk, "a": Wide}, act, 2, seeds=1, record=file)
    assert file.read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    for other in ("/dev/full", "/dev/null", tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="is not a file"):
            evaluate({"a": Walk}, act, 2, seeds=1, record=other)


@pytest.mark.deep
def test_two_at_once_do_not_share_a_record(tmp_path):
    """Whoever is forked meanwhile, and lives on, keeps no later one away."""
    file = tmp_path / "run.jsonl"
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))

    def policy(observations, env_ids):
        if fork.pid is None:
            with pytest.raises(BlockingIOError, match="another evaluation is writing"):
                evaluate({"a": Walk}, act, 3, seeds=1, record=file)
            fork.start()
        return act(observations, env_ids)

    try:
        assert evaluate({"a": Walk}, policy, 3, seeds=1, record=file).complete
        assert len(evaluate({"a": Walk}, policy, 5, seeds=1, record=file)["a"].returns) == 5
    finally:
        fork.kill()
        fork.join()


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from short_walks import Walk, Wide, act, lengthened
import shmvec, time

def slow(observations, env_ids):
    time.sleep(0.002)
    with open({record!r}) as record:
        if len(record.readlines()) > {lines} + 4:
            time.sleep(1000)  # it is not to end before it is killed
    return act(observations, env_ids)

if __name__ == "__main__":
    suite = {{"a": Walk, "b": lengthened(9), "c": Wide}}
    shmvec.evaluate(suite, slow, 20, seeds=5, record={record!r}, max_envs=3)
"""


@pytest.mark.deep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_any_moment_it_is_resumed_to_the_same_numbers(tmp_path, number):
    suite = {"a": Walk, "b": lengthened(9), "c": Wide}
    whole = evaluate(suite, act, 20, seeds=5, max_envs=2)
    record = tmp_path / "run.jsonl"
    script = tmp_path / "killed.py"
    for lines in (3, 40):  # killed as soon as the record has so many
        paths = {"tests": str(Path(__file__).parent), "record": str(record)}
        script.write_text(textwrap.dedent(KILLED).format(**paths, lines=lines))
        program = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 200
        while not record.exists() or record.read_bytes().count(b"\n") < lines:
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        program.send_signal(number)
        assert program.wait(250) != 0
    assert record.read_bytes().count(b"\n") < 64
    again = evaluate(suite, act, 20, seeds=5, record=record)
    assert same(whole, again)


@pytest.mark.deep
def test_infos_as_a_record_has_them():
    for value, expected in [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.array([True]), True),
        (np.arange(3), [0, 1, 2]),
        ({"a": (np.int64(1), None)}, {"a": [1, None]}),
        (np.longdouble(0.5), 0.5),
        ({1, 2}, "{1, 2}"),
        (1j, "1j"),
    ]:
        assert to_plain(value) == expected == json.loads(json.dumps(to_plain(value))), value
        assert type(to_plain(value)) is type(expected), value


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*task")
@pytest.mark.parametrize("kind", [Dying, *deep(Raising)])
def test_an_episode_whose_env_fails_is_repeated_or_counts_as_failed(tmp_path, kind):
    suite = {"good": Walk, "bad": partial(kind, tmp_path, (3, 5), 2)}
    expected = [row[:4] for row in one_after_the_other(Walk, range(8))]
    result = evaluate(suite, act, 8, seeds=0, max_envs=3)
    assert rows(result["good"]) == rows(result["bad"]) == expected
    assert result.complete and result["bad"].repeats == 4 and not result["good"].repeats
    whole = result
    for mark in tmp_path.iterdir():
        mark.unlink()
    record = tmp_path / "run.jsonl"
    result = evaluate(suite, act, 8, seeds=0, max_envs=3, retries=1, record=record)
    bad = result["bad"]
    assert rows(result["good"]) == expected
    assert rows(bad) == [row for seed, row in enumerate(expected) if seed not in (3, 5)]
    assert bad.seeds.tolist() == [0, 1, 2, 4, 6, 7]
    assert len(bad.failed) == 2 and not result.complete and "bad: 2 failed" in str(result)
    words = "lost its balance" if kind is Raising else "SIGKILL"
    assert [seed for seed, _ in bad.failed] == [3, 5]
    assert all(words in reason for _, reason in bad.failed)
    found = whole.compared_with(result).tasks[1]
    assert (found.before, found.episodes) == (whole["bad"].success_rate, 8)
    assert found.after == bad.success_rate
    assert bad.success_rate == sum(row[3] for row in rows(bad)) / 8
    again = evaluate(suite, act, 8, seeds=0, retries=1, record=record)
    assert same(result, again) and again["bad"].failed == bad.failed
    assert same(result, SuiteEvaluation.read(record))


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*task")
def test_an_env_that_hangs(tmp_path):
    suite = {"good": Walk, "bad": partial(Hanging, tmp_path, (1,), 1)}
    result = evaluate(suite, act, 3, seeds=0, step_timeout=1.0)
    expected = [row[:4] for row in one_after_the_other(Walk, range(3))]
    assert rows(result["good"]) == rows(result["bad"]) == expected
    assert result["bad"].repeats == 1


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*task")
def test_a_task_whose_env_cannot_be_built():
    result = evaluate({"bad": Broken, "good": Walk}, act, 3, seeds=0, max_envs=2)
    assert len(result["good"]) == 3 and len(result["bad"]) == 0
    assert not result.complete
    assert result.failures == {"bad": "OSError: no assets"}
    assert "bad: its env could not be built: OSError: no assets" in str(result)
    assert result.mean == result["good"].success_rate
    with pytest.raises(RuntimeError, match="could not be built: OSError: no assets"):
        evaluate(Broken, act, 3, seeds=0, retries=0)


@pytest.mark.filterwarnings("ignore:.*task")
def test_an_env_of_which_there_can_be_only_one_plays_all(tmp_path):
    """Others of it cannot be built, but its episodes are played: nothing has failed."""
    result = evaluate({"a": partial(Alone, tmp_path)}, act, 8, seeds=0, max_envs=3)
    expected = [row[:4] for row in one_after_the_other(Walk, range(8))]
    assert rows(result["a"]) == expected and result.complete and not result.failures
    assert rows(evaluate(partial(Alone, tmp_path), act, 8, seeds=0, max_envs=3)) == expected


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*task")
def test_an_env_that_is_never_built():
    begin = time.monotonic()
    suite = {"bad": SlowToBuild, "good": Walk}
    result = evaluate(suite, act, 3, seeds=0, max_envs=2, reset_timeout=4.0, retries=0)
    assert len(result["good"]) == 3 and "longer than reset_timeout=4 s" in result.failures["bad"]
    assert time.monotonic() < begin + 200


@pytest.mark.deep
def test_what_the_policy_raises_ends_it(tmp_path):
    def policy(observations, env_ids):
        if (tmp_path / "run.jsonl").read_bytes().count(b"\n") > 3:
            raise KeyError("no weights")
        return act(observations, env_ids)

    suite = {"a": Walk, "b": SlowToBuild}
    with pytest.raises(KeyError, match="no weights"):
        evaluate(suite, policy, 6, seeds=1, record=tmp_path / "run.jsonl")
    result = evaluate({"a": Walk}, act, 6, seeds=1, record=tmp_path / "run.jsonl")
    assert rows(result["a"]) == [row[:4] for row in one_after_the_other(Walk, range(1, 7))]


@pytest.mark.deep
def test_what_a_signal_handler_raises_ends_it():
    def preempt(number, frame):
        raise RuntimeError("preempted")

    def policy(observations, env_ids):
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # it comes while the env steps
        return act(observations, env_ids)

    before = signal.signal(signal.SIGALRM, preempt)
    try:
        with pytest.raises(RuntimeError, match="preempted"):
            evaluate(partial(Slow, 0.3), policy, 3, seeds=0, retries=0, max_envs=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.deep
def test_time_limits(tmp_path):
    record = tmp_path / "run.jsonl"
    suite = {"good": Walk, "slow": SlowToBuild}
    evaluate({"good": Walk}, act, 3, seeds=0, record=record)
    result = evaluate(suite, act, 3, seeds=0, record=record, max_envs=2, hard_time_limit=1.0)
    assert len(result["slow"]) == 0 and not result.complete and not result.failures
    result = evaluate({"good": Walk}, act, 3, seeds=0, record=record, time_limit=1e-9)
    assert result.complete  # it had them
    assert len(evaluate({"good": Walk}, act, 3, seeds=0, time_limit=1e-9)["good"]) == 0
    begin = time.monotonic()
    result = evaluate(suite, act, 3, seeds=0, max_envs=2, time_limit=6.0)
    assert len(result["good"]) == 3 and not result.failures
    assert time.monotonic() < begin + 100  # an env that is still being built is not waited for


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*task")
def test_what_has_begun_before_a_time_limit_counts_whatever_happens_to_its_env(tmp_path):
    def policy(observations, env_ids):
        if not (tmp_path / "late").exists():  # the time is up before any episode is over
            time.sleep(limit_s)
            (tmp_path / "late").touch()
        return act(observations, env_ids)

    limit_s = 2.5
    suite = {"a": partial(DiesLate, tmp_path)}
    result = evaluate(suite, policy, 40, seeds=0, max_envs=2, time_limit=limit_s)
    assert (tmp_path / "died").exists()  # one of the envs, once, after the limit
    expected = [row[:4] for row in one_after_the_other(lengthened(60), range(len(result["a"])))]
    assert rows(result["a"]) == expected
    assert result["a"].repeats == 1 and 1 <= len(expected) < 40


class Single(Walk):
    """Only one can be built, as is found out when that one has played everything."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        if (folder / "built").exists():
            until = time.monotonic() + 60
            while not (folder / "closed").exists() and time.monotonic() < until:
                time.sleep(0.01)
            raise OSError("there is one already")
        (folder / "built").touch()

    def close(self):
        (self.folder / "closed").touch()


@pytest.mark.filterwarnings("ignore:.*task 'a'")
def test_a_second_env_that_cannot_be_built_is_no_failure_of_a_task_that_was_played(tmp_path):
    task = partial(Single, tmp_path)
    result = evaluate({"a": task}, act, 6, seeds=0, max_envs=2, retries=0)
    assert result.complete and not result.failures


@pytest.mark.deep
def test_an_env_that_fails_as_it_closes():
    with pytest.warns(UserWarning, match="as an env of task 'a' was closed: never mind"):
        assert evaluate({"a": FailsToClose}, act, 2, seeds=0, max_envs=1).complete


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.deep
def test_memory_is_kept_to(tmp_path):
    suite = {f"task {i}": partial(Large, tmp_path, 100, meet=True) for i in range(4)}
    result = evaluate(
        suite,
        act,
        3,
        seeds=1,
        options={"more": 15},  # so that the next one is built before it is over
        max_envs=4,
        memory="330 MiB",
        info_keys=["running"],
        retries=0,
    )
    assert result.complete
    most = max(each.infos["running"].max() for each in result.values())
    assert 1 < most < 3


@pytest.mark.deep
def test_an_env_that_grows_is_played_later(tmp_path):
    suite = {"a": partial(Growing, 40), "b": partial(Growing, 40)}
    result = evaluate(suite, act, 2, seeds=1, max_envs=2, memory="300 MiB", retries=0)
    expected = [row[:4] for row in one_after_the_other(Walk, range(1, 3))]
    assert [rows(each) for each in result.values()] == [expected, expected]
    assert all(each.repeats == 0 and not each.failed for each in result.values())


@pytest.mark.deep
def test_an_env_that_alone_is_too_large(tmp_path):
    with pytest.warns(UserWarning, match="'a' alone needs more than memory allows"):
        result = evaluate({"a": partial(Large, tmp_path, 60)}, act, 3, seeds=1, memory="20 MB")
    assert result.complete


def test_sizes():
    for size, expected in [
        ("20 GiB", 20 << 30),
        ("500MB", 500_000_000),
        ("1.5 kib", 1536),
        (7, 7),
        ("12", 12),
    ]:
        assert parse_bytes("memory", size) == expected, size
    for size in ["", "GiB", "3 apples", "-1", 0, -5, "0", float("inf")]:
        with row(size), pytest.raises(ValueError, match="memory must be"):
            parse_bytes("memory", size)


@pytest.mark.deep
def test_memory_of_a_process_counts_those_below():
    program = subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(80 << 20); print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    program.stdout.readline()
    measure = MemoryMeter()
    before = measure(os.getpid())
    assert abs(measure(os.getpid()) - before) < 10 << 20  # by what is cheaper to read
    mine = np.ones(1 << 17)  # one MiB
    assert 0 <= measure(os.getpid()) - before < 11 << 20
    program.communicate(b"\n")
    assert 70 << 20 < before + mine.nbytes - measure(os.getpid()) < 200 << 20


@pytest.mark.deep
def test_a_budget_lets_one_in_until_it_has_seen_some():
    sizes = {1: 30, 2: 10}
    budget = Budget(100, sizes.get)
    assert budget.has_room("a", []) and not budget.has_room("a", [("x", "a")])
    assert budget.check([("x", "a", 1, False)]) and not budget.has_room("a", [("x", "a")])
    assert budget.check([("x", "a", 1, True)]) and budget.has_room("b", [("x", "a"), ("y", "b")])
    assert not budget.has_room("b", [("x", "a"), ("y", "b"), ("z", "b")])
    assert budget.check([("x", "a", 1, True), ("y", "b", 2, True)])
    assert budget.has_room("b", [("x", "a"), ("y", "b"), ("z", "b")])
    sizes[1] = 95
    assert not budget.check([("x", "a", 1, True), ("y", "b", 2, True)])


# ---- order ---------------------------------------------------------------------------------------


@pytest.mark.deep
def test_what_takes_longest_is_begun_first(tmp_path):
    suite = {f"task {i}": lengthened(5 * i) for i in range(4)}
    record = tmp_path / "run.jsonl"
    evaluate(suite, act, 4, seeds=1, record=record, max_envs=1)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    for line in lines:
        if "episode" in line:
            line["seconds"] = {"task 0": 1.0, "task 1": 3.0, "task 2": 2.0, "task 3": 0.5}[
                line["task"]
            ]
    kept = [line for line in lines if line.get("episode", 0) < 2]
    record.write_text("".join(json.dumps(line) + "\n" for line in kept))
    evaluate(suite, act, 4, seeds=1, record=record, max_envs=1)
    again = [json.loads(line) for line in record.read_text().splitlines()][len(kept) :]
    order = list(dict.fromkeys(line["task"] for line in again))
    assert order == ["task 1", "task 2", "task 0", "task 3"]


@pytest.mark.deep
def test_the_last_task_is_played_by_several(tmp_path):
    seen = set()

    def policy(observations, env_ids, task):
        seen.update((number, each.name) for number, each in zip(env_ids, task, strict=True))
        time.sleep(0.001)
        return act(observations, env_ids)

    evaluate({"short": Walk, "long": lengthened(200)}, policy, 12, seeds=1, max_envs=3)
    assert len([number for number, name in seen if name == "long"]) > 1


@pytest.mark.parametrize("kind", [Longer, *deep(MayDie)])
@pytest.mark.filterwarnings("ignore:.*task")
def test_two_envs_that_are_fast_share_a_process(tmp_path, kind):
    """If that dies, each is alone again, and nobody's episode counts as failed for another's."""

    class Told(kind):
        def step(self, action):
            *results, info = super().step(action)
            return *results, {**info, "pid": os.getpid()}

    def policy(observations, env_ids):
        numbers.update(env_ids.tolist())
        return act(observations, env_ids)

    numbers, died, record = set(), tmp_path / "died", tmp_path / "run.jsonl"
    suite = {"a": partial(Told, 9), "b": partial(Told, 9)}
    options = dict(seeds=1, info_keys=["pid"], record=record, options={"dies": str(died)})
    died.touch()
    evaluate(suite, act, 2, max_envs=1, **options)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    for line in lines:  # each step of these took a millisecond, and there were many
        if "episode" in line:
            line |= {"seconds": 1000.0, "steps": 10**6}
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    died.unlink()
    result = evaluate(suite, policy, 12, max_envs=2, retries=0, **options)
    assert result.complete and died.exists() == (kind is MayDie) and numbers == {0, 1}
    expected = [row[:4] for row in one_after_the_other(lengthened(9), range(1, 13))]
    for each in result.values():
        assert rows(each) == expected
        if kind is Longer:
            assert len(set(each.infos["pid"][2:].tolist())) == 1
        else:
            assert not each.failed


# ---- results -------------------------------------------------------------------------------------


def test_statistics_over_tasks():
    suite = {"a": Task(Walk, reference=(-5, 5)), "b": Task(lengthened(9), reference=(0, 10))}
    result = evaluate(suite, act, 6, seeds=1, max_envs=2)
    scores = result.scores()
    assert result.score == "normalised return"
    np.testing.assert_allclose(scores["a"], (result["a"].returns + 5) / 10)
    assert result.mean == pytest.approx(np.mean([scores["a"].mean(), scores["b"].mean()]))
    together = np.sort(np.concatenate(list(scores.values())))
    assert result.interquartile_mean == pytest.approx(together[3:9].mean())
    low, high = result.confidence_interval("mean")
    assert low < result.mean < high
    rates = [each.success_rate for each in result.values()]
    assert result.success_rate == pytest.approx(np.mean(rates))
    assert "| normalised |" in str(result) and "Over tasks, the normalised return:" in str(result)
    columns = result.columns()
    assert columns["task"].tolist() == ["a"] * 6 + ["b"] * 6
    assert columns["return"].tolist() == result["a"].returns.tolist() + result["b"].returns.tolist()
    assert set(result.scores("success")) == {"a", "b"}
    with pytest.raises(ValueError, match="score must be"):
        result.scores("points")


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*task")
def test_a_task_all_of_whose_episodes_failed_has_no_success(tmp_path):
    suite = {"good": Walk, "bad": partial(Raising, tmp_path, range(9), 99)}
    result = evaluate(suite, act, 4, seeds=1, retries=0)
    assert len(result["bad"].failed) == 4
    assert result.success_rate == result.mean == result["good"].success_rate / 2


@pytest.mark.deep
def test_intervals_are_those_of_rliable():
    library = pytest.importorskip("rliable.library")
    metrics = pytest.importorskip("rliable.metrics")
    suite = {"a": Task(Walk, reference=(0, 1)), "b": Task(lengthened(9), reference=(0, 1))}
    result = evaluate(suite, act, 20, seeds=1)
    scores = {"x": np.stack(list(result.scores().values()), axis=1)}
    points, intervals = library.get_interval_estimates(
        scores, lambda each: np.array([metrics.aggregate_iqm(each)]), reps=5000
    )
    assert result.interquartile_mean == pytest.approx(points["x"][0])
    np.testing.assert_allclose(
        result.confidence_interval(), intervals["x"][:, 0], atol=0.1 * np.ptp(intervals["x"])
    )


@pytest.mark.deep
def test_two_results_compared():
    suite = {"same": Walk, "other": lengthened(9)}

    def better(observations, env_ids, task):
        chosen = act(observations, env_ids)
        return np.where([each.name == "other" for each in task], 4 - chosen, chosen)

    before = evaluate(suite, act, 30, seeds=1)
    after = evaluate(suite, better, 30, seeds=1)
    found = before.compared_with(after)
    same_, other = found.tasks
    assert (same_.change, same_.interval, same_.differs) == (0.0, (0.0, 0.0), False)
    assert other.change == pytest.approx(after["other"].success_rate - before["other"].success_rate)
    assert other.interval[0] <= other.change <= other.interval[1]
    assert found.overall.episodes == 60 and "| all tasks | 60 |" in str(found)
    assert found.differing == (["other"] if other.differs else [])
    few = evaluate(suite, better, 5, seeds=28)  # three of these seeds are in both
    assert [each.episodes for each in before.compared_with(few).tasks] == [3, 3]
    with pytest.raises(ValueError, match="no episode in common"):
        before.compared_with(evaluate(suite, act, 2, seeds=900))


@pytest.mark.deep
def test_videos_of_each_task(tmp_path):
    pytest.importorskip("moviepy")

    def policy(observations, env_ids):
        return np.zeros(len(env_ids), np.int64)

    suite = {
        "cart pole": "CartPole-v1",
        "a/b": Task("CartPole-v1", kwargs={"max_episode_steps": 5}),
    }
    evaluate(suite, policy, 3, seeds=1, video_folder=tmp_path, video_episodes=[0, 2])
    for folder in ("cart-pole", "a-b"):
        names = sorted(path.name for path in (tmp_path / folder).iterdir())
        assert names == [f"evaluation-episode-{number}.mp4" for number in (0, 2)]


@pytest.mark.deep
def test_progress(capsys):
    seen = []
    evaluate({"a": Walk, "b": Walk}, act, 3, seeds=1, progress=seen.append)
    assert sorted((each.task, each.number) for each in seen) == [
        (name, number) for name in "ab" for number in range(3)
    ]
    told = []
    evaluate({"a": Walk}, act, 3, seeds=1, progress=lambda *how_far: told.append(how_far[1:]))
    over, episodes, left_s = zip(*told, strict=True)
    assert over == (1, 2, 3) and set(episodes) == {3} and min(left_s[:2]) > left_s[2] == 0
    pytest.importorskip("tqdm")
    evaluate({"a": Walk, "b": Walk}, act, 3, seeds=1, max_envs=1, progress=True)
    bars = re.findall("6/6 .*", capsys.readouterr().err)
    assert bars and all(bar.count("<") == 1 and "more" not in bar for bar in bars)


# ---- the command ---------------------------------------------------------------------------------

MINE = """
import gymnasium
import numpy as np


def policy(observations, env_ids):
    return np.zeros(len(env_ids), np.int64)


def make(length=3):
    return gymnasium.make("CartPole-v1", max_episode_steps=length)
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_env.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)

    def run(suite, arguments=""):
        (tmp_path / "suite.toml").write_text(suite)
        given = f"evaluate suite.toml --policy mine_env.py:policy {arguments}"
        try:
            status = shmvec.__main__.main(given.split())
        except SystemExit as ended:
            status = ended.code
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    yield run
    sys.modules.pop("mine_env", None)


SUITE = "episodes = 2\nseeds = 1\n[tasks.a]\nenv = 'mine_env.py:make'\n"


def test_a_suite_from_a_file_is_resumed_and_compared(tmp_path, command):
    suite = SUITE + "[tasks.b]\nenv = 'mine_env.py:make'\nkwargs = {length = 5}\n"
    status, out, _ = command(suite, "--record run.jsonl --json found.json")
    assert status == 0 and out.startswith("2 tasks, 4 episodes of 4, ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["task"] == ["a", "a", "b", "b"] and found["return"] == [3.0, 3.0, 5.0, 5.0]
    status, out, err = command(suite, "--record run.jsonl --progress --episodes 4")
    assert status == 0 and err.splitlines()[-1].startswith("8 of 8 episodes, mean return 4.00")
    listed = suite.replace("episodes = 2\nseeds = 1\n", "seeds = [1, 2]\n")
    assert command(listed, "--record run.jsonl")[1].startswith("2 tasks, 4 episodes of 4, ")
    status, out, _ = command(suite, "--compare run.jsonl")
    assert status == 0 and "| all tasks | 4 | 4.000 | 4.000 | +0.000 |" in out
    status, out, err = command(suite, "--compare run.jsonl --seeds 90 --json other.json")
    assert status == 1 and "no episode in common" in err and (tmp_path / "other.json").exists()
    status, _, err = command(suite, "--record run.jsonl --seeds 2")
    assert status == 2 and "Give this evaluation another record" in err


WRONG_SUITES = [
    ("hello", "", "is not TOML"),
    ("tasks = [1]", "", "has no tasks"),
    ("tasks = [['a']]", "", "has no tasks"),
    ("tasks = ['NoSuchEnv-v0']", "", "NoSuchEnv"),
    ("[tasks]\na = 3", "", "task 'a': needs env"),
    ("[tasks]\na = [1]", "", "task 'a': needs env"),
    ("[tasks.a]\nenv = 3", "", "task 'a': needs env"),
    ("[tasks.a]\nkwargs = {}", "", "'env'"),
    (SUITE + "kwargs = 3", "", "task 'a': needs env"),
    (SUITE + "kwargs = {x = 3}", "", "make takes (length=3)"),
    (SUITE + "reference = 3", "", "task 'a': needs env"),
    (SUITE + "reference = [0, inf]", "", "task 'a': reference must be"),
    (SUITE + "referenc = [0, 1]", "", "Did you mean 'reference'"),
    ("[tasks.a]\nenv = 'mine_env.py:mke'", "", "has no function 'mke'"),
    ("episods = 2\n" + SUITE, "", "Did you mean 'episodes'"),
    ("policy = 'x'\n" + SUITE, "", "no option 'policy'"),
    ("progress = true\n" + SUITE, "", "no option 'progress'"),
    ("episodes = '5'\n[tasks.a]\nenv = 'mine_env.py:make'", "", "episodes must be an int"),
    (SUITE, "--memory lots", "memory must be a size"),
    (SUITE, "--gpu-memory 8GiB", "gpu_memory= is gone"),
    ("gpu_memory = '8 GiB'\n" + SUITE, "", "gpu_memory= is gone"),
    (SUITE, "--retries -1", "retries must not be negative"),
    (SUITE, '--kwargs {"length":2}', "--kwargs is for one env"),
    (SUITE, "--compare nothing.jsonl", "nothing.jsonl"),
    (SUITE, "--record suite.toml", "not a record of an evaluation"),
]


def test_the_command_explains_what_is_wrong_with_a_suite(command):
    for suite, arguments, words in WRONG_SUITES:
        with row(suite, arguments):
            status, out, err = command(suite, arguments)
            assert status == 2 and words in err and not out


# ---- bad input -----------------------------------------------------------------------------------


def test_bad_input_is_refused_before_anything_starts(tmp_path):
    for envs, error, words in (
        ({}, ValueError, "at least one task"),
        ("NoSuchEnv*", ValueError, "matches 'NoSuchEnv"),
        (["CartPole-v1", "CartPole-v1"], ValueError, "two tasks are called 'CartPole-v1'"),
        ({"a": 3}, TypeError, "task 'a': an env is an id"),
        ({"": Walk}, TypeError, "the name of a task"),
        ({"a": "CartPole-v1000"}, gym.error.Error, "CartPole"),
        ({"a": "nowhere.py:make"}, ValueError, "there is no file nowhere.py"),
    ):
        with pytest.raises(error, match=words):
            evaluate(envs, act, 1)
    for options, error, words in (
        (dict(num_workers=2), ValueError, "cannot have num_workers"),
        (dict(faults=shmvec.FaultPolicy()), ValueError, "retries="),
        (dict(num_wokers=2), TypeError, "has no option 'num_wokers'"),
        (dict(max_envs=0), ValueError, "max_envs"),
        (dict(max_envs=2, num_envs=2), ValueError, "give one of them"),
        (dict(retries=-1), ValueError, "retries"),
        (dict(memory="much"), ValueError, "memory must be"),
        (dict(gpu_memory="8 GiB"), TypeError, "gpu_memory= is gone: it was never tried on a GPU"),
        (dict(step_timeout=-1), ValueError, "step_timeout"),
        (dict(context="thread"), ValueError, "context"),
    ):
        with pytest.raises(error, match=words):
            evaluate({"a": Walk}, act, 1, **options)
    record = tmp_path / "run.jsonl"
    for options, error, words in (
        (dict(info_keys=[1]), TypeError, "keys of infos must be texts"),
        (dict(video_folder=tmp_path, video_episodes=0), TypeError, "not iterable"),
        (dict(cluster=True, time_limit=3.0), ValueError, "there is no time_limit"),
        (dict(actor_options={}), ValueError, "need cluster=True"),
        (dict(video_folder=tmp_path), ValueError, r"in one folder: \['a/b', 'A-b'\]"),
    ):
        with pytest.raises(error, match=words):
            evaluate({"a/b": Walk, "c": Walk, "A-b": Walk}, act, 1, record=record, **options)
        assert not record.exists()
    with pytest.raises(ValueError, match="functions that make the envs"):
        with_vector(tmp_path)
    with pytest.raises(ValueError, match="reference"):
        Task(Walk, reference=(1, 1))
    with pytest.raises(TypeError, match="policy must"):
        evaluate({"a": Walk}, lambda: 0, 1)


def with_vector(tmp_path):
    envs = ShmVectorEnv([Walk], num_workers=0, autoreset_mode="Disabled")
    try:
        evaluate(envs, act, 1, record=tmp_path / "run.jsonl")
    finally:
        envs.close()


# ---- what others do at the same time -------------------------------------------------------------


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.deep
@pytest.mark.parametrize("where", ["start", "attach"])
def test_an_env_that_is_ended_while_it_starts_leaves_nothing(monkeypatch, capfd, where):
    """Its thread starts a process, or makes memory, at the moment when another one ends it."""
    evaluate({"a": Walk}, act, 1, seeds=0)
    before = open_files()
    begun, go_on = threading.Event(), getattr(Supervisor, where)

    def slowly(self, *arguments):
        if self._launcher._name == "evaluate b":
            start = self._launcher.start

            def started(index, mark, keep):
                start(index, mark, lambda *made: (keep(*made), begun.set(), time.sleep(0.5)))

            self._launcher.start = started
            if where == "attach":
                begun.set()
                time.sleep(0.5)
        return go_on(self, *arguments)

    monkeypatch.setattr(Supervisor, where, slowly)

    def policy(observations, env_ids):
        begun.wait(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate({"a": Walk, "b": Walk}, policy, 2, seeds=0, max_envs=2)
    deadline = time.monotonic() + 60
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert open_files() <= before
    assert "Traceback" not in capfd.readouterr().err


def test_two_processes_never_have_the_same_number(tmp_path):
    """Not even while one of them is slow to close: it may stand for a port, or for a GPU."""

    suite = {"a": SlowToClose, "b": Walk, "c": partial(Slow, 0.2), "d": Walk, "e": Walk}
    result = evaluate(
        suite, act, 2, seeds=1, max_envs=3, retries=0, worker_init=partial(take_alone, tmp_path)
    )
    assert result.complete and len(list(tmp_path.iterdir())) == 3
