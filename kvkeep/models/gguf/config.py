"""From a GGUF file's metadata to the `config.json` of the same model in Hugging Face layout."""

from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.experts import MIXTURES, mixture_config
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.gguf.gemma import gemma_config
from kvkeep.models.gguf.gemma3n import gemma3n_config
from kvkeep.models.gguf.layers import is_olmo3, layers_config
from kvkeep.models.gguf.rope import has_temperature, original_length, rope_scaling, shortest
from kvkeep.models.gguf.vocabulary import special_id
from kvkeep.models.spec.unsupported import unsupported_reason

# general.architecture to the class and model_type. Mistral is stored as llama. A model that reads
# images keeps what it needs for them in another file: this one is a language model as others are.
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
_MULTIPLIED = ("granite", "granitemoe")
_ROTATE_PARTS = ("phi3", "glm4")  # of each head
_IN_SECTIONS = ("qwen2vl", "qwen3vl", "qwen3vlmoe")  # by several positions, all the same in text


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """A config that `read_spec` and transformers 4 and 5 read alike.

    Raises UnsupportedModel, naming what it is that is not supported; BadModelFile if fields are
    missing.
    """
    family = _family(file)
    _refuse_unsupported(file, family)
    architecture, model_type = _FAMILIES[family]
    window = file.whole(f"{family}.attention.sliding_window", 0)
    if family == "llama" and window:
        architecture, model_type = "MistralForCausalLM", "mistral"
    if family == "olmo2" and is_olmo3(file):
        architecture, model_type = "Olmo3ForCausalLM", "olmo3"
    if has_temperature(file, family):
        architecture, model_type = "Ministral3ForCausalLM", "ministral3"
    heads = file.same(f"{family}.attention.head_count")
    hidden_size = file.count(f"{family}.embedding_length")
    head_dim = file.count(f"{family}.attention.key_length", max(1, hidden_size // heads))
    rotated = head_dim
    if family in _ROTATE_PARTS:
        rotated = file.count(f"{family}.rope.dimension_count", head_dim)
    mixture = mixture_config(file, family)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": _width(file, family),
        "num_hidden_layers": file.layers(family),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file, family, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.count(f"{family}.context_length"),
        **_norm_eps(file, family),
        "rope_theta": shortest(file.number(f"{family}.rope.freq_base", 10_000.0)),
        "rope_scaling": None if family == "gemma4" else rope_scaling(file, family, rotated),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": model_type != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": "bfloat16",
        "pad_token_id": None,  # not what a class has where nothing is said
    }
    if model_type in ("llama", "granite", "smollm3") and not mixture:
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if model_type in ("mistral", "ministral3", "phi3"):
        config["sliding_window"] = window or None
    if family in _ROTATE_PARTS:
        config["partial_rotary_factor"] = rotated / head_dim
    if family in _COHERE:
        # All Cohere 2 have one; without one llama.cpp leaves the logits of Command R as they are.
        scale = file.number(f"{family}.logit_scale", 1.0 if family == "command-r" else None)
        config["logit_scale"] = shortest(scale) or 1.0
    if family in _MULTIPLIED:
        config |= _multipliers(file, family, head_dim)
    if family == "phi3":
        key, scaling = "original_max_position_embeddings", config["rope_scaling"]
        said = scaling.get(key) if isinstance(scaling, dict) else None
        config[key] = said or original_length(file, family)
    if family in ("gemma2", "gemma3", "gemma4"):
        config |= gemma_config(file, family, head_dim)
    if family == "gemma3n":
        config |= gemma3n_config(file)
    config |= layers_config(file, family, config) | mixture
    if "rope_parameters" in config:  # as transformers 5 has it alone
        del config["rope_theta"], config["rope_scaling"]
    # The config classes of these scale RoPE where a config does not mention it.
    if model_type in ("gpt_oss", "ministral3") and config.get("rope_scaling") is None:
        config["rope_scaling"] = {"rope_type": "default"}
    for role, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (index := special_id(file, role)) is not None:
            config[key] = index
    return {**config, "eos_token_id": eos_token_ids(file) or None}


def _norm_eps(file: GgufFile, family: str) -> dict[str, float]:
    if family in _COHERE:
        eps = file.number(f"{family}.attention.layer_norm_epsilon")
        return {"layer_norm_eps": shortest(eps)}
    return {"rms_norm_eps": shortest(file.number(f"{family}.attention.layer_norm_rms_epsilon"))}


def _width(file: GgufFile, family: str) -> int:
    """Of the MLP. Granite 4 names another one beside it, that of experts which it has not."""
    if family in ("gemma3n", "gemma4"):
        return 0  # see `gguf_gemma3n.py`, `gguf_gemma.py`
    shared = f"{family}.expert_shared_feed_forward_length"
    said = family == "granite" and file.whole(shared, 0) > 0
    return file.same(shared if said else f"{family}.feed_forward_length")


def _kv_heads(file: GgufFile, family: str, heads: int) -> int:
    if family == "gemma4":
        return heads  # see `gguf_gemma.py`
    return file.same(f"{family}.attention.head_count_kv", heads)


def _multipliers(file: GgufFile, family: str, head_dim: int) -> dict[str, Any]:
    usual = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
    usual["attention.scale"] = head_dim**-0.5
    stated = {key: file.number(f"{family}.{key}", value) for key, value in usual.items()}
    found = {key: shortest(value) or usual[key] for key, value in stated.items()}
    return {
        "embedding_multiplier": found["embedding_scale"],
        "residual_multiplier": found["residual_scale"],
        "logits_scaling": found["logit_scale"],  # what logits are divided by, as in config.json
        "attention_multiplier": found["attention.scale"],
    }


def eos_token_ids(file: GgufFile) -> list[int]:
    """Every token that ends a text or a turn."""
    ids = [special_id(file, role) for role in ("eos", "eot")]
    return list(dict.fromkeys(index for index in ids if index is not None))


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
            f"the GGUF architecture {family!r} is not supported{unsupported_reason(family)}; "
            f"supported: {', '.join(sorted(_FAMILIES))}"
        )
    return family


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: some models have more of them than tokens, as padding."""
    if "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]
    return len(file.texts("tokenizer.ggml.tokens"))


def _refuse_unsupported(file: GgufFile, family: str) -> None:
    _refuse_relatives(file, family)
    heads = file.same(f"{family}.attention.head_count")
    usual = max(1, file.count(f"{family}.embedding_length") // heads)
    head_dim = file.count(f"{family}.attention.key_length", usual)
    sizes = {"attention.value_length": head_dim}
    if family not in _ROTATE_PARTS:
        sizes["rope.dimension_count"] = head_dim
    if family == "gemma4":
        local = file.count("gemma4.attention.key_length_swa", head_dim)
        sizes |= {"attention.value_length_swa": local, "rope.dimension_count_swa": local}
    for key, wanted in sizes.items():
        size = file.count(f"{family}.{key}", wanted)
        if size != wanted:
            raise UnsupportedModel(
                f"{file.path} has {key} {size} where its heads have {wanted} dimensions; "
                "only equal ones are supported in GGUF"
            )


def _refuse_relatives(file: GgufFile, family: str) -> None:
    """Models that are stored under the name of a family, and are not quite of it."""
    granite = family in _MULTIPLIED and not file.flag(f"{family}.rope.scaling.finetuned", True)
    against = {
        "is a GLM-4V, whose rows are in another order (rope.dimension_sections)": (
            family == "glm4" and file.has("glm4.rope.dimension_sections")
        ),
        "is a Granite without RoPE (rope.scaling.finetuned)": granite,
        "looks ahead in a text (attention.causal)": (
            not file.flag(f"{family}.attention.causal", True)
        ),
        "has layers that predict further tokens (nextn_predict_layers)": (
            file.whole(f"{family}.nextn_predict_layers", 0) > 0
        ),
        "clips queries, keys and values (attention.clamp_kqv)": (
            file.number(f"{family}.attention.clamp_kqv", 0.0) != 0
        ),
        "rotates parts of a head by positions in an image alone (rope.dimension_sections)": (
            family in _IN_SECTIONS and not _is_text(file, family)
        ),
    }
    for why, holds in against.items():
        if holds:
            raise UnsupportedModel(f"{file.path} {why}: that is not supported")


def _is_text(file: GgufFile, family: str) -> bool:
    """Whether each pair of a head is rotated by a position that text has: the fourth is not."""
    key = f"{family}.rope.dimension_sections"
    if not file.has(key):
        return True
    sections = [*file.integers(key), 0, 0, 0, 0]
    heads = file.same(f"{family}.attention.head_count")
    usual = file.count(f"{family}.embedding_length") // heads
    pairs = file.count(f"{family}.attention.key_length", usual) // 2
    # Qwen2-VL begins with the first section again behind the last; Qwen3-VL does not.
    return sections[3] == 0 and (family == "qwen2vl" or sum(sections[:3]) >= pairs)
