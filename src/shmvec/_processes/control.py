"""The messages of the control channels: reports, attachments, and late parts of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shmvec._autoreset import Autoreset
from shmvec._memory.layout import Layout
from shmvec.faults import Failure

__all__ = ["Attachment", "ImportReport", "LateParts", "Report", "ResetSettings", "Resets"]


# An env, and what was set for its automatic resets: a seed that does not fit the slab, and options.
ResetSettings = list[tuple[int, tuple[int | None, Any]]]


class Resets(NamedTuple):
    """Seeds and options for the resets of a worker that replaces another one.

    Attributes:
        first: Seed and options for the first reset of each env; None: those of the request.
        automatic: What was set for automatic resets.
    """

    first: Sequence[tuple[int | None, Any] | None]
    automatic: ResetSettings


@dataclass(frozen=True)
class ImportReport:
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
        reward_space: The space of its first env's rewards; None: they are numbers.
        metadata: Its first env's metadata.
        render_mode: Its first env's render mode.
        differing_spaces: Envs whose spaces differ from its first env's: (env, which space, space).
    """

    observation_space: Any
    action_space: Any
    reward_space: Any
    metadata: dict[str, Any]
    render_mode: str | None
    differing_spaces: list[tuple[int, str, Any]]


@dataclass(frozen=True)
class Attachment:
    """Everything a worker needs to attach to the segment.

    Descriptors come with it: of the segment, of the alarm that wakes the sleeping worker, of its
    depot, and of all that was shared later.

    Attributes:
        layout: The layout of the slabs.
        nbytes: Size of the segment.
        autoreset: How envs whose episodes have ended are reset.
        limits: Seconds that a step and a reset of one env may take.
        mends: Whether an env that has raised is reset and not given up.
        resets: Seeds and options for the resets of a replacement.
        compile_wrappers: Whether known wrappers are stepped by compiled twins.
        shared: Name and size of all that was shared later, such as memory for a rollout.
    """

    layout: Layout
    nbytes: int
    autoreset: Autoreset
    limits: tuple[float | None, float | None] = (None, None)
    mends: bool = False
    resets: Resets | None = None
    compile_wrappers: bool = True
    shared: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class LateParts:
    """The parts of an answer that did not fit the rings.

    Attributes:
        messages: (kind, env, packed message): infos and observations.
        failures: Exceptions in envs.
        results: The results of a command: one parcel an env, None where it failed.
    """

    messages: list[tuple[int, int, Any]]
    failures: list[Failure]
    results: list[Any] | None
