"""``ParallelEnv``: plangym's vectorized env, whose batches a ``PlanningVectorEnv`` steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError

from shmvec.adapters._shared import forwarded
from shmvec.adapters.plangym._gymnasium_env import count_among, given_states, repeats
from shmvec.exchange import HostedEnv, OwnsProcesses
from shmvec.planning import PlanningVectorEnv
from shmvec.spaces import Anything

# Spaces whose batches are arrays.
_ARRAYS = (
    gym.spaces.Box,
    gym.spaces.Discrete,
    gym.spaces.MultiBinary,
    gym.spaces.MultiDiscrete,
)


class ParallelEnv(OwnsProcesses):
    """Steps batches in worker processes; an env in this process, ``plan_env``, does all else.

    Attributes and methods that are not described here are those of ``plan_env``: ``obs_shape``,
    ``action_shape``, ``observation_space``, ``action_space``, ``gym_env``, ``step_with_dt``,
    ``sample_action``, ``get_image``, ``seed``, ``return_image`` and so on.

    Attributes:
        name: Name of the env.
        frameskip: How often each step is repeated with the same action.
        autoreset: The constructor's argument, without effect: envs are always reset after the end
            of an episode; the next step's info, if no state was set meanwhile, has ``autoreset``.
        delay_setup: Whether nothing is started before ``setup``, or the first use.
        n_workers: Number of worker processes; 0: their env lives in this process.
        blocking: The constructor's argument, without effect: workers always step in parallel.
    """

    # Class attributes, as plangym's have them.
    OBS_IS_ARRAY = forwarded("plan_env", "OBS_IS_ARRAY")
    STATE_IS_ARRAY = forwarded("plan_env", "STATE_IS_ARRAY")
    SINGLETON = forwarded("plan_env", "SINGLETON")
    AVAILABLE_RENDER_MODES = forwarded("plan_env", "AVAILABLE_RENDER_MODES")
    AVAILABLE_OBS_TYPES = forwarded("plan_env", "AVAILABLE_OBS_TYPES")
    DEFAULT_OBS_TYPE = forwarded("plan_env", "DEFAULT_OBS_TYPE")

    _planning: PlanningVectorEnv | None = None
    _plan_env: Any = None

    def __init__(
        self,
        env_class: Callable[..., Any],
        name: str,
        frameskip: int = 1,
        autoreset: bool = True,
        delay_setup: bool = False,
        n_workers: int = 8,
        blocking: bool = False,
        worker_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Starts the workers, each with its env.

        Args:
            env_class: Makes an env with plangym's interface: a class of plangym's,
                ``GymnasiumEnv``, or any function with such arguments.
            name: Argument of ``env_class``.
            frameskip: Argument of ``env_class``.
            autoreset: Without effect: envs are reset after the end of an episode, as in plangym.
            delay_setup: Whether nothing is started before ``setup``, or the first use.
            n_workers: Number of worker processes; 0: their env lives in this process.
            blocking: Without effect: the workers step in parallel.
            worker_options: Options of ``PlanningVectorEnv``: ``context``, ``faults`` and so on.
            **kwargs: Further arguments of ``env_class``.

        Raises:
            Exception: Whatever ``env_class`` raises; and as ``PlanningVectorEnv``.
        """
        count_among(
            type(self), "plangym.core:PlangymEnv", "plangym.vectorization.env:VectorizedEnv"
        )
        self.name = name
        self.frameskip = frameskip
        self.autoreset = autoreset
        self.delay_setup = delay_setup
        self.n_workers = n_workers
        self.blocking = blocking
        self._env_class = env_class
        self._arguments = {
            "worker_options": worker_options,
            "autoreset": autoreset,
            **kwargs,
        }
        common = {"render_mode": "rgb_array", **kwargs, "name": name, "frameskip": frameskip}
        self._make_local = partial(env_class, **common)
        if common["render_mode"] == "human":  # one window is enough
            common["render_mode"] = None
        make = partial(env_class, **common, autoreset=True, delay_setup=False)
        env_fn: Any = partial(HostedPlanEnv, make)
        self._make_planning = partial(
            PlanningVectorEnv,
            env_fn,
            n_workers,
            autoreset=False,  # the hosted env resets by itself
            list_infos=True,
            **(worker_options or {}),
        )
        self._planning = self._make_planning(delay_setup=delay_setup)

    def setup(self) -> None:
        """Starts the workers, unless they are running; after ``close``, starts new ones."""
        if self._planning is None:
            self._planning = self._make_planning()
        self._planning.setup()

    def _open(self) -> PlanningVectorEnv:
        if self._planning is None:
            raise ClosedEnvironmentError("This ParallelEnv is closed: setup() starts it anew.")
        return self._planning

    @property
    def plan_env(self) -> Any:
        """The env in this process, built when it is first needed."""
        if self._plan_env is None:
            self._open()
            self._plan_env = self._make_local()
        return self._plan_env

    @property
    def unwrapped(self) -> ParallelEnv:
        """Itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        """An attribute of ``plan_env``."""
        if name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if hasattr(type(self), name):  # a property has raised AttributeError, which is passed on
            return object.__getattribute__(self, name)
        return getattr(self.plan_env, name)

    def __repr__(self) -> str:
        """The env's name, and the number of workers."""
        kind = self._env_class
        return (
            f"{type(self).__name__}({getattr(kind, '__name__', kind)}, name={self.name!r}, "
            f"frameskip={self.frameskip}, n_workers={self.n_workers})"
        )

    # ---- batches -----------------------------------------------------------------------------

    def step_batch(
        self,
        actions: Any,
        states: Any = None,
        dt: int | npt.ArrayLike = 1,
        return_state: bool | None = None,
    ) -> tuple[list[Any], ...]:
        """Steps a batch of actions; see :meth:`shmvec.planning.PlanningVectorEnv.step_batch`.

        Args:
            actions: Any number of actions.
            states: One state for each action. None, or one None for each: the workers' envs go on
                from their present states.
            dt: How often each action is repeated: an int, or one for each action.
            return_state: Whether the new states are returned. None: if states were given.

        Returns:
            Lists ``(observations, rewards, ends, truncateds, infos)``, with the new states first if
            they are returned.
        """
        planning, count = self._open(), len(actions)
        states = given_states(states)
        returned = states is not None if return_state is None else bool(return_state)
        how = np.empty((count, 2), np.int64)
        how[:, 0], how[:, 1] = repeats(dt, count), returned
        if count == 0:  # an empty list has no shape to check
            space: Any = planning.action_space
            actions = np.empty((0, *(space["action"].shape or ())))
        if states is not None and self._in_tuples:
            states = [(state,) for state in states]
        *news, observations, rewards, ends, truncateds, infos = planning.step_batch(
            {"action": actions, "how": how}, states, return_state=returned
        )
        rest = rewards.tolist(), ends.tolist(), truncateds.tolist(), infos
        return *map(self._states, news), list(observations), *rest

    def sync_states(self, state: Any = None) -> None:
        """Sets one state in all workers; None: that of ``plan_env``."""
        given = self.get_state() if state is None else state
        self._open().sync_states((given,) if self._in_tuples else given)

    @property
    def _in_tuples(self) -> bool:
        """Whether workers return each state in a tuple."""
        return isinstance(self._open().state_space, Anything)

    def _states(self, states: Any) -> list[Any]:
        """States of workers, without the tuples."""
        return [state for (state,) in states] if self._in_tuples else list(states)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every worker's env, or gets an attribute: one result for each."""
        return self._open().call(name, *args, **kwargs)

    # ---- the env of this process -------------------------------------------------------------

    def reset(self, return_state: bool = True, indices: npt.ArrayLike | None = None) -> Any:
        """Resets ``plan_env``, and sets its new state in all workers.

        With ``indices``, envs of these workers are reset instead, each by itself, and batches are
        returned.
        """
        if indices is not None:
            states, *others = self._open().reset(True, indices)
            return (self._states(states), *others) if return_state else tuple(others)
        state, observation, info = self.plan_env.reset(return_state=True)
        self.sync_states(state)
        return (state, observation, info) if return_state else (observation, info)

    def step(
        self, action: Any, state: Any = None, dt: int = 1, return_state: bool | None = None
    ) -> Any:
        """Steps ``plan_env``; takes and returns what :meth:`step_batch` does, for one action."""
        return self.plan_env.step(action=action, state=state, dt=dt, return_state=return_state)

    def set_state(self, state: Any) -> None:
        """Sets the state of ``plan_env`` and of all workers."""
        self.plan_env.set_state(state)
        self.sync_states(state)

    def render(self, mode: str = "human") -> Any:
        """Renders ``plan_env``; its own render mode is used."""
        return self.plan_env.render()

    # ---- the rest ----------------------------------------------------------------------------

    def clone(self, **changes: Any) -> ParallelEnv:
        """A new vectorized env, made with the same arguments except for these changes."""
        arguments = {
            "env_class": self._env_class,
            "name": self.name,
            "frameskip": self.frameskip,
            "delay_setup": self.delay_setup,
            "n_workers": self.n_workers,
            "blocking": self.blocking,
            **self._arguments,
        }
        return type(self)(**{**arguments, **changes})

    def close(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the workers and closes the envs; see ``PlanningVectorEnv.close``."""
        planning, local = self._planning, self._plan_env
        self._planning = self._plan_env = None
        try:
            if planning is not None:
                planning.close(timeout, terminate)
        finally:
            if local is not None:
                local.close()

    def __del__(self) -> None:
        """Closes the envs of a program that did not call ``close``, as plangym's need not."""
        self.close(terminate=True)


# ---- in a worker ------------------------------------------------------------------------------


class HostedPlanEnv(HostedEnv):
    """An env of plangym's in a worker: it makes repeats, pictures, states and resets by itself.

    An action is a dict of the env's ``action`` and of ``how``: how often it is repeated, and
    whether the new state is wanted. A state that is no array of numbers travels in a tuple of one,
    since an array of objects would have the whole observation pickled with it.
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
        self._state: Any = None  # the state after the last step, if it was wanted
        self._was_reset = False  # whether the last step has reset the env
        self._in_arrays: bool | None = None  # whether states are arrays; None: never reset

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Resets the env, which takes neither seed nor options."""
        if self._in_arrays is None:
            self._try_out()
        observation, info = self.env.reset(return_state=False)
        self._state, self._was_reset = None, False
        return observation, info

    def _try_out(self) -> None:
        """Learns the types of states and observations, by a step.

        After a step they may be of another dtype than after a reset, as those of plangym's Acrobot
        and MountainCarContinuous are: no array has room for both.
        """
        state, observation, _ = self.env.reset(return_state=True)
        seen = [(state, observation)]
        with suppress(Exception):  # no action can be sampled; other errors will come back
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
        """The state after the last step, before the env's reset."""
        state = self.env.get_state() if self._state is None else self._state
        return state if self._in_arrays else (state,)

    def set_state(self, state: Any) -> None:
        """Sets a state that ``get_state`` returned."""
        self._state, self._was_reset = None, False
        self.env.set_state(state[0] if isinstance(state, tuple) else state)


def _is_numbers(state: Any) -> bool:
    return isinstance(state, np.ndarray) and state.dtype.kind in "fiub" and state.size > 0


def _are_alike(values: Iterable[Any]) -> bool:
    """Whether all arrays have the same shape and dtype."""
    kinds = {(getattr(each, "shape", None), getattr(each, "dtype", None)) for each in values}
    return len(kinds) == 1


def _space_like(observation: Any) -> gym.Space[Any]:
    """A space for observations like this one: plangym's own spaces are not always right."""
    if not isinstance(observation, np.ndarray) or observation.dtype.kind not in "fiu":
        return Anything()
    if observation.dtype.kind == "f":
        return gym.spaces.Box(-np.inf, np.inf, observation.shape, observation.dtype.type)
    bounds = np.iinfo(observation.dtype)
    return gym.spaces.Box(bounds.min, bounds.max, observation.shape, observation.dtype.type)
