from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from shmvec._core.results import Results
from shmvec._core.segment import Segment
from shmvec.layout import Slabs
from shmvec.scheduling import WaitBudgets

class ParentLoop:
    """The parent's ends of all rings: post, wait, collect."""

    pending: bool
    asked: int
    """How many single envs a :class:`PartialLoop` has asked whose answers were not taken yet."""
    def __init__(
        self,
        segment: Segment,
        ranges: Sequence[tuple[int, int]],
        slabs: Slabs,
        look: Callable[[], None],
        rouse: Callable[[], None],
        budgets: Callable[[], WaitBudgets],
        limits: tuple[float | None, float | None] = (None, None),
        copy: bool = True,
        leasing: bool = False,
        may_step_over: bool = True,
        inline: Callable[[], None] | None = None,
    ) -> None: ...
    rollouts: Results | None
    """Frames that follow those in the segment."""
    away: int
    """The frame of the rollouts that holds the last results; -1: the segment does."""
    def post_step(
        self, actions: Any, rollout_frame: int = -1
    ) -> dict[int, list[tuple[int, Any]]] | None:
        """Writes the actions and asks every worker to step its envs.

        Args:
            actions: One for each env.
            rollout_frame: The frame of the rollouts into which results go; -1: the segment.

        Returns:
            Actions (env, action) that did not fit the rings, by worker, to be sent over the pipes
            next; None if there are none.

        Raises:
            ValueError: The number or shape of the actions is wrong; nothing was sent.
            TypeError: Their dtype is; nothing was sent.
            AssertionError: An env's episode is over and nobody resets it; nothing was sent.
            BufferError: Every frame is leased; nothing was sent.
        """
    def post_reset(self) -> None:
        """Asks every worker to reset its envs, without seed or options."""
    def post_command(self, resets: Iterable[int] = ()) -> None:
        """Asks every worker to read a command, which resets these envs; send that next."""
    def take_rollouts(self, rollouts: Results) -> None:
        """Takes frames that follow those in the segment, in place of any before."""
    def start_rollout(self, frame: int) -> None:
        """Puts the last results into a frame of the rollouts."""
    def come_home(self) -> None:
        """Copies the last results to the segment if they are in a rollout."""
    def post_close(self) -> None:
        """Asks every worker to close its envs and end."""
    def wait(self, timeout: float | None) -> bool:
        """Waits until all that was posted is done; False when the time is up first."""
    def collect(self) -> list[int] | None:
        """Waits for all that was posted and takes the answers.

        Returns:
            The workers whose pipe holds a late message; None if there is none.
        """
    def infos(
        self,
        vector_env: VectorEnv[Any, Any, Any],
        late: list[tuple[int, int, dict[str, Any]]] | None,
    ) -> dict[str, Any]:
        """Gymnasium's dict of arrays of the step or reset just collected.

        Args:
            vector_env: Whose ``_add_info`` defines the result.
            late: Messages (kind, env, message) that came over the pipe.
        """
    def observe(self) -> Any:
        """The batch of observations."""
    def results(
        self, infos: dict[str, Any]
    ) -> tuple[
        Any,
        npt.NDArray[np.float64],
        npt.NDArray[np.bool_],
        npt.NDArray[np.bool_],
        dict[str, Any],
    ]:
        """What ``step`` returns, given its infos."""
    def counters(self) -> tuple[dict[str, int], list[dict[str, int]]]:
        """What the parent's waits were like, and what each worker has done; times in ns."""
