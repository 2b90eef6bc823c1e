"""``shmvec.adapters.sb3``, on Stable-Baselines3 if it is installed, else on what stands in for it.

The stand-in has what the adapter takes from SB3's base class and no more, so that the adapter's own
part is tested wherever there is no torch. It is in ``sys.modules`` only while the adapter is
imported: to everything else SB3 is as missing as it is.
"""

import gc
import importlib
import sys
import types

__all__ = ["INSTALLED", "AgentVecEnv", "ShmVecEnv"]

# What the adapter imports. Its replay buffer is not tested without SB3.
TAKEN = """VecEnv VecEnvIndices VecEnvObs VecEnvStepReturn VecCheckNan VecFrameStack VecMonitor
VecNormalize VecTransposeImage VecVideoRecorder ReplayBuffer DictReplayBufferSamples
ReplayBufferSamples""".split()


class VecEnv:
    """What SB3's base class does for a VecEnv."""

    def __init__(self, num_envs, observation_space, action_space):
        self.num_envs = num_envs
        self.observation_space = observation_space
        self.action_space = action_space
        self.reset_infos = [{} for _ in range(num_envs)]
        self._reset_seeds()
        self._reset_options()
        modes = self.get_attr("render_mode")
        assert len(set(modes)) == 1, "render_mode mode should be the same for all environments"
        self.render_mode = modes[0]
        self.metadata = {"render_modes": [] if modes[0] is None else [modes[0]]}

    def _reset_seeds(self):
        self._seeds = [None] * self.num_envs

    def _reset_options(self):
        self._options = [{} for _ in range(self.num_envs)]

    def seed(self, seed=None):
        self._seeds = [(0 if seed is None else seed) + env for env in range(self.num_envs)]
        return self._seeds

    def set_options(self, options=None):
        if not isinstance(options, list):
            options = [dict(options or {}) for _ in range(self.num_envs)]
        self._options = options

    def step(self, actions):
        self.step_async(actions)
        return self.step_wait()


def _adapter():
    """The adapter, made on the stand-in, and no trace of it left."""
    common = "stable_baselines3.common"
    modules = ("vec_env", "vec_env.base_vec_env", "buffers", "type_aliases")
    names = ["stable_baselines3", common, *(f"{common}.{module}" for module in modules)]
    before = dict(sys.modules)
    try:
        for name in names:
            sys.modules[name] = types.ModuleType(name)
            for what in TAKEN:
                setattr(sys.modules[name], what, VecEnv)
        return importlib.import_module("shmvec.adapters.sb3")
    finally:
        for name in [*names, "shmvec.adapters.sb3", "shmvec.adapters._sb3_replay"]:
            sys.modules.pop(name, None)
            if name in before:
                sys.modules[name] = before[name]


try:
    importlib.import_module("stable_baselines3")
    INSTALLED = True
    from shmvec.adapters.sb3 import AgentVecEnv, ShmVecEnv

    gc.freeze()  # what torch has brought is not gone through again after every test
except ImportError:
    INSTALLED = False
    adapter = _adapter()
    AgentVecEnv, ShmVecEnv = adapter.AgentVecEnv, adapter.ShmVecEnv
