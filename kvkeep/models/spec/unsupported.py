"""Models that kvkeep refuses: the reasons, what to use instead, and the checks of a config."""

from collections.abc import Collection, Mapping

from kvkeep.errors import UnsupportedModel
from kvkeep.models.spec.config_fields import ConfigFields
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.family import Family
from kvkeep.models.spec.model_spec import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_GPT_OSS = "GptOssForCausalLM"
_GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
_GEMMA3N = ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")
# Architectures, a field, its supported values, and what any other value makes of the model.
_UNSUPPORTED_FIELDS: tuple[tuple[Collection[str], str, tuple[object, ...], str], ...] = (
    (
        ("CohereForCausalLM", "Cohere2ForCausalLM"),
        "use_qk_norm",
        (None, False),
        "with query and key norms, as in Command R+",
    ),
    (("OlmoeForCausalLM",), "clip_qkv", (None,), "with clipped queries, keys and values"),
    (_GEMMA3, "attn_logit_softcapping", (None,), "with attention softcapping, as in Gemma 2"),
    (_GEMMA3N, "attn_logit_softcapping", (None,), "with attention softcapping"),
    (_GEMMA3N, "altup_correct_scale", (True,), "without a scale of corrections"),
    ((_GPT_OSS,), "swiglu_alpha", (1.702,), "with another gate in its experts"),
    ((_GPT_OSS,), "swiglu_limit", (7.0,), "with an expert clamp other than 7"),
    (
        FAMILIES,
        "use_bidirectional_attention",
        (None, False, "vision"),
        "with bidirectional attention, for embeddings,",
    ),
    (FAMILIES, "is_causal", (None, True), "with bidirectional attention, for embeddings,"),
)
_MAMBA = "has state layers (Mamba)"
_LATENT = "uses multi-head latent attention (MLA)"
_GROUPS = "routes to experts by biased scores, or by groups of experts"
_QWEN3_MOE = "Qwen3 is supported, dense or MoE"
_GRANITE = "granite-4.0-micro, -1b and -350m and Granite 3 are supported"
_ANY = "Llama 3, Qwen3 and Granite are supported"
# Reason and alternative: the architectures, by their names in config.json and in GGUF files.
_UNSUPPORTED = {
    (_MAMBA, _ANY): "JambaForCausalLM jamba MambaForCausalLM Mamba2ForCausalLM mamba mamba2",
    (_LATENT, "its Qwen2 and Llama distillations are supported"): (
        "DeepseekV2ForCausalLM DeepseekV3ForCausalLM deepseek2"
    ),
    (_LATENT, _ANY): "MiniCPM3ForCausalLM minicpm3",
    (_LATENT, "Mistral Small 3 and Ministral 3 are supported"): "Mistral4ForCausalLM mistral4",
    ("stores experts in another order", "its GGUF files are supported"): (
        "Qwen3VLMoeForConditionalGeneration"
    ),
    (_GROUPS, "GLM-4 is supported"): "Glm4MoeForCausalLM glm4moe",
    (_GROUPS, _QWEN3_MOE): "Ernie4_5_MoeForCausalLM ernie4_5-moe Dots1ForCausalLM dots1",
    (
        "routes to experts with SparseMixer",
        "Phi-3 and Phi-4 are supported",
    ): "PhimoeForCausalLM phimoe",
    ("has a shared expert without a gate", _GRANITE): "GraniteMoeSharedForCausalLM",
}
_REASONS = {name: reason for reason, names in _UNSUPPORTED.items() for name in names.split()}


def unsupported_reason(architecture: object) -> str:
    """Return ": it <reason>. In its place <model>" for a known architecture, else ""."""
    if not isinstance(architecture, str) or architecture not in _REASONS:
        return ""
    reason, alternative = _REASONS[architecture]
    return f": it {reason}. Instead, {alternative}"


def architecture_error(architecture: object) -> UnsupportedModel:
    """Return the error for an architecture, with the reason and an alternative if known."""
    return UnsupportedModel(
        f"architecture {architecture} is not supported{unsupported_reason(architecture)}; "
        f"supported: {', '.join(FAMILIES)}"
    )


def activations(family: Family) -> Mapping[str, Activation]:
    """Return the activations that a family may have, by their names in configs."""
    return {"relu2": "relu2"} if family.ungated_mlps else _ACTIVATIONS


def check_fields(config: ConfigFields, architecture: str) -> None:
    """Raise UnsupportedModel for fields of a supported architecture with values that are not."""
    family = FAMILIES[architecture]
    activation, supported = config.get(family.activation_field, "silu"), activations(family)
    if not isinstance(activation, str) or activation not in supported:
        raise UnsupportedModel(
            f"{architecture} with activation {activation!r} is not supported, only "
            f"{', '.join(supported)}"
        )
    for architectures, field, supported_values, variant in _UNSUPPORTED_FIELDS:
        if architecture in architectures and config.get(field) not in supported_values:
            raise UnsupportedModel(
                f"{architecture} {variant} ({field}) is not supported, unlike others of its family"
            )
    quantisation = config.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "?") if isinstance(quantisation, dict) else "?"
        if architecture == _GPT_OSS and method == "mxfp4":
            return
        raise UnsupportedModel(
            f"weights quantised by {method!r} are not supported; use the model's bf16 safetensors "
            "or a .gguf file"
        )
