from libc.stdint cimport int64_t

from shmvec._core.csrc cimport sv_budget, sv_waiter, sv_waiter_init


cdef inline int init_waiter(sv_waiter *waiter, budgets, int64_t brief_below) except -1:
    """Sets up a waiter from two pairs (pause, yield) in ns, for brief and for long waits."""
    cdef sv_budget when_brief, when_long
    (when_brief.pause, when_brief.yield_), (when_long.pause, when_long.yield_) = budgets
    sv_waiter_init(waiter, when_brief, when_long, brief_below)
    return 0
