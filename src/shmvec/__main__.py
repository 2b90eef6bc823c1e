"""The command line: ``python -m shmvec bench``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shmvec import __version__, bench


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="shmvec", description=__doc__)
    parser.add_argument("--version", action="version", version=f"shmvec {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "bench",
        help="step real envs with ShmVectorEnv, AsyncVectorEnv and SyncVectorEnv, side by side",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--env",
        nargs="+",
        choices=list(bench.WORKLOADS),
        default=list(bench.DEFAULT_WORKLOADS),
        help="envs to step; Noop is an env that does nothing (default: %(default)s)",
    )
    command.add_argument(
        "--num-envs",
        nargs="+",
        type=_positive(int),
        default=[1, 2, 8, 32],
        metavar="N",
        help="numbers of envs (default: 1 2 8 32)",
    )
    command.add_argument(
        "--num-workers",
        type=_positive(int),
        metavar="W",
        help="workers of ShmVectorEnv, at most one for each env (default: one for each core)",
    )
    command.add_argument(
        "--seconds",
        type=_positive(float),
        default=2.0,
        help="how long each contender is measured with each number of envs (default: 2)",
    )
    command.add_argument(
        "--compute",
        type=_positive(float),
        metavar="US",
        help="let the parent compute for so many µs between steps, and say how much waiting "
        "workers slow it down",
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    options = parser.parse_args(arguments)

    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    results = bench.run(
        options.env,
        options.num_envs,
        num_workers=options.num_workers,
        seconds=options.seconds,
        compute_us=options.compute,
        progress=sys.stderr,
    )
    print(bench.table(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0 if results["rows"] else 1


class _positive:  # noqa: N801 - reads as a function where it is used
    """An argparse type: a positive number."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def __call__(self, text: str) -> float:
        value = self._kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    def __repr__(self) -> str:
        return self._kind.__name__


if __name__ == "__main__":
    sys.exit(main())
