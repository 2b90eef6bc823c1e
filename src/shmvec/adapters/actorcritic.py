"""actorcritic's ``multi_env``: handles of envs in subprocesses, which step alone or together.

A ``SubprocessEnv`` is a Gymnasium env. A ``MultiEnv`` steps several in parallel, takes and returns
lists, and resets by itself. A subprocess that dies is replaced, and its requests are retried.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np

from shmvec._arguments import checked_env_fns, checked_options, checked_seeds
from shmvec.adapters._actorcritic_retrying import ResetRequest, RetryingEnvs, StepRequest
from shmvec.adapters._actorcritic_threads import BatchingThreads, Job, current_job
from shmvec.exchange import ActionRows, EnvFn, Options, OwnsProcesses
from shmvec.faults import (
    Failure,
    FaultPolicy,
    RemoteTraceback,
    WorkerCrashError,
    add_note,
    raise_failures,
)
from shmvec.spaces import batched

__all__ = ["MultiEnv", "SubprocessEnv", "create_subprocess_envs"]

_CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class _CloseRequest:
    """A request to close an env within ``timeout`` seconds."""

    timeout: float | None


# A str is the name of a method to call, or of an attribute.
_Request: TypeAlias = StepRequest | ResetRequest | _CloseRequest | str


class SubprocessEnv(OwnsProcesses, gym.Env[Any, Any]):
    """A handle of an env that lives in a process of its own.

    Call :meth:`start` and :meth:`initialize` first; :func:`create_subprocess_envs` does that for
    many at once. A process that dies is replaced: ``env_fn`` is called again, the env is reset
    (with the options of its last reset, and a seed derived from its last one), and the call is
    retried. The next info has ``fault`` with ``type``, ``message`` and ``restarts``; after a step
    also ``reset_observation`` and ``reset_info``, the beginning of the new episode.

    Methods raise ``ValueError`` before :meth:`initialize` and after :meth:`close`,
    ``TooManyFaultsError`` if the process has died too often, and the env's exceptions, with the
    process's traceback as the cause.

    Attributes:
        group: The envs that were started with this one, and are asked together; None before the
            start.
        index: The env's index in this group.
        closed: Whether the env was closed.

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
            env_fn: Makes the env, in the process and in each process that replaces it.
            faults: The policy for the process's death. None: it is replaced, up to 10 times in
                10 minutes.
            **options: Further arguments of :class:`shmvec.exchange.Exchange`, such as ``context=``
                and ``step_timeout=``.
        """
        checked_env_fns([env_fn])
        self._make_group = partial(RetryingEnvs, [env_fn], faults, **options)
        self.group: RetryingEnvs | None = None
        self.index = 0
        self.closed = False
        self._attributes: dict[str, Any] = {}  # a cache

    # ---- starting ----------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process, which builds the env, and does not wait; again is harmless."""
        if self.closed:
            raise ValueError("The subprocess was closed already: make a new SubprocessEnv.")
        if self.group is None:
            self.group = self._make_group()

    def initialize(self) -> None:
        """Waits until the env is built, and fetches its spaces. A second call is harmless."""
        group = self._require_group("initialize()")
        try:
            group.exchange.initialize()
        except BaseException:
            self.group = None
            raise

    def _require_group(self, method: str) -> RetryingEnvs:
        if self.closed:
            raise ValueError(f"The subprocess was closed already: '{method}' cannot be used.")
        if self.group is None:
            also = "" if method == "initialize()" else " and 'initialize()'"
            raise ValueError(
                f"The subprocess is not started yet. Call 'start()'{also} before '{method}'."
            )
        return self.group

    def ready_for(self, method: str) -> RetryingEnvs:
        """The group that a method asks; raises ValueError if the env cannot be asked."""
        group = self._require_group(method)
        if not group.exchange.initialized:
            raise ValueError(
                f"The subprocess is not initialized yet. Call 'initialize()' before '{method}'."
            )
        if group.exchange.closed:
            raise ValueError(
                f"The subprocess has ended by an earlier fault: '{method}' cannot be used. Make a "
                "new SubprocessEnv."
            )
        return group

    # ---- attributes of an env ----------------------------------------------------------------

    @property
    def observation_space(self) -> gym.Space[Any]:  # type: ignore[override]
        """Observation space of the env."""
        return self.ready_for("observation_space").exchange.single_observation_space

    @property
    def action_space(self) -> gym.Space[Any]:  # type: ignore[override]
        """Action space of the env."""
        return self.ready_for("action_space").exchange.single_action_space

    @property
    def metadata(self) -> dict[str, Any]:  # type: ignore[override]
        """Metadata of the env; empty before it is initialized, and after it was closed."""
        return dict(self._fetch_attribute("metadata") or {})

    @property
    def render_mode(self) -> str | None:  # type: ignore[override]
        """Render mode of the env; None before it is initialized, and after it was closed."""
        return self._fetch_attribute("render_mode")  # type: ignore[no-any-return]

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """Spec of the env; None before it is initialized, and after it was closed."""
        return self._fetch_attribute("spec")

    def _fetch_attribute(self, name: str) -> Any:
        try:
            self.ready_for(name)
        except ValueError:
            return None
        if name not in self._attributes:
            try:
                self._attributes[name] = self._ask(name)
            except AttributeError:  # the env is no gym.Env
                self._attributes[name] = None
        return self._attributes[name]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """See ``gymnasium.Env.reset``."""
        self.ready_for("reset()")
        (checked,) = checked_seeds([seed], 1) or [None]
        super().reset(seed=seed)
        return self._ask(ResetRequest(checked, options))  # type: ignore[no-any-return]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """See ``gymnasium.Env.step``; raises ValueError after the end of an episode."""
        if self.ready_for("step()").over[self.index]:
            raise ValueError("The episode is over. Call 'reset()' before 'step()'.")
        if current_job() is not None:  # a wrong action would fail the whole batch
            _check_actions(self.action_space, [action])
        return self._ask(StepRequest(action))  # type: ignore[no-any-return]

    def render(self, mode: str | None = None) -> Any:
        """Renders the env, and returns its frame; ``mode`` is not used."""
        self.ready_for("render()")
        return self._ask("render")

    def close(self, timeout: float | None = _CLOSE_TIMEOUT_S) -> None:
        """Closes the env, and ends the process; a second call is harmless.

        Processes that :func:`create_subprocess_envs` has started end when the last of their envs
        is closed.

        Args:
            timeout: Seconds that this may take; then the process is terminated. None: as long as
                it takes.
        """
        if not self.closed:
            self._ask(_CloseRequest(timeout))

    def _ask(self, request: _Request) -> Any:
        """Makes a request; in a job, together with the requests of other jobs."""
        job = current_job()
        answer = _execute([(self, request)])[0] if job is None else job.ask((self, request))
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, Failure):
            raise_failures([answer])
        return answer


