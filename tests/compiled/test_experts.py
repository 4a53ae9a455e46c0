"""Mixtures of experts in the compiled decode step: who is chosen, and who is read."""

from pathlib import Path

import pytest
import torch
from compiled.test_decoding import by_torch, forked, last, logits_of
from compiled.test_families import MADE_OF_EXPERTS, written
from packed_model import packed_model, spec_of
from torch import Tensor

from kvkeep import SessionGroup, load_model
from kvkeep.compiled.binding import library
from kvkeep.compiled.decoder import CompiledExecutor, unsupported_reason
from kvkeep.errors import KernelMismatch
from kvkeep.executors import new_decoder
from kvkeep.model import Model
from kvkeep.model_facts import model_facts
from kvkeep.models.spec.cells import cell_layout
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.tensors import is_router, matrices
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels here")

KINDS = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe", "gemma4-experts"]
TOKENS = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(60)]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_on_any_number_of_threads(kind: str, bits: int | None) -> None:
    model = packed_model(spec_of(64, kind), bits)  # type: ignore[arg-type]
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(logits_of(model, {"max_kv_size": 50}, 9))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_more_than_a_block_says_what_each_says_alone(kind: str) -> None:
    """Up to 20 sequences choose the same expert, which is multiplied 16 rows at a time."""
    model = packed_model(spec_of(32, kind), 8)

    def made() -> list[Session]:
        session = model.session(max_kv_size=40)
        session.feed(TOKENS)
        return forked(session, 20)

    together, alone = made(), made()
    group = SessionGroup(together)
    for _ in range(3):
        assert group.next_tokens() == [session.next_token() for session in alone]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(last(one), last(other))


def decoded(model: Model) -> Tensor:
    """`[n, vocab]`, token by token."""
    session, found = model.session(policy="full"), []
    for token in TOKENS[:20]:
        session.feed([token])
        found.append(last(session))
    return torch.stack(found)


def changed(spec: ModelSpec, model: Model, tensors: dict[str, Tensor]) -> Model:
    held = dict(model.decoder.tensors) | tensors
    return Model("changed", model.folder, new_decoder(spec, held), model.text)


@pytest.mark.parametrize("by", ["kernels", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_scores_the_lower_index_is_chosen_and_no_other_is_read(kind: str, by: str) -> None:
    """All experts score alike; what those beyond the first few hold would be seen at once."""
    spec = spec_of(64, kind)
    model = packed_model(spec, None)
    tensors = dict(model.decoder.tensors)
    level = {name: 0 * x for name, x in tensors.items() if name.endswith("mlp.gate.weight")}
    beyond = {
        name: torch.full_like(x, torch.nan)
        for name, x in tensors.items()
        if ".experts." in name and int(name.split(".")[5]) >= spec.experts_per_token
    }
    assert level
    assert beyond
    with_all, with_few = changed(spec, model, level), changed(spec, model, level | beyond)
    if by == "torch":
        with_all, with_few = (by_torch(each, torch.float32) for each in (with_all, with_few))
    assert isinstance(with_all.decoder.executor, CompiledExecutor) == (by == "kernels")
    assert torch.equal(decoded(with_all), decoded(with_few))


def test_kernels_refuse_more_experts_of_a_token_than_there_are() -> None:
    spec = spec_of(64, "mixtral")
    model = packed_model(spec, None)
    object.__setattr__(spec, "experts_per_token", 8)
    with pytest.raises(KernelMismatch, match="1 to 7 experts for each token; found 8"):
        new_decoder(spec, model.decoder.tensors)


def test_widths_of_what_a_model_has_not_stand_in_no_way() -> None:
    spec = spec_of(64, "mixtral")
    layout = cell_layout(spec, packed_model(spec, None).decoder.tensors)
    object.__setattr__(spec, "intermediate_size", 331)
    assert not unsupported_reason(spec, layout)
    object.__setattr__(spec, "expert_size", 100)
    assert "groups of 32" in unsupported_reason(spec, layout)


@pytest.mark.best_set
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", MADE_OF_EXPERTS)
def test_experts_are_rounded_and_routers_are_not(
    kind: str,
    weights: str | None,
    tmp_path: Path,
    smollm2_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is said of a token's reading is what is read."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    folder = str(written(tmp_path / kind, kind, smollm2_folder))
    model = load_model(folder, weights=weights)
    names = set(matrices(model.spec)) if weights else set()
    assert set(model.decoder.packed) == {name for name in names if not is_router(name)}
    session = model.session(policy="full")
    session.feed(TOKENS[:30])
    assert len([session.next_token() for _ in range(3)]) == 3

    facts, executor = model_facts(folder, weights=weights), model.decoder.executor
    assert isinstance(executor, CompiledExecutor)
    read, held = executor.matrix_bytes(), [*model.decoder.packed.values()]
    assert facts.bytes_per_token == sum(read.values())
    assert sum(facts.formats.values()) == len(read) < len(matrices(model.spec))
    held += model.decoder.tensors.values()
    assert facts.weight_bytes_held == sum(each.nbytes for each in held)
    layers = {"qwen3-moe": 1, "gpt-oss": 5, "gemma4-experts": 9}
    assert facts.sparse_layers == layers.get(kind, 3)
    of_experts = sum(".experts." in name for name in read)
    assert of_experts == 3 * facts.experts_per_token * facts.sparse_layers
