"""Shapes of known models: their tensors by GGUF name, and the fields of their files."""

from dataclasses import dataclass

import gguf
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class States:
    """Layers with a state in the place of attention.

    attention_layers: the layers without one. conv_width: tokens that a convolution sees. heads,
    head_dim: of Gated DeltaNet, the same of keys and of values; 0: short convolutions alone.
    """

    attention_layers: tuple[int, ...]
    conv_width: int
    heads: int = 0
    head_dim: int = 0


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. inner: width of the MLP, or of each expert.

    experts, used: number of experts, and of those used per token; 0: no mixture. window: of local
    layers; 0: none. rotated: the part of a head with RoPE.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    architecture: str = "llama"
    experts: int = 0
    used: int = 0
    window: int = 0
    rotated: float = 1.0
    states: States | None = None

    def has_state(self, layer: int) -> bool:
        """Whether a layer has a state in the place of attention."""
        return self.states is not None and layer not in self.states.attention_layers


SHAPES = {
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 64, 128_256, True),  # Llama 3.2 1B
    "llama-135m": Shape(576, 1536, 30, 9, 3, 64, 49_152, True),  # SmolLM2 135M
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128, 128_256, False),  # Llama 3.1 8B
    # Qwen3 30B A3B with half of its layers and experts, and those a third as wide.
    "qwen3-moe-3b": Shape(2048, 256, 24, 32, 4, 128, 32_000, False, "qwen3moe", 64, 8),
    # Gemma 3 1B with an eighth of its vocabulary: of 26 layers 22 are local.
    "gemma3-1b": Shape(1152, 6912, 26, 4, 1, 256, 32_768, True, "gemma3", window=512),
    "lfm2-1.2b": Shape(
        *(2048, 8192, 16, 32, 8, 64, 65_536, True, "lfm2"),
        states=States((2, 5, 8, 10, 12, 14), conv_width=3),
    ),
    "qwen3.5-0.8b": Shape(
        *(1024, 3584, 24, 8, 2, 256, 248_320, True, "qwen35"),
        rotated=0.25,
        states=States(tuple(range(3, 24, 4)), conv_width=4, heads=16, head_dim=128),
    ),
    # gpt-oss 20B with 4 of its 24 layers, an eighth of its vocabulary, and the same experts.
    "gpt-oss-4-layers": Shape(
        2880, 2880, 4, 64, 8, 64, 25_136, False, "gpt-oss", 32, 4, window=128
    ),
    "tiny": Shape(256, 512, 4, 4, 2, 64, 600, True),
}


