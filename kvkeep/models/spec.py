"""What a model is, in numbers: everything that the forward and the cache need to know of it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, resolved to a fixed table.

    inverse_frequencies: radians per position for each pair of a head, `[head_dim / 2]`, float64
        values; scaled kinds (linear, llama3, yarn, longrope) are already applied. 0 for pairs that
        are not rotated, behind those that are.
    attention_scaling: yarn's or longrope's factor on cosine and sine. It multiplies q and k alike,
        so its square is put on the softmax scale and rotations stay pure.
    """

    kind: str
    inverse_frequencies: tuple[float, ...]
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder, all of whose layers attend to everything in the same way.

    max_positions is the trained length in tokens; a model with its own sliding attention window
    counts as trained to that window, since beyond it full attention is not what it learnt.

    What has a default is what Llama does not have; no digest names it where it is the default:

    norms_before, norms_after: whether attention and MLP norm what they read, and what they give
        before it is added to the residual stream.
    centred_norms: norms are LayerNorm (arXiv:1607.06450) without a bias, not RMSNorm.
    parallel: the MLP reads what attention reads, not what it has added to.
    qk_norm_whole: queries and keys are normed over all heads together, not head by head.
    embedding_multiplier, residual_multiplier, logits_multiplier: of embeddings, of what attention
        and MLP add to the residual stream, and of logits. Folded into weights they would round
        them, and change what a packed matrix says.
    attention_multiplier: in the place of 1 / sqrt(head_dim); None for that.
    experts, experts_per_token: of a mixture of experts, in the place of the MLP, and how many of
        them a token goes through; 0 for none. Its router scores them by a softmax over all.
    expert_size, shared_expert_size: as intermediate_size, of an expert and of the one that every
        token goes through beside them; 0 for none of that kind.
    norm_topk: the weights of the experts that a token goes through are made to add up to 1.
    sparse_step, dense_layers: each so-manieth layer is a mixture, but for these, by their indices;
        the others have an MLP.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeSpec
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    norms_before: bool = True
    norms_after: bool = False
    centred_norms: bool = False
    parallel: bool = False
    qk_norm_whole: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    attention_multiplier: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    norm_topk: bool = False
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts in the place of its MLP."""
        return (
            self.experts > 0
            and (layer + 1) % self.sparse_step == 0
            and layer not in self.dense_layers
        )

    @property
    def softmax_scale(self) -> float:
        """The factor on the products of queries and keys."""
        if self.attention_multiplier is not None:
            return self.rope.attention_scaling**2 * self.attention_multiplier
        return self.rope.attention_scaling**2 / math.sqrt(self.head_dim)

    @property
    def query_scale(self) -> tuple[float, ...] | None:
        """By what each number of a query, `[head_dim]`, is multiplied; None where by nothing.

        Where a part of each head is rotated, `attention_scaling` is of that part alone: what the
        softmax scale has too much is taken off the others, of queries alone.
        """
        frequencies, scaling = self.rope.inverse_frequencies, self.rope.attention_scaling
        if scaling == 1 or all(frequencies):
            return None
        half = tuple(1.0 if frequency else scaling**-2 for frequency in frequencies)
        return half + half
