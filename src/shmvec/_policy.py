"""Calls a policy with batches of observations, checks its answers, and steps envs with them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from shmvec._hints import names, takes
from shmvec.faults import RemoteTraceback, add_note
from shmvec.spaces import mapped

__all__ = [
    "PADDING",
    "InformedPolicy",
    "Policy",
    "PolicyCaller",
    "as_policy",
    "check_policy",
    "chosen",
]

Policy = Callable[[Any, npt.NDArray[np.int64]], Any]
Rows = npt.NDArray[np.intp]

_OF_ARRAYS = gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiBinary, gym.spaces.MultiDiscrete

PADDING = -1  # the env id of a row that only fills a batch


class Asked(Protocol):
    """Envs that a policy's actions are for: an exchange's, or those of several."""

    single_observation_space: gym.Space[Any]
    single_action_space: gym.Space[Any]

    def ask(self, envs: Any, actions: Any) -> None:
        """Asks envs to step."""


def check_policy(
    policy: Any, batch: str, of_calls: Collection[str] = (), of_resets: Collection[str] = ()
) -> None:
    """Checks a policy, its ``reset``, and that ``batch`` is "ready" or "fixed".

    Args:
        policy: The policy.
        batch: The argument of this name.
        of_calls: Names of what its calls get besides observations and envs, if they name it.
        of_resets: Names of what calls of its ``reset`` get besides envs, if they name it.
    """
    if batch not in ("ready", "fixed"):
        raise ValueError(f"batch must be 'ready' or 'fixed', got {batch!r}")
    if not callable(policy):
        raise TypeError(f"policy must be callable, policy(observations, env_ids), got {policy!r}")
    if isinstance(policy, type):
        raise TypeError(f"policy is the class {policy.__name__}: give an object of it")
    named = {name: None for name in of_calls if names(policy, name, None, None)}
    if not takes(policy, None, None, **named):
        hint = ": give lambda observations, env_ids: policy(observations)"
        raise TypeError(
            "policy must take two arguments, policy(observations, env_ids), and takes "
            f"{inspect.signature(policy)}{hint if takes(policy, None) else ''}"
        )
    reset = getattr(policy, "reset", None)
    if callable(reset):
        named = {name: None for name in of_resets if names(reset, name, None)}
        if not takes(reset, None, **named):
            raise TypeError(
                "a policy's reset gets the envs in which episodes begin, reset(env_ids), and "
                f"{' and '.join(of_resets) or 'nothing'} by name; it takes "
                f"{inspect.signature(reset)}"
            )


def as_policy(policy: Any) -> Any:
    """A policy; a model with ``predict``, as Stable-Baselines3's, is made one."""
    if callable(policy) or not callable(getattr(policy, "predict", None)):
        return policy
    return _Predicting(policy)


class _Predicting:
    """A model's ``predict`` that returns no state, as a policy, which samples no actions."""

    def __init__(self, model: Any) -> None:
        self._predict = model.predict
        self._named = {"deterministic": True} if names(self._predict, "deterministic", None) else {}
        self.reset = getattr(model, "reset", None)

    def __call__(self, observations: Any, env_ids: Any) -> Any:
        answer = self._predict(observations, **self._named)
        if not isinstance(answer, tuple) or len(answer) != 2:
            return answer
        actions, state = answer
        if state is not None:
            raise TypeError(
                "predict has returned a state, which a policy keeps for each env: give what does "
                "so, as Model of examples/evaluate_sb3.py"
            )
        return actions


class InformedPolicy:
    """A policy that names more parameters than observations and envs, as one that does not.

    Its calls, and those of its ``reset``, get what they take: a list with a value for each env.
    """

    def __init__(
        self,
        policy: Any,
        of_calls: Mapping[str, Callable[[int], Any]],
        of_resets: Mapping[str, Callable[[int], Any]],
    ) -> None:
        """Looks which parameters the policy names.

        Args:
            policy: The policy.
            of_calls: By name, the value for an env that a call may get.
            of_resets: By name, the value for an env that a call of its ``reset`` may get.
        """
        self._policy = policy
        self._named = [each for each in of_calls.items() if names(policy, each[0], None, None)]
        reset = getattr(policy, "reset", None)
        if callable(reset):
            named = [each for each in of_resets.items() if names(reset, each[0], None)]
            self.reset = lambda env_ids: reset(env_ids, **_values(named, env_ids))

    def __call__(self, observations: Any, env_ids: Any) -> Any:
        """Calls the policy."""
        return self._policy(observations, env_ids, **_values(self._named, env_ids))


def _values(named: Sequence[tuple[str, Callable[[int], Any]]], env_ids: Any) -> dict[str, Any]:
    """Lists by name; a row that only fills the batch is a copy of the first."""
    envs: list[int] = env_ids.tolist() if named else []
    return {
        name: [value(envs[0] if env == PADDING else env) for env in envs] for name, value in named
    }


