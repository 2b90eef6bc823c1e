"""The crew on the nodes of a cluster of Ray's: each member is an actor."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shmvec.cluster.crew import Crew, Lost, Member, Node, Ticket
from shmvec.faults import Failure, RemoteTraceback, add_note

__all__ = ["RayCrew"]


class RayCrew(Crew):
    """Objects in actors of Ray's, on the nodes of a cluster."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Connects to the cluster, or starts Ray on this machine; nothing if Ray runs already.

        Args:
            options: Options for actors, such as ``runtime_env`` and ``resources``.

        Raises:
            ImportError: Ray is not installed.
            ConnectionError: There is no cluster at the address that the environment names.
        """
        try:
            ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise ImportError(
                "a cluster needs Ray: pip install 'shmvec[cluster]'. local=True needs none."
            ) from error
        if not ray.is_initialized():
            ray.init()
        self._module = ray
        self._session = self._session_now()
        self._actor = ray.remote(Actor)
        self._options = dict(options)

    @property
    def gone(self) -> bool:
        """Whether Ray was shut down; another one may have been started since."""
        return not self._module.is_initialized() or self._session_now() != self._session

    def _session_now(self) -> tuple[str, str]:
        """The ids of job and node, which only together are unique.

        The first job of each cluster has the same id, and one node may serve several jobs.
        """
        context = self._module.get_runtime_context()
        return context.get_job_id(), context.get_node_id()

    @property
    def ray(self) -> Any:
        """The module; raises if Ray was shut down, since any call would start it again."""
        if self.gone:
            raise RuntimeError("Ray was shut down, and all that it had started ended with it")
        return self._module

    def nodes(self) -> list[Node]:
        """The nodes that are alive."""
        found = []
        for node in self.ray.nodes():
            if node["Alive"]:
                has = node["Resources"]
                name = _name(node["NodeManagerAddress"], node["NodeID"])
                found.append(Node(node["NodeID"], name, has.get("CPU", 0.0), has.get("GPU", 0.0)))
        return found

    def room(self) -> str:
        """The nodes, and the CPUs and GPUs that are free, as a text for messages."""
        nodes = ", ".join(f"{node.name} with {node.cpus:g} CPUs" for node in self.nodes())
        free = self.ray.available_resources()
        return f"{nodes}; free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"

    def put(self, value: Any) -> Any:
        """Puts a value into Ray's object store, from which each node fetches it once."""
        return self.ray.put(value)

    def start(
        self, name: str, factory: Any, *args: Any, node: str | None, cpus: float, gpus: float
    ) -> tuple[Member, Ticket]:
        """Starts an actor, which Ray does not restart when it is lost."""
        strategy: Any = "SPREAD"
        if node is not None:
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "scheduling_strategy": strategy,
            "max_restarts": 0,
            "max_task_retries": 0,
            **self._options,
        }
        member = RayMember(self, self._actor.options(**options).remote(name), node)
        return member, member.ask("make", factory, *args)

    def ready(self, tickets: Sequence[Ticket], timeout: float) -> list[Ticket]:
        """The tickets of calls that are done and whose results are on this node."""
        by_ref = {ticket.ref: ticket for ticket in tickets if isinstance(ticket, RayTicket)}
        refs = list(by_ref)
        done, _ = self.ray.wait(refs, num_returns=1, timeout=timeout)
        if done and len(refs) > 1:
            done, _ = self.ray.wait(refs, num_returns=len(refs), timeout=0)
        return [by_ref[ref] for ref in done]


class RayMember(Member):
    """An actor of Ray's, as a member of the crew."""

    def __init__(self, crew: RayCrew, actor: Any, node: str | None) -> None:
        """Takes the actor and the id of its node, if that is known."""
        self._crew, self._actor = crew, actor
        self.place = "" if node is None else _name("", node)

    def where(self) -> str:
        """The address and id of its node."""
        return self.place or "a node that is not known yet"

    def ask(self, method: str, *args: Any) -> Ticket:
        """Calls the actor."""
        ray = self._crew.ray
        return RayTicket(ray, self._actor.do.remote(method, *args), self)

    def finish(self, asked: Iterable[Ticket]) -> Ticket:
        """Cancels queued calls, and asks the actor to close after the call that it is making."""
        for ticket in asked:
            if isinstance(ticket, RayTicket):
                self._crew.ray.cancel(ticket.ref)
        return self.ask("close")

    def end(self) -> None:
        """Kills the actor; its workers end with it."""
        if not self._crew.gone:
            self._crew.ray.kill(self._actor)


class RayTicket(Ticket):
    """A call that an actor makes."""

    def __init__(self, ray: Any, ref: Any, member: RayMember) -> None:
        """Takes Ray's reference to the call's result."""
        self._ray, self.ref, self._member = ray, ref, member

    def result(self) -> Any:
        """Waits for the call, and returns its result; arrays are read-only, in the object store."""
        errors = self._ray.exceptions
        try:
            place, value, failed = self._ray.get(self.ref)
        except errors.RayTaskError as error:  # the result cannot be pickled
            raise _told(error, self._member) from None
        except errors.RayError as error:
            raise Lost(str(error).strip() or type(error).__name__) from error
        if place is not None:
            self._member.place = place
        if failed is not None:
            _raise(failed, self._member)
        return value


def _told(error: Any, member: RayMember) -> BaseException:
    cause: BaseException = error.cause if isinstance(error.cause, BaseException) else error
    cause.__cause__ = RemoteTraceback(f"On node {member.where()}:\n{error}")
    return cause


def _raise(failed: tuple[str, Failure], member: RayMember) -> None:
    """Raises what an actor has caught, with its type and arguments."""
    doing, failure = failed
    doing = f"{doing}, on node {member.where()}"
    if failure.pickled is None:
        error: BaseException = RuntimeError(f"in {doing}: {failure.summary}")
    else:
        error = failure.exception()
    error.__cause__ = RemoteTraceback(f"In {doing}:\n{failure.text}")
    add_note(error, f"raised in {doing}")
    raise error


def _name(address: str, node: str) -> str:
    return f"{address} ({node[:8]})".strip()


class Actor:
    """Holds an object of the crew, in an actor's process."""

    def __init__(self, name: str) -> None:
        """Takes the actor's name, for messages."""
        self._name = name
        self._held: Any = None

    def do(self, method: str, *args: Any) -> tuple[Any, Any, Any]:
        """Calls a method of the object; "make" makes the object, and calls its ``report``.

        Returns:
            The node's name ("make" only; else None); the result; None, or what was being done and
            the failure.
        """
        place = None
        try:
            if method == "make":
                context = importlib.import_module("ray").get_runtime_context()
                node = context.get_node_id()
                address = importlib.import_module("ray.util").get_node_ip_address()
                place = _name(address, node)
                factory, *rest = args
                self._held = factory(*rest)
                return place, self._held.report(), None
            return None, getattr(self._held, method)(*args), None
        except Exception as error:
            failure = Failure.of(error, 0, 0, method)
            return place, None, (f"{self._name}, {method}", failure)
