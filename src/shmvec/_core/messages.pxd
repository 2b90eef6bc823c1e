from libc.stdint cimport uint32_t

from shmvec._core cimport csrc as c


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


cdef class Field:
    cdef object key
    cdef object type      # the exact type of the value
    cdef Kind kind
    cdef object dtype     # of the column of such values; None: it is a column of objects
    cdef bytes format     # of an ARRAY's buffer
    cdef tuple shape      # of an ARRAY
    cdef Py_ssize_t nbytes
    cdef list children    # the fields of NESTED
    cdef object column    # on the caller's side: the column of the values

cdef class Encoder:
    cdef c.sv_byte_ring ring
    cdef list schemas
    cdef dict schemas_by_key
    cdef list last_schemas  # by env and kind of message: the schema that was used last
    cdef Py_ssize_t first_env
    cdef char *buffer
    cdef Py_ssize_t used
    cdef Py_ssize_t capacity
    cdef int encode(self, Py_ssize_t env, uint32_t kind, object message,
                    uint32_t sequence) except -1
    cdef char *grow(self, Py_ssize_t nbytes) except NULL
    cdef bint pack(self, list fields, dict message) except -1
    cdef object schema_for(self, dict message)
    cdef bint send(self, uint32_t *prefix, uint32_t tag, const char *content,
                   Py_ssize_t nbytes) noexcept

cdef class Decoder:
    cdef c.sv_byte_ring ring
    cdef list schemas
    cdef Py_ssize_t num_envs
    cdef object ring_name         # for messages of errors
    cdef uint32_t expected_kinds  # a bit for each kind of message that may come
    # The message that `next` has turned to:
    cdef Py_ssize_t env
    cdef uint32_t kind
    cdef uint32_t tag
    cdef const char *start
    cdef const char *cursor
    cdef const char *end
    cdef bytes pickled    # a copy of its content, if that is pickled
    cdef object damage_error(self, what)
    cdef int check(self, list fields) except -1
    cdef int on_schema(self, list fields) except -1
    cdef bint next(self, uint32_t sequence) except -1
    cdef bint is_wanted_later(self, uint32_t env, uint32_t sequence, uint32_t now) except -1
    cdef list schema(self)
    cdef object decode(self)
    cdef dict unpack(self, list fields)
    cdef const char *skip(self, Py_ssize_t nbytes) except NULL
    cdef object unpack_value(self, Field field)
    cdef int copy(self, void *target, Py_ssize_t nbytes) except -1
    cdef void open(self, Py_ssize_t env, uint32_t kind, uint32_t tag, const char *start,
                   Py_ssize_t nbytes) noexcept
    cdef void release(self) noexcept
