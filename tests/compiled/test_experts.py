"""Mixtures of experts in the compiled decode step: which experts are chosen and read."""

from pathlib import Path

import pytest
import torch
from compiled.test_decoding import by_torch, forked, last, logits_of
from compiled.test_families import MADE_OF_EXPERTS, written
from packed_model import packed_model, spec_of
from torch import Tensor

from kvkeep import SessionGroup, load_model
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.decoder import CompiledExecutor, unsupported_reason
from kvkeep.errors import KernelMismatch
from kvkeep.executors import new_decoder
from kvkeep.model import Model
from kvkeep.model_facts import model_facts
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.tensors import is_router, matrix_shapes
from kvkeep.session.session import Session

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

KINDS = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "granite-moe", "gemma4-experts"]
KINDS += ["lfm2-moe", "gated-sigmoid"]
TOKENS = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(60)]


@pytest.mark.parametrize(
    ("kind", "bits"), [(kind, (None, 4)[number % 2]) for number, kind in enumerate(KINDS)]
)
def test_logits_are_the_same_on_any_number_of_threads(kind: str, bits: int | None) -> None:
    model = packed_model(spec_of(64, kind), bits)  # type: ignore[arg-type]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(logits_of(model, {"max_kv_size": 20}, 4))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# Others before releases.
IN_GROUPS = ("mixtral", "qwen2-moe", "gemma4-experts", "gated-sigmoid")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in IN_GROUPS else pytest.mark.slow) for kind in KINDS],
)
def test_a_group_larger_than_a_block_gives_the_same_bits_as_each_alone(kind: str) -> None:
    """Up to 20 sequences choose the same expert, which is multiplied 16 rows at a time."""
    model = packed_model(spec_of(32, kind), 8)

    def made() -> list[Session]:
        session = model.session(max_kv_size=40)
        session.feed(TOKENS)
        return forked(session, 20)

    together, alone = made(), made()
    group = SessionGroup(together)
    for _ in range(2):
        assert group.next_tokens() == [session.next_token() for session in alone]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(last(one), last(other))


def decoded(model: Model) -> Tensor:
    """Return the logits of tokens decoded one by one, `[n, vocab]`."""
    session, results = model.session(policy="full"), []
    for token in TOKENS[:8]:
        session.feed([token])
        results.append(last(session))
    return torch.stack(results)


def changed(spec: ModelSpec, model: Model, tensors: dict[str, Tensor]) -> Model:
    held = dict(model.decoder.tensors) | tensors
    return Model("changed", model.folder, new_decoder(spec, held), model.text)


@pytest.mark.parametrize("by", ["kernels", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_scores_choose_the_lower_indices_and_other_experts_are_not_read(
    kind: str, by: str
) -> None:
    """All experts score alike; the others hold weights that would change the result at once."""
    spec = spec_of(64, kind)
    model = packed_model(spec, None)
    tensors = dict(model.decoder.tensors)
    scoring = ("mlp.gate.weight", "mlp.expert_bias")
    level = {name: 0 * x for name, x in tensors.items() if name.endswith(scoring)}
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


def test_more_experts_per_token_than_experts_are_refused() -> None:
    spec = spec_of(64, "mixtral")
    model = packed_model(spec, None)
    object.__setattr__(spec, "experts_per_token", 8)
    with pytest.raises(KernelMismatch, match="1 to 7 experts for each token; found 8"):
        new_decoder(spec, model.decoder.tensors)


def test_unused_widths_do_not_make_a_model_unsupported() -> None:
    spec = spec_of(64, "mixtral")
    layout = packed_model(spec, None).decoder.new_cache().layout
    object.__setattr__(spec, "intermediate_size", 331)
    assert not unsupported_reason(spec, layout)
    object.__setattr__(spec, "expert_size", 100)
    assert "multiples of 32" in unsupported_reason(spec, layout)


@pytest.mark.best_set
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", MADE_OF_EXPERTS)
def test_experts_are_packed_and_routers_are_not(
    kind: str,
    weights: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also, `matrix_bytes` equals the bytes that a token reads."""
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    folder = str(written(tmp_path / kind, kind))
    model = load_model(folder, weights=weights)
    names = set(matrix_shapes(model.spec)) if weights else set()
    assert set(model.decoder.packed) == {name for name in names if not is_router(name)}
    session = model.session(policy="full")
    session.feed(TOKENS[:30])
    assert len([session.next_token() for _ in range(3)]) == 3

    facts, executor = model_facts(folder, weights=weights), model.decoder.executor
    assert isinstance(executor, CompiledExecutor)
    read, held = executor.matrix_bytes(), [*model.decoder.packed.values()]
    assert facts.bytes_per_token == sum(read.values())
    assert sum(facts.formats.values()) == len(read) < len(matrix_shapes(model.spec))
    held += model.decoder.tensors.values()
    assert facts.weight_bytes_held == sum(each.nbytes for each in held)
    layers = {"qwen3-moe": 1, "gpt-oss": 5, "gemma4-experts": 9}
    assert facts.sparse_layers == layers.get(kind, 3)
    of_experts = sum(".experts." in name for name in read)
    assert of_experts == 3 * facts.experts_per_token * facts.sparse_layers
