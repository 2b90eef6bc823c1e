from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmvec._core.frames import Frames
from shmvec._core.lease import Lease
from shmvec._core.links import Links
from shmvec._core.told import Told
from shmvec._memory.layout import Slabs
from shmvec.faults import Failure, Fault

Envs = npt.NDArray[np.intp]

class Ledger:
    """What was asked of each env, and what has come back."""

    links: Links
    frames: Frames
    num_ready: int
    num_asked: int
    num_out: int
    owing: Sequence[int]
    unanswered: list[int]
    failures: list[Failure]
    raised: list[Failure]
    results: dict[int, Any]
    told: dict[int, Told]
    lockstep: bool

    def __init__(
        self,
        links: Links,
        frames: Frames,
        slabs: Slabs,
        mode: str,
        may_step_over: bool = True,
        in_ranges: bool = False,
    ) -> None:
        """Takes what requests go through and results lie in.

        Args:
            links: To the workers.
            frames: Of results.
            slabs: The arrays of the segment.
            mode: Value of the ``AutoresetMode``.
            may_step_over: Whether an env may be stepped whose episode is over.
            in_ranges: Whether neighbours are asked together.
        """

    def is_out(self, env: int) -> bool:
        """Whether it was asked and not taken."""
    def has_failed(self, env: int) -> bool:
        """Whether it has raised, and nothing is decided about that."""
    def is_over(self, env: int) -> bool:
        """Whether its last results ended an episode."""
    def is_broken(self, env: int) -> bool:
        """Whether its next step is answered by a truncation."""
    def num_missing(self, envs: Envs) -> int:
        """How many requests to these, at least, are not answered."""
    def check(self, envs: Envs) -> None:
        """Raises ValueError unless each of these is an env, once, and may be asked something."""
    def step_all(self, actions: Any, pack: Callable[[Any], Any], rollout_frame: int = -1) -> None:
        """Writes actions and asks every env to step."""
    def step(
        self,
        envs: Envs,
        actions: Any,
        pack: Callable[[Any], Any],
        rollout_frame: int | None = None,
        together: bool = False,
    ) -> None:
        """Writes actions and asks each of these envs to step."""
    def reset(self, envs: Envs) -> None:
        """Asks each of these envs to reset, without seed or options."""
    def command(
        self, envs: Envs, packed: dict[int, Any], resets: bool, descriptors: Sequence[int] = ()
    ) -> None:
        """Asks the workers of these envs to carry out a command."""
    def close(self) -> None:
        """Asks all workers to close their envs and end.

        Raises:
            RuntimeError: A request ring is full.
        """
    def wait_all(self, timeout: float | None) -> bool:
        """Waits until all requests are answered; False: the time is up first."""
    def wait(self, wanted: int, timeout: float | None, requests: bool = False) -> bool:
        """Waits until so many more may have answered; False: the time is up first."""
    def wait_regular(self, wanted: int, envs: Envs | None = None) -> bool:
        """Waits until so many, or these, are ready; False if anything else happens before."""
    def look_around(self) -> None:
        """Looks after signals, channels, workers and limits."""
    def look_if_due(self) -> None:
        """The same, if that was a slice ago."""
    def take_regular(
        self, vector_env: Any, arrays: bool = True, commit: bool = True
    ) -> tuple[Any, ...] | None:
        """Four arrays and infos of all; None if something is not as usual."""
    def take_soonest(
        self, count: int, vector_env: Any, envs: Envs | None = None, arrays: bool = True
    ) -> tuple[Any, ...] | None:
        """Envs, four arrays and infos, not committed; None if something is not as usual."""
    def pop(self) -> None:
        """Takes the answers that are there."""
    def owed_by(self, worker: int) -> int:
        """The number of the request whose message must come next from a worker."""
    def deliver(
        self,
        worker: int,
        messages: list[tuple[int, int, Any]],
        failures: list[Failure],
        results: list[Any] | None,
    ) -> None:
        """Takes the message that must come next."""
    def lose(self, worker: int) -> None:
        """Notes that a worker is dead; what it has answered in whole holds."""
    def retire(self, worker: int) -> None:
        """Notes that a worker is dead and gets no successor: nobody waits for its envs."""
    def lost_resets(self, worker: int) -> list[int]:
        """Envs of a dead worker that are lost in a reset of the user's."""
    def revive(self, worker: int, fault: Fault) -> None:
        """Notes that a worker has a successor: asks or answers again what was lost."""
    def mend(self, failure: Failure, fault: Fault) -> None:
        """Answers for an env that has raised."""
    def give_up(self, failure: Failure) -> None:
        """Leaves it to the caller what an env has raised."""
    def forget(self) -> None:
        """Drops all answers, none of which is still to come."""
    def oldest(self, count: int) -> Envs:
        """The envs that have been ready for longest, at most so many."""
    def those_ready(self, envs: Envs) -> Envs:
        """Those of these envs that are ready."""
    def ready(self) -> Envs:
        """All envs that are ready, by index."""
    def gather(
        self,
        envs: Envs,
        vector_env: Any,
        everyone: bool,
        arrays: bool,
        among: Collection[int] | None,
    ) -> tuple[Envs, tuple[Any, ...], Lease | None, dict[int, Told], list[Failure]]:
        """Envs that are ready: they, four arrays and infos, the lease, what is told, failures."""
    def commit(self, envs: Envs, failures: Collection[Failure] = ()) -> None:
        """Takes the envs that were gathered: they may be asked again."""
