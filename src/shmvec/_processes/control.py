"""The messages of the control channels: reports, attachments, and late parts of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shmvec._autoreset import Autoreset
from shmvec._memory.layout import Layout
from shmvec.faults import Failure

__all__ = ["Attachment", "Imported", "Late", "Report", "Resets"]


# Seed and options for the first reset of each env of a worker; None: those of the request.
Resets = Sequence[tuple[int | None, Any] | None]


@dataclass(frozen=True)
class Imported:
    """The imports of the first worker, sent once its first env is built, before its report.

    Attributes:
        modules: Names of the modules that it has imported and others may inherit.
    """

    modules: list[str]


@dataclass(frozen=True)
class Report:
    """A worker's description of its envs once they are built.

    Attributes:
        observation_space: Its first env's observation space.
        action_space: Its first env's action space.
        metadata: Its first env's metadata.
        render_mode: Its first env's render mode.
        unequal: Envs whose spaces differ from its first env's: (env, which space, space).
    """

    observation_space: Any
    action_space: Any
    metadata: dict[str, Any]
    render_mode: str | None
    unequal: list[tuple[int, str, Any]]


@dataclass(frozen=True)
class Attachment:
    """Everything a worker needs to attach to the segment.

    Descriptors come with it: of the segment, of the alarm that wakes the worker when it dozes, of
    its depot, and of all memory that is kept.

    Attributes:
        layout: The layout of the slabs.
        nbytes: Size of the segment.
        autoreset: How envs whose episodes have ended are reset.
        limits: Seconds that a step and a reset of one env may take.
        mends: Whether an env that has raised is reset and not given up.
        resets: In a replacement: arguments for each env's next reset that has none.
        compile_wrappers: Whether known wrappers are stepped by compiled twins.
        kept: Name and size of memory that was shared later: for rollouts, for a trace.
    """

    layout: Layout
    nbytes: int
    autoreset: Autoreset
    limits: tuple[float | None, float | None] = (None, None)
    mends: bool = False
    resets: Resets | None = None
    compile_wrappers: bool = True
    kept: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Late:
    """The parts of an answer that did not fit the rings.

    Attributes:
        messages: (kind, env, packed message): infos and observations.
        failures: Exceptions in envs.
        results: The results of a command: one parcel an env, None where it failed.
    """

    messages: list[tuple[int, int, Any]]
    failures: list[Failure]
    results: list[Any] | None
