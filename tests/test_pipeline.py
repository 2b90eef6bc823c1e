"""A pipeline's rollouts and transitions: those of lockstep, whichever envs are stepped when."""

import importlib.util
import itertools
import sys
import types
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from envs import Fails, Nested, Speaks, Story, stories
from equality import MODES as MODES_OF_SYNC
from equality import equal, same, sync_env
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_benchmark
from replay_reference import at
from tables import deep, paired, row

from shmvec import FaultPolicy, Pipeline, ShmVectorEnv, evaluate
from shmvec.exchange import AutoresetMode
from shmvec.pipeline import GroupingTuner, Tensors, form_groups

MODES = MODES_OF_SYNC[:2]  # those in which envs are reset


class Chooser:
    """Chooses by each row alone; remembers its batches, and keeps a state for each env."""

    def __init__(self, num_envs=0, space=Story.action_space, said=True):
        self.space, self.said = space, said
        self.steps = np.full(num_envs, -1)  # of the episode; -1: it has not begun
        self.batches = []

    def reset(self, env_ids):
        if len(self.steps):
            self.steps[env_ids] = 0

    def __call__(self, observations, env_ids):
        self.batches.append(env_ids.tolist())
        text = observations["text"] if isinstance(observations, dict) else observations
        own = env_ids[env_ids >= 0]
        if len(self.steps):
            assert (self.steps[own] >= 0).all()
            self.steps[own] += 1
        numbers = (np.abs(text[:, 4] * 1000).astype(int) + text[:, 1].astype(int)) % 13
        actions = numbers
        if isinstance(self.space, gym.spaces.Dict):
            actions = {"z": numbers, "a": np.stack([text[:, 4]] * 2, 1).astype(np.float32)}
        if not self.said:
            return actions
        steps = self.steps[env_ids] if len(self.steps) else np.zeros(len(env_ids))
        return actions, {"value": text[:, 4] * 2, "steps": steps, "ids": [[i] for i in env_ids]}


def lockstep(fns, mode, seed, lengths):
    """What the same gives in SyncVectorEnv: lists of (t, what is there)."""
    envs = sync_env(fns, mode)
    chooser = Chooser(len(fns), envs.single_action_space)
    chooser.reset(np.arange(len(fns)))
    nothing = np.zeros(len(fns)), np.zeros(len(fns), bool), np.zeros(len(fns), bool)
    last = (envs.reset(seed=seed)[0], *nothing, {})
    ended = np.zeros(len(fns), bool)
    rollouts = []
    for length in lengths:
        steps = [last]
        given = []
        for _ in range(length):
            actions, extras = chooser(steps[-1][0], np.arange(len(fns)))
            given.append((actions, extras))
            steps.append(envs.step(actions))
            over = steps[-1][2] | steps[-1][3]
            begun = np.flatnonzero(over if mode is AutoresetMode.SAME_STEP else ended)
            chooser.reset(begun)
            ended = over
        rollouts.append((steps, given))
        last = (*steps[-1][:4], {})
    envs.close()
    return rollouts


@contextmanager
def choosing(fns, workers, mode, groups, **options):
    """A vector env, a policy and their pipeline, with at most a worker and a group for each env."""
    num_envs = len(fns)
    envs = ShmVectorEnv(fns, num_workers=min(workers, num_envs), autoreset_mode=mode)
    with closing(envs):
        chooser = Chooser(num_envs, envs.single_action_space)
        groups = groups and min(groups, num_envs)
        yield envs, chooser, Pipeline(envs, chooser, groups=groups, **options)


def assert_same_rollout(rollout, steps, given):
    assert rollout.length == rollout.steps == len(given)
    assert len(rollout.infos) == len(steps)
    for t, (observations, rewards, terminations, truncations, infos) in enumerate(steps):
        assert same(at(rollout.observations, t), observations)
        assert same(rollout.rewards[t], rewards)
        assert same(rollout.terminations[t], terminations)
        assert same(rollout.truncations[t], truncations)
        assert same(rollout.infos[t], infos)
    for t, (actions, extras) in enumerate(given):
        kept = at(rollout.actions, t)
        assert same(
            kept, {key: actions[key] for key in kept} if isinstance(kept, dict) else actions
        )
        for key, values in extras.items():
            assert same(rollout.extras[key][t], np.asarray(values))


