"""Partial batches: envs that are ready first, each env's own story untouched."""

import multiprocessing
import signal
import threading
import time
from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest
from envs import CountEnv, Counter, Fails, Gated, Story, stories
from equality import MODES, same, sync_env
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import send_signal
from tables import deep, row

from shmvec import ShmVectorEnv

DEADLINE = 100.0


def alone(make, mode, seed, actions):
    """What an env returns that is stepped alone: [(observation, reward, ..., info)]."""
    envs = sync_env([make], mode)
    observations, infos = envs.reset(seed=seed)
    returned = [(observations, np.zeros(1), np.zeros(1, bool), np.zeros(1, bool), infos)]
    returned += [envs.step(np.array([action])) for action in actions]
    envs.close()
    return returned


def part(infos, rows):
    """The infos of some envs of a batch, as those of a batch of these."""
    found = {}
    for key, value in infos.items():
        if not key.startswith("_") and key != "env_id":
            mask = infos[f"_{key}"][rows]
            if mask.any():
                found[key] = part(value, rows) if isinstance(value, dict) else value[rows]
                found[f"_{key}"] = mask
    return found


def assert_infos(infos, expected):
    """Infos are equal, whatever the order of their keys."""
    assert infos.keys() == expected.keys()
    for key in expected:
        if isinstance(expected[key], dict):
            assert_infos(infos[key], expected[key])
        else:
            assert same(infos[key], expected[key])


@settings(max_examples=30, deadline=None)
@given(
    num_envs=st.integers(1, 9),
    workers=st.integers(0, 4),
    batch=st.integers(1, 9),
    turns=st.sampled_from([0, 200, 5000]),
    mode=st.sampled_from(MODES[:2]),
    messages=st.booleans(),
    copy=st.booleans(),
    data=st.data(),
)
def test_every_env_tells_its_own_story(num_envs, workers, batch, turns, mode, messages, copy, data):
    batch, workers = min(batch, num_envs), min(workers, num_envs)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    envs = ShmVectorEnv(
        stories(num_envs, turns),
        not messages,
        autoreset_mode=mode,
        num_workers=workers,
        batch_size=batch,
        copy=copy,
        num_buffers=64,  # views are kept to the end, and must not have changed by then
    )
    try:
        received = [[] for _ in range(num_envs)]
        given_to = [[] for _ in range(num_envs)]
        envs.async_reset(seed=3)
        out = num_envs
        for _ in range(60):
            least = int(rng.integers(1, batch + 1)) if rng.random() < 0.3 else None
            if out < (least or batch):
                break
            *results, infos = envs.recv(min_envs=least, timeout=DEADLINE)
            ids = infos["env_id"]
            assert ids.dtype == np.int64 and len(set(ids.tolist())) == len(ids) <= batch
            out -= len(ids)
            for row, env in enumerate(ids):
                rows = slice(row, row + 1)
                received[env].append((*[array[rows] for array in results], part(infos, rows)))
            again = ids[rng.random(len(ids)) < 0.95]
            if len(again):
                actions = rng.integers(1000, size=len(again))
                for env, action in zip(again, actions, strict=True):
                    given_to[env].append(action)
                envs.send(actions, again)
                out += len(again)
    finally:
        envs.close()
    for env, story in enumerate(received):
        expected = alone(stories(num_envs, turns)[env], mode, 3 + env, given_to[env])
        for mine, theirs in zip(story, expected[: len(story)], strict=True):
            assert same(mine[:4], theirs[:4])
            assert_infos(mine[4], theirs[4])


