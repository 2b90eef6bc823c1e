"""Envs behind HTTP: sessions of a server, stepped by coroutines, hundreds in a worker.

Needs aiohttp (``pip install aiohttp``), and starts a server of its own:

    python examples/http_env.py

``HttpEnv`` is the env. Its ``reset`` and ``step`` are coroutines, so a worker waits for the answers
of all its envs at the same time. A policy gets the envs that are ready, in batches with a deadline.
Some sessions die meanwhile, and some never answer: their episodes are truncated, and other sessions
take their place. The program prints requests/s, also for a plain aiohttp loop without shmvec.
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
    """A session or its server no longer answers; the message is its last problem."""


class SharedClient:
    """The HTTP client of all envs of an event loop, which reuse each other's connections."""

    _clients: dict[asyncio.AbstractEventLoop, SharedClient] = {}  # weak keys could not be pickled

    def __init__(self) -> None:
        """Makes a client on the running event loop."""
        self.users = 0
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # by default, at most 100 envs ask at once
            cookie_jar=aiohttp.DummyCookieJar(),  # envs must not share cookies
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),  # the vector env has limits
        )

    @classmethod
    def join(cls) -> SharedClient:
        """Returns the running loop's client for one more env, which must call ``leave``."""
        loop = asyncio.get_running_loop()
        client = cls._clients.get(loop)
        if client is None:
            client = cls._clients[loop] = cls()
        client.users += 1
        return client

    async def ask(self, url: str, body: dict[str, Any], patience: float) -> Any:
        """Sends a request, and retries it for up to ``patience`` seconds.

        Raises:
            SessionLost: HTTP 404, or the time is up.
            RuntimeError: The server does not accept the request.
        """
        deadline = time.monotonic() + patience
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
                        raise RuntimeError(f"{url}: {problem}")  # a retry would not help
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                problem = f"{type(error).__name__}: {error}"
            if time.monotonic() + wait > deadline:
                raise SessionLost(problem)
            # Random delays spread the requests to a server that has just come back.
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, 1.0)

    async def leave(self) -> None:
        """Closes the client if this was its last env."""
        self.users -= 1
        if self.users == 0:
            del self._clients[asyncio.get_running_loop()]
            await self.http.close()


class HttpEnv(gym.Env[npt.NDArray[np.float32], int]):
    """An env that is a session of a server.

    Requests have numbers, and the server carries out none twice, so they are retried after a
    connection error or HTTP 5xx. A lost session ends the episode: ``truncated=True``, and
    ``info["session_lost"]`` says why. The next reset opens another session.

    An env draws the seed of each episode itself, from the last seed of ``reset``. So an episode is
    the same in an old session as in a new one.

    Attributes:
        session: The session's name; None before the first reset and once the session is lost.
        number: The number of the last request.
        client: Sends the requests of all envs of an event loop.
    """

    def __init__(self, url: str, step_patience: float = 2.0, reset_patience: float = 30.0) -> None:
        """Makes the env, which does not connect before its first reset.

        Args:
            url: The server's URL.
            step_patience: Seconds for which a step's request is retried. Then its session is lost.
            reset_patience: Seconds for which opening a session is retried. Then the reset raises
                SessionLost.
        """
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._url = url
        self._step_patience = step_patience
        self._reset_patience = reset_patience
        self.client: SharedClient | None = None
        self.session: str | None = None
        self._old_sessions: list[str] = []  # which the server should delete
        self.number = 0
        self._observation = np.zeros(4, np.float32)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        """Begins an episode, in the previous one's session if that is still alive."""
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        if self.client is None:
            self.client = SharedClient.join()
        while self._old_sessions:
            await self._delete(self._old_sessions.pop())
        answer = None
        if self.session is not None:
            with contextlib.suppress(SessionLost):
                answer = await self._request("reset", self._step_patience, seed=seed)
        if answer is None:
            # The env chooses the name, so that a retried request opens no second session.
            self.session = uuid.uuid4().hex
            answer = await self._request("reset", self._reset_patience, seed=seed)
        self._observation = np.array(answer["observation"], np.float32)
        return self._observation, {"session": self.session}

    async def step(
        self, action: int
    ) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Makes a step once, even if its request is retried."""
        if self.session is None:
            raise gym.error.ResetNeeded("the session was lost: call reset")
        try:
            answer = await self._request("step", self._step_patience, action=int(action))
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
        """Closes the session, and the client if this is its last env."""
        if self.client is None:
            return
        if self.session is not None:
            self._old_sessions.append(self.session)
            self.session = None
        while self._old_sessions:
            await self._delete(self._old_sessions.pop())
        client, self.client = self.client, None
        await client.leave()

    async def _request(self, path: str, patience: float, **arguments: Any) -> Any:
        """Sends the session's next request; if no answer comes, the session is lost."""
        assert self.client is not None
        self.number += 1
        body = {"session": self.session, "number": self.number, **arguments}
        try:
            return await self.client.ask(f"{self._url}/{path}", body, patience)
        except BaseException:  # also a cancellation by the time limit
            if self.session is not None:
                self._old_sessions.append(self.session)
            self.session = None
            raise

    async def _delete(self, session: str) -> None:
        """Tries for a second to delete a session."""
        assert self.client is not None
        limit = aiohttp.ClientTimeout(total=1.0)
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
            async with self.client.http.delete(f"{self._url}/session/{session}", timeout=limit):
                pass


