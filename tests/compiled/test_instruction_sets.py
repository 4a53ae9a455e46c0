"""Which kernels are used, and that those of each set round alike."""

import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sets_here import sets_here

from kvkeep.compiled import instruction_sets
from kvkeep.compiled.binding import library, require_done
from kvkeep.compiled.instruction_sets import (
    ARCHITECTURE,
    ARCHITECTURES,
    SETS,
    Choice,
    choice,
    load,
    runs_here,
)
from kvkeep.compiled.matrices import described
from kvkeep.errors import InvalidArgument

kernels_here = pytest.mark.skipif(library() is None, reason="no compiled kernels here")

# As Linux calls what the sets need.
FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
    "neon": {"asimd"},
    "neonbf16": {"asimd", "bf16"},
}


def cpu_flags() -> set[str]:
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVKEEP_ISA", "KVKEEP_COMPILED"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def old_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """One that runs none of the sets, all of them being built. The names of what was loaded."""
    loaded, load_from = list[str](), instruction_sets._loaded

    def noted(folder: Path, name: str) -> object:
        loaded.append(name)
        return load_from(folder, name)

    for file in Path(instruction_sets.__file__).parent.glob("*.so"):
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.setenv("KVKEEP_KERNELS", str(tmp_path))
    monkeypatch.setattr(instruction_sets, "runs_here", lambda name: False)
    monkeypatch.setattr(instruction_sets, "_loaded", noted)
    return loaded


@kernels_here
@pytest.mark.usefixtures("unasked")
def test_the_best_that_the_processor_runs_is_taken() -> None:
    runs = [name for name in SETS if FLAGS[name] <= cpu_flags()]
    assert [name for name in SETS if runs_here(name)] == runs
    chosen = choice()
    assert chosen.name == runs[0]
    faster = list(SETS)[: list(SETS).index(runs[0])]
    assert chosen.against == {name: f"need a processor with {SETS[name]}" for name in faster}
    assert chosen.why_torch == ""


@kernels_here
@pytest.mark.usefixtures("unasked")
def test_another_one_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in sets_here():
        monkeypatch.setenv("KVKEEP_ISA", name)
        assert choice().name == name
        assert library() is load(name)
        assert all(name in why for why in choice().against.values())


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize(("name", "value"), [("KVKEEP_ISA", "torch"), ("KVKEEP_COMPILED", "0")])
def test_they_can_be_switched_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert library() is None
    assert choice() == Choice("torch", dict.fromkeys(SETS, f"were switched off by {name}={value}"))


@pytest.mark.usefixtures("unasked")
def test_a_word_that_is_no_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_ISA", "avx3")
    known = ", ".join([*SETS, "torch"])
    with pytest.raises(InvalidArgument, match=f"one of {known}; found 'avx3'"):
        library()


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_set_of_another_architecture_is_refused(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if architecture == ARCHITECTURE:
        pytest.skip("this is one")
    for name in ARCHITECTURES[architecture]:
        monkeypatch.setenv("KVKEEP_ISA", name)
        with pytest.raises(InvalidArgument, match=f"are for {architecture}, and this is"):
            library()


@pytest.mark.usefixtures("unasked")
def test_where_there_are_no_sets_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "SETS", {})
    instruction_sets._chosen.cache_clear()
    try:
        assert choice() == Choice("torch", {})
        assert choice().why_torch == "are for x86_64 and aarch64"
    finally:
        instruction_sets._chosen.cache_clear()


@kernels_here
@pytest.mark.usefixtures("unasked")
def test_a_set_that_the_processor_lacks_is_refused_and_not_loaded(
    old_processor: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choice().name == "torch"
    assert choice().why_torch == f"need a processor with {list(SETS.values())[-1]}"
    for name in SETS:
        monkeypatch.setenv("KVKEEP_ISA", name)
        with pytest.raises(InvalidArgument, match=f"KVKEEP_ISA={name} .* need a processor with"):
            library()
    assert set(old_processor) == {"_cpu"}


@pytest.mark.parametrize("name", SETS)
def test_a_process_that_asks_for_what_it_lacks_ends_with_an_error_of_ours(name: str) -> None:
    if runs_here(name):
        pytest.skip("this processor has it")
    script = "from kvkeep.compiled.binding import library; library()"
    environment = {**os.environ, "KVKEEP_ISA": name}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert f"InvalidArgument: KVKEEP_ISA={name} cannot be had: its kernels" in ended.stderr


@pytest.mark.usefixtures("unasked")
def test_where_none_were_built_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVKEEP_KERNELS", str(tmp_path))
    assert library() is None
    assert choice().why_torch == "were not built here"
    monkeypatch.setenv("KVKEEP_ISA", "neon" if "neon" in SETS else "avx2")
    with pytest.raises(InvalidArgument, match="were not built here"):
        library()


def rounded(bits: int) -> int:
    """A float's bits as bf16's, as AVX512-BF16 has it: what is below the least normal is zero."""
    sign, size = bits & 0x80000000, bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return (bits >> 16) | 0x40
    if size < 0x00800000:
        return sign >> 16
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def hard_ones() -> list[int]:
    """Bits of floats: between two bf16, beside that, the largest, none, and below the least."""
    tops = [0x3F80, 0x3F81, 0x0080, 0x7F7F, 0x7F7E, 0x7F80, 0x0000, 0x0001, 0x007F, 0x4049]
    lows = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    found = [top << 16 | low for top in tops for low in lows]
    found += [sign | size for sign in (0x80000000, 0) for size in (0x7FFFFFFF, 0x7FA00000)]
    return found + [size | 0x80000000 for size in found if size < 0x80000000]


@kernels_here
@pytest.mark.parametrize("instruction_set", sets_here(), indirect=True)
def test_numbers_are_rounded_to_the_same_bits(instruction_set: str) -> None:
    bits = hard_ones()
    columns = 32 * math.ceil(len(bits) / 32)
    bits += [0] * (columns - len(bits))
    floats = struct.pack(f"{columns}I", *bits)
    matrix = torch.frombuffer(bytearray(floats), dtype=torch.float32).view(1, columns)
    out = torch.empty(1, columns, dtype=torch.int16)
    kernels = library()
    assert kernels is not None
    it = described("it", matrix, (1, columns), None, rounded=True)
    require_done(kernels.kvkeep_unpack(it, 0, 1, out.data_ptr(), 1))
    assert [x & 0xFFFF for x in out[0].tolist()] == list(map(rounded, bits))
