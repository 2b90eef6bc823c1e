from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium as gym

from shmvec._core.results import Results
from shmvec._core.segment import Segment
from shmvec._core.trace import Recorder
from shmvec._memory.layout import Slabs

# Seeds, options and mask (which envs to reset), one item an env.
ResetArguments = tuple[Sequence[int | None] | None, Sequence[Any] | None, Sequence[bool] | None]

AUTORESET: dict[str, int]  # values of gymnasium.vector.AutoresetMode and their numbers here

class Host(Protocol):
    """What the loop leaves to Python: the rare things."""

    def command(self, sequence: int) -> tuple[ResetArguments | None, Any]:
        """Takes a command from its channel: (arguments of a reset or None, results)."""
    def trace(self, sequence: int) -> None:
        """Takes from its channel memory to record into."""
    def misfit(self, env: int, observation: Any, error: Exception) -> Exception:
        """What to raise for an observation that could not be put where it belongs."""
    def late_actions(self, sequence: int) -> list[tuple[int, Any]]:
        """Takes from its channel the actions (env, action) that did not fit the ring."""
    def send_late(
        self,
        sequence: int,
        messages: list[tuple[int, int, dict[str, Any]]],
        failures: list[tuple[int, str, BaseException]],
        results: Any,
    ) -> None:
        """Sends the parent what does not fit the rings; messages are (kind, env, message)."""

FAULT_POINTS: range

def die_at(point: int) -> None:
    """Has this process killed when it next comes to a point of the protocol: see csrc/fault.h."""

def watch_forks() -> None:
    """From now on a fork of this process that comes back from an env ends: it is no worker."""

def end_forks() -> None:
    """Ends a process that an env has forked and that comes back from the env."""

class WorkerLoop:
    """Serves the envs ``first_env`` and up from a worker's request ring."""

    def __init__(
        self,
        segment: Segment,
        index: int,
        first_env: int,
        envs: Sequence[gym.Env[Any, Any]],
        host: Host,
        slabs: Slabs,
        autoreset: str,
        timed: bool = False,
        mends: bool = False,
        resets: Sequence[tuple[int | None, Any] | None] | None = None,
    ) -> None:
        """Takes over the envs.

        Args:
            segment: Where requests come from and results go.
            index: The worker's index.
            first_env: Index of its first env.
            envs: The envs.
            host: For what is rare.
            slabs: The arrays of the segment.
            autoreset: Value of the ``AutoresetMode``.
            timed: Whether there are time limits.
            mends: Whether an env that has raised is reset, and not given up.
            resets: Of a worker that takes another one's place: seed and options for each env's
                next reset that has none.
        """
    def busy(self) -> tuple[int, str, float] | None:
        """What an env is in: (env, "step", "reset" or "call", seconds); None: nothing."""
    def begin_call(self, env: int) -> None:
        """Notes that a method of an env is called now, or an attribute got or set."""
    def end_call(self, env: int) -> None:
        """Notes that it has ended."""
    def take_rollouts(self, rollouts: Results) -> None:
        """Takes frames that follow those in the segment, in place of any before."""
    def record(self, recorder: Recorder | None) -> None:
        """Has what is done from now on be recorded; None: not any more."""
    def serve(self, parent_alive: Callable[[], bool], doze: Callable[[], object] | None) -> bool:
        """Serves until told to close (True) or until the parent is gone (False).

        Args:
            parent_alive: Asked between slices of sleep.
            doze: Sleeps until the parent sends something or is gone; called after half a second
                without a request. None: go on sleeping in slices.
        """
    def serve_pending(self) -> bool:
        """Serves what was requested so far; False after a request to close."""
