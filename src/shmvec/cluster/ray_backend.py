"""``RayBackend``: actors on the nodes of a cluster, by Ray."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shmvec.cluster.backend import Actor, ActorLostError, Node
from shmvec.faults import Failure, RemoteTraceback, add_note

__all__ = ["RayBackend"]


class RayBackend:
    """Actors of Ray's, on the nodes of a cluster; its methods are those of ``LocalBackend``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Connects to the cluster, or starts Ray on this machine, unless Ray runs already.

        Args:
            options: Options for actors, such as ``runtime_env`` and ``resources``. A placement
                group's bundles count as nodes.

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
        self._session = self._current_session()
        self._actor = ray.remote(RayActor)
        self._options = dict(options)
        self._strategy: Any = self._options.get("scheduling_strategy")
        self._group = getattr(self._strategy, "placement_group", None)

    @property
    def is_shut_down(self) -> bool:
        """Whether Ray was shut down; another one may have been started since."""
        return not self._module.is_initialized() or self._current_session() != self._session

    def _current_session(self) -> tuple[str, str]:
        # Neither id is unique: the first jobs of all clusters have the same one, and a node may
        # serve several jobs.
        context = self._module.get_runtime_context()
        return context.get_job_id(), context.get_node_id()

    @property
    def ray(self) -> Any:
        """The module; raises RuntimeError if Ray was shut down: a call would start it again."""
        if self.is_shut_down:
            raise RuntimeError("Ray was shut down, which has ended all runners and hosts")
        return self._module

    def nodes(self) -> list[Node]:
        """The live nodes, or the group's bundles, that have the resources of the options."""
        if self._group is None:
            candidates = [
                (
                    node["NodeID"],
                    _node_label(node["NodeManagerAddress"], node["NodeID"]),
                    node["Resources"],
                )
                for node in self.ray.nodes()
                if node["Alive"]
            ]
        else:
            candidates = [
                (str(index), f"bundle {index} of the placement group", has)
                for index, has in enumerate(self._group.bundle_specs)
                if self._strategy.placement_group_bundle_index in (-1, index)
            ]
        needed = self._options.get("resources") or {}
        return [
            Node(node, name, has.get("CPU", 0.0), has.get("GPU", 0.0))
            for node, name, has in candidates
            if all(has.get(resource, 0.0) >= needed[resource] for resource in needed)
        ]

    def describe_resources(self) -> str:
        """The nodes, and the CPUs and GPUs that are free, as a text for messages."""
        nodes = ", ".join(f"{node.name} with {node.cpus:g} CPUs" for node in self.nodes())
        nodes = nodes or f"no node that has {self._options.get('resources') or 'CPUs'}"
        free = self.ray.available_resources()
        return f"{nodes}; free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"

    def put(self, value: Any) -> Any:
        """Puts a value into Ray's object store, from which each node fetches it once."""
        return self.ray.put(value)

    def start(self, name: str, node: Node | None, cpus: float, gpus: float) -> Any:
        """Starts an actor; Ray does not restart it when it is lost."""
        if self._strategy is not None and self._group is None:
            node = None  # the user's strategy decides
        strategy = self._strategy or "SPREAD" if node is None else self._strategy_for(node)
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": 0,
            "max_task_retries": 0,
            **self._options,
            "scheduling_strategy": strategy,
        }
        return self._actor.options(**options).remote(name)

    def _strategy_for(self, node: Node) -> Any:
        """The scheduling strategy for a node, or for a bundle of the placement group."""
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        if self._group is None:
            return strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        children = self._strategy.placement_group_capture_child_tasks
        return strategies.PlacementGroupSchedulingStrategy(self._group, int(node.id), children)

    def ask(self, actor: Any, method: str, *args: Any) -> Any:
        """Calls the actor; returns Ray's reference to the result."""
        self.ray  # noqa: B018  # raises if Ray was shut down
        return actor.do.remote(method, *args)

    def ready(self, calls: Sequence[Any], timeout: float) -> list[Any]:
        """Waits until a call's result is on this node; returns all such calls."""
        calls = list(calls)
        done, _ = self.ray.wait(calls, num_returns=1, timeout=timeout)
        if done and len(calls) > 1:
            done, _ = self.ray.wait(calls, num_returns=len(calls), timeout=0)
        return list(done)

    def result(self, call: Any) -> tuple[str, Any]:
        """Waits for the call, and returns its result; arrays lie in the object store, read-only."""
        errors = self.ray.exceptions
        try:
            where, value, failed = self.ray.get(call)
        except errors.RayTaskError as error:  # the result cannot be pickled
            cause: BaseException = error.cause if isinstance(error.cause, BaseException) else error
            cause.__cause__ = RemoteTraceback(str(error))
            raise cause from cause.__cause__
        except errors.RayError as error:
            raise ActorLostError(_shorten(error)) from error
        if failed is not None:
            raise _exception(*failed)
        return where, value

    def cancel(self, calls: Iterable[Any]) -> None:
        """Cancels queued calls; those that have begun continue."""
        for call in calls:
            self.ray.cancel(call)

    def end(self, actor: Any) -> None:
        """Kills the actor; its workers end with it."""
        if not self.is_shut_down:
            self._module.kill(actor)


def _shorten(error: Exception) -> str:
    """The message of an error of Ray's, without its lines of ids and names."""
    lines = (line.strip() for line in str(error).splitlines())
    message_lines = [line for line in lines if line and not re.match(r"\w+: ", line)]
    return "; ".join(message_lines) or type(error).__name__


def _exception(doing: str, failure: Failure) -> BaseException:
    """The exception of a call, with its type and arguments."""
    if failure.pickled is None:
        error: BaseException = RuntimeError(f"in {doing}: {failure.summary}")
    else:
        error = failure.exception()
    error.__cause__ = RemoteTraceback(f"In {doing}:\n{failure.text}")
    add_note(error, f"raised in {doing}")
    return error


def _node_label(address: str, node: str) -> str:
    return f"{address} ({node[:8]})"


class RayActor(Actor):
    """An actor in a process of Ray's."""

    def __init__(self, name: str) -> None:
        """Makes an actor without an object."""
        super().__init__(name)
        node = importlib.import_module("ray").get_runtime_context().get_node_id()
        address = importlib.import_module("ray.util").get_node_ip_address()
        self._node_name = _node_label(address, node)

    def do(self, method: str, *args: Any) -> tuple[str, Any, tuple[str, Failure] | None]:
        """Makes a call.

        Returns:
            The node's name; the result; and the call's description and failure, or None.
        """
        try:
            return self._node_name, self.call(method, *args), None
        except Exception as error:
            doing = f"{self.name}, {method}, on node {self._node_name}"
            return self._node_name, None, (doing, Failure.of(error, 0, 0, method))
