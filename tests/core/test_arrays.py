"""NumPy's binary interface: what is declared of it here is that of the NumPy that is installed."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tables import first

from shmvec._core import memory as arrays

try:
    from numpy._core import _multiarray_umath as umath
except ImportError:
    from numpy.core import _multiarray_umath as umath

DEADLINE = 60
SLOTS = {
    "PyArray_GetNDArrayCVersion": arrays.ABI_VERSION,
    "PyArray_GetNDArrayCFeatureVersion": arrays.API_VERSION,
    "PyArray_NewLikeArray": arrays.NEW_LIKE_ARRAY,
}
read = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def function(slot, result, *arguments):
    """What stands at a place of the table of the NumPy that is installed."""
    table = ctypes.cast(read(umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    return ctypes.PYFUNCTYPE(result, *arguments)(table[slot])


@pytest.mark.deep
@pytest.mark.parametrize("name", SLOTS)
def test_places_are_those_of_numpys_header(name):
    header = Path(np.get_include()) / "numpy" / "__multiarray_api.h"
    if not header.exists():
        pytest.skip("NumPy's headers are not installed")
    found = re.search(rf"#define {name}\s[^#]*?PyArray_API\[(\d+)\]", header.read_text())
    assert int(found[1]) == SLOTS[name]


@pytest.mark.deep
def test_versions():
    assert function(arrays.ABI_VERSION, ctypes.c_uint)() >> 24 == int(np.__version__[0])
    least = 0xF  # of NumPy 1.22
    assert least <= function(arrays.API_VERSION, ctypes.c_uint)() < 0x100


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["u1", "f4", ">f8", "?", "longdouble", "M8[s]"])
def test_an_array_like_another(dtype):
    like = function(
        arrays.NEW_LIKE_ARRAY, ctypes.py_object,
        ctypes.py_object, ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
    )  # fmt: skip
    for shape in [(), (0,), (3,), (2, 3, 4), (1, 5)]:
        prototype = np.zeros(shape, dtype).T
        made = like(prototype, 0, None, False)
        assert type(made) is np.ndarray and made.base is None and made.flags.c_contiguous
        assert made.shape == prototype.shape and made.dtype == prototype.dtype


@pytest.mark.deep
@pytest.mark.parametrize(
    "array",
    [
        np.zeros(()),
        np.zeros((3, 4), np.float32).T,
        np.zeros((5, 4), "u1")[1:, ::2],
        np.zeros((0, 7)),
        np.zeros((4, 1, 2))[2:3],
        np.zeros(3).view(type("Derived", (np.ndarray,), {})),
    ],
    ids=lambda array: str(array.shape),
)
def test_fields(array):
    assert arrays.array_fields(array) == arrays.array_attributes(array)
    assert arrays.array_fields(array)[3]


BROKEN = {
    "its binary interface is 0x3000000": "table[0] = version(3 << 24)",
    "it is too old": "table[211] = version(0xe)",
    "it shows no table of functions": "umath._ARRAY_API = None",
}


@pytest.mark.parametrize("why", first(BROKEN))
def test_another_numpy_is_refused(why):
    program = f"""
import ctypes, importlib
umath = importlib.import_module("{umath.__name__}")
python = ctypes.pythonapi
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = ctypes.py_object, ctypes.c_char_p
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
table = (ctypes.c_void_p * 305)()
ctypes.memmove(table, python.PyCapsule_GetPointer(umath._ARRAY_API, None), 8 * 305)
umath._ARRAY_API = python.PyCapsule_New(ctypes.addressof(table), None, None)
kept = []

def version(number):
    kept.append(ctypes.CFUNCTYPE(ctypes.c_uint)(lambda: number))
    return ctypes.cast(kept[-1], ctypes.c_void_p)

{BROKEN[why]}
import shmvec._core.memory
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1
    assert f"ImportError: shmvec does not know NumPy {np.__version__}: {why}" in done.stderr
