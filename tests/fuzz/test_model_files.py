"""Fuzz tests of GGUF files, config.json, generation_config.json, safetensors and tokenizers."""

import json
import struct
from pathlib import Path
from random import Random

import pytest
from fuzz.fuzzing import fuzz
from fuzz.mutations import json_bytes, mutate_bytes, mutate_json
from small_models import write_small_folder
from tiny_gguf import tiny_llama, write_gguf

from kvkeep.models.gguf.config import config_from_gguf
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.tensors import named_tensors
from kvkeep.models.gguf.tokenizer import build_tokenizer
from kvkeep.models.spec.config import read_spec, spec_from_config
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.checkpoint import decoder_shapes
from kvkeep.models.weights.tensors import check_tensors, read_shapes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": True,
    "sliding_window": 1024,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "eos_token_id": [0, 2],
    "bos_token_id": 1,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 3.0,
    "num_local_experts": 0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 96,
    "original_max_position_embeddings": 1024,
    "text_config": {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
}
ROPE = (
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "attention_factor": None,
        "original_max_position_embeddings": 1024,
    },
    {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.0, 2.1, 4.2, 8.3, 16.4, 32.5, 32.6, 32.7],
        "original_max_position_embeddings": 1024,
    },
    {"type": "mrope", "mrope_section": [4, 2, 2]},
)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = tiny_llama(**sizes, num_attention_heads=2, num_key_value_heads=1)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", model).read_bytes()


def test_a_damaged_gguf_loads_or_raises_bad_model_file(gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def read(random: Random) -> None:
        path.write_bytes(mutate_bytes(gguf, random))
        file = GgufFile.open(path)
        config = config_from_gguf(file)
        spec = spec_from_config(config, {}, path)
        tensors = named_tensors(file, spec.architecture)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        check_tensors(spec, decoder_shapes(spec, shapes), path)
        build_tokenizer(file)

    outcomes = fuzz(read, seed=1)
    assert outcomes["BadModelFile"]


@pytest.mark.parametrize("rope", range(len(ROPE)))
def test_a_config_with_changed_values_loads_or_raises_bad_model_file(
    rope: int, tmp_path: Path
) -> None:
    def read(random: Random) -> None:
        config = {**CONFIG, "architectures": [random.choice(list(FAMILIES))]}
        config[random.choice(("rope_scaling", "rope_parameters"))] = ROPE[rope]
        files = mutate_json({"config": config, "generation": {"eos_token_id": 2}}, random)
        for name in ("config", "generation"):
            file = tmp_path / ("config.json" if name == "config" else "generation_config.json")
            file.write_bytes(json_bytes(files.get(name)))
        spec = read_spec(tmp_path)
        shapes = {"model.norm.weight": (64,), "model.layers.0.self_attn.qkv_proj.weight": (9, 64)}
        check_tensors(spec, decoder_shapes(spec, shapes), tmp_path)

    outcomes = fuzz(read, seed=2 + rope, share=2 * len(ROPE))
    assert outcomes["BadModelFile"]


def test_a_config_with_changed_bytes_loads_or_raises_bad_model_file(tmp_path: Path) -> None:
    original = json_bytes({**CONFIG, "rope_scaling": ROPE[2]})

    def read(random: Random) -> None:
        (tmp_path / "config.json").write_bytes(mutate_bytes(original, random))
        read_spec(tmp_path)

    assert fuzz(read, seed=6, share=2)["BadModelFile"]


def test_damaged_weights_load_or_raise_bad_model_file(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    spec = read_spec(folder)
    file = folder / "model.safetensors"
    original = file.read_bytes()
    (length,) = struct.unpack("<Q", original[:8])
    header = json.loads(original[8 : 8 + length])

    def read(random: Random) -> None:
        if random.random() < 0.5:
            file.write_bytes(mutate_bytes(original, random))
        else:
            text = json_bytes(mutate_json(header, random))
            file.write_bytes(struct.pack("<Q", len(text)) + text + original[8 + length :])
        check_tensors(spec, read_shapes(folder), folder)

    assert fuzz(read, seed=7)["BadModelFile"]


def test_a_damaged_tokenizer_encodes_or_raises_bad_model_file(tmp_path: Path) -> None:
    folder = write_small_folder(tmp_path / "model")
    original = json.loads((folder / "tokenizer.json").read_text())
    original["model"]["vocab"] = dict(list(original["model"]["vocab"].items())[:40])

    def read(random: Random) -> None:
        text = json_bytes(original)
        changed = (
            mutate_bytes(text, random)
            if random.random() < 0.5
            else json_bytes(mutate_json(original, random))
        )
        (folder / "tokenizer.json").write_bytes(changed)
        codec = TextCodec.open(folder)
        codec.decode(codec.encode("abc !"))

    assert fuzz(read, seed=8)["BadModelFile"]
