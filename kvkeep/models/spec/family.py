"""The differences of an architecture's config and checkpoint from Llama's: type of `FAMILIES`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# What decides which attention projections have biases:
# "attention_bias": that field, for all four of them. "attention_bias of qkv": that field, for q, k
# and v. "qkv": always q, k and v. "qkv_bias": q, k and v unless that field is false.
BiasRule = Literal["attention_bias", "attention_bias of qkv", "qkv", "qkv_bias", "none"]
# What decides whether all layers were trained with a sliding window:
# "sliding_window": a stated window always counts. "use_sliding_window": only if that field is true.
# "max_window_layers": only if, moreover, `layer_types` or `max_window_layers` lets a layer slide.
WindowRule = Literal["sliding_window", "use_sliding_window", "max_window_layers", "none"]
# How configs describe layers that keep a state: `config_states.py` has a function for each.
StateRule = Literal["lfm2", "delta_net", "mamba2", "falcon_h1", "nemotron_h"]

# Config fields that many families have defaults for.
EPS, HEAD_DIM, KV_HEADS = "rms_norm_eps", "head_dim", "num_key_value_heads"
THETA, TIED, WINDOW = "rope_theta", "tie_word_embeddings", "sliding_window"
MAX_POSITIONS, VOCAB = "max_position_embeddings", "vocab_size"
# Norms of sub-layer outputs: the names in checkpoints to the names in kvkeep.
OUTPUT_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


@dataclass(frozen=True)
class Mixture:
    """The mixture-of-experts fields of a family's config.

    width_field: the field with the width of an expert's MLP.
    shared_width_field: the same of the shared expert; "" if the family has none.
    norm_topk: as in ModelSpec; None if the field `norm_topk_prob` says it.
    first_dense_field: the field with the number of first layers that have an MLP; "" for none.
    sigmoid_router: as in ModelSpec; `use_expert_bias` and `routed_scaling_factor` count.
    optional: a model without experts has an MLP of the shared expert's width.
    ungated_shared_expert: as in ModelSpec.
    some_layers_dense: `decoder_sparse_step` and `mlp_only_layers` may give some layers an MLP.
    """

    width_field: str = "intermediate_size"
    shared_width_field: str = ""
    norm_topk: bool | None = None
    some_layers_dense: bool = False
    first_dense_field: str = ""
    sigmoid_router: bool = False
    optional: bool = False
    ungated_shared_expert: bool = False


@dataclass(frozen=True)
class LayerPattern:
    """The local and RoPE-less layers of a family.

    period: without `layer_types`, every period-th layer is global (sees everything) and the others
        are local (see a window).
    period_in_config: `sliding_window_pattern` overrides the period.
    last_layer_global: the last layer is global whatever the config says.
    unrotated_rule: which layers have no RoPE. "global": the global ones. "global if windowed": the
        same, if there is a `sliding_window`. "no_rope_layers": as that field says; without
        `layer_types` and with `use_sliding_window`, these layers are also the local ones.
    """

    period: int = 0
    period_in_config: bool = False
    last_layer_global: bool = False
    unrotated_rule: Literal["none", "global", "global if windowed", "no_rope_layers"] = "none"


@dataclass(frozen=True)
class Family:
    """An architecture, by its differences from Llama.

    bias_rule: see `BiasRule`. mlp_bias: the config's `mlp_bias` counts; other families ignore it.
    defaults: values of fields that a config leaves out, as in transformers' config class. Sizes
        have none: a config that lacks one is refused.
    default_rope: the RoPE settings of a config with neither `rope_parameters` nor `rope_scaling`.
    window_rule: see `WindowRule`.
    layer_pattern: for families whose layers are not all alike.
    separate_local_rope: local layers have a RoPE base of their own, without scaling.
    spec_fields: fields of ModelSpec that are the same for all models of the architecture.
    norm_eps_field, activation_field, mlp_width_field: the config fields that state these.
    field_aliases: config fields that replace another one, where they are there: their name to it.
    state_rule: see `StateRule`; None if no layer keeps a state.
    is_gemma4, is_gemma3n: the config has the fields that `config_gemma.py` reads.
    granite_multipliers: the config has Granite's four multipliers.
    cohere_logit_scale: the config has Cohere's `logit_scale`.
    gemma_scales: Gemma's scales of embeddings and attention, and its caps on attention and logits.
    no_logits_softcap: logits are not capped whatever the config says.
    partial_rotary_factor: the rotated share of each head if the config states none; None for
        families that always rotate whole heads.
    interleaved_rope: the two numbers of a rotated pair are neighbours, not half a head apart.
    fused_qkv, fused_gate_up: the checkpoint's name of one matrix that holds several, in this order;
        "" if the matrices are separate.
    fused_delta_net: Gated DeltaNet's projections are stored in two matrices (`value_heads.py`).
    renamed_tensors: other layer tensors with another name in checkpoints: their name, or its first
        parts, to kvkeep's.
    final_norm, embedding: the checkpoint's names of the norm after the last layer and of the
        embedding.
    base_module: what names in checkpoints begin with, all but the head's.
    ungated_mlps: MLPs and experts have no gate, and a squared ReLU.
    mixture: for mixtures of experts; `weights/stacks.py` has the names of their tensors.
    ignored_tensors: a regular expression of tensors in checkpoints that the model does not need.
    multimodal: the model also reads images; only its language model is run.
    """

    bias_rule: BiasRule = "attention_bias"
    mlp_bias: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_rope: Mapping[str, Any] = field(default_factory=dict)
    window_rule: WindowRule = "none"
    layer_pattern: LayerPattern | None = None
    separate_local_rope: bool = False
    spec_fields: Mapping[str, Any] = field(default_factory=dict)
    norm_eps_field: str = "rms_norm_eps"
    activation_field: str = "hidden_act"
    mlp_width_field: str = "intermediate_size"
    field_aliases: Mapping[str, str] = field(default_factory=dict)
    state_rule: StateRule | None = None
    is_gemma4: bool = False
    is_gemma3n: bool = False
    granite_multipliers: bool = False
    cohere_logit_scale: bool = False
    gemma_scales: bool = False
    no_logits_softcap: bool = False
    partial_rotary_factor: float | None = None
    interleaved_rope: bool = False
    fused_qkv: str = ""
    fused_gate_up: str = ""
    fused_delta_net: bool = False
    renamed_tensors: Mapping[str, str] = field(default_factory=dict)
    final_norm: str = "model.norm"
    embedding: str = "model.embed_tokens"
    base_module: str = "model"
    ungated_mlps: bool = False
    mixture: Mixture | None = None
    ignored_tensors: str = ""
    multimodal: bool = False
