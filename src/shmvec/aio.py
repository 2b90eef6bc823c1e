"""``shmvec.aio``: single envs in worker processes that coroutines await.

Programs of coroutines, such as trainers of language-model agents, have an env in each of hundreds
of tasks, and call a model between its steps. :func:`make` gives each task an env with the methods
of a ``gymnasium.Env``, as coroutines, and starts no threads: all envs belong to one
:class:`shmvec.exchange.Exchange`. What tasks ask in one turn of the event loop is sent together,
and answers wake the loop by a descriptor.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded

from shmvec._options import takes_options
from shmvec.exchange import Answers, AutoresetMode, EnvFn, Exchange, OwnsProcesses
from shmvec.faults import EnvTimeoutError, WorkerCrashError
from shmvec.spaces import batched, mapped
from shmvec.stats import Stats

__all__ = ["AwaitableEnv", "AwaitableEnvs", "make"]

_RETRY_S = 0.01  # until the next turn, after an env was too late, or while a worker starts


def make(env_fns: Sequence[EnvFn], **options: Any) -> AwaitableEnvs:
    """Makes envs that are awaited: ``async with shmvec.aio.make(env_fns) as envs``.

    Args:
        env_fns: One function for each env.
        **options: As for :class:`AwaitableEnvs`.

    Returns:
        The envs; ``async with`` starts and closes them.

    Raises:
        TypeError: There is no such option.

    Example:
        >>> import asyncio
        >>> import gymnasium as gym
        >>> import shmvec
        >>> async def episode(env, seed):
        ...     observation, info = await env.reset(seed=seed)
        ...     steps, over = 0, False
        ...     while not over:
        ...         observation, reward, terminated, truncated, info = await env.step(0)
        ...         steps, over = steps + 1, terminated or truncated
        ...     return steps
        >>> async def main():
        ...     env_fns = [lambda: gym.make("CartPole-v1")] * 4
        ...     async with shmvec.aio.make(env_fns, num_workers=2) as envs:
        ...         return await asyncio.gather(*(episode(env, 7) for env in envs))
        >>> asyncio.run(main())
        [9, 9, 9, 9]
    """
    return AwaitableEnvs(env_fns, **options)


@dataclass(eq=False, slots=True)
class _Call:
    """What a task asks of an env.

    Attributes:
        env: The env's index.
        operation: "step", "reset" or "call".
        arguments: An action; seed and options; or a name, args and kwargs.
        answer: The future that the task awaits; a cancelled task's is done before the env answers.
    """

    env: int
    operation: str
    arguments: tuple[Any, ...]
    answer: asyncio.Future[Any]


class AwaitableEnv:
    """One env, with the methods of a ``gymnasium.Env`` as coroutines.

    One call at a time: a second one raises AlreadyPendingCallError while the first is awaited. If a
    task is cancelled while it awaits a call, the env's answer is discarded, and its next call is
    sent once that answer has come.

    Attributes:
        index: Its index in :class:`AwaitableEnvs`.
        observation_space: The first env's; with ``observation_mode="different"``, this env's may
            have other bounds.
        action_space: Its action space.
        metadata: The first env's.
        render_mode: The first env's.
    """

    def __init__(self, index: int, exchange: Exchange, ask: Callable[..., Any]) -> None:
        """Takes its index, the exchange, and the function that sends a call."""
        self.index = index
        self.observation_space: gym.Space[Any] = exchange.single_observation_space
        self.action_space: gym.Space[Any] = exchange.single_action_space
        self.metadata: dict[str, Any] = exchange.metadata
        self.render_mode: str | None = exchange.render_mode
        self._ask = ask

    def __repr__(self) -> str:
        """Names the env's index."""
        return f"{type(self).__name__}(index={self.index})"

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the env.

        Args:
            seed: For its random generator. None: the env goes on with the generator it has.
            options: For the env.

        Returns:
            The first observation, which is the caller's own, and the info.

        Raises:
            AlreadyPendingCallError: Another call of this env is awaited.
            ClosedEnvironmentError: The envs were closed, maybe while this was awaited.
            EnvTimeoutError: It takes longer than ``reset_timeout``, and the policy is to raise.
            WorkerCrashError: A worker has died, and the policy is to raise: all envs are closed.
            RuntimeError: The envs were not started, or were started in another event loop.
            Exception: Whatever the env raises.
        """
        result: tuple[Any, dict[str, Any]] = await self._ask(self.index, "reset", seed, options)
        return result

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps the env.

        Args:
            action: Of the action space. It is read before the loop's next turn: do not write to an
                array until this returns.

        Returns:
            The observation, which is the caller's own; the reward; whether the episode was
            terminated, and truncated; and the info.

        Raises:
            ResetNeeded: The episode is over, and ``autoreset_mode`` is not to reset it.
            ValueError: The action lacks parts of a Dict or Tuple space. Nothing was sent.
            TypeError: The dtype of the action is wrong. Nothing was sent.
            Exception: As :meth:`reset`.
        """
        result: tuple[Any, float, bool, bool, dict[str, Any]]
        result = await self._ask(self.index, "step", action)
        return result

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the env, or gets an attribute.

        Raises:
            WorkerCrashError: Its worker has died; if it was restarted, the envs can still be used.
            Exception: As :meth:`reset`; or the arguments cannot be pickled. Nothing was sent then.
        """
        return await self._ask(self.index, "call", name, args, kwargs)

    async def render(self) -> Any:
        """The result of the env's ``render``; raises as :meth:`call`."""
        return await self.call("render")

    async def get_attr(self, name: str) -> Any:
        """An attribute of the env, or what a method returns; raises as :meth:`call`."""
        return await self.call(name)

    async def set_attr(self, name: str, value: Any) -> None:
        """Sets an attribute of the env, as ``set_wrapper_attr`` does; raises as :meth:`call`."""
        await self.call("set_wrapper_attr", name, value)


