"""Which instruction set is used, and that all sets round to the same bits."""

import ctypes
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from available_sets import sets_here

from kvkeep.compiled import instruction_sets
from kvkeep.compiled.binding import kernel_library, raise_for_status
from kvkeep.compiled.instruction_sets import (
    ARCHITECTURE,
    ARCHITECTURES,
    SETS,
    InstructionSet,
    load_kernels,
    runs_here,
    selected_set,
)
from kvkeep.compiled.operands import matrix_operand
from kvkeep.errors import InvalidArgument

kernels_here = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

# The flags in /proc/cpuinfo that each set needs.
FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "neon": {"asimd"},
    "neonbf16": {"asimd", "asimddp", "bf16"},
}
FLAGS["avx512bf16"] = FLAGS["avx512"] | {"avx512_bf16", "avx512_vnni"}
FLAGS["amx"] = FLAGS["avx512bf16"] | {"amx_tile", "amx_bf16"}


def cpu_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


@pytest.fixture
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVKEEP_ISA", "KVKEEP_COMPILED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def old_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A processor that runs none of the sets, although all are built.

    Returns the names of the libraries that are loaded.
    """
    loaded, load_library = list[str](), instruction_sets.load_library

    def recorded(folder: Path, name: str) -> object:
        loaded.append(name)
        return load_library(folder, name)

    for file in Path(instruction_sets.__file__).parent.glob("*.so"):
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.setenv("KVKEEP_KERNELS", str(tmp_path))
    monkeypatch.setattr(instruction_sets, "runs_here", lambda name: False)
    monkeypatch.setattr(instruction_sets, "load_library", recorded)
    return loaded


@kernels_here
@pytest.mark.usefixtures("no_switches")
def test_the_best_set_that_the_processor_runs_is_used() -> None:
    runs = [name for name in SETS if FLAGS[name] <= cpu_flags()]
    assert [name for name in SETS if runs_here(name)] == runs
    selected = selected_set()
    assert selected.name == runs[0]
    faster = list(SETS)[: list(SETS).index(runs[0])]
    assert selected.rejected == {name: f"need a processor with {SETS[name]}" for name in faster}
    assert selected.torch_reason == ""


@kernels_here
@pytest.mark.usefixtures("no_switches")
def test_kvkeep_isa_selects_another_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in sets_here():
        monkeypatch.setenv("KVKEEP_ISA", name)
        assert selected_set().name == name
        assert kernel_library() is load_kernels(name)
        assert all(name in reason for reason in selected_set().rejected.values())


@pytest.mark.usefixtures("no_switches")
@pytest.mark.parametrize(("name", "value"), [("KVKEEP_ISA", "torch"), ("KVKEEP_COMPILED", "0")])
def test_kernels_can_be_switched_off(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert kernel_library() is None
    assert selected_set() == InstructionSet(
        "torch", dict.fromkeys(SETS, f"are disabled by {name}={value}")
    )


@pytest.mark.usefixtures("no_switches")
def test_an_unknown_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_ISA", "avx3")
    known = ", ".join([*SETS, "torch"])
    with pytest.raises(InvalidArgument, match=f"one of {known}; found 'avx3'"):
        kernel_library()


@pytest.mark.usefixtures("no_switches")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_set_of_another_architecture_is_refused(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if architecture == ARCHITECTURE:
        pytest.skip("this machine's own architecture")
    for name in ARCHITECTURES[architecture]:
        monkeypatch.setenv("KVKEEP_ISA", name)
        with pytest.raises(InvalidArgument, match=f"are for {architecture}, and this machine is"):
            kernel_library()


@pytest.mark.usefixtures("no_switches")
def test_an_architecture_without_sets_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "SETS", {})
    instruction_sets.select_set.cache_clear()
    try:
        assert selected_set() == InstructionSet("torch", {})
        assert selected_set().torch_reason == "are for x86_64 and aarch64"
    finally:
        instruction_sets.select_set.cache_clear()


@kernels_here
@pytest.mark.usefixtures("no_switches")
def test_a_set_that_the_processor_lacks_is_refused_and_not_loaded(
    old_processor: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selected_set().name == "torch"
    assert selected_set().torch_reason == f"need a processor with {list(SETS.values())[-1]}"
    for name in SETS:
        monkeypatch.setenv("KVKEEP_ISA", name)
        with pytest.raises(InvalidArgument, match=f"KVKEEP_ISA={name} .* need a processor with"):
            kernel_library()
    assert set(old_processor) == {"_cpu"}


def test_a_process_that_requests_a_set_it_lacks_ends_with_invalid_argument() -> None:
    lacking = [name for name in SETS if not runs_here(name)]
    if not lacking:
        pytest.skip("this processor runs all sets")
    name = lacking[0]  # the tests above try all, without a process
    script = "from kvkeep.compiled.binding import kernel_library; kernel_library()"
    environment = {**os.environ, "KVKEEP_ISA": name}
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 1
    assert f"InvalidArgument: KVKEEP_ISA={name} is not available: its kernels" in process.stderr


NO_BITS = """
static int __get_cpuid(unsigned leaf, unsigned* a, unsigned* b, unsigned* c, unsigned* d) {
  *a = *b = *c = *d = 0;
  return leaf != 0;
}
static int __get_cpuid_count(unsigned leaf, unsigned part, unsigned* a, unsigned* b, unsigned* c,
                             unsigned* d) {
  return __get_cpuid(leaf + part, a, b, c, d);
}
"""


@pytest.mark.skipif(ARCHITECTURE != "x86_64", reason="of x86")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")
def test_no_set_is_for_processors_without_f16c(tmp_path: Path) -> None:
    """A hypervisor may hide that bit of CPUID alone; here it is one's header that does."""
    (tmp_path / "cpuid.h").write_text(NO_BITS)
    source = Path(instruction_sets.__file__).parent / "src" / "cpu.c"
    library = tmp_path / "cpu.so"
    command = ["gcc", "-shared", "-fPIC", f"-I{tmp_path}", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    cpu = ctypes.CDLL(str(library))
    assert not any(cpu.kvkeep_cpu_runs(name.encode()) for name in SETS)


# Linux permits no tiles while a thread handles signals on a stack too small to save them.
SMALL_SIGNAL_STACK = """
import ctypes
from kvkeep.compiled.instruction_sets import runs_here, selected_set

class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
assert not runs_here("amx")
assert selected_set().rejected["amx"].startswith("need a processor with AMX")
"""


@pytest.mark.skipif("amx" not in SETS or not runs_here("amx"), reason="no AMX here")
@pytest.mark.usefixtures("no_switches")
def test_tiles_that_the_system_does_not_permit_are_not_used() -> None:
    subprocess.run([sys.executable, "-c", SMALL_SIGNAL_STACK], check=True)


@pytest.mark.usefixtures("no_switches")
def test_libraries_that_were_not_built_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVKEEP_KERNELS", str(tmp_path))
    assert kernel_library() is None
    assert selected_set().torch_reason == "were not built on this machine"
    monkeypatch.setenv("KVKEEP_ISA", "neon" if "neon" in SETS else "avx2")
    with pytest.raises(InvalidArgument, match="were not built on this machine"):
        kernel_library()


@kernels_here
@pytest.mark.usefixtures("no_switches")
def test_a_folder_of_libraries_may_be_relative(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = selected_set()
    for file in Path(instruction_sets.__file__).parent.glob("*.so"):
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVKEEP_KERNELS", ".")
    assert selected_set() == expected
    assert kernel_library() is not None


@pytest.mark.usefixtures("no_switches")
def test_a_library_that_cannot_be_loaded_is_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "_cpu.so").write_text("no library")
    monkeypatch.setenv("KVKEEP_KERNELS", str(tmp_path))
    assert kernel_library() is None
    assert selected_set().torch_reason.startswith(f"cannot be loaded ({tmp_path}/_cpu.so: ")


def rounded(bits: int) -> int:
    """Round a float's bits to bf16's as AVX512-BF16 does: subnormal numbers become zero."""
    sign, size = bits & 0x80000000, bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return (bits >> 16) | 0x40
    if size < 0x00800000:
        return sign >> 16
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def hard_cases() -> list[int]:
    """Bits of floats: halfway between two bf16, just beside that, the largest, NaNs, subnormals."""
    tops = [0x3F80, 0x3F81, 0x0080, 0x7F7F, 0x7F7E, 0x7F80, 0x0000, 0x0001, 0x007F, 0x4049]
    lows = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    bits = [top << 16 | low for top in tops for low in lows]
    bits += [sign | size for sign in (0x80000000, 0) for size in (0x7FFFFFFF, 0x7FA00000)]
    return bits + [size | 0x80000000 for size in bits if size < 0x80000000]


@kernels_here
@pytest.mark.parametrize("instruction_set", sets_here(), indirect=True)
def test_numbers_are_rounded_to_the_same_bits(instruction_set: str) -> None:
    bits = hard_cases()
    columns = 32 * math.ceil(len(bits) / 32)
    bits += [0] * (columns - len(bits))
    floats = struct.pack(f"{columns}I", *bits)
    matrix = torch.frombuffer(bytearray(floats), dtype=torch.float32).view(1, columns)
    out = torch.empty(1, columns, dtype=torch.int16)
    kernels = kernel_library()
    assert kernels is not None
    operand = matrix_operand("matrix", matrix, (1, columns), None, round_weights=True)
    raise_for_status(kernels.kvkeep_unpack(operand, 0, 1, out.data_ptr(), 1))
    assert [x & 0xFFFF for x in out[0].tolist()] == list(map(rounded, bits))
