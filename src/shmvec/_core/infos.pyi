from typing import Any

from gymnasium.vector import VectorEnv

from shmvec._core.segment import Segment

class InfoEncoder:
    """A worker's side of the info ring; driven by the worker's loop."""

    def __init__(self, segment: Segment, worker: int, first_env: int, num_envs: int) -> None: ...

class Columns:
    """The arrays of the dict that is being built, shared by the decoders of all workers."""

    def finish(self) -> None:
        """Ends a batch: lets go of its arrays."""

class InfoDecoder:
    """The parent's side of one worker's info ring."""

    def __init__(self, segment: Segment, worker: int, columns: Columns) -> None: ...
    def drain(self, sequence: int) -> list[tuple[int, dict[str, Any]]]:
        """All infos of a sequence as the envs returned them; others are dropped."""
    def add_to(
        self, infos: dict[str, Any], sequence: int, vector_env: VectorEnv[Any, Any, Any]
    ) -> None:
        """Adds the infos of a sequence to Gymnasium's dict of arrays; others are dropped."""
