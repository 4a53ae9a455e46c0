"""For `pytest -p emulated.plugin`: as if this were an Arm processor, whose kernels qemu runs.

`make emulated` runs the tests of the kernels so. PyTorch, which they are compared with, is this
processor's own.
"""

from functools import cache
from pathlib import Path

import pytest
from emulated.emulator import Object, here

from kvkeep.compiled import instruction_sets


@cache
def _emulated(folder: Path, name: str) -> Object | None:
    path = instruction_sets._path(folder, name)
    return None if path is None else Object(here(), path)


# Before any test asks which sets there are.
instruction_sets.ARCHITECTURE = "aarch64"
instruction_sets.SETS = instruction_sets.ARCHITECTURES["aarch64"]
instruction_sets._loaded = _emulated


def pytest_configure() -> None:
    """Without kernels all tests of them would be left out."""
    for name in instruction_sets.SETS:
        if why := instruction_sets._obstacle(name, instruction_sets._folder()):
            raise pytest.UsageError(f"the emulated kernels of {name} {why}")
