"""Infos in the parent: messages straight into the arrays of Gymnasium's dict, a *column* a key.

``VectorEnv._add_info`` defines the result: whatever is not a plain store into a column of the same
dtype is given to that very method, so that results equal ``SyncVectorEnv``'s.
"""

from libc.stdint cimport uint8_t, uint32_t

from shmvec._core.codec cimport Codec, MessageCodec, address_of
from shmvec._core.messages cimport NESTED, Decoder, Field
from shmvec._core.protocol cimport FINAL, INFO, OBSERVATION
from shmvec._core.segment cimport Segment

import numpy as np
from gymnasium.vector import VectorEnv

from shmvec._core.again import raises_again

cdef object _ndarray = np.ndarray
cdef object _plain_add_info = VectorEnv._add_info


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
                    array = np.empty(num_envs, object)  # of None; np.full is Python, which Ctrl-C ends
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
                self.data = <char *>address_of(array)
            self.flags = <uint8_t *>address_of(mask)
            self.array = array
            self.mask = mask
            columns.entered.append(self)
        if self.dtype is field.dtype:
            return field.dtype is None or self.shape is field.shape or self.shape == field.shape
        return (self.dtype is not None and field.dtype is not None
                and self.dtype == field.dtype and self.shape == field.shape)


cdef class Columns:
    """The columns of one dict of arrays, by key; shared by the decoders of all workers."""

    def __cinit__(self):
        self.by_key = {}
        self.entered = []

    cdef int settle(self, list fields) except -1:
        """Gives every field of a schema its column."""
        cdef Field field
        for field in fields:
            if field.dtype is not None:  # NumPy's own instance again: equality is identity then
                field.dtype = np.empty(0, field.dtype.type).dtype
            if field.key not in self.by_key:
                self.by_key[field.key] = Column(field.key)
            field.column = self.by_key[field.key]
            if field.kind == NESTED:
                (<Column>field.column).children.settle(field.children)
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


cdef class InfoDecoder(Decoder):
    """What one worker sends the parent: infos, and observations that are in no slab."""

    def __init__(self, segment, worker, from_worker, Columns columns, Codec observations,
                 Codec finals):
        self.columns = columns
        self.observations = observations
        self.finals = finals
        self.kinds = 1 << INFO
        if isinstance(observations, MessageCodec):
            self.kinds |= 1 << OBSERVATION
        if finals is not None:
            self.kinds |= 1 << FINAL

    cdef int learned(self, list fields) except -1:
        return self.columns.settle(fields)

    cdef list drain(self, uint32_t sequence):
        """All infos of this sequence as [(env, info)], in the order in which they were sent."""
        cdef list infos = []
        while self.next(sequence):
            info = self.take_one(None, None)
            if info is not None:
                infos.append((self.env, info))
            self.advance()
        return infos

    cdef int add_to(self, dict infos, uint32_t sequence, object vector_env) except -1:
        """Adds the infos of this sequence, of which there are some, to Gymnasium's dict of arrays."""
        cdef bint found = False
        self.num_rows = self.num_envs
        while self.next(sequence):
            found = True
            self.row = self.env
            self.take_one(infos, vector_env)
            self.advance()
        if not found and not self.spoilt:
            raise self.damaged("was announced, and is not there")
        return 0

    cdef int add_env(self, dict infos, Py_ssize_t env, uint32_t sequence, Py_ssize_t row,
                     Py_ssize_t num_rows, object vector_env) except -1:
        """Adds those of one env, which are the next, to a dict of arrays of another length."""
        self.row = row
        self.num_rows = num_rows
        while self.next(sequence) and self.env <= env:
            if self.env == env:  # else of one that failed
                self.take_one(infos, vector_env)
            self.advance()
        return 0

    cdef object take_one(self, dict infos, object vector_env):
        """Adds the message that `next` found; without a vector env, returns it as the env did."""
        try:
            return self.take_once(infos, vector_env)
        except Exception:
            self.cursor = self.start
            if raises_again(self.take_once, infos, vector_env):
                self.spoil()
            raise

    cpdef object take_once(self, dict infos, object vector_env):
        cdef list fields
        if self.kind == OBSERVATION:  # to where the others are
            self.observations.write(self.env, self.take()[""])
        elif vector_env is None:
            info = self.take()
            return {"final_obs": self.finals.read(self.env), **info} if self.kind == FINAL else info
        else:
            if self.kind == FINAL:
                _plain_add_info(
                    vector_env, infos, {"final_obs": self.finals.read(self.env)}, self.row)
            fields = self.schema()
            if fields is None:
                _plain_add_info(vector_env, infos, self.take(), self.row)
            else:
                self.add_fields(self.columns, fields, infos, vector_env)
        return None

    cdef int add_fields(self, Columns columns, list fields, dict infos,
                        object vector_env) except -1:
        cdef Field field
        cdef Column column
        for field in fields:
            column = <Column>field.column
            if field.kind == NESTED:
                self.add_nested(field, infos, vector_env)
            elif column.enter(columns, infos, field, self.num_rows):
                column.flags[self.row] = 1
                if field.dtype is None:
                    column.array[self.row] = self.value(field)
                else:
                    self.copy(column.data + self.row * column.nbytes, field.nbytes)
            else:
                _plain_add_info(vector_env, infos, {field.key: self.value(field)}, self.row)
        return 0

    cdef int add_nested(self, Field field, dict infos, object vector_env) except -1:
        """As `_add_info` does: the nested dict first, then its place and mask in the outer one."""
        cdef Column column = <Column>field.column
        inner = infos.get(field.key)
        if inner is None:
            inner = {}
        elif type(inner) is not dict:  # a value of another env: `_add_info` knows what follows
            _plain_add_info(vector_env, infos, {field.key: self.unpack(field.children)}, self.row)
            return 0
        self.add_fields(column.children, field.children, <dict>inner, vector_env)
        mask = infos.get(column.mask_key)
        if mask is None:
            mask = np.zeros(self.num_rows, np.bool_)
        mask[self.row] = True
        infos[field.key] = inner
        infos[column.mask_key] = mask
        return 0
