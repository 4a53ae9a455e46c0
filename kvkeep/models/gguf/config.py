"""Translation of a GGUF file's metadata to the `config.json` of the same model.

In this package, `arch` is the value of `general.architecture`, such as "qwen3moe", which is also
the prefix "{arch}" of metadata keys. `architecture` is the model's class in transformers.
"""

from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.family_config import experts_config, gemma_config, is_olmo3, layers_config
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.nemotron_config import NEMOTRON_ARCHS
from kvkeep.models.gguf.rope import original_length, rope_scaling, scales_queries
from kvkeep.models.gguf.state_config import (
    KV_HEADS_PER_LAYER_ARCHS,
    MTP_ARCHS,
    is_bamba,
    state_config,
)
from kvkeep.models.gguf.vocabulary import special_token_id
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.unsupported import unsupported_reason

# By `arch`: the class and model_type. The file of a multimodal model is an ordinary language model:
# another file has the weights for images.
_CLASS_AND_MODEL_TYPE = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral3": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2vl": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3vl": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "granite": ("GraniteForCausalLM", "granite"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    "falcon-h1": ("FalconH1ForCausalLM", "falcon_h1"),
    **dict.fromkeys(NEMOTRON_ARCHS, ("NemotronHForCausalLM", "nemotron_h")),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "command-r": ("CohereForCausalLM", "cohere"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "exaone4": ("Exaone4ForCausalLM", "exaone4"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma3n": ("Gemma3nForCausalLM", "gemma3n_text"),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
}
# GGUF files that are not language models, by `general.type`.
_NOT_MODELS = {
    "mmproj": "the projector of a vision model",
    "adapter": "an adapter (LoRA) for a model",
    "imatrix": "an importance matrix for quantisation",
    "vocab": "a vocabulary without weights",
}
# The config field to the metadata key.
_GRANITE_MULTIPLIER_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",  # in both files a divisor
    "attention_multiplier": "attention.scale",
}
# Multimodal RoPE: the rotated pairs of a head are divided into sections, which rotate by the time,
# height and width of a token in an image (in text all the same number), and by a fourth index.
_MROPE_ARCHS = ("qwen2vl", "qwen3vl", "qwen3vlmoe")
# Metadata keys of recommended sampling parameters, and transformers' names for them.
_SAMPLING_FIELDS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_SUPPRESSED_KEY = "tokenizer.ggml.suppress_tokens"


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Return a config.json for transformers 4 and 5. Raises UnsupportedModel, BadModelFile."""
    _check_supported(file)
    head_dim = rotary_dim = _head_dim(file)
    architecture, model_type = _model_class(file)
    if FAMILIES[architecture].partial_rotary_factor:
        rotary_dim = file.positive_int("{arch}.rope.dimension_count", head_dim)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": file.positive_int("{arch}.embedding_length"),
        "num_hidden_layers": file.layer_count(),
        "num_attention_heads": file.uniform_int("{arch}.attention.head_count"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.positive_int("{arch}.context_length"),
        "rope_theta": file.rounded_number("{arch}.rope.freq_base", 10_000.0),
        "rope_scaling": None if model_type == "gemma4_text" else rope_scaling(file, rotary_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": model_type != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": "bfloat16",
        "pad_token_id": None,  # not the default of the config class
    }
    config |= _family_fields(file, FAMILIES[architecture], rotary_dim / head_dim, config)
    config |= gemma_config(file) | state_config(file)
    config |= layers_config(file, config) | experts_config(file)
    if "rope_parameters" in config:  # replaces these two in transformers 5
        del config["rope_theta"], config["rope_scaling"]
    # The config classes of these scale RoPE by default.
    if model_type in ("gpt_oss", "ministral3") and config.get("rope_scaling") is None:
        config["rope_scaling"] = {"rope_type": "default"}
    for role, field in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (token_id := special_token_id(file, role)) is not None:
            config[field] = token_id
    return {**config, "eos_token_id": eos_token_ids(file) or None}


def eos_token_ids(file: GgufFile) -> list[int]:
    """Return the ids of the tokens that end a text or a turn."""
    ids = [special_token_id(file, role) for role in ("eos", "eot")]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the contents of generation_config.json: end tokens, and what it says of sampling."""
    eos_ids = eos_token_ids(file)
    sampling: dict[str, Any] = {
        name: max(0, file.integer(key)) if name == "top_k" else file.rounded_number(key)
        for key, name in _SAMPLING_FIELDS.items()
        if file.has(key)
    }
    if file.has(_SUPPRESSED_KEY):
        sampling["suppress_tokens"] = file.integers(_SUPPRESSED_KEY)
    return {"eos_token_id": eos_ids, **sampling} if eos_ids else sampling


