"""Has the handler of a signal leave errno as it was: see csrc/handler.h."""

from shmvec._core.csrc cimport sv_handler_keep_errno

import os


def keep_errno(int number):
    cdef int error = sv_handler_keep_errno(number)
    if error != 0:
        raise OSError(error, f"signal {number}: {os.strerror(error)}")
