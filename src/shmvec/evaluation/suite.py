"""Plays a suite: pools are started when their task is due, each in a process of its own.

Further threads only start and end pools. A pool that fails takes no other with it: its episodes go
back to their task, for another pool.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from threading import Thread
from typing import Any

from gymnasium import logger

from shmvec._arguments import checked_count, checked_int
from shmvec._cores import usable_cores
from shmvec._options import exchange_settings
from shmvec._policy import Policy
from shmvec.evaluation.episodes import Episode
from shmvec.evaluation.memory import Budget, parsed_bytes
from shmvec.evaluation.player import Player
from shmvec.evaluation.pools import Plan, Pool
from shmvec.evaluation.record import plain
from shmvec.evaluation.tasks import EnvFn, Task
from shmvec.exchange import Answers, AutoresetMode, Exchange
from shmvec.faults import EnvTimeoutError, FaultPolicy

__all__ = ["SuitePlayer"]

_CLOSE_S = 5.0  # for an env to close
_LIMIT_S = 600.0  # for a step, a reset, and for an env to be built, unless other limits are given
_LOOK_S = 0.2  # between two looks at memory
# After how long a wait looks at all pools again: a share of how long it has waited, within limits.
_NAP_SHARE, _SHORTEST_NAP_S, _LONGEST_NAP_S = 0.25, 200e-6, 5e-3
_AGAIN_S = 0.05  # until a start is asked once more to end
# Two envs share a process if their steps take less than this, seen from here: then the process has
# one to step while the policy is asked for the other, and need not be woken for each step.
_FAST_S = 0.01
_STARTS = 20  # times what its start takes: what a task must have left to play, to be started so
# Options that mean nothing where each pool has a process of its own, and retries= rules faults.
_REFUSED = (
    "num_workers",
    "caller_steps",
    "overlap",
    "spare_envs",
    "pin_workers",
    "faults",
    "autoreset_mode",
    "recycle_after",
)


class SuitePool(Pool):
    """A pool whose envs have a process of their own, from its start to its end.

    Attributes:
        born: When it was begun to start, by the monotonic clock.
        error: What its start, or its end, has raised.
    """

    def __init__(
        self, plan: Plan, numbers: Sequence[int], recording: bool, options: Mapping[str, Any]
    ) -> None:
        """Begins to start it."""
        super().__init__(plan, numbers, recording)
        self.born = time.monotonic()
        self.error: BaseException | None = None
        self._made: Exchange | None = None
        self._do(partial(self._start, options))

    def _do(self, work: Any) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.error = error

        self._worker = Thread(target=run, daemon=True)
        self._worker.start()

    def _start(self, options: Mapping[str, Any]) -> None:
        assert self.plan.make is not None
        env_fns = [self.plan.make] * len(self.numbers)
        name = f"evaluate {self.plan.task.name}"
        self._made = Exchange(env_fns, name=name, wait=False, **options)
        self._made.initialize()
        self.exchange = self._made

    @property
    def busy(self) -> bool:
        """Whether it is being started or ended."""
        return self._worker.is_alive()

    @property
    def pid(self) -> int | None:
        """Its process; None: there is none (yet)."""
        return self._made.processes[0].pid if self._made and self._made.processes else None

    def end(self, at_once: bool) -> None:
        """Begins to end it, whatever it does; ``busy`` says until when."""
        self._do(partial(self._end, at_once, self._worker))

    def _end(self, at_once: bool, before: Thread) -> None:
        while before.is_alive():  # it is being started, or ended with patience
            self._close(at_once=True)
            before.join(_AGAIN_S)
        self.error = None  # of a start that was broken off
        self._close(at_once)

    def _close(self, at_once: bool) -> None:
        if self._made is not None:  # else there is nothing to end yet
            self._made.close(timeout=_CLOSE_S, terminate=at_once)

    def wait(self) -> None:
        """Waits until it has started or ended."""
        self._worker.join()


class SuitePlayer(Player):
    """Plays the episodes of tasks in pools that it starts and ends."""

    pools: list[SuitePool]  # type: ignore[assignment]
    of_calls = ("task",)
    of_resets = ("task", "seeds")

    def __init__(
        self,
        tasks: Sequence[tuple[Task, EnvFn]],
        policy: Policy,
        *,
        keys: Collection[str],
        max_envs: int | None,
        memory: int | float | str | None,
        across: bool,
        batch: str,
        batch_size: int | None,
        retries: int,
        recording: bool,
        vector_options: Mapping[str, Any],
    ) -> None:
        """Prepares to play; the arguments of ``evaluate`` of these names mean the same.

        Args:
            tasks: The tasks, and what makes their envs.
            policy: Chooses actions.
            keys: The keys of last infos that episodes keep.
            max_envs: Number of envs at a time. None: two for each core of this machine.
            memory: What their processes may use together.
            across: Whether a batch may have envs of several tasks.
            batch: "ready" or "fixed".
            batch_size: Number of envs that the policy is asked about at a time, at most.
            retries: How often an episode is repeated, or a pool built anew.
            recording: Whether envs get the numbers of their episodes, to record some.
            vector_options: Options of the exchanges.

        Raises:
            ValueError: An argument is out of range.
            TypeError: An argument is of a wrong type.
        """
        refused = [name for name in _REFUSED if vector_options.get(name) is not None]
        if refused:
            raise ValueError(
                f"the envs of a suite have processes of their own, without {', '.join(refused)}: "
                "max_envs= is their number, and retries= says what becomes of faults"
            )
        most = 2 * usable_cores() if max_envs is None else checked_count("max_envs", max_envs)
        super().__init__(policy, most, batch=batch, batch_size=batch_size, across=across)
        if checked_int("retries", retries) < 0:
            raise ValueError(f"retries must not be negative, got {retries}")
        self.plans = {task.name: Plan(task, make) for task, make in tasks}
        self._budget = None if memory is None else Budget(parsed_bytes("memory", memory))
        self._retries = retries
        self._keys = keys
        self._recording = recording
        limits = {
            name: _LIMIT_S if vector_options.get(name) is None else vector_options[name]
            for name in ("step_timeout", "reset_timeout")
        }
        self._start_limit_s: float = limits["reset_timeout"]
        self._options = {
            "context": "forkserver",  # the caller may have threads, and envs of several kinds
            "wait_policy": "park",  # there are as many processes as cores, or more
            "threads_per_worker": 1,
            **{name: value for name, value in vector_options.items() if value is not None},
            **limits,
            "num_workers": 1,
            "faults": FaultPolicy(),
            "autoreset_mode": AutoresetMode.DISABLED,
            "log_errors": False,
        }
        exchange_settings(1, self._options_of(0))  # a wrong option is refused now
        self._ending: list[SuitePool] = []
        self._looked = 0.0
        self._changed = True  # whether there may be a pool to start
        self._too_large: set[str] = set()  # tasks of which one pool alone exceeds the budget

    # ---- the loop ----------------------------------------------------------------------------

    def add(self, episodes: Sequence[Episode]) -> None:  # type: ignore[override]
        """Takes episodes to play; those that are over tell how long others will take."""
        super().add(episodes)
        self._changed = True

    def _up(self) -> Sequence[SuitePool]:
        return [pool for pool in self.pools if pool.group is not None]

    def _is_busy(self) -> bool:
        return bool(self.pools or self._ending or any(map(self._num_due, self.plans.values())))

    def _num_due(self, plan: Plan) -> int:
        return 0 if plan.failure else plan.num_due(self._late)

    def _patience(self, end: float) -> float:
        return 0.0

    def _wait(self, idle_s: float) -> None:
        """Waits; less if the pool answers that was asked first, which is the likeliest to."""
        nap = min(max(_NAP_SHARE * idle_s, _SHORTEST_NAP_S), _LONGEST_NAP_S)
        asked = [pool for pool in self._up() if pool.playing]
        if not asked:
            time.sleep(nap)
            return
        pool = min(asked, key=lambda pool: pool.asked)
        try:
            pool.exchange.wait_for(1, nap)
        except (EnvTimeoutError, RuntimeError) as error:
            self._lost(pool, error)

    def _see_to_pools(self, now: float) -> None:
        for pool in list(self._ending):
            if not pool.busy:
                self._ending.remove(pool)
                self._changed = True
                if pool.error is not None:
                    name = pool.plan.task.name
                    logger.warn("%s", f"as an env of task {name!r} was closed: {pool.error}")
        for pool in list(self.pools):
            if pool.group is not None:
                continue
            if self._late and not pool.plan.num_due(late=True):
                self._end(pool, at_once=True)
            elif not pool.busy:
                self._see_started(pool, now)
            elif now > pool.born + self._start_limit_s:
                limit = f"it took longer than reset_timeout={self._start_limit_s:g} s to be built"
                self._not_built(pool, TimeoutError(limit))
        if self._budget is not None and now >= self._looked + _LOOK_S:
            self._looked = now
            self._changed = True
            self._look_at_memory(self._budget)
        if self._changed:
            self._changed = False
            self._start_pools()

    def _see_started(self, pool: SuitePool, now: float) -> None:
        if pool.error is not None:
            self._not_built(pool, pool.error)
            return
        self._changed = True
        taken, plan = now - pool.born, pool.plan
        plan.start_s = taken if plan.start_s is None else (plan.start_s + taken) / 2
        plan.failures = 0
        self.take_in(pool)

    def _begin(self, pool: Pool) -> None:
        """Has a pool begin the next episodes of its task; ends it if it is not to."""
        assert isinstance(pool, SuitePool)
        if pool.playing or (pool.plan.num_due(self._late) and not self._makes_way(pool)):
            pool.begin(self._late)
        else:
            self._end(pool, at_once=False)

    def _end_episode(self, pool: Pool, episode: Episode) -> None:
        info = episode.info
        episode.info = {key: plain(info[key]) for key in self._keys if key in info}
        self._changed = True
        super()._end_episode(pool, episode)

    # ---- starting pools ----------------------------------------------------------------------

    def _start_pools(self) -> None:
        """Starts the pools that are worth it, as far as there is room for them."""
        while True:
            taken = {number for each in [*self.pools, *self._ending] for number in each.numbers}
            free = [number for number in range(self.num_envs) if number not in taken]
            plan = self._next() if free else None
            if plan is None:
                return
            size = self._size_for(plan)
            if size > len(free):
                if self._num_staying() + size <= self.num_envs:  # others are about to make way
                    return
                size = 1
            running = [(each, each.plan.task.name) for each in [*self.pools, *self._ending]]
            if self._budget and not self._budget.has_room(plan.task.name, running):
                return
            numbers = free[:size]
            options = self._options_of(numbers[0])
            self.pools.append(SuitePool(plan, numbers, self._recording, options))

    def _options_of(self, number: int) -> dict[str, Any]:
        """The options of a pool's exchange, whose only worker would otherwise be number 0."""
        options = dict(self._options)
        environ, init = options.get("worker_environ"), options.get("worker_init")
        if callable(environ):
            options["worker_environ"] = environ(number)
        if init is not None:
            options["worker_init"] = partial(_with_number, init, number)
        return options

    def _next(self) -> Plan | None:
        """The task that a pool is started for: that with the most to do, if it is worth it."""
        envs, starting = Counter[Plan](), Counter[Plan]()
        for pool in self.pools:
            envs[pool.plan] += len(pool.numbers)
            starting[pool.plan] += len(pool.numbers) * (pool.group is None)
        due = [plan for plan in self.plans.values() if self._num_due(plan) > starting[plan]]
        fresh = [plan for plan in due if not envs[plan]]
        if fresh:
            return max(fresh, key=self._work_of)
        # All tasks have a pool: more of them help those that would end last.
        share = -(-self.num_envs // max(1, len(envs)))
        worth = [plan for plan in due if self._pays(plan, envs[plan], starting[plan], share)]
        return max(worth, key=lambda plan: self._work_of(plan) / envs[plan], default=None)

    def _pays(self, plan: Plan, envs: int, starting: int, share: int) -> bool:
        """Whether one more env of a task would have an episode to play once it has started."""
        if plan.alone:
            return False
        if plan.episode_s is None or plan.start_s is None:  # as many for each task
            return envs < share
        left = len(plan.waiting) - starting
        return left * plan.episode_s > (envs - starting) * plan.start_s

    def _work_of(self, plan: Plan) -> float:
        """Seconds that a task's waiting episodes will take; as others' do, if none is over yet."""
        return len(plan.waiting) * (self._known(plan, "episode_s") or 1.0)

    def _known(self, plan: Plan, name: str) -> float | None:
        """A duration of a task; if it is not known yet, the mean of others'; None: nor is any."""
        if (own := getattr(plan, name)) is not None:
            return float(own)
        known = [each for of in self.plans.values() if (each := getattr(of, name)) is not None]
        return sum(known) / len(known) if known else None

    # ---- envs that share a process -----------------------------------------------------------

    def _size_for(self, plan: Plan) -> int:
        """How many envs of a task are to share a process: two if they are fast, and it pays."""
        step_s, start_s = self._known(plan, "step_s"), self._known(plan, "start_s") or 0.0
        if not plan.shares or self.num_envs < 2 or len(plan.waiting) < 2 or self._budget:
            return 1
        fast = step_s is not None and step_s < _FAST_S
        return 2 if fast and self._work_of(plan) > _STARTS * start_s else 1

    def _num_staying(self) -> int:
        """The number of envs of pools that are not to make way for larger ones."""
        sizes = [(len(pool.numbers), pool.plan) for pool in self.pools]
        return sum(size for size, plan in sizes if size >= self._size_for(plan))

    def _makes_way(self, pool: SuitePool) -> bool:
        """Whether a pool that is idle ends, for one of the same task with more envs."""
        size = self._size_for(pool.plan)
        return len(pool.numbers) < size and self._num_staying() + size <= self.num_envs

    # ---- faults ------------------------------------------------------------------------------

    def _raised(self, pool: Pool, answers: Answers) -> None:
        failure = answers.failures[0]
        reason = f"{failure.operation}() has raised {failure.summary}"
        self._fail(pool, reason, failure.env)

    def _lost(self, pool: Pool, error: Exception) -> None:
        self._fail(pool, _reason(error), getattr(error, "env", None))

    def _fail(self, pool: Pool, reason: str, env: int | None) -> None:
        """Ends a pool; its episodes are repeated, or count as failed.

        Args:
            pool: The pool.
            reason: What has happened.
            env: The env that has failed; None: any of them. Of several nobody knows which: none
                counts as failed, and each is alone from now on.
        """
        plan = pool.plan
        if env is None and len(pool.playing) == 1:
            (env,) = pool.playing
        plan.shares &= len(pool.numbers) == 1
        assert isinstance(pool, SuitePool)
        for each in sorted(pool.playing, reverse=True):
            episode = pool.leave(each)
            name = f"episode {episode.number} of task {plan.task.name!r} (seed {episode.seed})"
            plan.faults[episode.number] += each == env
            if each == env and plan.faults[episode.number] > self._retries:
                episode.failed = reason
                self._end_episode(pool, episode)
                logger.warn("%s", f"{name} counts as failed: {reason}")
            else:
                episode.interrupt()
                plan.waiting.appendleft(episode)
                logger.warn("%s", f"{name} was interrupted, and is repeated: {reason}")
        self._end(pool, at_once=True)

    def _not_built(self, pool: SuitePool, error: BaseException) -> None:
        """Takes note of a pool that could not be built."""
        plan = pool.plan
        name = plan.task.name
        reason = getattr(error, "summary", "") or f"{type(error).__name__}: {error}"
        self._end(pool, at_once=True)
        if len(pool.numbers) > 1:  # perhaps there can be only one in a process
            plan.shares = False
            return
        plan.alone = True
        plan.failures += not any(other.plan is plan for other in self.pools)
        if plan.failures <= self._retries:
            logger.warn("%s", f"an env of task {name!r} could not be built: {reason}")
            return
        plan.failure = reason
        logger.warn("%s", f"task {name!r} is given up, it cannot be built: {reason}")

    def _look_at_memory(self, budget: Budget) -> None:
        """Ends the youngest pool where all together need more memory than they may."""
        pools = [*self.pools, *self._ending]
        about = [(pool, pool.plan.task.name, pool.pid, bool(pool.playing)) for pool in pools]
        if budget.look(about) or not self.pools or self._ending:  # soon there will be more room
            return
        if len(self.pools) > 1:
            pool = max(self.pools, key=lambda pool: pool.born)
            for env in list(pool.playing):  # they are played again: nothing has failed
                episode = pool.leave(env)
                episode.return_, episode.length = 0.0, 0
                pool.plan.waiting.appendleft(episode)
            self._end(pool, at_once=True)
            return
        name = self.pools[0].plan.task.name
        if name not in self._too_large:
            self._too_large.add(name)
            logger.warn("%s", f"one env of task {name!r} alone needs more than memory allows")

    # ---- the end -----------------------------------------------------------------------------

    def _end(self, pool: SuitePool, at_once: bool) -> None:
        """Begins to end a pool; others get its numbers once it has ended."""
        self.pools.remove(pool)
        self._ending.append(pool)
        pool.end(at_once)

    def close(self, at_once: bool = True) -> None:
        """Ends all pools, and waits until they have ended."""
        pools = [*self.pools, *self._ending]
        for pool in pools:
            if at_once or pool not in self._ending:
                pool.end(at_once)
        for pool in pools:
            pool.wait()
        self.pools.clear()
        self._ending.clear()


def _with_number(init: Any, number: int, _: int) -> None:
    init(number)


def _reason(error: BaseException) -> str:
    """Why an env cannot go on: without the advice that is for users of one vector env."""
    return getattr(error, "summary", "") or str(error)
