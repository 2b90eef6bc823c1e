"""Envs of plangym's interface, as its users write them: for tests where it is not installed."""

import gymnasium as gym
import numpy as np


class Walk:
    """Counts its steps up to a length; resets itself after the last one, as plangym's do."""

    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    SINGLETON = False
    OBS_IS_ARRAY = STATE_IS_ARRAY = True
    AVAILABLE_RENDER_MODES = {None, "rgb_array", "human"}
    AVAILABLE_OBS_TYPES = {"coords"}
    DEFAULT_OBS_TYPE = obs_type = "coords"
    obs_shape, action_shape = (3,), (2,)

    def __init__(self, name, frameskip=1, render_mode=None, length=6, autoreset=True, **others):
        self.name, self.frameskip, self.render_mode = name, frameskip, render_mode
        self.length, self.autoreset, self.others = length, autoreset, others
        self.count, self.last, self.resets, self.is_open = 0, 0.0, 0, True

    def observe(self):
        # Of another dtype than its space says, if it had one.
        return np.array([self.count, self.last, 0], np.float64)

    def get_state(self):
        return np.array([self.count, self.last])

    def set_state(self, state):
        self.count, self.last = int(state[0]), float(state[1])

    def reset(self, return_state=True):
        self.count, self.last = 0, 0.0
        self.resets += 1
        info = {"resets": self.resets}
        if return_state:
            return self.get_state(), self.observe(), info
        return self.observe(), info

    def step_with_dt(self, action, dt=1):
        reward = steps = 0
        for _ in range(int(dt) * self.frameskip):
            self.count += 1
            steps += 1
            self.last = float(np.sum(action))
            reward += self.count
            if self.count >= self.length:
                break
        info = {"n_step": steps, "dt": dt, "double": action.dtype == np.float64}
        return self.observe(), reward, self.count >= self.length, False, info

    def step(self, action, state=None, dt=1, return_state=None):
        if state is not None:
            self.set_state(state)
        result = self.step_with_dt(action, dt)
        if return_state or (return_state is None and state is not None):
            result = (self.get_state(), *result)
        if self.autoreset and result[-3]:
            self.reset()
        return result

    def sample_action(self):
        return np.array([0.5, 0.25], np.float32)

    def render(self):
        return f"{self.name} at {self.count}"

    def close(self):
        self.is_open = False


class Fickle(Walk):
    """After a step its states and observations have another dtype than after a reset."""

    def get_state(self):
        return np.array([self.count, self.last], np.float64 if self.count else np.float32)

    def observe(self):
        return np.array([self.count + 0.5 if self.count else 0])


class Words(Walk):
    """Has no spaces: its observations, actions and states are words."""

    action_space = None

    def observe(self):
        return f"after {self.count}"

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count, self.last = state["count"], 0.0

    def step_with_dt(self, action, dt=1):
        self.count += len(action) * dt
        return self.observe(), 1, self.count >= 100, False, {"n_step": dt, "dt": dt}
