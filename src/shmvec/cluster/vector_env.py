"""``ClusterVectorEnv``: Gymnasium's ``VectorEnv`` on several nodes, for slow envs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

from shmvec._arguments import (
    checked_batch_size,
    checked_count,
    checked_env_fns,
    existing_env_ids,
    reset_arguments,
    values_by_env,
)
from shmvec._options import takes_options
from shmvec.cluster.actor_pool import ActorPool, Place
from shmvec.cluster.backend import ActorLostError
from shmvec.cluster.fragments import pickle_object
from shmvec.cluster.hosts import Answer, Host, HostReport, Request, gather_answers
from shmvec.exchange import (
    ActionRows,
    Autoreset,
    AutoresetMode,
    Options,
    OwnsProcesses,
)
from shmvec.faults import (
    FaultPolicy,
    TooManyFaultsError,
    WorkerCrashError,
    envs_in_words,
    restart_seed,
)
from shmvec.vector_env import StepResults

__all__ = ["ClusterVectorEnv"]


@dataclass(eq=False)
class _HostPlace(Place):
    """The vector env's record of a host."""

    envs: range = range(0)
    queue: list[Request] = field(default_factory=list)  # unsent requests
    in_flight: int = 0  # number of envs with a request that was sent and is not answered
    awaited: bool = False  # whether answers were asked for, and have not come


@dataclass
class _EnvRecord:
    """The vector env's record of an env."""

    request: Request | None = None  # its request in flight
    seed: int | None = None  # its last seed
    observation: Any = None  # its last observation
    over: bool = False  # whether its episode is over
    fresh: bool = False  # whether it was rebuilt, and not reset since
    fault: dict[str, Any] | None = None  # its next step reports this


