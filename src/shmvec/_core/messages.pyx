"""Messages between caller and workers: packed dicts in byte rings, and the control channels."""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBuffer_Release,
    PyObject_GetBuffer,
    Py_buffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Next
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_AsDouble
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.object cimport PyObject
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset, strcmp
from posix.unistd cimport close as close_descriptor

from shmvec._core cimport csrc as c
from shmvec._core.memory cimport Segment
from shmvec._core.protocol cimport ACTION, FINAL, INFO, NUM_KINDS
from shmvec._core.texts cimport PyUnicode_DATA, measure, text_of, width_of

import math
import os
from _socket import socketpair
from copy import deepcopy
from pickle import HIGHEST_PROTOCOL, PicklingError, dumps as pickle_by_reference, loads

import numpy as np

from shmvec._pickling import dumps as pickle_by_value  # bound here: an env may patch the module


# ==== packed messages =============================================================================
#
# Infos (worker to parent), and observations and actions of spaces that have no fixed size.
#
# The dicts that an env returns look alike from step to step. The sender makes a *schema* of each
# form: keys, nesting, types, dtypes and shapes. It sends a schema once, and from then on only the
# packed values with the schema's number. A dict that no schema can describe (a key that is no
# string, a subclass of dict, ...) is pickled whole. What does not fit the ring goes through the
# channel, which is the caller's task.
#
# A message: tag (schema number or one of the two below), env, kind, sequence, checksum, packed
# values. The checksum is of all but packed values. So nothing damaged is unpickled, and no values
# are read by another schema than theirs. Damage of packed values makes wrong numbers, as in a slab.

cdef enum:
    MAX_SCHEMAS = 1000      # with more, infos do not look alike, and are pickled
    MAX_SCHEMA_LEVELS = 50  # of nested dicts: a schema is pickled by recursion
    MAX_INFO_LEVELS = 1000  # of nested dicts: Gymnasium gathers infos by recursion
    TAG_PICKLE = 0x7ffffffe
    TAG_SCHEMA = 0x7ffffffd
    PREFIX_BYTES = 16       # env, kind, sequence and checksum

cdef object _ndarray = np.ndarray
cdef object _float32 = np.float32
cdef object _float64 = np.float64
cdef object _number = np.number


cdef inline uint32_t _message_checksum(const uint32_t *prefix, Py_ssize_t nbytes, uint32_t tag,
                                       const char *content) noexcept:
    """The checksum of a message's prefix and tag, and of the content of a pickle or a schema."""
    cdef uint64_t sum = c.sv_sum_pair(c.SV_SUM_START, <uint32_t>nbytes, tag)
    sum = c.sv_sum(c.sv_sum_pair(sum, prefix[0], prefix[1]), prefix[2])
    if tag >= TAG_SCHEMA:
        sum = c.sv_sum_bytes(sum, content, nbytes - PREFIX_BYTES)
    return <uint32_t>sum


cdef inline uint32_t _pickle_checksum(bytes pickled):
    return <uint32_t>c.sv_sum_bytes(
        c.SV_SUM_START, PyBytes_AS_STRING(pickled), PyBytes_GET_SIZE(pickled))


def pickle_value(value):
    """Pickles a value: by reference, which is fast, or else by value (cloudpickle)."""
    try:
        return pickle_by_reference(value, HIGHEST_PROTOCOL)
    except RecursionError:
        return pickle_by_value(_FlatDict(value) if type(value) is dict else value)
    except Exception:
        return pickle_by_value(value)


class _FlatDict:
    """A dict that is pickled without recursion into nested dicts, and unpickled as a dict."""

    def __init__(self, outermost):
        numbers, dicts = {id(outermost): 0}, [outermost]
        self.items = []  # of each dict: (key, value or the number of a dict, is it a dict)
        for each in dicts:
            items = []
            for key, value in each.items():
                if is_dict := type(value) is dict:
                    if id(value) not in numbers:
                        numbers[id(value)] = len(dicts)
                        dicts.append(value)
                    value = numbers[id(value)]
                items.append((key, value, is_dict))
            self.items.append(items)

    def __reduce__(self):
        return _nest, (self.items,)


