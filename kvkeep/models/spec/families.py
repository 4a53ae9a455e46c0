"""Which architectures there are, and what each of them has that Llama has not.

The names are those of transformers' classes; what a field means is read by `config.py`, and where
a checkpoint's tensors go by `checkpoint.py`.
"""

from dataclasses import replace

from kvkeep.models.spec.family import Family, Mixture, Unlike

_EPS_5 = {"rms_norm_eps": 1e-5}
_MISTRAL = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096}
_GLM = Family(
    attention_bias="stated of qkv",
    usual={
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
    },
    rotated=0.5,
    interleaved=True,
    gate_up="mlp.gate_up_proj",
)
_COHERE = Family(
    centred_norms=True,
    parallel=True,
    norm_eps="layer_norm_eps",
    logit_scale=True,
    usual={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "rope_theta": 5e5},
    interleaved=True,
)
_NORMED_AFTER = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_OLMO2 = Family(
    qk_norm=True,
    qk_norm_whole=True,
    norms_before=False,
    norms_after=True,
    renamed=_NORMED_AFTER,
    usual=_EPS_5,
)
_NORMED_TWICE = {**_NORMED_AFTER, "pre_feedforward_layernorm": "post_attention_layernorm"}
_GEMMA = Family(
    norms_after=True,
    unit_norms=True,
    activation="hidden_activation",
    scaled=True,
    renamed=_NORMED_TWICE,
    usual={
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
    unlike=Unlike(period=6, pattern=True, two_ropes=True),
    usual={  # files of the larger ones leave these out
        **_GEMMA.usual,
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
    unlike=Unlike(period=5, two_ropes=True),
    usual={
        **_GEMMA3.usual,
        "vocab_size": 262400,
        "num_key_value_heads": 2,
        "intermediate_size": 16384,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
)
_GEMMA4 = replace(
    _GEMMA3,
    unit_norms=False,
    gemma4=True,
    unlike=Unlike(period=6, last_whole=True, two_ropes=True),
    usual={
        **_GEMMA3.usual,
        "vocab_size": 262144,
        "query_pre_attn_scalar": 1,
        "sliding_window": 512,
        "global_head_dim": 512,
        "num_kv_shared_layers": 0,
    },
    usual_rope={
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
    window="stated",
    usual={"head_dim": 128, "num_key_value_heads": 8, **_EPS_5},
    usual_rope={
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
    "MistralForCausalLM": Family(attention_bias="none", window="stated", usual=_MISTRAL),
    "Mistral3ForConditionalGeneration": Family(
        attention_bias="none", window="stated", usual=_MISTRAL, text_part=True
    ),
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Qwen2ForCausalLM": Family(attention_bias="qkv", window="if used", usual=_QWEN),
    "Qwen3ForCausalLM": Family(window="if used", usual={**_QWEN, "head_dim": 128}, qk_norm=True),
    "Phi3ForCausalLM": Family(
        attention_bias="none",
        window="stated",
        rotated=1.0,
        qkv="self_attn.qkv_proj",
        gate_up="mlp.gate_up_proj",
        usual={**_EPS_5, "original_max_position_embeddings": 4096},
    ),
    "GraniteForCausalLM": Family(mlp_bias=True, multipliers=True),
    # Granite 4 without state layers and experts (-micro, -1b, -350m); others are refused.
    "GraniteMoeHybridForCausalLM": Family(
        multipliers=True,
        gate_up="shared_mlp.input_linear",
        renamed={"shared_mlp.output_linear": "mlp.down_proj"},
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        unlike=Unlike(period=4, two_ropes=True),
        usual={**_EPS_5, "sliding_window": 4096, "rope_theta": 5e5},
    ),
    "Exaone4ForCausalLM": Family(
        attention_bias="none",
        qk_norm=True,
        norms_before=False,
        norms_after=True,
        renamed=_NORMED_AFTER,
        unlike=Unlike(period=4, pattern=True, unrotated="whole if windowed"),
        usual={**_QWEN, **_EPS_5},
    ),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=True,
        unlike=Unlike(unrotated="stated"),
        usual={
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
        unlike=Unlike(period=4, pattern=True, unrotated="whole"),
        usual={**_COHERE.usual, "sliding_window": 4096, "rope_theta": 1e4},
    ),
    "Gemma2ForCausalLM": replace(
        _GEMMA,
        unlike=Unlike(period=2),
        usual={**_GEMMA.usual, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA3, text_part=True, uncapped=True),
    "Gemma3nForCausalLM": _GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(_GEMMA3N, text_part=True),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": replace(_GEMMA4, text_part=True),
    "MixtralForCausalLM": Family(
        attention_bias="none",
        window="stated",
        usual={"num_key_value_heads": 8, **_EPS_5, "rope_theta": 1e6},
        mixture=Mixture(norm_topk=True),
    ),
    "Qwen2MoeForCausalLM": Family(
        attention_bias="qkv unless said",
        window="if used at all",
        usual={"num_key_value_heads": 16, "sliding_window": 4096},
        mixture=Mixture(
            "moe_intermediate_size", "shared_expert_intermediate_size", alternating=True
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        window="if used at all",
        usual={"num_key_value_heads": 4, "sliding_window": 4096},
        qk_norm=True,
        mixture=Mixture("moe_intermediate_size", alternating=True),
    ),
    "OlmoeForCausalLM": Family(qk_norm=True, qk_norm_whole=True, usual=_EPS_5, mixture=Mixture()),
    "GptOssForCausalLM": Family(
        sinks=True,
        mixture=Mixture(norm_topk=True, clamped=True),
        unlike=Unlike(period=2),
        usual={
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            **_EPS_5,
            "sliding_window": 128,
            "rope_theta": 1.5e5,
        },
        usual_rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    # A softmax over those that are chosen is one over all, made to add up to 1.
    "GraniteMoeForCausalLM": Family(multipliers=True, mixture=Mixture(norm_topk=True)),
    "Qwen2_5_VLForConditionalGeneration": Family(
        attention_bias="qkv",
        window="if used",
        usual={
            "num_key_value_heads": 8,
            **_EPS_5,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "max_window_layers": 80,
        },
        text_part=True,
    ),
    "Qwen3VLForConditionalGeneration": Family(
        usual={"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 5e5},
        qk_norm=True,
        text_part=True,
    ),
}
