"""Importing this module installs shmvec: ``make_vec("shmvec.auto:CartPole-v1", ...)`` is enough.

Gymnasium imports what stands before the colon of an id; ``vectorization_mode="async"`` then makes
a :class:`shmvec.ShmVectorEnv`. So does LeRobot, with ``--env.discover_packages_path=shmvec.auto``.
"""

from shmvec.entry import install

__path__: list[str] = []  # LeRobot imports packages only: it looks for modules in them

install()
