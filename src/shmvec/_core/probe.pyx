"""What hand-overs between cores cost on this machine: see csrc/probe.h."""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc

from shmvec._core.csrc cimport (
    sv_probe_clock,
    sv_probe_rates,
    sv_probe_round_trip,
    sv_probe_yield,
)


def core_round_trip(uint32_t core, uint32_t other, bint sleeping, double seconds):
    cdef int64_t duration_ns = <int64_t>(1e9 * seconds)
    cdef double found
    with nogil:
        found = sv_probe_round_trip(core, other, sleeping, duration_ns)
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


def yield_cost(double seconds):
    return cost(sv_probe_yield, seconds)


def clock_cost(double seconds):
    return cost(sv_probe_clock, seconds)


cdef object cost(double (*probe)(int64_t) noexcept nogil, double seconds):
    """What a probe finds within so many seconds, in seconds."""
    cdef int64_t duration_ns = <int64_t>(1e9 * seconds)
    cdef double found
    with nogil:
        found = probe(duration_ns)
    return 1e-9 * found
