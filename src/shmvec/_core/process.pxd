from cpython.buffer cimport Py_buffer

from shmvec._core cimport csrc as c


cdef class Recorder:
    cdef c.sv_trace trace
    cdef Py_buffer _export
