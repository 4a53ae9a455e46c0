"""One-row products over packed weights."""

import ctypes

import pytest
import torch
from torch import Tensor

from kvkeep.compiled.binding import BF16, INT4, INT8, CMatrix, library, require_done
from kvkeep.errors import NonFiniteLogits
from kvkeep.models.packing import packed, quantise

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels here")

SIZES = [(16, 32), (48, 96), (50, 64), (1, 32), (264, 192)]


def product(matrix: CMatrix, x: Tensor, threads: int = 2) -> Tensor:
    kernels = library()
    assert kernels is not None
    out = torch.full((x.shape[0], matrix.rows), torch.nan)
    require_done(kernels.kvkeep_product(matrix, x.data_ptr(), x.shape[0], out.data_ptr(), threads))
    return out


def described(weights: Tensor, kind: int, bias: Tensor | None) -> tuple[CMatrix, Tensor, object]:
    """The matrix, its values in float64, and what must stay alive."""
    added = None if bias is None else bias.data_ptr()
    if kind == BF16:
        half = weights.bfloat16()
        return CMatrix(BF16, *half.shape, 0, half.data_ptr(), None, added), half.double(), half
    rounded = quantise(weights, 4 if kind == INT4 else 8)
    there = packed(rounded)
    data, scales = there.data.data_ptr(), there.scales.data_ptr()
    matrix = CMatrix(kind, there.rows, there.columns, 0, data, scales, added)
    return matrix, rounded.values().double(), there


@pytest.mark.parametrize("kind", [BF16, INT8, INT4])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 3, 8, 13, 16, 17])
@pytest.mark.parametrize("with_bias", [False, True])
def test_they_are_those_of_the_unpacked_matrix(
    kind: int, size: tuple[int, int], count: int, with_bias: bool
) -> None:
    random = torch.Generator().manual_seed(count)
    weights = torch.randn(size, generator=random)
    x = torch.randn(count, size[1], generator=random).bfloat16()
    # Room to read whole blocks of 16.
    bias = torch.randn(size[0] + 16, generator=random).bfloat16() if with_bias else None
    matrix, values, kept = described(weights, kind, bias)
    wanted = x.double() @ values.T + (0 if bias is None else bias[: size[0]].double())
    found = product(matrix, x)
    assert (found.double() - wanted).abs().max() <= 2e-6 * wanted.abs().max() * size[1] ** 0.5
    del kept


@pytest.mark.parametrize("kind", [BF16, INT8, INT4])
def test_a_row_is_the_same_to_the_last_bit_alone_and_among_others(kind: int) -> None:
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(264, 192, generator=random)
    x = torch.randn(17, 192, generator=random).bfloat16()
    matrix, _, kept = described(weights, kind, None)
    together = product(matrix, x)
    alone = torch.cat([product(matrix, row.unsqueeze(0).contiguous(), threads=1) for row in x])
    assert torch.equal(together, alone)
    del kept


@pytest.mark.parametrize("row", [0, 17, 49])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_one_that_is_no_number_is_found(row: int, wrong: float) -> None:
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(50, 64, generator=random)
    x = torch.randn(9, 64, generator=random).bfloat16()
    bias = torch.zeros(66).bfloat16()
    bias[50:] = torch.nan  # of rows that there are not
    for at in (0, 4, 8):
        matrix, _, kept = described(weights, BF16, bias)
        product(matrix, x)
        before = x[at, 5].clone()
        x[at, 5] = wrong
        with pytest.raises(NonFiniteLogits):
            product(matrix, x)
        x[at, 5] = before
        bias[row] = wrong
        with pytest.raises(NonFiniteLogits):
            product(matrix, x)
        bias[row] = 0
        del kept


def test_both_sides_agree_on_the_structures() -> None:
    kernels = library()
    assert kernels is not None
    assert kernels.kvkeep_interface() > ctypes.sizeof(CMatrix)
