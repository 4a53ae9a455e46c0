"""Sizes that fill no register, block or group: attention and decoding against plain products."""

import math
from dataclasses import replace

import pytest
import torch
from compiled.test_decoding import by_torch, last
from packed_model import packed_model, spec_of
from torch import Tensor

from kvkeep import SessionGroup
from kvkeep.cache import AttentionConfig, KVCache, Layout, Rope, Segment, Window
from kvkeep.cache.quantised import dequantise
from kvkeep.cache.rope import rotate
from kvkeep.cache.step import ChunkStep
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.chunk import ChunkAttention

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

CHUNKS = (2, 13, 16, 17, 31, 33, 64, 65, 3, 129)  # that leave 2, 15, 31, 48, 79 ... cells
HEADS = [(1, 1, 32), (7, 1, 64), (3, 3, 96), (10, 2, 128)]


def empty(heads: int, kv_heads: int, head_dim: int, bits: int, size: int | None) -> KVCache:
    """Return a cache of one layer with one segment of at most `size` cells."""
    layout = Layout(1, kv_heads, head_dim, torch.bfloat16, torch.device("cpu"), bits, bits)
    frequencies = tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    cache = KVCache(
        layout, AttentionConfig(heads, Rope(frequencies, layout.device), head_dim**-0.5)
    )
    cache.segments = [Segment(layout, size or 10_000)]
    cache.window = Window(size)
    return cache


def plainly(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attend naively: the output, `[n, heads * d]`, and each softmax's log sum, `[heads, n]`.

    q: `[n, heads, d]`, keys, values: `[kv_heads, cells, d]`, seen: `[n, cells]`.
    """
    groups = q.shape[1] // keys.shape[0]
    keys, values = (x.double().repeat_interleave(groups, 0) for x in (keys, values))
    scores = torch.einsum("nhd,hcd->hnc", q.double(), keys) / math.sqrt(q.shape[2])
    scores.masked_fill_(~seen, -math.inf)
    shares = scores.softmax(-1)
    return torch.einsum("hnc,hcd->nhd", shares, values).flatten(1), scores.logsumexp(-1)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("size", [None, 37])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_chunks_of_any_length_over_any_number_of_cells(
    heads: int, kv_heads: int, head_dim: int, size: int | None, bits: int
) -> None:
    kernels, random = kernel_library(), torch.Generator().manual_seed(heads)
    assert kernels is not None
    cache = empty(heads, kv_heads, head_dim, bits, size)
    rope, times = cache.rope, torch.empty(0, dtype=torch.int64)
    held = torch.empty(2, kv_heads, 0, head_dim)
    for n in CHUNKS:
        q, k, v = (
            torch.randn(n, count, head_dim, generator=random).bfloat16()
            for count in (heads, kv_heads, kv_heads)
        )
        first = cache.time
        with torch.inference_mode(), cache.step(n) as step:
            assert isinstance(step, ChunkStep)
            step.log_sums = torch.full((1, heads, n), math.nan)
            results = ChunkAttention(step, kernels).attend(0, q, k, v)
        now = torch.arange(first, first + n)
        rotation = rope.rotation_at(now)
        keys = torch.cat((held[0], rotate(k, rotation).transpose(0, 1).float()), 1)
        values = torch.cat((held[1], v.transpose(0, 1).float()), 1)
        times = torch.cat((times, now))
        seen = times <= now[:, None]
        if size is not None:
            seen &= times > now[:, None] - size
        expected, log_sums = plainly(rotate(q, rotation), keys, values, seen)
        assert (results.double() - expected).abs().max() < 0.025
        assert (step.log_sums[0].double() - log_sums).abs().max() < 0.005
        # What quantised cells are worth is another matter: they are looked at as they are kept.
        segment = cache.segments[-1]
        cells = segment.read(0, segment.length)
        held = torch.stack(
            [dequantise(x, torch.float32)[0] for x in (cells.stored_keys, cells.stored_values)]
        )
        times = cells.positions


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 1, "kv_heads": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 17},
        {"heads": 7, "kv_heads": 1, "hidden_size": 96, "intermediate_size": 160, "vocab_size": 31},
        {"heads": 5, "kv_heads": 5, "hidden_size": 224, "intermediate_size": 32, "vocab_size": 33},
    ],
    ids=["one head", "seven to one", "five to five"],
)
def test_decode_steps_over_any_number_of_cells(sizes: dict[str, int], bits: int | None) -> None:
    spec = replace(spec_of(64), layers=1, **sizes)
    model = packed_model(spec, bits)  # type: ignore[arg-type]
    ids = [(7 * i * i + i) % (spec.vocab_size - 1) + 1 for i in range(260)]
    errors = []
    exact = by_torch(model, torch.float32)
    for other in (by_torch(model, torch.bfloat16), model):
        sessions = [each.session(policy="full") for each in (exact, other)]
        results: list[Tensor] = []
        for cells in (0, 1, 14, 15, 16, 17, 62, 63, 64, 65, 254, 255, 256, 257):
            for session in sessions:
                missing = ids[len(session.tokens) : cells]
                if missing:
                    session.feed(missing)
                session.score([ids[cells]], token_by_token=True)
            results.append((last(sessions[0]) - last(sessions[1])).square().mean())
        errors.append(torch.stack(results))
    assert errors[1].mean() <= 1.2 * errors[0].mean()
    assert errors[1].max() <= 2 * errors[0].max()


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33])
def test_any_number_of_sequences_gives_the_same_bits_as_each_alone(count: int) -> None:
    model = packed_model(replace(spec_of(32), layers=1, vocab_size=41), 4)
    parent = model.session(max_kv_size=70)
    parent.feed([i % 40 + 1 for i in range(63)])
    together, alone = ([parent.fork() for _ in range(count)] for _ in range(2))
    for forks in (together, alone):
        for index, fork in enumerate(forks):
            fork.feed([index % 40 + 1])
    group = SessionGroup(together)
    for _ in range(9):
        assert group.next_tokens() == [session.next_token() for session in alone]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(last(one), last(other))
