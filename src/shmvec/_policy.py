"""Calls a policy with batches of observations, checks its answers, and steps envs with them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from shmvec._hints import can_be_called, has_parameter
from shmvec.faults import RemoteTraceback, add_note
from shmvec.spaces import ARRAY_SPACES, mapped

__all__ = [
    "PADDING",
    "InformedPolicy",
    "Policy",
    "PolicyCaller",
    "as_policy",
    "check_policy",
    "select_rows",
]

Policy = Callable[[Any, npt.NDArray[np.int64]], Any]
Envs = npt.NDArray[np.intp]
ValueOfEnv = tuple[str, Callable[[int], Any]]  # a name, and a function of an env's index

PADDING = -1  # the env id of a row that only fills a batch


def check_policy(
    policy: Any, batch: str, call_names: Collection[str] = (), reset_names: Collection[str] = ()
) -> None:
    """Checks a policy, its ``reset``, and that ``batch`` is "ready" or "fixed".

    Args:
        policy: The policy.
        batch: The argument of this name.
        call_names: Names of optional arguments, besides observations and envs.
        reset_names: Names of optional arguments of its ``reset``, besides envs.
    """
    if batch not in ("ready", "fixed"):
        raise ValueError(f"batch must be 'ready' or 'fixed', got {batch!r}")
    if not callable(policy):
        raise TypeError(f"policy must be callable, policy(observations, env_ids), got {policy!r}")
    if isinstance(policy, type):
        raise TypeError(f"policy is the class {policy.__name__}: give an object of it")
    keywords = {name: None for name in call_names if has_parameter(policy, name, None, None)}
    if not can_be_called(policy, None, None, **keywords):
        hint = ": give lambda observations, env_ids: policy(observations)"
        raise TypeError(
            "policy must take two arguments, policy(observations, env_ids), and takes "
            f"{inspect.signature(policy)}{hint if can_be_called(policy, None) else ''}"
        )
    reset = getattr(policy, "reset", None)
    if callable(reset):
        keywords = {name: None for name in reset_names if has_parameter(reset, name, None)}
        if not can_be_called(reset, None, **keywords):
            raise TypeError(
                "a policy's reset gets the envs in which episodes begin, reset(env_ids), and "
                f"{' and '.join(reset_names) or 'nothing'} by name; it takes "
                f"{inspect.signature(reset)}"
            )


def as_policy(policy: Any) -> Any:
    """Returns the policy; a model with ``predict``, as Stable-Baselines3's, becomes one."""
    if callable(policy) or not callable(getattr(policy, "predict", None)):
        return policy
    return _ModelPolicy(policy)


class _ModelPolicy:
    """A model's ``predict`` as a policy, which samples no actions. The model has no state."""

    def __init__(self, model: Any) -> None:
        self._predict = model.predict
        optional = has_parameter(self._predict, "deterministic", None)
        self._keywords = {"deterministic": True} if optional else {}
        self.reset = getattr(model, "reset", None)

    def __call__(self, observations: Any, env_ids: Any) -> Any:
        answer = self._predict(observations, **self._keywords)
        if not isinstance(answer, tuple) or len(answer) != 2:
            return answer
        actions, state = answer
        if state is not None:
            raise TypeError(
                "predict has returned a state, which must be kept for each env: give a policy that "
                "does so, such as Model of examples/evaluate_sb3.py"
            )
        return actions


class InformedPolicy:
    """Calls a policy, and its ``reset``, with the optional arguments that they have.

    Each of these is a list with a value for each env.
    """

    def __init__(
        self,
        policy: Any,
        call_values: Mapping[str, Callable[[int], Any]],
        reset_values: Mapping[str, Callable[[int], Any]],
    ) -> None:
        """Finds out which of these arguments the policy has.

        Args:
            policy: The policy.
            call_values: By name of an argument, a function that returns an env's value.
            reset_values: Likewise, for the policy's ``reset``.
        """
        self._policy = policy
        self._values = [v for v in call_values.items() if has_parameter(policy, v[0], None, None)]
        reset = getattr(policy, "reset", None)
        if callable(reset):
            values = [v for v in reset_values.items() if has_parameter(reset, v[0], None)]
            self.reset = lambda env_ids: reset(env_ids, **_lists_by_name(values, env_ids))

    def __call__(self, observations: Any, env_ids: Any) -> Any:
        """Calls the policy."""
        return self._policy(observations, env_ids, **_lists_by_name(self._values, env_ids))


def _lists_by_name(values: Sequence[ValueOfEnv], env_ids: Any) -> dict[str, Any]:
    """Lists of values by name; a padding row has the first env's."""
    envs: list[int] = env_ids.tolist() if values else []
    envs = [envs[0] if env == PADDING else env for env in envs]
    return {name: [value(env) for env in envs] for name, value in values}


