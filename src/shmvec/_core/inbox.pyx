"""Infos of answers, and observations that are in no slab: from rings and channels to a batch.

Reading removes nothing: a message keeps its room in its ring, or its place in ``held``, until its
env is taken. So a reading that is interrupted (by a signal handler during unpickling, or in the
user's ``_add_info``) loses nothing: the next one starts from the beginning.
"""

from libc.stdint cimport uint8_t, uint32_t

from shmvec._core.codec cimport Codec
from shmvec._core.links cimport Links
from shmvec._core.messages cimport Columns, InfoDecoder
from shmvec._core.protocol cimport MESSAGES, OBSERVATION

import numpy as np
from gymnasium.vector import VectorEnv

from shmvec._core.guard import raises_by_itself

cdef object _plain_add_info = VectorEnv._add_info


cdef class Inbox:
    """Messages of answers that have not been taken yet."""

    def __init__(self, Links links, slabs, const uint32_t[::1] workers,
                 const uint32_t[::1] sequences, uint32_t[::1] flags):
        self.links = links
        self.slabs = slabs
        self.observations = slabs.results.observations
        self.workers = workers
        self.sequences = sequences
        self.flags = flags
        self.columns = Columns()
        self.decoders = [None] * links.num_workers
        self.held = {}

    cdef int renew(self, uint32_t worker) except -1:
        """Starts reading a worker's ring from its beginning."""
        self.decoders[worker] = InfoDecoder(
            self.links.segment, worker, True, self.columns, self.observations, self.slabs.finals)
        return 0

    # ---- what is there -----------------------------------------------------------------------

    cdef bint has_any(self, const Py_ssize_t[::1] envs) noexcept:
        """Whether one of these envs has sent a message."""
        cdef Py_ssize_t i
        if self.held:
            return True
        for i in range(envs.shape[0]):
            if self.flags[envs[i]] & MESSAGES:
                return True
        return False

    cdef int put(self, Py_ssize_t env, uint32_t kind, message) except -1:
        """Keeps a message that came through a channel."""
        if kind == OBSERVATION:
            self.observations.write(env, message[""])
        else:
            self.held.setdefault(env, []).append(message)
        return 0

    cdef int hold(self, Py_ssize_t env) except -1:
        """Moves an env's messages from the ring to ``held``; call it in the order of answers."""
        cdef InfoDecoder decoder
        if not self.flags[env] & MESSAGES:
            return 0
        if self.unread:
            self.rewind()
        decoder = self.decoders[self.workers[env]]
        while decoder.next(self.sequences[env]) and decoder.env <= env:
            if decoder.env == env:  # otherwise it belongs to an env that failed
                info = decoder.take_one(None, None)
                if info is not None:
                    self.held.setdefault(env, []).append(info)
            decoder.release()
        self.flags[env] &= ~<uint32_t>MESSAGES
        return 0

    cdef int order(self, const Py_ssize_t[::1] ready, const Py_ssize_t[::1] envs) except -1:
        """Moves infos out of the rings if their order there is not that of these envs.

        Args:
            ready: All envs that have answered, in the order of their answers.
            envs: The ones whose infos are wanted.
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

    cdef int rewind(self) except -1:
        """Undoes a reading that was interrupted, or whose envs were not taken."""
        cdef InfoDecoder decoder
        self.unread = False
        for decoder in self.decoders:
            decoder.rewind()
        return 0

    cdef list each_of_all(self, list workers, uint32_t sequence):
        """Infos of all envs, some sent by these workers: one dict for each env."""
        cdef InfoDecoder decoder
        cdef list each = [{} for _ in range(self.workers.shape[0])]
        self.unread = True
        for worker in workers:
            decoder = self.decoders[worker]
            for env, info in decoder.drain(sequence):
                each[env] = _merged([each[env], info]) if each[env] else info
        return each

    cdef dict gather_all(self, list workers, uint32_t sequence, vector_env):
        """Infos of all envs, some sent by these workers: Gymnasium's dict of arrays."""
        cdef InfoDecoder decoder
        cdef dict infos = {}
        self.unread = True
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
        return [_merged(self.held.get(envs[i], [])) for i in range(envs.shape[0])]

    cdef object gather(self, const Py_ssize_t[::1] envs, const Py_ssize_t[::1] rows, dict reports,
                       vector_env):
        """Infos of these envs, with reports of faults: Gymnasium's dict of arrays."""
        cdef Py_ssize_t i
        cdef Py_ssize_t env
        cdef object infos = {}
        cdef InfoDecoder decoder
        cdef Py_ssize_t num_rows = vector_env.num_envs
        cdef bint plain = type(vector_env)._add_info is _plain_add_info
        self.unread = plain
        try:
            for i in range(envs.shape[0]):
                env = envs[i]
                if not plain:
                    self.hold(env)
                elif self.flags[env] & MESSAGES:
                    decoder = self.decoders[self.workers[env]]
                    decoder.add_env(infos, env, self.sequences[env], rows[i], num_rows, vector_env)
                if self.held or reports:
                    infos = self.add_others(infos, env, rows[i], reports, vector_env)
        finally:
            self.columns.finish()
        return infos

    cdef object add_others(self, object infos, Py_ssize_t env, Py_ssize_t row, dict reports,
                           vector_env):
        """Adds an env's held infos and its report; discards what cannot be added, and raises."""
        cdef list held = self.held.get(env, [])
        cdef list others = held + [reports[env].info] if reports and env in reports else held
        for info in others:
            try:
                infos = vector_env._add_info(infos, info, row)
            except Exception:
                if raises_by_itself(vector_env._add_info, infos, info, row):
                    self.held[env] = [each for each in held if each is not info]
                    if len(self.held[env]) == len(held):  # none of the held: it was the report
                        del reports[env]
                raise
        return infos

    # ---- the end of a batch ------------------------------------------------------------------

    cdef int give_back(self) except -1:
        """Gives the room of what was read back to the rings."""
        cdef InfoDecoder decoder
        self.unread = False
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
        self.rewind()
        self.held.clear()
        self.flags[:] = 0
        for decoder in self.decoders:
            decoder.next(sequence)
            decoder.give_back()
        return 0


cdef object _merged(list infos):
    """One dict from these; if there is only one, that one itself."""
    if len(infos) == 1:
        return infos[0]
    return {key: info[key] for info in infos for key in info}
