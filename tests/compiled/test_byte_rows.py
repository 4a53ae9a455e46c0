"""Products of a prompt's rows of 8 bits, as with KVKEEP_PROMPT_BITS=8."""

from typing import Any

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
from kvkeep.models.weights.packing import from_gguf, pack

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

# Blocks and panels with a rest, and more rows than are multiplied at a time.
SIZES = (((50, 64), 1), ((1, 32), 17), ((264, 1312), 40), ((17, 2080), 300))


def has_byte_rows(kind: str) -> bool:
    """Whether a format's codes are multiplied by bytes: sums of 16 bits are too small for some."""
    sums_are_wide = selected_set().name in ("amx", "avx512bf16", "avxvnni")
    return sums_are_wide or kind not in ("Q8_0", "IQ4_NL", "IQ4_XS")


def byte_rows(x: Tensor) -> Tensor:
    """Round rows to bytes, float64: 32 columns share a scale, a 127th of the greatest of them."""
    groups = x.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=2.0**-126)
    return ((groups * (1 / scale)).round().double() * scale.double()).flatten(1)


def require_product(actual: Tensor, x: Tensor, one: MatrixCase, added: Tensor | float = 0) -> None:
    """Check a product of rounded rows up to the rounding of sums in float32 and to bfloat16."""
    expected = x @ one.values.double().T + added
    size = x.abs() @ one.values.double().abs().T
    assert ((actual.double() - expected).abs() <= 2**-8 * expected.abs() + 2e-6 * (1 + size)).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_those_of_rows_rounded_to_bytes(kind: str) -> None:
    for size, count in SIZES:
        bias = torch.randn(size[0] + 16).bfloat16()
        one = make_matrix(kind, size, bias)
        x = inputs(count, one.values.shape[1])
        actual = many_rows(one.matrix(), x, threads=3, row_bits=8)
        if has_byte_rows(kind):
            require_product(actual, byte_rows(x), one, bias[: size[0]].double())
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
    expected = x.double() @ one.values.double().T
    groups, weights = (each.double().abs().unflatten(1, (-1, 32)) for each in (x, one.values))
    slack = (groups.amax(-1) / 253) @ weights.sum(-1).T
    size = x.double().abs() @ one.values.double().abs().T
    assert ((actual - expected).abs() <= slack + 2**-8 * size + 1e-30).all()
    assert 0 < x[3].abs().max() < 1e-30  # so the row is compared without that slack, too
    assert ((actual - expected)[3].abs() <= slack[3] + 2**-8 * size[3] + 2**-126).all()
    assert not actual[1].any()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_greatest_codes_do_not_overflow(kind: str) -> None:
    """Codes at the ends of their range, times rows at the ends of theirs."""
    for byte in (0x00, 0x77, 0x7F, 0x80, 0xFF):
        one = repeated_codes(kind, byte)
        x = torch.ones(4, one.values.shape[1]).bfloat16()
        x[1], x[2, ::2], x[3, : x.shape[1] // 2] = -1, -1, -1
        require_product(many_rows(one.matrix(), x, 1, row_bits=8), byte_rows(x), one)


def repeated_codes(kind: str, byte: int) -> MatrixCase:
    """Make a matrix of 16 rows whose blocks are a repeated byte, but for the scales in float16."""
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = random_blocks(kind, 16, 256).reshape(16, -1, size)
    is_scale = torch.zeros(size, dtype=torch.bool)
    for offset in HALVES.get(kind, (0,)):
        is_scale[offset : offset + (1 if kind == "MXFP4" else 2)] = True
    blocks[..., ~is_scale.numpy()] = byte
    blocks = blocks.reshape(16, -1)
    packed_matrix = pack(from_gguf(FORMATS[kind], torch.from_numpy(blocks)))
    return MatrixCase(exact(kind, blocks), packed_matrix, None)


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

    assert 2 * error() < error(row_bits=8) < 0.01
