"""What a segment says of its vector env: read by the parent, and from outside by ``top``.

Reads only, and only what lies before the rings. Whatever damage has made of the numbers, they are
numbers, and indices are of envs that there are.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmvec._core.counters cimport counts_of
from shmvec._core.csrc cimport (
    SV_NOTICE_CLOSED,
    SV_NOTICE_OPEN,
    SV_NUM_FAULTS,
    SV_TIMING_WORDS,
    sv_busy_for,
    sv_counter_get,
    sv_counters,
    sv_fault_names,
    sv_notice,
    sv_notice_fault,
    sv_notice_state,
    sv_now_ns,
    sv_segment_counters,
    sv_segment_notice,
    sv_segment_past,
    sv_segment_timings,
    sv_timings_read,
)
from shmvec._core.segment cimport Segment

import numpy as np


cdef class Insight:
    """See insight.pyi."""

    cdef Segment segment
    cdef sv_notice *notice

    def __init__(self, Segment segment):
        if not segment.has_front():
            raise ValueError("it is shorter than its header says")
        self.segment = segment
        self.notice = sv_segment_notice(segment.base, &segment.plan)

    cdef sv_counters *of(self, uint32_t worker) noexcept:
        return sv_segment_counters(self.segment.base, &self.segment.plan, worker)

    # ---- whose it is -------------------------------------------------------------------------

    @property
    def in_use(self):
        cdef uint64_t state = sv_notice_state(self.notice)
        if state > SV_NOTICE_CLOSED:
            raise ValueError("it is damaged: whether it is in use makes no sense")
        return state == SV_NOTICE_OPEN

    @property
    def process(self):
        return sv_counter_get(&self.notice.parent.process)

    @property
    def processes(self):
        cdef uint32_t worker
        if self.num_workers == 0:
            return []
        return [sv_counter_get(&self.of(worker).process)
                for worker in range(self.segment.plan.sizes.num_workers)]

    @property
    def num_workers(self):
        # The rings are there without processes, too.
        return self.segment.num_workers if sv_counter_get(&self.notice.num_workers) else 0

    @property
    def num_envs(self):
        return self.segment.num_envs

    @property
    def cores(self):
        cdef uint64_t cores = sv_counter_get(&self.notice.cores)
        return cores or 1

    @property
    def elapsed_s(self):
        cdef uint64_t elapsed = <uint64_t>sv_now_ns() - sv_counter_get(&self.notice.began)
        return 1e-9 * max(0, <int64_t>elapsed)

    # ---- what was done -----------------------------------------------------------------------

    def parent(self):
        return counts_of(&self.notice.parent)

    def workers(self):
        cdef uint32_t worker
        cdef list found = []
        for worker in range(self.segment.plan.sizes.num_workers):
            now = counts_of(self.of(worker))
            past = counts_of(
                sv_segment_past(self.segment.base, &self.segment.plan, worker))
            found.append({name: count + past[name] for name, count in now.items()})
        return found

    def faults(self):
        cdef size_t which
        return {sv_fault_names[which].name.decode(): sv_counter_get(
            sv_notice_fault(self.notice, which)) for which in range(SV_NUM_FAULTS)}

    def timings(self):
        cdef uint32_t env
        cdef uint32_t num_envs = self.segment.plan.sizes.num_envs
        found = np.empty((num_envs, 2, SV_TIMING_WORDS), np.uint64)
        cdef uint64_t[:, :, ::1] words = found
        for env in range(num_envs):
            sv_timings_read(sv_segment_timings(self.segment.base, &self.segment.plan, env),
                            &words[env, 0, 0])
        return found

    # ---- what is being done ------------------------------------------------------------------

    def doing(self):
        cdef uint32_t worker
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef int64_t now = sv_now_ns()
        cdef list found = []
        for worker in range(self.segment.plan.sizes.num_workers):
            busy = sv_busy_for(self.of(worker), now, &elapsed)
            if 1 <= busy >> 1 <= self.segment.plan.sizes.num_envs:
                found.append(((busy >> 1) - 1, bool(busy & 1), 1e-9 * max(0, elapsed)))
            else:  # or the segment is damaged
                found.append(None)
        return found

    def waiting(self):
        cdef int64_t elapsed
        if sv_busy_for(&self.notice.parent, sv_now_ns(), &elapsed) == 0:
            return None
        return 1e-9 * max(0, elapsed)
