"""A crew: objects that carry out calls, in this process or, as Ray's actors, on nodes.

The caller does not know which. Here is what both have in common, and the crew of this process,
which makes a call when its answer is wanted: in an order that does not depend on time.
"""

from __future__ import annotations

import math
import pickle
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

__all__ = [
    "SLICE_S",
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

SLICE_S = 0.2  # of a wait: then signals are looked for
_CLOSE_S = 5.0  # what members get to close


class Lost(Exception):
    """A member is no more, and what it was asked is lost; the message says why."""


@dataclass(frozen=True)
class Node:
    """A machine, or what counts as one.

    Attributes:
        id: Names it for good.
        name: For people.
        cpus: How many it has for this.
        gpus: Likewise.
    """

    id: str
    name: str
    cpus: float
    gpus: float


class Ticket(ABC):
    """A call that a member was asked to make."""

    @abstractmethod
    def result(self) -> Any:
        """The answer, which is waited for.

        Raises:
            Lost: There will be none.
            Exception: What was raised instead.
        """


class Member(ABC):
    """An object of the crew, in this process or on a node."""

    @abstractmethod
    def where(self) -> str:
        """The node that it is on, for people."""

    @abstractmethod
    def ask(self, method: str, *args: Any) -> Ticket:
        """Asks it to call a method, after what it was asked before; does not wait."""

    @abstractmethod
    def finish(self, asked: Iterable[Ticket]) -> Ticket:
        """Asks it to close, before what it was asked and has not begun."""

    @abstractmethod
    def end(self) -> None:
        """Ends it at once."""


class Crew(ABC):
    """The place where members are made: this process, or nodes joined by Ray."""

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether what joins the nodes was ended, and all members with it."""

    @abstractmethod
    def nodes(self) -> list[Node]:
        """The nodes that there are now."""

    @abstractmethod
    def room(self) -> str:
        """The room that there is, as text for people."""

    @abstractmethod
    def put(self, value: Any) -> Any:
        """A copy of a value as it is now, to be handed to members as an argument."""

    @abstractmethod
    def start(
        self, name: str, factory: Any, *args: Any, node: str | None, cpus: float, gpus: float
    ) -> tuple[Member, Ticket]:
        """Begins to make an object, and does not wait.

        Args:
            name: For people.
            factory: What was ``put``: a function that returns the object.
            *args: For it.
            node: On which node, by id. None: where there is room, spread over all.
            cpus: CPUs that are its own.
            gpus: GPUs that are its own.

        Returns:
            The member, and a ticket for what the object's ``report`` says.
        """

    @abstractmethod
    def ready(self, tickets: Sequence[Ticket], timeout: float) -> list[Ticket]:
        """Waits until a ticket is answered; all that are, in order, or none once time is up."""


def how_often(share: float, whole: float) -> int:
    """How often a share fits into the whole: 0.1 into 1 ten times, 0.3 into 0.9 three times."""
    return math.floor(whole / share + 1e-9)


def coming(crew: Crew, tickets: Iterable[Ticket], timeout: float = math.inf) -> Iterator[Ticket]:
    """Yields each ticket as soon as it is answered, until none is left or the time is up."""
    waiting, deadline = list(tickets), time.monotonic() + timeout
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ticket in crew.ready(waiting, min(left, SLICE_S)):
            waiting.remove(ticket)
            yield ticket


def dismiss(
    crew: Crew, members: Sequence[tuple[Member, Iterable[Ticket] | None]]
) -> list[Exception]:
    """Ends members; returns what those raised that could close.

    Args:
        crew: The crew that made them.
        members: Each with its pending calls, which are not wanted any more. None: it is still
            being made, and is not waited for.
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
    """A value, pickled with its arrays beside it; these are read-only once it is opened."""

    content: bytes
    buffers: tuple[bytes, ...]

    def open(self) -> Any:
        """The value, unpickled anew by each call."""
        return pickle.loads(self.content, buffers=self.buffers)


def packed(value: Any) -> Packed:
    """Pickles a value, as it would be for another node: what works here works there."""
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
        self, name: str, factory: Any, *args: Any, node: str | None, cpus: float, gpus: float
    ) -> tuple[Member, Ticket]:
        """Notes to make the object once its report is wanted."""
        member = LocalMember(name)
        return member, member.asked(lambda: member.make(_opened(factory), *map(_opened, args)))

    def ready(self, tickets: Sequence[Ticket], timeout: float) -> list[Ticket]:
        """The first one: it is answered when it is asked for its result."""
        return list(tickets[:1])


class LocalMember(Member):
    """An object in this process, and what it was asked and has not done.

    Attributes:
        name: Its name, for people.
    """

    def __init__(self, name: str) -> None:
        """Takes a name for people."""
        self.name = name
        self._held: Any = None
        self._todo: deque[LocalTicket] = deque()

    def make(self, factory: Callable[..., Any], *args: Any) -> Any:
        """Makes the object; returns its report."""
        self._held = factory(*args)
        return self._held.report()

    def where(self) -> str:
        """In this process."""
        return LocalCrew.HERE.name

    def ask(self, method: str, *args: Any) -> Ticket:
        """Notes a call for later."""
        return self.asked(lambda: getattr(self._held, method)(*map(_opened, args)))

    def asked(self, call: Callable[[], Any]) -> LocalTicket:
        """A ticket for a call."""
        ticket = LocalTicket(self, call)
        self._todo.append(ticket)
        return ticket

    def do(self, until: LocalTicket) -> None:
        """Does what it was asked, up to this."""
        while not until.done:
            if not self._todo[0].done:  # else Ctrl-C came when it was
                self._todo[0].call()
            self._todo.popleft()

    def finish(self, asked: Iterable[Ticket]) -> Ticket:
        """Forgets what it was asked, and asks it to close."""
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
        """Takes whose it is."""
        self._member = member
        self._call = call
        self._answer: Packed | None = None
        self._failure: Exception | None = None
        self.done = False

    def call(self) -> None:
        """Makes the call."""
        try:
            self._answer = packed(self._call())
        except Exception as error:  # which is an answer, too: what comes behind it is done
            self._failure = error
        self.done = True

    def result(self) -> Any:
        """What it returns, as it comes from another node: a copy that can only be read."""
        self._member.do(self)
        if self._failure is not None:
            raise self._failure
        assert self._answer is not None
        return self._answer.open()


def _opened(value: Any) -> Any:
    return value.open() if isinstance(value, Packed) else value
