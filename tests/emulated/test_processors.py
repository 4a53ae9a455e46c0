"""What only an emulator can show: Arm processors with more or fewer instructions, and crashes."""

import pytest
import torch
from emulated.emulator import MACHINE, Emulator, Object

from kvkeep.compiled import instruction_sets
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.instruction_sets import ARCHITECTURES, SETS, selected_set
from kvkeep.compiled.structures import CMatrix

pytestmark = pytest.mark.skipif(
    SETS is not ARCHITECTURES["aarch64"] or not MACHINE.exists(), reason="run by `make emulated`"
)


def load_on(cpu: str, name: str) -> Object:
    path = instruction_sets.library_path(instruction_sets.library_folder(), name)
    assert path is not None
    return Object(Emulator(cpu), path)


@pytest.mark.parametrize(("cpu", "runs"), [("cortex-a57", {"neon"}), ("max", {"neon", "neonbf16"})])
def test_a_processor_reports_the_sets_it_runs(cpu: str, runs: set[str]) -> None:
    probe = load_on(cpu, "_cpu")
    names = [name for sets in ARCHITECTURES.values() for name in sets]
    assert {name for name in names if probe.kvkeep_cpu_runs(name.encode())} == runs
    assert bool(probe.kvkeep_cpu_multiplies_bf16()) == ("neonbf16" in runs)


def test_the_kernels_of_plain_neon_need_nothing_else() -> None:
    weights, rows = torch.randn(3, 64).bfloat16(), torch.tensor([2, 0])
    out = torch.zeros(2, 64, dtype=torch.bfloat16)
    matrix = CMatrix(0, 3, 64, 0, weights.data_ptr(), None, None)
    kernels = load_on("cortex-a57", "_neon")
    assert kernels.kvkeep_rows(matrix, rows.data_ptr(), 2, out.data_ptr()) == 0
    assert torch.equal(out, weights[rows])


def test_the_best_set_is_used() -> None:
    assert selected_set().name == "neonbf16"
    assert isinstance(kernel_library(), Object)


def test_a_kernel_that_reads_outside_its_callers_memory_ends() -> None:
    out = torch.zeros(1, 64, dtype=torch.bfloat16)
    rows = torch.tensor([0])
    kernels = load_on("max", "_neon")
    nowhere = CMatrix(0, 1, 64, 0, 1 << 20, None, None)
    with pytest.raises(RuntimeError, match="ended with 9 in kvkeep_rows"):
        kernels.kvkeep_rows(nowhere, rows.data_ptr(), 1, out.data_ptr())
