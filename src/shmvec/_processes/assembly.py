"""Assembles a vector env from workers: agrees on spaces, makes the segment, attaches the rings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shmvec._core import (
    Frames,
    Guard,
    Ledger,
    Links,
    MappedMemory,
    Segment,
    segment_bytes,
)
from shmvec._cores import current_budgets, split_evenly
from shmvec._memory.layout import Layout, check_shared_memory, has_fixed_size
from shmvec._memory.segment import reserve_segment
from shmvec._options import Settings
from shmvec._processes.control import Attachment, Report
from shmvec._processes.host import EnvFn
from shmvec._processes.launcher import Launcher
from shmvec._processes.supervisor import Supervisor
from shmvec.faults import Failure, raise_failures
from shmvec.spaces import refuse_reward_space

__all__ = ["Agreement", "agree", "assemble", "make_supervisor"]

_INFO_BYTES_PER_ENV = 4096
_MIN_INFO_BYTES = 65536
_MAX_TEXT_RING_BYTES = 1 << 24  # to which the length of texts enlarges a ring
_MAX_MESSAGE_RING_BYTES = 1 << 28  # larger messages go through the channel
_MIN_BLOCK_BYTES = 1 << 16  # of a batch's observations without texts; smaller ones have no blocks
_MAX_BLOCKS_BYTES = 1 << 26  # of all blocks
_MAX_BLOCKS = 4

Space = gym.Space[Any]


@dataclass
class Agreement:
    """The spaces and the memory layout that all envs share.

    Attributes:
        spaces: Observation space of one env, of the batch; action space of one env, of the batch.
        metadata: The first env's metadata.
        render_mode: The first env's render mode.
        layout: The layout of the slabs.
        leasing: Whether batches are returned as borrowed views.
    """

    spaces: tuple[Space, Space, Space, Space]
    metadata: dict[str, Any]
    render_mode: str | None
    layout: Layout
    leasing: bool


def make_supervisor(env_fns: Sequence[EnvFn], settings: Settings, name: str) -> Supervisor:
    """The supervisor of the workers that step the envs, before their start."""
    if settings.num_workers == 0:
        return Supervisor(None, [range(len(env_fns))], settings.hang_warning_s, env_fns)
    ranges = split_evenly(len(env_fns), settings.num_workers, settings.pin_workers)
    launcher = Launcher(env_fns, ranges, settings, name)
    own = [env_fns[env] for env in ranges[-1]] if settings.caller_steps else None
    return Supervisor(launcher, ranges, settings.hang_warning_s, own)


def agree(workers: Supervisor, settings: Settings, name: str) -> Agreement:
    """Waits for the workers' reports, and derives what all envs share.

    Args:
        workers: The workers, which were started.
        settings: The options.
        name: The name of the vector env's class, for messages.

    Raises:
        Exception: An env_fn has raised it; or the spaces are not compatible.
        TypeError: Rewards have more than one number, and may not.
    """
    reports = workers.collect_reports()
    raise_failures([report for report in reports if isinstance(report, Failure)])
    built = [report for report in reports if isinstance(report, Report)]
    spaces = _agree_on_spaces(name, workers.ranges, built, settings)
    layout = Layout(
        spaces[0],
        spaces[2],
        settings.num_envs,
        not settings.shared_memory or not has_fixed_size(spaces[0]),
        not settings.shared_memory or not has_fixed_size(spaces[2]),
        settings.autoreset.in_step,
        reward_space=_agree_on_reward_space(_spaces_by_env(workers.ranges, built, "reward_space")),
    )
    if not settings.vector_rewards:
        refuse_reward_space(layout.reward_space, name)
    leasing = settings.num_buffers > 0 and not (settings.copy or layout.observation_messages)
    # If faults are handled, an env whose results are lost returns its previous ones.
    num_frames = (settings.num_buffers if leasing else 1) + int(not settings.faults.raises)
    layout = replace(layout, num_frames=num_frames)
    if settings.copy:
        layout = replace(layout, num_blocks=_num_blocks(layout))
    return Agreement(spaces, dict(built[0].metadata), built[0].render_mode, layout, leasing)


def _spaces_by_env(ranges: Sequence[range], reports: Sequence[Report], which: str) -> list[Any]:
    """The space of this name of each env."""
    spaces: list[Any] = []
    for envs, report in zip(ranges, reports, strict=True):
        spaces += [getattr(report, which)] * len(envs)
        for env, name, space in report.differing_spaces:
            if name == which:
                spaces[env] = space
    return spaces


def _agree_on_reward_space(spaces: Sequence[gym.spaces.Box | None]) -> gym.spaces.Box | None:
    """The space of the rewards of each env, which may differ in their bounds."""
    first = spaces[0]
    for env, space in enumerate(spaces):
        if getattr(first, "shape", None) != getattr(space, "shape", None) or (
            getattr(first, "dtype", None) != getattr(space, "dtype", None)
        ):
            raise RuntimeError(
                "Some environments have a reward space of another shape or dtype than "
                f"`{first}`. In order to batch rewards, those of all environments must be alike. "
                f"The reward space of env {env} is {space}."
            )
    return first


def _num_blocks(layout: Layout) -> int:
    """The number of blocks: 0, or 2 and more, as one is written while one is used."""
    # Texts are copied also out of blocks, so they do not count.
    if layout.observation_messages or layout.arrays_nbytes < _MIN_BLOCK_BYTES:
        return 0
    affordable = min(_MAX_BLOCKS, _MAX_BLOCKS_BYTES // layout.block_nbytes)
    return affordable if affordable >= 2 else 0


def assemble(workers: Supervisor, settings: Settings, agreement: Agreement, guard: Guard) -> Ledger:
    """Makes the segment, has the workers attach, and makes the parent's side.

    Raises:
        OSError: There is not enough shared memory.
        WorkerCrashError: A worker has died.
    """
    autoreset = settings.autoreset
    try:
        sizes, descriptor, memory = _map_segment(workers, settings, agreement.layout)
    except OSError:
        if agreement.layout.num_blocks == 0:
            raise
        # If memory is short, the segment has no blocks.
        agreement.layout = replace(agreement.layout, num_blocks=0)
        sizes, descriptor, memory = _map_segment(workers, settings, agreement.layout)
    layout = agreement.layout
    mends = not settings.faults.raises
    try:
        segment = Segment.create(memory, *sizes)
        attachment = Attachment(
            layout,
            len(memory),
            autoreset,
            settings.limits,
            mends,
            compile_wrappers=settings.compile_wrappers and _has_wrappers(),
        )
        workers.attach(attachment, descriptor, segment)
    finally:
        os.close(descriptor)
    slabs = layout.attach(segment)
    links = Links(
        segment,
        workers,
        guard,
        partial(current_budgets, settings.wait_policy, len(workers.processes), workers.processes),
        limits=settings.limits,
        hang_after=settings.hang_warning_s,
    )
    frames = Frames(
        slabs.results, settings.copy, agreement.leasing, mends, slabs.blocks, settings.hold_batches
    )
    return Ledger(
        links,
        frames,
        slabs,
        autoreset,
        workers.pack,
        workers.unpack,
        settings.may_step_over,
        settings.in_ranges,
    )


def _has_wrappers() -> bool:
    """Whether the compiled wrappers are installed; the engine works without them."""
    return find_spec("shmvec._wrappers") is not None


def _map_segment(
    workers: Supervisor, settings: Settings, layout: Layout
) -> tuple[tuple[int, int, int, int, int, int], int, MappedMemory]:
    """Reserves a segment; returns its sizes, its descriptor and its mapping."""
    max_envs = max(len(envs) for envs in workers.ranges)
    info_bytes = max_envs * (_INFO_BYTES_PER_ENV + 2 * layout.observation_message_bytes)
    # If spaces have texts, infos probably have texts as long, of one or two bytes a character.
    with_texts = info_bytes + max_envs * 2 * layout.longest_text
    info_bytes = max(info_bytes, min(with_texts, _MAX_TEXT_RING_BYTES))
    action_bytes = max_envs * 2 * layout.action_message_bytes
    sizes = (
        len(workers.ranges),
        settings.num_envs,
        3 * max_envs + 2,  # each env's request, what was set for its resets, and traces
        min(max(info_bytes, _MIN_INFO_BYTES), _MAX_MESSAGE_RING_BYTES),
        min(action_bytes, _MAX_MESSAGE_RING_BYTES),
        layout.nbytes,
    )
    nbytes = segment_bytes(*sizes)
    descriptor = reserve_segment(nbytes)
    try:
        return sizes, descriptor, MappedMemory(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def _agree_on_spaces(
    name: str, ranges: Sequence[range], reports: Sequence[Report], settings: Settings
) -> tuple[Space, Space, Space, Space]:
    """The spaces of an agreement; raises if those of the envs differ."""
    first, mode = reports[0], settings.observation_mode
    observation_spaces = _spaces_by_env(ranges, reports, "observation_space")
    action_spaces = _spaces_by_env(ranges, reports, "action_space")
    num_envs = len(observation_spaces)
    if isinstance(mode, tuple):
        batched, single = mode
    else:
        single = first.observation_space
        batched = (
            batch_space(single, num_envs)
            if mode == "same"
            else batch_differing_spaces(observation_spaces)
        )
    if settings.shared_memory:
        check_shared_memory(single)
    for env, space in enumerate(observation_spaces):
        where = f"The observation space of env {env} is {space}, not {single}."
        if mode == "same" and space != single:
            raise RuntimeError(
                f"{name}(..., observation_mode='same') however some of the sub-environments "
                "observation spaces are not equivalent. If this is intentional, use "
                f"`observation_mode='different'` instead. {where}"
            )
        if mode != "same" and not is_space_dtype_shape_equiv(single, space):
            raise RuntimeError(
                f"{name}(..., observation_mode='different' or custom space) however the "
                "sub-environment's observation spaces do not share a common shape and dtype. "
                f"{where}"
            )
    for env, space in enumerate(action_spaces):
        if space != first.action_space:
            raise RuntimeError(
                "Some environments have an action space different from "
                f"`{first.action_space}`. In order to batch actions, the action spaces "
                "from all environments must be equal. "
                f"The action space of env {env} is {space}."
            )
    return single, batched, first.action_space, batch_space(first.action_space, num_envs)
