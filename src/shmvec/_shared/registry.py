"""Gymnasium's registry of envs, taken along to workers that have not run the program's code.

What a script, a notebook or a module has registered in the parent is registered in each worker, so
that ``lambda: gym.make("My-v0")`` works there, too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gymnasium.envs.registration import EnvSpec, WrapperSpec, registry

from shmvec._classes import dumps_for_main, loads_in_main

__all__ = ["join_registry", "kept_registry", "packed_registry"]

_MAIN = ("__main__", "__mp_main__")  # the latter where multiprocessing has spawned the program


@dataclass
class _Unpickled:
    """Stands for the entry point of a spec that could not be sent."""

    name: str
    why: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"the env id {self.name!r} was registered in the parent with what cannot be pickled, "
            f"and so not be sent to this worker: {self.why}. Give an entry_point that can be: "
            "'module:Class', or a function of a module or script; or use context='fork'."
        )


def packed_registry() -> bytes:
    """All specs of this process's registry, and what of ``__main__`` they name."""
    specs = dict(registry)
    try:
        return _packed(specs)
    except Exception:
        return _packed({name: _sendable(spec) for name, spec in specs.items()})


def _packed(specs: dict[str, EnvSpec]) -> bytes:
    found = {name: vars(sys.modules["__main__"]).get(name) for name in _names_of_main(specs)}
    return dumps_for_main((specs, found))


def _names_of_main(specs: dict[str, EnvSpec]) -> Iterator[str]:
    """Names in ``__main__`` that entry points refer to."""
    for spec in specs.values():
        wrappers: tuple[WrapperSpec, ...] = spec.additional_wrappers
        points = [spec.entry_point, spec.vector_entry_point, *(w.entry_point for w in wrappers)]
        for point in points:
            module, _, name = point.partition(":") if isinstance(point, str) else ("", "", "")
            if module in _MAIN:
                yield name.partition(".")[0]


def _sendable(spec: EnvSpec) -> EnvSpec:
    """The spec; or one like it that says, when it is used, why it could not be sent."""
    try:
        _packed({spec.id: spec})
    except Exception as error:
        bad = _Unpickled(spec.id, f"{type(error).__name__}: {error}")
        return replace(
            spec, entry_point=bad, vector_entry_point=bad, additional_wrappers=(), kwargs={}
        )
    return spec


def join_registry(packed: bytes) -> None:
    """Registers what the parent's registry has; where both have an id the parent's counts."""
    # Modules that registered ids in the parent may be imported, and do it again.
    warnings.filterwarnings("ignore", r".*Overriding environment .* already in registry")
    specs, found = loads_in_main(packed)
    vars(sys.modules["__main__"]).update(found)
    registry.update(specs)


@contextmanager
def kept_registry() -> Iterator[None]:
    """What is registered inside adds ids, and replaces none."""
    before = dict(registry)
    try:
        yield
    finally:
        registry.update(before)
