"""The families with layers that keep a state: short convolutions, Gated DeltaNet, Mamba-2."""

from dataclasses import replace

from kvkeep.models.spec.family import (
    EPS,
    HEAD_DIM,
    KV_HEADS,
    THETA,
    TIED,
    Family,
    Mixture,
)

QWEN35 = Family(
    spec_fields={"qk_norm": True, "unit_norms": True, "gated_attention": True},
    state_rule="delta_net",
    partial_rotary_factor=0.25,
    ignored_tensors=r"mtp\..*",  # layers that predict several tokens
    defaults={
        HEAD_DIM: 256,
        KV_HEADS: 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
)
QWEN35_MOE = replace(
    QWEN35,
    mixture=Mixture("moe_intermediate_size", "shared_expert_intermediate_size", norm_topk=True),
    mlp_width_field="moe_intermediate_size",  # no layer has an MLP without experts
    defaults={**QWEN35.defaults, KV_HEADS: 2},
)
QWEN3_NEXT = replace(
    QWEN35,
    mixture=Mixture(
        "moe_intermediate_size", "shared_expert_intermediate_size", some_layers_dense=True
    ),
    fused_delta_net=True,
    defaults={**QWEN35.defaults, KV_HEADS: 2, "norm_topk_prob": True},
)
LFM2 = Family(
    bias_rule="none",
    spec_fields={"qk_norm": True},
    norm_eps_field="norm_eps",
    state_rule="lfm2",
    field_aliases={"tie_embedding": TIED, "block_ff_dim": "intermediate_size"},
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
        KV_HEADS: 8,
        TIED: True,
        THETA: 1e6,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    },
)
LFM2_MOE = replace(
    LFM2,
    mixture=Mixture(
        "moe_intermediate_size", first_dense_field="num_dense_layers", sigmoid_router=True
    ),
    field_aliases={"tie_embedding": TIED},
    defaults={
        **LFM2.defaults,
        "block_auto_adjust_ff_dim": False,
        "num_dense_layers": 2,
        "norm_topk_prob": True,
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
BAMBA = Family(
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
    defaults={**_MAMBA_DEFAULTS, KV_HEADS: 8, EPS: 1e-5, "attn_layer_indices": None},
)
FALCON_H1 = replace(
    BAMBA,
    state_rule="falcon_h1",
    partial_rotary_factor=None,
    defaults={
        **_MAMBA_DEFAULTS,
        KV_HEADS: 8,
        EPS: 1e-5,
        "mamba_d_ssm": 1024,
        "mamba_norm_before_gate": True,
    },
)
GRANITE_HYBRID = Family(
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
)
NEMOTRON_H = Family(
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
        "attention_head_dim": HEAD_DIM,
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
        HEAD_DIM: 128,
        KV_HEADS: 8,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_n_groups": 8,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
    },
)
