"""Infos in the parent: reads them from rings and channels, and gathers them for a batch.

A batch's infos become Gymnasium's dict of arrays (a *column* a key), or one dict for each env.
``VectorEnv._add_info`` defines the dict of arrays: a value that is not a plain store into a column
of the same dtype is given to that very method, so that results equal ``SyncVectorEnv``'s.

Reading runs the user's code (unpickling, ``_add_info``) and may raise. The call that takes the envs
then ends with that exception, and their answers are discarded, so that a message which cannot be
read raises only once. Envs that the call does not take keep their messages.
"""

from libc.stdint cimport uint8_t, uint32_t

from shmvec._core.codec cimport Codec, MessageCodec, address_of
from shmvec._core.links cimport Links
from shmvec._core.messages cimport NESTED, Decoder, Field
from shmvec._core.protocol cimport FINAL, INFO, MESSAGES, OBSERVATION

import numpy as np
from gymnasium.vector import VectorEnv

cdef object _ndarray = np.ndarray
cdef object _plain_add_info = VectorEnv._add_info


# ---- reports of faults -------------------------------------------------------------------------


cdef class Report:
    """Report of a fault in an env's next answer."""

    @property
    def info(self):
        fault = self.fault.info
        if self.last is None:
            return {"fault": fault}
        return {"fault": fault, "final_obs": self.last[0], "final_info": {"fault": fault}}


cdef Report report_of(fault, bint cut_off, list last):
    cdef Report report = Report()
    report.fault = fault
    report.cut_off = cut_off
    report.last = last
    return report


class Batch(VectorEnv):
    """Stand-in for a vector env of fewer envs, so that Gymnasium gathers their infos."""

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.closed = True


# ---- columns -----------------------------------------------------------------------------------


cdef class Columns  # see below


cdef class Column:
    """The array of one key in the dict of arrays that is being built, and its mask."""

    cdef str key
    cdef str mask_key
    cdef object array       # None: the key is not in this batch's infos yet
    cdef object mask
    cdef object dtype       # None: objects
    cdef tuple shape        # the shape of one env's value
    cdef Py_ssize_t nbytes  # the bytes of one env's value
    cdef char *data
    cdef uint8_t *flags
    cdef Columns children   # the columns of a nested dict

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
                    array = np.empty(num_envs, object)  # np.full is Python: Ctrl-C ends it
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
            columns.entered.append(self)  # first: what raises later must find it there
            self.array = array
            self.mask = mask
        if self.dtype is field.dtype:
            return field.dtype is None or self.shape is field.shape or self.shape == field.shape
        return (self.dtype is not None and field.dtype is not None
                and self.dtype == field.dtype and self.shape == field.shape)


