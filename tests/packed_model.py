"""Small random bfloat16 models that the compiled kernels take, with packed weights."""

from pathlib import Path

import torch
from small import small_tokenizer

from kvkeep.executors import new_decoder
from kvkeep.model import Model
from kvkeep.models.packing import MatrixBits, PackedMatrix, packed, quantise
from kvkeep.models.spec import ModelSpec, RopeSpec
from kvkeep.models.text import TextCodec
from kvkeep.models.weights import HEAD, matrices, tensor_shapes

VOCABULARY = 264  # not a multiple of 16


def spec_of(head_dim: int = 64, family: str = "llama") -> ModelSpec:
    """Three heads to each of two KV heads."""
    frequencies = tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    return ModelSpec(
        architecture={"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}.get(
            family, "Qwen3ForCausalLM"
        ),
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=320,
        layers=3,
        heads=6,
        kv_heads=2,
        head_dim=head_dim,
        norm_eps=1e-5,
        max_positions=4096,
        rope=RopeSpec("default", frequencies),
        tied_head=family != "qwen3",
        qkv_bias=family == "qwen2",
        output_bias=False,
        mlp_bias=False,
        qk_norm=family == "qwen3",
        bos_token_id=None,
        eos_token_ids=(0,),
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
