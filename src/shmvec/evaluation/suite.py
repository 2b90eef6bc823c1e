"""Plays a suite: starts a pool, in its own process, when its task is due.

Other threads only start and end pools. A failed pool does not affect the others: its episodes go
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
from shmvec.evaluation.memory import Budget, parse_bytes
from shmvec.evaluation.player import Plan, Player, Pool
from shmvec.evaluation.record import to_plain
from shmvec.evaluation.tasks import EnvFn, Task
from shmvec.exchange import Answers, AutoresetMode, Exchange
from shmvec.faults import EnvTimeoutError, FaultPolicy, module_that_raised

__all__ = ["SuitePlayer"]

_CLOSE_TIMEOUT_S = 5.0  # for an env to close
_DEFAULT_TIMEOUT_S = 600.0  # for a step, a reset, and an env to be built
_MEMORY_CHECK_S = 0.2  # between two checks
# The time between two looks at all pools is a share of the time waited so far, within limits.
_NAP_SHARE, _MIN_NAP_S, _MAX_NAP_S = 0.25, 1e-3, 5e-3
_STOP_RETRY_S = 0.05  # between two requests to a start to end
# Two envs share a process if their steps, with the policy's share, take less than this. Then the
# process has an env to step while the policy is asked about the other, and is woken less often.
_FAST_STEP_S = 0.01
# Two envs only share a process if the task's remaining episodes take this many times its start.
_MIN_WORK_PER_START = 20
# Options without a meaning, since each pool has its own process, and retries= deals with faults.
_REFUSED_OPTIONS = (
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
    """A pool with its own process, from its start to its end.

    Attributes:
        start_time: When its start began, by the monotonic clock.
        error: The exception of its start or end.
    """

    def __init__(
        self, plan: Plan, numbers: Sequence[int], recording: bool, options: Mapping[str, Any]
    ) -> None:
        """Begins to start the pool."""
        super().__init__(plan, numbers, recording)
        self.start_time = time.monotonic()
        self.error: BaseException | None = None
        self._exchange: Exchange | None = None
        self._run_in_thread(partial(self._start, options))

    def _run_in_thread(self, work: Any) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.error = error

        self._thread = Thread(target=run, daemon=True)
        self._thread.start()

    def _start(self, options: Mapping[str, Any]) -> None:
        assert self.plan.make is not None
        env_fns = [self.plan.make] * len(self.numbers)
        name = f"evaluate {self.plan.task.name}"
        self._exchange = Exchange(env_fns, name=name, wait=False, **options)
        self._exchange.initialize()
        self.exchange = self._exchange

    @property
    def is_busy(self) -> bool:
        """Whether it is being started or ended."""
        return self._thread.is_alive()

    @property
    def pid(self) -> int | None:
        """Its process; None if there is none, or none yet."""
        exchange = self._exchange
        return exchange.processes[0].pid if exchange and exchange.processes else None

    def end(self, at_once: bool) -> None:
        """Begins to end the pool, whatever it does; ``is_busy`` is True until it has ended."""
        self._run_in_thread(partial(self._end, at_once, self._thread))

    def _end(self, at_once: bool, previous: Thread) -> None:
        while previous.is_alive():  # the pool is being started, or ended with a timeout
            self._close(at_once=True)
            previous.join(_STOP_RETRY_S)
        self.error = None  # that of a start which was interrupted
        self._close(at_once)

    def _close(self, at_once: bool) -> None:
        if self._exchange is not None:  # its start has come so far
            self._exchange.close(timeout=_CLOSE_TIMEOUT_S, terminate=at_once)

    def wait(self) -> None:
        """Waits until the pool has started or ended."""
        self._thread.join()


class SuitePlayer(Player):
    """Plays the episodes of tasks in pools that it starts and ends."""

    pools: list[SuitePool]  # type: ignore[assignment]
    call_names = ("task",)
    reset_names = ("task", "seeds")

    def __init__(
        self,
        tasks: Sequence[tuple[Task, EnvFn]],
        policy: Policy,
        *,
        keys: Collection[str],
        max_envs: int | None,
        memory: int | float | str | None,
        mix_tasks: bool,
        batch: str,
        batch_size: int | None,
        retries: int,
        recording: bool,
        vector_options: Mapping[str, Any],
    ) -> None:
        """Prepares to play; the arguments of ``evaluate`` of these names mean the same.

        Args:
            tasks: The tasks, and the functions that make their envs.
            policy: Chooses actions.
            keys: The keys of last infos that episodes keep.
            max_envs: Number of envs at a time. None: two for each core of this machine.
            memory: A limit to the memory of their processes together.
            mix_tasks: Whether a batch may have envs of several tasks.
            batch: "ready" or "fixed".
            batch_size: Largest number of envs in a batch of the policy.
            retries: How often an episode is repeated, or a pool built again.
            recording: Whether envs get the numbers of their episodes, to record videos of some.
            vector_options: Options of the exchanges.

        Raises:
            ValueError: An argument is out of range.
            TypeError: An argument is of a wrong type.
        """
        refused = [name for name in _REFUSED_OPTIONS if vector_options.get(name) is not None]
        if refused:
            raise ValueError(
                f"the envs of a suite have their own processes, and cannot have "
                f"{', '.join(refused)}: max_envs= sets their number, and retries= deals with faults"
            )
        num_envs = 2 * usable_cores() if max_envs is None else checked_count("max_envs", max_envs)
        super().__init__(policy, num_envs, batch=batch, batch_size=batch_size, mix_tasks=mix_tasks)
        if checked_int("retries", retries) < 0:
            raise ValueError(f"retries must not be negative, got {retries}")
        self.plans = {task.name: Plan(task, make) for task, make in tasks}
        self._budget = None if memory is None else Budget(parse_bytes("memory", memory))
        self._retries = retries
        self._keys = keys
        self._recording = recording
        self._options: dict[str, Any] = {
            "context": "forkserver",  # the caller may have threads, and envs of several kinds
            "wait_policy": "park",  # there are as many processes as cores, or more
            "threads_per_worker": 1,
            "step_timeout": _DEFAULT_TIMEOUT_S,
            "reset_timeout": _DEFAULT_TIMEOUT_S,
            **{name: value for name, value in vector_options.items() if value is not None},
            "num_workers": 1,
            "faults": FaultPolicy(),
            "autoreset_mode": AutoresetMode.DISABLED,
            "log_errors": False,
        }
        exchange_settings(1, self._options_of(0))  # refuses wrong options now
        self._start_limit_s: float = self._options["reset_timeout"]
        self._ending: list[SuitePool] = []
        self._last_memory_check = 0.0
        self._may_start = True  # whether there may be a pool to start
        self._too_large: set[str] = set()  # tasks of which one pool alone exceeds the budget

    # ---- the loop ----------------------------------------------------------------------------

    def add(self, episodes: Sequence[Episode]) -> None:  # type: ignore[override]
        """Adds episodes to play; those that are over serve to estimate how long others take."""
        super().add(episodes)
        self._may_start = True

    def _has_work(self) -> bool:
        return bool(self.pools or self._ending or any(map(self._num_due, self.plans.values())))

    def _num_due(self, plan: Plan) -> int:
        return 0 if plan.failure else plan.num_due(self._only_begun)

    def _wait_limit(self, end: float) -> float:
        return 0.0

    def _wait(self, idle_s: float) -> None:
        """Waits for the pool that is expected to answer first, or for a nap."""
        nap = min(max(_NAP_SHARE * idle_s, _MIN_NAP_S), _MAX_NAP_S)
        asked = [pool for pool in self._running_pools() if pool.playing]
        if not asked:
            time.sleep(nap)
            return
        pool = min(asked, key=lambda pool: pool.last_request + (pool.plan.step_s or 0.0))
        try:
            pool.exchange.wait_for(1, nap)
        except (EnvTimeoutError, RuntimeError) as error:
            self._handle_lost_pool(pool, error)

    def _manage_pools(self, now: float) -> None:
        for pool in list(self._ending):
            if not pool.is_busy:
                self._ending.remove(pool)
                self._may_start = True
                if pool.error is not None:
                    name = pool.plan.task.name
                    logger.warn("%s", f"as an env of task {name!r} was closed: {pool.error}")
        for pool in list(self.pools):
            if pool.group is not None:
                continue
            if self._only_begun and not pool.plan.num_due(only_begun=True):
                self._end(pool, at_once=True)
            elif not pool.is_busy:
                self._handle_started(pool, now)
            elif now > pool.start_time + self._start_limit_s:
                message = f"it took longer than reset_timeout={self._start_limit_s:g} s to be built"
                self._handle_build_failure(pool, TimeoutError(message))
        if self._budget is not None and now >= self._last_memory_check + _MEMORY_CHECK_S:
            self._last_memory_check = now
            self._may_start = True
            self._enforce_budget(self._budget)
        if self._may_start:
            self._may_start = False
            self._start_pools()

    def _handle_started(self, pool: SuitePool, now: float) -> None:
        if pool.error is not None:
            self._handle_build_failure(pool, pool.error)
            return
        self._may_start = True
        duration, plan = now - pool.start_time, pool.plan
        plan.start_s = duration if plan.start_s is None else (plan.start_s + duration) / 2
        plan.build_failures = 0
        self.admit(pool)

    def _begin(self, pool: Pool) -> None:
        """Has a pool begin the next episodes of its task, or ends it if it has none."""
        assert isinstance(pool, SuitePool)
        if pool.playing or (pool.plan.num_due(self._only_begun) and not self._is_too_small(pool)):
            pool.begin(self._only_begun)
        else:
            self._end(pool, at_once=False)

    def _end_episode(self, pool: Pool, episode: Episode) -> None:
        info = episode.info
        episode.info = {key: to_plain(info[key]) for key in self._keys if key in info}
        self._may_start = True
        super()._end_episode(pool, episode)

    # ---- starting pools ----------------------------------------------------------------------

    def _start_pools(self) -> None:
        """Starts pools that pay off, as far as there is room."""
        while True:
            taken = {number for each in [*self.pools, *self._ending] for number in each.numbers}
            free = [number for number in range(self.num_envs) if number not in taken]
            plan = self._next_plan() if free else None
            if plan is None:
                return
            size = self._pool_size(plan)
            if size > len(free):
                if self._num_envs_staying() + size <= self.num_envs:  # smaller pools are to end
                    return
                size = 1
            running = [(each, each.plan.task.name) for each in [*self.pools, *self._ending]]
            if self._budget and not self._budget.has_room(plan.task.name, running):
                return
            numbers = free[:size]
            options = self._options_of(numbers[0])
            self.pools.append(SuitePool(plan, numbers, self._recording, options))

    def _options_of(self, number: int) -> dict[str, Any]:
        """The options of a pool's exchange: its only worker gets ``number``, instead of 0."""
        options = dict(self._options)
        environ, init = options.get("worker_environ"), options.get("worker_init")
        if callable(environ):
            options["worker_environ"] = environ(number)
        if init is not None:
            options["worker_init"] = partial(_init_as, init, number)
        return options

    def _next_plan(self) -> Plan | None:
        """The task for which a pool is started next; None if no pool would pay off."""
        envs, starting = Counter[Plan](), Counter[Plan]()
        for pool in self.pools:
            envs[pool.plan] += len(pool.numbers)
            starting[pool.plan] += len(pool.numbers) * (pool.group is None)
        due = [plan for plan in self.plans.values() if self._num_due(plan) > starting[plan]]
        fresh = [plan for plan in due if not envs[plan]]
        if fresh:
            return max(fresh, key=self._work_of)
        # All tasks have a pool: one more goes to the task that would end last.
        share = -(-self.num_envs // max(1, len(envs)))
        slow = [plan for plan in due if self._pays_off(plan, envs[plan], starting[plan], share)]
        return max(slow, key=lambda plan: self._work_of(plan) / envs[plan], default=None)

    def _pays_off(self, plan: Plan, envs: int, starting: int, share: int) -> bool:
        """Whether one more env of a task would have an episode to play once it has started."""
        if plan.single_pool:
            return False
        if plan.episode_s is None or plan.start_s is None:  # not known: an equal share each
            return envs < share
        left = len(plan.waiting) - starting
        return left * plan.episode_s > (envs - starting) * plan.start_s

    def _work_of(self, plan: Plan) -> float:
        """Estimated seconds that a task's waiting episodes take."""
        return len(plan.waiting) * (self._estimate(plan, "episode_s") or 1.0)

    def _estimate(self, plan: Plan, name: str) -> float | None:
        """A duration of a task, or, if it is not known yet, the mean of the others'."""
        if (value := getattr(plan, name)) is not None:
            return float(value)
        all_values = (getattr(other, name) for other in self.plans.values())
        values = [value for value in all_values if value is not None]
        return sum(values) / len(values) if values else None

    # ---- envs that share a process -----------------------------------------------------------

    def _pool_size(self, plan: Plan) -> int:
        """The number of envs of a task in a process: two if they are fast, and it pays off."""
        step_s, start_s = self._estimate(plan, "step_s"), self._estimate(plan, "start_s") or 0.0
        if not plan.may_share or self.num_envs < 2 or len(plan.waiting) < 2 or self._budget:
            return 1
        fast = step_s is not None and step_s < _FAST_STEP_S
        return 2 if fast and self._work_of(plan) > _MIN_WORK_PER_START * start_s else 1

    def _num_envs_staying(self) -> int:
        """The number of envs in pools that larger ones do not replace."""
        sizes = [(len(pool.numbers), pool.plan) for pool in self.pools]
        return sum(size for size, plan in sizes if size >= self._pool_size(plan))

    def _is_too_small(self, pool: SuitePool) -> bool:
        """Whether an idle pool is to be replaced by one of the same task with more envs."""
        size = self._pool_size(pool.plan)
        return len(pool.numbers) < size and self._num_envs_staying() + size <= self.num_envs

    # ---- faults ------------------------------------------------------------------------------

    def _handle_failures(self, pool: Pool, answers: Answers) -> None:
        failure = answers.failures[0]
        reason = f"{failure.operation}() has raised {failure.summary}"
        self._fail(pool, reason, failure.env)

    def _handle_lost_pool(self, pool: Pool, error: Exception) -> None:
        if not module_that_raised(error).startswith("shmvec."):  # a signal's handler has raised it
            raise error
        self._fail(pool, _reason(error), getattr(error, "env", None))

    def _fail(self, pool: Pool, reason: str, env: int | None) -> None:
        """Ends a pool; its episodes are repeated, or count as failed.

        Args:
            pool: The pool.
            reason: The fault.
            env: The env that has failed. None: it is not known; then no env of several counts as
                failed, and the task's envs share no process from now on.
        """
        plan = pool.plan
        if env is None and len(pool.playing) == 1:
            (env,) = pool.playing
        plan.may_share &= len(pool.numbers) == 1
        assert isinstance(pool, SuitePool)
        for each in sorted(pool.playing, reverse=True):
            episode = pool.remove_episode(each)
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

    def _handle_build_failure(self, pool: SuitePool, error: BaseException) -> None:
        plan = pool.plan
        name = plan.task.name
        reason = getattr(error, "summary", "") or f"{type(error).__name__}: {error}"
        self._end(pool, at_once=True)
        if len(pool.numbers) > 1:  # perhaps a process can only have one
            plan.may_share = False
            return
        plan.single_pool = True
        plan.build_failures += not any(other.plan is plan for other in self.pools)
        if plan.build_failures <= self._retries:
            logger.warn("%s", f"an env of task {name!r} could not be built: {reason}")
            return
        plan.failure = reason
        logger.warn("%s", f"task {name!r} is given up, since its env cannot be built: {reason}")

    def _enforce_budget(self, budget: Budget) -> None:
        """Ends the youngest pool if all together exceed the budget, and none is about to end."""
        pools = [*self.pools, *self._ending]
        envs = [(pool, pool.plan.task.name, pool.pid, bool(pool.playing)) for pool in pools]
        if budget.check(envs) or not self.pools or self._ending:
            return
        if len(self.pools) > 1:
            pool = max(self.pools, key=lambda pool: pool.start_time)
            for env in list(pool.playing):  # played again, without counting as repeats
                episode = pool.remove_episode(env)
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
        """Begins to end a pool; other pools can get its numbers once it has ended."""
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


def _init_as(init: Any, number: int, _: int) -> None:
    init(number)


def _reason(error: BaseException) -> str:
    """An error's message, without the advice to users of a vector env."""
    return getattr(error, "summary", "") or str(error)
