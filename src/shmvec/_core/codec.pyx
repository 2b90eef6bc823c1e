"""Codecs: they write and read values of Gymnasium spaces, in slabs of shared memory or in messages.

There is one codec for each leaf of a space, nested as the space is.  Workers write the observations
and read the actions of one env; the parent reads the observations and writes the actions of all.
Batches are those of
``SyncVectorEnv``: the same containers, dtypes and scalar types.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_WRITABLE,
    Py_buffer,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy, strcmp

from shmvec._core.arrays cimport (
    Pool,
    array_over,
    data_of,
    has_dtype,
    is_contiguous,
    ndim_of,
    new_like,
    shape_of,
    size_of,
)
from shmvec._core.texts cimport PyUnicode_DATA, measure, text_of, width_of

from copy import deepcopy

import numpy as np
from gymnasium.spaces import Dict, Tuple
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

cdef object _ndarray = np.ndarray
cdef Py_ssize_t _LONG = 1 << 16  # bytes from which on a copy releases the GIL


cdef class Codec:
    cdef int write(self, Py_ssize_t env, object value) except -1:
        raise NotImplementedError

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        """Writes a value if it reads back with its type, dtype and shape; else returns False."""
        raise NotImplementedError

    cdef object read(self, Py_ssize_t env):
        raise NotImplementedError

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        raise NotImplementedError

    cdef object gather(self, const Py_ssize_t[::1] envs):
        raise NotImplementedError

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        """Rows from `first` on as an array (*lead, ...) over a lease, which it keeps."""
        raise NotImplementedError

    cdef int put_many(self, Py_ssize_t first, object values) except -1:
        """Writes values that `gather` has returned to the rows from `first` on."""
        raise NotImplementedError

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        """Copies a row of a codec of the same space to a row of this codec."""
        return self.put_many(target, source.gather(np.array([row], np.intp)))

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        raise NotImplementedError

    def put(self, Py_ssize_t env, value):
        self.write(env, value)

    def get(self, Py_ssize_t env):
        return self.read(env)

    def put_rows(self, envs, values):
        self.write_rows(envs, values)


@cython.no_gc_clear  # clearing would discard the exporter without releasing its buffer
cdef class _Rows:
    """An array (num_envs, ...) in a slab and the address of its first row."""

    cdef object array
    cdef object dtype
    cdef Py_ssize_t itemsize
    cdef char *base
    cdef Py_ssize_t row_bytes
    cdef Py_ssize_t num_envs
    cdef Py_buffer _export

    def __cinit__(self, array):
        PyObject_GetBuffer(array, &self._export, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE
                           | PyBUF_FORMAT)
        self.array = array
        self.dtype = array.dtype
        self.itemsize = array.itemsize
        self.base = <char *>self._export.buf
        self.num_envs = len(array)
        self.row_bytes = array.nbytes // self.num_envs

    def __dealloc__(self):
        PyBuffer_Release(&self._export)

    cdef bint copy_from(self, object value, Py_ssize_t row):
        """Copies an array of exactly a row's format and shape; False if it is another."""
        cdef char *target = self.base + row * self.row_bytes
        cdef Py_buffer view
        if type(value) is not _ndarray or not self.has_shape_of_row(value):
            return False
        # The usual case is checked first, because a buffer's description is made for each array.
        if has_dtype(value, self.dtype) and is_contiguous(value):
            memcpy(target, data_of(value), self.row_bytes)
            return True
        if PyObject_GetBuffer(value, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0:
            return False
        cdef bint fits = strcmp(view.format, self._export.format) == 0
        if fits:
            memcpy(target, view.buf, self.row_bytes)
        PyBuffer_Release(&view)
        return fits

    cdef bint has_shape_of_row(self, object value) noexcept:
        cdef const Py_ssize_t *shape = shape_of(self.array) + 1
        cdef int axis
        if ndim_of(value) != ndim_of(self.array) - 1:
            return False
        for axis in range(ndim_of(value)):
            if shape_of(value)[axis] != shape[axis]:
                return False
        return True


cdef object copied(object array, Py_ssize_t itemsize):
    """A copy of a contiguous array, whose elements must not be objects."""
    # The same as its method `copy`, in a quarter of the time.
    cdef object copy = new_like(array)
    cdef const void *source = data_of(array)
    cdef void *target = data_of(copy)
    cdef Py_ssize_t nbytes = size_of(array) * itemsize
    if nbytes < _LONG:
        memcpy(target, source, nbytes)
    else:
        with nogil:
            memcpy(target, source, nbytes)
    return copy


cdef void *address_of(object array) except? NULL:
    """The address of an array's data, valid while the caller holds the array."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
    cdef void *start = view.buf
    PyBuffer_Release(&view)
    return start


# By the dtype of a scalar space, the types of `ArrayCodec.assigned`.
cdef dict _ASSIGNED = {
    np.dtype(np.int64): (int, bool, np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32,
                         np.uint32),
    np.dtype(np.float64): (float, np.float32),
    np.dtype(np.float32): (float, np.float64),
}


cdef class ArrayCodec(Codec):
    """Observations of Box, Discrete, MultiDiscrete and MultiBinary."""

    cdef _Rows rows
    cdef Pool copies           # of all rows
    cdef Pool gathered         # arrays for as many rows as were gathered last; None: none were
    cdef bint scalar
    cdef object shape
    cdef object dtype
    cdef object cast_from     # the dtype of the last value that was cast to this one
    cdef frozenset assigned   # types of numbers that NumPy casts in the same way as an array

    def __init__(self, array):
        self.rows = _Rows(array)
        self.copies = Pool(array)
        self.shape = array.shape[1:]
        self.scalar = self.shape == ()
        self.dtype = array.dtype
        self.assigned = frozenset({self.dtype.type, *_ASSIGNED.get(self.dtype, ())})

    cdef int write(self, Py_ssize_t env, object value) except -1:
        try:
            if self.scalar and type(value) in self.assigned:
                self.rows.array[env] = value
                return 0
            if self.rows.copy_from(value, env):
                return 0
        except (BufferError, ValueError, OverflowError):
            pass  # not contiguous, of a dtype without a buffer format, or a large integer
        array = np.asarray(value)
        if array.shape != self.shape:
            # Shapes may differ in axes of length 1 only: else reshaping would mix up elements.
            if [n for n in array.shape if n != 1] != [n for n in self.shape if n != 1]:
                raise ValueError(f"shape {array.shape} does not fit {self.shape}")
            array = array.reshape(self.shape)
        dtype = array.dtype
        if dtype is not self.cast_from:
            if not np.can_cast(dtype, self.dtype, "same_kind"):
                raise TypeError(f"Cannot cast array data from {dtype!r} to {self.dtype!r} "
                                "according to the rule 'same_kind'")
            self.cast_from = dtype
        self.rows.array[env, ...] = array
        return 0

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        if self.scalar:
            if type(value) is not self.dtype.type:
                return False
            self.rows.array[env] = value
            return True
        try:
            return self.rows.copy_from(value, env)
        except (BufferError, ValueError):
            return False

    cdef object read(self, Py_ssize_t env):
        return self.rows.array[env] if self.scalar else self.rows.array[env].copy()

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        cdef object array = self.rows.array
        if count >= 0 and count < self.rows.num_envs:
            array = array[first:first + count]
            return copied(array, self.rows.itemsize) if copy else array
        return self.copies.copy() if copy else array

    cdef object gather(self, const Py_ssize_t[::1] envs):
        if self.gathered is None or shape_of(self.gathered.like)[0] != envs.shape[0]:
            self.gathered = Pool(np.empty((envs.shape[0], *self.shape), self.dtype))
        cdef object array = self.gathered.new()
        cdef char *target = <char *>data_of(array)
        cdef char *base = self.rows.base
        cdef Py_ssize_t nbytes = self.rows.row_bytes
        cdef Py_ssize_t i
        with nogil:
            for i in range(envs.shape[0]):
                memcpy(target + i * nbytes, base + envs[i] * nbytes, nbytes)
        return array

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        return array_over(lease, self.rows.base + first * self.rows.row_bytes,
                          lead + self.shape, self.dtype)

    cdef int put_many(self, Py_ssize_t first, object values) except -1:
        self.rows.array[first:first + len(values)] = values
        return 0

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        cdef _Rows rows = (<ArrayCodec>source).rows
        memcpy(self.rows.base + target * self.rows.row_bytes, rows.base + row * rows.row_bytes,
               self.rows.row_bytes)
        return 0


class OtherShapeError(ValueError):
    """As many actions as there are envs, but of another shape than their space's, or masked."""

    actions = None  # an array


# The dtypes in which actions may travel; an index in this tuple is the code in shared memory.
cdef tuple _FORMATS = tuple([
    np.dtype(name) for name in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8",
                                "f2", "f4", "f8", "longdouble")
])
cdef dict _FORMAT_CODES = {dtype: code for code, dtype in enumerate(_FORMATS)}
cdef Py_ssize_t[13] _ITEMSIZES = [dtype.itemsize for dtype in _FORMATS]
ACTION_ITEMSIZE = 8  # bytes that a row has for each element, at least
cdef dict _RANK = {"b": 0, "u": 1, "i": 1, "f": 2}


