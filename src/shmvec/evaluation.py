"""Exact evaluation: each episode is played once, whatever the number and speed of the envs."""

from __future__ import annotations

import copy
import inspect
import itertools
import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import RecordVideo

from shmvec._arguments import checked_count, checked_int, checked_seconds
from shmvec._cores import usable_cores
from shmvec._hints import found_spec, refuse_unknown
from shmvec._options import OPTIONS, AtMost, with_faults
from shmvec._policy import Policy, PolicyCaller, check_policy
from shmvec.exchange import Answers, Autoreset, AutoresetMode, Exchange
from shmvec.faults import FaultPolicy, RemoteTraceback, add_note
from shmvec.vector_env import ShmVectorEnv

__all__ = ["Episode", "Evaluation", "evaluate"]


Envs: TypeAlias = (
    "str | EnvSpec | Callable[[], gym.Env[Any, Any]] | "
    "Sequence[Callable[[], gym.Env[Any, Any]]] | ShmVectorEnv"
)

_SUCCESS = "is_success"
_CLOSE_S = 5.0  # for envs to close that may be in the middle of a step
_SAMPLES = 1000  # resamples for the intervals in a table: enough for two digits, and fast
_SEEDS = 2**31  # as many as all generators take
_NUMBERS = (bool, int, float, np.number, np.bool_)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The episodes of an evaluation, in the order of their seeds; arrays have shape ``(n,)``.

    Attributes:
        returns: float64: the sums of the rewards.
        lengths: int64: the numbers of steps.
        terminated: bool: whether they ended in a terminal state, and not by a truncation.
        seeds: int64: the seeds of their resets. ``seeds=`` with these plays the same episodes.
        infos: By key, the values in the last steps' infos: an array of numbers or bools where all
            are such, nan where an info has none; else an array of objects, with None.
        steps: Steps made, those of ``repeats`` included.
        repeats: How often an episode was interrupted by a fault, and repeated.
        asked: Number of episodes asked for: more than ``n`` if the time was up.
        seconds: Duration of the evaluation.
    """

    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    terminated: npt.NDArray[np.bool_]
    seeds: npt.NDArray[np.int64]
    infos: dict[str, npt.NDArray[Any]]
    steps: int
    repeats: int
    asked: int
    seconds: float

    def __len__(self) -> int:
        """The number of episodes."""
        return len(self.returns)

    @property
    def complete(self) -> bool:
        """Whether all episodes that were asked for have been played."""
        return len(self) == self.asked

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(means(self.returns[None])[0]) if len(self) else float("nan")

    @property
    def standard_error(self) -> float:
        """The standard error of the mean return; nan for fewer than two episodes."""
        return standard_error(self.returns)

    @property
    def interquartile_mean(self) -> float:
        """The mean return of the middle half of the episodes."""
        return interquartile_mean(self.returns)

    @property
    def success_rate(self) -> float:
        """The share of true ``is_success`` in the last infos that have one; nan if none has.

        A value that is neither a number nor an array of one does not count.
        """
        each = [_number(value) for value in self.infos.get(_SUCCESS, ())]
        known = [value for value in each if not np.isnan(value)]
        return float(np.mean(known)) if known else float("nan")

    def confidence_interval(
        self,
        statistic: str = "interquartile_mean",
        *,
        level: float = 0.95,
        samples: int = 10_000,
        seed: int = 0,
    ) -> tuple[float, float]:
        """A bootstrap's confidence interval of a statistic of the returns.

        It is the percentile bootstrap, as in rliable.

        Args:
            statistic: "interquartile_mean" or "mean".
            level: The interval's confidence level.
            samples: Number of resamples.
            seed: Seed of the resampling.

        Raises:
            ValueError: There is no such statistic, or an argument is out of range.
        """
        return confidence_interval(self.returns, statistic, level, samples, seed)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Columns with a row for each episode, by name; an info whose name is taken is left out."""
        known = {
            "seed": self.seeds,
            "return": self.returns,
            "length": self.lengths,
            "terminated": self.terminated,
        }
        return {**known, **{key: of for key, of in self.infos.items() if key not in known}}

    def to_pandas(self) -> Any:
        """A DataFrame, a row for each episode.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.columns())

    def __str__(self) -> str:
        """The results as a table."""
        lines = [f"{len(self)} episodes of {self.asked}, {self.steps} steps, {self.seconds:.1f} s"]
        if self.repeats:
            lines[0] += f", {self.repeats} repeated"
        if len(self):
            low, high = self.confidence_interval("mean", samples=_SAMPLES)
            low_middle, high_middle = self.confidence_interval(samples=_SAMPLES)
            lines += [
                "",
                "| | mean | standard error | 95 % of the mean | interquartile mean | 95 % of it |",
                "|---|--:|--:|--:|--:|--:|",
                f"| return | {self.mean:,.2f} | {self.standard_error:,.2f} | {low:,.2f} to "
                f"{high:,.2f} | {self.interquartile_mean:,.2f} | {low_middle:,.2f} to "
                f"{high_middle:,.2f} |",
                f"| length | {self.lengths.mean():,.2f} | "
                f"{standard_error(self.lengths.astype(np.float64)):,.2f} | | | |",
            ]
            if _SUCCESS in self.infos:
                lines += [f"| success | {self.success_rate:.3f} | | | | |"]
        return "\n".join(lines)


def evaluate(
    envs: Envs,
    policy: Policy,
    episodes: int = 100,
    *,
    num_envs: int | None = None,
    seeds: int | Sequence[int] | None = None,
    options: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
    batch_size: int | None = None,
    batch: str = "ready",
    info_keys: Collection[str] = (),
    time_limit: float | None = None,
    hard_time_limit: float | None = None,
    progress: bool | Callable[[Episode], object] = False,
    video_folder: str | os.PathLike[str] | None = None,
    video_episodes: Collection[int] = (0,),
    cluster: bool = False,
    actor_options: Mapping[str, Any] | None = None,
    **vector_options: Any,
) -> Evaluation:
    """Plays episodes with a policy, in parallel, each of them exactly once.

    Each episode is a seed and options, with which its env is reset. An env whose episode is over
    takes the next one at once, and stands still when none is left: no step is wasted, and short
    episodes do not count for more than long ones. While the policy computes for the envs that are
    ready, the others step.

    The result does not depend on the numbers of envs and workers, on their speed, or on faults: it
    is, bit for bit, that of playing one episode after the other, if the policy's action for one
    observation does not depend on the others in its batch, and if an env's randomness is its own.
    An episode that is interrupted (its worker was killed) is repeated from its seed.

    Args:
        envs: An id of Gymnasium's registry, "module:Env-v0" to import a module first, or a spec;
            a function that makes an env; a list of such functions, one for each env, of which any
            may play any episode; or a :class:`shmvec.ShmVectorEnv`, which is not closed, and whose
            envs must be reset before they are used again. Answers that an earlier, interrupted call
            has left are waited for first.
        policy: ``policy(observations, env_ids)`` returns an action for each observation, batched
            as ``action_space`` says. ``env_ids``, int64 ``(n,)``, says where they come from. If it
            has a method ``reset(env_ids)``, that is called before it is asked about the first
            observations of episodes in these envs.
        episodes: Number of episodes.
        num_envs: Number of envs, at most one for each episode. None: two for each core, or for each
            worker if ``num_workers`` is given.
        seeds: A number: episode ``i`` gets ``seeds + i``. A list: one for each episode. None: drawn
            from the system's entropy; ``Evaluation.seeds`` has them.
        options: Options of every episode's reset; of a list, each episode gets its own.
        batch_size: Number of envs that the policy is asked about at most, while the others step.
            None: all; with "fixed", half of them.
        batch: "ready": the policy is asked about those that are ready when it is. "fixed": its
            batches always have ``batch_size`` rows, for compiled policies, and for kernels whose
            result depends on the size: missing rows are copies of the first one, with env -1, and
            their actions are discarded.
        info_keys: Further keys of an episode's last info that ``Evaluation.infos`` has;
            ``is_success`` is included where there is one.
        time_limit: Seconds after which no further episode begins. Those that are under way are
            played to their end and count, whatever their length.
        hard_time_limit: Seconds after which nothing is waited for, not even an env in the middle
            of a step. The episodes before the first unfinished one count: so shorter ones are more
            likely to, and the mean is biased towards them.
        progress: True: a bar, where tqdm is installed. A function: it is called with each
            :class:`Episode` when that is over.
        video_folder: Where videos are written, by Gymnasium's ``RecordVideo``:
            ``evaluation-episode-0.mp4``, ... Needs moviepy, and envs with the render mode
            ``rgb_array``, which envs made by id have then.
        video_episodes: Episodes to record, by number.
        cluster: Whether to play on all nodes of a cluster of Ray's, each of which has ``num_envs``
            envs and a copy of the policy; envs and policy must be picklable. The episodes of a node
            that is lost are played by others. docs/cluster.md.
        actor_options: With ``cluster``: options for Ray's actors, ``num_cpus``, ``resources``,
            ``scheduling_strategy`` and ``runtime_env`` for example.
        **vector_options: Arguments of :class:`shmvec.ShmVectorEnv`, ``num_workers`` for example.
            ``faults`` is, by default, ``FaultPolicy(on_crash="restart")``, where neither
            ``install`` nor the environment says otherwise.

    Raises:
        ValueError: There are not as many seeds or options as episodes, or an argument is out of
            range; the policy's actions are wrong in number or shape.
        TypeError: The policy cannot be called, or an argument or an action is of a wrong type.
        Exception: Whatever the policy or an env raises.

    Example:
        >>> import numpy as np
        >>> import shmvec
        >>> def policy(observations, env_ids):
        ...     return (observations[:, 2] > 0).astype(int)
        >>> result = shmvec.evaluate("CartPole-v1", policy, episodes=4, seeds=1)
        >>> result.returns
        array([51., 35., 36., 25.])
        >>> result.steps, result.lengths.tolist()
        (147, [51, 35, 36, 25])
    """
    begin = time.monotonic()
    if isinstance(info_keys, str):
        raise TypeError(f"info_keys must be several, as [{info_keys!r}]")
    keys = dict.fromkeys(info_keys)  # here, so that an error is raised before any work
    played = _episodes(checked_count("episodes", episodes), seeds, options)
    limits = {"time_limit": time_limit, "hard_time_limit": hard_time_limit}
    for name, limit in limits.items():
        checked_seconds(name, limit)
    check_policy(policy, batch)
    if not cluster:
        known = [*inspect.signature(evaluate).parameters, *OPTIONS]
        refuse_unknown("evaluate", vector_options, known)
    if cluster:
        return _on_nodes(
            envs,
            policy,
            played,
            {"num_envs": num_envs, **vector_options},
            {"batch_size": batch_size, "batch": batch},
            {**limits, "video_folder": video_folder},
            keys,
            progress,
            actor_options or {},
        )
    if actor_options is not None:
        raise ValueError("actor_options are for Ray's actors: they need cluster=True")
    if isinstance(envs, ShmVectorEnv):
        chosen = {"num_envs": num_envs, "video_folder": video_folder, **vector_options}
        given = [name for name, value in chosen.items() if value is not None]
        if given:
            raise ValueError(f"of a vector env that exists these cannot be chosen: {given}")
        vector, own = envs, False
        make = _nothing
    else:
        recording = None if video_folder is None else (video_folder, video_episodes)
        env_fns, chosen = _chosen(envs, len(played), recording, num_envs, **vector_options)
        # The object exists before it starts anything, so that it is closed if Ctrl-C comes.
        vector, own = ShmVectorEnv.__new__(ShmVectorEnv), True
        make = partial(ShmVectorEnv.__init__, vector, env_fns, **chosen)
    ended: Callable[[], object] = _nothing
    try:
        make()
        _check_mode(vector)
        report, ended = _progress(progress, len(played))
        size = vector.num_envs if batch == "ready" else max(1, vector.num_envs // 2)
        if batch_size is not None:
            size = checked_count("batch_size", batch_size)
        vector.exchange.check_pending("evaluate", alone=True)
        with vector.exchange.lend("evaluate", in_flight=True) as exchange:
            player = EpisodePlayer(
                exchange,
                policy,
                played,
                batch_size=size,
                fixed=batch == "fixed",
                options_of=_options_of if video_folder is None else _options_with_number,
                finished=report,
            )
            player.play(
                np.inf if time_limit is None else begin + time_limit,
                np.inf if hard_time_limit is None else begin + hard_time_limit,
            )
        if own:
            _close(vector, None if hard_time_limit is None else _CLOSE_S, None)
    except BaseException as error:
        if own:
            _close(vector, _CLOSE_S, error)
        raise
    finally:
        ended()
    return _evaluation(played, player.steps, keys, time.monotonic() - begin)


def _chosen(
    envs: Any, episodes: int, recording: Any = None, num_envs: int | None = None, **options: Any
) -> tuple[list[Callable[[], Any]], dict[str, Any]]:
    """The env functions and options of a vector env for so many episodes, without autoreset."""
    if options.get("num_workers") is not None:
        options["num_workers"] = AtMost(options["num_workers"])
    workers = options.get("num_workers") or usable_cores()
    env_fns = _env_fns(envs, num_envs, 2 * workers, episodes, recording is not None)
    if recording is not None:
        env_fns = recorded(env_fns, *recording)
    options = with_faults(options, FaultPolicy(on_crash="restart"))
    options.setdefault("autoreset_mode", AutoresetMode.DISABLED)
    return env_fns, options


def _made(envs: Any, episodes: int, **options: Any) -> ShmVectorEnv:
    """Makes a node's vector env; it runs on the node, whose cores it counts."""
    env_fns, chosen = _chosen(envs, episodes, **options)
    return ShmVectorEnv(env_fns, **chosen)


