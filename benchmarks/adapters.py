"""Each adapter beside the system whose interface it has, through that interface.

    python benchmarks/adapters.py                                # all that are installed
    python benchmarks/adapters.py --system sb3 --workload HalfCheetah-v5 --num-envs 8

Contenders of a system take turns, in slices, in one run, with plain ShmVectorEnv beside them: what
an adapter costs is the difference to that. An original that is not installed is left out, by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import peers
from harness import WORKLOADS, arguments
from peers import Start, every_step, of_four, of_tianshou, tianshous

from shmvec._commands.measuring import LIMIT, cells, described, line, machine, race
from shmvec._cores import usable_cores
from shmvec.adapters.pettingzoo import ParallelVectorEnv


def sb3(fns: Sequence[Any]) -> dict[str, Start]:
    """Stable-Baselines3's VecEnvs, their processes forked."""

    def ours() -> Any:
        from shmvec.adapters.sb3 import ShmVecEnv

        return ShmVecEnv(list(fns), "fork")

    def subproc() -> Any:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        return SubprocVecEnv(list(fns), "fork")

    def dummy() -> Any:
        from stable_baselines3.common.vec_env import DummyVecEnv

        return DummyVecEnv(list(fns))

    makes = {"ShmVecEnv": ours, "SubprocVecEnv": subproc, "DummyVecEnv": dummy}
    return {f"SB3 {name}": of_four(len(fns), make) for name, make in makes.items()}


