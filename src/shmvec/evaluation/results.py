"""The result of an evaluation: the episodes of one env, as arrays and as a table."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shmvec.evaluation.episodes import Episode
from shmvec.evaluation.statistics import confidence_interval, standard_error, statistic_of

__all__ = ["SUCCESS", "Evaluation", "data_frame", "evaluation_of"]

SUCCESS = "is_success"
_SAMPLES = 1000  # resamples for a table's intervals: enough for two digits, and fast
_NUMBERS = (bool, int, float, np.number, np.bool_)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The episodes of an evaluation, in the order of their seeds; arrays have shape ``(n,)``.

    Attributes:
        returns: float64: the sums of the rewards.
        lengths: int64: the numbers of steps.
        terminated: bool: whether they have terminated; the others were truncated.
        seeds: int64: the seeds of their resets. ``seeds=`` with these plays the same episodes.
        infos: By key, the values in the last steps' infos: an array of numbers or bools if all
            are such, with nan for infos without the key; else an array of objects, with None.
        steps: Number of steps made, including those of interrupted episodes.
        repeats: Number of times that an episode was interrupted by a fault, and repeated.
        asked: Number of episodes asked for: more than ``n`` if a time limit ended the evaluation,
            or episodes have failed.
        seconds: Duration of the evaluation; for a task of a suite, of its episodes.
        success_key: The key of infos that says whether an episode was a success.
        failed: For a task of a suite, seed and reason of each failed episode: no array has it.
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
    success_key: str = SUCCESS
    failed: tuple[tuple[int, str], ...] = ()

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
        return statistic_of([self.returns], "mean")

    @property
    def standard_error(self) -> float:
        """The standard error of the mean return; nan for fewer than two episodes."""
        return standard_error(self.returns)

    @property
    def interquartile_mean(self) -> float:
        """The mean return of the middle half of the episodes."""
        return statistic_of([self.returns], "interquartile_mean")

    @property
    def successes(self) -> npt.NDArray[np.float64]:
        """The values of ``success_key`` in the last infos, float64 ``(n,)``; nan if there is none.

        A value that is neither a number nor an array of one number counts as none.
        """
        each = self.infos.get(self.success_key, [None] * len(self))
        return np.array([_number(value) for value in each], np.float64)

    @property
    def success_rate(self) -> float:
        """The share of successes among the episodes that have ``success_key`` and the failed ones.

        It is nan if no episode has the key.
        """
        known = self.successes[~np.isnan(self.successes)]
        return float(known.sum() / (len(known) + len(self.failed))) if len(known) else float("nan")

    @property
    def success_text(self) -> str:
        """The success rate as in tables, with the number of episodes that say so, if not all do."""
        known = int((~np.isnan(self.successes)).sum())
        some = "" if known == len(self) else f" ({known} of {len(self)} say so)"
        return f"{self.success_rate:.3f}{some}" if known else ""

    def confidence_interval(
        self,
        statistic: str = "interquartile_mean",
        *,
        level: float = 0.95,
        samples: int = 10_000,
        seed: int = 0,
    ) -> tuple[float, float]:
        """The confidence interval of a statistic of the returns, by the percentile bootstrap.

        Args:
            statistic: "interquartile_mean" or "mean".
            level: The interval's confidence level.
            samples: Number of resamples.
            seed: Seed of the resampling.

        Returns:
            The lower and upper end; nan if there are no episodes.

        Raises:
            ValueError: There is no such statistic, or an argument is out of range.
        """
        return confidence_interval([self.returns], statistic, level, samples, seed)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Columns with a row for each episode, by name, without infos named as another column."""
        known = {
            "seed": self.seeds,
            "return": self.returns,
            "length": self.lengths,
            "terminated": self.terminated,
        }
        return {**known, **{key: of for key, of in self.infos.items() if key not in known}}

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each episode.

        Raises:
            ImportError: pandas is not installed.
        """
        return data_frame(self.columns())

    def __str__(self) -> str:
        """The results as a table."""
        lines = [f"{len(self)} episodes of {self.asked}, {self.steps} steps, {self.seconds:.1f} s"]
        if self.repeats:
            lines[0] += f", {self.repeats} repeated"
        if self.failed:
            lines[0] += f", {len(self.failed)} failed"
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
            if self.success_key in self.infos:
                lines += [f"| success | {self.success_text} | | | | |"]
        return "\n".join(lines)


def data_frame(columns: dict[str, npt.NDArray[Any]]) -> Any:
    """A DataFrame of columns.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas: pip install pandas") from error
    return pandas.DataFrame(columns)


def evaluation_of(
    played: Sequence[Episode],
    keys: Collection[str],
    success_key: str = SUCCESS,
    seconds: float | None = None,
) -> Evaluation:
    """The result of the episodes before the first unfinished one.

    ``seconds`` is the evaluation's duration. None: the sum of the episodes'.
    """
    # If all finished episodes counted, short ones would be more likely to count than long ones.
    settled = list(itertools.takewhile(lambda episode: episode.settled, played))
    counted = [episode for episode in settled if episode.finished]
    infos = {}
    for key in dict.fromkeys([success_key, *keys]):
        values = [episode.info.get(key) for episode in counted]
        if any(value is not None for value in values):
            infos[key] = _array(values)
    return Evaluation(
        returns=np.array([episode.return_ for episode in counted], np.float64),
        lengths=np.array([episode.length for episode in counted], np.int64),
        terminated=np.array([episode.terminated for episode in counted], np.bool_),
        seeds=np.array([episode.seed for episode in counted], np.int64),
        infos=infos,
        steps=sum(episode.steps for episode in played),
        repeats=sum(episode.repeats for episode in played),
        asked=len(played),
        seconds=sum(episode.seconds for episode in played) if seconds is None else seconds,
        success_key=success_key,
        failed=tuple((int(each.seed or 0), each.failed) for each in settled if each.failed),
    )


def _number(value: Any) -> float:
    """A number or bool, or an array of one, as a float; nan for anything else."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    return float(value) if isinstance(value, _NUMBERS) else float("nan")


def _array(values: Sequence[Any]) -> npt.NDArray[Any]:
    """An array of numbers or bools if all values are such or None; else one of objects."""
    if all(value is None or isinstance(value, _NUMBERS) for value in values):
        if any(value is None for value in values):
            return np.array([np.nan if value is None else value for value in values], np.float64)
        return np.array(values)
    array = np.empty(len(values), object)
    array[:] = values
    return array