# The server ---------------------------------------------------------------------------------------


class Session:
    """An env of the server, and its last answer."""

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

    ``POST /reset`` and ``POST /step`` take ``session``, the ``number`` of the request, and ``seed``
    or ``action``. Numbers grow; the same number gets the same answer. A reset opens a session that
    does not exist. ``POST /fault`` causes a ``fault`` in a ``session``:

    - "die": HTTP 404 from now on; "break": HTTP 500 from now on;
    - "hang": its requests are not answered until it is deleted;
    - "busy": HTTP 503 for the next ``times`` requests;
    - "lose": the next ``times`` requests are carried out, but their connections are closed.
    """

    def __init__(self, delay: float = 0.02, die_every: int = 0, hang_every: int = 0) -> None:
        """Makes a server.

        Args:
            delay: Seconds that a step takes.
            die_every: One in this many steps is its session's last. 0: none.
            hang_every: One in this many steps is not answered. 0: none.
        """
        self._delay = delay
        self._die_every = die_every
        self._hang_every = hang_every
        self._sessions: dict[str, Session] = {}
        self._dead: set[str] = set()
        self._names = 0
        self._counts = dict.fromkeys(("requests", "steps", "repeated", "opened", "died", "hung"), 0)

    def app(self) -> web.Application:
        """The application with its routes."""
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
        """Answers the request with this number, whose work is done once."""
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
        answer = await asyncio.shield(session.answer)  # a retry waits for it, too
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
    """Serves until SIGTERM or the end of standard input; prints the port once it listens."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    with contextlib.suppress(PermissionError):  # /dev/null does not end
        loop.add_reader(sys.stdin.fileno(), stop.set)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    # With a shorter backlog, some envs wait for a second if many connect at once.
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    print(runner.addresses[0][1], flush=True)
    await stop.wait()
    await runner.cleanup()