cdef class ActionCodec(Codec):
    """Actions of Box, Discrete, MultiDiscrete and MultiBinary.

    An env gets its action in the dtype that the caller used, as from ``SyncVectorEnv``: a float64
    action for a float32 space is not rounded on its way.  So each row has room for wider elements
    than the space's, and a byte beside it says which dtype it holds.
    """

    def __init__(self, memory, codes, shape, dtype, space):
        """Takes a byte array (num_envs, row capacity) and one (num_envs,) for the codes."""
        self.memory = memory
        self.codes = codes
        self.base = <char *>address_of(memory)
        self.capacity = memory.shape[1]
        self.shape = shape
        self.ndim = len(shape)
        self.scalar = shape == ()
        self.size = int(np.prod(shape))
        self.fitting = sum([
            1 << code for code, dtype in enumerate(_FORMATS)
            if dtype.itemsize * self.size <= self.capacity
        ])
        self.dtype = np.dtype(dtype).newbyteorder("=")  # all formats have this byte order
        self.space = space
        self.arrays = [None] * len(_FORMATS)
        self.slots = [None] * len(_FORMATS)
        self.last_code = -1
        codes[:] = _FORMAT_CODES[self.dtype]

    cdef object rows(self, int code):
        """The slab as an array (num_envs, *shape) of a format."""
        if self.arrays[code] is None:
            dtype = _FORMATS[code]
            row = np.empty(self.shape, dtype)
            self.arrays[code] = np.ndarray(
                (len(self.memory), *self.shape), dtype, self.memory,
                strides=(self.capacity, *row.strides))
            self.slots[code] = list(self.arrays[code])
        return self.arrays[code]

    cdef object read(self, Py_ssize_t env):
        cdef int code = self.codes[env]
        if code >= 32 or not self.fitting >> code & 1:
            raise RuntimeError(f"the segment is damaged: action format {code} of env {env}")
        cdef object array = self.rows(code)
        # A copy, because the env may keep its action.
        if self.scalar:
            return array[env]
        return copied((<list>self.slots[code])[env], _ITEMSIZES[code])

    cdef int write(self, Py_ssize_t env, object value) except -1:
        raise NotImplementedError("actions are written for many envs at once")

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        cdef object array = values
        if type(values) is not _ndarray or not self.is_usual(values, envs.shape[0]):
            array = self.checked(values, envs.shape[0])
        cdef int code = self.last_code
        cdef const char *source = <const char *>data_of(array)
        cdef Py_ssize_t nbytes = self.size * _ITEMSIZES[code]
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            memcpy(self.base + envs[i] * self.capacity, source + i * nbytes, nbytes)
            self.codes[envs[i]] = code
        return 0

    cdef bint is_usual(self, object values, Py_ssize_t count):
        """Whether an array is contiguous, of the last batch's dtype, and of the right shape."""
        cdef const Py_ssize_t *shape = shape_of(values)
        cdef Py_ssize_t axis
        if (not has_dtype(values, self.last_dtype) or not is_contiguous(values)
                or ndim_of(values) != 1 + self.ndim or shape[0] != count):
            return False
        for axis in range(self.ndim):
            if shape[1 + axis] != <Py_ssize_t>(<tuple>self.shape)[axis]:
                return False
        return True

    cdef object checked(self, object values, Py_ssize_t count):
        """The actions as a contiguous array of a format, or an exception; keeps the format."""
        try:
            array = np.asarray(values)
        except (ValueError, TypeError) as error:
            raise self.wrong(f"they are no array of numbers ({error})", count) from error
        except RuntimeError as error:  # a tensor of torch's that requires gradients
            if type(error) is not RuntimeError:
                raise
            raise self.wrong(f"NumPy cannot read them ({error})", count, RuntimeError) from error
        cdef object kind = array.dtype.kind
        if kind not in _RANK:
            raise self.wrong(f"they have dtype {array.dtype}", count, TypeError)
        if array.ndim == 0:
            raise self.wrong(f"they are one {type(values).__name__}", count, TypeError)
        if len(array) != count:
            raise self.wrong(f"there are {len(array)}", count)
        if _RANK[kind] > _RANK[self.dtype.kind] and not (
            # a Box of bools takes 0 and 1
            self.dtype.kind == "b" and kind in "iu"
        ):
            raise self.wrong(f"they have dtype {array.dtype}", count, TypeError)
        if array.shape != (count, *self.shape):
            error = self.wrong(f"they have shape {array.shape}", count, OtherShapeError)
            error.actions = array
            raise error
        if isinstance(values, np.ma.MaskedArray):  # a slab has no room for the mask
            error = self.wrong("they are a masked array", count, OtherShapeError)
            error.actions = values
            raise error
        native = array.dtype.newbyteorder("=")
        if native not in _FORMAT_CODES or native.itemsize * self.size > self.capacity:
            native = self.dtype
        self.last_code = _FORMAT_CODES[native]
        self.last_dtype = array.dtype if array.dtype == native else None
        return np.ascontiguousarray(array, native)

    cdef object wrong(self, what, Py_ssize_t count, kind=ValueError):
        return kind(
            f"wrong actions: {what}. {count} envs with action space {self.space} need "
            f"an array of shape {(count, *self.shape)} and dtype {self.dtype}"
            " (or one that converts to it without loss of kind). Nothing was sent to any env."
        )