def matrices(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all matrices by name, `[experts,] rows, columns`."""
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        has_state = shape.has_state(layer)
        parts = (_state_matrices(shape) if has_state else _attention(shape)) | _mlp(shape)
        sizes |= {f"blk.{layer}.{name}.weight": size for name, size in parts.items()}
    return sizes if shape.tied else sizes | {"output.weight": (shape.vocabulary, shape.hidden)}


def _attention(shape: Shape) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    has_gate = shape.architecture == "qwen35"
    return {
        "attn_q": (queries * (1 + has_gate), shape.hidden),
        "attn_k": (keys, shape.hidden),
        "attn_v": (keys, shape.hidden),
        "attn_output": (shape.hidden, queries),
    }


def _mlp(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape.hidden, shape.inner
    if not shape.experts:
        return {
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
    return {
        "ffn_gate_inp": (shape.experts, hidden),
        "ffn_gate_exps": (shape.experts, inner, hidden),
        "ffn_up_exps": (shape.experts, inner, hidden),
        "ffn_down_exps": (shape.experts, hidden, inner),
    }


def _state_matrices(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, states = shape.hidden, shape.states
    assert states is not None
    if not states.heads:
        return {"shortconv.in_proj": (3 * hidden, hidden), "shortconv.out_proj": (hidden, hidden)}
    width = states.heads * states.head_dim
    return {
        "attn_qkv": (3 * width, hidden),
        "attn_gate": (width, hidden),
        "ssm_alpha": (states.heads, hidden),
        "ssm_beta": (states.heads, hidden),
        "ssm_out": (hidden, width),
    }


def vectors(shape: Shape) -> dict[str, NDArray[np.float32]]:
    """Return the tensors in float32 by name: norms, convolutions, and the decays of states."""
    norms, final_norm = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}, "output_norm.weight"
    if shape.architecture == "gemma3":
        norms |= {"post_attention_norm": shape.hidden, "post_ffw_norm": shape.hidden}
    if shape.architecture in ("qwen35", "gpt-oss"):
        norms = {"attn_norm": shape.hidden, "post_attention_norm": shape.hidden}
    if shape.architecture == "lfm2":
        final_norm = "token_embd_norm.weight"
    head_norms = {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    has_head_norms = shape.architecture in ("qwen3moe", "gemma3", "lfm2", "qwen35")
    tensors = {final_norm: np.ones(shape.hidden, np.float32)}
    for layer in range(shape.layers):
        widths = norms
        if has_head_norms and not shape.has_state(layer):
            widths = norms | head_norms
        ones = {f"{name}.weight": np.ones(n, np.float32) for name, n in widths.items()}
        parts = ones | (_state_vectors(shape) if shape.has_state(layer) else {})
        if shape.architecture == "gpt-oss":
            parts |= _gpt_oss_vectors(shape)
        tensors |= {f"blk.{layer}.{name}": values for name, values in parts.items()}
    return tensors


def _state_vectors(shape: Shape) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a state layer that no format packs; its states fade by a tenth."""
    states = shape.states
    assert states is not None
    width = states.conv_width
    if not states.heads:
        kernel = np.full((shape.hidden, width), 1 / width, np.float32)
        return {"shortconv.conv.weight": kernel}
    channels = 3 * states.heads * states.head_dim
    return {
        "ssm_conv1d.weight": np.full((channels, width), 1 / width, np.float32),
        "ssm_dt.bias": np.zeros(states.heads, np.float32),
        "ssm_a": np.full(states.heads, -0.15, np.float32),
        "ssm_norm.weight": np.ones(states.head_dim, np.float32),
    }


def _gpt_oss_vectors(shape: Shape) -> dict[str, NDArray[np.float32]]:
    """Return the biases of a layer and the sinks of its heads, all 0."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "attn_sinks.weight": (shape.heads,),
        "attn_q.bias": (queries,),
        "attn_k.bias": (keys,),
        "attn_v.bias": (keys,),
        "attn_output.bias": (shape.hidden,),
        "ffn_gate_inp.bias": (shape.experts,),
        "ffn_gate_exps.bias": (shape.experts, shape.inner),
        "ffn_up_exps.bias": (shape.experts, shape.inner),
        "ffn_down_exps.bias": (shape.experts, shape.hidden),
    }
    return {name: np.zeros(size, np.float32) for name, size in sizes.items()}


def add_fields(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Add a shape's sizes to a file, as llama.cpp's converter does."""
    writer.add_block_count(shape.layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.inner)
    if shape.window:
        writer.add_sliding_window(shape.window)
    writer.add_head_count(shape.heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(int(shape.rotated * shape.head_dim))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(shape.vocabulary)
    if shape.states is None or shape.states.heads:
        writer.add_head_count_kv(shape.kv_heads)
    if shape.states is not None:
        _add_state_fields(writer, shape, shape.states)


def _add_state_fields(writer: gguf.GGUFWriter, shape: Shape, states: States) -> None:
    if not states.heads:
        kv_heads = [0 if shape.has_state(i) else shape.kv_heads for i in range(shape.layers)]
        writer.add_head_count_kv(kv_heads)
        writer.add_shortconv_l_cache(states.conv_width)
        return
    writer.add_ssm_conv_kernel(states.conv_width)
    writer.add_ssm_state_size(states.head_dim)
    writer.add_ssm_group_count(states.heads)
    writer.add_ssm_time_step_rank(states.heads)
    writer.add_ssm_inner_size(states.heads * states.head_dim)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    has_state = [shape.has_state(i) for i in range(shape.layers)]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", has_state)
