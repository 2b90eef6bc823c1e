from typing import Any

from gymnasium.vector import VectorEnv

from shmvec._core.codec import Codec
from shmvec._core.messages import Decoder
from shmvec._core.segment import Segment

class Columns:
    """The arrays of the dict that is being built, shared by the decoders of all workers."""

    def finish(self) -> None:
        """Ends a batch: lets go of its arrays."""

class InfoDecoder(Decoder):
    """What one worker sends the parent: infos, and observations that are in no slab."""

    def __init__(
        self,
        segment: Segment,
        worker: int,
        from_worker: bool,
        columns: Columns,
        observations: Codec | None,
        finals: Codec | None,
    ) -> None: ...
    def drain(self, sequence: int) -> list[tuple[int, dict[str, Any]]]:
        """All infos of a sequence as the envs returned them; others are dropped."""
    def add_to(
        self, infos: dict[str, Any], sequence: int, vector_env: VectorEnv[Any, Any, Any]
    ) -> None:
        """Adds the infos of a sequence to Gymnasium's dict of arrays; others are dropped."""
