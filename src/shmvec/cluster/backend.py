"""Actors, each with an object, and ``LocalBackend``, which has them in this process.

It makes a call when its result is taken, so the order of calls does not depend on time.
``RayBackend`` (``ray_backend.py``) has the same methods for actors on nodes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle

__all__ = ["Actor", "ActorLostError", "LocalBackend", "Node"]


class ActorLostError(Exception):
    """An actor is gone, with all its calls; the message says why."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, or a bundle of a placement group.

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
        """Makes an actor without an object."""
        self.name = name
        self.object: Any = None

    def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the object; "make" makes it by a function, and calls ``report``."""
        if method == "make":
            function, *args = args  # type: ignore[assignment]
            self.object = function(*args)
            return self.object.report()
        target = self.object
        if method == "close":
            self.object = None
        return getattr(target, method)(*args)


class PickledValue:
    """A pickled value, as it would be on another node."""

    def __init__(self, value: Any) -> None:
        """Pickles the value."""
        buffers: list[pickle.PickleBuffer] = []
        self._content = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self._buffers = [buffer.raw().tobytes() for buffer in buffers]

    def load(self) -> Any:
        """Unpickles the value; each call returns a new one, whose arrays are read-only."""
        return pickle.loads(self._content, buffers=self._buffers)


class LocalBackend:
    """Starts actors in this process, and calls them; ``RayBackend`` does so on nodes.

    Attributes:
        is_shut_down: Whether Ray was shut down; all actors have ended with it.
    """

    NODE = Node("here", "this process", 1, 0)
    is_shut_down = False

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        return [self.NODE]

    def describe_resources(self) -> str:
        """A text for messages about nodes, CPUs and GPUs."""
        return self.NODE.name

    def put(self, value: Any) -> PickledValue:
        """Copies a value for use as an argument of calls."""
        return PickledValue(value)

    def start(self, name: str, node: Node | None, cpus: float, gpus: float) -> Actor:
        """Starts an actor, and does not wait.

        Args:
            name: The actor's name, for messages.
            node: Node to start it on. None: any with room; actors are spread over all.
            cpus: Number of CPUs reserved for it.
            gpus: Number of GPUs reserved for it.
        """
        return Actor(name)

    def ask(self, actor: Actor, method: str, *args: Any) -> Callable[[], Any]:
        """Queues a call of ``Actor.call``; returns a key for it: here, a function that makes it."""
        return partial(self._call, actor, method, *args)

    def _call(self, actor: Actor, method: str, *args: Any) -> Any:
        return actor.call(
            method, *(each.load() if isinstance(each, PickledValue) else each for each in args)
        )

    def ready(self, calls: Sequence[Any], timeout: float) -> list[Any]:
        """Waits until a call is done, or the time is up; returns the calls done: here, the first.

        It is made by ``result``.
        """
        return list(calls[:1])

    def result(self, call: Callable[[], Any]) -> tuple[str, Any]:
        """Waits for a call; returns its node, for messages, and its result.

        The result is a read-only copy, as it would come from another node.

        Raises:
            ActorLostError: The actor is gone.
            Exception: The call has raised it.
        """
        return self.NODE.name, PickledValue(call()).load()

    def cancel(self, calls: Iterable[Any]) -> None:
        """Discards calls that have not begun."""

    def end(self, actor: Actor) -> None:
        """Ends an actor at once; its object, if it is open, is closed."""
        if actor.object is not None:
            actor.call("close")
