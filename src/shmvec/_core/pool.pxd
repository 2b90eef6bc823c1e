from shmvec._core.csrc cimport sv_hold


cdef struct Block:
    sv_hold hold      # arrays that live in it; a block that is never to be used again counts one
    void *copy        # for the fork that is being made; NULL: none


cdef class Pool:
    cdef object capsule   # of the allocator, which lives as long as its arrays do
    cdef readonly list codecs  # of observations of all envs, one a block
    cdef Py_ssize_t unheld(self)
    cdef object array(self, char *start, tuple shape, object dtype)
    cdef object take(self, Py_ssize_t block)
