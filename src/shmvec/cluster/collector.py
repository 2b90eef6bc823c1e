"""``Collector``: fragments of trajectories from runners on all nodes, for one learner."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmvec._arguments import checked_count
from shmvec.cluster.crew import Lost
from shmvec.cluster.fragments import Fragment, Report, Runner, pickled
from shmvec.cluster.hirings import Hiring, Hirings
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Collector", "CollectorStats", "RunnerStats"]

_log = logging.getLogger("shmvec.cluster")

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
class _Runner(Hiring):
    """The collector's record of a runner."""

    number: int = 0
    version: int = 0  # version of the weights that it was sent last
    fragments: int = 0
    steps: int = 0
    seconds: float = 0.0
    lag: int = 0


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
        self._ready: deque[_Runner] = deque()  # runners whose next fragments have come
        self._turn: deque[_Runner] = deque()  # those whose fragments are still to come this round
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
        follows = num_runners is None and not ordered and not local
        if pin_runners and not follows:
            raise ValueError(
                "pin_runners is for runners that stay on their nodes: without num_runners, ordered "
                "and local"
            )
        self._pinned = pin_runners
        self._first_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._ordered = ordered or local
        self._hirings = hirings = Hirings(
            _Runner,
            "runner",
            local=local,
            options=actor_options,
            cpus=cpus_per_runner,
            gpus=gpus_per_runner,
            timeout=start_timeout,
        )
        self._made = tuple(map(hirings.crew.put, make))
        self._weights: Any = None
        self._served: _Runner | None = None
        self._counts = dict.fromkeys(("fragments", "steps", "nbytes", "lag"), 0)
        self.version = 0
        try:
            hirings.places = hirings.anywhere(num_runners) if num_runners else hirings.on_nodes()
            while not hirings.start(self._begin):
                pass
            hirings.fixed = self._ordered  # each place has its part in each round
            hirings.follows = follows
            self._report: Report = hirings.first
            self.single_observation_space, self.single_action_space = self._report.spaces
        except BaseException:
            self._end()
            raise
        self._since = self._logged = time.monotonic()

    # ---- runners -----------------------------------------------------------------------------

    def _begin(self, runner: _Runner) -> tuple[Any, ...]:
        """The name and the arguments of another runner."""
        runner.number = self._hirings.started
        runner.version = runner.fragments = runner.steps = runner.lag = 0
        runner.seconds = 0.0
        seed = (self._first_seed + runner.number) % _SEEDS * _STRIDE
        share = (runner.share, math.ceil(runner.cpus)) if self._pinned else None
        arguments = self._length, runner.number, seed, share
        return f"runner {runner.number}", Runner, *self._made, *arguments

    def _lose(self, runner: _Runner, why: Exception) -> None:
        """Forgets a lost runner, with its fragments in flight."""
        if runner in self._ready:
            self._ready.remove(runner)
        self._hirings.lose(runner, why)

    def _log_stats(self) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_S:
            self._logged = now
            _log.info("%s", self.stats())

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
                self._log_stats()
                self._hirings.fill(self._begin)
                runner = self._next_in_turn() if self._ordered else self._next_ready()
                if runner is not None:
                    fragment = self._taken(runner)
            return fragment
        except Exception:
            self._end()
            raise

    def _ask(self, runner: _Runner) -> None:
        """Asks a runner for fragments, until ``in_flight`` of them are."""
        while runner.report is not None and len(runner.calls) < self._in_flight:
            sent = (self._weights,) if runner.version != self.version else ()
            self._hirings.ask(runner, "collect", self.version, *sent)
            runner.version = self.version

    def _next_ready(self) -> _Runner | None:
        """A runner that has answered: the one whose last fragment was taken longest ago."""
        runners = self._hirings.places
        served, self._served = self._served, None
        if served in runners:
            runners.remove(served)
            runners.append(served)
        for runner in runners:
            self._ask(runner)
        if not self._ready:
            self._ready += self._hirings.wait(runners)
        return self._ready.popleft() if self._ready else None

    def _next_in_turn(self) -> _Runner | None:
        """The next runner of the round, if it has answered."""
        if not self._turn:
            for runner in self._hirings.places:
                self._ask(runner)
            self._turn.extend(self._hirings.places)
        runner = self._turn[0]
        if not runner.calls:  # it has replaced a lost runner
            self._ask(runner)
        return next(iter(self._hirings.wait([runner])), None)

    def _taken(self, runner: _Runner) -> Fragment | None:
        """Takes a runner's answer: a fragment; or None for its report, or if it is lost."""
        try:
            if runner.report is None:
                try:
                    self._hirings.take(runner)
                except Exception as error:  # others have started, so its node is at fault
                    self._lose(runner, error)
                return None
            fragment: Fragment = self._hirings.take(runner)
            if fragment.index != runner.fragments:
                raise Lost("Ctrl-C has interrupted an earlier request to it")
        except Lost as error:
            self._lose(runner, error)
            return None
        if self._turn:
            self._turn.popleft()
        self._served = runner
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
        if not self._report.takes_weights:
            raise TypeError(
                "the policy that make_policy returns has no method set_weights(weights)"
            )
        try:
            self._weights = self._hirings.crew.put(weights)
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
            self._hirings.lost,
            self._hirings.started,
            time.monotonic() - self._since,
            tuple(
                RunnerStats(
                    each.number,
                    each.where,
                    each.fragments,
                    each.steps,
                    each.seconds,
                    each.lag / max(1, each.fragments),
                )
                for each in self._hirings.places
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
        self._ready.clear()
        self._turn.clear()
        self._served = None
        self._weights, self._made = None, ()  # frees their memory in the object store
        return self._hirings.close()

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
