from collections.abc import Callable
from typing import Any

def has_version(kind: type) -> bool: ...

class Stepper: ...

class Python(Stepper):
    def __init__(
        self,
        env: Any,
        owner: Chain,
        below: Any = None,
        chain: Chain | None = None,
    ) -> None: ...
    @property
    def beneath(self) -> tuple[Any, Chain | None]: ...

class Twin(Stepper):
    def __init__(
        self, wrapper: Any, owner: Chain, below: Any, inner: Stepper, method: str | None
    ) -> None: ...

class Chain:
    env: Any
    notes: list[tuple[str, str]]
    steps_env: bool
    @property
    def __name__(self) -> str: ...
    def __init__(
        self, env: Any, build: Callable[[Any, Chain], tuple[Stepper, list[tuple[str, str]]]]
    ) -> None: ...
    def step(self, action: Any) -> Any: ...
    def __call__(self, env: Any, *given: Any, **named: Any) -> Any: ...
