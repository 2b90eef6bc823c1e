"""The command line in odd surroundings: a reader that is gone, an output without µ."""

import os
import subprocess
import sys

import pytest
from tables import deep

from shmvec.__main__ import main

PRINTING = """
import sys
from shmvec import __main__ as command_line
from shmvec._commands import stacks

def stacks_of(pid):
    yield "a step takes 3 \\u00b5s, a \\u2026 \\u00b1 4 \\u00d7 5 \\N{SNOWMAN}"
    while pid == 2:
        yield "y" * 10_000
    if pid == 3:
        raise KeyboardInterrupt

stacks.stacks_of = stacks_of
sys.exit(command_line.main(["stacks", sys.argv[1]]))
"""


def printed(which, stdout=subprocess.PIPE, buffered=True, **options):
    how = [] if buffered else ["-u"]
    return subprocess.Popen(
        [sys.executable, *how, "-c", PRINTING, which],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.deep
def test_who_reads_may_leave():
    with printed("2") as process:
        assert "µs" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 141 and process.stderr.read() == ""


@pytest.mark.deep
def test_ctrl_c():
    with printed("3") as process:
        _, errors = process.communicate(timeout=250)
    assert process.returncode == 130 and errors == ""


@pytest.mark.deep
@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_an_encoding_without_signs(encoding):
    with printed("1", env={**os.environ, "PYTHONIOENCODING": encoding}, encoding=encoding) as one:
        out, errors = one.communicate(timeout=250)
    assert one.returncode == 0 and errors == ""
    assert out.endswith("4 × 5 \N{SNOWMAN}\n" if encoding == "utf-8" else " 5 ?\n")
    assert ("3 us, a ... +- 4 x 5" in out) == (encoding == "ascii")


@pytest.mark.deep
def test_the_plainest_locale():
    """Where Python would have what is no text written as bytes."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    env |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with printed("1", env=env) as one:
        out, errors = one.communicate(timeout=250)
    assert one.returncode == 0 and errors == ""
    assert "3 us, a ... +- 4 x 5" in out


@pytest.mark.parametrize("interval", ["nan", *deep("0", "inf", "1e300")])
def test_an_interval_that_cannot_be_slept(interval, capsys):
    with pytest.raises(SystemExit):
        main(["top", "--interval", interval])
    assert f"must be positive, and at most a million, got {interval}" in capsys.readouterr().err


@pytest.mark.deep
def test_an_output_that_is_closed():
    done = subprocess.run(
        f"exec {sys.executable} -m shmvec top {os.getpid()} >&-",
        shell=True,
        stderr=subprocess.PIPE,
        text=True,
        timeout=250,
    )
    assert done.returncode == 1 and done.stderr.startswith("shmvec top: process ")


@pytest.mark.deep
@pytest.mark.parametrize("buffered", [True, False])
def test_an_output_that_is_full(buffered):
    with open("/dev/full", "w") as full, printed("1", stdout=full, buffered=buffered) as process:
        _, errors = process.communicate(timeout=250)
    assert process.returncode == 1
    assert errors == "shmvec: standard output: No space left on device\n"


def test_the_help_says_where_a_timeline_comes_from(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "envs.trace(" in capsys.readouterr().out
