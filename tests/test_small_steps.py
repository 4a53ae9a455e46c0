"""Small steps: up to 16 fed tokens are computed as rows, each to the bit as if it came alone."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_model import packed_model, spec_of, spec_with_states

from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import MAX_ROWS
from kvkeep.executors import new_decoder
from kvkeep.model import Model
from kvkeep.session.session import Session
from tests.examples import examples

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

PROMPT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(900)]
KINDS = [
    "dense",
    "llama",
    "gemma3",
    "gemma4-experts",
    "gpt-oss",
    "qwen3-moe",
    "convolution",
    "delta_net",
    "mamba2",
]
HEAD_DIMS = {"gemma3": 256, "gemma4-experts": 128}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "sliding": {"max_kv_size": 70, "keep": 3},
    "tiny": {"max_kv_size": 9, "keep": 2},
    "shift": {"max_kv_size": 60, "policy": "shift", "discard": 7},
    "self_extend": {"policy": "self_extend", "group": 2, "window": 32},
    "archive": {"policy": "archive", "max_kv_size": 96},
}
EXACT = ("full", "sliding", "shift")  # that models with states take as well


@cache
def model_of(kind: str) -> Model:
    """Return a random model whose matrices are packed only, as those of a GGUF file."""
    if kind == "dense":
        return packed_model(spec_of(), None)
    is_hybrid = kind in ("convolution", "delta_net", "mamba2")
    spec = spec_with_states(kind) if is_hybrid else spec_of(HEAD_DIMS.get(kind, 64), kind)
    model = packed_model(spec, 4)
    decoder = model.decoder
    tensors = {name: x for name, x in decoder.tensors.items() if name not in decoder.packed}
    packed_only = new_decoder(spec, tensors, decoder.packed)
    assert packed_only.executor.row_limit == MAX_ROWS
    return Model("packed", model.folder, packed_only, model.text)


def require_same_bits(one: Session, other: Session) -> None:
    assert one.tokens == other.tokens
    assert one.cache.serials() == other.cache.serials()
    assert one.cache.time == other.cache.time
    assert torch.equal(one.logits, other.logits)
    for mine, yours in zip(one.cache.all_segments, other.cache.all_segments, strict=True):
        assert mine.position_map == yours.position_map
        assert mine.first_place == yours.first_place
        assert mine.read(0, mine.length).same_bits(yours.read(0, yours.length))
    for name, state in one.cache.recurrent_states.items():
        assert torch.equal(state, other.cache.recurrent_states[name])


def grown(kind: str, name: str, bits: str | None, first: int, is_forked: bool) -> Session:
    session = model_of(kind).session(**SETTINGS[name], kv_bits=bits)
    session.feed(PROMPT[:first])
    return session.fork() if is_forked else session


@settings(max_examples=examples(25))
@given(st.data())
def test_a_small_step_gives_the_bits_of_its_tokens_one_by_one(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    hybrid = kind in KINDS[-3:]
    name = data.draw(st.sampled_from(EXACT if hybrid else sorted(SETTINGS)))
    bits = data.draw(st.sampled_from([None, None, "8", "8/4", "4"]))
    first = data.draw(st.integers(1, 160))
    parts = data.draw(st.lists(st.integers(1, MAX_ROWS), min_size=1, max_size=6))
    is_forked, sampled = data.draw(st.booleans()), data.draw(st.integers(0, 2))
    together, alone = (grown(kind, name, bits, first, is_forked) for _ in range(2))
    for size in parts:
        ids = PROMPT[len(together.tokens) :][:size]
        together.feed(ids)
        for token in ids:
            alone.feed([token])
        require_same_bits(together, alone)
        if sampled:
            alone.feed([together.next_token() for _ in range(sampled)])
            require_same_bits(together, alone)


@pytest.mark.parametrize("bits", ["8", "4"])
def test_quantised_cells_move_to_the_far_segment_with_the_same_bits(bits: str) -> None:
    together, alone = (grown("gemma3", "self_extend", bits, 50, False) for _ in range(2))
    for _ in range(6):
        ids = PROMPT[len(together.tokens) :][:MAX_ROWS]
        together.feed(ids)
        for token in ids:
            alone.feed([token])
        require_same_bits(together, alone)
