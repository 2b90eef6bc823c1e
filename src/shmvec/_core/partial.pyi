from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from shmvec._core.lease import Lease
from shmvec._core.parent import ParentLoop

Envs = npt.NDArray[np.intp]

class PartialLoop:
    """Requests and answers of single envs, over the rings of a :class:`ParentLoop`."""

    num_ready: int
    @property
    def num_out(self) -> int: ...
    def __init__(self, loop: ParentLoop, in_any_order: bool) -> None:
        """Takes the loop, and whether :meth:`take_these` will be used."""
    def check(self, envs: Envs) -> None:
        """Checks that each of these is an env, once, and may be asked something.

        Raises:
            ValueError: It is not.
        """
    def ask_in_ranges(self) -> None:
        """From now on neighbours are asked together: cheaper if nobody waits for one."""
    def post_steps(
        self, envs: Envs, actions: Any
    ) -> list[tuple[int, list[tuple[int, Any]]]] | None:
        """Asks these envs to step.

        Returns:
            Actions that did not fit the rings, (worker, [(env, action)]), to be sent over the
            pipes next, in this order; None if there are none.

        Raises:
            ValueError: The number or shape of the actions is wrong; nothing was sent.
            TypeError: Their dtype is; nothing was sent.
            AssertionError: An env's episode is over and nobody resets it; nothing was sent.
            BufferError: Every frame of an env is leased; nothing was sent.
        """
    def post_resets(self, envs: Envs) -> None:
        """Asks these envs to reset, without seed or options."""
    def post_command(self, envs: Envs) -> list[int]:
        """Asks the workers of these envs to read a command, which resets them.

        Returns:
            The workers: send each its command next.

        Raises:
            BufferError: Every frame is leased; nothing was sent.
        """
    def look_if_due(self) -> None:
        """Looks after the workers now and then.

        Raises:
            WorkerCrashError: One has died.
            EnvTimeoutError: An env takes longer than its time limit.
        """
    def wait(self, wanted: int, timeout: float | None) -> bool:
        """Waits until so many envs may be ready: pop and look; False when the time is up first."""
    def pop(self) -> list[tuple[int, int, int]] | None:
        """Takes the answers that are there.

        Returns:
            (worker, first env, number of envs) of the answers that are followed by a late message,
            in this order; None if there are none.
        """
    def forget(self, worker: int) -> list[tuple[int, int]]:
        """Ends what was posted to a worker that is dead; its answers have been popped.

        Returns:
            (env, operation) of the requests that were lost: these envs are still out.
        """
    def take_truncated(self) -> list[int]:
        """Envs that were asked to step but are broken: they are out, and no worker knows."""
    def answer(self, env: int) -> None:
        """Answers for an env that is out: its results are in the segment."""
    def again(self, env: int) -> None:
        """Asks an env that is out to reset, in place of what it was asked."""
    def fail(self, env: int) -> None:
        """Forgets what an env that has failed has answered: it is out as before."""
    def was_resetting(self, env: int) -> bool:
        """Whether an env's last request was a reset."""
    def hold_infos(self, env: int) -> None:
        """Takes what an env has sent out of the ring; to be called in the order of answers."""
    def num_missing(self, envs: npt.NDArray[np.intp]) -> int:
        """How many of these envs have still to answer."""
    def infos_of(self, env: int) -> list[dict[str, Any]]:
        """What an env that was taken has sent, as it returned it."""
    def hold(self, env: int, kind: int, message: dict[str, Any]) -> None:
        """Keeps a message that came over the pipe until its env is taken."""
    def drop(self, env: int) -> None:
        """Forgets what an env that has failed has answered."""
    def take(self, count: int) -> Envs:
        """The envs that have been ready for longest, at most so many."""
    def take_these(self, envs: Envs) -> bool:
        """Takes envs wherever they are in the queue; False, and none, if one is not ready."""
    def have_infos(self, envs: Envs) -> bool:
        """Whether one of these envs, which were taken, has sent any."""
    def infos(self, envs: Envs, rows: Envs, vector_env: VectorEnv[Any, Any, Any]) -> dict[str, Any]:
        """Gymnasium's dict of arrays of envs that were taken.

        Args:
            envs: The envs.
            rows: Where each one is in the arrays.
            vector_env: How long the arrays are.
        """
    def results(self, envs: Envs, infos: dict[str, Any]) -> tuple[tuple[Any, ...], Lease | None]:
        """Observations, rewards, terminations and truncations of these envs, and the infos.

        And the lease that the arrays hold, if they are views; None: they are copies.
        """
