"""The rings of a trace, in which parent and workers record what they do when; see csrc/trace.h."""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t
from posix.unistd cimport getpid

from shmvec._core.csrc cimport (
    SV_TRACE_ATTACH,
    SV_TRACE_CALL,
    SV_TRACE_CALLER,
    SV_TRACE_ERROR,
    SV_TRACE_HERE,
    SV_TRACE_NOTHING,
    SV_TRACE_PARK,
    SV_TRACE_PAUSE,
    SV_TRACE_RESET,
    SV_TRACE_SEND,
    SV_TRACE_STEP,
    SV_TRACE_TAKE,
    SV_TRACE_YIELD,
    sv_now_ns,
    sv_trace_add,
    sv_trace_attach,
    sv_trace_bytes,
    sv_trace_entry,
    sv_trace_read,
    sv_trace_turn,
)

import os

import numpy as np

TRACE_KINDS = {
    SV_TRACE_STEP: "step",
    SV_TRACE_RESET: "reset",
    SV_TRACE_CALL: "call",
    SV_TRACE_ERROR: "error",
    SV_TRACE_ATTACH: "attach",
    SV_TRACE_PAUSE: "wait: spin",
    SV_TRACE_YIELD: "wait: yield",
    SV_TRACE_PARK: "wait: park",
    SV_TRACE_SEND: "send",
    SV_TRACE_TAKE: "take",
    SV_TRACE_CALLER: "caller",
    SV_TRACE_HERE: "envs",
}

_ENTRY = np.dtype([("begin", np.int64), ("end", np.int64), ("env", np.uint32), ("kind", np.uint32)])


cdef int _check(Py_ssize_t nbytes, rings, size, index) except -1:
    if size < 16 or size & (size - 1) or not 0 <= index < rings:
        raise ValueError(f"there is no ring {index} of {size} entries among {rings}")
    if nbytes < <Py_ssize_t>sv_trace_bytes(rings, size):
        raise ValueError(f"{rings} rings of {size} entries do not fit {nbytes} bytes")
    return 0


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class Recorder:
    def __cinit__(self, memory, rings, size, index, *args, **kwargs):
        PyObject_GetBuffer(memory, &self._export, PyBUF_WRITABLE)
        _check(self._export.len, rings, size, index)

    def __init__(self, memory, rings, size, index, pid, takes=False):
        sv_trace_attach(&self.trace, self._export.buf, size, index,
                        SV_TRACE_TAKE if takes else SV_TRACE_NOTHING)
        now = sv_now_ns()
        sv_trace_add(&self.trace, SV_TRACE_ATTACH, pid, now, now)

    def __dealloc__(self):
        PyBuffer_Release(&self._export)


def trace_bytes(rings, size):
    return sv_trace_bytes(rings, size)


@cython.no_gc_clear  # as above
cdef class TraceSwitch:
    cdef Py_buffer _export
    cdef object owner

    def __cinit__(self, memory):
        PyObject_GetBuffer(memory, &self._export, PyBUF_WRITABLE)
        self.owner = os.getpid()
        _check(self._export.len, 1, 16, 0)
        sv_trace_turn(self._export.buf, True)

    def off(self):
        sv_trace_turn(self._export.buf, False)

    def __dealloc__(self):
        # In C, because a `__del__` would lose Ctrl-C. A fork must not end its parent's trace.
        if self._export.buf is not NULL and getpid() == self.owner:
            sv_trace_turn(self._export.buf, False)
        PyBuffer_Release(&self._export)


def read_trace(unsigned char[::1] memory, rings, size, index):
    cdef uint64_t lost
    _check(memory.shape[0], rings, size, index)
    entries = np.empty(size, _ENTRY)
    cdef unsigned char[::1] room = entries.view(np.uint8)
    cdef uint32_t count = sv_trace_read(
        &memory[0], size, index, <sv_trace_entry *>&room[0], &lost)
    return entries[:count], lost
