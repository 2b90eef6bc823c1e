"""PettingZoo parallel envs over ``ShmVectorEnv``: dicts of agents in and out, a slab an agent.

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
from shmvec.adapters._shared import STEP, forwarded, waiting
from shmvec.exchange import Autoreset, HostedEnv, Options, OwnsProcesses
from shmvec.spaces import batched
from shmvec.vector_env import ShmVectorEnv

__all__ = ["AgentRows", "ParallelVectorEnv"]

Agent: TypeAlias = Hashable
Array: TypeAlias = npt.NDArray[Any]
Space: TypeAlias = gym.Space[Any]
ByAgent: TypeAlias = dict[Any, Any]
# Observations, rewards, terminations, truncations, infos.
StepResults: TypeAlias = tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]

# Parts of an env's observation: its agents' observations, their rewards, and rows of flags.
AGENTS, REWARDS, FLAGS = "agents", "rewards", "flags"
TERMINATED, TRUNCATED, ALIVE = range(3)
OF_AGENT = "agent "  # prefix of an agent's name, as a key of infos
_NEEDED = ("observation_space", "action_space", "reset", "step")


class ParallelVectorEnv(OwnsProcesses):
    """Steps PettingZoo parallel envs in worker processes, through shared memory.

    Everything is a dict by agent, of arrays with a row for each env: ``(num_envs, ...)``. All dicts
    have all ``possible_agents``. The envs are ``pettingzoo.ParallelEnv``, or have its methods;
    PettingZoo need not be installed.

    An agent that is absent from an env, because it is dead or not yet born, has an observation of
    zeros, reward 0, and is neither terminated nor truncated: ``alive`` says which agents act.
    In the step in which an agent dies it has its last observation and reward, and is terminated or
    truncated. Its actions are ignored from then on, and may be left out.

    An episode is over when no agent is left. What follows is as for ``ShmVectorEnv``, by
    ``autoreset_mode``: the next step resets the env (NEXT_STEP), this step has reset it already
    (SAME_STEP; last observations are in ``infos[agent]["final_obs"]``), or you do (DISABLED).

    Attributes:
        envs: The ``ShmVectorEnv`` behind it, for ``stats()``, ``restart()`` and the like.
        num_envs: Number of envs.
        possible_agents: Agents that there may be, the same in all envs. ``agents`` is the same,
            since all dicts have all of them.
        alive: By agent, bool ``(num_envs,)``: the envs in which it acts in the next step. An
            agent's results of a step are of use in the envs in which it was alive before the step.
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
        self.possible_agents: list[Any] = everyone[0]
        self._keys = {agent: str(agent) for agent in self.possible_agents}
        self._same_step = Autoreset.of(self.envs.autoreset_mode).in_step
        self._reset_mask: Any = None  # mask of the reset in flight
        self._begun = np.zeros(self.num_envs, np.bool_)  # which envs were ever reset
        self._alive = np.zeros((len(self.possible_agents), self.num_envs), np.bool_)

    # Methods that do not depend on agents are those of ``ShmVectorEnv``.
    num_envs = forwarded("envs", "num_envs")
    metadata = forwarded("envs", "metadata")
    render_mode = forwarded("envs", "render_mode")
    processes = forwarded("envs", "processes")
    closed = forwarded("envs", "closed")
    async_reset = forwarded("envs", "async_reset")
    call = forwarded("envs", "call")
    call_async = forwarded("envs", "call_async")
    call_wait = forwarded("envs", "call_wait")
    get_attr = forwarded("envs", "get_attr")
    set_attr = forwarded("envs", "set_attr")  # sets it on the outermost wrapper that has it
    render = forwarded("envs", "render")
    close = forwarded("envs", "close")

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
        """Resets all envs; arguments and exceptions are those of :meth:`shmvec.ShmVectorEnv.reset`.

        Returns:
            Observations ``(num_envs, ...)`` by agent, and infos: by agent, Gymnasium's dict of
            arrays ``(num_envs, ...)``, each with a mask ``_key``.
        """
        mask = options.get("reset_mask") if isinstance(options, dict) else None
        return self._begun_anew(self.envs.reset(seed=seed, options=options), mask)

    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> None:
        """Starts to reset envs and does not wait; arguments are those of :meth:`reset`."""
        self.envs.reset_async(seed=seed, options=options)
        self._reset_mask = options.get("reset_mask") if isinstance(options, dict) else None

    def reset_wait(self, timeout: float | None = None) -> tuple[ByAgent, ByAgent]:
        """Waits for :meth:`reset_async`; raises TimeoutError after ``timeout`` seconds."""
        return self._begun_anew(self.envs.reset_wait(timeout), self._reset_mask)

    def _begun_anew(self, results: Any, mask: Any) -> tuple[ByAgent, ByAgent]:
        observations, infos = results
        nothing = np.zeros(len(observations[FLAGS]), np.bool_)
        parts = self._taken_apart((observations, None, nothing, nothing, infos), mask)
        return parts[0], parts[4]

    def step(self, actions: Mapping[Any, Any], *, mask: Any = None) -> StepResults:
        """Steps all envs, in parallel. An env whose episode was over is reset instead (NEXT_STEP).

        Args:
            actions: By agent, one action for each env: an array ``(num_envs, ...)`` or a list,
                batched as ``action_space(agent)`` says. In envs in which the agent is not alive the
                action is ignored, and may be NaN or None; an agent that is alive in no env may be
                left out.
            mask: As for :meth:`shmvec.ShmVectorEnv.step`.

        Returns:
            By agent: observations ``(num_envs, ...)``; rewards, float64 ``(num_envs,)``;
            terminations and truncations, bool ``(num_envs,)``; infos, as :meth:`reset` returns
            them. Beside the agents, infos have ``fault`` for envs whose fault a ``FaultPolicy`` has
            handled: all agents of such an env are truncated.

        Raises:
            ResetNeeded: An env has never been reset. Nothing was sent.
            ValueError: There is no such agent, or actions of one that is alive are missing. Nothing
                was sent.
            Exception: As :meth:`shmvec.ShmVectorEnv.step`.
        """
        asked = np.ones(self.num_envs, np.bool_)
        if mask is not None and np.shape(mask) == asked.shape:  # else the core raises an error
            asked = np.asarray(mask, np.bool_)
        batch = self._batched(actions, np.arange(self.num_envs), asked)
        return self._taken_apart(self.envs.step(batch, mask=mask), mask)

    def step_async(self, actions: Mapping[Any, Any]) -> None:
        """Starts to step all envs and does not wait; takes and raises what :meth:`step` does."""
        everyone = np.arange(self.num_envs)
        self.envs.step_async(self._batched(actions, everyone, np.ones(self.num_envs, np.bool_)))

    def step_wait(self, timeout: float | None = None) -> StepResults:
        """Waits for :meth:`step_async`; see :meth:`shmvec.ShmVectorEnv.step_wait`."""
        return self._taken_apart(self.envs.step_wait(timeout), None)

    def send(self, actions: Mapping[Any, Any], env_id: npt.ArrayLike | None = None) -> None:
        """Starts to step some envs; :meth:`recv` returns those that are ready first.

        Args:
            actions: As for :meth:`step`, one for each of these envs.
            env_id: Which envs, int ``(n,)``. None: all.
        """
        envs = existing_env_ids(env_id, self.num_envs)
        self.envs.send(self._batched(actions, envs, np.ones(len(envs), np.bool_)), envs)

    def recv(self, *, min_envs: int | None = None, timeout: float | None = None) -> StepResults:
        """Waits for a batch of envs; see :meth:`shmvec.ShmVectorEnv.recv`.

        Returns:
            As :meth:`step`, of the envs in ``infos["env_id"]``.
        """
        return self._taken_apart(self.envs.recv(min_envs=min_envs, timeout=timeout), None)

    def as_rows(self, base_class: str = "gymnasium") -> Any:
        """Every agent of every env as an env of its own, for learners without support for agents.

        Args:
            base_class: "gymnasium": as a ``gymnasium.vector.VectorEnv``, :class:`AgentRows`.
                "stable_baselines3": as its ``VecEnv``, for which envs must be reset in the step
                that ends an episode: ``ParallelVectorEnv(..., autoreset_mode="SameStep")``.

        Raises:
            ValueError: Agents have different spaces; there is no such base class; another
                ``autoreset_mode``, or ``batch_size``.
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

    def _batched(
        self, actions: Mapping[Any, Any], envs: npt.NDArray[np.intp], asked: npt.NDArray[np.bool_]
    ) -> dict[str, Any]:
        """Actions of these envs as the core takes them; only those of asked envs are checked."""
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
        """The core's results by agent; envs that were not asked keep their state."""
        observations, _, over, broken, infos = results
        if isinstance(infos.get("final_obs"), dict):  # taken apart, by Gymnasium 1.0 alone
            infos["final_obs"] = [_row_of(infos["final_obs"], row) for row in range(len(over))]
        envs, finals = infos.get("env_id"), infos.get("final_obs")
        rows = slice(None) if envs is None else envs
        by_agent = self._infos_by_agent(infos, self._alive[:, rows])
        rewards, flags = self._agents_results(observations, over, broken, finals, rows, mask)
        agents = self.possible_agents
        return (
            {agent: observations[AGENTS][key] for agent, key in self._keys.items()},
            dict(zip(agents, rewards, strict=True)),
            dict(zip(agents, flags[TERMINATED], strict=True)),
            dict(zip(agents, flags[TRUNCATED], strict=True)),
            by_agent,
        )

    def _agents_results(
        self, observations: Any, over: Any, broken: Any, finals: Any, rows: Any, mask: Any
    ) -> tuple[Array, Array]:
        """Rewards ``(agents, n)`` and flags ``(3, agents, n)``; notes which agents are alive."""
        before = self._alive[:, rows]
        rewards = np.ascontiguousarray(observations[REWARDS].T)
        flags = np.ascontiguousarray(observations[FLAGS].transpose(1, 2, 0))
        if mask is not None:
            left_out = ~np.asarray(mask, np.bool_)
            rewards[:, left_out] = 0.0
            flags[:, :, left_out] = False
            flags[ALIVE][:, left_out] = before[:, left_out]
            over, broken = over & mask, broken & mask
        if self._same_step and over.any():  # these results are of the next episode
            for row in np.flatnonzero(over):
                rewards[:, row] = finals[row][REWARDS]
                flags[:ALIVE, :, row] = finals[row][FLAGS][:ALIVE]
        if broken.any():  # after a fault there are no results of the env
            rewards[:, broken] = 0.0
            flags[TERMINATED][:, broken] = False
            flags[TRUNCATED][:, broken] = before[:, broken]
            if not self._same_step:
                flags[ALIVE][:, broken] = False
        self._alive[:, rows] = flags[ALIVE]
        self._begun[rows] |= True if mask is None else mask
        return rewards, flags

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


