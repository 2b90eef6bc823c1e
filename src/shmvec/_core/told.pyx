"""What answers tell besides results: of a worker that was replaced, of an env that was reset."""

from gymnasium.vector import VectorEnv


cdef class Told:
    """What an env's answer tells of its worker."""

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
    """Stands in for a vector env of fewer envs, of which Gymnasium gathers infos."""

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.closed = True
