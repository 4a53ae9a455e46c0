"""Metadata fields of GGUF files: kvkeep's logits against those that llama.cpp gives for the file.

The figures are llama.cpp's (llama-cpp-python 0.3.36, float32 cache, no flash attention), recorded
with `benchmarks/gguf_fuzz_llama.py` from the files that `write` makes: the logits of the first four
tokens of the vocabulary behind the last of TOKENS. Weights are a formula, so no generator of random
numbers has to stay the same.
"""

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tiny_gguf import write_tokens

from kvkeep import load_model

TOKENS = [(17 * i * i + 5 * i) % 250 for i in range(48)]
HIDDEN, INNER, VOCABULARY, LAYERS = 32, 48, 259, 2
LLAMA = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
PHI3 = {
    "attn_norm": (HIDDEN,),
    "attn_qkv": (2 * HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_up": (2 * INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
COHERE = {name: shape for name, shape in LLAMA.items() if name != "ffn_norm"}
LAYER = {"llama": LLAMA, "mistral3": LLAMA, "granite": LLAMA, "phi3": PHI3, "command-r": COHERE}
DIVISORS = [1.0, 1.0, 1.5, 2.0, 3.0, 4.5, 5.0, 6.0]
FREQS = {"rope_freqs.weight": DIVISORS}
TWO = {"rope_factors_short.weight": DIVISORS, "rope_factors_long.weight": DIVISORS[::-1]}


def formula(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers without a pattern: about 1 for norms, else as large as random weights would be."""
    phase = (
        np.arange(math.prod(shape), dtype=np.float64) ** 2 * 0.37 + zlib.crc32(name.encode()) % 97
    )
    scale = 2.5 if ".attn_q" in name or ".attn_k" in name else 1.4
    drawn = np.sin(phase) * scale * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.3 * np.sin(phase)
    return (drawn * 4 if "token_embd" in name else drawn).reshape(shape).astype(np.float32)


def write(path: Path, architecture: str, fields: dict[str, Any], tables: dict[str, Any]) -> Path:
    """fields: behind the architecture's name. tables: of divisors, by tensor name."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    if architecture == "command-r":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "granite":
        writer.add_logit_scale(1.0)
    for key, value in fields.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{architecture}.{key}", value)
    write_tokens(writer)
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in LAYER[architecture].items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", formula(f"{name}.weight", shape))
    for name, divisors in tables.items():
        writer.add_tensor(name, np.array(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[float]]] = {
    "plain": ("llama", {}, {}, [-1.2094, 6.3754, -2.2085, 6.7864]),
    "attn_factor": (
        "llama",
        {"rope.scaling.attn_factor": 1.25},
        {},
        [-1.1939, 6.1596, -2.0812, 6.413],
    ),
    "attn_factor-linear": (
        "llama",
        {"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.25},
        {},
        [-1.0349, 8.3296, -1.763, 7.9686],
    ),
    "attn_factor-yarn": (
        "llama",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.25,
        },
        {},
        [-0.9404, 9.4449, -1.203, 8.8726],
    ),
    "none-with-factor": (
        "llama",
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        {},
        [-1.2094, 6.3754, -2.2085, 6.7864],
    ),
    "factor-alone": ("llama", {"rope.scaling.factor": 4.0}, {}, [-1.0874, 7.7426, -2.008, 7.5298]),
    "factor-before-scale_linear": (
        "llama",
        {"rope.scaling.factor": 2.0, "rope.scale_linear": 8.0},
        {},
        [-1.7775, 9.9437, -1.4081, 9.3783],
    ),
    "scale_linear": ("llama", {"rope.scale_linear": 4.0}, {}, [-1.0874, 7.7426, -2.008, 7.5298]),
    "any-divisors": ("llama", {}, FREQS, [-1.1857, 7.1157, -2.2388, 7.3332]),
    "divisors-linear": (
        "llama",
        {"rope.scaling.factor": 4.0},
        FREQS,
        [-1.0686, 7.4448, -2.0005, 7.1902],
    ),
    "divisors-yarn": (
        "llama",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        FREQS,
        [-0.8564, 8.5358, -1.7247, 8.1247],
    ),
    "longrope": (
        "llama",
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.factor": 2.0,
            "rope.scaling.attn_factor": 1.25,
            "rope.scaling.original_context_length": 256,
        },
        TWO,
        [-0.8164, 7.9763, -1.6693, 7.2921],
    ),
    "temperature-of-llama": (
        "llama",
        {"attention.temperature_scale": 0.5},
        {},
        [-1.2094, 6.3754, -2.2085, 6.7864],
    ),
    "temperature-alone": (
        "mistral3",
        {"attention.temperature_scale": 0.5},
        {},
        [-1.2094, 6.3754, -2.2085, 6.7864],
    ),
    "log-multiplier": (
        "mistral3",
        {
            "rope.freq_base": 500.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 256,
            "rope.scaling.yarn_log_multiplier": 0.5,
            "rope.scaling.yarn_beta_fast": 8.0,
        },
        {},
        [-1.1296, 8.9034, -1.8219, 8.8426],
    ),
    "tables-yarn": (
        "phi3",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 256,
            "rope.scaling.attn_factor": 1.25,
        },
        TWO,
        [-2.1051, -4.8363, -1.0821, -2.9903],
    ),
    "phi3-scale_linear": (
        "phi3",
        {"rope.scale_linear": 4.0},
        {},
        [0.0853, -8.3137, 1.0781, -4.4963],
    ),
    "phi3-attn_factor": (
        "phi3",
        {"rope.scaling.attn_factor": 1.25, "rope.dimension_count": 8},
        {},
        [-2.2299, -5.4467, 2.9829, -2.8371],
    ),
    "phi3-yarn": (
        "phi3",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        {},
        [-1.4269, -8.3482, -0.6116, -4.8121],
    ),
    "phi3-tables-without-attn_factor": (
        "phi3",
        {"rope.scaling.original_context_length": 256},
        TWO,
        [-1.8821, -10.5804, 0.6181, -7.6406],
    ),
    "no-logit_scale": ("command-r", {}, {}, [-2.413, 7.6242, -1.7114, 7.8553]),
    "granite-zeros": (
        "granite",
        {"residual_scale": 0.0, "embedding_scale": 0.0, "attention.scale": 0.0},
        {},
        [-1.2094, 6.3754, -2.2085, 6.7864],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_llama_cpp(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_HOME", str(tmp_path / "home"))
    architecture, fields, tables, expected = CASES[case]
    path = write(tmp_path / "m.gguf", architecture, fields, tables)
    session = load_model(str(path), dtype="float32").session(policy="full")
    session.feed(TOKENS)
    logits = session.logits[:4]
    assert (logits - torch.tensor(expected)).abs().max() <= 1e-3 * session.logits.abs().max()
