"""The tensors of a GGUF file by their Hugging Face names, with stacks split into matrices.

A stack holds one projection of all experts, `[experts, rows, columns]`; files from before April
2024 have a tensor for each expert. Gemma 3n stacks the matrices of all residual streams but the
first. Quantised blocks never cross a row, so a matrix is a view of its stack.
"""

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.file import GgufFile, PackedTensor
from kvkeep.models.layers.experts import (
    EXPERT_SCALES,
    LATENT_DOWN,
    LATENT_UP,
    ROUTER_SCALE,
    SELECTION_BIAS,
)

_MODEL_NAMES = {  # of tensors outside layers
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
# Without the suffix, which is "weight" or "bias"; with it where the Hugging Face name has none.
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
_MOE_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_INPUT_AND_OUTPUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PER_LAYER_EMBEDDING = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_SHORT_CONVOLUTION_NAMES = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_DELTA_NET_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of early files
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_MAMBA_NAMES = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_GPT_OSS = "GptOssForCausalLM"
# Names of single architectures: in some, `attn_qkv` and `ffn_up` are several matrices in one.
_ARCHITECTURE_LAYER_NAMES = {
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    _GPT_OSS: {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
    },
    "Gemma3nForCausalLM": {
        **_INPUT_AND_OUTPUT_NORMS,
        **_PER_LAYER_EMBEDDING,
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    "Gemma4ForCausalLM": {
        **_INPUT_AND_OUTPUT_NORMS,
        **_PER_LAYER_EMBEDDING,
        "layer_output_scale.weight": "layer_scalar",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp.scale": ROUTER_SCALE,
        "ffn_down_exps.scale": EXPERT_SCALES,
    },
    "Lfm2ForCausalLM": _SHORT_CONVOLUTION_NAMES,
    "Lfm2MoeForCausalLM": {**_SHORT_CONVOLUTION_NAMES, "exp_probs_b.bias": SELECTION_BIAS},
    "GraniteMoeHybridForCausalLM": _MAMBA_NAMES,
    "BambaForCausalLM": _MAMBA_NAMES,
    "FalconH1ForCausalLM": _MAMBA_NAMES,
    "NemotronHForCausalLM": {
        **_MAMBA_NAMES,
        "exp_probs_b.bias": SELECTION_BIAS,
        "ffn_latent_down.weight": LATENT_DOWN,
        "ffn_latent_up.weight": LATENT_UP,
    },
    "Qwen3_5ForCausalLM": _DELTA_NET_NAMES,
    "Qwen3_5MoeForCausalLM": _DELTA_NET_NAMES,
    "Qwen3NextForCausalLM": _DELTA_NET_NAMES,
    "Glm4ForCausalLM": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "Olmo2ForCausalLM": _INPUT_AND_OUTPUT_NORMS,
    "Olmo3ForCausalLM": _INPUT_AND_OUTPUT_NORMS,
    "Exaone4ForCausalLM": _INPUT_AND_OUTPUT_NORMS,
    "Gemma2ForCausalLM": _INPUT_AND_OUTPUT_NORMS,
    "Gemma3ForCausalLM": _INPUT_AND_OUTPUT_NORMS,
}
# Tensors outside layers that single architectures have under another name.
_LFM2_MODEL_NAMES = {"token_embd_norm.weight": "model.norm.weight"}
_ARCHITECTURE_MODEL_NAMES = {
    "Lfm2ForCausalLM": _LFM2_MODEL_NAMES,
    "Lfm2MoeForCausalLM": _LFM2_MODEL_NAMES,
}
# Stored as `[channels, width]`, loaded as `[channels, 1, width]`.
_CONVOLUTIONS = ("shortconv.conv", "ssm_conv1d")
_STREAM_STACK_NAMES = {
    "altup_proj.weight": "altup_projections",
    "altup_unembd_proj.weight": "altup_unembed_projections",
}
# RoPE tables, which the config states in another form.
_NOT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([\w.]+)\.(\w+)")
_BARE_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(ssm_[ad])")  # without a suffix
_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)")
_EXPERT_STACK = re.compile(r"ffn_(gate_up|gate|up|down)_exps")


def named_tensors(file: GgufFile, architecture: str) -> dict[str, PackedTensor]:
    """Return the tensors of the model by Hugging Face name, one per expert, in file order.

    Tensors whose names GGUF does not define are left out, with a warning. Raises UnsupportedModel
    for a tensor that GGUF defines but the architecture does not have.
    """
    layer_names = _LAYER_NAMES | _ARCHITECTURE_LAYER_NAMES.get(architecture, {})
    named: dict[str, PackedTensor] = {}
    undefined = []
    for name, tensor in file.tensors.items():
        if _NOT_WEIGHTS.fullmatch(name) or _is_of_predicting_layer(file, name):
            continue
        if renamed := _by_hub_name(name, tensor, layer_names, architecture):
            named |= renamed
        elif _is_gguf_name(name):
            raise UnsupportedModel(f"the GGUF tensor {name} is unknown in its architecture")
        else:
            undefined.append(name)
    if undefined:
        warnings.warn(
            f"{file.path} has tensors with names that GGUF does not define, which are ignored: "
            f"{', '.join(undefined[:3])}{', ...' if len(undefined) > 3 else ''}",
            RuntimeWarning,
            stacklevel=3,
        )
    return named


def _is_of_predicting_layer(file: GgufFile, name: str) -> bool:
    """Whether a tensor is of a layer that predicts several tokens, which come last."""
    match = re.match(r"blk\.(\d+)\.", name)
    has_such_layers = file.predicting_layer_count() > 0
    return match is not None and has_such_layers and int(match[1]) >= file.layer_count()


def _is_gguf_name(name: str) -> bool:
    """Whether GGUF defines the name, or that of the module that it belongs to, for any model."""
    from gguf import TENSOR_NAMES

    name_parts = re.sub(r"^blk\.\d+\.", "blk.{bid}.", name).split(".")
    prefixes = {".".join(name_parts[:count]) for count in range(1, len(name_parts) + 1)}
    return not prefixes.isdisjoint(TENSOR_NAMES.values())


def _by_hub_name(
    name: str, tensor: PackedTensor, layer_names: Mapping[str, str], architecture: str
) -> dict[str, PackedTensor]:
    """Return a tensor, or the parts of a stack, by Hugging Face name; empty if it has none."""
    model_names = _MODEL_NAMES | _ARCHITECTURE_MODEL_NAMES.get(architecture, {})
    if name in model_names:
        return {model_names[name]: tensor}
    if name in _STREAM_STACK_NAMES and len(tensor.shape) == 3:
        return {
            f"model.{_STREAM_STACK_NAMES[name]}.{stream}.weight": _stack_part(tensor, data)
            for stream, data in enumerate(tensor.data)
        }
    if name.endswith(".ffn_norm"):  # so in files of Falcon-H1
        name = f"{name}.weight"
    bare_match = _BARE_LAYER_TENSOR.fullmatch(name)
    if bare_match and bare_match[2] in layer_names:
        name = f"model.layers.{bare_match[1]}.{layer_names[bare_match[2]]}"
        return {name: _flattened(tensor)}
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return {}
    prefix, module, suffix = f"model.layers.{match[1]}", match[2], match[3]
    if f"{module}.{suffix}" in layer_names:
        return {f"{prefix}.{layer_names[f'{module}.{suffix}']}": tensor}
    if suffix not in ("weight", "bias"):
        return {}
    if module == "ssm_norm" and module in layer_names:
        tensor = _flattened(tensor)
    if module in _CONVOLUTIONS and module in layer_names and len(tensor.shape) == 2:
        channels, width = tensor.shape
        data = tensor.data.reshape(channels, 1, -1)
        tensor = replace(tensor, shape=(channels, 1, width), data=data)
    if module in layer_names:
        return {f"{prefix}.{layer_names[module]}.{suffix}": tensor}
    if suffix == "bias" and architecture != _GPT_OSS:  # only its experts and routers have biases
        return {}
    return _expert_tensors(prefix, module, suffix, tensor)


def _expert_tensors(
    prefix: str, module: str, suffix: str, tensor: PackedTensor
) -> dict[str, PackedTensor]:
    """Return a layer's tensor of a router or of experts by Hugging Face name; empty for others."""
    if module in _MOE_NAMES:
        if suffix == "weight" and len(tensor.shape) == 1:  # the shared expert's gate, one row
            tensor = replace(tensor, shape=(1, *tensor.shape), data=tensor.data.reshape(1, -1))
        return {f"{prefix}.{_MOE_NAMES[module]}.{suffix}": tensor}
    if (expert_match := _EXPERT.fullmatch(module)) and suffix == "weight":
        return {f"{prefix}.mlp.experts.{expert_match[2]}.{expert_match[1]}_proj.weight": tensor}
    stack_match = _EXPERT_STACK.fullmatch(module)
    if stack_match and len(tensor.shape) == (2 if suffix == "bias" else 3):
        return _unstack_experts(f"{prefix}.mlp.experts", stack_match[1].split("_"), suffix, tensor)
    return {}


def _flattened(tensor: PackedTensor) -> PackedTensor:
    """Return a vector that is stored as a matrix, as those of Mamba-2 are, as a vector."""
    if len(tensor.shape) == 1 or tensor.ggml_type != "F32":
        return tensor
    data = tensor.data.reshape(-1)
    return replace(tensor, shape=data.shape, data=data)


def _unstack_experts(
    prefix: str, projections: list[str], suffix: str, stack: PackedTensor
) -> dict[str, PackedTensor]:
    """Return each expert's projections in a stack.

    Example: a stack `ffn_gate_up_exps` of `[8, 512, 128]` gives for each of 8 experts a gate_proj
    and an up_proj of `[256, 128]`.
    """
    rows = stack.shape[1] // len(projections)
    return {
        f"{prefix}.{expert}.{projection}_proj.{suffix}": _stack_part(
            stack, data[index * rows : (index + 1) * rows]
        )
        for expert, data in enumerate(stack.data)
        for index, projection in enumerate(projections)
    }


def _stack_part(stack: PackedTensor, data: NDArray[Any]) -> PackedTensor:
    """Return rows of one matrix (or bias) of a stack."""
    return replace(stack, shape=(len(data), *stack.shape[2:]), data=data)
