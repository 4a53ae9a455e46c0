"""The compiled kernels: one source, an object for each instruction set of this architecture.

Objects are built for sets that the building machine's own processor lacks, too; which is used is
found where they run (kvkeep/compiled/instruction_sets.py). What a compiler cannot build is left
out, and without any kvkeep works by torch alone.
"""

import copy
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

SOURCES = Path("kvkeep/compiled/src")
# OpenMP's threads are torch's own: its symbols are found in the process, and not linked. What is
# not called from Python stays hidden: objects of several sets may be in one process.
COMMON = ["-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"]
# The one that is built for: this Python's, or the one that `make emulated` names.
ARCHITECTURE = sysconfig.get_platform().rpartition("-")[2]
if sys.platform == "darwin":
    # Apple's compiler has OpenMP behind a preprocessor's flag, and its header is Homebrew's.
    COMMON += ["-Xpreprocessor", "-fopenmp", "-I/opt/homebrew/opt/libomp/include"]
    # A Python may be of two architectures; the kernels are of the one that it runs on.
    ARCHITECTURE = os.uname().machine
    os.environ.setdefault("ARCHFLAGS", f"-arch {ARCHITECTURE}")
else:
    COMMON += ["-fopenmp"]
# Python passes on that it was itself built with -g, which makes an object many times as large.
SYMBOLS = [] if "-g" in os.environ.get("CFLAGS", "").split() else ["-g0"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
X86 = {"avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"]}
# With -O3 one file alone takes GCC several minutes and more than 1.5 GB.
ARM = {"neon": ["-O2"], "neonbf16": ["-O2", "-march=armv8.2-a+bf16+dotprod"]}
SETS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(ARCHITECTURE, {})
# KVKEEP_SETS: names of those to build, for who needs no others.
NAMES = os.environ.get("KVKEEP_SETS", " ".join(SETS)).split()


def kernels(name: str, flags: list[str]) -> Extension:
    return Extension(
        f"kvkeep.compiled._{name}",
        sources=sorted(map(str, SOURCES.glob("*.cpp"))),
        depends=sorted(map(str, SOURCES.glob("*.h"))),
        language="c++",
        extra_compile_args=[*COMMON, *SYMBOLS, *flags],
        optional=True,
    )


class EachApart(build_ext):
    """Builds all at once, each where it overwrites no other's objects, which have its names.

    What could not be built is left out, and `built.json` beside the objects says why: whoever
    installs a package is not shown what its build said.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        self.failures = {name: "KVKEEP_SETS left them out" for name in SETS if name not in NAMES}

    def run(self) -> None:
        super().run()
        places = [Path(self.build_lib), *([Path()] if self.inplace else [])]
        for place in places:
            path = place / "kvkeep/compiled/built.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"failures": self.failures}, indent=1), encoding="utf-8")

    def build_extension(self, extension: Extension) -> None:
        alone = copy.copy(self)
        alone.build_temp = os.path.join(self.build_temp, extension.name)
        try:
            build_ext.build_extension(alone, extension)
        except (BaseError, CCompilerError) as error:
            name = extension.name.rpartition("._")[2]
            self.failures[name] = self._said(extension) or str(error)
            raise

    def _said(self, extension: Extension) -> str:
        """What the compiler says of an empty source with the flags of an extension."""
        source = "c++" if extension.language == "c++" else "c"
        command = [self.compiler.compiler_so[0], *extension.extra_compile_args]
        try:
            done = subprocess.run(
                [*command, "-x", source, "-fsyntax-only", os.devnull],
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError:
            return f"there is no compiler {command[0]}"
        return done.stderr.strip().partition("\n")[0] if done.returncode else ""

    def get_ext_filename(self, fullname: str) -> str:
        """Without a Python's version: the objects are loaded by ctypes, and know none."""
        return os.path.join(*fullname.split(".")) + ".so"


class ForAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def readme() -> str:
    """README.md for places other than the repository: links and pictures say where they are."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    there = f"{project['urls']['Homepage']}/%s/v{project['version']}/"
    text = Path("README.md").read_text(encoding="utf-8")
    pictures = re.sub(r"(!\[[^\]]*\]\()(?=docs/)", rf"\g<1>{there % 'raw'}", text)
    return re.sub(r"(\]\()(?=docs/|[A-Z]+(\.md)?\))", rf"\g<1>{there % 'blob'}", pictures)


cpu = Extension(
    "kvkeep.compiled._cpu",
    [str(SOURCES / "cpu.c")],
    extra_compile_args=SYMBOLS,
    optional=True,
)
setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[cpu, *(kernels(name, SETS[name]) for name in NAMES)],
    cmdclass={"build_ext": EachApart, "bdist_wheel": ForAnyPython},
    options={"build_ext": {"parallel": os.cpu_count()}},
)
