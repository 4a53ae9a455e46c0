"""The supported architectures, and how the config and checkpoint of each differ from Llama's.

Names are those of transformers' classes. `config.py` reads the fields of a config, and
`weights/checkpoint.py` renames the tensors of a checkpoint.
"""

from dataclasses import replace

from kvkeep.models.spec.family import Family, LayerPattern, Mixture

# Config fields that many families have defaults for.
_EPS, _HEAD_DIM, _KV_HEADS = "rms_norm_eps", "head_dim", "num_key_value_heads"
_THETA, _TIED, _WINDOW = "rope_theta", "tie_word_embeddings", "sliding_window"
_MAX_POSITIONS, _VOCAB = "max_position_embeddings", "vocab_size"
# ModelSpec fields of OLMo: queries and keys are normalised over all heads together.
_QK_NORM_WHOLE = {"qk_norm": True, "qk_norm_whole": True}

# Norms of sub-layer outputs: the names in checkpoints to the names in kvkeep.
_OUTPUT_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_INPUT_AND_OUTPUT_NORMS = {**_OUTPUT_NORMS, "pre_feedforward_layernorm": "post_attention_layernorm"}

_MISTRAL = Family(
    bias_rule="none", window_rule="sliding_window", defaults={_KV_HEADS: 8, _WINDOW: 4096}
)
_MINISTRAL3 = Family(
    bias_rule="none",
    window_rule="sliding_window",
    defaults={_HEAD_DIM: 128, _KV_HEADS: 8, _EPS: 1e-5},
    default_rope={
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)
_GLM = Family(
    bias_rule="attention_bias of qkv",
    defaults={"attention_bias": True, _HEAD_DIM: 128, _KV_HEADS: 2, _EPS: 1.5625e-7},
    partial_rotary_factor=0.5,
    interleaved_rope=True,
    fused_gate_up="mlp.gate_up_proj",
)
_COHERE = Family(
    spec_fields={"centred_norms": True, "parallel": True},
    norm_eps_field="layer_norm_eps",
    cohere_logit_scale=True,
    defaults={_TIED: True, "layer_norm_eps": 1e-5, _THETA: 5e5},
    interleaved_rope=True,
)
_OLMO2 = Family(
    spec_fields={**_QK_NORM_WHOLE, "norms_before": False, "norms_after": True},
    renamed_tensors=_OUTPUT_NORMS,
    defaults={_EPS: 1e-5},
)
_GEMMA2 = Family(
    spec_fields={"norms_after": True, "unit_norms": True, "embedding_multiplier_rounded": True},
    activation_field="hidden_activation",
    gemma_scales=True,
    renamed_tensors=_INPUT_AND_OUTPUT_NORMS,
    layer_pattern=LayerPattern(period=2),
    defaults={
        _HEAD_DIM: 256,
        _KV_HEADS: 4,
        _WINDOW: 4096,
        _TIED: True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
_GEMMA3 = replace(
    _GEMMA2,
    spec_fields={**_GEMMA2.spec_fields, "qk_norm": True},
    layer_pattern=LayerPattern(period=6, period_in_config=True),
    separate_local_rope=True,
    defaults={  # the configs of the larger models leave these out
        **_GEMMA2.defaults,
        _VOCAB: 262208,
        "num_attention_heads": 8,
        _MAX_POSITIONS: 131072,
        _THETA: 1e6,
        "rope_local_base_freq": 1e4,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
)
_GEMMA3N = replace(
    _GEMMA3,
    spec_fields={**_GEMMA3.spec_fields, "unit_norms": False, "values_normed": True},
    is_gemma3n=True,
    layer_pattern=LayerPattern(period=5),
    defaults={
        **_GEMMA3.defaults,
        _VOCAB: 262400,
        _KV_HEADS: 2,
        _MAX_POSITIONS: 32768,
        _WINDOW: 512,
        "intermediate_size": 16384,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "altup_correct_scale": True,
        "laurel_rank": 64,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
)
_GEMMA4 = replace(
    _GEMMA3,
    spec_fields={**_GEMMA3N.spec_fields, "layer_scales": True},
    is_gemma4=True,
    layer_pattern=LayerPattern(period=6, last_layer_global=True),
    defaults={
        **_GEMMA3.defaults,
        _VOCAB: 262144,
        _WINDOW: 512,
        "query_pre_attn_scalar": 1,
        "global_head_dim": 512,
        "num_kv_shared_layers": 0,
    },
    default_rope={
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)
_QWEN35 = Family(
    spec_fields={"qk_norm": True, "unit_norms": True, "gated_attention": True},
    state_rule="delta_net",
    partial_rotary_factor=0.25,
    ignored_tensors=r"mtp\..*",  # layers that predict several tokens
    defaults={
        _HEAD_DIM: 256,
        _KV_HEADS: 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
)
_LFM2 = Family(
    bias_rule="none",
    spec_fields={"qk_norm": True},
    norm_eps_field="norm_eps",
    state_rule="lfm2",
    field_aliases={"tie_embedding": _TIED, "block_ff_dim": "intermediate_size"},
    renamed_tensors={
        "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
        "self_attn.out_proj": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
    },
    final_norm="model.embedding_norm",
    defaults={
        _KV_HEADS: 8,
        _TIED: True,
        _THETA: 1e6,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
)
_MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_BAMBA = Family(
    mlp_bias=True,
    state_rule="mamba2",
    partial_rotary_factor=0.5,
    renamed_tensors={
        "pre_ff_layernorm": "post_attention_layernorm",
        "feed_forward.gate_proj": "mlp.gate_proj",
        "feed_forward.up_proj": "mlp.up_proj",
        "feed_forward.down_proj": "mlp.down_proj",
    },
    final_norm="model.final_layernorm",
    defaults={**_MAMBA_DEFAULTS, _KV_HEADS: 8, _EPS: 1e-5, "attn_layer_indices": None},
)
_QWEN35_MOE = replace(
    _QWEN35,
    mixture=Mixture("moe_intermediate_size", "shared_expert_intermediate_size", norm_topk=True),
    mlp_width_field="moe_intermediate_size",  # no layer has an MLP without experts
    defaults={**_QWEN35.defaults, _KV_HEADS: 2},
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, multimodal=True),
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Qwen2ForCausalLM": Family(
        bias_rule="qkv", window_rule="max_window_layers", defaults={_KV_HEADS: 32, _WINDOW: 4096}
    ),
    "Qwen3ForCausalLM": Family(
        window_rule="max_window_layers",
        defaults={_HEAD_DIM: 128, _KV_HEADS: 32, _WINDOW: 4096},
        spec_fields={"qk_norm": True},
    ),
    "Phi3ForCausalLM": Family(
        bias_rule="none",
        window_rule="sliding_window",
        partial_rotary_factor=1.0,
        fused_qkv="self_attn.qkv_proj",
        fused_gate_up="mlp.gate_up_proj",
        defaults={_EPS: 1e-5, "original_max_position_embeddings": 4096},
    ),
    "GraniteForCausalLM": Family(mlp_bias=True, granite_multipliers=True),
    "GraniteMoeHybridForCausalLM": Family(
        granite_multipliers=True,
        mlp_width_field="shared_intermediate_size",
        fused_gate_up="shared_mlp.input_linear",
        renamed_tensors={"shared_mlp.output_linear": "mlp.down_proj"},
        state_rule="mamba2",
        field_aliases={"layers_block_type": "layer_types"},
        mixture=Mixture(
            norm_topk=True,
            shared_width_field="shared_intermediate_size",
            optional=True,
            ungated_shared_expert=True,
        ),
        defaults={
            **_MAMBA_DEFAULTS,
            "position_embedding_type": "none",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "BambaForCausalLM": _BAMBA,
    "FalconH1ForCausalLM": replace(
        _BAMBA,
        state_rule="falcon_h1",
        partial_rotary_factor=None,
        defaults={
            **_MAMBA_DEFAULTS,
            _KV_HEADS: 8,
            _EPS: 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_norm_before_gate": True,
        },
    ),
    "NemotronHForCausalLM": Family(
        bias_rule="none",
        mlp_bias=True,
        norm_eps_field="layer_norm_epsilon",
        activation_field="mlp_hidden_act",
        ungated_mlps=True,
        state_rule="nemotron_h",
        field_aliases={
            "mamba_num_heads": "mamba_n_heads",
            "mamba_head_dim": "mamba_d_head",
            "n_groups": "mamba_n_groups",
            "ssm_state_size": "mamba_d_state",
            "conv_kernel": "mamba_d_conv",
            "use_conv_bias": "mamba_conv_bias",
            "use_bias": "mamba_proj_bias",
            "attention_head_dim": _HEAD_DIM,
            "n_routed_experts": "num_local_experts",
        },
        base_module="backbone",
        embedding="model.embeddings",
        final_norm="model.norm_f",
        renamed_tensors={
            "norm": "input_layernorm",
            **{f"mixer.{x}_proj": f"mamba.{x}_proj" for x in ("in", "out")},
            **{f"mixer.{x}": f"mamba.{x}" for x in ("conv1d", "norm", "A_log", "D", "dt_bias")},
            **{f"mixer.{x}_proj": f"self_attn.{x}_proj" for x in "qkvo"},
            **{f"mixer.{x}": f"mlp.{x}" for x in ("up_proj", "down_proj", "gate", "experts")},
            "mixer.gate.e_score_correction_bias": "mlp.expert_bias",
            "mixer.shared_experts": "mlp.shared_expert",
            "mixer.fc1_latent_proj": "mlp.latent_down",
            "mixer.fc2_latent_proj": "mlp.latent_up",
        },
        ignored_tensors=r"mtp\..*",
        mixture=Mixture(
            "moe_intermediate_size",
            "moe_shared_expert_intermediate_size",
            optional=True,
            ungated_shared_expert=True,
            sigmoid_router=True,
        ),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            _HEAD_DIM: 128,
            _KV_HEADS: 8,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "mamba_conv_bias": True,
        },
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        layer_pattern=LayerPattern(period=4),
        separate_local_rope=True,
        defaults={_EPS: 1e-5, _WINDOW: 4096, _THETA: 5e5},
    ),
    "Exaone4ForCausalLM": Family(
        bias_rule="none",
        spec_fields={"qk_norm": True, "norms_before": False, "norms_after": True},
        renamed_tensors=_OUTPUT_NORMS,
        layer_pattern=LayerPattern(4, period_in_config=True, unrotated_rule="global if windowed"),
        defaults={_KV_HEADS: 32, _WINDOW: 4096, _EPS: 1e-5},
    ),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=True,
        layer_pattern=LayerPattern(unrotated_rule="no_rope_layers"),
        defaults={_KV_HEADS: 4, _TIED: True, "no_rope_layer_interval": 4, _THETA: 2e6},
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, spec_fields={"norms_after": True}),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(
        _COHERE,
        layer_pattern=LayerPattern(period=4, period_in_config=True, unrotated_rule="global"),
        defaults={**_COHERE.defaults, _WINDOW: 4096, _THETA: 1e4},
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, multimodal=True, no_logits_softcap=True),
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(_GEMMA3N, multimodal=True),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, multimodal=True),
    "MixtralForCausalLM": Family(
        bias_rule="none",
        window_rule="sliding_window",
        defaults={_KV_HEADS: 8, _EPS: 1e-5, _THETA: 1e6},
        mixture=Mixture(norm_topk=True),
    ),
    "Qwen2MoeForCausalLM": Family(
        bias_rule="qkv_bias",
        window_rule="use_sliding_window",
        defaults={_KV_HEADS: 16, _WINDOW: 4096},
        mixture=Mixture(
            "moe_intermediate_size", "shared_expert_intermediate_size", some_layers_dense=True
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        window_rule="use_sliding_window",
        defaults={_KV_HEADS: 4, _WINDOW: 4096},
        spec_fields={"qk_norm": True},
        mixture=Mixture("moe_intermediate_size", some_layers_dense=True),
    ),
    "OlmoeForCausalLM": Family(
        spec_fields=_QK_NORM_WHOLE, defaults={_EPS: 1e-5}, mixture=Mixture()
    ),
    "GptOssForCausalLM": Family(
        spec_fields={"sinks": True, "clamped_experts": True},
        mixture=Mixture(norm_topk=True),
        layer_pattern=LayerPattern(period=2),
        defaults={
            _HEAD_DIM: 64,
            _KV_HEADS: 8,
            _EPS: 1e-5,
            _WINDOW: 128,
            _THETA: 1.5e5,
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        default_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "Qwen3_5ForCausalLM": _QWEN35,
    "Qwen3_5ForConditionalGeneration": replace(_QWEN35, multimodal=True),
    "Qwen3_5MoeForCausalLM": _QWEN35_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(_QWEN35_MOE, multimodal=True),
    "Qwen3NextForCausalLM": replace(
        _QWEN35,
        mixture=Mixture(
            "moe_intermediate_size", "shared_expert_intermediate_size", some_layers_dense=True
        ),
        fused_delta_net=True,
        defaults={**_QWEN35.defaults, _KV_HEADS: 2, "norm_topk_prob": True},
    ),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        mixture=Mixture(
            "moe_intermediate_size", first_dense_field="num_dense_layers", sigmoid_router=True
        ),
        field_aliases={"tie_embedding": _TIED},
        defaults={
            **_LFM2.defaults,
            "block_auto_adjust_ff_dim": False,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
        },
    ),
    # Its softmax over the chosen experts equals one over all experts, renormalised.
    "GraniteMoeForCausalLM": Family(granite_multipliers=True, mixture=Mixture(norm_topk=True)),
    "Qwen2_5_VLForConditionalGeneration": Family(
        bias_rule="qkv",
        window_rule="max_window_layers",
        defaults={_KV_HEADS: 8, _EPS: 1e-5, _THETA: 1e6, _WINDOW: 4096, "max_window_layers": 80},
        multimodal=True,
    ),
    "Qwen3VLForConditionalGeneration": Family(
        defaults={_HEAD_DIM: 128, _KV_HEADS: 32, _THETA: 5e5},
        spec_fields={"qk_norm": True},
        multimodal=True,
    ),
}