@pytest.mark.parametrize("workers, batch", [(1, 3), *deep((0, 1), (0, 3), (0, 7), (1, 1), (1, 7))])
def test_nobody_waits_while_others_are_served_twice(workers, batch):
    """One worker answers in the order in which it was asked: strictly by turns."""
    envs = ShmVectorEnv(stories(7), num_workers=workers, batch_size=batch)
    try:
        envs.async_reset()
        last = {env: 0 for env in range(7)}
        for turn in range(1, 200):
            ids = envs.recv(timeout=DEADLINE)[-1]["env_id"]
            last.update(dict.fromkeys(ids.tolist(), turn))
            envs.send(np.zeros(len(ids), int), ids)
            assert turn - min(last.values()) <= -(-7 // batch)
    finally:
        envs.close()


@pytest.mark.deep
def test_many_sends_of_random_sizes():
    """Many steps: none lost, none twice, none out of order within an env."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 40_000)
    envs = ShmVectorEnv([CountEnv] * 16, num_workers=2, batch_size=8)
    try:
        envs.async_reset()
        counts = np.full(16, -1)
        steps = turn = 0
        while steps < 100_000:
            observations, _, _, _, infos = envs.recv(min_envs=int(sizes[turn]), timeout=DEADLINE)
            ids = infos["env_id"]
            counts[ids] += 1
            assert (observations[:, 0] == counts[ids]).all()
            envs.send(ids, ids)
            steps += len(ids)
            turn += 1
    finally:
        envs.close()


@pytest.mark.parametrize("workers", [2, *deep(0, 4)])
def test_order_is_recorded_and_replayed(workers):
    def run(**order):
        envs = ShmVectorEnv(stories(6, 3000), num_workers=workers, batch_size=2, **order)
        try:
            envs.async_reset(seed=1)
            results = []
            for _ in range(40):
                results.append(envs.recv(timeout=DEADLINE))
                ids = results[-1][-1]["env_id"]
                envs.send(ids * 2, ids)
            return results
        finally:
            envs.close()

    order = []
    first = run(record_order=order)
    assert len(order) == 40 and all(len(ids) == 2 for ids in order)
    again = []
    second = run(replay_order=order, record_order=again)
    assert same([ids.tolist() for ids in again], [ids.tolist() for ids in order])
    for mine, theirs in zip(second, first, strict=True):
        assert same(mine[:4], theirs[:4])
        assert_infos(mine[4], theirs[4])


@pytest.mark.deep
@pytest.mark.parametrize("batch_size", [3, (2, 3)])
def test_fewer_envs_than_a_batch_are_reset_and_stepped(batch_size):
    late = {"batch_timeout": DEADLINE} if isinstance(batch_size, tuple) else {}
    envs = ShmVectorEnv(stories(4), num_workers=2, batch_size=batch_size, **late)
    try:
        envs.reset(seed=1)
        envs.recv(min_envs=1, timeout=DEADLINE)
        mask = np.array([False, True, False, False])
        assert envs.reset(options={"reset_mask": mask})[1]["env_id"].tolist() == [1]
        assert envs.step([5], [2])[1].tolist() == [5]
    finally:
        envs.close()


def test_an_order_that_does_not_fit():
    envs = ShmVectorEnv(stories(3), num_workers=1, batch_size=1, replay_order=[[0], [0], [1, 2]])
    try:
        envs.async_reset()
        envs.recv(timeout=DEADLINE)
        with pytest.raises(ValueError, match=r"batch 1 has envs \[0\]"):
            envs.recv(timeout=DEADLINE)
        assert envs.recv(timeout=DEADLINE)[-1]["env_id"].tolist() == [1, 2]
        with pytest.raises(ValueError, match="replay_order is over: it holds 3 batches"):
            envs.recv()
    finally:
        envs.close()


@pytest.mark.deep
def test_a_batch_of_an_order_that_is_not_ready_in_time_is_the_next_one_again():
    envs = ShmVectorEnv(stories(2), num_workers=1, batch_size=1, replay_order=[[1], [0]])
    try:
        send_signal(envs.processes[0], signal.SIGSTOP)
        try:
            envs.async_reset()
            with pytest.raises(multiprocessing.TimeoutError):
                envs.recv(timeout=0.01)
        finally:
            send_signal(envs.processes[0], signal.SIGCONT)
        for env in (1, 0):
            assert envs.recv(timeout=DEADLINE)[-1]["env_id"].tolist() == [env]
    finally:
        envs.close()


def test_step_and_reset_are_those_of_envpool():
    envs = ShmVectorEnv(stories(4), num_workers=2, batch_size=2)
    try:
        observations, infos = envs.reset(seed=5)
        assert observations.shape == (2, 5) and infos["env_id"].shape == (2,)
        for _ in range(10):
            ids = infos["env_id"]
            observations, rewards, *_, infos = envs.step(ids + 10, ids)
            assert observations.shape == (2, 5)
            assert ((rewards == 0) | (rewards == infos["env_id"] + 10)).all()
    finally:
        envs.close()


def test_all_at_once_without_a_batch_size():
    envs, reference = ShmVectorEnv(stories(4), num_workers=2), SyncVectorEnv(stories(4))
    try:
        envs.async_reset(seed=1)
        observations, *_, infos = envs.recv(timeout=DEADLINE)
        expected = reference.reset(seed=1)[0]
        assert same(observations[np.argsort(infos["env_id"])], expected)
        some = envs.step([7, 8], env_id=[2, 0])
        assert some[-1]["env_id"].tolist() == [2, 0]  # in the order asked for, as EnvPool has it
        assert some[1].tolist() == [7, 8]
        envs.send([1, 2, 3, 4])
        assert sorted(envs.recv(timeout=DEADLINE)[1]) == [1, 2, 3, 4]
        assert envs.step(np.zeros(4, int))[0].shape == (4, 5)  # and as ever
    finally:
        envs.close()
        reference.close()


class Gate(Story):
    """Steps only when the gate of its action is open."""

    def __init__(self, index, gates):
        super().__init__(index)
        self.gates = gates

    def step(self, action):
        assert self.gates[self.index].wait(DEADLINE)
        self.gates[self.index].clear()
        return super().step(action)


@contextmanager
def gated():
    context = multiprocessing.get_context("fork")
    gates = [context.Event() for _ in range(3)]
    envs = ShmVectorEnv(
        [lambda i=i: Gate(i, gates) for i in range(3)],
        context="fork",
        num_workers=3,
        batch_size=2,
    )
    envs.async_reset()
    while envs.exchange.num_in_flight:
        envs.recv(min_envs=1, timeout=DEADLINE)
    try:
        yield envs, gates
    finally:
        for gate in gates:
            gate.set()
        envs.close()


def test_part_of_a_batch_when_the_time_is_up():
    with gated() as (envs, gates):
        envs.send([0, 0, 0])
        with pytest.raises(multiprocessing.TimeoutError, match="0 of 2 envs are ready"):
            envs.recv(timeout=0.01)
        with pytest.raises(multiprocessing.TimeoutError, match="0 of 1 envs are ready"):
            envs.recv(min_envs=1, timeout=0.01)
        gates[1].set()
        assert envs.recv(min_envs=1, timeout=DEADLINE)[-1]["env_id"].tolist() == [1]
        gates[2].set()
        deadline = time.monotonic() + DEADLINE
        while True:  # until env 2 is ready, of which we do not hear otherwise
            try:
                found = envs.recv(min_envs=2, timeout=0.02)
                break
            except multiprocessing.TimeoutError:
                assert time.monotonic() < deadline
        assert found[-1]["env_id"].tolist() == [2]
        with pytest.raises(NoAsyncCallError, match="for 2 envs, but only 1 have been asked"):
            envs.recv()
        gates[0].set()
        assert envs.recv(min_envs=1, timeout=DEADLINE)[-1]["env_id"].tolist() == [0]


def test_nothing_else_while_envs_are_out():
    with gated() as (envs, gates):
        envs.send([5], [1])
        for call in (
            lambda: envs.step_async([0, 0, 0]),
            lambda: envs.reset_async(),
            lambda: envs.call("index"),
            lambda: envs.step([1, 1, 1], mask=np.array([True, False, True])),
        ):
            with pytest.raises(AlreadyPendingCallError, match="with `recv`"):
                call()
        with pytest.raises(ValueError, match="env 1 has been asked already"):
            envs.send([0, 0], [0, 1])
        with pytest.raises(ValueError, match="env 1 has been asked already"):
            envs.async_reset()
        gates[1].set()
        assert envs.recv(min_envs=1, timeout=DEADLINE)[1].tolist() == [5]
        assert envs.call("index") == (0, 1, 2)
        envs.step_async([0, 0, 0])
        for call in (envs.recv, envs.async_reset, lambda: envs.send([0], [0])):
            with pytest.raises(AlreadyPendingCallError, match="pending call to `step`"):
                call()
        for gate in gates:
            gate.set()
        envs.step_wait()


BAD_SENDS = [
    (([1], [3]), ValueError, "there is no env 3"),
    (([1], [-1]), ValueError, "there is no env -1"),
    (([1, 1], [0, 0]), ValueError, "env 0 is named twice"),
    (([1], []), ValueError, "one dimension"),
    (([1], 0), ValueError, "one dimension"),
    (([1], [0.0]), TypeError, "must be integers"),
    (([1, 2], [0]), ValueError, "wrong actions: there are 2"),
    (([0.5], [0]), TypeError, "wrong actions: they have dtype float64"),
    (([1, 2],), ValueError, "wrong actions: there are 2. 3 envs"),
]


def test_bad_sends():
    envs = ShmVectorEnv(stories(3), num_workers=1, batch_size=1)
    try:
        for arguments, error, message in BAD_SENDS:
            with row(*arguments):
                with pytest.raises(error, match=message):
                    envs.send(*arguments)
                with pytest.raises(NoAsyncCallError):
                    envs.recv()
        with pytest.raises(ValueError, match="min_envs must be between 1 and 1"):
            envs.recv(min_envs=2)
        envs.reset()
    finally:
        envs.close()
    for call in (envs.recv, envs.async_reset, lambda: envs.send([0], [0])):
        with pytest.raises(ClosedEnvironmentError):
            call()


def test_bad_batch_sizes():
    for options, error, message in [
        ({"batch_size": 0}, ValueError, "batch_size must be"),
        ({"batch_size": 4}, ValueError, "batch_size must be"),
        ({"batch_size": 1.5}, TypeError, "batch_size must be"),
        ({"batch_size": "2"}, TypeError, "batch_size must be"),
        ({"batch_size": (1, 3)}, ValueError, "belong together"),
        ({"batch_size": 2, "batch_timeout": 1.0}, ValueError, "belong together"),
        ({"batch_timeout": 1.0}, ValueError, "belong together"),
        ({"batch_size": (3, 1), "batch_timeout": 1.0}, ValueError, "in order"),
        ({"batch_size": (0, 1), "batch_timeout": 1.0}, ValueError, "between 1 and"),
        ({"batch_size": (1, 4), "batch_timeout": 1.0}, ValueError, "between 1 and"),
        ({"batch_size": (1, 2, 3), "batch_timeout": 1.0}, ValueError, "a pair"),
        ({"batch_size": (1, 2), "batch_timeout": -1.0}, ValueError, "must not be negative"),
    ]:
        with row(options), pytest.raises(error, match=message):
            ShmVectorEnv(stories(3), **options)


@pytest.mark.parametrize("shared_memory", [True, *deep(False)])
def test_an_env_that_raises(shared_memory):
    """The others' results are not lost, and the env can be reset."""
    envs = ShmVectorEnv(
        [lambda i=i: Fails(i) for i in range(4)], shared_memory, num_workers=2, batch_size=1
    )
    try:
        envs.async_reset(seed=0)
        for _ in range(4):
            envs.recv(timeout=DEADLINE)
        envs.send([1, 13, 3, 4])
        got, failed = [], 0
        while len(got) < 3 or not failed:
            try:
                got += envs.recv(timeout=DEADLINE)[-1]["env_id"].tolist()
            except LookupError as error:
                assert error.args == ("thirteen", 1) and "env 1" in str(error.__cause__)
                failed += 1
        with pytest.raises(NoAsyncCallError):
            envs.recv()
        assert sorted(got) == [0, 2, 3] and failed == 1
        envs.async_reset(options={"reset_mask": np.array([False, True, False, False])})
        *_, infos = envs.recv(timeout=DEADLINE)
        assert infos["env_id"].tolist() == [1] and infos["episode"].tolist() == [2]
    finally:
        envs.close()


@pytest.mark.deep
def test_envs_that_raise_in_a_masked_step():
    """Raised together, as by step(), after the others have made theirs; nothing is left over."""
    envs = ShmVectorEnv([lambda i=i: Fails(i) for i in range(4)], num_workers=2)
    try:
        envs.reset(seed=0)
        with pytest.raises(LookupError) as caught:
            envs.step([13, 5, None, 13])
        assert caught.value.args == ("thirteen", 0)
        assert not hasattr(caught.value, "add_note") or "env 3" in caught.value.__notes__[0]
        assert envs.get_attr("asked") == (0, 1, 0, 0)
        assert envs.step([1, 1, 1, 1])[4]["asked"].tolist() == [1, 2, 1, 1]
    finally:
        envs.close()


@pytest.mark.deep
def test_a_reset_that_cannot_be_sent():
    envs = ShmVectorEnv(stories(2), num_workers=1)
    try:
        envs.reset()
        with pytest.raises(TypeError, match="pickle"):
            envs.async_reset(options={"lock": threading.Lock()})
        assert envs.step([1, 1])[1].tolist() == [1, 1]
    finally:
        envs.close()


@pytest.mark.parametrize("workers", [3, *deep(0, 1)])
def test_envs_left_out_keep_their_state_and_results(workers):
    envs, reference = ShmVectorEnv(stories(5), num_workers=workers), [Story(i) for i in range(5)]
    rng = np.random.default_rng(0)
    try:
        envs.reset(seed=4)
        last = [(env.reset(seed=4 + i)[0], 0.0, False, False) for i, env in enumerate(reference)]
        over = [False] * 5
        for turn in range(60):
            mask = rng.random(5) < 0.6
            mask[rng.integers(5)] = True
            actions = rng.integers(1000, size=5)
            infos = {}
            for i in np.flatnonzero(mask):
                if over[i]:
                    observation, info = reference[i].reset()
                    last[i] = (observation, 0.0, False, False)
                else:
                    *last[i], info = reference[i].step(actions[i])
                over[i] = last[i][2] or last[i][3]
                infos = SyncVectorEnv._add_info(envs, infos, info, i)
            given = actions
            if turn % 2:
                given = [a if m else None for a, m in zip(actions.tolist(), mask, strict=True)]
            results = envs.step(given, mask=None if turn % 2 else mask)
            assert same(results[:4], tuple(np.array(x) for x in zip(*last, strict=True)))
            assert same(results[4], infos)
    finally:
        envs.close()


def test_bad_masks():
    envs = ShmVectorEnv(stories(2), num_workers=1)
    try:
        envs.reset()
        with pytest.raises(ValueError, match="`mask` must have shape"):
            envs.step([1, 1], mask=np.ones(3, bool))
        with pytest.raises(TypeError, match="`mask` must be a numpy array"):
            envs.step([1, 1], mask=[True, False])
        with pytest.raises(ValueError, match="all 2 are None.*at least one env an action"):
            envs.step([None, None])
        with pytest.raises(ValueError, match="not both"):
            envs.step([1, None], env_id=[0, 1])
        with pytest.raises(TypeError, match="wrong actions"):
            envs.step([0.5, None])
        assert envs.step([3, None])[1].tolist() == [3, 0]
        assert envs.step([0, None])[4]["asked"].tolist() == [2, 0]  # an action of 0 is one
    finally:
        envs.close()


class Shouts(Counter):
    def step(self, action):
        raise ValueError("x" * 20000)


@pytest.mark.deep
def test_exceptions_that_do_not_fit_the_pipes():
    """A worker that cannot say one answers no other: they are taken while the rest is awaited."""
    envs = ShmVectorEnv([Shouts] * 32, num_workers=2)
    try:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="xxx"):
            envs.step(np.zeros(32, int), mask=np.arange(32) > 0)
    finally:
        envs.close()