class PolicyCaller:
    """Calls a policy with batches, and asks the envs to step with its actions.

    Attributes:
        has_reset: Whether the policy has a ``reset``.
        batches: Number of batches so far.
        seconds: Time that the policy has taken, without its ``reset``.
    """

    def __init__(
        self,
        exchange: Asked,
        policy: Policy,
        size: int | None,
        read: Callable[[Any], Any] = np.asarray,
        keep: Callable[[Any], Any] = np.asarray,
    ) -> None:
        """Prepares to call a policy.

        Args:
            exchange: The envs; an :class:`shmvec.exchange.Exchange`, or what stands for several.
            policy: Called with observations and their envs; before that its ``reset``, if it has
                one, is called with the envs in which episodes begin.
            size: Rows of every batch, padding included. None: as many rows as envs.
            read: Converts actions to an array.
            keep: Converts an extra to an array or tensor.
        """
        self._exchange = exchange
        self._policy = policy
        reset = getattr(policy, "reset", None)
        self._reset = reset if callable(reset) else None
        self.has_reset = self._reset is not None
        self._size = size
        self._read, self._keep = read, keep
        self.batches = 0
        self.seconds = 0.0
        self._space: gym.Space[Any] = exchange.single_action_space
        self._plain = isinstance(self._space, _OF_ARRAYS)

    def step(
        self,
        envs: Rows,
        observations: Any,
        rows: Rows | None,
        begun: list[int],
        *,
        ask: Callable[[Rows, Any, dict[str, Any]], Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Calls the policy with a batch, and asks its envs to step.

        Args:
            envs: The envs of the batch, int ``(n,)``.
            observations: Their observations.
            rows: Rows of the batch that the policy gets, int ``(m,)``. None: all.
            begun: Envs among these in which an episode begins.
            ask: Asks envs to step; called with envs, actions and extras. None: the exchange's.

        Returns:
            The actions of these envs, and the policy's extras, a row for each env.

        Raises:
            ValueError: The number or shape of the actions is wrong, or an extra does not have a row
                for each env. No env was stepped.
            TypeError: The dtype is wrong, or NumPy cannot read the arrays. No env was stepped.
            Exception: The exceptions of the policy, and of ``ask``.
        """
        asked = envs if rows is None else envs[rows]
        ids = asked.astype(np.int64)
        missing = 0 if self._size is None else self._size - len(asked)
        if missing:
            rows = np.arange(len(envs)) if rows is None else rows
            rows = np.append(rows, np.repeat(rows[:1], missing))
            ids = np.append(ids, np.repeat(PADDING, missing))
        if rows is not None and (len(rows) != len(envs) or missing):
            observations = mapped(
                self._exchange.single_observation_space,
                lambda part: chosen(part, rows),
                observations,
            )
        try:
            if begun and self._reset is not None:
                self._reset(np.array(begun, np.int64))
            begin = time.perf_counter()
            answer = self._policy(observations, ids)
            self.seconds += time.perf_counter() - begin
            actions, extras = self._parted(answer)
        except Exception as error:
            where = self._named(asked)
            add_note(error, f"raised by the policy in {where}; its envs were not stepped")
            raise
        try:
            size, count = len(ids), len(asked)
            if self._plain:
                given = _checked(size, count, self._read, self._space, actions)
            else:
                check = partial(_checked, size, count, self._read)
                given = mapped(self._space, check, self._space, actions)
            besides = {key: _rows_of(key, extras[key], size, count, self._keep) for key in extras}
            if ask is None:
                self._exchange.ask(asked, given)
            else:
                ask(asked, given, besides)
        except (TypeError, ValueError, LookupError) as error:
            if isinstance(error.__cause__, RemoteTraceback):  # of an env: `ask` may wait for it
                raise
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"the policy's actions for {self._named(asked)}: {error}") from error
        self.batches += 1
        return given, besides

    def _parted(self, answer: Any) -> tuple[Any, Mapping[str, Any]]:
        """Splits a policy's answer into the actions, and the dict of extras, if there is one."""
        if not isinstance(answer, tuple) or len(answer) != 2:
            return answer, {}
        if type(answer[1]) is dict or isinstance(answer[1], Mapping):  # the latter is slow
            if self._plain or not _fits(self._space, answer):
                return answer
        return answer, {}

    def _named(self, envs: Rows) -> str:
        return f"batch {self.batches}, of envs {envs.tolist()}"


def _fits(space: gym.Space[Any], actions: Any) -> bool:
    """Whether a policy's answer is nested like a batch of actions, and so holds no extras."""
    if isinstance(space, gym.spaces.Dict):
        return isinstance(actions, Mapping) and all(
            key in actions and _fits(part, actions[key]) for key, part in space.items()
        )
    if isinstance(space, gym.spaces.Tuple):
        return (
            isinstance(actions, (tuple, list))
            and len(actions) == len(space.spaces)
            and all(map(_fits, space.spaces, actions))
        )
    if isinstance(actions, tuple):  # one action for each env, which may be a dict
        return len({isinstance(action, Mapping) for action in actions}) < 2
    return not isinstance(actions, Mapping)


def _rows_of(key: str, values: Any, size: int, count: int, keep: Callable[[Any], Any]) -> Any:
    """The first ``count`` of the ``size`` rows of an extra."""
    try:
        values = keep(values)
    except Exception as error:
        raise TypeError(f"{key!r}, which comes with them, cannot be read: {error}") from error
    if values.shape[:1] != (size,):  # a tensor's shape is a tuple, too
        raise ValueError(
            f"{key!r}, which comes with them, has shape {tuple(values.shape)}, and must have a row "
            f"for each of {size}"
        )
    return values if count == size else values[:count]


def chosen(part: Any, rows: Rows) -> Any:
    """Selects rows of a batch, or of a part of one."""
    if hasattr(part, "shape"):  # an array, or a tensor
        return part[rows]
    return tuple(part[row] for row in rows)  # Gymnasium batches this space as a tuple


def _checked(
    size: int, count: int, read: Callable[[Any], Any], space: gym.Space[Any], actions: Any
) -> Any:
    """Checks the actions of ``size`` rows; returns the first ``count``, without the padding."""
    if isinstance(space, _OF_ARRAYS):
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
