"""The result of a suite's evaluation: by task, over all tasks, and compared with another one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shmvec.evaluation.episodes import Episode
from shmvec.evaluation.record import RecordError, read_record
from shmvec.evaluation.results import Evaluation, data_frame, evaluation_of
from shmvec.evaluation.statistics import Values, confidence_interval, statistic_of
from shmvec.evaluation.tasks import Task

__all__ = ["Comparison", "SuiteEvaluation", "TaskDifference"]

_SAMPLES = 1000  # resamples for a table's intervals


@dataclass(frozen=True, eq=False)
class SuiteEvaluation(Mapping[str, Evaluation]):
    """The evaluations of a suite's tasks, by name: ``result["task"]`` is an :class:`Evaluation`.

    Statistics over tasks are computed from scores. These are normalised returns, if all tasks with
    episodes have a :attr:`Task.reference`; else successes, if all have them; else returns.

    Attributes:
        tasks: The tasks.
        evaluations: Their evaluations, by name.
        failures: By name, why the env of a task could not be built.
        seconds: Duration of this evaluation, without the episodes that its record had.
    """

    tasks: tuple[Task, ...]
    evaluations: dict[str, Evaluation]
    failures: dict[str, str]
    seconds: float

    def __getitem__(self, name: str) -> Evaluation:
        """The evaluation of a task."""
        return self.evaluations[name]

    def __iter__(self) -> Iterator[str]:
        """The names of the tasks."""
        return iter(self.evaluations)

    def __len__(self) -> int:
        """The number of tasks."""
        return len(self.evaluations)

    @classmethod
    def read(
        cls, record: str | os.PathLike[str], *, success_key: str | None = None
    ) -> SuiteEvaluation:
        """The result of the episodes in a record.

        The episodes of each task before the first missing one count, as in an evaluation that was
        ended by a time limit: if all did, short episodes would be more likely to count. A record
        does not know how many episodes were asked for: ``complete`` means that none is missing
        between others.

        Args:
            record: A file that ``evaluate(..., record=)`` has written.
            success_key: The key of infos that says whether an episode was a success. None: that of
                the evaluation.

        Raises:
            ValueError: The file is not a record, or it is damaged.
        """
        content = read_record(Path(record))
        for name in content.episodes.keys() - content.tasks.keys():
            raise RecordError(f"the record is damaged: it has no task {name!r}")
        tasks, evaluations = [], {}
        for index, (name, line) in enumerate(content.tasks.items()):
            reference, keys = line["reference"], line["info_keys"]
            reference = None if reference is None else tuple(reference)
            tasks.append(Task(line["env"], reference=reference, name=name, index=index))
            episodes = [*content.played(name)]
            for place, each in enumerate(episodes):
                if each.number != place:  # one is missing: it had not ended
                    episodes.insert(place, Episode(place, None, None))
                    break
            evaluations[name] = evaluation_of(episodes, keys, success_key or keys[0])
        seconds = sum(each.seconds for each in evaluations.values())
        return cls(tuple(tasks), evaluations, {}, seconds)

    @property
    def complete(self) -> bool:
        """Whether all episodes of all tasks have been played."""
        return not self.failures and all(each.complete for each in self.evaluations.values())

    @property
    def score(self) -> str:
        """The score of statistics over tasks: "normalised return", "success" or "return"."""
        played = [task for task in self.tasks if len(self[task.name])]
        if played and all(task.reference is not None for task in played):
            return "normalised return"
        if played and not any(np.isnan(self[task.name].success_rate) for task in played):
            return "success"
        return "return"

    def scores(self, score: str | None = None) -> dict[str, npt.NDArray[np.float64]]:
        """The scores of the episodes, for each task with episodes.

        An episode that counts as failed is not a success, and has no return.

        Args:
            score: "normalised return", "success" or "return". None: :attr:`score`.

        Raises:
            ValueError: There is no such score, or a task has no reference.
        """
        kind = self.score if score is None else score
        scores = {}
        for task in self.tasks:
            each = self[task.name]
            if kind == "return":
                values = each.returns
            elif kind == "success":
                successes = each.successes
                values = successes[~np.isnan(successes)]
                if len(values) or not len(each):
                    values = np.append(values, np.zeros(len(each.failed)))
            elif kind == "normalised return":
                values = task.normalised(each.returns) if len(each) else each.returns
            else:
                raise ValueError(
                    f"score must be 'return', 'success' or 'normalised return', got {score!r}"
                )
            if len(values):
                scores[task.name] = values
        return scores

    @property
    def mean(self) -> float:
        """The mean of the tasks' mean scores."""
        return statistic_of([*self.scores().values()], "mean")

    @property
    def interquartile_mean(self) -> float:
        """The mean of the middle half of all episodes' scores."""
        return statistic_of([*self.scores().values()], "interquartile_mean")

    @property
    def success_rate(self) -> float:
        """The mean of the tasks' success rates; nan if none has one.

        It is 0 for a task all of whose episodes count as failed.
        """
        if all(np.isnan(each.success_rate) for each in self.values()):
            return float("nan")
        return float(np.mean([values.mean() for values in self.scores("success").values()]))

    def confidence_interval(
        self,
        statistic: str = "interquartile_mean",
        *,
        level: float = 0.95,
        samples: int = 10_000,
        seed: int = 0,
    ) -> tuple[float, float]:
        """The confidence interval of a statistic of the scores over all tasks.

        It is computed by the stratified percentile bootstrap, as in rliable: episodes are resampled
        within each task, so it says how much the result depends on the episodes, and not how much
        it depends on the tasks.

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
        return confidence_interval([*self.scores().values()], statistic, level, samples, seed)

    def compared_with(
        self, other: SuiteEvaluation, *, level: float = 0.95, samples: int = 10_000, seed: int = 0
    ) -> Comparison:
        """The changes from this result to another one, with intervals.

        Only episodes that both results have, by task and seed, are compared, in pairs: if the seed
        decides much of an episode, small differences show. Returns of both are normalised by the
        references of this result. An episode that counts as failed is not a success; returns are
        only compared between episodes that have one.

        The intervals for few episodes are too narrow: at a level of 95 %, about 6 of 100 tasks that
        do not differ seem to differ with 50 episodes, 10 with 10, and 17 with 5. For one episode
        there is no interval (nan).

        Args:
            other: The other result.
            level: The intervals' confidence level.
            samples: Number of resamples.
            seed: Seed of the resampling.

        Raises:
            ValueError: They have no episode in common, or an argument is out of range.
        """
        kind = self.score if self.score == other.score else "return"
        rows, groups = [], []
        for name in self:
            if name in other:
                mine, others = _paired(self, other, name, kind)
                if len(mine):
                    change = others - mine
                    interval = _interval([change], level, samples, seed)
                    means = float(mine.mean()), float(others.mean())
                    rows.append(TaskDifference(name, len(mine), *means, interval))
                    groups.append(change)
        if not rows:
            raise ValueError("the two results have no episode in common, by task and seed")
        overall = TaskDifference(
            "all tasks",
            sum(row.episodes for row in rows),
            float(np.mean([row.before for row in rows])),
            float(np.mean([row.after for row in rows])),
            _interval(groups, level, samples, seed),
        )
        return Comparison(kind, level, tuple(rows), overall)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Columns with a row for each episode, by name, "task" first."""
        tables = {name: each.columns() for name, each in self.evaluations.items() if len(each)}
        keys = dict.fromkeys(key for table in tables.values() for key in table)
        columns: dict[str, npt.NDArray[Any]] = {
            "task": np.array([name for name, each in self.items() for _ in range(len(each))])
        }
        for key in keys:
            if key == "task":  # an info of this name is left out
                continue
            parts = [
                table.get(key, np.full(len(self[name]), None)) for name, table in tables.items()
            ]
            columns[key] = np.concatenate(parts)
        return columns

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each episode.

        Raises:
            ImportError: pandas is not installed.
        """
        return data_frame(self.columns())

    def __str__(self) -> str:
        """The results as a table with a row for each task."""
        played = sum(map(len, self.evaluations.values()))
        asked = sum(each.asked for each in self.evaluations.values())
        repeats = sum(each.repeats for each in self.evaluations.values())
        failed = sum(len(each.failed) for each in self.evaluations.values())
        head = f"{len(self)} tasks, {played} episodes of {asked}, {self.seconds:.1f} s"
        head += f", {repeats} repeated" if repeats else ""
        head += f", {failed} failed" if failed else ""
        with_success = any(each.success_key in each.infos for each in self.evaluations.values())
        normalised = any(task.reference is not None for task in self.tasks)
        titles = ["task", "episodes", "return", "95 % of the mean", "interquartile mean", "length"]
        titles += ["success"] * with_success + ["normalised"] * normalised
        rows = [titles, ["---"] + ["--:"] * (len(titles) - 1)]
        for task in self.tasks:
            rows.append(self._row(task, with_success, normalised))
        lines = [head, "", *(f"| {' | '.join(row)} |" for row in rows)]
        if any(map(len, self.evaluations.values())):
            lines += ["", f"Over tasks, the {self.score}:", ""]
            lines += ["| | | 95 % of it |", "|---|--:|--:|"]
            for name, value in (
                ("mean", self.mean),
                ("interquartile mean", self.interquartile_mean),
            ):
                low, high = self.confidence_interval(name.replace(" ", "_"), samples=_SAMPLES)
                lines.append(f"| {name} | {value:,.3f} | {low:,.3f} to {high:,.3f} |")
        for name, reason in self.failures.items():
            lines += ["", f"{name}: its env could not be built: {reason.splitlines()[0]}"]
        for name, each in self.items():
            for reason, count in Counter(reason for _, reason in each.failed).items():
                lines += ["", f"{name}: {count} failed: {reason.splitlines()[0]}"]
        return "\n".join(lines)

    def _row(self, task: Task, with_success: bool, normalised: bool) -> list[str]:
        each = self[task.name]
        name = _cell(task.name)
        if not len(each):
            cells = [name, f"0 of {each.asked}"] + [""] * (4 + with_success + normalised)
            return cells
        count = f"{len(each)}" if each.complete else f"{len(each)} of {each.asked}"
        low, high = each.confidence_interval("mean", samples=_SAMPLES)
        cells = [name, count, f"{each.mean:,.2f}", f"{low:,.2f} to {high:,.2f}"]
        cells += [f"{each.interquartile_mean:,.2f}", f"{each.lengths.mean():,.1f}"]
        if with_success:
            cells.append(each.success_text)
        if normalised:
            cells.append("" if task.reference is None else f"{task.normalised(each.mean):.3f}")
        return cells


def _cell(name: str) -> str:
    """A name as the cell of a table."""
    return name.replace("|", "\\|")


def _interval(
    changes: Sequence[Values], level: float, samples: int, seed: int
) -> tuple[float, float]:
    """The interval of a mean change; nan if a task has only one episode."""
    interval = confidence_interval(changes, "mean", level, samples, seed)
    return interval if min(map(len, changes)) > 1 else (float("nan"), float("nan"))


def _paired(
    one: SuiteEvaluation, other: SuiteEvaluation, name: str, kind: str
) -> tuple[Values, Values]:
    """The two results' scores of the episodes of a task that both have, in the same order."""
    by_result = []
    task = next(task for task in one.tasks if task.name == name)
    for result in (one, other):
        each = result[name]
        values = each.successes if kind == "success" else each.returns
        if kind == "normalised return" and task.reference is not None:
            values = task.normalised(values)
        by_seed: dict[tuple[int, int], float] = {}
        times: Counter[int] = Counter()  # a seed may be played several times
        for seed, value in zip(each.seeds.tolist(), values.tolist(), strict=True):
            times[seed] += 1
            if not np.isnan(value):
                by_seed[seed, times[seed]] = value
        if kind == "success":
            for seed, _ in each.failed:
                times[seed] += 1
                by_seed[seed, times[seed]] = 0.0
        by_result.append(by_seed)
    common = [key for key in by_result[0] if key in by_result[1]]
    return (
        np.array([by_result[0][key] for key in common], np.float64),
        np.array([by_result[1][key] for key in common], np.float64),
    )


