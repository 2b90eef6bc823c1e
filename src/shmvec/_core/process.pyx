"""This process: its watchdog, family, signal handlers and output; its ring of a trace.

Most of it calls csrc, whose headers say what is done, and why: watchdog.h, family.h, handler.h,
trace.h. The watchdog stops while this process forks, so that the process forks with only
the program's own threads. It continues in the parent; the child has none.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.signal cimport SIG_DFL
from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport BUFSIZ, _IOLBF, fflush, setvbuf, stdout
from posix.signal cimport sigaction, sigaction_t

from shmvec._core cimport csrc as c

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


cdef extern from "unistd.h":
    int close(int descriptor) nogil

cdef int _watched = -1          # the watchdog's pidfd; -1: there is no watchdog
cdef uint64_t _mark = 0         # the mark of the family that it ends, too
cdef bint _follows = False      # whether hooks stop and start it at forks
cdef char _lines[BUFSIZ]        # the buffer of C's stdout, for as long as the process lives


# ---- descriptors -----------------------------------------------------------------------------


cdef class Descriptor:
    """A file descriptor, closed when nothing refers to this object any more.

    Opening and closing are in C: what a signal's handler raises loses no descriptor.
    """

    cdef readonly int number  # -1: it is closed

    def __cinit__(self, opens, *arguments):
        """Calls a builtin function that opens a descriptor, and owns that."""
        self.number = -1
        self.number = opens(*arguments)

    def __dealloc__(self):
        self.close()

    cpdef void close(self) noexcept:
        cdef int number = self.number
        self.number = -1
        if number >= 0:
            close(number)


def opened_pipe():
    # No bytecode runs in between, at which a signal's handler could raise.
    return [Descriptor(int, number) for number in os.pipe()]


# ---- watchdog --------------------------------------------------------------------------------


def start_watchdog(int descriptor, uint64_t mark):
    global _watched, _mark
    cdef int error = c.sv_watchdog_start(descriptor, mark)
    if error != 0:
        raise OSError(error, f"cannot watch over the parent: {os.strerror(error)}")
    _watched, _mark = descriptor, mark
    _follow_forks()


def stop_watchdog():
    global _watched
    c.sv_watchdog_stop()
    _watched = -1


# ---- family ----------------------------------------------------------------------------------


def mark_process(uint64_t mark):
    cdef int error = c.sv_family_lead(mark)
    if error != 0:
        raise OSError(error, f"cannot mark this process: {os.strerror(error)}")


cdef bytes packed_marks(marks):
    return b"".join([mark.to_bytes(8, "little") for mark in marks])


def signal_marked(marks, int number, int spared=0):
    cdef bytes packed = packed_marks(marks)
    cdef const uint64_t *first = <const uint64_t *><const char *>packed
    cdef uint32_t count = len(packed) // sizeof(uint64_t), living
    with nogil:
        living = c.sv_family_signal(first, count, number, spared)
    return living


def reap_marked(marks):
    cdef bytes packed = packed_marks(marks)
    cdef const uint64_t *first = <const uint64_t *><const char *>packed
    cdef uint32_t count = len(packed) // sizeof(uint64_t)
    with nogil:
        c.sv_family_reap(first, count)


# ---- handlers of signals ---------------------------------------------------------------------


def is_unhandled(int number):
    """Whether this process neither handles nor ignores a signal, in Python or C."""
    cdef sigaction_t action
    return sigaction(number, NULL, &action) == 0 and action.sa_handler == SIG_DFL


def guard_handler(int number, int descriptor):
    cdef int error = c.sv_handler_guard(number, descriptor, UNREADY, UNREADY_BYTES)
    if error != 0:
        raise OSError(error, f"signal {number}: {os.strerror(error)}")


# ---- output ----------------------------------------------------------------------------------


def buffer_c_lines():
    """Has C's stdout pass on whole lines; what is in its buffer goes out first."""
    fflush(stdout)
    # After python -u the stream's own buffer has room for one byte.
    setvbuf(stdout, _lines, _IOLBF, BUFSIZ)


def flush_c():
    fflush(stdout)


# ---- forks -----------------------------------------------------------------------------------


def _before_fork():
    c.sv_watchdog_stop()


def _after_fork_in_parent():
    if _watched >= 0:
        start_watchdog(_watched, _mark)


def _after_fork_in_child():
    global _watched
    _watched = -1


cdef int _follow_forks() except -1:
    """Registers the hooks above; late, so that other libraries' hooks run without the watchdog."""
    global _follows
    if not _follows:
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork_in_parent,
            after_in_child=_after_fork_in_child,
        )
        _follows = True
    return 0


# ---- the ring of a trace -----------------------------------------------------------------------


cdef int check_ring(Py_ssize_t nbytes, rings, size, index) except -1:
    if size < 16 or size & (size - 1) or not 0 <= index < rings:
        raise ValueError(f"there is no ring {index} of {size} entries among {rings}")
    if nbytes < <Py_ssize_t>c.sv_trace_bytes(rings, size):
        raise ValueError(f"{rings} rings of {size} entries do not fit {nbytes} bytes")
    return 0


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class Recorder:
    """A writer's end of a ring of a trace; its first entry names the writer."""

    def __cinit__(self, memory, rings, size, index, *args, **kwargs):
        PyObject_GetBuffer(memory, &self._export, PyBUF_WRITABLE)
        check_ring(self._export.len, rings, size, index)

    def __init__(self, memory, rings, size, index, pid, takes=False):
        c.sv_trace_attach(&self.trace, self._export.buf, size, index,
                          c.SV_TRACE_TAKE if takes else c.SV_TRACE_NOTHING)
        now = c.sv_now_ns()
        c.sv_trace_add(&self.trace, c.SV_TRACE_ATTACH, pid, now, now)

    def __dealloc__(self):
        PyBuffer_Release(&self._export)
