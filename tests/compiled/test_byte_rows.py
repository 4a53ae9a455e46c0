"""Products of a prompt's rows of 8 bits, as with KVKEEP_PROMPT_BITS=8."""

from typing import Any

import numpy as np
import pytest
import torch
from compiled.test_products import MatrixCase, inputs, make_matrix, many_rows
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from random_blocks import HALVES, exact, random_blocks
from torch import Tensor

from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.compiled.matrices import MAX_KERNEL_ROWS
from kvkeep.models.weights.formats import FORMATS
from kvkeep.models.weights.packing import Matrix, from_gguf, pack

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

WIDE_SUMS = ("amx", "avx512bf16", "avxvnni")  # sets that add products of bytes in 32 bits
# Blocks and panels with a rest, and more rows than are multiplied at a time.
SIZES = (((50, 64), 1), ((1, 32), 17), ((264, 1312), 40), ((17, 2080), 300))


def has_byte_rows(kind: str) -> bool:
    """Whether a format's codes are multiplied by bytes: sums of 16 bits are too small for some."""
    return selected_set().name in WIDE_SUMS or kind not in ("Q8_0", "IQ4_NL", "IQ4_XS")


def has_byte_tiles(kind: str) -> bool:
    """Whether 256 columns share a scale, of rows and of weights, which are rounded to bytes."""
    return kind in ("Q4_K", "Q5_K", "Q6_K") and selected_set().name in WIDE_SUMS


def group_columns(kind: str) -> int:
    return 256 if has_byte_tiles(kind) else 32


def byte_rows(x: Tensor, kind: str) -> Tensor:
    """Round rows to bytes, float64. Columns of a group share a scale, a 127th of the greatest."""
    groups = x.float().unflatten(1, (-1, group_columns(kind)))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=2.0**-126)
    return ((groups * (1 / scale)).round().double() * scale.double()).flatten(1)


def byte_weights(kind: str, blocks: np.ndarray) -> Tensor:
    """Return the weights, float64, as products with rows of 8 bits round them (byte_tiles.cpp)."""
    if not has_byte_tiles(kind):
        return exact(kind, blocks).double()
    greatest_code = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 32}[kind]
    minima = exact(kind, changed_blocks(kind, blocks, scale=0)).double()
    products = exact(kind, changed_blocks(kind, blocks, scale=1, minimum=0)).double()
    greatest = exact(kind, changed_blocks(kind, blocks, scale=1, minimum=0, largest_codes=True))
    bound = greatest.unflatten(1, (-1, 256)).abs().amax(-1, keepdim=True).clamp(min=greatest_code)
    factor = ((127 if kind == "Q6_K" else 255) * 32768 / bound).round().clamp(max=32767).double()
    codes = ((products.unflatten(1, (-1, 256)) * factor + 2**14) / 2**15).floor()
    size, offset = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1], HALVES[kind][0]
    tiles = blocks.reshape(len(blocks), -1, size)
    scale = torch.from_numpy(tiles[..., offset : offset + 2].copy().view(np.float16)).double()
    return (codes * (scale * 2**15 / factor)).flatten(1) + minima


