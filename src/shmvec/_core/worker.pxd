from libc.stdint cimport int64_t


cdef void add_time_in_wrappers(int64_t ns) noexcept
cpdef int end_forks() except -1