class AgentRows(OwnsProcesses, gym.vector.VectorEnv[Any, Any, Any]):
    """Agents as rows: agent ``a`` of env ``e`` has row ``e * num_agents + a``.

    :meth:`ParallelVectorEnv.as_rows` makes it; SuperSuit's ``pettingzoo_env_to_vec_env_v1`` and
    ``concat_vec_envs_v1`` make the same of parallel envs. All rows of an env begin and end an
    episode together. An agent that dies before the others, or is not born yet, gets zeros and
    reward 0 until all are gone (SuperSuit's ``black_death``); then its row is terminated or
    truncated as the agent was, or terminated if the agent never was born. ``alive`` says which rows
    have an agent that acts.

    Attributes:
        parallel: The :class:`ParallelVectorEnv` behind it.
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
            raise ValueError("rows are stepped all together: leave batch_size out")
        self.parallel = parallel
        self._exchange = parallel.envs.exchange
        self.num_envs = parallel.num_envs * parallel.num_agents
        self.single_observation_space = parallel.single_observation_space(first)
        self.single_action_space = parallel.single_action_space(first)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = parallel.metadata
        self.render_mode = parallel.render_mode
        # Whether agents were terminated and truncated, kept until all agents of their env are gone.
        self._ended = np.zeros((2, parallel.num_agents, parallel.num_envs), np.bool_)

    closed = forwarded("parallel", "closed")
    render = forwarded("parallel", "render")
    close = forwarded("parallel", "close")
    waiting = waiting

    @property
    def alive(self) -> npt.NDArray[np.bool_]:
        """The rows whose agents act in the next step: bool ``(rows,)``, a copy."""
        return self._in_rows(self.parallel._alive)

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
                is not passed: only the envs that it marks, with all their rows, are reset.

        Raises:
            ValueError: The number of seeds is wrong; the mask has another shape, or parts the rows
                of an env.
            Exception: As :meth:`ParallelVectorEnv.reset`.
        """
        observations, infos = self.reset_rows(seed=seed, options=options)
        return observations, self._gathered(infos)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Steps all envs, in parallel; raises what :meth:`ParallelVectorEnv.step` does.

        Args:
            actions: One for each row, batched as ``action_space`` says, or a list. Those of rows
                that are not alive are ignored.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Starts to step all envs and does not wait; :meth:`step` has the arguments."""
        parallel = self.parallel
        space, count = self.single_action_space, parallel.num_agents
        if isinstance(actions, list):
            actions = batched(space, actions)
        by_agent = {
            agent: _rows_of(space, actions, slice(index, None, count), self.num_envs)
            for index, agent in enumerate(parallel.possible_agents)
        }
        everyone = np.arange(parallel.num_envs)
        asked = np.ones(len(everyone), np.bool_)
        self._exchange.begin(STEP, parallel._batched(by_agent, everyone, asked))

    def step_wait(self) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Waits for the step that :meth:`step_async` has started."""
        *results, infos = self.finish_rows()
        return *results, self._gathered(infos)

    def finish_rows(self) -> tuple[Any, Array, Array, Array, list[dict[str, Any]]]:
        """Waits as :meth:`step_wait`; infos are one dict a row."""
        observations, _, over, broken, infos = self._exchange.finish(STEP)
        finals = [info.get("final_obs") for info in infos] if over.any() else None
        rewards, flags = self.parallel._agents_results(
            observations, over, broken, finals, slice(None), None
        )
        self._ended |= flags[: TRUNCATED + 1]
        ends = self._ended & (over | broken)
        ends[TERMINATED] |= (over | broken) & ~ends.any(0)
        self._ended[:, :, over | broken] = False
        rows = self._observed(observations), self._in_rows(rewards), *map(self._in_rows, ends)
        return *rows, self._row_infos(infos)

    def reset_rows(
        self, *, seed: int | Sequence[int | None] | None = None, options: Options = None
    ) -> tuple[Any, list[dict[str, Any]]]:
        """Resets as :meth:`reset`; infos are one dict a row."""
        parallel, count = self.parallel, self.parallel.num_agents
        reset: Array = np.ones(parallel.num_envs, np.bool_)
        if isinstance(options, dict) and "reset_mask" in options:
            marked = np.asarray(options["reset_mask"])
            if marked.shape != (self.num_envs,) or marked.dtype != np.bool_:
                raise ValueError(
                    f"reset_mask must be an array of bools with shape {(self.num_envs,)}"
                )
            reset = np.asarray(marked.reshape(-1, count).any(1))
            if (reset != marked.reshape(-1, count).all(1)).any():
                raise ValueError("reset_mask parts the rows of an env, which are reset together")
            options = {**options, "reset_mask": reset}
        elif options is not None and not isinstance(options, dict):
            options = (checked_options(options, self.num_envs) or [])[::count]
        if not isinstance(seed, int | np.integer | None):
            seed = (checked_seeds(seed, self.num_envs) or [])[::count]
        arguments = reset_arguments(parallel.num_envs, seed, options)
        self._exchange.drop(STEP)
        observations, some = self._exchange.reset(*arguments)
        nothing = np.zeros(parallel.num_envs, np.bool_)
        parallel._agents_results(observations, nothing, nothing, None, slice(None), reset)
        self._ended[:, :, reset] = False
        infos: list[dict[str, Any]] = [{} for _ in range(parallel.num_envs)]
        for env, info in zip(arguments[0].tolist(), some, strict=True):
            infos[env] = info
        return self._observed(observations), self._row_infos(infos)

    def __del__(self) -> None:
        """Leaves the envs open: they belong to ``parallel``."""

    def _observed(self, observations: Any) -> Any:
        parts = [observations[AGENTS][key] for key in self.parallel._keys.values()]
        return _interleaved(self.single_observation_space, parts)

    def _in_rows(self, by_agent: Array) -> Array:
        return by_agent.T.reshape(self.num_envs)  # a copy, unless there is one agent

    def _row_infos(self, infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """An info for each row: its agent's, and the entries of the env beside the agents."""
        keys = list(self.parallel._keys.values())
        rows = []
        for info in infos:
            final, last = info.pop("final_obs", None), info.pop("final_info", {})
            own = [(info.pop(OF_AGENT + key, {}), last.pop(OF_AGENT + key, {})) for key in keys]
            for key, (one, final_one) in zip(keys, own, strict=True):
                row = {**one, **info}
                if final is not None:
                    row["final_obs"] = final[AGENTS][key]
                    row["final_info"] = {**final_one, **last}
                rows.append(row)
        return rows

    def _gathered(self, infos: list[dict[str, Any]]) -> dict[str, Any]:
        gathered: dict[str, Any] = {}
        for row, info in enumerate(infos):
            if info:
                gathered = self._add_info(gathered, info, row)
        return gathered


def _rows_of(space: Space, batch: Any, rows: slice, number: int) -> Any:
    """Some rows of a batch that must have ``number`` rows."""
    if isinstance(space, spaces.Dict):
        return {key: _rows_of(part, batch[key], rows, number) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, batch, strict=True)
        return tuple(_rows_of(part, one, rows, number) for part, one in parts)
    if len(batch) != number:
        raise ValueError(f"there are {len(batch)} actions for {number} rows. Nothing was sent.")
    return batch[rows]


def _interleaved(space: Space, parts: list[Any]) -> Any:
    """Merges the batches of agents into one, in which the agents of an env follow each other."""
    if isinstance(space, spaces.Dict):
        return {key: _interleaved(part, [one[key] for one in parts]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        each = enumerate(space.spaces)
        return tuple(_interleaved(part, [one[place] for one in parts]) for place, part in each)
    if all(isinstance(one, np.ndarray) for one in parts):
        return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])
    return tuple(value for values in zip(*parts, strict=True) for value in values)


def _row_of(gathered: dict[str, Any], row: int) -> dict[str, Any]:
    """One env's dict, of which Gymnasium has made a dict of arrays and of masks ``_key``."""
    return {
        key: _row_of(values, row) if isinstance(values, dict) else values[row]
        for key, values in gathered.items()
        if f"_{key}" in gathered
    }


def _missing(agent: Any, envs: npt.NDArray[np.intp]) -> ValueError:
    return ValueError(
        f"there are no actions for agent {agent!r}, which is alive in envs {envs.tolist()}. "
        "Nothing was sent to any env."
    )


def _checked(
    agent: Any,
    space: Space,
    values: Any,
    envs: npt.NDArray[np.intp],
    lives: npt.NDArray[np.bool_],
) -> Array:
    """The actions of an agent in these envs, as an array; its value is arbitrary for the dead."""
    shape = (len(envs), *(space.shape or ()))
    if isinstance(values, (list, tuple)) and any(value is None for value in values):
        none = np.array([value is None for value in values])
        if len(none) == len(lives) and (none & lives).any():
            raise _missing(agent, envs[none & lives])
        nothing = np.zeros(space.shape or (), space.dtype)
        values = [nothing if value is None else value for value in values]
    try:
        array = np.asarray(values)
        if len(array) == len(envs) and array.size == np.prod(shape):  # as numbers for Box((1,))
            array = array.reshape(shape)
    except (ValueError, TypeError) as error:
        raise _wrong(agent, ValueError, f"they are no array ({error})", shape) from error
    if array.shape != shape:
        raise _wrong(agent, ValueError, f"they have shape {array.shape}", shape)
    kind = np.dtype(space.dtype).kind
    if array.dtype.kind == "f" and kind in "iu":  # floats, since NaN stands for dead agents
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


# ---- in a worker ---------------------------------------------------------------------------------


class Team(HostedEnv):
    """A parallel env as one Gymnasium env, whose observation holds the results of all agents."""

    def __init__(self, index: int, env_fn: Callable[[], Any]) -> None:
        """Builds the env."""
        env = env_fn()
        name = f"env_fns[{index}]() returned a {type(env).__name__}"
        missing = [method for method in _NEEDED if not callable(getattr(env, method, None))]
        if missing:
            raise TypeError(
                f"{name} without the methods {', '.join(missing)}; it must return a "
                "pettingzoo.ParallelEnv (others become one by pettingzoo.utils.aec_to_parallel)"
            )
        if not hasattr(env, "possible_agents"):
            raise TypeError(
                f"{name} without possible_agents. PettingZoo does not require it, but arrays need "
                "to know all agents that there may ever be: set it to their names in the env, or "
                "in a wrapper"
            )
        self.agents = list(env.possible_agents)
        self._keys = {agent: str(agent) for agent in self.agents}
        if not self.agents or len(set(self._keys.values())) < len(self.agents):
            raise ValueError(f"agents need names that differ, and there must be one: {self.agents}")
        self._indices = {agent: index for index, agent in enumerate(self.agents)}
        count = len(self.agents)
        seen = {key: env.observation_space(agent) for agent, key in self._keys.items()}
        self._nothing = {key: _nothing(space) for key, space in seen.items()}
        self._acting: list[tuple[Any, str]] = []  # agents of the next step, with their keys
        super().__init__(
            env,
            spaces.Dict(
                {
                    AGENTS: spaces.Dict(seen),
                    REWARDS: spaces.Box(-np.inf, np.inf, (count,), np.float64),
                    FLAGS: spaces.Box(0, 1, (3, count), np.bool_),
                }
            ),
            spaces.Dict({key: env.action_space(agent) for agent, key in self._keys.items()}),
        )

    def reset(self, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
        """Resets the env."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._merged(observations, {}, {}, {}), self._infos(infos)

    def step(self, actions: dict[str, Any]) -> Any:
        """Steps the env, with the actions of the agents that are alive."""
        acting = {agent: actions[key] for agent, key in self._acting}
        *results, infos = self.env.step(acting)
        if len(results) != 4:
            raise ValueError(
                f"step() returned {len(results) + 1} values; expected (observations, rewards, "
                "terminations, truncations, infos)"
            )
        merged = self._merged(*results)
        return merged, 0.0, not self._acting, False, self._infos(infos)

    def close(self) -> None:
        """Closes the env, if it has a method ``close``."""
        if hasattr(self.env, "close"):
            super().close()

    def _merged(
        self,
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminations: Mapping[Any, Any],
        truncations: Mapping[Any, Any],
    ) -> dict[str, Any]:
        """The results of all agents as one observation; notes which agents act next."""
        keys, indices, count = self._keys, self._indices, len(self.agents)
        seen = self._nothing.copy()
        earned = [0.0] * count
        terminated, truncated, alive = [False] * count, [False] * count, [False] * count
        try:
            for agent, observation in observations.items():
                seen[keys[agent]] = observation
            for agent, reward in rewards.items():
                earned[indices[agent]] = reward
            for agent, flag in terminations.items():
                terminated[indices[agent]] = bool(flag)
            for agent, flag in truncations.items():
                truncated[indices[agent]] = bool(flag)
            acting = []
            # Without the env's list of agents, those with an observation are alive.
            for agent in getattr(self.env, "agents", observations):
                index = indices[agent]
                if terminated[index] or truncated[index]:
                    continue
                if agent not in observations:
                    raise ValueError(f"agent {agent!r} is alive and has got no observation")
                alive[index] = True
                acting.append((agent, keys[agent]))
        except KeyError as error:
            raise self._unknown_agent(agent) from error
        self._acting = acting
        return {
            AGENTS: seen,
            REWARDS: np.array(earned, np.float64),
            FLAGS: np.array((terminated, truncated, alive)),
        }

    def _infos(self, infos: Mapping[Any, Any] | None) -> dict[str, Any]:
        found = {}
        for agent, info in (infos or {}).items():
            if agent not in self._keys:
                raise self._unknown_agent(agent)
            if info:
                found[OF_AGENT + self._keys[agent]] = info
        return found

    def _unknown_agent(self, agent: Any) -> ValueError:
        return ValueError(
            f"the env returned results of an agent {agent!r} that is not in possible_agents, "
            f"{self.agents}"
        )

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of the env; ``shmvec_agents`` is the list of all its agents."""
        return self.agents if name == "shmvec_agents" else super().get_wrapper_attr(name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Sets an attribute of the env, or of the wrapper that has it."""
        holder = self.env
        while name not in getattr(holder, "__dict__", ()) and hasattr(holder, "env"):
            holder = holder.env
        setattr(holder if hasattr(holder, name) else self.env, name, value)


def _nothing(space: Space) -> Any:
    """The observation of an absent agent: zeros, as far as the space has them."""
    if isinstance(space, spaces.Dict):
        return {key: _nothing(part) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nothing(part) for part in space.spaces)
    if isinstance(space, spaces.Text):
        return ""
    empty: Any = create_empty_array(space, 1)
    return None if empty is None else empty[0]
