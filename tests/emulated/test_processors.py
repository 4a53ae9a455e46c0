"""What only an emulator can show: processors of Arm that have more or less, and where it ends."""

import pytest
import torch
from emulated.emulator import MACHINE, Emulator, Object

from kvkeep.compiled import instruction_sets
from kvkeep.compiled.binding import CMatrix, library
from kvkeep.compiled.instruction_sets import ARCHITECTURES, SETS, choice

pytestmark = pytest.mark.skipif(
    SETS is not ARCHITECTURES["aarch64"] or not MACHINE.exists(), reason="run by `make emulated`"
)


def on(cpu: str, name: str) -> Object:
    at = instruction_sets._path(instruction_sets._folder(), name)
    assert at is not None
    return Object(Emulator(cpu), at)


@pytest.mark.parametrize(("cpu", "runs"), [("cortex-a57", {"neon"}), ("max", {"neon", "neonbf16"})])
def test_a_processor_says_what_it_runs(cpu: str, runs: set[str]) -> None:
    asked, every = on(cpu, "_cpu"), [name for sets in ARCHITECTURES.values() for name in sets]
    assert {name for name in every if asked.kvkeep_cpu_runs(name.encode())} == runs
    assert bool(asked.kvkeep_cpu_multiplies_bf16()) == ("neonbf16" in runs)


def test_the_kernels_of_plain_neon_need_nothing_else() -> None:
    weights, rows = torch.randn(3, 64).bfloat16(), torch.tensor([2, 0])
    out = torch.zeros(2, 64, dtype=torch.bfloat16)
    matrix = CMatrix(0, 3, 64, 0, weights.data_ptr(), None, None)
    kernels = on("cortex-a57", "_neon")
    assert kernels.kvkeep_rows(matrix, rows.data_ptr(), 2, out.data_ptr()) == 0
    assert torch.equal(out, weights[rows])


def test_the_best_is_taken() -> None:
    assert choice().name == "neonbf16"
    assert isinstance(library(), Object)


def test_a_kernel_that_reads_what_its_caller_lacks_ends() -> None:
    out = torch.zeros(1, 64, dtype=torch.bfloat16)
    rows = torch.tensor([0])
    kernels = on("max", "_neon")
    nowhere = CMatrix(0, 1, 64, 0, 1 << 20, None, None)
    with pytest.raises(RuntimeError, match="ended with 9 in kvkeep_rows"):
        kernels.kvkeep_rows(nowhere, rows.data_ptr(), 1, out.data_ptr())
