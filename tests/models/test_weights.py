"""Tensors from safetensors files, mapped, checked against the spec."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import small_tokenizer, write_small_folder
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvkeep
from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.model_facts import model_facts
from kvkeep.models.spec.config import read_spec
from kvkeep.models.weights.tensors import check_tensors, read_shapes, read_tensors

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=16)),
        LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        MistralForCausalLM(MistralConfig(**SIZES)),
        Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        Qwen3ForCausalLM(Qwen3Config(**SIZES, attention_bias=True)),
    ],
    ids=["llama", "llama-bias", "llama-tied", "mistral", "qwen2", "qwen3"],
)
@pytest.mark.parametrize("shard", ["10GB", "30KB"])
def test_reads_what_transformers_saves(tmp_path: Path, model: Any, shard: str) -> None:
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "30KB")
    tensors = read_tensors(tmp_path, torch.float32, CPU, progress=False)
    check_tensors(read_spec(tmp_path), read_shapes(tmp_path), tmp_path)
    assert read_shapes(tmp_path) == {name: tuple(t.shape) for name, t in tensors.items()}
    saved = model.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, saved[name])
    assert saved.keys() - tensors.keys() <= {"lm_head.weight"}


def test_another_dtype_is_converted(llama: Path) -> None:
    exact = read_tensors(llama, torch.float32, CPU, progress=False)
    short = read_tensors(llama, torch.bfloat16, CPU, progress=False)
    assert all(tensor.dtype == torch.bfloat16 for tensor in short.values())
    for name, tensor in short.items():
        assert torch.equal(tensor, exact[name].bfloat16())


def private_memory() -> int:
    """Bytes that this process holds for itself: pages of mapped files are the system's."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def test_weights_are_mapped_not_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({str(i): torch.zeros(8, 1 << 20, dtype=torch.bfloat16) for i in range(4)}, file)
    size, before = file.stat().st_size, private_memory()
    tensors = read_tensors(tmp_path, torch.bfloat16, CPU, progress=False)
    assert sum(tensor.nbytes for tensor in tensors.values()) > 0.99 * size
    assert private_memory() - before < size / 10
    maps = {Path(entry.path) for entry in psutil.Process().memory_maps()}
    assert file.resolve() in maps


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:4],
        lambda data: data[:200],
        lambda data: data[:-1],
        lambda data: b"GGUF" + data[4:],
        lambda data: data + b"more",
    ],
    ids=["empty", "no-header", "cut-header", "cut-data", "foreign", "longer"],
)
def test_a_damaged_file_is_named(llama: Path, tmp_path: Path, damage: Any) -> None:
    data = (llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(damage(data))
    with pytest.raises(BadModelFile, match=r"model\.safetensors"):
        read_tensors(tmp_path, torch.float32, CPU, progress=False)


def test_a_missing_or_shortened_shard_is_named(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path, max_shard_size="30KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.norm.weight"]
    save_file({"other": torch.zeros(1)}, tmp_path / shard)
    with pytest.raises(BadModelFile, match=shard):
        read_tensors(tmp_path, torch.float32, CPU, progress=False)
    (tmp_path / shard).unlink()
    with pytest.raises(BadModelFile, match=shard):
        read_tensors(tmp_path, torch.float32, CPU, progress=False)


def test_an_index_that_names_another_shard_for_a_tensor_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path, max_shard_size="30KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = next(x for x in index["weight_map"].values() if "00001" not in x)
    name = next(n for n, x in index["weight_map"].items() if x != shard)
    index["weight_map"][name] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(BadModelFile, match=rf"{shard} does not contain {name}"):
        kvkeep.load_model(str(write_tokenizer(tmp_path)), dtype="float32")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_integers_without_a_quantization_config_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    folder = write_small_folder(tmp_path / "model")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, folder / "model.safetensors")
    monkeypatch.setattr("kvkeep.loader.read_tensors", None)
    with pytest.raises(UnsupportedModel, match=rf"{name} has the dtype .*quantization_config"):
        kvkeep.load_model(str(folder), dtype="float32")
    with pytest.raises(UnsupportedModel, match=name):
        model_facts(str(folder))


def test_integers_that_no_text_needs_do_not_matter(tmp_path: Path) -> None:
    names = ("vision_tower.ids", "mlp.experts.up_proj_blocks", "mlp.experts.up_proj_scales")
    bytes_by_name = {name: torch.zeros(1, dtype=torch.uint8) for name in names}
    save_file(bytes_by_name, tmp_path / "model.safetensors")
    assert set(read_shapes(tmp_path, lambda name: "vision" not in name)) == set(names)
    with pytest.raises(UnsupportedModel, match=r"vision_tower\.ids"):
        read_shapes(tmp_path)


def write_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(small_tokenizer().to_str())
    return folder


def test_a_folder_without_safetensors_names_the_expected_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(BadModelFile, match=r"neither model\.safetensors nor"):
        read_tensors(tmp_path, torch.float32, CPU, progress=False)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone()
    save_file(tensors, file)
    kvkeep.load_model(str(folder), dtype="float32")
    tensors["lm_head.weight"][7, 3] += 1
    save_file(tensors, file)
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings"):
        kvkeep.load_model(str(folder), dtype="float32")
    tensors["lm_head.weight"] = embedding[:-1].clone()
    save_file(tensors, file)
    with pytest.raises(BadModelFile, match=r"lm_head\.weight"):
        kvkeep.load_model(str(folder), dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_with_a_bias_is_refused(tmp_path: Path, dtype: str) -> None:
    folder = write_small_folder(tmp_path / "model")
    file = folder / "model.safetensors"
    save_file({**load_file(file), "lm_head.bias": torch.zeros(256)}, file)
    with pytest.raises(UnsupportedModel, match=r"lm_head\.bias"):
        kvkeep.load_model(str(folder), dtype=dtype)


def test_missing_misshapen_and_unused_tensors_are_named(llama: Path) -> None:
    spec, shapes = read_spec(llama), read_shapes(llama)
    for name in shapes:
        without = {key: shape for key, shape in shapes.items() if key != name}
        with pytest.raises(BadModelFile, match=name):
            check_tensors(spec, without, llama)
        with pytest.raises(BadModelFile, match=name):
            check_tensors(spec, {**shapes, name: (3, *shapes[name])}, llama)
    for extra in (
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.norm.bias",
        "lm_head.bias",
        "score.weight",
    ):
        with pytest.raises(UnsupportedModel, match=extra):
            check_tensors(spec, {**shapes, extra: (48,)}, llama)
    check_tensors(spec, {**shapes, "model.rotary_emb.inv_freq": (4,)}, llama)
    with pytest.raises(BadModelFile, match="q_norm"):
        check_tensors(replace(spec, qk_norm=True), shapes, llama)


def test_a_config_of_huge_sizes_is_refused_by_the_shapes(llama: Path) -> None:
    spec, size = read_spec(llama), 1 << 40
    huge = replace(spec, vocab_size=size, hidden_size=size, intermediate_size=size)
    with pytest.raises(BadModelFile, match="has shape"):
        check_tensors(huge, read_shapes(llama), llama)
