"""Configurations of small models of each family, for transformers' classes."""

from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
MINISTRAL3 = {
    "head_dim": 16,
    "pad_token_id": 0,
    "rope_parameters": YARN
    | {
        "original_max_position_embeddings": 160,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 0.7,
}
GRANITE4 = {
    "layer_types": ["full_attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 160,
    "position_embedding_type": "rope",
    "mamba_n_heads": 12,
}
_LOCAL, _WHOLE = "sliding_attention", "full_attention"
PADDING = {"pad_token_id": 0, "eos_token_id": 1}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
SHARED = {"shared_expert_intermediate_size": 56}
GPT_OSS = {
    "head_dim": 16,
    "sliding_window": 20,
    "num_hidden_layers": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "rope_parameters": YARN | {"truncate": False},
}
LFM2 = {
    "conv_L_cache": 4,
    "num_hidden_layers": 7,
    "layer_types": ["conv", "conv", _WHOLE, "conv", _WHOLE, "conv", "conv"],
    "block_multiple_of": 32,
    **PADDING,
}
QWEN35 = {
    "head_dim": 24,
    "num_hidden_layers": 7,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
GLM = {"head_dim": 16, "attention_bias": False, "pad_token_id": 0, "eos_token_id": 1}


def longrope(pairs: int, **changes: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2 + 3.0 * pair for pair in range(pairs)],
        **changes,
    }


PHI4_MINI = {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "original_max_position_embeddings": 160,
    "rope_parameters": longrope(6, partial_rotary_factor=0.75),
}
# Kinds of layers come more than once, and the prompt is longer than the window.
NEAR = {"sliding_window": 20, "num_hidden_layers": 9}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20, "num_hidden_layers": 7}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 20,
    "num_hidden_layers": 9,
    "layer_types": [_LOCAL, _LOCAL, _WHOLE] * 3,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
}
GEMMA3N = {
    "head_dim": 16,
    "sliding_window": 20,
    "num_hidden_layers": 9,
    "layer_types": [_LOCAL, _LOCAL, _WHOLE] * 3,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 300,  # fewer than there are tokens
    "altup_num_inputs": 3,
    "laurel_rank": 5,
    "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.8, 0.95, 0.0, 0.95, 0.0, 0.0],
}
BESIDE = {
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
}
GEMMA4_ALONE = {
    **GEMMA4,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 3,
}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
}
LFM2_MOE = {
    **{name: value for name, value in LFM2.items() if not name.startswith("block_")},
    **EXPERTS,
}
MAMBA = {
    "num_hidden_layers": 7,
    "mamba_n_heads": 12,
    "mamba_n_groups": 3,
    "mamba_d_state": 20,
    "mamba_d_conv": 3,
}
GRANITE4_H = MAMBA | {
    "layer_types": [*["linear_attention"] * 2, _WHOLE, *["linear_attention"] * 3, _WHOLE],
    "shared_intermediate_size": 112,
    "pad_token_id": 0,
}
FALCON_H1_MULTIPLIERS = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.6, 1.5],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.5, 1.2, 0.8, 1.1, 0.9],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
}
FALCON_H1 = MAMBA | {
    "num_hidden_layers": 4,
    "mamba_d_ssm": 120,
    "head_dim": 24,
    **FALCON_H1_MULTIPLIERS,
    **PADDING,
}
_STATE, _MLP, _EXPERTS = "linear_attention", "mlp", "moe"
NEMOTRON_H = {
    "num_hidden_layers": None,
    "layers_block_type": [_STATE, _MLP, _STATE, _STATE, _WHOLE, _MLP, _STATE, _WHOLE, _MLP],
    "head_dim": 24,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "n_groups": 3,
    "ssm_state_size": 12,
    "conv_kernel": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    **PADDING,
}
NEMOTRON_H_EXPERTS = NEMOTRON_H | {
    "layers_block_type": [_STATE, _EXPERTS, _STATE, _MLP, _WHOLE, _EXPERTS, _STATE, _EXPERTS]
}
BAMBA = MAMBA | {"attn_layer_indices": [1, 4, 5], **PADDING}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-all-heads": ("Llama", {"num_key_value_heads": 6}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 32}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn-rope": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "ministral3": ("Ministral3", MINISTRAL3),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "phi3": ("Phi3", {"pad_token_id": 0, "eos_token_id": 1}),
    "phi3-tied": ("Phi3", {"pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": True}),
    "phi4-mini": ("Phi3", PHI4_MINI),
    "phi3-128k": ("Phi3", PHI4_MINI | {"rope_parameters": longrope(8)}),
    "granite": ("Granite", GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granite-tied": ("Granite", GRANITE | {"tie_word_embeddings": True}),
    "granite4-dense": ("GraniteMoeHybrid", GRANITE | GRANITE4),
    "olmo2": ("Olmo2", {"pad_token_id": 0, "eos_token_id": 1}),
    "olmo2-one-kv-head": ("Olmo2", {"num_key_value_heads": 1, "pad_token_id": 0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere-biases": (
        "Cohere",
        {"logit_scale": 0.25, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "glm": ("Glm", GLM),
    "glm-biases": ("Glm", GLM | {"attention_bias": True}),
    "glm4": ("Glm4", GLM | {"attention_bias": True}),
    "glm4-quarter": ("Glm4", GLM | {"partial_rotary_factor": 0.25}),
    "glm4-whole": ("Glm4", GLM | {"partial_rotary_factor": 1.0}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-untied": ("Gemma2", GEMMA | {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3": ("Gemma3Text", GEMMA),
    "gemma3-two-ropes": ("Gemma3Text", GEMMA | {"rope_parameters": TWO_ROPES}),
    "gemma3-no-period": (
        "Gemma3Text",
        GEMMA | {"layer_types": [_LOCAL, _LOCAL, _WHOLE, _WHOLE, _LOCAL, _WHOLE, _LOCAL]},
    ),
    "cohere2": ("Cohere2", NEAR | {"logit_scale": 0.25}),
    "cohere2-untied": (
        "Cohere2",
        NEAR | {"tie_word_embeddings": False, "attention_bias": True, "logit_scale": 0.5},
    ),
    "exaone4": ("Exaone4", NEAR | {"head_dim": 24, "rope_parameters": LLAMA3}),
    "exaone4-alike": ("Exaone4", {"sliding_window": None, "layer_types": [_WHOLE] * 3}),
    "olmo3": ("Olmo3", NEAR | PADDING),
    "olmo3-yarn": (
        "Olmo3",
        NEAR
        | PADDING
        | {
            "rope_parameters": {
                _LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
                _WHOLE: YARN | {"attention_factor": 1.25},
            }
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 9, **PADDING}),
    "smollm3-biases": (
        "SmolLM3",
        {
            "num_hidden_layers": 5,
            "no_rope_layers": [1, 0, 0, 1, 1],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            **PADDING,
        },
    ),
    "smollm3-local": ("SmolLM3", NEAR | PADDING | {"use_sliding_window": True}),
    "smollm3-local-by-types": (  # transformers' masks go by these alone
        "SmolLM3",
        NEAR | PADDING | {"use_sliding_window": False, "layer_types": [_LOCAL, _WHOLE, _LOCAL] * 3},
    ),
    "cohere2-no-rope": (
        "Cohere2",
        {"sliding_window": 20, "layer_types": [_WHOLE] * 3, "logit_scale": 0.25},
    ),
    "exaone4-no-rope": ("Exaone4", {"sliding_window": 20, "layer_types": [_WHOLE] * 3}),
    # Layers without RoPE have no attention factor, though it is in the group's softmax scale.
    "smollm3-yarn": ("SmolLM3", {"num_hidden_layers": 5, **PADDING, "rope_parameters": YARN}),
    "smollm3-local-yarn": (
        "SmolLM3",
        NEAR
        | PADDING
        | {
            "use_sliding_window": True,
            "no_rope_layers": [1, 0, 1, 0, 1, 0, 1, 0, 1],
            "layer_types": [_WHOLE, _WHOLE, _LOCAL, _LOCAL, _WHOLE] + [_LOCAL] * 4,
            "rope_parameters": YARN | {"attention_factor": 1.4},
        },
    ),
    "smollm3-longrope": (
        "SmolLM3",
        {
            "num_hidden_layers": 4,
            **PADDING,
            "original_max_position_embeddings": 160,
            "rope_parameters": longrope(8, original_max_position_embeddings=160, factor=4.0),
        },
    ),
    "exaone4-yarn": ("Exaone4", NEAR | {"rope_parameters": YARN | {"attention_factor": 1.4}}),
    "cohere2-yarn": ("Cohere2", NEAR | {"logit_scale": 0.25, "rope_parameters": YARN}),
    "gemma4": ("Gemma4Text", GEMMA4 | {"final_logit_softcapping": 3.0}),
    "gemma4-as-published": ("Gemma4Text", GEMMA4 | {"num_hidden_layers": 12, "layer_types": None}),
    "gemma4-alone": ("Gemma4Text", GEMMA4_ALONE),
    "gemma4-heads-alike": ("Gemma4Text", GEMMA4 | {"global_head_dim": 16}),
    "gemma4-experts": ("Gemma4Text", GEMMA4_ALONE | BESIDE),  # as 26B-A4B has them
    "gemma4-experts-shared": ("Gemma4Text", GEMMA4 | BESIDE | {"top_k_experts": 5}),
    "gemma3n": ("Gemma3nText", GEMMA3N | {"final_logit_softcapping": 3.0}),
    "gemma3n-as-published": (
        "Gemma3nText",
        GEMMA3N
        | {
            "num_hidden_layers": 15,
            "layer_types": None,
            "intermediate_size": 800,  # of which 40 are left
            "num_kv_shared_layers": 5,
            "altup_num_inputs": 4,
            "activation_sparsity_pattern": None,
        },
    ),
    "gemma3n-alone": (
        "Gemma3nText",
        GEMMA3N
        | {
            "num_kv_shared_layers": 0,
            "altup_active_idx": 1,
            "activation_sparsity_pattern": [0.0] * 9,
            "intermediate_size": [160, 96, 128, 160, 32, 200, 64, 160, 96],
            "rope_parameters": TWO_ROPES,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-one-of-all": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 24}),
    "qwen3-moe-shares": ("Qwen3Moe", EXPERTS | {"num_experts_per_tok": 7}),
    "qwen3-moe-alternating": ("Qwen3Moe", EXPERTS | {"decoder_sparse_step": 2}),
    "qwen3-moe-dense-first": ("Qwen3Moe", EXPERTS | {"mlp_only_layers": [0]}),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | SHARED),
    "qwen2-moe-normed": ("Qwen2Moe", EXPERTS | SHARED | {"norm_topk_prob": True}),
    "qwen2-moe-no-biases": ("Qwen2Moe", EXPERTS | SHARED | {"qkv_bias": False}),
    "olmoe": ("Olmoe", {"num_experts": 7, "num_experts_per_tok": 3, **PADDING}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-no-biases": ("GptOss", GPT_OSS | {"attention_bias": False, "num_experts_per_tok": 5}),
    "lfm2": ("Lfm2", LFM2),
    "lfm2-biases": (
        "Lfm2",
        LFM2
        | {
            "conv_bias": True,
            "conv_L_cache": 2,
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-attention-only": ("Lfm2", {"num_hidden_layers": 2, **PADDING}),
    "lfm2-moe": ("Lfm2Moe", LFM2_MOE),
    "lfm2-moe-shares": (
        "Lfm2Moe",
        LFM2_MOE
        | {
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "use_expert_bias": False,
            "num_dense_layers": 0,
        },
    ),
    "granite4-h": ("GraniteMoeHybrid", GRANITE | GRANITE4_H | {"num_local_experts": 0}),
    "granite4-h-experts": (
        "GraniteMoeHybrid",
        GRANITE | GRANITE4_H | {"num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "granite4-h-rope": (
        "GraniteMoeHybrid",
        GRANITE
        | GRANITE4_H
        | {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
        },
    ),
    "granite4-experts": (
        "GraniteMoeHybrid",
        GRANITE | GRANITE4 | {"num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "bamba": ("Bamba", BAMBA),
    "bamba-biases": ("Bamba", BAMBA | {"attention_bias": True, "mlp_bias": True}),
    "falcon-h1": ("FalconH1", FALCON_H1 | {"tie_word_embeddings": True}),
    "falcon-h1-norms": (
        "FalconH1",
        FALCON_H1
        | {"mamba_rms_norm": True, "mamba_n_groups": 2, "mlp_bias": True, "attention_bias": True},
    ),
    "falcon-h1-norms-after-gates": (
        "FalconH1",
        MAMBA
        | {"num_hidden_layers": 3, "mamba_d_ssm": None, "mamba_rms_norm": True}
        | {"mamba_norm_before_gate": False, **PADDING},
    ),
    "nemotron-h": ("NemotronH", NEMOTRON_H),
    "nemotron-h-biases": (
        "NemotronH",
        NEMOTRON_H | {"mlp_bias": True, "use_bias": True, "use_conv_bias": False},
    ),
    "nemotron-h-experts": ("NemotronH", NEMOTRON_H_EXPERTS),
    "nemotron-h-latent-experts": ("NemotronH", NEMOTRON_H_EXPERTS | {"moe_latent_size": 32}),
    "qwen3.5": ("Qwen3_5Text", QWEN35),
    "qwen3.5-biases": (
        "Qwen3_5Text",
        QWEN35
        | {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "mrope_section": [4, 4, 4],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", QWEN35 | EXPERTS | SHARED),
    "qwen3-next": ("Qwen3Next", QWEN35 | EXPERTS | SHARED),
    "qwen3-next-dense-first": (
        "Qwen3Next",
        QWEN35 | EXPERTS | SHARED | {"mlp_only_layers": [0, 2], "norm_topk_prob": False},
    ),
    "granite-moe": ("GraniteMoe", GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}),
}
