"""The program's registry of envs, which workers get."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gymnasium.envs.registration import EnvSpec, WrapperSpec, registry

from shmvec._pickling import dumps_for_main, loads_in_main

__all__ = ["merge_registry", "pack_registry"]

_MAIN_MODULES = ("__main__", "__mp_main__")  # the latter if multiprocessing has spawned it


@dataclass
class _UnsendableEntryPoint:
    """Stands for the entry point of a spec that cannot be sent."""

    name: str
    why: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"the env id {self.name!r} cannot be sent to this worker: it was registered with an "
            f"object that cannot be pickled: {self.why}. Give an entry_point that can be: "
            "'module:Class', or a function of a module or script; or use context='fork'."
        )


def pack_registry() -> bytes:
    """Packs all specs of this process's registry, and the objects of ``__main__`` they name."""
    specs = dict(registry)
    try:
        return _pack_specs(specs)
    except Exception:
        return _pack_specs({name: _make_sendable(spec) for name, spec in specs.items()})


def _pack_specs(specs: dict[str, EnvSpec]) -> bytes:
    main_objects = {name: vars(sys.modules["__main__"]).get(name) for name in _main_names(specs)}
    return dumps_for_main((specs, main_objects))


def _main_names(specs: dict[str, EnvSpec]) -> Iterator[str]:
    """Names in ``__main__`` that entry points refer to."""
    for spec in specs.values():
        wrappers: tuple[WrapperSpec, ...] = spec.additional_wrappers
        points = [spec.entry_point, spec.vector_entry_point, *(w.entry_point for w in wrappers)]
        for point in points:
            module, _, name = point.partition(":") if isinstance(point, str) else ("", "", "")
            if module in _MAIN_MODULES:
                yield name.partition(".")[0]


def _make_sendable(spec: EnvSpec) -> EnvSpec:
    """The spec, or one whose use raises an error that says why the spec cannot be sent."""
    try:
        _pack_specs({spec.id: spec})
    except Exception as error:
        bad = _UnsendableEntryPoint(spec.id, f"{type(error).__name__}: {error}")
        return replace(
            spec, entry_point=bad, vector_entry_point=bad, additional_wrappers=(), kwargs={}
        )
    return spec


def merge_registry(packed: bytes) -> None:
    """Registers the parent's specs, which replace those of the same ids in this process."""
    # Modules that have registered ids in the parent may be imported here, and register them again.
    warnings.filterwarnings("ignore", r".*Overriding environment .* already in registry")
    specs, main_objects = loads_in_main(packed)
    vars(sys.modules["__main__"]).update(main_objects)
    registry.update(specs)
