"""``ShmVectorEnv`` with the interfaces of other systems, for code that was written for them.

An adapter only translates between two interfaces.
Import the one you need, such as ``from shmvec.adapters.sb3 import ShmVecEnv``;
docs/coming-from has a page for each.
"""

import importlib

from shmvec import is_native

if not is_native:  # this import raises, before an adapter says that its library is missing
    importlib.import_module("shmvec.exchange")