class MultiEnv(OwnsProcesses):
    """Steps envs in parallel; takes and returns lists.

    A step returns the terminal observation of an episode. The env's next step first resets the env;
    its info has the observation and info of the reset as ``reset_observation`` and ``reset_info``.

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
        """Takes the envs, which have equal spaces.

        Args:
            envs: Each a :class:`SubprocessEnv`, or one in wrappers. The steps of wrapped ones run
                in threads, and their requests are sent together.
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
        unwrapped = [env.unwrapped for env in self._envs]
        if len({id(env) for env in unwrapped}) < len(unwrapped):
            raise ValueError("The same env was passed twice")
        self._handles = [env for env in unwrapped if isinstance(env, SubprocessEnv)]
        self._closed = False
        self._episode_over = [False] * len(self._envs)  # whether episodes are over, of wrapped envs
        self.reset_infos: list[dict[str, Any]] = [{} for _ in self._envs]
        plain = all(isinstance(env, SubprocessEnv) for env in self._envs)
        self._threads = None if plain else BatchingThreads(len(self._envs), _execute)

    @property
    def envs(self) -> list[gym.Env[Any, Any]]:
        """The envs."""
        return self._envs

    @property
    def observation_space(self) -> gym.Space[Any]:
        """Observation space of each env."""
        return self._envs[0].observation_space

    @property
    def action_space(self) -> gym.Space[Any]:
        """Action space of each env."""
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
        """
        self._check_open("reset()")
        count = len(self._envs)
        seeds = checked_seeds(seed, count) or [None] * count
        each = checked_options(options, count) or [None] * count
        if self._threads is not None:
            jobs = {i: partial(self._reset_wrapped, i, seeds[i], each[i]) for i in range(count)}
            results = _results_of(self._threads.run(jobs))
        else:
            results = self._ask({i: ResetRequest(seeds[i], each[i]) for i in range(count)})
        self.reset_infos = [results[i][1] for i in range(count)]
        return [results[i][0] for i in range(count)]

    def step(
        self, actions: Sequence[Any]
    ) -> tuple[list[Any], list[float | None], list[bool | None], list[dict[str, Any] | None]]:
        """Steps all envs, in parallel.

        Args:
            actions: One for each env. None leaves that env out.

        Returns:
            Lists of observations, rewards, terminals and infos, with one item for each env, None
            for those left out. A terminal says that the episode has terminated or was truncated;
            the info's ``TimeLimit.truncated`` says which.

        Raises:
            ValueError: The MultiEnv is closed; the number of actions, or the shape of one, is
                wrong. No env has made a step.
            TypeError: The dtype of an action is wrong. No env has made a step.
            Exception: An env has raised it; a note has its index. The others have made their step.
        """
        self._check_open("step()")
        action_list = list(actions)
        if len(action_list) != len(self._envs):
            raise ValueError(
                f"wrong actions: there are {len(action_list)} for {len(self._envs)} envs. Nothing "
                "was sent to any env."
            )
        stepped = [i for i, action in enumerate(action_list) if action is not None]
        if self._threads is not None:
            jobs = {i: partial(self._step_wrapped, i, action_list[i]) for i in stepped}
            results = _results_of(self._threads.run(jobs))
        else:
            results = self._ask({i: StepRequest(action_list[i]) for i in stepped})
        rows: list[tuple[Any, ...]] = [(None,) * 4] * len(action_list)
        for i in stepped:
            observation, reward, terminated, truncated, info = results[i]
            if truncated:
                info["TimeLimit.truncated"] = not terminated
            rows[i] = observation, reward, terminated or truncated, info
        observations, rewards, terminals, infos = map(list, zip(*rows, strict=True))
        return observations, rewards, terminals, infos

    def close(self, timeout: float | None = _CLOSE_TIMEOUT_S) -> None:
        """Closes all envs, in parallel; see :meth:`SubprocessEnv.close`."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._threads is not None:
                jobs = {i: env.close for i, env in enumerate(self._envs)}
                _results_of(self._threads.run(jobs))
        finally:
            _close(self._handles, timeout)
            if self._threads is not None:
                self._threads.close()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise ValueError(f"The MultiEnv was closed already: '{method}' cannot be used.")
        for handle in self._handles:
            handle.ready_for(method)

    def _ask(self, requests: Mapping[int, StepRequest | ResetRequest]) -> dict[int, Any]:
        """Makes requests to unwrapped handles; returns answers, or raises the first exception."""
        if len({self._handles[i].group for i in requests}) > 1:
            # Actions are checked before any group gets a request.
            actions = [each.action for each in requests.values() if isinstance(each, StepRequest)]
            _check_actions(self.action_space, actions)
        answers = _execute([(self._handles[i], request) for i, request in requests.items()])
        results = dict(zip(requests, answers, strict=True))
        raise_failures(
            [replace(each, env=i) for i, each in results.items() if isinstance(each, Failure)]
        )
        return results

    # ---- wrapped handles ---------------------------------------------------------------------

    def _step_wrapped(self, i: int, action: Any) -> tuple[Any, ...]:
        env = self._envs[i]
        reset = None
        if self._episode_over[i]:
            reset = env.reset()
            self._episode_over[i] = False
        observation, reward, terminated, truncated, info = env.step(action)
        self._episode_over[i] = bool(terminated or truncated)
        if reset is not None:
            if "fault" in reset[1]:
                info.setdefault("fault", reset[1]["fault"])
            if "reset_observation" not in info:  # else a crash in the step was followed by a reset
                info["reset_observation"], info["reset_info"] = reset
        return observation, reward, terminated, truncated, info

    def _reset_wrapped(self, i: int, seed: int | None, options: Any) -> tuple[Any, ...]:
        self._episode_over[i] = False
        return self._envs[i].reset(seed=seed, options=options)


