"""``Collector``: fragments of trajectories from runners on all nodes, for one learner."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shmvec._arguments import checked_count
from shmvec.cluster.crew import (
    SLICE_S,
    TRIES,
    Crew,
    LocalCrew,
    Lost,
    Member,
    Node,
    Ticket,
    dismiss,
    how_often,
)
from shmvec.cluster.fragments import Fragment, Report, Runner, pickled
from shmvec.cluster.ray_crew import RayCrew
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Collector", "CollectorStats", "RunnerStats"]

_log = logging.getLogger("shmvec.cluster")

_LOOK_S = 1.0  # between two checks for nodes that have joined
_LOG_S = 30.0
_SEEDS, _STRIDE = 1 << 15, 1 << 16  # runners, and envs of each: seeds below 2**31


@dataclass(frozen=True)
class RunnerStats:
    """Counts of a runner's fragments, as far as the learner has been given them.

    Attributes:
        runner: The runner's number.
        node: The runner's node, for messages.
        fragments: Number of fragments.
        steps: Number of env steps in them.
        seconds: Seconds that it took to make them.
        lag: How often weights were set between the request for a fragment and its receipt, on
            average.
    """

    runner: int
    node: str
    fragments: int
    steps: int
    seconds: float
    lag: float

    @property
    def steps_per_second(self) -> float:
        """Env steps a second, while the runner made fragments."""
        return self.steps / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class CollectorStats:
    """Counts of a collector since it was made.

    Attributes:
        fragments: Number of fragments that the learner was given.
        steps: Number of env steps in them.
        nbytes: Bytes of their arrays.
        version: The version of the weights that are set.
        lag: How often weights were set between the request for a fragment and its receipt, on
            average.
        lost: Number of runners that were lost, with their fragments in flight.
        started: Number of runners that were started, the first ones included.
        seconds: Seconds since the first runners were ready.
        runners: Stats of the present runners.
    """

    fragments: int
    steps: int
    nbytes: int
    version: int
    lag: float
    lost: int
    started: int
    seconds: float
    runners: tuple[RunnerStats, ...]

    def __str__(self) -> str:
        """The stats in one line."""
        rate = self.steps / self.seconds if self.seconds else 0.0
        return (
            f"{len(self.runners)} runners, {self.fragments} fragments, {self.steps:,} steps, "
            f"{rate:,.0f} steps/s, weights {self.version}, lag {self.lag:.1f}, "
            f"{self.nbytes / 1e6:,.0f} MB, {self.lost} runners lost"
        )


@dataclass(eq=False)
class _Place:
    """A place for one runner at a time: on any node, or a share of a certain one."""

    node: Node | None
    cpus: float
    share: int = 0  # index among the node's shares
    runner: _Hired | None = None
    early_losses: int = 0  # runners lost here since the last fragment that came from here


@dataclass(eq=False)
class _Hired:
    """The collector's record of a runner."""

    number: int
    place: _Place
    member: Member
    starting: Ticket | None
    version: int = 0  # version of the weights that it was sent last
    asked: deque[Ticket] = field(default_factory=deque)
    fragments: int = 0
    steps: int = 0
    seconds: float = 0.0
    lag: int = 0

    @property
    def awaited(self) -> Ticket:
        """The ticket of the call that the runner is making."""
        return self.asked[0] if self.starting is None else self.starting