# ---- batches with a deadline ------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [3, *deep(0)])
def test_a_batch_is_the_most_if_they_are_in_time(num_workers):
    options = {"batch_size": (1, 3), "batch_timeout": DEADLINE, "num_workers": num_workers}
    with closing(ShmVectorEnv([lambda: Counter(99)] * 3, **options)) as envs:
        assert envs.batch_size == 3
        *_, infos = envs.reset(seed=0)
        for _ in range(5):
            envs.send([0] * 3, infos["env_id"])
            *_, infos = envs.recv()
            assert sorted(infos["env_id"]) == [0, 1, 2]


def test_at_the_deadline_a_batch_is_what_is_ready(tmp_path):
    gates = [tmp_path / str(env) for env in range(3)]
    fns = [partial(Gated, gate) for gate in gates]
    options = {"num_workers": 3, "batch_size": (1, 3), "batch_timeout": 0.05}
    with closing(ShmVectorEnv(fns, **options)) as envs:
        seen = []
        envs.async_reset(seed=0)
        while len(seen) < 3:
            seen += envs.recv()[-1]["env_id"].tolist()
        for gate in gates[1:]:
            gate.touch()
        envs.send([0] * 3, [0, 1, 2])
        seen = []
        while len(seen) < 2:  # usually one batch
            seen += envs.recv()[-1]["env_id"].tolist()
        assert sorted(seen) == [1, 2]
        with pytest.raises(multiprocessing.TimeoutError):  # the least is not ready either
            envs.recv(timeout=0.1)
        gates[0].touch()
        assert envs.recv()[-1]["env_id"].tolist() == [0]
        with pytest.raises(NoAsyncCallError):
            envs.recv()
        envs.send([0], [2])  # fewer than the most are in flight
        assert envs.recv()[-1]["env_id"].tolist() == [2]


@pytest.mark.deep
def test_the_least_is_waited_for_beyond_the_deadline(tmp_path):
    gates = [tmp_path / str(env) for env in range(3)]
    fns = [partial(Gated, gate) for gate in gates]
    options = {"num_workers": 3, "batch_size": (2, 3), "batch_timeout": 0.0}
    with closing(ShmVectorEnv(fns, **options)) as envs:
        for gate in gates:
            gate.touch()
        ready = envs.reset(seed=0)[-1]["env_id"].tolist()
        assert len(ready) >= 2
        for gate in gates:
            gate.unlink()
        envs.send([0] * len(ready), ready)
        opener = threading.Timer(0.2, lambda: [gate.touch() for gate in gates])
        opener.start()
        assert len(envs.recv()[-1]["env_id"]) >= 2
        opener.join()
