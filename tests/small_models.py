"""Small random models for tests, in fp32, with a byte-level tokenizer."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.layers.network import tensor_shapes
from kvkeep.models.spec.model_spec import ModelSpec, RopeSpec
from kvkeep.models.spec.state_layers import StateLayers
from kvkeep.models.text.codec import TextCodec

HEAD_DIM = 16
VOCABULARY = 256


def small_spec(max_positions: int = 4096) -> ModelSpec:
    """Return a spec with two layers, four heads and two KV heads; token 0 ends a text."""
    frequencies = tuple(10000.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2))
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=HEAD_DIM,
        norm_eps=1e-5,
        max_positions=max_positions,
        rope=RopeSpec("default", frequencies),
        tied_head=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        bos_token_id=None,
        eos_token_ids=(0,),
    )


def local_spec(window: int = 8) -> ModelSpec:
    """Return a spec with five layers; all but the second are local, with another RoPE."""
    near = RopeSpec("default", tuple(100.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)))
    return replace(
        small_spec(), layers=5, local_layers=(0, 2, 3, 4), window=window, local_rope=near
    )


def unrotated_spec() -> ModelSpec:
    """Return a spec with four layers of global attention, two of them without RoPE."""
    return replace(small_spec(), layers=4, unrotated_layers=(1, 3))


def state_specs() -> dict[str, ModelSpec]:
    """Return specs with five layers, of which the second and the fourth attend."""
    spec, layers = replace(small_spec(), layers=5), (0, 2, 4)
    return {
        "convolution": replace(spec, states=StateLayers("convolution", layers, 64, conv_width=4)),
        "mamba2": replace(
            spec,
            states=StateLayers(
                "mamba2",
                layers,
                channels=6 * 10 + 2 * 2 * 12,
                conv_width=3,
                conv_bias=True,
                key_heads=2,
                value_heads=6,
                key_dim=12,
                value_dim=10,
            ),
        ),
        "delta_net": replace(
            spec,
            gated_attention=True,
            states=StateLayers(
                "delta_net",
                layers,
                channels=2 * 2 * 12 + 4 * 10,
                conv_width=3,
                key_heads=2,
                value_heads=4,
                key_dim=12,
                value_dim=10,
            ),
        ),
    }


def altup_spec() -> ModelSpec:
    """Return a spec with six layers and three residual streams (AltUp).

    Four layers are local, and two share the KV cells of other layers. It has what Gemma 3n has
    beyond Gemma 3, except its attention scale.
    """
    return replace(
        local_spec(),
        layers=6,
        local_layers=(0, 2, 3, 5),
        shared_kv_layers=2,
        qk_norm=True,
        norms_after=True,
        values_normed=True,
        activation="gelu_tanh",
        per_layer_size=8,
        per_layer_vocab=200,
        altup_inputs=3,
        altup_active=1,
        laurel_rank=5,
        activation_sparsity=(0.95, 0.5, 0.0, 0.8, 0.0, 0.0),
        mlp_widths=(96, 32, 64, 96, 40, 72),
    )


def small_model(
    seed: int = 0,
    max_positions: int = 4096,
    sharpness: float = 0.3,
    spec: ModelSpec | None = None,
) -> Model:
    """Return a random model.

    sharpness: standard deviation of the weights; larger values make attention more uneven.
    """
    spec = spec or small_spec(max_positions)
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=random) * sharpness
        for name, shape in tensor_shapes(spec).items()
    }
    return Model(
        "small", Path("small"), Decoder(spec, tensors), TextCodec(Path(), small_tokenizer())
    )


def small_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer: one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_small_folder(folder: Path, seed: int = 0, max_positions: int = 4096) -> Path:
    """Write `small_model` as files: `load_model(folder, dtype="float32")` loads the same model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = small_model(seed, max_positions)
    spec = model.spec
    config = {
        "architectures": [spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": 10000.0,
        "tie_word_embeddings": spec.tied_head,
        "eos_token_id": list(spec.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(model.text.tokenizer.to_str())
    save_file(dict(model.decoder.tensors), folder / "model.safetensors")
    return folder
