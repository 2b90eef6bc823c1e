"""What is done to this process: its watchdog, family, signal handlers, output, forks, and trace.

Most of it calls csrc, whose headers say what is done, and why: watchdog.h, family.h, handler.h,
trace.h. The watchdog stops while this process forks, so that the fork sees only the program's own
threads. It goes on in the parent; the child has none.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.errno cimport EAGAIN, errno
from libc.signal cimport SIG_DFL, SIG_IGN, SIGINT, raise_
from libc.stdint cimport uint32_t, uint64_t
from libc.stdio cimport BUFSIZ, _IOLBF, fflush, setvbuf, stdout
from libc.string cimport memrchr
from posix.signal cimport SA_RESTART, sigaction, sigaction_t, sigemptyset
from posix.unistd cimport _exit, close, write

from shmvec._core cimport csrc as c

import os
import threading

cdef extern from *:
    """
    #if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030D0000
    #define UNREADY ((const void *)(uintptr_t)_PyEval_EvalFrameDefault)
    #define UNREADY_BYTES 1024 /* that count a call and link its frame: 170 by gcc -O3 */
    #else
    #define UNREADY NULL
    #define UNREADY_BYTES 0
    #endif
    """
    const void *UNREADY
    size_t UNREADY_BYTES


cdef extern from "limits.h":
    enum: PIPE_BUF

cdef extern from "poll.h" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *descriptors, unsigned long count, int timeout_ms)
    enum: POLLIN, POLLOUT

cdef int _parent_pidfd = -1        # that the watchdog watches; -1: there is no watchdog
cdef uint64_t _family_mark = 0     # of the family that the watchdog ends, too
cdef bint _has_fork_hooks = False  # hooks stop and start the watchdog at forks
cdef char _stdout_buffer[BUFSIZ]   # of C's stdout, which may use it until the process ends


# ---- descriptors -----------------------------------------------------------------------------


cdef class Descriptor:
    """A file descriptor, closed when nothing refers to this object any more.

    Opening and closing are in C, so that an exception of a signal's handler loses no descriptor.
    """

    def __cinit__(self, open_function, *arguments):
        """Calls a builtin function that opens a descriptor, and owns the descriptor."""
        self.number = -1
        self.number = open_function(*arguments)

    def __dealloc__(self):
        self.close()

    cpdef void close(self) noexcept:
        cdef int number = self.number
        self.number = -1
        if number >= 0:
            close(number)


def open_pipe():
    # Between the calls no bytecode runs, at which a signal's handler could raise.
    return [Descriptor(int, number) for number in os.pipe()]


# ---- watchdog --------------------------------------------------------------------------------


def start_watchdog(int descriptor, uint64_t mark):
    global _parent_pidfd, _family_mark
    cdef int error = c.sv_watchdog_start(descriptor, mark)
    if error != 0:
        raise OSError(error, f"cannot watch over the parent: {os.strerror(error)}")
    _parent_pidfd, _family_mark = descriptor, mark
    _register_fork_hooks()


def stop_watchdog():
    global _parent_pidfd
    c.sv_watchdog_stop()
    _parent_pidfd = -1


# ---- family ----------------------------------------------------------------------------------


def mark_process(uint64_t mark):
    """Marks this process, a worker, and the processes that it starts from now on."""
    c.sv_family_lead(mark)  # where that fails, only their process group identifies them


cdef bytes _pack_marks(marks):
    return b"".join([mark.to_bytes(8, "little") for mark in marks])


def signal_marked(marks, int number, int spared=0):
    cdef bytes packed = _pack_marks(marks)
    cdef const uint64_t *first = <const uint64_t *><const char *>packed
    cdef uint32_t count = len(packed) // sizeof(uint64_t), num_alive
    with nogil:
        num_alive = c.sv_family_signal(first, count, number, spared)
    return num_alive


def reap_marked(marks):
    cdef bytes packed = _pack_marks(marks)
    cdef const uint64_t *first = <const uint64_t *><const char *>packed
    cdef uint32_t count = len(packed) // sizeof(uint64_t)
    with nogil:
        c.sv_family_reap(first, count)


# ---- handlers of signals ---------------------------------------------------------------------


def is_unhandled(int number):
    """Whether this process neither handles nor ignores a signal, in Python or in C."""
    cdef sigaction_t action
    return sigaction(number, NULL, &action) == 0 and action.sa_handler == SIG_DFL


def guard_handler(int number, int descriptor):
    cdef int error = c.sv_handler_guard(number, descriptor, UNREADY, UNREADY_BYTES)
    if error != 0:
        raise OSError(error, f"signal {number}: {os.strerror(error)}")


# ---- output ----------------------------------------------------------------------------------


def buffer_c_lines():
    """Makes C's stdout line-buffered, after a flush."""
    fflush(stdout)
    # With python -u the stream's own buffer has room for only one byte.
    setvbuf(stdout, _stdout_buffer, _IOLBF, BUFSIZ)


