"""A client env for servers that speak OpenEnv's protocol, and a server to try it with.

Needs aiohttp (``pip install aiohttp``), and starts a server of its own:

    python examples/openenv_client.py
    python examples/openenv_client.py --transport http

`OpenEnv <https://github.com/meta-pytorch/OpenEnv>`_ hosts envs in containers. Each connection to a
server's ``/ws`` has its own env, which takes JSON messages: ``reset``, ``step``, ``state``,
``close``. ``OpenEnvClient`` makes it a Gymnasium env. Each server has its own actions and
observations, so two functions translate them. For OpenEnv's echo env:

    text = gymnasium.spaces.Text(200)
    client = partial(
        OpenEnvClient,
        "http://localhost:8000",
        text,
        text,
        to_action=lambda action: {"message": action},
        to_observation=lambda observation: observation["echoed_message"],
    )
    envs = shmvec.ShmVectorEnv([client] * 64, num_workers=2)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import gymnasium as gym
import numpy as np
import numpy.typing as npt
from aiohttp import web
from gymnasium import spaces
from http_env import SessionLost, SharedClient, policy, serve, serving

import shmvec


class ServerFull(ConnectionError):
    """The server has as many sessions as it allows."""


class OpenEnvClient(gym.Env[Any, Any]):
    """An env on an OpenEnv server.

    ``done`` counts as a termination, because the protocol does not tell it from a truncation. If
    the connection is lost, the episode ends: ``truncated=True``, and ``info["session_lost"]`` says
    why. The next reset connects anew. No step is sent twice, because the protocol has no number by
    which a server could know. An exception of the server's env is a RuntimeError here, and the
    session goes on.

    An env draws the seed of each episode itself, from the last seed of ``reset``.
    """

    def __init__(
        self,
        url: str,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        to_action: Callable[[Any], dict[str, Any]],
        to_observation: Callable[[dict[str, Any]], Any],
        *,
        transport: str = "ws",
        max_steps: int | None = None,
        patience: float = 30.0,
    ) -> None:
        """Makes the env, which does not connect before its first reset.

        Args:
            url: The server's URL, ``http://host:port``.
            observation_space: The space of what ``to_observation`` returns.
            action_space: The space of what ``to_action`` takes.
            to_action: Turns an action into the server's JSON.
            to_observation: Turns the server's JSON into an observation.
            transport: "ws": a session for each env. "http": ``POST /reset`` and ``/step``, for
                servers of one env that keep it between requests. OpenEnv's own server makes an env
                for each request.
            max_steps: Number of steps after which an episode is truncated.
            patience: Seconds for which a reset tries to connect to a server that is down or full.
        """
        if transport not in ("ws", "http"):
            raise ValueError(f"transport is 'ws' or 'http', not {transport!r}")
        self.observation_space = observation_space
        self.action_space = action_space
        self._url = url
        self._to_action = to_action
        self._to_observation = to_observation
        self._transport = transport
        self._max_steps = max_steps
        self._patience = patience
        self._steps = 0
        self._observation: Any = None
        self._client: SharedClient | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._lost_socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode; ``options`` are further arguments of the server's reset."""
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        if self._client is None:
            self._client = SharedClient.join()
        await self._close_lost_socket()
        arguments = {"seed": seed, **(options or {})}
        if self._transport == "http":
            answer = await self._client.ask(f"{self._url}/reset", arguments, self._patience)
        else:
            answer = await self._reset_session({"type": "reset", "data": arguments})
        self._steps = 0
        self._observation = self._to_observation(answer["observation"])
        return self._observation, {}

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Makes a step."""
        if self._transport == "ws" and self._socket is None:
            raise gym.error.ResetNeeded("the session was lost: call reset")
        data = self._to_action(action)
        try:
            if self._transport == "ws":
                answer = await self._request({"type": "step", "data": data})
            else:
                assert self._client is not None
                answer = await self._client.ask(f"{self._url}/step", {"action": data}, 0.0)
        except SessionLost as lost:
            return self._observation, 0.0, False, True, {"session_lost": str(lost)}
        self._steps += 1
        self._observation = self._to_observation(answer["observation"])
        return (
            self._observation,
            float(answer["reward"] or 0.0),
            bool(answer["done"]),
            self._steps == self._max_steps,
            {},
        )

    async def state(self) -> dict[str, Any]:
        """Gets the server's state of the episode: ``episode_id``, ``step_count``, and more."""
        if self._transport == "ws":
            return await self._request({"type": "state"})
        assert self._client is not None
        async with self._client.http.get(f"{self._url}/state") as response:
            response.raise_for_status()
            return await response.json()

    async def close(self) -> None:
        """Ends the session, and closes the client if this is its last env."""
        if self._client is None:
            return
        await self._close_lost_socket()
        if self._socket is not None:
            with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
                await self._socket.send_json({"type": "close"})
                await asyncio.wait_for(self._socket.receive(), 1.0)  # the server closes it
            await self._socket.close()
            self._socket = None
        client, self._client = self._client, None
        await client.leave()

    async def _reset_session(self, message: dict[str, Any]) -> Any:
        """Resets the session if there is one; else tries for ``patience`` seconds to open one."""
        if self._socket is not None:
            with contextlib.suppress(SessionLost):
                return await self._request(message)
        deadline = time.monotonic() + self._patience
        wait = 0.05
        while True:
            try:
                await self._close_lost_socket()
                await self._connect()
                return await self._request(message)
            except (SessionLost, ServerFull, aiohttp.ClientError) as error:
                if time.monotonic() + wait > deadline:
                    raise SessionLost(f"{type(error).__name__}: {error}") from error
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, 1.0)

    async def _connect(self) -> None:
        assert self._client is not None
        self._socket = await self._client.http.ws_connect(
            f"{self._url}/ws",
            max_msg_size=100 << 20,
            timeout=aiohttp.ClientWSTimeout(ws_close=1.0),  # for a server that does not answer
        )

    async def _request(self, message: dict[str, Any]) -> Any:
        """Sends a message and returns the answer; if none comes, the session is lost."""
        socket = self._socket
        if socket is None:
            raise SessionLost("there is no connection")
        try:
            await socket.send_str(json.dumps(message))
            received = await socket.receive()
            if received.type != aiohttp.WSMsgType.TEXT:
                raise SessionLost(f"the connection was closed: {socket.close_code}")
            answer = json.loads(received.data)
            if answer["type"] == "error" and answer["data"].get("code") == "CAPACITY_REACHED":
                raise ServerFull(answer["data"].get("message"))
        except BaseException as error:
            # Also after a cancellation: its late answer would be taken for the next one.
            self._lost_socket, self._socket = socket, None
            if isinstance(error, ConnectionError) and not isinstance(error, ServerFull):
                raise SessionLost(str(error)) from error
            raise
        if answer["type"] == "error":
            raise RuntimeError(f"{answer['data'].get('code')}: {answer['data'].get('message')}")
        return answer["data"]

    async def _close_lost_socket(self) -> None:
        socket, self._lost_socket = self._lost_socket, None
        if socket is not None:
            await socket.close()


