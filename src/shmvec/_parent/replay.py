"""``replay_order``: batches of envs that are taken again in the order of an earlier run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from shmvec.exchange import Exchange


class Replay:
    """A recorded order, and how far it has been followed.

    Attributes:
        batches: How many batches have been taken: add one for each, once it is there.
    """

    def __init__(self, order: Iterable[npt.ArrayLike]) -> None:
        """Takes what ``record_order`` noted: the envs of each batch."""
        self.batches = 0
        self._order = iter(order)
        self._batch: tuple[int, npt.NDArray[np.intp]] | None = None

    def batch(self, exchange: Exchange) -> npt.NDArray[np.intp]:
        """The envs of the next batch; the same ones again, until it was taken.

        Raises:
            ValueError: There is no other; or not all of them have been asked anything: the next
                call goes on with those after them.
        """
        if self._batch is None or self._batch[0] != self.batches:
            try:
                envs = np.ascontiguousarray(next(self._order), np.intp)
            except StopIteration:
                raise ValueError(f"replay_order is over: it holds {self.batches} batches") from None
            self._batch = self.batches, envs
        envs = self._batch[1]
        if not all(exchange.is_out(env) for env in envs.tolist()):
            self.batches += 1
            raise ValueError(
                f"replay_order does not fit: batch {self.batches - 1} is envs {envs.tolist()}, "
                f"of which not all have been asked anything: {exchange.num_asked} have been"
            )
        return envs
