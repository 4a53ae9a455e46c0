"""Small random bfloat16 models that the compiled kernels take, with packed weights."""

from pathlib import Path
from typing import Any

import torch
from small import small_tokenizer

from kvkeep.executors import new_decoder
from kvkeep.model import Model
from kvkeep.models.packing import MatrixBits, PackedMatrix, packed, quantise
from kvkeep.models.spec import ModelSpec, RopeSpec
from kvkeep.models.text import TextCodec
from kvkeep.models.weights import HEAD, matrices, tensor_shapes

VOCABULARY = 264  # not a multiple of 16


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "phi4": "Phi3ForCausalLM",
    "cohere": "CohereForCausalLM",
}
BEYOND: dict[str, dict[str, Any]] = {
    "granite": {
        "embedding_multiplier": 3.7,
        "residual_multiplier": 0.22,
        "logits_multiplier": 0.55,
        "attention_multiplier": 0.15,
    },
    "olmo2": {"norms_before": False, "norms_after": True, "qk_norm_whole": True},
    "glm4": {"norms_after": True},
    "cohere": {"centred_norms": True, "parallel": True, "logits_multiplier": 0.5},
}
ROTATED = {"glm4": (0.5, 1.0), "phi4": (0.75, 1.19)}  # of each head; what yarn or longrope scales


def spec_of(head_dim: int = 64, family: str = "llama") -> ModelSpec:
    """Three heads to each of two KV heads."""
    part, scaling = ROTATED.get(family, (1.0, 1.0))
    pairs = int(part * head_dim) // 2
    frequencies = tuple(10000.0 ** (-i / pairs) for i in range(pairs))
    unrotated = (0.0,) * (head_dim // 2 - pairs)
    return ModelSpec(
        architecture=ARCHITECTURES[family],
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=320,
        layers=3,
        heads=6,
        kv_heads=2,
        head_dim=head_dim,
        norm_eps=1e-5,
        max_positions=4096,
        rope=RopeSpec("default", frequencies + unrotated, scaling),
        tied_head=family != "qwen3",
        qkv_bias=family in ("qwen2", "glm4"),
        output_bias=False,
        mlp_bias=False,
        qk_norm=family in ("qwen3", "olmo2"),
        bos_token_id=None,
        eos_token_ids=(0,),
        **BEYOND.get(family, {}),
    )


def packed_model(
    spec: ModelSpec, bits: MatrixBits | None, seed: int = 0, lossless: bool = True
) -> Model:
    """bits: of all matrices; None for bfloat16. lossless: the tensors have the packed values."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        drawn = torch.randn(shape, generator=random)
        tensors[name] = 1 + 0.1 * drawn if len(shape) == 1 else 0.15 * drawn
    matrices_packed: dict[str, PackedMatrix] = {}
    if bits is not None:
        for name in matrices(spec):
            source = "model.embed_tokens.weight" if name == HEAD and spec.tied_head else name
            rounded = quantise(tensors[source], bits)
            if lossless:
                tensors[source] = rounded.values()
            matrices_packed[name] = packed(rounded)
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    text = TextCodec(Path(), small_tokenizer())
    return Model("packed", Path("packed"), new_decoder(spec, halves, matrices_packed), text)