TEXT_HEAD = 2  # words of a text's row before its characters: their number and bound
cdef Py_ssize_t _HEAD = TEXT_HEAD


cdef class TextCodec(Codec):
    """Strings of Text spaces: characters as Python has them, so that any of them travel."""

    cdef _Rows rows
    cdef Py_ssize_t longest

    def __init__(self, array):
        """Takes a uint32 array (num_envs, TEXT_HEAD + longest text)."""
        self.rows = _Rows(array)
        self.longest = array.shape[1] - _HEAD

    cdef uint32_t *row_of(self, Py_ssize_t env) noexcept:
        return <uint32_t *>(self.rows.base + env * self.rows.row_bytes)

    cdef int write(self, Py_ssize_t env, object value) except -1:
        cdef uint32_t *row = self.row_of(env)
        cdef uint32_t[2] head
        if not isinstance(value, str):
            raise TypeError(f"a Text space needs a str, got {type(value).__name__}: {value!r}")
        cdef Py_ssize_t nbytes = measure(value, head)
        if len(<str>value) > self.longest:
            raise ValueError(
                f"a text of {len(<str>value)} characters does not fit a Text space with "
                f"max_length={self.longest}: {value!r}"
            )
        memcpy(row, head, 4 * _HEAD)
        memcpy(row + _HEAD, PyUnicode_DATA(value), nbytes)
        return 0

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        if type(value) is not str or len(<str>value) > self.longest:
            return False
        self.write(env, value)
        return True

    cdef object read(self, Py_ssize_t env):
        cdef uint32_t *row = self.row_of(env)
        cdef Py_ssize_t length = row[0]
        cdef object text = None
        if length <= self.longest:
            text = text_of(row + _HEAD, length, row[1])
        if text is None:
            raise RuntimeError(f"the segment is damaged: what is in row {env} is no text")
        return text

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        cdef const uint32_t *there = (<TextCodec>source).row_of(row)
        cdef Py_ssize_t nbytes = there[0] * width_of(there[1])
        if nbytes > 4 * self.longest:
            raise RuntimeError(f"the segment is damaged: what is in row {row} is no text")
        memcpy(self.row_of(target), there, 4 * _HEAD + nbytes)
        return 0

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        cdef Py_ssize_t row
        if count < 0:
            count = self.rows.num_envs
        return tuple([self.read(row) for row in range(first, first + count)])

    cdef object gather(self, const Py_ssize_t[::1] envs):
        cdef Py_ssize_t i
        return tuple([self.read(envs[i]) for i in range(envs.shape[0])])

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        return tuple([self.read(row) for row in range(first, first + lead[0])])

    cdef int put_many(self, Py_ssize_t first, object values) except -1:
        cdef Py_ssize_t i
        for i in range(len(values)):
            self.write(first + i, values[i])
        return 0

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        texts = tuple(values)
        if len(texts) != len(envs):
            raise ValueError(
                f"wrong actions: there are {len(texts)} texts for {len(envs)} envs. "
                "Nothing was sent to any env."
            )
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            try:
                self.write(envs[i], texts[i])
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"wrong action for env {envs[i]}: {error}. Nothing was sent to any env."
                ) from error
        return 0


