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
from shmvec._core import Batch
from shmvec._cores import split_evenly
from shmvec._hints import refusing_unknown
from shmvec._memory.rollout import Rollout
from shmvec._policy import PADDING, Policy, PolicyCaller, check_policy, chosen
from shmvec.exchange import Answers, Exchange, Options
from shmvec.spaces import mapped
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Pipeline"]


@dataclass(slots=True, eq=False)
class _Group:
    """A group of envs that are stepped together.

    Attributes:
        envs: Indices of its envs.
        part: The same as an index of arrays of all envs: a slice where the envs are neighbours.
        runs: The same as slices.
        firsts: The first env of each worker that has envs of the group.
        observations: Their last observations, where no rollout keeps them.
        actions: The actions of the step in flight, where no rollout keeps them.
        extras: The extras that came with these actions.
        steps: Number of steps made in this rollout.
    """

    envs: npt.NDArray[np.intp]
    part: Any
    runs: list[slice]
    firsts: list[int]
    observations: Any = None
    actions: Any = None
    extras: dict[str, Any] = field(default_factory=dict)
    steps: int = 0


class _TakenError(RuntimeError):
    """Other code has taken the answers of envs in flight."""


class Pipeline:
    """Collects rollouts and transitions; the policy and the envs work at the same time.

    The envs form groups. While the policy is asked about one, the workers step the others. So a
    step takes as long as the policy or the envs do, whichever is longer, and not both.

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

    @refusing_unknown
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
        """Forms groups; asks no env and no policy yet.

        Args:
            envs: The vector env, which is used and not closed. Its envs must have been reset, by
                their ``reset`` or by :meth:`reset`, before the first step.
            policy: ``policy(observations, env_ids)`` returns an action for each observation,
                batched as ``action_space`` says, or these and a dict of arrays with a row for each,
                such as values and log-probabilities. ``env_ids``, int64 ``(n,)``, says where they
                come from. If it has a method ``reset(env_ids)``, that is called before it is asked
                about the first observations of episodes in these envs.
            groups: Number of groups, each with its share of each worker's envs. One is lockstep.
                None: two; but :meth:`collect` measures whether two groups or lockstep are faster,
                and goes on with that, unless batches must be the same in each run or have a fixed
                size.
            deterministic: Whether the policy is asked about the groups in a fixed order. False:
                about the group that is ready first, which makes a difference where groups share no
                workers.
            device: Where the policy's observations, and all that is returned, are: torch tensors on
                "cpu", which are the same memory, or on a CUDA device. What the policy returns may
                be tensors then, too. None: NumPy arrays.
            batch: "ready": of each group's envs. "fixed": the policy's batches all have the size of
                the largest group; missing rows are copies of the first one, with env -1, and the
                answers for them are discarded. Transitions have that size, too.

        Raises:
            TypeError: ``envs`` is no ShmVectorEnv, or the policy cannot be called.
            ImportError: ``device`` needs torch.
            RuntimeError: There is no such device.
            ValueError: Episodes that are over are not reset (AutoresetMode.DISABLED); there are
                more groups than envs; an argument is out of range.
        """
        if not isinstance(envs, ShmVectorEnv):
            raise TypeError(
                f"envs must be a ShmVectorEnv, without wrappers around it, got "
                f"{type(envs).__name__}: wrap the envs"
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
        self._seen, self._acted = envs.single_observation_space, envs.single_action_space
        self._groups = [self._group(of) for of in grouped(exchange.ranges, count)]
        self._everyone = self._group(np.arange(envs.num_envs, dtype=np.intp))
        self._fixed = batch == "fixed"
        self._size = max(len(group.envs) for group in self._groups)
        self._tensors = None if device is None else Tensors(device)
        reading = () if self._tensors is None else (self._tensors.read, self._tensors.keep)
        size = self._size if self._fixed else None
        self._caller = PolicyCaller(exchange, policy, size, *reading)
        self._same_step = exchange.autoreset.in_step
        # A worker answers in the order of its requests, and so do groups that share workers.
        self._in_turn = deterministic or all(
            group.firsts == self._groups[0].firsts for group in self._groups
        )
        chooses = groups is None and not deterministic and count > 1 and batch == "ready"
        self._faster = Faster() if chooses else None
        self._ended = np.zeros(envs.num_envs, np.bool_)
        # Whether an episode begins with an env's last observation, as far as the policy is
        # concerned: also at first, after an error, and when other code has used the env, because
        # what the policy remembers of it does not hold then.
        self._begun = np.ones(envs.num_envs, np.bool_)
        self._moves = exchange.moves()  # as they were when this pipeline used the envs last
        self._in_flight: deque[_Group] = deque()  # groups in flight, in the order of their requests
        self._held: deque[_Group] = deque()  # groups that were taken, until their next request
        # Whether a call is under way, or an exception has ended it: its loan has abandoned what it
        # had asked for.
        self._midway = False

    def __repr__(self) -> str:
        """Its groups, and the envs."""
        return f"Pipeline({self.envs!r}, groups={len(self._groups)})"

    @property
    def groups(self) -> list[npt.NDArray[np.intp]]:
        """The envs of each group."""
        return [group.envs.copy() for group in self._groups]

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: Options = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all envs, as ``ShmVectorEnv.reset`` does; for the policy, episodes begin in all.

        Raises:
            Exception: As ``ShmVectorEnv.reset``.
        """
        self.drop()
        self._begun[:] = True
        return self.envs.reset(seed=seed, options=options)

    def drop(self) -> None:
        """Waits for the steps in flight, and discards them, so that other code can use the envs.

        This is only needed after a loop over this pipeline was left: its requests stay in flight,
        for the next loop to go on with.

        Raises:
            Exception: As ``ShmVectorEnv.step``.
        """
        if self._in_flight or self._midway:
            if not self._exchange.closed:
                self._exchange.discard()
            self._forget()

    # ---- rollouts ----------------------------------------------------------------------------

    def collect(self, length: int) -> Collected:
        """Makes ``length`` steps of all envs, in the order of lockstep.

        When it returns, all envs have made ``length`` steps, and none is in flight: the learner can
        change the policy. The next call goes on from where the envs are.

        Args:
            length: Number of steps.

        Raises:
            ValueError: The policy's actions are wrong in number or shape; or the length is.
            TypeError: Their dtype is, or they are no arrays that NumPy can read; or observations or
                actions are not arrays in shared memory, or Dicts or Tuples of them.
            BufferError: Arrays of the last two rollouts are still in use.
            Exception: What the policy raises; and as ``ShmVectorEnv.step`` and ``rollout``. What
                was in flight is discarded; the envs can be used, and the next call goes on from
                where they are. Then a policy's ``reset``, if it has one, is called for all of them.
        """
        self._settle()
        tensors = self._tensors
        pin = tensors is not None and not tensors.on_host
        rollout = Collected(self.envs.rollout(length, pin=pin))
        self._notice(rollout.terminations[0] | rollout.truncations[0])
        mirror = None if tensors is None else Mirror(tensors, rollout, self._seen, self._acted)
        try:
            with self._exchange.lend("Pipeline") as exchange:
                rollout.begin(exchange.pending)
                self._midway = True
                while rollout.steps < rollout.length:
                    self._fill_some(rollout, mirror)
                if mirror is not None:
                    mirror.finish()
                self._moves = exchange.moves()
        except BaseException:
            rollout.release()  # code that keeps the error keeps this Python frame, not the memory
            raise
        self._midway = False
        return rollout

    def _fill_some(self, rollout: Collected, mirror: Mirror | None) -> None:
        """Makes some steps, in groups or in lockstep: the faster way, or the other to compare."""
        faster, begin = self._faster, rollout.steps
        in_groups, steps = len(self._groups) > 1, rollout.length - begin
        if faster is not None:
            in_groups, steps = faster.choose(rollout.length, steps)
        fill = self._fill if in_groups else self._fill_in_lockstep
        policy = self._caller.seconds
        started = fill(rollout, mirror, begin + steps)
        if faster is not None:
            # Measured from the first step on: the cost of changing the way does not count.
            seconds = time.perf_counter() - started
            policy = (self._caller.seconds - policy) / steps
            faster.took(in_groups, steps, seconds / max(1, steps - 1), policy)

    def _fill(self, rollout: Collected, mirror: Mirror | None, end: int) -> float:
        """Makes steps in groups up to an index; returns the time at which the first was made."""
        ask, begin, started = partial(self._ask_into, rollout, mirror), rollout.steps, 0.0
        for group in self._groups:
            group.steps = begin
            ask(group)
        while self._in_flight:
            group = self._next()
            self._take_into(rollout, group)
            if group.steps == begin + 1:
                started = time.perf_counter()
            if group.steps < end:
                self._held.append(group)
            self._go_on(ask)
        rollout.set_steps(end)
        return started

    def _fill_in_lockstep(self, rollout: Collected, mirror: Mirror | None, end: int) -> float:
        """Makes steps of all envs at once, each in one call of the exchange."""
        everyone, started = self._everyone, 0.0
        tracked = self._caller.has_reset  # else where episodes end matters only after the last step
        for t in range(rollout.steps, end):
            self._choose(everyone, self._shown(rollout, mirror, t, everyone), rollout.step)
            if tracked or t >= end - 2:  # _note looks back one step
                self._note(everyone.part, rollout.terminations[t + 1] | rollout.truncations[t + 1])
            started = started or time.perf_counter()
        return started

    def _ask_into(self, rollout: Collected, mirror: Mirror | None, group: _Group) -> None:
        observations = self._shown(rollout, mirror, group.steps, group)
        self._choose(group, observations, partial(rollout.ask, group.part, group.steps))
        self._in_flight.append(group)

    def _take_into(self, rollout: Collected, group: _Group) -> None:
        row_infos = row_infos_of(self._take(group, arrays=False))
        group.steps += 1
        if row_infos:
            rollout.row_infos[group.steps].update(row_infos)
        index = group.steps, group.part
        self._note(group.part, rollout.terminations[index] | rollout.truncations[index])

    def _shown(self, rollout: Collected, mirror: Mirror | None, index: int, group: _Group) -> Any:
        """A group's observations at an index of the rollout, for the policy."""
        if mirror is not None:
            return mirror.observations(index, group.part, group.runs)
        part, observations = group.part, rollout.observations
        if isinstance(observations, np.ndarray):  # the usual
            return observations[index, part]
        return mapped(self._seen, lambda each: each[index, part], observations)

    # ---- transitions -------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Transitions]:
        """Yields transitions of one group at a time, for ever.

        When they are yielded, the group is in flight for its next step: all envs step while you use
        the transitions. A step that was a reset (autoreset mode NEXT_STEP) is no transition, and is
        left out; with ``batch="fixed"`` it is marked by ``valid``. Do not change the arrays: the
        next observations are the observations of the transitions to come.

        After a loop is left, another loop or :meth:`collect` can go on (index 0 of the rollout is
        what was in flight), or :meth:`drop` discards what is in flight.
        """
        return self

    def __next__(self) -> Transitions:
        """The next transitions.

        Raises:
            Exception: As :meth:`collect`.
        """
        if self._midway:
            self._forget()
        with self._exchange.lend("Pipeline", in_flight=bool(self._in_flight), keeps=True):
            self._midway = True
            found = self._next_transitions()
            self._midway = False
            return found

    def _next_transitions(self) -> Transitions:
        if not self._in_flight:
            self._start()
        while True:
            group = self._next()
            begins = self._ended[group.envs]
            before = group.observations, group.actions, group.extras
            try:
                answers = self._take(group)
            except _TakenError:
                self._forget()
                self._exchange.discard()
                self._start()
                continue
            self._note(group.part, answers.terminations | answers.truncations)
            group.observations = self._moved(answers.observations)
            found = self._transitions(answers, group.observations, before, begins)
            self._held.append(group)
            self._go_on(self._ask)
            if found.valid.any():
                return found

    def _start(self) -> None:
        """Asks the policy about all groups, and their envs to step."""
        last = self._exchange.take(everyone=True)  # no env is in flight: these are the last results
        self._notice(last.terminations | last.truncations)
        for group in self._groups:
            group.observations = self._moved(self._some(self._seen, last.observations, group.envs))
        for group in self._groups:
            self._ask(group)

    def _ask(self, group: _Group) -> None:
        """Asks the policy about a group, and its envs to step."""
        actions, extras = self._choose(group, group.observations, self._ask_together)
        self._in_flight.append(group)
        # Copies, because the policy may reuse its arrays.
        group.actions = mapped(self._acted, _copied, self._acted, actions)
        if self._tensors is None:
            group.extras = {key: values.copy() for key, values in extras.items()}
        else:
            group.actions = self._moved(group.actions, self._acted)
            group.extras = {key: values.clone() for key, values in extras.items()}

    def _moved(self, batch: Any, space: gym.Space[Any] | None = None) -> Any:
        """A batch where the policy wants it; its space is that of observations by default."""
        tensors = self._tensors
        return batch if tensors is None else tensors.moved(space or self._seen, batch)

    def _transitions(
        self, answers: Answers, after: Any, before: tuple[Any, Any, dict[str, Any]], begins: Any
    ) -> Transitions:
        """The transitions of a group that has answered.

        Args:
            answers: The answers of these envs.
            after: Their observations, where the policy wants them.
            before: The observations, actions and extras of the request that they have answered.
            begins: Which of these envs had ended before: in NEXT_STEP their step was a reset.
        """
        row_infos = row_infos_of(answers)
        rows = np.arange(len(answers.envs))
        valid = np.ones(len(rows), np.bool_) if self._same_step else ~begins
        if self._same_step:
            over = np.flatnonzero(answers.terminations | answers.truncations)
            if len(over):
                final = mapped(self._seen, copy.copy, answers.observations)
                for row in over.tolist():
                    infos = [
                        info for info in row_infos[int(answers.envs[row])] if "final_obs" in info
                    ]
                    final = with_row(self._seen, final, row, infos[-1]["final_obs"])
                after = self._moved(final)
        env_ids = answers.envs.astype(np.int64)
        results: tuple[Any, ...] = (answers.rewards, answers.terminations, answers.truncations)
        observations, actions, extras = before
        if self._fixed or not valid.all():
            kept = rows if self._fixed else rows[valid]
            missing = self._size - len(kept) if self._fixed else 0
            rows = np.append(kept, np.repeat(kept[:1], missing))
            observations = self._some(self._seen, observations, rows)
            after = self._some(self._seen, after, rows)
            actions = self._some(self._acted, actions, rows)
            extras = {key: values[rows] for key, values in extras.items()}
            results = tuple(each[rows] for each in results)
            valid, env_ids = valid[rows], env_ids[rows]
            if missing:
                valid[-missing:], env_ids[-missing:] = False, PADDING
        index = {env: row for row, env in enumerate(env_ids.tolist())}
        if self._tensors is not None:
            results = tuple(map(self._tensors.small, results))
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
        runs = _runs(envs)
        part = runs[0] if len(runs) == 1 else envs  # a slice copies nothing
        firsts = [owned[0] for owned in self._exchange.ranges if np.isin(owned, envs).any()]
        return _Group(envs, part, runs, firsts)

    def _choose(
        self,
        group: _Group,
        observations: Any,
        step: Callable[[npt.NDArray[np.intp], Any, dict[str, Any]], None],
    ) -> tuple[Any, dict[str, Any]]:
        """Asks the policy for actions, and the group to step; returns the policy's answer."""
        begun = group.envs[self._begun[group.part]].tolist() if self._caller.has_reset else []
        return self._caller.step(group.envs, observations, None, begun, ask=step)

    def _ask_together(self, envs: npt.NDArray[np.intp], actions: Any, extras: Any) -> None:
        self._exchange.ask(envs, actions, together=True)

    def _next(self) -> _Group:
        """The group to take: the one that was asked first, or that is ready first."""
        if not self._in_turn and len(self._in_flight) > 1:
            ready = self._exchange.first_ready([group.envs for group in self._in_flight])
            self._in_flight.rotate(-ready)
        return self._in_flight.popleft()

    def _take(self, group: _Group, arrays: bool = True) -> Answers:
        """Waits for a group.

        Raises:
            _TakenError: Other code has taken its answers, by ``recv`` after a loop was left.
        """
        envs, exchange = group.envs, self._exchange
        answers = exchange.take(envs, arrays=arrays)
        if answers.failures:
            exchange.raise_failures(answers.failures)
        if len(answers.envs) < len(group.envs):
            raise _TakenError("other code has taken the results of a Pipeline")
        return answers

    def _note(self, part: Any, over: npt.NDArray[np.bool_]) -> None:
        """Notes which envs' episodes a step has ended, and so where episodes begin."""
        self._begun[part] = over if self._same_step else self._ended[part]
        self._ended[part] = over

    def _go_on(self, ask: Callable[[_Group], None]) -> None:
        """Asks the groups that were taken to step; first recycles workers that are due."""
        worn = self._exchange.recycle(() if self._in_flight else None)
        if any(env in worn for group in self._held for env in group.firsts):
            return
        while self._held:
            ask(self._held.popleft())

    def _notice(self, over: npt.NDArray[np.bool_]) -> None:
        """Has episodes begin, for the policy, in envs that other code has used meanwhile.

        A step of other code's that has reset an env counts as none: its episode was over.

        Args:
            over: Whose last step has ended an episode.
        """
        self._begun |= (self._exchange.moves() != self._moves).any(axis=0) | self._ended & ~over
        self._ended[:] = over

    def _settle(self) -> None:
        """Takes answers in flight for a loop that was left."""
        if self._midway:
            self._forget()
        if not self._in_flight:
            return
        try:
            with self._exchange.lend("Pipeline", in_flight=True, keeps=True) as exchange:
                self._midway = True
                while self._in_flight:
                    group = self._next()
                    answers = self._take(group)
                    self._note(group.part, answers.terminations | answers.truncations)
                self._moves = exchange.moves()
            self._held.clear()
            self._midway = False
        except _TakenError:
            self.drop()

    def _forget(self) -> None:
        """Forgets what is in flight; for the policy, episodes begin in all envs."""
        self._in_flight.clear()
        self._held.clear()
        self._begun[:] = True
        self._midway = False

    @staticmethod
    def _some(space: gym.Space[Any], batch: Any, rows: npt.NDArray[np.intp]) -> Any:
        return mapped(space, lambda part: chosen(part, rows), batch)


