from collections.abc import Sequence

def round_trip(core: int, other: int, sleeping: bool, seconds: float) -> float | None:
    """Hands a cache line from core to core and back, for so long.

    Args:
        core: A core that this process may use.
        other: Another one; or the same, of players that sleep.
        sleeping: Each player sleeps until the other wakes it; otherwise it spins.
        seconds: How long.

    Returns:
        Seconds there and back; None: the players could not be started there.
    """

def rates(cores: Sequence[int], seconds: float) -> list[float]:
    """What a process on each of these cores gets done when all compute at once.

    Returns:
        For each core its rate, in a unit that is the same for all; 0 where none could be started.
    """

def yield_cost(seconds: float) -> float:
    """Seconds of a ``sched_yield``, measured for so long."""

def clock_cost(seconds: float) -> float:
    """Seconds of a reading of the clock, measured for so long."""
