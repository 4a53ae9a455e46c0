"""The supported architectures, and how the config and checkpoint of each differ from Llama's.

Names are those of transformers' classes. `config.py` reads the fields of a config, and
`weights/checkpoint.py` renames the tensors of a checkpoint.
"""

from dataclasses import replace

from kvkeep.models.spec.family import Family, LayerPattern, Mixture

_NORM_EPS_5 = {"rms_norm_eps": 1e-5}
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096}
_GLM = Family(
    attention_bias="attention_bias of qkv",
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
    },
    partial_rotary_factor=0.5,
    interleaved_rope=True,
    fused_gate_up="mlp.gate_up_proj",
)
_COHERE = Family(
    centred_norms=True,
    parallel=True,
    norm_eps_field="layer_norm_eps",
    cohere_logit_scale=True,
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "rope_theta": 5e5},
    interleaved_rope=True,
)
# Norms of sub-layer outputs: the names in checkpoints to the names in kvkeep.
_OUTPUT_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_OLMO2 = Family(
    qk_norm=True,
    qk_norm_whole=True,
    norms_before=False,
    norms_after=True,
    renamed_tensors=_OUTPUT_NORMS,
    defaults=_NORM_EPS_5,
)
_INPUT_AND_OUTPUT_NORMS = {**_OUTPUT_NORMS, "pre_feedforward_layernorm": "post_attention_layernorm"}
_GEMMA = Family(
    norms_after=True,
    unit_norms=True,
    activation_field="hidden_activation",
    gemma_scales=True,
    renamed_tensors=_INPUT_AND_OUTPUT_NORMS,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
)
_GEMMA3 = replace(
    _GEMMA,
    qk_norm=True,
    layer_pattern=LayerPattern(period=6, period_in_config=True, separate_local_rope=True),
    defaults={  # the configs of the larger models leave these out
        **_GEMMA.defaults,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)
_GEMMA3N = replace(
    _GEMMA3,
    unit_norms=False,
    gemma3n=True,
    layer_pattern=LayerPattern(period=5, separate_local_rope=True),
    defaults={
        **_GEMMA3.defaults,
        "vocab_size": 262400,
        "num_key_value_heads": 2,
        "intermediate_size": 16384,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
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
    unit_norms=False,
    gemma4=True,
    layer_pattern=LayerPattern(period=6, last_layer_global=True, separate_local_rope=True),
    defaults={
        **_GEMMA3.defaults,
        "vocab_size": 262144,
        "query_pre_attn_scalar": 1,
        "sliding_window": 512,
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
_MINISTRAL3 = Family(
    attention_bias="none",
    window="sliding_window",
    defaults={"head_dim": 128, "num_key_value_heads": 8, **_NORM_EPS_5},
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

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(
        attention_bias="none", window="sliding_window", defaults=_MISTRAL_DEFAULTS
    ),
    "Mistral3ForConditionalGeneration": Family(
        attention_bias="none", window="sliding_window", defaults=_MISTRAL_DEFAULTS, multimodal=True
    ),
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Qwen2ForCausalLM": Family(
        attention_bias="qkv", window="max_window_layers", defaults=_QWEN_DEFAULTS
    ),
    "Qwen3ForCausalLM": Family(
        window="max_window_layers", defaults={**_QWEN_DEFAULTS, "head_dim": 128}, qk_norm=True
    ),
    "Phi3ForCausalLM": Family(
        attention_bias="none",
        window="sliding_window",
        partial_rotary_factor=1.0,
        fused_qkv="self_attn.qkv_proj",
        fused_gate_up="mlp.gate_up_proj",
        defaults={**_NORM_EPS_5, "original_max_position_embeddings": 4096},
    ),
    "GraniteForCausalLM": Family(mlp_bias=True, granite_multipliers=True),
    # Granite 4 without state layers and experts (-micro, -1b, -350m); the others are refused.
    "GraniteMoeHybridForCausalLM": Family(
        granite_multipliers=True,
        fused_gate_up="shared_mlp.input_linear",
        renamed_tensors={"shared_mlp.output_linear": "mlp.down_proj"},
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        layer_pattern=LayerPattern(period=4, separate_local_rope=True),
        defaults={**_NORM_EPS_5, "sliding_window": 4096, "rope_theta": 5e5},
    ),
    "Exaone4ForCausalLM": Family(
        attention_bias="none",
        qk_norm=True,
        norms_before=False,
        norms_after=True,
        renamed_tensors=_OUTPUT_NORMS,
        layer_pattern=LayerPattern(period=4, period_in_config=True, unrotated="global if windowed"),
        defaults={**_QWEN_DEFAULTS, **_NORM_EPS_5},
    ),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=True,
        layer_pattern=LayerPattern(unrotated="no_rope_layers"),
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
        },
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms_after=True),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(
        _COHERE,
        layer_pattern=LayerPattern(period=4, period_in_config=True, unrotated="global"),
        defaults={**_COHERE.defaults, "sliding_window": 4096, "rope_theta": 1e4},
    ),
    "Gemma2ForCausalLM": replace(
        _GEMMA,
        layer_pattern=LayerPattern(period=2),
        defaults={
            **_GEMMA.defaults,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, multimodal=True, no_logits_softcap=True),
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(_GEMMA3N, multimodal=True),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, multimodal=True),
    "MixtralForCausalLM": Family(
        attention_bias="none",
        window="sliding_window",
        defaults={"num_key_value_heads": 8, **_NORM_EPS_5, "rope_theta": 1e6},
        mixture=Mixture(norm_topk=True),
    ),
    "Qwen2MoeForCausalLM": Family(
        attention_bias="qkv_bias",
        window="use_sliding_window",
        defaults={"num_key_value_heads": 16, "sliding_window": 4096},
        mixture=Mixture(
            "moe_intermediate_size", "shared_expert_intermediate_size", some_layers_dense=True
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        window="use_sliding_window",
        defaults={"num_key_value_heads": 4, "sliding_window": 4096},
        qk_norm=True,
        mixture=Mixture("moe_intermediate_size", some_layers_dense=True),
    ),
    "OlmoeForCausalLM": Family(
        qk_norm=True, qk_norm_whole=True, defaults=_NORM_EPS_5, mixture=Mixture()
    ),
    "GptOssForCausalLM": Family(
        sinks=True,
        mixture=Mixture(norm_topk=True, clamped=True),
        layer_pattern=LayerPattern(period=2),
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            **_NORM_EPS_5,
            "sliding_window": 128,
            "rope_theta": 1.5e5,
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
    # Its softmax over the chosen experts equals one over all experts, renormalised.
    "GraniteMoeForCausalLM": Family(granite_multipliers=True, mixture=Mixture(norm_topk=True)),
    "Qwen2_5_VLForConditionalGeneration": Family(
        attention_bias="qkv",
        window="max_window_layers",
        defaults={
            "num_key_value_heads": 8,
            **_NORM_EPS_5,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "max_window_layers": 80,
        },
        multimodal=True,
    ),
    "Qwen3VLForConditionalGeneration": Family(
        defaults={"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 5e5},
        qk_norm=True,
        multimodal=True,
    ),
}