def _played_on_node(
    envs: ShmVectorEnv, policy: Policy, seeds: list[int], options: list[Any], how: dict[str, Any]
) -> tuple[list[Episode], int]:
    """Plays a node's share of the episodes; returns these, in order, and the number of steps."""
    played: list[Episode] = []
    result = evaluate(
        envs, policy, len(seeds), seeds=seeds, options=options, progress=played.append, **how
    )
    return sorted(played, key=lambda episode: episode.number), result.steps


def _on_nodes(
    envs: Any,
    policy: Policy,
    played: list[Episode],
    vector_options: dict[str, Any],
    how: dict[str, Any],
    not_there: dict[str, Any],
    keys: Collection[str],
    progress: Any,
    actor_options: Mapping[str, Any],
) -> Evaluation:
    """Evaluates on a cluster."""
    from shmvec.cluster.evaluation import play_on_nodes  # imported only where it is needed

    begin = time.monotonic()
    refused = [name for name, value in not_there.items() if value is not None]
    if refused:
        raise ValueError(f"on a cluster there is no {' and no '.join(refused)}")
    if isinstance(envs, ShmVectorEnv):
        raise ValueError("a vector env cannot be sent to other nodes: give what makes its envs")
    report, ended = _progress(progress, len(played))
    make = partial(_made, envs, len(played), **vector_options)
    try:
        steps = play_on_nodes(make, policy, _played_on_node, played, how, report, actor_options)
    finally:
        ended()
    return _evaluation(played, steps, keys, time.monotonic() - begin)


