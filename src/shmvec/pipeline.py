"""``Pipeline``: the workers step some envs while the policy is asked about others."""

from __future__ import annotations

import contextlib
import copy
import importlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from shmvec._arguments import checked_count
from shmvec._core import VectorEnvStub
from shmvec._cores import split_evenly
from shmvec._hints import refuse_unknown_arguments
from shmvec._memory.rollout import Rollout
from shmvec._policy import PADDING, Policy, PolicyCaller, check_policy, select_rows
from shmvec.exchange import Answers, Exchange, Options
from shmvec.spaces import mapped
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Pipeline"]


@dataclass(slots=True, eq=False)
class _Group:
    """A group of envs that are stepped together.

    Attributes:
        envs: Indices of its envs.
        rows: Index of their rows in arrays of all envs, a slice if the envs are neighbours.
        slices: The same rows as slices.
        first_envs: The first env of each worker that has envs of the group.
        observations: Their last observations, unless a rollout has them.
        actions: The actions of the step in flight, unless a rollout has them.
        extras: The extras that the policy returned with these actions.
        steps: Number of steps made in this rollout.
    """

    envs: npt.NDArray[np.intp]
    rows: Any
    slices: list[slice]
    first_envs: list[int]
    observations: Any = None
    actions: Any = None
    extras: dict[str, Any] = field(default_factory=dict)
    steps: int = 0


class _MissingAnswersError(RuntimeError):
    """Other code has taken the answers of envs in flight."""


