"""Says how far an evaluation is: to a function of the caller's, or as a bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shmvec._hints import takes
from shmvec.evaluation.episodes import Episode

__all__ = ["reporter"]


def reporter(
    progress: Any, count: int, done: int = 0
) -> tuple[Callable[[Episode], object], Callable[[], object]]:
    """The function to call with each episode that is over, and the one to call at the end.

    Args:
        progress: As for ``evaluate``.
        count: Number of episodes.
        done: How many of them are over.
    """
    if callable(progress):
        if not takes(progress, None, None):
            return progress, _nothing
        begin, left = time.monotonic(), count - done

        def told(episode: Episode) -> None:
            nonlocal left
            left -= 1
            progress(episode, (time.monotonic() - begin) * left / (count - done - left))

        return told, _nothing
    if progress:
        with suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=count, initial=done, unit="episode")
            return lambda episode: bar.update(), bar.close
    return _nothing, _nothing


def _nothing(*_: Any) -> None:
    pass
