"""Parallel envs of many agents, without PettingZoo, and what is returned for them."""

import numpy as np
from gymnasium import spaces

MODES = ["NextStep", "SameStep", "Disabled"]

SEEN = {
    "ann": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "bob": spaces.Dict({"place": spaces.Box(0, 1, (2,), np.float64), "kind": spaces.Discrete(4)}),
    "cid": spaces.Box(0, 255, (2, 2), np.uint8),
}
DONE = {
    "ann": spaces.Discrete(3),
    "bob": spaces.Box(-1, 1, (2,), np.float32),
    "cid": spaces.MultiDiscrete([3, 3]),
}
# By agent: the turns in which it is born and dies. An episode each, again and again.
LIVES = [
    {"ann": (0, 2), "bob": (0, 4), "cid": (0, 3)},
    {"ann": (0, 3), "bob": (1, 2), "cid": (2, 5)},
    {"bob": (0, 1)},
]


class Band:
    """A parallel env of our own, without PettingZoo: agents are born and die as the lives say."""

    metadata = {"name": "band"}
    render_mode = "rgb_array"

    def __init__(self, lives=LIVES, agents=tuple(SEEN), first=0):
        self.possible_agents = list(agents)
        self.lives = lives
        self.episode = first - 1
        self.rng = np.random.default_rng(0)
        self.agents = []
        self.received = []
        self.given = []
        self.closed = False

    def observation_space(self, agent):
        return SEEN[agent]

    def action_space(self, agent):
        return DONE[agent]

    def _observe(self, agent):
        if agent == "bob":
            return {"kind": self.rng.integers(4), "place": self.rng.random(2)}
        if agent == "cid":
            return self.rng.integers(0, 255, (2, 2), np.uint8)
        return self.rng.random(3).astype(np.float32)

    def _living(self):
        lives = self.lives[self.episode % len(self.lives)]
        return [agent for agent, (born, dies) in lives.items() if born <= self.turn < dies]

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.given.append((seed, options))
        self.turn = 0
        self.episode += 1
        self.agents = self._living()
        return (
            {agent: self._observe(agent) for agent in self.agents},
            {agent: {"episode": self.episode} for agent in self.agents[:1]},
        )

    def step(self, actions):
        assert set(actions) == set(self.agents), (actions, self.agents)
        self.received.append(actions)
        before, self.turn = self.agents, self.turn + 1
        self.agents = self._living()
        observed = before + [agent for agent in self.agents if agent not in before]
        gone = {agent: agent not in self.agents for agent in before}
        truncated = {agent: gone[agent] and agent == "cid" for agent in before}
        return (
            {agent: self._observe(agent) for agent in observed},
            {agent: float(np.sum(actions[agent])) + self.turn for agent in before},
            {agent: gone[agent] and agent != "cid" for agent in before},
            truncated,
            {agent: {"turn": self.turn, "of": agent} for agent in before if agent != "bob"},
        )

    def render(self):
        return np.full((2, 2, 3), self.turn, np.uint8)

    def state(self):
        return np.array([self.turn, self.episode])

    def close(self):
        self.closed = True


def info_of(infos, row):
    return {
        key: info_of(value, row) if isinstance(value, dict) and key != "final_obs" else value[row]
        for key, value in infos.items()
        if not key.startswith("_") and infos[f"_{key}"][row]
    }