# A server -----------------------------------------------------------------------------------------


class HostedCartPole:
    """A CartPole that a server hosts.

    Its actions are ``{"push": 0 or 1}``, and for tests ``{"fault": ...}``: "raise" an exception,
    "hang", or "die", which closes the connection.
    """

    def __init__(self) -> None:
        """Makes the env."""
        self.env = gym.make("CartPole-v1")
        self.steps = 0

    def reset(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answers a reset."""
        self.steps = 0
        observation, _ = self.env.reset(seed=arguments.get("seed"))
        return {"observation": {"state": observation.tolist()}, "reward": None, "done": False}

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Answers a step."""
        if action.get("fault") == "raise":
            raise ValueError("what the action says")
        self.steps += 1
        observation, reward, terminated, truncated, _ = self.env.step(action["push"])
        done = terminated or truncated
        return {"observation": {"state": observation.tolist()}, "reward": reward, "done": done}

    def state(self) -> dict[str, Any]:
        """Answers a request for the state."""
        return {"episode_id": None, "step_count": self.steps}


def server(max_sessions: int) -> web.Application:
    """A stand-in for an OpenEnv server: one env by HTTP, and one for each WebSocket."""
    shared_env = HostedCartPole()
    sessions: set[HostedCartPole] = set()

    async def reset(request: web.Request) -> web.Response:
        return web.json_response(shared_env.reset(await request.json()))

    async def step(request: web.Request) -> web.Response:
        action = (await request.json())["action"]
        if action.get("fault") == "hang":
            await asyncio.sleep(3600)
        if action.get("fault") == "die":
            assert request.transport is not None
            request.transport.close()
        return web.json_response(shared_env.step(action))

    async def state(request: web.Request) -> web.Response:
        return web.json_response(shared_env.state())

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy", "sessions": len(sessions)})

    async def websocket(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if len(sessions) >= max_sessions:
            await socket.send_json(error_message("CAPACITY_REACHED", f"{max_sessions} sessions"))
            await socket.close()
            return socket
        hosted = HostedCartPole()
        sessions.add(hosted)
        try:
            async for message in socket:
                request = json.loads(message.data)
                kind, data = request.get("type"), request.get("data", {})
                if kind == "close" or (kind == "step" and data.get("fault") == "die"):
                    break
                if kind == "step" and data.get("fault") == "hang":
                    continue
                await socket.send_json(answer(hosted, kind, data))
        finally:
            sessions.discard(hosted)
        return socket

    app = web.Application()
    app.router.add_post("/reset", reset)
    app.router.add_post("/step", step)
    app.router.add_get("/state", state)
    app.router.add_get("/health", health)
    app.router.add_get("/ws", websocket)
    return app


def answer(hosted: HostedCartPole, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Answers a message."""
    try:
        if kind == "reset":
            return {"type": "observation", "data": hosted.reset(data)}
        if kind == "step":
            return {"type": "observation", "data": hosted.step(data)}
        if kind == "state":
            return {"type": "state", "data": hosted.state()}
    except Exception as error:
        return error_message("EXECUTION_ERROR", str(error))
    return error_message("UNKNOWN_TYPE", f"there is no {kind!r}")


def error_message(code: str, message: str) -> dict[str, Any]:
    """The answer that reports an error."""
    return {"type": "error", "data": {"code": code, "message": message}}


# The program --------------------------------------------------------------------------------------


def to_action(action: Any) -> dict[str, Any]:
    """Makes an action of the stand-in."""
    return {"push": int(action)}


def to_observation(observation: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Takes the observation out of the stand-in's."""
    return np.array(observation["state"], np.float32)


def cartpole(url: str, transport: str = "ws", **options: Any) -> OpenEnvClient:
    """Makes the stand-in's env."""
    return OpenEnvClient(
        url,
        spaces.Box(-np.inf, np.inf, (4,), np.float32),
        spaces.Discrete(2),
        options.pop("to_action", to_action),
        to_observation,
        transport=transport,
        **options,
    )


def main() -> None:
    """Plays on a server, in sessions, or in its one env by HTTP."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", choices=["ws", "http"], default="ws")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--serve", action="store_true", help="only the server")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-sessions", type=int, default=1000)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(server(options.max_sessions), options.port))
        return

    sessions = options.sessions if options.transport == "ws" else 1
    with serving(program=__file__) as url:
        with shmvec.ShmVectorEnv(
            [partial(cartpole, url, options.transport)] * sessions,
            num_workers=min(options.workers, sessions),
            faults=shmvec.FaultPolicy(on_timeout="reset", on_error="reset", step_timeout=10.0),
        ) as envs:
            observations, _ = envs.reset(seed=1)
            episodes = 0
            start = time.perf_counter()
            for _ in range(options.steps):
                observations, _, terminations, truncations, _ = envs.step(policy(observations))
                episodes += int(np.count_nonzero(terminations | truncations))
            rate = options.steps * sessions / (time.perf_counter() - start)
    print(f"{sessions} sessions by {options.transport}: {episodes} episodes, {rate:,.0f} steps/s")


if __name__ == "__main__":
    main()
