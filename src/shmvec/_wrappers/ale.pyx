"""The twin of ale-py's AtariEnv, which is no wrapper: it fetches no screen that is not looked at.

To fetch one in colours takes half as long as to emulate a frame.
"""

cimport cython

from shmvec._wrappers.chain cimport Chain, Python, Step, attributes_of, version_of

cdef tuple _METHODS = ("step", "_get_obs")
cdef tuple _KINDS = ("rgb", "grayscale", "ram")  # of observations, which change nothing when fetched


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
        terminated, truncated = ale.game_over(with_truncation=False), ale.game_truncated()
        return step.take((None, reward, terminated, truncated, self.env._get_info()))

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
