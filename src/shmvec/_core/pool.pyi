import numpy as np
import numpy.typing as npt

from shmvec._core.codec import Codec

class Pool:
    """Blocks of shared memory, each for observations of all envs that the user gets as they are."""

    def __init__(
        self, memory: npt.NDArray[np.uint8], block_bytes: int, codecs: list[Codec]
    ) -> None:
        """Takes whole pages of memory, the bytes of a block, and a codec over each."""
    def end(self) -> None:
        """No array is made any more: what the user does not hold goes back to the system."""
