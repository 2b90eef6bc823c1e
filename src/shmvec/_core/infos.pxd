from libc.stdint cimport uint32_t

from shmvec._core.codec cimport Codec
from shmvec._core.messages cimport Decoder, Field


cdef class Columns:
    cdef dict by_key
    cdef list entered   # those that are in this batch's infos
    cdef int settle(self, list fields) except -1


cdef class InfoDecoder(Decoder):
    cdef Columns columns
    cdef Codec observations
    cdef Codec finals
    # Of the dict that is being built: where the message's env is in it, and its length.
    cdef Py_ssize_t row
    cdef Py_ssize_t num_rows
    cdef list drain(self, uint32_t sequence)
    cdef int add_to(self, dict infos, uint32_t sequence, object vector_env) except -1
    cdef int add_env(self, dict infos, Py_ssize_t env, uint32_t sequence, Py_ssize_t row,
                     Py_ssize_t num_rows, object vector_env) except -1
    cdef object take_one(self, dict infos, object vector_env)
    cpdef object take_once(self, dict infos, object vector_env)
    cdef int add_fields(self, Columns columns, list fields, dict infos,
                        object vector_env) except -1
    cdef int add_nested(self, Field field, dict infos, object vector_env) except -1