def flush_c():
    fflush(stdout)


def write_lines(bytes lines, int alarm):
    """Writes lines to stderr until another descriptor is readable.

    Returns how many bytes are done with: all, if stderr has no reader or the disk is full.
    """
    cdef const char *next = lines
    cdef const char *end = next + len(lines)
    cdef const char *newline
    cdef size_t count
    cdef ssize_t written
    cdef pollfd descriptors[2]
    descriptors[0] = pollfd(fd=2, events=POLLOUT, revents=0)
    descriptors[1] = pollfd(fd=alarm, events=POLLIN, revents=0)
    with nogil:
        while next < end:
            if poll(descriptors, 2, -1) < 0:
                continue
            if descriptors[1].revents != 0:
                break
            # A writable pipe has room for so many bytes at once: this does not block.
            count = min(<size_t>(end - next), <size_t>PIPE_BUF)
            newline = <const char *>memrchr(next, c'\n', count)
            if newline != NULL:
                count = newline + 1 - next
            written = write(2, next, count)
            if written >= 0:
                next += written
            elif errno != EAGAIN:  # EAGAIN: another program has made it non-blocking, and filled it
                next = end
    return len(lines) - (end - next)


# ---- forks -----------------------------------------------------------------------------------

cdef bint _interrupted = False  # SIGINT has come during a fork


cdef void _note_interrupt(int number) noexcept nogil:
    global _interrupted
    _interrupted = True


def fork(run, list children):
    """Forks this process. The fork calls `run`, and ends with status 1 if that returns or raises.

    The fork's process id is appended to `children` before any signal's handler can raise. Python
    runs hooks around a fork, and discards what they raise. So Ctrl-C is deferred until after it.
    """
    global _interrupted
    cdef int pid = -1
    cdef sigaction_t user_action, own_action
    # Python's handlers run in the main thread alone, whichever thread gets the signal.
    cdef bint defers_interrupt = threading.current_thread() is threading.main_thread()
    if defers_interrupt:
        sigaction(SIGINT, NULL, &user_action)
        defers_interrupt = user_action.sa_handler != SIG_DFL and user_action.sa_handler != SIG_IGN
    if defers_interrupt:
        _interrupted = False
        own_action.sa_handler = _note_interrupt
        own_action.sa_flags = SA_RESTART
        sigemptyset(&own_action.sa_mask)
        sigaction(SIGINT, &own_action, NULL)
    try:
        pid = os.fork()
        if pid > 0:
            children.append(pid)
    finally:
        if defers_interrupt:
            sigaction(SIGINT, &user_action, NULL)
            if _interrupted and pid != 0:
                raise_(SIGINT)
    if pid == 0:
        try:
            run()
        finally:
            _exit(1)


def _before_fork():
    c.sv_watchdog_stop()


def _after_fork_in_parent():
    if _parent_pidfd >= 0:
        start_watchdog(_parent_pidfd, _family_mark)


def _after_fork_in_child():
    global _parent_pidfd
    _parent_pidfd = -1


cdef int _register_fork_hooks() except -1:
    # Late: hooks that other libraries registered before these then run without the watchdog.
    global _has_fork_hooks
    if not _has_fork_hooks:
        os.register_at_fork(
            before=_before_fork,
            after_in_parent=_after_fork_in_parent,
            after_in_child=_after_fork_in_child,
        )
        _has_fork_hooks = True
    return 0


# ---- the ring of a trace -----------------------------------------------------------------------


cdef int check_trace_ring(Py_ssize_t nbytes, rings, size, index) except -1:
    if size < 16 or size & (size - 1) or not 0 <= index < rings:
        raise ValueError(f"there is no ring {index} of {size} entries among {rings}")
    if nbytes < <Py_ssize_t>c.sv_trace_bytes(rings, size):
        raise ValueError(f"{rings} rings of {size} entries do not fit {nbytes} bytes")
    return 0


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class Recorder:
    """A writer's end of a ring of a trace. Its first entry names the writer."""

    def __cinit__(self, memory, rings, size, index, *args, **kwargs):
        PyObject_GetBuffer(memory, &self._export, PyBUF_WRITABLE)
        check_trace_ring(self._export.len, rings, size, index)

    def __init__(self, memory, rings, size, index, pid, is_caller=False):
        c.sv_trace_attach(&self.trace, self._export.buf, size, index,
                          c.SV_TRACE_TAKE if is_caller else c.SV_TRACE_NOTHING)
        now = c.sv_now_ns()
        c.sv_trace_add(&self.trace, c.SV_TRACE_ATTACH, pid, now, now)

    def __dealloc__(self):
        PyBuffer_Release(&self._export)
