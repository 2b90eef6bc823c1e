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
from tables import deep

from shmvec import EnvTimeoutError, FaultPolicy, ShmVectorEnv
from shmvec.faults import restart_seed

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


KINDS = pytest.mark.parametrize("kind", [Noted, AsyncNoted])


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
            seed = restart_seed(self.seed, self.episode - self.since)
        return self.env.reset(seed=seed, options=options)


@KINDS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spare_envs", [1, 3])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("overlap", [None, *deep(4)])
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


@KINDS
def test_copies_are_reset_while_an_episode_is_played(kind, tmp_path):
    file = tmp_path / "resets"
    with closing(made(kind, 3, 2, file=str(file))) as envs:
        envs.reset(seed=0)
        deadline = time.monotonic() + DEADLINE
        while len(file.read_text().split()) < 9:  # no episode but the first has begun
            assert time.monotonic() < deadline


@KINDS
def test_attributes_are_set_in_all_copies(kind):
    with closing(made(kind, 3, 2)) as envs:
        envs.set_attr("extra", [1, 2, 3])
        envs.reset(seed=0)
        for _ in range(20):
            _, _, _, _, infos = envs.step([0, 0, 0])
            found = infos["extra"][infos["_extra"]] - np.flatnonzero(infos["_extra"])
            assert (found == 1).all()


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


@KINDS
def test_a_reset_that_hangs_ahead_is_over_its_limit_when_it_is_waited_for(kind):
    with closing(made(kind, 2, 1, hangs=2, num_workers=1, reset_timeout=0.3)) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvTimeoutError, match=r"env \d has been in reset\(\)"):  # noqa: PT012
            for _ in range(20):
                envs.step([0, 0])
        envs.close(terminate=True)


def test_a_coroutine_that_hangs_ahead_is_cancelled():
    faults = FaultPolicy(on_timeout="reset", reset_timeout=0.3, max_restarts=100)
    with closing(made(AsyncNoted, 2, 1, hangs=2, num_workers=1, faults=faults)) as envs:
        envs.reset(seed=0)
        process = envs.processes[0]
        for _ in range(8):
            envs.step([0, 0])
        assert envs.stats().faults.timeouts > 0 and envs.processes[0] is process


@KINDS
def test_closing_while_copies_are_reset(kind):
    envs = made(kind, 2, 1, hangs=2, num_workers=1)
    envs.reset(seed=0)
    envs.close(timeout=0.3)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"spare_envs": 1, "num_workers": 0}, ValueError, "num_workers=0 has none"),
        ({"spare_envs": 1, "caller_steps": True}, ValueError, "caller_steps=True"),
        ({"spare_envs": -1}, ValueError, "must not be negative"),
        ({"spare_envs": "two"}, TypeError, "spare_envs must be an int"),
    ],
)
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        ShmVectorEnv([Counter] * 4, **options)


@pytest.mark.parametrize("name", ["NormalizeObservation", "NormalizeReward"])
def test_wrappers_with_a_record_of_all_episodes_are_refused(name):
    wrapper = getattr(gym.wrappers, name)
    with pytest.raises(ValueError, match=f"in a {name}, which keeps a record of all episodes"):
        ShmVectorEnv([lambda: wrapper(Counter())] * 2, spare_envs=1, num_workers=1)
