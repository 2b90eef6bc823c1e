"""Memory that is not written again while somebody looks at it: csrc/hold.h."""

cimport cython
from cpython.buffer cimport (
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)

from shmvec._core.csrc cimport sv_marks_clear, sv_marks_set

import numpy as np


@cython.no_gc  # nothing it refers to can refer to it, and it must be whole when it goes
cdef class Lease:
    """Marks rows as leased while it lives; the arrays that show them have it as their base."""

    def __cinit__(self, memory, leased, Py_ssize_t first, Py_ssize_t count):
        PyObject_GetBuffer(memory, &self.export, PyBUF_WRITABLE)
        self.memory = memory
        self.leased = leased
        self.first = first
        self.count = count
        sv_marks_set(&self.leased[0], first, count)

    def __dealloc__(self):
        self.end()
        PyBuffer_Release(&self.export)

    def release(self):
        with cython.critical_section(self):  # once, or it would end the lease of who has it next
            self.end()

    cdef void end(self) noexcept:
        if not self.ended:
            self.ended = True
            sv_marks_clear(&self.leased[0], self.first, self.count)

    @property
    def released(self):
        return self.ended

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.export.buf, self.export.len, False, flags)

    cdef object show(self, char *start, tuple shape, object dtype):
        """An array over the memory from `start` on, which keeps this lease."""
        return np.ndarray(shape, dtype, self, start - <char *>self.export.buf)