cdef class Columns:
    """The columns of one dict of arrays, by key; shared by the decoders of all workers."""

    cdef dict by_key
    cdef list entered       # the columns that are in this batch's infos

    def __cinit__(self):
        self.by_key = {}
        self.entered = []

    cdef int settle(self, list fields) except -1:
        """Gives every field of a schema its column."""
        cdef Field field
        for field in fields:
            if field.dtype is not None:  # NumPy's own instance, so that dtypes compare by identity
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
    """Decoder of one worker's messages: infos, and observations that are in no slab."""

    cdef const uint8_t[::1] states  # these three: as in Inbox
    cdef const uint32_t[::1] sequences
    cdef const uint32_t[::1] flags
    cdef bint discards  # whether no message is wanted
    cdef Columns columns
    cdef Codec observations
    cdef Codec finals
    # The row of the message's env in the dict that is being built, and the number of its rows.
    cdef Py_ssize_t row
    cdef Py_ssize_t num_rows

    def __init__(self, segment, worker, from_worker, Inbox inbox, Columns columns,
                 Codec observations, Codec finals):
        self.states, self.sequences, self.flags = inbox.states, inbox.sequences, inbox.flags
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

    cdef bint is_wanted_later(self, uint32_t env, uint32_t sequence, uint32_t now) except -1:
        # Not by its number: a worker that is busy with several envs may answer later ones first.
        if env >= self.num_envs:
            raise self.damaged("has no env")
        return not self.discards and self.sequences[env] == sequence and (
            self.states[env] == IN_FLIGHT
            or self.states[env] == READY and self.flags[env] & MESSAGES != 0)

    cdef list drain(self, uint32_t sequence):
        """All infos of this sequence as [(env, info)], in the order in which they were sent."""
        cdef list infos = []
        while self.next(sequence):
            info = self.read(None, None)
            if info is not None:
                infos.append((self.env, info))
            self.advance()
        return infos

    cdef int add_to(self, dict infos, uint32_t sequence, object vector_env) except -1:
        """Adds the infos of this sequence, at least one, to Gymnasium's dict of arrays."""
        cdef bint found = False
        self.num_rows = self.num_envs
        while self.next(sequence):
            found = True
            self.row = self.env
            self.read(infos, vector_env)
            self.advance()
        if not found:
            raise self.damaged("was announced, and is not there")
        return 0

    cdef int add_env(self, dict infos, Py_ssize_t env, uint32_t sequence, Py_ssize_t row,
                     Py_ssize_t num_rows, object vector_env) except -1:
        """Adds the infos of one env, which come next, to a dict of arrays of another length."""
        self.row = row
        self.num_rows = num_rows
        while self.next(sequence) and self.env <= env:
            if self.env == env:  # else it is of an env that has failed
                self.read(infos, vector_env)
            self.advance()
        return 0

    cdef object read(self, dict infos, object vector_env):
        """Adds the message that `next` found; without a vector env, returns it as the env did."""
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


# ---- the messages of all workers ---------------------------------------------------------------