def _episodes(count: int, seeds: Any, options: Any) -> list[Episode]:
    if seeds is None:
        numbers = np.random.default_rng().integers(_SEEDS, size=count).tolist()
    elif isinstance(seeds, Sequence) or (isinstance(seeds, np.ndarray) and seeds.ndim):
        numbers = [_seed(seed) for seed in seeds]
        if len(numbers) != count:
            raise ValueError(f"seeds has {len(numbers)} seeds, for {count} episodes")
    else:
        numbers = [_seed(_seed(seeds) + i) for i in range(count)]
    each = list(options) if isinstance(options, (list, tuple)) else [options] * count
    if len(each) != count:
        raise ValueError(f"options has {len(each)} options, for {count} episodes")
    for one in each:
        if one is not None and not isinstance(one, dict):
            raise TypeError(f"options must be dicts or None, got {one!r}")
    return [Episode(*of) for of in zip(range(count), numbers, each, strict=True)]


def _seed(value: Any) -> int:
    seed = checked_int("a seed", value)
    if seed < 0:
        raise ValueError(f"a seed must not be negative, got {seed}")
    if seed > np.iinfo(np.int64).max:
        raise ValueError(f"a seed must be less than 2**63, got {seed}")
    return seed


def _options_of(episode: Episode) -> Any:
    return episode.options


