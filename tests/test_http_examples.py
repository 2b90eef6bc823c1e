"""Examples of envs behind HTTP: sessions die, hang and are replaced, and servers come back."""

import asyncio
import importlib
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.error import URLError

import gymnasium as gym
import numpy as np
import pytest

from shmvec import FaultPolicy, ShmVectorEnv

pytestmark = pytest.mark.deep

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the examples extra has it)")

EXAMPLES = Path(__file__).parents[1] / "examples"
DEADLINE = 60.0  # of each wait, on a busy machine


@pytest.fixture(scope="module", autouse=True)
def examples():
    """Workers import them by name, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield


@pytest.fixture(scope="module")
def http_env(examples):
    return importlib.import_module("http_env")


@pytest.fixture(scope="module")
def openenv_client(examples):
    return importlib.import_module("openenv_client")


@pytest.fixture(scope="module")
def url(http_env):
    with http_env.serving("--delay", "0.001", "--die-every", "0", "--hang-every", "0") as url:
        yield url


@pytest.fixture(scope="module")
def openenv_url(http_env, openenv_client):
    arguments = ("--max-sessions", "8")
    with http_env.serving(*arguments, program=openenv_client.__file__) as url:
        yield url


def within(coroutine):
    """The result of a coroutine, which has a deadline."""

    async def limited():
        return await asyncio.wait_for(coroutine, DEADLINE)

    return asyncio.run(limited())


@contextmanager
def closing(envs):
    try:
        yield envs
    finally:
        envs.close()


def eventually(look):
    """Until something is so, for as long as the deadline allows."""
    until = time.monotonic() + DEADLINE
    while not look():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


class Local(gym.Wrapper):
    """What a session's env is, here: each episode is seeded as HttpEnv seeds it."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        self.random = None

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.random, _ = gym.utils.seeding.np_random(seed)
        else:
            seed = int(self.random.integers(2**31))
        return self.env.reset(seed=seed)[0], {}


def same(step, other):
    return (step[0] == other[0]).all() and step[1:4] == other[1:4]


# The env, in a loop of its own


def test_sessions_give_what_the_env_would_here(http_env, url):
    async def episodes(seed):
        env, local = http_env.HttpEnv(url), Local()
        observation, _ = await env.reset(seed=seed)
        assert (observation == local.reset(seed=seed)[0]).all()
        over = False
        for step in range(60):
            if over:
                observation, _ = await env.reset()
                assert (observation == local.reset()[0]).all()
            result = await env.step(step % 3 % 2)
            assert same(result, local.step(step % 3 % 2))
            over = result[2] or result[3]
        return env

    async def all_of_them():
        envs = await asyncio.gather(*(episodes(seed) for seed in range(32)))
        assert len({id(env.client) for env in envs}) == 1, "connections are not shared"
        await asyncio.gather(*(env.close() for env in envs))
        assert envs[0].client is None

    before = http_env.counts(url)
    within(all_of_them())
    after = http_env.counts(url)
    assert after["sessions"] == before["sessions"]
    assert after["opened"] == before["opened"] + 32


@pytest.mark.parametrize(("fault", "why"), [("die", "HTTP 404"), ("break", "HTTP 500")])
def test_a_session_that_dies_ends_its_episode(http_env, url, fault, why):
    async def play():
        env = http_env.HttpEnv(url, step_patience=0.2)
        last, info = await env.reset(seed=1)
        http_env.get(f"{url}/fault", {"session": info["session"], "fault": fault})
        observation, reward, terminated, truncated, lost = await env.step(0)
        assert (observation == last).all()
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert why in lost["session_lost"]
        with pytest.raises(gym.error.ResetNeeded):
            await env.step(0)
        _, another = await env.reset(seed=1)
        assert another["session"] != info["session"]
        assert not (await env.step(0))[3]
        await env.close()

    within(play())
    assert http_env.counts(url)["sessions"] == 0


def test_a_session_that_has_died_between_episodes_is_replaced(http_env, url):
    async def play():
        env = http_env.HttpEnv(url)
        _, info = await env.reset(seed=1)
        http_env.get(f"{url}/fault", {"session": info["session"], "fault": "die"})
        observation, another = await env.reset(seed=2)
        assert another["session"] != info["session"]
        assert (observation == Local().reset(seed=2)[0]).all()
        await env.close()

    within(play())


@pytest.mark.parametrize("fault", ["busy", "lose"])
def test_no_step_is_made_twice(http_env, url, fault):
    async def play():
        env, local = http_env.HttpEnv(url, step_patience=DEADLINE), Local()
        _, info = await env.reset(seed=1)
        local.reset(seed=1)
        repeated = http_env.counts(url)["repeated"]
        for step in range(3):
            http_env.get(
                f"{url}/fault", {"session": info["session"], "fault": fault, "times": step}
            )
            assert same(await env.step(1), local.step(1))
        assert http_env.get(f"{url}/state/{info['session']}") == {"steps": 3}
        more = http_env.counts(url)["repeated"] - repeated
        assert more == (3 if fault == "lose" else 0)
        await env.close()

    within(play())


