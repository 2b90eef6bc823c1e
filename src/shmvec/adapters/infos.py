"""What an exchange has answered, for systems whose infos are one dict an env."""

from __future__ import annotations

from shmvec.exchange import Answers
from shmvec.faults import raise_as_gymnasium_does

__all__ = ["delivered"]


def delivered(answers: Answers) -> Answers:
    """The answers, what is told of faults added to the infos of the envs that had them.

    Raises:
        Exception: Whatever an env has raised, with the worker's traceback as its cause.
    """
    if answers.failures:
        raise_as_gymnasium_does(answers.failures)
    for env, told in answers.told.items():
        answers.infos[answers.envs.tolist().index(env)].update(told.info)
    return answers
