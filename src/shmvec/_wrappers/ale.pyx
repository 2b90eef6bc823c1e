"""The twin of ale-py's AtariEnv, which is no wrapper: it fetches no screen that is not looked at.

To fetch one in colours takes half as long as to emulate a frame, and changes nothing. So it is left
out until a wrapper that skips frames knows which it needs.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals

import numpy as np

from shmvec._core.memory cimport has_dtype, ndim_of
from shmvec._wrappers.chain cimport Chain, Python, Step, attributes_of, version_of
from shmvec._wrappers.numbers cimport is_plain

cdef tuple _METHODS = ("step", "_get_obs")
cdef tuple _KINDS = ("rgb", "grayscale", "ram")  # of observations
cdef object _uint8 = np.dtype(np.uint8)


@cython.final
cdef class AtariEnv(Python):
    cdef object kind                # the env's class,
    cdef unsigned int tag           # and its version
    cdef object emulator            # that of its emulator,
    cdef unsigned int emulator_tag  # and its version

    def __init__(self, env, Chain owner):
        from ale_py import ALEInterface

        Python.__init__(self, env, owner)
        hasattr(ALEInterface, "act")  # so that it has a version
        self.kind, self.emulator = type(env), ALEInterface
        self.tag, self.emulator_tag = version_of(self.kind), version_of(ALEInterface)

    cdef int step(self, object action, Step step) except -1:
        cdef dict own = attributes_of(self.env)
        if not step.unseen or not self.is_as_it_was(own):
            return step.take(self.env.step(action))
        ale = own["ale"]
        action = own["_action_set"][action]
        reward = 0.0
        for _ in range(own["_frameskip"]):
            reward += ale.act(action, 1.0)
            PyErr_CheckSignals()  # a time limit, as where Python goes on
        terminated, truncated = ale.game_over(with_truncation=False), ale.game_truncated()
        step.take((None, reward, terminated, truncated, self.env._get_info()))
        step.unmade = self
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

    cdef bint is_as_it_was(self, dict own) except -1:
        """Whether the env's step does as its class's, and its observation may be left out."""
        return (
            type(self.env) is self.kind and version_of(self.kind) == self.tag
            and _METHODS[0] not in own and _METHODS[1] not in own
            and type(own.get("ale")) is self.emulator
            and version_of(self.emulator) == self.emulator_tag != 0
            and type(own.get("_action_set")) is list and type(own.get("_frameskip")) is int
            and own.get("continuous") is False and own.get("sound_obs", False) is False
            and type(own.get("_obs_type")) is str and own["_obs_type"] in _KINDS
        )
