"""Local layers of a GGUF file, as config.json states them."""

from typing import Any

from kvkeep.errors import BadModelFile, UnsupportedModel
from kvkeep.models.gguf.file import GgufFile, shown
from kvkeep.models.gguf.rope import attention_factor, shortest_decimal, unscaled_longrope

_WITH_LOCAL = ("gemma2", "gemma3", "cohere2", "exaone4", "olmo2", "gpt-oss", "gemma3n", "gemma4")
_DEFAULT_WINDOW = {"gemma2": 4096, "gemma3n": 512}
_ALWAYS_LOCAL = ("cohere2", "gpt-oss", "gemma4")  # every model of these has local layers


def layers_config(file: GgufFile, family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config's window and kinds of layers; empty for families without local layers.

    Without `layer_types` in the result, the defaults of the model's class apply.

    config: the fields found so far.

    Raises UnsupportedModel, BadModelFile.
    """
    if family not in _WITH_LOCAL or (family == "olmo2" and not is_olmo3(file)):
        return {}
    layers = file.layer_count(family)
    default = None if family in _ALWAYS_LOCAL else _DEFAULT_WINDOW.get(family, 0)
    window = file.non_negative(f"{family}.attention.sliding_window", default)
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    kinds = ("full_attention", "sliding_attention")
    is_local = local_layer_flags(file, f"{family}.attention.sliding_window_pattern", layers)
    return {
        "sliding_window": window,
        **({} if is_local is None else {"layer_types": [kinds[local] for local in is_local]}),
        **_local_rope(file, family, config),
    }


def is_olmo3(file: GgufFile) -> bool:
    """Whether a file with the architecture olmo2 is an OLMo 3, which has local layers."""
    return file.non_negative("olmo2.attention.sliding_window", 0) > 0


def local_layer_flags(file: GgufFile, key: str, layers: int) -> list[bool] | None:
    """Return for each layer whether it is local; None if the file does not state it.

    The file states a list of flags, or a period: every period-th layer is global.
    """
    if not file.has(key):
        return None
    pattern = file.required(key)
    if type(pattern) is int and pattern > 0:
        return [(layer + 1) % pattern > 0 for layer in range(layers)]
    if (
        not isinstance(pattern, list)
        or len(pattern) != layers
        or any(flag not in (0, 1) for flag in pattern)
    ):
        raise BadModelFile(
            f"{file.path}: metadata field {key} must say of each of {layers} layers whether it is "
            f"local, found {shown(pattern)}; fetch it again"
        )
    return [bool(flag) for flag in pattern]


def _local_rope(file: GgufFile, family: str, config: dict[str, Any]) -> dict[str, Any]:
    key = f"{family}.rope.freq_base_swa"
    if family == "gemma4":
        return {}  # part of `gemma_config`
    if family in ("gemma3", "gemma3n"):
        base = shortest_decimal(file.number(key, 10_000.0))
        factor = attention_factor(file, family)
        if factor == 1:
            return {"rope_local_base_freq": base}
        longest = config["max_position_embeddings"]
        unscaled = unscaled_longrope(config["head_dim"], factor, longest)
        return {
            "rope_parameters": {
                "full_attention": config["rope_scaling"] | {"rope_theta": config["rope_theta"]},
                "sliding_attention": unscaled | {"rope_theta": base},
            }
        }
    global_base = file.number(f"{family}.rope.freq_base", 10_000.0)
    if file.number(key, global_base) != global_base:
        raise UnsupportedModel(
            f"{file.path} rotates local layers by another base (rope.freq_base_swa), which no "
            f"other {family} does; use the model's safetensors folder"
        )
    return {}