class Pipeline:
    """Collects rollouts and transitions, while the policy and the envs work at the same time.

    The envs form groups. While the policy computes actions for one group, the workers step the
    others. So a step takes as long as the policy or the envs, whichever takes longer.

    Example:
        >>> import numpy as np
        >>> import shmvec
        >>> def policy(observations, env_ids):
        ...     return (observations[:, 2] > 0).astype(int), {"angle": observations[:, 2]}
        >>> envs = shmvec.make_vec("CartPole-v1", 4)
        >>> pipeline = shmvec.Pipeline(envs, policy)
        >>> _ = pipeline.reset(seed=0)
        >>> rollout = pipeline.collect(8)
        >>> rollout.observations.shape, rollout.actions.shape, rollout.extras["angle"].shape
        ((9, 4, 4), (8, 4), (8, 4))
        >>> rollout.rewards[1:].sum(axis=0)
        array([8., 8., 8., 8.])
        >>> for transitions in pipeline:
        ...     break  # a learner would go on
        >>> transitions.env_ids, transitions.rewards
        (array([0, 2]), array([1., 1.]))
        >>> pipeline.drop()
        >>> envs.close()
    """

    @refuse_unknown_arguments
    def __init__(
        self,
        envs: ShmVectorEnv,
        policy: Policy,
        *,
        groups: int | None = None,
        deterministic: bool = False,
        device: Any = None,
        batch: str = "ready",
    ) -> None:
        """Forms groups; the envs and the policy are not called yet.

        Args:
            envs: The vector env; closing the envs is left to you. They must have been reset, by
                their ``reset`` or by :meth:`reset`, before the first step.
            policy: ``policy(observations, env_ids)`` returns an action for each observation,
                batched as ``action_space`` says. It may also return a tuple: these actions, and a
                dict of arrays with a row for each, such as values and log-probabilities.
                ``env_ids``, int64 ``(n,)``, are the envs of the observations. If the policy has a
                method ``reset(env_ids)``, that is called before it gets the first observations of
                episodes in these envs.
            groups: Number of groups, each with its share of each worker's envs. 1 is lockstep.
                None: two groups; :meth:`collect` measures whether they or lockstep are faster and
                uses that, unless ``deterministic`` is True or ``batch`` is "fixed".
            deterministic: Whether the policy gets the groups in a fixed order. False: it gets the
                group that is ready first. The order only differs if groups share no workers.
            device: The device of the policy's observations and of all results: torch tensors on
                "cpu", which share the arrays' memory, or on a CUDA device. The policy may return
                tensors, too. None: NumPy arrays.
            batch: "ready": the policy's batches have the sizes of the groups. "fixed": they all
                have the size of the largest group; missing rows are copies of the first one, with
                env -1, and the answers for them are discarded. Transitions have that size, too.

        Raises:
            TypeError: ``envs`` is not a ShmVectorEnv, or the policy cannot be called.
            ImportError: ``device`` needs torch, which is not installed.
            RuntimeError: There is no such device.
            ValueError: The envs do not reset themselves (AutoresetMode.DISABLED); there are more
                groups than envs; an argument is out of range.
        """
        if not isinstance(envs, ShmVectorEnv):
            raise TypeError(
                f"envs must be a ShmVectorEnv, without wrappers around it, got "
                f"{type(envs).__name__}: wrap the single envs instead"
            )
        exchange = envs.exchange
        exchange.check_open()
        if not exchange.autoreset.by_worker:
            raise ValueError(
                "a Pipeline needs envs that are reset when their episodes end: use AutoresetMode "
                "NEXT_STEP or SAME_STEP"
            )
        if envs.batch_size is not None:
            raise ValueError("a Pipeline makes its own batches: make the envs without batch_size")
        check_policy(policy, batch)
        count = min(2, envs.num_envs) if groups is None else checked_count("groups", groups)
        if count > envs.num_envs:
            raise ValueError(f"there are {envs.num_envs} envs: too few for {count} groups")
        self.envs = envs
        self.deterministic = deterministic
        self._exchange: Exchange = exchange
        self._observation_space = envs.single_observation_space
        self._action_space = envs.single_action_space
        self._groups = [self._group(of) for of in form_groups(exchange.ranges, count)]
        self._all_envs = self._group(np.arange(envs.num_envs, dtype=np.intp))
        self._fixed_size = batch == "fixed"
        self._batch_size = max(len(group.envs) for group in self._groups)
        self._tensors = None if device is None else Tensors(device)
        reading = () if self._tensors is None else (self._tensors.read, self._tensors.keep)
        size = self._batch_size if self._fixed_size else None
        spaces = self._observation_space, self._action_space
        self._caller = PolicyCaller(*spaces, policy, size, *reading)
        self._same_step = exchange.autoreset.in_step
        # A worker answers in the order of its requests, and so do groups with the same workers.
        self._in_order = deterministic or all(
            group.first_envs == self._groups[0].first_envs for group in self._groups
        )
        chooses = groups is None and not deterministic and count > 1 and batch == "ready"
        self._tuner = GroupingTuner() if chooses else None
        self._ended = np.zeros(envs.num_envs, np.bool_)
        # Whether an env's last observation is, for the policy, the first of an episode. It is also
        # True at first, after an error, and when other code has used the env: then the policy's
        # memory of the env does not hold.
        self._is_first = np.ones(envs.num_envs, np.bool_)
        self._moves = exchange.moves()  # when this pipeline last used the envs
        self._in_flight: deque[_Group] = deque()  # in the order of their requests
        self._idle_groups: deque[_Group] = deque()  # answered, and not asked again yet
        # Whether a call is under way, or was ended by an exception, which has abandoned its
        # requests.
        self._unfinished = False

    def __repr__(self) -> str:
        """The envs, and the number of groups."""
        return f"Pipeline({self.envs!r}, groups={len(self._groups)})"

    @property
    def groups(self) -> list[npt.NDArray[np.intp]]:
        """The envs of each group, int arrays."""
        return [group.envs.copy() for group in self._groups]

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: Options = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, as ``ShmVectorEnv.reset`` does, and the policy for all of them.

        Arguments and results are those of ``ShmVectorEnv.reset``.

        Raises:
            Exception: As ``ShmVectorEnv.reset``.
        """
        self.drop()
        self._is_first[:] = True
        return self.envs.reset(seed=seed, options=options)

    def drop(self) -> None:
        """Waits for the steps in flight, and discards them, so that other code can use the envs.

        It is only needed after a loop over this pipeline: the loop's last requests stay in flight,
        so that the next loop can continue with them.

        Raises:
            Exception: As ``ShmVectorEnv.step``.
        """
        if self._in_flight or self._unfinished:
            if not self._exchange.closed:
                self._exchange.discard()
            self._forget()

    # ---- rollouts ----------------------------------------------------------------------------

    def collect(self, length: int) -> Collected:
        """Makes ``length`` steps of all envs.

        When it returns, all envs have made ``length`` steps, and none is in flight: the learner can
        change the policy. The next call continues from the envs' states.

        Args:
            length: Number of steps.

        Raises:
            ValueError: The length is not positive, or the policy's actions are wrong in number or
                shape.
            TypeError: The dtype of the actions is wrong, or NumPy cannot read them; or observations
                or actions are not arrays in shared memory, or Dicts or Tuples of them.
            BufferError: Arrays of the last two rollouts are still in use.
            Exception: Exceptions of the policy, of ``ShmVectorEnv.step`` and of ``rollout``. Steps
                in flight are discarded, and the envs can be used. The next call continues from
                their states; it first calls the policy's ``reset``, if any, for all of them.
        """
        self._finish_in_flight()
        tensors = self._tensors
        pin = tensors is not None and not tensors.on_host
        rollout = Collected(self.envs.rollout(length, pin=pin))
        self._note_foreign_steps(rollout.terminations[0] | rollout.truncations[0])
        mirror = None if tensors is None else Mirror(tensors, rollout, self.envs)
        try:
            with self._exchange.lend("Pipeline") as exchange:
                rollout.begin(exchange.pending)
                self._unfinished = True
                while rollout.steps < rollout.length:
                    self._collect_some(rollout, mirror)
                if mirror is not None:
                    mirror.finish()
                self._moves = exchange.moves()
        except BaseException:
            rollout.release()  # code that keeps the error would keep the memory, too
            raise
        self._unfinished = False
        return rollout

    def _collect_some(self, rollout: Collected, mirror: Mirror | None) -> None:
        """Makes some steps, in groups or in lockstep, as the tuner chooses."""
        tuner, begin = self._tuner, rollout.steps
        in_groups, steps = len(self._groups) > 1, rollout.length - begin
        if tuner is not None:
            in_groups, steps = tuner.choose(rollout.length, steps)
        fill = self._collect_in_groups if in_groups else self._collect_in_lockstep
        policy = self._caller.seconds
        started = fill(rollout, mirror, begin + steps)
        if tuner is not None:
            # Measured from the first step on, without the cost of switching.
            seconds = time.perf_counter() - started
            policy = (self._caller.seconds - policy) / steps
            tuner.record(in_groups, steps, seconds / max(1, steps - 1), policy)

    def _collect_in_groups(self, rollout: Collected, mirror: Mirror | None, end: int) -> float:
        """Makes steps in groups up to index ``end``; returns when the first of them was made."""
        ask, begin, started = partial(self._ask_for_rollout, rollout, mirror), rollout.steps, 0.0
        for group in self._groups:
            group.steps = begin
            ask(group)
        while self._in_flight:
            group = self._next_group()
            self._take_for_rollout(rollout, group)
            if group.steps == begin + 1:
                started = time.perf_counter()
            if group.steps < end:
                self._idle_groups.append(group)
            self._ask_idle_groups(ask)
        rollout.set_steps(end)
        return started

    def _collect_in_lockstep(self, rollout: Collected, mirror: Mirror | None, end: int) -> float:
        """Makes steps of all envs at once, up to index ``end``; returns when the first was made."""
        group, started = self._all_envs, 0.0
        tracked = self._caller.has_reset  # if not, the ends of episodes only matter at the end
        for t in range(rollout.steps, end):
            self._ask_policy(group, self._batch_at(rollout, mirror, t, group), rollout.step)
            if tracked or t >= end - 2:  # `_note_ends` looks back one step
                over = rollout.terminations[t + 1] | rollout.truncations[t + 1]
                self._note_ends(group.rows, over)
            started = started or time.perf_counter()
        return started

    def _ask_for_rollout(self, rollout: Collected, mirror: Mirror | None, group: _Group) -> None:
        observations = self._batch_at(rollout, mirror, group.steps, group)
        self._ask_policy(group, observations, partial(rollout.ask, group.rows, group.steps))
        self._in_flight.append(group)

    def _take_for_rollout(self, rollout: Collected, group: _Group) -> None:
        row_infos = row_infos_of(self._take(group, arrays=False))
        group.steps += 1
        if row_infos:
            rollout.row_infos[group.steps].update(row_infos)
        index = group.steps, group.rows
        self._note_ends(group.rows, rollout.terminations[index] | rollout.truncations[index])

    def _batch_at(self, rollout: Collected, mirror: Mirror | None, t: int, group: _Group) -> Any:
        """A group's observations at index ``t`` of the rollout, on the policy's device."""
        if mirror is not None:
            return mirror.observations(t, group.rows, group.slices)
        rows, observations = group.rows, rollout.observations
        if isinstance(observations, np.ndarray):  # the usual case, without the call of `mapped`
            return observations[t, rows]
        return mapped(self._observation_space, lambda each: each[t, rows], observations)

    # ---- transitions -------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Transitions]:
        """Yields transitions of one group at a time, for ever.

        When transitions are yielded, their group is already in flight for its next step: all envs
        step while you use the transitions. A step that was a reset (autoreset mode NEXT_STEP) is
        not a transition: it is left out, or, with ``batch="fixed"``, marked by ``valid``. Do not
        change the arrays: the next observations are those of the following transitions.

        After the loop, another loop or :meth:`collect` can continue: index 0 of its rollout has the
        results that were in flight. :meth:`drop` discards them.
        """
        return self

    def __next__(self) -> Transitions:
        """Returns the next transitions.

        Raises:
            Exception: As :meth:`collect`.
        """
        if self._unfinished:
            self._forget()
        with self._exchange.lend("Pipeline", in_flight=bool(self._in_flight), keeps=True):
            self._unfinished = True
            transitions = self._next_transitions()
            self._unfinished = False
            return transitions

    def _next_transitions(self) -> Transitions:
        if not self._in_flight:
            self._start()
        while True:
            group = self._next_group()
            begins = self._ended[group.envs]
            before = group.observations, group.actions, group.extras
            try:
                answers = self._take(group)
            except _MissingAnswersError:
                self._forget()
                self._exchange.discard()
                self._start()
                continue
            self._note_ends(group.rows, answers.terminations | answers.truncations)
            group.observations = self._to_device(answers.observations)
            transitions = self._transitions(answers, group.observations, before, begins)
            self._idle_groups.append(group)
            self._ask_idle_groups(self._ask)
            if transitions.valid.any():
                return transitions

    def _start(self) -> None:
        """Asks the policy for actions of all groups, and their envs to step."""
        last = self._exchange.take(everyone=True)  # no env is in flight: the results of last time
        self._note_foreign_steps(last.terminations | last.truncations)
        for group in self._groups:
            rows = select_rows(self._observation_space, last.observations, group.envs)
            group.observations = self._to_device(rows)
        for group in self._groups:
            self._ask(group)

    def _ask(self, group: _Group) -> None:
        """Asks the policy for a group's actions, and its envs to step."""
        self._ask_policy(group, group.observations, partial(self._ask_envs, group))

    def _ask_envs(
        self, group: _Group, envs: npt.NDArray[np.intp], actions: Any, extras: dict[str, Any]
    ) -> None:
        self._exchange.ask(envs, actions, together=True)
        self._in_flight.append(group)
        # Copies, because the policy may reuse its arrays.
        group.actions = mapped(self._action_space, _copy_actions, self._action_space, actions)
        if self._tensors is None:
            group.extras = {key: values.copy() for key, values in extras.items()}
        else:
            group.actions = self._to_device(group.actions, self._action_space)
            group.extras = {key: values.clone() for key, values in extras.items()}

    def _to_device(self, batch: Any, space: gym.Space[Any] | None = None) -> Any:
        """A batch on the policy's device; by default it is of observations."""
        if self._tensors is None:
            return batch
        return self._tensors.to_device(space or self._observation_space, batch)

    def _transitions(
        self, answers: Answers, after: Any, before: tuple[Any, Any, dict[str, Any]], begins: Any
    ) -> Transitions:
        """The transitions of a group that has answered.

        Args:
            answers: The answers of these envs.
            after: Their observations, on the policy's device.
            before: The observations, actions and extras of the request that they answer.
            begins: Whose episode had ended before, so that in NEXT_STEP their step was a reset.
        """
        row_infos = row_infos_of(answers)
        rows = np.arange(len(answers.envs))
        valid = np.ones(len(rows), np.bool_) if self._same_step else ~begins
        if self._same_step:
            over = np.flatnonzero(answers.terminations | answers.truncations)
            if len(over):
                final = mapped(self._observation_space, copy.copy, answers.observations)
                for row in over.tolist():
                    infos = [
                        info for info in row_infos[int(answers.envs[row])] if "final_obs" in info
                    ]
                    final = replace_row(self._observation_space, final, row, infos[-1]["final_obs"])
                after = self._to_device(final)
        env_ids = answers.envs.astype(np.int64)
        results: tuple[Any, ...] = (answers.rewards, answers.terminations, answers.truncations)
        observations, actions, extras = before
        if self._fixed_size or not valid.all():
            stored = rows if self._fixed_size else rows[valid]
            missing = self._batch_size - len(stored) if self._fixed_size else 0
            rows = np.append(stored, np.repeat(stored[:1], missing))
            observations = select_rows(self._observation_space, observations, rows)
            after = select_rows(self._observation_space, after, rows)
            actions = select_rows(self._action_space, actions, rows)
            extras = {key: values[rows] for key, values in extras.items()}
            results = tuple(each[rows] for each in results)
            valid, env_ids = valid[rows], env_ids[rows]
            if missing:
                valid[-missing:], env_ids[-missing:] = False, PADDING
        index = {env: row for row, env in enumerate(env_ids.tolist())}
        if self._tensors is not None:
            results = tuple(map(self._tensors.copy_small, results))
        return Transitions(
            observations=observations,
            actions=actions,
            rewards=results[0],
            next_observations=after,
            terminations=results[1],
            truncations=results[2],
            env_ids=env_ids,
            extras=extras,
            valid=valid,
            row_infos={index[env]: each for env, each in row_infos.items() if env in index},
        )

    def __del__(self) -> None:
        """Abandons what is in flight: the next call of the envs discards it."""
        if getattr(self, "_in_flight", None):
            self._exchange.discard(timeout=0)

    # ---- groups ------------------------------------------------------------------------------

    def _group(self, envs: npt.NDArray[np.intp]) -> _Group:
        slices = _slices(envs)
        rows = slices[0] if len(slices) == 1 else envs  # a slice copies nothing
        first_envs = [each[0] for each in self._exchange.ranges if np.isin(each, envs).any()]
        return _Group(envs, rows, slices, first_envs)

    def _ask_policy(
        self,
        group: _Group,
        observations: Any,
        ask: Callable[[npt.NDArray[np.intp], Any, dict[str, Any]], None],
    ) -> None:
        """Asks the policy for actions, and the group to step."""
        first = group.envs[self._is_first[group.rows]].tolist() if self._caller.has_reset else []
        self._caller.step(group.envs, observations, first, ask)

    def _next_group(self) -> _Group:
        """Removes the group to take: the one that was asked first, or that is ready first."""
        if not self._in_order and len(self._in_flight) > 1:
            ready = self._exchange.first_ready([group.envs for group in self._in_flight])
            self._in_flight.rotate(-ready)
        return self._in_flight.popleft()

    def _take(self, group: _Group, arrays: bool = True) -> Answers:
        """Waits for a group's answers, and takes them.

        Raises:
            _MissingAnswersError: Other code has taken them, by ``recv`` after a loop.
        """
        envs, exchange = group.envs, self._exchange
        answers = exchange.take(envs, arrays=arrays)
        if answers.failures:
            exchange.raise_failures(answers.failures)
        if len(answers.envs) < len(group.envs):
            raise _MissingAnswersError("other code has taken results of this Pipeline")
        return answers

    def _note_ends(self, rows: Any, over: npt.NDArray[np.bool_]) -> None:
        """Notes whose episodes a step has ended, and so whose begin next."""
        self._is_first[rows] = over if self._same_step else self._ended[rows]
        self._ended[rows] = over

    def _ask_idle_groups(self, ask: Callable[[_Group], None]) -> None:
        """Asks the idle groups to step; first recycles workers that are due."""
        worn = self._exchange.recycle(() if self._in_flight else None)
        if any(env in worn for group in self._idle_groups for env in group.first_envs):
            return
        while self._idle_groups:
            ask(self._idle_groups.popleft())

    def _note_foreign_steps(self, over: npt.NDArray[np.bool_]) -> None:
        """Has episodes begin, for the policy, in envs that other code has used meanwhile.

        ``over`` says whose last step has ended an episode; where an episode had ended and it is
        False, other code has reset the env.
        """
        self._is_first |= (self._exchange.moves() != self._moves).any(axis=0) | self._ended & ~over
        self._ended[:] = over

    def _finish_in_flight(self) -> None:
        """Takes the answers that a loop has left in flight."""
        if self._unfinished:
            self._forget()
        if not self._in_flight:
            return
        try:
            with self._exchange.lend("Pipeline", in_flight=True, keeps=True) as exchange:
                self._unfinished = True
                while self._in_flight:
                    group = self._next_group()
                    answers = self._take(group)
                    self._note_ends(group.rows, answers.terminations | answers.truncations)
                self._moves = exchange.moves()
            self._idle_groups.clear()
            self._unfinished = False
        except _MissingAnswersError:
            self.drop()

    def _forget(self) -> None:
        """Forgets the groups in flight; for the policy, episodes begin in all envs."""
        self._in_flight.clear()
        self._idle_groups.clear()
        self._is_first[:] = True
        self._unfinished = False


