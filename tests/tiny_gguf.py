"""GGUF files of tiny transformers models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 259,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ONE = np.ones(1, dtype=np.float32)
Edit = Callable[[gguf.GGUFWriter], None]


def gguf_name(name: str) -> str:
    name = name.replace("model.layers.", "blk.")
    for hf_name, gguf_name_part in NAMES.items():
        name = name.replace(hf_name, gguf_name_part)
    return name


def interleaved(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder Llama's q or k rows as in GGUF: the two rows of a rotated pair are neighbours."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def write_tokens(writer: gguf.GGUFWriter, kind: str = "gpt2", pre: str = "gpt-2") -> None:
    """Write a vocabulary of the 256 bytes, one merge, and two special tokens."""
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*sorted(ByteLevel.alphabet()), "he", "<|start|>", "<|stop|>"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)


def write_gguf(
    path: Path,
    model: Any,
    architecture: str = "llama",
    stored: Type = Type.F32,
    edit: Edit = lambda writer: None,
    tokens: Edit = write_tokens,
    packed: dict[str, tuple[np.ndarray, Type]] | None = None,
    in_a_part: int = 0,
) -> Path:
    """in_a_part: the most tensors of a part of it; 0: one file."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=in_a_part)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    tokens(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            array = interleaved(array, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            array = interleaved(array, config.num_key_value_heads)
        form = stored if array.ndim == 2 else Type.F32
        data, form = (packed or {}).get(gguf_name(name), (gguf.quantize(array, form), form))
        writer.add_tensor(gguf_name(name), data, raw_dtype=form)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))
