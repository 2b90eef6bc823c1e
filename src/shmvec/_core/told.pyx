"""Reports of faults in answers: a worker was replaced, an env was reset."""

from gymnasium.vector import VectorEnv


cdef class Told:
    """Report of a fault in an env's next answer."""

    @property
    def info(self):
        fault = self.fault.info
        if self.last is None:
            return {"fault": fault}
        return {"fault": fault, "final_obs": self.last[0], "final_info": {"fault": fault}}


cdef Told tell(fault, bint cut_off, list last):
    cdef Told told = Told()
    told.fault = fault
    told.cut_off = cut_off
    told.last = last
    return told


class Batch(VectorEnv):
    """Stand-in for a vector env of fewer envs, so that Gymnasium gathers their infos."""

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.closed = True
