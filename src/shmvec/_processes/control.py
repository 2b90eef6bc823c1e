"""The messages of the control channels: reports, commands, and what comes late with an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shmvec._autoreset import Autoreset
from shmvec._memory.layout import Layout
from shmvec.faults import Failure

__all__ = ["Attachment", "Imported", "Late", "Report", "Resets"]


# Seed and options for the first reset of each env of a worker; None: as the core asks.
Resets = Sequence[tuple[int | None, Any] | None]


@dataclass(frozen=True)
class Imported:
    """What the first worker says once its first env is built, before its report.

    Attributes:
        modules: Names of those that it has imported, and others may find imported.
    """

    modules: list[str]


@dataclass(frozen=True)
class Report:
    """What a worker says of its envs once they are built.

    Attributes:
        observation_space: That of its first env.
        action_space: That of its first env.
        metadata: That of its first env.
        render_mode: That of its first env.
        unequal: Envs whose spaces differ from its first env's: (env, which space, space).
    """

    observation_space: Any
    action_space: Any
    metadata: dict[str, Any]
    render_mode: str | None
    unequal: list[tuple[int, str, Any]]


@dataclass(frozen=True)
class Attachment:
    """What a worker needs to attach to the segment.

    Descriptors come with it: of the segment, of what wakes the worker when it dozes, of its depot,
    and of all memory that is kept.

    Attributes:
        layout: What lies in the slabs.
        nbytes: Size of the segment.
        autoreset: Who resets an env whose episode has ended, and when.
        limits: Seconds that a step and a reset of one env may take.
        mends: Whether an env that has raised is reset, and not given up.
        resets: Of a worker that takes another one's place: for each env's next reset that has none.
        kept: Name and size of memory that was handed out later: for rollouts, for a trace.
    """

    layout: Layout
    nbytes: int
    autoreset: Autoreset
    limits: tuple[float | None, float | None] = (None, None)
    mends: bool = False
    resets: Resets | None = None
    kept: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Late:
    """What did not fit the rings.

    Attributes:
        messages: (kind, env, packed message): infos and observations.
        failures: Exceptions in envs.
        results: Of a command: one parcel an env, None where it failed.
    """

    messages: list[tuple[int, int, Any]]
    failures: list[Failure]
    results: list[Any] | None