def test_a_request_that_is_cancelled_gives_its_session_up(http_env, url):
    async def play():
        env = http_env.HttpEnv(url)
        _, info = await env.reset(seed=1)
        http_env.get(f"{url}/fault", {"session": info["session"], "fault": "hang"})
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.step(0), 0.2)
        _, another = await env.reset(seed=1)
        assert another["session"] != info["session"]
        assert http_env.counts(url)["sessions"] == 1, "the server still has it"
        await env.close()

    within(play())


# The env, in workers


def vectors(env_fns, **options):
    policy = FaultPolicy(on_timeout="reset", on_error="reset", reset_timeout=DEADLINE, **options)
    return closing(ShmVectorEnv(env_fns, num_workers=2, faults=policy))


def test_a_request_that_the_server_refuses_is_an_error(http_env, url):
    async def play():
        env = http_env.HttpEnv(url)
        await env.reset(seed=1)
        env.number -= 2
        with pytest.raises(RuntimeError, match="HTTP 409"):
            await env.step(0)
        await env.close()

    within(play())


def test_workers_give_what_the_envs_would_here(http_env, url):
    local = gym.vector.SyncVectorEnv([Local] * 6)
    with vectors([partial(http_env.HttpEnv, url)] * 6) as envs, closing(local):
        assert (envs.reset(seed=3)[0] == local.reset(seed=3)[0]).all()
        for step in range(60):
            actions = (np.arange(6) + step) % 3 % 2
            for result, other in zip(envs.step(actions)[:4], local.step(actions)[:4], strict=True):
                assert (result == other).all()
    eventually(lambda: http_env.counts(url)["sessions"] == 0)


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_only_the_env_whose_session_fails_is_truncated(http_env, url, fault):
    local = gym.vector.SyncVectorEnv([Local] * 6)
    with vectors([partial(http_env.HttpEnv, url)] * 6, step_timeout=5.0) as envs, closing(local):
        before, infos = envs.reset(seed=3)
        local.reset(seed=3)
        name = infos["session"][1]
        http_env.get(f"{url}/fault", {"session": name, "fault": fault})
        others = np.arange(6) != 1
        for step in range(3):  # the failure, the reset, and a step
            observations, rewards, terminations, truncations, infos = envs.step([0] * 6)
            expected = local.step([0] * 6)
            assert (observations[others] == expected[0][others]).all()
            assert not terminations.any()
            assert truncations.tolist() == ([False, step == 0] + [False] * 4)
            if step == 0:
                assert (observations[1] == before[1]).all() and rewards[1] == 0
                if fault == "die":
                    assert infos["_session_lost"].tolist() == truncations.tolist()
                    assert "HTTP 404" in infos["session_lost"][1]
                else:
                    assert infos["_fault"].tolist() == truncations.tolist()
                    assert infos["fault"]["type"][1] == "EnvTimeoutError"
        assert envs.get_attr("session")[1] not in (name, None)
    eventually(lambda: http_env.counts(url)["sessions"] == 0)


def test_a_server_that_restarts_in_between(http_env):
    never = ("--die-every", "0", "--hang-every", "0")
    with ExitStack() as servers:
        url = servers.enter_context(http_env.serving(*never))
        make = partial(http_env.HttpEnv, url, step_patience=DEADLINE)
        with closing(ShmVectorEnv([make] * 4, num_workers=2)) as envs:
            envs.reset(seed=1)
            envs.step([0] * 4)
            servers.close()
            envs.step_async([1] * 4)  # meanwhile there is none
            servers.enter_context(http_env.serving("--port", url.rpartition(":")[2], *never))
            _, _, _, truncations, infos = envs.step_wait(timeout=DEADLINE)
            assert truncations.all()
            assert all("HTTP 404" in why for why in infos["session_lost"])
            for _ in range(3):
                _, rewards, _, truncations, _ = envs.step([0] * 4)
                assert not truncations.any()
            assert rewards.all()
            assert http_env.counts(url)["opened"] == 4


# The program

SMALL = ("--sessions", "16", "--seconds", "1", "--die-every", "100", "--hang-every", "0")


def program(name, *arguments):
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_program_says_how_fast_it_is():
    with program("http_env.py", *SMALL) as process:
        output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    _, rate, replaced, bare = output.splitlines()
    assert re.fullmatch(r"16 sessions, 2 workers: [\d,]+ requests/s, \d+ episodes, .*", rate)
    assert re.match(r"\d+ sessions died and 0 did not answer: ", replaced)
    assert re.fullmatch(r"a bare loop: [\d,]+ requests/s; ratio \d\.\d\d", bare)


