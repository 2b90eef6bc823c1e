"""The adapter to Tianshou, also where that is not installed.

Only its base class is needed, and of that nothing but that it is there: a stand-in will do.
"""

import gc
import sys
import types
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Tianshou imports
    try:
        import tianshou.env
    except ImportError:
        tianshou = None
        stand_in = types.ModuleType("tianshou.env")
        stand_in.BaseVectorEnv = type("BaseVectorEnv", (), {})
        sys.modules["tianshou"] = types.ModuleType("tianshou")
        sys.modules["tianshou.env"] = stand_in
    else:
        gc.freeze()  # its many objects make each collection slow
    from shmvec.adapters.tianshou import ShmemVectorEnv, SubprocVectorEnv, TianshouVectorEnv

    if tianshou is None:  # others are not to find it
        del sys.modules["tianshou"], sys.modules["tianshou.env"]

__all__ = ["ShmemVectorEnv", "SubprocVectorEnv", "TianshouVectorEnv", "tianshou"]