class PolicyCaller:
    """Calls a policy with batches, and has the envs stepped with its actions.

    Attributes:
        has_reset: Whether the policy has a ``reset``.
        batches: Number of batches so far.
        seconds: Time that the policy has taken, without its ``reset``.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        policy: Policy,
        size: int | None,
        read: Callable[[Any], Any] = np.asarray,
        read_extra: Callable[[Any], Any] = np.asarray,
    ) -> None:
        """Prepares to call a policy.

        Args:
            observation_space: Observation space of one env.
            action_space: Action space of one env.
            policy: Called with observations and their envs; before that its ``reset``, if it has
                one, is called with the envs in which episodes begin.
            size: Rows of every batch, padding included. None: as many rows as envs.
            read: Converts actions to an array.
            read_extra: Converts an extra to an array or tensor.
        """
        self._policy = policy
        reset = getattr(policy, "reset", None)
        self._reset = reset if callable(reset) else None
        self.has_reset = self._reset is not None
        self._size = size
        self._read, self._read_extra = read, read_extra
        self.batches = 0
        self.seconds = 0.0
        self._observation_space, self._space = observation_space, action_space
        self._is_array_space = isinstance(self._space, ARRAY_SPACES)

    def step(
        self,
        envs: Envs,
        observations: Any,
        new_episodes: list[int],
        ask: Callable[[Envs, Any, dict[str, Any]], object],
    ) -> None:
        """Calls the policy with a batch, and asks its envs to step.

        Args:
            envs: The envs of the batch, int ``(n,)``.
            observations: Their observations.
            new_episodes: Envs among these in which an episode begins.
            ask: Asks the envs to step; called with envs, actions, and the policy's extras, which
                have a row for each env.

        Raises:
            ValueError: The number or shape of the actions is wrong, or an extra does not have a row
                for each env. No env was stepped.
            TypeError: The dtype is wrong, or NumPy cannot read the arrays. No env was stepped.
            Exception: The exceptions of the policy, and of ``ask``.
        """
        ids = envs.astype(np.int64)
        missing = 0 if self._size is None else self._size - len(envs)
        if missing:
            ids = np.append(ids, np.repeat(PADDING, missing))
            rows = np.append(np.arange(len(envs)), np.zeros(missing, np.intp))
            observations = select_rows(self._observation_space, observations, rows)
        try:
            if new_episodes and self._reset is not None:
                self._reset(np.array(new_episodes, np.int64))
            begin = time.perf_counter()
            answer = self._policy(observations, ids)
            self.seconds += time.perf_counter() - begin
            actions, extras = self._split_answer(answer)
        except Exception as error:
            where = self._batch_name(envs)
            add_note(error, f"raised by the policy in {where}; its envs were not stepped")
            raise
        try:
            size, count = len(ids), len(envs)
            if self._is_array_space:
                actions = _checked_actions(size, count, self._read, self._space, actions)
            else:
                check = partial(_checked_actions, size, count, self._read)
                actions = mapped(self._space, check, self._space, actions)
            extras = {
                k: _checked_extra(k, extras[k], size, count, self._read_extra) for k in extras
            }
            ask(envs, actions, extras)
        except (TypeError, ValueError, LookupError) as error:
            if isinstance(error.__cause__, RemoteTraceback):  # an env's error, if `ask` has waited
                raise
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"the policy's actions for {self._batch_name(envs)}: {error}") from error
        self.batches += 1

    def _split_answer(self, answer: Any) -> tuple[Any, Mapping[str, Any]]:
        """Splits a policy's answer into actions and a dict of extras, which may be empty."""
        if not isinstance(answer, tuple) or len(answer) != 2:
            return answer, {}
        if type(answer[1]) is dict or isinstance(answer[1], Mapping):  # the latter is slow
            if self._is_array_space or not _is_nested_like(self._space, answer):
                return answer
        return answer, {}

    def _batch_name(self, envs: Envs) -> str:
        return f"batch {self.batches}, of envs {envs.tolist()}"


def _is_nested_like(space: gym.Space[Any], actions: Any) -> bool:
    """Whether a policy's answer is nested like a batch of actions, and so holds no extras."""
    if isinstance(space, gym.spaces.Dict):
        return isinstance(actions, Mapping) and all(
            key in actions and _is_nested_like(part, actions[key]) for key, part in space.items()
        )
    if isinstance(space, gym.spaces.Tuple):
        return (
            isinstance(actions, (tuple, list))
            and len(actions) == len(space.spaces)
            and all(map(_is_nested_like, space.spaces, actions))
        )
    if isinstance(actions, tuple):  # one action for each env, which may be a dict
        return len({isinstance(action, Mapping) for action in actions}) < 2
    return not isinstance(actions, Mapping)


def _checked_extra(key: str, values: Any, size: int, count: int, read: Callable[[Any], Any]) -> Any:
    """Checks an extra of ``size`` rows; returns the first ``count``, without the padding."""
    try:
        values = read(values)
    except Exception as error:
        raise TypeError(f"the extra {key!r} cannot be read: {error}") from error
    if values.shape[:1] != (size,):  # a tensor's shape is a tuple, too
        raise ValueError(
            f"the extra {key!r} has shape {tuple(values.shape)}, and must have a row for each of "
            f"{size}"
        )
    return values if count == size else values[:count]


def select_rows(space: gym.Space[Any], batch: Any, rows: npt.NDArray[np.intp]) -> Any:
    """Copies rows of a batch, of arrays or tensors."""
    return mapped(space, partial(_select_rows, rows), batch)


def _select_rows(rows: npt.NDArray[np.intp], part: Any) -> Any:
    if hasattr(part, "shape"):  # an array, or a tensor
        return part[rows]
    return tuple(part[row] for row in rows)  # Gymnasium batches this space as a tuple


def _checked_actions(
    size: int, count: int, read: Callable[[Any], Any], space: gym.Space[Any], actions: Any
) -> Any:
    """Checks the actions of ``size`` rows; returns the first ``count``, without the padding."""
    if isinstance(space, ARRAY_SPACES):
        try:
            actions = read(actions)
        except Exception as error:  # a tensor of another device, or one that requires gradients
            raise TypeError(f"NumPy cannot read them: {error}") from error
        expected = (size, *(space.shape or ()))
        if actions.shape != expected:
            raise ValueError(f"they have shape {actions.shape}, and must have {expected}")
    elif len(actions) != size:
        raise ValueError(f"there are {len(actions)}, and must be {size}")
    return actions if count == size else actions[:count]
