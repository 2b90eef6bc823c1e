"""PettingZoo parallel envs over ``ShmVectorEnv``: dicts of agents in and out, a slab an agent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import create_empty_array

from shmvec.adapters.pettingzoo_env import (
    AGENTS,
    ALIVE,
    FLAGS,
    OF_AGENT,
    REWARDS,
    TERMINATED,
    TRUNCATED,
    Team,
)
from shmvec.exchange import (
    AutoresetMode,
    Options,
    checked_env_fns,
    existing_env_ids,
)
from shmvec.vector_env import ShmVectorEnv

__all__ = ["ParallelVectorEnv"]

Agent: TypeAlias = Hashable
Array: TypeAlias = npt.NDArray[Any]
Space: TypeAlias = gym.Space[Any]
ByAgent: TypeAlias = dict[Any, Any]
# Observations, rewards, terminations, truncations, infos.
StepResults: TypeAlias = tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]


class ParallelVectorEnv:
    """Steps PettingZoo parallel envs in worker processes, through shared memory.

    Everything is a dict by agent, of arrays with a row for each env: ``(num_envs, ...)``. All dicts
    have all ``possible_agents``. The envs are ``pettingzoo.ParallelEnv``, or have its methods;
    PettingZoo need not be installed.

    An agent that is not there in an env, because it is dead or not yet born, has an observation of
    zeros, reward 0, and is neither terminated nor truncated: what is nobody's is told by ``alive``.
    In the step in which it dies it has its last observation and reward, and is terminated or
    truncated. Its actions are ignored from then on, and need not be given.

    An episode is over when nobody is left. What follows is as for ``ShmVectorEnv``, by
    ``autoreset_mode``: the next step resets the env (NEXT_STEP), this step has reset it already
    (SAME_STEP; last observations are in ``infos[agent]["final_obs"]``), or you do (DISABLED).

    Attributes:
        envs: The ``ShmVectorEnv`` behind it, for ``stats()``, ``restart()`` and the like.
        num_envs: Number of envs.
        possible_agents: Agents that there may be, the same in all envs.
        alive: By agent, bool ``(num_envs,)``: where it is to act in the next step. So what is
            returned by that step is, for an agent, of use where it was alive before.
        metadata: The first env's, with ``autoreset_mode``.
        render_mode: The first env's.
        closed: Whether it has been closed.

    Example:
        >>> import numpy as np
        >>> from gymnasium.spaces import Box, Discrete
        >>> from shmvec.adapters.pettingzoo import ParallelVectorEnv
        >>> class Duel:  # or a pettingzoo.ParallelEnv
        ...     possible_agents = ["ann", "bob"]
        ...     def observation_space(self, agent): return Box(0, 9, (2,))
        ...     def action_space(self, agent): return Discrete(3)
        ...     def reset(self, seed=None, options=None):
        ...         self.agents = ["ann", "bob"]
        ...         return {agent: np.ones(2) for agent in self.agents}, {}
        ...     def step(self, actions):  # who does 2 is out
        ...         out = {agent: action == 2 for agent, action in actions.items()}
        ...         self.agents = [agent for agent in self.agents if not out[agent]]
        ...         rewards = {agent: float(action) for agent, action in actions.items()}
        ...         no = dict.fromkeys(actions, False)
        ...         return {agent: np.full(2, 5) for agent in actions}, rewards, out, no, {}
        ...     def close(self): pass
        >>> envs = ParallelVectorEnv([Duel] * 3)
        >>> observations, infos = envs.reset(seed=1)
        >>> observations["ann"].shape
        (3, 2)
        >>> _, rewards, terminations, _, _ = envs.step({"ann": [0, 1, 2], "bob": [1, 1, 1]})
        >>> rewards["ann"], terminations["ann"]
        (array([0., 1., 2.]), array([False, False,  True]))
        >>> envs.alive["ann"]
        array([ True,  True, False])
        >>> _, rewards, _, _, _ = envs.step({"ann": [1, 1, None], "bob": [1, 1, 1]})
        >>> rewards["ann"]
        array([1., 1., 0.])
        >>> envs.close()
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **options: Any) -> None:
        """Starts the workers and builds the envs, all in parallel.

        Args:
            env_fns: One function for each env; each returns a parallel env.
            **options: Of ``ShmVectorEnv``: ``num_workers``, ``autoreset_mode``, ``context``,
                ``copy``, ``step_timeout``, ``faults`` and so on. ``shared_memory=False`` for
                observations or actions without a fixed size.

        Raises:
            TypeError: An env_fn returns no parallel env.
            RuntimeError: Agents or their spaces differ between the envs.
            ValueError: Two agents of an env have the same name; and as ``ShmVectorEnv``.
            Exception: Whatever an env_fn raises, with the worker's traceback as its cause.
        """
        functions: list[Any] = [
            partial(Team, env, env_fn) for env, env_fn in enumerate(checked_env_fns(env_fns))
        ]
        self.envs = ShmVectorEnv(functions, **options)
        try:
            everyone = self.envs.call("shmvec_agents")
            for env, agents in enumerate(everyone):
                if agents != everyone[0]:
                    raise RuntimeError(
                        f"possible_agents of env {env} are {agents}, those of env 0 {everyone[0]}: "
                        "they must be the same, in the same order, in all envs"
                    )
        except BaseException:
            self.envs.close()
            raise
        self.num_envs = self.envs.num_envs
        self.possible_agents: list[Any] = everyone[0]
        self.metadata = self.envs.metadata
        self.render_mode = self.envs.render_mode
        self._keys = {agent: str(agent) for agent in self.possible_agents}
        self._same_step = self.envs.autoreset_mode is AutoresetMode.SAME_STEP
        self._begun = np.zeros(self.num_envs, np.bool_)  # which have been reset
        self._alive = np.zeros((len(self.possible_agents), self.num_envs), np.bool_)

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self.envs.closed

    @property
    def alive(self) -> ByAgent:
        """By agent, where it is to act in the next step: bool ``(num_envs,)``, copies."""
        return dict(zip(self.possible_agents, self._alive.copy(), strict=True))

    @property
    def agents(self) -> list[Any]:
        """Those of ``possible_agents`` that live in an env at least."""
        return [agent for agent, lives in self.alive.items() if lives.any()]

    def single_observation_space(self, agent: Any) -> Space:
        """The observation space of an agent in one env."""
        return self._part(self.envs.single_observation_space, AGENTS, agent)

    def observation_space(self, agent: Any) -> Space:
        """The observation space of an agent in all envs."""
        return self._part(self.envs.observation_space, AGENTS, agent)

    def single_action_space(self, agent: Any) -> Space:
        """The action space of an agent in one env."""
        return self._part(self.envs.single_action_space, None, agent)

    def action_space(self, agent: Any) -> Space:
        """The action space of an agent in all envs."""
        return self._part(self.envs.action_space, None, agent)

    def _part(self, space: Any, part: str | None, agent: Any) -> Space:
        if agent not in self._keys:
            raise ValueError(f"there is no agent {agent!r}; there are {self.possible_agents}")
        found: Space = (space if part is None else space[part])[self._keys[agent]]
        return found

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> tuple[ByAgent, ByAgent]:
        """Resets all envs, in parallel.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one seed (or None) for each env.
            options: Passed to every env's ``reset``; of a list, each env gets its own.
                ``options["reset_mask"]``, a bool array ``(num_envs,)``, is not passed: only the
                envs that it marks are reset.

        Returns:
            Observations ``(num_envs, ...)`` by agent, and infos: by agent, Gymnasium's dict of
            arrays ``(num_envs, ...)``, each with a mask ``_key``.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The number of seeds or options, or the shape of the mask, is wrong.
            TypeError: A seed is no integer, or the mask no array of bools.
            Exception: Whatever an env raises, with the worker's traceback as its cause.
        """
        observations, infos = self.envs.reset(seed=seed, options=options)
        mask = options.get("reset_mask") if isinstance(options, dict) else None
        nothing = np.zeros(len(observations[FLAGS]), np.bool_)
        parts = self._taken_apart((observations, None, nothing, nothing, infos), mask)
        return parts[0], parts[4]

    def step(self, actions: Mapping[Any, Any], *, mask: Any = None) -> StepResults:
        """Steps all envs, in parallel. An env whose episode was over is reset instead (NEXT_STEP).

        Args:
            actions: By agent, one for each env: an array ``(num_envs, ...)`` or a list, batched as
                ``action_space(agent)`` says. Where an agent is not alive it is ignored, and may be
                NaN or None; an agent that is alive nowhere may be left out.
            mask: Which envs to step, bool ``(num_envs,)``. For the others nothing happens: they
                return their last observations, rewards 0, no flags and no infos.

        Returns:
            By agent: observations ``(num_envs, ...)``; rewards, float64 ``(num_envs,)``;
            terminations and truncations, bool ``(num_envs,)``; infos, as of :meth:`reset`. Beside
            the agents, infos have ``fault`` where a ``FaultPolicy`` had something to do: all
            agents of that env are truncated then.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ResetNeeded: An env has never been reset. Nothing was sent.
            ValueError: There is no such agent, actions of one that is alive are missing, or their
                number or shape is wrong. Nothing was sent.
            TypeError: Their dtype is. Nothing was sent.
            AssertionError: An episode is over and nobody resets it (DISABLED). Nothing was sent.
            EnvTimeoutError: An env takes longer than its time limit.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause.
        """
        asked = np.ones(self.num_envs, np.bool_)
        if mask is not None and np.shape(mask) == asked.shape:  # else the core complains
            asked = np.asarray(mask, np.bool_)
        batch = self._batched(actions, np.arange(self.num_envs), asked)
        return self._taken_apart(self.envs.step(batch, mask=mask), mask)

    def async_reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
        env_id: npt.ArrayLike | None = None,
    ) -> None:
        """Starts to reset envs; :meth:`recv` returns those that are ready first.

        Arguments and exceptions are those of ``ShmVectorEnv.async_reset``.
        """
        self.envs.async_reset(seed, options, env_id)

    def send(self, actions: Mapping[Any, Any], env_id: npt.ArrayLike | None = None) -> None:
        """Starts to step some envs; :meth:`recv` returns those that are ready first.

        Args:
            actions: As for :meth:`step`, one for each of these envs.
            env_id: Which envs, int ``(n,)``. None: all.

        Raises:
            Exception: As :meth:`step`, and as ``ShmVectorEnv.send``. Nothing was sent.
        """
        envs = existing_env_ids(env_id, self.num_envs)
        self.envs.send(self._batched(actions, envs, np.ones(len(envs), np.bool_)), envs)

    def recv(self, *, min_envs: int | None = None, timeout: float | None = None) -> StepResults:
        """Waits for a batch of envs, those that have been ready for longest.

        Arguments and exceptions are those of ``ShmVectorEnv.recv``.

        Returns:
            As :meth:`step`, of the envs in ``infos["env_id"]``.
        """
        return self._taken_apart(self.envs.recv(min_envs=min_envs, timeout=timeout), None)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every env, in parallel, or gets an attribute: one result an env."""
        return self.envs.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute of every env; see :meth:`call`."""
        return self.envs.get_attr(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of every env: a list or tuple has one value for each.

        Of wrapped envs, that of the outermost one that has it, or else of the outermost.
        """
        self.envs.set_attr(name, values)

    def render(self) -> tuple[Any, ...]:
        """What every env's ``render`` returns."""
        return self.envs.render()

    def close(self, **kwargs: Any) -> None:
        """Closes the envs and ends the workers, with ``timeout=`` or ``terminate=True``."""
        self.envs.close(**kwargs)

    # ---- actions -----------------------------------------------------------------------------

    def _batched(
        self, actions: Mapping[Any, Any], envs: npt.NDArray[np.intp], asked: npt.NDArray[np.bool_]
    ) -> dict[str, Any]:
        """Actions of these envs as the core takes them; of those that are asked they matter."""
        if not isinstance(actions, Mapping):
            raise TypeError(
                f"actions must be a dict by agent of batches, got {type(actions).__name__}"
            )
        for agent in actions:
            if agent not in self._keys:
                raise ValueError(f"there is no agent {agent!r}; there are {self.possible_agents}")
        if not self._begun[envs[asked]].all():
            never = [env for env in envs[asked].tolist() if not self._begun[env]]
            raise ResetNeeded(f"envs {never} have never been reset. Nothing was sent to any env.")
        alive = self._alive[:, envs] & asked
        batch = {}
        for agent, lives in zip(self.possible_agents, alive, strict=True):
            values = actions.get(agent)
            space = self.single_action_space(agent)
            if values is None:
                if lives.any():
                    raise _missing(agent, envs[lives])
                values = create_empty_array(space, len(envs))
            elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete,
                                    spaces.MultiBinary)):  # fmt: skip
                values = _checked(agent, space, values, envs, lives)
            batch[self._keys[agent]] = values
        return batch

    # ---- results -----------------------------------------------------------------------------

    def _taken_apart(self, results: Any, mask: Any) -> StepResults:
        """By agent, what the core returns of envs that were asked; the others' state is kept."""
        told, _, over, broken, infos = results
        envs = infos.get("env_id")
        rows = slice(None) if envs is None else envs
        before = self._alive[:, rows]
        rewards = np.ascontiguousarray(told[REWARDS].T)
        flags = np.ascontiguousarray(told[FLAGS].transpose(1, 2, 0))
        if mask is not None:
            left_out = ~np.asarray(mask, np.bool_)
            rewards[:, left_out] = 0.0
            flags[:, :, left_out] = False
            flags[ALIVE][:, left_out] = before[:, left_out]
            over, broken = over & mask, broken & mask
        if self._same_step and over.any():  # what these have told is of the next episode
            for row in np.flatnonzero(over):
                last = infos["final_obs"][row]
                rewards[:, row] = last[REWARDS]
                flags[:ALIVE, :, row] = last[FLAGS][:ALIVE]
        if broken.any():  # a fault: the env has told nothing
            rewards[:, broken] = 0.0
            flags[TERMINATED][:, broken] = False
            flags[TRUNCATED][:, broken] = before[:, broken]
            if not self._same_step:
                flags[ALIVE][:, broken] = False
        by_agent = self._infos_by_agent(infos, before)
        self._alive[:, rows] = flags[ALIVE]
        self._begun[rows] |= True if mask is None else mask
        agents = self.possible_agents
        return (
            {agent: told[AGENTS][key] for agent, key in self._keys.items()},
            dict(zip(agents, rewards, strict=True)),
            dict(zip(agents, flags[TERMINATED], strict=True)),
            dict(zip(agents, flags[TRUNCATED], strict=True)),
            by_agent,
        )

    def _infos_by_agent(self, infos: dict[str, Any], before: npt.NDArray[np.bool_]) -> ByAgent:
        found: ByAgent = {agent: {} for agent in self.possible_agents}
        if not infos:
            return found
        last = infos.pop("final_info", {})
        for agent, key in self._keys.items():
            found[agent] = infos.pop(OF_AGENT + key, found[agent])
            infos.pop(f"_{OF_AGENT}{key}", None)
            if OF_AGENT + key in last:
                found[agent]["final_info"] = last[OF_AGENT + key]
                found[agent]["_final_info"] = last[f"_{OF_AGENT}{key}"]
        finals, ended = infos.pop("final_obs", None), infos.pop("_final_obs", None)
        infos.pop("_final_info", None)
        if finals is not None:
            for agent, lived in zip(self.possible_agents, before, strict=True):
                found[agent]["_final_obs"] = mask = ended & lived
                found[agent]["final_obs"] = each = np.full(len(finals), None, object)
                for row in np.flatnonzero(mask):
                    each[row] = finals[row][AGENTS][self._keys[agent]]
        return {**infos, **found}


