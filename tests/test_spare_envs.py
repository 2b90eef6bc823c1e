"""``spare_envs=``: copies of an env that are reset ahead play its episodes in turn."""

import asyncio
import time
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from envs import Counter
from equality import MODES, same
from tables import deep, paired, row

from shmvec import EnvTimeoutError, FaultPolicy, ShmVectorEnv
from shmvec.exchange import HostedEnv
from shmvec.faults import derived_seed, restart_seed
from shmvec.planning import PlanningVectorEnv

DEADLINE = 30.0


class Noted(Counter):
    """Notes its resets in a file; all from a certain one on raise, and one hangs."""

    def __init__(self, length=3, file=None, raises=99, hangs=99):
        super().__init__(length)
        self.file, self.raises, self.hangs = file, raises, hangs
        self.extra = 0

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        if self.file:
            with open(self.file, "a") as file:
                file.write("reset\n")
        if self.resets >= self.raises:
            raise LookupError("this reset")
        if self.resets == self.hangs and type(self) is Noted:
            time.sleep(DEADLINE)
        return observation, info | {"seed": -1 if seed is None else seed}

    def step(self, action):
        *results, info = super().step(action)
        return *results, info | {"extra": self.extra}


class AsyncNoted(Noted):
    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        result = super().reset(seed=seed, options=options)
        if self.resets == self.hangs:
            await asyncio.sleep(DEADLINE)
        return result

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


KINDS = pytest.mark.parametrize("kind", [Noted, *deep(AsyncNoted)])


def made(kind, num_envs=3, spare_envs=1, num_workers=2, **options):
    lengths = [2, 4, 3, 5][:num_envs]
    file = options.pop("file", None)
    given = {name: options.pop(name) for name in ("raises", "hangs") if name in options}
    fns = [partial(kind, length, file, **given) for length in lengths]
    return ShmVectorEnv(fns, spare_envs=spare_envs, num_workers=num_workers, **options)


class Played:
    """The env that a slot should look like: its copies in turn, with the seeds that follow."""

    def __init__(self, length, spare_envs):
        self.copies = [Noted(length) for _ in range(spare_envs + 1)]
        self.episode = -1

    def reset(self, seed=None, options=None):
        self.episode += 1
        self.env = self.copies[self.episode % len(self.copies)]
        if seed is not None:
            self.seed, self.since = seed, self.episode
        elif options is None:
            seed = derived_seed(self.seed, 0, self.episode - self.since)
        return self.env.reset(seed=seed, options=options)


@pytest.mark.parametrize(
    "kind, mode, spare_envs, num_workers, overlap",
    paired([Noted, AsyncNoted], [*MODES, *MODES[::-1]], [1, 3, 3, 1], [3, 1], [None, None, 4]),
)
def test_episodes_are_played_by_copies_in_turn(kind, mode, spare_envs, num_workers, overlap):
    expected = [Played(length, spare_envs) for length in (2, 4, 3)]
    options = {"autoreset_mode": mode, "num_workers": num_workers, "overlap": overlap}
    with closing(made(kind, 3, spare_envs, **options)) as envs:
        for seed in (7, None, 11):
            observations, infos = envs.reset(seed=seed)
            over = np.zeros(3, bool)
            first = [
                each.reset(None if seed is None else seed + n) for n, each in enumerate(expected)
            ]
            assert same(list(observations), [observation for observation, _ in first])
            assert infos["seed"].tolist() == [info["seed"] for _, info in first]
            for _ in range(14):
                if mode.value == "Disabled" and over.any():
                    observations, infos = envs.reset(options={"reset_mask": over})
                    for n in np.flatnonzero(over):
                        observation, info = expected[n].reset()
                        assert same(observations[n], observation)
                        assert infos["seed"][n] == info["seed"]
                    over[:] = False
                observations, rewards, ends, _, infos = envs.step([0, 1, 2])
                for n, each in enumerate(expected):
                    if over[n]:  # NEXT_STEP
                        assert same(observations[n], each.reset()[0]) and rewards[n] == 0
                        continue
                    observation, reward, end, _, _ = each.env.step(n)
                    assert rewards[n] == reward and ends[n] == end
                    if end and mode.value == "SameStep":
                        assert same(infos["final_obs"][n], observation)
                        observation = each.reset()[0]
                    assert same(observations[n], observation)
                if mode.value != "SameStep":
                    over = ends.copy()


