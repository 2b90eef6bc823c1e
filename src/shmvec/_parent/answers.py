"""What envs have answered, and what of that was taken and is not with the caller yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shmvec._core.lease import Lease
from shmvec._core.told import Told
from shmvec.faults import Failure

__all__ = ["Answers", "Envs", "Taken"]

Envs = npt.NDArray[np.intp]


@dataclass(slots=True)
class Answers:
    """What envs have answered.

    Attributes:
        envs: Which envs, int ``(n,)``, in the order in which they were taken.
        observations: Theirs, batched as the observation space says.
        rewards: float64 ``(n,)``; 0 of a reset.
        terminations: bool ``(n,)``.
        truncations: bool ``(n,)``.
        infos: One dict for each, as the env returned it; or what the vector env that was to gather
            them has made of them.
        told: By env, what its answer tells of its worker, if it does.
        failures: What envs have raised; these have no row above.
        results: Of a command: by env, what it has returned.
        unanswered: Envs whose worker died in a command, and was restarted: they have no result.
    """

    envs: Envs
    observations: Any = None
    rewards: Any = None
    terminations: Any = None
    truncations: Any = None
    infos: Any = field(default_factory=list)
    told: dict[int, Told] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)
    unanswered: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Taken:
    """Answers that were taken, until they are returned."""

    answers: Answers
    lease: Lease | None = None
    counted: bool = False  # among the batches that are held
