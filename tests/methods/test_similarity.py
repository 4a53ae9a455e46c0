"""The search for the most similar vector, by kernels and by torch, against plain products."""

import math

import pytest
import torch
from available_sets import sets_here
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.compiled.binding import kernel_library
from kvkeep.compression.methods import similarity
from kvkeep.compression.methods.similarity import most_similar, most_similar_older
from tests.examples import examples

SHAPES = {
    "layers": st.integers(1, 2),
    "kv_heads": st.integers(1, 3),
    "rows": st.integers(1, 70),
    "columns": st.integers(1, 70),
    "width": st.sampled_from([2, 16, 32, 34, 64, 96]),
    "seed": st.integers(0, 2**31),
}


@pytest.fixture(params=[*filter("torch".__ne__, sets_here()), "torch"], scope="module")
def backend(request):
    """The instruction set of the kernels, or "torch"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVKEEP_ISA", request.param)
        if request.param == "torch":
            patch.setattr(similarity, "BLOCK_ROWS", 16)
        yield request.param


@given(**SHAPES)
@settings(max_examples=examples(60))
def test_most_similar_finds_the_largest_product(
    backend, layers, kv_heads, rows, columns, width, seed
) -> None:
    x, candidates = _directions(seed, (layers, kv_heads), width, rows, columns)
    most, which = most_similar(x, candidates)
    products = x.double() @ candidates.double().transpose(-1, -2)
    torch.testing.assert_close(most.double(), products.amax(-1), rtol=0, atol=4e-3)
    named = products.gather(-1, which.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(named, products.amax(-1), rtol=0, atol=8e-3)


@given(**SHAPES)
@settings(max_examples=examples(60))
def test_most_similar_older_compares_only_with_older_vectors(
    backend, layers, kv_heads, rows, columns, width, seed
) -> None:
    x, _ = _directions(seed, (layers, kv_heads), width, rows, columns)
    products = x.double() @ x.double().transpose(-1, -2)
    older = torch.ones(rows, rows, dtype=torch.bool).tril(-1)
    expected = products.masked_fill(~older, -math.inf).amax(-1)
    torch.testing.assert_close(most_similar_older(x).double(), expected, rtol=0, atol=4e-3)


def test_a_strided_slice_gives_the_same_result_as_its_copy(backend) -> None:
    x, _ = _directions(3, (4, 3), 64, 40, 1)
    part = x[1:3, :, 5:30]
    assert torch.equal(most_similar_older(part), most_similar_older(part.clone()))


def test_the_first_of_equal_vectors_is_returned() -> None:
    if kernel_library() is None:
        pytest.skip("torch does not specify which one it returns")
    same = torch.nn.functional.normalize(torch.ones(1, 1, 50, 32), dim=-1).bfloat16()
    assert most_similar(same, same)[1].eq(0).all()


def _directions(seed: int, heads: tuple[int, int], width: int, *counts: int):
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(*heads, count, width, generator=generator) for count in counts)
    return [torch.nn.functional.normalize(x, dim=-1).bfloat16() for x in drawn]
