"""Ends the worker when its parent is gone, whatever its env is doing: see csrc/watchdog.h.

Once started it stays out of the way of ``os.fork``: it is stopped before, so that an env which
forks does so with the threads that are its own, and started again in the parent. The child of the
fork has none.
"""

from libc.stdint cimport uint64_t

from shmvec._core.csrc cimport sv_watchdog_start, sv_watchdog_stop

import os

cdef int _watched = -1       # the descriptor; -1: none
cdef uint64_t _mark = 0      # of the family
cdef bint _follows = False   # forks, by the hooks below


def start_watchdog(int descriptor, uint64_t mark):
    global _watched, _mark, _follows
    cdef int error = sv_watchdog_start(descriptor, mark)
    if error != 0:
        raise OSError(error, f"cannot watch over the parent: {os.strerror(error)}")
    _watched, _mark = descriptor, mark
    if not _follows:
        os.register_at_fork(before=_pause, after_in_parent=_resume, after_in_child=_forget)
        _follows = True


def stop_watchdog():
    global _watched
    sv_watchdog_stop()
    _watched = -1


def _pause():
    sv_watchdog_stop()


def _resume():
    if _watched >= 0:
        start_watchdog(_watched, _mark)


def _forget():
    global _watched
    _watched = -1