cdef class DictCodec(Codec):
    """Values of a Dict space: a plain dict in the space's order of keys, as from Gymnasium."""

    cdef tuple keys
    cdef tuple codecs

    def __init__(self, codecs):
        self.keys = tuple(codecs)
        self.codecs = tuple(codecs.values())

    cdef int write(self, Py_ssize_t env, object value) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.keys)):
            (<Codec>self.codecs[i]).write(env, value[self.keys[i]])
        return 0

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        cdef Py_ssize_t i
        if type(value) is not dict or tuple(value) != self.keys:
            return False
        for i in range(len(self.keys)):
            if not (<Codec>self.codecs[i]).keep(env, value[self.keys[i]]):
                return False
        return True

    cdef object read(self, Py_ssize_t env):
        cdef Py_ssize_t i
        cdef dict values = {}
        for i in range(len(self.keys)):
            values[self.keys[i]] = (<Codec>self.codecs[i]).read(env)
        return values

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        cdef Py_ssize_t i
        cdef dict values = {}
        for i in range(len(self.keys)):
            values[self.keys[i]] = (<Codec>self.codecs[i]).batch(copy, first, count)
        return values

    cdef object gather(self, const Py_ssize_t[::1] envs):
        cdef Py_ssize_t i
        cdef dict values = {}
        for i in range(len(self.keys)):
            values[self.keys[i]] = (<Codec>self.codecs[i]).gather(envs)
        return values

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        cdef Py_ssize_t i
        cdef dict values = {}
        for i in range(len(self.keys)):
            values[self.keys[i]] = (<Codec>self.codecs[i]).view(lease, first, lead)
        return values

    cdef int put_many(self, Py_ssize_t first, object values) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.keys)):
            (<Codec>self.codecs[i]).put_many(first, values[self.keys[i]])
        return 0

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.keys)):
            (<Codec>self.codecs[i]).copy_row((<DictCodec>source).codecs[i], row, target)
        return 0

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        cdef Py_ssize_t i
        for key in self.keys:
            try:
                values[key]
            except (KeyError, TypeError, IndexError) as error:
                raise type(error)(
                    f"wrong actions: a Dict action space needs a mapping with the keys "
                    f"{list(self.keys)}, each holding the values of all envs; {key!r} is "
                    "missing. Nothing was sent to any env."
                ) from error
        for i in range(len(self.keys)):
            (<Codec>self.codecs[i]).write_rows(envs, values[self.keys[i]])
        return 0


