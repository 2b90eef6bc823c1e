"""actorcritic's ``multi_env``: handles of envs that live in subprocesses, and many of them as one.

A ``SubprocessEnv`` is a Gymnasium env; a ``MultiEnv`` steps several in parallel, takes and returns
lists, and resets by itself. A subprocess that dies is replaced, and what it was asked is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym

from shmvec._parent.arguments import Options, checked_env_fns, checked_options, checked_seeds
from shmvec.adapters.meeting import Meeting, Raised, current
from shmvec.adapters.repeating import (
    RepeatingVectorEnv,
    Reset,
    Step,
    check_action,
)
from shmvec.faults import Failure, FaultPolicy, RemoteTraceback, WorkerCrashError, raise_failures

__all__ = ["MultiEnv", "SubprocessEnv", "create_subprocess_envs"]

_CLOSE_S = 30.0

EnvFn = Callable[[], gym.Env[Any, Any]]


class _Group(RepeatingVectorEnv):
    """The envs of one ``create_subprocess_envs``, or a single one."""


_Group.__name__ = "SubprocessEnv"  # what messages and processes are called by


@dataclass(frozen=True)
class _Call:
    """Asks for what a method of an env returns, or for an attribute."""

    name: str


@dataclass(frozen=True)
class _Close:
    """Asks for an env to be closed, within so many seconds."""

    timeout: float | None


_Asked: TypeAlias = Step | Reset | _Call | _Close


class SubprocessEnv(gym.Env[Any, Any]):
    """An env whose env lives in a process of its own.

    :meth:`start` and :meth:`initialize` must be called first; :func:`create_subprocess_envs` does
    that for many at once. A process that dies is replaced: ``env_fn`` is called again, the env is
    reset (with the options of its last reset, and a seed derived from the last one it was given),
    and the call is repeated. The next info says so in ``fault``: ``type``, ``message`` and
    ``restarts``; after a step also ``reset_observation`` and ``reset_info``, with which the new
    episode began.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.actorcritic import SubprocessEnv
        >>> env = SubprocessEnv(lambda: gym.make("CartPole-v1"))
        >>> env.start()
        >>> env.initialize()
        >>> observation, info = env.reset(seed=1)
        >>> observation, reward, terminated, truncated, info = env.step(1)
        >>> observation.shape, reward
        ((4,), 1.0)
        >>> env.close()
    """

    def __init__(self, env_fn: EnvFn, *, faults: FaultPolicy | None = None, **options: Any) -> None:
        """Prepares for a process; nothing is started.

        Args:
            env_fn: Makes the env, in the process, and again in each process that replaces it.
            faults: What is done when the process dies, and how often. None: it is replaced, up to
                10 times in 10 minutes.
            **options: Further arguments of :class:`shmvec.ShmVectorEnv`, such as ``context=`` and
                ``step_timeout=``.

        Raises:
            TypeError: ``env_fn`` is no function.
        """
        checked_env_fns([env_fn])
        self._new_group = partial(_Group, [env_fn], faults, **options)
        self._group: _Group | None = None
        self._index = 0
        self._closed = False
        self._attributes: dict[str, Any] = {}  # those that were asked for

    # ---- starting ----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process, which builds the env, and does not wait. A second call is harmless.

        Raises:
            ValueError: After :meth:`close`.
            TypeError: ``env_fn`` cannot be pickled, and the process is not forked; or one of the
                options is wrong (or ValueError).
        """
        if self._closed:
            raise ValueError("The subprocess was closed already: make a new SubprocessEnv.")
        if self._group is None:
            self._group = self._new_group()

    def initialize(self) -> None:
        """Waits until the env is built, and fetches its spaces. A second call is harmless.

        Raises:
            ValueError: Before :meth:`start`, or after :meth:`close`.
            WorkerCrashError: The process died while it built the env; it may be started again.
            Exception: Whatever ``env_fn`` raises, with the process's traceback as its cause.
        """
        group = self._started("initialize()")
        try:
            group.initialize()
        except BaseException:
            self._group = None
            raise

    def _started(self, method: str) -> _Group:
        if self._closed:
            raise ValueError(f"The subprocess was closed already: '{method}' cannot be used.")
        if self._group is None:
            also = "" if method == "initialize()" else " and 'initialize()'"
            raise ValueError(
                f"The subprocess is not started yet. Call 'start()'{also} before '{method}'."
            )
        return self._group

    def _initialized(self, method: str) -> _Group:
        group = self._started(method)
        if not group.initialized:
            raise ValueError(
                f"The subprocess is not initialized yet. Call 'initialize()' before '{method}'."
            )
        if group.closed:
            raise ValueError(
                f"The subprocess has ended, by a fault that was raised before: '{method}' cannot "
                "be used. Make a new SubprocessEnv."
            )
        return group

    # ---- what an env has ---------------------------------------------------------------------

    @property
    def observation_space(self) -> gym.Space[Any]:  # type: ignore[override]
        """That of the env."""
        return self._initialized("observation_space").single_observation_space

    @property
    def action_space(self) -> gym.Space[Any]:  # type: ignore[override]
        """That of the env."""
        return self._initialized("action_space").single_action_space

    @property
    def metadata(self) -> dict[str, Any]:  # type: ignore[override]
        """That of the env; empty before it is initialized, and after it was closed."""
        return dict(self._fetched("metadata") or {})

    @property
    def render_mode(self) -> str | None:  # type: ignore[override]
        """That of the env; None before it is initialized, and after it was closed."""
        mode: str | None = self._fetched("render_mode")
        return mode

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """That of the env; None before it is initialized, and after it was closed."""
        return self._fetched("spec")

    def _fetched(self, name: str) -> Any:
        group = self._group
        if self._closed or group is None or not group.initialized or group.closed:
            return None
        if name not in self._attributes:
            try:
                self._attributes[name] = _ask(self, _Call(name))
            except AttributeError:  # it is no gym.Env
                self._attributes[name] = None
        return self._attributes[name]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the env.

        Args:
            seed: For its random generator.
            options: For it.

        Returns:
            Observation and info.

        Raises:
            ValueError: Before :meth:`initialize`, or after :meth:`close`.
            TypeError: The seed is no integer.
            TooManyFaultsError: The process has died too often.
            Exception: Whatever the env raises, with the process's traceback as its cause.
        """
        self._initialized("reset()")
        (checked,) = checked_seeds([seed], 1) or [None]
        super().reset(seed=seed)
        observation, info = _ask(self, Reset(checked, options))
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps the env.

        Args:
            action: As its action space says.

        Returns:
            Observation, reward, terminated, truncated and info.

        Raises:
            ValueError: Before :meth:`initialize`, after :meth:`close`, or after the end of an
                episode; the action's shape is wrong.
            TypeError: The action's dtype is wrong.
            TooManyFaultsError: The process has died too often.
            Exception: Whatever the env raises, with the process's traceback as its cause.
        """
        self._initialized("step()")
        if self._over:
            raise ValueError("The episode is over. Call 'reset()' before 'step()'.")
        if current() is not None:  # it is sent with those of others, where the core checks it
            check_action(self.action_space, action)
        observation, reward, terminated, truncated, info = _ask(self, Step(action))
        return observation, reward, terminated, truncated, info

    def render(self, mode: str | None = None) -> Any:
        """What the env's ``render`` returns.

        Args:
            mode: Ignored: a Gymnasium env knows its ``render_mode``.

        Raises:
            ValueError: Before :meth:`initialize`, or after :meth:`close`.
            Exception: Whatever the env raises.
        """
        self._initialized("render()")
        return _ask(self, _Call("render"))

    def close(self, timeout: float | None = _CLOSE_S) -> None:
        """Closes the env, and ends the process; a second call is harmless.

        Processes that :func:`create_subprocess_envs` has started end when the last of their envs
        is closed.

        Args:
            timeout: Seconds that this may take; then the process is terminated. None: as long as
                it takes.

        Raises:
            Exception: What the env's ``close`` raises.
        """
        if not self._closed:
            _ask(self, _Close(timeout))

    @property
    def _over(self) -> bool:
        return _group_of(self).is_over(self._index)


