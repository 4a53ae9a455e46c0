"""Translation of a GGUF file's metadata to the `config.json` of the same model.

In this package, `family` is the value of `general.architecture`, such as "qwen3moe". It is also the
prefix of the model's metadata keys.
"""

from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.experts import MIXTURES, mixture_config
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.gemma import gemma3n_config, gemma_config
from kvkeep.models.gguf.layers import is_olmo3, layers_config
from kvkeep.models.gguf.rope import (
    has_temperature,
    original_length,
    rope_scaling,
    shortest_decimal,
)
from kvkeep.models.gguf.vocabulary import special_id
from kvkeep.models.spec.unsupported import unsupported_reason

# general.architecture to the class and model_type. Mistral is stored as llama. What a multimodal
# model needs for images is in another file, so that this one is an ordinary language model.
_FAMILIES = MIXTURES | {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral3": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2vl": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3vl": ("Qwen3ForCausalLM", "qwen3"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "granite": ("GraniteForCausalLM", "granite"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "command-r": ("CohereForCausalLM", "cohere"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "exaone4": ("Exaone4ForCausalLM", "exaone4"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma3n": ("Gemma3nForCausalLM", "gemma3n_text"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
}
_COHERE = ("command-r", "cohere2")
_WITH_MULTIPLIERS = ("granite", "granitemoe")
_PARTIAL_ROTARY = ("phi3", "glm4")  # rotate a part of each head
# Multimodal RoPE: sections of a head rotate by several positions, which are all equal in text.
_WITH_ROPE_SECTIONS = ("qwen2vl", "qwen3vl", "qwen3vlmoe")


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Return a config that `read_spec` and transformers 4 and 5 read alike.

    Raises UnsupportedModel with the unsupported feature, and BadModelFile for missing fields.
    """
    family = _family(file)
    _refuse_unsupported(file, family)
    architecture, model_type = _FAMILIES[family]
    window = file.non_negative(f"{family}.attention.sliding_window", 0)
    if family == "llama" and window:
        architecture, model_type = "MistralForCausalLM", "mistral"
    if family == "olmo2" and is_olmo3(file):
        architecture, model_type = "Olmo3ForCausalLM", "olmo3"
    if has_temperature(file, family):
        architecture, model_type = "Ministral3ForCausalLM", "ministral3"
    heads = file.uniform_count(f"{family}.attention.head_count")
    hidden_size = file.count(f"{family}.embedding_length")
    head_dim = file.count(f"{family}.attention.key_length", max(1, hidden_size // heads))
    rotated = head_dim
    if family in _PARTIAL_ROTARY:
        rotated = file.count(f"{family}.rope.dimension_count", head_dim)
    mixture = mixture_config(file, family)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": _mlp_width(file, family),
        "num_hidden_layers": file.layer_count(family),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file, family, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.count(f"{family}.context_length"),
        **_norm_eps(file, family),
        "rope_theta": shortest_decimal(file.number(f"{family}.rope.freq_base", 10_000.0)),
        "rope_scaling": None if family == "gemma4" else rope_scaling(file, family, rotated),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": model_type != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": "bfloat16",
        "pad_token_id": None,  # not the default of the config class
    }
    if model_type in ("llama", "granite", "smollm3") and not mixture:
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if model_type in ("mistral", "ministral3", "phi3"):
        config["sliding_window"] = window or None
    if family in _PARTIAL_ROTARY:
        config["partial_rotary_factor"] = rotated / head_dim
    if family in _COHERE:
        # Every Cohere 2 states it; llama.cpp does not scale a Command R that states none.
        scale = file.number(f"{family}.logit_scale", 1.0 if family == "command-r" else None)
        config["logit_scale"] = shortest_decimal(scale) or 1.0
    if family in _WITH_MULTIPLIERS:
        config |= _multipliers(file, family, head_dim)
    if family == "phi3":
        key, scaling = "original_max_position_embeddings", config["rope_scaling"]
        stated = scaling.get(key) if isinstance(scaling, dict) else None
        config[key] = stated or original_length(file, family)
    if family in ("gemma2", "gemma3", "gemma4"):
        config |= gemma_config(file, family, head_dim)
    if family == "gemma3n":
        config |= gemma3n_config(file)
    config |= layers_config(file, family, config) | mixture
    if "rope_parameters" in config:  # replaces these two in transformers 5
        del config["rope_theta"], config["rope_scaling"]
    # The config classes of these scale RoPE by default.
    if model_type in ("gpt_oss", "ministral3") and config.get("rope_scaling") is None:
        config["rope_scaling"] = {"rope_type": "default"}
    for role, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (index := special_id(file, role)) is not None:
            config[key] = index
    return {**config, "eos_token_id": eos_token_ids(file) or None}


def _norm_eps(file: GgufFile, family: str) -> dict[str, float]:
    if family in _COHERE:
        eps = file.number(f"{family}.attention.layer_norm_epsilon")
        return {"layer_norm_eps": shortest_decimal(eps)}
    return {
        "rms_norm_eps": shortest_decimal(file.number(f"{family}.attention.layer_norm_rms_epsilon"))
    }


def _mlp_width(file: GgufFile, family: str) -> int:
    """Return the width of the MLP. A dense Granite 4 states it as that of a shared expert."""
    if family in ("gemma3n", "gemma4"):
        return 0  # overwritten by gemma3n_config, gemma_config
    shared = f"{family}.expert_shared_feed_forward_length"
    is_shared = family == "granite" and file.non_negative(shared, 0) > 0
    return file.uniform_count(shared if is_shared else f"{family}.feed_forward_length")


def _kv_heads(file: GgufFile, family: str, heads: int) -> int:
    if family == "gemma4":
        return heads  # overwritten by gemma_config
    return file.uniform_count(f"{family}.attention.head_count_kv", heads)


def _multipliers(file: GgufFile, family: str, head_dim: int) -> dict[str, Any]:
    def factor(key: str, default: float) -> float:  # 0 means the default
        return shortest_decimal(file.number(f"{family}.{key}", default)) or default

    return {
        "embedding_multiplier": factor("embedding_scale", 1.0),
        "residual_multiplier": factor("residual_scale", 1.0),
        "logits_scaling": factor("logit_scale", 1.0),  # in both files a divisor
        "attention_multiplier": factor("attention.scale", head_dim**-0.5),
    }


def eos_token_ids(file: GgufFile) -> list[int]:
    """Return the ids of the tokens that end a text or a turn."""
    ids = [special_id(file, role) for role in ("eos", "eot")]
    return list(dict.fromkeys(index for index in ids if index is not None))


# GGUF files that are not models, by `general.type`.
_NOT_MODELS = {
    "mmproj": "the projector of a vision model",
    "adapter": "an adapter (LoRA) for a model",
    "imatrix": "an importance matrix, by which models are quantised",
    "vocab": "a vocabulary alone",
}


def _family(file: GgufFile) -> str:
    kind = file.text("general.type", "model")
    family = file.text("general.architecture", "none" if kind in _NOT_MODELS else None)
    if family == "clip":  # a projector of before general.type
        kind = "mmproj"
    if kind in _NOT_MODELS:
        raise UnsupportedModel(
            f"{file.path} is {_NOT_MODELS[kind]}, not a language model: give the model's own file"
        )
    if family not in _FAMILIES:
        raise UnsupportedModel(
            f"the GGUF architecture {family!r} is not supported{unsupported_reason(family)}; "
            f"supported: {', '.join(sorted(_FAMILIES))}"
        )
    return family


def _vocab_size(file: GgufFile) -> int:
    """Return the rows of the embedding: some models pad it beyond their tokens."""
    if "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]
    return len(file.texts("tokenizer.ggml.tokens"))


def _refuse_unsupported(file: GgufFile, family: str) -> None:
    _refuse_variants(file, family)
    heads = file.uniform_count(f"{family}.attention.head_count")
    default = max(1, file.count(f"{family}.embedding_length") // heads)
    head_dim = file.count(f"{family}.attention.key_length", default)
    sizes = {"attention.value_length": head_dim}
    if family not in _PARTIAL_ROTARY:
        sizes["rope.dimension_count"] = head_dim
    if family == "gemma4":
        local = file.count("gemma4.attention.key_length_swa", head_dim)
        sizes |= {"attention.value_length_swa": local, "rope.dimension_count_swa": local}
    for key, expected in sizes.items():
        size = file.count(f"{family}.{key}", expected)
        if size != expected:
            raise UnsupportedModel(
                f"{file.path} has {key} {size} where its heads have {expected} dimensions; "
                "only equal ones are supported in GGUF"
            )


def _refuse_variants(file: GgufFile, family: str) -> None:
    """Raise UnsupportedModel for models that share a family's name but compute something else."""
    is_nope_granite = family in _WITH_MULTIPLIERS and not file.flag(
        f"{family}.rope.scaling.finetuned", True
    )
    unsupported = {
        "is a GLM-4V, whose rows are in another order (rope.dimension_sections)": (
            family == "glm4" and file.has("glm4.rope.dimension_sections")
        ),
        "is a Granite without RoPE (rope.scaling.finetuned)": is_nope_granite,
        "looks ahead in a text (attention.causal)": (
            not file.flag(f"{family}.attention.causal", True)
        ),
        "has layers that predict further tokens (nextn_predict_layers)": (
            file.non_negative(f"{family}.nextn_predict_layers", 0) > 0
        ),
        "clips queries, keys and values (attention.clamp_kqv)": (
            file.number(f"{family}.attention.clamp_kqv", 0.0) != 0
        ),
        "rotates parts of a head by positions in an image alone (rope.dimension_sections)": (
            family in _WITH_ROPE_SECTIONS and not _rotates_by_text_position(file, family)
        ),
    }
    for feature, is_present in unsupported.items():
        if is_present:
            raise UnsupportedModel(f"{file.path} {feature}: that is not supported")


def _rotates_by_text_position(file: GgufFile, family: str) -> bool:
    """Whether all pairs of a head rotate by one of the first three positions, which text has."""
    key = f"{family}.rope.dimension_sections"
    if not file.has(key):
        return True
    sections = [*file.integers(key), 0, 0, 0, 0]
    heads = file.uniform_count(f"{family}.attention.head_count")
    default = file.count(f"{family}.embedding_length") // heads
    pairs = file.count(f"{family}.attention.key_length", default) // 2
    # Qwen2-VL repeats the sections until all pairs are covered; Qwen3-VL does not.
    return sections[3] == 0 and (family == "qwen2vl" or sum(sections[:3]) >= pairs)
