from cpython.buffer cimport Py_buffer
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t

from shmvec._core cimport csrc as c


# The first fields of an array, NumPy's PyArrayObject_fields: the same in NumPy 1.x and 2.x.
cdef struct Fields:
    PyObject ob_base
    char *data
    int nd
    Py_ssize_t *dimensions
    Py_ssize_t *strides
    PyObject *base
    PyObject *descr
    int flags
    PyObject *weakreflist


cdef inline Fields *_fields(object array) noexcept:
    return <Fields *><PyObject *>array


cdef inline void *data_of(object array) noexcept:
    """The address of an array's elements."""
    return _fields(array).data


cdef inline int ndim_of(object array) noexcept:
    return _fields(array).nd


cdef inline const Py_ssize_t *shape_of(object array) noexcept:
    return _fields(array).dimensions


cdef inline Py_ssize_t size_of(object array) noexcept:
    """The number of elements of an array."""
    cdef Py_ssize_t size = 1
    cdef int axis
    for axis in range(_fields(array).nd):
        size *= _fields(array).dimensions[axis]
    return size


cdef inline bint has_dtype(object array, object dtype) noexcept:
    """Whether an array has this very dtype; one that is equal to it does not count."""
    return _fields(array).descr == <PyObject *>dtype


cdef inline bint is_contiguous(object array) noexcept:
    """Whether the elements lie side by side, in C's order."""
    return _fields(array).flags & 1  # NPY_ARRAY_C_CONTIGUOUS


cdef inline bint is_aligned(object array) noexcept:
    """Whether C may read the elements as their type."""
    return (_fields(array).flags & 0x100) != 0  # NPY_ARRAY_ALIGNED


cdef inline bint is_writeable(object array) noexcept:
    return (_fields(array).flags & 0x400) != 0  # NPY_ARRAY_WRITEABLE


# A new array of the same shape and dtype, contiguous in C's order, with any content.
cdef object new_like(object array)


# The same, of another dtype.
cdef object new_like_as(object array, object dtype)


cdef class Pool:
    cdef object template
    cdef bint pools_large
    cdef Py_ssize_t nbytes
    cdef list arrays
    cdef Py_ssize_t next_index
    cdef object new(self)
    cdef object copy(self)
    cdef bint is_free(self, PyObject *array) noexcept


cdef object array_over(object exporter, char *start, tuple shape, object dtype)


cdef class Segment:
    cdef readonly object memory
    cdef char *base
    cdef c.sv_segment plan
    cdef Py_buffer _export
    cdef bint has_front(self) noexcept


cdef bytes pack_words(words)
cdef void *address_of(object array) except? NULL
cdef object copy_array(object array, Py_ssize_t itemsize)


cdef class Codec:
    cdef int write(self, Py_ssize_t env, object value) except -1
    cdef bint keep(self, Py_ssize_t env, object value) except -1
    cdef object read(self, Py_ssize_t env)
    cpdef object batch(self, bint copy, Py_ssize_t first=*, Py_ssize_t count=*)
    cdef object gather(self, const Py_ssize_t[::1] envs)
    cdef object view(self, object lease, Py_ssize_t first, tuple lead)
    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1
    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1


cdef class MessageCodec(Codec):
    cdef object space
    cdef Py_ssize_t num_envs
    cdef object explain_error
    cdef dict batched_spaces
    cdef list values
    cdef object arrays
    cdef object join(self, envs, object arrays)
    cdef list split(self, object batch, Py_ssize_t count)


cdef class Results


cdef class StepLog:
    cpdef int attach(self, Py_ssize_t first, Py_ssize_t count) except -1
    cpdef int interrupt(self, Py_ssize_t env) except -1
    cdef int put_start(self, Py_ssize_t env, Py_ssize_t num_unpublished,
                       object observation) except -1
    cdef int put_step(self, Py_ssize_t env, object action, object observation, Results results,
                      Py_ssize_t row) except -1
    cdef int publish(self, Py_ssize_t env, Py_ssize_t count) except -1
    cdef int note_request(self, const Py_ssize_t *envs, Py_ssize_t count) except -1
    cdef int accept(self, Py_ssize_t env) except -1


cdef class Seeds:
    cdef int64_t[::1] values
    cdef uint8_t[::1] flags
    cdef bint fits(self, tuple arguments) except -1
    cdef int put(self, Py_ssize_t env, tuple arguments) except -1
    cdef tuple get(self, Py_ssize_t env)
    cdef int mark_automatic(self, Py_ssize_t env) except -1
    cdef bint is_automatic(self, Py_ssize_t env) noexcept
    cdef bint is_unused(self, Py_ssize_t env) noexcept
    cdef int mark_used(self, Py_ssize_t env) except -1
    cdef int remove_used(self, Py_ssize_t env) except -1
    cdef int unmark_used(self, Py_ssize_t env) except -1


cdef class Lender:
    cdef Py_buffer export     # of the memory in which the rows lie
    cdef uint8_t[::1] marks   # by row: whether it is lent
    cpdef bint is_leased(self, Py_ssize_t first, Py_ssize_t count)
    cpdef Lease lease(self, Py_ssize_t first, Py_ssize_t count)

cdef class Lease:
    cdef object __weakref__
    cdef Lender lender
    cdef Py_ssize_t first
    cdef Py_ssize_t count
    cdef bint ended
    cdef void end(self) noexcept

cdef class Results(Lender):
    cdef readonly Codec observations
    cdef readonly object rewards
    cdef readonly object terminations
    cdef readonly object truncations
    cdef readonly Py_ssize_t num_envs
    cdef readonly Py_ssize_t num_frames
    cdef Codec reward_rows
    cdef Codec terminated_rows
    cdef Codec truncated_rows
    cdef double[::1] reward_of  # None: rewards have more than one number
    cdef Py_ssize_t reward_nbytes
    cdef uint8_t[::1] terminated_of
    cdef uint8_t[::1] truncated_of
    cdef int copy_row(self, Results source, Py_ssize_t row, Py_ssize_t target) except -1
    cdef void clear_reward(self, Py_ssize_t row) noexcept
    cdef tuple gather(self, object rows)
    cpdef tuple view(self, Lease lease, tuple lead)

cdef class Blocks(Lender):
    cdef Codec observations
    cdef Py_ssize_t num_envs
    cdef Py_ssize_t num_blocks
    cdef c.sv_area area      # memory of which a fork gets a copy
    cdef bint is_registered  # the area was added: csrc/pages.h
    cdef Py_ssize_t find_unleased(self)
    cdef object lend(self, Py_ssize_t block)