class MultiEnv:
    """Steps envs in parallel; takes and returns lists.

    An env whose episode has ended is reset by its next step, so that the terminal observation is
    returned: that step resets the env and makes its step, and its info has the observation and
    info of the reset as ``reset_observation`` and ``reset_info``.

    Example:
        >>> import gymnasium as gym
        >>> from shmvec.adapters.actorcritic import MultiEnv, create_subprocess_envs
        >>> envs = MultiEnv(create_subprocess_envs([lambda: gym.make("CartPole-v1")] * 3))
        >>> observations = envs.reset()
        >>> observations, rewards, terminals, infos = envs.step([1, None, 0])
        >>> rewards, terminals
        ([1.0, None, 1.0], [False, None, False])
        >>> envs.close()
    """

    def __init__(self, envs: Iterable[gym.Env[Any, Any]]) -> None:
        """Takes the envs.

        Args:
            envs: Each a :class:`SubprocessEnv`, or one in wrappers (then its step runs in a
                thread, and what it asks the env is sent together with what the others ask).

        Raises:
            ValueError: There is none, one is there twice, one is not initialized or closed, or
                spaces differ.
            TypeError: One of them is no env.
        """
        self._envs = list(envs)
        if not self._envs:
            raise ValueError("MultiEnv needs at least one env")
        for index, env in enumerate(self._envs):
            if not isinstance(env, gym.Env):
                raise TypeError(f"envs[{index}] is a {type(env).__name__}, not a gymnasium.Env")
            for kind in ("observation_space", "action_space"):
                first, space = getattr(self._envs[0], kind), getattr(env, kind)
                if space != first:
                    raise ValueError(
                        f"The spaces of all envs must be equal, but the {kind} of env {index} is "
                        f"{space}, and that of env 0 is {first}"
                    )
        below = [env.unwrapped for env in self._envs]
        if len({id(env) for env in below}) < len(below):
            raise ValueError("One env is there twice")
        self._handles = [env for env in below if isinstance(env, SubprocessEnv)]
        self._closed = False
        self._over = [False] * len(self._envs)  # of those that are wrapped
        self.reset_infos: list[dict[str, Any]] = [{} for _ in self._envs]
        self._meeting: Meeting | None = None
        if any(env is not handle for env, handle in zip(self._envs, below, strict=True)) or len(
            self._handles
        ) < len(self._envs):
            self._meeting = Meeting(len(self._envs), _carry_out)

    @property
    def envs(self) -> list[gym.Env[Any, Any]]:
        """The envs."""
        return self._envs

    @property
    def observation_space(self) -> gym.Space[Any]:
        """That of each env."""
        return self._envs[0].observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """That of each env."""
        return self._envs[0].action_space

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> list[Any]:
        """Resets all envs, in parallel.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one seed (or None) for each env.
            options: Passed to every env's ``reset``; of a list, each env gets its own.

        Returns:
            One observation for each env. The infos are in ``reset_infos``.

        Raises:
            ValueError: After :meth:`close`; the number of seeds or options is wrong.
            TypeError: A seed is no integer.
            TooManyFaultsError: A process has died too often.
            Exception: Whatever an env raises, with its index.
        """
        self._check_open("reset()")
        count = len(self._envs)
        seeds = checked_seeds(seed, count) or [None] * count
        each = checked_options(options, count) or [None] * count
        if self._meeting is not None:
            jobs = {i: partial(self._reset_wrapped, i, seeds[i], each[i]) for i in range(count)}
            results = self._gather(self._meeting.run(jobs))
        else:
            results = self._ask({i: Reset(seeds[i], each[i]) for i in range(count)})
            _raise_any(results)
        self.reset_infos = [results[i][1] for i in range(count)]
        return [results[i][0] for i in range(count)]

    def step(
        self, actions: Sequence[Any]
    ) -> tuple[list[Any], list[float | None], list[bool | None], list[dict[str, Any] | None]]:
        """Steps all envs, in parallel.

        Args:
            actions: One for each env. None leaves that env out.

        Returns:
            Observations; rewards; terminals: whether the episode has ended, or was cut off, which
            the info says in ``TimeLimit.truncated``; infos. One of each for each env, None for
            those left out.

        Raises:
            ValueError: After :meth:`close`; the number of actions, or the shape of one, is wrong.
                No env has made a step.
            TypeError: The dtype of one is. No env has made a step.
            TooManyFaultsError: A process has died too often.
            Exception: Whatever an env raises, with its index; the others have made their step.
        """
        self._check_open("step()")
        given = list(actions)
        if len(given) != len(self._envs):
            raise ValueError(
                f"wrong actions: there are {len(given)} for {len(self._envs)} envs. Nothing was "
                "sent to any env."
            )
        wanted = [i for i, action in enumerate(given) if action is not None]
        if self._meeting is not None:
            jobs = {i: partial(self._step_wrapped, i, given[i]) for i in wanted}
            results = self._gather(self._meeting.run(jobs))
        else:
            results = self._step_plain({i: given[i] for i in wanted})
        observations: list[Any] = [None] * len(given)
        rewards: list[float | None] = [None] * len(given)
        terminals: list[bool | None] = [None] * len(given)
        infos: list[dict[str, Any] | None] = [None] * len(given)
        for i in wanted:
            observations[i], rewards[i], terminated, truncated, info = results[i]
            terminals[i] = terminated or truncated
            if truncated:
                info["TimeLimit.truncated"] = not terminated
            infos[i] = info
        return observations, rewards, terminals, infos

    def close(self, timeout: float | None = _CLOSE_S) -> None:
        """Closes all envs, in parallel, and ends their processes; a second call is harmless.

        Args:
            timeout: Seconds that this may take; then the processes are terminated. None: as long
                as it takes.

        Raises:
            Exception: What an env's ``close`` raises, after all are closed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._meeting is not None:
                jobs = {i: env.close for i, env in enumerate(self._envs)}
                self._gather(self._meeting.run(jobs))
        finally:
            _close(self._handles, timeout)
            if self._meeting is not None:
                self._meeting.close()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise ValueError(f"The MultiEnv was closed already: '{method}' cannot be used.")
        for handle in self._handles:
            handle._initialized(method)

    # ---- plain handles -----------------------------------------------------------------------

    def _step_plain(self, actions: dict[int, Any]) -> dict[int, Any]:
        if len({self._handles[i]._group for i in actions}) > 1:
            for action in actions.values():  # before the first group is sent any
                check_action(self.action_space, action)
        results = self._ask({i: Step(action) for i, action in actions.items()})
        _raise_any(results)
        return results

    def _ask(self, requests: dict[int, Step | Reset]) -> dict[int, Any]:
        answers = _carry_out([(self._handles[i], asked) for i, asked in requests.items()])
        return {
            i: replace(answer, env=i) if isinstance(answer, Failure) else answer
            for i, answer in zip(requests, answers, strict=True)
        }

    # ---- wrapped ones ------------------------------------------------------------------------

    def _step_wrapped(self, i: int, action: Any) -> tuple[Any, ...]:
        env = self._envs[i]
        reset = None
        if self._over[i]:
            reset = env.reset()
            self._over[i] = False
        observation, reward, terminated, truncated, info = env.step(action)
        self._over[i] = bool(terminated or truncated)
        if reset is not None:
            _tell_of_reset(info, *reset)
        return observation, reward, terminated, truncated, info

    def _reset_wrapped(self, i: int, seed: int | None, options: Any) -> tuple[Any, ...]:
        self._over[i] = False
        return self._envs[i].reset(seed=seed, options=options)

    def _gather(self, outcomes: dict[int, Any]) -> dict[int, Any]:
        """The results of jobs; raises what the first one has raised, and names the others."""
        raised = {
            i: outcome.error
            for i, outcome in sorted(outcomes.items())
            if isinstance(outcome, Raised)
        }
        for i, error in raised.items():
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"In env {i} of the MultiEnv")
                for other in raised:
                    if other != i:
                        error.add_note(f"At the same time: env {other}: {raised[other]!r}")
            raise error
        return outcomes


def create_subprocess_envs(
    env_fns: Iterable[EnvFn], *, faults: FaultPolicy | None = None, **options: Any
) -> list[SubprocessEnv]:
    """Starts a process for each env, and builds them all in parallel.

    Args:
        env_fns: One function for each env, called in its process, and again in each process that
            replaces it.
        faults: What is done when a process dies, and how often. None: it is replaced, up to 10
            times in 10 minutes.
        **options: Further arguments of :class:`shmvec.ShmVectorEnv`, such as ``context=`` and
            ``step_timeout=``.

    Returns:
        One handle for each env, ready to be used.

    Raises:
        ValueError: No env_fns, or a wrong option.
        TypeError: Something in ``env_fns`` is not callable or cannot be pickled; a wrong option.
        WorkerCrashError: A process died while it built its env.
        Exception: Whatever an env_fn raises, with the process's traceback, which names the env, as
            its cause.
    """
    functions = checked_env_fns(list(env_fns))
    envs = [SubprocessEnv(env_fn, faults=faults, **options) for env_fn in functions]
    group = _Group(functions, faults, **options)
    try:
        group.initialize()
    except RuntimeError as error:
        if not _spaces_differ(error):
            raise
        _initialize_each(envs)
        return envs
    for index, env in enumerate(envs):
        env._group, env._index = group, index
    return envs


def _spaces_differ(error: RuntimeError) -> bool:
    """Whether a group cannot be, because its envs do not fit into one; else an env has raised."""
    return not isinstance(error, WorkerCrashError) and not isinstance(
        error.__cause__, RemoteTraceback
    )


def _initialize_each(envs: Sequence[SubprocessEnv]) -> None:
    """Starts envs that cannot share a group."""
    try:
        for env in envs:
            env.start()
        for env in envs:
            env.initialize()
    except BaseException:
        _close(envs, 0.0)
        raise


# ---- requests ------------------------------------------------------------------------------------


def _ask(env: SubprocessEnv, asked: _Asked) -> Any:
    """Carries a request out, together with others where a meeting runs this thread."""
    meeting = current()
    answer = _carry_out([(env, asked)])[0] if meeting is None else meeting.ask((env, asked))
    if isinstance(answer, Raised):
        raise answer.error
    if isinstance(answer, Failure):
        raise_failures([answer])
    return answer


def _carry_out(requests: Sequence[tuple[SubprocessEnv, _Asked]]) -> list[Any]:
    """One answer to each request; steps and resets are sent to all before any is waited for."""
    groups: dict[_Group, dict[int, Step | Reset]] = {}
    for env, asked in requests:
        if isinstance(asked, (Step, Reset)):
            groups.setdefault(_group_of(env), {})[env._index] = asked
    for group, those in groups.items():
        group.begin(those)
    found = {group: group.finish() for group in groups}
    closing = [env for env, asked in requests if isinstance(asked, _Close)]
    answers: list[Any] = []
    for env, asked in requests:
        if isinstance(asked, (Step, Reset)):
            answers.append(found[_group_of(env)][env._index])
            continue
        try:
            if isinstance(asked, _Call):
                answers.append(_group_of(env).call_one(env._index, asked.name))
            else:
                _close(closing, asked.timeout)  # all of them, the first time
                answers.append(None)
        except Exception as error:
            answers.append(Raised(error))
    return answers


def _group_of(env: SubprocessEnv) -> _Group:
    assert env._group is not None
    return env._group


def _close(envs: Sequence[SubprocessEnv], timeout: float | None) -> None:
    """Closes envs in parallel; raises what the first has raised."""
    deadline = None if timeout is None else time.monotonic() + timeout

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    groups: dict[_Group, list[int]] = {}
    for env in envs:
        if not env._closed and env._group is not None:
            groups.setdefault(env._group, []).append(env._index)
        env._closed = True
    errors: list[BaseException] = []
    ending = []
    for group, members in groups.items():
        try:
            if group.leave(members, left()):
                group.begin_close()
                ending.append(group)
        except Exception as error:
            errors.append(error)
    for group in ending:
        try:
            group.close(timeout=left())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _raise_any(answers: dict[int, Any]) -> None:
    raise_failures([answer for answer in answers.values() if isinstance(answer, Failure)])


def _tell_of_reset(info: dict[str, Any], observation: Any, reset_info: dict[str, Any]) -> None:
    """Puts into a step's info what the reset before it has returned."""
    if "fault" in reset_info:
        info.setdefault("fault", reset_info["fault"])
    if "reset_observation" not in info:  # else the process died in that step: a later reset
        info["reset_observation"], info["reset_info"] = observation, reset_info
