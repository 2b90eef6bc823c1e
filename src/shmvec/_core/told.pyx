"""Reports of faults in answers: a worker was replaced, an env was reset."""

from gymnasium.vector import VectorEnv


cdef class Report:
    """Report of a fault in an env's next answer."""

    @property
    def info(self):
        fault = self.fault.info
        if self.last is None:
            return {"fault": fault}
        return {"fault": fault, "final_obs": self.last[0], "final_info": {"fault": fault}}


cdef Report report_of(fault, bint cut_off, list last):
    cdef Report report = Report()
    report.fault = fault
    report.cut_off = cut_off
    report.last = last
    return report


class Batch(VectorEnv):
    """Stand-in for a vector env of fewer envs, so that Gymnasium gathers their infos."""

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.closed = True