def _runs(envs: npt.NDArray[np.intp]) -> list[slice]:
    """Splits sorted indices into slices of neighbours."""
    parts = np.split(envs, np.flatnonzero(np.diff(envs) != 1) + 1)
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts]


def _copied(space: gym.Space[Any], actions: Any) -> Any:
    if isinstance(actions, np.ndarray):
        return np.array(actions, space.dtype)
    return tuple(actions)


_SLICE = 16  # steps that are made in one way, groups or lockstep, before the choice is reviewed
_PAIRS = 5  # comparisons of the two ways, whose majority decides
_AGAIN = 25  # slices, at least, between two tries of the slower way
_COST = 0.01  # the share of all time that tries of the slower way may cost, at most
_GAIN, _KEEP = 0.93, 0.97  # time in groups by time in lockstep, at most: to begin groups, to stay


def grouped(owned: Sequence[range], count: int) -> list[npt.NDArray[np.intp]]:
    """Groups of envs, none of them empty, whose sizes are as equal as can be.

    Each group takes its share of each worker's envs, side by side, so that all workers step one
    group while the policy is busy with another. Where workers have too few envs for that, each
    group takes its share of the workers.

    Args:
        owned: Each worker's envs.
        count: Number of groups, at most that of envs.

    Example:
        >>> [group.tolist() for group in grouped([range(0, 4), range(4, 7)], 2)]
        [[0, 1, 4], [2, 3, 5, 6]]
        >>> [group.tolist() for group in grouped([range(i, i + 1) for i in range(5)], 2)]
        [[0, 1, 2], [3, 4]]
    """
    if all(len(envs) < count for envs in owned):
        everyone = [env for envs in owned for env in envs]
        return [np.array(everyone)[part] for part in split_evenly(len(everyone), count)]
    groups: list[list[int]] = [[] for _ in range(count)]
    for envs in owned:
        sizes = [len(envs) // count] * count
        # An env left over goes to the smallest group; among equals to the last, which is asked
        # last.
        for _ in range(len(envs) % count):
            least = min(reversed(range(count)), key=lambda index: len(groups[index]) + sizes[index])
            sizes[least] += 1
        begin = envs.start
        for group, size in zip(groups, sizes, strict=True):
            group += range(begin, begin + size)
            begin += size
    return [np.array(group, np.intp) for group in groups]


class Faster:
    """Finds out, while steps are made, whether groups are faster than lockstep.

    Groups save at most the time of the policy or that of the envs, whichever is shorter: where that
    would not be enough, they are not tried. Otherwise slices of both ways alternate, so that what
    disturbs one disturbs the other. Lockstep is left if most of the last comparisons say that
    groups are clearly faster. From then on the slower way gets a slice now and then: the slower it
    is, the more rarely, so that this costs no more than a hundredth of the time. A slice with a
    surprising result is followed by another one at once.
    """

    def __init__(self) -> None:
        """Begins with lockstep."""
        self.grouped = False  # how most steps are made
        self._ratios: deque[float] = deque(maxlen=_PAIRS)
        self._usual = 0.0  # seconds a step, in the last slice of the usual way
        self._may_pay = True  # whether groups can save enough, by the last slice in lockstep
        self._steps = _SLICE  # until the other way is tried

    def choose(self, length: int, left: int) -> tuple[bool, int]:
        """Which way the next steps are made.

        Args:
            length: Number of steps of the rollout.
            left: Number of these that are still to be made.

        Returns:
            Whether they are made in groups, and for how many steps.
        """
        slices = -(-length // _SLICE)
        most = -(-length // slices)
        if self._steps > 0 or not (self.grouped or self._may_pay):
            return self.grouped, min(left, max(most, self._steps))
        if left < most:  # too few to be compared
            return self.grouped, left
        return not self.grouped, most

    def took(self, grouped: bool, steps: int, seconds: float, policy: float) -> None:
        """Notes a slice: its steps, the seconds of a step, and the policy's share of these."""
        if not grouped:
            self._may_pay = min(policy, seconds - policy) > (1 - _GAIN) * seconds
        if grouped == self.grouped:
            self._usual, self._steps = seconds, self._steps - steps
            return
        ratio = seconds / self._usual if grouped else self._usual / seconds
        self._ratios.append(ratio)
        self._steps = _SLICE
        most = _KEEP if self.grouped else _GAIN
        for_groups = sum(each < most for each in self._ratios)
        if max(for_groups, len(self._ratios) - for_groups) > _PAIRS // 2:
            typical = statistics.median(self._ratios)
            self.grouped = for_groups > _PAIRS // 2
            if (ratio < most) == self.grouped:
                loss = (1 / typical if self.grouped else typical) - 1
                self._steps = int(_SLICE * max(_AGAIN, loss / _COST))


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

    ``infos[t]`` is made into arrays each time it is read: infos that are not read cost little.
    """

    def __init__(self, num_rows: int, row_infos: list[RowInfos]) -> None:
        """Takes the infos of each step, by row."""
        self._gatherer = Batch(num_rows)
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

    Index ``t + 1`` holds what the action at index ``t`` led to; index 0 holds the last results
    from before. The arrays are in shared memory, in which two rollouts alternate, as those of
    :meth:`shmvec.ShmVectorEnv.rollout` do: release the older one before you collect a third.

    Attributes:
        length: Number of steps.
        steps: Number of steps made so far; ``length`` once :meth:`Pipeline.collect` returns.
        observations: ``(length + 1, num_envs, ...)``, nested as the observation space is.
        rewards: float64 ``(length + 1, num_envs)``. ``actions[t]`` has earned ``rewards[t + 1]``.
        terminations: bool ``(length + 1, num_envs)``.
        truncations: bool ``(length + 1, num_envs)``. In autoreset mode NEXT_STEP, an env that has
            ended at ``t`` is reset by the next step, which ignores ``actions[t]``.
        actions: ``(length, num_envs, ...)``, in the dtype of the action space.
        extras: What the policy has returned besides actions, by name: ``(length, num_envs, ...)``.
        infos: ``infos[t + 1]`` is what ``ShmVectorEnv.step`` returns for ``actions[t]``;
            ``infos[0]`` is empty. They are gathered when you ask for them.
    """

    def __init__(self, rollout: Rollout) -> None:
        """Takes a rollout of which no step is made."""
        self._rollout = rollout
        self.length, self.steps = rollout.length, 0
        self.observations = rollout.observations
        self.rewards: Any = rollout.rewards
        self.terminations: Any = rollout.terminations
        self.truncations: Any = rollout.truncations
        self.actions = rollout.actions
        self.extras: dict[str, Any] = {}
        self._named = False  # whether the first batch has fixed the names of the extras
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
        """The rollout's size, and how many of its steps were made."""
        return f"Collected({self.steps} of {self.length} steps, {self.num_envs} envs)"

    def ask(
        self, part: Any, index: int, envs: Any, actions: Any, extras: Mapping[str, Any]
    ) -> None:
        """Asks some envs for a step; see :meth:`shmvec._memory.rollout.Rollout.ask`."""
        self._rollout.ask(envs, part, index, actions)
        self.keep_extras(index, part, extras)

    def begin(self, loan: Any) -> None:
        """Makes its steps within a loan."""
        self._rollout.within = loan

    def set_steps(self, steps: int) -> None:
        """Notes that all envs have made so many steps, by :meth:`ask`."""
        self._rollout.set_steps(steps)
        self.steps = steps

    def step(self, envs: Any, actions: Any, extras: Mapping[str, Any]) -> None:
        """Steps all envs at once, to the next index."""
        keep = partial(self.keep_extras, self.steps, slice(None), extras)
        infos = self._rollout.step(actions, meanwhile=keep)
        self.steps += 1
        self.infos.gathered[self.steps] = infos

    def keep_extras(self, index: int, part: Any, extras: Mapping[str, Any]) -> None:
        """Keeps the extras that came with some envs' actions.

        Raises:
            ValueError: Names, shapes or dtypes differ from those that came first.
        """
        if not self._named:
            self._named = True
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
            kept = self.extras[key]
            if values.shape[1:] != kept.shape[2:] or values.dtype != kept.dtype:
                raise ValueError(
                    f"the policy has returned {key!r} of {values.dtype} {tuple(values.shape[1:])} "
                    f"for an env, and of {kept.dtype} {tuple(kept.shape[2:])} before"
                )
            kept[index, part] = values

    def release(self) -> None:
        """Returns the memory for another rollout, which writes over these arrays.

        Not needed if no array of this rollout is left: then the memory is free, too.
        """
        self._rollout.release()

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._rollout.released


@dataclass(slots=True, eq=False)
class Transitions:
    """One step of each of some envs, as iterating over a :class:`shmvec.Pipeline` yields them.

    Attributes:
        observations: The observations for which the actions were chosen, batched as the observation
            space says.
        actions: The actions of these envs.
        rewards: float64 ``(n,)``.
        next_observations: The observations after the actions: for an episode that has ended, its
            last ones, in each autoreset mode.
        terminations: bool ``(n,)``.
        truncations: bool ``(n,)``.
        infos: Gymnasium's dict of arrays, gathered when it is asked for.
        env_ids: int64 ``(n,)``; -1 of rows that only fill a batch.
        extras: What the policy has returned besides actions, by name, a row for each env.
        valid: bool ``(n,)``: False for a row that is no transition, which only ``batch="fixed"``
            keeps: a step that was a reset, a row that fills the batch.
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
        """Gymnasium's dict of arrays, gathered when it is asked for."""
        return Infos(len(self.env_ids), [self.row_infos])[0]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.env_ids)


def with_row(space: gym.Space[Any], batch: Any, row: int, observation: Any) -> Any:
    """A batch with one row replaced by an observation; changes arrays in place."""
    return mapped(space, partial(_with_row, row), batch, observation)


def _with_row(row: int, batch: Any, observation: Any) -> Any:
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
        """Takes a device: what ``torch.device`` takes.

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

    # ---- what the policy answers -------------------------------------------------------------

    def read(self, actions: Any) -> Any:
        """Actions as a NumPy array; the thread waits for the device here."""
        if isinstance(actions, self._torch.Tensor):
            actions = actions.detach().cpu()
        return np.asarray(actions)

    def keep(self, values: Any) -> Any:
        """Extras that came with actions, as a tensor on the device."""
        return self._torch.as_tensor(values).detach().to(self.device, non_blocking=True)

    # ---- what the policy is asked about ------------------------------------------------------

    def wrapped(self, array: Any) -> Any:
        """A tensor of the same memory; what is no array stays what it is."""
        return self._torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    def moved(self, space: Space, batch: Any) -> Any:
        """A batch on the device, whose arrays no other code may change meanwhile."""
        if self.on_host:
            return mapped(space, self.wrapped, batch)
        with self.copying() as asking:
            return mapped(space, partial(self._sent, asking), batch)

    def _sent(self, asking: Any, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        # Torch reuses its page-locked memory only when the copy is complete.
        sent = self.wrapped(array).pin_memory().to(self.device, non_blocking=True)
        sent.record_stream(asking)  # likewise this memory, once that stream is done with it
        return sent

    def small(self, array: Any) -> Any:
        """A small array on the device."""
        return self.wrapped(array).to(self.device)

    @contextlib.contextmanager
    def copying(self) -> Any:
        """Makes copies on a stream of their own; the caller's stream waits for them."""
        asking = self._torch.cuda.current_stream(self.device)
        self._stream.wait_stream(asking)  # for earlier uses of the same memory
        with self._torch.cuda.stream(self._stream):
            yield asking
        asking.wait_stream(self._stream)

    def finish(self) -> None:
        """Waits for all copies: page-locked memory may be written again."""
        if not self.on_host:
            self._stream.synchronize()

    def empty(self, array: Any) -> Any:
        """A tensor on the device with room for an array."""
        like = self.wrapped(array)
        return like if self.on_host else self._torch.empty_like(like, device=self.device)


class Mirror:
    """A rollout's tensors, filled as the policy is asked, so that they need no copy later."""

    def __init__(self, tensors: Tensors, rollout: Collected, seen: Space, acted: Space) -> None:
        """Makes tensors for a rollout of which no step is made."""
        self._tensors, self._rollout, self._seen, self._acted = tensors, rollout, seen, acted
        self._host = rollout.observations
        self._observations = mapped(seen, tensors.empty, rollout.observations)

    def observations(self, index: int, part: Any, runs: Sequence[slice]) -> Any:
        """The observations of some envs at a step.

        Args:
            index: The step.
            part: The envs, as an index.
            runs: The same as slices.
        """
        self._copy(index, runs)
        return mapped(self._seen, lambda tensor: tensor[index][part], self._observations)

    def _copy(self, index: int, runs: Sequence[slice]) -> None:
        if self._tensors.on_host:
            return
        with self._tensors.copying():
            for run in runs:
                mapped(
                    self._seen, partial(self._copy_run, index, run), self._observations, self._host
                )

    def _copy_run(self, index: int, run: slice, target: Any, source: Any) -> None:
        wrapped = self._tensors.wrapped(source[index, run])
        target[index, run].copy_(wrapped, non_blocking=True)

    def finish(self) -> None:
        """Replaces the rollout's arrays with tensors."""
        rollout, tensors = self._rollout, self._tensors
        self._copy(rollout.length, [slice(None)])
        rollout.observations = self._observations
        rollout.actions = mapped(self._acted, tensors.small, rollout.actions)
        rollout.rewards = tensors.small(rollout.rewards)
        rollout.terminations = tensors.small(rollout.terminations)
        rollout.truncations = tensors.small(rollout.truncations)
        tensors.finish()
