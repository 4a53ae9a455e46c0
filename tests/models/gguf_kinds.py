"""Random models of many families with shapes as small as their code allows."""

import re
from typing import Any

import torch
import transformers
from models.family_configs import FALCON_H1_MULTIPLIERS
from tiny_gguf import SIZES

TOKENS = [(17 * i * i + 5 * i) % 250 for i in range(60)]
PADDING = {"pad_token_id": 0, "eos_token_id": 1}
DIVISORS = {
    "short_factor": [1 + 0.125 * pair for pair in range(12)],
    "long_factor": [2 + 1.5 * pair for pair in range(12)],
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 3.0,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **DIVISORS}
MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Kinds of layers come more than once, and the prompt is longer than the window.
NEAR = {"sliding_window": 20, "num_hidden_layers": 9}
ALIKE = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 20,
    "num_hidden_layers": 7,
}
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 20,
    "num_hidden_layers": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 259,
}
GEMMA3N = {
    "head_dim": 32,
    "sliding_window": 20,
    "num_hidden_layers": 9,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 240,
    "laurel_rank": 32,
    "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.875, 0.95, 0.0, 0.0, 0.0, 0.0],
}
GEMMA4_ALONE = {
    **GEMMA4,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 4,
}
BESIDE = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 96,
}
LFM2 = {
    "num_hidden_layers": 6,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    "conv_L_cache": 4,
    "block_auto_adjust_ff_dim": False,
    **PADDING,
}
QWEN35 = {
    "head_dim": 32,
    "num_hidden_layers": 6,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "tie_word_embeddings": True,
}
GRANITE4_H = {
    "num_hidden_layers": 6,
    "layer_types": [*["linear_attention"] * 2, "full_attention", *["linear_attention"] * 3],
    "num_local_experts": 0,
    "shared_intermediate_size": 512,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 3,
    "mamba_proj_bias": False,
    "pad_token_id": 0,
}
BAMBA = {
    "num_hidden_layers": 5,
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    **PADDING,
}
STATE, WHOLE = "linear_attention", "full_attention"
NEMOTRON_H = {
    "num_hidden_layers": None,
    "layers_block_type": [STATE, "mlp", STATE, STATE, WHOLE, "mlp", WHOLE, "mlp"],
    "head_dim": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 48,
    "n_groups": 2,
    "ssm_state_size": 32,
    **PADDING,
}
FALCON_H1 = {
    "num_hidden_layers": 3,
    "mamba_d_ssm": 384,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "head_dim": 32,
    **PADDING,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_WHOLE = {  # transformers takes no other base than this one from a config of its version 4
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 128,
    },
}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
}
MADE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "granite": ("Granite", "granite", MULTIPLIERS),
    "granite-biases": ("Granite", "granite", MULTIPLIERS | {"attention_bias": True}),
    "olmo2": ("Olmo2", "olmo2", PADDING),
    "command-r": ("Cohere", "command-r", {"logit_scale": 0.25}),
    "glm4": ("Glm4", "glm4", PADDING | {"head_dim": 32, "attention_bias": False}),
    "glm4-biases": ("Glm4", "glm4", PADDING | {"head_dim": 32, "attention_bias": True}),
    "phi3": ("Phi3", "phi3", PADDING),
    "phi4-mini": (
        "Phi3",
        "phi3",
        PADDING | {"original_max_position_embeddings": 128, "rope_parameters": LONGROPE},
    ),
    "ministral3": (
        "Ministral3",
        "mistral3",
        PADDING | {"head_dim": 32, "rope_parameters": MINISTRAL3},
    ),
    "mistral-small3": ("Mistral", "mistral3", {"head_dim": 32, "sliding_window": None}),
    "cohere2": ("Cohere2", "cohere2", NEAR | {"logit_scale": 0.25}),
    "exaone4": ("Exaone4", "exaone4", NEAR | {"head_dim": 32, "rope_parameters": LLAMA3}),
    "exaone4-alike": (
        "Exaone4",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "olmo3": ("Olmo3", "olmo2", NEAR | PADDING | {"rope_parameters": YARN_WHOLE}),
    "smollm3": ("SmolLM3", "smollm3", PADDING | {"num_hidden_layers": 9}),
    "gemma2": (
        "Gemma2",
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3Text", "gemma3", GEMMA | {"rope_parameters": TWO_ROPES}),
    "gemma3n": ("Gemma3nText", "gemma3n", GEMMA3N | {"final_logit_softcapping": 3.0}),
    "gemma3n-widths": (
        "Gemma3nText",
        "gemma3n",
        GEMMA3N
        | {
            "intermediate_size": [512, 256, 128, 512, 64, 512, 512, 384, 32],
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0] * 9,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": ("Gemma4Text", "gemma4", GEMMA4 | {"final_logit_softcapping": 3.0}),
    "gemma4-alone": ("Gemma4Text", "gemma4", GEMMA4_ALONE),
    "gemma4-experts": ("Gemma4Text", "gemma4", GEMMA4_ALONE | BESIDE),
    "lfm2": ("Lfm2", "lfm2", LFM2),
    "lfm2-untied": ("Lfm2", "lfm2", LFM2 | {"conv_L_cache": 2, "tie_word_embeddings": False}),
    "granite4-h": ("GraniteMoeHybrid", "granitehybrid", MULTIPLIERS | GRANITE4_H),
    "bamba": ("Bamba", "granitehybrid", BAMBA),
    "nemotron-h": ("NemotronH", "nemotron_h", NEMOTRON_H),
    "falcon-h1": ("FalconH1", "falcon-h1", FALCON_H1 | FALCON_H1_MULTIPLIERS),
    "falcon-h1-norms": (
        "FalconH1",
        "falcon-h1",
        FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "qwen3.5": ("Qwen3_5Text", "qwen35", QWEN35),
    "qwen3.5-heads-alike": (
        "Qwen3_5Text",
        "qwen35",
        QWEN35 | {"linear_num_value_heads": 2, "tie_word_embeddings": False},
    ),
    "qwen3vl": ("Qwen3", "qwen3vl", {"head_dim": 32}),
    "qwen2vl": ("Qwen2", "qwen2vl", {}),
}
# Their files hold the exponentials of the numbers in a checkpoint.
WITH_DECAYS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "falcon_h1")
WITH_DECAYS += ("bamba", "nemotron_h")


def random_model(kind: str) -> Any:
    """Return a random model whose weights are exact in bfloat16."""
    name, _, changes = MADE[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for each, weight in model.named_parameters():
            usual = weight[0].item() if each.endswith("norm.weight") else 0
            if name in ("Gemma3nText", "Gemma4Text") and each.endswith("q_norm.weight"):
                usual = 0.15  # products are not scaled
            routed = "modality_router" in each  # what it reads is divided by its width
            if re.search(r"norm_[12]\.weight|router\.(per_expert_)?scale", each):
                usual = 1
            weight.normal_(usual, 16 if routed else 0.15)
            weight.copy_(weight.bfloat16())
        for each, scale in model.named_buffers():
            if each.endswith("layer_scalar"):
                scale.uniform_(0.7, 1.3)
    return model
