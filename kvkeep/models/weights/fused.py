"""Matrices that a family stores as one: those of query, key and value, and of gate and up.

A part is rows of the whole, so that it is looked at where it lies: nothing is copied.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.model_spec import ModelSpec

_OF_A_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)\.(weight|bias)")


def separated_shapes(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors once all matrices are apart.

    One that has another number of rows than its parts stays whole, and is none of the model's.
    """
    apart: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        rows = _rows(spec, name)
        if rows and shape[:1] == (sum(rows.values()),):
            apart |= {part: (count, *shape[1:]) for part, count in rows.items()}
        else:
            apart[name] = shape
    return apart


def separated(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors, all matrices apart; their shapes are checked."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        rows = _rows(spec, name)
        parts = torch.split(tensor, list(rows.values())) if rows else (tensor,)
        apart |= zip(rows or [name], parts, strict=True)
    return apart


def part_of(spec: ModelSpec, name: str) -> tuple[str, slice] | None:
    """The stored tensor that one of a model's is a part of, and which rows; None for no part."""
    family, found = FAMILIES[spec.architecture], _OF_A_LAYER.fullmatch(name)
    if found is None:
        return None
    for whole in filter(None, (family.qkv, family.gate_up)):
        stored, first = f"{found.group(1)}{whole}.{found.group(3)}", 0
        for part, count in _rows(spec, stored).items():
            if part == name:
                return stored, slice(first, first + count)
            first += count
    return None


def _rows(spec: ModelSpec, name: str) -> dict[str, int]:
    """How many rows each part of a fused matrix has, in their order; none of any other tensor."""
    family, found = FAMILIES[spec.architecture], _OF_A_LAYER.fullmatch(name)
    if found is None:
        return {}
    layer, matrix, kind = found.groups()
    rows: dict[str, int] = {}
    if matrix == family.gate_up:
        rows = {"mlp.gate_proj": spec.intermediate_size, "mlp.up_proj": spec.intermediate_size}
    elif matrix == family.qkv:
        keys = spec.kv_heads * spec.head_dim
        rows = {
            "self_attn.q_proj": spec.heads * spec.head_dim,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": keys,
        }
    return {f"{layer}{part}.{kind}": count for part, count in rows.items()}