def _options_with_number(episode: Episode) -> Any:
    return {EPISODE: episode.number, "": episode.options}


def _env_fns(
    envs: Any, num_envs: int | None, default: int, episodes: int, draws: bool
) -> list[Callable[[], Any]]:
    if isinstance(envs, VectorEnv):
        raise TypeError(
            f"evaluate() plays in a ShmVectorEnv, without wrappers around it, and not in a "
            f"{type(envs).__name__}: wrap the envs, or give it what makes one"
        )
    if not isinstance(envs, (str, EnvSpec)) and isinstance(envs, Sequence):
        if num_envs not in (None, len(envs)):
            raise ValueError(f"num_envs is {num_envs}, and there are {len(envs)} env_fns")
        return list(envs[:episodes])
    count = default if num_envs is None else checked_count("num_envs", num_envs)
    if isinstance(envs, (str, EnvSpec)):
        spec = found_spec(envs) if isinstance(envs, str) else envs
        drawing: dict[str, Any] = {"render_mode": "rgb_array"} if draws else {}
        envs = partial(gym.make, spec, **drawing)
    return [envs] * min(count, episodes)


def _check_mode(envs: ShmVectorEnv) -> None:
    autoreset = Autoreset.of(envs.autoreset_mode)
    # A worker function resets by rules of its own: Gymnasium's would reset an env a second time.
    if autoreset.in_step or (envs.worker and autoreset.by_worker):
        raise ValueError(
            "evaluate() resets envs itself: make them with autoreset_mode=AutoresetMode.DISABLED"
        )


