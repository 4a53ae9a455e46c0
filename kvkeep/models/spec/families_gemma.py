"""The Gemma families: Gemma 2, Gemma 3, Gemma 3n and Gemma 4."""

from dataclasses import replace

from kvkeep.models.spec.family import (
    HEAD_DIM,
    KV_HEADS,
    MAX_POSITIONS,
    OUTPUT_NORMS,
    THETA,
    TIED,
    VOCAB,
    WINDOW,
    Family,
    LayerPattern,
)

_NORMS = {**OUTPUT_NORMS, "pre_feedforward_layernorm": "post_attention_layernorm"}

GEMMA2 = Family(
    spec_fields={"norms_after": True, "unit_norms": True, "embedding_multiplier_rounded": True},
    activation_field="hidden_activation",
    gemma_scales=True,
    renamed_tensors=_NORMS,
    layer_pattern=LayerPattern(period=2),
    defaults={
        HEAD_DIM: 256,
        KV_HEADS: 4,
        WINDOW: 4096,
        TIED: True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA3 = replace(
    GEMMA2,
    spec_fields={**GEMMA2.spec_fields, "qk_norm": True},
    layer_pattern=LayerPattern(period=6, period_in_config=True),
    separate_local_rope=True,
    defaults={  # the configs of the larger models leave these out
        **GEMMA2.defaults,
        VOCAB: 262208,
        "num_attention_heads": 8,
        MAX_POSITIONS: 131072,
        THETA: 1e6,
        "rope_local_base_freq": 1e4,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
)
GEMMA3N = replace(
    GEMMA3,
    spec_fields={**GEMMA3.spec_fields, "unit_norms": False, "values_normed": True},
    is_gemma3n=True,
    layer_pattern=LayerPattern(period=5),
    defaults={
        **GEMMA3.defaults,
        VOCAB: 262400,
        KV_HEADS: 2,
        MAX_POSITIONS: 32768,
        WINDOW: 512,
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
GEMMA4 = replace(
    GEMMA3,
    spec_fields={**GEMMA3N.spec_fields, "layer_scales": True},
    is_gemma4=True,
    layer_pattern=LayerPattern(period=6, last_layer_global=True),
    defaults={
        **GEMMA3.defaults,
        VOCAB: 262144,
        WINDOW: 512,
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
