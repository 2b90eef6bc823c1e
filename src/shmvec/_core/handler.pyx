"""Handlers of signals: whether there is one, and one that leaves errno as it was: csrc/handler.h."""

from libc.signal cimport SIG_DFL
from posix.signal cimport sigaction, sigaction_t

from shmvec._core.csrc cimport sv_handler_keep_errno

import os


def is_free(int number):
    cdef sigaction_t action
    return sigaction(number, NULL, &action) == 0 and action.sa_handler == SIG_DFL


def keep_errno(int number):
    cdef int error = sv_handler_keep_errno(number)
    if error != 0:
        raise OSError(error, f"signal {number}: {os.strerror(error)}")
