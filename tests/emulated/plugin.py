"""A plugin for `pytest -p emulated.plugin`: an Arm processor whose kernels qemu runs.

`make emulated` runs the tests of the kernels with it. PyTorch, which they are compared with, runs
on this machine's own processor.
"""

from functools import cache
from pathlib import Path

import pytest
from emulated.emulator import Object, emulator_here

from kvkeep.compiled import instruction_sets


@cache
def load_emulated(folder: Path, name: str) -> Object | None:
    path = instruction_sets.library_path(folder, name)
    return None if path is None else Object(emulator_here(), path)


# Before any test reads them.
instruction_sets.ARCHITECTURE = "aarch64"
instruction_sets.SETS = instruction_sets.ARCHITECTURES["aarch64"]
instruction_sets.load_library = load_emulated


def pytest_configure() -> None:
    """Fail where kernels are missing: otherwise all of their tests would be skipped."""
    for name in instruction_sets.SETS:
        folder = instruction_sets.library_folder()
        if reason := instruction_sets.unusable_reason(name, folder):
            raise pytest.UsageError(f"the emulated kernels of {name} {reason}")