def _close(vector: ShmVectorEnv, timeout: float | None, reason: BaseException | None) -> None:
    """Closes a vector env; an env's exception hides neither the reason nor the results."""
    try:
        vector.close(timeout=timeout)
    except Exception as error:
        if not isinstance(error.__cause__, RemoteTraceback):  # a signal's handler has raised it
            raise
        failure = f"as it was closed, an env has raised {type(error).__name__}: {error}"
        if reason is None:
            logger.warn(f"the results of evaluate() are whole, but {failure}")
        else:
            add_note(reason, failure)


def _progress(
    progress: Any, count: int
) -> tuple[Callable[[Episode], object], Callable[[], object]]:
    """The function to call with each episode that is over, and the one to call at the end."""
    if callable(progress):
        return progress, _nothing
    if progress:
        with suppress(ImportError):
            from tqdm import tqdm

            bar = tqdm(total=count, unit="episode")
            return lambda episode: bar.update(), bar.close
    return _nothing, _nothing


def _nothing(*_: Any) -> None:
    pass


def _evaluation(
    played: Sequence[Episode], steps: int, keys: Collection[str], seconds: float
) -> Evaluation:
    # Only the episodes before the first unfinished one count: if all finished ones did, short
    # episodes would be more likely to count than long ones.
    counted = list(itertools.takewhile(lambda episode: episode.finished, played))
    infos = {}
    for key in dict.fromkeys([_SUCCESS, *keys]):
        values = [episode.info.get(key) for episode in counted]
        if any(value is not None for value in values):
            infos[key] = _array(values)
        elif key in keys and counted:
            logger.warn(f"no episode's last info has {key!r}; it has {list(counted[0].info)}")
    return Evaluation(
        returns=np.array([episode.return_ for episode in counted], np.float64),
        lengths=np.array([episode.length for episode in counted], np.int64),
        terminated=np.array([episode.terminated for episode in counted], np.bool_),
        seeds=np.array([episode.seed for episode in counted], np.int64),
        infos=infos,
        steps=steps,
        repeats=sum(episode.repeats for episode in played),
        asked=len(played),
        seconds=seconds,
    )


