"""Infos through the info ring: numbers and arrays packed by schema, the rest pickled.

The dicts that an env returns look alike from step to step.  A worker learns each look, its
*schema*: keys, nesting, types, dtypes and shapes.  It sends a schema once, and from then on only
the packed values with the schema's number.  What a schema cannot describe (a key that is no
string, a subclass of dict, ...) is pickled whole; what does not fit the ring is left to the caller.

The parent puts packed values straight into the arrays of Gymnasium's dict of arrays, a *column* a
key.  ``VectorEnv._add_info`` defines the result: whatever is not a plain store into a column of the
same dtype is given to that very method, so that results equal ``SyncVectorEnv``'s.

A message: tag (schema number or one of the two below), env, sequence, packed values.
"""

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_WRITABLE,
    Py_buffer,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Next
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_AsDouble
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, strcmp

from shmvec._core.csrc cimport (
    SV_RING_CORRUPT,
    SV_RING_YES,
    sv_byte_ring_attach_consumer,
    sv_byte_ring_attach_producer,
    sv_byte_ring_commit,
    sv_byte_ring_peek,
    sv_byte_ring_release,
    sv_byte_ring_reserve,
    sv_segment_infos,
)
from shmvec._core.segment cimport Segment

import pickle

import cloudpickle
import numpy as np
from gymnasium.vector import VectorEnv

cdef extern from "Python.h":
    int64_t PyLong_AsLongLongAndOverflow(object value, int *overflow) except? -1
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

cdef enum:
    MOST_SCHEMAS = 1000       # then infos are pickled: they do not look alike
    TAG_PICKLE = 0x7ffffffe
    TAG_SCHEMA = 0x7ffffffd
    PREFIX = 8                # env and sequence

cdef enum Kind:
    FLOAT    # float and np.float64
    INT      # int
    BOOL     # bool
    NUMBER   # another np.number, copied as its bytes
    FLOAT32  # np.float32, the commonest of them
    ARRAY    # np.ndarray of one dtype and shape
    NONE
    TEXT
    NESTED   # dict
    PICKLED  # any other value

cdef object _ndarray = np.ndarray
cdef object _float32 = np.float32
cdef object _float64 = np.float64
cdef object _number = np.number
cdef object _plain_add_info = VectorEnv._add_info


cdef class Field:
    """One key of a schema and how its value is packed."""

    cdef object key
    cdef object type      # of the value, exactly
    cdef Kind kind
    cdef object dtype     # of the column; None for columns of objects
    cdef bytes format     # of an ARRAY's buffer
    cdef tuple shape      # of an ARRAY
    cdef Py_ssize_t nbytes
    cdef list children    # of NESTED
    cdef Column column    # the parent's, where it is packed out

    def __reduce__(self):
        # The parent needs no type but to tell float from np.float64; others may not unpickle.
        return _field, (self.key, float if self.type is float else None, <int>self.kind, self.dtype, self.format, self.shape,
                        self.nbytes, self.children)


def _field(key, type_, kind, dtype, format_, shape, nbytes, children):
    cdef Field field = Field()
    field.key = key
    field.type = type_
    field.kind = kind
    field.dtype = dtype
    field.format = format_
    field.shape = shape
    field.nbytes = nbytes
    field.children = children
    return field


cdef Field _describe(object key, object value):
    """The field for a value, or None where the whole info must be pickled."""
    kind_of = type(value)
    if type(key) is not str or key.startswith("_") or key == "final_obs":
        return None  # "_key" may meet the mask of "key"; "final_obs" has rules of its own
    if kind_of is dict:
        children = _describe_all(value)
        return None if children is None else _field(key, dict, NESTED, None, None, None, 0,
                                                    children)
    if isinstance(value, dict):
        return None
    if kind_of is float or kind_of is _float64:
        return _field(key, kind_of, FLOAT, np.dtype(float), None, (), 8, None)
    if kind_of is int:
        return _field(key, kind_of, INT, np.dtype(int), None, (), 8, None)
    if kind_of is bool:
        return _field(key, kind_of, BOOL, np.dtype(bool), None, (), 1, None)
    if kind_of is _float32:
        return _field(key, kind_of, FLOAT32, np.dtype(np.float32), None, (), 4, None)
    if value is None:
        return _field(key, kind_of, NONE, None, None, None, 0, None)
    if kind_of is str:
        return _field(key, kind_of, TEXT, None, None, None, 0, None)
    if isinstance(value, _number) and kind_of.__module__ == "numpy" and value.dtype.kind != "m":
        return _field(key, kind_of, NUMBER, value.dtype, None, (), value.dtype.itemsize, None)
    if kind_of is _ndarray and value.dtype.kind in "biufc" and value.dtype.isnative:
        view = memoryview(np.empty(0, value.dtype))
        return _field(key, kind_of, ARRAY, value.dtype, view.format.encode(), value.shape,
                      value.nbytes, None)
    if isinstance(value, (_number, _ndarray)):
        return None  # gives a typed column by rules of its own
    return _field(key, kind_of, PICKLED, None, None, None, 0, None)


