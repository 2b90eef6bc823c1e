from libc.stdint cimport uint32_t

from shmvec._core.csrc cimport sv_byte_ring


cdef class InfoEncoder:
    cdef sv_byte_ring ring
    cdef list schemas
    cdef dict ids
    cdef list last
    cdef Py_ssize_t first_env
    cdef char *buffer
    cdef Py_ssize_t used
    cdef Py_ssize_t room
    cdef int encode(self, Py_ssize_t env, object info, uint32_t sequence) except -1
    cdef char *grow(self, Py_ssize_t nbytes) except NULL
    cdef bint pack(self, list fields, dict info) except -1
    cdef object learn(self, dict info)
    cdef bint send(self, uint32_t tag) noexcept


cdef class Columns:
    cdef dict by_key
    cdef list entered   # those that are in this batch's infos
    cdef int settle(self, list fields) except -1


cdef class InfoDecoder:
    cdef sv_byte_ring ring
    cdef list schemas
    cdef Columns columns
    cdef Py_ssize_t num_envs
    cdef int next(self, uint32_t sequence, Py_ssize_t *env, const char **payload,
                  Py_ssize_t *nbytes, uint32_t *tag) except -1
    cdef dict unpack(self, list fields, const char **cursor, const char *end)
