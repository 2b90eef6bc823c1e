"""PettingZoo parallel envs over ``ShmVectorEnv``, with dicts by agent.

Envs are those of `PettingZoo's parallel API <https://pettingzoo.farama.org/api/parallel/>`_.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector.utils import batch_space, create_empty_array

from shmvec._arguments import (
    checked_env_fns,
    checked_options,
    checked_seeds,
    existing_env_ids,
    reset_arguments,
)
from shmvec.adapters._shared import STEP, AskedEnv, delegate, waiting_property
from shmvec.exchange import Autoreset, Options, OwnsProcesses
from shmvec.spaces import ARRAY_SPACES, batched, mapped
from shmvec.vector_env import ShmVectorEnv

__all__ = ["AgentRows", "ParallelVectorEnv"]

Agent: TypeAlias = Hashable
Array: TypeAlias = npt.NDArray[Any]
Space: TypeAlias = gym.Space[Any]
ByAgent: TypeAlias = dict[Any, Any]
# Observations, rewards, terminations, truncations, infos.
StepResults: TypeAlias = tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]

# Keys of an env's observation: its agents' observations, their rewards, and rows of flags.
AGENTS_KEY, REWARDS_KEY, FLAGS_KEY = "agents", "rewards", "flags"
TERMINATED, TRUNCATED, ALIVE = range(3)
AGENT_PREFIX = "agent "  # prefix of an agent's name, as a key of infos
_REQUIRED_METHODS = ("observation_space", "action_space", "reset", "step")


class ParallelVectorEnv(OwnsProcesses):
    """Steps PettingZoo parallel envs in worker processes, through shared memory.

    Arguments and results are dicts by agent, of arrays with a row for each env:
    ``(num_envs, ...)``. Each dict has all ``possible_agents``. The envs are
    ``pettingzoo.ParallelEnv``, or have its methods; PettingZoo need not be installed.

    An agent that is absent from an env, because it is dead or not yet born, has an observation of
    zeros, reward 0, and is neither terminated nor truncated: ``alive`` says which agents act. In
    the step in which an agent dies, it has its last observation and reward, and is terminated or
    truncated. Afterwards its actions are ignored, and may be left out.

    An episode is over when no agent is left. As with ``ShmVectorEnv``, ``autoreset_mode`` says who
    resets the env: the next step (NEXT_STEP), the same step (SAME_STEP; last observations are in
    ``infos[agent]["final_obs"]``), or you (DISABLED).

    Attributes:
        envs: The ``ShmVectorEnv`` below, for ``stats()``, ``restart()`` and the like.
        num_envs: Number of envs.
        possible_agents: All agents, the same in all envs. ``agents`` is the same, since all dicts
            have all of them.
        alive: By agent, bool ``(num_envs,)``: the envs in which it acts in the next step. An
            agent's results of a step are meaningful in envs in which it was alive before the step.
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
            **options: Options of ``ShmVectorEnv``: ``num_workers``, ``autoreset_mode``,
                ``context``, ``copy``, ``step_timeout``, ``faults`` and so on; for observations or
                actions without a fixed size ``shared_memory=False``.

        Raises:
            TypeError: An env_fn returns no parallel env.
            RuntimeError: Agents or their spaces differ between the envs.
            Exception: As ``ShmVectorEnv``.
        """
        functions: list[Any] = [
            partial(HostedParallelEnv, env, env_fn)
            for env, env_fn in enumerate(checked_env_fns(env_fns))
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
        self.possible_agents: list[Any] = everyone[0]
        self._keys = {agent: str(agent) for agent in self.possible_agents}
        self._same_step = Autoreset.of(self.envs.autoreset_mode).in_step
        self._reset_mask: Any = None  # mask of the reset in flight
        self._was_reset = np.zeros(self.num_envs, np.bool_)  # which envs were ever reset
        self._alive = np.zeros((len(self.possible_agents), self.num_envs), np.bool_)

    # These do not depend on agents.
    num_envs = delegate("envs", "num_envs")
    metadata = delegate("envs", "metadata")
    render_mode = delegate("envs", "render_mode")
    processes = delegate("envs", "processes")
    closed = delegate("envs", "closed")
    async_reset = delegate("envs", "async_reset")
    call = delegate("envs", "call")
    call_async = delegate("envs", "call_async")
    call_wait = delegate("envs", "call_wait")
    get_attr = delegate("envs", "get_attr")
    set_attr = delegate("envs", "set_attr")  # sets it on the outermost wrapper that has it
    render = delegate("envs", "render")
    close = delegate("envs", "close")

    @property
    def alive(self) -> ByAgent:
        """The envs in which each agent acts in the next step: bool ``(num_envs,)``, copies."""
        return dict(zip(self.possible_agents, self._alive.copy(), strict=True))

    @property
    def agents(self) -> list[Any]:
        """All of ``possible_agents``; ``alive`` says which of them act in which env."""
        return self.possible_agents

    @property
    def num_agents(self) -> int:
        """The number of ``possible_agents``."""
        return len(self.possible_agents)

    def single_observation_space(self, agent: Any) -> Space:
        """The observation space of an agent in one env."""
        return self._agent_space(self.envs.single_observation_space, AGENTS_KEY, agent)

    def observation_space(self, agent: Any) -> Space:
        """The observation space of an agent in all envs."""
        return self._agent_space(self.envs.observation_space, AGENTS_KEY, agent)

    def single_action_space(self, agent: Any) -> Space:
        """The action space of an agent in one env."""
        return self._agent_space(self.envs.single_action_space, None, agent)

    def action_space(self, agent: Any) -> Space:
        """The action space of an agent in all envs."""
        return self._agent_space(self.envs.action_space, None, agent)

    def _agent_space(self, space: Any, key: str | None, agent: Any) -> Space:
        if agent not in self._keys:
            raise ValueError(f"there is no agent {agent!r}; there are {self.possible_agents}")
        agent_space: Space = (space if key is None else space[key])[self._keys[agent]]
        return agent_space

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> tuple[ByAgent, ByAgent]:
        """Resets all envs; arguments and exceptions are those of :meth:`shmvec.ShmVectorEnv.reset`.

        Returns:
            Observations ``(num_envs, ...)`` by agent, and infos: by agent, Gymnasium's dict of
            arrays ``(num_envs, ...)``, each with a mask ``_key``.
        """
        mask = options.get("reset_mask") if isinstance(options, dict) else None
        return self._reset_results(self.envs.reset(seed=seed, options=options), mask)

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> None:
        """Starts to reset envs and does not wait; arguments are those of :meth:`reset`."""
        self.envs.reset_async(seed=seed, options=options)
        self._reset_mask = options.get("reset_mask") if isinstance(options, dict) else None

    def reset_wait(self, timeout: float | None = None) -> tuple[ByAgent, ByAgent]:
        """Waits for :meth:`reset_async`; raises TimeoutError after ``timeout`` seconds."""
        return self._reset_results(self.envs.reset_wait(timeout), self._reset_mask)

    def _reset_results(self, results: Any, mask: Any) -> tuple[ByAgent, ByAgent]:
        observations, infos = results
        parts = self._split_by_agent((observations, None, np.False_, np.False_, infos), mask)
        return parts[0], parts[4]

    def step(self, actions: Mapping[Any, Any], *, mask: Any = None) -> StepResults:
        """Steps all envs, in parallel; NEXT_STEP resets envs whose episodes are over instead.

        Args:
            actions: By agent, one action for each env: an array ``(num_envs, ...)`` or a list,
                batched as ``action_space(agent)`` says. In envs in which the agent is not alive,
                the action is ignored, and may be NaN or None. An agent that is alive in no env may
                be left out.
            mask: As for :meth:`shmvec.ShmVectorEnv.step`.

        Returns:
            By agent: observations ``(num_envs, ...)``; rewards, float64 ``(num_envs,)``;
            terminations and truncations, bool ``(num_envs,)``; infos, as :meth:`reset` returns
            them. Infos also have ``fault``, for envs whose fault a ``FaultPolicy`` has handled: all
            agents of such an env are truncated.

        Raises:
            ResetNeeded: An env has never been reset. Nothing was sent.
            ValueError: There is no such agent, or actions of one that is alive are missing. Nothing
                was sent.
            Exception: As :meth:`shmvec.ShmVectorEnv.step`.
        """
        stepped = mask if np.shape(mask) == (self.num_envs,) else None  # the core raises an error
        batch = self._batch_actions(actions, mask=stepped)
        return self._split_by_agent(self.envs.step(batch, mask=mask), mask)

    def step_async(self, actions: Mapping[Any, Any]) -> None:
        """Starts to step all envs and does not wait; see :meth:`step`."""
        self.envs.step_async(self._batch_actions(actions))

    def step_wait(self, timeout: float | None = None) -> StepResults:
        """Waits for :meth:`step_async`; see :meth:`shmvec.ShmVectorEnv.step_wait`."""
        return self._split_by_agent(self.envs.step_wait(timeout), None)

    def send(self, actions: Mapping[Any, Any], env_id: npt.ArrayLike | None = None) -> None:
        """Starts to step some envs; :meth:`recv` returns those that are ready first.

        Args:
            actions: As for :meth:`step`, one for each of these envs.
            env_id: Which envs, int ``(n,)``. None: all.
        """
        envs = existing_env_ids(env_id, self.num_envs)
        self.envs.send(self._batch_actions(actions, envs), envs)

    def recv(self, *, min_envs: int | None = None, timeout: float | None = None) -> StepResults:
        """Waits for a batch of envs; see :meth:`shmvec.ShmVectorEnv.recv`.

        Returns:
            As :meth:`step`, of the envs in ``infos["env_id"]``.
        """
        return self._split_by_agent(self.envs.recv(min_envs=min_envs, timeout=timeout), None)

    def as_rows(self, base_class: str = "gymnasium") -> Any:
        """A vector env in which each agent of each env is an env, for learners without agents.

        Args:
            base_class: "gymnasium": a ``gymnasium.vector.VectorEnv``, :class:`AgentRows`.
                "stable_baselines3": its ``VecEnv``, which needs envs that are reset in the step
                that ends an episode: ``ParallelVectorEnv(..., autoreset_mode="SameStep")``.

        Raises:
            ValueError: Agents have different spaces; there is no such base class;
                ``autoreset_mode`` is wrong, or ``batch_size`` is set.
            ImportError: Stable-Baselines3 is not installed.
        """
        rows = AgentRows(self)
        if base_class == "gymnasium":
            return rows
        if base_class != "stable_baselines3":
            raise ValueError(
                f'base_class must be "gymnasium" or "stable_baselines3", got {base_class!r}'
            )
        from shmvec.adapters.sb3 import AgentVecEnv

        return AgentVecEnv(rows)

    # ---- actions -----------------------------------------------------------------------------

    def _batch_actions(
        self, actions: Mapping[Any, Any], envs: Any = None, mask: Any = None
    ) -> dict[str, Any]:
        """Actions of these envs, for the core; only those of envs in the mask are checked."""
        envs = np.arange(self.num_envs) if envs is None else envs
        stepped = np.ones(len(envs), np.bool_) if mask is None else np.asarray(mask, np.bool_)
        if not isinstance(actions, Mapping):
            raise TypeError(
                f"actions must be a dict by agent of batches, got {type(actions).__name__}"
            )
        for agent in actions:
            if agent not in self._keys:
                raise ValueError(f"there is no agent {agent!r}; there are {self.possible_agents}")
        if not self._was_reset[envs[stepped]].all():
            never = [env for env in envs[stepped].tolist() if not self._was_reset[env]]
            raise ResetNeeded(f"envs {never} have never been reset. Nothing was sent to any env.")
        alive = self._alive[:, envs] & stepped
        batch = {}
        for agent, acts in zip(self.possible_agents, alive, strict=True):
            values = actions.get(agent)
            space = self.single_action_space(agent)
            if values is None:
                if acts.any():
                    raise _missing_actions_error(agent, envs[acts])
                values = create_empty_array(space, len(envs))
            elif isinstance(space, ARRAY_SPACES):
                values = _checked_actions(agent, space, values, envs, acts)
            batch[self._keys[agent]] = values
        return batch

    # ---- results -----------------------------------------------------------------------------

    def _split_by_agent(self, results: Any, mask: Any) -> StepResults:
        """The core's results by agent; envs outside ``mask`` keep their state."""
        observations, _, over, broken, infos = results
        if isinstance(infos.get("final_obs"), dict):  # as Gymnasium 1.0 returns them
            infos["final_obs"] = [_row_of(infos["final_obs"], row) for row in range(len(over))]
        envs, finals = infos.get("env_id"), infos.get("final_obs")
        rows = slice(None) if envs is None else envs
        by_agent = self._infos_by_agent(infos, self._alive[:, rows])
        rewards, flags = self._update_agents(observations, over, broken, finals, rows, mask)
        agents = self.possible_agents
        return (
            {agent: observations[AGENTS_KEY][key] for agent, key in self._keys.items()},
            dict(zip(agents, rewards, strict=True)),
            dict(zip(agents, flags[TERMINATED], strict=True)),
            dict(zip(agents, flags[TRUNCATED], strict=True)),
            by_agent,
        )

    def _update_agents(
        self, observations: Any, over: Any, broken: Any, finals: Any, rows: Any, mask: Any
    ) -> tuple[Array, Array]:
        """Rewards ``(agents, n)`` and flags ``(3, agents, n)``; notes which agents are alive."""
        was_alive = self._alive[:, rows]
        rewards = np.ascontiguousarray(observations[REWARDS_KEY].T)
        flags = np.ascontiguousarray(observations[FLAGS_KEY].transpose(1, 2, 0))
        if mask is not None:
            left_out = ~np.asarray(mask, np.bool_)
            rewards[:, left_out] = 0.0
            flags[:, :, left_out] = False
            flags[ALIVE][:, left_out] = was_alive[:, left_out]
            over, broken = over & mask, broken & mask
        if self._same_step and over.any():  # these results are of the next episode
            for row in np.flatnonzero(over):
                rewards[:, row] = finals[row][REWARDS_KEY]
                flags[:ALIVE, :, row] = finals[row][FLAGS_KEY][:ALIVE]
        if broken.any():  # after a fault an env has no results
            rewards[:, broken] = 0.0
            flags[TERMINATED][:, broken] = False
            flags[TRUNCATED][:, broken] = was_alive[:, broken]
            if not self._same_step:
                flags[ALIVE][:, broken] = False
        self._alive[:, rows] = flags[ALIVE]
        self._was_reset[rows] |= True if mask is None else mask
        return rewards, flags

    def _infos_by_agent(self, infos: dict[str, Any], was_alive: npt.NDArray[np.bool_]) -> ByAgent:
        by_agent: ByAgent = {agent: {} for agent in self.possible_agents}
        if not infos:
            return by_agent
        last = infos.pop("final_info", {})
        for agent, key in self._keys.items():
            by_agent[agent] = infos.pop(AGENT_PREFIX + key, by_agent[agent])
            infos.pop(f"_{AGENT_PREFIX}{key}", None)
            if AGENT_PREFIX + key in last:
                by_agent[agent]["final_info"] = last[AGENT_PREFIX + key]
                by_agent[agent]["_final_info"] = last[f"_{AGENT_PREFIX}{key}"]
        finals, ended = infos.pop("final_obs", None), infos.pop("_final_obs", None)
        infos.pop("_final_info", None)
        if finals is not None:
            for agent, alive in zip(self.possible_agents, was_alive, strict=True):
                by_agent[agent]["_final_obs"] = mask = ended & alive
                by_agent[agent]["final_obs"] = finals_of_agent = np.full(len(finals), None, object)
                for row in np.flatnonzero(mask):
                    finals_of_agent[row] = finals[row][AGENTS_KEY][self._keys[agent]]
        return {**infos, **by_agent}


