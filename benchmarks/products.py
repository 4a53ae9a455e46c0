"""Speed of single matrix products with few rows, by format of the packed weights.

    python -m benchmarks.products --rows 1 --rows 4
    KVKEEP_ISA=avx2 KVKEEP_KERNELS=/tmp/before/kvkeep/compiled python -m benchmarks.products

The second command measures kernels of another build with the same C interface. Several copies of a
matrix are read in turn, so that they do not stay in the processor's caches.
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
from kvkeep.compiled.binding import CMatrix, kernel_library, raise_for_status
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.compiled.operands import matrix_operand
from kvkeep.models.weights.formats import FORMATS
from kvkeep.models.weights.packing import from_gguf, pack
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


@click.command(cls=Measurement, context_settings={"show_default": True})
@click.argument("formats", nargs=-1)
@click.option("--rows", "counts", multiple=True, default=(1, 4), type=click.IntRange(1, 16))
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


def measure(name: str, counts: Sequence[int]) -> list[Speed]:
    blocks = random_blocks(np.random.default_rng(0), name, *SHAPE)
    matrix = pack(from_gguf(FORMATS[name], torch.from_numpy(blocks)))
    matrices = [dataclasses.replace(matrix, data=matrix.data.clone()) for _ in range(MATRIX_COPIES)]
    copies = [matrix_operand(name, copy, SHAPE, None, round_weights=False) for copy in matrices]
    speeds = list[Speed]()
    for count in counts:
        seconds = _seconds(copies, count)
        speed = Speed(name, count, rounded(seconds), rounded(matrix.nbytes / seconds / 1e9))
        print(f"{name:<8}{count:>3} rows{seconds * 1e6:>9.0f} us{speed.gigabytes:>8.1f} GB/s")
        speeds.append(speed)
    return speeds


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
