"""Envs behind HTTP: sessions of a server, stepped by coroutines, hundreds in a worker.

Needs aiohttp (``pip install aiohttp``), and starts a server of its own:

    python examples/http_env.py

``HttpEnv`` is the env. Its ``reset`` and ``step`` are coroutines, so that a worker waits for the
answers of all its envs at the same time. A policy looks at the envs that are ready, by batches with
a deadline. Some sessions die meanwhile, and some never answer: their episodes are truncated, and
other sessions take their place. Prints requests/s, beside those of a bare loop of aiohttp's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import aiohttp
import gymnasium as gym
import numpy as np
import numpy.typing as npt
from aiohttp import web
from gymnasium import spaces

import shmvec

# The env ------------------------------------------------------------------------------------------


class SessionLost(ConnectionError):
    """A session, or its server, that does not answer any more, and the last that was heard."""


class SharedClient:
    """The HTTP client of all envs of an event loop, which reuse each other's connections."""

    _of: dict[asyncio.AbstractEventLoop, SharedClient] = {}  # weak keys could not be pickled

    def __init__(self) -> None:
        """Makes a client, on the loop that runs."""
        self.users = 0
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the default would let 100 envs ask at once
            cookie_jar=aiohttp.DummyCookieJar(),  # one env's cookies are none of another's
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),  # the vector env has limits
        )

    @classmethod
    def join(cls) -> SharedClient:
        """The client of the loop that runs, for one more env. It has to leave it."""
        loop = asyncio.get_running_loop()
        client = cls._of.get(loop)
        if client is None:
            client = cls._of[loop] = cls()
        client.users += 1
        return client

    async def ask(self, url: str, body: dict[str, Any], patience: float) -> Any:
        """Sends a request, and repeats it for so many seconds.

        Raises:
            SessionLost: HTTP 404; or the time is up.
            RuntimeError: The server does not accept the request.
        """
        until = time.monotonic() + patience
        wait = 0.05
        while True:
            try:
                async with self.http.post(url, json=body) as response:
                    if response.status == 200:
                        return await response.json()
                    problem = f"HTTP {response.status}: {await response.text()}"
                    if response.status == 404:
                        raise SessionLost(problem)
                    if response.status < 500:
                        raise RuntimeError(f"{url}: {problem}")  # repeated, it would be the same
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() + wait > until:
                raise SessionLost(problem)
            # Not all at the same time: a server that comes back has enough to do.
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, 1.0)

    async def leave(self) -> None:
        """Closes the client, if that was its last env."""
        self.users -= 1
        if self.users == 0:
            del self._of[asyncio.get_running_loop()]
            await self.http.close()


class HttpEnv(gym.Env[npt.NDArray[np.float32], int]):
    """An env that is a session of a server.

    Requests have numbers, and the server makes none twice, so that any may be repeated: those that
    meet a connection error or HTTP 5xx are. A session that is lost ends the episode:
    ``truncated=True``, and ``info["session_lost"]`` says why. The next reset opens another.

    An env draws the seed of each episode itself, from that of the last ``reset`` that had one: an
    episode is the same in a session that has lived for long as in a new one.

    Attributes:
        session: The server's name for it; None before the first reset, and once it is lost.
        number: That of the last request.
        client: What sends the requests of all envs of an event loop.
    """

    def __init__(self, url: str, step_patience: float = 2.0, reset_patience: float = 30.0) -> None:
        """Makes the env; it connects to nothing before its first reset.

        Args:
            url: The server's.
            step_patience: Seconds for which a step's request is repeated, after which its session
                is given up.
            reset_patience: Seconds for which opening a session is tried, after which the reset
                raises SessionLost.
        """
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._url = url
        self._step_patience = step_patience
        self._reset_patience = reset_patience
        self.client: SharedClient | None = None
        self.session: str | None = None
        self._given_up: list[str] = []  # to be deleted, for the server's sake
        self.number = 0
        self._observation = np.zeros(4, np.float32)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Begins an episode, in the session of the last one if that still lives."""
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        if self.client is None:
            self.client = SharedClient.join()
        while self._given_up:
            await self._delete(self._given_up.pop())
        answer = None
        if self.session is not None:
            with contextlib.suppress(SessionLost):
                answer = await self._make("reset", self._step_patience, seed=seed)
        if answer is None:
            # Named here: a request that is repeated, since its answer was lost, opens no second.
            self.session = uuid.uuid4().hex
            answer = await self._make("reset", self._reset_patience, seed=seed)
        self._observation = np.array(answer["observation"], np.float32)
        return self._observation, {"session": self.session}

    async def step(
        self, action: int
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Makes a step, once, however often it has to be asked for."""
        if self.session is None:
            raise gym.error.ResetNeeded("the session was lost: call reset")
        try:
            answer = await self._make("step", self._step_patience, action=int(action))
        except SessionLost as lost:
            return self._observation, 0.0, False, True, {"session_lost": str(lost)}
        self._observation = np.array(answer["observation"], np.float32)
        return (
            self._observation,
            float(answer["reward"]),
            bool(answer["terminated"]),
            bool(answer["truncated"]),
            {},
        )

    async def close(self) -> None:
        """Closes the session, and the client with the last env that has it."""
        if self.client is None:
            return
        if self.session is not None:
            self._given_up.append(self.session)
            self.session = None
        while self._given_up:
            await self._delete(self._given_up.pop())
        client, self.client = self.client, None
        await client.leave()

    async def _make(self, what: str, patience: float, **arguments: Any) -> Any:
        """A request of the session's with the next number; without an answer it is given up."""
        assert self.client is not None
        self.number += 1
        body = {"session": self.session, "number": self.number, **arguments}
        try:
            return await self.client.ask(f"{self._url}/{what}", body, patience)
        except BaseException:  # a cancellation as well: the time limit's
            if self.session is not None:
                self._given_up.append(self.session)
            self.session = None
            raise

    async def _delete(self, session: str) -> None:
        """Deletes a session: best effort, for a second."""
        assert self.client is not None
        limit = aiohttp.ClientTimeout(total=1.0)
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
            async with self.client.http.delete(f"{self._url}/session/{session}", timeout=limit):
                pass