def test_ctrl_c_ends_program_and_server(http_env):
    arguments = (*SMALL, "--seconds", "1000", "--hang-every", "100")
    with program("http_env.py", *arguments) as process:
        try:
            url = process.stdout.readline().split()[-1]
            eventually(lambda: http_env.counts(url)["hung"] > 0)  # some may be waited for
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    with pytest.raises(URLError, match="refused"):
        http_env.counts(url)


# OpenEnv's protocol


def client(openenv_client, url, transport="ws", **options):
    """An env whose actions are the server's JSON, for its faults."""
    return openenv_client.cartpole(url, transport, to_action=lambda action: action, **options)


@pytest.mark.parametrize("transport", ["ws", "http"])
def test_openenv_gives_what_the_env_would_here(openenv_client, openenv_url, transport):
    async def play():
        env, local = openenv_client.cartpole(openenv_url, transport), Local()
        assert ((await env.reset(seed=5))[0] == local.reset(seed=5)[0]).all()
        over = steps = 0
        for step in range(60):
            if over:
                assert ((await env.reset())[0] == local.reset()[0]).all()
                steps = 0
            result = await env.step(step % 3 % 2)
            assert same(result, local.step(step % 3 % 2))
            over, steps = result[2], steps + 1
        assert (await env.state())["step_count"] == steps
        await env.close()

    within(play())


def test_openenv_in_workers(http_env, openenv_client, openenv_url):
    number = 6
    make = partial(openenv_client.cartpole, openenv_url)
    local = gym.vector.SyncVectorEnv([Local] * number)
    policy = FaultPolicy(on_timeout="reset", on_error="reset", step_timeout=DEADLINE)
    envs = ShmVectorEnv([make] * number, num_workers=2, faults=policy)
    with closing(envs), closing(local):
        assert (envs.reset(seed=3)[0] == local.reset(seed=3)[0]).all()
        for step in range(60):
            actions = (np.arange(number) + step) % 3 % 2
            for result, other in zip(envs.step(actions)[:4], local.step(actions)[:4], strict=True):
                assert (result == other).all()
    eventually(lambda: http_env.get(f"{openenv_url}/health")["sessions"] == 0)


@pytest.mark.parametrize("transport", ["ws", "http"])
def test_openenv_sends_no_step_twice(openenv_client, openenv_url, transport):
    async def play():
        env = client(openenv_client, openenv_url, transport)
        last, _ = await env.reset(seed=1)
        observation, reward, terminated, truncated, info = await env.step({"fault": "die"})
        assert (observation == last).all()
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert info["session_lost"]
        observation, _ = await env.reset(seed=1)
        assert (observation == last).all()
        await env.step({"push": 1})
        assert (await env.state())["step_count"] == 1
        await env.close()

    within(play())


@pytest.mark.parametrize("transport", ["ws", "http"])
def test_openenv_that_never_answers(openenv_client, openenv_url, transport):
    async def play():
        env, local = client(openenv_client, openenv_url, transport), Local()
        await env.reset(seed=1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(env.step({"fault": "hang"}), 0.2)
        assert ((await env.reset(seed=2))[0] == local.reset(seed=2)[0]).all()
        assert same(await env.step({"push": 1}), local.step(1))
        await env.close()

    within(play())


def test_openenv_that_is_full_is_waited_for(http_env, openenv_client, openenv_url):
    async def play():
        envs = [client(openenv_client, openenv_url, patience=DEADLINE) for _ in range(9)]
        await asyncio.gather(*(env.reset() for env in envs[:8]))
        late = client(openenv_client, openenv_url, patience=0.2)
        with pytest.raises(ConnectionError, match="ServerFull"):
            await late.reset()
        await late.close()
        await asyncio.gather(envs[8].reset(), envs[0].close())
        await asyncio.gather(*(env.close() for env in envs[1:]))

    within(play())
    eventually(lambda: http_env.get(f"{openenv_url}/health")["sessions"] == 0)


def test_openenv_truncates_after_so_many_steps(openenv_client, openenv_url):
    async def play():
        env = client(openenv_client, openenv_url, max_steps=3)
        for _ in range(2):
            await env.reset(seed=1)
            over = [(await env.step({"push": step % 2}))[3] for step in range(3)]
            assert over == [False, False, True]
        await env.close()

    within(play())


def test_the_program_of_openenv():
    with program("openenv_client.py", "--sessions", "8", "--steps", "30") as process:
        output, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    assert re.fullmatch(r"8 sessions by ws: \d+ episodes, [\d,]+ steps/s\n", output)
