"""The kernels are there where they can be, and can be left out."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.compiled.instruction_sets import SETS, load, runs_here


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
@pytest.mark.skipif(not SETS, reason="there are no kernels for it")
@pytest.mark.skipif("KVKEEP_KERNELS" in os.environ, reason="kernels of another folder are tested")
def test_they_were_built_with_the_package_for_each_set() -> None:
    for name in filter(runs_here, SETS):
        assert load(name) is not None


def test_they_can_be_switched_off() -> None:
    script = "from kvkeep.compiled.binding import library; assert library() is None"
    environment = {"KVKEEP_COMPILED": "0"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_they_can_be_taken_from_elsewhere(tmp_path: Path) -> None:
    script = "from kvkeep.compiled.binding import library; assert library() is None"
    environment = {"KVKEEP_KERNELS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
