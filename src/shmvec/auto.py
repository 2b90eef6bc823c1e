"""Importing this module installs shmvec: ``make_vec("shmvec.auto:CartPole-v1", ...)`` is enough.

Gymnasium imports what stands before the colon of an id; ``vectorization_mode="async"`` then makes
a :class:`shmvec.ShmVectorEnv`.
"""

from shmvec.entry import install

install()
