"""Builds the extensions of ``shmvec``; everything else is in pyproject.toml.

csrc is compiled once, into a static library that each extension links what it uses of.

Environment switches: ``SHMVEC_DEBUG=1`` builds without optimisation, with debug symbols and
Cython's bounds checks; ``SHMVEC_SANITIZE=address,undefined`` adds compiler sanitizers. After a
change of them: ``build_ext --force``. Without either there is no debug information, which would be
most of a wheel; names of functions stay, for profilers.

``SHMVEC_PURE=1 python -m build --wheel`` makes the wheel for macOS and Windows, without extensions:
``_pure.py``. There a checkout is built so, too.
"""

import os
import re
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

PURE = sys.platform in ("darwin", "win32") or os.environ.get("SHMVEC_PURE") == "1"
# Where pip may choose a wheel without extensions; never on Linux.
PURE_TAG = "macosx_10_9_x86_64.macosx_11_0_arm64.win_amd64.win_arm64"

if not PURE and (sys.platform != "linux" or sys.maxsize < 2**63 - 1 or sys.byteorder != "little"):
    sys.exit(
        "shmvec needs 64-bit Linux (x86_64 or aarch64): here use gymnasium.vector.AsyncVectorEnv, "
        "or shmvec in WSL 2 or a Linux container."
    )

DEBUG = os.environ.get("SHMVEC_DEBUG") == "1"
SANITIZE = os.environ.get("SHMVEC_SANITIZE", "")

CORE = Path("src/shmvec/_core")
C_SOURCES = [str(source) for source in sorted(Path("csrc").glob("*.c"))]
COUNTED = "SV_WAITS", "SV_WORK"  # tables of csrc/counters.h
HEADERS = sorted(Path("csrc").glob("*.h"))

compile_args = ["-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-pthread"]
# Python's own flags have -g, with which compiling takes half as long again.
compile_args += ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O2", "-g0"]
link_args = ["-pthread"]
if SANITIZE:
    compile_args += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g"]
    link_args += [f"-fsanitize={SANITIZE}"]


def declare_counters() -> None:
    """Declares ``sv_counts`` for Cython, which sees no macros: its fields are those of tables."""
    header = Path("csrc/counters.h").read_text("utf-8")
    tables = [header.split(f"#define {name}(X)")[1].split("\n\n")[0] for name in COUNTED]
    names = re.findall(r"^ +X\((\w+),", "\n".join(tables), re.MULTILINE)
    lines = [
        "# Written by setup.py.",
        "from libc.stdint cimport int64_t",
        'cdef extern from "counters.h" nogil:',
        "    ctypedef struct sv_counts:",
        *(f"        int64_t {name}" for name in names),
    ]
    declared, text = CORE / "counters.pxd", "\n".join([*lines, ""])
    if not declared.exists() or declared.read_text("utf-8") != text:
        declared.write_text(text, "utf-8")


def included(source: str) -> set[Path]:
    """The headers of csrc that a source in C includes, and that these include."""
    found: set[Path] = set()
    unread = [Path(source)]
    while unread:
        text = unread.pop().read_text("utf-8")
        new = {header for header in HEADERS if f'#include "{header.name}"' in text} - found
        unread += new
        found |= new
    return found


class BuildCore(build_ext):
    """Compiles what is older than its source or its headers, links what is older than its parts."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or True

    def build_extensions(self):
        compile_all = self.compiler.compile

        def compile_outdated(sources, output_dir, **options):
            objects = self.compiler.object_filenames(sources, output_dir=output_dir)
            outdated = [
                source
                for source, target in zip(sources, objects, strict=True)
                if self.force or newer_group([source, *included(source)], target)
            ]
            if outdated:
                compile_all(outdated, output_dir=output_dir, **options)
            return objects

        self.compiler.compile = compile_outdated
        objects = compile_outdated(
            C_SOURCES, self.build_temp, include_dirs=["csrc"], extra_postargs=compile_args
        )
        self.compiler.create_static_lib(objects, "csrc", output_dir=self.build_temp)
        library = self.compiler.library_filename("csrc", output_dir=self.build_temp)
        for extension in self.extensions:
            extension.extra_objects = [library]
            extension.depends = [library, *map(str, HEADERS)]
        super().build_extensions()


class PureWheel(bdist_wheel):
    """A wheel for macOS and Windows."""

    def get_tag(self):
        return "py3", "none", PURE_TAG


# What Cython's memoryviews need is in one module: with a copy of its own each of the others would
# be 100 KB larger, and take half as long again to compile.
SHARED = "shmvec._core.cyutility"
SHARED_SOURCE = CORE / "cyutility.c"  # written by Cython

# In _wrappers products and sums are rounded each for itself, as NumPy's are.
extensions = [
    Extension(
        f"shmvec.{folder}.{source.stem}",
        [str(source)],
        include_dirs=["csrc"],
        extra_compile_args=[*compile_args, *args],
        extra_link_args=link_args,
    )
    for folder, args in (("_core", []), ("_wrappers", ["-ffp-contract=off"]))
    for source in sorted(Path("src/shmvec", folder).glob("*.pyx"))
]
extensions.append(
    Extension(
        SHARED,
        [str(SHARED_SOURCE)],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )
)

if __name__ == "__main__" and PURE:
    setup(cmdclass={"bdist_wheel": PureWheel})
elif __name__ == "__main__":  # not in cythonize's processes, which Python 3.14 has import this
    declare_counters()
    setup(
        cmdclass={"build_ext": BuildCore},
        ext_modules=cythonize(
            extensions,
            language_level=3,
            nthreads=os.cpu_count() or 1,
            shared_utility_qualified_name=SHARED,
            compiler_directives={
                "boundscheck": DEBUG,
                "wraparound": False,
                "initializedcheck": DEBUG,
                "cdivision": True,
                "freethreading_compatible": True,
            },
        ),
    )