def _nest(items_of_dicts):
    dicts = [{} for _ in items_of_dicts]
    for each, items in zip(dicts, items_of_dicts):
        for key, value, is_dict in items:
            each[key] = dicts[value] if is_dict else value
    return dicts[0]


def deep_copy(value):
    try:
        return deepcopy(value)
    except RecursionError:
        return loads(pickle_value(value))


@cython.wraparound(True)
def check_nesting(info):
    """Raises RecursionError for an info that contains itself, or is nested too deep to gather."""
    keys, levels, ancestors = [], [iter(info.items())], [id(info)]
    while levels:
        for key, value in levels[-1]:
            if isinstance(value, dict) and key != "final_obs":
                keys.append(key)
                if id(value) in ancestors:
                    raise RecursionError(f"{_path('info', keys)} contains itself")
                if len(keys) >= MAX_INFO_LEVELS:
                    raise RecursionError(
                        f"{_path('info', keys)} is nested {MAX_INFO_LEVELS} dicts deep")
                levels.append(iter(value.items()))
                ancestors.append(id(value))
                break
        else:
            levels.pop()
            ancestors.pop()
            del keys[-1:]


def unsendable_error(env, what, value, error):
    """An error that names the part of an info or observation that cannot be sent."""
    error_type = type(error)
    if error_type not in (RecursionError, TypeError, AttributeError, PicklingError):
        return error
    visited, stack = set(), [((), value)]
    while stack:
        keys, part = stack.pop()
        if not isinstance(part, dict):
            try:
                pickle_value(part)
            except Exception as cause:
                return error_type(f"env {env}: the {_path(what, keys)}, a {type(part).__name__}, "
                                  f"cannot be sent: {cause}")
        elif id(part) not in visited:
            visited.add(id(part))
            stack += [((*keys, key), inner) for key, inner in reversed(part.items())]
    return error_type(f"env {env}: the {error}")


@cython.wraparound(True)
def _path(what, keys):
    """A part of a value as Python code; the middle of a long path is left out."""
    names = [f"[{key!r}]" for key in keys]
    if len(names) > 8:
        names[4:-4] = ["..."]
    return what + "".join(names)


cdef class Field:
    """One key of a schema, and how its value is packed."""

    def __reduce__(self):
        # The caller only tells float from np.float64 by the type. Other types may not unpickle.
        return _make_field, (self.key, float if self.type is float else None, <int>self.kind,
                             self.dtype, self.format, self.shape, self.nbytes, self.children)


def _make_field(key, type_, kind, dtype, format_, shape, nbytes, children):
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


cdef Field _field_for(object key, object value):
    """The field for a value; None: the whole info must be pickled."""
    value_type = type(value)
    if type(key) is not str or key.startswith("_") or key == "final_obs":
        return None  # "_key" is the name of a mask of "key"; "final_obs" has rules of its own
    if value_type is dict:
        children = _fields_for(value)
        if children is None:
            return None
        return _make_field(key, dict, NESTED, None, None, None, 0, children)
    if isinstance(value, dict):
        return None
    if value_type is float or value_type is _float64:
        return _make_field(key, value_type, FLOAT, np.dtype(float), None, (), 8, None)
    if value_type is int:
        return _make_field(key, value_type, INT, np.dtype(int), None, (), 8, None)
    if value_type is bool:
        return _make_field(key, value_type, BOOL, np.dtype(bool), None, (), 1, None)
    if value_type is _float32:
        return _make_field(key, value_type, FLOAT32, np.dtype(np.float32), None, (), 4, None)
    if value is None:
        return _make_field(key, value_type, NONE, None, None, None, 0, None)
    if value_type is str:
        return _make_field(key, value_type, TEXT, None, None, None, 0, None)
    if isinstance(value, _number) and value_type.__module__ == "numpy" and value.dtype.kind != "m":
        return _make_field(key, value_type, NUMBER, value.dtype, None, (), value.dtype.itemsize,
                           None)
    if value_type is _ndarray and value.dtype.kind in "biufc" and value.dtype.isnative:
        view = memoryview(np.empty(0, value.dtype))
        return _make_field(key, value_type, ARRAY, value.dtype, view.format.encode(), value.shape,
                           value.nbytes, None)
    if isinstance(value, (_number, _ndarray)):
        return None  # Gymnasium has rules of its own for the dtypes of their columns
    return _make_field(key, value_type, PICKLED, None, None, None, 0, None)