# The server ---------------------------------------------------------------------------------------


class Session:
    """An env of the server's, and what it has answered last."""

    def __init__(self) -> None:
        """Makes the env."""
        self.env = gym.make("CartPole-v1")
        self.number = 0
        self.steps = 0
        self.answer: asyncio.Future[dict[str, Any]] | None = None
        self.fault = ""
        self.times = 0
        self.deleted = asyncio.Event()


class Server:
    """A server of CartPole sessions, some of which die or never answer.

    ``POST /reset`` and ``POST /step`` take ``session``, the ``number`` of the request, larger than
    the last one's (the same number gets the same answer), and ``seed`` or ``action``. A reset opens
    a session that does not exist. ``POST /fault`` brings about a ``fault`` in a ``session``:

    - "die": HTTP 404 from now on; "break": HTTP 500 from now on;
    - "hang": its requests are not answered, until it is deleted;
    - "busy": HTTP 503 for the next ``times`` requests;
    - "lose": the next ``times`` requests are carried out, and the connections closed.
    """

    def __init__(self, delay: float = 0.02, die_every: int = 0, hang_every: int = 0) -> None:
        """Makes a server.

        Args:
            delay: Seconds that a step takes.
            die_every: One of so many steps is its session's last. 0: none.
            hang_every: One of so many steps is not answered. 0: none.
        """
        self._delay = delay
        self._die_every = die_every
        self._hang_every = hang_every
        self._sessions: dict[str, Session] = {}
        self._dead: set[str] = set()
        self._names = 0
        self._counts = dict.fromkeys(("requests", "steps", "repeated", "opened", "died", "hung"), 0)

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.router.add_post("/reset", self._reset)
        app.router.add_post("/step", self._step)
        app.router.add_post("/fault", self._fault)
        app.router.add_get("/state/{session}", self._state)
        app.router.add_get("/counts", self._count)
        app.router.add_delete("/session/{session}", self._delete)
        return app

    async def _reset(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body.get("session")
        if name is None:
            self._names += 1
            name = f"session-{self._names}"
        if name not in self._sessions and name not in self._dead:
            self._sessions[name] = Session()
            self._counts["opened"] += 1
        session = self._session(name)

        async def work() -> dict[str, Any]:
            observation, _ = session.env.reset(seed=body.get("seed"))
            session.steps = 0
            return {"session": name, "observation": observation.tolist()}

        return await self._answer(request, session, body["number"], work)

    async def _step(self, request: web.Request) -> web.Response:
        body = await request.json()
        session = self._session(body["session"])

        async def work() -> dict[str, Any]:
            await asyncio.sleep(self._delay)
            observation, reward, terminated, truncated, _ = session.env.step(body["action"])
            session.steps += 1
            self._counts["steps"] += 1
            if self._hang_every and self._counts["steps"] % self._hang_every == 0:
                self._set(body["session"], "hang")
            elif self._die_every and self._counts["steps"] % self._die_every == 0:
                self._set(body["session"], "die")
            return {
                "observation": observation.tolist(),
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
            }

        return await self._answer(request, session, body["number"], work)

    async def _answer(
        self,
        request: web.Request,
        session: Session,
        number: int,
        work: Callable[[], Awaitable[dict[str, Any]]],
    ) -> web.Response:
        """The answer to the request of this number, whose work is done once."""
        self._counts["requests"] += 1
        if session.fault == "break":
            raise web.HTTPInternalServerError(text="this session is broken")
        if session.fault == "busy" and session.times:
            session.times -= 1
            raise web.HTTPServiceUnavailable(text="come back later")
        if session.fault == "hang":
            await session.deleted.wait()
            raise web.HTTPNotFound(text="this session was deleted")
        if number < session.number:
            raise web.HTTPConflict(text=f"request {session.number} came after {number}")
        if number > session.number or session.answer is None:
            session.number, session.answer = number, asyncio.ensure_future(work())
        else:
            self._counts["repeated"] += 1
        answer = await asyncio.shield(session.answer)  # one that is repeated waits for it, too
        if session.fault == "lose" and session.times:
            session.times -= 1
            assert request.transport is not None
            request.transport.close()
        return web.json_response(answer)

    async def _fault(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._session(body["session"])
        self._set(body["session"], body["fault"], body.get("times", 1))
        return web.json_response({})

    def _set(self, name: str, fault: str, times: int = 1) -> None:
        session = self._sessions.get(name)
        if session is None:
            return
        session.fault, session.times = fault, times
        if fault in ("die", "break"):
            self._counts["died"] += 1
        if fault == "hang":
            self._counts["hung"] += 1
        if fault == "die":
            del self._sessions[name]
            self._dead.add(name)

    async def _state(self, request: web.Request) -> web.Response:
        session = self._session(request.match_info["session"])
        return web.json_response({"steps": session.steps})

    async def _count(self, request: web.Request) -> web.Response:
        return web.json_response({**self._counts, "sessions": len(self._sessions)})

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["session"]
        self._dead.discard(name)
        session = self._sessions.pop(name, None)
        if session is not None:
            session.deleted.set()
            session.env.close()
        return web.json_response({})

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            raise web.HTTPNotFound(text=f"there is no session {name}")
        return self._sessions[name]


async def serve(app: web.Application, port: int) -> None:
    """Serves until SIGTERM, or until standard input ends; prints the port, once it listens."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    with contextlib.suppress(PermissionError):  # /dev/null does not end
        loop.add_reader(sys.stdin.fileno(), stop.set)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    # With a shorter backlog, some of many envs that connect at once wait for a second.
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await stop.wait()
    await runner.cleanup()


@contextlib.contextmanager
def serving(*arguments: str, program: str = __file__) -> Iterator[str]:
    """A server in a process of its own, as its URL; it ends with the block, or with this process.

    Args:
        arguments: For the program's command line.
        program: A script that takes ``--serve`` and prints its port.
    """
    command = [sys.executable, os.path.abspath(program), "--serve", *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # ends with this process, however that ends
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            if not port:
                raise RuntimeError("the server did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()


# The program --------------------------------------------------------------------------------------


def policy(observations: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Keeps the pole upright for a while."""
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


def play(
    url: str,
    sessions: int,
    workers: int,
    seconds: float,
    step_timeout: float = 2.0,
    context: str | None = None,
) -> dict[str, Any]:
    """Steps the envs for so many seconds, and counts what the server and the policy see."""
    faults = shmvec.FaultPolicy(
        on_timeout="reset",  # the step that is never answered is cancelled, and its env reset
        on_error="reset",
        step_timeout=step_timeout,
        reset_timeout=60.0,
        max_restarts=1000,
    )
    seen = {"batches": 0, "lost": 0, "timed_out": 0, "episodes": 0}
    envs = shmvec.ShmVectorEnv(
        [partial(HttpEnv, url)] * sessions,
        num_workers=workers,
        batch_size=(1, sessions // 2),
        batch_timeout=0.005,
        faults=faults,
        context=context,
    )
    try:
        envs.async_reset(seed=1)
        before = None
        start = time.perf_counter()
        while True:
            observations, _, terminations, truncations, infos = envs.recv()
            envs.send(policy(observations), infos["env_id"])
            seen["batches"] += 1
            seen["episodes"] += int(np.count_nonzero(terminations | truncations))
            seen["lost"] += int(np.count_nonzero(infos.get("_session_lost", ())))
            seen["timed_out"] += int(np.count_nonzero(infos.get("_fault", ())))
            now = time.perf_counter()
            if before is None and now > start + min(1.0, seconds / 2):  # once all are connected
                before, since = counts(url), now
            if now > start + seconds:
                break
        after = counts(url)
        rate = (after["requests"] - before["requests"]) / (time.perf_counter() - since)
        envs.exchange.discard()  # waits for all, under the limits; close() has none
    finally:
        envs.close(timeout=5.0)
    return {**seen, "rate": rate}


def bare(url: str, sessions: int, seconds: float, seed: int = 1) -> float:
    """Requests/s of a loop that makes the same requests in this process, and nothing else."""

    async def session(client: aiohttp.ClientSession, seed: int) -> None:
        async def ask(what: str, body: dict[str, Any]) -> Any:
            async with client.post(f"{url}/{what}", json=body) as response:
                return await response.json() if response.status == 200 else None

        rng = np.random.default_rng(seed)
        while True:  # an episode; its session has died, if there is no answer
            number = 1
            answer = await ask("reset", {"number": 1, "seed": int(rng.integers(2**31))})
            name = answer["session"]
            while answer is not None:
                observation = np.array(answer["observation"], np.float32)
                number += 1
                if answer.get("terminated") or answer.get("truncated"):
                    body = {"seed": int(rng.integers(2**31))}
                    what = "reset"
                else:
                    body = {"action": int(policy(observation[None])[0])}
                    what = "step"
                answer = await ask(what, {"session": name, "number": number, **body})

    async def all_of_them() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            tasks = [asyncio.ensure_future(session(client, seed + i)) for i in range(sessions)]
            warm_up = min(1.0, seconds / 2)
            try:
                await asyncio.sleep(warm_up)
                before, since = await counted(client, url), time.perf_counter()
                await asyncio.sleep(seconds - warm_up)
                after = await counted(client, url)
                return (after["requests"] - before["requests"]) / (time.perf_counter() - since)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(all_of_them())


async def counted(client: aiohttp.ClientSession, url: str) -> dict[str, int]:
    """What the server has counted."""
    async with client.get(f"{url}/counts") as response:
        return await response.json()


def counts(url: str) -> dict[str, int]:
    """What the server has counted, for code without an event loop."""
    return get(f"{url}/counts")


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    """The answer to a GET, or to a POST with this body, for code without an event loop."""
    from urllib.request import ProxyHandler, Request, build_opener

    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    with build_opener(ProxyHandler({})).open(request, timeout=10) as response:
        return json.load(response)


def main() -> None:
    """Plays, beside the bare loop, and says how many sessions were replaced."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--delay", type=float, default=0.02, help="seconds that a step takes")
    parser.add_argument("--die-every", type=int, default=1000, help="so many steps end a session")
    parser.add_argument("--hang-every", type=int, default=3000, help="so many are not answered")
    parser.add_argument("--context", choices=["fork", "forkserver", "spawn"])
    parser.add_argument("--serve", action="store_true", help="only the server")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.serve:
        server = Server(options.delay, options.die_every, options.hang_every)
        asyncio.run(serve(server.app(), options.port))
        return

    given = {"--delay": options.delay, "--die-every": options.die_every}
    given["--hang-every"] = options.hang_every
    arguments = [text for name, value in given.items() for text in (name, str(value))]
    with serving(*arguments) as url:
        print(f"a server at {url}", flush=True)
        seen = play(
            url, options.sessions, options.workers, options.seconds, context=options.context
        )
        end = counts(url)
    print(
        f"{options.sessions} sessions, {options.workers} workers: {seen['rate']:,.0f} requests/s, "
        f"{seen['episodes']} episodes, {seen['batches']} batches"
    )
    print(
        f"{end['died']} sessions died and {end['hung']} did not answer: {seen['lost']} and "
        f"{seen['timed_out']} episodes were truncated so far, and "
        f"{end['opened'] - options.sessions} sessions opened in their place"
    )
    with serving(*arguments) as url:
        rate = bare(url, options.sessions, options.seconds)
    print(f"a bare loop: {rate:,.0f} requests/s; ratio {seen['rate'] / rate:.2f}")


if __name__ == "__main__":
    main()
