"""Plays a suite: each env in a process of its own, started when its task is due, ended after it.

One thread, the caller's, asks the policy and all envs; further threads only start and end envs. An
env that fails takes no other with it: its episode goes back to its task, for another env.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from threading import Thread
from typing import Any

import numpy as np
from gymnasium import logger

from shmvec._options import exchange_settings
from shmvec._policy import InformedPolicy, Policy, PolicyCaller
from shmvec.evaluation.episodes import EPISODE, Episode
from shmvec.evaluation.memory import Budget
from shmvec.evaluation.record import plain
from shmvec.evaluation.tasks import EnvFn, Task
from shmvec.exchange import AutoresetMode, Exchange
from shmvec.faults import EnvTimeoutError, FaultPolicy
from shmvec.spaces import mapped

__all__ = ["SuitePlayer", "TaskPlan"]

_CLOSE_S = 5.0  # for an env to close
_LIMIT_S = 600.0  # for a step, a reset, and for an env to be built, unless other limits are given
_LOOK_S = 0.2  # between two looks at memory
# After how long a wait looks at all envs again: a share of how long it has waited, within limits.
_NAP_SHARE, _SHORTEST_NAP_S, _LONGEST_NAP_S = 0.25, 200e-6, 5e-3
_AGAIN_S = 0.05  # until a start is asked once more to end
_ALONE = np.zeros(1, np.intp)  # the only env of an exchange


@dataclass(eq=False)
class TaskPlan:
    """A task, and what is left of it to play.

    Attributes:
        task: The task.
        make: Makes its env.
        episodes: All its episodes, by number.
        waiting: Those that no env plays, in order.
        start_s: How long its envs have taken to start, on average; None: none has.
        episode_s: How long its episodes have taken, on average; None: none is over.
        alone: Whether at most one env of it may run: others could not be built beside it.
        failures: How many envs in a row could not be built, with none of its others there.
        failure: Why it is given up; "": it is not.
    """

    task: Task
    make: EnvFn
    episodes: list[Episode]
    waiting: deque[Episode] = field(default_factory=deque)
    start_s: float | None = None
    episode_s: float | None = None
    alone: bool = False
    failures: int = 0
    failure: str = ""

    def __post_init__(self) -> None:
        """Lines up the episodes that are not settled, and learns from those that are."""
        self.waiting.extend(episode for episode in self.episodes if not episode.settled)
        known = [episode.seconds for episode in self.episodes if episode.finished]
        self.episode_s = sum(known) / len(known) if known else None

    def num_due(self, late: bool) -> int:
        """How many episodes may begin; late: only those that had begun before."""
        if late:
            return sum(bool(each.steps or each.repeats) for each in self.waiting)
        return len(self.waiting)

    def learn(self, episode: Episode) -> None:
        """Takes the time of an episode that is over into account."""
        before, count = self.episode_s, sum(each.finished for each in self.episodes)
        mean = episode.seconds if before is None else before
        self.episode_s = mean + (episode.seconds - mean) / max(1, count)


class TaskEnv:
    """One env of a task, alone in a process, from its start to its end.

    Attributes:
        plan: Its task.
        number: Its number among the envs that run: what the policy knows it by.
        exchange: The exchange that steps it.
        episode: The episode that it plays; None: none.
        resets: Whether it was asked to reset, and not to step.
        asked: When it was, by the monotonic clock.
        group: Which envs it shares batches with; None: it has not started.
        born: When it was begun to start, by the monotonic clock.
        begun: When its start was begun, or its episode.
        error: What its start has raised.
    """

    def __init__(self, plan: TaskPlan, number: int, options: Mapping[str, Any]) -> None:
        """Begins to start it."""
        self.plan = plan
        self.number = number
        self.episode: Episode | None = None
        self.resets = False
        self.group: Group | None = None
        self.born = self.begun = self.asked = time.monotonic()
        self.error: BaseException | None = None
        self.exchange = Exchange.__new__(Exchange)
        self._options = options
        self._work = self._start
        self._worker = Thread(target=self._run, daemon=True)
        self._worker.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def _start(self) -> None:
        name = f"evaluate {self.plan.task.name}"
        Exchange.__init__(self.exchange, [self.plan.make], name=name, **self._options)

    @property
    def busy(self) -> bool:
        """Whether it is being started or ended."""
        return self._worker.is_alive()

    @property
    def pid(self) -> int | None:
        """Its process; None: there is none (yet)."""
        processes = self.exchange.processes if hasattr(self.exchange, "num_workers") else []
        return processes[0].pid if processes else None

    def begin(self, episode: Episode, options: Any) -> None:
        """Has it begin an episode."""
        self.episode, self.begun = episode, time.monotonic()
        self.exchange.ask_reset(_ALONE, [episode.seed], [options])
        self.resets, self.asked = True, time.monotonic()

    def step(self, action: Any) -> None:
        """Has it step with a batch of one action."""
        self.exchange.ask(_ALONE, action)
        self.resets, self.asked = False, time.monotonic()

    def end(self, at_once: bool) -> None:
        """Begins to end it, whatever it does; ``busy`` says until when."""
        self.episode = None
        self._work = partial(self._end, at_once, self._worker)
        self._worker = Thread(target=self._run, daemon=True)
        self._worker.start()

    def _end(self, at_once: bool, before: Thread) -> None:
        while before.is_alive():  # it is being started, or ended with patience
            self._close(at_once=True)
            before.join(_AGAIN_S)
        self.error = None  # of a start that was broken off
        self._close(at_once)

    def _close(self, at_once: bool) -> None:
        if hasattr(self.exchange, "num_workers"):  # else there is nothing to end yet
            self.exchange.close(timeout=_CLOSE_S, terminate=at_once)

    def wait(self) -> None:
        """Waits until it has started or ended."""
        self._worker.join()


class Group:
    """The envs whose observations and actions fit into one batch.

    It stands for an exchange to a ``PolicyCaller``, which asks the envs of all exchanges by it.
    """

    def __init__(self, env: TaskEnv, policy: Policy, size: int | None, envs: list[Any]) -> None:
        """Makes the group of an env, which ``envs`` has, as all others, at its number."""
        self.single_observation_space = env.exchange.single_observation_space
        self.single_action_space = env.exchange.single_action_space
        self.task = env.plan.task
        self.caller = PolicyCaller(self, policy, size)
        self.lost: list[tuple[TaskEnv, Exception]] = []
        self._envs = envs

    def fits(self, env: TaskEnv) -> bool:
        """Whether an env's observations and actions are of the same spaces."""
        exchange = env.exchange
        return bool(
            exchange.single_observation_space == self.single_observation_space
            and exchange.single_action_space == self.single_action_space
        )

    def batch(self, observations: Sequence[Any]) -> Any:
        """One batch of batches of one observation each."""
        if len(observations) == 1:
            return observations[0]
        return mapped(self.single_observation_space, _joined, *observations)

    def ask(self, numbers: Any, actions: Any) -> None:
        """Has envs step, each with its row of a batch of actions."""
        for row, number in enumerate(numbers.tolist()):
            its_row = itemgetter(slice(row, row + 1))
            try:
                self._envs[number].step(mapped(self.single_action_space, its_row, actions))
            except RuntimeError as error:  # its worker has died, and with it its exchange
                self.lost.append((self._envs[number], error))


