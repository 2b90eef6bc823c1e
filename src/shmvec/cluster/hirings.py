"""Hirings: actors with objects on all nodes, started, replaced when they are lost, and closed."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from shmvec.cluster.crew import Crew, LocalCrew, Lost, Node
from shmvec.cluster.ray_crew import RayCrew

__all__ = ["CLOSE_S", "Hiring", "Hirings"]

_log = logging.getLogger("shmvec.cluster")

CLOSE_S = 5.0  # for objects to close
_SLICE_S = 0.2  # of a wait, between two checks for signals
_LOOK_S = 1.0  # between two checks for nodes that have joined
_START_S = 120.0  # for the first actor to start, where its user sets no time
_TRIES = 3  # actors that may be lost in one place, one after the other, before it is left out


@dataclass(eq=False)
class Hiring:
    """A place for one actor at a time, and the actor that has it.

    Attributes:
        node: The node. None: any.
        cpus: Number of CPUs that are reserved for the actor.
        share: Index among the node's places.
        name: The actor's name, for messages.
        where: The actor's node, for messages.
        actor: The actor; None if there is none.
        calls: What it was asked for and has not answered yet, in order.
        report: What its object's ``report`` returned; None until it has started.
        losses: Number of actors that were lost here since one has answered.
    """

    node: Node | None
    cpus: float
    share: int = 0
    name: str = ""
    where: str = ""
    actor: Any = None
    calls: deque[Any] = field(default_factory=deque)
    report: Any = None
    losses: int = 0


H = TypeVar("H", bound=Hiring)
_Begin: TypeAlias = Callable[[H], tuple[Any, ...]]


class Hirings(Generic[H]):
    """Places on nodes, or in this process, each with an actor that holds an object.

    - ``places = on_nodes()``, or ``anywhere(count, cpus)``, says where there are to be actors;
    - ``fill(begin)`` starts one in each place that has none, and looks for nodes that have joined.
      ``begin(place)`` returns the actor's name, a function, and its arguments, which ``crew.put``
      may have put into the store. The function returns the object, on the node, which has the
      methods ``report`` and ``close``. ``start(begin)`` waits until all have started, too;
    - ``ask(place, method, *args)`` asks the object there to call a method; an actor makes its calls
      in order;
    - ``wait(places)`` waits a slice of time for the oldest calls of these, and returns the places
      whose oldest call is done. The first one is that of ``report``;
    - ``take(place)`` returns the result of the oldest call, and raises what it has raised; if the
      actor is gone, it raises ``Lost``, and then
    - ``lose(place, error)`` forgets the actor with all its calls. ``fill`` starts another one
      there, unless the place was taken off ``places``: its node is gone, or actors are lost there
      one after the other;
    - ``close()`` closes the objects and ends the actors.

    A subclass of ``Hiring`` has what the user notes of each place.

    Attributes:
        crew: Where the actors are.
        places: The places.
        fixed: Whether no place is taken off: one whose node is gone is anywhere then. At first not.
        follows: Whether nodes that join get places. At first not.
        first: The first report.
        started: Number of actors that were started.
        lost: Number of actors that were lost.
    """

    def __init__(
        self,
        kind: type[H],
        what: str,
        *,
        local: bool = False,
        options: Mapping[str, Any] | None = None,
        cpus: float | None = None,
        gpus: float = 0.0,
        timeout: float | None = None,
    ) -> None:
        """Connects to the cluster; starts nothing.

        Args:
            kind: The subclass of ``Hiring``.
            what: What the objects are, for messages.
            local: Whether all are in this process, without Ray.
            options: Options for Ray's actors.
            cpus: CPUs of each actor. None: all of its node, divided among those that GPUs are for.
            gpus: GPUs of each actor.
            timeout: ``start_timeout``: seconds that actors get to start.

        Raises:
            ImportError: Ray is not installed.
        """
        self.crew: Crew = LocalCrew() if local else RayCrew(options or {})
        self.places: list[H] = []
        self.fixed = self.follows = False
        self.first: Any = None
        self._first_name = ""
        self.started = self.lost = 0
        self._kind, self._what = kind, what
        self._cpus, self._gpus = None if local else cpus, gpus
        self._timeout = _START_S if timeout is None else timeout
        self._option = "" if timeout is None else " (start_timeout)"
        self._avoided: set[Node] = set()
        self._loss = ""  # how the last one was lost
        self._waited_s = 0.0  # of waiting for nothing but starts
        self._looked = time.monotonic()

    # ---- places ------------------------------------------------------------------------------

    def anywhere(self, count: int, cpus: float | None = None) -> list[H]:
        """So many places on any nodes; without ``cpus`` with the largest equal shares of these."""
        cpus = self._cpus or cpus or _largest_share(self.crew.nodes(), count)
        return [self._kind(None, cpus) for _ in range(count)]

    def on_nodes(self) -> list[H]:
        """The places for which nodes have room, but for nodes where actors are lost.

        Raises:
            RuntimeError: There are none.
        """
        places = [place for node in self._nodes() for place in self._on(node)]
        if not places:
            raise self._no_room(f"no room for a {self._what}, which")
        return places

    def _nodes(self) -> list[Node]:
        return [node for node in self.crew.nodes() if node not in self._avoided]

    def _on(self, node: Node) -> list[H]:
        counts = [
            math.floor(whole / share + 1e-9)  # 0.1 fits into 1 ten times
            for share, whole in ((self._cpus, node.cpus), (self._gpus, node.gpus))
            if share
        ]
        count = min(counts, default=1)
        cpus = self._cpus or node.cpus // max(1, count)
        return [self._kind(node, cpus, share) for share in range(count if cpus else 0)]

    def fill(self, begin: _Begin[H]) -> None:
        """Starts an actor in each place that has none; adds places on nodes that have joined."""
        if self.follows and time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            known = {place.node for place in self.places}
            for node in self._nodes():
                if node not in known and (joined := self._on(node)):
                    self.places += joined
                    _log.info("%s has joined", node.name)
        for place in self.places:
            if place.actor is None:
                place.name, *make = begin(place)
                place.where = place.node.name if place.node else "a node that is not known yet"
                actor = self.crew.start(place.name, place.node, place.cpus, self._gpus)
                place.calls = deque([self.crew.ask(actor, "make", *make)])
                place.actor = actor
                self.started += 1

    def start(self, begin: _Begin[H]) -> bool:
        """Waits until all have started; False as soon as a place is left out.

        Raises:
            RuntimeError: No place is left, or ``start_timeout`` is over.
            Exception: What a function or ``report`` raises.
        """
        self.fill(begin)
        count = len(self.places)
        while starting := [place for place in self.places if place.report is None]:
            for place in self.wait(starting):
                try:
                    self.take(place)
                except Lost as error:
                    self.lose(place, error)
            if len(self.places) < count:
                return False
            self.fill(begin)
        self._check_places()
        return True

    def _no_room(self, what: str) -> RuntimeError:
        cpus = max((place.cpus for place in self.places), default=self._cpus or 1)
        needed = f"{cpus:g} CPUs" + (f" and {self._gpus:g} GPUs" if self._gpus else "")
        return RuntimeError(
            f"the cluster has {what} needs {needed}: there is {self.crew.room()}{self._loss}"
        )

    def _check_places(self) -> None:
        if not self.places and not self.follows:
            raise self._no_room(f"no node left for a {self._what}, which")

    # ---- calls -------------------------------------------------------------------------------

    def ask(self, place: H, method: str, *args: Any) -> None:
        """Asks an object to call a method, after all earlier calls; does not wait."""
        place.calls.append(self.crew.ask(place.actor, method, *args))

    def wait(self, places: Iterable[H]) -> list[H]:
        """Waits for a slice of time; returns the places whose oldest call is done.

        Raises:
            RuntimeError: None of them could be started for too long.
        """
        oldest = {place.calls[0]: place for place in places if place.calls}
        self._check_places()
        if oldest:
            done = [oldest[call] for call in self.crew.ready(list(oldest), _SLICE_S)]
        else:  # until a node joins
            time.sleep(_SLICE_S)
            done = []
        if any(place.report is not None for place in oldest.values()):
            self._waited_s = 0.0
        elif not done:
            self._waited_s += _SLICE_S
            if self._waited_s > self._timeout:
                raise self._no_room(
                    f"no room, or takes longer than {self._timeout:g} s{self._option}, for "
                    f"{len(oldest)} of {len(self.places)} {self._what}s, each of which"
                )
        return done

    def take(self, place: H) -> Any:
        """Takes the result of the oldest call, and waits for it if it is not done.

        Raises:
            Lost: The actor is gone.
            RuntimeError: The spaces that the report tells are not those of the first one.
            Exception: What the call has raised; its cause and notes name the node.
        """
        place.where, result = self.crew.result(place.calls[0])
        place.calls.popleft()
        if place.report is not None:
            place.losses = 0
            return result
        name = f"{place.name}, on {place.where}"
        if self.first is None:
            self.first, self._first_name = result, name
        ours, first = (getattr(each, "spaces", None) for each in (result, self.first))
        if ours != first:
            raise RuntimeError(
                f"the envs of {name}, have the spaces {ours}, and those of {self._first_name}, "
                f"{first}"
            )
        place.report = result
        _log.info("%s, has started", name)
        return result

    def lose(self, place: H, why: Exception) -> None:
        """Forgets an actor that is lost, with its calls; its place is free, or is left out.

        Raises:
            RuntimeError: Too many were lost there, one after the other, and it cannot be left out.
        """
        self.lost += 1
        actor, place.actor, place.report = place.actor, None, None
        calls, place.calls = len(place.calls), deque()
        lost = f"{place.name}, on {place.where}, is lost"
        self._loss = f"; {lost}: {why}"
        _log.warning("%s, with %d calls under way: %s", lost, calls, why)
        self.crew.end(actor)
        place.losses += 1
        if place.node is not None and place.node not in self.crew.nodes():
            if self.fixed:
                place.node = None
            else:
                self.places.remove(place)  # another node may join
        elif place.losses >= _TRIES:
            if place.node is None or self.fixed or len(self.places) == 1:
                raise RuntimeError(
                    f"{_TRIES} {self._what}s were lost one after the other, the last one on "
                    f"{place.where}: {why}"
                ) from why
            self._avoided.add(place.node)
            self.places.remove(place)
            _log.warning("no %s is started on %s again", self._what, place.node.name)

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> list[Exception]:
        """Closes the objects, and ends the actors; returns what objects have raised.

        Calls that are not begun are discarded. What has not closed after some seconds is ended.
        """
        places = [place for place in self.places if place.actor is not None]
        self.places = []
        failures: list[Exception] = []
        if self.crew.gone:
            return failures
        try:
            closing = []
            for place in places:
                if place.report is not None:
                    self.crew.cancel(place.calls)
                    closing.append(self.crew.ask(place.actor, "close"))
            deadline = time.monotonic() + CLOSE_S
            while closing and (left := deadline - time.monotonic()) > 0:
                for call in self.crew.ready(closing, min(left, _SLICE_S)):
                    closing.remove(call)
                    try:
                        self.crew.result(call)
                    except Lost:
                        pass
                    except Exception as error:
                        failures.append(error)
        finally:
            for place in places:
                self.crew.end(place.actor)
        return failures


def _largest_share(nodes: list[Node], count: int) -> float:
    """The most CPUs that each of ``count`` actors can have, each on one node; at least 1."""
    shares = {node.cpus // some for node in nodes for some in range(1, count + 1)}
    fitting = [
        share
        for share in shares
        if share >= 1 and sum(node.cpus // share for node in nodes) >= count
    ]
    return max(fitting, default=1.0)
