"""Mixtures of experts in GGUF: what the metadata say of them, and their tensors, expert by expert.

A layer has all gates in one tensor `[experts, rows, columns]`, all ups and all downs; files of
before April 2024 have each expert by itself. A block never crosses a row, so that each expert is
cut out as it is packed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvkeep.errors import UnsupportedModel
from kvkeep.models.gguf.file import GgufFile, PackedTensor

# Of `general.architecture`, the class and model_type of a mixture.
MIXTURES = {
    "llama": ("MixtralForCausalLM", "mixtral"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
}
_NORMED = ("qwen3moe", "qwen3vlmoe")  # whose weights of a token's experts add up to 1
_ALTERNATING = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
_SOFTMAX = 1  # LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX
_KINDS = {
    "gate": ["gate_proj"],
    "up": ["up_proj"],
    "down": ["down_proj"],
    "gate_up": ["gate_proj", "up_proj"],
}
_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)_exps\.(weight|bias)")
_APART = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_OTHERS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_OTHER = re.compile(rf"blk\.(\d+)\.({'|'.join(_OTHERS)})\.(weight|bias)")


def mixture_config(file: GgufFile, family: str) -> dict[str, Any]:
    """What `config.json` has of experts, the class included; nothing where there are none.

    Raises UnsupportedModel for a router of another kind, BadModelFile where fields are missing.
    """
    said = file.whole(f"{family}.expert_count", 0)
    if family == "gemma4":
        return _beside(file) if said else {}
    if family not in MIXTURES or (family == "llama" and not said):
        if said:
            raise UnsupportedModel(
                f"{file.path} is a mixture of experts under the name of {family}, which is not "
                "supported"
            )
        return {}
    _refuse_routers(file, family)
    architecture, model_type = MIXTURES[family]
    experts = file.count(f"{family}.expert_count")
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_experts_per_tok": file.same(f"{family}.expert_used_count"),
    }
    if family in ("llama", "granitemoe", "gpt-oss"):
        return {**found, "num_local_experts": experts}
    normed = file.flag(f"{family}.expert_weights_norm", family in _NORMED)
    found |= {"num_experts": experts, "norm_topk_prob": normed}
    if architecture in _ALTERNATING:
        width = file.same(f"{family}.expert_feed_forward_length")
        names = filter(
            None, (re.fullmatch(r"blk\.(\d+)\.ffn_gate\.weight", x) for x in file.tensors)
        )
        dense = sorted(int(name.group(1)) for name in names)
        found |= {"moe_intermediate_size": width, "mlp_only_layers": dense}
    if family == "qwen2moe":
        shared = file.count("qwen2moe.expert_shared_feed_forward_length")
        biases = "blk.0.attn_q.bias" in file.tensors
        found |= {"shared_expert_intermediate_size": shared, "qkv_bias": biases}
    return found


def _beside(file: GgufFile) -> dict[str, Any]:
    """Gemma 4's, beside its MLPs."""
    _refuse_routers(file, "gemma4")
    return {
        "enable_moe_block": True,
        "num_experts": file.count("gemma4.expert_count"),
        "top_k_experts": file.same("gemma4.expert_used_count"),
        "moe_intermediate_size": file.same("gemma4.expert_feed_forward_length"),
    }


def _refuse_routers(file: GgufFile, family: str) -> None:
    """Raises UnsupportedModel for what no family here has."""
    usual: dict[str, tuple[float, ...]] = {
        "expert_gating_func": (_SOFTMAX,),
        "expert_weights_scale": (0.0, 1.0),
        "expert_group_count": (0, 1),
        "expert_shared_count": (0, 1),
    }
    if family != "qwen2moe":
        usual["expert_shared_feed_forward_length"] = (0,)
    for key, values in usual.items():
        found = file.number(f"{family}.{key}", values[0])
        if found not in values:
            raise UnsupportedModel(
                f"{file.path} is a mixture of experts with {key} {found!r}, which is not supported"
            )


def apart(tensors: Mapping[str, PackedTensor], biases: bool) -> dict[str, PackedTensor]:
    """Tensors by their GGUF names, but those of experts and routers by the names that they have in
    `weights.tensor_shapes`, each expert by itself. Nothing is copied.

    biases: whether experts and routers have some; else none is known.
    """
    found: dict[str, PackedTensor] = {}
    for name, tensor in tensors.items():
        one, other, stack = (kind.fullmatch(name) for kind in (_APART, _OTHER, _STACK))
        if name.endswith(".bias") and not biases:
            found[name] = tensor
        elif stack and len(tensor.shape) == (2 if stack.group(3) == "bias" else 3):
            found |= _cut(f"model.layers.{stack.group(1)}.mlp.experts", stack, tensor)
        elif one:
            expert = f"model.layers.{one.group(1)}.mlp.experts.{one.group(3)}"
            found[f"{expert}.{one.group(2)}_proj.weight"] = tensor
        elif other:
            router = f"model.layers.{other.group(1)}.{_OTHERS[other.group(2)]}.{other.group(3)}"
            found[router] = tensor if other.group(3) == "bias" else _matrix(tensor)
        else:
            found[name] = tensor
    return found


def _cut(
    prefix: str, stack: re.Match[str], tensor: PackedTensor
) -> Iterator[tuple[str, PackedTensor]]:
    experts, rows, *columns = tensor.shape
    parts = _KINDS[stack.group(2)]
    each = rows // len(parts)
    for expert in range(experts):
        for number, part in enumerate(parts):
            some = tensor.data[expert, number * each : (number + 1) * each]
            cut = PackedTensor(tensor.name, tensor.quantisation, (len(some), *columns), some)
            yield f"{prefix}.{expert}.{part}.{stack.group(3)}", cut


def _matrix(tensor: PackedTensor) -> PackedTensor:
    """The gate of the shared expert is a vector there, and here a matrix of one row."""
    if len(tensor.shape) != 1:
        return tensor
    data = tensor.data.reshape(1, -1)
    return PackedTensor(tensor.name, tensor.quantisation, (1, *tensor.shape), data)
