"""The rows of a batch, in a worker: to the core each is an env, and all step the worker's one env.

A row's action has the env's action, a state, and orders: whether to set the state first, how many
steps to make, and whether to return the new state. Its observation has the env's observation, the
new state, and whether the env's episode has ended. The row's own episode never ends, so the core
does not reset it.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec.exchange import EnvFn, HostedEnv
from shmvec.faults import add_note
from shmvec.states import StateAccess

__all__ = ["DT", "INDEX", "NUM_ORDERS", "SET", "WANTED", "Row", "SharedEnv", "copied"]

# Columns of a row's orders: steps to make (0: none), whether to set the state first, whether to
# return the new one, and the row's index in the user's batch, for messages.
DT, SET, WANTED, INDEX, NUM_ORDERS = range(5)


class SharedEnv:
    """An env that continues from any state: one a worker, which all the worker's rows step.

    Attributes:
        observation: The env's last observation.
        over: Whether the env's episode has ended.
        num_steps: Number of env steps made by the last ``step``.
    """

    observation: Any = None
    over = False
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
        """Prepares; ``env_fn`` is called when the env is first needed."""
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
                self.observation = env.reset()[0]  # before it some envs have no state
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
        """Whether the env was built, and not closed since."""
        return self._env is not None

    @property
    def state(self) -> StateAccess:
        """Access to the env's state."""
        if self._state is None:
            self._state = StateAccess(self.env, self._include_rng)
        return self._state

    def get_state(self) -> Any:
        """A copy of the env's state."""
        return copied(self.state.get())

    def set_state(self, state: Any) -> None:
        """Sets a copy of a state."""
        self.state.set(copied(state))
        self.over = False

    def reset(self, **arguments: Any) -> dict[str, Any]:
        """Resets the env; returns the info."""
        self.observation, info = self.env.reset(**arguments)
        self.over = False
        return info  # type: ignore[no-any-return]

    def step(self, action: Any, dt: int) -> tuple[float, bool, bool, dict[str, Any]]:
        """Repeats an action ``dt`` times; returns summed rewards, ends and last info."""
        env = self.env
        was_reset = self.over and self._autoreset
        if was_reset:
            env.reset()
        info: dict[str, Any] = {}
        step, reward, terminated, truncated, count = env.step, 0.0, False, False, 0
        times = dt * self._frameskip
        for count in range(1, times + 1):
            again = copied(action) if count < times else action  # an env may change it in place
            self.observation, gained, terminated, truncated, info = step(again)
            reward += float(gained)
            if terminated or truncated:
                break
        self.num_steps, self.over = count, terminated or truncated
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


def copied(state: Any) -> Any:
    """A copy of a state."""
    return state.copy() if isinstance(state, np.ndarray) else copy.deepcopy(state)


class Row(HostedEnv):
    """A row of the batch: to the core an env; its steps are those of the worker's shared env."""

    def __init__(self, shared: SharedEnv) -> None:
        """Makes a row that steps ``shared``."""
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
        """Itself: rows share their env."""
        return self

    def reset(self, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Resets the env."""
        info = self._shared.reset(**arguments)
        return self._observed(False, False, True), info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Sets a state, steps and returns the new state, as the orders say."""
        shared = self._shared
        dt, given, wanted, index = action["orders"].tolist()
        try:
            if given:
                self._state.put(action["state"])  # checked by the parent, with its batch
                shared.over = False
            if not dt:
                return self._observed(False, False, wanted), 0.0, False, False, {}
            reward, terminated, truncated, info = shared.step(action["action"], dt)
            return self._observed(terminated, truncated, wanted), reward, False, False, info
        except BaseException as error:
            add_note(error, f"In row {index} of the batch, by an env of PlanningVectorEnv.")
            raise

    def _observed(self, terminated: bool, truncated: bool, wanted: bool) -> dict[str, Any]:
        """The row's observation; the state in it is a placeholder unless it is ``wanted``."""
        ends, state = self._ends, self._state
        ends[0] = terminated
        ends[1] = truncated
        return {
            "observation": self._shared.observation,
            "state": state.get() if wanted else state.nothing,
            "ends": ends,
        }

    def close(self) -> None:
        """Closes the env."""
        self._shared.close()
