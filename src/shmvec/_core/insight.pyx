"""What a segment says of its vector env: read by the parent, and from outside by ``top``.

Reads only, and only what lies before the rings. Whatever damage has made of the numbers, they are
numbers, and indices are of envs that there are.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmvec._core.counters cimport counts_of
from shmvec._core.csrc cimport (
    SV_IN_RESET,
    SV_IN_STEP,
    SV_NOTICE_CLOSED,
    SV_NOTICE_OPEN,
    SV_NUM_FAULTS,
    SV_TIMING_WORDS,
    sv_busy_doing,
    sv_busy_env,
    sv_busy_for,
    sv_busy_name,
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
    sv_timings,
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
    def number(self):
        return sv_counter_get(&self.notice.number)

    @property
    def nbytes(self):
        return self.segment.plan.total_bytes

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
        cdef int64_t elapsed
        cdef dict found = counts_of(&self.notice.parent)
        # One that is not over is a long one, or does not matter.
        if sv_busy_for(&self.notice.parent, sv_now_ns(), &elapsed) != 0:
            found["park_ns"] += max(0, elapsed)
        return found

    def workers(self):
        cdef uint32_t worker
        cdef list found = []
        for worker in range(self.segment.plan.sizes.num_workers):
            now = counts_of(self.of(worker))
            past = counts_of(
                sv_segment_past(self.segment.base, &self.segment.plan, worker))
            found.append({name: count + past[name] for name, count in now.items()})
        for worker, (first, count) in enumerate(self.ranges()):
            self.add_request_in_hand(worker, first, count, found[worker])
        return found

    cdef int add_request_in_hand(self, uint32_t worker, uint32_t first, uint32_t count,
                                 dict found) except -1:
        """What a worker counts when it answers is told by its envs' histograms before.

        By them, too, what one had not yet counted that died.
        """
        cdef sv_timings *timings
        cdef uint64_t busy, steps = 0, resets = 0, step_ns = 0, reset_ns = 0
        cdef int64_t elapsed
        cdef uint32_t env, bucket
        for env in range(first, first + count):
            timings = sv_segment_timings(self.segment.base, &self.segment.plan, env)
            step_ns += sv_counter_get(&timings.step.total_ns)
            reset_ns += sv_counter_get(&timings.reset.total_ns)
            for bucket in range(SV_TIMING_WORDS - 2):
                steps += sv_counter_get(&timings.step.buckets[bucket])
                resets += sv_counter_get(&timings.reset.buckets[bucket])
        busy = sv_busy_for(self.of(worker), sv_now_ns(), &elapsed)
        if busy != 0 and elapsed > 0:
            if sv_busy_doing(busy) == SV_IN_STEP:
                step_ns += elapsed
            elif sv_busy_doing(busy) == SV_IN_RESET:
                reset_ns += elapsed
        found["steps"] = max(found["steps"], steps)
        found["resets"] = max(found["resets"], resets)
        found["step_ns"] = max(found["step_ns"], step_ns)
        found["reset_ns"] = max(found["reset_ns"], reset_ns)
        return 0

    def ranges(self):
        cdef sv_counters *told
        cdef uint32_t worker
        cdef uint64_t end = 0, first, count, num_envs = self.segment.plan.sizes.num_envs
        cdef list found = []
        for worker in range(self.segment.plan.sizes.num_workers):
            told = sv_segment_past(self.segment.base, &self.segment.plan, worker)
            first, count = sv_counter_get(&told.first_env), sv_counter_get(&told.num_envs)
            if not end <= first <= num_envs or count > num_envs - first:
                first, count = end, 0  # damaged
            end = first + count
            found.append((first, count))
        return found

    def spent_before(self):
        cdef uint32_t worker
        return [(1e-9 * sv_counter_get(&self.of(worker).ran_ns),
                 1e-9 * sv_counter_get(&self.of(worker).starved_ns))
                for worker in range(self.segment.plan.sizes.num_workers)]

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

    def doing(self, at=None):
        cdef uint32_t worker
        cdef uint64_t busy
        cdef int64_t elapsed
        cdef int64_t now = sv_now_ns() if at is None else at
        cdef list found = []
        for worker in range(self.segment.plan.sizes.num_workers):
            busy = sv_busy_for(self.of(worker), now, &elapsed)
            if busy != 0 and sv_busy_env(busy) < self.segment.plan.sizes.num_envs:
                found.append((sv_busy_env(busy), sv_busy_name(busy).decode(),
                              1e-9 * max(0, elapsed)))
            else:  # or the segment is damaged
                found.append(None)
        return found

    def waiting(self):
        cdef int64_t elapsed
        if sv_busy_for(&self.notice.parent, sv_now_ns(), &elapsed) == 0:
            return None
        return 1e-9 * max(0, elapsed)
