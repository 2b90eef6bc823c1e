"""Partial batches: envs are asked one by one, and whoever is ready first is taken first."""

from __future__ import annotations

import multiprocessing
import operator
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import VectorEnv

from shmvec._core.lease import Lease
from shmvec._core.parent import ParentLoop
from shmvec._core.partial import PartialLoop
from shmvec._parent.supervisor import InlineWorker, Supervisor
from shmvec._shared.pipes import uninterrupted
from shmvec.faults import EnvTimeoutError, Failure, WorkerCrashError, raise_failures
from shmvec.spaces import mapped

if TYPE_CHECKING:
    from shmvec._parent.recovery import Recovery

__all__ = [
    "EnvsFailed",
    "PartialBatches",
    "checked_batch_size",
    "checked_env_ids",
    "existing_env_ids",
    "given_actions",
    "release",
]

Envs = npt.NDArray[np.intp]

_SLICE_S = 0.05


class PartialBatches:
    """What ``send`` and ``recv`` and ``step(mask=)`` do."""

    def __init__(
        self,
        loop: ParentLoop,
        workers: Supervisor | InlineWorker,
        vector_env: VectorEnv[Any, Any, Any],
        record_order: list[Envs] | None,
        replay_order: Iterable[npt.ArrayLike] | None,
        hold_batches: int | None,
    ) -> None:
        """Takes the core, the order of arrival to be recorded or replayed, and the lease's end."""
        plain = type(vector_env)._add_info is VectorEnv._add_info
        self._vector_env = weakref.proxy(vector_env)  # which has this
        self.recovery: Recovery  # set by itself
        self._failures: list[Failure] = []  # not raised yet
        self._parent = loop
        self._loop = PartialLoop(loop, replay_order is not None or not plain)
        self._workers = workers
        self._record = record_order
        self._replay: Iterator[npt.ArrayLike] | None = None
        if replay_order is not None:
            self._replay = iter(replay_order)
        self._batches = 0
        self._hold_batches = hold_batches
        self._held: deque[weakref.ref[Lease] | None] = deque()

    def check(self, envs: Envs) -> None:
        """Raises ValueError unless these envs can be asked something."""
        self._loop.check(envs)

    def ask_in_ranges(self) -> None:
        """From now on neighbours are asked together: cheaper if nobody waits for one."""
        self._loop.ask_in_ranges()

    def send(self, envs: Envs, actions: Any) -> None:
        """Asks envs to step."""
        self._workers.doing = "send"
        self._loop.check(envs)
        if self.recovery.later:
            self.recovery.asked(envs.tolist())
        if not self._parent.sends_messages:
            self._loop.post_steps(envs, actions)
            return
        with uninterrupted():
            for worker, items in self._loop.post_steps(envs, actions) or ():
                self._workers.send(worker, self._workers.pack(items))

    def reset(self, envs: Envs, command: Callable[[], Sequence[Any]] | None) -> None:
        """Asks envs to reset.

        Args:
            envs: Which.
            command: Makes a command for each worker, packed, which has the seeds and options; None
                if there are none.
        """
        if self.recovery.later:
            self.recovery.asked(envs.tolist())
        self._workers.doing = "reset"
        if command is None:
            self._loop.post_resets(envs)
            return
        packed = command()
        with uninterrupted():
            for worker in self._loop.post_command(envs):
                self._workers.send(worker, packed[worker])

    def take(self, count: int, min_envs: int | None, timeout: float | None) -> Envs:
        """Waits for ``count`` envs and takes those that were ready first.

        Raises:
            NoAsyncCallError: So many have not been asked anything.
            multiprocessing.TimeoutError: The time is up; nothing was taken.
            Exception: What an env has raised.
        """
        self._batches += 1
        if self._replay is not None:
            envs = self._take_as_recorded(timeout)
        else:
            wanted = count if min_envs is None else min_envs
            asked = self._loop.num_out + self._loop.num_ready
            if asked < wanted:
                raise NoAsyncCallError(
                    f"Calling `recv` for {wanted} envs, but only {asked} have been asked to step "
                    "or reset: `send` actions, or call `async_reset`, first.",
                    "recv",
                )
            if not self._wait_for(wanted, timeout) and (
                min_envs is None or self._loop.num_ready == 0
            ):
                raise self._too_late(timeout, f"{self._loop.num_ready} of {wanted} envs are ready")
            envs = self._loop.take(count)
        if self._record is not None:
            self._record.append(envs.copy())
        return envs

    def take_these(self, envs: Envs, timeout: float | None) -> None:
        """Waits for these envs, which were asked, and takes them.

        While others are out, too, it is woken less often: it then returns a little later.

        Raises:
            multiprocessing.TimeoutError: The time is up; nothing was taken.
            EnvsFailed: Envs have raised exceptions; the others are still to be taken.
        """
        loop = self._loop
        deadline = None if timeout is None else time.monotonic() + timeout
        in_time = True
        while True:
            self._pop()
            missing = loop.num_missing(envs)
            if missing == 0:
                loop.take_these(envs)
                return
            if in_time:
                # Others' answers come between: waiting for just so many would wake us for each.
                wanted = min(missing + len(envs) // 2, loop.num_out)
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                in_time = self._wait_core(loop.num_ready + wanted, left)
            else:
                raise self._too_late(timeout, f"{missing} of {len(envs)} envs are not ready")

    def _wait_for(self, wanted: int, timeout: float | None) -> bool:
        """Waits until so many are ready; False when the time is up first."""
        loop = self._loop
        try:
            loop.look_if_due()
        except (WorkerCrashError, EnvTimeoutError) as error:
            self.recovery.recover(error)
        self._pop()
        if loop.num_ready < wanted and timeout is None:
            self._wait_core(wanted, None)
            self._pop()
        if loop.num_ready >= wanted:  # the usual
            return True
        return self._wait(lambda: loop.num_ready >= wanted, wanted, timeout)

    def _pop(self) -> None:
        """Takes the answers that are there; raises what envs have raised."""
        late = self._loop.pop()
        if late is not None:
            self._failures += self._take_late(late)
        if self._failures:
            failures, self._failures = self._failures, []
            raise EnvsFailed(failures)

    def _wait_core(self, wanted: int, timeout: float | None) -> bool:
        """Waits until so many may be ready, whatever happens to workers meanwhile.

        Returns False if the time is up; True: look again.
        """
        self.recovery.answer_for_broken()
        # In slices: a worker whose pipe is full of late messages answers once they are taken.
        last = timeout is not None and timeout <= _SLICE_S
        try:
            return self._loop.wait(wanted, timeout if last else _SLICE_S) or not last
        except (WorkerCrashError, EnvTimeoutError) as error:
            self.recovery.recover(error)
        return True  # answers were taken meanwhile, so fewer than `wanted` may be out

    def _take_as_recorded(self, timeout: float | None) -> Envs:
        assert self._replay is not None
        try:
            envs = np.ascontiguousarray(next(self._replay), np.intp)
        except StopIteration:
            raise ValueError(
                f"replay_order is over: it holds {self._batches - 1} batches"
            ) from None
        asked = self._loop.num_out + self._loop.num_ready
        if len(envs) > asked:
            raise ValueError(
                f"replay_order does not fit: batch {self._batches - 1} has {len(envs)} envs, but "
                f"only {asked} have been asked anything"
            )
        taken = False

        def all_ready() -> bool:
            nonlocal taken
            taken = taken or self._loop.take_these(envs)
            return taken or self._loop.num_out == 0

        if not self._wait(all_ready, 0, timeout):
            raise self._too_late(timeout, f"envs {envs.tolist()} are not all ready")
        if not taken:
            raise ValueError(
                f"replay_order does not fit: batch {self._batches - 1} is envs {envs.tolist()}, "
                "of which not all have been asked anything"
            )
        return envs

    def _too_late(self, timeout: float | None, state: str) -> multiprocessing.TimeoutError:
        return multiprocessing.TimeoutError(
            f"The call to `recv` has timed out after {timeout} second(s): {state}."
        )

    def _wait(self, done: Callable[[], bool], wanted: int, timeout: float | None) -> bool:
        """Takes answers until it is done; False when the time is up first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._pop()
            if done():
                return True
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wait_core(wanted or self._loop.num_ready + 1, left):
                return False

    def finish(self) -> tuple[Envs, list[Failure]]:
        """Waits until no env is out: those that have answered, and what the others have raised."""
        while self._loop.num_out > 0:
            self._wait_core(self._loop.num_ready + self._loop.num_out, None)
            late = self._loop.pop()
            if late is not None:
                self._failures += self._take_late(late)
        failures, self._failures = self._failures, []
        return self._loop.take(self._loop.num_ready), failures

    def _take_late(self, answers: Sequence[tuple[int, int, int]]) -> list[Failure]:
        """Takes what did not fit the rings: infos are kept, and what envs have raised returned.

        Unless the policy does something about it.
        """
        failures: list[Failure] = []
        dead: set[int] = set()
        for worker, first, count in answers:
            try:
                late = None if worker in dead else self._workers.receive(worker)
            except WorkerCrashError as error:
                late = None
                dead.add(worker)
                crash = error
            if late is None:  # it is lost, and the answer with it
                for env in range(first, first + count):
                    self._loop.fail(env)
                continue
            failures += late.failures
            for kind, env, message in late.messages:
                self._loop.hold(env, kind, self._workers.unpack(message))
        if dead:
            self.recovery.recover(crash)
        mended = [failure for failure in failures if self.recovery.handles(failure)]
        for failure in mended:
            self._loop.fail(failure.env)
        self.recovery.mend(mended)
        raised = [failure for failure in failures if failure not in mended]
        for failure in raised:
            self._loop.drop(failure.env)
        return raised

    def forget(self, worker: int) -> list[tuple[int, bool]]:
        """Ends what a worker that is dead was asked: (env, whether to reset) of what was lost."""
        if self._parent.pending:  # it was asked as all were
            return []
        late = self._loop.pop()
        mine = [answer for answer in late or () if answer[0] == worker]
        for _, first, count in mine:
            for env in range(first, first + count):
                self._loop.fail(env)
        others = [answer for answer in late or () if answer[0] != worker]
        if others:
            self._failures += self._take_late(others)
        lost = self._loop.forget(worker)
        return [(env, self._loop.was_resetting(env)) for env, _ in lost]

    def truncated(self) -> list[int]:
        """Envs that were asked to step but are broken."""
        return self._loop.take_truncated()

    def answer(self, env: int) -> None:
        """Answers for an env that is out."""
        self._loop.answer(env)

    def again(self, env: int) -> None:
        """Asks an env that is out to reset."""
        self._loop.again(env)

    def was_resetting(self, env: int) -> bool:
        """Whether an env's last request was a reset."""
        return self._loop.was_resetting(env)

    def infos_of(self, env: int) -> list[dict[str, Any]]:
        """What an env that was taken has sent, as it returned it."""
        return self._loop.infos_of(env)

    def info_of(self, env: int) -> dict[str, Any]:
        """What an env that was taken has sent, in one dict."""
        infos = self.infos_of(env)
        return infos[0] if len(infos) == 1 else {key: info[key] for info in infos for key in info}

    def results(self, envs: Envs) -> tuple[Any, ...]:
        """What ``recv`` returns for envs that were taken."""
        infos: dict[str, Any] = {}
        if self._loop.have_infos(envs):
            rows = np.arange(len(envs), dtype=np.intp)
            infos = self._loop.infos(envs, rows, _Batch(len(envs)))
        if self.recovery.told:
            batch = _Batch(len(envs))
            for row, env in enumerate(envs.tolist()):
                infos = self.recovery.tell(batch, infos, env, row)
        infos["env_id"] = envs.astype(np.int64)
        results, lease = self._loop.results(envs, infos)
        if self._hold_batches is not None:
            self._held.append(None if lease is None else weakref.ref(lease))
            if len(self._held) > self._hold_batches:
                _release(self._held.popleft())
        return results

    def infos(self, envs: Envs) -> dict[str, Any]:
        """Infos of envs that were taken, in arrays of all envs."""
        if not self.recovery.policy.raises:  # who was asked twice is not in order
            for env in envs.tolist():
                self._loop.hold_infos(env)
        order = np.sort(envs)
        infos = self._loop.infos(order, order, self._vector_env)
        for env in order.tolist() if self.recovery.told else ():
            infos = self.recovery.tell(self._vector_env, infos, env, env)
        return infos


def release(array: Any) -> None:
    """Ends the lease that an array of a batch, or a view of one, holds.

    Raises:
        TypeError: It is no array.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"release() takes an array of a batch, such as its rewards, got {type(array).__name__}"
        )
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, Lease):  # else a copy, which holds nothing
        owner.release()


def _release(lease: weakref.ref[Lease] | None) -> None:
    alive = lease() if lease is not None else None
    if alive is not None:
        alive.release()


class EnvsFailed(Exception):
    """Envs have raised exceptions."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        """Takes what they have raised."""
        super().__init__()
        self.failures = failures

    def exception(self) -> BaseException:
        """What the first of them has raised."""
        try:
            raise_failures(self.failures)
        except BaseException as error:
            return error
        raise AssertionError


class _Batch(VectorEnv[Any, Any, Any]):
    """Stands in for a vector env of fewer envs, of which Gymnasium gathers infos."""

    def __init__(self, num_envs: int) -> None:
        """Takes the number of envs."""
        self.num_envs = num_envs
        self.closed = True


def checked_batch_size(batch_size: Any, num_envs: int) -> int | None:
    """A number of envs, or None.

    Raises:
        TypeError: It is no integer.
        ValueError: There are not so many envs.
    """
    if batch_size is None:
        return None
    try:
        size = operator.index(batch_size)
    except TypeError:
        raise TypeError(f"batch_size must be an int or None, got {batch_size!r}") from None
    if not 1 <= size <= num_envs:
        raise ValueError(
            f"batch_size must be between 1 and the number of envs ({num_envs}), got {size}"
        )
    return size


def checked_env_ids(env_id: Any, num_envs: int) -> Envs:
    """Indices of envs, as an array; None means all.

    Raises:
        TypeError: They are no integers.
        ValueError: There are none, or they are not in one row.
    """
    if env_id is None:
        return np.arange(num_envs, dtype=np.intp)
    ids = np.asarray(env_id)
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(
            f"env_id must be indices of envs, a list or an array of one dimension, got {env_id!r}"
        )
    if ids.dtype.kind not in "iu":
        raise TypeError(f"env_id must be integers, got {ids.dtype}: {env_id!r}")
    return np.ascontiguousarray(ids, np.intp)


def existing_env_ids(env_id: Any, num_envs: int) -> Envs:
    """Indices of envs that there are, each once; None means all.

    Raises:
        TypeError: They are no integers.
        ValueError: There is no such env, or it is named twice.
    """
    envs = checked_env_ids(env_id, num_envs)
    if envs.min() < 0 or envs.max() >= num_envs:
        raise ValueError(f"env_id must be in 0 to {num_envs - 1}, got {envs.tolist()}")
    if len(np.unique(envs)) < len(envs):
        raise ValueError(f"env_id names an env twice: {envs.tolist()}")
    return envs


def given_actions(space: Any, actions: Any, envs: Envs) -> Any:
    """The actions of some envs, out of those of all; ``space`` is that of one env."""

    def given(part: Any) -> Any:
        return part[envs] if isinstance(part, np.ndarray) else [part[env] for env in envs]

    return mapped(space, given, actions)
