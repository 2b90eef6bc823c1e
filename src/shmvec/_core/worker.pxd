from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmvec._core cimport csrc as c
from shmvec._core.memory cimport Blocks, Codec, Results, Segment
from shmvec._core.messages cimport Decoder, Encoder
from shmvec._core.process cimport Recorder
from shmvec._core.replay cimport ReplayLog


cdef void add_time_in_wrappers(int64_t ns) noexcept
cpdef int end_forks() except -1
