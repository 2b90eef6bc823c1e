"""A trace as the caller has it: its switch, and what is read from its rings (trace.h)."""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer, Py_buffer
from libc.stdint cimport uint32_t, uint64_t
from posix.unistd cimport getpid

from shmvec._core cimport csrc as c
from shmvec._core.process cimport check_trace_ring

import os

import numpy as np

TRACE_KINDS = {
    c.SV_TRACE_STEP: "step",
    c.SV_TRACE_RESET: "reset",
    c.SV_TRACE_CALL: "call",
    c.SV_TRACE_ERROR: "error",
    c.SV_TRACE_ATTACH: "attach",
    c.SV_TRACE_PAUSE: "wait: spin",
    c.SV_TRACE_YIELD: "wait: yield",
    c.SV_TRACE_PARK: "wait: park",
    c.SV_TRACE_SEND: "send",
    c.SV_TRACE_TAKE: "take",
    c.SV_TRACE_CALLER: "caller",
    c.SV_TRACE_HERE: "envs",
}

_ENTRY_DTYPE = np.dtype(
    [("begin", np.int64), ("end", np.int64), ("env", np.uint32), ("kind", np.uint32)])


def trace_bytes(rings, size):
    return c.sv_trace_bytes(rings, size)


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class TraceSwitch:
    """Has writers record a trace until it is turned off or freed."""

    cdef Py_buffer _export
    cdef object owner_pid

    def __cinit__(self, memory):
        PyObject_GetBuffer(memory, &self._export, PyBUF_WRITABLE)
        self.owner_pid = os.getpid()
        check_trace_ring(self._export.len, 1, 16, 0)
        c.sv_trace_turn(self._export.buf, True)

    def turn_off(self):
        """Has writers release the memory when they next look at it."""
        c.sv_trace_turn(self._export.buf, False)

    def __dealloc__(self):
        # Not in `__del__`, which would lose Ctrl-C. A fork must not end its parent's trace.
        if self._export.buf is not NULL and getpid() == self.owner_pid:
            c.sv_trace_turn(self._export.buf, False)
        PyBuffer_Release(&self._export)


def read_trace(unsigned char[::1] memory, rings, size, index):
    """The entries of a ring, oldest first, and the number of older ones that are overwritten.

    They make no sense if the memory was damaged.
    """
    cdef uint64_t num_lost
    check_trace_ring(memory.shape[0], rings, size, index)
    entries = np.empty(size, _ENTRY_DTYPE)
    cdef unsigned char[::1] entry_bytes = entries.view(np.uint8)
    cdef uint32_t count = c.sv_trace_read(
        &memory[0], size, index, <c.sv_trace_entry *>&entry_bytes[0], &num_lost)
    return entries[:count], num_lost
