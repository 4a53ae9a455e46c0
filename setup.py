"""Builds the compiled kernels: from one source, a library for each instruction set.

KVKEEP_KERNELS_FOR says which sets: "native" (the default) for the best one that this processor
runs, "all" for every set of this architecture, as wheels need it, "none", or names of sets. The one
to use is selected at run time (kvkeep/compiled/instruction_sets.py). A set that the compiler cannot
build is left out; without any, kvkeep computes by torch alone.
"""

import copy
import ctypes
import json
import logging
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

SOURCES = Path("kvkeep/compiled/src")
# The OpenMP runtime is torch's: its symbols are found in the process and not linked. Symbols that
# Python does not call are hidden, since one process may load the libraries of several sets.
COMMON = ["-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"]
# The target architecture: this Python's, or the one that `make emulated` sets.
ARCHITECTURE = sysconfig.get_platform().rpartition("-")[2]
if sys.platform == "darwin":
    # Apple's compiler enables OpenMP by a preprocessor flag; the header comes from Homebrew.
    COMMON += ["-Xpreprocessor", "-fopenmp", "-I/opt/homebrew/opt/libomp/include"]
    # A universal Python has two architectures; build for the one that it runs on.
    ARCHITECTURE = os.uname().machine
    os.environ.setdefault("ARCHFLAGS", f"-arch {ARCHITECTURE}")
else:
    COMMON += ["-fopenmp"]
# Python passes on its own -g, which makes a library many times as large.
SYMBOLS = [] if "-g" in os.environ.get("CFLAGS", "").split() else ["-g0"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
X86 = {
    "avx2": AVX2,
    "avxvnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512bf16": AVX512BF16,
    "amx": [*AVX512BF16, "-mamx-tile", "-mamx-bf16"],
}
# With -O3, GCC needs several minutes and more than 1.5 GB for one of the files.
ARM = {"neon": ["-O2"], "neonbf16": ["-O2", "-march=armv8.2-a+bf16+dotprod"]}
SETS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(ARCHITECTURE, {})
KERNELS_FOR = os.environ.get("KVKEEP_KERNELS_FOR", "").strip() or "native"
if KERNELS_FOR not in ("native", "all", "none") and not {*KERNELS_FOR.split()} <= {*SETS}:
    known = ", ".join(["native", "all", "none", *SETS])
    sys.exit(f"KVKEEP_KERNELS_FOR takes {known}, or several sets; found {KERNELS_FOR!r}")


def library_name(set_name: str) -> str:
    return f"kvkeep.compiled._{set_name}"


def kernels(name: str, flags: list[str]) -> Extension:
    return Extension(
        library_name(name),
        sources=sorted(map(str, SOURCES.glob("*.cpp"))),
        depends=sorted(map(str, SOURCES.glob("*.h"))),
        language="c++",
        extra_compile_args=[*COMMON, *SYMBOLS, *flags],
        optional=True,
    )


class BuildSets(build_ext):
    """Builds all libraries in parallel, each in a folder of its own, since object names are equal.

    A library that cannot be built is left out, and `built.json` beside the libraries records why:
    pip does not show the output of a build.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        self.failures: dict[str, str] = {}

    def run(self) -> None:
        super().run()
        folders = [Path(self.build_lib), *([Path()] if self.inplace else [])]
        for folder in folders:
            path = folder / "kvkeep/compiled/built.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"failures": self.failures}, indent=1), encoding="utf-8")

    def build_extensions(self) -> None:
        selected = self._selected_sets()
        left_out = f"KVKEEP_KERNELS_FOR={KERNELS_FOR} left them out"
        self.failures = {name: left_out for name in SETS if name not in selected}
        names = {cpu.name, *map(library_name, selected)}
        self.extensions = [extension for extension in self.extensions if extension.name in names]
        with self._time_announced():
            super().build_extensions()

    @contextmanager
    def _time_announced(self) -> Iterator[None]:
        """Print the seconds every second: pip's spinner turns with each line of a build."""
        start, ended = time.monotonic(), threading.Event()

        def announce() -> None:
            while not ended.wait(1):
                seconds = time.monotonic() - start
                self.announce(f"compiling the kernels: {seconds:.0f} s", level=logging.INFO)

        thread = threading.Thread(target=announce, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _selected_sets(self) -> list[str]:
        """Return the names of the sets to build.

        "native" is the best set that both the processor and the compiler can do, and the next one
        beside AMX, which the system may refuse to a process. If the processor cannot be asked, as
        when this is built for another machine, it is all sets.
        """
        if KERNELS_FOR in ("all", "none"):
            return list(SETS) if KERNELS_FOR == "all" else []
        if KERNELS_FOR != "native":
            return KERNELS_FOR.split()
        try:
            build_ext.build_extension(self, cpu)
            library = ctypes.CDLL(os.path.abspath(self.get_ext_fullpath(cpu.name)))
        except (BaseError, CCompilerError, OSError):
            return list(SETS)
        usable = [
            name
            for name, flags in SETS.items()
            if library.kvkeep_cpu_runs(name.encode())
            and not self._compiler_error(kernels(name, flags))
        ]
        return usable[-2 if usable[-1:] == ["amx"] else -1 :]

    def build_extension(self, extension: Extension) -> None:
        builder = copy.copy(self)
        builder.build_temp = os.path.join(self.build_temp, extension.name)
        try:
            build_ext.build_extension(builder, extension)
        except (BaseError, CCompilerError) as error:
            name = extension.name.rpartition("._")[2]
            self.failures[name] = self._compiler_error(extension) or str(error)
            raise

    def _compiler_error(self, extension: Extension) -> str:
        """Return the compiler's message for an empty source with an extension's flags."""
        source = "c++" if extension.language == "c++" else "c"
        command = [self.compiler.compiler_so[0], *extension.extra_compile_args]
        try:
            result = subprocess.run(
                [*command, "-x", source, "-fsyntax-only", os.devnull],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return f"there is no compiler {command[0]}"
        return result.stderr.strip().partition("\n")[0] if result.returncode else ""

    def get_ext_filename(self, fullname: str) -> str:
        """Return a name without Python's version: ctypes loads the libraries."""
        return os.path.join(*fullname.split(".")) + ".so"


class AnyPythonWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def readme() -> str:
    """Return README.md for use outside the repository, with absolute links and pictures."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    base = f"{project['urls']['Homepage']}/%s/v{project['version']}/"
    text = Path("README.md").read_text(encoding="utf-8")
    pictures = re.sub(r"(!\[[^\]]*\]\()(?=docs/)", rf"\g<1>{base % 'raw'}", text)
    return re.sub(r"(\]\()(?=docs/|[A-Z]+(\.md)?\))", rf"\g<1>{base % 'blob'}", pictures)


cpu = Extension(
    "kvkeep.compiled._cpu",
    [str(SOURCES / "cpu.c")],
    extra_compile_args=SYMBOLS,
    optional=True,
)
setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[cpu, *(kernels(name, flags) for name, flags in SETS.items())],
    cmdclass={"build_ext": BuildSets, "bdist_wheel": AnyPythonWheel},
    options={"build_ext": {"parallel": os.cpu_count()}},
)
