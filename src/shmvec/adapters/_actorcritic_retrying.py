"""Steps and resets of single envs, which are retried after a worker's crash.

The core truncates an episode when its worker dies. Here a new episode begins instead: the env is
reset, the step is retried, and its info says so. A step after an episode's end resets the env
first, in the worker and in the same request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from shmvec.exchange import AutoresetMode, EnvFn, Exchange, HostedEnv
from shmvec.faults import Failure, FaultPolicy, WorkerCrashError
from shmvec.spaces import batched


class AutoresettingEnv(HostedEnv):
    """An env whose step resets it first if its episode is over; it is closed only once."""

    _episode_over = False
    _closed = False

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the env or one of its wrappers."""
        return self.close if name == "close" else super().get_wrapper_attr(name)

    def reset(self, **arguments: Any) -> Any:
        """Resets the env."""
        result = self.env.reset(**arguments)
        self._episode_over = False
        return result

    def step(self, action: Any) -> Any:
        """Resets the env if its episode is over, and steps it."""
        # It is copied, because the step may change the arrays.
        began = deepcopy(self.reset()) if self._episode_over else None
        result = self.env.step(action)
        if len(result) != 5:
            return result  # the core raises the error for it
        observation, reward, terminated, truncated, info = result
        self._episode_over = bool(terminated) or bool(truncated)
        if began is not None:
            info = {**info, "reset_observation": began[0], "reset_info": began[1]}
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Closes the env, once."""
        if not self._closed:
            self._closed = True
            self.env.close()


class StepRequest(NamedTuple):
    """A request to make a step.

    Attributes:
        action: The action.
    """

    action: Any


class ResetRequest(NamedTuple):
    """A request to reset.

    Attributes:
        seed: The seed of the reset, or None.
        options: The options of the reset, or None.
    """

    seed: int | None = None
    options: dict[str, Any] | None = None


# The results of an env (five values for a step, two for a reset), or its exception.
Answer: TypeAlias = tuple[Any, ...] | Failure


class RetryingEnvs:
    """Envs whose requests are retried after a crash; their processes start in the background.

    Attributes:
        exchange: Asks the envs; its ``initialize`` waits until they are built.
        over: For each env, whether its last step has ended an episode.
    """

    def __init__(
        self, env_fns: Sequence[EnvFn], faults: FaultPolicy | None = None, **options: Any
    ) -> None:
        """Starts the processes.

        Args:
            env_fns: One function for each env.
            faults: The policy for workers that die. None: they are restarted.
            **options: Further arguments of ``Exchange``.
        """
        options.setdefault("num_workers", len(env_fns))
        self.exchange = Exchange(
            [partial(AutoresettingEnv.made_by, env_fn) for env_fn in env_fns],
            name="SubprocessEnv",  # the name in messages and of processes
            autoreset_mode=AutoresetMode.DISABLED,
            may_step_over=True,
            faults=faults or FaultPolicy(on_crash="restart", backoff_s=0.01),
            wait=False,
            **options,
        )
        self.over = [False] * len(env_fns)
        self._reset_options: dict[int, Any] = {}  # options of each env's last reset
        self._faults: dict[int, dict[str, Any]] = {}  # by env
        self._open_envs = set(range(len(env_fns)))

    # ---- steps and resets --------------------------------------------------------------------

    def begin(self, requests: Mapping[int, StepRequest | ResetRequest]) -> None:
        """Asks envs and does not wait; :meth:`finish` must follow with the same requests."""
        if self.exchange.num_in_flight:  # from an interrupted call
            self.exchange.discard()
        self.exchange.recycle()
        self._ask(requests)

    def _ask(self, requests: Mapping[int, StepRequest | ResetRequest]) -> None:
        steps = {i: each.action for i, each in requests.items() if isinstance(each, StepRequest)}
        resets = {i: each for i, each in requests.items() if isinstance(each, ResetRequest)}
        if steps:
            actions = batched(self.exchange.single_action_space, list(steps.values()))
            self.exchange.ask(list(steps), actions)
        if resets:
            seeds, options = zip(*resets.values(), strict=True)
            self._reset_options.update(zip(resets, options, strict=True))
            # A request without seeds and options takes a faster path.
            values = [None if all(x is None for x in each) else each for each in (seeds, options)]
            self.exchange.ask_reset(list(resets), *values)

    def finish(self, requests: Mapping[int, StepRequest | ResetRequest]) -> dict[int, Answer]:
        """Waits for the requests of :meth:`begin`, and retries those that were lost.

        Returns:
            The answer of each env. The info of a restarted env has ``fault``; after a retried step
            also ``reset_observation`` and ``reset_info``, the beginning of the new episode.
        """
        answers = self._take(requests)
        while lost := {env: request for env, request in requests.items() if env not in answers}:
            resets = {env: ResetRequest(None, self._reset_options.get(env)) for env in lost}
            self._ask(resets)
            starts = self._take(resets)
            answers.update({i: each for i, each in starts.items() if isinstance(each, Failure)})
            steps = {env: request for env, request in lost.items() if env not in answers}
            self._ask(steps)
            for env, answer in self._take(steps).items():
                if not isinstance(answer, Failure):
                    start: Any = starts[env]
                    answer[-1]["reset_observation"], answer[-1]["reset_info"] = start
                answers[env] = answer
        for env, answer in answers.items():
            if env in self._faults and not isinstance(answer, Failure):
                answer[-1]["fault"] = self._faults.pop(env)
        return answers

    def _take(self, requests: Mapping[int, StepRequest | ResetRequest]) -> dict[int, Answer]:
        """Waits for the answers; lost steps have none."""
        space = self.exchange.single_observation_space
        results = self.exchange.take()
        if results.failures:
            self.exchange.log_failures(results.failures)
        answers: dict[int, Answer] = {failure.env: failure for failure in results.failures}
        self._faults.update({env: report.fault.info for env, report in results.reports.items()})
        for env, observation, reward, terminated, truncated, info in results.by_env(space):
            if isinstance(requests[env], ResetRequest):
                self.over[env] = False
                answers[env] = observation, info
            elif env not in results.reports or not results.reports[env].cut_off:
                if "reset_info" in info:
                    self._reset_options[env] = None
                self.over[env] = terminated or truncated
                answers[env] = observation, reward, terminated, truncated, info
        return answers

    # ---- calls -------------------------------------------------------------------------------

    def call_one(self, env: int, name: str) -> Any:
        """Calls a method of an env; if its worker dies, the env is reset, and the call repeated."""
        while True:
            self.exchange.discard()
            try:
                return self.exchange.call(name, envs=[env])[0]
            except WorkerCrashError:
                if self.exchange.closed:
                    raise
            reset = {env: ResetRequest(None, self._reset_options.get(env))}
            self.begin(reset)
            answer = self.finish(reset)[env]
            if isinstance(answer, Failure):
                raise answer.exception()
            self._faults[env] = answer[-1]["fault"]

    # ---- closing -----------------------------------------------------------------------------

    def close_envs(self, envs: Sequence[int], timeout: float | None) -> bool:
        """Closes some envs; the processes end when the last env is closed.

        Returns:
            Whether no env is left, so that ``exchange.close`` is due.
        """
        self._open_envs.difference_update(envs)
        if not self._open_envs or self.exchange.closed:
            return True
        try:
            self.exchange.discard()
            self.exchange.leave(envs, timeout)
        except WorkerCrashError:
            if self.exchange.closed:
                raise
        return False
