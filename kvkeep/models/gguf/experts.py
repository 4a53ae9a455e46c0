"""Mixtures of experts in GGUF: their metadata as config.json states it, and one tensor per expert.

A layer has its gates stacked in one tensor `[experts, rows, columns]`, and likewise its ups and its
downs; files from before April 2024 have a tensor for each expert. Quantised blocks never cross a
row, so an expert can be cut out of a stack without unpacking it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.file import GgufFile, PackedTensor

# general.architecture to the class and model_type of a mixture.
MIXTURES = {
    "llama": ("MixtralForCausalLM", "mixtral"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
}
_NORM_TOPK = ("qwen3moe", "qwen3vlmoe")  # renormalise the weights of the chosen experts by default
_SOME_LAYERS_DENSE = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
_SOFTMAX = 1  # LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX
_PROJECTIONS = {
    "gate": ["gate_proj"],
    "up": ["up_proj"],
    "down": ["down_proj"],
    "gate_up": ["gate_proj", "up_proj"],
}
_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)_exps\.(weight|bias)")
_DENSE_GATE = re.compile(r"blk\.(\d+)\.ffn_gate\.weight")
_SINGLE = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_ROUTER_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_ROUTER = re.compile(rf"blk\.(\d+)\.({'|'.join(_ROUTER_NAMES)})\.(weight|bias)")


def mixture_config(file: GgufFile, family: str) -> dict[str, Any]:
    """Return the config fields of experts, with the model's class; empty without experts.

    Raises UnsupportedModel for unsupported routers, and BadModelFile for missing fields.
    """
    expert_count = file.non_negative(f"{family}.expert_count", 0)
    if family == "gemma4":
        return _gemma4_experts(file) if expert_count else {}
    if family not in MIXTURES or (family == "llama" and not expert_count):
        if expert_count:
            raise UnsupportedModel(
                f"{file.path} is a mixture of experts under the name of {family}, which is not "
                "supported"
            )
        return {}
    _refuse_routers(file, family)
    architecture, model_type = MIXTURES[family]
    experts = file.count(f"{family}.expert_count")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_experts_per_tok": file.uniform_count(f"{family}.expert_used_count"),
    }
    if family in ("llama", "granitemoe", "gpt-oss"):
        return {**config, "num_local_experts": experts}
    norm_topk = file.flag(f"{family}.expert_weights_norm", family in _NORM_TOPK)
    config |= {"num_experts": experts, "norm_topk_prob": norm_topk}
    if architecture in _SOME_LAYERS_DENSE:
        width = file.uniform_count(f"{family}.expert_feed_forward_length")
        gates = filter(None, map(_DENSE_GATE.fullmatch, file.tensors))
        dense = sorted(int(gate.group(1)) for gate in gates)
        config |= {"moe_intermediate_size": width, "mlp_only_layers": dense}
    if family == "qwen2moe":
        shared_size = file.count("qwen2moe.expert_shared_feed_forward_length")
        has_bias = "blk.0.attn_q.bias" in file.tensors
        config |= {"shared_expert_intermediate_size": shared_size, "qkv_bias": has_bias}
    return config


def _gemma4_experts(file: GgufFile) -> dict[str, Any]:
    """Return the config fields of the experts beside Gemma 4's MLPs."""
    _refuse_routers(file, "gemma4")
    return {
        "enable_moe_block": True,
        "num_experts": file.count("gemma4.expert_count"),
        "top_k_experts": file.uniform_count("gemma4.expert_used_count"),
        "moe_intermediate_size": file.uniform_count("gemma4.expert_feed_forward_length"),
    }


def _refuse_routers(file: GgufFile, family: str) -> None:
    """Raise UnsupportedModel for routers that no supported family has."""
    supported: dict[str, tuple[float, ...]] = {
        "expert_gating_func": (_SOFTMAX,),
        "expert_weights_scale": (0.0, 1.0),
        "expert_group_count": (0, 1),
        "expert_shared_count": (0, 1),
    }
    if family != "qwen2moe":
        supported["expert_shared_feed_forward_length"] = (0,)
    for key, values in supported.items():
        value = file.number(f"{family}.{key}", values[0])
        if value not in values:
            raise UnsupportedModel(
                f"{file.path} is a mixture of experts with {key} {value!r}, which is not supported"
            )


def split_experts(tensors: Mapping[str, PackedTensor], biases: bool) -> dict[str, PackedTensor]:
    """Cut stacks of experts apart, without copying.

    Tensors of experts and routers get the names of `tensor_shapes`; all others keep their GGUF
    names.

    biases: whether the experts and routers of this family have biases. If not, biases keep their
    GGUF names.
    """
    split: dict[str, PackedTensor] = {}
    for name, tensor in tensors.items():
        single, router, stack = (pattern.fullmatch(name) for pattern in (_SINGLE, _ROUTER, _STACK))
        if name.endswith(".bias") and not biases:
            split[name] = tensor
        elif stack and len(tensor.shape) == (2 if stack.group(3) == "bias" else 3):
            split |= _expert_parts(f"model.layers.{stack.group(1)}.mlp.experts", stack, tensor)
        elif single:
            layer, projection, expert = single.groups()
            split[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"] = tensor
        elif router:
            layer, part, kind = router.groups()
            new_name = f"model.layers.{layer}.{_ROUTER_NAMES[part]}.{kind}"
            split[new_name] = tensor if kind == "bias" else _as_matrix(tensor)
        else:
            split[name] = tensor
    return split


def _expert_parts(
    prefix: str, stack: re.Match[str], tensor: PackedTensor
) -> Iterator[tuple[str, PackedTensor]]:
    """Yield the name and tensor of each expert's projections in a stack.

    Example: a stack `ffn_gate_up_exps` of `[8, 512, 128]` yields for each of 8 experts a gate_proj
    and an up_proj of `[256, 128]`.
    """
    experts, rows, *columns = tensor.shape
    parts = _PROJECTIONS[stack.group(2)]
    part_rows = rows // len(parts)
    for expert in range(experts):
        for index, part in enumerate(parts):
            data = tensor.data[expert, index * part_rows : (index + 1) * part_rows]
            projection = PackedTensor(tensor.name, tensor.quantisation, (len(data), *columns), data)
            yield f"{prefix}.{expert}.{part}.{stack.group(3)}", projection


def _as_matrix(tensor: PackedTensor) -> PackedTensor:
    """Return the shared expert's gate, a vector in GGUF, as a matrix of one row."""
    if len(tensor.shape) != 1:
        return tensor
    data = tensor.data.reshape(1, -1)
    return PackedTensor(tensor.name, tensor.quantisation, (1, *tensor.shape), data)
