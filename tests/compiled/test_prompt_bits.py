"""Models whose prompts are multiplied by rows of 8 bits: KVKEEP_PROMPT_BITS=8."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from available_sets import sets_here
from blake3 import blake3
from engine.workload import Create, Fork, Request
from packed_model import packed_model, spec_of, spec_with_states
from torch import Tensor

import kvkeep
from kvkeep import Sampling, SessionGroup, Snapshot
from kvkeep.compiled.binding import kernel_library
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.compiled.matrices import MAX_KERNEL_ROWS
from kvkeep.compiled.products import ProductExecutor, prompt_products
from kvkeep.engine import Engine
from kvkeep.errors import InvalidArgument
from kvkeep.executors import new_decoder
from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.primitives import EMBEDDING, LM_HEAD
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.packing import MatrixBits, as_tensor
from kvkeep.session.session import Session
from kvkeep.storage.objects.folder import FolderObjectStore
from kvkeep.storage.prefixes.shared import SharedPrefixCache
from kvkeep.storage.prefixes.store import BLOCK_TOKENS, PrefixStore

kernels_here = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels here")

PROMPT = [(i * i * 7 + 3 * i) % 250 + 1 for i in range(65)]
BYTES = "packed weights by rows of 8 bits"
Load = Callable[..., Model]


@pytest.fixture
def has_fast_bf16() -> bool:
    return False


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, has_fast_bf16: bool) -> Load:
    """Load a model with a value of the variable, on a processor with fast bfloat16 or without."""
    monkeypatch.setattr("kvkeep.compiled.products.has_fast_bf16", lambda: has_fast_bf16)
    for sets in ("_INTEGER_SETS", "_BYTE_SETS"):
        monkeypatch.setattr(f"kvkeep.compiled.products.{sets}", (selected_set().name,))

    def loaded(
        bits: str, spec: ModelSpec | None = None, weight_bits: MatrixBits | None = 4
    ) -> Model:
        spec = spec or spec_of()
        monkeypatch.setenv("KVKEEP_PROMPT_BITS", bits)
        model = packed_model(spec, weight_bits)
        packed = model.decoder.packed
        tensors = {k: v for k, v in model.decoder.tensors.items() if k not in packed}
        return Model("packed", model.folder, new_decoder(spec, tensors, packed), model.text)

    return loaded


def by_torch_in_float32(model: Model) -> Model:
    """Return the model with unrounded weights, computed by PyTorch."""
    decoder = model.decoder
    weights = {name: as_tensor(x, torch.float32) for name, x in decoder.packed.items()}
    tensors = {name: tensor.float() for name, tensor in decoder.tensors.items()} | weights
    if model.spec.tied_head:
        tensors[EMBEDDING] = tensors.pop(LM_HEAD)
    return Model("float32", model.folder, Decoder(model.spec, tensors), model.text)


def after_prompt(model: Model, **settings: Any) -> Session:
    session = model.session(**settings)
    session.feed(PROMPT)
    return session


def logits(session: Session) -> Tensor:
    assert session.logits is not None
    return session.logits.float()


@kernels_here
@pytest.mark.parametrize(
    "spec", [spec_of(), spec_with_states("delta_net")], ids=["llama", "states"]
)
def test_prompts_are_less_exact_and_still_near_to_float32(load: Load, spec: ModelSpec) -> None:
    usual, bytes_ = load("16", spec), load("8", spec)
    expected = logits(after_prompt(by_torch_in_float32(usual)))
    errors = [
        float((logits(after_prompt(model)) - expected).norm() / expected.norm())
        for model in (usual, bytes_)
    ]
    assert 2 * errors[0] < errors[1] < 0.2


@kernels_here
@pytest.mark.parametrize("has_fast_bf16", [False, True])
@pytest.mark.parametrize("spec", [spec_of(), spec_with_states("mamba2")], ids=["llama", "states"])
def test_decode_and_small_steps_keep_their_bits(load: Load, spec: ModelSpec) -> None:
    usual, bytes_ = load("", spec), load("8", spec)
    snapshot = after_prompt(usual).snapshot()
    sessions = [usual.restore(snapshot), bytes_.restore(snapshot)]
    for count in (1, 5, MAX_KERNEL_ROWS):
        for session in sessions:
            session.feed(PROMPT[:count])
            session.next_token()
        assert torch.equal(*map(logits, sessions))
    groups = [[session.fork() for _ in range(3)] for session in sessions]
    for forks in groups:
        SessionGroup(forks).next_tokens([Sampling(temperature=1, seed=i) for i in range(3)])
    for one, other in zip(*groups, strict=True):
        assert torch.equal(logits(one), logits(other))
    assert not torch.equal(*(logits(after_prompt(model)) for model in (usual, bytes_)))


@kernels_here
def test_a_large_group_decodes_as_each_session_alone(load: Load) -> None:
    model = load("8", spec_with_states("delta_net"))
    decoder = model.decoder
    executor = ProductExecutor(model.spec, decoder.tensors, decoder.packed)
    decoder.executor = executor
    assert BYTES in executor.name
    parent = after_prompt(model)
    alone, *forks = (parent.fork() for _ in range(MAX_KERNEL_ROWS + 2))
    SessionGroup(forks).next_tokens([Sampling(temperature=0) for _ in forks])
    alone.next_token(Sampling(temperature=0))
    assert all(torch.equal(logits(fork), logits(alone)) for fork in forks)


@kernels_here
@pytest.mark.parametrize("has_fast_bf16", [False, True])
def test_a_model_without_packed_matrices_has_its_usual_name(load: Load) -> None:
    usual, bytes_ = (load(bits, weight_bits=None) for bits in ("16", "8"))
    assert bytes_.decoder.executor.name == usual.decoder.executor.name
    assert torch.equal(*(logits(after_prompt(model)) for model in (usual, bytes_)))


@kernels_here
def test_the_variable_is_read_when_a_model_is_loaded(load: Load, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    usual, bytes_ = load("16"), load("8")
    expected = [logits(after_prompt(model)) for model in (usual, bytes_)]
    for bits in ("8", "16"):
        monkeypatch.setenv("KVKEEP_PROMPT_BITS", bits)
        assert all(
            torch.equal(logits(after_prompt(model)), one)
            for model, one in zip((usual, bytes_), expected, strict=True)
        )


@kernels_here
def test_another_value_is_reported_as_not_bit_exact(load: Load, tmp_path: Path) -> None:
    usual, bytes_ = load("16"), load("8")
    after_prompt(usual).snapshot().save(tmp_path / "a.kvkeep")
    snapshot = Snapshot.load(tmp_path / "a.kvkeep")
    assert load("").restore(snapshot).exactness.bit_exact
    kernels = f"compiled {selected_set().name}, prompts in float32"
    assert bytes_.restore(snapshot).exactness.differs == (
        f"kernels: {kernels}, packed weights as integers saved, {kernels}, {BYTES} here",
    )


@kernels_here
@pytest.mark.parametrize("has_fast_bf16", [True])
def test_torch_in_bfloat16_is_replaced_on_request_only(load: Load) -> None:
    names = [load(bits).decoder.executor.name for bits in ("16", "8")]
    name = f"compiled {selected_set().name}"
    assert names == [name, f"{name}, prompts in bfloat16, {BYTES}"]


@kernels_here
def test_a_shared_prefix_cache_keeps_cells_of_both_apart(load: Load, tmp_path: Path) -> None:
    objects, prompt = FolderObjectStore(tmp_path), (PROMPT * 4)[: BLOCK_TOKENS + 4]

    def reused(model: Model) -> int:
        store = SharedPrefixCache(objects, bytes(32), model.arithmetic)
        count = model.session(store=store).feed(prompt).reused
        store.flush()
        return count

    usual, bytes_ = load("16"), load("8")
    assert [reused(model) for model in (usual, bytes_, bytes_, usual)] == [
        *(0, 0),
        *(BLOCK_TOKENS, BLOCK_TOKENS),
    ]


@kernels_here
def test_a_local_prefix_cache_keeps_cells_of_both_apart(load: Load, tmp_path: Path) -> None:
    prompt = (PROMPT * 4)[: BLOCK_TOKENS + 4]
    usual, bytes_ = load("16"), load("8")
    for first, second in ((usual, bytes_), (bytes_, usual)):
        store = PrefixStore(tmp_path / first.decoder.executor.name)
        counts = [
            model.session(store=store).feed(prompt).reused
            for model in (first, second, second, first)
        ]
        assert counts == [0, 0, BLOCK_TOKENS, BLOCK_TOKENS]


@kernels_here
@pytest.mark.parametrize("place", ["stores", "folder"])
@pytest.mark.parametrize("bits", [("16", "8"), ("8", "16")], ids=str)
def test_an_engine_keeps_cells_of_both_apart(
    load: Load, place: str, bits: tuple[str, str], tmp_path: Path
) -> None:
    """Those of its prefix store, and of a saved session for texts that begin like its own."""
    first, second = map(load, bits)
    texts = [(*(PROMPT * 5)[:300], *[i] * 20) for i in (7, 8, 9)]

    def reused(model: Model, text: tuple[int, ...], is_first: bool = False) -> int:
        with Engine(model, settings={"max_kv_size": 2048}, **{place: tmp_path}) as engine:
            if place == "folder" and not is_first:
                Fork("a", None, f"b{text[-1]}").do(engine)  # which loads it
            elif place == "folder":
                Create("a", ()).do(engine)
            name = "a" if place == "folder" and is_first else None
            (result,) = Request(text, 2, session=name).do(engine)
            return result.reuse.tokens

    assert reused(first, texts[0], is_first=True) == 0
    assert [
        reused(model, text) for model, text in zip((second, first), texts[1:3], strict=True)
    ] == [0, 256]


@kernels_here
def test_snapshots_and_default_prefixes_keep_their_fingerprint(load: Load) -> None:
    usual, bytes_ = load("16").fingerprint, load("8").fingerprint
    assert usual.to_dict() == bytes_.to_dict()
    assert usual.digest() == replace(bytes_, rounding="").digest() != bytes_.digest()
    assert (
        usual.digest() == blake3(json.dumps(usual.to_dict(), sort_keys=True).encode()).hexdigest()
    )


@pytest.mark.parametrize(
    ("name", "has_fast_bf16", "expected"),
    [
        ("amx", True, "bfloat16"),
        ("amx", False, f"float32, {BYTES}"),
        ("avx512bf16", True, f"bfloat16, {BYTES}"),
        ("avx512", False, "float32"),
        ("avx2", False, f"float32, {BYTES}"),
    ],
)
def test_the_products_of_each_set(
    name: str, has_fast_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name not in sets_here():
        pytest.skip(f"no {name} here")
    monkeypatch.setattr("kvkeep.compiled.products.has_fast_bf16", lambda: has_fast_bf16)
    monkeypatch.setenv("KVKEEP_ISA", name)
    monkeypatch.setenv("KVKEEP_PROMPT_BITS", "8")
    assert str(prompt_products()) == expected
    monkeypatch.setenv("KVKEEP_PROMPT_BITS", "16")
    usual = "" if has_fast_bf16 else ", packed weights as integers"
    assert str(prompt_products()) == expected.replace(f", {BYTES}", usual)


@pytest.mark.parametrize("name", ["no-owner/no-model", "transformers:/no/folder"])
@pytest.mark.parametrize("text", ["7", "08", "int8", " 8"])
def test_another_value_is_refused_before_anything_is_loaded(
    text: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_PROMPT_BITS", text)
    message = f"KVKEEP_PROMPT_BITS must be 8 or 16; found '{text}'"
    with pytest.raises(InvalidArgument, match=message):
        kvkeep.load_model(name)