cdef class TupleCodec(Codec):
    """Values of a Tuple space."""

    cdef tuple codecs

    def __init__(self, codecs):
        self.codecs = tuple(codecs)

    cdef int write(self, Py_ssize_t env, object value) except -1:
        cdef Py_ssize_t i
        if len(value) < len(self.codecs):
            raise IndexError(f"a Tuple space of {len(self.codecs)} parts got {len(value)}")
        for i in range(len(self.codecs)):
            (<Codec>self.codecs[i]).write(env, value[i])
        return 0

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        cdef Py_ssize_t i
        if type(value) is not tuple or len(value) != len(self.codecs):
            return False
        for i in range(len(self.codecs)):
            if not (<Codec>self.codecs[i]).keep(env, value[i]):
                return False
        return True

    cdef object read(self, Py_ssize_t env):
        return tuple([(<Codec>codec).read(env) for codec in self.codecs])

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        return tuple([(<Codec>codec).batch(copy, first, count) for codec in self.codecs])

    cdef object gather(self, const Py_ssize_t[::1] envs):
        return tuple([(<Codec>codec).gather(envs) for codec in self.codecs])

    cdef object view(self, object lease, Py_ssize_t first, tuple lead):
        return tuple([(<Codec>codec).view(lease, first, lead) for codec in self.codecs])

    cdef int put_many(self, Py_ssize_t first, object values) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.codecs)):
            (<Codec>self.codecs[i]).put_many(first, values[i])
        return 0

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        cdef Py_ssize_t i
        for i in range(len(self.codecs)):
            (<Codec>self.codecs[i]).copy_row((<TupleCodec>source).codecs[i], row, target)
        return 0

    cdef int write_rows(self, const Py_ssize_t[::1] envs, object values) except -1:
        cdef Py_ssize_t i
        if len(values) != len(self.codecs):
            raise ValueError(
                f"wrong actions: a Tuple action space of {len(self.codecs)} parts needs a tuple "
                f"of that many, each holding the values of all envs; got {len(values)}. "
                "Nothing was sent to any env."
            )
        for i in range(len(self.codecs)):
            (<Codec>self.codecs[i]).write_rows(envs, values[i])
        return 0