cdef list _fields_for(dict info):
    cdef list fields = []
    for key, value in info.items():
        field = _field_for(key, value)
        if field is None:
            return None
        fields.append(field)
    return fields


cdef object _schema_key(dict info, int level=0):
    """A key that all dicts of a schema have."""
    if level == MAX_SCHEMA_LEVELS:
        raise RecursionError("no schema has so many levels")
    return tuple([
        (key, _schema_key(value, level + 1)) if type(value) is dict
        else (key, _ndarray, value.dtype, value.shape) if type(value) is _ndarray
        else (key, type(value))
        for key, value in info.items()
    ])


def die_at(int point):
    # Each module has a copy of the variable: see the worker module's `die_at`.
    c.sv_fault_point = point


cdef class Encoder:
    """The sending side of a worker's ring to the parent, or of the parent's ring to a worker."""

    def __cinit__(self, Segment segment, worker, first_env, num_envs, to_parent):
        if to_parent:
            c.sv_byte_ring_attach_producer(
                &self.ring, c.sv_segment_infos(segment.base, &segment.plan, worker),
                segment.plan.sizes.info_capacity)
        else:
            c.sv_byte_ring_attach_producer(
                &self.ring, c.sv_segment_actions(segment.base, &segment.plan, worker),
                segment.plan.sizes.action_capacity)
        self.schemas = []
        self.schemas_by_key = {}
        self.first_env = first_env
        self.last_schemas = [None] * (num_envs * NUM_KINDS)
        self.grow(1)  # so that there is a buffer, also for content without a byte

    def __dealloc__(self):
        free(self.buffer)

    cdef char *grow(self, Py_ssize_t nbytes) except NULL:
        """Makes room for more bytes of the content; returns their address."""
        cdef Py_ssize_t capacity
        cdef char *buffer
        if self.used + nbytes > self.capacity:
            capacity = 2 * (self.used + nbytes) + 256
            buffer = <char *>realloc(self.buffer, capacity)
            if buffer is NULL:
                raise MemoryError(f"an info of {self.used + nbytes} bytes")
            self.buffer = buffer
            self.capacity = capacity
        self.used += nbytes
        return self.buffer + self.used - nbytes

    cdef int encode(self, Py_ssize_t env, uint32_t kind, object message,
                    uint32_t sequence) except -1:
        """Sends a dict of one env; 0: the ring has no room for it."""
        cdef uint32_t[4] prefix = [<uint32_t>env, kind, sequence, 0]
        cdef Py_ssize_t last_index = (env - self.first_env) * NUM_KINDS + kind
        cdef object schema = self.last_schemas[last_index]
        cdef Py_ssize_t attempt
        if type(message) is dict:
            for attempt in range(2):
                if schema is not None:
                    self.used = 0
                    if self.pack((<tuple>schema)[1], <dict>message):
                        self.last_schemas[last_index] = schema
                        return self.send(prefix, (<tuple>schema)[0], self.buffer, self.used)
                schema = self.schema_for(<dict>message)
                if schema is None:
                    break
        if kind == INFO or kind == FINAL:
            check_nesting(message)
        cdef bytes pickled = pickle_value(message)
        return self.send(prefix, TAG_PICKLE, pickled, len(pickled))

    cdef object schema_for(self, dict message):
        """The schema (number, fields) for a message, or None; a new one is sent."""
        cdef uint32_t[4] prefix = [0, 0, 0, 0]
        cdef bytes pickled
        try:
            key = _schema_key(message)
            schema = self.schemas_by_key.get(key)
        except (TypeError, RecursionError):
            return None  # a key or type that cannot be hashed, or many levels of dicts
        if (schema is not None or key in self.schemas_by_key
                or len(self.schemas_by_key) >= MAX_SCHEMAS):
            return schema
        fields = _fields_for(message)
        if fields is not None:
            number = len(self.schemas)
            pickled = pickle_by_value((number, fields))
            if not self.send(prefix, TAG_SCHEMA, pickled, len(pickled)):
                return None  # no room: the next message tries it again
            schema = (number, fields)
            self.schemas.append(fields)
        self.schemas_by_key[key] = schema
        return schema

    cdef bint send(self, uint32_t *prefix, uint32_t tag, const char *content,
                   Py_ssize_t nbytes) noexcept:
        """Sends a prefix, to which it adds the checksum, and the content; False: no room."""
        cdef char *payload = <char *>c.sv_byte_ring_reserve(
            &self.ring, <uint32_t>(PREFIX_BYTES + nbytes), tag)
        if payload is NULL or nbytes > 0x7fffffff:
            return False
        prefix[3] = _message_checksum(prefix, PREFIX_BYTES + nbytes, tag, content)
        memcpy(payload, prefix, PREFIX_BYTES)
        memcpy(payload + PREFIX_BYTES, content, nbytes)
        c.sv_byte_ring_commit(&self.ring)
        return True

    cdef bint pack(self, list fields, dict message) except -1:
        """Appends the values; False: the message has another schema."""
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
        cdef uint32_t[2] head
        cdef Py_ssize_t length
        cdef uint32_t size
        cdef uint32_t sum
        cdef bytes pickled
        cdef bint same
        if len(message) != count:
            return False
        while PyDict_Next(message, &position, &key, &value):
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
                    if (<object>value).dtype != field.dtype:
                        return False
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
                length = measure(<object>value, head)
                memcpy(self.grow(8), head, 8)
                memcpy(self.grow(length), PyUnicode_DATA(<object>value), length)
            elif field.kind == NESTED:
                if not self.pack(field.children, <dict>(<object>value)):
                    return False
            else:
                pickled = pickle_value(<object>value)
                size = <uint32_t>PyBytes_GET_SIZE(pickled)
                memcpy(self.grow(4), &size, 4)
                sum = _pickle_checksum(pickled)
                memcpy(self.grow(4), &sum, 4)
                memcpy(self.grow(size), PyBytes_AS_STRING(pickled), size)
        return True


