"""The instruction sets that the kernels are built for, and the one that is used here.

There is an object for each of this architecture (`setup.py`), from one source. The best of those
that this processor runs is taken; KVKEEP_ISA names another one, or torch, and KVKEEP_COMPILED=0
does without any. KVKEEP_KERNELS names a folder whose objects are taken instead of those that lie
here, such as ones that were built to find errors (`make sanitize`).
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

# Of each architecture, the fastest first: what each needs of a processor.
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
SETS = ARCHITECTURES.get(ARCHITECTURE, {})  # those that there are for this one
TORCH = "torch"


@dataclass(frozen=True)
class Choice:
    """name: of a set, or "torch". against: why each faster one is not taken, by its name.

    asked: whether the environment chose it.
    """

    name: str
    against: dict[str, str] = field(default_factory=dict)
    asked: bool = field(default=False, compare=False)

    @property
    def why_torch(self) -> str:
        """Why no kernels are used, as what they are or need; "" where some are."""
        if self.name != TORCH:
            return ""
        # Of the one that most processors have.
        return next(reversed(self.against.values()), f"are for {' and '.join(ARCHITECTURES)}")


def choice() -> Choice:
    """Who computes here, as the environment says now.

    Raises InvalidArgument for a KVKEEP_ISA that is no set, or one that is not to be had here.
    """
    return _chosen(
        os.environ.get("KVKEEP_ISA") or None, os.environ.get("KVKEEP_COMPILED"), _folder()
    )


def runs_here(name: str) -> bool:
    """Whether this processor has all that a set needs."""
    cpu = _loaded(_folder(), "_cpu")
    return cpu is not None and bool(cpu.kvkeep_cpu_runs(name.encode()))


def load(name: str) -> ctypes.CDLL | None:
    """The object of a set, which this processor must run; None where there is none."""
    return _loaded(_folder(), f"_{name}")


def load_error(name: str) -> str:
    """What the system said where the object of a set is there and `load` gives None."""
    path = _path(_folder(), f"_{name}")
    return _ERRORS.get(path, "") if path else ""


def multiplies_bf16() -> bool:
    """Whether PyTorch's library multiplies bfloat16 as fast as float32 here, or faster.

    By the processor, and by what the library was told to leave out (ONEDNN_MAX_CPU_ISA).
    """
    cpu = _loaded(_folder(), "_cpu")
    if cpu is None or not cpu.kvkeep_cpu_multiplies_bf16():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _folder() -> Path:
    return Path(os.environ.get("KVKEEP_KERNELS") or Path(__file__).parent)


@cache
def _chosen(asked: str | None, compiled: str | None, folder: Path) -> Choice:
    if compiled == "0":
        return _none("were switched off by KVKEEP_COMPILED=0")
    if asked == TORCH:
        return _none("were switched off by KVKEEP_ISA=torch")
    if asked is not None:
        return _forced(asked, folder)
    against: dict[str, str] = {}
    for name in SETS:
        if not (why := _obstacle(name, folder)):
            return Choice(name, against)
        against[name] = why
    return Choice(TORCH, against)


def _none(why: str) -> Choice:
    return Choice(TORCH, dict.fromkeys(SETS, why), asked=True)


def _forced(asked: str, folder: Path) -> Choice:
    for architecture, sets in ARCHITECTURES.items():
        if asked in sets and asked not in SETS:
            raise InvalidArgument(
                f"KVKEEP_ISA={asked} cannot be had: its kernels are for {architecture}, and this "
                f"is {ARCHITECTURE}"
            )
    if asked not in SETS:
        known = ", ".join([*SETS, TORCH])
        raise InvalidArgument(f"KVKEEP_ISA must be one of {known}; found {asked!r}")
    if why := _obstacle(asked, folder):
        raise InvalidArgument(
            f"KVKEEP_ISA={asked} cannot be had: its kernels {why}. Without KVKEEP_ISA the best "
            "that there is here is used"
        )
    better = list(SETS)[: list(SETS).index(asked)]
    why = f"were left out by KVKEEP_ISA={asked}"
    return Choice(asked, dict.fromkeys(better, why), asked=True)


def _obstacle(name: str, folder: Path) -> str:
    """Why a set cannot be used, as what its kernels are or need. None of it is executed."""
    if _loaded(folder, "_cpu") is None:
        return _not_built(folder, "cpu")
    if not runs_here(name):
        return f"need a processor with {SETS[name]}"
    return "" if _path(folder, f"_{name}") else _not_built(folder, name)


def _not_built(folder: Path, name: str) -> str:
    """With what the build wrote down of it (`setup.py`): nobody saw what it said."""
    try:
        written = json.loads((folder / "built.json").read_text(encoding="utf-8"))
        why = written["failures"].get(name, "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        why = ""
    return "were not built here" + (f" ({why})" if why else "")


def _path(folder: Path, name: str) -> Path | None:
    # Builds before this one named them by the version of Python, which they do not depend on.
    paths = (folder / (name + suffix) for suffix in (".so", *EXTENSION_SUFFIXES))
    return next(filter(Path.exists, paths), None)


_ERRORS: dict[Path, str] = {}  # of objects that could not be loaded


@cache
def _loaded(folder: Path, name: str) -> ctypes.CDLL | None:
    path = _path(folder, name)
    if path is None:
        return None
    # torch has brought the OpenMP runtime that the kernels' threads are of.
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _ERRORS[path] = str(error)
        return None