@settings(max_examples=15, deadline=None)
@given(
    num_envs=st.integers(1, 9),
    workers=st.integers(0, 4),
    groups=st.none() | st.integers(1, 4),
    mode=st.sampled_from(MODES),
    kind=st.sampled_from([Story, Nested]),
    deterministic=st.booleans(),
    batch=st.sampled_from(["ready", "fixed"]),
    turns=st.sampled_from([0, 3000]),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    seed=st.integers(0, 100),
)
def test_as_lockstep(
    num_envs, workers, groups, mode, kind, deterministic, batch, turns, lengths, seed
):
    fns = [lambda i=i: kind(i, turns, length=2 + i % 3) for i in range(num_envs)]
    expected = lockstep(fns, mode, seed, lengths)
    with choosing(fns, workers, mode, groups, deterministic=deterministic, batch=batch) as (
        envs,
        chooser,
        pipeline,
    ):
        pipeline.reset(seed=seed)
        held = []
        for length, (steps, given) in zip(lengths, expected, strict=True):
            rollout = pipeline.collect(length)
            assert_same_rollout(rollout, steps, given)
            held = [(rollout, steps, given)]  # a third one needs its room
            assert envs.exchange.num_in_flight == 0
        assert_same_rollout(*held[0])
        sizes = [len(group) for group in pipeline.groups]
        if batch == "fixed":
            assert {len(ids) for ids in chooser.batches} == {max(sizes)}
        if deterministic:
            ids = [[env for env in ids if env >= 0] for ids in chooser.batches]
            assert ids == [group.tolist() for group in pipeline.groups] * sum(lengths)


@settings(max_examples=15, deadline=None)
@given(
    num_envs=st.integers(1, 9),
    workers=st.integers(0, 4),
    groups=st.none() | st.integers(1, 4),
    mode=st.sampled_from(MODES),
    kind=st.sampled_from([Story, Nested]),
    deterministic=st.booleans(),
    batch=st.sampled_from(["ready", "fixed"]),
    seed=st.integers(0, 100),
)
def test_transitions_are_those_of_lockstep(
    num_envs, workers, groups, mode, kind, deterministic, batch, seed
):
    fns = [lambda i=i: kind(i, length=2 + i % 3) for i in range(num_envs)]
    ((steps, given),) = lockstep(fns, mode, seed, [12])
    with choosing(fns, workers, mode, groups, deterministic=deterministic, batch=batch) as (
        envs,
        chooser,
        pipeline,
    ):
        pipeline.reset(seed=seed)
        counts = np.zeros(num_envs, int)
        taken = []  # checked at the end: nothing changes them
        while len(taken) < 20:
            for found in pipeline:  # a loop that is left is gone on with
                taken.append(found)
                if len(taken) % 3 == 0:
                    break
        for found in taken:
            assert len(found) == len(found.valid) == len(found.rewards)
            if batch == "fixed":
                assert len(found) == max(map(len, pipeline.groups))
            else:
                assert found.valid.all()
            for row in np.flatnonzero(found.valid):
                env = found.env_ids[row]
                t = counts[env]
                if t < 12 and mode is AutoresetMode.NEXT_STEP and (steps[t][2] | steps[t][3])[env]:
                    t += 1  # that step was a reset
                counts[env] = t + 1
                if t >= 12:
                    continue
                after, infos = at(steps[t + 1][0], env), steps[t + 1][4]
                if mode is AutoresetMode.SAME_STEP and (steps[t + 1][2] | steps[t + 1][3])[env]:
                    after = infos["final_obs"][env]
                assert same(at(found.observations, row), at(steps[t][0], env))
                assert equal(at(found.next_observations, row), after)
                assert same(found.rewards[row], steps[t + 1][1][env])
                assert same(found.terminations[row], steps[t + 1][2][env])
                assert same(found.truncations[row], steps[t + 1][3][env])
                actions, extras = given[t]
                assert equal(at(found.actions, row), at(actions, env))
                assert same(found.extras["value"][row], extras["value"][env])
                assert found.infos["asked" if "asked" in found.infos else "final_info"] is not None
                if "asked" in infos and infos["_asked"][env]:
                    assert found.infos["asked"][row] == infos["asked"][env]
        # What was under way is index 0 of a rollout.
        rollout = pipeline.collect(1)
        assert (at(rollout.observations, 0)["text"] if kind is Nested else rollout.observations[0])[
            :, 1
        ].max() >= 1


