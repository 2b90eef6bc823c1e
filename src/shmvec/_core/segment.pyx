"""The shared segment as Python sees it: a validated mapping, and arrays over its slabs."""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

from shmvec._core.csrc cimport (
    sv_segment,
    sv_segment_format,
    sv_segment_front,
    sv_segment_open,
    sv_segment_plan,
    sv_segment_reserve,
    sv_segment_sizes,
)

import os

import numpy as np


cdef bint _plan(sv_segment *plan, num_workers, num_envs, records, info_bytes,
                action_bytes, slab_bytes) except -1:
    """Computes a layout; capacities are rounded up to powers of two."""
    cdef sv_segment_sizes sizes
    sizes.num_workers = num_workers
    sizes.num_envs = num_envs
    sizes.ring_capacity = 1 << max(6, (records - 1).bit_length())
    sizes.info_capacity = 1 << max(12, (info_bytes - 1).bit_length())
    sizes.action_capacity = 1 << max(6, (action_bytes - 1).bit_length())
    sizes.reserved = 0
    sizes.slab_bytes = slab_bytes
    if not sv_segment_plan(&sizes, plan):
        raise ValueError(
            f"no segment can hold {num_workers} workers, {num_envs} envs, rings of {records} "
            f"records, {info_bytes} and {action_bytes} bytes, and {slab_bytes} bytes of slabs"
        )
    return True


def segment_bytes(num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes):
    cdef sv_segment plan
    _plan(&plan, num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes)
    return plan.total_bytes


def reserve_pages(int descriptor, nbytes):
    cdef int error = sv_segment_reserve(descriptor, nbytes)
    if error != 0:
        raise OSError(error, os.strerror(error))


@cython.no_gc_clear  # which would drop the exporter without releasing its buffer
cdef class Segment:
    def __cinit__(self, memory, writable=True):
        PyObject_GetBuffer(memory, &self._export, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self.memory = memory
        self.base = <char *>self._export.buf

    def __dealloc__(self):
        # The mapping lives on while arrays made by array() do: each holds its own export.
        PyBuffer_Release(&self._export)

    @staticmethod
    def create(memory, num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes):
        cdef Segment segment = Segment(memory)
        _plan(&segment.plan, num_workers, num_envs, records, info_bytes, action_bytes, slab_bytes)
        if <Py_ssize_t>segment.plan.total_bytes > segment._export.len:
            raise ValueError(
                f"the segment needs {segment.plan.total_bytes} bytes but the mapping has "
                f"{segment._export.len}"
            )
        sv_segment_format(segment.base, &segment.plan)
        return segment

    @staticmethod
    def open(memory):
        cdef Segment segment = Segment(memory)
        if not sv_segment_open(segment.base, segment._export.len, &segment.plan):
            raise ValueError(
                "the shared memory holds no shmvec segment of this version; "
                "parent and workers must run the same shmvec"
            )
        return segment

    @staticmethod
    def look(memory, nbytes):
        cdef Segment segment = Segment(memory, False)
        if (segment._export.len < <Py_ssize_t>sizeof(sv_segment)
                or not sv_segment_open(segment.base, nbytes, &segment.plan)):
            raise ValueError("it is damaged, or of another version of shmvec")
        return segment

    @property
    def front(self):
        return sv_segment_front(&self.plan)

    cdef bint has_front(self) noexcept:
        return self._export.len >= <Py_ssize_t>sv_segment_front(&self.plan)

    @property
    def num_workers(self):
        return self.plan.sizes.num_workers

    @property
    def num_envs(self):
        return self.plan.sizes.num_envs

    def array(self, Py_ssize_t offset, shape, dtype):
        array = np.ndarray(
            shape, dtype, buffer=self.memory, offset=<Py_ssize_t>self.plan.slabs + offset
        )
        if offset < 0 or offset + array.nbytes > <Py_ssize_t>self.plan.sizes.slab_bytes:
            raise ValueError(f"an array of {array.nbytes} bytes at {offset} is outside the slabs")
        return array
