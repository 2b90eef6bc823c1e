"""Prints the rows that `KNOWN` in `shmvec/_wrappers/sources.py` lacks for what is installed.

    python tests/upstream/sources.py          # what is new in this Gymnasium, and Stable-Baselines3
    python tests/upstream/sources.py --all    # all rows

Read what has changed of a function before its row is added: a twin must do as each of its sources.
"""

import argparse
from contextlib import suppress
from importlib import import_module

import gymnasium

from shmvec._wrappers import HOMES, TWINS, code_of, wrapper_of
from shmvec._wrappers.sources import KNOWN, fingerprint


def rows() -> dict[str, str]:
    """The functions that twins know, and their fingerprints."""
    found = {}
    for home in HOMES:
        with suppress(ImportError):
            import_module(home)
    for kind in filter(None, map(wrapper_of, TWINS)):
        for name, function in code_of(kind):
            found[name] = fingerprint(getattr(function, "fget", function))
    return found


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--all", action="store_true", help="those that the table has, too")
    everything = parser.parse_args().all
    version = gymnasium.__version__
    for name, found in sorted(rows().items()):
        if everything or found not in KNOWN.get(name, {}):
            print(f'    "{name}": {{"{found}": "{version}"}},')


if __name__ == "__main__":
    main()
