"""What is done to processes by the operating system's means: csrc/watchdog.h, family.h, handler.h, tee.h.

A watchdog ends a worker when its parent is gone, whatever its env is doing. A mark makes known which
processes a worker has started. A guard goes around the signal handler of somebody else. A ``Tee``
copies what a worker writes to its stderr.

While this process forks, the threads that watch and that copy are away: the fork is one of a process
that has the program's own threads only. They go on in the parent; the child has none.
"""

cimport cython
from libc.signal cimport SIG_DFL
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport BUFSIZ, _IOLBF, fflush, setvbuf, stdout
from libc.stdlib cimport free, malloc
from posix.signal cimport sigaction, sigaction_t
from posix.unistd cimport close as close_descriptor

from shmvec._core.csrc cimport (
    SV_TEE_LAST,
    sv_family_lead,
    sv_family_signal,
    sv_handler_guard,
    sv_tee,
    sv_tee_close,
    sv_tee_forget,
    sv_tee_last,
    sv_tee_open,
    sv_tee_pause,
    sv_tee_resume,
    sv_tee_settle,
    sv_watchdog_start,
    sv_watchdog_stop,
)

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

cdef int _watched = -1          # the watchdog's pidfd; -1: there is no watchdog
cdef uint64_t _mark = 0         # of the family that it ends, too
cdef bint _follows = False      # forks, by hooks
cdef object _opening = object() # one tee at a time is
cdef char _lines[BUFSIZ]        # C's stdout has its buffer here for as long as the process lives


# ---- watchdog --------------------------------------------------------------------------------


def start_watchdog(int descriptor, uint64_t mark):
    global _watched, _mark
    cdef int error = sv_watchdog_start(descriptor, mark)
    if error != 0:
        raise OSError(error, f"cannot watch over the parent: {os.strerror(error)}")
    _watched, _mark = descriptor, mark
    _follow_forks()


def stop_watchdog():
    global _watched
    sv_watchdog_stop()
    _watched = -1


# ---- family ----------------------------------------------------------------------------------


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


# ---- handlers of signals ---------------------------------------------------------------------


def is_unhandled(int number):
    cdef sigaction_t action
    return sigaction(number, NULL, &action) == 0 and action.sa_handler == SIG_DFL


def guard_handler(int number, int descriptor):
    cdef int error = sv_handler_guard(number, descriptor, UNREADY, UNREADY_BYTES)
    if error != 0:
        raise OSError(error, f"signal {number}: {os.strerror(error)}")


# ---- output ----------------------------------------------------------------------------------


cdef class Tee:
    cdef sv_tee *tee
    cdef readonly int end
    cdef int settling  # threads that wait within: the last of them closes it
    cdef bint closed

    def __cinit__(self):
        self.end = -1

    def __init__(self, int target):
        if self.tee != NULL:
            raise RuntimeError("it is open")
        cdef int end
        cdef int error
        with cython.critical_section(_opening):
            _follow_forks()
            error = sv_tee_open(target, &self.tee, &end)
        if error != 0:
            raise OSError(error, f"cannot copy what a worker writes: {os.strerror(error)}")
        self.end = end

    def __dealloc__(self):
        if self.end >= 0:  # or the copying would not come to its end
            close_descriptor(self.end)
        if self.tee != NULL:
            sv_tee_close(self.tee)

    def close_end(self):
        if self.end >= 0:
            close_descriptor(self.end)
            self.end = -1

    def last(self):
        cdef char text[SV_TEE_LAST]
        cdef size_t count = 0
        with cython.critical_section(self):
            if self.tee != NULL:
                count = sv_tee_last(self.tee, text, SV_TEE_LAST)
        return text[:count]

    def settle(self, double patience):
        cdef int64_t patience_ns = <int64_t>(1e9 * patience)
        cdef bint settled = True
        with cython.critical_section(self):
            if self.tee == NULL:
                return True
            self.settling += 1
        with nogil:
            settled = sv_tee_settle(self.tee, patience_ns)
        with cython.critical_section(self):
            self.settling -= 1
            if self.closed:
                self.close()
        return settled

    def close(self):
        with cython.critical_section(self):
            self.closed = True
            if self.tee != NULL and self.settling == 0:
                sv_tee_close(self.tee)
                self.tee = NULL


def buffer_c_lines():
    fflush(stdout)
    # Its own, if it had none (python -u), has room for one byte.
    setvbuf(stdout, _lines, _IOLBF, BUFSIZ)


def flush_c():
    fflush(stdout)


# ---- forks -----------------------------------------------------------------------------------


def _before_fork():
    sv_watchdog_stop()
    with nogil:
        sv_tee_pause()


def _after_fork_in_parent():
    sv_tee_resume()
    if _watched >= 0:
        start_watchdog(_watched, _mark)


def _after_fork_in_child():
    global _watched
    _watched = -1
    sv_tee_forget()


cdef int _follow_forks() except -1:
    """Has the above called; not before there are threads, as hooks of others' then run without them."""
    global _follows
    if not _follows:
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork_in_parent,
            after_in_child=_after_fork_in_child,
        )
        _follows = True
    return 0