@pytest.mark.deep
@KINDS
def test_copies_are_reset_while_an_episode_is_played(kind, tmp_path):
    file = tmp_path / "resets"
    with closing(made(kind, 3, 2, file=str(file))) as envs:
        envs.reset(seed=0)
        deadline = time.monotonic() + DEADLINE
        while len(file.read_text().split()) < 9:  # no episode but the first has begun
            assert time.monotonic() < deadline


@pytest.mark.deep
@KINDS
def test_attributes_are_set_in_all_copies(kind):
    with closing(made(kind, 3, 2)) as envs:
        envs.set_attr("extra", [1, 2, 3])
        envs.reset(seed=0)
        for _ in range(20):
            _, _, _, _, infos = envs.step([0, 0, 0])
            found = infos["extra"][infos["_extra"]] - np.flatnonzero(infos["_extra"])
            assert (found == 1).all()
        envs.call("set_wrapper_attr", "extra", 7)  # as shmvec.aio does
        for _ in range(20):
            infos = envs.step([0, 0, 0])[4]
            assert (infos["extra"][infos["_extra"]] == 7).all()


@KINDS
def test_a_reset_that_fails_ahead_is_the_env_s_when_its_episode_begins(kind):
    with closing(made(kind, 2, 1, raises=2, num_workers=1)) as envs:
        envs.reset(seed=0)
        with pytest.raises(LookupError, match="this reset"):  # noqa: PT012
            for _ in range(20):
                envs.step([0, 0])
    faults = FaultPolicy(on_error="restart", max_restarts=100, backoff_s=0)
    with closing(made(kind, 2, 1, raises=2, num_workers=1, faults=faults)) as envs:
        envs.reset(seed=0)
        for _ in range(20):
            envs.step([0, 0])
        assert envs.stats().faults.errors > 0


@pytest.mark.deep
@KINDS
def test_a_reset_that_hangs_ahead_is_over_its_limit_when_it_is_waited_for(kind):
    with closing(made(kind, 2, 1, hangs=2, num_workers=1, reset_timeout=1.0)) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvTimeoutError, match=r"env \d has been in reset\(\)"):  # noqa: PT012
            for _ in range(20):
                envs.step([0, 0])
        envs.close(terminate=True)


@pytest.mark.deep
@pytest.mark.parametrize("kind, keeps_its_worker", [(AsyncNoted, True), (Noted, False)])
def test_a_coroutine_that_hangs_ahead_is_cancelled_and_a_thread_costs_its_worker(
    kind, keeps_its_worker
):
    faults = FaultPolicy(on_timeout="reset", reset_timeout=1.0, max_restarts=100)
    with closing(made(kind, 2, 1, hangs=2, num_workers=1, faults=faults)) as envs:
        envs.reset(seed=0)
        process = envs.processes[0]
        for _ in range(8):
            envs.step([0, 0])
        assert envs.stats().faults.timeouts > 0
        assert (envs.processes[0] is process) == keeps_its_worker


class Lingers(AsyncNoted):
    """Its second reset takes a while to heed that it is cancelled."""

    inside = False

    async def reset(self, *, seed=None, options=None):
        assert not self.inside, "it is still in reset()"
        self.inside = True
        try:
            result = Noted.reset(self, seed=seed, options=options)
            if self.resets == 2:
                try:
                    await asyncio.sleep(DEADLINE)
                finally:
                    await asyncio.sleep(0.3)
            return result
        finally:
            self.inside = False


@pytest.mark.deep
def test_a_copy_does_one_thing_at_a_time():
    faults = FaultPolicy(on_timeout="reset", reset_timeout=1.0, max_restarts=100)
    with closing(made(Lingers, 1, 1, num_workers=1, faults=faults)) as envs:
        envs.reset(seed=0)
        for _ in range(12):
            envs.step([0])
        counts = envs.stats().faults
        assert counts.timeouts == 2 and counts.errors == 0  # of two copies


