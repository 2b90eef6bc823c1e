"""Reports the progress of an evaluation: to a function of the caller's, or as a bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from shmvec._hints import can_be_called
from shmvec.evaluation.episodes import Episode

__all__ = ["reporting"]


@contextmanager
def reporting(progress: Any, count: int, done: int = 0) -> Iterator[Callable[[Episode], object]]:
    """A function to call with each episode that is over, in a ``with`` block.

    Args:
        progress: As for ``evaluate``.
        count: Number of episodes.
        done: Number of episodes that are over.
    """
    if callable(progress):
        if not can_be_called(progress, None, None, None, None):
            yield progress
            return
        begin, num_new = time.monotonic(), 0

        def report(episode: Episode) -> None:
            nonlocal num_new
            num_new += 1
            left = count - done - num_new
            progress(episode, done + num_new, count, (time.monotonic() - begin) * left / num_new)

        yield report
        return
    bar = None
    if progress:
        with suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=count, initial=done, unit="episode")
    if bar is None:
        yield lambda episode: None
    else:
        with closing(bar):
            yield lambda episode: bar.update()