def _number(value: Any) -> float:
    """A number or bool, or an array of one; nan: it is something else."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    return float(value) if isinstance(value, _NUMBERS) else float("nan")


def _array(values: Sequence[Any]) -> npt.NDArray[Any]:
    """An array of numbers or bools if all values are such or None; else of objects."""
    if all(value is None or isinstance(value, _NUMBERS) for value in values):
        if any(value is None for value in values):
            return np.array([np.nan if value is None else value for value in values], np.float64)
        return np.array(values)
    array = np.empty(len(values), object)
    array[:] = values
    return array


@dataclass(slots=True)
class Episode:
    """An episode of an evaluation.

    Attributes:
        number: Its place among the episodes asked for.
        seed: The seed of its reset.
        options: The options of its reset.
        return_: The sum of its rewards, so far.
        length: The number of its steps, so far.
        info: The last step's info.
        terminated: Whether it ended in a terminal state, and not by a truncation.
        finished: Whether it has been played.
        repeats: How often it was interrupted by a fault, and repeated.
    """

    number: int
    seed: int | None
    options: Any
    return_: float = 0.0
    length: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    terminated: bool = False
    finished: bool = False
    repeats: int = 0


class EpisodePlayer:
    """Plays episodes, each from its seed and its options, without a wasted step."""

    def __init__(
        self,
        exchange: Exchange,
        policy: Policy,
        episodes: Sequence[Episode],
        *,
        batch_size: int,
        fixed: bool,
        options_of: Callable[[Episode], Any],
        finished: Callable[[Episode], object],
    ) -> None:
        """Prepares to play.

        Args:
            exchange: The envs; answers in flight are discarded when they come.
            policy: Chooses actions.
            episodes: The episodes to play, in this order.
            batch_size: Number of envs that the policy is asked about at a time, at most.
            fixed: Whether batches are filled up to this size.
            options_of: Returns the options that an episode's reset is given.
            finished: Called with each episode when it is over.
        """
        self._exchange = exchange
        self._caller = PolicyCaller(exchange, policy, batch_size if fixed else None)
        self._waiting = deque(episodes)
        self._batch_size = batch_size
        self._options_of = options_of
        self._finished = finished
        self._last_start = np.inf
        self._playing: dict[int, Episode] = {}  # by env
        self._begun: set[int] = set()  # envs that were asked to reset
        self.steps = 0

    def play(self, last_start: float, deadline: float) -> None:
        """Plays the episodes, as far as the time allows.

        Args:
            last_start: When the last episode may begin, by the monotonic clock.
            deadline: When it stops to wait for those that have begun.

        Raises:
            Exception: What envs and the policy raise.
        """
        exchange = self._exchange
        everyone = range(exchange.num_envs)
        self._last_start = last_start
        try:
            if not exchange.discard(_left(deadline)):
                return
            self._begin(everyone)
            while self._playing or self._waiting:
                if self._waiting and len(self._playing) < len(everyone):
                    self._begin([env for env in everyone if env not in self._playing])
                    if not self._playing:  # the time is up
                        break
                count = min(self._batch_size, exchange.num_in_flight)
                # Takes only the envs that are ready: the others become ready while the policy is
                # busy with these.
                answers = exchange.take(count=count, least=1, timeout=_left(deadline))
                if answers.failures:
                    exchange.raise_failures(answers.failures)
                self._go_on(answers)
                if time.monotonic() >= deadline:
                    break
        except multiprocessing.TimeoutError:
            if time.monotonic() < deadline:  # then it is an env's own limit
                raise

    def _begin(self, envs: Sequence[int]) -> None:
        """Has envs begin the next episodes, as long as there are any, and time is left."""
        worn = self._exchange.recycle(envs) if self._waiting else ()
        for env in envs:
            if not self._waiting or time.monotonic() >= self._last_start:
                break
            if env in worn:  # its worker restarts first, when the episodes of its envs are over
                continue
            self._playing[env] = self._waiting.popleft()
        self._reset([env for env in envs if env in self._playing])

    def _reset(self, envs: list[int]) -> None:
        if not envs:
            return
        mine = [self._playing[env] for env in envs]
        # Copies, because an env may change its options, which other resets need as they are.
        options = [copy.deepcopy(self._options_of(episode)) for episode in mine]
        self._begun.update(envs)
        self._exchange.ask_reset(envs, [episode.seed for episode in mine], options)

    def _go_on(self, answers: Answers) -> None:
        """Takes what envs have answered, and asks them for their next step or reset."""
        over = answers.terminations | answers.truncations
        rows: list[int] = []
        begun: list[int] = []
        broken: list[int] = []
        ended: dict[int, Episode] = {}
        for row, env in enumerate(answers.envs.tolist()):
            episode = self._playing[env]
            report = answers.reports.get(env)
            resets = env in self._begun
            self._begun.discard(env)
            if report is not None and report.cut_off:
                episode.repeats += 1
                episode.return_, episode.length = 0.0, 0
                broken.append(env)
            elif resets:
                begun.append(env)
                rows.append(row)
            else:
                self.steps += 1
                episode.return_ += float(answers.rewards[row])
                episode.length += 1
                if over[row]:
                    episode.info = answers.infos[row]
                    episode.terminated = bool(answers.terminations[row])
                    episode.finished = True
                    ended[env] = self._playing.pop(env)
                else:
                    rows.append(row)
        # Resets first: they keep workers busy while the policy computes.
        self._reset(broken)
        self._begin(list(ended))
        for episode in ended.values():
            self._finished(episode)
        if rows:
            self._caller.step(answers.envs, answers.observations, np.array(rows, np.intp), begun)


def _left(deadline: float) -> float | None:
    """Seconds until the deadline; None: there is none."""
    return None if deadline == np.inf else max(0.0, deadline - time.monotonic())


Values = npt.NDArray[np.float64]
_AT_ONCE = 1 << 22  # values of resamples that are in memory at a time


def interquartile_mean(values: Values) -> float:
    """The mean of the middle half: a quarter of the values is left out at either end.

    Example:
        >>> interquartile_mean(np.array([1.0, 2.0, 4.0, 100.0]))
        3.0
    """
    return float(_interquartile_means(values[None])[0]) if len(values) else float("nan")


def standard_error(values: Values) -> float:
    """The standard error of the values' mean; nan for fewer than two values."""
    if len(values) < 2:
        return float("nan")
    with np.errstate(invalid="ignore"):  # raised by infinite values
        return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def _interquartile_means(values: Values) -> Values:
    cut = values.shape[1] // 4
    ordered = np.sort(values, axis=1)
    return means(ordered[:, cut : values.shape[1] - cut])


