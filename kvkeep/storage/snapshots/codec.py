"""How a snapshot's tensors are written: as they are, compressed, or in 8 bits."""

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
_LEVEL = 1  # of keys and values, level 3 makes more bytes in twice the time
# Keys and values become half as large: what says that it was far larger is there to fill memory.
_MOST_TIMES, _MOST_UNSEEN = 4096, 1 << 20
_LEAST_SCALE, _MOST_SCALE = 1e-7, 65504.0  # what float16 can hold


def encode(
    tensors: Mapping[str, Tensor], codec: str
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Tensors as they will be stored, and for each that is not plain, how to get it back.

    Keys and values are coded; everything else is small, and stays readable to anyone.
    """
    if codec not in CODECS:
        raise InvalidArgument(f"codec must be one of {', '.join(CODECS)}; found {codec!r}")
    stored: dict[str, Tensor] = {}
    coding: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if codec == "none" or not name.endswith((".keys", ".values")):
            stored[name] = tensor
            continue
        kind = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        coding[name] = {"codec": codec, **kind}
        if codec == "zstd":
            stored[f"{name}.zstd"] = _compressed(tensor)
        else:
            stored[f"{name}.int8"], stored[f"{name}.scale"] = _in_8_bits(tensor)
    return stored, coding


def decode(
    stored: Mapping[str, Tensor], coding: Mapping[str, Mapping[str, Any]]
) -> dict[str, Tensor]:
    """The tensors that `encode` was given: equal, but for int8.

    Raises KeyError or ValueError where they are not of that coding.
    """
    tensors = dict(stored)
    for name, how in coding.items():
        dtype = getattr(torch, how["dtype"])
        if how["codec"] == "zstd":
            tensors[name] = _decompressed(tensors.pop(f"{name}.zstd"), dtype, how["shape"])
        else:
            small, scale = tensors.pop(f"{name}.int8"), tensors.pop(f"{name}.scale")
            require_tensor(f"{name}.int8", small, torch.int8, *how["shape"])
            require_tensor(f"{name}.scale", scale, torch.float16, *how["shape"][:-1], 1)
            tensors[name] = (small * scale.float()).to(dtype)
    return tensors


def _compressed(tensor: Tensor) -> Tensor:
    """zstd over the first bytes of all numbers, then the second bytes, and so on.

    Of a bfloat16 only the byte with the exponent has a pattern; set apart, it compresses.
    """
    rows = tensor.contiguous().view(torch.uint8).reshape(-1, tensor.dtype.itemsize).numpy()
    planes = np.empty(rows.shape[::-1], np.uint8)
    for index, plane in enumerate(planes):  # ten times as fast as a transposed copy
        plane[:] = rows[:, index]
    data = zstandard.ZstdCompressor(level=_LEVEL, threads=-1).compress(planes.data)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _decompressed(data: Tensor, dtype: torch.dtype, shape: list[int]) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    frame = tensor_bytes(data)
    if size > _MOST_UNSEEN + _MOST_TIMES * len(frame):
        raise ValueError(f"{len(frame)} bytes of compressed data are not of {size}")
    if zstandard.frame_content_size(frame) != size:
        raise ValueError(f"compressed data does not hold the {size} bytes of {shape}")
    try:
        plain = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"compressed data cannot be read: {error}") from error
    planes = np.frombuffer(plain, np.uint8).reshape(dtype.itemsize, -1)
    # Aligned to 64 bytes, which numpy's arrays are not.
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    rows = tensor.view(-1).view(torch.uint8).view(-1, dtype.itemsize).numpy()
    for index, plane in enumerate(planes):
        rows[:, index] = plane
    return tensor


def _in_8_bits(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int8, and a float16 scale for each cell of each layer and KV head."""
    full = tensor.float()
    scale = (full.abs().amax(-1, keepdim=True) / 127).clamp(_LEAST_SCALE, _MOST_SCALE).half()
    return (full / scale.float()).round().clamp(-127, 127).to(torch.int8), scale
