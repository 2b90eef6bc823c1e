import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

class Lease:
    """Marks rows as leased while it lives; the base of the arrays that show them."""

    def __init__(
        self, memory: Buffer, leased: npt.NDArray[np.uint8], first: int, count: int
    ) -> None:
        """Marks ``leased[first : first + count]``; arrays are made over ``memory``."""
    def release(self) -> None:
        """The rows may be written again, even if arrays still show them."""
    @property
    def released(self) -> bool: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
