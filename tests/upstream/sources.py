"""Prints the rows that `KNOWN` in `shmvec/_wrappers/sources.py` lacks for what is installed.

    python tests/upstream/sources.py          # what is new in this Gymnasium, and Stable-Baselines3
    python tests/upstream/sources.py --all    # all rows

Read what has changed of a function before its row is added: a twin must do as each of its sources.
"""

import argparse
from contextlib import suppress
from importlib import import_module

import gymnasium

from shmvec._wrappers import HOMES, TWINS, code_of, kinds_of
from shmvec._wrappers.sources import KNOWN, fingerprint


def rows() -> set[tuple[str, str]]:
    """The functions that twins know, and their fingerprints."""
    for home in HOMES:
        with suppress(ImportError):
            import_module(home)
    return {
        (name, fingerprint(getattr(function, "fget", function)))
        for twin in TWINS
        for kind in kinds_of(twin)
        for name, function in code_of(kind)
    }


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="those that the table has, too")
    everything = parser.parse_args().all
    version = gymnasium.__version__
    for name, found in sorted(rows()):
        if everything or found not in KNOWN.get(name, {}):
            print(f'    "{name}": {{"{found}": "{version}"}},')


if __name__ == "__main__":
    main()