def means(values: Values) -> Values:
    """The means of the rows; nan where there are infinite values of both signs."""
    with np.errstate(invalid="ignore"):
        found: Values = values.mean(axis=1)
    return found


# Each takes a matrix, and returns one value for each row.
STATISTICS: dict[str, Callable[[Values], Values]] = {
    "interquartile_mean": _interquartile_means,
    "mean": means,
}


def confidence_interval(
    values: Values, statistic: str, level: float, samples: int, seed: int
) -> tuple[float, float]:
    """A percentile bootstrap's interval of a statistic.

    Args:
        values: float64 ``(n,)``.
        statistic: One of ``STATISTICS``.
        level: The interval's confidence level, 0.95 for example.
        samples: Number of resamples.
        seed: Seed of the resampling.

    Returns:
        The interval's lower and upper end; nan where there are no values.

    Raises:
        ValueError: There is no such statistic, or the level is not between 0 and 1.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"statistic must be one of {', '.join(STATISTICS)}, got {statistic!r}")
    if not 0 < level < 1 or samples < 1:
        raise ValueError(
            f"level must lie between 0 and 1, and samples be positive, got {level} and {samples}"
        )
    if not len(values):
        return float("nan"), float("nan")
    each = STATISTICS[statistic]
    random = np.random.default_rng(seed)
    found = _resampled(values, each, samples, random)
    with np.errstate(invalid="ignore"):
        low, high = np.percentile(found, (50 * (1 - level), 50 * (1 + level)))
    return float(low), float(high)


def _resampled(
    values: Values,
    each: Callable[[Values], Values],
    samples: int,
    random: np.random.Generator,
) -> Values:
    found = np.empty(samples)
    some = max(1, _AT_ONCE // len(values))
    for begin in range(0, samples, some):
        end = min(samples, begin + some)
        drawn = random.integers(len(values), size=(end - begin, len(values)))
        found[begin:end] = each(values[drawn])
    return found


EPISODE = "shmvec.episode"  # the option by which a reset says which episode it begins

_Env = gym.Env[Any, Any]


def recorded(
    env_fns: Collection[Callable[[], _Env]], folder: str | os.PathLike[str], chosen: Collection[int]
) -> list[Callable[[], _Env]]:
    """Env_fns whose envs record these episodes, as ``episode-<number>.mp4``.

    Raises:
        gymnasium.error.DependencyNotInstalled: moviepy is not installed.
    """
    return [
        partial(_make, env_fn, os.path.abspath(folder), frozenset(chosen)) for env_fn in env_fns
    ]


def _make(env_fn: Callable[[], _Env], folder: str, chosen: frozenset[int]) -> _Env:
    return Recorder(env_fn(), folder, chosen)


if TYPE_CHECKING:
    _RecordVideo = RecordVideo[Any, Any]
else:  # Gymnasium 1.1 to 1.3 give it three type arguments
    _RecordVideo = RecordVideo


class Recorder(_RecordVideo):
    """Gymnasium's RecordVideo with given episode numbers; its own count the episodes of one env."""

    def __init__(self, env: _Env, folder: str, chosen: frozenset[int]) -> None:
        """Wraps an env."""
        with warnings.catch_warnings():  # other workers make the folder, too
            warnings.simplefilter("ignore")
            super().__init__(
                env, folder, episode_trigger=chosen.__contains__, name_prefix="evaluation"
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins the episode that the options name."""
        if options is not None and EPISODE in options:
            self.episode_id = options[EPISODE] - 1  # the wrapper counts on
            options = options.get("")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Writes the video at an episode's end; there may be no other reset."""
        results = super().step(action)
        if self.recording and (results[2] or results[3]):
            self.stop_recording()  # type: ignore[no-untyped-call]
        return results