cdef class MessageCodec(Codec):
    """Values that travel as messages, one an env, and lie in no slab.

    For spaces without a fixed size (Sequence, Graph, OneOf, a class of the user's), and for all if
    ``shared_memory=False``.  Gymnasium's own functions split and join the batches.
    """

    def __init__(self, space, num_envs, explain):
        """`explain` returns the error to raise, given envs, values and the error of joining."""
        self.space = space
        self.explain = explain
        self.num_envs = num_envs  # frames do not matter: there are only the last values received
        self.batched_spaces = {}  # by number of envs, made when first needed
        self.values = [_empty(space) for _ in range(num_envs)]
        self.arrays = create_empty_array(space, num_envs)

    cdef int write(self, Py_ssize_t env, object value) except -1:
        self.values[env % self.num_envs] = value
        return 0

    cdef bint keep(self, Py_ssize_t env, object value) except -1:
        return False  # it travels inside the info

    cdef object read(self, Py_ssize_t env):
        return self.values[env % self.num_envs]

    cpdef object batch(self, bint copy, Py_ssize_t first=0, Py_ssize_t count=-1):
        self.arrays = self.joined(range(self.num_envs), self.arrays)
        return deepcopy(self.arrays) if copy else self.arrays

    cdef object gather(self, const Py_ssize_t[::1] envs):
        indices = [env % self.num_envs for env in envs]
        if not indices:
            return create_empty_array(self.space, 0)
        return self.joined(indices, create_empty_array(self.space, len(indices)))

    cdef object joined(self, envs, object arrays):
        """The values of envs, joined into a batch."""
        cdef list values = [self.values[env] for env in envs]
        try:
            return concatenate(self.space, values, arrays)
        except Exception as error:
            explained = self.explain(envs, values, error)
            if explained is error:
                raise
            raise explained from error

    cdef int copy_row(self, Codec source, Py_ssize_t row, Py_ssize_t target) except -1:
        return 0

    cdef list split(self, object batch, Py_ssize_t count):
        """Splits a batch of actions into a list of ``count``."""
        if count not in self.batched_spaces:
            self.batched_spaces[count] = batch_space(self.space, count)
        try:
            actions = list(iterate(self.batched_spaces[count], batch))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise type(error)(f"wrong actions: {error}. Nothing was sent to any env.") from error
        if len(actions) != count:
            raise ValueError(
                f"wrong actions: there are {len(actions)} for {count} envs. "
                "Nothing was sent to any env."
            )
        return actions


cdef object _empty(object space):
    """The observation of an env that was never reset: zeros where the space has them, else None."""
    if isinstance(space, Dict):
        return {key: _empty(part) for key, part in space.spaces.items()}
    if isinstance(space, Tuple):
        return tuple([_empty(part) for part in space.spaces])
    values = create_empty_array(space, 1)
    return None if values is None else values[0]
