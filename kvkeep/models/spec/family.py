"""How a model family's config and checkpoint differ from Llama's: the columns of `families.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
    clamped: as clamped_experts in ModelSpec.
    alternating: some layers may have an MLP, as `decoder_sparse_step` and `mlp_only_layers` say.
    """

    width: str = "intermediate_size"
    shared: str = ""
    norm_topk: bool | None = None
    clamped: bool = False
    alternating: bool = False


@dataclass(frozen=True)
class Unlike:
    """How a family's config speaks of layers that see or rotate in another way than the others.

    period: every n-th layer sees everything, and the others a window, where `layer_types` does not
        say it. pattern: whether `sliding_window_pattern` says another period then.
    last_whole: the last layer sees everything, whatever the config says.
    unrotated: those that see everything, where others do not, or ("whole if windowed") where there
        is a `sliding_window`; as `no_rope_layers` says, and it is these that are local where
        `use_sliding_window` says so and there are no `layer_types`; none.
    two_ropes: RoPE of local layers has a base of its own, and is not scaled.
    """

    period: int = 0
    pattern: bool = False
    last_whole: bool = False
    unrotated: Literal["none", "whole", "whole if windowed", "stated"] = "none"
    two_ropes: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture, by how it differs from Llama.

    attention_bias, mlp_bias: which biases it has; those of the MLP are as the config says.
    usual: the defaults of fields that a config leaves out, as transformers' config class has them.
        Sizes have none: a config that lacks one is refused. usual_rope: the RoPE settings where it
        has neither `rope_parameters` nor `rope_scaling`.
    window: see `Windows`. unlike: of families whose layers are not all alike.
    qk_norm, qk_norm_whole, norms_before, norms_after, centred_norms, parallel, unit_norms,
        sinks: as in ModelSpec.
    norm_eps: the field of the config that says it.
    activation: the field of the config that says it.
    gemma4, gemma3n: it has what `config_gemma4.py` or `config_gemma3n.py` reads.
    multipliers: Granite's four. logit_scale: Cohere's one. scaled: Gemma's two, of embeddings and
        of attention, and its caps on products and logits; uncapped: it has none on logits, whatever
        the config says.
    rotated: the part of each head that is rotated where the config says nothing; None for families
        that rotate whole heads, whatever it says.
    interleaved: the pairs that are rotated lie side by side, not half a head apart.
    qkv, gate_up: of a layer's matrices that are several: their name, and its parts in their order.
    renamed: what else of a layer has another name than here: theirs to ours.
    mixture: it is a mixture of experts; see `stored_experts.py` for their names.
    text_part: it reads images, too, and is run without them.
    """

    attention_bias: Biases = "stated"
    mlp_bias: bool = False
    usual: Mapping[str, Any] = field(default_factory=dict)
    usual_rope: Mapping[str, Any] = field(default_factory=dict)
    window: Windows = "none"
    unlike: Unlike | None = None
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norms_before: bool = True
    norms_after: bool = False
    centred_norms: bool = False
    parallel: bool = False
    unit_norms: bool = False
    sinks: bool = False
    norm_eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    gemma4: bool = False
    gemma3n: bool = False
    multipliers: bool = False
    logit_scale: bool = False
    scaled: bool = False
    uncapped: bool = False
    rotated: float | None = None
    interleaved: bool = False
    qkv: str = ""
    gate_up: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    mixture: Mixture | None = None
    text_part: bool = False
