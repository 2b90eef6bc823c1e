"""A crew: objects that carry out calls, in this process or, as Ray's actors, on nodes.

The caller need not know which. This module has the interface of both, and the crew in this process:
it makes a call when the call's result is asked for, in an order that does not depend on time.
"""

from __future__ import annotations

import math
import pickle
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

__all__ = [
    "SLICE_S",
    "TRIES",
    "Crew",
    "LocalCrew",
    "Lost",
    "Member",
    "Node",
    "Ticket",
    "coming",
    "dismiss",
    "how_often",
]

SLICE_S = 0.2  # of a wait, between two checks for signals
TRIES = 3  # members that may be lost as they start in one place, before it is left out
_CLOSE_S = 5.0  # for members to close


class Lost(Exception):
    """A member is gone, and with it all calls it was asked to make; the message says why."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, or what counts as one.

    Attributes:
        id: The node's id, which no other node ever has.
        name: The node's name in messages.
        cpus: Number of CPUs that members may have there.
        gpus: Number of GPUs that members may have there.
    """

    id: str
    name: str = field(compare=False)
    cpus: float = field(compare=False)
    gpus: float = field(compare=False)


class Ticket(ABC):
    """A call that a member was asked to make."""

    @abstractmethod
    def result(self) -> Any:
        """Waits for the call, and returns what it returned.

        Raises:
            Lost: The member is gone.
            Exception: What the call raised.
        """


class Member(ABC):
    """An object of the crew, in this process or on a node."""

    @abstractmethod
    def where(self) -> str:
        """The node that the member is on, for messages."""

    @abstractmethod
    def ask(self, method: str, *args: Any) -> Ticket:
        """Asks the object to call a method, after all earlier requests; does not wait."""

    @abstractmethod
    def finish(self, asked: Iterable[Ticket]) -> Ticket:
        """Asks the object to close; discards earlier requests that it has not begun."""

    @abstractmethod
    def end(self) -> None:
        """Ends the member at once."""


class Crew(ABC):
    """The place where members are made: this process, or nodes joined by Ray."""

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether Ray was shut down, and all members with it."""

    @abstractmethod
    def nodes(self) -> list[Node]:
        """The nodes that are alive."""

    @abstractmethod
    def room(self) -> str:
        """The CPUs and GPUs that there are, as a text for messages."""

    @abstractmethod
    def put(self, value: Any) -> Any:
        """Copies a value, as it is now, for use as an argument of ``start``."""

    @abstractmethod
    def start(
        self, name: str, factory: Any, *args: Any, node: Node | None, cpus: float, gpus: float
    ) -> tuple[Member, Ticket]:
        """Begins to make an object, and does not wait.

        Args:
            name: The member's name, for messages.
            factory: The result of ``put`` for a function that returns the object.
            *args: Arguments of that function.
            node: Node to make it on. None: any that has room; members spread over all.
            cpus: Number of CPUs that are reserved for the member.
            gpus: Number of GPUs that are reserved for the member.

        Returns:
            The member, and a ticket for what the object's method ``report`` returns.
        """

    @abstractmethod
    def ready(self, tickets: Sequence[Ticket], timeout: float) -> list[Ticket]:
        """Waits until a call is done; returns the tickets of all that are, none once time is up."""


def how_often(share: float, whole: float) -> int:
    """How often a share fits into the whole, rounding errors aside: 0.1 fits into 1 ten times."""
    return math.floor(whole / share + 1e-9)


def coming(crew: Crew, tickets: Iterable[Ticket], timeout: float = math.inf) -> Iterator[Ticket]:
    """Yields each ticket as soon as its call is done, until none is left or the time is up."""
    waiting, deadline = list(tickets), time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ticket in crew.ready(waiting, min(left, SLICE_S)):
            waiting.remove(ticket)
            yield ticket


def dismiss(
    crew: Crew, members: Sequence[tuple[Member, Iterable[Ticket] | None]]
) -> list[Exception]:
    """Closes and ends members; returns what closing them has raised.

    Args:
        crew: The crew that made them.
        members: The members, each with its pending calls, which are discarded; or with None, if it
            is still being made: it is ended without being closed.
    """
    failures: list[Exception] = []
    if crew.gone:
        return failures
    try:
        closing = [member.finish(asked) for member, asked in members if asked is not None]
        for ticket in coming(crew, closing, _CLOSE_S):
            try:
                ticket.result()
            except Lost:
                pass
            except Exception as error:
                failures.append(error)
    finally:
        for member, _ in members:
            member.end()
    return failures


@dataclass(frozen=True)
class Packed:
    """A pickled value, and its arrays as bytes; in the unpickled value they are read-only."""

    content: bytes
    buffers: tuple[bytes, ...]

    def open(self) -> Any:
        """Unpickles the value; each call returns a new one."""
        return pickle.loads(self.content, buffers=self.buffers)


def packed(value: Any) -> Packed:
    """Pickles a value in the way that it would be for another node."""
    buffers: list[pickle.PickleBuffer] = []
    content = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return Packed(content, tuple(buffer.raw().tobytes() for buffer in buffers))


class LocalCrew(Crew):
    """Objects in this process."""

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
        return packed(value)

    def start(
        self, name: str, factory: Any, *args: Any, node: Node | None, cpus: float, gpus: float
    ) -> tuple[Member, Ticket]:
        """Queues the making of an object, which its ticket's ``result`` does."""
        member = LocalMember(name)
        return member, member.asked(lambda: member.make(_opened(factory), *map(_opened, args)))

    def ready(self, tickets: Sequence[Ticket], timeout: float) -> list[Ticket]:
        """The first ticket, whose call is made when its result is asked for."""
        return list(tickets[:1])