def create_subprocess_envs(
    env_fns: Iterable[EnvFn], *, faults: FaultPolicy | None = None, **options: Any
) -> list[SubprocessEnv]:
    """Starts a process for each env, and builds them all in parallel.

    Args:
        env_fns: One function for each env.
        faults: As for :class:`SubprocessEnv`.
        **options: Likewise.

    Returns:
        One handle for each env, ready to be used.
    """
    functions = checked_env_fns(list(env_fns))
    envs = [SubprocessEnv(env_fn, faults=faults, **options) for env_fn in functions]
    group = RetryingEnvs(functions, faults, **options)
    try:
        group.exchange.initialize()
        for index, env in enumerate(envs):
            env.group, env.index = group, index
        return envs
    except RuntimeError as error:
        if isinstance(error, WorkerCrashError) or isinstance(error.__cause__, RemoteTraceback):
            raise
    try:  # the spaces may differ, so each env gets a group of its own
        for start in (SubprocessEnv.start, SubprocessEnv.initialize):
            for env in envs:
                start(env)
    except BaseException:
        _close(envs, 0.0)
        raise
    return envs


# ---- requests ------------------------------------------------------------------------------------


def _check_actions(space: gym.Space[Any], actions: Sequence[Any]) -> None:
    """Raises for actions that the core would refuse."""
    if actions:
        envs = np.arange(len(actions))
        ActionRows(space, len(actions)).of(envs, batched(space, actions))


