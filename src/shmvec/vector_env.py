"""``ShmVectorEnv``: Gymnasium's ``VectorEnv`` contract over the core, and nothing else."""

from __future__ import annotations

import copy as copying
import multiprocessing
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from shmvec._core.parent import ParentLoop
from shmvec._core.segment import Segment, segment_bytes
from shmvec._parent.arguments import (
    AutoresetMode,
    Options,
    checked_autoreset_mode,
    checked_count,
    checked_env_fns,
    checked_limits,
    checked_max_concurrency,
    checked_num_workers,
    checked_observation_mode,
    checked_threads,
    checked_wait_policy,
    given_once,
)
from shmvec._parent.beyond import BeyondGymnasium, StepResults
from shmvec._parent.ownership import caller, own
from shmvec._parent.partial import (
    PartialBatches,
    checked_batch_size,
    checked_env_ids,
    existing_env_ids,
)
from shmvec._parent.recovery import Recovery
from shmvec._parent.rollout import Rollouts
from shmvec._parent.supervisor import InlineWorker, Supervisor
from shmvec._shared.layout import Layout, has_fixed_size
from shmvec._shared.memory import map_memory, reserve_memory
from shmvec._shared.pipes import uninterrupted
from shmvec._shared.scheduling import current_budgets, split_evenly, usable_cores
from shmvec._worker.function import WorkerEnv, checked_worker
from shmvec._worker.process import Attachment, Late, Report
from shmvec.faults import (
    EnvTimeoutError,
    Failure,
    FaultPolicy,
    WorkerCrashError,
    log_as_gymnasium_does,
    raise_failures,
)
from shmvec.spaces import agreed_spaces
from shmvec.stats import Stats

__all__ = ["ShmVectorEnv"]

_INFO_BYTES_PER_ENV = 4096
_INFO_BYTES_LEAST = 65536
_MESSAGE_RING_MOST = 1 << 28  # what is larger goes over the pipe

_DEFAULT = AsyncState.DEFAULT
_STEP = AsyncState.WAITING_STEP
_RESET = AsyncState.WAITING_RESET
_CALL = AsyncState.WAITING_CALL


