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
