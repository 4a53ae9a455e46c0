"""Codecs of keys and values in snapshot files: plain, lossless zstd, or 8 bits."""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
import zstandard
from torch import Tensor

from kvkeep.cache.checks import require_tensor
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.tensors import tensor_bytes

Codec = Literal["none", "zstd", "int8"]
CODECS: tuple[str, ...] = get_args(Codec)
_ZSTD_LEVEL = 1  # level 3 gives a larger result for keys and values, in twice the time
# Real keys and values shrink to about half. Larger expansions (a decompression bomb) are refused.
_MAX_EXPANSION_FACTOR, _ALWAYS_ALLOWED_BYTES = 4096, 1 << 20  # a factor, bytes on top
_MIN_SCALE, _MAX_SCALE = 1e-7, 65504.0  # the range of float16


def encode(
    tensors: Mapping[str, Tensor], codec: str
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Encode the keys and values among a snapshot's tensors.

    Returns the tensors to store, and for `decode` how each of the encoded ones is encoded, by name.
    All others are small, and stay plain for other safetensors readers.
    """
    if codec not in CODECS:
        raise InvalidArgument(f"codec must be one of {', '.join(CODECS)}; found {codec!r}")
    stored: dict[str, Tensor] = {}
    encodings: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if codec == "none" or not name.endswith((".keys", ".values")):
            stored[name] = tensor
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        encodings[name] = {"codec": codec, "dtype": dtype, "shape": list(tensor.shape)}
        if codec == "zstd":
            stored[f"{name}.zstd"] = _compress(tensor.cpu())
        else:
            stored[f"{name}.int8"], stored[f"{name}.scale"] = _quantise(tensor)
    return stored, encodings


def decode(
    stored: Mapping[str, Tensor], encodings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Undo `encode`. Raises KeyError or ValueError if the tensors do not match their encodings."""
    tensors = dict(stored)
    for name, encoding in encodings.items():
        dtype = getattr(torch, encoding["dtype"])
        if encoding["codec"] == "zstd":
            tensors[name] = _decompress(tensors.pop(f"{name}.zstd"), dtype, encoding["shape"])
        else:
            quantised, scale = tensors.pop(f"{name}.int8"), tensors.pop(f"{name}.scale")
            require_tensor(f"{name}.int8", quantised, torch.int8, *encoding["shape"])
            require_tensor(f"{name}.scale", scale, torch.float16, *encoding["shape"][:-1], 1)
            tensors[name] = (quantised * scale.float()).to(dtype)
    return tensors


def _compress(tensor: Tensor) -> Tensor:
    """Compress a tensor as byte planes: the first bytes of all numbers, then the second, and so on.

    In a bfloat16 only the byte with the exponent has a pattern; in its own plane it compresses.
    """
    byte_rows = tensor.contiguous().view(torch.uint8).reshape(-1, tensor.dtype.itemsize).numpy()
    planes = np.empty(byte_rows.shape[::-1], np.uint8)
    for index, plane in enumerate(planes):  # ten times faster than a transposed copy
        plane[:] = byte_rows[:, index]
    compressed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, threads=-1).compress(planes.data)
    return torch.frombuffer(bytearray(compressed), dtype=torch.uint8)


def _decompress(compressed: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Undo `_compress`. Raises ValueError if the data does not expand to the shape."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    frame = tensor_bytes(compressed)
    if nbytes > _ALWAYS_ALLOWED_BYTES + _MAX_EXPANSION_FACTOR * len(frame):
        raise ValueError(f"{len(frame)} bytes of compressed data cannot expand to {nbytes} bytes")
    if zstandard.frame_content_size(frame) != nbytes:
        raise ValueError(f"compressed data does not expand to the {nbytes} bytes of {shape}")
    try:
        decompressed = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"compressed data cannot be read: {error}") from error
    planes = np.frombuffer(decompressed, np.uint8).reshape(dtype.itemsize, -1)
    # torch aligns it to 64 bytes; numpy's arrays are not aligned.
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    byte_rows = tensor.view(-1).view(torch.uint8).view(-1, dtype.itemsize).numpy()
    for index, plane in enumerate(planes):
        byte_rows[:, index] = plane
    return tensor


def _quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise to int8 with a float16 scale per cell, layer and KV head."""
    floats = tensor.float()
    scale = (floats.abs().amax(-1, keepdim=True) / 127).clamp(_MIN_SCALE, _MAX_SCALE).half()
    return (floats / scale.float()).round().clamp(-127, 127).to(torch.int8), scale
