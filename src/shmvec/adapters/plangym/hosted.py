"""One of plangym's envs in its worker: as planning steps it, with what it does itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec.exchange import HostedEnv
from shmvec.spaces import Anything

__all__ = ["HostedPlanEnv"]

# Spaces of which a batch is an array.
_ARRAYS = (
    gym.spaces.Box,
    gym.spaces.Discrete,
    gym.spaces.MultiBinary,
    gym.spaces.MultiDiscrete,
)


class HostedPlanEnv(HostedEnv):
    """Hands a whole step on to the env: repeats, pictures, states and resets are its own affair.

    An action is a dict of the env's ``action``, and of ``how``: how often it is repeated, and
    whether the state that comes of it is wanted. A state that is no array of numbers is a tuple of
    one: an array of objects would have the whole observation pickled with it.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """Builds the env."""
        env = make()
        actions = getattr(env, "action_space", None)
        how = gym.spaces.Box(0, np.iinfo(np.int64).max, (2,), np.int64)
        super().__init__(
            env,
            Anything(),
            gym.spaces.Dict(
                {"action": actions if isinstance(actions, _ARRAYS) else Anything(), "how": how}
            ),
        )
        self._state: Any = None  # that the last step came to, if that was wanted
        self._was_reset = False  # by its last step
        self._in_arrays: bool | None = None  # whether states are; None: never reset

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Resets the env, which knows of no seed and no options."""
        if self._in_arrays is None:
            self._try_out()
        observation, info = self.env.reset(return_state=False)
        self._state, self._was_reset = None, False
        return observation, info

    def _try_out(self) -> None:
        """Learns what states and observations are like.

        After a step they may be of another dtype than after a reset, as those of plangym's Acrobot
        and MountainCarContinuous are: no array has room for both.
        """
        state, observation, _ = self.env.reset(return_state=True)
        seen = [(state, observation)]
        with suppress(Exception):  # an env that has no action to offer; others fail again
            seen.append(self.env.step(self.env.sample_action(), return_state=True)[:2])
        states, observations = zip(*seen, strict=True)
        self._in_arrays = all(map(_is_numbers, states)) and _are_alike(states)
        if _are_alike(observations):
            self.observation_space = _space_like(observation)

    def step(self, action: Any) -> tuple[Any, ...]:
        """Makes a step; the env resets itself after the last one of an episode."""
        dt, wanted = action["how"].tolist()
        was_reset = self._was_reset
        *states, observation, reward, end, truncated, info = self.env.step(
            action["action"], dt=dt, return_state=bool(wanted)
        )
        self._state = states[0] if states else None
        self._was_reset = bool(end or truncated) and getattr(self.env, "autoreset", False)
        if was_reset:
            info = {**info, "autoreset": True}
        return observation, reward, end, truncated, info

    def get_state(self) -> Any:
        """The state that the last step came to, before the env was reset."""
        state = self.env.get_state() if self._state is None else self._state
        return state if self._in_arrays else (state,)

    def set_state(self, state: Any) -> None:
        """Sets a state that ``get_state`` gave."""
        self._state, self._was_reset = None, False
        self.env.set_state(state[0] if isinstance(state, tuple) else state)

    def get_wrapper_attr(self, name: str) -> Any:
        """What ``call`` finds."""
        return getattr(self.env, name)


def _is_numbers(state: Any) -> bool:
    return isinstance(state, np.ndarray) and state.dtype.kind in "fiub" and state.size > 0


def _are_alike(values: Iterable[Any]) -> bool:
    """Whether arrays have one shape and dtype."""
    kinds = {(getattr(each, "shape", None), getattr(each, "dtype", None)) for each in values}
    return len(kinds) == 1


def _space_like(observation: Any) -> gym.Space[Any]:
    """The space of such observations: not all that plangym's envs say of theirs is true."""
    if not isinstance(observation, np.ndarray) or observation.dtype.kind not in "fiu":
        return Anything()
    if observation.dtype.kind == "f":
        return gym.spaces.Box(-np.inf, np.inf, observation.shape, observation.dtype.type)
    bounds = np.iinfo(observation.dtype)
    return gym.spaces.Box(bounds.min, bounds.max, observation.shape, observation.dtype.type)
