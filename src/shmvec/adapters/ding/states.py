"""What an env manager knows of each env: its state, and what it was asked; and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from gymnasium.error import ClosedEnvironmentError

__all__ = ["BaseEnvTimestep", "EnvState", "EnvStateError", "ManagerClosedError", "Slot"]


class EnvState(IntEnum):
    """What an env is doing. docs/coming-from/di-engine.md has a table of all transitions."""

    VOID = 0  # there is none: the manager is closed
    INIT = 1  # it is built
    RUN = 2  # it can be stepped
    RESET = 3  # it is being reset, or will be tried again
    DONE = 4  # it has played its episodes
    ERROR = 5  # it has failed: reset it
    NEED_RESET = 6  # its episode is over, and auto_reset is off: reset it


class BaseEnvTimestep(NamedTuple):
    """What a step of one env returns.

    Attributes:
        obs: Its observation.
        reward: float64; an array where the env returns one.
        done: Whether its episode is over, terminated or truncated.
        info: As the env returned it. If done, with "TimeLimit.truncated": whether it was truncated
            and not terminated.
    """

    obs: Any
    reward: Any
    done: bool
    info: dict[str, Any]


class EnvStateError(RuntimeError, AssertionError):
    """An env cannot do in its state what it was asked; DI-engine's managers assert it."""


class ManagerClosedError(ClosedEnvironmentError, AssertionError):
    """The env manager is not launched; DI-engine's managers assert it."""


@dataclass
class Slot:
    """An env's place in the manager.

    Attributes:
        state: Its state.
        episodes: How many it has played.
        observation: The next one to act on.
        reset_info: The info of its last reset.
        param: Keyword arguments of its resets.
        asked_at: When it was asked last, by the monotonic clock.
        asked_generation: How often its worker had been restarted by then.
        turn: When its last answer came, by the number of answers before it.
        in_flight: Whether a step's result has not been returned yet.
        attempts: How often its reset has failed in a row.
        reset_at: In RESET: when it is to be asked, by the monotonic clock; None: it was.
        late: The error, if the parent waits for its reset no longer.
        seed: The last one that ``seed`` gave it.
        seed_used: Whether a reset has used it.
        dynamic_seed: What ``seed`` said with it.
        generation: How often its worker had been restarted at its last reset with orders.
        with_orders: Whether the reset that was asked last has some, the seed among them.
        replay_path: Where it saves replays.
    """

    state: EnvState = EnvState.VOID
    episodes: int = 0
    observation: Any = None
    reset_info: dict[str, Any] = field(default_factory=dict)
    param: dict[str, Any] | None = None
    asked_at: float = 0.0
    asked_generation: int = 0
    turn: int = 0
    in_flight: bool = False
    attempts: int = 0
    reset_at: float | None = None
    late: BaseException | None = None
    seed: int | None = None
    seed_used: bool = True
    dynamic_seed: bool | None = None
    generation: int = 0
    with_orders: bool = False
    replay_path: str | None = None

    @property
    def ready(self) -> bool:
        """Whether it can be stepped."""
        return self.state is EnvState.RUN and not self.in_flight

    def launched(self) -> None:
        """Begins anew, but for a seed that was not used."""
        kept = ("seed", "seed_used", "dynamic_seed", "replay_path")
        fresh = Slot(EnvState.INIT, **{name: getattr(self, name) for name in kept})
        if self.seed_used:
            fresh.seed = None
        self.__dict__.update(fresh.__dict__)
