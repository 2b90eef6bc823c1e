"""``ShmVectorEnv``: Gymnasium's ``VectorEnv`` contract over the core, and nothing else."""

from __future__ import annotations

import multiprocessing
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from shmvec._core.parent import ParentLoop
from shmvec._core.segment import Segment, segment_bytes
from shmvec.faults import Failure, WorkerCrashError, raise_failures
from shmvec.layout import Layout
from shmvec.memory import map_memory, reserve_memory
from shmvec.scheduling import split_evenly, usable_cores, wait_budgets
from shmvec.supervisor import InlineWorker, Supervisor
from shmvec.worker import Attachment, Late, Report

__all__ = ["ShmVectorEnv"]

_INFO_BYTES_PER_ENV = 4096
_INFO_BYTES_LEAST = 65536


class ShmVectorEnv(VectorEnv[Any, Any, npt.NDArray[Any]]):
    """Steps ordinary Gymnasium envs in parallel worker processes, through shared memory.

    Results are those of :class:`gymnasium.vector.SyncVectorEnv`, bit for bit, for any number of
    workers. An episode that ends is reset by the next step (``AutoresetMode.NEXT_STEP``).

    Attributes:
        num_envs: Number of envs.
        num_workers: Number of worker processes; 0 if the envs live in this process.
        processes: The worker processes.
        single_observation_space: Observation space of one env.
        observation_space: Observation space of the batch.
        single_action_space: Action space of one env.
        action_space: Action space of the batch.
        metadata: The first env's, with ``autoreset_mode``.
        render_mode: The first env's.

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
        *,
        num_workers: int | None = None,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
    ) -> None:
        """Starts the workers and builds the envs, all in parallel.

        Args:
            env_fns: One function for each env; env ``i`` is ``env_fns[i]()``. Unless the workers
                are forked they are sent by cloudpickle.
            num_workers: Processes that hold the envs, split as evenly as possible. None: one for
                each usable core (CPU affinity and cgroup quota), at most one for each env. 0: the
                envs live in the calling process, for debuggers and profilers.
            copy: Whether observations are returned as copies. False: as views of shared memory,
                the same arrays each time, which the next ``step`` or ``reset`` overwrites; after
                ``close`` they stay readable and keep the last values.
            context: How processes are started: "fork", "spawn", "forkserver", or None for
                Python's default.
            daemon: Whether the workers are daemonic: they may then not start processes.

        Raises:
            ValueError: No env_fns, a bad ``num_workers`` or ``context``, or a space that cannot be
                laid out in memory.
            TypeError: Something in ``env_fns`` is not callable, returns no env, or cannot be
                pickled; or ``num_workers`` is no integer.
            RuntimeError: Spaces of the envs differ.
            OSError: There is not enough shared memory.
            WorkerCrashError: A worker process died while it built its envs.
            Exception: Whatever an env_fn raises, with the worker's traceback as its cause.
        """
        super().__init__()
        # Set first: close() and __del__ must work whatever fails below.
        self._workers: Supervisor | InlineWorker | None = None
        self._loop: ParentLoop | None = None

        self.env_fns = list(env_fns)
        self.num_envs = len(self.env_fns)
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.autoreset_mode = AutoresetMode.NEXT_STEP
        if not self.env_fns:
            raise ValueError("env_fns is empty: a vector env needs at least one env")
        for index, env_fn in enumerate(self.env_fns):
            if not callable(env_fn):
                raise TypeError(
                    f"env_fns[{index}] is a {type(env_fn).__name__}, not a function that makes "
                    "an env (write `lambda: gym.make(...)`)"
                )
        cores = usable_cores()
        self.num_workers = _checked_num_workers(num_workers, self.num_envs, cores)

        if self.num_workers == 0:
            self._workers = InlineWorker(self.env_fns)
        else:
            self._workers = Supervisor(
                self.env_fns,
                split_evenly(self.num_envs, self.num_workers),
                multiprocessing.get_context(context),
                daemon,
                type(self).__name__,
            )
        # Ends the workers of an env that is forgotten, and of one that is open at exit.
        self._finalizer = weakref.finalize(self, self._workers.stop, 0.0)
        try:
            self._start(self._workers, cores)
        except BaseException:
            self._abandon()
            raise

    def _start(self, workers: Supervisor | InlineWorker, cores: int) -> None:
        """Takes the workers' reports, makes the segment and hands it to them."""
        reports = workers.reports()
        failures = [report for report in reports if isinstance(report, Failure)]
        try:
            raise_failures(failures)
            built = [report for report in reports if isinstance(report, Report)]
            first = built[0]
            layout = Layout(first.observation_space, first.action_space, self.num_envs)
            layout.check()
            self._check_spaces(workers.ranges, built)
        except BaseException:
            workers.dismiss()
            self._finalizer.detach()
            workers.stop(10.0)  # they only close their envs
            raise

        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

        most_envs = max(len(envs) for envs in workers.ranges)
        sizes = (
            len(workers.ranges),
            self.num_envs,
            2 * most_envs + 2,
            max(_INFO_BYTES_LEAST, most_envs * _INFO_BYTES_PER_ENV),
            layout.nbytes,
        )
        nbytes = segment_bytes(*sizes)
        budgets = wait_budgets(self.num_workers, cores)
        descriptor = reserve_memory(nbytes)
        try:
            segment = Segment.create(map_memory(descriptor, nbytes), *sizes)
            workers.attach(Attachment(layout, nbytes, budgets), descriptor, segment)
        finally:
            os.close(descriptor)
        slabs = layout.attach(segment)
        self._loop = ParentLoop(
            segment,
            [(envs.start, len(envs)) for envs in workers.ranges],
            slabs.observations,
            slabs.actions,
            slabs.rewards,
            slabs.terminations,
            slabs.truncations,
            look=workers.look,
            waiting=budgets.parent,
            copy=self.copy,
            inline=workers.inline,
        )

    def _check_spaces(self, ranges: Sequence[range], reports: Sequence[Report]) -> None:
        """Raises RuntimeError if the spaces of some env are not those of the first."""
        first = reports[0]
        for envs, report in zip(ranges, reports, strict=True):
            unequal = list(report.unequal)
            for which in ("action_space", "observation_space"):
                if getattr(report, which) != getattr(first, which):
                    unequal.insert(0, (envs.start, which, getattr(report, which)))
            if unequal:
                env, which, space = unequal[0]
                raise RuntimeError(
                    f"All envs must have equal spaces, but the {which.replace('_', ' ')} of env "
                    f"{env} is {space} and that of env 0 is {getattr(first, which)}."
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
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, in parallel.

        Args:
            seed: An int: env ``i`` gets ``seed + i``. A list: one seed (or None) for each env.
                None: envs go on with the generators they have.
            options: Passed to every env's ``reset``. ``options["reset_mask"]``, a bool array of
                shape ``(num_envs,)``, is not: only the envs that it marks are reset.

        Returns:
            Observations, batched as ``observation_space`` says, and infos, a dict of arrays.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The number of seeds or the shape of the mask is wrong.
            TypeError: A seed is no integer, or the mask no array of bools.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause.
        """
        loop = self._ready_loop()
        seeds = self._checked_seeds(seed)
        mask = None
        if options is not None and "reset_mask" in options:
            options = dict(options)
            mask = self._checked_mask(options.pop("reset_mask"))
        if seeds is None and options is None:
            loop.post_reset()
        else:
            self._command(
                loop,
                "reset",
                lambda envs: (
                    None if seeds is None else seeds[envs.start : envs.stop],
                    options,
                    None if mask is None else mask[envs.start : envs.stop],
                ),
            )
        infos, _ = self._gather(loop)
        return loop.observe(), infos

    def step(
        self, actions: Any
    ) -> tuple[
        Any,
        npt.NDArray[np.float64],
        npt.NDArray[np.bool_],
        npt.NDArray[np.bool_],
        dict[str, Any],
    ]:
        """Steps all envs, in parallel. An env whose episode had ended is reset instead.

        Args:
            actions: One action for each env, batched as ``action_space`` says; lists will do.
                Each env gets its action in the dtype in which it was given.

        Returns:
            Observations; rewards, float64 ``(num_envs,)``; terminations and truncations, bool
            ``(num_envs,)``; infos, a dict of arrays.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The number or the shape of the actions is wrong. Nothing was sent.
            TypeError: Their dtype is. Nothing was sent.
            WorkerCrashError: A worker process died.
            Exception: Whatever an env raises, with the worker's traceback as its cause. The other
                envs have made their step; ``reset`` or ``close`` as you like.
        """
        loop = self._ready_loop()
        loop.post_step(actions)
        return loop.results(self._gather(loop)[0])

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
        if name in ("reset", "step", "close"):
            raise ValueError(
                f"Trying to call function `{name}` with `call`, use `{name}` directly instead."
            )
        loop = self._ready_loop()
        self._command(loop, "call", lambda envs: (name, args, kwargs))
        return self._gather(loop)[1]

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute of every env, as a tuple; see :meth:`call`."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of every env.

        Args:
            name: Of the attribute.
            values: A list or tuple: one value for each env. Anything else: the value for all.

        Raises:
            ClosedEnvironmentError: After ``close``.
            ValueError: The list has another length than there are envs.
            Exception: Whatever an env raises.
        """
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        loop = self._ready_loop()
        self._command(loop, "set_attr", lambda envs: (name, values[envs.start : envs.stop]))
        self._gather(loop)

    def render(self) -> tuple[Any, ...]:
        """What every env's ``render`` returns, as a tuple."""
        return self.call("render")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Closes the envs and ends the workers; called by :meth:`close`.

        Args:
            timeout: Seconds the envs get to close. None: as long as they take. Workers that are
                not done by then are terminated, and killed if they do not obey.
            terminate: Do not wait for the envs at all.

        Raises:
            Exception: What an env's ``close`` raises, after everything else is closed.
        """
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
        raise_failures(workers.stop(0.0 if terminate else timeout))

    def _ready_loop(self) -> ParentLoop:
        """The core, with nothing in flight."""
        loop = self._loop
        if loop is None:
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`."
            )
        if loop.pending:  # a wait was interrupted, by Ctrl-C for example: drop its results
            self._collect(loop)
        return loop

    def _command(self, loop: ParentLoop, name: str, payload: Callable[[range], Any]) -> None:
        """Sends every worker a command; what cannot be pickled raises before anything is sent."""
        workers = self._workers
        assert workers is not None
        packed = [workers.pack((name, payload(envs))) for envs in workers.ranges]
        # Posted first: a worker reads its pipe only when a request tells it to, and a long
        # message blocks until it is read.
        loop.post_command()
        for index, message in enumerate(packed):
            workers.send(index, message)

    def _collect(self, loop: ParentLoop) -> list[Late] | None:
        """Waits for what was posted; closes the vector env if a worker died."""
        workers = self._workers
        assert workers is not None
        try:
            late = loop.collect()
            return None if late is None else [workers.receive(index) for index in late]
        except WorkerCrashError:
            self._abandon()
            raise

    def _gather(self, loop: ParentLoop) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Infos and results of what was posted; raises what envs raised."""
        messages = self._collect(loop)
        if messages is None:
            return loop.infos(self, None), ()
        raise_failures([failure for late in messages for failure in late.failures])
        assert self._workers is not None
        unpack = self._workers.unpack
        infos = [(env, unpack(info)) for late in messages for env, info in late.infos]
        results = [unpack(result) for late in messages for result in late.results or ()]
        return loop.infos(self, infos), tuple(results)

    def _abandon(self) -> None:
        """Ends everything at once."""
        self._loop = None
        self.closed = True
        self._finalizer()

    def _checked_seeds(self, seed: Any) -> list[int | None] | None:
        if seed is None:
            return None
        try:
            first = operator.index(seed)
        except TypeError:
            pass
        else:
            return [first + i for i in range(self.num_envs)]
        seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(
                "If seeds are passed as a list the length must match "
                f"num_envs={self.num_envs} but got length={len(seeds)}."
            )
        for env, value in enumerate(seeds):
            try:
                seeds[env] = None if value is None else operator.index(value)
            except TypeError:
                raise TypeError(
                    f"the seed of env {env} must be an int or None, got {value!r}"
                ) from None
        return seeds

    def _checked_mask(self, mask: Any) -> list[bool]:
        name = "`options['reset_mask']`"
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"{name} must be a numpy array, got {type(mask)}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"{name} must have shape `({self.num_envs},)`, got {mask.shape}")
        if mask.dtype != np.bool_:
            raise TypeError(f"{name} must have `dtype=np.bool_`, got {mask.dtype}")
        if not mask.any():
            raise ValueError(
                f"{name} must contain a boolean array with at least one True value, got "
                f"reset_mask={mask}"
            )
        return list(mask.tolist())


def _checked_num_workers(num_workers: Any, num_envs: int, cores: int) -> int:
    if num_workers is None:
        return min(cores, num_envs)
    try:
        count = operator.index(num_workers)
    except TypeError:
        raise TypeError(f"num_workers must be an int or None, got {num_workers!r}") from None
    if isinstance(num_workers, bool) or not 0 <= count <= num_envs:
        raise ValueError(
            f"num_workers must be between 0 (the calling process) and the number of envs "
            f"({num_envs}), got {num_workers!r}; None chooses one for each usable core"
        )
    return count
