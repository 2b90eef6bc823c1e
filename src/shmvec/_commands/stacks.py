"""Print where in Python each worker of a running program is, most recent call first.

    shmvec stacks PID

It works even if a worker or the program hangs, and disturbs neither. Run it as the same user, on
the same machine (in the same container). PID may also be the process that has started the program,
such as timeout, srun or a shell.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from shmvec._commands.arguments import positive
from shmvec._processes.stacks import find_offers, read_stack
from shmvec.faults import envs_in_words

__all__ = ["SUMMARY", "add_arguments", "main", "stacks_of"]

SUMMARY = "print where in Python a running program's workers are, or hang"


def stacks_of(pid: int) -> Iterator[str]:
    """The stack of each worker, with a heading.

    Args:
        pid: Process id of a program that steps vector envs, of a worker, or of a process that has
            started such programs.

    Raises:
        LookupError: There is no such process, it is another user's, or it has no workers.
    """
    try:
        offers = find_offers(pid)
    except FileNotFoundError:
        raise LookupError(f"There is no process {pid}.") from None
    except PermissionError:
        raise LookupError(
            f"Process {pid} may not be read: it is another user's, or forbids it."
        ) from None
    if not offers:
        raise LookupError(
            f"Process {pid} is no worker, and has none that offers its stack. Either it has no "
            "open vector env of shmvec's, or all have num_workers=0, PYTHONFAULTHANDLER=0 is set, "
            "it cannot make a memfd, or its Python is 3.13.0."
        )
    for offer in offers:
        stack = read_stack(offer.pid, whole=True)
        who = f"worker {offer.worker} ({envs_in_words(offer.envs)})"
        yield f"{who}, process {offer.pid}:\n{stack}\n"


# ---- the command ---------------------------------------------------------------------------------


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    command.add_argument(
        "pid", type=positive(int), metavar="PID", help="process id of the program, or of a worker"
    )


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    try:
        for stack in stacks_of(options.pid):
            print(stack, flush=True)
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 1
    return 0