cdef class Decoder:
    """The receiving side of a worker's ring to the parent, or of the parent's ring to a worker."""

    def __cinit__(self, Segment segment, worker, from_worker, *others):
        if from_worker:
            c.sv_byte_ring_attach_consumer(
                &self.ring, c.sv_segment_infos(segment.base, &segment.plan, worker),
                segment.plan.sizes.info_capacity)
        else:
            c.sv_byte_ring_attach_consumer(
                &self.ring, c.sv_segment_actions(segment.base, &segment.plan, worker),
                segment.plan.sizes.action_capacity)
        self.schemas = []
        self.num_envs = segment.plan.sizes.num_envs
        self.ring_name = f"of worker {worker}" if from_worker else f"to worker {worker}"
        self.expected_kinds = 1 << ACTION

    cdef object damage_error(self, what):
        return RuntimeError(f"the segment is damaged: a message {self.ring_name} {what}")

    cdef int check(self, list fields) except -1:
        """Raises RuntimeError unless values of these fields fit the arrays that they go to."""
        cdef Field field
        for field in fields:
            if field.kind == NESTED:
                self.check(field.children)
            elif field.kind != NONE and field.kind != TEXT and field.kind != PICKLED and (
                    field.dtype.kind not in "biufc"
                    or field.nbytes != field.dtype.itemsize * math.prod(field.shape)):
                raise self.damage_error("describes a value of another size than it has")
        return 0

    cdef int on_schema(self, list fields) except -1:
        """Is called with each new schema."""
        return 0

    cdef bint next(self, uint32_t sequence) except -1:
        """Turns to the next message of this sequence, until `release`; False: there is none.

        On the way it takes in schemas, and discards messages that nobody asks for any more.
        """
        cdef uint32_t prefix[4]
        cdef uint32_t size
        cdef const void *start
        cdef int found
        while True:
            found = c.sv_byte_ring_peek(&self.ring, &start, &size, &self.tag)
            if found != c.SV_RING_YES:
                if found == c.SV_RING_CORRUPT:
                    raise self.damage_error("lies where none can be")
                return False
            if size < PREFIX_BYTES:
                raise self.damage_error("is cut short")
            memcpy(prefix, start, PREFIX_BYTES)
            self.start = <const char *>start + PREFIX_BYTES
            if self.tag >= TAG_SCHEMA:
                self.pickled = PyBytes_FromStringAndSize(self.start, size - PREFIX_BYTES)
                self.start = PyBytes_AS_STRING(self.pickled)  # checked and read from this copy
            self.cursor = self.start
            self.end = self.start + size - PREFIX_BYTES
            if prefix[3] != _message_checksum(prefix, size, self.tag, self.start):
                raise self.damage_error("is not as it was written")
            if self.tag == TAG_SCHEMA:
                number, fields = loads(self.pickled)
                if number != len(self.schemas):
                    raise self.damage_error("is a schema out of order")
                self.check(fields)
                self.on_schema(fields)
                self.schemas.append(fields)
            elif prefix[2] == sequence:
                self.env = prefix[0]
                self.kind = prefix[1]
                if self.env >= self.num_envs or self.kind >= NUM_KINDS or (
                    not self.expected_kinds >> self.kind & 1
                ) or (self.tag != TAG_PICKLE and self.tag >= <uint32_t>len(self.schemas)):
                    raise self.damage_error("has no env, no kind or no schema")
                return True
            elif self.is_wanted_later(prefix[0], prefix[2], sequence):
                return False
            self.release()

    cdef bint is_wanted_later(self, uint32_t env, uint32_t sequence, uint32_t now) except -1:
        """Whether the message of `sequence` is for a later call than the one of `now`."""
        return <int32_t>(sequence - now) > 0

    cdef list schema(self):
        """The fields of the message; None: it was pickled."""
        return None if self.tag == TAG_PICKLE else <list>self.schemas[self.tag]

    cdef object decode(self):
        """The message, as the env returned it."""
        if self.tag == TAG_PICKLE:
            return loads(PyBytes_FromStringAndSize(self.start, self.end - self.start))
        return self.unpack(self.schemas[self.tag])

    cdef dict unpack(self, list fields):
        cdef dict message = {}
        cdef Field field
        for field in fields:
            message[field.key] = (self.unpack(field.children) if field.kind == NESTED
                                  else self.unpack_value(field))
        return message

    cdef const char *skip(self, Py_ssize_t nbytes) except NULL:
        """Passes over bytes of the message; returns their address."""
        cdef const char *start = self.cursor
        if self.end - start < nbytes:
            raise self.damage_error(f"is cut short (env {self.env})")
        self.cursor += nbytes
        return start

    cdef object unpack_value(self, Field field):
        """The next value, as the Python object that the env returned."""
        cdef uint32_t[2] head
        cdef uint32_t size
        cdef uint32_t sum
        cdef bytes pickled
        cdef double real
        cdef int64_t integer
        cdef const char *start
        if field.kind == NONE:
            return None
        if field.kind == TEXT:
            memcpy(head, self.skip(8), 8)
            text = text_of(
                self.skip(<Py_ssize_t>head[0] * width_of(head[1])), head[0], head[1])
            if text is None:
                raise self.damage_error(f"holds what is no text (env {self.env})")
            return text
        if field.kind == PICKLED:
            memcpy(&size, self.skip(4), 4)
            memcpy(&sum, self.skip(4), 4)
            pickled = PyBytes_FromStringAndSize(self.skip(size), size)
            if sum != _pickle_checksum(pickled):
                raise self.damage_error(f"holds what is not as it was written (env {self.env})")
            return loads(pickled)
        start = self.skip(field.nbytes)
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

    cdef int copy(self, void *target, Py_ssize_t nbytes) except -1:
        memcpy(target, self.skip(nbytes), nbytes)
        return 0

    cdef void open(self, Py_ssize_t env, uint32_t kind, uint32_t tag, const char *start,
                   Py_ssize_t nbytes) noexcept:
        """Turns to a message that was moved out of the ring."""
        self.env, self.kind, self.tag = env, kind, tag
        self.start = self.cursor = start
        self.end = start + nbytes

    cdef void release(self) noexcept:
        """Gives back the room of the message that `next` has turned to."""
        c.sv_byte_ring_release(&self.ring)


