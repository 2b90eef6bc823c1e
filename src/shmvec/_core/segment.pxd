from cpython.buffer cimport Py_buffer

from shmvec._core.csrc cimport sv_segment


cdef class Segment:
    cdef readonly object memory
    cdef char *base
    cdef sv_segment plan
    cdef Py_buffer _export
    cdef bint has_front(self) noexcept


cdef bytes packed_words(words)
