"""Selection of the instruction set whose kernels this process uses.

`setup.py` builds one library for each set of this architecture. The best one that this processor
runs is used, unless KVKEEP_ISA names another, or torch; KVKEEP_COMPILED=0 switches the kernels off.
KVKEEP_KERNELS names another folder of libraries, such as that of `make sanitize`.
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

# For each architecture its sets, the fastest first, and the processor that each set needs.
ARCHITECTURES = {
    "x86_64": {
        "amx": "AMX for bfloat16, permitted by the system, and AVX-512 with bfloat16 and VNNI",
        "avx512bf16": "AVX-512 with bfloat16 and VNNI",
        "avx512": "AVX-512",
        "avxvnni": "AVX2 with VNNI",
        "avx2": "AVX2 with FMA and F16C",
    },
    "aarch64": {"neonbf16": "NEON with bfloat16 and dot products", "neon": "NEON"},
}
_MACHINE = platform.machine()
ARCHITECTURE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(_MACHINE, _MACHINE)
SETS = ARCHITECTURES.get(ARCHITECTURE, {})
TORCH = "torch"


@dataclass(frozen=True)
class InstructionSet:
    """The instruction set in use."""

    name: str  # "torch" if no kernels are used
    rejected: dict[str, str] = field(default_factory=dict)  # why each faster set is not used
    requested: bool = field(default=False, compare=False)  # by an environment variable

    @property
    def torch_reason(self) -> str:
        """The reason for using no kernels, as a predicate of "the kernels"; "" if some are used."""
        if self.name != TORCH:
            return ""
        # The reason of the last set, which most processors run; no sets: another architecture.
        return next(reversed(self.rejected.values()), f"are for {' and '.join(ARCHITECTURES)}")


def selected_set() -> InstructionSet:
    """Return the instruction set that the current environment selects.

    Raises InvalidArgument if KVKEEP_ISA names no set, or one that is not available here.
    """
    switched_off = os.environ.get("KVKEEP_COMPILED") == "0"
    return select_set(os.environ.get("KVKEEP_ISA") or None, switched_off, library_folder())


@cache
def select_set(requested_name: str | None, switched_off: bool, folder: Path) -> InstructionSet:
    """Return the instruction set to use. requested_name: KVKEEP_ISA. folder: of the libraries."""
    if switched_off or requested_name == TORCH:
        variable = "KVKEEP_COMPILED=0" if switched_off else "KVKEEP_ISA=torch"
        reason = f"are disabled by {variable}"
        return InstructionSet(TORCH, dict.fromkeys(SETS, reason), requested=True)
    if requested_name is not None:
        return _requested_set(requested_name, folder)
    rejected: dict[str, str] = {}
    for name in SETS:
        if not (reason := unusable_reason(name, folder)):
            return InstructionSet(name, rejected)
        rejected[name] = reason
    return InstructionSet(TORCH, rejected)


def runs_here(name: str) -> bool:
    """Whether this processor runs an instruction set, by the `_cpu` library, which needs none."""
    cpu = load_library(library_folder(), "_cpu")
    return cpu is not None and bool(cpu.kvkeep_cpu_runs(name.encode()))


def load_kernels(name: str) -> ctypes.CDLL | None:
    """Load a set's library, if there is one. The processor must run the set."""
    return load_library(library_folder(), f"_{name}")


def load_error(name: str) -> str:
    """Return the system's message if a set's library exists and cannot be loaded, else ""."""
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
    """Say why a set cannot be used, as a predicate of "the kernels"; empty if it can.

    Executes no instruction of the set.
    """
    if load_library(folder, "_cpu") is None:
        return _missing_reason(folder, "cpu")
    if not runs_here(name):
        return f"need a processor with {SETS[name]}"
    return "" if library_path(folder, f"_{name}") else _missing_reason(folder, name)


def library_folder() -> Path:
    """Return the absolute path of the folder of the kernels' libraries."""
    return Path(os.environ.get("KVKEEP_KERNELS") or Path(__file__).parent).absolute()


def library_path(folder: Path, name: str) -> Path | None:
    """Return the file of a library; None if it was not built."""
    # Earlier builds have the version of Python in their files' names.
    paths = (folder / (name + suffix) for suffix in (".so", *EXTENSION_SUFFIXES))
    return next(filter(Path.exists, paths), None)


def load_library(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load a library; None if it was not built or cannot be loaded (see `load_error`)."""
    library = _open_library(folder, name)
    return library if isinstance(library, ctypes.CDLL) else None


@cache
def _open_library(folder: Path, name: str) -> ctypes.CDLL | str | None:
    """Return a library, the system's message if it cannot be loaded, or None if it is missing."""
    path = library_path(folder, name)
    if path is None:
        return None
    # The kernels use the OpenMP runtime of torch, which is imported above.
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        return str(error)


def _requested_set(name: str, folder: Path) -> InstructionSet:
    """Return the set that KVKEEP_ISA names. Raises InvalidArgument if it is not available."""
    for architecture, sets in ARCHITECTURES.items():
        if name in sets and name not in SETS:
            raise InvalidArgument(
                f"KVKEEP_ISA={name} is not available: its kernels are for {architecture}, and this "
                f"machine is {ARCHITECTURE}"
            )
    if name not in SETS:
        known_names = ", ".join([*SETS, TORCH])
        raise InvalidArgument(f"KVKEEP_ISA must be one of {known_names}; found {name!r}")
    if reason := unusable_reason(name, folder):
        raise InvalidArgument(
            f"KVKEEP_ISA={name} is not available: its kernels {reason}. Unset KVKEEP_ISA to use "
            "the best instruction set of this machine"
        )
    faster = list(SETS)[: list(SETS).index(name)]
    rejected = dict.fromkeys(faster, f"are excluded by KVKEEP_ISA={name}")
    return InstructionSet(name, rejected, requested=True)


def _missing_reason(folder: Path, name: str) -> str:
    """Say why there is no library, with the reason from `setup.py` if it recorded one."""
    if isinstance(error := _open_library(folder, f"_{name}"), str):
        return f"cannot be loaded ({error})"
    try:
        build_record = json.loads((folder / "built.json").read_text(encoding="utf-8"))
        reason = build_record["failures"].get(name, "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        reason = ""
    return "were not built on this machine" + (f" ({reason})" if reason else "")