cdef class Inbox:
    """Messages of answers that have not been taken yet."""

    def __init__(self, Links links, slabs, const uint32_t[::1] workers,
                 const uint8_t[::1] states, const uint32_t[::1] sequences, uint32_t[::1] flags):
        self.links = links
        self.slabs = slabs
        self.observations = slabs.results.observations
        self.workers = workers
        self.states = states
        self.sequences = sequences
        self.flags = flags
        self.columns = Columns()
        self.decoders = [None] * links.num_workers
        self.held = {}

    cdef int renew(self, uint32_t worker) except -1:
        """Starts reading a worker's ring from its beginning."""
        self.decoders[worker] = InfoDecoder(
            self.links.segment, worker, True, self, self.columns, self.observations,
            self.slabs.finals)
        return 0

    # ---- messages in rings -------------------------------------------------------------------

    cdef bint has_any(self, const Py_ssize_t[::1] envs) noexcept:
        """Whether one of these envs has sent a message."""
        cdef Py_ssize_t i
        if self.held:
            return True
        for i in range(envs.shape[0]):
            if self.flags[envs[i]] & MESSAGES:
                return True
        return False

    cdef int hold(self, Py_ssize_t env) except -1:
        """Moves an env's messages, unread, from the ring to ``held``; in the order of answers."""
        cdef InfoDecoder decoder
        if not self.flags[env] & MESSAGES:
            return 0
        decoder = self.decoders[self.workers[env]]
        while decoder.next(self.sequences[env]) and decoder.env <= env:
            if decoder.env == env:  # otherwise it belongs to an env that failed
                self.held.setdefault(env, []).append((decoder, decoder.copied()))
            decoder.release()
        self.flags[env] &= ~<uint32_t>MESSAGES
        return 0

    cdef int order(self, const Py_ssize_t[::1] ready, const Py_ssize_t[::1] envs) except -1:
        """Moves infos out of the rings if their order there is not that of these envs.

        Args:
            ready: All envs that have answered, in the order of their answers.
            envs: The envs whose infos are wanted.
        """
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef Py_ssize_t position
        places = np.full(self.workers.shape[0], envs.shape[0], np.intp)  # past the end: not moved
        cdef Py_ssize_t[::1] place = places
        for i in range(envs.shape[0]):
            place[envs[i]] = i
        last = np.full(self.links.num_workers, -1, np.intp)
        cdef Py_ssize_t[::1] last_of = last
        for i in range(ready.shape[0]):
            env = ready[i]
            if not self.flags[env] & MESSAGES:
                continue
            position = place[env]
            if position < last_of[self.workers[env]]:
                break
            last_of[self.workers[env]] = position
        else:
            return 0
        for i in range(ready.shape[0]):
            self.hold(ready[i])
        return 0

    # ---- infos of a batch --------------------------------------------------------------------

    cdef list read_held(self, Py_ssize_t env):
        """An env's infos that are in no ring."""
        cdef InfoDecoder decoder
        cdef list infos = []
        for held in self.held.get(env, ()):
            if type(held) is tuple:
                decoder, message = held
                decoder.restore(message)
                held = decoder.read(None, None)
            if held is not None:
                infos.append(held)
        return infos

    cdef list each_of_all(self, list workers, uint32_t sequence):
        """Infos of all envs, one dict each; only these workers have sent some."""
        cdef InfoDecoder decoder
        cdef list each = [{} for _ in range(self.workers.shape[0])]
        self.has_read = True
        for worker in workers:
            decoder = self.decoders[worker]
            for env, info in decoder.drain(sequence):
                each[env] = _merged([each[env], info]) if each[env] else info
        return each

    cdef dict gather_all(self, list workers, uint32_t sequence, vector_env):
        """Infos of all envs, as Gymnasium's dict of arrays; only these workers have sent some."""
        cdef InfoDecoder decoder
        cdef dict infos = {}
        self.has_read = True
        try:
            for worker in workers:
                decoder = self.decoders[worker]
                decoder.add_to(infos, sequence, vector_env)
        finally:
            self.columns.finish()
        return infos

    cdef list each(self, const Py_ssize_t[::1] envs):
        """Infos of these envs: one dict for each, as the env returned it."""
        cdef Py_ssize_t i
        for i in range(envs.shape[0]):
            self.hold(envs[i])
        return [_merged(self.read_held(envs[i])) for i in range(envs.shape[0])]

    cdef object gather(self, const Py_ssize_t[::1] envs, const Py_ssize_t[::1] rows, dict reports,
                       vector_env):
        """Infos of these envs, with reports of faults: Gymnasium's dict of arrays."""
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef object infos = {}
        cdef InfoDecoder decoder
        cdef Py_ssize_t num_rows = vector_env.num_envs
        cdef bint plain = type(vector_env)._add_info is _plain_add_info
        self.has_read = plain
        try:
            for i in range(envs.shape[0]):
                env = envs[i]
                if not plain:
                    self.hold(env)
                elif self.flags[env] & MESSAGES:
                    decoder = self.decoders[self.workers[env]]
                    decoder.add_env(infos, env, self.sequences[env], rows[i], num_rows, vector_env)
                for info in self.read_held(env) if self.held else ():
                    infos = vector_env._add_info(infos, info, rows[i])
                if reports and env in reports:
                    infos = vector_env._add_info(infos, reports[env].info, rows[i])
        finally:
            self.columns.finish()
        return infos

    # ---- the end of a batch ------------------------------------------------------------------

    cdef int give_back(self) except -1:
        """Gives the room of messages that were read back to the rings."""
        cdef InfoDecoder decoder
        self.has_read = False
        for decoder in self.decoders:
            decoder.give_back()
        return 0

    cdef int discard(self, Py_ssize_t env) except -1:
        """Discards an env's held messages."""
        if self.held:
            self.held.pop(env, None)
        return 0

    cdef int discard_all(self, uint32_t sequence) except -1:
        """Discards all messages of answers to requests before this one."""
        cdef InfoDecoder decoder
        self.has_read = False
        self.held.clear()
        self.flags[:] = 0
        for decoder in self.decoders:
            decoder.discards = True
            try:
                decoder.next(sequence)
            finally:
                decoder.discards = False
            decoder.give_back()
        return 0


cdef object _merged(list infos):
    """Merges dicts into one; if there is only one, returns that."""
    if len(infos) == 1:
        return infos[0]
    return {key: info[key] for info in infos for key in info}
