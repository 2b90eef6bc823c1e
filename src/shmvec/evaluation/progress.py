"""Reports the progress of an evaluation: to a function of the caller's, or as a bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shmvec._hints import can_be_called
from shmvec.evaluation.episodes import Episode

__all__ = ["reporter"]


def reporter(
    progress: Any, count: int, done: int = 0
) -> tuple[Callable[[Episode], object], Callable[[], object]]:
    """A function to call with each episode that is over, and one to call at the end.

    Args:
        progress: As for ``evaluate``. A function of four arguments gets the episode, the number of
            episodes that are over, the number of all, and an estimate of the seconds left.
        count: Number of episodes.
        done: Number of episodes that are over.
    """
    if callable(progress):
        if not can_be_called(progress, None, None, None, None):
            return progress, _do_nothing
        begin, num_new = time.monotonic(), 0

        def report(episode: Episode) -> None:
            nonlocal num_new
            num_new += 1
            left = count - done - num_new
            progress(episode, done + num_new, count, (time.monotonic() - begin) * left / num_new)

        return report, _do_nothing
    if progress:
        with suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=count, initial=done, unit="episode")
            return lambda episode: bar.update(), bar.close
    return _do_nothing, _do_nothing


def _do_nothing(*_: Any) -> None:
    pass
