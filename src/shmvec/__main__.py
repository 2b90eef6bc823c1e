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
from shmvec._core import is_native, needs_linux

# Modules of _commands, whose docstrings are the commands' descriptions.
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
    if not is_native:
        print(f"shmvec: {needs_linux('the command line')}", file=sys.stderr)
        return 1
    parser = _parser()
    options = parser.parse_args(arguments)
    _replace_unencodable()
    try:
        status = int(options.run(options))
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except argparse.ArgumentError as error:  # found by the command, not by the parser
        parser.error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        # The reader has closed the pipe, which is no error.
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not _is_output_full(error):
            raise
        print(f"shmvec: standard output: {error.strerror}", file=sys.stderr)
        _discard_output()
        return 1


def _parser() -> argparse.ArgumentParser:
    """Makes the parser; its result has the command's function as ``run``."""
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


def _replace_unencodable() -> None:
    """Makes standard output replace what its encoding lacks: us for µs, # for █, or ?."""
    out = sys.stdout
    if isinstance(out, TextIOWrapper) and out.errors in ("strict", "surrogateescape"):
        out.reconfigure(errors="shmvec.replace")


def _replacement(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs, which returns a replacement and where to go on."""
    assert isinstance(error, UnicodeEncodeError)
    ascii_text = {"µ": "u", "×": "x", "±": "+-", "…": "...", "█": "#", "▓": "+", "░": "."}
    return "".join(ascii_text.get(c, "?") for c in error.object[error.start : error.end]), error.end


codecs.register_error("shmvec.replace", _replacement)


def _is_reader_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _is_output_full(error: OSError) -> bool:
    """Whether the error is of standard output, on a full disk, and not of another file."""
    if sys.stdout is None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return False
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as second:
        return second.errno == error.errno
    return False


def _discard_output() -> None:
    """Redirects standard output, so that Python does not write its buffer there at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
