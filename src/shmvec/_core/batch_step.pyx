"""A batch step in one compiled call: it asks envs, waits, and takes their results.

This is what most callers do most of the time, so no Python code runs in it unless something is
unusual: a fault, a message that did not fit, envs that were chosen. That is left to the subclass.
"""

from libc.stdint cimport uint64_t

from shmvec._core.guard cimport Guard
from shmvec._core.ledger cimport Ledger

from shmvec.faults import EnvTimeoutError, WorkerCrashError


cdef class BatchSteps:
    """Base of the Exchange, with its `step`."""

    cdef public Guard guard
    cdef public Ledger _ledger      # None: the exchange is not started yet, or closed
    cdef public object _workers
    cdef public object _recovery
    cdef public set _left           # envs that `leave` has closed
    cdef public bint _recycles

    def step(self, actions, gather=None, envs=None, *, Py_ssize_t frame=-1, bint last=False,
             bint arrays=True, meanwhile=None, within=None):
        """Steps all envs, or some, none of which may be in flight.

        Args:
            actions: As for :meth:`ask`.
            gather: As for :meth:`take`.
            envs: Which. None: all.
            frame: The rollout's frame for the results; -1: none.
            last: Whether that is the rollout's last frame.
            arrays: Whether results other than infos are wanted at all.
            meanwhile: Called while the envs step.
            within: The loan under which this call is made.

        Returns:
            Observations, rewards, terminations and truncations of all envs, and infos.

        Raises:
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
            Exception: As :meth:`ask` and :meth:`take`, and whatever envs raise.
        """
        cdef Guard guard = self.guard
        cdef uint64_t asked
        cdef object pending
        guard.enter()
        asked = guard.asked
        pending = guard.pending
        guard.claimed = False
        try:
            return self.whole_step(
                guard, actions, gather, envs, frame, last, arrays, meanwhile, within)
        except BaseException:
            guard.abandon_all_of(asked, pending)
            raise
        finally:
            guard.leave()

    cdef tuple whole_step(self, Guard guard, actions, gather, envs, Py_ssize_t frame, bint last,
                          bint arrays, meanwhile, within):
        cdef Ledger ledger = self._ledger  # kept: close() may take it away meanwhile
        cdef tuple results = None
        if (ledger is None or guard.pending is not within or guard.abandoned or ledger.lockstep
                or ledger.num_singles or self._recovery.down):
            self._check_pending("step_async", within, alone=True)
            ledger, _ = self._settled()
        self._workers.doing = "step"
        if self._left:
            self._asked(envs)
        if envs is None:
            ledger.step_all(actions, frame)
        elif len(envs):
            ledger.step(envs, actions)
        if meanwhile is not None:
            meanwhile()
        try:
            results = ledger.take_all(gather, arrays)
        except (WorkerCrashError, EnvTimeoutError) as error:
            self._recover(error)
        if results is None:  # not all has been as usual
            results = self._results(ledger, gather, arrays)
        if self._recycles:
            self._recycle(None)
        if last:
            self._frames.come_home()
        return results
