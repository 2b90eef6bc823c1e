"""A crew: actors, each of which has an object, in this process or, by Ray, on nodes.

The caller need not know which. This module has the interface of both, and the crew in this process:
it makes a call when the call's result is asked for, in an order that does not depend on time.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle

__all__ = ["Actor", "Crew", "LocalCrew", "Lost", "Node"]


class Lost(Exception):
    """An actor is gone, and with it all calls that it was asked for; the message says why."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, or what counts as one.

    Attributes:
        id: The node's id, which no other node ever has.
        name: The node's name in messages.
        cpus: Number of CPUs that actors may have there.
        gpus: Number of GPUs that actors may have there.
    """

    id: str
    name: str = field(compare=False)
    cpus: float = field(compare=False)
    gpus: float = field(compare=False)


class Actor:
    """Holds an object, and calls its methods.

    Attributes:
        name: The actor's name, for messages.
        object: The object; None before it is made, and once it is closed.
    """

    def __init__(self, name: str) -> None:
        """Takes the actor's name, for messages."""
        self.name = name
        self.object: Any = None

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the object; "make" makes it by a function, and calls ``report``."""
        if method == "make":
            function, *args = args  # type: ignore[assignment]
            self.object = function(*args)
            return self.object.report()
        called = self.object
        if method == "close":
            self.object = None
        return getattr(called, method)(*args)


class Crew(ABC):
    """The place where actors are: this process, or nodes joined by Ray."""

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether Ray was shut down, and all actors with it."""

    @abstractmethod
    def nodes(self) -> list[Node]:
        """The nodes that are alive."""

    @abstractmethod
    def room(self) -> str:
        """The CPUs and GPUs that there are, as a text for messages."""

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Copies a value, as it is now, for use as an argument of calls."""

    @abstractmethod
    def start(self, name: str, node: Node | None, cpus: float, gpus: float) -> Any:
        """Starts an actor, and does not wait.

        Args:
            name: The actor's name, for messages.
            node: Node to start it on. None: any that has room; actors spread over all.
            cpus: Number of CPUs that are reserved for it.
            gpus: Number of GPUs that are reserved for it.
        """

    @abstractmethod
    def ask(self, actor: Any, method: str, *args: Any) -> Any:
        """Asks for a call of ``Actor.call``, after all earlier ones; returns a key of the call."""

    @abstractmethod
    def ready(self, calls: Sequence[Any], timeout: float) -> list[Any]:
        """Waits until a call is done; returns all that are, none once the time is up."""

    @abstractmethod
    def result(self, call: Any) -> tuple[str, Any]:
        """Waits for a call; returns the node it was made on, for messages, and its result.

        Raises:
            Lost: The actor is gone.
            Exception: What the call raised.
        """

    @abstractmethod
    def cancel(self, calls: Iterable[Any]) -> None:
        """Discards calls, as far as they are not begun."""

    @abstractmethod
    def end(self, actor: Any) -> None:
        """Ends an actor at once."""


class Packed:
    """A pickled value, as it would be on another node."""

    def __init__(self, value: Any) -> None:
        """Pickles the value."""
        buffers: list[pickle.PickleBuffer] = []
        self._content = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self._buffers = [buffer.raw().tobytes() for buffer in buffers]

    def open(self) -> Any:
        """Unpickles the value; each call returns a new one, whose arrays are read-only."""
        return pickle.loads(self._content, buffers=self._buffers)


class LocalCrew(Crew):
    """Actors in this process."""

    HERE = Node("here", "this process", 1, 0)
    gone = False

    def nodes(self) -> list[Node]:
        """This process."""
        return [self.HERE]

    def room(self) -> str:
        """This process."""
        return self.HERE.name

    def put(self, value: Any) -> Packed:
        """The value, pickled as for another node."""
        return Packed(value)

    def start(self, name: str, node: Node | None, cpus: float, gpus: float) -> Actor:
        """An actor."""
        return Actor(name)

    def ask(self, actor: Actor, method: str, *args: Any) -> Callable[[], Any]:
        """Returns a function that makes the call."""
        return partial(self._call, actor, method, *args)

    def _call(self, actor: Actor, method: str, *args: Any) -> Any:
        return actor.call(
            method, *(each.open() if isinstance(each, Packed) else each for each in args)
        )

    def ready(self, calls: Sequence[Any], timeout: float) -> list[Any]:
        """The first call, which is made when its result is asked for."""
        return list(calls[:1])

    def result(self, call: Callable[[], Any]) -> tuple[str, Any]:
        """Makes the call; its result is a read-only copy, as it would come from another node."""
        return self.HERE.name, Packed(call()).open()

    def cancel(self, calls: Iterable[Any]) -> None:
        """A call whose result nobody asks for is not made."""

    def end(self, actor: Actor) -> None:
        """Closes the object, if it is open."""
        if actor.object is not None:
            actor.call("close")
