"""Random GGUF blocks of any format that kvkeep packs, with finite weights of a usual size."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from kvkeep.models.weights.formats import FORMATS

# Offsets of float16 scales in a block.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Return random blocks, `[rows, bytes]` uint8."""
    random = np.random.default_rng(seed)
    span, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = random.integers(0, 256, (rows, columns // span, size), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = random.integers(120, 125, blocks.shape[:2])
        return blocks.reshape(rows, -1)
    largest = {8: 127, 4: 8, 5: 16, 6: 32}[FORMATS[name].bits] * (32 if span == 256 else 1)
    for offset in HALVES.get(name, (0,)):
        scales = random.standard_normal((*blocks.shape[:2], 1)) / largest
        blocks[..., offset : offset + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def exact(name: str, blocks: np.ndarray) -> Tensor:
    """Return the weights as gguf-py unpacks them, `[rows, columns]` float32."""
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType[name]))
