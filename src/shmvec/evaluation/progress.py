"""Says how far an evaluation is: to a function of the caller's, or as a bar."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shmvec._hints import takes
from shmvec.evaluation.episodes import Episode

__all__ = ["reporter"]

_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<"  # tqdm's own, up to the time that is left


def reporter(
    progress: Any, count: int, done: int = 0, left: Callable[[], float] | None = None
) -> tuple[Callable[[Episode], object], Callable[[], object]]:
    """The function to call with each episode that is over, and the one to call at the end.

    Args:
        progress: As for ``evaluate``.
        count: Number of episodes.
        done: How many of them are over.
        left: Estimates how many seconds the others take; None: the bar does.
    """
    if callable(progress):
        if left is not None and takes(progress, None, None):
            return lambda episode: progress(episode, left()), _nothing
        return progress, _nothing
    if progress:
        with suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=count, initial=done, unit="episode")

            def show(episode: Episode) -> None:
                seconds = float("nan") if left is None else left()
                if not math.isnan(seconds):  # the bar's own would be a second one
                    rest = tqdm.format_interval(seconds)
                    bar.bar_format = f"{_BAR}{rest}, {{rate_fmt}}]"
                bar.update()

            return show, bar.close
    return _nothing, _nothing


def _nothing(*_: Any) -> None:
    pass
