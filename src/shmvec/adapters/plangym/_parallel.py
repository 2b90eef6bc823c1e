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

from shmvec.adapters._shared import delegate, register_as
from shmvec.adapters.plangym._gymnasium_env import repeat_counts, states_or_none
from shmvec.exchange import HostedEnv, OwnsProcesses
from shmvec.planning import PlanningVectorEnv
from shmvec.spaces import ARRAY_SPACES, Anything
from shmvec.states import unbounded_box


class ParallelEnv(OwnsProcesses):
    """Steps batches in worker processes; an env in this process, ``plan_env``, does the rest.

    Attributes and methods that are not described here are those of ``plan_env``: ``obs_shape``,
    ``action_shape``, ``observation_space``, ``action_space``, ``gym_env``, ``step_with_dt``,
    ``sample_action``, ``get_image``, ``seed``, ``return_image`` and so on. The constructor's
    arguments from ``name`` to ``blocking`` are attributes, too.
    """

    # Class attributes, as plangym's have them.
    OBS_IS_ARRAY = delegate("plan_env", "OBS_IS_ARRAY")
    STATE_IS_ARRAY = delegate("plan_env", "STATE_IS_ARRAY")
    SINGLETON = delegate("plan_env", "SINGLETON")
    AVAILABLE_RENDER_MODES = delegate("plan_env", "AVAILABLE_RENDER_MODES")
    AVAILABLE_OBS_TYPES = delegate("plan_env", "AVAILABLE_OBS_TYPES")
    DEFAULT_OBS_TYPE = delegate("plan_env", "DEFAULT_OBS_TYPE")

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
            autoreset: Without effect: envs are always reset after the end of an episode. Then the
                next step's info has ``autoreset``, unless a state was set meanwhile.
            delay_setup: Whether workers are started only by ``setup``, or the first use.
            n_workers: Number of worker processes; 0: the env lives in this process.
            blocking: Without effect: the workers step in parallel.
            worker_options: Options of ``PlanningVectorEnv``: ``context``, ``faults`` and so on.
            **kwargs: Further arguments of ``env_class``.

        Raises:
            Exception: ``env_class`` has raised it; and as ``PlanningVectorEnv``.
        """
        register_as(
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
        self._make_plan_env = partial(env_class, **common)
        if common["render_mode"] == "human":  # workers need no windows
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
        """Starts the workers, unless they are running, also after ``close``."""
        if self._planning is None:
            self._planning = self._make_planning()
        self._planning.setup()

    def _require_planning(self) -> PlanningVectorEnv:
        if self._planning is None:
            raise ClosedEnvironmentError("This ParallelEnv is closed: setup() starts it anew.")
        return self._planning

    @property
    def plan_env(self) -> Any:
        """The env in this process, built when it is first needed."""
        if self._plan_env is None:
            self._require_planning()
            self._plan_env = self._make_plan_env()
        return self._plan_env

    @property
    def unwrapped(self) -> ParallelEnv:
        """Itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        """An attribute of ``plan_env``."""
        if name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if hasattr(type(self), name):  # a property has raised AttributeError: raise it again
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
            states: One state for each action. None, or a None for each: the workers' envs continue
                from their present states.
            dt: How often each action is repeated: an int, or one for each action.
            return_state: Whether the new states are returned. None: if states were given.

        Returns:
            Lists ``(observations, rewards, ends, truncateds, infos)``, with the new states first if
            they are returned.
        """
        planning, count = self._require_planning(), len(actions)
        states = states_or_none(states)
        returns_state = states is not None if return_state is None else bool(return_state)
        how = np.empty((count, 2), np.int64)
        how[:, 0], how[:, 1] = repeat_counts(dt, count), returns_state
        if count == 0:  # an empty list has no shape to check
            space: Any = planning.action_space
            actions = np.empty((0, *(space["action"].shape or ())))
        if states is not None and self._states_in_tuples:
            states = [(state,) for state in states]
        *news, observations, rewards, ends, truncateds, infos = planning.step_batch(
            {"action": actions, "how": how}, states, return_state=returns_state
        )
        rest = rewards.tolist(), ends.tolist(), truncateds.tolist(), infos
        return *map(self._unwrap_states, news), list(observations), *rest

    def sync_states(self, state: Any = None) -> None:
        """Sets one state in all workers; None: that of ``plan_env``."""
        state = self.get_state() if state is None else state
        self._require_planning().sync_states((state,) if self._states_in_tuples else state)

    @property
    def _states_in_tuples(self) -> bool:
        """Whether workers return each state in a tuple."""
        return isinstance(self._require_planning().state_space, Anything)

    def _unwrap_states(self, states: Any) -> list[Any]:
        """States of workers, without the tuples."""
        return [state for (state,) in states] if self._states_in_tuples else list(states)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every worker's env, or gets an attribute: one result for each."""
        return self._require_planning().call(name, *args, **kwargs)

    # ---- the env of this process -------------------------------------------------------------

    def reset(self, return_state: bool = True, indices: npt.ArrayLike | None = None) -> Any:
        """Resets ``plan_env``, and sets its new state in all workers.

        With ``indices``, the envs of these workers are reset instead, and batches are returned.
        """
        if indices is not None:
            states, *others = self._require_planning().reset(True, indices)
            return (self._unwrap_states(states), *others) if return_state else tuple(others)
        state, observation, info = self.plan_env.reset(return_state=True)
        self.sync_states(state)
        return (state, observation, info) if return_state else (observation, info)

    def step(
        self, action: Any, state: Any = None, dt: int = 1, return_state: bool | None = None
    ) -> Any:
        """Steps ``plan_env``; like :meth:`step_batch`, for one action."""
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
        """A new vectorized env, with the same arguments except for these changes."""
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
        """Closes the envs, because programs for plangym need not call ``close``."""
        self.close(terminate=True)


