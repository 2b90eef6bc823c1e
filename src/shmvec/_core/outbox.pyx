"""The actions of requests: from a batch to their slab, to rings, or packed for the channels.

They are written before their requests are. What is broken off in between, or raises, has asked for
nothing: what was written is overwritten, or dropped by its number, which no request has.
"""

from libc.stdint cimport uint32_t

from shmvec._core.codec cimport ActionCodec, MessageCodec
from shmvec._core.messages cimport Encoder
from shmvec._core.protocol cimport ACTION

from shmvec._core.codec import OtherShapeError


cdef class Outbox:
    """Writes what workers must have with their requests.

    ``pack`` makes a message of [(env, action)]. Such a message is for who posts the requests to put
    into a channel.
    """

    def __init__(self, Links links, slabs, const uint32_t[::1] workers):
        self.links = links
        self.actions = slabs.actions
        self.workers = workers
        if isinstance(self.actions, MessageCodec):
            self.encoders = [None] * links.num_workers

    cdef int renew(self, uint32_t worker) except -1:
        """Begins to write a worker's ring from its start."""
        cdef Links links = self.links
        if self.encoders is not None:
            self.encoders[worker] = Encoder(
                links.segment, worker, links.firsts[worker], links.counts[worker], False)
        return 0

    cdef dict put_all(self, const Py_ssize_t[::1] everyone, actions, pack, uint32_t sequence,
                      bint any_shape):
        """Writes all envs' actions, for requests of one number; packed, what is left, by worker."""
        cdef Links links = self.links
        cdef uint32_t worker
        cdef Py_ssize_t env
        cdef dict left
        cdef list each = self.write(everyone, actions, any_shape)
        if each is None:
            return None
        left = {}
        for worker in range(links.num_workers):
            for env in range(links.firsts[worker], links.firsts[worker] + links.counts[worker]):
                if self.encoders is None or not self.encode(env, each[env], sequence):
                    left.setdefault(worker, []).append((env, each[env]))
        for worker in left:
            left[worker] = pack(left[worker])
        return left

    cdef dict put(self, const Py_ssize_t[::1] envs, actions, pack, uint32_t sequence,
                  bint any_shape):
        """Writes envs' actions, for requests from this number on; packed, what is left, by env."""
        cdef Py_ssize_t i
        cdef dict left
        cdef list each = self.write(envs, actions, any_shape)
        if each is None:
            return None
        left = {}
        for i in range(envs.shape[0]):
            if self.encoders is None or not self.encode(
                    envs[i], each[i], sequence + <uint32_t>i):
                left[envs[i]] = pack([(envs[i], each[i])])
        return left

    cdef list write(self, const Py_ssize_t[::1] envs, actions, bint any_shape):
        """Writes actions to their slab; [action] if they are to be messages, as of another shape."""
        if self.encoders is not None:
            return (<MessageCodec>self.actions).split(actions, envs.shape[0])
        try:
            self.actions.write_rows(envs, actions)
        except OtherShapeError as error:
            if not any_shape or not isinstance(self.actions, ActionCodec):
                raise
            return list(error.actions.copy())  # envs may keep theirs
        return None

    cdef bint encode(self, Py_ssize_t env, action, uint32_t sequence) except -1:
        """Puts an action into the ring to its worker; False if it does not fit."""
        cdef Encoder encoder = self.encoders[self.workers[env]]
        try:
            return encoder.encode(env, ACTION, {"": action}, sequence)
        except Exception as error:
            raise TypeError(
                f"wrong actions: that of env {env} cannot be pickled to send it to its worker "
                f"({error}). Nothing was sent to any env."
            ) from error
