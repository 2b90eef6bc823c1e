"""What happens to an env whose episode has ended: Gymnasium's autoreset modes, and their meaning.

Code asks for the meaning (``Autoreset.of(mode).in_step``) and compares no names. A new mode needs
an entry of ``_MEANINGS``, the worker's part in ``WorkerLoop.step_one``, and an answer to a lost
step in ``Ledger.cut``.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gymnasium.vector import AutoresetMode
else:
    try:
        from gymnasium.vector import AutoresetMode
    except ImportError:  # Gymnasium 1.0 resets at the next step and has no name for it

        class AutoresetMode(Enum):
            """When an episode's end is followed by a reset."""

            NEXT_STEP = "NextStep"
            SAME_STEP = "SameStep"
            DISABLED = "Disabled"


__all__ = ["Autoreset", "AutoresetMode"]


class Autoreset(NamedTuple):
    """What an autoreset mode means.

    Attributes:
        in_step: The step that ends an episode also resets the env. It returns the reset's
            observation and info; the episode's last ones are in ``final_obs`` and ``final_info``.
        in_next_step: The step after that one resets the env. It ignores its action, its reward is
            0, and it is no transition.
    """

    in_step: bool
    in_next_step: bool

    @classmethod
    def of(cls, mode: str | AutoresetMode) -> Autoreset:
        """The meaning of a mode, or of a mode's value ("NextStep", ...)."""
        return _MEANINGS[AutoresetMode(mode)]

    @property
    def by_worker(self) -> bool:
        """Whether the worker resets the env. If not, the caller does before its next step."""
        return self.in_step or self.in_next_step

    def transitions(self, terminations: Any, truncations: Any) -> npt.NDArray[np.bool_]:
        """Which steps are transitions, not resets that ignore the action.

        Args:
            terminations: bool ``(T + 1, N)``: index ``t + 1`` holds what step ``t`` returned.
            truncations: Likewise.

        Returns:
            bool ``(T, N)``.
        """
        over = np.asarray(terminations[:-1]) | np.asarray(truncations[:-1])
        return ~over if self.in_next_step else np.ones_like(over)


_MEANINGS = {
    AutoresetMode.NEXT_STEP: Autoreset(in_step=False, in_next_step=True),
    AutoresetMode.SAME_STEP: Autoreset(in_step=True, in_next_step=False),
    AutoresetMode.DISABLED: Autoreset(in_step=False, in_next_step=False),
}