class LocalMember(Member):
    """An object in this process, and the calls that it was asked to make.

    Attributes:
        name: The member's name, for messages.
    """

    def __init__(self, name: str) -> None:
        """Takes the member's name, for messages."""
        self.name = name
        self._held: Any = None
        self._todo: deque[LocalTicket] = deque()

    def make(self, factory: Callable[..., Any], *args: Any) -> Any:
        """Makes the object, and returns its report."""
        self._held = factory(*args)
        return self._held.report()

    def where(self) -> str:
        """In this process."""
        return LocalCrew.HERE.name

    def ask(self, method: str, *args: Any) -> Ticket:
        """Queues the call of a method of the object."""
        return self.asked(lambda: getattr(self._held, method)(*map(_opened, args)))

    def asked(self, call: Callable[[], Any]) -> LocalTicket:
        """Queues a call; returns its ticket."""
        ticket = LocalTicket(self, call)
        self._todo.append(ticket)
        return ticket

    def do(self, until: LocalTicket) -> None:
        """Makes the queued calls, up to this one."""
        while not until.done:
            if not self._todo[0].done:  # else Ctrl-C came between the call and its removal
                self._todo[0].call()
            self._todo.popleft()

    def finish(self, asked: Iterable[Ticket]) -> Ticket:
        """Discards the queued calls, and queues the object's ``close``."""
        self._todo.clear()
        held, self._held = self._held, None
        return self.asked(held.close)

    def end(self) -> None:
        """Closes the object, if it is open."""
        if self._held is not None:
            held, self._held = self._held, None
            held.close()


class LocalTicket(Ticket):
    """A call that is made when its result is wanted."""

    def __init__(self, member: LocalMember, call: Callable[[], Any]) -> None:
        """Takes the member that makes the call, and the call."""
        self._member = member
        self._call = call
        self._answer: Packed | None = None
        self._failure: Exception | None = None
        self.done = False

    def call(self) -> None:
        """Makes the call."""
        try:
            self._answer = packed(self._call())
        except Exception as error:  # the call is done; later calls are made
            self._failure = error
        self.done = True

    def result(self) -> Any:
        """What the call returns: a read-only copy, as it would come from another node."""
        self._member.do(self)
        if self._failure is not None:
            raise self._failure
        assert self._answer is not None
        return self._answer.open()


def _opened(value: Any) -> Any:
    return value.open() if isinstance(value, Packed) else value
