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
from shmvec.cluster.actor_pool import ActorPool, Place
from shmvec.cluster.backend import ActorLostError
from shmvec.cluster.fragments import Fragment, Runner, RunnerReport, pickle_object
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Collector", "CollectorStats", "RunnerStats"]

_log = logging.getLogger("shmvec.cluster")

_LOG_INTERVAL_S = 30.0
_NUM_RUNNER_SEEDS, _SEEDS_PER_RUNNER = 1 << 15, 1 << 16  # so seeds are below 2**31


@dataclass(frozen=True)
class RunnerStats:
    """Counts of a runner's fragments that the learner has received.

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
        fragments: Number of fragments that the learner has received.
        steps: Number of env steps in them.
        nbytes: Bytes of their arrays.
        version: The version of the present weights.
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
class _RunnerPlace(Place):
    """The collector's record of a runner."""

    number: int = 0
    version: int = 0  # of the weights that it has
    fragments: int = 0
    steps: int = 0
    seconds: float = 0.0
    lag: int = 0


class Collector:
    """Collects fragments of trajectories from runners on all nodes of a cluster.

    A runner is an actor of Ray's with a vector env over the cores of its node, and a policy.
    No step goes over the network: only fragments do, and weights, once for each node.

    Iterate over a collector to receive fragments. Each ``next`` asks the runner of the last
    fragment for another one, with the present weights, and waits for a fragment of any runner.
    While the learner uses a fragment, others are made: ``in_flight`` for each runner.

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
            make_envs: ``make_envs()`` returns a :class:`shmvec.ShmVectorEnv`, in each runner.
                Without ``num_workers`` it has a worker for each CPU of the runner.
            make_policy: ``make_policy(seed)`` returns a policy, in each runner:
                ``policy(observations, env_ids)`` returns actions, or a pair of actions and a dict
                of arrays with a row for each env, such as values and log-probabilities. Its method
                ``reset(env_ids)``, if there is one, is called before it gets the first observations
                of episodes in these envs. ``set_weights(weights)`` takes the learner's weights. Its
                random numbers should depend on the seed alone.
            fragment_length: Steps of each env in a fragment.
            num_runners: Number of runners. None: one on each node, or as many as
                ``cpus_per_runner`` and ``gpus_per_runner`` leave room for. Nodes that join later
                get runners, too, unless ``ordered``. With ``local``: one.
            in_flight: Number of fragments of each runner that are being made, or wait for the
                learner.
            seed: The seeds of a runner's envs and policy are derived from this and the runner's
                number.
            ordered: Whether fragments come in rounds: one of each runner, in a fixed order, all
                made with the weights that are set when the round begins. The first ``in_flight``
                rounds begin at once, and another one after each. The learner's fragments do not
                depend on time then.
            local: Whether all runners are in this process, without a cluster and without Ray. They
                work when a fragment is asked for, and their fragments are those of ``ordered``, bit
                for bit.
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
            Exception: A function has raised it; its cause and notes name the node.
        """
        self._ready_runners: deque[_RunnerPlace] = deque()  # their next fragments are here
        self._round: deque[_RunnerPlace] = deque()  # their fragments are not yet taken this round
        self._closed = False
        for name, function in (("make_envs", make_envs), ("make_policy", make_policy)):
            if not callable(function):
                raise TypeError(f"{name} must be callable, got {function!r}")
        make = pickle_object("make_envs", make_envs), pickle_object("make_policy", make_policy)
        self._fragment_length = checked_count("fragment_length", fragment_length)
        self._in_flight = checked_count("in_flight", in_flight)
        if num_runners is not None:
            num_runners = checked_count("num_runners", num_runners)
        if cpus_per_runner is not None and not cpus_per_runner > 0:
            raise ValueError(f"cpus_per_runner must be positive, got {cpus_per_runner}")
        if not gpus_per_runner >= 0:
            raise ValueError(f"gpus_per_runner must not be negative, got {gpus_per_runner}")
        adds_new_nodes = num_runners is None and not ordered and not local
        if pin_runners and not adds_new_nodes:
            raise ValueError(
                "pin_runners needs runners that stay on their nodes: leave num_runners, ordered "
                "and local out"
            )
        self._pin_runners = pin_runners
        self._first_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._ordered = ordered or local
        self._pool = pool = ActorPool(
            _RunnerPlace,
            "runner",
            local=local,
            options=actor_options,
            cpus=cpus_per_runner,
            gpus=gpus_per_runner,
            timeout=start_timeout,
        )
        self._pickled_makers = tuple(map(pool.backend.put, make))
        self._weights: Any = None
        self._last_runner: _RunnerPlace | None = None
        self._counts = dict.fromkeys(("fragments", "steps", "nbytes", "lag"), 0)
        self.version = 0
        try:
            places = pool.places_anywhere(num_runners) if num_runners else pool.places_on_nodes()
            pool.places = places
            while not pool.start_all(self._prepare_runner):
                pass
            pool.keeps_places = self._ordered  # each round needs all places
            pool.adds_new_nodes = adds_new_nodes
            self._report: RunnerReport = pool.first_report
            self.single_observation_space, self.single_action_space = self._report.spaces
        except BaseException:
            self._shut_down()
            raise
        self._started_at = self._logged_at = time.monotonic()

    # ---- runners -----------------------------------------------------------------------------

    def _prepare_runner(self, runner: _RunnerPlace) -> tuple[Any, ...]:
        """Resets a place's counts; returns the next runner's name and arguments."""
        runner.number = self._pool.num_started
        runner.version = runner.fragments = runner.steps = runner.lag = 0
        runner.seconds = 0.0
        seed = (self._first_seed + runner.number) % _NUM_RUNNER_SEEDS * _SEEDS_PER_RUNNER
        share = (runner.index_on_node, math.ceil(runner.cpus)) if self._pin_runners else None
        arguments = self._fragment_length, runner.number, seed, share
        return f"runner {runner.number}", Runner, *self._pickled_makers, *arguments

    def _log_stats(self) -> None:
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            _log.info("%s", self.stats())

    # ---- fragments ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Fragment]:
        """Returns the collector itself: a new loop continues where the last one ended."""
        return self

    def __next__(self) -> Fragment:
        """The next fragment.

        Raises:
            RuntimeError: The collector is closed; or no runner is left, and none can be started.
            Exception: An env or the policy has raised it; its cause and notes name the runner and
                the node. The collector is closed then.
        """
        self._check_open()
        try:
            fragment = None
            while fragment is None:
                self._log_stats()
                self._pool.start_missing(self._prepare_runner)
                runner = self._wait_for_next_in_round() if self._ordered else self._wait_for_any()
                if runner is not None:
                    fragment = self._take_fragment(runner)
            return fragment
        except Exception:
            self._check_open()  # it may have been closed meanwhile, which ends the runners
            self._shut_down()
            raise

    def _request_fragments(self, runner: _RunnerPlace) -> None:
        """Asks a runner for fragments until it has ``in_flight`` requests."""
        while runner.report is not None and len(runner.calls) < self._in_flight:
            weights = (self._weights,) if runner.version != self.version else ()
            self._pool.ask(runner, "collect", self.version, *weights)
            runner.version = self.version

    def _wait_for_any(self) -> _RunnerPlace | None:
        """The runner whose last fragment was taken longest ago, of those that have answered."""
        runners = self._pool.places
        last_runner, self._last_runner = self._last_runner, None
        if last_runner in runners:
            runners.remove(last_runner)
            runners.append(last_runner)
        for runner in runners:
            self._request_fragments(runner)
        if not self._ready_runners:
            self._ready_runners += self._pool.wait(runners)
        return self._ready_runners.popleft() if self._ready_runners else None

    def _wait_for_next_in_round(self) -> _RunnerPlace | None:
        """The next runner of the round, if it has answered."""
        if not self._round:
            for runner in self._pool.places:
                self._request_fragments(runner)
            self._round.extend(self._pool.places)
        runner = self._round[0]
        if not runner.calls:  # it replaces a lost runner
            self._request_fragments(runner)
        return next(iter(self._pool.wait([runner])), None)

    def _take_fragment(self, runner: _RunnerPlace) -> Fragment | None:
        """Takes a runner's answer; returns None if that is its report, or the runner is lost."""
        try:
            if runner.report is None:
                try:
                    self._pool.take(runner)
                except Exception as error:  # its node is at fault, since others have started
                    self._pool.drop_lost(runner, error)
                return None
            fragment: Fragment = self._pool.take(runner)
            if fragment.index != runner.fragments:
                raise ActorLostError("Ctrl-C has interrupted an earlier request to it")
        except ActorLostError as error:
            self._pool.drop_lost(runner, error)
            return None
        if self._round:
            self._round.popleft()
        self._last_runner = runner
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
        """Sets the weights for fragments that are asked for from now on.

        Args:
            weights: The argument of the policies' ``set_weights``; it must be picklable, and is
                copied.

        Returns:
            The version of these weights: the ``version`` of fragments made with them.

        Raises:
            RuntimeError: The collector is closed.
            TypeError: The policy has no ``set_weights``; or the weights cannot be pickled.
        """
        self._check_open()
        if not self._report.takes_weights:
            raise TypeError(
                "the policy that make_policy returns has no method set_weights(weights)"
            )
        try:
            self._weights = self._pool.backend.put(weights)
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
            self._pool.num_lost,
            self._pool.num_started,
            time.monotonic() - self._started_at,
            tuple(
                RunnerStats(
                    each.number,
                    each.node_name,
                    each.fragments,
                    each.steps,
                    each.seconds,
                    each.lag / max(1, each.fragments),
                )
                for each in self._pool.places
            ),
        )

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the envs, and ends the runners. Fragments stay. A second call does nothing.

        Raises:
            Exception: An env's ``close`` has raised it; all have ended.
        """
        failures = self._shut_down()
        if failures:
            raise failures[0]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this collector is closed")

    def _shut_down(self) -> list[Exception]:
        """Ends all runners; returns the exceptions of closing their envs."""
        self._closed = True
        self._ready_runners.clear()
        self._round.clear()
        self._last_runner = None
        self._weights, self._pickled_makers = None, ()  # frees their memory in the object store
        return self._pool.close()

    def __enter__(self) -> Collector:
        """Returns the collector itself."""
        return self

    def __del__(self) -> None:
        """Ends the runners, so that their CPUs are free again."""
        with suppress(Exception):  # __init__ has failed, or the interpreter is exiting
            if not self._closed:
                self._shut_down()

    def __exit__(self, kind: object, *_: object) -> None:
        """Closes the collector; an env's exception does not hide one of the block."""
        failures = self._shut_down()
        if failures and kind is None:
            raise failures[0]
        for failure in failures:
            _log.error("an env's close() has raised %s", repr(failure))