def changed_blocks(
    kind: str,
    blocks: np.ndarray,
    scale: float | None = None,
    minimum: float | None = None,
    largest_codes: bool = False,
) -> np.ndarray:
    """Return blocks with other scales, and with codes of the greatest absolute value."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    changed = blocks.reshape(len(blocks), -1, size).copy()
    for value, offset in zip((scale, minimum), HALVES[kind], strict=False):
        if value is not None:
            changed[..., offset : offset + 2] = np.array([value], np.float16).view(np.uint8)
    if largest_codes and kind == "Q6_K":
        changed[..., :192] = 0  # a code of -32
    elif largest_codes:
        changed[..., 16:] = 255
    return changed.reshape(blocks.shape)


def require_product(actual: Tensor, x: Tensor, weights: Tensor, added: Tensor | float = 0) -> None:
    """Check a product of rounded rows up to the rounding of sums in float32 and to bfloat16."""
    expected = x @ weights.T + added
    size = x.abs() @ weights.abs().T
    assert ((actual.double() - expected).abs() <= 2**-8 * expected.abs() + 2e-6 * (1 + size)).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_those_of_rows_rounded_to_bytes(kind: str) -> None:
    for size, count in SIZES:
        bias = torch.randn(size[0] + 16).bfloat16()
        one = make_matrix(kind, size, bias)
        x = inputs(count, one.values.shape[1])
        actual = many_rows(one.matrix(), x, threads=3, row_bits=8)
        if has_byte_rows(kind):
            weights = byte_weights(kind, blocks_of(kind, one))
            require_product(actual, byte_rows(x, kind), weights, bias[: size[0]].double())
        else:
            assert torch.equal(actual, many_rows(one.matrix(), x, threads=1))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    for size, count in SIZES:
        one = make_matrix(kind, size)
        x = inputs(count, one.values.shape[1])
        together = many_rows(one.matrix(), x, threads=3, row_bits=8)
        for i in {0, count // 2, count - 1}:
            alone = many_rows(one.matrix(), x[i : i + 1].clone(), threads=1, row_bits=8)
            assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_only_more_rows_than_a_small_step_has_are_bytes(kind: str, dtype: torch.dtype) -> None:
    one = make_matrix(kind, (48, 512))
    usual = one.linear(dtype, row_bits=0 if dtype is torch.bfloat16 else 16)
    for count in (1, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1):
        x = inputs(count, one.values.shape[1])
        expected = usual(x)
        if count > MAX_KERNEL_ROWS:
            expected = many_rows(one.matrix(), x, threads=1, row_bits=8)
        assert torch.equal(one.linear(dtype, row_bits=8)(x), expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_rounded_relative_to_the_greatest_of_each_group(kind: str) -> None:
    one = make_matrix(kind, (48, 512))
    columns = one.values.shape[1]
    sizes = 2.0 ** torch.randint(-30, 30, (9, columns), generator=torch.Generator().manual_seed(5))
    x = (inputs(9, columns).float() * sizes).bfloat16()
    # Zeros, and numbers near both ends of those that floats can represent.
    x[1], x[2, :40], x[3] = 0, 0, x[3] * 2.0**-100 * 2.0**-30
    x[4] = inputs(9, columns)[4] * 2.0**100
    x[5, ::2], x[6, 32:] = 2.0**-133, 2.0**-126
    actual = many_rows(one.matrix(), x, threads=1, row_bits=8).double()
    rounded = byte_weights(kind, blocks_of(kind, one))
    width = group_columns(kind)
    groups, weights = (each.double().abs().unflatten(1, (-1, width)) for each in (x, rounded))
    expected = x.double() @ rounded.T
    slack = (groups.amax(-1) / 253) @ weights.sum(-1).T
    size = x.double().abs() @ rounded.abs().T
    assert ((actual - expected).abs() <= slack + 2**-8 * size + 1e-30).all()
    assert 0 < x[3].abs().max() < 1e-30  # so the row is compared without that slack, too
    assert ((actual - expected)[3].abs() <= slack[3] + 2**-8 * size[3] + 2**-126).all()
    assert not actual[1].any()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_greatest_codes_do_not_overflow(kind: str) -> None:
    """Codes at the ends of their range, times rows at the ends of theirs."""
    for byte in (0x00, 0x77, 0x7F, 0x80, 0xFF):
        blocks = repeated_codes(kind, byte)
        one = MatrixCase(exact(kind, blocks), packed(kind, blocks), None)
        x = torch.ones(4, one.values.shape[1]).bfloat16()
        x[1], x[2, ::2], x[3, : x.shape[1] // 2] = -1, -1, -1
        actual = many_rows(one.matrix(), x, 1, row_bits=8)
        require_product(actual, byte_rows(x, kind), byte_weights(kind, blocks))


def blocks_of(kind: str, one: MatrixCase) -> np.ndarray:
    """Return the blocks of `make_matrix`."""
    rows, columns = one.values.shape
    return random_blocks(kind, rows, columns, rows)


def packed(kind: str, blocks: np.ndarray) -> Matrix:
    return pack(from_gguf(FORMATS[kind], torch.from_numpy(blocks)))


def repeated_codes(kind: str, byte: int) -> np.ndarray:
    """Make blocks of 16 rows that are a repeated byte, but for the scales in float16."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = random_blocks(kind, 16, 256).reshape(16, -1, size)
    is_scale = torch.zeros(size, dtype=torch.bool)
    for offset in HALVES.get(kind, (0,)):
        is_scale[offset : offset + (1 if kind == "MXFP4" else 2)] = True
    blocks[..., ~is_scale.numpy()] = byte
    return blocks.reshape(16, -1)


@pytest.mark.parametrize("kind", FORMATS)
def test_nonfinite_numbers_make_their_row_nan(kind: str) -> None:
    one = make_matrix(kind, (50, 512))
    x = inputs(20, one.values.shape[1])
    before = many_rows(one.matrix(), x, threads=1, row_bits=8)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x[7, 77] = wrong
        after = many_rows(one.matrix(), x, threads=1, row_bits=8)
        assert after[7].isnan().all()
        rest = torch.arange(20) != 7
        assert torch.equal(after[rest], before[rest])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "MXFP4"])
def test_the_error_of_byte_rows(kind: str) -> None:
    one = make_matrix(kind, (64, 2048))
    x = inputs(64, one.values.shape[1])
    expected = x.double() @ one.values.double().T

    def error(**settings: Any) -> float:
        actual = many_rows(one.matrix(), x, threads=2, **settings).double()
        return float((actual - expected).norm() / expected.norm())

    assert 2 * error() < error(row_bits=8) < (0.012 if has_byte_tiles(kind) else 0.01)
