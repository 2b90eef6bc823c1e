"""Exact evaluation: each episode is played once, whatever the number and speed of the envs."""

from shmvec.evaluation.call import evaluate
from shmvec.evaluation.episodes import Episode
from shmvec.evaluation.results import Evaluation
from shmvec.evaluation.suite_results import Comparison, SuiteEvaluation, TaskDifference
from shmvec.evaluation.tasks import Task

__all__ = [
    "Comparison",
    "Episode",
    "Evaluation",
    "SuiteEvaluation",
    "Task",
    "TaskDifference",
    "evaluate",
]