# ==== control channels ============================================================================
#
# Commands, their results, errors and messages too large for the rings go through a socket, each
# with the number of its request. Steps do not use it.
#
# No call blocks, or runs Python code between a system call and the note of its result. So when a
# signal handler raises, the channel still knows how much of each message is read or written.
# A message that no call waits for any more is discarded by its number. Another thread may close the
# channel at any time, so each call is a critical section, also in a Python without a GIL.
# csrc/model/channel.pml is the model.

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_CMSG_CLOEXEC
        MSG_DONTWAIT
        MSG_NOSIGNAL
        SCM_RIGHTS
        SOL_SOCKET
    struct iovec:
        void *iov_base
        size_t iov_len
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
    struct cmsghdr:
        size_t cmsg_len
        int cmsg_level
        int cmsg_type
    cmsghdr *CMSG_FIRSTHDR(msghdr *message)
    unsigned char *CMSG_DATA(cmsghdr *header)
    size_t CMSG_LEN(size_t length)
    size_t CMSG_SPACE(size_t length)
    ssize_t recvmsg(int descriptor, msghdr *message, int flags)
    ssize_t sendmsg(int descriptor, const msghdr *message, int flags)

cdef uint32_t MAGIC = 0x73686D76
cdef uint64_t MAX_LENGTH = 1 << 40
cdef enum:
    MAX_DESCRIPTORS = 64


