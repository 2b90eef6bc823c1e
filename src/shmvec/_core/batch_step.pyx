"""The calls that a training loop makes, compiled: a batch step, and the two halves of a partial one.

No Python code runs in them unless something is unusual: a fault, a message that did not fit, an
abandoned call. That is left to the subclass.
"""

from shmvec._core.arrays cimport has_dtype, is_contiguous, ndim_of, size_of
from shmvec._core.guard cimport Guard
from shmvec._core.ledger cimport Ledger

import numpy as np

from shmvec._core.ledger import DONE
from shmvec.faults import EnvTimeoutError, WorkerCrashError, cut_traceback


cdef object _ndarray = np.ndarray
cdef object _intp = np.dtype(np.intp)


cdef class BatchSteps:
    """Base of the Exchange, with its `step`, `ask` and `take_batch`."""

    cdef readonly Guard guard       # never None: its methods are called without a check
    cdef public Ledger _ledger      # None: the exchange is not started yet, or closed
    cdef public object _workers
    cdef public object _recovery
    cdef public set _left           # envs that `leave` has closed
    cdef public bint _recycles

    def __cinit__(self, *args, **kwargs):
        self.guard = Guard()

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
        guard.enter_whole()
        try:
            return self.whole_step(
                guard, actions, gather, envs, frame, last, arrays, meanwhile, within)
        except BaseException as error:
            guard.abandon_all()
            raise cut_traceback(error)
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

    # ---- partial batches ---------------------------------------------------------------------

    cdef Ledger settled(self):
        """The ledger, once abandoned answers are discarded."""
        cdef Ledger ledger = self._ledger
        if ledger is None or self.guard.abandoned or self._recovery.down:
            ledger, _ = self._settled()
        return ledger

    def ask(self, envs, actions, *, Py_ssize_t frame=-1, bint together=False):
        """Asks envs to step, and does not wait.

        Args:
            envs: Which, int ``(n,)``. None: all.
            actions: One for each of these envs, batched as the action space says; lists will do.
            frame: The rollout's frame for the results; with some envs, one that has the others'
                results.
            together: Whether neighbouring envs answer together: cheaper, if no caller waits for one
                of them alone.

        Raises:
            ClosedEnvironmentError: It is closed.
            AlreadyPendingCallError: Another call is under way.
            ValueError: There is no such env, it is named twice, or is in flight; the number or
                shape of the actions is wrong. Nothing was sent.
            TypeError: The dtype of the actions or of ``envs`` is wrong. Nothing was sent.
            BufferError: All frames of an env are held. Nothing was sent.
        """
        cdef Guard guard = self.guard
        guard.enter()
        try:
            self.ask_some(envs, actions, frame, together)
        finally:
            guard.leave()

    cdef int ask_some(self, envs, actions, Py_ssize_t frame, bint together) except -1:
        cdef Ledger ledger = self.settled()
        self._workers.doing = "step"
        if envs is None and not self._left:
            return ledger.step_all(actions, frame)
        if self._left or not (type(envs) is _ndarray and has_dtype(envs, _intp)
                              and ndim_of(envs) == 1 and is_contiguous(envs)):
            envs = self._asked(envs)
        if size_of(envs):
            ledger.step(envs, actions, None if frame < 0 else frame, together)
        return 0

    def take_batch(self, Py_ssize_t count, gather=None, least=None, timeout=None):
        """Takes the envs that have been ready for longest, as :meth:`take` does, in fewer steps.

        Args:
            count: As for :meth:`take`.
            gather: Likewise.
            least: Likewise.
            timeout: Likewise.

        Returns:
            Observations, rewards, terminations, truncations and infos; the envs; and what envs have
            raised.

        Raises:
            AlreadyPendingCallError: Another call is under way, or its results are to be taken.
            Exception: As :meth:`take`.
        """
        cdef Guard guard = self.guard
        guard.enter()
        try:
            if guard.pending is not None:
                self._check_pending("recv")
            if self._recycles:
                self._open()
                self._recycle(None)
            return self.take_oldest(count, gather, least, timeout)
        finally:
            guard.leave()

    cdef tuple take_oldest(self, Py_ssize_t count, gather, least, timeout):
        cdef Ledger ledger = self.settled()
        cdef Py_ssize_t wanted = count if least is None else least
        cdef bint ready = False
        among = ()
        if timeout is None and not ledger.failures and not ledger.raised and (
                ledger.num_in_flight >= wanted):
            try:
                ledger.links.look_if_due()
                ready = ledger.wait_ready(wanted) == DONE and not ledger.raised
            except (WorkerCrashError, EnvTimeoutError) as error:
                self._recover(error)
        if ready:
            envs = ledger.oldest(count)
        else:
            envs, among = self._waited_for(ledger, None, count, least, timeout)
        _, results, rest = ledger.take(envs, gather, False, True, among)
        return results, envs, rest[1]
