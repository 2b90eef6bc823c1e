"""A program for actorcritic's ``MultiEnv``: an agent that interacts, and a learner of CartPole.

    python examples/coming_from/actorcritic_program.py

The agent has the loop of actorcritic's ``MultiEnvAgent``: it takes lists and returns lists with a
row for each env. As in actorcritic's example, each handle has a wrapper. Only the import of
``multi_env`` has changed, and gym is Gymnasium. See docs/coming-from/actorcritic.md.
"""

import argparse

import gymnasium as gym
import numpy as np
from linear import ActorCritic

from shmvec.adapters.actorcritic import MultiEnv, create_subprocess_envs


class EpisodeInfo(gym.Wrapper):
    """Stores an episode's length in the info of its last step."""

    def reset(self, **arguments):
        """Begins to count steps."""
        self.length = 0
        return self.env.reset(**arguments)

    def step(self, action):
        """Counts a step."""
        self.length += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info["episode_length"] = self.length
        return observation, reward, terminated, truncated, info


def transposed(rows) -> list:
    """Turns [step][env] into [env][step]."""
    return list(map(list, zip(*rows, strict=True)))


class MultiEnvAgent:
    """Samples several steps of several envs."""

    def __init__(self, multi_env: MultiEnv, model: ActorCritic, num_steps: int) -> None:
        """The first ``interact`` resets the envs."""
        self.env, self.model, self.num_steps = multi_env, model, num_steps
        self.observations = None

    def interact(self):
        """Returns observations, actions, rewards, terminals, next observations, infos."""
        steps = []
        if self.observations is None:
            self.observations = self.env.reset(seed=1)
        for _ in range(self.num_steps):
            actions = self.model.sample_actions(self.observations)
            observations, rewards, terminals, infos = self.env.step(actions)
            steps.append((self.observations, actions, rewards, terminals, infos))
            self.observations = observations
        *batch, infos = [
            list(map(list, zip(*one, strict=True))) for one in zip(*steps, strict=True)
        ]
        return *batch, self.observations, infos


def main() -> None:
    """Learns, and prints how long episodes were."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=600)
    updates = parser.parse_args().updates
    envs = create_subprocess_envs([lambda: gym.make("CartPole-v1")] * 4)
    multi_env = MultiEnv([EpisodeInfo(env) for env in envs])
    model = ActorCritic(multi_env.observation_space.shape[0], multi_env.action_space.n)
    agent = MultiEnvAgent(multi_env, model, num_steps=32)
    episodes = []
    for _ in range(updates):
        observations, actions, rewards, terminals, next_observations, infos = agent.interact()
        episodes += [i["episode_length"] for row in infos for i in row if "episode_length" in i]
        batch = (np.swapaxes(np.array(one), 0, 1) for one in (observations, actions, rewards))
        model.learn(*batch, np.transpose(terminals), next_observations)
    multi_env.close()
    first, last = np.mean(episodes[:50]), np.mean(episodes[-50:])
    print(f"{len(episodes)} episodes: length {first:.0f} at first, {last:.0f} at last")


if __name__ == "__main__":
    main()