def _slices(envs: npt.NDArray[np.intp]) -> list[slice]:
    """Splits sorted indices into slices of neighbours."""
    parts = np.split(envs, np.flatnonzero(np.diff(envs) != 1) + 1)
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts]


def _copy_actions(space: gym.Space[Any], actions: Any) -> Any:
    if isinstance(actions, np.ndarray):
        return np.array(actions, space.dtype)
    return tuple(actions)


_SLICE_STEPS = 16  # steps made in groups, or in lockstep, before the choice is reviewed
_NUM_COMPARISONS = 5  # the last comparisons, whose majority decides
_MIN_SLICES = 25  # slices between two trials of the slower way, at least
_MAX_COST = 0.01  # share of the time that trials of the slower way may cost
_START_RATIO, _STAY_RATIO = 0.93, 0.97  # most time in groups / in lockstep, to begin and to stay


def form_groups(ranges: Sequence[range], count: int) -> list[npt.NDArray[np.intp]]:
    """Divides envs into groups, none of them empty, of sizes as equal as possible.

    Each group gets neighbours among each worker's envs, so that all workers step one group while
    the policy is busy with another. If workers have too few envs for that, each group gets the envs
    of some workers.

    Args:
        ranges: Each worker's envs.
        count: Number of groups, at most that of envs.

    Example:
        >>> [group.tolist() for group in form_groups([range(0, 4), range(4, 7)], 2)]
        [[0, 1, 4], [2, 3, 5, 6]]
        >>> [group.tolist() for group in form_groups([range(i, i + 1) for i in range(5)], 2)]
        [[0, 1, 2], [3, 4]]
    """
    if all(len(envs) < count for envs in ranges):
        everyone = [env for envs in ranges for env in envs]
        return [np.array(everyone)[part] for part in split_evenly(len(everyone), count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for envs in ranges:
        sizes = [len(envs) // count] * count
        # An env left over goes to the smallest group; of several, to the one that is asked last.
        for _ in range(len(envs) % count):
            least = min(reversed(range(count)), key=lambda index: len(groups[index]) + sizes[index])
            sizes[least] += 1
        begin = envs.start
        for group, size in zip(groups, sizes, strict=True):
            group += range(begin, begin + size)
            begin += size
    return [np.array(group, np.intp) for group in groups]


class GroupingTuner:
    """Measures, while steps are made, whether groups are faster than lockstep.

    Groups save at most the time of the policy or that of the envs, whichever is shorter. If that is
    too little, they are not tried. Otherwise slices of both ways alternate, so that a disturbance
    affects both. Groups are chosen if most of the last comparisons say that they are clearly
    faster. After that the slower way gets a slice now and then, more rarely the slower it is. A
    slice with a surprising result is followed by another trial at once.
    """

    def __init__(self) -> None:
        """Begins with lockstep."""
        self.in_groups = False  # whether most steps are made in groups
        self._ratios: deque[float] = deque(maxlen=_NUM_COMPARISONS)
        self._usual_step_s = 0.0  # in the last slice of the usual way
        self._may_pay = True  # whether groups can save enough, by the last slice in lockstep
        self._steps_until_trial = _SLICE_STEPS  # of the other way

    def choose(self, length: int, remaining: int) -> tuple[bool, int]:
        """Chooses how the next steps are made.

        Args:
            length: Number of steps of the rollout.
            remaining: Number of these that are still to be made.

        Returns:
            Whether they are made in groups, and for how many steps.
        """
        count = -(-length // _SLICE_STEPS)
        most = -(-length // count)
        if self._steps_until_trial > 0 or not (self.in_groups or self._may_pay):
            return self.in_groups, min(remaining, max(most, self._steps_until_trial))
        if remaining < most:  # too few to be compared
            return self.in_groups, remaining
        return not self.in_groups, most

    def record(self, in_groups: bool, steps: int, seconds: float, policy: float) -> None:
        """Records a slice: its steps, the seconds of a step, and the policy's seconds of these."""
        if not in_groups:
            self._may_pay = min(policy, seconds - policy) > (1 - _START_RATIO) * seconds
        if in_groups == self.in_groups:
            self._usual_step_s, self._steps_until_trial = seconds, self._steps_until_trial - steps
            return
        ratio = seconds / self._usual_step_s if in_groups else self._usual_step_s / seconds
        self._ratios.append(ratio)
        self._steps_until_trial = _SLICE_STEPS
        most = _STAY_RATIO if self.in_groups else _START_RATIO
        for_groups = sum(each < most for each in self._ratios)  # comparisons that groups win
        if max(for_groups, len(self._ratios) - for_groups) > _NUM_COMPARISONS // 2:
            typical = statistics.median(self._ratios)
            self.in_groups = for_groups > _NUM_COMPARISONS // 2
            if (ratio < most) == self.in_groups:
                loss = (1 / typical if self.in_groups else typical) - 1
                self._steps_until_trial = int(_SLICE_STEPS * max(_MIN_SLICES, loss / _MAX_COST))


RowInfos = dict[int, list[dict[str, Any]]]  # infos, by row


def row_infos_of(answers: Answers) -> RowInfos:
    """The infos of envs, and of their workers' faults, by row; empty ones are left out."""
    row_infos: RowInfos = {}
    if any(answers.infos):
        each = zip(answers.envs.tolist(), answers.infos, strict=True)
        row_infos = {env: [info] for env, info in each if info}
    for env, report in answers.reports.items():
        row_infos.setdefault(env, []).append(report.info)
    return row_infos


class Infos(Sequence[dict[str, Any]]):
    """Infos of several steps, each as ``ShmVectorEnv.step`` returns them.

    ``infos[t]`` gathers a step's infos into arrays each time it is read: unread infos cost little.
    """

    def __init__(self, num_rows: int, row_infos: list[RowInfos]) -> None:
        """Takes the infos of each step, by row."""
        self._gatherer = VectorEnvStub(num_rows)
        self._row_infos = row_infos
        self.gathered: dict[int, dict[str, Any]] = {}  # dicts of arrays, by step

    def __len__(self) -> int:
        """The number of steps."""
        return len(self._row_infos)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """A step's infos: Gymnasium's dict of arrays."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row_infos, infos = self._row_infos[index], self.gathered.get(range(len(self))[index])
        if infos is not None:
            return infos
        infos = {}
        for row in sorted(row_infos):
            for info in row_infos[row]:
                infos = self._gatherer._add_info(infos, info, row)
        return infos


class Collected:
    """A rollout that :meth:`shmvec.Pipeline.collect` has filled; its arrays are yours to change.

    Index ``t + 1`` holds the results of the action at index ``t``; index 0 holds the results from
    before the rollout. The arrays are in shared memory, in which two rollouts alternate, as those
    of :meth:`shmvec.ShmVectorEnv.rollout` do: release the older one before you collect a third.

    Attributes:
        length: Number of steps.
        steps: Number of steps made so far; ``length`` once :meth:`Pipeline.collect` returns.
        observations: ``(length + 1, num_envs, ...)``, nested as the observation space is.
        rewards: float64 ``(length + 1, num_envs)``. ``actions[t]`` has earned ``rewards[t + 1]``.
            With a ``reward_space`` of shape ``(k,)``: ``(length + 1, num_envs, k)``.
        terminations: bool ``(length + 1, num_envs)``.
        truncations: bool ``(length + 1, num_envs)``. In autoreset mode NEXT_STEP, an env that has
            ended at ``t`` is reset by the next step, which ignores ``actions[t]``.
        actions: ``(length, num_envs, ...)``, in the dtype of the action space.
        extras: The policy's arrays besides actions, by name: ``(length, num_envs, ...)``.
        infos: ``infos[t + 1]`` is what ``ShmVectorEnv.step`` returns for ``actions[t]``;
            ``infos[0]`` is empty. They are gathered each time they are read.
    """

    def __init__(self, rollout: Rollout) -> None:
        """Wraps a rollout of which no step was made."""
        self._rollout = rollout
        self.length, self.steps = rollout.length, 0
        self.observations = rollout.observations
        self.rewards: Any = rollout.rewards
        self.terminations: Any = rollout.terminations
        self.truncations: Any = rollout.truncations
        self.actions = rollout.actions
        self.extras: dict[str, Any] = {}
        self._has_names = False  # whether the first batch has fixed the names of the extras
        self.num_envs = rollout.rewards.shape[1]
        self.row_infos: list[RowInfos] = [{} for _ in range(self.length + 1)]
        self.infos = Infos(self.num_envs, self.row_infos)

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """Which steps are transitions, bool ``(length, num_envs)``.

        In autoreset mode NEXT_STEP the others reset their env and ignore the action.
        """
        return self._rollout.valid

    def __repr__(self) -> str:
        """The number of steps, how many of them were made, and the number of envs."""
        return f"Collected({self.steps} of {self.length} steps, {self.num_envs} envs)"

    def ask(
        self, rows: Any, index: int, envs: Any, actions: Any, extras: Mapping[str, Any]
    ) -> None:
        """Asks some envs for a step; see :meth:`shmvec._memory.rollout.Rollout.ask`."""
        self._rollout.ask(envs, rows, index, actions)
        self._store_extras(index, rows, extras)

    def begin(self, loan: Any) -> None:
        """Has its steps made within a loan."""
        self._rollout.within = loan

    def set_steps(self, steps: int) -> None:
        """Sets the number of steps that all envs have made by :meth:`ask`."""
        self._rollout.set_steps(steps)
        self.steps = steps

    def step(self, envs: Any, actions: Any, extras: Mapping[str, Any]) -> None:
        """Steps all envs at once, to the next index."""
        keep = partial(self._store_extras, self.steps, slice(None), extras)
        infos = self._rollout.step(actions, meanwhile=keep)
        self.steps += 1
        self.infos.gathered[self.steps] = infos

    def _store_extras(self, index: int, rows: Any, extras: Mapping[str, Any]) -> None:
        """Stores the extras that came with some envs' actions.

        Raises:
            ValueError: Names, shapes or dtypes differ from those that came first.
        """
        if not self._has_names:
            self._has_names = True
            for key, values in extras.items():
                shape = self.length, self.num_envs, *values.shape[1:]
                on_device = hasattr(values, "new_empty")
                self.extras[key] = (
                    values.new_empty(shape) if on_device else np.empty(shape, values.dtype)
                )
        if self.extras.keys() != extras.keys():
            raise ValueError(
                f"the policy has returned extras {list(extras)}, and {list(self.extras)} before"
            )
        for key, values in extras.items():
            stored = self.extras[key]
            if values.shape[1:] != stored.shape[2:] or values.dtype != stored.dtype:
                raise ValueError(
                    f"the policy has returned {key!r} of {values.dtype} {tuple(values.shape[1:])} "
                    f"for an env, and of {stored.dtype} {tuple(stored.shape[2:])} before"
                )
            stored[index, rows] = values

    def release(self) -> None:
        """Returns the memory for another rollout, which overwrites these arrays.

        It is not needed once no reference to this rollout or its arrays is left.
        """
        self._rollout.release()

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._rollout.released


@dataclass(slots=True, eq=False)
class Transitions:
    """One step of each env of a group, as iterating over a :class:`shmvec.Pipeline` yields them.

    Attributes:
        observations: The observations for which the actions were chosen, batched as the observation
            space says.
        actions: The actions.
        rewards: float64 ``(n,)``, or ``(n, k)`` as the ``reward_space`` says.
        next_observations: The observations after the actions; for an episode that has ended, its
            last one, in each autoreset mode.
        terminations: bool ``(n,)``.
        truncations: bool ``(n,)``.
        infos: Gymnasium's dict of arrays, gathered each time it is read.
        env_ids: int64 ``(n,)``: the envs; -1 for rows that only fill the batch.
        extras: The policy's arrays besides actions, by name, with a row for each env.
        valid: bool ``(n,)``: whether a row is a transition. With ``batch="fixed"`` it is False for
            steps that were resets, and for rows that only fill the batch.
        row_infos: The infos and faults of each row that has any.
    """

    observations: Any
    actions: Any
    rewards: Any
    next_observations: Any
    terminations: Any
    truncations: Any
    env_ids: npt.NDArray[np.int64]
    extras: dict[str, Any]
    valid: Any
    row_infos: RowInfos

    @property
    def infos(self) -> dict[str, Any]:
        """Gymnasium's dict of arrays, gathered each time it is read."""
        return Infos(len(self.env_ids), [self.row_infos])[0]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.env_ids)


def replace_row(space: gym.Space[Any], batch: Any, row: int, observation: Any) -> Any:
    """A batch with one row replaced by an observation; changes arrays in place."""
    return mapped(space, partial(_replace_row, row), batch, observation)


def _replace_row(row: int, batch: Any, observation: Any) -> Any:
    if isinstance(batch, np.ndarray):
        batch[row] = observation
        return batch
    return (*batch[:row], observation, *batch[row + 1 :])


Space = gym.Space[Any]


class Tensors:
    """Conversion of arrays to tensors, and of tensors to arrays.

    Attributes:
        on_host: Whether the device is main memory.
    """

    def __init__(self, device: Any) -> None:
        """Checks a device, given as ``torch.device`` takes it.

        Raises:
            ImportError: torch is not installed.
            RuntimeError: There is no such device.
        """
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise ImportError("device= needs torch, which is not installed") from error
        self.device = self._torch.device(device)
        self.on_host: bool = self.device.type == "cpu"
        if not self.on_host:
            if self.device.type != "cuda":
                raise RuntimeError(f"device must be 'cpu' or of CUDA, got {device!r}")
            if not self._torch.cuda.is_available():
                raise RuntimeError(f"device={device!r}, and torch finds no CUDA here")
            self._stream = self._torch.cuda.Stream(self.device)

    # ---- answers of the policy ---------------------------------------------------------------

    def read(self, actions: Any) -> Any:
        """Actions as a NumPy array; waits for the device."""
        if isinstance(actions, self._torch.Tensor):
            actions = actions.detach().cpu()
        return np.asarray(actions)

    def keep(self, values: Any) -> Any:
        """Extras that came with actions, as a tensor on the device."""
        return self._torch.as_tensor(values).detach().to(self.device, non_blocking=True)

    # ---- observations and results ------------------------------------------------------------

    def wrap(self, array: Any) -> Any:
        """A tensor that shares an array's memory; anything else is returned as it is."""
        return self._torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    def to_device(self, space: Space, batch: Any) -> Any:
        """A batch on the device; its arrays must not be changed before the copy is complete."""
        if self.on_host:
            return mapped(space, self.wrap, batch)
        with self.copying() as caller_stream:
            return mapped(space, partial(self._copy_to_device, caller_stream), batch)

    def _copy_to_device(self, caller_stream: Any, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        # Torch reuses the page-locked memory only after the copy, and the tensor's memory only
        # once the caller's stream is done with it.
        tensor = self.wrap(array).pin_memory().to(self.device, non_blocking=True)
        tensor.record_stream(caller_stream)
        return tensor

    def copy_small(self, array: Any) -> Any:
        """A small array on the device."""
        return self.wrap(array).to(self.device)

    @contextlib.contextmanager
    def copying(self) -> Any:
        """Has copies made on their own stream, for which the caller's stream waits."""
        caller_stream = self._torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller_stream)  # for earlier uses of the same memory
        with self._torch.cuda.stream(self._stream):
            yield caller_stream
        caller_stream.wait_stream(self._stream)

    def finish(self) -> None:
        """Waits for all copies; after that, page-locked memory may be written again."""
        if not self.on_host:
            self._stream.synchronize()

    def empty(self, array: Any) -> Any:
        """An uninitialised tensor on the device, like an array; on the host, the array itself."""
        tensor = self.wrap(array)
        return tensor if self.on_host else self._torch.empty_like(tensor, device=self.device)


class Mirror:
    """A rollout's tensors, to which each step is copied as the policy is asked about it."""

    def __init__(self, tensors: Tensors, rollout: Collected, envs: ShmVectorEnv) -> None:
        """Makes tensors for a rollout of which no step was made."""
        self._tensors, self._rollout = tensors, rollout
        self._space, self._action_space = envs.single_observation_space, envs.single_action_space
        self._host = rollout.observations
        self._observations = mapped(self._space, tensors.empty, rollout.observations)

    def observations(self, index: int, rows: Any, slices: Sequence[slice]) -> Any:
        """The observations of some envs at a step; ``slices`` are the same rows."""
        self._copy(index, slices)
        return mapped(self._space, lambda tensor: tensor[index][rows], self._observations)

    def _copy(self, index: int, slices: Sequence[slice]) -> None:
        if self._tensors.on_host:
            return
        with self._tensors.copying():
            for run in slices:
                copy = partial(self._copy_slice, index, run)
                mapped(self._space, copy, self._observations, self._host)

    def _copy_slice(self, index: int, run: slice, target: Any, source: Any) -> None:
        tensor = self._tensors.wrap(source[index, run])
        target[index, run].copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """Replaces the rollout's arrays with tensors."""
        rollout, tensors = self._rollout, self._tensors
        self._copy(rollout.length, [slice(None)])
        rollout.observations = self._observations
        rollout.actions = mapped(self._action_space, tensors.copy_small, rollout.actions)
        rollout.rewards = tensors.copy_small(rollout.rewards)
        rollout.terminations = tensors.copy_small(rollout.terminations)
        rollout.truncations = tensors.copy_small(rollout.truncations)
        tensors.finish()