def _model_class(file: GgufFile) -> tuple[str, str]:
    """Return the transformers class and model_type. A Mixtral's file says "llama", for example."""
    if file.arch == "llama" and file.non_negative_int("llama.expert_count", 0):
        return "MixtralForCausalLM", "mixtral"
    if file.arch == "llama" and _sliding_window(file):
        return "MistralForCausalLM", "mistral"
    if file.arch == "olmo2" and is_olmo3(file):
        return "Olmo3ForCausalLM", "olmo3"
    if is_bamba(file):
        return "BambaForCausalLM", "bamba"
    if scales_queries(file):
        return "Ministral3ForCausalLM", "ministral3"
    return _CLASS_AND_MODEL_TYPE[file.arch]


def _family_fields(
    file: GgufFile, family: Family, partial_rotary_factor: float, config: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields that differ between families. config: the fields of all families."""
    arch, fields = file.arch, dict[str, Any]()
    has_widths_per_layer = family.is_gemma3n or family.is_gemma4 or arch in NEMOTRON_ARCHS
    if not has_widths_per_layer:
        fields["intermediate_size"] = file.uniform_int(_mlp_width_key(file))
    if family.mlp_width_field == "shared_intermediate_size":  # Granite 4 with state layers
        shared_key = "{arch}.expert_shared_feed_forward_length"
        width = file.non_negative_int(shared_key, 0) or fields["intermediate_size"]
        fields["shared_intermediate_size"] = width
    if not family.is_gemma4 and arch not in KV_HEADS_PER_LAYER_ARCHS:
        heads = config["num_attention_heads"]
        fields["num_key_value_heads"] = file.uniform_int("{arch}.attention.head_count_kv", heads)
    if family.cohere_logit_scale:
        fields["layer_norm_eps"] = file.rounded_number("{arch}.attention.layer_norm_epsilon")
        # Every Cohere 2 states it; llama.cpp does not scale a Command R that states none.
        default = 1.0 if arch == "command-r" else None
        fields["logit_scale"] = file.rounded_number("{arch}.logit_scale", default) or 1.0
    else:
        eps_key = "{arch}.attention.layer_norm_rms_epsilon"
        if arch in NEMOTRON_ARCHS and not file.has(eps_key):
            eps_key = "{arch}.attention.layer_norm_epsilon"
        fields[family.norm_eps_field] = file.rounded_number(eps_key)
    if family.mlp_bias:
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if arch in ("mistral3", "phi3") or (arch == "llama" and _sliding_window(file)):
        fields["sliding_window"] = _sliding_window(file) or None
    if family.partial_rotary_factor:
        fields["partial_rotary_factor"] = partial_rotary_factor
    if family.granite_multipliers:
        for field, key in _GRANITE_MULTIPLIER_KEYS.items():
            default = config["head_dim"] ** -0.5 if field == "attention_multiplier" else 1.0
            multiplier = file.rounded_number("{arch}." + key, default)
            fields[field] = multiplier or default  # 0 stands for the default
    if arch == "phi3":
        key = "original_max_position_embeddings"
        fields[key] = (config["rope_scaling"] or {}).get(key) or original_length(file)
    return fields


def _sliding_window(file: GgufFile) -> int:
    return file.non_negative_int("{arch}.attention.sliding_window", 0)


def _mlp_width_key(file: GgufFile) -> str:
    """Return the metadata key of the MLP's width: for a dense Granite 4, the shared expert's.

    A Qwen3.5-MoE has experts only.
    """
    if file.arch == "qwen35moe":
        return "{arch}.expert_feed_forward_length"
    shared_key = "{arch}.expert_shared_feed_forward_length"
    is_dense_granite4 = file.arch == "granite" and file.non_negative_int(shared_key, 0) > 0
    return shared_key if is_dense_granite4 else "{arch}.feed_forward_length"


def _head_dim(file: GgufFile) -> int:
    """Return the width of a query or key head; of global layers if local ones differ."""
    heads = file.uniform_int("{arch}.attention.head_count")
    default = max(1, file.positive_int("{arch}.embedding_length") // heads)
    return file.positive_int("{arch}.attention.key_length", default)


def _vocab_size(file: GgufFile) -> int:
    """Return the number of rows of the embedding, which some models pad beyond their tokens."""
    if "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]
    return len(file.strings("tokenizer.ggml.tokens"))


def check_arch(arch: str) -> None:
    """Raise UnsupportedModel for a `general.architecture` that is not supported."""
    if arch not in _CLASS_AND_MODEL_TYPE:
        raise UnsupportedModel(
            f"the GGUF architecture {arch!r} is not supported{unsupported_reason(arch)}; "
            f"supported: {', '.join(sorted(_CLASS_AND_MODEL_TYPE))}"
        )


def _check_supported(file: GgufFile) -> None:
    """Raise UnsupportedModel for a file that is no model, and for an unsupported model."""
    file_type = file.string("general.type", "model")
    arch = file.string("general.architecture", "none" if file_type in _NOT_MODELS else None)
    if arch == "clip":  # a projector older than general.type
        file_type = "mmproj"
    if file_type in _NOT_MODELS:
        raise UnsupportedModel(
            f"{file.path} is {_NOT_MODELS[file_type]}, not a language model: pass a model file"
        )
    check_arch(arch)
    _check_variant(file)
    head_dim = _head_dim(file)
    expected_sizes = {"attention.value_length": head_dim}
    is_rotated = arch not in NEMOTRON_ARCHS
    if is_rotated and not FAMILIES[_model_class(file)[0]].partial_rotary_factor:
        expected_sizes["rope.dimension_count"] = head_dim
    if arch == "gemma4":
        local_head_dim = file.positive_int("gemma4.attention.key_length_swa", head_dim)
        for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
            expected_sizes[key] = local_head_dim
    for key, expected in expected_sizes.items():
        size = file.positive_int("{arch}." + key, expected)
        if size != expected:
            feature = f"has {key} {size} where its heads have {expected} dimensions"
            raise file.unsupported_error(feature)


def _check_variant(file: GgufFile) -> None:
    """Raise UnsupportedModel for models that share a family's name but compute something else."""
    arch = file.arch
    unsupported_features = {
        "is a GLM-4V, whose rows have a different order (rope.dimension_sections)": (
            arch == "glm4" and file.has("glm4.rope.dimension_sections")
        ),
        "is a Granite without RoPE (rope.scaling.finetuned)": (
            arch in ("granite", "granitemoe")
            and not file.boolean("{arch}.rope.scaling.finetuned", True)
        ),
        "is bidirectional (attention.causal)": not file.boolean("{arch}.attention.causal", True),
        "has layers for multi-token prediction (nextn_predict_layers)": (
            arch not in MTP_ARCHS and file.predicting_layer_count() > 0
        ),
        "clips queries, keys and values (attention.clamp_kqv)": (
            file.number("{arch}.attention.clamp_kqv", 0.0) != 0
        ),
        "rotates part of each head by image positions (rope.dimension_sections)": (
            arch in _MROPE_ARCHS and not _rotates_by_text_position(file)
        ),
    }
    for feature, is_present in unsupported_features.items():
        if is_present:
            raise file.unsupported_error(feature)


def _rotates_by_text_position(file: GgufFile) -> bool:
    """Whether all pairs of a head are in the first three sections, whose positions text has."""
    key = "{arch}.rope.dimension_sections"
    if not file.has(key):
        return True
    sections = [*file.integers(key), 0, 0, 0, 0]  # pairs in each; a file may state fewer than four
    # Qwen2-VL repeats the sections until all pairs are covered; Qwen3-VL does not.
    covers_all = file.arch == "qwen2vl" or sum(sections[:3]) >= _head_dim(file) // 2
    return sections[3] == 0 and covers_all