class Slow(AsyncNoted):
    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0.8)
        return Noted.reset(self, seed=seed, options=options)


@pytest.mark.deep
def test_only_the_reset_that_runs_counts_for_the_limit():
    with closing(made(Slow, 2, 1, num_workers=1, reset_timeout=1.5)) as envs:
        for seed in range(4):
            envs.reset(seed=seed)


class SecondHangs(Noted):
    """Every second one that a process makes hangs in its reset."""

    made = 0

    def __init__(self):
        SecondHangs.made += 1
        super().__init__(length=9, hangs=1 if SecondHangs.made % 2 == 0 else 99)

    def reset(self, *, seed=None, options=None):
        if self.hangs == 1:
            time.sleep(DEADLINE)
        return super().reset(seed=seed, options=options)


@pytest.mark.deep
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_copy_that_does_not_come_back_is_not_closed(num_workers, monkeypatch):
    monkeypatch.setattr("shmvec._processes.spare_envs.CLOSE_TIMEOUT_S", 0.3)
    envs = ShmVectorEnv([SecondHangs] * 2, spare_envs=1, num_workers=num_workers, context="fork")
    envs.reset(seed=0)
    with pytest.raises(TimeoutError, match="not closed"):
        envs.close()
    assert envs.closed


@pytest.mark.deep
@KINDS
def test_a_seeded_reset_after_another_one(kind):
    """What was begun ahead for the first may not have made a step when the second discards it."""
    with closing(made(kind, 3, 1, num_workers=1, raises=9_999, hangs=9_999)) as envs:
        for seed in range(200):
            envs.reset()
            envs.reset(seed=seed)


@pytest.mark.deep
@KINDS
def test_options_without_a_seed_are_given_one(kind):
    found = []
    for _ in range(2):
        with closing(made(kind, 2, 1, num_workers=1)) as envs:
            envs.reset(seed=4)
            observations, infos = envs.reset(options={"a": 1})
            found.append(observations)
            assert infos["seed"].tolist() == [derived_seed(4, 0, 1), derived_seed(5, 0, 1)]
    assert same(found[0], found[1])


@pytest.mark.deep
@KINDS
def test_options_of_any_type(kind):
    with closing(made(kind, 2, 1, num_workers=1)) as envs:
        envs.reset(seed=0, options=np.arange(3))
        assert envs.get_attr("received")[1][-1].tolist() == [0, 1, 2]


@pytest.mark.deep
def test_no_two_resets_of_a_coroutine_count_as_one():
    with closing(
        ShmVectorEnv([partial(Slow, 1)], spare_envs=2, num_workers=1, reset_timeout=1.5)
    ) as envs:
        envs.reset()
        envs.reset(seed=5)
        for _ in range(4):
            envs.step([0])


class ClosedInReset(Slow):
    inside = False

    async def reset(self, *, seed=None, options=None):
        self.inside = True
        try:
            return await super().reset(seed=seed, options=options)
        finally:
            self.inside = False

    def close(self):
        assert not self.inside, "it is in reset()"


@pytest.mark.deep
def test_no_env_is_closed_in_its_reset():
    envs = ShmVectorEnv([partial(ClosedInReset, 1)], spare_envs=2, num_workers=1)
    envs.reset()
    envs.step([0])
    envs.reset(seed=5)
    envs.close()


class ClosesSlowly(Noted):
    def reset(self, *, seed=None, options=None):
        time.sleep(0.8)
        return super().reset(seed=seed, options=options)

    def close(self):
        time.sleep(2.2)


@pytest.mark.deep
def test_a_copy_that_is_being_closed_is_waited_for(monkeypatch):
    monkeypatch.setattr("shmvec._processes.spare_envs.CLOSE_TIMEOUT_S", 2.0)
    envs = ShmVectorEnv([ClosesSlowly] * 2, spare_envs=1, num_workers=1, context="fork")
    envs.reset(seed=0)
    envs.close()


class Level(Counter):
    """Shows a level that its reset has read."""

    level = 0

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"level": self.level}


