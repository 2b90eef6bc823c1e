"""What this machine costs, for the doctor command: probe.h says how it is measured."""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc

cdef extern from "probe.h" nogil:
    double sv_probe_round_trip(uint32_t core, uint32_t other, int64_t duration_ns)
    bint sv_probe_rates(const uint32_t *cores, uint32_t count, int64_t duration_ns, double *rates)
    double sv_probe_clock(int64_t duration_ns)


def core_round_trip(uint32_t core, uint32_t other, double seconds):
    cdef int64_t duration_ns = <int64_t>(1e9 * seconds)
    cdef double found
    with nogil:
        found = sv_probe_round_trip(core, other, duration_ns)
    return 1e-9 * found if found > 0 else None


def core_rates(cores, double seconds):
    cdef int64_t duration_ns = <int64_t>(1e9 * seconds)
    cdef uint32_t count = len(cores), i
    cdef uint32_t *places = <uint32_t *>malloc((count + 1) * sizeof(uint32_t))
    cdef double *found = <double *>malloc((count + 1) * sizeof(double))
    cdef bint room
    try:
        if places == NULL or found == NULL:
            raise MemoryError
        for i in range(count):
            places[i] = cores[i]
        with nogil:
            room = sv_probe_rates(places, count, duration_ns, found)
        if not room:
            raise MemoryError
        return [found[i] for i in range(count)]
    finally:
        free(places)
        free(found)


def clock_cost(double seconds):
    cdef int64_t duration_ns = <int64_t>(1e9 * seconds)
    cdef double found
    with nogil:
        found = sv_probe_clock(duration_ns)
    return 1e-9 * found
