from typing import Any

from shmvec._core.segment import Segment

def dumps(value: Any) -> bytes:
    """Pickles: fast where the type can be imported, by value (cloudpickle) where it cannot."""

class Encoder:
    """The sending side of a ring of messages; driven by a hot loop."""

    def __init__(
        self, segment: Segment, worker: int, first_env: int, num_envs: int, to_parent: bool
    ) -> None: ...

class Decoder:
    """The receiving side of a ring of messages; driven by a hot loop."""

    def __init__(self, segment: Segment, worker: int, from_worker: bool) -> None: ...

def die_at(point: int) -> None:
    """As that of :mod:`shmvec._core.worker`, which calls this."""
