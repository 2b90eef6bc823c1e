"""Starts worker processes, by one of multiprocessing's start methods."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.context import BaseContext
from socket import socketpair
from typing import Any

import cloudpickle
from gymnasium.vector.utils import clear_mpi_env_vars

from shmvec._core.channel import Channel
from shmvec._shared.threads import thread_variables
from shmvec._worker.generators import state_of_generators
from shmvec._worker.host import EnvFn
from shmvec._worker.process import run_worker

__all__ = ["Launcher"]


class Launcher:
    """What it takes to start the worker processes of one vector env, also once more."""

    def __init__(
        self,
        env_fns: Sequence[EnvFn],
        ranges: Sequence[range],
        context: BaseContext,
        daemon: bool,
        name: str,
        threads: int,
        pinned: bool,
    ) -> None:
        """Prepares to start a process for each range of envs.

        Args:
            env_fns: One for each env.
            ranges: The envs of each worker.
            context: How processes are started.
            daemon: Whether they are daemonic.
            name: Part of the processes' names.
            threads: Threads that libraries may start in each process; 0: as many as they like.
            pinned: Whether each process stays on one core.

        Raises:
            TypeError: An env_fn cannot be pickled (spawn and forkserver).
            RuntimeError: This process is daemonic, and may start none.
        """
        if multiprocessing.current_process().daemon:
            raise RuntimeError(
                "This process is daemonic (a worker of multiprocessing.Pool or of another vector "
                "env, for example), and such a process may not start others. num_workers=0 steps "
                "the envs in this process; or make this process one that is not daemonic: "
                "daemon=False of the outer vector env, concurrent.futures.ProcessPoolExecutor in "
                "place of a Pool."
            )
        self._ranges = ranges
        self._context = context
        self._daemon = daemon
        self._name = name
        self._threads = threads
        self._pinned = pinned
        self._state = state_of_generators()
        self._starts = [0] * len(ranges)
        loads = [list(env_fns[envs.start : envs.stop]) for envs in ranges]
        self._loads: list[Any] = (
            loads
            if context.get_start_method() == "fork"
            else [_pickled(fns, envs) for fns, envs in zip(loads, ranges, strict=True)]
        )

    def start(self, index: int) -> tuple[Any, Channel]:
        """Starts the process of a worker; returns it and the parent's end of its channel."""
        mine, theirs = socketpair()
        channel = Channel(mine.detach())
        try:
            process = self._context.Process(  # type: ignore[attr-defined]
                target=run_worker,
                name=f"Worker<{self._name}>-{index}",
                args=(
                    index,
                    self._ranges[index].start,
                    self._loads[index],
                    theirs,
                    os.getpid(),
                    self._threads,
                    self._pinned,
                    (self._state, self._ranges[index].start, self._starts[index]),
                ),
                daemon=self._daemon,
            )
            with clear_mpi_env_vars(), thread_variables(self._threads):
                process.start()
            self._starts[index] += 1
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
        return process, channel


def _pickled(env_fns: Sequence[EnvFn], envs: range) -> bytes:
    try:
        return bytes(cloudpickle.dumps(env_fns))
    except Exception as error:
        for index, env_fn in zip(envs, env_fns, strict=True):
            try:
                cloudpickle.dumps(env_fn)
            except Exception as cause:
                raise TypeError(
                    f"env_fns[{index}] cannot be pickled to send it to a worker: {cause}. Make "
                    "the env inside the function instead of capturing it, or use "
                    "context='fork'."
                ) from cause
        raise TypeError(f"env_fns cannot be pickled to send them to a worker: {error}") from error
