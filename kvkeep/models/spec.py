"""What a model is, in numbers: everything that the forward and the cache need to know of it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, resolved to a fixed table.

    inverse_frequencies: radians per position for each rotated pair, `[rotary_dim / 2]`, float64
        values; scaled kinds (linear, llama3, yarn) are already applied.
    attention_scaling: yarn's factor on cosine and sine. It multiplies q and k alike, so the cache
        puts its square on the softmax scale and leaves rotations pure.
    """

    kind: str
    inverse_frequencies: tuple[float, ...]
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A Llama-family decoder.

    max_positions is the trained length in tokens; a model with its own sliding attention window
    counts as trained to that window, since beyond it full attention is not what it learnt.
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

    @property
    def softmax_scale(self) -> float:
        """The factor on the products of queries and keys."""
        return self.rope.attention_scaling**2 / math.sqrt(self.head_dim)
