"""Other systems' interfaces to ``ShmVectorEnv``: for code that was written for one of them.

An adapter translates between two interfaces, and has no transport, processes or waits of its own.
Import the one you need, such as ``from shmvec.adapters.sb3 import ShmVecEnv``;
docs/coming-from has a page for each.
"""
