"""Conversion of GGUF files that were made from transformers models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from random_blocks import exact, random_blocks
from tiny_gguf import ONE, SIZES, Edit, gguf_name, tiny_llama, write_gguf
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.convert import convert
from kvkeep.models.spec.config import read_spec
from kvkeep.models.spec.rope import rope_spec
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.export import export
from kvkeep.models.weights.formats import FORMATS
from kvkeep.models.weights.packed import converted_path, load_converted
from kvkeep.models.weights.packing import Matrix, PackedMatrix, as_tensor, format_name
from kvkeep.models.weights.tensors import check_tensors, read_shapes


@pytest.mark.parametrize(
    ("architecture", "make"),
    [
        ("llama", lambda: tiny_llama()),
        ("llama", lambda: tiny_llama(tie_word_embeddings=True, head_dim=64)),
        ("llama", lambda: tiny_llama(attention_bias=True, mlp_bias=True)),
        ("qwen2", lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES))),
        ("qwen3", lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))),
    ],
    ids=["llama", "llama-tied", "llama-bias", "qwen2", "qwen3"],
)
def test_converted_folder_equals_the_original_model(
    tmp_path: Path, architecture: str, make: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    convert(write_gguf(tmp_path / "m.gguf", model, architecture), tmp_path / "own", False)
    export(tmp_path / "own", tmp_path / "out", torch.float32)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert type(loaded) is type(model)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    check_tensors(read_spec(tmp_path / "out"), read_shapes(tmp_path / "out"), tmp_path)
    assert read_spec(tmp_path / "out") == read_spec(tmp_path / "own")


def test_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=128))
    path = write_gguf(
        tmp_path / "m.gguf", model, edit=lambda writer: writer.add_sliding_window(128)
    )
    convert(path, tmp_path / "own", False)
    spec = read_spec(tmp_path / "own")
    assert spec.architecture == "MistralForCausalLM"
    assert spec.max_positions == 128
    export(tmp_path / "own", tmp_path / "out")
    _, info = MistralForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())


def convert_and_read(path: Path, to: Path) -> dict[str, Matrix]:
    """Convert a file and return its matrices by name."""
    convert(path, to, False)
    return load_converted(converted_path(to), read_spec(to))


@pytest.mark.parametrize("stored", [Type.F32, Type.F16, Type.BF16, *map(Type.__getitem__, FORMATS)])
def test_matrices_keep_their_quantised_bytes(tmp_path: Path, stored: Type) -> None:
    model, packed = tiny_llama(num_hidden_layers=1), {}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, shape in shapes.items():
        if stored.name in FORMATS and len(shape) == 2:
            blocks = random_blocks(stored.name, *shape, seed=len(packed))
            packed[gguf_name(name)] = (blocks, stored)
    path = write_gguf(tmp_path / "m.gguf", model, stored=Type.F32, packed=packed)
    if not packed:
        path = write_gguf(tmp_path / "m.gguf", model, stored=stored)
    converted = convert_and_read(path, tmp_path / "out")
    assert converted.keys() == shapes.keys()
    assert (tmp_path / "out" / "packed.safetensors").stat().st_size <= 1.1 * path.stat().st_size
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 1:
            assert torch.equal(converted[name], tensor)
            continue
        heads = {"q_proj": 8, "k_proj": 2}.get(name.split(".")[-2], 0)
        if packed:
            wanted = exact(stored.name, packed[gguf_name(name)][0])
            if heads:  # rows of a pair lie side by side in the file
                wanted = wanted.view(heads, -1, 2, wanted.shape[1]).transpose(1, 2)
                wanted = wanted.reshape(tensor.shape)
        else:
            wanted = tensor.to(PLAIN.get(stored.name, torch.float32)).float()
        assert format_name(converted[name]) == (stored.name if packed else stored.name.lower())
        assert torch.equal(as_tensor(converted[name], torch.float32), wanted), name


PLAIN = {"F16": torch.float16, "BF16": torch.bfloat16}


def test_format_without_kernels_is_unpacked_with_a_warning(tmp_path: Path) -> None:
    blocks = np.random.default_rng(0).integers(0, 60, (256, 84), dtype=np.uint8)
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_llama(num_hidden_layers=1),
        packed={"blk.0.attn_output.weight": (blocks, Type.Q2_K)},
    )
    with pytest.warns(RuntimeWarning, match="no kernels for Q2_K: .*unpacked to bfloat16"):
        converted = convert_and_read(path, tmp_path / "out")
    expected = torch.from_numpy(gguf.dequantize(blocks, Type.Q2_K)).bfloat16()
    assert expected.unique().numel() > 100
    matrix = converted["model.layers.0.self_attn.o_proj.weight"]
    assert not isinstance(matrix, PackedMatrix)
    assert torch.equal(matrix, expected)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def rope_divisors(settings: dict[str, Any], head_dim: int) -> np.ndarray:
    """Return the contents of `rope_freqs.weight` for a llama3 config."""
    config = LlamaConfig(**{**SIZES, "head_dim": head_dim}, rope_parameters=settings)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = torch.tensor(rope_spec({}, 10_000.0, head_dim, 1).inverse_frequencies)
    return (plain / scaled).float().numpy()


def test_llama_3_scaling_is_recognised(tmp_path: Path) -> None:
    divisors = rope_divisors(LLAMA3, 64)
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_llama(head_dim=64),
        edit=lambda writer: writer.add_tensor("rope_freqs.weight", divisors),
    )
    convert(path, tmp_path / "out", False)
    rope = read_spec(tmp_path / "out").rope
    assert rope.kind == "llama3"
    assert rope == rope_spec(LLAMA3, 10_000.0, 64, 512)


def test_other_divisor_tables_are_kept_unchanged(tmp_path: Path) -> None:
    settings = {**LLAMA3, "high_freq_factor": 8.0}
    divisors = rope_divisors(settings, 64)
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_llama(head_dim=64),
        edit=lambda writer: writer.add_tensor("rope_freqs.weight", divisors),
    )
    convert(path, tmp_path / "out", False)
    spec = read_spec(tmp_path / "out")
    wanted = rope_spec(settings, 10_000.0, 64, 512).inverse_frequencies
    assert spec.rope.inverse_frequencies == pytest.approx(wanted, rel=1e-5)
    assert (spec.rope.attention_scaling, spec.max_positions) == (1.0, 512)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling_keeps_its_kind(tmp_path: Path, kind: str) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    convert(write_gguf(tmp_path / "m.gguf", tiny_llama(), edit=edit), tmp_path / "out", False)
    settings = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_spec(tmp_path / "out").rope == rope_spec(settings, 10_000.0, 32, 512)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda writer: writer.add_tensor("blk.0.ffn_up_exps.weight", ONE), "ffn_up_exps"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "dynamic"), "dynamic"),
        (lambda writer: writer.add_tensor("rope_factors_long.weight", ONE), "rope_factors_long"),
        (lambda writer: writer.add_bool("llama.attention.causal", False), "attention.causal"),
        (lambda writer: writer.add_uint32("llama.nextn_predict_layers", 1), "nextn_predict"),
        (lambda writer: writer.add_clamp_kqv(8.0), "clamp_kqv"),
        (lambda writer: writer.add_tensor("blk.0.ffn_up.scale", ONE), "ffn_up.scale"),
        (lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", ONE), "attn_sinks"),
        (lambda writer: writer.add_tensor("blk.0.attn_q_norm.weight", ONE), "q_norm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_file_is_refused_before_writing(tmp_path: Path, edit: Edit, named: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), edit=edit)
    with pytest.raises(UnsupportedModel, match=named):
        convert(path, tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), architecture="gptj")
    with pytest.raises(UnsupportedModel, match=r"gptj.*llama.*qwen2.*qwen3"):
        convert(path, tmp_path / "out", False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", tiny_llama()).read_bytes()


@pytest.mark.parametrize("length", [0, 3, 4, 20, 24, 100, 700, 4000, 20_000, 200_000, -4])
def test_truncated_file_is_refused_before_writing(
    tmp_path: Path, whole: bytes, length: int
) -> None:
    (tmp_path / "m.gguf").write_bytes(whole[:length])
    with pytest.raises(BadModelFile, match=r"m\.gguf"):
        convert(tmp_path / "m.gguf", tmp_path / "out", False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("start", "complaint"),
    [
        (b"PK\x03\x04", "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00", "version 1"),
        (b"GGUF\x00\x00\x00\x03", "little-endian"),
    ],
)
def test_file_of_another_format_is_refused(
    tmp_path: Path, whole: bytes, start: bytes, complaint: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(start + whole[len(start) :])
    with pytest.raises(BadModelFile, match=complaint):
        convert(tmp_path / "m.gguf", tmp_path / "out", False)


def test_missing_tensor_is_named_in_the_error(tmp_path: Path) -> None:
    model = tiny_llama()
    path = write_gguf(tmp_path / "m.gguf", model, edit=lambda writer: writer.add_block_count(3))
    with pytest.raises(BadModelFile):
        convert(path, tmp_path / "out", False)


def test_converted_default_model_generates_in_transformers(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    export(smollm2_folder, tmp_path / "out")
    model, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=2, do_sample=False)[0].tolist()
    assert TextCodec.open(smollm2_folder).decode(ids) == "The capital of France is Paris."