cdef list _describe_all(dict info):
    cdef list fields = []
    for key, value in info.items():
        field = _describe(key, value)
        if field is None:
            return None
        fields.append(field)
    return fields


cdef object _look(dict info):
    """What tells one schema from another, for a lookup."""
    return tuple([
        (key, _look(value)) if type(value) is dict
        else (key, _ndarray, value.dtype, value.shape) if type(value) is _ndarray
        else (key, type(value))
        for key, value in info.items()
    ])


cdef class InfoEncoder:
    """A worker's side: packs the infos of its envs."""

    def __cinit__(self, Segment segment, worker, first_env, num_envs):
        sv_byte_ring_attach_producer(
            &self.ring, sv_segment_infos(segment.base, &segment.plan, worker),
            segment.plan.sizes.info_capacity)
        self.schemas = []
        self.ids = {}
        self.first_env = first_env
        self.last = [None] * num_envs
        self.room = 0
        self.buffer = NULL

    def __dealloc__(self):
        free(self.buffer)

    cdef char *grow(self, Py_ssize_t nbytes) except NULL:
        """Room for that many more bytes of the message."""
        cdef Py_ssize_t room
        cdef char *buffer
        if self.used + nbytes > self.room:
            room = 2 * (self.used + nbytes) + 256
            buffer = <char *>realloc(self.buffer, room)
            if buffer is NULL:
                raise MemoryError(f"an info of {self.used + nbytes} bytes")
            self.buffer = buffer
            self.room = room
        self.used += nbytes
        return self.buffer + self.used - nbytes

    cdef int encode(self, Py_ssize_t env, object info, uint32_t sequence) except -1:
        """Sends the info of one env.  Returns 0 if the ring has no room for it."""
        if type(info) is not dict:
            if not isinstance(info, dict):
                raise TypeError(f"the info must be a dict, got {type(info).__name__}: {info!r}")
        elif len(<dict>info) == 0:
            return 1
        cdef uint32_t prefix[2]
        prefix[0] = <uint32_t>env
        prefix[1] = sequence
        cdef object known = self.last[env - self.first_env]
        cdef Py_ssize_t attempt
        if type(info) is dict:
            for attempt in range(2):
                if known is not None:
                    self.used = 0
                    memcpy(self.grow(PREFIX), prefix, PREFIX)
                    if self.pack((<tuple>known)[1], <dict>info):
                        self.last[env - self.first_env] = known
                        return self.send((<tuple>known)[0])
                known = self.learn(<dict>info)
                if known is None:
                    break
        self.used = 0
        memcpy(self.grow(PREFIX), prefix, PREFIX)
        cdef bytes pickled = cloudpickle.dumps(info)
        memcpy(self.grow(len(pickled)), PyBytes_AS_STRING(pickled), len(pickled))
        return self.send(TAG_PICKLE)

    cdef object learn(self, dict info):
        """The schema (number, fields) for an info, sent to the parent when new, or None."""
        try:
            look = _look(info)
            known = self.ids.get(look)
        except TypeError:
            return None  # a key or type that cannot be hashed
        if known is not None or look in self.ids or len(self.ids) >= MOST_SCHEMAS:
            return known
        fields = _describe_all(info)
        if fields is not None:
            number = len(self.schemas)
            pickled = cloudpickle.dumps((number, fields))
            self.used = 0
            self.grow(PREFIX)
            memcpy(self.grow(len(pickled)), PyBytes_AS_STRING(pickled), len(pickled))
            if not self.send(TAG_SCHEMA):
                return None  # no room now: try again with the next info
            known = (number, fields)
            self.schemas.append(fields)
        self.ids[look] = known
        return known

    cdef bint send(self, uint32_t tag) noexcept:
        cdef char *payload = <char *>sv_byte_ring_reserve(&self.ring, <uint32_t>self.used, tag)
        if payload is NULL or self.used > 0x7fffffff:
            return False
        memcpy(payload, self.buffer, self.used)
        sv_byte_ring_commit(&self.ring)
        return True

    cdef bint pack(self, list fields, dict info) except -1:
        """Appends the values; False if the info does not look like the schema."""
        cdef PyObject *key
        cdef PyObject *value
        cdef Py_ssize_t position = 0
        cdef Py_ssize_t i = 0
        cdef Py_ssize_t count = len(fields)
        cdef Field field
        cdef int overflow
        cdef int64_t integer
        cdef double real
        cdef float single
        cdef Py_buffer view
        cdef const char *text
        cdef Py_ssize_t length
        cdef uint32_t size
        cdef bytes pickled
        cdef bint same
        if len(info) != count:
            return False
        while PyDict_Next(info, &position, &key, &value):
            field = <Field>fields[i]
            i += 1
            if <PyObject *>field.key is not key and field.key != <object>key:
                return False
            if type(<object>value) is not field.type:
                return False
            if field.kind == FLOAT:
                real = PyFloat_AS_DOUBLE(<object>value)
                memcpy(self.grow(8), &real, 8)
            elif field.kind == INT:
                integer = PyLong_AsLongLongAndOverflow(<object>value, &overflow)
                if overflow:
                    return False
                memcpy(self.grow(8), &integer, 8)
            elif field.kind == BOOL:
                self.grow(1)[0] = <object>value is True
            elif field.kind == FLOAT32:
                single = <float>PyFloat_AsDouble(<object>value)
                memcpy(self.grow(4), &single, 4)
            elif field.kind == NUMBER:
                PyObject_GetBuffer(<object>value, &view, PyBUF_C_CONTIGUOUS)
                memcpy(self.grow(field.nbytes), view.buf, field.nbytes)
                PyBuffer_Release(&view)
            elif field.kind == ARRAY:
                if (<object>value).shape != field.shape:
                    return False
                try:
                    PyObject_GetBuffer(<object>value, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
                except (BufferError, ValueError):
                    dense = np.ascontiguousarray(<object>value).reshape(field.shape)
                    PyObject_GetBuffer(dense, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
                same = (view.len == field.nbytes
                        and strcmp(view.format, PyBytes_AS_STRING(field.format)) == 0)
                if same:
                    memcpy(self.grow(field.nbytes), view.buf, field.nbytes)
                PyBuffer_Release(&view)
                if not same:
                    return False
            elif field.kind == NONE:
                pass
            elif field.kind == TEXT:
                try:
                    text = PyUnicode_AsUTF8AndSize(<object>value, &length)
                except UnicodeEncodeError:
                    return False  # lone surrogates: pickled
                size = <uint32_t>length
                memcpy(self.grow(4), &size, 4)
                memcpy(self.grow(length), text, length)
            elif field.kind == NESTED:
                if not self.pack(field.children, <dict>(<object>value)):
                    return False
            else:
                pickled = cloudpickle.dumps(<object>value)
                size = <uint32_t>PyBytes_GET_SIZE(pickled)
                memcpy(self.grow(4), &size, 4)
                memcpy(self.grow(size), PyBytes_AS_STRING(pickled), size)
        return True


cdef class Column:
    """The array of one key in the dict of arrays that is being built, and its mask."""

    cdef str key
    cdef str mask_key
    cdef object array       # None: not in this batch's infos yet
    cdef object mask
    cdef object dtype       # None: objects
    cdef tuple shape        # of one env's value
    cdef Py_ssize_t nbytes  # of one env's value
    cdef char *data
    cdef uint8_t *flags
    cdef Columns children   # of a nested dict

    def __cinit__(self, key):
        self.key = key
        self.mask_key = f"_{key}"
        self.children = Columns()

    cdef bint enter(self, Columns columns, dict infos, Field field,
                    Py_ssize_t num_envs) except -1:
        """Finds or makes the array in `infos`.  False: leave the value to `_add_info`."""
        if self.array is None:
            array = infos.get(self.key)
            mask = infos.get(self.mask_key)
            if array is None and mask is None:
                if field.dtype is None:
                    array = np.full(num_envs, None, dtype=object)
                else:
                    array = np.zeros((num_envs, *field.shape) if field.shape else num_envs,
                                     field.dtype)
                mask = np.zeros(num_envs, np.bool_)
                infos[self.key] = array
                infos[self.mask_key] = mask
            elif (type(array) is not _ndarray or type(mask) is not _ndarray
                  or mask.dtype != np.bool_ or mask.shape != (num_envs,)):
                return False  # a key "_key" of the user's has taken the mask's place
            self.dtype = array.dtype
            self.shape = array.shape[1:]
            self.nbytes = array.nbytes // num_envs
            if self.dtype.hasobject:
                self.dtype = None
            else:
                self.data = <char *>_address(array)
            self.flags = <uint8_t *>_address(mask)
            self.array = array
            self.mask = mask
            columns.entered.append(self)
        if self.dtype is None or field.dtype is None:
            return self.dtype is field.dtype
        return self.dtype == field.dtype and self.shape == field.shape


cdef void *_address(object array) except? NULL:
    """Where an array's data is; it stays there while the caller holds the array."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)
    cdef void *start = view.buf
    PyBuffer_Release(&view)
    return start


cdef class Columns:
    """The columns of one dict of arrays, by key; shared by the decoders of all workers."""

    def __cinit__(self):
        self.by_key = {}
        self.entered = []

    cdef int settle(self, list fields) except -1:
        """Gives every field of a schema its column."""
        cdef Field field
        for field in fields:
            if field.key not in self.by_key:
                self.by_key[field.key] = Column(field.key)
            field.column = self.by_key[field.key]
            if field.kind == NESTED:
                field.column.children.settle(field.children)
        return 0

    def finish(self):
        """Ends a batch: the arrays are the user's from now on."""
        cdef Column column
        for column in self.entered:
            column.array = column.mask = None
        self.entered.clear()
        for column in self.by_key.values():
            if column.children.by_key:
                column.children.finish()


cdef object _value(Field field, const char **cursor, const char *end):
    """Takes one packed value, as the Python object that the env returned."""
    cdef uint32_t size
    cdef double real
    cdef int64_t integer
    cdef const char *start
    if field.kind == NONE:
        return None
    if field.kind == TEXT or field.kind == PICKLED:
        if end - cursor[0] < 4:
            raise RuntimeError("the segment is damaged: an info is cut short")
        memcpy(&size, cursor[0], 4)
        cursor[0] += 4
        if end - cursor[0] < <Py_ssize_t>size:
            raise RuntimeError("the segment is damaged: an info is cut short")
        start = cursor[0]
        cursor[0] += size
        if field.kind == TEXT:
            return PyUnicode_DecodeUTF8(start, size, NULL)
        return pickle.loads(PyBytes_FromStringAndSize(start, size))
    if end - cursor[0] < field.nbytes:
        raise RuntimeError("the segment is damaged: an info is cut short")
    start = cursor[0]
    cursor[0] += field.nbytes
    if field.kind == FLOAT:
        memcpy(&real, start, 8)
        return real if field.type is float else _float64(real)
    if field.kind == INT:
        memcpy(&integer, start, 8)
        return integer
    if field.kind == BOOL:
        return start[0] != 0
    array = np.frombuffer(PyBytes_FromStringAndSize(start, field.nbytes), field.dtype)
    return array.reshape(field.shape).copy() if field.kind == ARRAY else array[0]


cdef class InfoDecoder:
    """The parent's side for one worker: builds Gymnasium's dict of arrays."""

    def __cinit__(self, Segment segment, worker, Columns columns):
        sv_byte_ring_attach_consumer(
            &self.ring, sv_segment_infos(segment.base, &segment.plan, worker),
            segment.plan.sizes.info_capacity)
        self.schemas = []
        self.columns = columns
        self.num_envs = segment.plan.sizes.num_envs

    cdef int next(self, uint32_t sequence, Py_ssize_t *env, const char **payload,
                  Py_ssize_t *nbytes, uint32_t *tag) except -1:
        """The next message of this sequence, to be released; 0 if there is none.

        Learns schemas and drops messages of other sequences on the way.
        """
        cdef uint32_t prefix[2]
        cdef uint32_t size
        cdef const void *start
        cdef int found
        while True:
            found = sv_byte_ring_peek(&self.ring, &start, &size, tag)
            if found != SV_RING_YES:
                if found == SV_RING_CORRUPT:
                    raise RuntimeError("the segment is damaged: an info ring makes no sense")
                return 0
            if size < PREFIX:
                raise RuntimeError("the segment is damaged: an info is cut short")
            memcpy(prefix, start, PREFIX)
            payload[0] = <const char *>start + PREFIX
            nbytes[0] = size - PREFIX
            if tag[0] == TAG_SCHEMA:
                number, fields = pickle.loads(PyBytes_FromStringAndSize(payload[0], nbytes[0]))
                if number != len(self.schemas):
                    raise RuntimeError("the segment is damaged: an info schema is out of order")
                self.columns.settle(fields)
                self.schemas.append(fields)
            elif prefix[1] == sequence:
                env[0] = prefix[0]
                if env[0] >= self.num_envs or (
                    tag[0] != TAG_PICKLE and tag[0] >= <uint32_t>len(self.schemas)
                ):
                    raise RuntimeError("the segment is damaged: an info has no env or no schema")
                return 1
            sv_byte_ring_release(&self.ring)

    cdef dict unpack(self, list fields, const char **cursor, const char *end):
        """One info as the env returned it."""
        cdef dict info = {}
        cdef Field field
        for field in fields:
            info[field.key] = (self.unpack(field.children, cursor, end) if field.kind == NESTED
                               else _value(field, cursor, end))
        return info

    def drain(self, uint32_t sequence):
        """All infos of this sequence as [(env, info)], in the order in which they were sent."""
        cdef Py_ssize_t env = 0
        cdef Py_ssize_t nbytes = 0
        cdef const char *payload = NULL
        cdef uint32_t tag = 0
        cdef list infos = []
        while self.next(sequence, &env, &payload, &nbytes, &tag):
            try:
                if tag == TAG_PICKLE:
                    info = pickle.loads(PyBytes_FromStringAndSize(payload, nbytes))
                else:
                    info = self.unpack(self.schemas[tag], &payload, payload + nbytes)
                infos.append((env, info))
            finally:
                sv_byte_ring_release(&self.ring)
        return infos

    def add_to(self, dict infos, uint32_t sequence, vector_env):
        """Adds the infos of this sequence to Gymnasium's dict of arrays."""
        cdef Py_ssize_t env = 0
        cdef Py_ssize_t nbytes = 0
        cdef const char *payload = NULL
        cdef uint32_t tag = 0
        while self.next(sequence, &env, &payload, &nbytes, &tag):
            try:
                if tag == TAG_PICKLE:
                    _plain_add_info(
                        vector_env, infos,
                        pickle.loads(PyBytes_FromStringAndSize(payload, nbytes)), env)
                else:
                    _add_fields(self, self.columns, <list>self.schemas[tag], infos, env,
                                vector_env, &payload, payload + nbytes)
            finally:
                sv_byte_ring_release(&self.ring)


cdef int _add_fields(InfoDecoder decoder, Columns columns, list fields, dict infos,
                     Py_ssize_t env, object vector_env, const char **cursor,
                     const char *end) except -1:
    cdef Field field
    cdef Column column
    for field in fields:
        column = field.column
        if field.kind == NESTED:
            _add_nested(decoder, field, infos, env, vector_env, cursor, end)
        elif column.enter(columns, infos, field, decoder.num_envs):
            column.flags[env] = 1
            if field.dtype is None:
                column.array[env] = _value(field, cursor, end)
            else:
                if end - cursor[0] < field.nbytes:
                    raise RuntimeError("the segment is damaged: an info is cut short")
                memcpy(column.data + env * column.nbytes, cursor[0], field.nbytes)
                cursor[0] += field.nbytes
        else:
            _plain_add_info(vector_env, infos, {field.key: _value(field, cursor, end)}, env)
    return 0


cdef int _add_nested(InfoDecoder decoder, Field field, dict infos, Py_ssize_t env,
                     object vector_env, const char **cursor, const char *end) except -1:
    """As `_add_info` does: the nested dict first, then its place and mask in the outer one."""
    inner = infos.get(field.key)
    if inner is None:
        inner = {}
    elif type(inner) is not dict:  # a value of another env: `_add_info` says what becomes of it
        _plain_add_info(vector_env, infos,
                        {field.key: decoder.unpack(field.children, cursor, end)}, env)
        return 0
    _add_fields(decoder, field.column.children, field.children, <dict>inner, env, vector_env,
                cursor, end)
    mask = infos.get(field.column.mask_key)
    if mask is None:
        mask = np.zeros(decoder.num_envs, np.bool_)
    mask[env] = True
    infos[field.key] = inner
    infos[field.column.mask_key] = mask
    return 0
