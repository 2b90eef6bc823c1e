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

import numpy as np

__all__ = ["seed_generators", "state_of_generators"]


def state_of_generators() -> int:
    """A number made of the states that they have in this process. Nothing is drawn from them."""
    states = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)), protocol=4)
    digest = hashlib.sha256(states)
    if "torch" in sys.modules:
        digest.update(sys.modules["torch"].get_rng_state().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def seed_generators(state: int, first_env: int, starts: int) -> None:
    """Seeds those of this process, a worker.

    Args:
        state: That of the parent's.
        first_env: Index of the worker's first env.
        starts: How often it was started before.
    """
    seeds = np.random.SeedSequence([state, first_env, starts]).generate_state(8)
    random.seed(seeds.tobytes())
    with suppress(TypeError):  # the program has put a generator there that takes no seeds
        np.random.seed(seeds)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(int(seeds[0]))
