"""Exact evaluation: each episode is played once, whatever the number and speed of the envs."""

from shmvec.evaluation.call import evaluate
from shmvec.evaluation.episodes import Episode
from shmvec.evaluation.results import Evaluation

__all__ = ["Episode", "Evaluation", "evaluate"]
