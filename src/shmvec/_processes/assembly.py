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
from shmvec._processes.inline import InlineWorker, Workers, WorkersAndCaller
from shmvec._processes.launcher import Launcher
from shmvec._processes.supervisor import Supervisor
from shmvec.faults import Failure, raise_failures

__all__ = ["Agreement", "Assembly", "agree", "agreed_spaces", "assemble", "workers_for"]


_INFO_BYTES_PER_ENV = 4096
_INFO_BYTES_LEAST = 65536
_TEXT_RING_MOST = 1 << 24  # to which the length of texts enlarges a ring
_MESSAGE_RING_MOST = 1 << 28  # larger messages go through the channel
# The bytes of a batch's observations, less texts, from which on there are blocks; limits to blocks.
_BLOCK_BYTES_LEAST = 1 << 16
_BLOCKS_BYTES_MOST = 1 << 26
_BLOCKS_MOST = 4


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

    spaces: tuple[gym.Space[Any], gym.Space[Any], gym.Space[Any], gym.Space[Any]]
    metadata: dict[str, Any]
    render_mode: str | None
    layout: Layout
    leasing: bool


@dataclass
class Assembly:
    """The objects through which an exchange reaches its workers."""

    links: Links
    frames: Frames
    ledger: Ledger


def workers_for(env_fns: Sequence[EnvFn], settings: Settings, name: str) -> Workers:
    """The workers that step the envs: processes, not started yet, or this process."""
    if settings.num_workers == 0:
        return InlineWorker(env_fns)
    ranges = split_evenly(len(env_fns), settings.num_workers, settings.pin_workers)
    launcher = Launcher(env_fns, ranges, settings, name)
    if settings.caller_steps:
        own = [env_fns[env] for env in ranges[-1]]
        return WorkersAndCaller(launcher, ranges, settings.hang_warning_s, own)
    return Supervisor(launcher, ranges, settings.hang_warning_s)


def agree(workers: Workers, settings: Settings, name: str, num_buffers: int) -> Agreement:
    """Waits for the workers' reports, and derives from them what holds for all.

    Raises:
        Exception: An env_fn has raised it; or the spaces do not fit together.
    """
    reports = workers.reports()
    raise_failures([report for report in reports if isinstance(report, Failure)])
    built = [report for report in reports if isinstance(report, Report)]
    shared = settings.shared_memory
    spaces = agreed_spaces(name, workers.ranges, built, settings.observation_mode, shared)
    layout = Layout(
        spaces[0],
        spaces[2],
        settings.num_envs,
        not shared or not has_fixed_size(spaces[0]),
        not shared or not has_fixed_size(spaces[2]),
        settings.autoreset.in_step,
    )
    leasing = num_buffers > 0 and not (settings.copy or layout.observation_messages)
    # Where faults are handled, an env whose results are lost returns its previous ones.
    num_frames = (num_buffers if leasing else 1) + int(not settings.faults.raises)
    layout = replace(layout, num_frames=num_frames)
    # Texts are copied wherever they lie.
    if (
        settings.copy
        and not layout.observation_messages
        and layout.arrays_nbytes >= _BLOCK_BYTES_LEAST
    ):
        layout = replace(layout, num_blocks=_num_blocks(layout.block_nbytes))
    return Agreement(spaces, dict(built[0].metadata), built[0].render_mode, layout, leasing)


def _num_blocks(nbytes: int) -> int:
    """The number of blocks of ``nbytes``: none, or several: one is written while one is used."""
    affordable = min(_BLOCKS_MOST, _BLOCKS_BYTES_MOST // nbytes)
    return affordable if affordable >= 2 else 0


def assemble(
    workers: Workers,
    settings: Settings,
    agreement: Agreement,
    guard: Guard,
    may_step_over: bool,
    in_ranges: bool,
    hold_batches: int | None,
) -> Assembly:
    """Makes the segment, has the workers attach, and makes the parent's side.

    Raises:
        OSError: There is not enough shared memory.
        WorkerCrashError: A worker has died.
    """
    autoreset = settings.autoreset
    try:
        sizes, descriptor, memory = _reserve(workers, settings, agreement.layout)
    except OSError:
        if agreement.layout.num_blocks == 0:
            raise
        # Without room, the segment does without blocks, which are optional.
        agreement.layout = replace(agreement.layout, num_blocks=0)
        sizes, descriptor, memory = _reserve(workers, settings, agreement.layout)
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
        slabs.results, settings.copy, agreement.leasing, mends, slabs.blocks, hold_batches
    )
    ledger = Ledger(
        links, frames, slabs, autoreset, workers.pack, workers.unpack, may_step_over, in_ranges
    )
    return Assembly(links, frames, ledger)


def _has_wrappers() -> bool:
    """Whether the compiled wrappers are installed, of which the engine knows no more."""
    return find_spec("shmvec._wrappers") is not None


def _reserve(
    workers: Workers, settings: Settings, layout: Layout
) -> tuple[tuple[int, int, int, int, int, int], int, MappedMemory]:
    """Reserves a segment; returns its sizes, its descriptor and its mapping."""
    most_envs = max(len(envs) for envs in workers.ranges)
    info_bytes = most_envs * (_INFO_BYTES_PER_ENV + 2 * layout.observation_message_bytes)
    # Where spaces have texts infos have, too: as long, and of two bytes a character or one, mostly.
    with_texts = info_bytes + most_envs * 2 * layout.longest_text
    info_bytes = max(info_bytes, min(with_texts, _TEXT_RING_MOST))
    action_bytes = most_envs * 2 * layout.action_message_bytes
    sizes = (
        len(workers.ranges),
        settings.num_envs,
        2 * most_envs + 2,
        min(max(info_bytes, _INFO_BYTES_LEAST), _MESSAGE_RING_MOST),
        min(action_bytes, _MESSAGE_RING_MOST),
        layout.nbytes,
    )
    nbytes = segment_bytes(*sizes)
    descriptor = reserve_segment(nbytes)
    try:
        return sizes, descriptor, MappedMemory(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


Space = gym.Space[Any]


def agreed_spaces(
    name: str,
    ranges: Sequence[range],
    reports: Sequence[Report],
    mode: str | tuple[Space, Space],
    shared_memory: bool,
) -> tuple[Space, Space, Space, Space]:
    """The spaces of observations and actions, of one env and of the batch.

    Args:
        name: The name of the vector env's class, for messages.
        ranges: The envs of each worker.
        reports: Each worker's report of its envs.
        mode: The ``observation_mode``.
        shared_memory: Whether observations are to lie in shared memory.

    Returns:
        Observation space of one env, of the batch; action space of one env, of the batch.

    Raises:
        RuntimeError: Spaces of the envs differ.
        ValueError: The observation space cannot lie in shared memory.
    """
    first = reports[0]
    observation_spaces: list[Any] = []
    action_spaces: list[Any] = []
    for envs, report in zip(ranges, reports, strict=True):
        observation_spaces += [report.observation_space] * len(envs)
        action_spaces += [report.action_space] * len(envs)
        for env, which, space in report.unequal:
            (observation_spaces if which == "observation_space" else action_spaces)[env] = space

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
    if shared_memory:
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
