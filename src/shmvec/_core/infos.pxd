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
    cdef int observe(self) except -1
    cdef int add_fields(self, Columns columns, list fields, dict infos,
                        object vector_env) except -1
    cdef int add_nested(self, Field field, dict infos, object vector_env) except -1