class AgentRows(OwnsProcesses, gym.vector.VectorEnv[Any, Any, Any]):
    """Agents as rows: agent ``a`` of env ``e`` has row ``e * num_agents + a``.

    :meth:`ParallelVectorEnv.as_rows` makes it. It is like the result of SuperSuit's
    ``pettingzoo_env_to_vec_env_v1`` and ``concat_vec_envs_v1``. All rows of an env begin and end an
    episode together. An agent that dies before the others, or is not born yet, gets zeros and
    reward 0 until all are gone (SuperSuit's ``black_death``). Then its row is terminated or
    truncated as the agent was, or terminated if the agent was never born. ``alive`` says which rows
    have an agent that acts.

    Attributes:
        parallel: The :class:`ParallelVectorEnv` below.
        num_envs: Number of rows.
        metadata: The first env's, with ``autoreset_mode``.
        render_mode: The first env's.
        waiting: Whether a step was started and not waited for.
    """

    def __init__(self, parallel: ParallelVectorEnv) -> None:
        """See :meth:`ParallelVectorEnv.as_rows`."""
        first = parallel.possible_agents[0]
        for kind in ("observation", "action"):
            space_of = getattr(parallel, f"single_{kind}_space")
            for agent in parallel.possible_agents:
                if space_of(agent) != space_of(first):
                    raise ValueError(
                        f"rows must have one {kind} space, but that of agent {agent!r} is "
                        f"{space_of(agent)}, and that of {first!r} {space_of(first)}. SuperSuit's "
                        f"pad_{kind}{'s' if kind == 'observation' else '_space'}_v0 makes them one"
                    )
        if parallel.envs.batch_size is not None:
            raise ValueError("rows are stepped all at once: leave batch_size out")
        self.parallel = parallel
        self._exchange = parallel.envs.exchange
        self.num_envs = parallel.num_envs * parallel.num_agents
        self.single_observation_space = parallel.single_observation_space(first)
        self.single_action_space = parallel.single_action_space(first)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = parallel.metadata
        self.render_mode = parallel.render_mode
        # Whether agents were terminated and truncated in the present episode of their env.
        self._ended = np.zeros((2, parallel.num_agents, parallel.num_envs), np.bool_)

    closed = delegate("parallel", "closed")
    render = delegate("parallel", "render")
    close = delegate("parallel", "close")
    waiting = waiting_property

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """The rows whose agents act in the next step: bool ``(rows,)``, a copy."""
        return self._to_rows(self.parallel._alive)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, in parallel.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one (or None) for each row; an env
                gets the seed of its first row.
            options: Passed to every env's ``reset``. ``options["reset_mask"]``, bool ``(rows,)``,
                is not passed: it says which envs, with all their rows, are reset.

        Raises:
            ValueError: The number of seeds is wrong; the mask has another shape, or has only some
                rows of an env.
            Exception: As :meth:`ParallelVectorEnv.reset`.
        """
        observations, infos = self.reset_rows(seed=seed, options=options)
        return observations, self._gather_infos(infos)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Steps all envs, in parallel; raises as :meth:`ParallelVectorEnv.step`.

        Args:
            actions: One for each row, batched as ``action_space`` says, or a list. Those of rows
                that are not alive are ignored.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Starts to step all envs and does not wait; see :meth:`step`."""
        parallel = self.parallel
        space, count = self.single_action_space, parallel.num_agents
        if isinstance(actions, list):
            actions = batched(space, actions)

        def rows_from(first: int) -> Any:
            return mapped(space, lambda part: part[first::count], actions)

        mapped(space, self._check_rows, actions)
        by_agent = {agent: rows_from(row) for row, agent in enumerate(parallel.possible_agents)}
        self._exchange.begin(STEP, parallel._batch_actions(by_agent))

    def _check_rows(self, part: Any) -> None:
        if len(part) != self.num_envs:
            raise ValueError(
                f"there are {len(part)} actions for {self.num_envs} rows. Nothing was sent."
            )

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Waits for the step that :meth:`step_async` has started."""
        *results, infos = self.finish_rows()
        return *results, self._gather_infos(infos)

    def finish_rows(self) -> tuple[Any, Array, Array, Array, list[dict[str, Any]]]:
        """Waits as :meth:`step_wait`; infos are one dict a row."""
        observations, _, over, broken, infos = self._exchange.finish(STEP)
        finals = [info.get("final_obs") for info in infos] if over.any() else None
        rewards, flags = self.parallel._update_agents(
            observations, over, broken, finals, slice(None), None
        )
        self._ended |= flags[: TRUNCATED + 1]
        ends = self._ended & (over | broken)
        ends[TERMINATED] |= (over | broken) & ~ends.any(0)
        self._ended[:, :, over | broken] = False
        rows = self._observation_rows(observations), *map(self._to_rows, (rewards, *ends))
        return *rows, self._row_infos(infos)

    def reset_rows(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Resets as :meth:`reset`; infos are one dict a row."""
        parallel, count = self.parallel, self.parallel.num_agents
        reset: Array = np.ones(parallel.num_envs, np.bool_)
        if isinstance(options, dict) and "reset_mask" in options:
            row_mask = np.asarray(options["reset_mask"])
            if row_mask.shape != (self.num_envs,) or row_mask.dtype != np.bool_:
                raise ValueError(
                    f"reset_mask must be an array of bools with shape {(self.num_envs,)}"
                )
            reset = np.asarray(row_mask.reshape(-1, count).any(1))
            if (reset != row_mask.reshape(-1, count).all(1)).any():
                raise ValueError("reset_mask must have all rows of an env, or none of them")
            options = {**options, "reset_mask": reset}
        elif options is not None and not isinstance(options, dict):
            options = (checked_options(options, self.num_envs) or [])[::count]
        if not isinstance(seed, int | np.integer | None):
            seed = (checked_seeds(seed, self.num_envs) or [])[::count]
        arguments = reset_arguments(parallel.num_envs, seed, options)
        self._exchange.drop(STEP)
        observations, reset_infos = self._exchange.reset(*arguments)
        parallel._update_agents(observations, np.False_, np.False_, None, slice(None), reset)
        self._ended[:, :, reset] = False
        infos: list[dict[str, Any]] = [{} for _ in range(parallel.num_envs)]
        for env, info in zip(arguments[0].tolist(), reset_infos, strict=True):
            infos[env] = info
        return self._observation_rows(observations), self._row_infos(infos)

    def __del__(self) -> None:
        """Leaves the envs open: they belong to ``parallel``."""

    def _observation_rows(self, observations: Any) -> Any:
        parts = [observations[AGENTS_KEY][key] for key in self.parallel._keys.values()]
        return mapped(self.single_observation_space, _interleave, *parts)

    def _to_rows(self, by_agent: Array) -> Array:
        return by_agent.T.reshape(self.num_envs)  # a copy, unless there is one agent

    def _row_infos(self, infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """An info for each row: its agent's, and the env's entries that are not by agent."""
        keys = list(self.parallel._keys.values())
        rows = []
        for info in infos:
            final, last = info.pop("final_obs", None), info.pop("final_info", {})
            names = [AGENT_PREFIX + key for key in keys]
            agent_infos = [(info.pop(name, {}), last.pop(name, {})) for name in names]
            for key, (agent_info, agent_final_info) in zip(keys, agent_infos, strict=True):
                row = {**agent_info, **info}
                if final is not None:
                    row["final_obs"] = final[AGENTS_KEY][key]
                    row["final_info"] = {**agent_final_info, **last}
                rows.append(row)
        return rows

    def _gather_infos(self, infos: list[dict[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for row, info in enumerate(infos):
            if info:
                result = self._add_info(result, info, row)
        return result


def _interleave(*parts: Any) -> Any:
    """Merges the batches of agents into one, ordered by env and then by agent."""
    if all(isinstance(one, np.ndarray) for one in parts):
        return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])
    return tuple(value for values in zip(*parts, strict=True) for value in values)


def _row_of(batch: dict[str, Any], row: int) -> dict[str, Any]:
    """One env's dict, out of Gymnasium's dict of arrays and of masks ``_key``."""
    return {
        key: _row_of(values, row) if isinstance(values, dict) else values[row]
        for key, values in batch.items()
        if f"_{key}" in batch
    }


def _missing_actions_error(agent: Any, envs: npt.NDArray[np.intp]) -> ValueError:
    return ValueError(
        f"there are no actions for agent {agent!r}, which is alive in envs {envs.tolist()}. "
        "Nothing was sent to any env."
    )


def _checked_actions(
    agent: Any,
    space: Space,
    values: Any,
    envs: npt.NDArray[np.intp],
    acts: npt.NDArray[np.bool_],
) -> Array:
    """The actions of an agent in these envs, as an array; values of dead agents are arbitrary."""
    shape = (len(envs), *(space.shape or ()))
    if isinstance(values, (list, tuple)) and any(value is None for value in values):
        none = np.array([value is None for value in values])
        if len(none) == len(acts) and (none & acts).any():
            raise _missing_actions_error(agent, envs[none & acts])
        zero = np.zeros(space.shape or (), space.dtype)
        values = [zero if value is None else value for value in values]
    try:
        array = np.asarray(values)
        if len(array) == len(envs) and array.size == np.prod(shape):  # numbers for Box((1,))
            array = array.reshape(shape)
    except (ValueError, TypeError) as error:
        raise _action_error(agent, ValueError, f"they are no array ({error})", shape) from error
    if array.shape != shape:
        raise _action_error(agent, ValueError, f"they have shape {array.shape}", shape)
    kind = np.dtype(space.dtype).kind
    if array.dtype.kind == "f" and kind in "iu":  # floats, since NaN stands for dead agents
        living = np.where(acts.reshape(-1, *[1] * (array.ndim - 1)), array, 0)
        if (living == np.round(living)).all():
            return living.astype(np.int64)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and kind != "f"):
        raise _action_error(agent, TypeError, f"they have dtype {array.dtype}", shape)
    return array


def _action_error(
    agent: Any, error_type: type[Exception], problem: str, shape: tuple[int, ...]
) -> Exception:
    return error_type(
        f"wrong actions of agent {agent!r}: {problem}; {shape} is needed. Nothing was sent to any "
        "env."
    )


# ---- in a worker ---------------------------------------------------------------------------------


class HostedParallelEnv(AskedEnv):
    """A parallel env as one Gymnasium env, whose observation holds the results of all agents."""

    def __init__(self, index: int, env_fn: Callable[[], Any]) -> None:
        """Builds the env."""
        env = env_fn()
        name = f"env_fns[{index}]() returned a {type(env).__name__}"
        missing = [each for each in _REQUIRED_METHODS if not callable(getattr(env, each, None))]
        if missing:
            raise TypeError(
                f"{name} without the methods {', '.join(missing)}; it must return a "
                "pettingzoo.ParallelEnv (others become one by pettingzoo.utils.aec_to_parallel)"
            )
        if not hasattr(env, "possible_agents"):
            raise TypeError(
                f"{name} without possible_agents. PettingZoo does not require it, but arrays have "
                "a row for every agent that may ever appear: set it to the agents' names, in the "
                "env or in a wrapper"
            )
        self.agents = self.shmvec_agents = list(env.possible_agents)
        self._keys = {agent: str(agent) for agent in self.agents}
        if not self.agents or len(set(self._keys.values())) < len(self.agents):
            raise ValueError(f"possible_agents must be distinct names, at least one: {self.agents}")
        self._indices = {agent: index for index, agent in enumerate(self.agents)}
        count = len(self.agents)
        spaces_by_key = {key: env.observation_space(agent) for agent, key in self._keys.items()}
        self._absent_observations = {
            key: _absent_observation(space) for key, space in spaces_by_key.items()
        }
        self._acting: list[tuple[Any, str]] = []  # agents of the next step, with their keys
        super().__init__(
            env,
            spaces.Dict(
                {
                    AGENTS_KEY: spaces.Dict(spaces_by_key),
                    REWARDS_KEY: spaces.Box(-np.inf, np.inf, (count,), np.float64),
                    FLAGS_KEY: spaces.Box(0, 1, (3, count), np.bool_),
                }
            ),
            spaces.Dict({key: env.action_space(agent) for agent, key in self._keys.items()}),
        )

    def reset(self, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        """Resets the env."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._merge(observations, {}, {}, {}), self._merge_infos(infos)

    def step(self, actions: dict[str, Any]) -> Any:
        """Steps the env, with the actions of the agents that are alive."""
        acting = {agent: actions[key] for agent, key in self._acting}
        *results, infos = self.env.step(acting)
        if len(results) != 4:
            raise ValueError(
                f"step() returned {len(results) + 1} values; expected (observations, rewards, "
                "terminations, truncations, infos)"
            )
        merged = self._merge(*results)
        return merged, 0.0, not self._acting, False, self._merge_infos(infos)

    def _merge(
        self,
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
    ) -> dict[str, Any]:
        """The results of all agents as one observation; notes which agents act next."""
        keys, indices, count = self._keys, self._indices, len(self.agents)
        agent_observations = self._absent_observations.copy()
        reward_list = [0.0] * count
        terminated, truncated, alive = [False] * count, [False] * count, [False] * count
        try:
            for agent, observation in observations.items():
                agent_observations[keys[agent]] = observation
            for agent, reward in rewards.items():
                reward_list[indices[agent]] = reward
            for agent, flag in terminations.items():
                terminated[indices[agent]] = bool(flag)
            for agent, flag in truncations.items():
                truncated[indices[agent]] = bool(flag)
            acting = []
            # If the env has no list of agents, those with an observation are alive.
            for agent in getattr(self.env, "agents", observations):
                index = indices[agent]
                if terminated[index] or truncated[index]:
                    continue
                if agent not in observations:
                    raise ValueError(f"the env returned no observation of the live agent {agent!r}")
                alive[index] = True
                acting.append((agent, keys[agent]))
        except KeyError as error:
            raise self._unknown_agent(agent) from error
        self._acting = acting
        return {
            AGENTS_KEY: agent_observations,
            REWARDS_KEY: np.array(reward_list, np.float64),
            FLAGS_KEY: np.array((terminated, truncated, alive)),
        }

    def _merge_infos(self, infos: Mapping[Any, Any] | None) -> dict[str, Any]:
        merged = {}
        for agent, info in (infos or {}).items():
            if agent not in self._keys:
                raise self._unknown_agent(agent)
            if info:
                merged[AGENT_PREFIX + self._keys[agent]] = info
        return merged

    def _unknown_agent(self, agent: Any) -> ValueError:
        return ValueError(
            f"the env returned results of an agent {agent!r} that is not in possible_agents, "
            f"{self.agents}"
        )

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets an attribute of the env, or of the wrapper that has it."""
        holder = self.env
        while name not in getattr(holder, "__dict__", ()) and hasattr(holder, "env"):
            holder = holder.env
        setattr(holder if hasattr(holder, name) else self.env, name, value)


def _absent_observation(space: Space) -> Any:
    """The observation of an absent agent: zeros, where the space has arrays."""
    empty = create_empty_array(space, 1)
    return mapped(space, lambda values: None if values is None else values[0], empty)
