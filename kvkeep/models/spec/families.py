"""The supported architectures, and how the config and checkpoint of each differ from Llama's.

Names are those of transformers' classes. Gemma's families are in `families_gemma.py`, and those
with state layers in `families_states.py`. `config.py` reads the fields of a config, and
`weights/checkpoint.py` renames the tensors of a checkpoint.
"""

from dataclasses import replace

from kvkeep.models.spec.families_gemma import GEMMA2, GEMMA3, GEMMA3N, GEMMA4
from kvkeep.models.spec.families_states import (
    BAMBA,
    FALCON_H1,
    GRANITE_HYBRID,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    QWEN3_NEXT,
    QWEN35,
    QWEN35_MOE,
)
from kvkeep.models.spec.family import (
    EPS,
    HEAD_DIM,
    KV_HEADS,
    OUTPUT_NORMS,
    THETA,
    TIED,
    WINDOW,
    Family,
    LayerPattern,
    Mixture,
)

# ModelSpec fields of OLMo: queries and keys are normalised over all heads together.
_QK_NORM_WHOLE = {"qk_norm": True, "qk_norm_whole": True}

_MISTRAL = Family(
    bias_rule="none", window_rule="sliding_window", defaults={KV_HEADS: 8, WINDOW: 4096}
)
_MINISTRAL3 = Family(
    bias_rule="none",
    window_rule="sliding_window",
    defaults={HEAD_DIM: 128, KV_HEADS: 8, EPS: 1e-5},
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
    defaults={"attention_bias": True, HEAD_DIM: 128, KV_HEADS: 2, EPS: 1.5625e-7},
    partial_rotary_factor=0.5,
    interleaved_rope=True,
    fused_gate_up="mlp.gate_up_proj",
)
_COHERE = Family(
    spec_fields={"centred_norms": True, "parallel": True},
    norm_eps_field="layer_norm_eps",
    cohere_logit_scale=True,
    defaults={TIED: True, "layer_norm_eps": 1e-5, THETA: 5e5},
    interleaved_rope=True,
)
_OLMO2 = Family(
    spec_fields={**_QK_NORM_WHOLE, "norms_before": False, "norms_after": True},
    renamed_tensors=OUTPUT_NORMS,
    defaults={EPS: 1e-5},
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": replace(_MISTRAL, multimodal=True),
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Qwen2ForCausalLM": Family(
        bias_rule="qkv", window_rule="max_window_layers", defaults={KV_HEADS: 32, WINDOW: 4096}
    ),
    "Qwen3ForCausalLM": Family(
        window_rule="max_window_layers",
        defaults={HEAD_DIM: 128, KV_HEADS: 32, WINDOW: 4096},
        spec_fields={"qk_norm": True},
    ),
    "Phi3ForCausalLM": Family(
        bias_rule="none",
        window_rule="sliding_window",
        partial_rotary_factor=1.0,
        fused_qkv="self_attn.qkv_proj",
        fused_gate_up="mlp.gate_up_proj",
        defaults={EPS: 1e-5, "original_max_position_embeddings": 4096},
    ),
    "GraniteForCausalLM": Family(mlp_bias=True, granite_multipliers=True),
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": FALCON_H1,
    "NemotronHForCausalLM": NEMOTRON_H,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(
        _OLMO2,
        layer_pattern=LayerPattern(period=4),
        separate_local_rope=True,
        defaults={EPS: 1e-5, WINDOW: 4096, THETA: 5e5},
    ),
    "Exaone4ForCausalLM": Family(
        bias_rule="none",
        spec_fields={"qk_norm": True, "norms_before": False, "norms_after": True},
        renamed_tensors=OUTPUT_NORMS,
        layer_pattern=LayerPattern(4, period_in_config=True, unrotated_rule="global if windowed"),
        defaults={KV_HEADS: 32, WINDOW: 4096, EPS: 1e-5},
    ),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=True,
        layer_pattern=LayerPattern(unrotated_rule="no_rope_layers"),
        defaults={KV_HEADS: 4, TIED: True, "no_rope_layer_interval": 4, THETA: 2e6},
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, spec_fields={"norms_after": True}),
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(
        _COHERE,
        layer_pattern=LayerPattern(period=4, period_in_config=True, unrotated_rule="global"),
        defaults={**_COHERE.defaults, WINDOW: 4096, THETA: 1e4},
    ),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": replace(GEMMA3, multimodal=True, no_logits_softcap=True),
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": replace(GEMMA3N, multimodal=True),
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": replace(GEMMA4, multimodal=True),
    "MixtralForCausalLM": Family(
        bias_rule="none",
        window_rule="sliding_window",
        defaults={KV_HEADS: 8, EPS: 1e-5, THETA: 1e6},
        mixture=Mixture(norm_topk=True),
    ),
    "Qwen2MoeForCausalLM": Family(
        bias_rule="qkv_bias",
        window_rule="use_sliding_window",
        defaults={KV_HEADS: 16, WINDOW: 4096},
        mixture=Mixture(
            "moe_intermediate_size", "shared_expert_intermediate_size", some_layers_dense=True
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        window_rule="use_sliding_window",
        defaults={KV_HEADS: 4, WINDOW: 4096},
        spec_fields={"qk_norm": True},
        mixture=Mixture("moe_intermediate_size", some_layers_dense=True),
    ),
    "OlmoeForCausalLM": Family(spec_fields=_QK_NORM_WHOLE, defaults={EPS: 1e-5}, mixture=Mixture()),
    "GptOssForCausalLM": Family(
        spec_fields={"sinks": True, "clamped_experts": True},
        mixture=Mixture(norm_topk=True),
        layer_pattern=LayerPattern(period=2),
        defaults={
            HEAD_DIM: 64,
            KV_HEADS: 8,
            EPS: 1e-5,
            WINDOW: 128,
            THETA: 1.5e5,
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
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5ForConditionalGeneration": replace(QWEN35, multimodal=True),
    "Qwen3_5MoeForCausalLM": QWEN35_MOE,
    "Qwen3_5MoeForConditionalGeneration": replace(QWEN35_MOE, multimodal=True),
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2_MOE,
    # Its softmax over the chosen experts equals one over all experts, renormalised.
    "GraniteMoeForCausalLM": Family(granite_multipliers=True, mixture=Mixture(norm_topk=True)),
    "Qwen2_5_VLForConditionalGeneration": Family(
        bias_rule="qkv",
        window_rule="max_window_layers",
        defaults={KV_HEADS: 8, EPS: 1e-5, THETA: 1e6, WINDOW: 4096, "max_window_layers": 80},
        multimodal=True,
    ),
    "Qwen3VLForConditionalGeneration": Family(
        defaults={HEAD_DIM: 128, KV_HEADS: 32, THETA: 5e5},
        spec_fields={"qk_norm": True},
        multimodal=True,
    ),
}
