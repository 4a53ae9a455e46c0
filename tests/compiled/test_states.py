"""State layers in the compiled decode step: short convolutions, Gated DeltaNet and Mamba-2."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from compiled.test_decoding import by_torch, last
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_model import STATE_LAYERS, packed_model, spec_with_states
from session_state import same, whole_state
from torch import Tensor

from kvkeep import SessionGroup
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor, unsupported_reason
from kvkeep.compiled.states import KernelMixer
from kvkeep.errors import NonFiniteLogits
from kvkeep.model import Model
from kvkeep.models.spec.cells import group_layout
from kvkeep.models.weights.packing import MatrixBits
from kvkeep.session.session import Session
from tests.examples import examples

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

TOKENS = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(130)]
PROMPT, WRITTEN = TOKENS[:70], TOKENS[70:100]


def fed(model: Model, tokens: list[int] = PROMPT) -> Session:
    session = model.session(max_kv_size=48, prefill_step=40)
    session.feed(tokens)
    return session


def evaluate(model: Model, written: bool) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the logits after a prompt and after each of some more tokens, and the last states."""
    session = fed(model)
    rows = [last(session)]
    for token in WRITTEN:
        session.score([token], token_by_token=written)
        rows.append(last(session))
    return torch.stack(rows), session.cache.recurrent_states


@cache
def by_torch_of(
    kind: str, bits: MatrixBits | None
) -> tuple[tuple[Tensor, Mapping[str, Tensor]], ...]:
    """Return `evaluate` of torch in float32 and bfloat16, once for all instruction sets."""
    model = packed_model(spec_with_states(kind), bits)
    dtypes = (torch.float32, torch.bfloat16)
    return tuple(evaluate(by_torch(model, dtype), written=True) for dtype in dtypes)


@pytest.mark.parametrize(("bits", "written"), [(None, True), (4, True), (4, False)])
@pytest.mark.parametrize("kind", STATE_LAYERS)
def test_logits_are_as_near_to_float32_as_torch_in_bfloat16(
    kind: str, bits: MatrixBits | None, written: bool
) -> None:
    model = packed_model(spec_with_states(kind), bits)
    assert isinstance(model.decoder.executor, CompiledExecutor)
    (exact, exact_states), (rounded, rounded_states) = by_torch_of(kind, bits)
    reference = (rounded - exact).square().mean()
    logits, states = evaluate(model, written)
    assert exact.abs().max() > 5
    assert (logits - exact).square().mean() <= 1.2 * reference
    for name, state in exact_states.items():
        assert states[name].dtype == rounded_states[name].dtype
        reference = (rounded_states[name] - state).square().mean()
        assert (states[name] - state).square().mean() <= 2 * reference


@pytest.mark.parametrize("kind", STATE_LAYERS)
def test_a_group_of_forks_gives_the_same_bits_as_each_session_alone(kind: str) -> None:
    """States that forks share are read by each and written to by none."""
    model = packed_model(spec_with_states(kind), 8)
    shared = fed(model)
    before = whole_state(shared)

    def made() -> list[Session]:
        sessions = [shared.fork() for _ in range(3)]
        for session, (first, end) in zip(sessions, pairwise((0, 1, 3, 7)), strict=True):
            session.feed(WRITTEN[first:end])
        return [*sessions, fed(model, TOKENS[:1]), shared.fork()]

    together, alone = made(), made()
    group, threads = SessionGroup(together), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        tokens = [group.next_tokens() for _ in range(4)]
    finally:
        torch.set_num_threads(threads)
    for session, sampled, one in zip(alone, zip(*tokens, strict=True), together, strict=True):
        assert [session.next_token() for _ in range(4)] == list(sampled)
        assert same(whole_state(one)["states"], whole_state(session)["states"])
        assert torch.equal(last(one), last(session))
    assert same(whole_state(shared), before)


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from(sorted(STATE_LAYERS)), st.lists(st.integers(1, 70), min_size=2, max_size=5))
def test_a_chunk_is_the_same_to_the_bit_however_it_is_cut(kind: str, counts: list[int]) -> None:
    mixer, projections = mixer_and_projections(kind, sum(counts))
    states: list[dict[str, Tensor]] = [{}, {}]
    whole = mixer(0, projections, {}, states[0])
    parts = []
    for cut in zip(*(torch.split(x, counts) for x in projections), strict=True):
        old, states[1] = states[1], {}
        parts.append(mixer(0, cut, old, states[1]))
    assert torch.equal(torch.cat(parts), whole)
    assert states[0].keys() == states[1].keys()
    for name, state in states[0].items():
        assert torch.equal(states[1][name], state)


@pytest.mark.parametrize("kind", STATE_LAYERS)
def test_a_chunk_is_the_same_on_any_number_of_threads(kind: str) -> None:
    mixer, projections = mixer_and_projections(kind, 70)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            states: dict[str, Tensor] = {}
            results.append((mixer(0, projections, {}, states), states))
    finally:
        torch.set_num_threads(threads)
    for out, states in results[1:]:
        assert torch.equal(out, results[0][0])
        for name, state in states.items():
            assert torch.equal(state, results[0][1][name])


def mixer_and_projections(kind: str, count: int) -> tuple[KernelMixer, list[Tensor]]:
    """Return the kernels of a model's state layers, and random projections of a layer's input."""
    layers, executor = STATE_LAYERS[kind], model_of(kind).decoder.executor
    assert isinstance(executor, CompiledExecutor)
    assert executor.state_mixer is not None
    values = layers.value_heads * layers.value_dim
    widths = {
        "convolution": [3 * layers.channels],
        "delta_net": [layers.channels, values, layers.value_heads, layers.value_heads],
        "mamba2": [values + layers.channels + layers.value_heads],
    }[layers.kind]
    random = torch.Generator().manual_seed(count)
    projections = [torch.randn(count, width, generator=random).bfloat16() for width in widths]
    return executor.state_mixer, projections


@cache
def model_of(kind: str) -> Model:
    return packed_model(spec_with_states(kind), None)


@pytest.mark.parametrize("kind", STATE_LAYERS)
def test_a_step_that_fails_changes_no_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model(spec_with_states(kind), 4)
    session = fed(model)
    before, expected = whole_state(session), session.fork().next_token()

    def failing(hidden: Tensor) -> Tensor:
        raise NonFiniteLogits("broken")

    with monkeypatch.context() as patch:
        patch.setattr(model.decoder.executor, "logits", failing)
        with pytest.raises(NonFiniteLogits):
            session.feed(TOKENS[:1])
    assert same(whole_state(session), before)
    assert session.next_token() == expected


def test_unsupported_widths_are_named() -> None:
    spec = spec_with_states("mamba2")
    layout = group_layout(spec, spec.groups[0], torch.bfloat16, torch.device("cpu"))
    assert not unsupported_reason(spec, layout)
    assert spec.states is not None
    for changes, reason in (
        ({"key_dim": 40, "channels": 9 * 32 + 2 * 3 * 40}, "key_dim 40"),
        ({"value_heads": 8, "key_heads": 3, "channels": 8 * 32 + 2 * 3 * 48}, "value heads"),
    ):
        changed = replace(spec, states=replace(spec.states, **changes))
        assert reason in unsupported_reason(changed, layout)
