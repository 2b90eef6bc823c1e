from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from shmvec._core.results import Results
from shmvec._core.segment import Segment
from shmvec._shared.layout import Slabs
from shmvec._shared.scheduling import WaitBudgets

class ParentLoop:
    """The parent's ends of all rings: post, wait, collect."""

    rouse: Callable[[], None]
    pending: bool
    waiting: bool
    """Whether a thread is in a wait."""
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
        keep_last: bool = False,
        may_step_over: bool = True,
        inline: Callable[[], None] | None = None,
    ) -> None: ...
    rollouts: Results | None
    """Frames that follow those in the segment."""
    away: int
    """The frame of the rollouts that holds the last results; -1: the segment does."""
    @property
    def sends_messages(self) -> bool:
        """Whether actions travel as messages, some of which may go over pipes."""
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
    num_invalid: int
    """How many envs have no valid results of what was posted last."""
    def post_command(self, resets: npt.NDArray[np.intp] | None = None) -> None:
        """Asks every worker to read a command, which resets these envs; send that next."""
    def take_rollouts(self, rollouts: Results) -> None:
        """Takes frames that follow those in the segment, in place of any before."""
    def start_rollout(self, frame: int) -> None:
        """Puts the last results into a frame of the rollouts."""
    def come_home(self) -> None:
        """Copies the last results to the segment if they are in a rollout."""
    def post_close(self) -> None:
        """Asks every worker to close its envs and end."""
    def remind(self) -> None:
        """Calls the workers again, in case that damage to the segment has hidden a request."""
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
    def forget(self, worker: int) -> None:
        """Ends what was posted to a worker that is dead, and makes its rings new.

        What it has answered holds; envs whose results were lost become invalid.
        """
    def invalidate(self, env: int) -> None:
        """Says that an env has no valid results of what was posted last."""
    def is_invalid(self, env: int) -> bool:
        """Whether an env has no valid results of what was posted last."""
    @property
    def resetting(self) -> bool:
        """Whether what was posted last to all workers resets envs."""
    @property
    def returns_results(self) -> bool:
        """Whether what was posted last to all workers steps or resets envs."""
    def take_invalid(self) -> npt.NDArray[np.intp]:
        """The envs without valid results; they count as valid from now on."""
    def set_broken(self, env: int, broken: bool) -> None:
        """Says whether a step of this env is not to be sent, and counts as invalid."""
    def is_over(self, env: int) -> bool:
        """Whether the env's last step ended an episode."""
    def truncate(self, env: int) -> Any:
        """Makes an env's results its last observation, reward 0 and a truncation.

        Returns:
            A copy of that observation.
        """
    def put_back(self, away: int, envs: Iterable[int]) -> None:
        """Copies results of envs from the segment to the frame of the rollouts they were in."""
    def mark_truncated(self, env: int) -> None:
        """Says that an env's results are those of a truncation."""
    def is_idle(self, worker: int) -> bool:
        """Whether a worker has answered everything."""
    def steps_of(self, worker: int) -> int:
        """Steps of envs that the process which is this worker now has made."""
    def counters(self) -> tuple[dict[str, int], list[dict[str, int]]]:
        """What the parent's waits were like, and what each worker has done; times in ns."""
