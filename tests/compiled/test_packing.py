"""Packed matrices keep the values of their source."""

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from random_blocks import exact, random_blocks

from kvkeep.models.weights.formats import FORMATS, GROUP_COLUMNS
from kvkeep.models.weights.packing import (
    BLOCK_ROWS,
    from_gguf,
    is_packable,
    pack,
    packed_shapes,
    quantise,
)

BITS = st.sampled_from((4, 8))
NAMES = st.sampled_from(sorted(FORMATS))


@given(NAMES, st.integers(1, 40), st.integers(1, 3), st.integers(0, 9))
def test_packing_blocks_of_a_file_changes_no_value(name, rows, tiles, seed):  # type: ignore[no-untyped-def]
    kind = FORMATS[name]
    blocks = random_blocks(name, rows, tiles * kind.tile_width, seed)
    expected = exact(name, blocks)
    assert expected.isfinite().all()
    matrix = from_gguf(kind, torch.from_numpy(blocks))
    assert torch.equal(matrix.values(), expected)
    there = pack(matrix)
    assert there.shape == expected.shape
    shapes = (tuple(there.data.shape), tuple(there.scales.shape))
    assert shapes == packed_shapes(kind, *expected.shape)
    back = there.unpack()
    assert torch.equal(back.codes, matrix.codes)
    assert all(
        torch.equal(*pair) for pair in zip(back.scale_parts, matrix.scale_parts, strict=True)
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_matrix_is_about_as_large_as_in_its_file(name: str) -> None:
    kind = FORMATS[name]
    span, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    assert (span, size) == (kind.tile_width, kind.block_bytes)
    assert (
        BLOCK_ROWS * size
        <= span // GROUP_COLUMNS * kind.group_code_bytes + kind.tile_scale_bytes
        <= 1.03 * BLOCK_ROWS * size
    )


@given(BITS, st.integers(1, 40), st.integers(1, 4), st.integers(0, 9))
def test_quantising_changes_no_weight_by_more_than_half_a_step(bits, rows, groups, seed):  # type: ignore[no-untyped-def]
    weights = torch.randn(
        rows, groups * GROUP_COLUMNS, generator=torch.Generator().manual_seed(seed)
    )
    matrix = pack(quantise(weights, bits)).unpack()
    steps = matrix.scale_parts[0].float().flatten(1).repeat_interleave(GROUP_COLUMNS, 1)
    # A scale or minimum in float16 is itself off by up to 2 ** -11 of it.
    slack = 2**-11 * (16 if bits == 4 else 128) * steps + 2**-11 * weights.abs().max()
    assert ((matrix.values() - weights).abs() <= steps / 2 + slack).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_constant_group_is_exact(bits):  # type: ignore[no-untyped-def]
    weights = torch.zeros(3, 2 * GROUP_COLUMNS)
    weights[1] = 0.5
    assert torch.allclose(quantise(weights, bits).values(), weights, atol=1e-3)


def test_only_rows_of_whole_tiles_can_be_packed() -> None:
    assert is_packable(FORMATS["Q8_0"], 1, 32)
    assert not is_packable(FORMATS["Q8_0"], 16, 48)
    assert is_packable(FORMATS["Q4_K"], 3, 512)
    assert not is_packable(FORMATS["Q4_K"], 3, 128)
