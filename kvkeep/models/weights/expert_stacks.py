"""Experts in checkpoints: their names, and the stacks that hold all experts of a layer.

The decoder has each expert's matrices apart, as Qwen and OLMoE store them:
`mlp.experts.5.gate_proj.weight`, with the router in `mlp.gate.weight`. Others:

    Mixtral     block_sparse_moe.experts.5.w1.weight    gate; w3: up, w2: down
                block_sparse_moe.gate.weight            router
    Granite     block_sparse_moe.input_linear.weight    [experts, gate and up, hidden]
                block_sparse_moe.output_linear.weight   [experts, hidden, width]
                block_sparse_moe.router.layer.weight    router
    transformers 5, if it saves experts in stacks:
                mlp.experts.gate_up_proj, mlp.experts.down_proj     such stacks
    Gemma 4     experts.gate_up_proj, experts.down_proj: such stacks, beside the MLP
                router.proj.weight                      router

Parts of these stacks are views: nothing is copied. gpt-oss ("clamped" experts) alternates gate and
up, transposes its matrices and has biases, so that its parts are copied:

    mlp.experts.gate_up_proj            [experts, hidden, 2 width]   gate and up columns alternate
    mlp.experts.gate_up_proj_bias       [experts, 2 width]
    mlp.experts.down_proj               [experts, width, hidden]
    mlp.experts.down_proj_bias          [experts, hidden]

or in MXFP4 (OCP Microscaling Formats 1.0), row by row: a block is 32 columns in 16 bytes, the even
columns in the lower nibbles, and an exponent:

    mlp.experts.gate_up_proj_blocks     [experts, 2 width, hidden / 32, 16] uint8
    mlp.experts.gate_up_proj_scales     [experts, 2 width, hidden / 32] uint8

MXFP4 is unpacked to the dtype of the other weights; bfloat16 holds each value exactly.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvkeep.models.layers.experts import EXPERT_SCALES, ROUTER_SCALE
from kvkeep.models.layers.primitives import NORM
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.formats import FORMATS, GROUP

Shape = tuple[int, ...]

_LAYER_TENSOR = re.compile(r"(model\.layers\.\d+\.)(.+)")
_ROUTER = re.compile(r"(?:mlp|block_sparse_moe)\.(?:gate|router|router\.layer)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_MIXTRAL_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(w[123])\.weight")
_MIXTRAL = {"w1": "gate", "w2": "down", "w3": "up"}
_GEMMA_ROUTER = {
    "router.proj.weight": "mlp.gate.weight",
    "router.scale": ROUTER_SCALE,
    "router.per_expert_scale": EXPERT_SCALES,
}
# The module of the experts, unless they lie beside the MLP, and the stack in it.
_STACK = re.compile(
    r"((?:mlp|block_sparse_moe)\.)?"
    r"(?:experts\.(gate_up|down)_proj(_bias|_blocks)?|(input|output)_linear\.weight)"
)


@dataclass(frozen=True)
class ExpertStack:
    """A checkpoint's tensor with gate and up, or down, of all experts of a layer, or their biases.

    Attributes:
        prefix: of the decoder's names, before the index of the expert.
        rows: the rows of "gate", "up" or "down" in the matrix of one expert.
        transposed: whether matrices are `[experts, columns, rows]`, as in gpt-oss.
        suffix: "_bias" for biases, "_blocks" for matrices in MXFP4, "" for other matrices.
    """

    prefix: str
    experts: int
    rows: dict[str, range]
    columns: int
    transposed: bool
    suffix: str

    @property
    def shape(self) -> Shape:
        rows = sum(map(len, self.rows.values()))
        if self.suffix == "_bias":
            return self.experts, rows
        if self.suffix == "_blocks":
            return self.experts, rows, self.columns // GROUP, GROUP // 2
        return self.experts, *((self.columns, rows) if self.transposed else (rows, self.columns))

    def parts(self) -> Iterator[tuple[str, int, slice, Shape]]:
        """Yield the decoder's name, the expert, its rows and the shape of each part."""
        bias = self.suffix == "_bias"
        for expert in range(self.experts):
            for matrix, rows in self.rows.items():
                name = f"{self.prefix}{expert}.{matrix}_proj.{'bias' if bias else 'weight'}"
                shape = (len(rows),) if bias else (len(rows), self.columns)
                yield name, expert, slice(rows.start, rows.stop, rows.step), shape