def _missing(agent: Any, envs: npt.NDArray[np.intp]) -> ValueError:
    return ValueError(
        f"there are no actions for agent {agent!r}, who is alive in envs {envs.tolist()}. "
        "Nothing was sent to any env."
    )


def _checked(
    agent: Any,
    space: Space,
    values: Any,
    envs: npt.NDArray[np.intp],
    lives: npt.NDArray[np.bool_],
) -> Array:
    """The actions of an agent in these envs, as an array; whatever there is where it is dead."""
    shape = (len(envs), *(space.shape or ()))
    if isinstance(values, (list, tuple)) and any(value is None for value in values):
        none = np.array([value is None for value in values])
        if len(none) == len(lives) and (none & lives).any():
            raise _missing(agent, envs[none & lives])
        nothing = np.zeros(space.shape or (), space.dtype)
        values = [nothing if value is None else value for value in values]
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise _wrong(agent, ValueError, f"they are no array ({error})", shape) from error
    if array.shape != shape:
        raise _wrong(agent, ValueError, f"they have shape {array.shape}", shape)
    kind = np.dtype(space.dtype).kind
    if array.dtype.kind == "f" and kind in "iu":  # with NaN for the dead, as is the custom
        living = np.where(lives.reshape(-1, *[1] * (array.ndim - 1)), array, 0)
        if (living == np.round(living)).all():
            return living.astype(np.int64)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and kind != "f"):
        raise _wrong(agent, TypeError, f"they have dtype {array.dtype}", shape)
    return array


def _wrong(agent: Any, kind: type[Exception], what: str, shape: tuple[int, ...]) -> Exception:
    return kind(
        f"wrong actions of agent {agent!r}: {what}; {shape} is needed. Nothing was sent to any env."
    )
