"""What a GGUF file says of layers that are not all alike, as `config.json` says it."""

from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile, shown
from kvkeep.models.gguf.rope import attention_factor, shortest, unscaled_longrope

_WITH_LOCAL = ("gemma2", "gemma3", "cohere2", "exaone4", "olmo2", "gpt-oss", "gemma3n", "gemma4")
_USUAL_WINDOW = {"gemma2": 4096, "gemma3n": 512}
_ALWAYS_LOCAL = ("cohere2", "gpt-oss", "gemma4")  # none of them sees everything in all layers


def layers_config(file: GgufFile, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Which layers see a window alone, and how wide it is; nothing of families that have none.

    Where the file does not say which they are, they are those that the class has usually.

    config: what is known of the model already.

    Raises UnsupportedModel, BadModelFile.
    """
    if family not in _WITH_LOCAL or (family == "olmo2" and not is_olmo3(file)):
        return {}
    layers = file.layers(family)
    usual = None if family in _ALWAYS_LOCAL else _USUAL_WINDOW.get(family, 0)
    window = file.whole(f"{family}.attention.sliding_window", usual)
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    kinds = ("full_attention", "sliding_attention")
    local = layers_said(file, f"{family}.attention.sliding_window_pattern", layers)
    return {
        "sliding_window": window,
        **({} if local is None else {"layer_types": [kinds[each] for each in local]}),
        **_local_rope(file, family, config),
    }


def is_olmo3(file: GgufFile) -> bool:
    """Whether a file of OLMo 2, which has no local layers, is one of OLMo 3."""
    return file.whole("olmo2.attention.sliding_window", 0) > 0


def layers_said(file: GgufFile, key: str, layers: int) -> list[bool] | None:
    """Whether each layer is local; None where the file does not say it."""
    if not file.has(key):
        return None
    said = file.required(key)
    if type(said) is int and said > 0:
        return [(layer + 1) % said > 0 for layer in range(layers)]
    if not isinstance(said, list) or len(said) != layers or any(x not in (0, 1) for x in said):
        raise BadModelFile(
            f"{file.path}: metadata field {key} must say of each of {layers} layers whether it is "
            f"local, found {shown(said)}; fetch it again"
        )
    return [bool(each) for each in said]


def _local_rope(file: GgufFile, family: str, config: dict[str, Any]) -> dict[str, Any]:
    key = f"{family}.rope.freq_base_swa"
    if family == "gemma4":
        return {}  # see `gemma_config`
    if family in ("gemma3", "gemma3n"):
        base = shortest(file.number(key, 10_000.0))
        factor = attention_factor(file, family)
        if factor == 1:
            return {"rope_local_base_freq": base}
        longest = config["max_position_embeddings"]
        near = unscaled_longrope(config["head_dim"], factor, longest) | {"rope_theta": base}
        whole = config["rope_scaling"] | {"rope_theta": config["rope_theta"]}
        return {"rope_parameters": {"full_attention": whole, "sliding_attention": near}}
    whole_base = file.number(f"{family}.rope.freq_base", 10_000.0)
    if file.number(key, whole_base) != whole_base:
        raise UnsupportedModel(
            f"{file.path} rotates local layers by another base (rope.freq_base_swa), which no "
            f"other {family} does; use the model's safetensors folder"
        )
    return {}
