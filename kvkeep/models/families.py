"""Which architectures there are, and what each of them has that Llama has not.

The names are those of transformers' classes; what a field means is read by `config.py`, and where
a checkpoint's tensors go by `checkpoint.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

# Which projections of attention have biases: all as `attention_bias` says; q, k and v as it says;
# q, k and v whatever it says; q, k and v unless `qkv_bias` says no; none.
Biases = Literal["stated", "stated of qkv", "qkv", "qkv unless said", "none"]
# Whether attention was trained to see fewer tokens than all: as `sliding_window` says; the same
# where `use_sliding_window` says so, too, of the layers that are left to slide, or of whichever;
# never.
Windows = Literal["stated", "if used", "if used at all", "none"]


@dataclass(frozen=True)
class Mixture:
    """How a family's config speaks of experts.

    width: the field that says how wide an expert is. shared: the same of the shared one; "" where
        the family has none.
    norm_topk: as in ModelSpec; None where `norm_topk_prob` says it.
    alternating: some layers may have an MLP, as `decoder_sparse_step` and `mlp_only_layers` say.
    """

    width: str = "intermediate_size"
    shared: str = ""
    norm_topk: bool | None = None
    alternating: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture, by how it differs from Llama.

    attention_bias, mlp_bias: which biases it has; those of the MLP are as the config says.
    bias_unsaid: what a config without `attention_bias` means.
    window, usual_window: see `Windows`; tokens where the config says nothing.
    usual_head_dim: where the config says nothing; None for hidden_size / heads.
    qk_norm, qk_norm_whole, norms_before, norms_after, centred_norms, parallel: as in ModelSpec.
    norm_eps: the field of the config that says it.
    multipliers: Granite's four. logit_scale: Cohere's one.
    tied_unsaid: what a config without `tie_word_embeddings` means.
    rotated: the part of each head that is rotated where the config says nothing; None for families
        that rotate whole heads, whatever it says.
    interleaved: the pairs that are rotated lie side by side, not half a head apart.
    qkv, gate_up: of a layer's matrices that are several: their name, and its parts in their order.
    renamed: what else of a layer has another name than here: theirs to ours.
    mixture: it is a mixture of experts; see `stored_experts.py` for their names.
    text_part: it reads images, too, and is run without them.
    """

    attention_bias: Biases = "stated"
    bias_unsaid: bool = False
    mlp_bias: bool = False
    window: Windows = "none"
    usual_window: int | None = None
    usual_head_dim: int | None = None
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norms_before: bool = True
    norms_after: bool = False
    centred_norms: bool = False
    parallel: bool = False
    norm_eps: str = "rms_norm_eps"
    multipliers: bool = False
    logit_scale: bool = False
    tied_unsaid: bool = False
    rotated: float | None = None
    interleaved: bool = False
    qkv: str = ""
    gate_up: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    mixture: Mixture | None = None
    text_part: bool = False


_GLM = Family(
    attention_bias="stated of qkv",
    bias_unsaid=True,
    usual_head_dim=128,
    rotated=0.5,
    interleaved=True,
    gate_up="mlp.gate_up_proj",
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(attention_bias="none", window="stated", usual_window=4096),
    "Mistral3ForConditionalGeneration": Family(
        attention_bias="none", window="stated", text_part=True
    ),
    "Ministral3ForCausalLM": Family(attention_bias="none", window="stated", usual_head_dim=128),
    "Qwen2ForCausalLM": Family(attention_bias="qkv", window="if used", usual_window=4096),
    "Qwen3ForCausalLM": Family(
        window="if used", usual_window=4096, usual_head_dim=128, qk_norm=True
    ),
    "Phi3ForCausalLM": Family(
        attention_bias="none",
        window="stated",
        rotated=1.0,
        qkv="self_attn.qkv_proj",
        gate_up="mlp.gate_up_proj",
    ),
    "GraniteForCausalLM": Family(mlp_bias=True, multipliers=True),
    # Granite 4 without state layers and experts (-micro, -1b, -350m); others are refused.
    "GraniteMoeHybridForCausalLM": Family(
        multipliers=True,
        gate_up="shared_mlp.input_linear",
        renamed={"shared_mlp.output_linear": "mlp.down_proj"},
    ),
    "Olmo2ForCausalLM": Family(
        qk_norm=True,
        qk_norm_whole=True,
        norms_before=False,
        norms_after=True,
        renamed={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms_after=True),
    "CohereForCausalLM": Family(
        centred_norms=True,
        parallel=True,
        norm_eps="layer_norm_eps",
        logit_scale=True,
        tied_unsaid=True,
        interleaved=True,
    ),
    "MixtralForCausalLM": Family(
        attention_bias="none", window="stated", mixture=Mixture(norm_topk=True)
    ),
    "Qwen2MoeForCausalLM": Family(
        attention_bias="qkv unless said",
        window="if used at all",
        usual_window=4096,
        mixture=Mixture(
            "moe_intermediate_size", "shared_expert_intermediate_size", alternating=True
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        window="if used at all",
        usual_window=4096,
        qk_norm=True,
        mixture=Mixture("moe_intermediate_size", alternating=True),
    ),
    "OlmoeForCausalLM": Family(qk_norm=True, qk_norm_whole=True, mixture=Mixture()),
    # A softmax over those that are chosen is one over all, made to add up to 1.
    "GraniteMoeForCausalLM": Family(multipliers=True, mixture=Mixture(norm_topk=True)),
    "Qwen2_5_VLForConditionalGeneration": Family(
        attention_bias="qkv", window="if used", usual_window=4096, text_part=True
    ),
    "Qwen3VLForConditionalGeneration": Family(usual_head_dim=128, qk_norm=True, text_part=True),
}
