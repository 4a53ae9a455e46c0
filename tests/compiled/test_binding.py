"""The kernels are there where they can be, and can be left out."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.compiled.binding import library

CPU_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma")


def cpu_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


@pytest.mark.skipif(not set(CPU_FLAGS) <= cpu_flags(), reason="not a CPU that they are for")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_they_were_built_with_the_package() -> None:
    assert library() is not None


def test_they_can_be_switched_off() -> None:
    script = "from kvkeep.compiled.binding import library; assert library() is None"
    environment = {"KVKEEP_COMPILED": "0"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_they_can_be_taken_from_elsewhere(tmp_path: Path) -> None:
    script = "from kvkeep.compiled.binding import library; assert library() is None"
    environment = {"KVKEEP_KERNELS": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