@contextlib.contextmanager
def serving(*arguments: str, program: str = __file__) -> Iterator[str]:
    """Runs a server in its own process, and yields its URL; it ends with the block or this process.

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
    """Keeps the pole up for a while."""
    return (observations[:, 2] + observations[:, 3] > 0).astype(np.int64)


def play(
    url: str,
    sessions: int,
    workers: int,
    seconds: float,
    step_timeout: float = 2.0,
    context: str | None = None,
) -> dict[str, Any]:
    """Steps the envs for some seconds, and counts requests, batches, episodes and lost sessions."""
    faults = shmvec.FaultPolicy(
        on_timeout="reset",  # a step that is not answered is cancelled, and its env reset
        on_error="reset",
        step_timeout=step_timeout,
        reset_timeout=60.0,
        max_restarts=1000,
    )
    results = {"batches": 0, "lost": 0, "timed_out": 0, "episodes": 0}
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
            results["batches"] += 1
            results["episodes"] += int(np.count_nonzero(terminations | truncations))
            results["lost"] += int(np.count_nonzero(infos.get("_session_lost", ())))
            results["timed_out"] += int(np.count_nonzero(infos.get("_fault", ())))
            now = time.perf_counter()
            if before is None and now > start + min(1.0, seconds / 2):  # once all are connected
                before, since = counts(url), now
            if now > start + seconds:
                break
        after = counts(url)
        rate = (after["requests"] - before["requests"]) / (time.perf_counter() - since)
        envs.exchange.discard()  # waits for all within the time limits; close() has no limit
    finally:
        envs.close(timeout=5.0)
    return {**results, "rate": rate}


def bare(url: str, sessions: int, seconds: float, seed: int = 1) -> float:
    """Measures requests/s of a loop in this process that only makes the same requests."""

    async def session(client: aiohttp.ClientSession, seed: int) -> None:
        async def ask(path: str, body: dict[str, Any]) -> Any:
            async with client.post(f"{url}/{path}", json=body) as response:
                return await response.json() if response.status == 200 else None

        rng = np.random.default_rng(seed)
        while True:  # plays an episode; without an answer, its session has died
            number = 1
            answer = await ask("reset", {"number": 1, "seed": int(rng.integers(2**31))})
            name = answer["session"]
            while answer is not None:
                observation = np.array(answer["observation"], np.float32)
                number += 1
                if answer.get("terminated") or answer.get("truncated"):
                    body = {"seed": int(rng.integers(2**31))}
                    path = "reset"
                else:
                    body = {"action": int(policy(observation[None])[0])}
                    path = "step"
                answer = await ask(path, {"session": name, "number": number, **body})

    async def measure() -> float:
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

    return asyncio.run(measure())


async def counted(client: aiohttp.ClientSession, url: str) -> dict[str, int]:
    """Gets the server's counts."""
    async with client.get(f"{url}/counts") as response:
        return await response.json()


def counts(url: str) -> dict[str, int]:
    """Gets the server's counts, for code without an event loop."""
    return get(f"{url}/counts")


def get(url: str, body: dict[str, Any] | None = None) -> Any:
    """Gets the answer to a GET, or to a POST with this body, for code without an event loop."""
    from urllib.request import ProxyHandler, Request, build_opener

    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    with build_opener(ProxyHandler({})).open(request, timeout=10) as response:
        return json.load(response)


def main() -> None:
    """Plays, says how many sessions were replaced, and compares with the bare loop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--delay", type=float, default=0.02, help="seconds that a step takes")
    parser.add_argument(
        "--die-every", type=int, default=1000, help="one in this many steps ends its session"
    )
    parser.add_argument(
        "--hang-every", type=int, default=3000, help="one in this many is not answered"
    )
    parser.add_argument("--context", choices=["fork", "forkserver", "spawn"])
    parser.add_argument("--serve", action="store_true", help="only the server")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.serve:
        server = Server(options.delay, options.die_every, options.hang_every)
        asyncio.run(serve(server.app(), options.port))
        return

    switches = {"--delay": options.delay, "--die-every": options.die_every}
    switches["--hang-every"] = options.hang_every
    arguments = [text for name, value in switches.items() for text in (name, str(value))]
    with serving(*arguments) as url:
        print(f"a server at {url}", flush=True)
        results = play(
            url, options.sessions, options.workers, options.seconds, context=options.context
        )
        totals = counts(url)
    print(
        f"{options.sessions} sessions, {options.workers} workers: "
        f"{results['rate']:,.0f} requests/s, "
        f"{results['episodes']} episodes, {results['batches']} batches"
    )
    print(
        f"{totals['died']} sessions died and {totals['hung']} did not answer: {results['lost']} "
        f"and {results['timed_out']} episodes were truncated so far, and "
        f"{totals['opened'] - options.sessions} sessions opened in their place"
    )
    with serving(*arguments) as url:
        rate = bare(url, options.sessions, options.seconds)
    print(f"a bare loop: {rate:,.0f} requests/s; ratio {results['rate'] / rate:.2f}")


if __name__ == "__main__":
    main()
