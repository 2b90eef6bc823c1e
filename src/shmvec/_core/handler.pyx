"""Handlers of signals: whether there is one, and one around that of somebody else: csrc/handler.h."""

from libc.signal cimport SIG_DFL
from posix.signal cimport sigaction, sigaction_t

from shmvec._core.csrc cimport sv_handler_guard

import os

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030D0000
    #define UNREADY ((const void *)(uintptr_t)_PyEval_EvalFrameDefault)
    #define UNREADY_BYTES 1024 /* where it counts a call in, and notes it: 170 in gcc's -O3 */
    #else
    #define UNREADY NULL
    #define UNREADY_BYTES 0
    #endif
    """
    const void *UNREADY
    size_t UNREADY_BYTES


def is_unhandled(int number):
    cdef sigaction_t action
    return sigaction(number, NULL, &action) == 0 and action.sa_handler == SIG_DFL


def guard_handler(int number, int descriptor):
    cdef int error = sv_handler_guard(number, descriptor, UNREADY, UNREADY_BYTES)
    if error != 0:
        raise OSError(error, f"signal {number}: {os.strerror(error)}")
