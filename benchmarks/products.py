"""Speed of single matrix products, by format of the packed weights.

    python -m benchmarks.products --rows 1 --rows 4
    KVKEEP_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
      python -m benchmarks.products Q4_K Q8_0 --rows 512
    KVKEEP_ISA=avx2 KVKEEP_KERNELS=/tmp/before/kvkeep/compiled python -m benchmarks.products

More than 16 rows, those of a prompt, are multiplied as integers by the kernels, with rows of 16 and
of 8 bits (KVKEEP_PROMPT_BITS), and by the library as without them, in turn. The last command
measures kernels of another build with the same C interface. Several copies of a matrix are read in
turn, so that they do not stay in the processor's caches.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import numpy as np
import torch

from benchmarks.command import Measurement, check_outputs, out_option
from benchmarks.figures import rounded
from benchmarks.machine import describe_machine
from benchmarks.random_gguf import random_blocks
from kvkeep.compiled.binding import kernel_library, raise_for_status
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.compiled.matrices import MAX_KERNEL_ROWS, PackedLinear, shared_scratch
from kvkeep.compiled.operands import matrix_operand
from kvkeep.compiled.products import prompt_products
from kvkeep.compiled.structures import CMatrix
from kvkeep.models.weights.formats import FORMATS
from kvkeep.models.weights.packing import PackedMatrix, as_tensor, from_gguf, pack
from kvkeep.storage.files.atomic import write_json

SHAPE = (8192, 2048)  # the largest matrix of Llama 3.2 1B
MATRIX_COPIES, ROUNDS = 6, 15


@dataclass(frozen=True)
class Speed:
    """seconds: median of one product. gigabytes: weights read per second."""

    format: str
    rows: int
    seconds: float
    gigabytes: float


@dataclass(frozen=True)
class PromptSpeed:
    """Products with many rows, by the kernels as integers and by the library in `dtype`.

    byte: with rows of 8 bits; the same as integers where the format's codes are too large for them.

    errors: of the results, which are rounded to bfloat16, relative to float64.
    """

    format: str
    rows: int
    dtype: str
    integer_seconds: float
    byte_seconds: float
    library_seconds: float
    integer_error: float
    byte_error: float
    library_error: float


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.argument("formats", nargs=-1)
@click.option("--rows", "counts", multiple=True, default=(1, 4), type=click.IntRange(1, 4096))
@out_option
def main(formats: Sequence[str], counts: Sequence[int], out: Path | None) -> None:
    """Measure products of FORMATS (default: all)."""
    check_outputs(out)
    if unknown := set(formats) - FORMATS.keys():
        raise click.UsageError(f"{min(unknown)} is no format; there are {', '.join(FORMATS)}")
    if kernel_library() is None:
        raise click.UsageError(f"there are no kernels here: they {selected_set().torch_reason}")
    print(f"{selected_set().name}, {torch.get_num_threads()} threads")
    speeds = [speed for name in formats or FORMATS for speed in measure(name, counts)]
    if out:
        header = {"machine": dataclasses.asdict(describe_machine()), "kernels": selected_set().name}
        write_json(out, header | {"speeds": [dataclasses.asdict(each) for each in speeds]})


def measure(name: str, counts: Sequence[int]) -> list[Speed | PromptSpeed]:
    blocks = random_blocks(np.random.default_rng(0), name, *SHAPE)
    matrix = pack(from_gguf(FORMATS[name], torch.from_numpy(blocks)))
    matrices = [dataclasses.replace(matrix, data=matrix.data.clone()) for _ in range(MATRIX_COPIES)]
    copies = [matrix_operand(name, copy, SHAPE, None, round_weights=False) for copy in matrices]
    speeds = list[Speed | PromptSpeed]()
    for count in counts:
        if count > MAX_KERNEL_ROWS:
            speeds.append(_measure_prompt(name, matrix, count))
            continue
        seconds = _seconds(copies, count)
        speed = Speed(name, count, rounded(seconds), rounded(matrix.nbytes / seconds / 1e9))
        print(f"{name:<8}{count:>3} rows{seconds * 1e6:>9.0f} us{speed.gigabytes:>8.1f} GB/s")
        speeds.append(speed)
    return speeds


def _measure_prompt(name: str, matrix: PackedMatrix, count: int) -> PromptSpeed:
    kernels, dtype = kernel_library(), prompt_products().dtype
    assert kernels is not None
    operand = matrix_operand(name, matrix, SHAPE, None, round_weights=True)
    ways = [PackedLinear(kernels, operand, None, matrix, dtype, bits) for bits in (16, 8, 0)]
    x = torch.randn(count, SHAPE[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = x.double() @ as_tensor(matrix, torch.float32).double().T
    errors = [float((way(x).double() - expected).norm() / expected.norm()) for way in ways]
    times: tuple[list[float], ...] = ([], [], [])
    with shared_scratch():
        for _ in range(ROUNDS):
            for way, seconds in zip(ways, times, strict=True):
                start = perf_counter()
                way(x)
                seconds.append(perf_counter() - start)
    dtype_name = str(dtype).removeprefix("torch.")
    speed = PromptSpeed(name, count, dtype_name, *map(rounded, [*map(median, times), *errors]))
    print(
        f"{name:<8}{count:>3} rows{speed.integer_seconds * 1e3:>8.1f} ms as integers (error "
        f"{speed.integer_error:.2e}), {speed.byte_seconds * 1e3:.1f} ms with rows of 8 bits "
        f"({speed.byte_error:.2e}), {speed.library_seconds * 1e3:.1f} ms in {dtype_name} "
        f"({speed.library_error:.2e}): {speed.library_seconds / speed.integer_seconds:.2f}x and "
        f"{speed.library_seconds / speed.byte_seconds:.2f}x"
    )
    return speed


def _seconds(copies: Sequence[CMatrix], count: int) -> float:
    kernels = kernel_library()
    assert kernels is not None
    x, out = torch.randn(count, SHAPE[1]).bfloat16(), torch.empty(count, SHAPE[0])
    times = list[float]()
    for _ in range(ROUNDS):
        start = perf_counter()
        for copy in copies:
            status = kernels.kvkeep_product(
                copy, x.data_ptr(), count, out.data_ptr(), torch.get_num_threads()
            )
            raise_for_status(status)
        times.append((perf_counter() - start) / len(copies))
    return median(times)


if __name__ == "__main__":
    main()