class Collector:
    """Collects fragments of trajectories from runners on all nodes of a cluster.

    A runner is an actor of Ray's: a vector env over the cores of its node, and a policy beside it.
    No step goes over the network: only fragments do, and weights, once for each node.

    Iterate over a collector to receive fragments. Each ``next`` asks the runner of the last
    fragment for another one, with the weights as they are then, and waits for a fragment of any
    runner. While the learner uses a fragment, others are made: ``in_flight`` for each runner.

    Attributes:
        single_observation_space: Observation space of one env.
        single_action_space: Action space of one env.
        version: How many times weights were set.

    Example:
        >>> import shmvec
        >>> from shmvec.cluster import Collector
        >>> def make_envs():
        ...     return shmvec.make_vec("CartPole-v1", 4)
        >>> def make_policy(seed):
        ...     return lambda observations, env_ids: (observations[:, 2] > 0).astype(int)
        >>> with Collector(make_envs, make_policy, fragment_length=8, local=True) as collector:
        ...     fragment = next(collector)
        >>> fragment.observations.shape, fragment.actions.shape, fragment.steps
        ((9, 4, 4), (8, 4), 32)
    """

    def __init__(
        self,
        make_envs: Callable[[], ShmVectorEnv],
        make_policy: Callable[[int], Any],
        fragment_length: int = 128,
        num_runners: int | None = None,
        in_flight: int = 2,
        seed: int = 1,
        *,
        ordered: bool = False,
        local: bool = False,
        cpus_per_runner: float | None = None,
        gpus_per_runner: float = 0.0,
        pin_runners: bool = False,
        start_timeout: float = 120.0,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts the runners, and waits until all have built their envs.

        Args:
            make_envs: ``make_envs()`` returns a :class:`shmvec.ShmVectorEnv`, in each runner. If it
                does not say how many workers, there is one for each CPU of the runner.
            make_policy: ``make_policy(seed)`` returns a policy, in each runner:
                ``policy(observations, env_ids)`` returns actions, or a pair of actions and a dict
                of arrays with a row for each env: values, log-probabilities. If it has a method
                ``reset(env_ids)``, that is called before it is asked about the first observations
                of episodes in these envs; ``set_weights(weights)`` takes the learner's. Its random
                numbers should depend on the seed alone.
            fragment_length: Steps of each env in a fragment.
            num_runners: Number of runners. None: one on each node, or as many as
                ``cpus_per_runner`` and ``gpus_per_runner`` leave room for; nodes that join later
                get theirs, too, unless ``ordered``. With ``local``: one.
            in_flight: Number of fragments of each runner that are being made, or wait for the
                learner.
            seed: Seed from which, with a runner's number, the seeds of its envs and policy are
                derived.
            ordered: Whether fragments come in rounds, one of each runner in a round, in a fixed
                order, all made with the weights that are set when the round begins. The first
                ``in_flight`` rounds begin at once, and another one after each. The fragments that a
                learner is given do not depend on time then.
            local: Whether all runners are in this process, without a cluster and without Ray: they
                work when a fragment is wanted. The fragments are those of ``ordered``, bit for bit.
            cpus_per_runner: CPUs of Ray's that are reserved for each runner. None: all of its node;
                with ``num_runners``, the largest equal share that leaves room for all of them.
            gpus_per_runner: GPUs of Ray's that are reserved for each runner's policy.
            pin_runners: Whether the runners of a node are bound to cores of their own, of one NUMA
                node each if they fit. For nodes on which nothing else runs; not with ``local``,
                ``ordered`` or ``num_runners``.
            start_timeout: Seconds that all runners get to start.
            actor_options: Options for Ray's actors, ``resources``, ``scheduling_strategy`` and
                ``runtime_env`` for example: docs/cluster.md.

        Raises:
            ImportError: Ray is not installed.
            ValueError: A number is out of range.
            TypeError: A function cannot be called or pickled, or returns something else.
            RuntimeError: There is no room for the runners; their spaces differ; a function cannot
                be unpickled on a node; runners are lost one after the other as they start.
            Exception: What the functions raise; its cause and notes name the node.
        """
        self._runners: dict[int, _Hired] = {}
        self._places: list[_Place] = []
        self._ready: deque[_Hired] = deque()  # runners whose next fragments have come
        self._turn: deque[_Place] = deque()  # places whose fragments are still to come this round
        self._closed = False
        for name, function in (("make_envs", make_envs), ("make_policy", make_policy)):
            if not callable(function):
                raise TypeError(f"{name} must be callable, got {function!r}")
        make = pickled("make_envs", make_envs), pickled("make_policy", make_policy)
        self._length = checked_count("fragment_length", fragment_length)
        self._in_flight = checked_count("in_flight", in_flight)
        if num_runners is not None:
            num_runners = checked_count("num_runners", num_runners)
        if cpus_per_runner is not None and not cpus_per_runner > 0:
            raise ValueError(f"cpus_per_runner must be positive, got {cpus_per_runner}")
        if not gpus_per_runner >= 0:
            raise ValueError(f"gpus_per_runner must not be negative, got {gpus_per_runner}")
        self._follows = num_runners is None and not ordered and not local
        if pin_runners and not self._follows:
            raise ValueError(
                "pin_runners is for runners that stay on their nodes: without num_runners, ordered "
                "and local"
            )
        self._pinned = pin_runners
        self._first_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._ordered = ordered or local
        self._timeout = start_timeout
        self._gpus = gpus_per_runner
        self._cpus = None if local else cpus_per_runner
        self._crew: Crew = LocalCrew() if local else RayCrew(actor_options or {})
        self._made: tuple[Any, ...] = tuple(map(self._crew.put, make))
        self._weights: Any = None
        self._agreed: tuple[Report, str] | None = None
        self._served: _Hired | None = None
        self._waited_s = 0.0  # seconds of waiting since a runner was last up
        self._loss = ""  # how the last runner was lost
        self._fixed = False  # whether each place has its part in each round
        self._avoided: set[Node] = set()  # nodes on which runners are lost before any fragment
        self._counts = dict.fromkeys(("fragments", "steps", "nbytes", "lag", "lost", "started"), 0)
        self._begin = self._looked = self._logged = time.monotonic()
        self.version = 0
        try:
            self._places = self._first_places(num_runners)
            self._start()
        except BaseException:
            self._end()
            raise

    # ---- runners -----------------------------------------------------------------------------

    def _first_places(self, num_runners: int | None) -> list[_Place]:
        """The places at which the first runners are started."""
        nodes = self._crew.nodes()
        if num_runners is not None:
            cpus = self._cpus or _largest_share(nodes, num_runners)
            return [_Place(None, cpus) for _ in range(num_runners)]
        places = [place for node in nodes for place in self._places_on(node)]
        if not places:
            raise self._no_room("no room for a runner, which")
        return places

    def _places_on(self, node: Node) -> list[_Place]:
        count = min(
            how_often(self._cpus, node.cpus) if self._cpus else math.inf,
            how_often(self._gpus, node.gpus) if self._gpus else math.inf,
        )
        if count == math.inf:
            count = 1
        cpus = self._cpus or node.cpus // max(1, count)
        return [_Place(node, cpus, share) for share in range(int(count) if cpus else 0)]

    def _no_room(self, what: str) -> RuntimeError:
        cpus = {place.cpus for place in self._places} or {self._cpus or 1}
        needed = f"{max(cpus):g} CPUs" + (f" and {self._gpus:g} GPUs" if self._gpus else "")
        return RuntimeError(
            f"the cluster has {what} needs {needed}: there is {self._crew.room()}{self._loss}"
        )

    def _hire(self, place: _Place) -> None:
        """Begins to start a runner."""
        number = self._counts["started"]
        self._counts["started"] += 1
        seed = (self._first_seed + number) % _SEEDS * _STRIDE
        member, starting = self._crew.start(
            f"runner {number}",
            Runner,
            *self._made,
            self._length,
            number,
            seed,
            (place.share, math.ceil(place.cpus)) if self._pinned else None,
            node=place.node,
            cpus=place.cpus,
            gpus=self._gpus,
        )
        place.runner = self._runners[number] = _Hired(number, place, member, starting)

    def _start(self) -> None:
        """Starts the first runners, and others for those that are lost as they start."""
        deadline = time.monotonic() + self._timeout
        while waiting := self._hired():
            if time.monotonic() > deadline:
                raise self._no_room(
                    f"no room, or takes longer than {self._timeout:g} s (start_timeout), for "
                    f"{len(waiting)} of {len(self._places)} runners, each of which"
                )
            for ticket in self._crew.ready(list(waiting), SLICE_S):
                try:
                    self._started(waiting[ticket])
                except Lost as error:
                    self._lose(waiting[ticket], error)
        if not self._places:
            raise self._no_room("no node left for a runner, which")
        self._fixed = self._ordered
        self._begin = self._looked = self._logged = time.monotonic()

    def _hired(self) -> dict[Ticket, _Hired]:
        """Starts runners at places that have none; returns all that have not reported yet."""
        for place in self._places:
            if place.runner is None:
                self._hire(place)
        return {each.starting: each for each in self._runners.values() if each.starting is not None}

    def _started(self, runner: _Hired) -> None:
        """Takes a runner's report, which must agree with the first one.

        Raises:
            Exception: What the runner raised, or a RuntimeError: its spaces differ from others'.
        """
        assert runner.starting is not None
        report: Report = runner.starting.result()
        where = f"runner {runner.number} on {runner.member.where()}"
        if self._agreed is None:
            self._agreed = report, where
            self.single_observation_space = report.single_observation_space
            self.single_action_space = report.single_action_space
        first, others = self._agreed
        for name in ("single_observation_space", "single_action_space"):
            ours, theirs = getattr(report, name), getattr(first, name)
            if ours != theirs:
                raise RuntimeError(
                    f"the envs of {where} have the {name} {ours}, and those of {others} {theirs}"
                )
        runner.starting = None
        _log.info("%s has started: %d envs, %d workers", where, report.num_envs, report.num_workers)

    def _lose(self, runner: _Hired, why: Exception) -> None:
        """Forgets a lost runner, with its fragments in flight; its place is free afterwards.

        Raises:
            RuntimeError: Too many runners were lost at that place before their first fragment.
        """
        place, where = runner.place, runner.member.where()
        place.runner = None
        self._runners.pop(runner.number)
        if runner in self._ready:
            self._ready.remove(runner)
        runner.member.end()
        self._counts["lost"] += 1
        lost = f"runner {runner.number}, on {where}, is lost"
        self._loss = f"; {lost}: {why}"
        _log.warning("%s, with %d fragments under way: %s", lost, len(runner.asked), why)
        place.early_losses += not runner.fragments
        if place.node is not None and place.node not in self._crew.nodes():
            if not self._fixed:
                self._places.remove(place)  # its node is gone; another one may join
                return
            place.node = None
        elif place.early_losses >= TRIES:
            if place.node is None or self._fixed or len(self._places) == 1:
                raise RuntimeError(
                    f"{TRIES} runners were lost one after the other before they had made a "
                    f"fragment, the last one on {where}: {why}"
                ) from why
            self._avoided.add(place.node)
            self._places.remove(place)
            _log.warning("no runner is started on %s again", where)

    def _fill(self) -> None:
        """Starts runners at places that have none; adds places on nodes that have joined."""
        self._hired()
        now = time.monotonic()
        if now - self._logged >= _LOG_S:
            self._logged = now
            _log.info("%s", self.stats())
        if not self._follows or now - self._looked < _LOOK_S:
            return
        self._looked = now
        known = {place.node for place in self._places} | self._avoided
        for node in self._crew.nodes():
            if node not in known:
                places = self._places_on(node)
                self._places += places
                if places:
                    _log.info("%s has joined", node.name)

    # ---- fragments ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Fragment]:
        """Returns the collector itself: a new loop goes on where the last one ended."""
        return self

    def __next__(self) -> Fragment:
        """The next fragment.

        Raises:
            RuntimeError: The collector is closed; or no runner is left, and none can be started.
            Exception: What envs or the policy raise; its cause and notes name the runner and the
                node. The collector is closed then.
        """
        if self._closed:
            raise RuntimeError("this collector is closed")
        try:
            fragment = None
            while fragment is None:
                self._fill()
                runner = self._next_in_turn() if self._ordered else self._next_ready()
                if runner is not None:
                    fragment = self._taken(runner)
            return fragment
        except Exception:
            self._end()
            raise

    def _ask(self, runner: _Hired) -> None:
        """Asks a runner for fragments, until ``in_flight`` of them are."""
        while runner.starting is None and len(runner.asked) < self._in_flight:
            sent = (self._weights,) if runner.version != self.version else ()
            runner.asked.append(runner.member.ask("collect", self.version, *sent))
            runner.version = self.version

    def _next_ready(self) -> _Hired | None:
        """A runner that has answered: the one whose last fragment was taken longest ago."""
        served, self._served = self._served, None
        if served is not None and served.number in self._runners:
            self._runners[served.number] = self._runners.pop(served.number)  # moved to the end
        for runner in self._runners.values():
            self._ask(runner)
        if not self._ready:
            self._ready += self._waited_for(list(self._runners.values()))
        return self._ready.popleft() if self._ready else None

    def _next_in_turn(self) -> _Hired | None:
        """The next runner of the round, if it has answered."""
        if not self._turn:
            for place in self._places:
                assert place.runner is not None
                self._ask(place.runner)
            self._turn.extend(self._places)
        runner = self._turn[0].runner
        assert runner is not None
        if runner.starting is None and not runner.asked:  # it has replaced a lost runner
            self._ask(runner)
        return next(iter(self._waited_for([runner])), None)

    def _waited_for(self, runners: list[_Hired]) -> list[_Hired]:
        """Waits for a slice of time; returns the runners among these that have answered.

        Raises:
            RuntimeError: None of them could be started for too long.
        """
        if runners:
            awaited = {runner.awaited: runner for runner in runners}
            answered = [awaited[each] for each in self._crew.ready(list(awaited), SLICE_S)]
        else:  # there is no runner until a node joins
            time.sleep(SLICE_S)
            answered = []
        if answered or any(runner.starting is None for runner in runners):
            self._waited_s = 0.0
            return answered
        self._waited_s += SLICE_S
        if self._waited_s > self._timeout:
            raise self._no_room(
                f"had no room for {self._timeout:g} s for any runner, each of which"
            )
        return []

    def _taken(self, runner: _Hired) -> Fragment | None:
        """Takes a runner's answer: a fragment; or None for its report, or if it is lost."""
        try:
            if runner.starting is not None:
                try:
                    self._started(runner)
                except Exception as error:  # others have started, so its node is at fault
                    self._lose(runner, error)
                return None
            fragment: Fragment = runner.asked[0].result()
            if fragment.index != runner.fragments:
                raise Lost("Ctrl-C has interrupted an earlier request to it")
        except Lost as error:
            self._lose(runner, error)
            return None
        runner.asked.popleft()
        if self._turn:
            self._turn.popleft()
        self._served = runner
        runner.place.early_losses = 0
        lag = self.version - fragment.version
        runner.fragments += 1
        runner.steps += fragment.steps
        runner.seconds += fragment.seconds
        runner.lag += lag
        for name, value in (
            ("fragments", 1),
            ("steps", fragment.steps),
            ("nbytes", fragment.nbytes),
            ("lag", lag),
        ):
            self._counts[name] += value
        return fragment

    def set_weights(self, weights: Any) -> int:
        """Sets the weights for the fragments that are asked for from now on.

        Args:
            weights: The argument of the policies' ``set_weights``, which must be picklable. A copy
                is made.

        Returns:
            The version of these weights, which fragments made with them have as ``version``.

        Raises:
            RuntimeError: The collector is closed.
            TypeError: The policy has no ``set_weights``; or the weights cannot be pickled.
        """
        if self._closed:
            raise RuntimeError("this collector is closed")
        assert self._agreed is not None
        if not self._agreed[0].takes_weights:
            raise TypeError(
                "the policy that make_policy returns has no method set_weights(weights)"
            )
        try:
            self._weights = self._crew.put(weights)
        except TypeError as error:
            raise TypeError(
                f"the weights cannot be pickled, and so cannot be sent to other nodes: {error}"
            ) from error
        self.version += 1
        return self.version

    def stats(self) -> CollectorStats:
        """Counts so far, of the collector and of its present runners."""
        counts = self._counts
        return CollectorStats(
            counts["fragments"],
            counts["steps"],
            counts["nbytes"],
            self.version,
            counts["lag"] / max(1, counts["fragments"]),
            counts["lost"],
            counts["started"],
            time.monotonic() - self._begin,
            tuple(
                RunnerStats(
                    each.number,
                    each.member.where(),
                    each.fragments,
                    each.steps,
                    each.seconds,
                    each.lag / max(1, each.fragments),
                )
                for each in self._runners.values()
            ),
        )

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the envs, and ends the runners. Fragments stay. A second call does nothing.

        Raises:
            Exception: What an env's ``close`` raises, after all have ended.
        """
        failures = self._end()
        if failures:
            raise failures[0]

    def _end(self) -> list[Exception]:
        """Ends all runners; returns what closing their envs has raised."""
        self._closed = True
        runners, self._runners = list(self._runners.values()), {}
        self._ready.clear()
        self._turn.clear()
        self._places, self._served = [], None
        self._weights, self._made = None, ()  # frees their memory in the object store
        return dismiss(
            self._crew, [(each.member, None if each.starting else each.asked) for each in runners]
        )

    def __enter__(self) -> Collector:
        """Returns the collector itself."""
        return self

    def __del__(self) -> None:
        """Ends the runners, whose CPUs a cycle of references would hold for longer."""
        with suppress(Exception):  # __init__ has failed, or the interpreter is exiting
            if not self._closed:
                self._end()

    def __exit__(self, kind: object, *_: object) -> None:
        """Closes the collector; an env's exception then does not hide one of the block."""
        failures = self._end()
        if failures and kind is None:
            raise failures[0]
        for failure in failures:
            _log.error("as it was closed, an env has raised %s", repr(failure))


def _largest_share(nodes: list[Node], count: int) -> float:
    """The most CPUs that each of ``count`` runners can have, each on one node; at least 1."""
    shares = {node.cpus // some for node in nodes for some in range(1, count + 1)}
    fitting = [
        share
        for share in shares
        if share >= 1 and sum(node.cpus // share for node in nodes) >= count
    ]
    return max(fitting, default=1.0)
