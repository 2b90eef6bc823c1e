from cpython.buffer cimport Py_buffer

from shmvec._core.csrc cimport sv_trace


cdef class Recorder:
    cdef sv_trace trace
    cdef Py_buffer _export
