"""The tensors of a GGUF file under the names that the class of the model has for them."""

import re
import warnings
from collections.abc import Mapping

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.experts import apart
from kvkeep.models.gguf.file import GgufFile, PackedTensor
from kvkeep.models.gguf.gemma3n import LAYER_NAMES as GEMMA3N_NAMES
from kvkeep.models.gguf.gemma3n import streams_apart
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
_NORMED_TWICE = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = "GptOssForCausalLM"
# What is named otherwise in some: `qkv` and `up` are several matrices in one. What is no weight
# here, or no weight there, is named with what it is.
_LAYER_NAMES_OF = {
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    _GPT_OSS: {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
    },
    "Gemma3nForCausalLM": GEMMA3N_NAMES,
    "Gemma4ForCausalLM": {
        **_NORMED_TWICE,
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
        _NORMED_TWICE,
    ),
}
# Tables that the config says in another way.
_NOT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)


def weights_of(file: GgufFile, architecture: str) -> dict[str, PackedTensor]:
    """The tensors of the model by Hugging Face name, each expert by itself, in file order.

    Warns of tensors whose names GGUF does not define, and leaves them out. Raises UnsupportedModel
    for one that it defines and that the architecture does not have.
    """
    names = _LAYER_NAMES | _LAYER_NAMES_OF.get(architecture, {})
    weights, unknown = {}, []
    for name, tensor in apart(streams_apart(file.tensors), architecture == _GPT_OSS).items():
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        if (ours := _hugging_face_name(name, names)) is not None:
            weights[ours] = tensor
        elif _is_known(name):
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
    return weights


def _is_known(name: str) -> bool:
    """Whether a tensor is one that GGUF defines, of any architecture: it changes what one computes.

    A bias or a scale counts as the tensor that it belongs to.
    """
    from gguf import TENSOR_NAMES

    general = re.sub(r"^blk\.\d+\.", "blk.{bid}.", name)
    known = set(TENSOR_NAMES.values())
    return any(
        general[:end] in known for end in range(len(general) + 1) if general[end:][:1] in ("", ".")
    )


def _hugging_face_name(name: str, of_a_layer: Mapping[str, str]) -> str | None:
    if name.startswith("model."):  # an expert's or a stream's, named already
        return name
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer = re.fullmatch(r"blk\.(\d+)\.((\w+)\.(\w+))", name)
    if layer:
        index, whole, ours, kind = layer.groups()
        if whole in of_a_layer:
            return f"model.layers.{index}.{of_a_layer[whole]}"
        if ours in of_a_layer and kind in ("weight", "bias"):
            return f"model.layers.{index}.{of_a_layer[ours]}.{kind}"
    return None
