"""The structures that Python passes to the compiled kernels, in ctypes.

Structure `CName` mirrors `Name` in `src/matrix.h`, `src/cells.h`, `src/states.h`, `src/decode.h`,
`src/chunk.h` or `src/similarity.h`.
"""

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_ssize_t, c_void_p
from typing import Any

import torch

# CMatrix.format of unpacked matrices.
DENSE_FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class _KernelStructure(Structure):
    """Base class of all structures that the kernels read."""


def _fields(*groups: tuple[str, type[Any]]) -> tuple[tuple[str, type[Any]], ...]:
    """Return a structure's `_fields_`. groups: names separated by spaces, and their type."""
    return tuple((name, field_type) for names, field_type in groups for name in names.split())


class CMatrix(_KernelStructure):
    # rounded: 1 to multiply as if each weight had been rounded to bfloat16.
    _fields_ = _fields(("format rows columns rounded", c_int32), ("data scales bias", c_void_p))


class CMlp(_KernelStructure):
    _fields_ = _fields(("gate up down", CMatrix))


class CParallelExperts(_KernelStructure):
    _fields_ = _fields(("mlp_norm norm output_norm router_scale", c_void_p))


class CMixtureOfExperts(_KernelStructure):
    _fields_ = _fields(
        ("router shared_router", CMatrix),
        ("shared", CMlp),
        ("experts", POINTER(CMlp)),
        ("selection_bias expert_scales", c_void_p),
        ("parallel", POINTER(CParallelExperts)),
    )


class CPerLayerEmbedding(_KernelStructure):
    _fields_ = _fields(
        ("table projection", CMatrix),
        ("norm", c_void_p),
        ("size", c_int32),
        ("table_multiplier", c_float),
    )


class CPerLayerInput(_KernelStructure):
    _fields_ = _fields(("gate projection", CMatrix), ("norm", c_void_p))


class CStateShape(_KernelStructure):
    _fields_ = _fields(
        ("kind channels conv_width key_heads value_heads key_dim value_dim tiled_output", c_int32),
        ("mamba_norm", c_int32),
        ("norm_eps output_multiplier", c_float),
        ("input_factors", c_void_p),
    )


class CStateLayer(_KernelStructure):
    _fields_ = _fields(
        ("input gate rate decay output", CMatrix),
        ("taps conv_bias step_bias decay_rates skip norm", c_void_p),
        ("index reserved", c_int32),
    )


class CLayerStates(_KernelStructure):
    _fields_ = _fields(("inputs matrices new_inputs new_matrices", c_void_p))


class CStateChunk(_KernelStructure):
    _fields_ = _fields(
        ("shape", POINTER(CStateShape)),
        ("layer", POINTER(CStateLayer)),
        ("states", CLayerStates),
        ("input gate rate decay out", c_void_p),
        ("tokens threads", c_int32),
    )


class CLayer(_KernelStructure):
    _fields_ = _fields(
        ("query key value output", CMatrix),
        ("mlp", CMlp),
        ("attention_norm mlp_norm query_norm key_norm", c_void_p),
        ("attention_output_norm mlp_output_norm", c_void_p),
        ("experts", POINTER(CMixtureOfExperts)),
        ("per_layer_input", POINTER(CPerLayerInput)),
        ("state", POINTER(CStateLayer)),
        ("sinks", c_void_p),
        ("group cell_layer rotated", c_int32),
        ("output_scale", c_float),
    )


class CLayerGroup(_KernelStructure):
    _fields_ = _fields(
        ("layer_count kv_heads head_dim reserved", c_int32),
        ("softmax_scale softcap", c_float),
        ("query_scale inverse_frequencies", c_void_p),
    )


