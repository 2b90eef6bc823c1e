"""Says where workers hang: once, in the log, while whoever waits for them goes on waiting."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

__all__ = ["Busy", "Hangs", "Watch"]

log = logging.getLogger("shmvec")

_MOST_TOLD = 4  # of workers that hang together; the others are named

# A worker, (its env, "step", "reset" or "call") or None: it is in none of them, and seconds.
Busy = tuple[int, tuple[int, str] | None, float]
# Says where a worker is, on lines that follow a message.
Where = Callable[[int], str]


class Hangs:
    """Those of the workers of one vector env."""

    def __init__(self, after_s: float | None, ranges: Sequence[range]) -> None:
        """Prepares to tell of them.

        Args:
            after_s: Seconds after which something hangs; None: nothing does.
            ranges: The envs of each worker.
        """
        self.after_s = after_s
        self._ranges = ranges

    def tell(self, hanging: Sequence[Busy], doing: str, where: Where) -> None:
        """Says where workers are that take too long for what they were asked, by this command."""
        whats = []
        for worker, at, seconds in hanging:
            if at is None:
                what = f"{self.named(worker)} has not answered to {doing!r}"
            else:
                env, operation = at
                what = f"env {env} of worker {worker} has been in {operation}()"
            whats.append((worker, what, seconds))
        self.say(whats, where)

    def named(self, worker: int) -> str:
        """A worker, in words."""
        envs = self._ranges[worker]
        which = f"env {envs[0]}" if len(envs) == 1 else f"envs {envs[0]} to {envs[-1]}"
        return f"worker {worker} ({which})"

    def say(self, hanging: Sequence[tuple[int, str, float]], where: Where) -> None:
        """Says of workers what they do, for how many seconds, and where."""
        told = [
            f"{what} for {seconds:.3g} s.{where(worker)}\n"
            for worker, what, seconds in hanging[:_MOST_TOLD]
        ]
        others = ", ".join(str(worker) for worker, *_ in hanging[_MOST_TOLD:])
        if others:
            told.append(f"Workers {others} as well: python -m shmvec stacks PID says where.\n")
        log.warning(
            "%sThe wait goes on. hang_warning_s=%g says when to tell of it; 0: never.",
            "".join(told),
            self.after_s,
        )


class Watch:
    """A wait for workers that begin or end, in which one looks now and then."""

    def __init__(self, hangs: Hangs, doing: str) -> None:
        """It begins now; ``doing`` says what workers have been doing."""
        self._hangs = hangs
        self._doing = doing
        self._after_s = hangs.after_s
        self._began = time.monotonic()

    def look(self, waiting: Iterable[int], where: Where) -> None:
        """Says once which workers are waited for, and where they are, if it takes too long."""
        seconds = time.monotonic() - self._began
        if self._after_s is not None and seconds > self._after_s:
            self._after_s = None
            named = self._hangs.named
            whats = [(each, f"{named(each)} {self._doing}", seconds) for each in waiting]
            self._hangs.say(whats, where)