@pytest.mark.deep
def test_groups_have_their_shares_of_each_worker():
    for owned, count, expected in [
        ([4, 4], 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ([3, 3], 2, [[0, 3, 4], [1, 2, 5]]),
        ([5], 2, [[0, 1], [2, 3, 4]]),
        ([1] * 5, 2, [[0, 1, 2], [3, 4]]),
        ([2, 1, 1], 2, [[0, 3], [1, 2]]),
        ([7], 3, [[0, 1], [2, 3], [4, 5, 6]]),
        ([2, 2], 1, [[0, 1, 2, 3]]),
    ]:
        ends = np.cumsum(owned).tolist()
        ranges = [range(end - size, end) for size, end in zip(owned, ends, strict=True)]
        assert [group.tolist() for group in form_groups(ranges, count)] == expected, owned


def went(tuner, groups_take, steps, length=100, policy=0.5):
    """How many steps were made in groups, where lockstep takes 1 and these so much."""
    made = dict.fromkeys((False, True), 0)
    left = 0
    while sum(made.values()) < steps:
        left = left or length
        in_groups, count = tuner.choose(length, left)
        assert 0 < count <= left
        left -= count
        made[in_groups] += count
        tuner.record(in_groups, count, groups_take if in_groups else 1.0, policy)
    return made[True]


@pytest.mark.deep
@pytest.mark.parametrize("length", [1, 8, 100, 128])
def test_groups_must_be_clearly_faster(length):
    assert went(GroupingTuner(), 0.95, 20_000, length) < 1_200
    assert went(GroupingTuner(), 0.6, 20_000, length) > 19_000
    tuner = GroupingTuner()
    assert went(tuner, 3.0, 300, length) < 150
    for _ in range(2):
        assert 0 < went(tuner, 3.0, 20_000, length) * 2 < 200  # a hundredth of the time
        went(tuner, 0.6, 6_000, length)
        assert tuner.in_groups
        went(tuner, 3.0, 6_000, length)
        assert not tuner.in_groups


@pytest.mark.deep
def test_a_disturbance_does_not_decide():
    tuner = GroupingTuner()
    went(tuner, 1.2, 200)
    tuner.record(False, 4_000, 1.0, 0.5)
    assert tuner.choose(100, 100)[0]
    tuner.record(True, 16, 0.1, 0.1)
    assert not tuner.in_groups
    assert went(tuner, 1.2, 400) < 40


@pytest.mark.deep
@pytest.mark.parametrize("policy", [0.05, 0.95])
def test_groups_are_not_tried_where_they_could_save_little(policy):
    tuner = GroupingTuner()
    assert went(tuner, 0.5, 5_000, policy=policy) == 0
    assert went(tuner, 0.5, 5_000, policy=0.2) > 4_000


@pytest.mark.deep
def test_what_is_clear_is_decided_soon():
    assert went(GroupingTuner(), 2.0, 400) == 3 * 15  # of 7 slices of a rollout of 100


class TakesTurns(GroupingTuner):
    """Finds lockstep and groups equally fast, however long they take."""

    def record(self, in_groups, steps, seconds, policy):
        super().record(in_groups, steps, 1.0, 0.5)


@pytest.mark.deep
@pytest.mark.parametrize("kind, workers, mode", paired([Story, Nested], [1, 3, 3, 1], MODES))
def test_lockstep_and_groups_take_turns_in_a_rollout(kind, mode, workers, monkeypatch):
    monkeypatch.setattr("shmvec.pipeline.GroupingTuner", TakesTurns)
    fns = [lambda i=i: kind(i, 0, length=2 + i % 3) for i in range(4)]
    lengths = [40, 7, 100]
    expected = lockstep(fns, mode, 3, lengths)
    with closing(ShmVectorEnv(fns, num_workers=workers, autoreset_mode=mode)) as envs:
        chooser = Chooser(4, envs.single_action_space)
        pipeline = Pipeline(envs, chooser)
        pipeline.reset(seed=3)
        rollout = None
        for length, (steps, given) in zip(lengths, expected, strict=True):
            rollout = pipeline.collect(length)
            assert_same_rollout(rollout, steps, given)
        changes = np.flatnonzero(np.diff([len(ids) for ids in chooser.batches]))
        assert len(changes) >= 4
        last = envs.exchange.take(everyone=True).observations
        assert same(last, at(rollout.observations, 100))


@pytest.mark.deep
def test_lockstep_tells_what_a_policy_raises():
    with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:
        envs.reset(seed=0)
        with pytest.raises(ZeroDivisionError):
            Pipeline(envs, lambda seen, ids: 1 / 0, groups=1).collect(2)
        assert envs.exchange.num_in_flight == 0
        Pipeline(envs, Chooser(4)).collect(2)


@pytest.fixture(params=[3, *deep(1)])
def envs(request):
    envs = ShmVectorEnv(stories(5), num_workers=request.param)
    with closing(envs):
        yield envs


WRONG = [
    (lambda rows: np.zeros(len(rows) + 1, int), ValueError, "must have"),
    (lambda rows: np.zeros((len(rows), 2), int), ValueError, "must have"),
    (lambda rows: np.zeros(len(rows)), TypeError, "dtype"),
    (lambda rows: rows[:, 0] / 0, ZeroDivisionError, None),
    (lambda rows: (np.zeros(len(rows), int), {"v": 1.0}), ValueError, "'v'"),
    (lambda rows: (np.zeros(len(rows), int), {"v": rows[1:]}), ValueError, "'v'"),
    (lambda rows: (np.zeros(len(rows), int), {"w": rows}), ValueError, "extras"),
    (lambda rows: (np.zeros(len(rows), int), {"v": rows[:, :2]}), ValueError, "'v' of"),
    (lambda rows: (np.zeros(len(rows), int), {}), ValueError, "extras"),
]


@pytest.mark.parametrize(
    "workers, how", [(3, "collect"), *deep((3, "iterate"), (1, "collect"), (1, "iterate"))]
)
def test_policies_that_answer_wrongly(workers, how):
    for number, (answer, error, message) in enumerate(WRONG):
        # Which are wrong only beside those before: each batch may have others.
        beside = message in ("extras", "'v' of")
        if not (beside and how == "iterate"):
            envs = ShmVectorEnv(stories(5), num_workers=workers)
            with row(number, message), closing(envs):
                assert_refused(envs, how, answer, error, message, beside)


def assert_refused(envs, how, answer, error, message, beside):
    """A policy's fifth answer is refused by name, and the envs can be used as before."""
    calls = 0

    def policy(observations, env_ids):
        nonlocal calls
        calls += 1
        if calls == 5:
            if error is ZeroDivisionError:
                raise ZeroDivisionError("mine")
            return answer(observations)
        return np.full(len(observations), 7), {"v": observations}

    pipeline = Pipeline(envs, policy, deterministic=True)
    pipeline.reset(seed=0)

    def use():
        if how == "collect":
            return pipeline.collect(4)
        return [found for found, _ in zip(pipeline, range(8), strict=False)]

    with pytest.raises(error, match=message) as raised:
        use()
    where = f"batch 4, of envs {pipeline.groups[0].tolist()}"
    if not beside:
        noted = "".join(getattr(raised.value, "__notes__", []))
        if error is not ZeroDivisionError or sys.version_info >= (3, 11):
            assert where in f"{raised.value}{noted}"
    assert envs.step([1] * 5)[1].tolist() == [1] * 5
    use()
    pipeline.drop()
    assert envs.step([1] * 5)[0].shape == (5, 5)


def test_extras_that_only_later_groups_have():
    calls = 0

    def policy(observations, env_ids):
        nonlocal calls
        calls += 1
        actions = np.zeros(len(env_ids), int)
        return actions if calls == 1 else (actions, {"value": actions})

    with closing(ShmVectorEnv(stories(4), num_workers=0)) as envs:
        pipeline = Pipeline(envs, policy, groups=2)
        pipeline.reset(seed=0)
        with pytest.raises(ValueError, match="extras"):
            pipeline.collect(1)
        pipeline.collect(1)


def test_it_goes_on_from_where_the_envs_are(envs):
    pipeline = Pipeline(envs, Chooser(said=False))
    envs.reset(seed=3)
    pipeline.collect(2)
    observations, rewards, *_ = envs.step([3] * 5)
    rollout = pipeline.collect(2)
    assert (rollout.observations[0] == observations).all() and (rollout.rewards[0] == 3).all()
    last = rollout.observations[-1].copy()
    found = next(pipeline)
    assert (found.observations == last[found.env_ids]).all()
    with pytest.raises(AlreadyPendingCallError):
        envs.step([3] * 5)
    pipeline.drop()
    pipeline.drop()
    assert (envs.step([3] * 5)[1] == 3).any()  # what was under way is forgotten
    envs.send([1, 1], [0, 1])
    for use in (lambda: pipeline.collect(2), lambda: next(pipeline)):
        with pytest.raises(AlreadyPendingCallError):
            use()
    envs.recv(min_envs=2, timeout=60)
    rollout = pipeline.collect(1)
    rollout.release()
    assert rollout.released


def test_an_env_that_raises():
    envs = ShmVectorEnv([lambda: Fails(0), *stories(3)], num_workers=2)
    with closing(envs):
        envs.reset(seed=0)
        unlucky = 13
        pipeline = Pipeline(envs, lambda seen, ids: np.where(seen[:, 1] == 2, unlucky, 1))
        for use in (lambda: pipeline.collect(5), lambda: list(pipeline)):
            with pytest.raises(LookupError, match="thirteen"):
                use()
            envs.reset(seed=0)
        unlucky = 1
        assert pipeline.collect(2).rewards[1:].tolist() == [[1] * 4] * 2


@pytest.mark.deep
@pytest.mark.parametrize(
    "workers, mode, how",
    paired([1, 2], [*MODES, *MODES[::-1]], ["collect", "iterate", "iterate", "collect"]),
)
def test_workers_that_are_killed(workers, mode, how):
    faults = FaultPolicy(on_crash="restart", max_restarts=1000, backoff_s=0)
    envs = ShmVectorEnv(stories(4), num_workers=workers, faults=faults, autoreset_mode=mode)
    with closing(envs):
        chooser = Chooser(4)
        calls = 0

        def policy(observations, env_ids):
            nonlocal calls
            calls += 1
            if calls % 9 == 0:
                envs.processes[calls // 9 % workers].kill()
            return chooser(observations, env_ids)

        policy.reset = chooser.reset
        pipeline = Pipeline(envs, policy)
        pipeline.reset(seed=0)
        reported = 0
        if how == "collect":
            for _ in range(3):
                rollout = pipeline.collect(15)
                for t in range(1, 16):
                    broken = rollout.infos[t].get("_fault", np.zeros(4, bool))
                    cut = rollout.truncations[t] & broken
                    assert (rollout.rewards[t][cut] == 0).all()
                    reported += broken.sum()
                # What was chosen was chosen from what stands there.
                for t in range(15):
                    same_again = chooser(rollout.observations[t], np.arange(4))[0]
                    assert (rollout.actions[t] == same_again).all()
        else:
            for found, _ in zip(pipeline, range(90), strict=False):
                reported += found.infos.get("_fault", np.zeros(1, bool)).sum()
                assert (chooser(found.observations, found.env_ids)[0] == found.actions).all()
            pipeline.drop()
        assert reported > 0 and envs.stats().faults.restarts > 0
        envs.step([1] * 4)


@pytest.mark.deep
@pytest.mark.parametrize("workers, how", paired([1, 2, 4], ["collect", "iterate"]))
def test_workers_are_recycled(workers, how):
    envs = ShmVectorEnv(stories(4), num_workers=workers, recycle_after=5)
    with closing(envs):
        pipeline = Pipeline(envs, Chooser(4))
        pipeline.reset(seed=0)
        for _ in range(3):
            if how == "collect":
                pipeline.collect(9)
            else:
                for _ in zip(pipeline, range(18), strict=False):
                    pass
        assert envs.stats().faults.restarts >= 2 * workers
        pipeline.drop()


def test_bad_arguments():
    for options, arguments, error, message in [
        ({"autoreset_mode": AutoresetMode.DISABLED}, {}, ValueError, "are reset when"),
        ({"batch_size": 1}, {}, ValueError, "without batch_size"),
        ({}, {"groups": 3}, ValueError, "too few for 3 groups"),
        ({}, {"groups": 0}, ValueError, "groups must be at least 1"),
        ({}, {"batch": "all"}, ValueError, "batch must be"),
        ({}, {"policy": 3}, TypeError, "policy must be callable"),
        ({}, {"envs": gym.make("CartPole-v1")}, TypeError, "without wrappers"),
    ]:
        with row(arguments), closing(ShmVectorEnv(stories(2), num_workers=0, **options)) as envs:
            given = {"envs": envs, "policy": Chooser(), **arguments}
            with pytest.raises(error, match=message):
                Pipeline(**given)
    with pytest.raises(ClosedEnvironmentError):
        Pipeline(envs, Chooser())


@pytest.mark.deep
def test_observations_that_are_no_arrays():
    with closing(ShmVectorEnv([lambda: Speaks(0)] * 3, num_workers=1)) as envs:
        pipeline = Pipeline(envs, lambda seen, ids: np.ones(len(seen), int))
        pipeline.reset()
        with pytest.raises(TypeError, match="observation space holds Text"):
            pipeline.collect(2)
        found = next(pipeline)
        assert found.observations == found.next_observations == ("a",) * len(found)
        pipeline.drop()


@pytest.mark.deep
def test_arrays_that_the_policy_uses_again():
    actions, values = np.zeros(2, int), np.zeros(2)

    def policy(observations, env_ids):
        actions[:] = observations[:, 1] + 1
        values[:] = -actions
        return actions, {"value": values}

    with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:
        pipeline = Pipeline(envs, policy, deterministic=True)
        pipeline.reset(seed=0)
        rollout = pipeline.collect(3)
        assert rollout.actions.tolist() == [[1] * 4, [2] * 4, [3] * 4]
        assert (rollout.extras["value"] == -rollout.actions).all()
        found = [next(pipeline) for _ in range(4)]
        assert [each.actions.tolist() for each in found] == [[4] * 2, [4] * 2, [5] * 2, [5] * 2]
        assert all((each.extras["value"] == -each.actions).all() for each in found)
        pipeline.drop()


def as_arrays(found):
    """The same with arrays: tensors as they are, which share their memory."""
    import torch

    if isinstance(found, dict):
        return {key: as_arrays(part) for key, part in found.items()}
    if isinstance(found, tuple):
        return tuple(map(as_arrays, found))
    assert isinstance(found, torch.Tensor)
    return found.numpy()


def is_mapped_from(file, address):
    """Whether memory is a file's, and so was not copied."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= address < end:
            return file in line
    raise AssertionError("nothing is mapped there")


@pytest.fixture
def stand_in(monkeypatch):
    """Has the copies to a GPU be made in main memory: what runs is the code for a GPU."""
    torch = pytest.importorskip("torch")
    stream = types.SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    cudart = types.SimpleNamespace(
        cudaHostRegister=lambda *given: 0, cudaHostUnregister=lambda address: 0
    )
    for name, value in {
        "is_available": lambda: True,
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda given: nullcontext(),
        "cudart": lambda: cudart,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, given: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)

    class OnStandIn(Tensors):
        def __init__(self, device):
            super().__init__(device)
            self.device = torch.device("cpu")
            assert not self.on_host

    monkeypatch.setattr("shmvec.pipeline.Tensors", OnStandIn)


@pytest.mark.deep
@pytest.mark.parametrize(
    "batch_and_device, kind, mode",
    paired(
        itertools.product(["ready", "fixed"], ["cpu", "cuda"]),
        [Story, Nested, Nested, Story],
        MODES,
    ),
)
def test_tensors_hold_the_same(kind, mode, batch_and_device, request):
    batch, device = batch_and_device
    torch = pytest.importorskip("torch")
    if device == "cuda":
        request.getfixturevalue("stand_in")
    fns = [lambda i=i: kind(i, length=3) for i in range(5)]

    def policy(observations, env_ids):
        actions, extras = arrays_policy(as_arrays(observations), env_ids)
        extras = {key: torch.as_tensor(np.asarray(values)) for key, values in extras.items()}
        extras["value"] = torch.nn.Parameter(extras["value"]) * 1  # which requires gradients
        if isinstance(actions, dict):
            return {key: torch.as_tensor(part) for key, part in actions.items()}, extras
        return torch.as_tensor(actions), extras

    found = {}
    for where in (None, device):
        with closing(ShmVectorEnv(fns, num_workers=2, autoreset_mode=mode)) as envs:
            arrays_policy = Chooser(5, envs.single_action_space)
            policy.reset = arrays_policy.reset
            options = {"batch": batch, "deterministic": True}
            if where is None:
                pipeline = Pipeline(envs, arrays_policy, **options)
            else:
                pipeline = Pipeline(envs, policy, device=where, **options)
            pipeline.reset(seed=1)
            rollouts = [pipeline.collect(6) for _ in range(2)]
            taken = [next(pipeline) for _ in range(12)]
            names = ["observations", "actions", "rewards", "terminations", "truncations", "extras"]
            for each in (*rollouts, *taken):
                more = ["next_observations"] if each in taken else []
                parts = {name: getattr(each, name) for name in [*names, *more]}
                parts = parts if where is None else as_arrays(parts)
                if where is None:
                    parts = {**parts, "extras": dict(each.extras)}
                said = each.infos if each in taken else each.infos[3]
                found.setdefault(where, []).append((parts, said))
            if where == "cpu":
                assert is_mapped_from("memfd:shmvec", rollouts[0].rewards.data_ptr())
            pipeline.drop()
            del rollouts, taken
    for (parts, infos), (expected, expected_infos) in zip(found[device], found[None], strict=True):
        assert same(parts, expected)
        assert same(infos, expected_infos)


@pytest.mark.deep
def test_policies_of_another_device(gpu_in_use):
    torch = pytest.importorskip("torch")
    with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:
        envs.reset(seed=0)
        for device in (None, "cpu"):
            away = Pipeline(
                envs,
                lambda seen, ids: torch.zeros(2, dtype=int, device="meta"),
                groups=2,
                device=device,
            )
            with pytest.raises(TypeError, match=r"batch 0, of envs \[0, 1\]: NumPy cannot read"):
                away.collect(2)
        assert envs.step([1] * 4)[1].tolist() == [1] * 4
        with pytest.raises(RuntimeError, match="must be 'cpu' or of CUDA"):
            Pipeline(envs, Chooser(), device="meta")
        if not torch.cuda.is_available():
            with pytest.raises(RuntimeError, match="finds no CUDA"):
                Pipeline(envs, Chooser(), device="cuda")


@pytest.mark.deep
def test_dlpack():
    torch = pytest.importorskip("torch")
    with closing(ShmVectorEnv(stories(4), num_workers=1)) as envs:
        pipeline = Pipeline(envs, Chooser())
        pipeline.reset(seed=0)
        rollout = pipeline.collect(2)
        tensor = torch.from_dlpack(rollout.observations)
        assert tensor.data_ptr() == rollout.observations.ctypes.data
        assert torch.from_dlpack(next(pipeline).observations).shape == (2, 5)
        pipeline.drop()


@pytest.mark.deep
def test_its_policies_can_be_evaluated():
    chooser = Chooser(2)
    result = evaluate([lambda: Story(0)] * 2, chooser, 4, seeds=0, num_workers=1)
    chooser.said = False
    again = evaluate([lambda: Story(0)] * 2, chooser, 4, seeds=0, num_workers=1)
    assert len(result) == 4 and chooser.batches
    assert result.lengths.tolist() == again.lengths.tolist()


@pytest.mark.deep
def test_tensors_need_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with closing(ShmVectorEnv(stories(2), num_workers=0)) as envs:
        with pytest.raises(ImportError, match="needs torch"):
            Pipeline(envs, Chooser(), device="cpu")


@pytest.mark.deep
def test_its_benchmark_runs(tmp_path):
    arguments = ("--seconds", "0.1", "--rounds", "1", "--workers", "1", "--us", "100")
    parts = ["equal", "cartpole"] + ["network"] * (importlib.util.find_spec("torch") is not None)
    cells = ("--cell", *parts, "--num-envs", "2")
    shown, results = run_benchmark("pipeline.py", tmp_path, *arguments, *cells)
    alone = ["pipeline", "envs alone", "network alone"]
    assert [row["system"] for row in results["rows"]] == [
        *["lockstep", "pipeline", "two groups"] * 2,
        *(alone if "network" in parts else ()),
    ]
    assert "× lockstep" in shown


@pytest.mark.deep
def test_the_benchmark_of_partial_batches_runs(tmp_path):
    few = ("--workload", "Noop", "--num-envs", "4", "--compute", "0", "--seconds", "0.1")
    _, results = run_benchmark("pipeline.py", tmp_path, "partial", *few)
    assert {"limit", "lockstep", "batches of 2"} <= {row["system"] for row in results["rows"]}