def _execute(requests: Sequence[tuple[SubprocessEnv, _Request]]) -> list[Any]:
    """Executes requests; sends all steps and resets before it waits for the first answer."""
    groups: dict[RetryingEnvs, dict[int, StepRequest | ResetRequest]] = {}
    for env, request in requests:
        if isinstance(request, (StepRequest, ResetRequest)):
            groups.setdefault(_group_of(env), {})[env.index] = request
    for group, group_requests in groups.items():
        group.begin(group_requests)
    answers_by_group = {group: group.finish(each) for group, each in groups.items()}
    closing = [env for env, request in requests if isinstance(request, _CloseRequest)]
    answers: list[Any] = []
    for env, request in requests:
        try:
            if isinstance(request, str):
                answers.append(_group_of(env).call_one(env.index, request))
            elif isinstance(request, _CloseRequest):
                _close(closing, request.timeout)  # the first of these requests closes all envs
                answers.append(None)
            else:
                answers.append(answers_by_group[_group_of(env)][env.index])
        except Exception as error:
            answers.append(error)
    return answers


def _group_of(env: SubprocessEnv) -> RetryingEnvs:
    assert env.group is not None
    return env.group


def _close(envs: Sequence[SubprocessEnv], timeout: float | None) -> None:
    """Closes envs in parallel; raises the first exception."""
    deadline = None if timeout is None else time.monotonic() + timeout

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    groups: dict[RetryingEnvs, list[int]] = {}
    for env in envs:
        if not env.closed and env.group is not None:
            groups.setdefault(env.group, []).append(env.index)
        env.closed = True
    errors: list[Exception] = []
    ending = []
    for group, members in groups.items():
        try:
            if group.close_envs(members, left()):
                group.exchange.close(wait=False)
                ending.append(group.exchange)
        except Exception as error:
            errors.append(error)
    for exchange in ending:
        try:
            exchange.close(timeout=left())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _results_of(jobs: Mapping[int, Job]) -> dict[int, Any]:
    """The results of jobs; raises the first exception, with the others in its notes."""
    errors = {i: job.error for i, job in sorted(jobs.items())}
    notes = [f"At the same time: env {i}: {error!r}" for i, error in errors.items() if error]
    for i, error in errors.items():
        if error is not None:
            for note in [f"In env {i} of the MultiEnv", *notes[1:]]:
                add_note(error, note)
            raise error
    return {i: job.result for i, job in jobs.items()}
