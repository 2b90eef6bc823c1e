"""Other systems' interfaces to ``ShmVectorEnv``: for code that was written for one of them.

An adapter holds only the difference in interface: no transport, no processes, no waiting of its
own. Import the one you need, such as ``from shmvec.adapters.sb3 import ShmVecEnv``;
docs/coming-from has a page for each.
"""