@pytest.mark.deep
@pytest.mark.parametrize("spare_envs", [1, 3])
def test_what_is_set_holds_from_the_next_episode_on(spare_envs):
    with closing(ShmVectorEnv([Level] * 2, spare_envs=spare_envs, num_workers=1)) as envs:
        envs.reset(seed=0)
        for level in (3, 7):
            envs.set_attr("level", [level] * 2)
            for _ in range(4):
                assert envs.reset()[1]["level"].tolist() == [level] * 2


@pytest.mark.deep
def test_seeds_of_episodes_and_of_restarts_differ():
    seeds = [derived_seed(5, 0, n) for n in range(1, 100)]
    assert len({*seeds, *(restart_seed(5, n) for n in range(100))}) == 199
    assert derived_seed(-5, 0, 1) != derived_seed(5, 0, 1) and derived_seed(None, 1) is None


class TakesNegativeSeeds(Noted):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else abs(seed), options=options)


@pytest.mark.deep
def test_negative_seeds():
    with closing(ShmVectorEnv([TakesNegativeSeeds] * 2, spare_envs=1, num_workers=1)) as envs:
        envs.reset(seed=[-1, -2])
        for _ in range(9):
            envs.step([0, 0])


class Another(Counter):
    """Each one that a process makes has larger observations than the one before."""

    made = 0

    def __init__(self):
        Another.made += 1
        super().__init__(size=3 + Another.made)


@pytest.mark.deep
def test_all_copies_have_the_same_spaces():
    with pytest.raises(RuntimeError, match="observation space of env 0"):
        ShmVectorEnv([Another], spare_envs=1, num_workers=1, context="fork")


@pytest.mark.deep
def test_the_same_env_twice():
    env = Counter()
    with pytest.raises(ValueError, match=r"env_fns\[0\] and env_fns\[0\] returned the same env"):
        ShmVectorEnv([lambda: env], spare_envs=1, num_workers=1, context="fork")


class OnlyOne(Counter):
    made = False

    def __init__(self):
        if OnlyOne.made:
            raise RuntimeError("one a process")
        OnlyOne.made = True
        super().__init__()


@pytest.mark.deep
def test_a_process_that_can_hold_only_one():
    with pytest.raises(RuntimeError, match="one a process") as caught:
        ShmVectorEnv([OnlyOne], spare_envs=1, num_workers=1, context="fork")
    assert "another copy of env 0" in "".join(caught.value.__notes__)


@pytest.mark.deep
def test_planning_takes_neither_copies_nor_threads():
    for options in ({"spare_envs": 1}, {"overlap": 2}):
        with pytest.raises(TypeError, match="all rows of one share an env"):
            PlanningVectorEnv(lambda: gym.make("CartPole-v1"), n_workers=1, **options)


@pytest.mark.deep
@KINDS
def test_closing_while_copies_are_reset(kind):
    envs = made(kind, 2, 1, hangs=2, num_workers=1)
    envs.reset(seed=0)
    envs.close(timeout=0.3)


def test_what_is_refused():
    for options, error, message in [
        ({"spare_envs": 1, "num_workers": 0}, ValueError, "num_workers=0 has none"),
        ({"spare_envs": 1, "caller_steps": True}, ValueError, "caller_steps=True"),
        ({"spare_envs": -1}, ValueError, "must not be negative"),
        ({"spare_envs": "two"}, TypeError, "spare_envs must be an int"),
    ]:
        with row(options), pytest.raises(error, match=message):
            ShmVectorEnv([Counter] * 4, **options)


@pytest.mark.deep
@pytest.mark.parametrize("name", ["NormalizeObservation", "NormalizeReward"])
def test_wrappers_with_a_record_of_all_episodes_are_refused(name):
    wrapper = getattr(gym.wrappers, name)
    with pytest.raises(ValueError, match=f"in a {name}, which keeps a record of all episodes"):
        ShmVectorEnv([lambda: wrapper(Counter())] * 2, spare_envs=1, num_workers=1)
    with pytest.raises(ValueError, match=f"in a {name}"):
        ShmVectorEnv([lambda: HostedEnv(wrapper(Counter()))], spare_envs=1, num_workers=1)
