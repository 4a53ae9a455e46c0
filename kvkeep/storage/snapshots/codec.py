"""Codecs of keys and values in snapshot files: plain, zstd, 8 bits, or in a basis of the model."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
import zstandard
from torch import Tensor

from kvkeep.cache.checks import require, require_tensor
from kvkeep.errors import InvalidArgument
from kvkeep.storage.files.tensors import tensor_bytes
from kvkeep.storage.lossy.basis import LOSSY_CODECS, CellBasis, find_basis
from kvkeep.storage.lossy.cells import CodedCells, decode_cells, encode_cells

Codec = Literal["exact", "none", "zstd", "int8", "small", "smaller"]
CODECS: tuple[str, ...] = get_args(Codec)
ROUNDING_CODECS = ("int8", *LOSSY_CODECS)  # in order of what they lose, the least first
_ZSTD_LEVEL = 1  # level 3 gives a larger result for keys and values, in twice the time
# Real keys and values shrink to about half. Larger expansions (a decompression bomb) are refused.
_MAX_EXPANSION_FACTOR, _ALWAYS_ALLOWED_BYTES = 4096, 1 << 20  # a factor, bytes on top
_MIN_SCALE, _MAX_SCALE = 1e-7, 65504.0  # the range of float16


def encode(
    tensors: Mapping[str, Tensor],
    codec: str,
    uniform: Collection[str] = (),
    basis: CellBasis | None = None,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Encode the keys and values among a snapshot's tensors.

    uniform: name prefixes of cells that a basis can code: those of all layers that attend to the
    whole text, not quantised, one for each token. Others are compressed without loss. basis: for
    the codecs small and smaller.

    Returns the tensors to store, and for `decode` how each of the encoded ones is encoded, by name.
    All others are small, and stay plain for other safetensors readers. The codec of an entry is one
    that rounds only if it rounds numbers of that tensor.
    """
    stored: dict[str, Tensor] = {}
    encodings: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if codec == "none" or not name.endswith((".keys", ".values")):
            stored[name] = tensor
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        encodings[name] = {"codec": codec, "dtype": dtype, "shape": list(tensor.shape)}
        prefix, _, kind = name.rpartition(".")
        if codec in LOSSY_CODECS and prefix in uniform:
            assert basis is not None
            positions = tensors[f"{prefix}.positions"]
            coded = encode_cells(tensor.cpu(), positions, basis, basis.steps[codec], kind == "keys")
            if len(coded.exact_cells) < len(positions):
                stored |= _frames(name, coded)
                sizes = [len(frame) for frame in coded.frames]
                encodings[name] |= {"basis": basis.digest, "frames": sizes}
                continue
        elif codec == "int8":
            stored[f"{name}.int8"], stored[f"{name}.scale"] = _quantise(tensor)
            continue
        encodings[name]["codec"] = "zstd"
        stored[f"{name}.zstd"] = _compress(tensor.cpu())
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
        elif encoding["codec"] in LOSSY_CODECS:
            tensors[name] = _decode_frames(name, encoding, tensors)
        else:
            quantised, scale = tensors.pop(f"{name}.int8"), tensors.pop(f"{name}.scale")
            require_tensor(f"{name}.int8", quantised, torch.int8, *encoding["shape"])
            require_tensor(f"{name}.scale", scale, torch.float16, *encoding["shape"][:-1], 1)
            tensors[name] = (quantised * scale.float()).to(dtype)
    return tensors


def checked_codec(codec: str) -> Codec:
    """Return a codec; "none" for "exact". Raises InvalidArgument for an unknown one."""
    if codec not in CODECS:
        raise InvalidArgument(f"codec must be one of {', '.join(CODECS)}; found {codec!r}")
    return "none" if codec == "exact" else cast(Codec, codec)


def coarser(codec: str, other: str) -> str:
    """Return the codec that loses more: "" loses nothing, one of a later release the most."""
    order = ("", *ROUNDING_CODECS)
    return max(codec, other, key=lambda name: order.index(name) if name in order else len(order))


def _frames(name: str, coded: CodedCells) -> dict[str, Tensor]:
    """Return the tensors of coded keys or values."""
    frames = bytearray(b"".join(coded.frames))
    return {
        f"{name}.frames": torch.frombuffer(frames, dtype=torch.uint8),
        f"{name}.exact": coded.exact,
        f"{name}.exact_cells": coded.exact_cells,
    }


def _decode_frames(name: str, encoding: Mapping[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """Return the keys or values of frames, whose tensors are removed."""
    basis, (prefix, _, kind) = find_basis(encoding["basis"]), name.rpartition(".")
    frames, exact = tensors.pop(f"{name}.frames"), tensors.pop(f"{name}.exact")
    exact_cells, positions = tensors.pop(f"{name}.exact_cells"), tensors[f"{prefix}.positions"]
    layers, kv_heads, count, head_dim = encoding["shape"]
    layout = basis.layout
    sizes, expected = (
        (layers, kv_heads, head_dim),
        (layout.layers, layout.kv_heads, layout.head_dim),
    )
    require(sizes == expected, f"{name} has cells of another shape than its basis")
    dtype = getattr(torch, encoding["dtype"])
    require(dtype == layout.dtype, f"{name} has another dtype than its basis")
    require_tensor(f"{prefix}.positions", positions, torch.int64, count)
    require_tensor(f"{name}.exact_cells", exact_cells, torch.int32, None)
    require_tensor(f"{name}.exact", exact, dtype, layers, kv_heads, len(exact_cells), head_dim)
    require_tensor(f"{name}.frames", frames, torch.uint8, sum(encoding["frames"]))
    coded = CodedCells(tuple(_split(tensor_bytes(frames), encoding["frames"])), exact_cells, exact)
    return decode_cells(coded, positions, basis, basis.steps[encoding["codec"]], kind == "keys")


def _split(content: bytes, sizes: Collection[int]) -> Iterator[bytes]:
    first = 0
    for size in sizes:
        yield content[first : first + size]
        first += size


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
