"""The instruction sets that the kernels are built for, and which of them this process uses.

`setup.py` builds one library for each set of this architecture from one source. The best set that
this processor runs is used. KVKEEP_ISA names another one, or torch; KVKEEP_COMPILED=0 switches the
kernels off. KVKEEP_KERNELS names a folder to load libraries from instead of this package's, such as
those that `make sanitize` builds.
"""

import ctypes
import json
import os
import platform
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from kvkeep.errors import InvalidArgument

# By architecture, the fastest set first: what each set needs of a processor.
ARCHITECTURES = {
    "x86_64": {
        "avx512bf16": "AVX-512 with bfloat16 and VNNI",
        "avx512": "AVX-512",
        "avx2": "AVX2 with FMA",
    },
    "aarch64": {
        "neonbf16": "NEON with bfloat16 and dot products",
        "neon": "NEON",
    },
}
_MACHINE = platform.machine()
ARCHITECTURE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(_MACHINE, _MACHINE)
SETS = ARCHITECTURES.get(ARCHITECTURE, {})  # those of this architecture
TORCH = "torch"


@dataclass(frozen=True)
class InstructionSet:
    """The instruction set in use.

    name: of the set, or "torch" for no kernels. rejected: the reason against each faster set.
    requested: whether the environment chose it.
    """

    name: str
    rejected: dict[str, str] = field(default_factory=dict)
    requested: bool = field(default=False, compare=False)

    @property
    def torch_reason(self) -> str:
        """Why no kernels are used, as a predicate of "the kernels"; "" where some are."""
        if self.name != TORCH:
            return ""
        # The last set is the one that most processors have.
        return next(reversed(self.rejected.values()), f"are for {' and '.join(ARCHITECTURES)}")


def selected_set() -> InstructionSet:
    """Return the instruction set to use under the current environment.

    Raises:
        InvalidArgument: KVKEEP_ISA names no set, or one that is not available here.
    """
    requested, compiled = os.environ.get("KVKEEP_ISA") or None, os.environ.get("KVKEEP_COMPILED")
    return select_set(requested, compiled, library_folder())


@cache
def select_set(requested: str | None, compiled: str | None, folder: Path) -> InstructionSet:
    """Return the instruction set for KVKEEP_ISA, KVKEEP_COMPILED and a folder of libraries."""
    if compiled == "0":
        return _torch("were switched off by KVKEEP_COMPILED=0")
    if requested == TORCH:
        return _torch("were switched off by KVKEEP_ISA=torch")
    if requested is not None:
        return _requested_set(requested, folder)
    rejected: dict[str, str] = {}
    for name in SETS:
        if not (reason := unusable_reason(name, folder)):
            return InstructionSet(name, rejected)
        rejected[name] = reason
    return InstructionSet(TORCH, rejected)


def runs_here(name: str) -> bool:
    """Whether this processor has all that a set needs."""
    cpu = load_library(library_folder(), "_cpu")
    return cpu is not None and bool(cpu.kvkeep_cpu_runs(name.encode()))


def load(name: str) -> ctypes.CDLL | None:
    """Load a set's library, or return None without one. The processor must run the set."""
    return load_library(library_folder(), f"_{name}")


def load_error(name: str) -> str:
    """Return the system's message for a library that exists and that `load` could not load."""
    library = _open_library(library_folder(), f"_{name}")
    return library if isinstance(library, str) else ""


def has_fast_bf16() -> bool:
    """Whether torch's CPU library multiplies bfloat16 here at least as fast as float32.

    Depends on the processor, and on ONEDNN_MAX_CPU_ISA.
    """
    cpu = load_library(library_folder(), "_cpu")
    if cpu is None or not cpu.kvkeep_cpu_multiplies_bf16():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def unusable_reason(name: str, folder: Path) -> str:
    """Say why a set cannot be used, as a predicate of its kernels; "" if it can.

    No instruction of the set is executed to find out.
    """
    if load_library(folder, "_cpu") is None:
        return _not_built(folder, "cpu")
    if not runs_here(name):
        return f"need a processor with {SETS[name]}"
    return "" if library_path(folder, f"_{name}") else _not_built(folder, name)


def library_folder() -> Path:
    """Return the folder that libraries are loaded from."""
    return Path(os.environ.get("KVKEEP_KERNELS") or Path(__file__).parent)


def library_path(folder: Path, name: str) -> Path | None:
    """Return the file of a library; None where it was not built."""
    # Earlier builds named the files by the version of Python, which they do not depend on.
    paths = (folder / (name + suffix) for suffix in (".so", *EXTENSION_SUFFIXES))
    return next(filter(Path.exists, paths), None)


def load_library(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load a library; None where it was not built or cannot be loaded (see `load_error`)."""
    library = _open_library(folder, name)
    return library if isinstance(library, ctypes.CDLL) else None


@cache
def _open_library(folder: Path, name: str) -> ctypes.CDLL | str | None:
    """Return a library, the system's message if it cannot be loaded, or None if it is not there."""
    path = library_path(folder, name)
    if path is None:
        return None
    # torch is imported above: it brings the OpenMP runtime that the kernels use.
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)


def _torch(reason: str) -> InstructionSet:
    return InstructionSet(TORCH, dict.fromkeys(SETS, reason), requested=True)


def _requested_set(name: str, folder: Path) -> InstructionSet:
    for architecture, sets in ARCHITECTURES.items():
        if name in sets and name not in SETS:
            raise InvalidArgument(
                f"KVKEEP_ISA={name} cannot be had: its kernels are for {architecture}, and this "
                f"is {ARCHITECTURE}"
            )
    if name not in SETS:
        known = ", ".join([*SETS, TORCH])
        raise InvalidArgument(f"KVKEEP_ISA must be one of {known}; found {name!r}")
    if reason := unusable_reason(name, folder):
        raise InvalidArgument(
            f"KVKEEP_ISA={name} cannot be had: its kernels {reason}. Without KVKEEP_ISA the best "
            "that there is here is used"
        )
    faster = list(SETS)[: list(SETS).index(name)]
    return InstructionSet(name, dict.fromkeys(faster, f"were left out by KVKEEP_ISA={name}"), True)


def _not_built(folder: Path, name: str) -> str:
    """Say that a library was not built, with the reason that `setup.py` recorded."""
    try:
        record = json.loads((folder / "built.json").read_text(encoding="utf-8"))
        reason = record["failures"].get(name, "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        reason = ""
    return "were not built here" + (f" ({reason})" if reason else "")
