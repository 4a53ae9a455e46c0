"""GGUF files of models with state layers, computed by the kernels."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from models.gguf_kinds import TOKENS, random_model
from models.gguf_writing import write

import kvkeep
from kvkeep import SessionGroup
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor
from kvkeep.model import Model
from kvkeep.model_facts import model_facts
from kvkeep.models.layers.decoder import Decoder

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")
KINDS = ["lfm2", "qwen3.5", "granite4-h", "falcon-h1-norms"]


@pytest.fixture(params=KINDS)
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    kind = request.param
    return str(write(tmp_path / "m.gguf", kind, random_model(kind), Type.Q8_0))


def logits_of(model: Model) -> torch.Tensor:
    session, logits = model.session(policy="full", prefill_step=20), []
    session.feed(TOKENS[:40])
    logits.append(session.logits)
    for token in TOKENS[40:]:
        session.feed([token])
        logits.append(session.logits)
    return torch.stack(logits)


def test_packed_matrices_are_as_close_to_float32_as_torch(file: str) -> None:
    packed, exact = kvkeep.load_model(file), kvkeep.load_model(file, dtype="float32")
    assert isinstance(packed.decoder.executor, CompiledExecutor)
    assert packed.decoder.packed
    unpacked = kvkeep.load_model(file, weights="bf16")
    decoder = Decoder(unpacked.spec, unpacked.decoder.tensors)
    by_torch = Model("torch", unpacked.folder, decoder, unpacked.text)
    expected = logits_of(exact)
    errors = [
        (logits_of(model) - expected).square().mean().sqrt()
        for model in (packed, unpacked, by_torch)
    ]
    assert errors[0] <= 1.1 * errors[2]
    assert errors[1] <= 1.1 * errors[2]


def test_a_packed_group_equals_its_sessions_alone(file: str) -> None:
    model = kvkeep.load_model(file)
    sessions = [model.session(48), model.session(48)]
    sessions[0].feed(TOKENS)
    sessions[1].feed(TOKENS[:9])
    alone = [session.fork() for session in sessions]
    group = SessionGroup([session.fork() for session in sessions])
    for _ in range(5):
        for session, other in zip(group.sessions, alone, strict=True):
            assert torch.equal(session.logits, other.logits)
        for token, other in zip(group.next_tokens(), alone, strict=True):
            assert other.next_token() == token


def test_facts_count_states_and_packed_matrices(file: str) -> None:
    model, facts = kvkeep.load_model(file), model_facts(file)
    assert facts.state_layers == len(model.spec.states.layers)
    session = model.session(48)
    session.feed(TOKENS)
    states = session.cache.recurrent_states.values()
    assert facts.state_bytes == sum(state.nbytes for state in states)
    assert "Q8_0" in facts.formats
    assert str(model.path).startswith("compiled kernels")
