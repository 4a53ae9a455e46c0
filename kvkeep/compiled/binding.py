"""The compiled kernels, where they were built and this processor can run them.

The structures are those of `src/decode.h`, `src/chunk.h` and `src/similarity.h`;
`instruction_sets.py` says which kernels they are.
"""

import ctypes
import warnings
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

import torch

from kvkeep.compiled.instruction_sets import TORCH, choice, load
from kvkeep.errors import KernelMismatch, OutOfMemory
from kvkeep.models.layers.primitives import non_finite_error

PLAIN = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # CMatrix.format


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


class CBeside(Structure):
    _fields_ = (
        ("mlp_norm", c_void_p),
        ("norm", c_void_p),
        ("output_norm", c_void_p),
        ("router_scale", c_void_p),
    )


class CMixture(Structure):
    _fields_ = (
        ("router", CMatrix),
        ("shared_router", CMatrix),
        ("shared", CMlp),
        ("expert", POINTER(CMlp)),
        ("scales", c_void_p),
        ("beside", POINTER(CBeside)),
    )


class CPerLayer(Structure):
    _fields_ = (
        ("table", CMatrix),
        ("projection", CMatrix),
        ("norm", c_void_p),
        ("size", c_int32),
        ("factor", c_float),
    )


class COwnInput(Structure):
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
        ("mixture", POINTER(CMixture)),
        ("own", POINTER(COwnInput)),
        ("sinks", c_void_p),
        ("group", c_int32),
        ("place", c_int32),
        ("rotated", c_int32),
        ("scale", c_float),
    )


