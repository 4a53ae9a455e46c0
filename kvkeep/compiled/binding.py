"""The compiled kernels as ctypes sees them: their structures, functions and status codes.

Each structure is that of the same name, less the C, in `src/matrix.h`, `src/cells.h`,
`src/decode.h`, `src/chunk.h` or `src/similarity.h`. A library whose structures differ in any field
is not used.
"""

import ctypes
import warnings
from ctypes import (
    POINTER,
    Structure,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_ssize_t,
    c_void_p,
)
from functools import cache

import torch

from kvkeep.compiled.instruction_sets import TORCH, load, selected_set
from kvkeep.errors import KernelMismatch, OutOfMemory
from kvkeep.models.layers.primitives import non_finite_error

# CMatrix.format of matrices that are not packed.
DENSE_FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class CMatrix(Structure):
    _fields_ = (
        ("format", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("rounded", c_int32),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


class CMlp(Structure):
    _fields_ = (("gate", CMatrix), ("up", CMatrix), ("down", CMatrix))


class CParallelExperts(Structure):
    _fields_ = (
        ("mlp_norm", c_void_p),
        ("norm", c_void_p),
        ("output_norm", c_void_p),
        ("router_scale", c_void_p),
    )


class CMixtureOfExperts(Structure):
    _fields_ = (
        ("router", CMatrix),
        ("shared_router", CMatrix),
        ("shared", CMlp),
        ("experts", POINTER(CMlp)),
        ("expert_scales", c_void_p),
        ("parallel", POINTER(CParallelExperts)),
    )


class CPerLayerEmbedding(Structure):
    _fields_ = (
        ("table", CMatrix),
        ("projection", CMatrix),
        ("norm", c_void_p),
        ("size", c_int32),
        ("table_multiplier", c_float),
    )


class CPerLayerInput(Structure):
    _fields_ = (("gate", CMatrix), ("projection", CMatrix), ("norm", c_void_p))


class CLayer(Structure):
    _fields_ = (
        ("query", CMatrix),
        ("key", CMatrix),
        ("value", CMatrix),
        ("output", CMatrix),
        ("mlp", CMlp),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("experts", POINTER(CMixtureOfExperts)),
        ("per_layer_input", POINTER(CPerLayerInput)),
        ("sinks", c_void_p),
        ("group", c_int32),
        ("cell_layer", c_int32),
        ("rotated", c_int32),
        ("output_scale", c_float),
    )


class CLayerGroup(Structure):
    _fields_ = (
        ("layer_count", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("reserved", c_int32),
        ("softmax_scale", c_float),
        ("softcap", c_float),
        ("query_scale", c_void_p),
        ("inverse_frequencies", c_void_p),
    )


class CModel(Structure):
    _fields_ = (
        ("layer_count", c_int32),
        ("group_count", c_int32),
        ("hidden_size", c_int32),
        ("mlp_size", c_int32),
        ("heads", c_int32),
        ("values_normed", c_int32),
        ("norm_eps", c_float),
        ("norm_offset", c_float),
        ("embedding_multiplier", c_float),
        ("residual_multiplier", c_float),
        ("qk_norm_whole", c_int32),
        ("centred_norms", c_int32),
        ("parallel", c_int32),
        ("activation", c_int32),
        ("expert_count", c_int32),
        ("experts_per_token", c_int32),
        ("expert_size", c_int32),
        ("shared_expert_size", c_int32),
        ("norm_topk", c_int32),
        ("norm", c_void_p),
        ("per_layer", POINTER(CPerLayerEmbedding)),
        ("layers", POINTER(CLayer)),
        ("groups", POINTER(CLayerGroup)),
        ("embedding", CMatrix),
        ("head", CMatrix),
    )


class CStrides(Structure):
    _fields_ = (("layer", c_ssize_t), ("head", c_ssize_t), ("cell", c_ssize_t))


class CStoredCells(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("scale", c_void_p),
        ("strides", CStrides),
        ("scale_strides", CStrides),
        ("bits", c_int32),
        ("reserved", c_int32),
    )


class CSequence(Structure):
    _fields_ = (
        ("token", c_int32),
        ("view_count", c_int32),
        ("position", c_int64),
        ("key", CStoredCells),
        ("value", CStoredCells),
        ("queries", c_void_p),
    )


class CSharedView(Structure):
    _fields_ = (
        ("keys", CStoredCells),
        ("values", CStoredCells),
        ("first", c_int32),
        ("cells", c_int32),
        ("view_count", c_int32),
        ("origin", c_int32),
        ("bias", c_void_p),
        ("cell_bias", c_void_p),
        ("cell_bias_layer", c_ssize_t),
        ("cell_bias_head", c_ssize_t),
        ("ragged", c_void_p),
    )


class CSequenceView(Structure):
    _fields_ = (("position", c_int64), ("shared_view", c_int32), ("row", c_int32))


class CGroupViews(Structure):
    _fields_ = (
        ("shared_view_count", c_int32),
        ("view_count", c_int32),
        ("sequences", POINTER(CSequence)),
        ("shared_views", POINTER(CSharedView)),
        ("views", POINTER(CSequenceView)),
    )


class CDecodeStep(Structure):
    _fields_ = (
        ("sequence_count", c_int32),
        ("threads", c_int32),
        ("groups", POINTER(CGroupViews)),
        ("hidden", c_void_p),
        ("seconds", POINTER(c_double)),
    )


class CChunkView(Structure):
    _fields_ = (
        ("keys", CStoredCells),
        ("values", CStoredCells),
        ("cells", c_int32),
        ("rotation", c_int32),
        ("causal", c_int32),
        ("bias_row", c_int32),
        ("bias", c_void_p),
        ("cell_bias", c_void_p),
        ("cell_bias_head", c_ssize_t),
        ("ragged", c_void_p),
    )


class CChunk(Structure):
    _fields_ = (
        ("tokens", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotations", c_int32),
        ("view_count", c_int32),
        ("threads", c_int32),
        ("softmax_scale", c_float),
        ("softcap", c_float),
        ("reserved", c_int32),
        ("sinks", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("angles", POINTER(c_float)),
        ("new_keys", c_void_p),
        ("new_values", c_void_p),
        ("new_key_head", c_ssize_t),
        ("new_value_head", c_ssize_t),
        ("views", POINTER(CChunkView)),
        ("out", c_void_p),
        ("log_sums", c_void_p),
    )


class CSimilarity(Structure):
    _fields_ = (
        ("heads", c_int32),
        ("row_count", c_int32),
        ("column_count", c_int32),
        ("width", c_int32),
        ("strictly_older", c_int32),
        ("threads", c_int32),
        ("rows", c_void_p),
        ("columns", c_void_p),
        ("max_products", c_void_p),
        ("argmax", c_void_p),
    )


# The phases that a decode step's seconds are counted under, in this order.
PHASES = ("norms", "projections", "cells", "attention", "output", "mlp")
HEAD_DIMS = (32, 64, 96, 128, 256, 512)
STRUCTURES: tuple[type[Structure], ...] = (
    *(CMatrix, CMlp, CParallelExperts, CMixtureOfExperts, CPerLayerEmbedding, CPerLayerInput),
    *(CLayer, CLayerGroup, CModel, CStrides, CStoredCells, CSequence, CSharedView, CSequenceView),
    *(CGroupViews, CDecodeStep, CChunkView, CChunk, CSimilarity),
)
_REVISION = 9  # `kRevision` in src/decode.h
_NO_MEMORY, _NOT_FINITE = 2, 4  # `Status` in src/status.h


def library() -> ctypes.CDLL | None:
    """Return the kernels, or None: not built, not for this processor, or switched off.

    Raises:
        InvalidArgument: KVKEEP_ISA names kernels that are not available.
    """
    name = selected_set().name
    kernels = None if name == TORCH else load(name)
    return None if kernels is None else _bound(kernels)


@cache
def _bound(kernels: ctypes.CDLL) -> ctypes.CDLL | None:
    try:
        require_same_interface(kernels)
    except KernelMismatch as error:
        warnings.warn(
            "the compiled kernels were built from other sources than this kvkeep's and are not "
            f"used: install it again to build them ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    kernels.kvkeep_decode.argtypes = [POINTER(CModel), POINTER(CDecodeStep)]
    kernels.kvkeep_product.argtypes = [POINTER(CMatrix), c_void_p, c_int, c_void_p, c_int]
    kernels.kvkeep_unpack.argtypes = [POINTER(CMatrix), c_int, c_int, c_void_p, c_int]
    kernels.kvkeep_unpack_floats.argtypes = kernels.kvkeep_unpack.argtypes
    kernels.kvkeep_rows.argtypes = [POINTER(CMatrix), c_void_p, c_int, c_void_p]
    kernels.kvkeep_attend_chunk.argtypes = [POINTER(CChunk)]
    kernels.kvkeep_angles.argtypes = [c_void_p, c_int, c_void_p, c_int, c_void_p]
    kernels.kvkeep_angles.restype = None
    kernels.kvkeep_most_similar.argtypes = [POINTER(CSimilarity)]
    return kernels


def require_same_interface(kernels: ctypes.CDLL) -> None:
    """Check that a library's structures are those of this module, field by field.

    Raises:
        KernelMismatch: names the structure and the first field that differs.
    """
    if not hasattr(kernels, "kvkeep_layout") or kernels.kvkeep_revision() != _REVISION:
        raise KernelMismatch(f"the kernels' interface is not revision {_REVISION}")
    layout = _layout(kernels)
    for structure in STRUCTURES:
        name = structure.__name__.removeprefix("C")
        fields = layout.pop(name, {})
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            expected, found = (place.offset, place.size), fields.pop(field, None)
            if found != expected:
                raise KernelMismatch(
                    f"{name}.{field} must have offset {expected[0]} and size {expected[1]}; the "
                    f"kernels have {found or 'no such field'}"
                )
        if fields:
            raise KernelMismatch(f"{name}.{next(iter(fields))} is a field of the kernels alone")
    if layout:
        raise KernelMismatch(f"{next(iter(layout))} is a structure of the kernels alone")


def _layout(kernels: ctypes.CDLL) -> dict[str, dict[str, tuple[int, int]]]:
    """Return a library's own list: for each structure the offset and size of each field."""
    size = 1 << 16
    text = ctypes.create_string_buffer(size)
    length = kernels.kvkeep_layout(text, size)
    layout: dict[str, dict[str, tuple[int, int]]] = {}
    for line in text.raw[:length].decode().splitlines():
        name, offset, width = line.split()
        structure, _, field = name.partition(".")
        layout.setdefault(structure, {})[field] = (int(offset), int(width))
    return layout


def require_done(status: int) -> None:
    """Raise the error that a kernel's status stands for; nothing for success.

    Raises:
        OutOfMemory: the call's buffers could not be allocated.
        NonFiniteLogits: a result is NaN or infinity.
        KernelMismatch: no kernel supports the call.
    """
    if status == _NOT_FINITE:
        raise non_finite_error()
    if status == _NO_MEMORY:
        raise OutOfMemory(
            "there was not enough memory for this step, and nothing was changed; free some, or "
            "take a smaller prefill_step or max_kv_size"
        )
    if status:
        raise KernelMismatch(
            f"no compiled kernel takes this model (status {status}); KVKEEP_COMPILED=0 goes by "
            "torch alone"
        )