def expert_stack(spec: ModelSpec, name: str) -> ExpertStack | None:
    """Return a checkpoint's stack of experts by its name; None for any other tensor."""
    layer = _LAYER_TENSOR.fullmatch(name)
    match = _STACK.fullmatch(layer.group(2)) if layer else None
    if not spec.experts or layer is None or match is None:
        return None
    module, projection, suffix, linear = match.groups(default="")
    clamped, is_stack = spec.clamped_experts, bool(module)
    if clamped or spec.experts_beside:
        is_stack = module == ("mlp." if clamped else "") and not linear
    if not is_stack or (suffix and not clamped):
        return None
    inner, columns = spec.expert_size, spec.hidden_size
    rows = {"gate": range(inner), "up": range(inner, 2 * inner)}
    if clamped:
        rows = {"gate": range(0, 2 * inner, 2), "up": range(1, 2 * inner, 2)}
    if projection == "down" or linear == "output":
        rows, columns = {"down": range(spec.hidden_size)}, inner
    prefix = f"{layer.group(1)}mlp.experts."
    return ExpertStack(prefix, spec.experts, rows, columns, clamped, suffix)


def expert_name(spec: ModelSpec, name: str) -> str:
    """Return the decoder's name of an expert's matrix or a router; any other name unchanged."""
    layer = _LAYER_TENSOR.fullmatch(name)
    if not spec.experts or layer is None:
        return name
    prefix, stored = layer.groups()
    if spec.experts_beside:
        return prefix + _GEMMA_ROUTER.get(stored, stored)
    if router := _ROUTER.fullmatch(stored):
        return f"{prefix}mlp.gate.{router.group(1)}"
    if expert := _MIXTRAL_EXPERT.fullmatch(stored):
        return f"{prefix}mlp.experts.{expert.group(1)}.{_MIXTRAL[expert.group(2)]}_proj.weight"
    return name


def stored_expert_name(spec: ModelSpec, name: str) -> str:
    """Return the checkpoint's name of a decoder's tensor; the stack's if it is part of one."""
    layer = _LAYER_TENSOR.fullmatch(name)
    if not spec.experts or layer is None:
        return name
    prefix, layer_tensor = layer.groups()
    stored, expert = layer_tensor, _EXPERT.fullmatch(layer_tensor)
    index, matrix, suffix = expert.groups() if expert else ("", "", "")
    stack = "down" if matrix == "down" else "gate_up"
    if spec.clamped_experts:
        stored = layer_tensor.replace("mlp.gate.", "mlp.router.")
        if expert:
            stored = f"mlp.experts.{stack}_proj{'_bias' if suffix == 'bias' else ''}"
    elif spec.experts_beside:
        names = {name: stored for stored, name in _GEMMA_ROUTER.items()}
        stored = f"experts.{stack}_proj" if expert else names.get(layer_tensor, layer_tensor)
    elif spec.architecture == "GraniteMoeForCausalLM":
        linear = "output" if matrix == "down" else "input"
        stored = layer_tensor.replace("mlp.gate.", "block_sparse_moe.router.layer.")
        if expert:
            stored = f"block_sparse_moe.{linear}_linear.weight"
    elif spec.architecture == "MixtralForCausalLM":
        mixtral_names = {name: mixtral_name for mixtral_name, name in _MIXTRAL.items()}
        stored = layer_tensor.replace("mlp.gate.", "block_sparse_moe.gate.")
        if expert:
            stored = f"block_sparse_moe.experts.{index}.{mixtral_names[matrix]}.weight"
    return prefix + stored


def split_stack_shapes(spec: ModelSpec, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a model's tensors with all experts apart.

    A stack of another shape than the spec's stays whole, under a name that no decoder has.
    """
    parts_by_name: dict[str, Shape] = {}
    used_scales = set()
    for name, shape in shapes.items():
        stack = expert_stack(spec, name)
        has_expected_shape = stack is not None and tuple(shape) == stack.shape
        if has_expected_shape and name.endswith("_blocks"):
            scales = _scales_name(name)
            has_expected_shape = tuple(shapes.get(scales, ())) == tuple(shape[:-1])
            used_scales |= {scales} if has_expected_shape else set()
        if stack is not None and has_expected_shape:
            parts_by_name |= {part: part_shape for part, _, _, part_shape in stack.parts()}
        else:
            parts_by_name[name] = shape
    return {name: shape for name, shape in parts_by_name.items() if name not in used_scales}


def split_stacks(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors with all experts apart; their shapes were checked before."""
    parts_by_name: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stack = expert_stack(spec, name)
        if stack is None:
            if not (spec.clamped_experts and name.endswith("_scales")):
                parts_by_name[name] = tensor
            continue
        for part, expert, rows, _ in stack.parts():
            if stack.suffix == "_blocks":
                scales = tensors[_scales_name(name)][expert]
                values = _mxfp4_values(tensor[expert][rows], scales[rows])
                parts_by_name[part] = values.to(tensors[NORM].dtype)
            elif stack.transposed:  # biases are not, and stay as they are
                parts_by_name[part] = tensor[expert].t()[rows].contiguous()
            else:
                parts_by_name[part] = tensor[expert, rows]
    return parts_by_name


def _mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return `[rows, columns]` float32. scales: `[rows, groups]` uint8, of blocks of 16 bytes."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return FORMATS["MXFP4"].values(codes, (scales.unsqueeze(-1),))


def _scales_name(blocks: str) -> str:
    return f"{blocks.removesuffix('blocks')}scales"