@dataclass(frozen=True)
class TaskDifference:
    """How one task differs between two results.

    Attributes:
        task: Its name.
        episodes: Number of episodes that both results have.
        before: Their mean score in the first result.
        after: Their mean score in the second result.
        interval: The confidence interval of the change; nan if there is only one episode.
    """

    task: str
    episodes: int
    before: float
    after: float
    interval: tuple[float, float]

    @property
    def change(self) -> float:
        """The change of the mean score from the first result to the second."""
        return self.after - self.before

    @property
    def differs(self) -> bool:
        """Whether the interval of the change excludes 0."""
        return self.interval[0] > 0 or self.interval[1] < 0


@dataclass(frozen=True)
class Comparison:
    """The comparison of two results of a suite.

    Attributes:
        score: The score that is compared, as :attr:`SuiteEvaluation.score`.
        level: The intervals' confidence level.
        tasks: The differences of the tasks that both results have, in the first one's order.
        overall: The difference over all tasks, each with the same weight.
    """

    score: str
    level: float
    tasks: tuple[TaskDifference, ...]
    overall: TaskDifference

    @property
    def differing(self) -> list[str]:
        """The names of the tasks whose interval excludes 0."""
        return [each.task for each in self.tasks if each.differs]

    def __str__(self) -> str:
        """The comparison as a table."""
        level = f"{100 * self.level:g} %"
        lines = [
            f"{len(self.differing)} of {len(self.tasks)} tasks differ in their {self.score}",
            "",
            f"| task | episodes | before | after | change | {level} of it | differs |",
            "|---|--:|--:|--:|--:|--:|---|",
        ]
        for each in (*self.tasks, self.overall):
            low, high = each.interval
            lines.append(
                f"| {_cell(each.task)} | {each.episodes} | {each.before:,.3f} | "
                f"{each.after:,.3f} | {each.change:+,.3f} | {low:+,.3f} to {high:+,.3f} | "
                f"{'yes' if each.differs else ''} |"
            )
        return "\n".join(lines)
