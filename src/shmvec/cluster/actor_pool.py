"""``ActorPool``: starts actors on all nodes, replaces those that are lost, and closes them."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from shmvec.cluster.backend import ActorLostError, LocalBackend, Node
from shmvec.cluster.ray_backend import RayBackend

__all__ = ["CLOSE_TIMEOUT_S", "ActorPool", "Place"]

_log = logging.getLogger("shmvec.cluster")

CLOSE_TIMEOUT_S = 5.0  # objects get so long to close
_WAIT_SLICE_S = 0.2  # signals are checked between two slices
_NODE_CHECK_INTERVAL_S = 1.0  # between two checks for new nodes
_START_TIMEOUT_S = 120.0  # for the first actor, where the user sets no start_timeout
_MAX_CONSECUTIVE_LOSSES = 3  # then a place is given up


@dataclass(eq=False)
class Place:
    """A place for one actor at a time, and the actor in it.

    Attributes:
        node: The node. None: any.
        cpus: Number of CPUs that are reserved for the actor.
        index_on_node: Index among the node's places.
        name: The actor's name, for messages.
        node_name: The actor's node, for messages.
        actor: The actor; None if there is none.
        calls: Its unanswered calls, oldest first.
        report: The result of its object's ``report``; None until it has started.
        consecutive_losses: Number of actors lost here since the last answer.
    """

    node: Node | None
    cpus: float
    index_on_node: int = 0
    name: str = ""
    node_name: str = ""
    actor: Any = None
    calls: deque[Any] = field(default_factory=deque)
    report: Any = None
    consecutive_losses: int = 0


P = TypeVar("P", bound=Place)
_Prepare: TypeAlias = Callable[[P], tuple[Any, ...]]


class ActorPool(Generic[P]):
    """Places on nodes, or in this process, each with an actor that holds an object.

    - ``places_on_nodes()`` or ``places_anywhere(count, cpus)`` returns places; set ``places``.
    - ``start_missing(prepare)`` starts an actor in each empty place, and looks for new nodes.
      ``prepare(place)`` returns the actor's name, a function, and the function's arguments, which
      may come from ``backend.put``. On the node, the function returns the object, which has the
      methods ``report`` and ``close``. ``start_all(prepare)`` also waits until all have started.
    - ``ask(place, method, *args)`` asks the object to call a method. An actor makes its calls in
      order; the first is ``report``.
    - ``wait(places)`` waits a slice of time, and returns the places whose oldest call is done.
    - ``take(place)`` returns the result of the oldest call, or raises its exception. If the actor
      is gone, it raises ``ActorLostError``; then call ``drop_lost``.
    - ``drop_lost(place, error)`` forgets the actor with all its calls. ``start_missing`` starts
      another one there, unless the place was removed, because its node is gone or too many actors
      were lost there.
    - ``close()`` closes the objects and ends the actors.

    A subclass of ``Place`` adds the user's own records.

    Attributes:
        backend: Starts actors, and calls them.
        places: The places.
        keeps_places: Whether no place is removed: where its node is gone, it may be on any.
            False at first.
        adds_new_nodes: Whether nodes that join get places. False at first.
        first_report: The first report.
        num_started: Number of actors started so far.
        num_lost: Number of actors lost so far.
    """

    def __init__(
        self,
        place_type: type[P],
        label: str,
        *,
        local: bool = False,
        options: Mapping[str, Any] | None = None,
        cpus: float | None = None,
        gpus: float = 0.0,
        timeout: float | None = None,
    ) -> None:
        """Connects to the cluster; starts nothing.

        Args:
            place_type: The subclass of ``Place``.
            label: The objects' name in messages.
            local: Whether all are in this process, without Ray.
            options: Options for Ray's actors.
            cpus: CPUs of each actor. None: all of its node, shared by the actors that get GPUs.
            gpus: GPUs of each actor.
            timeout: ``start_timeout``: seconds that actors get to start.

        Raises:
            ImportError: Ray is not installed.
        """
        self.backend: LocalBackend | RayBackend = (
            LocalBackend() if local else RayBackend(options or {})
        )
        self.places: list[P] = []
        self.keeps_places = self.adds_new_nodes = False
        self.first_report: Any = None
        self._first_actor = ""
        self.num_started = self.num_lost = 0
        self._place_type, self._label = place_type, label
        self._cpus, self._gpus = None if local else cpus, gpus
        self._timeout = _START_TIMEOUT_S if timeout is None else timeout
        self._timeout_note = "" if timeout is None else " (start_timeout)"
        self._avoided_nodes: set[Node] = set()
        self._last_loss = ""  # a text for messages
        self._start_wait_s = 0.0  # how long only starts were waited for
        self._nodes_checked_at = time.monotonic()

    # ---- places ------------------------------------------------------------------------------

    def places_anywhere(self, count: int, cpus: float | None = None) -> list[P]:
        """``count`` places on any nodes; without ``cpus``, with the largest equal shares."""
        cpus = self._cpus or cpus or _largest_share(self.backend.nodes(), count)
        return [self._place_type(None, cpus) for _ in range(count)]

    def places_on_nodes(self) -> list[P]:
        """The places for which nodes have room, without the nodes that were given up.

        Raises:
            RuntimeError: There are none.
        """
        places = [place for node in self._usable_nodes() for place in self._places_on(node)]
        if not places:
            raise self._no_room_error(f"no room for a {self._label}, which")
        return places

    def _usable_nodes(self) -> list[Node]:
        return [node for node in self.backend.nodes() if node not in self._avoided_nodes]

    def _places_on(self, node: Node) -> list[P]:
        counts = [
            math.floor(whole / share + 1e-9)  # 0.1 fits into 1 ten times
            for share, whole in ((self._cpus, node.cpus), (self._gpus, node.gpus))
            if share
        ]
        count = min(counts, default=1)
        cpus = self._cpus or node.cpus // max(1, count)
        return [self._place_type(node, cpus, share) for share in range(count if cpus else 0)]

    def start_missing(self, prepare: _Prepare[P]) -> None:
        """Starts an actor in each empty place; adds places on new nodes."""
        now = time.monotonic()
        if self.adds_new_nodes and now - self._nodes_checked_at >= _NODE_CHECK_INTERVAL_S:
            self._nodes_checked_at = now
            known_nodes = {place.node for place in self.places}
            for node in self._usable_nodes():
                if node not in known_nodes and (new_places := self._places_on(node)):
                    self.places += new_places
                    _log.info("%s has joined", node.name)
        for place in self.places:
            if place.actor is None:
                place.name, *make = prepare(place)
                place.node_name = place.node.name if place.node else "a node that is not known yet"
                actor = self.backend.start(place.name, place.node, place.cpus, self._gpus)
                place.calls = deque([self.backend.ask(actor, "make", *make)])
                place.actor = actor
                self.num_started += 1

    def start_all(self, prepare: _Prepare[P]) -> bool:
        """Waits until all have started; returns False as soon as a place is removed.

        Raises:
            RuntimeError: No place is left, or ``start_timeout`` is over.
            Exception: A function or ``report`` has raised it.
        """
        self.start_missing(prepare)
        count = len(self.places)
        while starting := [place for place in self.places if place.report is None]:
            for place in self.wait(starting):
                try:
                    self.take(place)
                except ActorLostError as error:
                    self.drop_lost(place, error)
            if len(self.places) < count:
                return False
            self.start_missing(prepare)
        self._check_places()
        return True

    def _no_room_error(self, problem: str) -> RuntimeError:
        cpus = max((place.cpus for place in self.places), default=self._cpus or 1)
        needed = f"{cpus:g} CPUs" + (f" and {self._gpus:g} GPUs" if self._gpus else "")
        return RuntimeError(
            f"the cluster has {problem} needs {needed}: there is "
            f"{self.backend.describe_resources()}{self._last_loss}"
        )

    def _check_places(self) -> None:
        if not self.places and not self.adds_new_nodes:
            raise self._no_room_error(f"no node left for a {self._label}, which")

    # ---- calls -------------------------------------------------------------------------------

    def ask(self, place: P, method: str, *args: Any) -> None:
        """Asks an object to call a method, after all earlier calls; does not wait."""
        place.calls.append(self.backend.ask(place.actor, method, *args))

    def wait(self, places: Iterable[P]) -> list[P]:
        """Waits for a slice of time; returns the places whose oldest call is done.

        Raises:
            RuntimeError: None of them could be started for too long.
        """
        oldest = {place.calls[0]: place for place in places if place.calls}
        self._check_places()
        if oldest:
            done = [oldest[call] for call in self.backend.ready(list(oldest), _WAIT_SLICE_S)]
        else:  # until a node joins
            time.sleep(_WAIT_SLICE_S)
            done = []
        if any(place.report is not None for place in oldest.values()):
            self._start_wait_s = 0.0
        elif not done:
            self._start_wait_s += _WAIT_SLICE_S
            if self._start_wait_s > self._timeout:
                raise self._no_room_error(
                    f"no room, or takes longer than {self._timeout:g} s{self._timeout_note}, for "
                    f"{len(oldest)} of {len(self.places)} {self._label}s, each of which"
                )
        return done

    def take(self, place: P) -> Any:
        """Takes the result of the oldest call, and waits for it if it is not done.

        Raises:
            ActorLostError: The actor is gone.
            RuntimeError: The report's spaces differ from those of the first report.
            Exception: The call has raised it; its cause and notes name the node.
        """
        place.node_name, result = self.backend.result(place.calls[0])
        place.calls.popleft()
        if place.report is not None:
            place.consecutive_losses = 0
            return result
        name = f"{place.name}, on {place.node_name}"
        if self.first_report is None:
            self.first_report, self._first_actor = result, name
        spaces = getattr(result, "spaces", None)
        first_spaces = getattr(self.first_report, "spaces", None)
        if spaces != first_spaces:
            raise RuntimeError(
                f"the envs of {name}, have the spaces {spaces}, and those of {self._first_actor}, "
                f"{first_spaces}"
            )
        place.report = result
        _log.info("%s, has started", name)
        return result

    def drop_lost(self, place: P, why: Exception) -> None:
        """Forgets a lost actor and its calls; its place becomes empty, or is removed.

        Raises:
            RuntimeError: Too many were lost there in a row, and the place cannot be removed.
        """
        self.num_lost += 1
        actor, place.actor, place.report = place.actor, None, None
        calls, place.calls = len(place.calls), deque()
        description = f"{place.name}, on {place.node_name}, is lost"
        self._last_loss = f"; {description}: {why}"
        _log.warning("%s, with %d calls in flight: %s", description, calls, why)
        self.backend.end(actor)
        place.consecutive_losses += 1
        if place.node is not None and place.node not in self.backend.nodes():
            if self.keeps_places:
                place.node = None
            else:
                self.places.remove(place)  # another node may join
        elif place.consecutive_losses >= _MAX_CONSECUTIVE_LOSSES:
            if place.node is None or self.keeps_places or len(self.places) == 1:
                raise RuntimeError(
                    f"{_MAX_CONSECUTIVE_LOSSES} {self._label}s were lost one after the other, the "
                    f"last one on {place.node_name}: {why}"
                ) from why
            self._avoided_nodes.add(place.node)
            self.places.remove(place)
            _log.warning("no %s is started on %s again", self._label, place.node.name)

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> list[Exception]:
        """Closes the objects, and ends the actors; returns the exceptions of the objects.

        Calls that have not begun are discarded. Actors that do not close in some seconds are ended.
        """
        # Another thread, or the call that this interrupts from a signal's handler, may drop actors.
        actors = [(place.actor, place) for place in self.places if place.actor is not None]
        self.places, self.adds_new_nodes = [], False
        failures: list[Exception] = []
        if self.backend.is_shut_down:
            return failures
        try:
            closing = []
            for actor, place in actors:
                if place.report is not None:
                    self.backend.cancel(place.calls)
                    closing.append(self.backend.ask(actor, "close"))
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            while closing and (left := deadline - time.monotonic()) > 0:
                for call in self.backend.ready(closing, min(left, _WAIT_SLICE_S)):
                    closing.remove(call)
                    try:
                        self.backend.result(call)
                    except ActorLostError:
                        pass
                    except Exception as error:
                        failures.append(error)
        finally:
            for actor, _ in actors:
                self.backend.end(actor)
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
