"""Products with few rows, and unpacked matrices."""

from dataclasses import dataclass

import pytest
import torch
from random_blocks import exact, random_blocks
from torch import Tensor

from kvkeep.compiled.binding import kernel_library, raise_for_status, require_same_interface
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.compiled.matrices import MAX_KERNEL_ROWS, PackedLinear
from kvkeep.compiled.operands import matrix_operand
from kvkeep.compiled.structures import DENSE_FORMATS, CMatrix
from kvkeep.errors import KernelMismatch, NonFiniteLogits
from kvkeep.models.weights.formats import FORMATS
from kvkeep.models.weights.packing import Matrix, from_gguf, pack

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

KINDS = [*FORMATS, *DENSE_FORMATS]
# Of one block and more, with a rest and without; of more columns than are unpacked at a time.
SIZES = [(16, 32), (48, 96), (50, 64), (1, 32), (264, 192), (17, 1312)]


def product(matrix: CMatrix, x: Tensor, threads: int = 2) -> Tensor:
    kernels = kernel_library()
    assert kernels is not None
    out = torch.full((x.shape[0], matrix.rows), torch.nan)
    raise_for_status(
        kernels.kvkeep_product(matrix, x.data_ptr(), x.shape[0], out.data_ptr(), threads)
    )
    return out


def many_rows(matrix: CMatrix, x: Tensor, threads: int, row_bits: int = 16) -> Tensor:
    kernels = kernel_library()
    assert kernels is not None
    out = torch.full((x.shape[0], matrix.rows), torch.nan, dtype=torch.bfloat16)
    raise_for_status(
        kernels.kvkeep_prompt_product(
            matrix, x.data_ptr(), x.shape[0], out.data_ptr(), threads, row_bits
        )
    )
    return out


@dataclass
class MatrixCase:
    """A matrix operand. values: of weight, float32."""

    values: Tensor
    weight: Matrix
    bias: Tensor | None

    def matrix(self, rounded: bool = False) -> CMatrix:
        bias = None if self.bias is None else self.bias.data_ptr()
        return matrix_operand("matrix", self.weight, tuple(self.values.shape), bias, rounded)

    def linear(self, dtype: torch.dtype = torch.bfloat16, row_bits: int = 0) -> PackedLinear:
        kernels = kernel_library()
        assert kernels is not None
        bias = None if self.bias is None else self.bias[: len(self.values)]
        return PackedLinear(kernels, self.matrix(rounded=True), bias, self.weight, dtype, row_bits)


def make_matrix(
    kind: str | torch.dtype, size: tuple[int, int], bias: Tensor | None = None
) -> MatrixCase:
    """Make a matrix of a size; formats with longer tiles get the columns that they need."""
    rows, columns = size
    if isinstance(kind, torch.dtype):
        plain = torch.randn(size, generator=torch.Generator().manual_seed(rows)).to(kind)
        return MatrixCase(plain.float(), plain, bias)
    blocks = random_blocks(
        kind, rows, -(-columns // FORMATS[kind].tile_width) * FORMATS[kind].tile_width, rows
    )
    packed_matrix = pack(from_gguf(FORMATS[kind], torch.from_numpy(blocks)))
    return MatrixCase(exact(kind, blocks), packed_matrix, bias)


def inputs(count: int, columns: int) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).bfloat16()


def multiplies_as_floats(kind: str | torch.dtype) -> bool:
    """Whether few rows are multiplied with a format of weights as floats, not as integers."""
    return isinstance(kind, torch.dtype) or (
        kind.startswith("IQ4") and selected_set().name not in ("amx", "avx512bf16", "avxvnni")
    )


def rounded_rows(x: Tensor, kind: str | torch.dtype) -> Tensor:
    """Round rows to integers as products with packed weights do, float64: see src/integers.h."""
    if multiplies_as_floats(kind):
        return x.double()
    groups = x.double().unflatten(1, (-1, 32))
    exponent = groups.abs().amax(-1, keepdim=True).log2().floor()
    scale = 2 ** (exponent - 13).clamp(min=-126)
    return ((groups / scale).round() * scale).flatten(1)


def require_near(actual: Tensor, x: Tensor, values: Tensor, added: Tensor | float) -> None:
    """Check a product up to the rounding of its sum in float32."""
    expected = x.double() @ values.double().T
    size = x.double().abs() @ values.double().abs().T
    assert ((actual.double() - expected - added).abs() <= 1e-6 * (1 + size)).all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_equal_those_of_the_unpacked_matrix(
    kind: str | torch.dtype, size: tuple[int, int]
) -> None:
    some = torch.randn(size[0] + 16).bfloat16()  # with room to read whole blocks of 16
    for bias, counts in ((some, (1, 3, 13, 17)), (None, (8,))):
        one = make_matrix(kind, size, bias)
        added = 0.0 if bias is None else bias[: size[0]].double()
        for count in counts:
            x = inputs(count, one.values.shape[1])
            require_near(product(one.matrix(), x), rounded_rows(x, kind), one.values, added)
            require_near(product(one.matrix(rounded=True), x), x, one.values.bfloat16(), added)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_rounded_relative_to_the_greatest_of_each_group(kind: str) -> None:
    one = make_matrix(kind, (48, 512))
    generator = torch.Generator().manual_seed(5)
    sizes = 2.0 ** torch.randint(-30, 30, (9, one.values.shape[1]), generator=generator)
    x = (inputs(9, one.values.shape[1]).float() * sizes).bfloat16()
    x[1], x[2, :40], x[3] = 0, 0, x[3] * 2.0**-110
    expected = x.double() @ one.values.double().T
    groups, weights = (each.double().abs().unflatten(1, (-1, 32)) for each in (x, one.values))
    # What is within 2^6 of the greatest is exact, and the rest is off by half of a step of it.
    slack = (2.0**-14 * groups.amax(-1)) @ weights.sum(-1).T
    size = x.double().abs() @ one.values.double().abs().T
    actual = product(one.matrix(), x)
    assert ((actual.double() - expected).abs() <= slack + 1e-6 * size + 1e-30).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_nonfinite_rows_are_reported(kind: str) -> None:
    one = make_matrix(kind, (48, 512))
    x = inputs(5, one.values.shape[1])
    product(one.matrix(), x)
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x[3, 77] = wrong
        with pytest.raises(NonFiniteLogits):
            product(one.matrix(), x)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rounded", [False, True])
