"""The global random generators of workers, which draw numbers of their own."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["free_generator_locks", "seed_generators", "generators_state", "worker_seeds"]

_DRAW_TIMEOUT_S = 5.0  # for a thread to draw a number on a busy machine


def generators_state() -> int:
    """A number derived from the states of this process's generators, without drawing from them."""
    states = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)), protocol=4)
    digest = hashlib.sha256(states)
    generator = _torch_generator()
    if generator is not None:
        digest.update(generator.get_state().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def worker_seeds(state: int, first_env: int, num_starts: int) -> npt.NDArray[np.uint32]:
    """Seeds for a worker's generators, uint32 ``(8,)``.

    Args:
        state: The parent's ``generators_state``.
        first_env: Index of the worker's first env.
        num_starts: How often the worker was started before.
    """
    return (
        np.random.SeedSequence([state, first_env, num_starts]).generate_state(8).astype(np.uint32)
    )


def seed_generators(seeds: npt.NDArray[np.uint32]) -> None:
    """Seeds the global generators of this process, a worker."""
    random.seed(seeds.tobytes())
    with suppress(TypeError):  # the program may have set a generator that takes no seeds
        np.random.seed(seeds)
    generator = _torch_generator()
    if generator is not None:
        generator.manual_seed(int(seeds[0]))


def free_generator_locks() -> None:
    """Frees the locks of the global generators in a fork; threads may have held them at the fork.

    Raises:
        RuntimeError: A thread held the lock of torch's generator, which cannot be freed.
    """
    with suppress(AttributeError):  # the program may have set a generator of another kind
        lock: Any = np.random.mtrand.get_bit_generator().lock
        lock._at_fork_reinit()
    if _torch_generator() is None:
        return
    # torch waits for its lock without the GIL, so this thread can stop waiting for the other.
    draw = threading.Thread(target=sys.modules["torch"].rand, args=(1,), daemon=True)
    draw.start()
    draw.join(_DRAW_TIMEOUT_S)
    if draw.is_alive():
        raise RuntimeError(
            "a thread of the program drew from torch's global generator as this worker was forked, "
            "and the generator's lock is never released in the fork. Use context='forkserver', or "
            "have the thread draw from a torch.Generator of its own"
        )


def _torch_generator() -> Any:
    """The generator of torch; None if torch is not loaded, or another module has its name."""
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)
    kind = getattr(torch, "Generator", None)
    return generator if isinstance(kind, type) and isinstance(generator, kind) else None
