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
from typing import Any

import torch

from kvkeep.compiled.instruction_sets import TORCH, load, selected_set
from kvkeep.errors import KernelMismatch, OutOfMemory
from kvkeep.models.layers.primitives import non_finite_error

# CMatrix.format of matrices that are not packed.
DENSE_FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def _fields(kind: type[Any], names: str) -> tuple[tuple[str, type[Any]], ...]:
    """Return fields of one type; names: separated by spaces."""
    return tuple((name, kind) for name in names.split())


class CMatrix(Structure):
    _fields_ = (
        *_fields(c_int32, "format rows columns rounded"),
        *_fields(c_void_p, "data scales bias"),
    )


class CMlp(Structure):
    _fields_ = _fields(CMatrix, "gate up down")


class CParallelExperts(Structure):
    _fields_ = _fields(c_void_p, "mlp_norm norm output_norm router_scale")


class CMixtureOfExperts(Structure):
    _fields_ = (
        *_fields(CMatrix, "router shared_router"),
        ("shared", CMlp),
        ("experts", POINTER(CMlp)),
        ("expert_scales", c_void_p),
        ("parallel", POINTER(CParallelExperts)),
    )


class CPerLayerEmbedding(Structure):
    _fields_ = (
        *_fields(CMatrix, "table projection"),
        ("norm", c_void_p),
        ("size", c_int32),
        ("table_multiplier", c_float),
    )


class CPerLayerInput(Structure):
    _fields_ = (*_fields(CMatrix, "gate projection"), ("norm", c_void_p))


class CLayer(Structure):
    _fields_ = (
        *_fields(CMatrix, "query key value output"),
        ("mlp", CMlp),
        *_fields(c_void_p, "attention_norm mlp_norm query_norm key_norm attention_output_norm"),
        ("mlp_output_norm", c_void_p),
        ("experts", POINTER(CMixtureOfExperts)),
        ("per_layer_input", POINTER(CPerLayerInput)),
        ("sinks", c_void_p),
        *_fields(c_int32, "group cell_layer rotated"),
        ("output_scale", c_float),
    )


class CLayerGroup(Structure):
    _fields_ = (
        *_fields(c_int32, "layer_count kv_heads head_dim reserved"),
        *_fields(c_float, "softmax_scale softcap"),
        *_fields(c_void_p, "query_scale inverse_frequencies"),
    )


class CModel(Structure):
    _fields_ = (
        *_fields(c_int32, "layer_count group_count hidden_size mlp_size heads values_normed"),
        *_fields(c_float, "norm_eps norm_offset embedding_multiplier residual_multiplier"),
        *_fields(c_int32, "qk_norm_whole centred_norms parallel activation expert_count"),
        *_fields(c_int32, "experts_per_token expert_size shared_expert_size norm_topk"),
        ("norm", c_void_p),
        ("per_layer", POINTER(CPerLayerEmbedding)),
        ("layers", POINTER(CLayer)),
        ("groups", POINTER(CLayerGroup)),
        *_fields(CMatrix, "embedding head"),
    )


class CStrides(Structure):
    _fields_ = _fields(c_ssize_t, "layer head cell")


class CStoredCells(Structure):
    _fields_ = (
        *_fields(c_void_p, "data scale"),
        *_fields(CStrides, "strides scale_strides"),
        *_fields(c_int32, "bits reserved"),
    )


class CSequence(Structure):
    _fields_ = (
        *_fields(c_int32, "token view_count"),
        ("position", c_int64),
        *_fields(CStoredCells, "key value"),
        ("queries", c_void_p),
    )


class CSharedView(Structure):
    _fields_ = (
        *_fields(CStoredCells, "keys values"),
        *_fields(c_int32, "first cells view_count origin"),
        *_fields(c_void_p, "bias cell_bias"),
        *_fields(c_ssize_t, "cell_bias_layer cell_bias_head"),
        ("ragged", c_void_p),
    )


class CSequenceView(Structure):
    _fields_ = (
        ("position", c_int64),
        *_fields(c_int32, "shared_view row"),
    )


class CGroupViews(Structure):
    _fields_ = (
        *_fields(c_int32, "shared_view_count view_count"),
        ("sequences", POINTER(CSequence)),
        ("shared_views", POINTER(CSharedView)),
        ("views", POINTER(CSequenceView)),
    )


class CDecodeStep(Structure):
    _fields_ = (
        *_fields(c_int32, "sequence_count threads"),
        ("groups", POINTER(CGroupViews)),
        ("hidden", c_void_p),
        ("seconds", POINTER(c_double)),
    )


class CChunkView(Structure):
    _fields_ = (
        *_fields(CStoredCells, "keys values"),
        *_fields(c_int32, "cells rotation causal bias_row"),
        *_fields(c_void_p, "bias cell_bias"),
        ("cell_bias_head", c_ssize_t),
        ("ragged", c_void_p),
    )


class CChunk(Structure):
    _fields_ = (
        *_fields(c_int32, "tokens heads kv_heads head_dim rotations view_count threads"),
        *_fields(c_float, "softmax_scale softcap"),
        ("reserved", c_int32),
        *_fields(c_void_p, "sinks q k v"),
        ("angles", POINTER(c_float)),
        *_fields(c_void_p, "new_keys new_values"),
        *_fields(c_ssize_t, "new_key_head new_value_head"),
        ("views", POINTER(CChunkView)),
        *_fields(c_void_p, "out log_sums"),
    )


class CSimilarity(Structure):
    _fields_ = (
        *_fields(c_int32, "heads row_count column_count width strictly_older threads"),
        *_fields(c_void_p, "rows columns max_products argmax"),
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
