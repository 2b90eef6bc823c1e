"""Actions of requests: from a batch to their slab, to rings, or packed for the channels.

Actions are written before their requests. A call that is interrupted in between, or raises, has
asked for nothing: its actions are overwritten later, or discarded, as no request has their number.
"""

from libc.stdint cimport uint32_t

from shmvec._core.codec cimport ActionCodec, MessageCodec
from shmvec._core.messages cimport Encoder
from shmvec._core.protocol cimport ACTION

from shmvec._core.codec import OtherShapeError
from shmvec._core.guard import raises_by_itself
from shmvec._core.messages import pickle_value


cdef class Outbox:
    """Writer of the actions that workers need for their requests.

    ``pack`` makes a message of [(env, action)]. The caller, which posts the requests, puts such a
    message into a channel.
    """

    def __init__(self, Links links, slabs, const uint32_t[::1] workers):
        self.links = links
        self.actions = slabs.actions
        self.workers = workers
        if isinstance(self.actions, MessageCodec):
            self.encoders = [None] * links.num_workers

    cdef int renew(self, uint32_t worker) except -1:
        """Starts writing a worker's ring from its beginning."""
        cdef Links links = self.links
        if self.encoders is not None:
            self.encoders[worker] = Encoder(
                links.segment, worker, links.firsts[worker], links.counts[worker], False)
        return 0

    cdef dict put_all(self, const Py_ssize_t[::1] everyone, actions, pack, uint32_t sequence,
                      bint any_shape):
        """Writes all envs' actions for requests with one number; the rest, packed, by worker."""
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
        """Writes envs' actions for requests from this number on; the rest, packed, by env."""
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
        """Writes actions to their slab; [action] if they must be messages, e.g. for their shape."""
        if self.encoders is not None:
            return (<MessageCodec>self.actions).split(actions, envs.shape[0])
        try:
            self.actions.write_rows(envs, actions)
        except OtherShapeError as error:
            if not any_shape or not isinstance(self.actions, ActionCodec):
                raise
            return list(error.actions.copy())  # copied, because envs may keep their actions
        return None

    cdef bint encode(self, Py_ssize_t env, action, uint32_t sequence) except -1:
        """Puts an action into its worker's ring; False if it does not fit."""
        cdef Encoder encoder = self.encoders[self.workers[env]]
        try:
            return encoder.encode(env, ACTION, {"": action}, sequence)
        except Exception as error:
            if not raises_by_itself(pickle_value, action):
                raise
            raise TypeError(
                f"wrong actions: that of env {env} cannot be pickled to send it to its worker "
                f"({error}). Nothing was sent to any env."
            ) from error
