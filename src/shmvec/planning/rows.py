"""The rows of a batch, in a worker: each looks like an env, and all of a worker share one env.

A row's action holds what is to be done: set a state or not, step so many times, say the state that
came of it or not. Its observation holds the observation, the state, and how the step ended: the
core sees rows whose episodes never end, so it never resets one by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from shmvec.states import EnvState

__all__ = ["DT", "INDEX", "NUM_ORDERS", "SET", "WANTED", "Row", "SharedEnv"]

# Columns of a row's orders: steps to make (0: none), whether to set the state first, whether to
# tell the one after it, and the row's index in the user's batch, for messages.
DT, SET, WANTED, INDEX, NUM_ORDERS = range(5)


class SharedEnv:
    """The env of one worker, which its rows step by turns."""

    def __init__(
        self,
        env_fn: Callable[[], gym.Env[Any, Any]],
        frameskip: int,
        autoreset: bool,
        include_rng: bool,
    ) -> None:
        """Takes what makes the env; it is made when the first row is, in the worker."""
        self.env_fn = env_fn
        self.frameskip = frameskip
        self.autoreset = autoreset
        self.include_rng = include_rng
        self.env: gym.Env[Any, Any] | None = None
        self.state: EnvState
        self.observation: Any
        self.over = False

    def row(self) -> Row:
        """One more row: this is the env_fn that the core gets."""
        if self.env is None:
            env = self.env_fn()
            try:
                self.observation = env.reset()[0]  # some have no state before
                self.state = EnvState(env, self.include_rng)
            except BaseException:
                env.close()
                raise
            self.env = env
            self.over = False
        return Row(self, self.env)

    def close(self) -> None:
        """Closes the env, once."""
        env, self.env = self.env, None
        if env is not None:
            env.close()


class Row(gym.Env[Any, Any]):
    """A place in the batch."""

    def __init__(self, shared: SharedEnv, env: gym.Env[Any, Any]) -> None:
        """Takes the env it shares."""
        self._shared = shared
        self._env = env
        self._ends = np.zeros(2, np.int8)  # the dtype of MultiBinary
        self.metadata = env.metadata
        self.render_mode = env.render_mode
        self.observation_space = gym.spaces.Dict(
            {
                "observation": env.observation_space,
                "state": shared.state.space,
                "ends": gym.spaces.MultiBinary(2),
            }
        )
        self.action_space = gym.spaces.Dict(
            {
                "action": env.action_space,
                "state": shared.state.space,
                "orders": gym.spaces.Box(0, np.iinfo(np.int64).max, (NUM_ORDERS,), np.int64),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Resets the env."""
        shared = self._shared
        shared.observation, info = self._env.reset(seed=seed, options=options)
        shared.over = False
        return self._seen(0, 0, True), info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Does what the orders say."""
        shared = self._shared
        dt, set_state, wanted, index = action["orders"].tolist()
        try:
            return self._step(shared, action, dt, set_state, wanted)
        except BaseException as error:
            note = f"In row {index} of the batch, by an env of PlanningVectorEnv."
            # As add_note does, which Python 3.10 has not.
            error.__notes__ = [*getattr(error, "__notes__", ()), note]
            raise

    def _step(
        self, shared: SharedEnv, action: Any, dt: int, set_state: int, wanted: int
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        info: dict[str, Any] = {}
        was_reset = False
        if set_state:
            shared.state.put(action["state"])
            shared.over = False
        elif dt and shared.over and shared.autoreset:
            self._env.reset()
            was_reset = True
        step, chosen = self._env.step, action["action"]
        reward = 0.0
        terminated = truncated = False
        for _ in range(dt * shared.frameskip):
            shared.observation, gained, terminated, truncated, info = step(chosen)
            reward += float(gained)
            if terminated or truncated:
                break
        if dt:
            shared.over = bool(terminated or truncated)
        if was_reset:
            info = {**info, "autoreset": True}
        return self._seen(terminated, truncated, wanted), reward, False, False, info

    def _seen(self, terminated: Any, truncated: Any, wanted: Any) -> dict[str, Any]:
        ends, state = self._ends, self._shared.state
        ends[0] = terminated
        ends[1] = truncated
        return {
            "observation": self._shared.observation,
            "state": state.get() if wanted else state.nothing,
            "ends": ends,
        }

    def get_wrapper_attr(self, name: str) -> Any:
        """Of the env."""
        return self._env.get_wrapper_attr(name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Of the env."""
        return self._env.set_wrapper_attr(name, value)

    def render(self) -> Any:
        """What the env renders."""
        return self._env.render()

    def close(self) -> None:
        """Closes the env."""
        self._shared.close()
