"""From a GGUF file's metadata to the `config.json` of the same model in Hugging Face layout."""

from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf_experts import MIXTURES, mixture_config
from kvkeep.models.gguf_file import GgufFile
from kvkeep.models.gguf_gemma import gemma_config
from kvkeep.models.gguf_gemma3n import gemma3n_config
from kvkeep.models.gguf_layers import is_olmo3, layers_config
from kvkeep.models.gguf_rope import rope_scaling, shortest, two_lengths
from kvkeep.models.gguf_tokenizer import special_token
from kvkeep.models.unsupported import why_not

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
_OF_EACH = "attention.head_count_kv"  # Granite 4 says it of each layer, though all are the same
_ALIKE = ("attention.head_count", _OF_EACH, "feed_forward_length")  # in all layers, but these:
_UNLIKE = {"gemma3n": ("feed_forward_length",), "gemma4": (_OF_EACH, "feed_forward_length")}
_COHERE = ("command-r", "cohere2")
_MULTIPLIED = ("granite", "granitemoe")
_ROTATE_PARTS = ("phi3", "glm4")  # of each head


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
    if family == "olmo2" and is_olmo3(file):
        architecture, model_type = "Olmo3ForCausalLM", "olmo3"
    if f"{family}.attention.temperature_scale" in file.metadata:
        architecture, model_type = "Ministral3ForCausalLM", "ministral3"
    heads = file.count(f"{family}.attention.head_count")
    hidden_size = file.count(f"{family}.embedding_length")
    head_dim = file.count(f"{family}.attention.key_length", max(1, hidden_size // heads))
    mixture = mixture_config(file, family)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": _width(file, family),
        "num_hidden_layers": file.count(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file, family, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.count(f"{family}.context_length"),
        **_norm_eps(file, family),
        "rope_theta": shortest(file.number(f"{family}.rope.freq_base", 10_000.0)),
        "rope_scaling": rope_scaling(file, family, head_dim),
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
        rotated = file.count(f"{family}.rope.dimension_count", head_dim)
        config["partial_rotary_factor"] = rotated / head_dim
    if family in _COHERE:
        config["logit_scale"] = shortest(file.number(f"{family}.logit_scale", 0.0625))
    if family in _MULTIPLIED:
        config |= _multipliers(file, family, head_dim)
    if family == "phi3":
        config |= two_lengths(file)
    if family in ("gemma2", "gemma3", "gemma4"):
        config |= gemma_config(file, family, head_dim)
    if family == "gemma3n":
        config |= gemma3n_config(file)
    if "rope_parameters" in config:  # as transformers 5 has it alone
        del config["rope_theta"], config["rope_scaling"]
    if model_type in ("gpt_oss", "ministral3") and config.get("rope_scaling") is None:
        config["rope_scaling"] = {
            "rope_type": "default"
        }  # their classes scale where nothing is said
    config |= layers_config(file, family) | mixture
    for role, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if special_token(file, role) is not None:
            config[key] = file.metadata[f"tokenizer.ggml.{role}_token_id"]
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
    said = family == "granite" and shared in file.metadata
    return file.count(shared if said else f"{family}.feed_forward_length")


def _kv_heads(file: GgufFile, family: str, heads: int) -> int:
    each = file.metadata.get(f"{family}.{_OF_EACH}")
    if isinstance(each, list) and each and type(each[0]) is int and each[0] > 0:
        return each[0]  # all are the same: `_refuse_unsupported`
    return file.count(f"{family}.{_OF_EACH}", heads)


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
            f"the GGUF architecture {family!r} is not supported{why_not(family)}; supported: "
            f"{', '.join(sorted(_FAMILIES))}"
        )
    return family


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: some models have more of them than tokens, as padding."""
    if "token_embd.weight" in file.tensors:
        return file.tensors["token_embd.weight"].shape[0]
    return len(file.texts("tokenizer.ggml.tokens"))


def _refuse_unsupported(file: GgufFile, family: str) -> None:
    _refuse_relatives(file, family)
    for key in _ALIKE:
        if key in _UNLIKE.get(family, ()):
            continue
        each = file.metadata.get(f"{family}.{key}")
        if isinstance(each, list) and (key != _OF_EACH or any(one != each[0] for one in each)):
            raise UnsupportedModel(
                f"{file.path} has another {key} in each layer, which is not supported"
            )
    heads = file.count(f"{family}.attention.head_count")
    usual = max(1, file.count(f"{family}.embedding_length") // heads)
    head_dim = file.count(f"{family}.attention.key_length", usual)
    sizes = ["attention.value_length", "rope.dimension_count"]
    for key in sizes[:1] if family in _ROTATE_PARTS else sizes:
        size = file.metadata.get(f"{family}.{key}", head_dim)
        if size != head_dim:
            raise UnsupportedModel(
                f"{file.path} has {key} {size} where its heads have {head_dim} dimensions; "
                "only equal ones are supported in GGUF"
            )


def _refuse_relatives(file: GgufFile, family: str) -> None:
    """Models that are stored under the name of a family, and are not quite of it."""
    against = {
        "is a GLM-4V, whose rows are in another order": (
            family == "glm4" and "glm4.rope.dimension_sections" in file.metadata
        ),
        "is a Granite without RoPE": (
            family in _MULTIPLIED and file.metadata.get(f"{family}.rope.scaling.finetuned") is False
        ),
    }
    for why, holds in against.items():
        if holds:
            raise UnsupportedModel(f"{file.path} {why}: that is not supported")