class AwaitableEnvs(OwnsProcesses):
    """Envs in worker processes; tasks may await each one separately.

    ``async with`` starts and closes them. They belong to the event loop that has started them.

    Attributes:
        num_envs: Number of envs, once they are started.
        closed: Whether they were closed, or a crash has closed them.
    """

    @takes_options(
        "caller_steps",
        "copy",
        "log_errors",
        reason="the event loop steps no env, results are the caller's own, and what an env raises "
        "is raised in the task that awaits it",
    )
    def __init__(self, env_fns: Sequence[EnvFn], **options: Any) -> None:
        """Prepares the envs, which ``async with`` starts.

        Args:
            env_fns: One function for each env.
            **options: Of :class:`shmvec.ShmVectorEnv`, with the same meaning: {options}.
                ``autoreset_mode`` is DISABLED unless it is given: tasks reset their envs when
                episodes are over. With ``num_workers=0`` the envs step in the event loop, and block
                it: this is for debuggers.
        """
        self._arguments = env_fns, {"autoreset_mode": AutoresetMode.DISABLED, **options}
        self._exchange: Exchange | None = None
        self._descriptor = -1  # the loop watches it
        self._timer: asyncio.Handle | None = None
        self._envs: list[AwaitableEnv] = []
        self._queue: dict[int, _Call] = {}  # by env: not sent yet
        self._is_turn_scheduled = False  # for calls in the queue
        self._calls_in_flight: dict[int, _Call] = {}  # by env: not answered yet
        self._unreported_faults: dict[int, dict[str, Any]] = {}  # infos by env
        self.num_envs = 0
        self.closed = False

    # ---- from start to end -------------------------------------------------------------------

    async def __aenter__(self) -> AwaitableEnvs:
        """Starts the workers, and waits until all envs are built.

        Raises:
            RuntimeError: They were started before.
            Exception: As :class:`shmvec.ShmVectorEnv`; no process is left then.
        """
        if self._exchange is not None:
            raise RuntimeError("these envs were started before: make new ones")
        self._loop = asyncio.get_running_loop()
        env_fns, options = self._arguments
        self._exchange = exchange = Exchange(
            env_fns, name=type(self).__name__, wait=False, **options
        )
        try:
            await _run_blocking(exchange, exchange.initialize)
            self._descriptor = exchange.fileno()
        except BaseException:
            self.closed = True
            exchange.close(terminate=True)
            raise
        self.num_envs = exchange.num_envs
        self._envs = [AwaitableEnv(env, exchange, self._ask) for env in range(self.num_envs)]
        self._loop.add_reader(self._descriptor, self._run_turn)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Closes the envs."""
        await self.close()

    async def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the envs and ends the workers; calls that are awaited raise.

        If the task that awaits this is cancelled, the workers are killed.

        Args:
            timeout: As for :meth:`shmvec.ShmVectorEnv.close`.
            terminate: Likewise.

        Raises:
            Exception: What an env's ``close`` raises, after everything else is closed.
        """
        exchange = self._exchange
        if exchange is None:
            return
        self._leave_loop(
            ClosedEnvironmentError("The envs were closed while this call was awaited.")
        )
        try:
            await _run_blocking(exchange, exchange.close, timeout, terminate)
        except BaseException:  # without this the thread would wait for an env that hangs
            for process in exchange.processes:
                process.kill()
            raise

    def _leave_loop(self, error: Exception) -> None:
        """Stops watching the descriptor, and fails all calls."""
        self.closed = True
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = -1
        if self._timer is not None:
            self._timer.cancel()
        calls = [*self._calls_in_flight.values(), *self._queue.values()]
        self._queue = {}
        for call in calls:
            if not self._loop.is_closed():  # no task of a closed loop awaits anything
                _fail(call, error)

    # ---- questions ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of envs."""
        return self.num_envs

    def __getitem__(self, index: int) -> AwaitableEnv:
        """The env with this index."""
        return self._envs[index]

    def __iter__(self) -> Iterator[AwaitableEnv]:
        """The envs, by index."""
        return iter(self._envs)

    def __repr__(self) -> str:
        """Names the number of envs and workers, and whether they are closed."""
        if self._descriptor < 0:
            return f"{type(self).__name__}({'closed' if self.closed else 'not started'})"
        return repr(self._exchange)

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return self._exchange.processes if self._exchange is not None else []

    def stats(self) -> Stats:
        """Counts and times so far, as :meth:`shmvec.ShmVectorEnv.stats`."""
        return self._open_exchange().stats()

    def _open_exchange(self) -> Exchange:
        """Returns the exchange; raises if it was closed or not started."""
        exchange = self._exchange
        if exchange is None:
            raise RuntimeError(
                "the envs are not started: `async with shmvec.aio.make(env_fns) as envs`"
            )
        exchange.check_open()
        if self.closed:
            raise ClosedEnvironmentError("Trying to operate on envs that are being closed.")
        return exchange

    # ---- a turn of the loop ------------------------------------------------------------------

    def _ask(self, env: int, operation: str, *arguments: Any) -> asyncio.Future[Any]:
        """Queues a call, which is sent at the end of this turn of the loop."""
        self._open_exchange()
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                "these envs belong to another event loop: await them in the one that started them"
            )
        for earlier in self._calls_in_flight.get(env), self._queue.get(env):
            if earlier is not None and not earlier.answer.done():
                raise AlreadyPendingCallError(
                    f"env {env} is in a {earlier.operation} that another task awaits: one call at "
                    "a time. Give each task an env of its own.",
                    earlier.operation,
                )
        call = _Call(env, operation, arguments, self._loop.create_future())
        self._queue[env] = call
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            self._schedule_turn(0.0)
        return call.answer

    def _schedule_turn(self, seconds: float | None) -> None:
        """Schedules the next turn after so many seconds, unless the descriptor is ready before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None and seconds <= 0.0:
            self._timer = self._loop.call_soon(self._run_turn)
        elif seconds is not None:
            self._timer = self._loop.call_later(seconds, self._run_turn)

    def _run_turn(self) -> None:
        exchange = self._exchange
        if exchange is None or self.closed:
            return
        self._is_turn_scheduled = False
        try:
            self._send(exchange)
            blocked = self._queue.keys() & self._calls_in_flight.keys()
            is_worker_down = len(blocked) < len(self._queue)
            seconds = exchange.poll()
            self._take(exchange)
            if blocked - self._calls_in_flight.keys():  # they can be sent now
                seconds = 0.0
            elif is_worker_down:
                seconds = min(_RETRY_S, _RETRY_S if seconds is None else seconds)
            if exchange.recycles:
                exchange.recycle()
        except EnvTimeoutError as error:
            self._report_timeout(exchange, error)
            seconds = _RETRY_S
        except Exception as error:  # a crash, mostly: it ends all envs
            self._leave_loop(error)
            exchange.close(terminate=True)
            return
        self._schedule_turn(seconds)

    def _send(self, exchange: Exchange) -> None:
        """Sends the calls in the queue that were not cancelled, those of an operation together."""
        queue, self._queue = self._queue, {}
        steps, resets, others = list[_Call](), list[_Call](), list[list[_Call]]()
        for env, call in queue.items():
            if call.answer.done():
                continue
            if env in self._calls_in_flight:  # an earlier call, which was cancelled
                self._queue[env] = call
            elif call.operation == "call":
                others.append([call])
            elif call.operation == "reset":
                resets.append(call)
            else:
                steps.append(call)
        for calls in (steps, resets, *others):
            if calls:
                self._send_together(exchange, calls)

    def _send_together(self, exchange: Exchange, calls: list[_Call]) -> None:
        """Sends calls of one operation; if one of them is wrong, only that one fails."""
        try:
            _ask_exchange(exchange, calls)
        except Exception as error:
            if exchange.closed:
                raise
            if len(calls) > 1:
                for call in calls:
                    self._send_together(exchange, [call])
            elif isinstance(error, multiprocessing.TimeoutError):  # its worker is being replaced
                self._queue[calls[0].env] = calls[0]
            else:
                _fail(calls[0], error)
        else:
            self._calls_in_flight.update((call.env, call) for call in calls)

    def _take(self, exchange: Exchange) -> None:
        while True:
            try:
                answers = exchange.take(count=self.num_envs, least=0, timeout=0.0)
            except Exception as error:
                lost_envs = [env for env in self._calls_in_flight if not exchange.in_flight(env)]
                if exchange.closed or not lost_envs:
                    raise
                self._report_loss(lost_envs, error)
                continue
            for failure in answers.failures:
                self._finish(failure.env, failure.exception())
            for env in answers.lost:
                message = f"the worker of env {env} died in this call, and was restarted: "
                self._finish(env, WorkerCrashError(message + "there is no result"))
            if not answers.failures:
                break
        if len(answers.envs):
            self._hand_out(exchange, exchange.delivered(answers))

    def _report_loss(self, envs: Sequence[int], cause: Exception) -> None:
        """Tells tasks that their envs' answers are lost, because a part cannot be read."""
        error = RuntimeError(
            f"the answers of envs {envs}, which came together, are lost, because a part of them, "
            f"such as an info, cannot be unpickled in this process: {cause!r}"
        )
        error.__cause__ = cause
        for env in envs:
            self._finish(env, error)

    def _hand_out(self, exchange: Exchange, answers: Answers) -> None:
        space = exchange.single_observation_space
        for env, observation, reward, terminated, truncated, info in answers.by_env(space):
            call = self._calls_in_flight.get(env)
            if call is None or call.operation == "call":
                self._finish(env, *_open_parcel(answers.returned.get(env)))
                continue
            if call.answer.done() and env in answers.reports:  # the env's next answer reports it
                self._unreported_faults[env] = {"fault": info["fault"]}
            elif env in self._unreported_faults:
                info = {**self._unreported_faults.pop(env), **info}
            observation = mapped(space, _copy_array, observation)
            ends = (reward, terminated, truncated) if call.operation == "step" else ()
            self._finish(env, None, (observation, *ends, info))

    def _finish(self, env: int, error: BaseException | None, result: Any = None) -> None:
        """Ends a task's call with an error or a result, which is discarded if it was cancelled."""
        call = self._calls_in_flight.pop(env, None)
        if call is None:
            return
        if error is not None:
            _fail(call, error)
        elif not call.answer.done():
            call.answer.set_result(result)

    def _report_timeout(self, exchange: Exchange, error: EnvTimeoutError) -> None:
        """Raises a timeout in the task of its env, or of all envs of a worker that is not up."""
        late_envs: Sequence[int] = [error.env]
        if error.operation == "build":
            late_envs = next(envs for envs in exchange.ranges if error.env in envs)
        for call in [*self._calls_in_flight.values(), *self._queue.values()]:
            if call.env in late_envs:
                _fail(call, error)


