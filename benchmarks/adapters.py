"""Each adapter beside the system whose interface it has, through that interface.

    python benchmarks/adapters.py                                # all that are installed
    python benchmarks/adapters.py --system sb3 --workload halfcheetah --num-envs 8

Contenders of a system take turns, in slices, in one run, with plain ShmVectorEnv beside them: what
an adapter costs is the difference to that. An original that is not installed is left out, by name.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import peers
from peers import Contender, Make, of_four, of_tianshou, tianshous
from workloads import WORKLOADS

from shmvec import measuring
from shmvec._shared.scheduling import usable_cores
from shmvec.adapters.pettingzoo import ParallelVectorEnv

ROUNDS = 5


def sb3(fns: Sequence[Any]) -> dict[str, Make]:
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
    n = len(fns)
    return {name: of_four(f"SB3 {name}", n, make) for name, make in makes.items()}


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


def baselines(fns: Sequence[Any]) -> dict[str, Make]:
    """OpenAI baselines' SubprocVecEnv, processes forked; ours also with one a core."""

    def ours(in_series: int) -> Any:
        from shmvec.adapters.baselines import SubprocVecEnv

        return SubprocVecEnv(fns, context="fork", in_series=in_series)

    def theirs() -> Any:
        from baselines.common.vec_env.subproc_vec_env import SubprocVecEnv

        return SubprocVecEnv([partial(FourTuples, fn) for fn in fns])

    n = len(fns)
    made = {"theirs": of_four("baselines SubprocVecEnv", n, theirs)}
    for in_series in sorted({1, max(1, n // usable_cores())}):
        if n % in_series == 0:
            name = f"shmvec SubprocVecEnv, in_series={in_series}"
            made[name] = of_four(name, n, partial(ours, in_series))
    return made


def actorcritic(fns: Sequence[Any]) -> dict[str, Make]:
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
        "ours": of_four("shmvec MultiEnv", n, partial(ours, False)),
        "wrapped": of_four("shmvec MultiEnv, wrapped handles", n, partial(ours, True)),
        "theirs": of_four("actorcritic MultiEnv", n, theirs),
    }


def ding(fns: Sequence[Any]) -> dict[str, Make]:
    """DI-engine's env managers, both of which wait for all envs and reset in place."""
    space = fns[0]().action_space

    class OfDIEngine(FourTuples):
        """The same as its managers want it."""

        reward_space = None

        def step(self, action: Any) -> Any:
            from ding.envs import BaseEnvTimestep

            return BaseEnvTimestep(*super().step(action))

    def contender(name: str, make: Callable[[], Any]) -> Make:
        def start() -> Any:
            manager = make()
            manager.launch()
            return manager

        def step(manager: Any, actions: Any) -> Any:
            ready = manager.ready_obs
            return manager.step({env: actions[env] for env in ready})

        def sample(manager: Any) -> Any:
            return [space.sample() for _ in fns]

        return lambda: Contender(
            name,
            start,
            step,
            lambda timesteps: np.array([step.done for step in timesteps.values()]),
            sample,
            resets_are_steps=True,  # in the step that ends an episode
        )

    def ours() -> Any:
        from shmvec.adapters.ding import SyncSubprocessEnvManager

        return SyncSubprocessEnvManager(fns, {"reset_inplace": True})

    def original() -> Any:
        from ding.envs import SyncSubprocessEnvManager

        cfg = SyncSubprocessEnvManager.default_config()
        cfg.reset_inplace = True
        return SyncSubprocessEnvManager([partial(OfDIEngine, fn) for fn in fns], cfg)

    return {
        "ours": contender("ding SyncSubprocessEnvManager, shmvec's", ours),
        "ding": contender("ding SyncSubprocessEnvManager, DI-engine's", original),
    }


def tianshou(fns: Sequence[Any]) -> dict[str, Make]:
    """Tianshou's vector envs."""

    def ours() -> Any:
        from shmvec.adapters.tianshou import TianshouVectorEnv

        return TianshouVectorEnv(fns)

    kinds = ("SubprocVectorEnv", "ShmemVectorEnv", "DummyVectorEnv")
    return {
        "TianshouVectorEnv": of_tianshou("TianshouVectorEnv", len(fns), ours),
        **{kind: tianshous(kind, fns) for kind in kinds},
    }


class Team:
    """A parallel env, as PettingZoo has them, in which each agent has an env of its own.

    Where an agent's episode is over it begins the next one, so that nobody ever dies.
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


def pettingzoo(fns: Sequence[Any]) -> dict[str, Make]:
    """Vector envs of parallel envs: teams of four; a step is one of one agent."""
    teams = [partial(Team, fns[first : first + 4]) for first in range(0, len(fns), 4)]

    def contender(name: str, make: Callable[[], Any]) -> Make:
        def start() -> Any:
            envs = make()
            envs.reset(seed=0)
            return envs

        def sample(envs: Any) -> Any:
            if hasattr(envs, "possible_agents"):
                return {agent: envs.action_space(agent).sample() for agent in envs.possible_agents}
            return np.array([envs.action_space.sample() for _ in fns])

        nobody = np.zeros(len(fns), bool)
        return lambda: Contender(
            name, start, lambda envs, actions: envs.step(actions), lambda _: nobody, sample
        )

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
        "ParallelVectorEnv": contender("ParallelVectorEnv", lambda: ParallelVectorEnv(teams)),
        "agilerl": contender("AgileRL AsyncPettingZooVecEnv", agilerl),
        "supersuit": contender("SuperSuit concat_vec_envs_v1", supersuit),
        "loop": contender("a plain loop", lambda: _Loop(teams)),
    }


# By the name of a system: from functions that make envs to its contenders, by name.
SYSTEMS: dict[str, Callable[[Sequence[Any]], dict[str, Make]]] = {
    "sb3": sb3,
    "baselines": baselines,
    "actorcritic": actorcritic,
    "ding": ding,
    "tianshou": tianshou,
    "pettingzoo": pettingzoo,
}


def measure(system: str, workload: str, n: int, seconds: float) -> list[dict[str, Any]]:
    """All contenders of one system, by turns; what is not installed is said."""
    fns = WORKLOADS[workload](n)
    limit = measuring.Limit(WORKLOADS[workload](8), usable_cores())
    running = []
    limits = []
    try:
        running.append(peers.ours("ShmVectorEnv", fns)())
        for name, make in SYSTEMS[system](fns).items():
            try:
                running.append(make())
            except ImportError as error:
                print(f"left out: {name} ({error})")
        for contender in running:
            contender.run(0.1, b"", keep=False)
        for _ in range(ROUNDS):
            limits.append(limit.run(seconds / ROUNDS).steps_per_s)
            for contender in running:
                contender.run(seconds / ROUNDS, b"")
    finally:
        limit.close()
        for contender in running:
            contender.close()
    return [contender.row(statistics.median(limits)) for contender in running]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--workload", nargs="+", choices=WORKLOADS, default=["cartpole", "halfcheetah"]
    )
    parser.add_argument("--num-envs", nargs="+", type=int, default=[8])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each contender")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the originals; none of ours

    print(", ".join(f"{name} {value}" for name, value in measuring.machine().items()))
    for system in options.system:
        for workload in options.workload:
            for n in options.num_envs:
                print(f"\n{system}: {workload}, {n} envs\n")
                print(
                    "| system | batch, µs | spread | steps/s | of the limit |\n" + "|---" * 5 + "|"
                )
                for row in measure(system, workload, n, options.seconds):
                    print(
                        f"| {row['system']} | {row['batch_us']:,.1f} | {row['spread']:.0%} "
                        f"| {row['steps_per_s']:,.0f} | {row['share_of_limit']:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
