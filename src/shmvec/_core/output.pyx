"""What workers print: copies of their stderr (csrc/tee.h), and the buffer of C's stdout.

While this process forks the thread that copies is away: the fork is one of a process that has no
other threads than the program's own. In the fork nothing is copied.
"""

cimport cython

from shmvec._core.csrc cimport (
    SV_TEE_LAST, sv_tee, sv_tee_close, sv_tee_forget, sv_tee_last, sv_tee_open, sv_tee_pause,
    sv_tee_resume, sv_tee_settle)

from libc.stdint cimport int64_t
from libc.stdio cimport BUFSIZ, _IOLBF, fflush, setvbuf, stdout
from posix.unistd cimport close as close_descriptor

import os

cdef object _opening = object()  # one thread at a time is
cdef bint _follows = False   # forks, by the hooks below
cdef char _lines[BUFSIZ]     # C's stdout has its buffer here for as long as the process lives


cdef class Tee:
    cdef sv_tee *tee
    cdef readonly int end
    cdef int settling  # threads that wait within: the last of them closes it
    cdef bint closed

    def __cinit__(self):
        self.end = -1

    def __init__(self, int target):
        global _follows
        if self.tee != NULL:
            raise RuntimeError("it is open")
        cdef int end
        cdef int error
        with cython.critical_section(_opening):
            if not _follows:
                os.register_at_fork(before=_pause, after_in_parent=_resume, after_in_child=_forget)
                _follows = True
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


def _pause():
    with nogil:
        sv_tee_pause()


def _resume():
    sv_tee_resume()


def _forget():
    sv_tee_forget()


def buffer_c_lines():
    """C's stdout passes on whole lines; what is in its buffer goes out first."""
    fflush(stdout)
    # Its own, if it had none (python -u), has room for one byte.
    setvbuf(stdout, _lines, _IOLBF, BUFSIZ)


def flush_c():
    fflush(stdout)
