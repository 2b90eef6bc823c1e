"""Twins of ale-py's AtariEnv, an env, and of Stable-Baselines3's wrappers of it.

The env's twin only fetches screens that are read. Fetching a screen in colours takes half as long
as emulating a frame, and changes nothing. So it is omitted until a wrapper that skips frames knows
which screens it needs.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals

import numpy as np

from shmvec._core.memory cimport has_dtype, ndim_of
from shmvec._wrappers.chain cimport Chain, PythonStepper, Step, Twin, attributes_of, version_of
from shmvec._wrappers.numbers cimport is_plain

cdef tuple _METHODS = ("step", "_get_obs")
cdef tuple _KINDS = ("rgb", "grayscale", "ram")  # of observations
cdef object _uint8 = np.dtype(np.uint8)


@cython.final
cdef class AtariEnv(PythonStepper):
    cdef object kind                    # the env's class
    cdef unsigned int version           # its version
    cdef object emulator                # the class of its emulator
    cdef unsigned int emulator_version  # its version

    def __init__(self, env, Chain chain):
        from ale_py import ALEInterface

        PythonStepper.__init__(self, env, chain)
        hasattr(ALEInterface, "act")  # gives the class a version
        self.kind, self.emulator = type(env), ALEInterface
        self.version, self.emulator_version = version_of(self.kind), version_of(ALEInterface)

    cdef int step(self, object action, Step step) except -1:
        cdef dict attributes = attributes_of(self.env)
        if not step.may_omit or not self.is_unchanged(attributes):
            return step.take(self.env.step(action))
        ale = attributes["ale"]
        action = attributes["_action_set"][action]
        reward = 0.0
        for _ in range(attributes["_frameskip"]):
            reward += ale.act(action, 1.0)
            PyErr_CheckSignals()  # a time limit is a signal; Python would check for it here
        terminated, truncated = ale.game_over(with_truncation=False), ale.game_truncated()
        step.take((None, reward, terminated, truncated, self.env._get_info()))
        step.omitted_by = self
        return 0

    cdef int observe(self, object places, object index) except -1:
        if is_plain(places) and has_dtype(places, _uint8) and ndim_of(places) == 4:
            place = places[index]
            ale = self.env.ale
            if (self.env._obs_type == "rgb" and place.shape == (*ale.getScreenDims(), 3)
                    and place.flags.writeable):
                ale.getScreenRGB(place)
                return 0
        places[index] = self.env._get_obs()
        return 0

    cdef bint is_unchanged(self, dict attributes) except -1:
        """Whether the env's step is still that of its class, and may omit the observation."""
        return (
            type(self.env) is self.kind and version_of(self.kind) == self.version
            and _METHODS[0] not in attributes and _METHODS[1] not in attributes
            and type(attributes.get("ale")) is self.emulator
            and version_of(self.emulator) == self.emulator_version != 0
            and type(attributes.get("_action_set")) is list
            and type(attributes.get("_frameskip")) is int
            and attributes.get("continuous") is False
            and attributes.get("sound_obs", False) is False
            and type(attributes.get("_obs_type")) is str and attributes["_obs_type"] in _KINDS
        )


@cython.final
cdef class StickyActionEnv(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        if self.wrapper.np_random.random() >= self.get(attributes, "action_repeat_probability"):
            attributes["_sticky_action"] = action
        return self.inner.step(self.get(attributes, "_sticky_action"), step)


@cython.final
cdef class EpisodicLifeEnv(Twin):
    cdef int step_with(self, dict attributes, object action, Step step) except -1:
        attributes = self.step_inner(action, step)
        attributes["was_real_done"] = step.terminated or step.truncated
        lives = self.get(attributes, "env").unwrapped.ale.lives()
        if 0 < lives < self.get(attributes, "lives"):
            step.terminated = True
        attributes["lives"] = lives
        return 0
