"""The rows of a batch, in a worker: the engine steps each as an env, and all step one shared env.

A row's action consists of the env's action, a state, and orders: whether to set the state first,
how many steps to make, and whether to return the new state. Its observation consists of the env's
observation, the new state, and whether the env's episode has ended. The row's own episode never
ends, so the engine does not reset it.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec.exchange import EnvFn, HostedEnv
from shmvec.faults import add_note
from shmvec.states import StateAccess

__all__ = ["DT", "INDEX", "NUM_ORDERS", "RETURN", "SET", "Row", "SharedEnv", "copy_state"]

# Columns of a row's orders: the number of steps (0: none), whether to set the state first, whether
# to return the new state, and the row's index in the user's batch, for messages.
DT, SET, RETURN, INDEX, NUM_ORDERS = range(5)


class SharedEnv:
    """A worker's env, which continues from any state, and which all the worker's rows step.

    Attributes:
        observation: The env's last observation.
        is_over: Whether the env's episode has ended.
        num_steps: Number of env steps made by the last ``step``.
    """

    observation: Any = None
    is_over = False
    num_steps = 0
    _env: Any = None
    _state: StateAccess | None = None

    def __init__(
        self,
        env_fn: EnvFn,
        frameskip: int = 1,
        autoreset: bool = False,
        include_rng: bool = True,
    ) -> None:
        """Prepares the env; ``env_fn`` is called when it is first needed."""
        self._env_fn = env_fn
        self._frameskip = frameskip
        self._autoreset = autoreset
        self._include_rng = include_rng

    @property
    def env(self) -> Any:
        """The env, built and reset at the first use."""
        if self._env is None:
            env = self._env_fn()
            try:
                self.observation = env.reset()[0]  # before a reset some envs have no state
            except BaseException:
                env.close()
                raise
            self._env = env
        return self._env

    @env.setter
    def env(self, env: Any) -> None:
        """Replaces the env, by a wrapped one for example."""
        self._env, self._state = env, None

    @property
    def is_open(self) -> bool:
        """Whether the env was built and not closed."""
        return self._env is not None

    @property
    def state(self) -> StateAccess:
        """Access to the env's state."""
        if self._state is None:
            self._state = StateAccess(self.env, self._include_rng)
        return self._state

    def get_state(self) -> Any:
        """A copy of the env's state."""
        return copy_state(self.state.get())

    def set_state(self, state: Any) -> None:
        """Sets a copy of a state."""
        self.state.set(copy_state(state))
        self.is_over = False

    def reset(self, **arguments: Any) -> dict[str, Any]:
        """Resets the env; returns the info."""
        self.observation, info = self.env.reset(**arguments)
        self.is_over = False
        return info  # type: ignore[no-any-return]

    def step(self, action: Any, dt: int) -> tuple[float, bool, bool, dict[str, Any]]:
        """Repeats an action ``dt`` times; returns summed rewards, ends and last info."""
        env = self.env
        was_reset = self.is_over and self._autoreset
        if was_reset:
            env.reset()
        info: dict[str, Any] = {}
        step, reward, terminated, truncated, count = env.step, 0.0, False, False, 0
        times = dt * self._frameskip
        for count in range(1, times + 1):
            copy = copy_state(action) if count < times else action  # an env may change it in place
            self.observation, gained, terminated, truncated, info = step(copy)
            reward += float(gained)
            if terminated or truncated:
                break
        self.num_steps, self.is_over = count, terminated or truncated
        if was_reset:
            info = {**info, "autoreset": True}
        return reward, bool(terminated), bool(truncated), info

    def render(self) -> Any:
        """The env's ``render()``, in its present state."""
        return self.state.rendered(self.env.render)

    def close(self) -> None:
        """Closes the env, if it is open; the next use builds another one."""
        env, self.env = self._env, None
        if env is not None:
            env.close()


def copy_state(state: Any) -> Any:
    """Copies a state, or an action."""
    return state.copy() if isinstance(state, np.ndarray) else copy.deepcopy(state)


class Row(HostedEnv):
    """A row of the batch: an env of the engine's whose steps are those of the shared env."""

    def __init__(self, shared: SharedEnv) -> None:
        """Makes a row that steps the shared env."""
        super().__init__(shared.env)
        self._shared = shared
        try:
            self._state = shared.state
        except BaseException:
            shared.close()
            raise
        self._ends = np.zeros(2, np.int8)  # the dtype of MultiBinary
        self.observation_space = gym.spaces.Dict(
            {
                "observation": self.env.observation_space,
                "state": self._state.space,
                "ends": gym.spaces.MultiBinary(2),
            }
        )
        self.action_space = gym.spaces.Dict(
            {
                "action": self.env.action_space,
                "state": self._state.space,
                "orders": gym.spaces.Box(0, np.iinfo(np.int64).max, (NUM_ORDERS,), np.int64),
            }
        )

    @property
    def unwrapped(self) -> Any:
        """The row itself, since rows share their env."""
        return self

    def reset(self, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Resets the env."""
        info = self._shared.reset(**arguments)
        return self._observation(False, False, True), info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Sets a state, steps, and returns the new state, as the action's orders say."""
        shared = self._shared
        dt, sets_state, with_state, index = action["orders"].tolist()
        try:
            if sets_state:
                self._state.put(action["state"])  # the parent has checked it
                shared.is_over = False
            if not dt:
                return self._observation(False, False, with_state), 0.0, False, False, {}
            reward, terminated, truncated, info = shared.step(action["action"], dt)
            return self._observation(terminated, truncated, with_state), reward, False, False, info
        except BaseException as error:
            add_note(error, f"In row {index} of the batch, by an env of PlanningVectorEnv.")
            raise

    def _observation(self, terminated: bool, truncated: bool, with_state: bool) -> dict[str, Any]:
        """The row's observation, in which the state may be a placeholder."""
        ends, state = self._ends, self._state
        ends[0] = terminated
        ends[1] = truncated
        return {
            "observation": self._shared.observation,
            "state": state.get() if with_state else state.nothing,
            "ends": ends,
        }

    def close(self) -> None:
        """Closes the env."""
        self._shared.close()
