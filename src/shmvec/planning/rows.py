"""The rows of a batch, in a worker: each stands for an env, and all of a worker share one env.

A row's action says what to do: set a state or not, step so many times, return the state that came
of it or not. Its observation holds the observation, the state, and how the step ended: the
core sees rows whose episodes never end, so it never resets one by itself.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from shmvec.exchange import EnvFn, HostedEnv
from shmvec.states import StateAccess

__all__ = ["DT", "INDEX", "NUM_ORDERS", "SET", "WANTED", "Row", "SharedEnv"]

# Columns of a row's orders: steps to make (0: none), whether to set the state first, whether to
# return the one after it, and the row's index in the user's batch, for messages.
DT, SET, WANTED, INDEX, NUM_ORDERS = range(5)


class SharedEnv:
    """An env that continues from any state: one a worker, which all the worker's rows step.

    Attributes:
        env: The env, once it is open.
        state: Takes and sets the env's state.
        observation: The env's last.
        over: Whether the env's episode has ended.
    """

    env: gym.Env[Any, Any] | None = None
    state: StateAccess
    observation: Any
    over = False

    def __init__(self, env_fn: EnvFn, frameskip: int, autoreset: bool, include_rng: bool) -> None:
        """Takes the env's function; ``open`` calls it, in the worker."""
        self._env_fn = env_fn
        self._frameskip = frameskip
        self._autoreset = autoreset
        self._include_rng = include_rng

    def open(self) -> gym.Env[Any, Any]:
        """The env, built now if it was not."""
        if self.env is None:
            env = self._env_fn()
            try:
                self.observation = env.reset()[0]  # some have no state before
                self.state = StateAccess(env, self._include_rng)
            except BaseException:
                env.close()
                raise
            self.env = env
        return self.env

    def set(self, state: Any) -> None:
        """Sets a state, which the env may keep."""
        self.state.set(state)
        self.over = False

    def reset(self, **arguments: Any) -> dict[str, Any]:
        """Resets the env; returns the info."""
        assert self.env is not None
        self.observation, info = self.env.reset(**arguments)
        self.over = False
        return info

    def step(self, action: Any, dt: int) -> tuple[float, bool, bool, dict[str, Any]]:
        """Repeats an action ``dt`` times: the sum of rewards, how it ended, and the last info."""
        assert self.env is not None
        was_reset = self.over and self._autoreset
        if was_reset:
            self.env.reset()
        info: dict[str, Any] = {}
        step, reward, terminated, truncated = self.env.step, 0.0, False, False
        for _ in range(dt * self._frameskip):
            self.observation, gained, terminated, truncated, info = step(action)
            reward += float(gained)
            if terminated or truncated:
                break
        self.over = terminated or truncated
        if was_reset:
            info = {**info, "autoreset": True}
        return reward, terminated, truncated, info

    def close(self) -> None:
        """Closes the env, once."""
        env, self.env = self.env, None
        if env is not None:
            env.close()


class Row(HostedEnv):
    """A place in the batch: an env to the core, which steps the worker's shared env."""

    def __init__(self, shared: SharedEnv) -> None:
        """Takes the env it shares."""
        super().__init__(shared.open())
        self._shared = shared
        self._ends = np.zeros(2, np.int8)  # the dtype of MultiBinary
        self.observation_space = gym.spaces.Dict(
            {
                "observation": self.env.observation_space,
                "state": shared.state.space,
                "ends": gym.spaces.MultiBinary(2),
            }
        )
        self.action_space = gym.spaces.Dict(
            {
                "action": self.env.action_space,
                "state": shared.state.space,
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
        return self._seen(False, False, True), info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Sets, steps and returns what the action's orders say."""
        shared = self._shared
        dt, given, wanted, index = action["orders"].tolist()
        try:
            if given:
                shared.state.put(action["state"])  # it was checked as one of a batch
                shared.over = False
            if not dt:
                return self._seen(False, False, wanted), 0.0, False, False, {}
            reward, terminated, truncated, info = shared.step(action["action"], dt)
            return self._seen(terminated, truncated, wanted), reward, False, False, info
        except BaseException as error:
            note = f"In row {index} of the batch, by an env of PlanningVectorEnv."
            # As add_note does, which Python 3.10 has not.
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
            raise

    def _seen(self, terminated: bool, truncated: bool, wanted: bool) -> dict[str, Any]:
        ends, state = self._ends, self._shared.state
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
