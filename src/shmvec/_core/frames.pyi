from typing import Any

from shmvec._core.pool import Pool
from shmvec._core.results import Results

class Frames:
    """Where each env's results are."""

    away: int
    rollouts: Results | None

    def __init__(
        self,
        home: Results,
        copy: bool = True,
        leasing: bool = False,
        keep_last: bool = False,
        pool: Pool | None = None,
    ) -> None:
        """Takes the frames of the segment.

        Args:
            home: They.
            copy: Whether observations are returned as copies.
            leasing: Whether batches are handed out as views.
            keep_last: Whether new results leave the last ones in place.
            pool: Where observations of all envs are written besides, to be handed out as they are.
        """

    def take_rollouts(self, rollouts: Results) -> None:
        """Takes frames that follow those at home, in place of any before."""

    def start_rollout(self, frame: int) -> None:
        """Puts the last results into a frame of the rollouts."""

    def meet(self, frame: int) -> None:
        """Says that the last results of all envs are, or will be, in a frame of a rollout."""

    def end_rollout(self) -> None:
        """Brings the last results home: their frame is the user's from now on."""

    def end(self) -> None:
        """The vector env is closed: lets go of memory that nobody looks at."""

    def observe(self) -> Any:
        """The last observations of all envs, as ``copy`` says."""
