from libc.stdint cimport uint32_t

from shmvec._core.codec cimport Codec
from shmvec._core.links cimport Links


cdef class Outbox:
    cdef Links links
    cdef Codec actions
    cdef list encoders              # by worker, of actions that are in no slab; None: they are
    cdef const uint32_t[::1] workers # of each env: the ledger's
    cdef int renew(self, uint32_t worker) except -1
    cdef dict put_all(self, const Py_ssize_t[::1] everyone, actions, pack, uint32_t sequence,
                      bint any_shape)
    cdef dict put(self, const Py_ssize_t[::1] envs, actions, pack, uint32_t sequence,
                  bint any_shape)
    cdef list write(self, const Py_ssize_t[::1] envs, actions, bint any_shape)
    cdef bint encode(self, Py_ssize_t env, action, uint32_t sequence) except -1