class CGroup(Structure):
    _fields_ = (
        ("layers", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("reserved", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("query_scale", c_void_p),
        ("frequencies", c_void_p),
    )


class CModel(Structure):
    _fields_ = (
        ("layers", c_int32),
        ("groups", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("heads", c_int32),
        ("values_normed", c_int32),
        ("norm_eps", c_float),
        ("norm_plus", c_float),
        ("embedding_multiplier", c_float),
        ("residual_multiplier", c_float),
        ("whole_norms", c_int32),
        ("centred_norms", c_int32),
        ("parallel", c_int32),
        ("activation", c_int32),
        ("experts", c_int32),
        ("experts_per_token", c_int32),
        ("expert_inner", c_int32),
        ("shared_inner", c_int32),
        ("norm_topk", c_int32),
        ("norm", c_void_p),
        ("per_layer", POINTER(CPerLayer)),
        ("layer", POINTER(CLayer)),
        ("group", POINTER(CGroup)),
        ("embedding", CMatrix),
        ("head", CMatrix),
    )


class CStrides(Structure):
    _fields_ = (("layer", c_int64), ("head", c_int64), ("cell", c_int64))


class CKept(Structure):
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
        ("runs", c_int32),
        ("position", c_int64),
        ("key", CKept),
        ("value", CKept),
        ("queries", c_void_p),
    )


class CSight(Structure):
    _fields_ = (
        ("keys", CKept),
        ("values", CKept),
        ("first", c_int32),
        ("cells", c_int32),
        ("runs", c_int32),
        ("origin", c_int32),
        ("bias", c_void_p),
        ("cell_bias", c_void_p),
        ("cell_bias_layer", c_int64),
        ("cell_bias_head", c_int64),
        ("offsets", c_void_p),
    )


class CRun(Structure):
    _fields_ = (("position", c_int64), ("sight", c_int32), ("index", c_int32))


class CSeen(Structure):
    _fields_ = (
        ("sights", c_int32),
        ("runs", c_int32),
        ("sequence", POINTER(CSequence)),
        ("sight", POINTER(CSight)),
        ("run", POINTER(CRun)),
    )


class CStep(Structure):
    _fields_ = (
        ("sequences", c_int32),
        ("threads", c_int32),
        ("seen", POINTER(CSeen)),
        ("hidden", c_void_p),
        ("seconds", POINTER(c_double)),
    )


class CPart(Structure):
    _fields_ = (
        ("keys", CKept),
        ("values", CKept),
        ("cells", c_int32),
        ("rotation", c_int32),
        ("causal", c_int32),
        ("bias_row", c_int32),
        ("bias", c_void_p),
        ("cell_bias", c_void_p),
        ("cell_bias_head", c_int64),
        ("offsets", c_void_p),
    )


class CChunk(Structure):
    _fields_ = (
        ("tokens", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotations", c_int32),
        ("parts", c_int32),
        ("threads", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("reserved", c_int32),
        ("sinks", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("angles", POINTER(c_float)),
        ("new_keys", c_void_p),
        ("new_values", c_void_p),
        ("new_key_head", c_int64),
        ("new_value_head", c_int64),
        ("part", POINTER(CPart)),
        ("out", c_void_p),
        ("log_sums", c_void_p),
    )


class CSimilarity(Structure):
    _fields_ = (
        ("heads", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("width", c_int32),
        ("older", c_int32),
        ("threads", c_int32),
        ("row", c_void_p),
        ("column", c_void_p),
        ("most", c_void_p),
        ("which", c_void_p),
    )


# What a step's seconds are counted under, in this order.
PHASES = ("norms", "projections", "cells", "attention", "output", "mlp")
HEAD_DIMS = (32, 64, 96, 128, 256, 512)
_LAYERS = (CModel, CLayer, CGroup, CMixture, CBeside, CPerLayer, COwnInput)
_DECODE = (*_LAYERS, CStep, CSeen, CSequence, CSight, CRun)
_CHUNK = (CPart, CChunk)
_REVISION = 8  # of the calls; `kRevision` in src/decode.h
_NO_MEMORY, _NOT_FINITE = 2, 4  # as in src/guard.h


def library() -> ctypes.CDLL | None:
    """The kernels, or None: not built, not for this processor, or switched off.

    Raises InvalidArgument for kernels that KVKEEP_ISA asks for and that are not to be had.
    """
    name = choice().name
    kernels = None if name == TORCH else load(name)
    return None if kernels is None else _bound(kernels)


@cache
def _bound(kernels: ctypes.CDLL) -> ctypes.CDLL | None:
    if not _agree(kernels):
        warnings.warn(
            "the compiled kernels were built from other sources than this kvkeep's and are not "
            "used: install it again to build them",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    kernels.kvkeep_decode.argtypes = [POINTER(CModel), POINTER(CStep)]
    kernels.kvkeep_product.argtypes = [POINTER(CMatrix), c_void_p, c_int, c_void_p, c_int]
    kernels.kvkeep_unpack.argtypes = [POINTER(CMatrix), c_int, c_int, c_void_p, c_int]
    kernels.kvkeep_unpack_floats.argtypes = kernels.kvkeep_unpack.argtypes
    kernels.kvkeep_rows.argtypes = [POINTER(CMatrix), c_void_p, c_int, c_void_p]
    kernels.kvkeep_attend_chunk.argtypes = [POINTER(CChunk)]
    kernels.kvkeep_angles.argtypes = [c_void_p, c_int, c_void_p, c_int, c_void_p]
    kernels.kvkeep_angles.restype = None
    kernels.kvkeep_most_similar.argtypes = [POINTER(CSimilarity)]
    return kernels


def require_done(status: int) -> None:
    """Raises what a kernel could not: OutOfMemory, NonFiniteLogits; KernelMismatch for none."""
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


def _agree(kernels: ctypes.CDLL) -> bool:
    """False for a library that was built from an older source than this file."""
    found = {
        "kvkeep_interface": _size(*_DECODE),
        "kvkeep_revision": _REVISION,
        "kvkeep_chunk_interface": _size(*_CHUNK),
        "kvkeep_similarity_interface": _size(CSimilarity),
    }
    return all(
        hasattr(kernels, name) and getattr(kernels, name)() == size for name, size in found.items()
    )


def _size(*structures: type[Structure]) -> int:
    return sum(map(ctypes.sizeof, structures))