class FourTuples:
    """An env as gym had them, for systems that know no other."""

    def __init__(self, env_fn: Callable[[], Any]) -> None:
        """Makes the env."""
        self.env = env_fn()
        self.observation_space, self.action_space = (
            self.env.observation_space,
            self.env.action_space,
        )
        self.metadata, self.spec, self.reward_range = {}, None, (-np.inf, np.inf)
        self.close = self.env.close

    def reset(self) -> Any:
        """The observation only."""
        return self.env.reset()[0]

    def step(self, action: Any) -> Any:
        """Both kinds of end as one."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, info


def baselines(fns: Sequence[Any]) -> dict[str, Start]:
    """OpenAI baselines' SubprocVecEnv, processes forked; ours also with one a core."""

    def ours(in_series: int) -> Any:
        from shmvec.adapters.baselines import SubprocVecEnv

        return SubprocVecEnv(fns, context="fork", in_series=in_series)

    def theirs() -> Any:
        from baselines.common.vec_env.subproc_vec_env import SubprocVecEnv

        return SubprocVecEnv([partial(FourTuples, fn) for fn in fns])

    n = len(fns)
    made = {"baselines SubprocVecEnv": of_four(n, theirs)}
    for in_series in sorted({1, max(1, n // usable_cores())}):
        if n % in_series == 0:
            name = f"shmvec SubprocVecEnv, in_series={in_series}"
            made[name] = of_four(n, partial(ours, in_series))
    return made


def actorcritic(fns: Sequence[Any]) -> dict[str, Start]:
    """The MultiEnv of actorcritic, whose step resets what is over and steps it, too."""

    def ours(wrapped: bool) -> Any:
        from gymnasium.wrappers import TransformReward

        from shmvec.adapters.actorcritic import MultiEnv, create_subprocess_envs

        envs: list[Any] = list(create_subprocess_envs(fns))
        return MultiEnv([TransformReward(env, float) for env in envs] if wrapped else envs)

    def theirs() -> Any:
        from actorcritic.multi_env import MultiEnv, create_subprocess_envs

        return MultiEnv(create_subprocess_envs([partial(FourTuples, fn) for fn in fns]))

    n = len(fns)
    return {
        "shmvec MultiEnv": of_four(n, partial(ours, False)),
        "shmvec MultiEnv, wrapped handles": of_four(n, partial(ours, True)),
        "actorcritic MultiEnv": of_four(n, theirs),
    }


def ding(fns: Sequence[Any]) -> dict[str, Start]:
    """DI-engine's env managers, both of which wait for all envs and reset in place."""
    space = fns[0]().action_space

    class OfDIEngine(FourTuples):
        """The same as its managers want it."""

        reward_space = None

        def step(self, action: Any) -> Any:
            from ding.envs import BaseEnvTimestep

            return BaseEnvTimestep(*super().step(action))

    def contender(make: Callable[[], Any]) -> Start:
        def start() -> Any:
            manager = make()
            manager.launch()
            return manager

        def step(manager: Any, actions: Any) -> None:
            manager.step({env: actions[env] for env in manager.ready_obs})

        return every_step(len(fns), start, lambda manager: [space.sample() for _ in fns], step)

    def ours() -> Any:
        from shmvec.adapters.ding import SyncSubprocessEnvManager

        return SyncSubprocessEnvManager(fns, {"reset_inplace": True})

    def original() -> Any:
        from ding.envs import SyncSubprocessEnvManager

        cfg = SyncSubprocessEnvManager.default_config()
        cfg.reset_inplace = True
        return SyncSubprocessEnvManager([partial(OfDIEngine, fn) for fn in fns], cfg)

    return {
        "ding SyncSubprocessEnvManager, shmvec's": contender(ours),
        "ding SyncSubprocessEnvManager, DI-engine's": contender(original),
    }


def tianshou(fns: Sequence[Any]) -> dict[str, Start]:
    """Tianshou's vector envs."""

    def ours() -> Any:
        from shmvec.adapters.tianshou import TianshouVectorEnv

        return TianshouVectorEnv(fns)

    kinds = ("SubprocVectorEnv", "ShmemVectorEnv", "DummyVectorEnv")
    return {
        "TianshouVectorEnv": of_tianshou(len(fns), ours),
        **{f"Tianshou {kind}": tianshous(kind, fns) for kind in kinds},
    }


class Team:
    """A parallel env, as PettingZoo has them, in which each agent has an env of its own.

    Where an agent's episode is over it begins the next one, so that no agent ever dies.
    """

    metadata: dict[str, Any] = {}
    render_mode = None

    def __init__(self, fns: Sequence[Any]) -> None:
        """Builds the envs."""
        self._envs = {f"agent_{index}": fn() for index, fn in enumerate(fns)}
        self.agents = self.possible_agents = list(self._envs)
        self.unwrapped = self

    def observation_space(self, agent: str) -> Any:
        """That of the agent's env."""
        return self._envs[agent].observation_space

    def action_space(self, agent: str) -> Any:
        """That of the agent's env."""
        return self._envs[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """Resets all agents' envs."""
        observations = {agent: env.reset(seed=seed)[0] for agent, env in self._envs.items()}
        return observations, {agent: {} for agent in observations}

    def step(self, actions: dict[str, Any]) -> Any:
        """Steps all agents' envs."""
        observations, rewards = {}, {}
        for agent, action in actions.items():
            env = self._envs[agent]
            observations[agent], rewards[agent], terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                observations[agent] = env.reset()[0]
        no = dict.fromkeys(actions, False)
        return observations, rewards, no, dict(no), {agent: {} for agent in actions}

    def close(self) -> None:
        """Closes them."""
        for env in self._envs.values():
            env.close()


class _Loop:
    """Parallel envs that are stepped one after the other, by agent in and by env out."""

    def __init__(self, fns: Sequence[Any]) -> None:
        self._teams = [fn() for fn in fns]
        self.possible_agents = self._teams[0].possible_agents

    def action_space(self, agent: str) -> Any:
        return gym.vector.utils.batch_space(self._teams[0].action_space(agent), len(self._teams))

    def reset(self, seed: int) -> None:
        for team in self._teams:
            team.reset(seed)

    def step(self, actions: dict[str, Any]) -> None:
        for row, team in enumerate(self._teams):
            team.step({agent: batch[row] for agent, batch in actions.items()})

    def close(self) -> None:
        for team in self._teams:
            team.close()


def pettingzoo(fns: Sequence[Any]) -> dict[str, Start]:
    """Vector envs of parallel envs: teams of four; a step is one of one agent."""
    teams = [partial(Team, fns[first : first + 4]) for first in range(0, len(fns), 4)]

    def contender(make: Callable[[], Any]) -> Start:
        def start() -> Any:
            envs = make()
            envs.reset(seed=0)
            return envs

        def sample(envs: Any) -> Any:
            if hasattr(envs, "possible_agents"):
                return {agent: envs.action_space(agent).sample() for agent in envs.possible_agents}
            return np.array([envs.action_space.sample() for _ in fns])

        return every_step(len(fns), start, sample)

    def agilerl() -> Any:
        from agilerl.vector.pz_async_vec_env import AsyncPettingZooVecEnv

        return AsyncPettingZooVecEnv(teams)

    def supersuit() -> Any:
        import supersuit
        from pettingzoo import ParallelEnv

        class Named(Team, ParallelEnv):  # type: ignore[misc]
            unwrapped = None

        team = supersuit.pettingzoo_env_to_vec_env_v1(Named(fns[:4]))
        return supersuit.concat_vec_envs_v1(
            team, len(teams), num_cpus=min(usable_cores(), len(teams)), base_class="gymnasium"
        )

    return {
        "ParallelVectorEnv": contender(lambda: ParallelVectorEnv(teams)),
        "AgileRL AsyncPettingZooVecEnv": contender(agilerl),
        "SuperSuit concat_vec_envs_v1": contender(supersuit),
        "a plain loop": contender(lambda: _Loop(teams)),
    }


# By the name of a system: from functions that make envs to what starts its contenders, by name.
SYSTEMS: dict[str, Callable[[Sequence[Any]], dict[str, Start]]] = {
    "sb3": sb3,
    "baselines": baselines,
    "actorcritic": actorcritic,
    "ding": ding,
    "tianshou": tianshou,
    "pettingzoo": pettingzoo,
}


def measure(system: str, workload: str, n: int, seconds: float) -> None:
    """Prints what became of all contenders of one system; what is not installed is said."""
    fns = WORKLOADS[workload].fns(n)
    starts = {"ShmVectorEnv": peers.ours(fns), **SYSTEMS[system](fns)}
    left_out: dict[str, str] = {}
    results = race(
        {name: partial(start, None) for name, start in starts.items()},
        seconds,
        limit=WORKLOADS[workload].makes,
        left_out=left_out,
    )
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")
    print(f"\n{system}: {workload}, {n} envs\n")
    print("| system | batch step, µs | spread | steps/s | of the limit |\n" + "|---" * 5 + "|")
    for name, result in results.items():
        print(line(name, *cells(result.figures(results[LIMIT]))), flush=True)


def main() -> None:
    """Runs the command line."""
    parser = arguments(__doc__, ["CartPole-v1", "HalfCheetah-v5"], [8])
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the originals; none of ours

    print(described(machine()))
    for system, workload, n in product(options.system, options.workload, options.num_envs):
        measure(system, workload, n, options.seconds)


if __name__ == "__main__":
    main()