def test_a_row_gives_the_same_bits_alone_and_among_others(
    kind: str | torch.dtype, rounded: bool
) -> None:
    one = make_matrix(kind, (264, 1312))
    x = inputs(17, one.values.shape[1])
    together = product(one.matrix(rounded), x)
    alone = [product(one.matrix(rounded), row[None].contiguous(), threads=1) for row in x]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_unpacked_weights_are_rounded_as_by_torch(
    kind: str | torch.dtype, size: tuple[int, int]
) -> None:
    one = make_matrix(kind, size)
    expected, linear = one.values.bfloat16(), one.linear()
    assert torch.equal(linear.dense(), expected)
    rows = torch.tensor([0, size[0] - 1, size[0] // 2])
    assert torch.equal(linear.take_rows(rows), expected[rows])
    for beyond in (-1, size[0]):
        with pytest.raises(KernelMismatch, match=f"0 to {size[0] - 1}"):
            linear.take_rows(torch.tensor([beyond]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", torch.float32, torch.bfloat16], ids=str)
def test_many_rows_are_multiplied_by_torch(
    kind: str | torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = dtype.itemsize * 48 * 1312
    monkeypatch.setattr("kvkeep.compiled.matrices._SCRATCH_BYTES", size)  # in several parts
    bias = torch.randn(264 + 16).bfloat16()
    one = make_matrix(kind, (264, 1312), bias)
    x = inputs(MAX_KERNEL_ROWS + 5, one.values.shape[1])
    expected = torch.nn.functional.linear(
        x.double(), one.values.bfloat16().double(), bias[:264].double()
    )
    for count in (1, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1, MAX_KERNEL_ROWS + 5):
        actual = one.linear(dtype)(x[:count])
        assert actual.dtype is torch.bfloat16
        assert (
            (actual.double() - expected[:count]).abs() <= 2**-8 * (0.1 + expected[:count].abs())
        ).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_many_rows_as_integers_have_the_bits_of_few(kind: str) -> None:
    # Blocks and panels with a rest, and more rows than are multiplied at a time.
    for size, count in (((50, 64), 1), ((1, 32), 17), ((264, 1312), 40), ((17, 512), 300)):
        one = make_matrix(kind, size, torch.randn(size[0] + 16).bfloat16())
        linear, x = one.linear(row_bits=16), inputs(count, one.values.shape[1])
        few = product(one.matrix(), x)
        actual = many_rows(one.matrix(), x, threads=3)
        if multiplies_as_floats(kind):
            size = x.float().abs() @ one.values.abs().T
            assert ((actual.float() - few).abs() <= 2**-8 * few.abs() + 1e-4 * (1 + size)).all()
        else:
            assert torch.equal(actual, few.bfloat16())
        assert torch.equal(linear(x[: count // 2]), actual[: count // 2])
        x[count // 2, 5] = torch.inf
        with_others = linear(x)
        assert with_others[count // 2].isnan().all()
        rest = torch.arange(count) != count // 2
        assert torch.equal(with_others[rest], actual[rest])


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "IQ4_NL"])
def test_products_as_integers_are_nearer_than_those_of_rounded_weights(kind: str) -> None:
    one = make_matrix(kind, (64, 2048))
    x = inputs(64, one.values.shape[1])
    expected = x.double() @ one.values.double().T

    def error(linear: PackedLinear) -> float:
        return float((linear(x).double() - expected).norm() / expected.norm())

    # Half of a step of bfloat16, uniformly: what rounding the result alone costs.
    assert error(one.linear(row_bits=16)) < 0.0017 < error(one.linear())


@pytest.mark.parametrize("row", [0, 17, 49])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_single_nonfinite_result_is_reported(row: int, wrong: float) -> None:
    x = inputs(9, 64)
    bias = torch.zeros(66).bfloat16()
    bias[50:] = torch.nan  # of rows that there are not
    one = make_matrix(torch.bfloat16, (50, 64), bias)
    for at in (0, 4, 8):
        product(one.matrix(), x)
        before = x[at, 5].clone()
        x[at, 5] = wrong
        with pytest.raises(NonFiniteLogits):
            product(one.matrix(), x)
        x[at, 5] = before
        bias[row] = wrong
        with pytest.raises(NonFiniteLogits):
            product(one.matrix(), x)
        bias[row] = 0


def test_results_below_normal_floats_are_zeros_in_calls_alone() -> None:
    """Instructions with such results take many times as long."""
    weight, x = torch.full((512, 32), 1e-20), torch.zeros(1, 32).bfloat16()
    x[0, 0] = 1e-20
    one = MatrixCase(weight, weight, None)
    torch.set_num_threads(2)
    assert not product(one.matrix(), x, threads=2).any()
    assert torch.full((2**18,), 1e-20).square().all()  # by torch, in the same threads


def test_the_kernels_of_each_set_have_our_structures() -> None:
    kernels = kernel_library()
    assert kernels is not None
    require_same_interface(kernels)
