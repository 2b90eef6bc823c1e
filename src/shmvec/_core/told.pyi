from typing import Any

from gymnasium.vector import VectorEnv

from shmvec.faults import Fault

class Told:
    """What an env's answer tells of its worker.

    Attributes:
        fault: What has befallen it.
        cut_off: Whether the answer is a truncation in place of what was lost.
        last: With an autoreset in the same step: the observation the episode ended with, in a
            list; else None.
        info: What infos say of it.
    """

    fault: Fault
    cut_off: bool
    last: list[Any] | None
    info: dict[str, Any]

class Batch(VectorEnv[Any, Any, Any]):
    """Stands in for a vector env of so many envs, of which Gymnasium gathers infos."""

    def __init__(self, num_envs: int) -> None: ...
