"""Memory that is returned to the operating system, and memory that is not."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.runtime.memory import trim_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

STARTED = """
from pathlib import Path
import torch
from kvkeep.runtime.memory import trim_code

def resident():
    sizes, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.split()[0].count("-") == 1 and ":" in line and "/" in line:
            here = "libtorch_cpu" in line and " r-xp " in line
        elif here and line.startswith("Rss:"):
            sizes += int(line.split()[1])
    return sizes

before = resident()
trim_code()
after = resident()
assert torch.equal(torch.ones(9, 9) @ torch.ones(9, 9), torch.full((9, 9), 9.0))
print(before, after)
"""


def test_trimmed_code_is_loaded_again_when_it_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, check=True
    )
    before, after = map(int, result.stdout.split())
    assert before > 20_000  # kB
    assert after < before / 4


FREED = """
import ctypes, sys, threading
import psutil
from kvkeep.runtime.memory import trim_heap

library, size = ctypes.CDLL(None), 1 << 16
library.malloc.restype = ctypes.c_void_p

def resident():
    return psutil.Process().memory_info().rss >> 10

def work():
    trim_heap()
    before = resident()
    blocks = [library.malloc(ctypes.c_size_t(size)) for _ in range(600)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks:
        library.free(ctypes.c_void_p(block))
    freed = resident()
    trim_heap()
    print(before, freed, resident())

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")
def test_memory_freed_by_a_thread_is_returned() -> None:
    # A threshold set by hand is not adapted, so freed memory stays mapped until the trim.
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": str(1 << 28)}
    result = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, check=True, env=environment
    )
    before, freed, after = map(int, result.stdout.split())
    assert freed > before + 30_000  # kB
    assert after < before + 6_000


def test_code_that_was_changed_in_memory_is_not_trimmed(tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_bytes(bytes(2 * mmap.PAGESIZE))
    with file.open("rb") as stream:
        mapped = mmap.mmap(
            stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    mapped[mmap.PAGESIZE] = 7  # as a debugger sets a breakpoint
    buffer = ctypes.c_char.from_buffer(mapped)
    address = ctypes.c_void_p(ctypes.addressof(buffer))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(address, ctypes.c_size_t(len(mapped)), mmap.PROT_READ | mmap.PROT_EXEC) == 0
    trim_code()
    assert mapped[mmap.PAGESIZE] == 7
