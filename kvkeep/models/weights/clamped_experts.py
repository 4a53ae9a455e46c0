"""Experts as gpt-oss stores them: gates and ups in turn, in stacks of a layer's.

    mlp.experts.gate_up_proj            [experts, hidden, 2 width]   by their columns
    mlp.experts.gate_up_proj_bias       [experts, 2 width]
    mlp.experts.down_proj               [experts, width, hidden]
    mlp.experts.down_proj_bias          [experts, hidden]

or in MXFP4 (OCP Microscaling Formats 1.0), by their rows, a block of 32 columns in 16 bytes, the
even ones in the lower halves, and an exponent:

    mlp.experts.gate_up_proj_blocks     [experts, 2 width, hidden / 32, 16] uint8
    mlp.experts.gate_up_proj_scales     [experts, 2 width, hidden / 32] uint8

They are unpacked to the dtype of the other weights: each value is one of bfloat16's.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.formats import FORMATS, GROUP
from kvkeep.models.weights.tensors import NORM

_ONE = re.compile(r"(experts\.)\d+\.(gate|up|down)_proj\.(weight|bias)")
_STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj(|_bias|_blocks)")


def clamped_shapes(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors once all experts are apart.

    A stack of another shape than the spec's stays whole, and is none of the model's.
    """
    apart = dict(shapes)
    for name, shape in shapes.items():
        whole = clamped_stack_shape(spec, name)
        if whole is None or tuple(shape) != whole:
            continue
        if name.endswith("_blocks"):
            scales = _scales_of(name)
            if tuple(shapes.get(scales, ())) != whole[:-1]:
                continue
            del apart[scales]
        del apart[name]
        columns = () if name.endswith("_bias") else (_sizes(spec, name)[1],)
        for part, _, rows in _parts(spec, name):
            apart[part] = (len(rows), *columns)
    return apart


def clamped(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors, all experts apart, each copied; their shapes are checked."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not _STACK.fullmatch(name):
            if not (name.endswith("_scales") and name.replace("_scales", "_blocks") in tensors):
                apart[name] = tensor
            continue
        for part, expert, rows in _parts(spec, name):
            one = tensor[expert]
            if name.endswith("_blocks"):
                scales = tensors[_scales_of(name)][expert]
                one = _unpacked(one[rows.start :: rows.step], scales[rows.start :: rows.step])
                apart[part] = one.to(tensors[NORM].dtype)
            else:
                apart[part] = one.t()[rows.start :: rows.step].contiguous()
    return apart


def clamped_stack_shape(spec: ModelSpec, name: str) -> tuple[int, ...] | None:
    """Of a stored stack; None for any other tensor."""
    found = _STACK.fullmatch(name)
    if found is None:
        return None
    rows, columns = _sizes(spec, name)
    if found.group(3) == "_bias":
        return spec.experts, rows
    if found.group(3) == "_blocks":
        return spec.experts, rows, columns // GROUP, GROUP // 2
    return spec.experts, columns, rows


def clamped_stack_name(matrix: str) -> str:
    """The stack that an expert's matrix or bias is in, both behind a layer's `mlp.`; any other
    name as it is.
    """
    found = _ONE.fullmatch(matrix)
    if found is None:
        return matrix
    kind = "down" if found.group(2) == "down" else "gate_up"
    return f"{found.group(1)}{kind}_proj{'_bias' if found.group(3) == 'bias' else ''}"


def as_stored(parts: Sequence[Tensor]) -> Tensor:
    """An expert's part of a stack, of its gate and its up, or of what it has there alone."""
    whole = torch.stack(list(parts), 1).flatten(0, 1)
    return whole.t().contiguous()


def _unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """`[rows, columns]` float32. blocks: `[rows, groups, 16]`, scales: `[rows, groups]`, uint8."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return FORMATS["MXFP4"].values(codes, (scales.unsqueeze(-1),))


def _scales_of(blocks: str) -> str:
    return f"{blocks.removesuffix('blocks')}scales"


def _sizes(spec: ModelSpec, name: str) -> tuple[int, int]:
    """Rows and columns of each expert's matrix in a stack."""
    if "down_proj" in name:
        return spec.hidden_size, spec.expert_size
    return 2 * spec.expert_size, spec.hidden_size


def _parts(spec: ModelSpec, name: str) -> Iterator[tuple[str, int, range]]:
    """Of a stack: the name of each part here, its expert, and its rows among that one's."""
    found = _STACK.fullmatch(name)
    assert found is not None, "only stacks are asked for"
    rows, _ = _sizes(spec, name)
    kinds = {"down": range(rows)}
    if found.group(2) == "gate_up":
        kinds = {"gate": range(0, rows, 2), "up": range(1, rows, 2)}
    kind = "bias" if found.group(3) == "_bias" else "weight"
    for expert in range(spec.experts):
        for part, some in kinds.items():
            yield f"{found.group(1)}{expert}.{part}_proj.{kind}", expert, some