def _joined(*parts: Any) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return tuple(value for part in parts for value in part)


class SuitePlayer:
    """Plays the episodes of tasks, in envs that it starts and ends.

    Attributes:
        plans: The tasks to play; more may be added.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_envs: int,
        budgets: Sequence[Budget],
        batch_across_tasks: bool,
        batch_size: int,
        fixed: bool,
        retries: int,
        keys: Collection[str],
        recording: bool,
        vector_options: Mapping[str, Any],
    ) -> None:
        """Prepares to play.

        Args:
            policy: Chooses actions.
            max_envs: Number of envs, and of processes, at a time.
            budgets: Limits to their memory.
            batch_across_tasks: Whether the policy gets envs of several tasks in one batch.
            batch_size: Number of envs that the policy is asked about at a time, at most.
            fixed: Whether batches are filled up to this size.
            retries: How often an episode is repeated, or an env built anew.
            keys: The keys of last infos that episodes keep.
            recording: Whether envs get the numbers of their episodes, to record some.
            vector_options: Options of the exchanges.
        """
        self.plans: list[TaskPlan] = []
        tasks = {"task": lambda number: self._playing(number).plan.task}
        seeds = {"seeds": lambda number: self._playing(number).episode.policy_seed}
        self._policy = InformedPolicy(policy, tasks, {**tasks, **seeds})
        self._max_envs = max_envs
        self._budgets = budgets
        self._across = batch_across_tasks
        self._size = batch_size
        self._fixed = fixed
        self._retries = retries
        self._keys = keys
        self._recording = recording
        self._settled: Callable[[Episode], object] = id
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
        self._envs: list[TaskEnv | None] = [None] * max_envs  # by number; None: free
        self._ending: list[TaskEnv] = []
        self._groups: list[Group] = []
        self._looked = 0.0
        self._late = False  # whether only episodes that had begun may begin
        self._changed = True  # whether there may be an env to start
        self._too_large: set[str] = set()  # tasks of which one env alone exceeds a budget

    # ---- the loop ----------------------------------------------------------------------------

    def play(
        self, settled: Callable[[Episode], object], last_start: float, deadline: float
    ) -> None:
        """Plays the episodes, as far as the time allows.

        Args:
            settled: Called with each episode that is over, or counts as failed.
            last_start: When the last episode may begin, by the monotonic clock.
            deadline: When nothing is waited for any more.

        Raises:
            Exception: What the policy raises.
        """
        self._settled = settled
        self._changed = True
        waited = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= deadline:
                return
            self._look(now)
            self._late = now >= last_start
            if self._late:
                for env in self._running():
                    if env.group is None and not env.plan.num_due(late=True):
                        self._part_with(env, at_once=True)
            if self._changed:
                self._changed = False
                self._start_envs()
            rows = self._take()
            if rows:
                self._ask_policy(rows)
                waited = time.monotonic()
            elif not (self._running() or self._ending or self._is_due()):
                return
            else:
                nap = _NAP_SHARE * (now - waited)
                self._wait(min(max(nap, _SHORTEST_NAP_S), _LONGEST_NAP_S))

    def _running(self) -> list[TaskEnv]:
        return [env for env in self._envs if env is not None]

    def _is_due(self) -> bool:
        return any(plan.num_due(self._late) and not plan.failure for plan in self.plans)

    def _look(self, now: float) -> None:
        """Sees to envs that have started, or ended, and to their memory."""
        for env in list(self._ending):
            if not env.busy:
                self._ending.remove(env)
                self._changed = True
                if env.error is not None:
                    logger.warn(
                        "%s", f"as an env of task {env.plan.task.name!r} was closed: {env.error}"
                    )
        for env in self._running():
            if env.group is None and not env.busy:
                if env.error is None:
                    self._welcome(env, now)
                else:
                    self._not_built(env, env.error)
            elif env.group is None and now > env.begun + self._start_limit_s:
                limit = f"it took longer than reset_timeout={self._start_limit_s:g} s to be built"
                self._not_built(env, TimeoutError(limit))
        if self._budgets and now >= self._looked + _LOOK_S:
            self._looked = now
            self._changed = True
            self._look_at_memory()

    def _welcome(self, env: TaskEnv, now: float) -> None:
        """Takes in an env that has been built."""
        self._changed = True
        taken = now - env.begun
        plan = env.plan
        plan.start_s = taken if plan.start_s is None else (plan.start_s + taken) / 2
        plan.failures = 0
        for group in self._groups:
            if (self._across or group.task is plan.task) and group.fits(env):
                env.group = group
                return
        size = self._size if self._fixed else None
        env.group = Group(env, self._policy, size, self._envs)
        self._groups.append(env.group)

    # ---- starting envs -----------------------------------------------------------------------

    def _start_envs(self) -> None:
        """Starts the envs that are worth it, as far as there is room for them."""
        while len(self._running()) + len(self._ending) < self._max_envs:
            plan = self._next()
            if plan is None:
                return
            running = [(env, env.plan.task.name) for env in [*self._running(), *self._ending]]
            if not all(budget.has_room(plan.task.name, running) for budget in self._budgets):
                return
            taken = {env.number for env, _ in running}  # also those that are still ending
            number = next(each for each in range(self._max_envs) if each not in taken)
            self._envs[number] = TaskEnv(plan, number, self._options_of(number))

    def _options_of(self, number: int) -> dict[str, Any]:
        """The options of an env's exchange, whose only worker would otherwise be number 0."""
        options = dict(self._options)
        environ, init = options.get("worker_environ"), options.get("worker_init")
        if callable(environ):
            options["worker_environ"] = environ(number)
        if init is not None:
            options["worker_init"] = partial(_with_number, init, number)
        return options

    def _next(self) -> TaskPlan | None:
        """The task that an env is started for: that with the most to do, if it is worth it."""
        envs = {id(plan): 0 for plan in self.plans}
        starting = dict(envs)
        for env in self._running():
            envs[id(env.plan)] += 1
            starting[id(env.plan)] += env.group is None
        due = [
            plan
            for plan in self.plans
            if plan.num_due(self._late) > starting[id(plan)] and not plan.failure
        ]
        fresh = [plan for plan in due if not envs[id(plan)]]
        if fresh:
            return max(fresh, key=self._work_of)
        # All tasks have an env: more of them help those that would end last.
        share = -(-self._max_envs // max(1, sum(map(bool, envs.values()))))
        worth = [
            plan for plan in due if self._pays(plan, envs[id(plan)], starting[id(plan)], share)
        ]
        return max(worth, key=lambda plan: self._work_of(plan) / envs[id(plan)], default=None)

    def _pays(self, plan: TaskPlan, envs: int, starting: int, share: int) -> bool:
        """Whether one more env of a task would have an episode to play once it has started."""
        if plan.alone:
            return False
        left = len(plan.waiting) - starting
        if plan.episode_s is None or plan.start_s is None:  # as many for each task
            return envs < share
        return left * plan.episode_s > (envs - starting) * plan.start_s

    def _work_of(self, plan: TaskPlan) -> float:
        """Seconds that a task's waiting episodes will take; as others' do, if none is over yet."""
        known = self._known("episode_s")
        usual = sum(known) / len(known) if known else 1.0
        return len(plan.waiting) * (usual if plan.episode_s is None else plan.episode_s)

    def seconds_left(self) -> float:
        """An estimate of how long the rest takes; nan: nothing is known yet."""
        plays, starts = self._known("episode_s"), self._known("start_s")
        if not plays:
            return float("nan")
        usual_play, usual_start = sum(plays) / len(plays), sum(starts) / max(1, len(starts))
        running, now, work = self._running(), time.monotonic(), 0.0
        for plan in self.plans:
            work += self._work_of(plan)
            if plan.waiting and not any(env.plan is plan for env in running):
                work += usual_start if plan.start_s is None else plan.start_s
        for env in running:
            if env.episode is not None:
                usual = usual_play if env.plan.episode_s is None else env.plan.episode_s
                work += max(0.0, usual - (now - env.begun))
        return work / max(1, len(running))

    @property
    def given_up(self) -> dict[str, str]:
        """The tasks that are given up, and why."""
        return {plan.task.name: plan.failure for plan in self.plans if plan.failure}

    def _known(self, name: str) -> list[float]:
        """What is known of a duration, of any task."""
        found = [getattr(plan, name) for plan in self.plans]
        return [seconds for seconds in found if seconds is not None]

    # ---- playing -----------------------------------------------------------------------------

    def _take(self) -> list[tuple[TaskEnv, Any, bool]]:
        """Takes what envs have answered: those that wait for an action, and observations."""
        rows = []
        for env in self._running():
            if env.group is None:
                continue
            if env.episode is None:
                self._begin_or_end(env)
                continue
            if not self._has_answered(env, 0.0):
                continue
            answers = env.exchange.take(count=1)
            if answers.failures:
                failure = answers.failures[0]
                self._lost(env, f"{failure.operation}() has raised {failure.summary}")
            elif env.resets:
                rows.append((env, answers.observations, True))
            else:
                over = bool(answers.terminations[0] or answers.truncations[0])
                episode = env.episode
                episode.steps += 1
                episode.length += 1
                episode.return_ += float(answers.rewards[0])
                if not over:
                    rows.append((env, answers.observations, False))
                    continue
                episode.terminated = bool(answers.terminations[0])
                info = answers.infos[0]
                episode.info = {key: plain(info[key]) for key in self._keys if key in info}
                episode.finished = True
                self._end_episode(env, episode)
                self._begin_or_end(env)
        return rows

    def _wait(self, seconds: float) -> None:
        """Waits; less if the env answers that was asked first, which is the likeliest to."""
        asked = [env for env in self._running() if env.episode is not None]
        if asked:
            self._has_answered(min(asked, key=lambda env: env.asked), seconds)
        else:
            time.sleep(seconds)

    def _has_answered(self, env: TaskEnv, timeout: float) -> bool:
        """Whether an env that was asked has answered; if it cannot any more, it is ended."""
        try:
            return env.exchange.wait_for(1, timeout) > 0
        except (EnvTimeoutError, RuntimeError) as error:  # a crash is a RuntimeError
            self._lost(env, _reason(error))
            return False

    def _begin_or_end(self, env: TaskEnv) -> None:
        """Has an env begin the next episode of its task; ends it if there is none."""
        plan = env.plan
        if not plan.num_due(self._late):
            self._part_with(env, at_once=False)
            return
        episode = plan.waiting.popleft()  # those that were interrupted come first
        options = episode.options
        if self._recording:
            options = {EPISODE: episode.number, "": options}
        env.begin(episode, options)

    def _end_episode(self, env: TaskEnv, episode: Episode) -> None:
        episode.seconds += time.monotonic() - env.begun
        if episode.finished:
            env.plan.learn(episode)
        env.episode = None
        self._changed = True
        self._settled(episode)

    def _playing(self, number: int) -> Any:
        """The env with this number, of which the policy is asked."""
        return self._envs[number]

    def _ask_policy(self, rows: Iterable[tuple[TaskEnv, Any, bool]]) -> None:
        """Asks the policy for the actions of envs, in batches of those that fit together."""
        parts: dict[int, list[tuple[TaskEnv, Any, bool]]] = {}
        for row in rows:
            parts.setdefault(id(row[0].group), []).append(row)
        for part in parts.values():
            for begin in range(0, len(part), self._size):
                batch = part[begin : begin + self._size]
                group = batch[0][0].group
                assert group is not None
                numbers = np.array([env.number for env, _, _ in batch], np.intp)
                begun = [env.number for env, _, resets in batch if resets]
                group.caller.step(numbers, group.batch([row[1] for row in batch]), None, begun)
                for env, error in group.lost:
                    self._lost(env, _reason(error))
                group.lost.clear()

    # ---- faults ------------------------------------------------------------------------------

    def _lost(self, env: TaskEnv, reason: str) -> None:
        """Ends an env that has failed; its episode is repeated, or counts as failed."""
        episode = env.episode
        assert episode is not None
        name = f"episode {episode.number} of task {env.plan.task.name!r} (seed {episode.seed})"
        if episode.repeats >= self._retries:
            episode.failed = reason
            self._end_episode(env, episode)
            logger.warn("%s", f"{name} counts as failed: {reason}")
        else:
            episode.seconds += time.monotonic() - env.begun
            episode.interrupt()
            env.plan.waiting.appendleft(episode)
            logger.warn("%s", f"{name} was interrupted, and is repeated: {reason}")
        self._part_with(env, at_once=True)

    def _not_built(self, env: TaskEnv, error: BaseException) -> None:
        """Takes note of an env that could not be built."""
        plan = env.plan
        reason = getattr(error, "summary", "") or f"{type(error).__name__}: {error}"
        self._part_with(env, at_once=True)
        plan.alone = True
        plan.failures += not any(other.plan is plan for other in self._running())
        if plan.failures <= self._retries:
            logger.warn("%s", f"an env of task {plan.task.name!r} could not be built: {reason}")
            return
        plan.failure = reason
        logger.warn("%s", f"task {plan.task.name!r} is given up, it cannot be built: {reason}")

    def _look_at_memory(self) -> None:
        """Ends the youngest env where all together need more memory than they may."""
        envs = [*self._running(), *self._ending]
        about = [(env, env.plan.task.name, env.pid, env.episode is not None) for env in envs]
        fits = [budget.look(about) for budget in self._budgets]
        if all(fits):
            return
        names = ", ".join(
            budget.name for budget, fit in zip(self._budgets, fits, strict=True) if not fit
        )
        running = self._running()
        if len(running) == 1:
            name = running[0].plan.task.name
            if not self._ending and name not in self._too_large:
                self._too_large.add(name)
                logger.warn("%s", f"one env of task {name!r} alone needs more than {names} allows")
            return
        if running and not self._ending:  # else there will be more room soon
            env = max(running, key=lambda env: env.born)
            if env.episode is not None:  # it is played again, from its seed: nothing has failed
                env.episode.return_, env.episode.length = 0.0, 0
                env.plan.waiting.appendleft(env.episode)
            self._part_with(env, at_once=True)

    # ---- the end -----------------------------------------------------------------------------

    def _part_with(self, env: TaskEnv, at_once: bool) -> None:
        """Begins to end an env; others get its number once it has ended."""
        self._envs[env.number] = None
        self._ending.append(env)
        env.end(at_once)

    def close(self, at_once: bool) -> None:
        """Ends all envs, and waits until they have ended."""
        envs = [*self._running(), *self._ending]
        for env in envs:
            if at_once or env not in self._ending:
                env.end(at_once)
        for env in envs:
            env.wait()
        self._envs[:] = [None] * self._max_envs
        self._ending.clear()


def _with_number(init: Callable[[int], object], number: int, _: int) -> None:
    init(number)


def _reason(error: BaseException) -> str:
    """Why an env cannot go on: without the advice that is for users of one vector env."""
    return getattr(error, "summary", "") or str(error)
