"""Counters as Python sees them, under their names in csrc/counters.h."""

from shmvec._core.csrc cimport (
    SV_NUM_COUNTERS,
    sv_count_at,
    sv_counter_names,
    sv_counters,
    sv_counters_read,
    sv_counts,
)


cdef inline dict counts_of(const sv_counters *counters):
    """A process's, in the segment."""
    cdef sv_counts counts
    cdef size_t i
    cdef dict named = {}
    sv_counters_read(counters, &counts)
    for i in range(SV_NUM_COUNTERS):
        named[sv_counter_names[i].name.decode()] = sv_count_at(&counts, sv_counter_names[i].offset)
    return named