# ---- in a worker ------------------------------------------------------------------------------


class HostedPlanEnv(HostedEnv):
    """An env of plangym's in a worker, which repeats actions and resets by itself.

    An action is a dict of the env's ``action`` and of ``how``: the number of repeats, and whether
    the new state is wanted. A state that is no array of numbers travels in a tuple of one, because
    with an array of objects the whole observation would be pickled.
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
                {"action": actions if isinstance(actions, ARRAY_SPACES) else Anything(), "how": how}
            ),
        )
        self._state: Any = None  # the state after the last step, if it was wanted
        self._was_reset = False  # by the last step
        self._states_are_arrays: bool | None = None  # None before the first reset

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Resets the env, which takes neither seed nor options."""
        if self._states_are_arrays is None:
            self._learn_types()
        observation, info = self.env.reset(return_state=False)
        self._state, self._was_reset = None, False
        return observation, info

    def _learn_types(self) -> None:
        """Learns the types of states and observations, by a step.

        After a step they may be of another dtype than after a reset, as in plangym's Acrobot and
        MountainCarContinuous; then they do not fit into an array.
        """
        state, observation, _ = self.env.reset(return_state=True)
        seen = [(state, observation)]
        with suppress(Exception):  # no action can be sampled; any other error will occur again
            seen.append(self.env.step(self.env.sample_action(), return_state=True)[:2])
        states, observations = zip(*seen, strict=True)
        self._states_are_arrays = all(map(_is_numeric, states)) and _are_alike(states)
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
        return state if self._states_are_arrays else (state,)

    def set_state(self, state: Any) -> None:
        """Sets a state that ``get_state`` returned."""
        self._state, self._was_reset = None, False
        self.env.set_state(state[0] if isinstance(state, tuple) else state)


def _is_numeric(state: Any) -> bool:
    return isinstance(state, np.ndarray) and state.dtype.kind in "fiub" and state.size > 0


def _are_alike(values: Iterable[Any]) -> bool:
    """Whether all arrays have the same shape and dtype."""
    kinds = {(getattr(each, "shape", None), getattr(each, "dtype", None)) for each in values}
    return len(kinds) == 1


def _space_like(observation: Any) -> gym.Space[Any]:
    """A space for observations like this one, since plangym's own are not always right."""
    if not isinstance(observation, np.ndarray) or observation.dtype.kind not in "fiu":
        return Anything()
    return unbounded_box(observation.shape, observation.dtype)