class CModel(_KernelStructure):
    _fields_ = _fields(
        ("layer_count group_count hidden_size mlp_size heads values_normed", c_int32),
        ("norm_eps norm_offset embedding_multiplier residual_multiplier", c_float),
        ("qk_norm_whole centred_norms parallel activation expert_count", c_int32),
        ("experts_per_token expert_size shared_expert_size norm_topk sigmoid_router", c_int32),
        ("routed_scale", c_float),
        ("gated_attention", c_int32),
        ("attention_input_multiplier attention_output_multiplier", c_float),
        ("gate_multiplier mlp_output_multiplier", c_float),
        ("norm", c_void_p),
        ("per_layer", POINTER(CPerLayerEmbedding)),
        ("states", POINTER(CStateShape)),
        ("layers", POINTER(CLayer)),
        ("groups", POINTER(CLayerGroup)),
        ("embedding head", CMatrix),
    )


class CStrides(_KernelStructure):
    _fields_ = _fields(("layer head cell", c_ssize_t))


class CStoredCells(_KernelStructure):
    _fields_ = _fields(
        ("data scale", c_void_p), ("strides scale_strides", CStrides), ("bits reserved", c_int32)
    )


class CSequence(_KernelStructure):
    _fields_ = _fields(
        ("token view_count", c_int32),
        ("position", c_int64),
        ("key value", CStoredCells),
        ("queries", c_void_p),
        ("follows reserved", c_int32),
    )


class COverwrittenCells(_KernelStructure):
    _fields_ = _fields(
        ("keys values", CStoredCells),
        ("slots first_rows", POINTER(c_int32)),
        ("count reserved", c_int32),
    )


class CSharedView(_KernelStructure):
    _fields_ = _fields(
        ("keys values", CStoredCells),
        ("first cells view_count origin", c_int32),
        ("bias cell_bias", c_void_p),
        ("cell_bias_layer cell_bias_head", c_ssize_t),
        ("ragged", c_void_p),
        ("overwritten", POINTER(COverwrittenCells)),
    )


class CSequenceView(_KernelStructure):
    _fields_ = _fields(("position", c_int64), ("shared_view row", c_int32))


class CGroupViews(_KernelStructure):
    _fields_ = _fields(
        ("shared_view_count view_count", c_int32),
        ("sequences", POINTER(CSequence)),
        ("shared_views", POINTER(CSharedView)),
        ("views", POINTER(CSequenceView)),
    )


class CDecodeStep(_KernelStructure):
    _fields_ = _fields(
        ("sequence_count threads", c_int32),
        ("groups", POINTER(CGroupViews)),
        ("states", POINTER(CLayerStates)),
        ("hidden", c_void_p),
        ("seconds", POINTER(c_double)),
    )


class CChunkView(_KernelStructure):
    _fields_ = _fields(
        ("keys values", CStoredCells),
        ("cells rotation causal bias_row", c_int32),
        ("bias cell_bias", c_void_p),
        ("cell_bias_head", c_ssize_t),
        ("ragged", c_void_p),
    )


class CChunk(_KernelStructure):
    _fields_ = _fields(
        ("tokens heads kv_heads head_dim rotations view_count threads", c_int32),
        ("softmax_scale softcap", c_float),
        ("reserved", c_int32),
        ("sinks q k v", c_void_p),
        ("angles", POINTER(c_float)),
        ("new_keys new_values", c_void_p),
        ("new_key_head new_value_head", c_ssize_t),
        ("views", POINTER(CChunkView)),
        ("packed out log_sums", c_void_p),
    )


class CSimilarity(_KernelStructure):
    _fields_ = _fields(
        ("heads row_count column_count width strictly_older threads", c_int32),
        ("rows columns max_products argmax", c_void_p),
    )


STRUCTURES = tuple(_KernelStructure.__subclasses__())
# The phases of a decode step, in the order of `CDecodeStep.seconds`.
PHASES = ("norms", "projections", "cells", "attention", "output", "mlp")


def field_extents(structure: type[Structure]) -> dict[str, tuple[int, int]]:
    """Return the offset and size in bytes of each field of a structure, by name."""
    fields = {name: getattr(structure, name) for name, *_ in structure._fields_}
    return {name: (field.offset, field.size) for name, field in fields.items()}
