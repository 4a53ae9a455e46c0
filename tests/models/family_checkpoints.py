"""Writes a random checkpoint of a family by transformers, and opens a checkpoint in kvkeep."""

import re
from pathlib import Path

import torch
import transformers
from models.family_configs import FAMILIES, SMALL

from kvkeep.model import Model
from kvkeep.models.layers.decoder import Decoder
from kvkeep.models.spec.config import read_spec
from kvkeep.models.text.codec import TextCodec
from kvkeep.models.weights.checkpoint import decoder_shapes, decoder_tensors
from kvkeep.models.weights.tensors import check_tensors, read_shapes, read_tensors

TOKENS = [(17 * i * i + 5 * i) % 320 for i in range(150)]


def write_checkpoint(folder: Path, family: str) -> transformers.PreTrainedModel:
    kind, changes = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**(SMALL | changes))
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = name.endswith(("norm.weight", "norm_f.weight"))
            usual = weight[0].item() if is_norm else 0  # 1, or 0 for 1 + 0
            if kind in ("Gemma3nText", "Gemma4Text") and name.endswith("q_norm.weight"):
                usual = 0.15  # products are not scaled
            if re.search(r"norm_[12]\.weight|router\.(per_expert_)?scale", name):
                usual = 1
            clamped = kind == "GptOss" and "gate_up_proj" in name  # some of what it gives
            routed = "modality_router" in name  # what it reads is divided by its width
            weight.normal_(usual, 6 if routed else 0.6 if clamped else 0.15)
        for name, scale in model.named_buffers():
            if name.endswith("layer_scalar"):
                scale.uniform_(0.7, 1.3)
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                scale.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


def open_model(folder: Path, text: TextCodec) -> Model:
    spec = read_spec(folder)
    check_tensors(spec, decoder_shapes(spec, read_shapes(folder)), folder)
    whole = read_tensors(folder, torch.float32, torch.device("cpu"), progress=False)
    tensors = decoder_tensors(spec, whole)
    return Model("small", folder, Decoder(spec, tensors), text)
