"""Runs scripts, each in a fork of a process that has imported what all of them need: see test_docs.

Reads, line by line, a script's path and the file that its output is to go to; writes exit statuses.
"""

import os
import runpy
import sys

import gymnasium  # noqa: F401
import numpy  # noqa: F401

import shmvec.evaluation
import shmvec.pipeline
import shmvec.planning
import shmvec.vector_env  # noqa: F401


def run(script: str, output: str) -> None:
    """In the fork: from here on a program of its own."""
    null, to = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT)
    for descriptor, standard in ((null, 0), (to, 1), (to, 2)):
        os.dup2(descriptor, standard)
    os.chdir(os.path.dirname(script))
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def serve() -> None:
    """Runs one after the other."""
    for line in sys.stdin:
        script, output = line.split()
        child = os.fork()
        if child == 0:
            run(script, output)
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":  # pytest looks into it for doctests
    serve()
