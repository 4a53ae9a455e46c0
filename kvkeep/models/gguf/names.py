"""The tensors of a GGUF file under their Hugging Face names."""

import re
import warnings
from collections.abc import Mapping

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.experts import split_experts
from kvkeep.models.gguf.file import GgufFile, PackedTensor
from kvkeep.models.gguf.gemma import GEMMA3N_LAYER_NAMES, split_streams
from kvkeep.models.layers.experts import EXPERT_SCALES, ROUTER_SCALE

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INPUT_AND_OUTPUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = "GptOssForCausalLM"
# Names of single architectures: in some, `attn_qkv` and `ffn_up` are several matrices in one. A
# tensor that is not called "weight" on one of the sides has its full name here.
_ARCHITECTURE_LAYER_NAMES = {
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    _GPT_OSS: {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
    },
    "Gemma3nForCausalLM": GEMMA3N_LAYER_NAMES,
    "Gemma4ForCausalLM": {
        **_INPUT_AND_OUTPUT_NORMS,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale.weight": "layer_scalar",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp.scale": ROUTER_SCALE,
        "ffn_down_exps.scale": EXPERT_SCALES,
    },
    "Glm4ForCausalLM": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    **dict.fromkeys(
        (
            "Olmo2ForCausalLM",
            "Olmo3ForCausalLM",
            "Exaone4ForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
        ),
        _INPUT_AND_OUTPUT_NORMS,
    ),
}
# RoPE tables, which the config states in another form.
_NOT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)


def named_tensors(file: GgufFile, architecture: str) -> dict[str, PackedTensor]:
    """Return the tensors of the model by Hugging Face name, one per expert, in file order.

    Tensors whose names GGUF does not define are left out, with a warning. Raises UnsupportedModel
    for a tensor that GGUF defines but the architecture does not have.
    """
    names = _LAYER_NAMES | _ARCHITECTURE_LAYER_NAMES.get(architecture, {})
    named, unknown = {}, []
    tensors = split_experts(split_streams(file.tensors), biases=architecture == _GPT_OSS)
    for name, tensor in tensors.items():
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        if (new_name := _hugging_face_name(name, names)) is not None:
            named[new_name] = tensor
        elif _is_defined(name):
            raise UnsupportedModel(f"the GGUF tensor {name} is not one of its architecture's")
        else:
            unknown.append(name)
    if unknown:
        warnings.warn(
            f"{file.path} has tensors whose names GGUF does not define, which are left out: "
            f"{', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}",
            RuntimeWarning,
            stacklevel=3,
        )
    return named


def _is_defined(name: str) -> bool:
    """Whether GGUF defines a tensor for any architecture, so that a forward could depend on it.

    A bias or a scale counts as the tensor that it belongs to.
    """
    from gguf import TENSOR_NAMES

    general = re.sub(r"^blk\.\d+\.", "blk.{bid}.", name)
    defined = set(TENSOR_NAMES.values())
    return any(
        general[:end] in defined
        for end in range(len(general) + 1)
        if general[end:][:1] in ("", ".")
    )


def _hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str | None:
    if name.startswith("model."):  # renamed by split_experts or split_streams
        return name
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer = re.fullmatch(r"blk\.(\d+)\.((\w+)\.(\w+))", name)
    if layer:
        index, full_name, base_name, kind = layer.groups()
        if full_name in layer_names:
            return f"model.layers.{index}.{layer_names[full_name]}"
        if base_name in layer_names and kind in ("weight", "bias"):
            return f"model.layers.{index}.{layer_names[base_name]}.{kind}"
    return None
