from typing import Any

import numpy as np
import numpy.typing as npt

from shmvec._core.codec import Codec
from shmvec._core.lease import Lease

class Results:
    """Frames of what steps return; a row an env: frame * num_envs + env."""

    observations: Codec
    rewards: npt.NDArray[np.float64]
    terminations: npt.NDArray[np.bool_]
    truncations: npt.NDArray[np.bool_]
    num_envs: int
    num_frames: int
    def __init__(
        self,
        memory: Any,
        observations: Codec,
        rewards: npt.NDArray[np.float64],
        terminations: npt.NDArray[np.bool_],
        truncations: npt.NDArray[np.bool_],
        num_envs: int,
    ) -> None:
        """Takes arrays ``(num_frames * num_envs, ...)``, and the memory in which they lie."""
    def leased(self, first: int, count: int) -> bool:
        """Whether one of these rows is leased."""
    def lease(self, first: int, count: int) -> Lease:
        """Protects rows from being written until the lease is released, or gone."""
    def view(
        self, lease: Lease, first: int, lead: tuple[int, ...]
    ) -> tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Arrays ``(*lead, ...)`` over leased rows from ``first`` on, which keep the lease."""
    def copy_rows(self, source: Results, rows: npt.NDArray[np.intp], first: int) -> None:
        """Copies rows of other frames to those from ``first`` on."""
