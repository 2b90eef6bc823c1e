"""What the C primitives cost here: ns an operation, round trips, and turns on one core.

Builds benchmarks/primitives.c with the system's C compiler and runs it:

    python benchmarks/primitives.py [--repeats 9]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "csrc").glob("*.c"))


def main() -> int:
    """Builds and runs the benchmark; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="of each measurement")
    repeats = parser.parse_args().repeats
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        print("no C compiler: set CC", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "primitives"
        includes = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'tests'}"]
        sources = map(str, [ROOT / "benchmarks" / "primitives.c", *SOURCES])
        command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-O2", *includes]
        command += [f"-DREPEATS={repeats}", *sources]
        subprocess.run([*command, "-pthread", "-o", str(program)], check=True)
        return subprocess.run([str(program)]).returncode


if __name__ == "__main__":
    sys.exit(main())