async def _run_blocking(exchange: Exchange, function: Callable[..., None], *args: Any) -> None:
    """Runs a blocking function in a thread; without workers here, where the envs belong."""
    if exchange.num_workers:
        await asyncio.to_thread(function, *args)
    else:
        function(*args)


def _ask_exchange(exchange: Exchange, calls: Sequence[_Call]) -> None:
    """Asks envs for calls of one operation; there is only one call if it is no step or reset."""
    envs = [call.env for call in calls]
    first = calls[0]
    if first.operation == "step":
        actions = batched(exchange.single_action_space, [call.arguments[0] for call in calls])
        try:
            exchange.ask(envs, actions, timeout=0.0)
        except AssertionError:  # AsyncVectorEnv's error, whose message is about several envs
            raise ResetNeeded(f"the episode of env {envs[0]} is over: reset it first") from None
    elif first.operation == "reset":
        seeds, options = map(list, zip(*(call.arguments for call in calls), strict=True))
        exchange.ask_reset(envs, _none_if_all_none(seeds), _none_if_all_none(options), timeout=0.0)
    else:
        name, args, kwargs = first.arguments
        exchange.ask_call(name, args, kwargs, envs, timeout=0.0)


def _none_if_all_none(values: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in values) else values


def _copy_array(value: Any) -> Any:
    """Copies a row of a batch, so that the task does not keep all of the batch."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _open_parcel(parcel: Any) -> tuple[Exception | None, Any]:
    """Unpickles the result of a call: an error and no result, or no error and a result."""
    try:
        return None, parcel.open()
    except Exception as error:
        return error, None


def _fail(call: _Call, error: BaseException) -> None:
    """Makes a call raise an error, unless it is done."""
    if isinstance(error, StopIteration):  # a coroutine cannot raise it
        cause, error = error, RuntimeError(f"env {call.env} raised StopIteration")
        error.__cause__ = cause
    if not call.answer.done():
        call.answer.set_exception(error)
