"""Builds the extension package ``shmvec._core``; everything else is in pyproject.toml.

Environment switches: ``SHMVEC_DEBUG=1`` builds without optimisation, with debug symbols and
Cython's bounds checks; ``SHMVEC_SANITIZE=address,undefined`` adds compiler sanitizers.
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("SHMVEC_DEBUG") == "1"
SANITIZE = os.environ.get("SHMVEC_SANITIZE", "")

CORE = Path("src/shmvec/_core")
C_SOURCES = [*map(str, sorted(Path("csrc").glob("*.c")))]
DEPENDS = [*map(str, sorted(Path("csrc").glob("*.h"))), *map(str, sorted(CORE.glob("*.pxd")))]

compile_args = ["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden"]
compile_args += ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3"]
link_args = []
if SANITIZE:
    compile_args += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
    link_args += [f"-fsanitize={SANITIZE}"]

extensions = [
    Extension(
        f"shmvec._core.{source.stem}",
        [str(source), *C_SOURCES],
        include_dirs=["csrc"],
        depends=DEPENDS,
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )
    for source in sorted(CORE.glob("*.pyx"))
]

setup(
    ext_modules=cythonize(
        extensions,
        language_level=3,
        compiler_directives={
            "boundscheck": DEBUG,
            "wraparound": False,
            "initializedcheck": DEBUG,
            "cdivision": True,
            "freethreading_compatible": False,
        },
    )
)
