"""The command line: ``python -m shmvec``, followed by a command; ``--help`` lists them."""

from __future__ import annotations

import argparse
import codecs
import errno
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper

from shmvec import __version__

# Each is a module of _commands, whose docstring is its description.
_COMMANDS = ("bench", "tune", "check", "evaluate", "doctor", "stacks", "top")

_EXAMPLES = """\
examples:
  shmvec bench                    how fast is this machine?
  shmvec check my_env.py:MyEnv    may my env run in parallel?
  shmvec tune my_env.py:MyEnv     which settings are best for it?
  shmvec top                      what limits the program that is running?
  shmvec stacks PID               where does it hang?

To record a timeline of a run, write `with envs.trace('run.json'):` in the program.
`shmvec COMMAND --help` lists a command's options. `python -m shmvec` is the same as `shmvec`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _keep_encodable()
    try:
        status = int(options.run(options))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except argparse.ArgumentError as error:  # one that only the command could find
        parser.error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _has_lost_reader():
            raise
        # The reader has closed the pipe, which is no error.
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not _is_full(error):
            raise
        print(f"shmvec: standard output: {error.strerror}", file=sys.stderr)
        _discard_output()
        return 1


def _parser() -> argparse.ArgumentParser:
    """The parser; the function of a command is its options' ``run``."""
    parser = argparse.ArgumentParser(
        prog="shmvec",
        description="Measure, check, evaluate and inspect Gymnasium envs that step in parallel.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shmvec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in _COMMANDS:
        module = import_module(f"shmvec._commands.{name}")
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps a docstring's lines
        )
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    return parser


# ---- standard output -----------------------------------------------------------------------------


def _keep_encodable() -> None:
    """Lets standard output replace what its encoding lacks: us for µs, or a question mark."""
    out = sys.stdout
    if isinstance(out, TextIOWrapper) and out.errors in ("strict", "surrogateescape"):
        codecs.register_error("shmvec.replace", _replacement)
        out.reconfigure(errors="shmvec.replace")


def _replacement(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: the replacement for what cannot be encoded."""
    assert isinstance(error, UnicodeEncodeError)
    instead = {"µ": "u", "×": "x", "±": "+-", "…": "..."}
    return "".join(instead.get(c, "?") for c in error.object[error.start : error.end]), error.end


def _has_lost_reader() -> bool:
    """Whether the reader of standard output has closed it."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _is_full(error: OSError) -> bool:
    """Whether the error is that of a full standard output, and not of another file."""
    if sys.stdout is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return False
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as second:
        return second.errno == error.errno
    return False


def _discard_output() -> None:
    """Redirects standard output, so that Python does not write what is left when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