class ClusterVectorEnv(OwnsProcesses, VectorEnv[Any, Any, npt.NDArray[Any]]):
    """Steps envs on all nodes of a cluster: for envs of 10 ms a step and more.

    Each node has some of the envs, in a :class:`shmvec.ShmVectorEnv` over its cores. A batch costs
    a message to each node and one back, some milliseconds. For faster envs use a
    :class:`Collector`. Results are those of ``ShmVectorEnv``.

    Attributes:
        num_envs: Number of envs.
        nodes: The envs of each node, by the node's name.
        restarts: How often a host was lost, and restarted.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.cluster import ClusterVectorEnv
        >>> envs = ClusterVectorEnv([lambda: gym.make("CartPole-v1")] * 3, local=True, num_hosts=2)
        >>> observations, infos = envs.reset(seed=42)
        >>> envs.step([0, 1, 0])[1]
        array([1., 1., 1.])
        >>> envs.close()
    """

    _pool: ActorPool[_HostPlace]

    @takes_options(
        "autoreset_mode",
        "copy",
        "faults",
        reason="results are copies, and nothing is reset within a step",
    )
    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        *,
        batch_size: int | None = None,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        faults: FaultPolicy | None = None,
        num_hosts: int | None = None,
        cpus_per_host: float | None = None,
        local: bool = False,
        start_timeout: float = 120.0,
        actor_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Builds the envs, on all nodes at the same time.

        Args:
            env_fns: One function for each env; neighbours share a node.
            batch_size: Number of envs that ``recv``, ``step`` and ``reset`` return: those that are
                ready first. None: all.
            autoreset_mode: NEXT_STEP or DISABLED, as for ``ShmVectorEnv``.
            faults: The policy for faults of workers. With ``on_crash="restart"`` the envs of a lost
                node are rebuilt where there is room: their next step returns a truncation, with
                ``infos["fault"]``, and a reset follows.
            num_hosts: Number of actors over which the envs are spread. None: one on each node.
            cpus_per_host: CPUs of each actor. None: all of its node; with ``num_hosts``: 1.
            local: Whether all hosts are in this process, without Ray.
            start_timeout: Seconds that hosts get to start.
            actor_options: Options for Ray's actors, ``resources``, ``scheduling_strategy`` and
                ``runtime_env`` for example: docs/cluster.md.
            **options: Options of :class:`shmvec.ShmVectorEnv`, for each node: {options}.

        Raises:
            ImportError: Ray is not installed.
            ValueError: An argument is out of range.
            TypeError: The env_fns cannot be pickled; and as ``ShmVectorEnv``.
            RuntimeError: There is no room for the hosts; spaces differ between nodes.
            Exception: An env_fn has raised it; the cause names the node.
        """
        super().__init__()
        self.env_fns = checked_env_fns(env_fns)
        self.num_envs = len(self.env_fns)
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self._autoreset = Autoreset.of(autoreset_mode)
        if self._autoreset.in_step:
            raise ValueError("on a cluster, episodes begin with the next step: use NEXT_STEP")
        self.batch_size = checked_batch_size(batch_size, self.num_envs)
        self.faults = faults or FaultPolicy()
        if num_hosts is not None:
            num_hosts = checked_count("num_hosts", num_hosts)
        if cpus_per_host is not None and not cpus_per_host > 0:
            raise ValueError(f"cpus_per_host must be positive, got {cpus_per_host}")
        functions = pickle_object("env_fns", self.env_fns)
        self._options = {**options, "autoreset_mode": self.autoreset_mode, "faults": faults}
        self.restarts = 0
        self._envs = [_EnvRecord() for _ in range(self.num_envs)]
        self._answers: deque[Answer] = deque()  # not yet taken
        self._pool = ActorPool(
            _HostPlace,
            "host",
            local=local,
            options=actor_options,
            cpus=cpus_per_host,
            timeout=start_timeout,
        )
        self._pickled_env_fns = self._pool.backend.put(functions)
        try:
            self._start(num_hosts)
        except BaseException:
            self._shut_down()
            raise

    # ---- hosts -------------------------------------------------------------------------------

    def _start(self, num_hosts: int | None) -> None:
        """Starts the hosts; spreads the envs anew if a place is removed."""
        pool = self._pool
        while True:
            hosts = pool.places_anywhere(num_hosts, 1) if num_hosts else pool.places_on_nodes()
            shares = np.cumsum([0.0, *(host.cpus for host in hosts)])
            bounds = np.rint(shares / shares[-1] * self.num_envs).astype(int).tolist()
            for host, begin, end in zip(hosts, bounds, bounds[1:], strict=False):
                host.envs = range(begin, end)
            pool.places = [host for host in hosts if host.envs]
            if pool.start_all(self._prepare_host):
                break
            pool.close()
        pool.keeps_places = True
        first: HostReport = pool.first_report
        self.single_observation_space, self.single_action_space = first.spaces
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self._actions = ActionRows(self.single_action_space, self.num_envs)

    def _prepare_host(self, host: _HostPlace) -> tuple[Any, ...]:
        name = f"host of {envs_in_words(host.envs)} (0 to {len(host.envs) - 1} there)"
        return name, Host, self._pickled_env_fns, host.envs, self._options

    @property
    def _hosts(self) -> list[_HostPlace]:
        return self._pool.places

    @property
    def nodes(self) -> dict[str, list[int]]:
        """The envs of each node, by the node's name."""
        nodes: dict[str, list[int]] = {}
        for host in self._hosts:
            nodes.setdefault(host.node_name, []).extend(host.envs)
        return nodes

    # ---- Gymnasium's contract ----------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, or those of ``options["reset_mask"]``, in parallel.

        Args:
            seed: As for ``ShmVectorEnv.reset``.
            options: As for ``ShmVectorEnv.reset``.

        Returns:
            Observations and infos; with ``batch_size``, of the envs that are ready first.

        Raises:
            Exception: As ``ShmVectorEnv``.
        """
        count = self._queue_resets(seed, options)
        if self.batch_size is not None:
            observations, *_, infos = self.recv()
            return observations, infos
        infos = self._take_in_order(count)[-1]
        space = self.single_observation_space
        empty: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, [env.observation for env in self._envs], empty), infos

    def async_reset(
        self, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> int:
        """Starts to reset envs; :meth:`recv` returns those that are ready first.

        Returns:
            The number of envs that are being reset.

        Raises:
            AlreadyPendingCallError: Envs are in flight.
            ValueError: Seeds, options or mask are wrong.
        """
        count = self._queue_resets(seed, options)
        self._send()
        return count

    def _queue_resets(self, seed: int | Sequence[int | None] | None, options: Options) -> int:
        """Queues resets for ``_send``; returns their number."""
        self._check_idle()
        envs, seeds, each = reset_arguments(self.num_envs, seed, options)
        none = [None] * len(envs)
        with self._closing_on_error():
            for arguments in zip(envs.tolist(), seeds or none, each or none, strict=True):
                self._reset_env(*arguments)
        return len(envs)

    def step(self, actions: Any, env_id: npt.ArrayLike | None = None) -> StepResults:
        """Steps all envs, in parallel; with ``batch_size`` or ``env_id`` as ``send`` and ``recv``.

        Raises:
            Exception: As ``ShmVectorEnv``; an exception of an env closes all envs.
        """
        if env_id is not None or self.batch_size is not None:
            envs = existing_env_ids(env_id, self.num_envs)
            self._queue_steps(actions, envs)
            return self._take_batch(self.batch_size or len(envs))
        self._check_idle()
        self._queue_steps(actions, None)
        return self._take_in_order(self.num_envs)

    def send(self, actions: Any, env_id: npt.ArrayLike | None = None) -> None:
        """Starts to step some envs; :meth:`recv` returns those that are ready first.

        Raises:
            ValueError: There is no such env, it is in flight, or the number or shape of the actions
                is wrong. Nothing was sent.
            TypeError: The dtype of the actions is wrong. Nothing was sent.
        """
        self._queue_steps(actions, env_id)
        self._send()

    def _queue_steps(self, actions: Any, env_id: npt.ArrayLike | None) -> None:
        self._check_open()
        envs = existing_env_ids(env_id, self.num_envs)
        rows = self._actions.of(envs, actions)
        pending = [env for env in envs.tolist() if self._envs[env].request is not None]
        if pending:
            raise ValueError(f"envs {pending} are in flight: take their results, with recv, first")
        with self._closing_on_error():
            for index, action in zip(envs.tolist(), rows, strict=True):
                env = self._envs[index]
                if env.fault is not None:
                    self._truncate(index, env.fault)
                    env.fault = None
                elif env.fresh and self._autoreset.in_next_step:
                    self._reset_env(index, restart_seed(env.seed, self.restarts), None)
                else:
                    self._enqueue(Request(index, False, action))

    def recv(self) -> StepResults:
        """Waits for a batch of the envs that are ready first; see ``ShmVectorEnv.recv``.

        Raises:
            NoAsyncCallError: Fewer envs are in flight.
            Exception: As :meth:`step`.
        """
        return self._take_batch(self.batch_size or self.num_envs)

    def _take_batch(self, count: int) -> StepResults:
        answers = self._take_answers(count, 1)
        results = gather_answers(self.single_observation_space, answers)
        results[-1]["env_id"] = np.array([answer.env for answer in answers])
        return results

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every env, in parallel, or gets an attribute."""
        results = self._call_hosts("call", [(name, args, kwargs)] * len(self._hosts))
        return tuple(value for part in results for value in part)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute of every env."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of every env: a list or tuple has one value for each."""
        value_of_env = values_by_env(values, range(self.num_envs))
        parts = [(name, [value_of_env[env] for env in host.envs]) for host in self._hosts]
        self._call_hosts("set_attr", parts)

    def render(self) -> tuple[Any, ...]:
        """Renders every env; returns their frames."""
        return self.call("render")

    # ---- asking and taking -------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("this ClusterVectorEnv is closed")

    def _check_idle(self) -> None:
        self._check_open()
        if self._answers or self._num_in_flight():
            raise AlreadyPendingCallError(
                "envs are in flight: take all their results, with recv, first",
                "recv",
            )

    def _host_of(self, env: int) -> _HostPlace:
        return next(host for host in self._hosts if env in host.envs)

    def _num_in_flight(self) -> int:
        return sum(env.request is not None for env in self._envs)

    def _reset_env(self, index: int, seed: int | None, options: Any) -> None:
        env = self._envs[index]
        env.fault = None
        if seed is not None:
            env.seed = seed
        self._enqueue(Request(index, True, seed=seed, options=options))

    def _enqueue(self, request: Request) -> None:
        self._envs[request.env].request = request
        self._host_of(request.env).queue.append(request)

    def _send(self, least: int | None = None) -> None:
        """Sends queued requests to hosts, in one message each; busy hosts get theirs later.

        Args:
            least: Number of answers to ask each host for. None: do not ask for answers.
        """
        with self._closing_on_error():
            for host in self._hosts:
                wanted = host.queue or (least is not None and host.in_flight)
                if host.report is None or host.awaited or not wanted:
                    continue
                requests, host.queue = host.queue, []
                host.in_flight += len(requests)
                if least is None:
                    self._pool.ask(host, "send", requests)
                else:
                    host.awaited = True
                    self._pool.ask(host, "send_and_receive", requests, min(least, host.in_flight))

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Closes the vector env if the block raises: its records may be wrong then."""
        try:
            yield
        except BaseException:
            self._shut_down()
            raise

    def _take_answers(self, count: int, least: int) -> list[Answer]:
        self._check_open()
        available = len(self._answers) + self._num_in_flight()
        if available < count:
            message = f"cannot wait for {count} envs: only {available} were asked"
            raise NoAsyncCallError(message, "recv")
        while len(self._answers) < count:
            self._wait(least)
        return [self._answers.popleft() for _ in range(count)]

    def _take_in_order(self, count: int) -> StepResults:
        """Takes ``count`` answers, ordered by env; infos have rows for all envs."""
        answers = sorted(self._take_answers(count, self.num_envs), key=lambda answer: answer.env)
        return gather_answers(self.single_observation_space, answers, self.num_envs)

    def _wait(self, least: int) -> None:
        """Waits a slice of time for answers; Ctrl-C meanwhile loses nothing."""
        self._send(least)
        try:
            answered = self._pool.wait([host for host in self._hosts if host.calls])
        except Exception:
            self._check_open()  # it may have been closed meanwhile, which ends the hosts
            self._shut_down()
            raise
        with self._closing_on_error():
            for host in answered:
                self._receive(host)

    def _receive(self, host: _HostPlace) -> None:
        """Receives a host's answers, its report, or the result of ``send``."""
        has_started = host.report is not None
        try:
            answers: list[Answer] | None = self._pool.take(host)
        except ActorLostError as error:
            self._replace_host(host, error)
            return
        if not has_started or answers is None:
            return
        host.awaited = False
        host.in_flight -= len(answers)
        for answer in answers:
            env = self._envs[answer.env]
            if env.request is not None and env.request.is_reset:
                env.fresh = False
            env.request, env.observation = None, answer.observation
            env.over = answer.terminated or answer.truncated
        self._answers += answers

    def _call_hosts(self, method: str, arguments: Sequence[Iterable[Any]]) -> list[Any]:
        self._check_idle()
        while any(host.report is None for host in self._hosts):
            self._wait(1)  # until lost hosts are replaced
        results: list[Any] = []
        failures: list[tuple[_HostPlace, Exception]] = []
        try:
            for host, args in zip(self._hosts, arguments, strict=True):
                self._pool.ask(host, method, *args)
            for host in self._hosts:
                try:
                    results.append(self._pool.take(host))
                except Exception as error:  # the calls of the other hosts are made, too
                    failures.append((host, error))
        finally:
            for host in self._hosts:
                host.calls.clear()
        for host, failure in failures:
            if isinstance(failure, ActorLostError):
                with self._closing_on_error():
                    self._replace_host(host, failure)
                raise WorkerCrashError(
                    f"the node of {envs_in_words(host.envs)} was lost in {method!r}: {failure}"
                ) from failure
            raise failure
        return results

    # ---- losses ------------------------------------------------------------------------------

    def _replace_host(self, host: _HostPlace, why: Exception) -> None:
        """Replaces a lost host, and truncates the episodes of its envs."""
        message = f"node {host.node_name} was lost: {why}"
        host.node = None  # anywhere
        self._pool.drop_lost(host, why)
        if self.faults.on_crash != "restart":
            raise WorkerCrashError(
                f"{message}. faults=FaultPolicy(on_crash='restart') goes on without it"
            ) from why
        self.restarts += 1
        if self.restarts > self.faults.max_restarts:
            raise TooManyFaultsError(
                f"{message}; the FaultPolicy allows {self.faults.max_restarts} restarts, and all "
                "are used up"
            ) from why
        host.awaited, host.in_flight = False, 0
        self._pool.start_missing(self._prepare_host)
        unsent = {request.env for request in host.queue}
        host.queue.clear()
        info = {"type": "NodeLost", "message": message, "restarts": self.restarts, "stderr": ""}
        for number in host.envs:
            env = self._envs[number]
            was_in_episode = not env.fresh and env.observation is not None
            env.fresh = True
            request = env.request
            if request is None:
                if was_in_episode and not env.over:
                    env.fault = info
            elif request.is_reset:
                seed = (
                    request.seed if number in unsent else restart_seed(request.seed, self.restarts)
                )
                self._enqueue(Request(number, True, seed=seed, options=request.options))
            elif env.over and self._autoreset.in_next_step:
                self._reset_env(number, restart_seed(env.seed, self.restarts), None)
            else:
                env.request = None
                self._truncate(number, info)

    def _truncate(self, index: int, info: dict[str, Any]) -> None:
        """Answers for an env with a truncation, in place of lost results."""
        env = self._envs[index]
        env.over = True
        self._answers.append(Answer(index, env.observation, 0.0, False, True, {"fault": info}))

    # ---- the end -----------------------------------------------------------------------------

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the envs, and ends the hosts.

        Raises:
            Exception: An env's ``close`` has raised it; all have ended.
        """
        failures = self._shut_down()
        if failures:
            raise failures[0]

    def _shut_down(self) -> list[Exception]:
        """Ends the hosts; returns the exceptions of closing their envs."""
        self.closed = True
        return self._pool.close() if hasattr(self, "_pool") else []  # an option was refused
