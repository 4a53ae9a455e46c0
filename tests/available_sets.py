"""The instruction sets that tests of the kernels run on."""

import os

from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.instruction_sets import SETS, load_kernels, runs_here


def sets_here() -> list[str]:
    """Return the sets that this processor runs and that were built, or the requested one."""
    requested = os.environ.get("KVKEEP_ISA")
    if kernel_library() is None or requested:
        return [requested or "torch"]
    return [name for name in SETS if runs_here(name) and load_kernels(name) is not None]
