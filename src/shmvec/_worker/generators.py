"""The global random generators, of ``random``, ``np.random`` and torch: each worker has its own.

Forked workers would all draw the same numbers from the two latter, and spawned ones others in each
run. Envs should draw from ``self.np_random``; but not all do.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["seed_generators", "state_of_generators", "worker_seeds"]


def state_of_generators() -> int:
    """A number made of the states that they have in this process. Nothing is drawn from them."""
    states = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)), protocol=4)
    digest = hashlib.sha256(states)
    generator = _of_torch()
    if generator is not None:
        digest.update(generator.get_state().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def worker_seeds(state: int, first_env: int, starts: int) -> npt.NDArray[np.uint32]:
    """Seeds for a worker's generators, uint32 ``(8,)``.

    Args:
        state: That of the parent's.
        first_env: Index of the worker's first env.
        starts: How often it was started before.
    """
    return np.random.SeedSequence([state, first_env, starts]).generate_state(8).astype(np.uint32)


def seed_generators(seeds: npt.NDArray[np.uint32]) -> None:
    """Seeds those of this process, a worker."""
    random.seed(seeds.tobytes())
    with suppress(TypeError):  # the program has put a generator there that takes no seeds
        np.random.seed(seeds)
    generator = _of_torch()
    if generator is not None:
        generator.manual_seed(int(seeds[0]))


def _of_torch() -> Any:
    """The generator of torch; None if that is not loaded, or something else in its place."""
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    kind = getattr(torch, "Generator", None)
    return generator if isinstance(kind, type) and isinstance(generator, kind) else None
