"""State layers in the compiled decode step: short convolutions, Gated DeltaNet and Mamba-2."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from compiled.test_decoding import by_torch, last
from packed_model import STATE_LAYERS, packed_model, spec_with_states
from session_state import same, whole_state
from torch import Tensor

from kvkeep import SessionGroup
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor, unsupported_reason
from kvkeep.errors import NonFiniteLogits
from kvkeep.model import Model
from kvkeep.models.spec.cells import group_layout
from kvkeep.models.weights.packing import MatrixBits
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

TOKENS = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(130)]
PROMPT, WRITTEN = TOKENS[:70], TOKENS[70:100]


def fed(model: Model, tokens: list[int] = PROMPT) -> Session:
    session = model.session(max_kv_size=48, prefill_step=40)
    session.feed(tokens)
    return session


def logits_of(model: Model, written: bool) -> Tensor:
    """Return the logits after the prompt and after each of some more tokens, `[n, vocab]`."""
    session = fed(model)
    rows = [last(session)]
    for token in WRITTEN:
        session.score([token], written=written)
        rows.append(last(session))
    return torch.stack(rows)


@cache
def by_torch_of(kind: str, bits: MatrixBits | None) -> tuple[Tensor, Tensor]:
    """Return torch's logits in float32 and bfloat16, computed once for all instruction sets."""
    model = packed_model(spec_with_states(kind), bits)
    exact, rounded = (
        logits_of(by_torch(model, dtype), written=True)
        for dtype in (torch.float32, torch.bfloat16)
    )
    return exact, rounded


@pytest.mark.parametrize(("bits", "written"), [(None, True), (4, True), (4, False)])
@pytest.mark.parametrize("kind", STATE_LAYERS)
def test_logits_are_as_near_to_float32_as_torch_in_bfloat16(
    kind: str, bits: MatrixBits | None, written: bool
) -> None:
    model = packed_model(spec_with_states(kind), bits)
    assert isinstance(model.decoder.executor, CompiledExecutor)
    exact, rounded = by_torch_of(kind, bits)
    reference = (rounded - exact).square().mean()
    compiled = (logits_of(model, written) - exact).square().mean()
    assert exact.abs().max() > 5
    assert compiled <= 1.2 * reference


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
