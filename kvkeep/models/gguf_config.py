"""From a GGUF file's metadata to the `config.json` of the same model in Hugging Face layout."""

from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.frequencies import rope_spec
from kvkeep.models.gguf_file import GgufFile
from kvkeep.models.gguf_tokenizer import special_token

# general.architecture to the class and model_type. Mistral is stored as llama.
_FAMILIES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """A config that `read_spec` and transformers 4 and 5 read alike.

    Raises UnsupportedModel, naming what it is that is not supported; BadModelFile if fields are
    missing.
    """
    family = _family(file)
    _refuse_unsupported(file, family)
    architecture, model_type = _FAMILIES[family]
    window = file.metadata.get(f"{family}.attention.sliding_window")
    if family == "llama" and window:
        architecture, model_type = "MistralForCausalLM", "mistral"
    heads = file.count(f"{family}.attention.head_count")
    hidden_size = file.count(f"{family}.embedding_length")
    head_dim = file.count(f"{family}.attention.key_length", max(1, hidden_size // heads))
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": file.count(f"{family}.feed_forward_length"),
        "num_hidden_layers": file.count(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count(f"{family}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.count(f"{family}.context_length"),
        "rms_norm_eps": _shortest(file.number(f"{family}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(file.number(f"{family}.rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(file, family, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": "bfloat16",
    }
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if model_type == "mistral":
        config["sliding_window"] = window
    for role, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if special_token(file, role) is not None:
            config[key] = file.metadata[f"tokenizer.ggml.{role}_token_id"]
    return {**config, "eos_token_id": eos_token_ids(file) or None}


def eos_token_ids(file: GgufFile) -> list[int]:
    """Every token that ends a text or a turn."""
    roles = [role for role in ("eos", "eot") if special_token(file, role) is not None]
    return list(dict.fromkeys(file.metadata[f"tokenizer.ggml.{role}_token_id"] for role in roles))


# What lies beside models in the same format, by `general.type`.
_NO_MODELS = {
    "mmproj": "the projector of a vision model",
    "adapter": "an adapter (LoRA) for a model",
    "imatrix": "an importance matrix, by which models are quantised",
    "vocab": "a vocabulary alone",
}


def _family(file: GgufFile) -> str:
    kind = file.text("general.type", "model")
    family = file.text("general.architecture", "none" if kind in _NO_MODELS else None)
    if family == "clip":  # of a projector, since before files had a type
        kind = "mmproj"
    if kind in _NO_MODELS:
        raise UnsupportedModel(
            f"{file.path} is {_NO_MODELS[kind]}, not a language model: give the model's own file"
        )
    if family not in _FAMILIES:
        raise UnsupportedModel(
            f"the GGUF architecture {family!r} is not supported; supported: "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    return family


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: some models have more of them than tokens, as padding."""
    if "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]
    return len(file.texts("tokenizer.ggml.tokens"))


def _refuse_unsupported(file: GgufFile, family: str) -> None:
    if file.metadata.get(f"{family}.expert_count"):
        raise UnsupportedModel(f"{file.path} is a mixture of experts, which is not supported")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(file.metadata.get(f"{family}.{key}"), list):
            raise UnsupportedModel(
                f"{file.path} has another {key} in each layer, which is not supported"
            )
    heads = file.count(f"{family}.attention.head_count")
    usual = max(1, file.count(f"{family}.embedding_length") // heads)
    head_dim = file.count(f"{family}.attention.key_length", usual)
    for key in ("attention.value_length", "rope.dimension_count"):
        size = file.metadata.get(f"{family}.{key}", head_dim)
        if size != head_dim:
            raise UnsupportedModel(
                f"{file.path} has {key} {size} where its heads have {head_dim} dimensions; "
                "only equal ones are supported in GGUF"
            )


def _rope_scaling(file: GgufFile, family: str, head_dim: int) -> dict[str, Any] | None:
    kind = file.text(f"{family}.rope.scaling.type", "none")
    factor = file.number(
        f"{family}.rope.scaling.factor", file.number(f"{family}.rope.scale_linear", 1.0)
    )
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, family, head_dim)
    if kind == "none" and factor in (0.0, 1.0):
        return None
    if kind == "linear" or kind == "none":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(
            f"the GGUF RoPE scaling {kind!r} is not supported; supported: none, linear, yarn, and "
            "Llama 3's rope_freqs.weight"
        )
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for key, name in (
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"{family}.rope.scaling.{key}" in file.metadata:
            scaling[name] = file.number(f"{family}.rope.scaling.{key}")
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
        if file.metadata.get(f"{family}.rope.scaling.{key}", 1.0) not in (0.0, 1.0):
            raise UnsupportedModel(
                f"the GGUF field {family}.rope.scaling.{key} is not supported; use the model's "
                "safetensors folder"
            )
    return scaling


def _llama3_scaling(file: GgufFile, family: str, head_dim: int) -> dict[str, Any] | None:
    """The settings whose divisors are those of `rope_freqs.weight`, if they are Llama 3's.

    GGUF stores what each frequency is divided by, not the settings: only the factor is in the
    numbers, as the largest. The others are the same in every Llama 3.1, 3.2 and 3.3.
    """
    stored = file.tensors["rope_freqs.weight"].unpack().tolist()
    if max(stored) == min(stored) == 1.0:
        return None
    settings = {
        "rope_type": "llama3",
        "factor": round(max(stored), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = file.number(f"{family}.rope.freq_base", 10_000.0)
    plain = rope_spec({}, theta, head_dim, 8192).inverse_frequencies
    scaled = rope_spec(settings, theta, head_dim, 8192).inverse_frequencies
    divisors = [before / after for before, after in zip(plain, scaled, strict=True)]
    if len(divisors) != len(stored) or any(
        abs(ours - theirs) > 1e-3 * ours for ours, theirs in zip(divisors, stored, strict=True)
    ):
        raise UnsupportedModel(
            f"rope_freqs.weight in {file.path} is not Llama 3's scaling of RoPE; use the model's "
            "safetensors folder, whose config.json states its kind"
        )
    return settings


def _shortest(value: float) -> float:
    """The short decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
