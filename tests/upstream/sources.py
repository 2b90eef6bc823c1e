"""Prints the rows that `KNOWN` in `shmvec/_wrappers/sources.py` lacks for what is installed.

    python tests/upstream/sources.py          # what is new in this Gymnasium, and Stable-Baselines3
    python tests/upstream/sources.py --all    # all rows

Read what has changed of a function before its row is added: a twin must do as each of its sources.
"""

import argparse
from contextlib import suppress
from importlib import import_module

import gymnasium
from gymnasium.envs.registration import load_env_creator

from shmvec._wrappers import SOURCE_MODULES, TWINS, classes_of, code_of, code_of_env
from shmvec._wrappers.sources import KNOWN, fingerprint


def rows() -> set[tuple[str, str]]:
    """The functions that twins know, and their fingerprints."""
    for home in SOURCE_MODULES:
        with suppress(ImportError):
            import_module(home)
    envs = [
        load_env_creator(spec.entry_point)
        for spec in gymnasium.registry.values()
        if str(spec.entry_point).startswith("gymnasium.envs.mujoco") and spec.version in (4, 5)
    ]
    code = [each for twin in TWINS for kind in classes_of(twin) for each in code_of(kind)]
    code += [each for kind in envs for each in code_of_env(kind)]
    return {(name, fingerprint(getattr(found, "fget", found))) for name, found in code}


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