class ShmVectorEnv(BeyondGymnasium, VectorEnv[Any, Any, npt.NDArray[Any]]):
    """Steps ordinary Gymnasium envs in parallel worker processes, through shared memory.

    A drop-in for :class:`gymnasium.vector.AsyncVectorEnv`: the same arguments, methods, results
    and exceptions; docs/differences.md lists where it does better. Results are those of
    :class:`gymnasium.vector.SyncVectorEnv`, bit for bit, for any number of workers.

    Attributes:
        num_envs: Number of envs.
        num_workers: Number of worker processes; 0 if the envs live in this process.
        processes: The worker processes, one for each worker.
        single_observation_space: Observation space of one env.
        observation_space: Observation space of the batch.
        single_action_space: Action space of one env.
        action_space: Action space of the batch.
        metadata: A copy of the first env's, with ``autoreset_mode``.
        render_mode: The first env's.
        closed: Whether the vector env has been closed.

    Example:
        >>> import gymnasium as gym
        >>> import shmvec
        >>> envs = shmvec.ShmVectorEnv([lambda: gym.make("CartPole-v1")] * 3, num_workers=2)
        >>> observations, infos = envs.reset(seed=42)
        >>> observations.shape, observations.dtype
        ((3, 4), dtype('float32'))
        >>> observations, rewards, terminations, truncations, infos = envs.step([0, 1, 0])
        >>> rewards
        array([1., 1., 1.])
        >>> envs.close()
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | tuple[gym.Space[Any], gym.Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | None = None,
        wait_policy: str = "adaptive",
        threads_per_worker: int | None = None,
        pin_workers: bool = False,
        step_timeout: float | None = None,
        reset_timeout: float | None = None,
        faults: FaultPolicy | None = None,
        recycle_after: int | None = None,
        batch_size: int | None = None,
        num_buffers: int = 4,
        hold_batches: int | None = None,
        record_order: list[npt.NDArray[np.intp]] | None = None,
        replay_order: Iterable[npt.ArrayLike] | None = None,
    ) -> None:
        """Starts the workers and builds the envs, all in parallel.

        Args:
            env_fns: One function for each env; env ``i`` is ``env_fns[i]()``, built once, in its
                worker. Unless the workers are forked they are sent by cloudpickle.
            shared_memory: Whether observations and actions lie in arrays in shared memory. False:
                they travel as messages, through shared memory as well, which is slower but takes
                values of any space, Sequence, Graph and classes of your own included.
            copy: Whether observations are returned as copies. False: as views of shared memory,
                the same arrays each time, which the next ``step`` or ``reset`` overwrites; after
                ``close`` they stay readable and keep the last values. With ``batch_size`` nothing
                is overwritten that you still hold: see ``recv``.
            context: How processes are started: "fork", "spawn", "forkserver", or None for
                Python's default.
            daemon: Whether the workers are daemonic: they may then not start processes.
            worker: A worker function for ``AsyncVectorEnv``, which takes over how an env is
                stepped and reset. It runs as it is, in a thread for each env, and is fed by
                pipes: slower than the default.
            observation_mode: "same": all observation spaces are equal. "different": they may
                differ in bounds, not in shape and dtype. A pair of spaces: the batched and the
                single one.
            autoreset_mode: NEXT_STEP: the step after an episode's end resets. SAME_STEP: the step
                that ends it resets; what it ended with is in ``infos["final_obs"]`` and
                ``infos["final_info"]``. DISABLED: you do, with ``options["reset_mask"]``.
            max_concurrency: At most so many envs are stepped at the same time: a limit to the
                number of workers.
            num_workers: Processes that hold the envs, split as evenly as possible. None: one for
                each usable core (CPU affinity and cgroup quota), at most one for each env. 0: the
                envs live in the calling process, for debuggers and profilers.
            wait_policy: How parent and workers wait for each other. "adaptive": spin while it pays
                and harms nobody, then sleep; right nearly everywhere. "spin": spin up to 40 ms
                before sleeping: the least delay where every worker and the parent have a core to
                themselves, ruinous where they have not. "park": sleep at once: the least CPU time.
            threads_per_worker: How many threads BLAS, OpenMP, torch and OpenCV may start in a
                worker. None: its share of the cores. 0: as many as they like. Variables such as
                ``OMP_NUM_THREADS`` that you have set hold. (A library that was loaded before its
                worker was forked is reached only if threadpoolctl is installed.)
            pin_workers: Whether each worker is bound to a core of its own.
            step_timeout: Seconds that a step of one env may take. None: as long as it likes.
            reset_timeout: Seconds that a reset of one env may take.
            faults: What is done when a worker dies, an env raises or takes too long. None: all
                that is raised.
            recycle_after: A worker is restarted after so many steps of each of its envs, for
                simulators that leak. Envs that are in an episode then are truncated.
            batch_size: ``recv`` returns so many envs, those that are ready first; ``step`` and
                ``reset``, too. None: all.
            num_buffers: With ``copy=False`` and ``batch_size``: how many results of each env there
                is room for. One is being written, the others may be held in batches.
            hold_batches: Then: after so many further ``recv`` a batch may be written again, even
                if its arrays are still there. None: only when they are gone, or by ``release``.
            record_order: A list to which ``recv`` appends the envs of each batch.
            replay_order: Such a list: ``recv`` returns these batches, in this order, so that an
                asynchronous run can be repeated.

        Raises:
            ValueError: No env_fns; a bad number of workers, threads or envs in a batch,
                ``max_concurrency``, ``context``, policy or mode; an observation space that cannot
                be shared memory.
            TypeError: Something in ``env_fns`` is not callable, returns no env, or cannot be
                pickled; ``num_workers`` is no integer; the pair of spaces holds none; a Sequence
                or Graph was to be shared memory.
            RuntimeError: Spaces of the envs differ.
            OSError: There is not enough shared memory.
            WorkerCrashError: A worker process died while it built its envs.
            Exception: Whatever an env_fn raises, with the worker's traceback as its cause.
        """
        super().__init__()
        # Set first: close() and __del__ must work whatever fails below.
        self._workers: Supervisor | InlineWorker | None = None
        self._owner = os.getpid()
        self._made_at = caller()
        own(self)
        self._loop: ParentLoop | None = None
        self._state = _DEFAULT
        self._held: Callable[[], object] | None = None
        self._masked = False  # the single envs that were asked are those of a masked step

        self.env_fns = checked_env_fns(env_fns)
        self.num_envs = len(self.env_fns)
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.observation_mode = observation_mode
        self.autoreset_mode = checked_autoreset_mode(autoreset_mode)
        self.max_concurrency = max_concurrency
        checked_observation_mode(observation_mode)
        self.wait_policy = wait_policy
        checked_max_concurrency(max_concurrency)
        checked_wait_policy(wait_policy)
        functions = self.env_fns
        if worker is not None:
            checked_worker(worker)
            functions = [
                partial(WorkerEnv, worker, index, env_fn, self.autoreset_mode)
                for index, env_fn in enumerate(functions)
            ]
        self.batch_size = checked_batch_size(batch_size, self.num_envs)
        self._num_buffers = checked_count("num_buffers", num_buffers)
        self._hold_batches = (
            None if hold_batches is None else checked_count("hold_batches", hold_batches)
        )
        self._order = (record_order, replay_order)
        cores = usable_cores()
        self.num_workers = checked_num_workers(num_workers, self.num_envs, cores, max_concurrency)

        self.faults = FaultPolicy() if faults is None else faults
        if not isinstance(self.faults, FaultPolicy):
            raise TypeError(f"faults must be a shmvec.FaultPolicy, got {faults!r}")
        self._recycle_after = (
            None if recycle_after is None else checked_count("recycle_after", recycle_after)
        )
        self._limits = checked_limits(
            given_once("step_timeout", step_timeout, self.faults.step_timeout),
            given_once("reset_timeout", reset_timeout, self.faults.reset_timeout),
            self.num_workers,
        )
        threads = checked_threads(threads_per_worker, self.num_workers, cores)

        if self.num_workers == 0:
            self._workers = InlineWorker(functions)
        else:
            self._workers = Supervisor(
                functions,
                split_evenly(self.num_envs, self.num_workers),
                multiprocessing.get_context(context),
                daemon,
                type(self).__name__,
                threads,
                pin_workers,
            )
        # Ends the workers of an env that is forgotten, and of one that is open at exit.
        self._finalizer = weakref.finalize(self, self._workers.stop, 0.0)
        try:
            self._start(self._workers)
        except BaseException:
            self._abandon()
            raise

    def _start(self, workers: Supervisor | InlineWorker) -> None:
        """Takes the workers' reports, makes the segment and hands it to them."""
        reports = workers.reports()
        try:
            raise_failures([report for report in reports if isinstance(report, Failure)])
            built = [report for report in reports if isinstance(report, Report)]
            self.metadata = {**built[0].metadata, "autoreset_mode": self.autoreset_mode}
            self.render_mode = built[0].render_mode
            agreed = agreed_spaces(
                type(self).__name__,
                workers.ranges,
                built,
                self.observation_mode,
                self.shared_memory,
            )
            self.single_observation_space, self.observation_space = agreed[:2]
            self.single_action_space, self.action_space = agreed[2:]
            # A worker of the user's resets as it likes; to the hot loop its envs are plain ones.
            mode = AutoresetMode.DISABLED if self.worker is not None else self.autoreset_mode
            layout = Layout(
                self.single_observation_space,
                self.single_action_space,
                self.num_envs,
                not self.shared_memory or not has_fixed_size(self.single_observation_space),
                not self.shared_memory or not has_fixed_size(self.single_action_space),
                mode is AutoresetMode.SAME_STEP,
            )
            leasing = self.batch_size is not None and not (self.copy or layout.observation_messages)
            keep_last = not self.faults.raises and not layout.observation_messages
            layout = replace(
                layout, num_frames=(self._num_buffers if leasing else 1) + int(keep_last)
            )
            nbytes_of_slabs = layout.nbytes
        except BaseException:
            workers.dismiss()
            self._finalizer.detach()
            workers.stop(10.0)  # they only close their envs
            raise

        most_envs = max(len(envs) for envs in workers.ranges)
        info_bytes = most_envs * (_INFO_BYTES_PER_ENV + 2 * layout.observation_message_bytes)
        action_bytes = most_envs * 2 * layout.action_message_bytes
        sizes = (
            len(workers.ranges),
            self.num_envs,
            2 * most_envs + 2,
            min(max(info_bytes, _INFO_BYTES_LEAST), _MESSAGE_RING_MOST),
            min(action_bytes, _MESSAGE_RING_MOST),
            nbytes_of_slabs,
        )
        nbytes = segment_bytes(*sizes)
        descriptor = reserve_memory(nbytes)
        try:
            segment = Segment.create(map_memory(descriptor, nbytes), *sizes)
            attachment = Attachment(
                layout,
                nbytes,
                workers.has_alarms,
                mode.value,
                self._limits,
                not self.faults.raises,
            )
            workers.attach(attachment, descriptor, segment)
        finally:
            os.close(descriptor)
        self._loop = ParentLoop(
            segment,
            [(envs.start, len(envs)) for envs in workers.ranges],
            layout.attach(segment),
            look=workers.look,
            rouse=workers.rouse,
            budgets=partial(current_budgets, self.wait_policy, self.num_workers, workers.processes),
            limits=self._limits,
            copy=self.copy,
            leasing=leasing,
            keep_last=keep_last,
            may_step_over=mode is not AutoresetMode.DISABLED or self.worker is not None,
            inline=workers.inline,
        )
        self._partial = PartialBatches(self._loop, workers, self, *self._order, self._hold_batches)
        self._recovery = Recovery(
            self.faults, self._recycle_after, mode, self._loop, self._partial, workers, self
        )
        itself = weakref.proxy(self)  # no cycle: an env that is forgotten goes at once
        self._rollouts = Rollouts(
            layout,
            self.single_action_space,
            self._loop,
            mode is not AutoresetMode.DISABLED,
            partial(type(self)._share_rollouts, itself),
            partial(type(self)._step_rollout, itself),
        )

    @property
    def processes(self) -> list[Any]:
        """The worker processes, one for each worker; empty if ``num_workers`` is 0."""
        return self._workers.processes if self._workers is not None else []

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of the random generator of each env."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's random generator."""
        return self.get_attr("np_random_seed")

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, in parallel.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one seed (or None) for each env.
                None: envs go on with the generators they have.
            options: Passed to every env's ``reset``; of a list, each env gets its own.
                ``options["reset_mask"]``, a bool array of shape ``(num_envs,)``, is not passed:
                only the envs that it marks are reset.

        Returns:
            Observations, batched as ``observation_space`` says, and infos, a dict of arrays.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The number of seeds or options, or the shape of the mask, is wrong.
            TypeError: A seed is no integer, or the mask no array of bools.
            EnvTimeoutError: An env takes longer than its time limit.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause.
        """
        if self.batch_size is not None:
            self.async_reset(seed, options)
            observations, *_, infos = self.recv()
            return observations, infos
        if isinstance(options, dict) and "reset_mask" in options:
            return self._reset_some(seed, options)
        self.reset_async(seed, options)
        return self.reset_wait()

    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: Options = None,
    ) -> None:
        """Starts to reset all envs and does not wait; see :meth:`reset`.

        Raises:
            AlreadyPendingCallError: Another call waits for its results.
        """
        loop = self._idle_loop("reset_async")
        envs, payload = self._reset_arguments(seed, options)
        if payload is None:
            self._begin(_RESET, loop, partial(self._send_reset, loop))
        else:
            self._begin(_RESET, loop, self._command("reset", payload, envs))

    def _send_reset(self, loop: ParentLoop) -> None:
        assert self._workers is not None
        self._workers.doing = "reset"
        self._recovery.asked(range(self.num_envs))
        loop.post_reset()

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits for what :meth:`reset_async` started.

        Args:
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            As :meth:`reset`.

        Raises:
            NoAsyncCallError: Nothing was started.
            multiprocessing.TimeoutError: The time is up. The results, when they come, are dropped;
                the next call waits for them first.
        """
        loop, infos, _ = self._finish(_RESET, timeout)
        return loop.observe(), infos

    def step(
        self, actions: Any, env_id: npt.ArrayLike | None = None, *, mask: Any = None
    ) -> StepResults:
        """Steps all envs, in parallel. An env whose episode had ended is reset instead.

        Args:
            actions: One action for each env, batched as ``action_space`` says; lists will do.
                Each env gets its action in the dtype in which it was given. None in a list (not
                in a tuple) leaves that env out.
            env_id: Envs to step, with an action each: as ``send`` and then ``recv``.
            mask: Which envs to step, bool ``(num_envs,)``. Those left out keep their state, and
                their last results are returned again, without infos.

        Returns:
            Observations; rewards, float64 ``(num_envs,)``; terminations and truncations, bool
            ``(num_envs,)``; infos, a dict of arrays. With ``batch_size`` or ``env_id``, of the
            envs in ``infos["env_id"]``; see :meth:`recv`.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The number or the shape of the actions is wrong. Nothing was sent.
            TypeError: Their dtype is. Nothing was sent.
            EnvTimeoutError: An env takes longer than its time limit.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause. The other
                envs have made their step; ``reset`` or ``close`` as you like.
        """
        if type(actions) is list and mask is None and any(action is None for action in actions):
            mask = np.array([action is not None for action in actions])
        if mask is not None:
            if env_id is not None:
                raise ValueError("step() takes a mask (or None actions) or env_id, not both")
            return self._step_some(actions, mask)
        if env_id is not None or self.batch_size is not None:
            envs = checked_env_ids(env_id, self.num_envs)
            self._send(envs, actions)
            return self._recv(self.batch_size or len(envs), None, None)
        self.step_async(actions)
        return self.step_wait()

    def _settle(self, loop: ParentLoop) -> None:
        """Waits for results that nobody wants any more: of calls that were broken off."""
        if loop.pending:
            self._drop(loop)

    def step_async(self, actions: Any) -> None:
        """Starts to step all envs and does not wait; see :meth:`step`.

        Raises:
            AlreadyPendingCallError: Another call waits for its results.
        """
        loop = self._idle_loop("step_async")
        if loop.pending:  # not now: then with the actions as they are now
            actions = copying.deepcopy(actions)
            self._begin(_STEP, loop, partial(self._send_actions, loop, actions))
        else:
            self._send_actions(loop, actions)
            self._state = _STEP

    def _send_actions(self, loop: ParentLoop, actions: Any, rollout_frame: int = -1) -> None:
        assert self._workers is not None
        self._workers.doing = "step"
        if self._recovery.later:
            self._recovery.asked(range(self.num_envs))
        if not loop.sends_messages:
            loop.post_step(actions, rollout_frame)
            return
        with uninterrupted():
            late = loop.post_step(actions, rollout_frame)
            for index, items in (late or {}).items():
                self._workers.send(index, self._workers.pack(items))

    def _step_rollout(
        self, actions: Any, frame: int, meanwhile: Callable[[], None]
    ) -> dict[str, Any]:
        """Steps all envs; the results go to a frame of the rollouts."""
        self._send_actions(self._idle_loop("step"), actions, frame)
        self._state = _STEP
        meanwhile()
        return self._finish(_STEP, None)[1]

    def _share_rollouts(self, descriptor: int, nbytes: int, num_frames: int) -> None:
        """Hands the workers the memory of rollouts."""
        loop, workers = self._loop, self._workers
        assert loop is not None and workers is not None
        workers.doing = "rollout"
        packed = workers.pack(("rollouts", (nbytes, num_frames)))
        with uninterrupted():
            loop.post_command()
            workers.share_rollouts(packed, descriptor)
        self._state = _CALL
        self._finish(_CALL, None)

    def step_wait(self, timeout: float | None = None) -> StepResults:
        """Waits for what :meth:`step_async` started.

        Args:
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            As :meth:`step`.

        Raises:
            NoAsyncCallError: Nothing was started.
            multiprocessing.TimeoutError: The time is up. The results, when they come, are dropped;
                the next call waits for them first.
        """
        loop, infos, _ = self._finish(_STEP, timeout)
        return loop.results(infos)

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of every env, in parallel, or gets an attribute.

        Args:
            name: Of the method or attribute, of the env or one of its wrappers.
            *args: For the method.
            **kwargs: For the method.

        Returns:
            One result for each env.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: For "reset", "step" and "close": use the method of that name.
            Exception: Whatever an env raises, AttributeError included.
        """
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Starts what :meth:`call` does and does not wait.

        Raises:
            AlreadyPendingCallError: Another call waits for its results.
        """
        loop = self._idle_loop("call_async")
        self._begin(_CALL, loop, self._calling(None, name, args, kwargs))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits for what :meth:`call_async` started.

        Args:
            timeout: Seconds to wait. None: as long as it takes.

        Returns:
            One result for each env.

        Raises:
            NoAsyncCallError: Nothing was started.
            multiprocessing.TimeoutError: The time is up. The results, when they come, are dropped;
                the next call waits for them first.
        """
        return self._finish(_CALL, timeout)[2]

    def get_attr(self, name: str, env_id: npt.ArrayLike | None = None) -> tuple[Any, ...]:
        """The attribute of every env, or of those in ``env_id``, as a tuple; see :meth:`call`."""
        return self.call(name) if env_id is None else self.call_some(env_id, name)

    def set_attr(self, name: str, values: Any, env_id: npt.ArrayLike | None = None) -> None:
        """Sets an attribute of every env.

        Args:
            name: Of the attribute.
            values: A list or tuple: one value for each env. Anything else: the value for all.
            env_id: Indices of the envs, int ``(n,)``. None: all.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The list has another length than there are envs, or there is no such env.
            TypeError: ``env_id`` is not of integers.
            AlreadyPendingCallError: Another call waits for its results.
            Exception: Whatever an env raises.
        """
        loop = self._idle_loop("set_attr")
        envs = existing_env_ids(env_id, self.num_envs).tolist()
        if not isinstance(values, (list, tuple)):
            values = [values] * len(envs)
        if len(values) != len(envs):
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {len(envs)} environments."
            )
        assigned = dict(zip(envs, values, strict=True))
        command = self._command(
            "set_attr",
            lambda envs: (name, {env: assigned[env] for env in envs if env in assigned}),
        )
        self._begin(_CALL, loop, command)
        self._finish(_CALL, None)

    def render(self) -> tuple[Any, ...]:
        """What every env's ``render`` returns, as a tuple."""
        return self.call("render")

    def stats(self) -> Stats:
        """What has been done so far, and where the time went; costs nothing when not called.

        Example:
            >>> import shmvec
            >>> envs = shmvec.make_vec("CartPole-v1", 4)
            >>> _ = envs.reset()
            >>> before = envs.stats()
            >>> _ = envs.step([0, 1, 0, 1])
            >>> sum(worker.steps for worker in (envs.stats() - before).workers)
            4
            >>> envs.close()

        Raises:
            ClosedEnvironmentError: After ``close``.
        """
        self._assert_is_running()
        assert self._loop is not None
        return Stats.of(*self._loop.counters(), self._recovery.counts)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the envs and ends the workers; called by :meth:`close`.

        Args:
            timeout: Seconds the envs get to close. None: as long as they take. Workers that are
                not done by then are terminated, and killed if they do not obey.
            terminate: Do not wait for the envs at all.

        Raises:
            Exception: What an env's ``close`` raises, after everything else is closed.
        """
        state, self._state = self._state, _DEFAULT
        try:
            if state is not _DEFAULT:
                logger.warn(
                    f"Calling `close` while waiting for a pending call to `{state.value}` to "
                    "complete."
                )
        finally:  # warnings may be errors
            self._stop(timeout, terminate)

    def _stop(self, timeout: float | None, terminate: bool) -> None:
        workers, loop = self._workers, self._loop
        if workers is None:
            return
        if loop is not None and not terminate:
            try:
                loop.post_close()
            except RuntimeError:
                terminate = True  # the request ring is full: the workers are stuck
        self._finalizer.detach()
        self._loop = None
        self.closed = True
        remind = None if loop is None else loop.remind
        raise_failures(workers.stop(0.0 if terminate else timeout, remind))

    def __del__(self) -> None:
        """Ends the workers of a vector env that was not closed, and warns."""
        if getattr(self, "closed", True) or getattr(self, "_loop", None) is None:
            return
        try:
            warnings.warn(
                f"unclosed {type(self).__name__}, made at {self._made_at}: call its close()",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )
        finally:  # warnings may be errors
            self.close(terminate=True)

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: it owns processes. Send the "
            "env_fns, and make one there."
        )

    def _assert_is_running(self) -> None:
        if self._loop is None:
            if self._owner != os.getpid():
                raise RuntimeError(
                    f"This {type(self).__name__} was made in process {self._owner}, of which this "
                    "one is a fork: its workers answer only there. Make one in each process."
                )
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )

    def _idle_loop(self, name: str, asking: bool = False) -> ParentLoop:
        """The core, for a call to the method ``name``, unless another one is pending.

        Single envs may still be out if the call is ``asking`` them, too.
        """
        self._assert_is_running()
        if self._state is not _DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._state.value}` to "
                "complete.",
                str(self._state.value),
            )
        assert self._loop is not None
        if self._loop.waiting:
            raise RuntimeError(
                f"Calling `{name}` while another thread waits for this vector env: use it in one "
                "thread at a time."
            )
        if self._masked:  # it was broken off: its results are dropped
            self._finish_masked()
            self._recovery.carry_over()
        if self._loop.asked and not asking:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while envs are out: take the results of all that were asked to "
                "step or reset, with `recv`, first.",
                "recv",
            )
        return self._loop

    def _begin(self, state: AsyncState, loop: ParentLoop, send: Callable[[], object]) -> None:
        """Sends a request; later, if results of a call that timed out are still to come."""
        if loop.pending:
            if not self._wait(loop, 0.0):
                self._held, self._state = send, state
                return
            self._drop(loop)
        send()
        self._state = state

    def _finish(
        self, state: AsyncState, timeout: float | None
    ) -> tuple[ParentLoop, dict[str, Any], tuple[Any, ...]]:
        """Waits for the results of a request: the core, infos, and results of a command."""
        self._assert_is_running()
        if self._state is not state:
            raise NoAsyncCallError(
                f"Calling `{state.value}_wait` without any prior call to `{state.value}_async`.",
                state.value,
            )
        loop = self._loop
        assert loop is not None
        self._state = _DEFAULT
        if timeout is not None or self._held is not None:
            self._wait_until_sent_and_done(loop, state, timeout)
        infos, results = self._gather(loop)
        if self._recycle_after is not None and state is _STEP:
            self._recycle()
        return loop, infos, results

    def _recycle(self) -> None:
        """Restarts workers that have made as many steps as they may."""
        try:
            self._recovery.recycle()
        except WorkerCrashError:
            self._abandon()
            raise

    def _wait_until_sent_and_done(
        self, loop: ParentLoop, state: AsyncState, timeout: float | None
    ) -> None:
        """Waits; raises TimeoutError, with the results left to be dropped, when the time is up."""
        held, self._held = self._held, None
        begin = time.monotonic()
        done = self._wait(loop, timeout)
        if done and held is not None:
            self._drop(loop)  # of a call that timed out
            held()
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))
            done = self._wait(loop, left)
        if not done:
            raise multiprocessing.TimeoutError(
                f"The call to `{state.value}_wait` has timed out after {timeout} second(s)."
            )

    def _command(
        self, name: str, payload: Callable[[range], Any], resets: npt.NDArray[np.intp] | None = None
    ) -> Callable[[], None]:
        """What sends every worker a command, which resets some envs.

        If it cannot be pickled, that is raised now.
        """
        loop, workers = self._loop, self._workers
        assert loop is not None and workers is not None
        packed = self._packed(name, payload)

        def send() -> None:
            # Posted first: a worker reads its pipe only when a request tells it to, and a long
            # message blocks until it is read.
            workers.doing = name
            if resets is not None:
                self._recovery.asked(resets.tolist())
            with uninterrupted():
                loop.post_command(resets)
                for index, message in enumerate(packed):
                    workers.send(index, message)

        return send

    def _packed(self, name: str, payload: Callable[[range], Any]) -> list[Any]:
        """A command for each worker."""
        assert self._workers is not None
        return [self._workers.pack((name, payload(envs))) for envs in self._workers.ranges]

    def _wait(self, loop: ParentLoop, timeout: float | None) -> bool:
        """Waits for what was posted, whatever happens to workers meanwhile."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return loop.wait(timeout)
            except (WorkerCrashError, EnvTimeoutError) as error:
                self._recover(error)
            if deadline is not None:
                timeout = max(0.0, deadline - time.monotonic())

    def _recover(self, error: WorkerCrashError | EnvTimeoutError) -> None:
        """Does what the policy says of a fault; closes the vector env if that is not enough."""
        try:
            self._recovery.recover(error)
        except WorkerCrashError:
            self._abandon()
            raise

    def _collect(self, loop: ParentLoop) -> list[Late]:
        """Takes the answers to what was posted, and the late messages that belong to them."""
        workers = self._workers
        assert workers is not None
        while True:
            try:
                late = loop.collect()
                break
            except (WorkerCrashError, EnvTimeoutError) as error:
                self._recover(error)
        answers: list[Late] = []
        for index in late or ():
            try:
                answers.append(workers.receive(index))
            except WorkerCrashError as error:  # what it had to say is lost, and what it did
                for env in workers.ranges[index]:
                    loop.invalidate(env)
                self._recover(error)
        return answers

    def _gather(self, loop: ParentLoop) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Infos and results of what was posted; raises what envs raised."""
        answers = self._collect(loop)
        if not (answers or loop.num_invalid or self._recovery.told):  # the usual
            return loop.infos(self, None), ()
        assert self._workers is not None
        unpack = self._workers.unpack
        failures = [failure for late in answers for failure in late.failures]
        raised = [failure for failure in failures if not self._recovery.handles(failure)]
        try:
            messages = [
                (kind, env, unpack(message))
                for late in answers
                for kind, env, message in late.messages
            ]
            infos = loop.infos(self, messages)
        finally:
            if raised:
                log_as_gymnasium_does(raised)
                raise_failures(raised)
        if loop.num_invalid and not loop.returns_results:
            lost = loop.take_invalid().tolist()
            raise WorkerCrashError(
                f"The worker of envs {lost} died in {self._workers.doing!r}, and was restarted: "
                "there is no result. The vector env can be used; these envs' next step truncates."
            )
        try:
            self._recovery.mend_all(failures)
            if loop.num_invalid:
                infos = self._recovery.deliver(infos)
            if loop.returns_results:
                infos = self._recovery.tell_all(infos)
        except WorkerCrashError:
            self._abandon()
            raise
        return infos, tuple(unpack(result) for late in answers for result in late.results or ())

    def _drop(self, loop: ParentLoop) -> None:
        """Takes answers that nobody wants any more."""
        answers = self._collect(loop)
        failures = [failure for late in answers for failure in late.failures]
        try:
            self._recovery.mend_all(list(filter(self._recovery.handles, failures)))
        except WorkerCrashError:
            self._abandon()
            raise
        loop.take_invalid()

    def _abandon(self) -> None:
        """Ends everything at once."""
        self._loop = None
        self._state = _DEFAULT
        self.closed = True
        self._finalizer()