cdef packed struct Header:
    uint32_t magic
    uint32_t sequence
    uint32_t goodbye
    uint32_t num_descriptors
    uint64_t length


cdef class ChannelMessage:
    cdef readonly uint32_t sequence
    cdef readonly bint is_goodbye           # it is the last one
    cdef readonly bytes content
    cdef readonly list descriptors          # whoever takes the message closes them
    cdef readonly bint has_all_descriptors  # the kernel drops those that exceed a limit here


def open_channel():
    """A channel, and the socket of its other end."""
    # Between the calls no bytecode runs, at which a signal's handler could raise.
    ours, theirs = socketpair()
    return Channel(ours.detach()), theirs


cdef class Channel:
    """One end of a control channel."""

    cdef readonly int descriptor
    cdef readonly str broken        # why the channel cannot be used any more; None: it can
    cdef bint write_failed          # the other end reads nothing any more
    cdef list outbox                # [(frame, descriptors)] that are not or partly written
    cdef Py_ssize_t bytes_written   # of the first of these frames
    cdef list inbox                 # [ChannelMessage] that were not taken yet
    cdef char header[24]            # of the message that is being read
    cdef Py_ssize_t header_read     # bytes of this header that were read
    cdef bytes body                 # of this message
    cdef Py_ssize_t body_read
    cdef list incoming_descriptors  # of this message

    def __init__(self, int descriptor):
        """Takes over a stream socket."""
        self.descriptor = descriptor
        self.outbox = []
        self.inbox = []
        self.incoming_descriptors = []

    def __dealloc__(self):
        if self.descriptor >= 0:
            close_descriptor(self.descriptor)

    def fileno(self):
        return self.descriptor

    @property
    @cython.critical_section
    def has_unsent(self):
        return len(self.outbox) > 0 and not self.write_failed

    @cython.critical_section
    def put(self, uint32_t sequence, bytes content, descriptors=(), bint goodbye=False):
        """Sends a request's message, now or as soon as there is room; nothing once it is closed."""
        cdef Header header
        if self.descriptor < 0:  # nobody would close the descriptors again
            return
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(f"at most {MAX_DESCRIPTORS} descriptors a message")
        header.magic = MAGIC
        header.sequence = sequence
        header.goodbye = goodbye
        header.num_descriptors = len(descriptors)
        header.length = len(content)
        # Duplicates: the caller may close its own before these are sent.
        cdef list copies = []
        try:
            for descriptor in descriptors:
                copies.append(os.dup(descriptor))
            frame = PyBytes_FromStringAndSize(<char *>&header, sizeof(Header)) + content
        except BaseException:
            _close_descriptors(copies)
            raise
        self.outbox.append((frame, copies))
        self.flush()

    @cython.critical_section
    def pump(self):
        """Writes and reads; returns whether something was read, or is still to be written."""
        cdef bint was_read = self.fill()
        return self.flush() or was_read

    @cython.critical_section
    def find(self, uint32_t sequence):
        """The message of a request; None: it has not come. Older messages are discarded."""
        cdef ChannelMessage message
        self.fill()
        while self.inbox:
            message = self.inbox[0]
            if message.is_goodbye or <int32_t>(message.sequence - sequence) > 0:
                return None
            if message.sequence == sequence:
                return message
            _close_descriptors(message.descriptors)
            del self.inbox[0]
        return None

    @cython.critical_section
    def take(self, uint32_t sequence):
        """Like `find`, but the message is the caller's then, with its descriptors."""
        message = self.find(sequence)
        if message is not None:
            del self.inbox[0]
        return message

    @cython.critical_section
    def fail(self, why):
        """Marks the channel as broken: its data can no longer be trusted."""
        self.broken = self.broken or why

    @property
    @cython.critical_section
    def goodbye_content(self):
        """The content of the other side's last message, or None; other messages are discarded."""
        cdef ChannelMessage message
        self.fill()
        while self.inbox:
            message = self.inbox[0]
            if message.is_goodbye:
                return message.content
            _close_descriptors(message.descriptors)
            del self.inbox[0]
        return None

    @cython.critical_section
    def close(self):
        """Closes the socket, and the descriptors of messages that were not sent or taken."""
        cdef ChannelMessage message
        if self.descriptor >= 0:
            close_descriptor(self.descriptor)
            self.descriptor = -1
        self.broken = self.broken or "it was closed"
        for _, copies in self.outbox:
            _close_descriptors(copies)
        for message in self.inbox:
            _close_descriptors(message.descriptors)
        _close_descriptors(self.incoming_descriptors)
        self.outbox.clear()
        self.inbox.clear()

    # ---- the socket --------------------------------------------------------------------------

    cdef bint flush(self) except -1:
        """Writes as much as the socket takes; returns whether something is still to be written."""
        cdef Py_ssize_t done
        while self.outbox and self.broken is None and not self.write_failed:
            done = self.write()
            if done == 0:
                return not self.write_failed
            self.bytes_written += done
            frame, copies = <tuple>self.outbox[0]
            _close_descriptors(copies)  # they went with the first byte
            if self.bytes_written == PyBytes_GET_SIZE(frame):
                self.bytes_written = 0
                del self.outbox[0]
        return False

    cdef Py_ssize_t write(self) except -2:
        """One write; 0: the socket is full, or broken."""
        cdef iovec vector
        cdef msghdr message
        cdef char control[512]
        cdef cmsghdr *header
        cdef ssize_t done
        cdef int[MAX_DESCRIPTORS] numbers
        frame, copies = <tuple>self.outbox[0]
        vector.iov_base = PyBytes_AS_STRING(frame) + self.bytes_written
        vector.iov_len = PyBytes_GET_SIZE(frame) - self.bytes_written
        memset(&message, 0, sizeof(message))
        message.msg_iov = &vector
        message.msg_iovlen = 1
        if copies:
            memset(control, 0, sizeof(control))
            for i, descriptor in enumerate(copies):
                numbers[i] = descriptor
            message.msg_control = control
            message.msg_controllen = CMSG_SPACE(len(copies) * sizeof(int))
            header = CMSG_FIRSTHDR(&message)
            header.cmsg_level = SOL_SOCKET
            header.cmsg_type = SCM_RIGHTS
            header.cmsg_len = CMSG_LEN(len(copies) * sizeof(int))
            memcpy(CMSG_DATA(header), numbers, len(copies) * sizeof(int))
        while True:
            done = sendmsg(self.descriptor, &message, MSG_DONTWAIT | MSG_NOSIGNAL)
            if done >= 0:
                return done
            if errno == EAGAIN:
                return 0
            if errno != EINTR:
                self.write_failed = True  # what the other side has sent can still be read
                return 0

    cdef bint fill(self) except -1:
        """Reads what has come; returns whether it was anything."""
        cdef Header header
        cdef ChannelMessage message
        cdef Py_ssize_t got
        cdef bint was_read = False
        while self.broken is None:
            if self.header_read < <Py_ssize_t>sizeof(Header):
                got = self.read(self.header + self.header_read, sizeof(Header) - self.header_read)
                self.header_read += got
            elif self.body is None:
                memcpy(&header, self.header, sizeof(Header))
                if (header.magic != MAGIC or header.length > MAX_LENGTH
                        or header.num_descriptors > MAX_DESCRIPTORS):
                    self.broken = "what came through it is no message"
                    break
                self.body = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>header.length)
                self.body_read = 0
                continue
            elif self.body_read < PyBytes_GET_SIZE(self.body):
                got = self.read(PyBytes_AS_STRING(self.body) + self.body_read,
                                PyBytes_GET_SIZE(self.body) - self.body_read)
                self.body_read += got
            else:
                memcpy(&header, self.header, sizeof(Header))
                message = ChannelMessage()
                message.sequence = header.sequence
                message.is_goodbye = header.goodbye != 0
                message.content = self.body
                message.descriptors = self.incoming_descriptors
                message.has_all_descriptors = (
                    len(self.incoming_descriptors) == <Py_ssize_t>header.num_descriptors)
                self.inbox.append(message)
                self.incoming_descriptors = []
                self.body = None
                self.header_read = 0
                continue
            if got == 0:
                break
            was_read = True
        return was_read

    cdef Py_ssize_t read(self, char *target, Py_ssize_t most) except -2:
        """One read; 0: there is nothing, or it is broken."""
        cdef iovec vector
        cdef msghdr message
        cdef char control[512]
        cdef cmsghdr *header
        cdef ssize_t got
        cdef int[MAX_DESCRIPTORS] numbers
        cdef size_t count
        vector.iov_base = target
        vector.iov_len = most
        while True:
            memset(&message, 0, sizeof(message))
            message.msg_iov = &vector
            message.msg_iovlen = 1
            message.msg_control = control
            message.msg_controllen = sizeof(control)
            got = recvmsg(self.descriptor, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC)
            if got > 0:
                header = CMSG_FIRSTHDR(&message)
                if header != NULL and header.cmsg_type == SCM_RIGHTS:
                    count = min((header.cmsg_len - CMSG_LEN(0)) // sizeof(int),
                                <size_t>MAX_DESCRIPTORS)
                    memcpy(numbers, CMSG_DATA(header), count * sizeof(int))
                    for i in range(count):
                        self.incoming_descriptors.append(numbers[i])
                return got
            if got == 0:
                self.broken = "the other end was closed"
                return 0
            if errno == EAGAIN:
                return 0
            if errno != EINTR:
                self.broken = f"reading from it failed: {os.strerror(errno)}"
                return 0


cdef int _close_descriptors(list descriptors) except -1:
    while descriptors:
        close_descriptor(descriptors.pop())
    return 0
