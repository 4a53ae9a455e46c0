"""Small random bfloat16 models with packed weights that the compiled kernels support."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_models import small_tokenizer

from kvkeep.executors import new_decoder
from kvkeep.model import Model
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.layers.primitives import LM_HEAD
from kvkeep.models.spec.model_spec import ModelSpec, RopeSpec
from kvkeep.models.spec.state_layers import StateLayers, is_float32_weight
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.packing import MatrixBits, PackedMatrix, pack, quantise
from kvkeep.models.weights.tensors import is_router, matrix_shapes

VOCABULARY = 264  # not a multiple of 16


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "phi4": "Phi3ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "gemma4-alone": "Gemma4ForCausalLM",
    "gemma4-experts": "Gemma4ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "smollm3-yarn": "SmolLM3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2-moe": "Qwen2MoeForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granite-moe": "GraniteMoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "qwen3.5": "Qwen3_5ForCausalLM",
    "lfm2-moe": "Lfm2MoeForCausalLM",
    "granite4-moe": "GraniteMoeHybridForCausalLM",
    "gated-sigmoid": "Qwen3_5MoeForCausalLM",
}
MULTIPLIERS = {
    "embedding_multiplier": 3.7,
    "residual_multiplier": 0.22,
    "logits_multiplier": 0.55,
    "attention_multiplier": 0.15,
}
SEVEN = {"experts": 7, "experts_per_token": 3, "expert_size": 96}
SIGMOID = {**SEVEN, "sigmoid_router": True}
UNGATED = {"shared_expert_size": 160, "ungated_shared_expert": True}
LOCAL = {"local_layers": (0, 2), "window": 20}
NEAR = RopeSpec("default", tuple(100.0 ** (-i / 128) for i in range(128)))
GEMMA = {
    **LOCAL,
    "norms_after": True,
    "unit_norms": True,
    "activation": "gelu_tanh",
    "embedding_multiplier": 192**0.5,
    "embedding_multiplier_rounded": True,
}
GEMMA4 = {
    **GEMMA,
    "unit_norms": False,
    "layers": 6,
    "local_layers": (0, 1, 3, 4),
    "qk_norm": True,
    "attention_multiplier": 0.1,
    "values_normed": True,
    "layer_scales": True,
    "logits_softcap": 6.0,
}
# 31B and 26B-A4B: global layers have other KV heads, whose keys are also the values.
ALONE = {**GEMMA4, "keys_as_values": True, "kv_heads": 1, "local_kv_heads": 3}
BEYOND: dict[str, dict[str, Any]] = {
    "gemma4": {**GEMMA4, "shared_kv_layers": 3, "wide_shared_mlp": True, "per_layer_size": 32},
    "gemma4-alone": ALONE,
    "gemma4-experts": {**ALONE, **SEVEN, "norm_topk": True, "experts_beside": True},
    "gemma2": {**GEMMA, "attention_softcap": 5.0, "logits_softcap": 6.0},
    "gemma3": {**GEMMA, "local_rope": NEAR, "attention_multiplier": 0.1},
    "cohere2": {**LOCAL, "unrotated_layers": (1,), "centred_norms": True, "parallel": True},
    "smollm3": {"unrotated_layers": (1,)},
    "smollm3-yarn": {"unrotated_layers": (1,)},
    "granite": MULTIPLIERS,
    "olmo2": {"norms_before": False, "norms_after": True, "qk_norm_whole": True},
    "glm4": {"norms_after": True},
    "cohere": {"centred_norms": True, "parallel": True, "logits_multiplier": 0.5},
    "mixtral": {**SEVEN, "norm_topk": True, "experts_per_token": 2},
    "qwen2-moe": {**SEVEN, "shared_expert_size": 160},
    "qwen3-moe": {**SEVEN, "norm_topk": True, "dense_layers": (1,)},
    "olmoe": {**SEVEN, "experts": 18, "qk_norm_whole": True},
    "gpt-oss": {**LOCAL, **SEVEN, "norm_topk": True, "clamped_experts": True, "sinks": True},
    "granite-moe": {**MULTIPLIERS, **SEVEN, "norm_topk": True},
    # Hybrid families, here with attention in all layers.
    "qwen3.5": {"gated_attention": True, "unit_norms": True},
    "lfm2-moe": {**SIGMOID, "router_bias": True, "norm_topk": True, "dense_layers": (0,)},
    "granite4-moe": {**MULTIPLIERS, **SEVEN, **UNGATED, "norm_topk": True},
    "gated-sigmoid": {**SIGMOID, **UNGATED, "gated_attention": True, "routed_scale": 1.7},
}
# The rotated part of each head, and the attention factor of YaRN or longrope.
ROTATED = {"glm4": (0.5, 1.0), "phi4": (0.75, 1.19), "smollm3-yarn": (1.0, 1.3)}
_QUARTER = ("gemma4", "gemma4-alone", "gemma4-experts", "qwen3.5", "gated-sigmoid")
ROTATED |= dict.fromkeys(_QUARTER, (0.25, 1.0))


def spec_of(head_dim: int = 64, family: str = "llama") -> ModelSpec:
    """Return a spec with six heads and two KV heads; Gemma 4's local layers have half the width."""
    part, scaling = ROTATED.get(family, (1.0, 1.0))
    pairs = int(part * head_dim) // 2
    frequencies = tuple(10000.0 ** (-i / pairs) for i in range(pairs))
    unrotated = (0.0,) * (head_dim // 2 - pairs)
    beyond = BEYOND.get(family, {})
    if family.startswith("gemma4"):
        near = RopeSpec(
            "default", tuple(100.0 ** (-4 * i / head_dim) for i in range(head_dim // 4))
        )
        beyond = {**beyond, "local_head_dim": head_dim // 2, "local_rope": near}
    usual = ModelSpec(
        architecture=ARCHITECTURES[family],
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=320,
        layers=3,
        heads=6,
        kv_heads=2,
        head_dim=head_dim,
        norm_eps=1e-5,
        max_positions=4096,
        rope=RopeSpec(
            "proportional" if family.startswith("gemma4") else "default",
            frequencies + unrotated,
            scaling,
        ),
        tied_head=family != "qwen3",
        qkv_bias=family in ("qwen2", "qwen2-moe", "glm4", "gpt-oss"),
        output_bias=family == "gpt-oss",
        mlp_bias=False,
        qk_norm=family in ("qwen3", "qwen3-moe", "olmo2", "olmoe", "gemma3", "qwen3.5", "lfm2-moe"),
        bos_token_id=None,
        eos_token_ids=(0,),
    )
    return replace(usual, **beyond)


# Widths of 16 more than a multiple of 32, numbers of heads that are not powers of two, and a matrix
# whose rows are not a multiple of 16.
STATE_LAYERS = {
    "convolution": StateLayers("convolution", (0, 1, 3), 160, conv_width=4, conv_bias=True),
    "delta_net": StateLayers(
        "delta_net",
        (0, 1, 3),
        channels=2 * 3 * 48 + 6 * 80,
        conv_width=3,
        key_heads=3,
        value_heads=6,
        key_dim=48,
        value_dim=80,
    ),
    "mamba2": StateLayers(
        "mamba2",
        (0, 1, 3),
        channels=9 * 32 + 2 * 3 * 48,
        conv_width=4,
        conv_bias=True,
        key_heads=3,
        value_heads=9,
        key_dim=48,
        value_dim=32,
        proj_bias=True,
    ),
}
STATE_LAYERS["delta_net, tiled"] = replace(STATE_LAYERS["delta_net"], tiled_output=True)
STATE_LAYERS["mamba2, no norm"] = replace(STATE_LAYERS["mamba2"], norm="none")
STATE_LAYERS["mamba2, one block a layer"] = replace(STATE_LAYERS["mamba2"], layers=(0, 4))
STATE_LAYERS["mamba2, beside attention"] = replace(
    STATE_LAYERS["mamba2"],
    proj_bias=False,
    norm="before_gate",
    beside_attention=True,
    input_multiplier=1.3,
    output_multiplier=0.7,
    part_multipliers=(0.8, 1.2, 0.9, 1.1, 1.4),
)


def spec_with_states(kind: str) -> ModelSpec:
    """Return a spec with four layers, of which the third attends, or all, as in Falcon-H1."""
    spec = replace(spec_of(), layers=4, states=STATE_LAYERS[kind])
    if kind == "mamba2, one block a layer":  # as in Nemotron-H
        return replace(spec, layers=6, mlp_layers=(1, 3, 5), activation="relu2")
    if not STATE_LAYERS[kind].beside_attention:
        return spec
    return replace(
        spec,
        attention_input_multiplier=0.8,
        attention_output_multiplier=1.25,
        gate_multiplier=1.3,
        mlp_output_multiplier=0.6,
    )


def packed_model(
    spec: ModelSpec, bits: MatrixBits | None, seed: int = 0, lossless: bool = True
) -> Model:
    """Return a random model.

    bits: of all matrices; None for bfloat16. lossless: the tensors have the packed values.
    """
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        drawn = torch.randn(shape, generator=random)
        tensors[name] = 1 + 0.1 * drawn if len(shape) == 1 else 0.15 * drawn
        if name.endswith((".A_log", ".dt_bias")):  # states that fade slowly, and others that do not
            tensors[name] = drawn - 2
    if spec.experts:
        routed_by_tokens(tensors, 0.15)
    matrices_packed: dict[str, PackedMatrix] = {}
    if bits is not None:
        for name in filterfalse(is_router, matrix_shapes(spec)):
            source = "model.embed_tokens.weight" if name == LM_HEAD and spec.tied_head else name
            rounded = quantise(tensors[source], bits)
            if lossless:
                tensors[source] = rounded.values()
            matrices_packed[name] = pack(rounded)
    halves = {
        name: tensor if is_float32_weight(name) else tensor.bfloat16()
        for name, tensor in tensors.items()
    }
    text = TextCodec(Path(), small_tokenizer())
    return Model("packed", Path("packed"), new_decoder(spec, halves, matrices_packed), text)


def routed_by_tokens(tensors: Mapping[str, torch.Tensor], size: float) -> None:
    """Make each token choose its experts so clearly that no rounding can change the choice.

    The last 32 elements of the residual stream encode one of 32 kinds of token, and no layer adds
    to them. Routers read nothing else, and score the experts in another order for each kind, evenly
    spaced. tensors: ours, or those of a transformers model. size: of random weights.
    """
    random = torch.Generator().manual_seed(7)
    hidden = next(x for name, x in tensors.items() if name.endswith("embed_tokens.weight")).shape[1]
    for name, tensor in tensors.items():
        if name.endswith("embed_tokens.weight"):
            kind = torch.arange(len(tensor)) % 32
            tensor[:, -32:] = 20 * size * F.one_hot(kind, 32).to(tensor.dtype)
        elif name.endswith(("mlp.gate.bias", "router.bias")):
            tensor.zero_()
        elif "o_proj" in name or "down_proj" in name or "per_layer_projection.w" in name:
            given = tensor if tensor.shape[-1] == hidden and tensor.dim() != 2 else tensor.mT
            given[..., -32:] = 0
        elif name.endswith("post_attention_layernorm.weight"):
            tensor[-32:] = 1
        elif name.endswith(("mlp.gate.scale", "router.scale")):
            tensor[-32:] = hidden**0.5  # the router's input is divided by it
        elif name.endswith(("mlp.gate.weight", "router.weight", "router.proj.weight")):
            tensor.zero_()
            for kind in range(32):
                order = torch.randperm(len(tensor), generator=random)
                tensor[:, kind - 32] = 0.6 / len(tensor) * order.to(tensor.dtype)
