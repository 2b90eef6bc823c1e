"""The processes that a worker has started, known by a mark: see csrc/family.h."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from shmvec._core.csrc cimport sv_family_lead, sv_family_signal

import os


def mark_process(uint64_t mark):
    cdef int error = sv_family_lead(mark)
    if error != 0:
        raise OSError(error, f"cannot mark this process: {os.strerror(error)}")


def signal_marked(marks, int number, int spared=0):
    cdef uint32_t count = len(marks), i, living
    cdef uint64_t *copied = <uint64_t *>malloc((count + 1) * sizeof(uint64_t))
    if copied == NULL:
        raise MemoryError
    try:
        for i in range(count):
            copied[i] = marks[i]
        with nogil:
            living = sv_family_signal(copied, count, number, spared)
    finally:
        free(copied)
    return living
