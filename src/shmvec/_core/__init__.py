"""The compiled core: thin, typed Cython over csrc, and the two hot loops.

``segment`` maps the shared memory, ``codec`` reads and writes values of spaces in it, ``infos``
packs infos, ``worker`` and ``ledger`` are the loops of the two sides, ``watchdog`` ends a worker
whose parent is gone, ``output`` passes on what workers print.
"""

try:
    from shmvec._core import segment as _segment
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ImportError(
        "shmvec's compiled core is missing. In a source tree build it with "
        "`pip install -e .` or `python setup.py build_ext --inplace`; an installed package "
        f"must be reinstalled for this Python. ({error})"
    ) from error

del _segment
