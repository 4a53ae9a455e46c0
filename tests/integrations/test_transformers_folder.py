"""`--model transformers:FOLDER`, and groups, prefix stores and engines on such a model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import kvkeep
from benchmarks.architectures import small_model
from kvkeep import PrefixStore, SessionGroup
from kvkeep.engine import Engine, GenerationRequest
from kvkeep.errors import BadModelFile, InvalidArgument, ModelError, UnsupportedModel
from kvkeep.model import Model
from kvkeep.model_facts import model_facts

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def transformers_model(tiny_folder: Path) -> Model:
    return kvkeep.load_model(f"transformers:{tiny_folder}", dtype="float32")


def run_kvkeep(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvkeep", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_command_line_generates_text(tiny_folder: Path, tmp_path: Path) -> None:
    options = ["--prompt", "The sea is", "--max-tokens", "12", "--temperature", "0"]
    result = run_kvkeep("generate", "--model", f"transformers:{tiny_folder}", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "cells" in result.stderr


def test_a_packed_model_is_refused_with_a_remedy() -> None:
    with pytest.raises(UnsupportedModel, match="kvkeep models export smollm2-135m-instruct"):
        kvkeep.load_model("transformers:smollm2-135m-instruct")
    with pytest.raises(InvalidArgument, match="transformers"):
        kvkeep.load_model("transformers:anything", weights="int8")
    with pytest.raises(InvalidArgument, match="after it is loaded"):
        model_facts("transformers:anything")


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_without_all_tensors_is_refused(
    tiny_folder: Path, tmp_path: Path, tied: bool
) -> None:
    """transformers would leave them random. A tied head needs none of its own."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    model.save_pretrained(folder)
    assert kvkeep.load_model(f"transformers:{folder}").spec.layers == 1
    tensors = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in tensors) != tied
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = r"lacks 1 tensors of a LlamaForCausalLM, among them model\.layers\.0\.mlp\.up_proj"
    with pytest.raises(BadModelFile, match=message):
        kvkeep.load_model(f"transformers:{folder}")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"intermediate_size": 50}, BadModelFile, r"cannot load .* \(RuntimeError: "),
        ({"num_attention_heads": 0}, BadModelFile, r"\(ZeroDivisionError: .*check its config"),
        ({"hidden_act": "nonsense"}, BadModelFile, r"\(KeyError: 'nonsense'\)"),
        ({"quantization_config": {"quant_method": "awq"}}, ModelError, "pip install gptqmodel"),
        (None, BadModelFile, r"\(SafetensorError: .*fetch the model again"),
    ],
    ids=["another shape", "no heads", "unknown activation", "missing package", "truncated"],
)
def test_what_transformers_cannot_load_is_a_model_error(
    tiny_folder: Path,
    tmp_path: Path,
    config: dict[str, object] | None,
    error: type[ModelError],
    message: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    if config is None:
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **(config or {})}))
    with pytest.raises(ModelError, match=message) as raised:
        kvkeep.load_model(f"transformers:{folder}")
    assert type(raised.value) is error


def test_a_group_generates_the_same_as_each_session_alone(transformers_model: Model) -> None:
    prompts = ["The sea is", "A very small house stood by the road, and in it", "One, two,"]

    def prefilled_sessions() -> list[kvkeep.Session]:
        sessions = [transformers_model.session(16, 2) for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.feed(prompt)
        return sessions

    group, alone = SessionGroup(prefilled_sessions()), prefilled_sessions()
    for _ in range(12):
        expected = [session.next_token() for session in alone]
        assert group.next_tokens() == expected


def test_a_prefix_store_reuses_prompts(transformers_model: Model, tmp_path: Path) -> None:
    store, prompt = PrefixStore(tmp_path), "The garden was green. " * 60
    first = transformers_model.session(1024, policy="full", prefill_step=64, store=store)
    assert first.feed(prompt).reused == 0
    second = transformers_model.session(1024, policy="full", prefill_step=64, store=store)
    assert second.feed(prompt + "And").reused > 200
    plain = transformers_model.session(1024, policy="full", prefill_step=64)
    plain.feed(prompt + "And")
    assert (second.logits - plain.logits).abs().max() < 1e-3


def test_an_engine_serves_requests(transformers_model: Model) -> None:
    with Engine(transformers_model) as engine:
        requests = [
            GenerationRequest(tuple(transformers_model.text.encode(text)), 8)
            for text in ("The sea is", "One, two,")
        ]
        generations = [engine.generate(request) for request in requests]
        assert all(generation.text() for generation in generations)


def test_scores_equal_those_of_kvkeeps_own_forward(
    transformers_model: Model, tiny_folder: Path
) -> None:
    own = kvkeep.load_model(str(tiny_folder), dtype="float32")
    text = "The quick brown fox jumps over the lazy dog. " * 3
    models = (transformers_model, own)
    scores, expected = (model.session(24, 2).score(text)[1:] for model in models)
    assert torch.allclose(scores, expected, atol=1e-3)


def test_a_hybrid_continues_from_stored_prefixes(tmp_path: Path) -> None:
    model, ids = (
        kvkeep.from_transformers(small_model("qwen3_next")),
        [i % 90 + 3 for i in range(400)],
    )
    fresh, *stored = (
        model.session(1000, prefill_step=128, store=store)
        for store in (None, PrefixStore(tmp_path), PrefixStore(tmp_path))
    )
    fresh.feed(ids)
    assert [session.feed(ids).reused for session in stored] == [0, 256]
    assert torch.equal(stored[1].logits, fresh.logits)
