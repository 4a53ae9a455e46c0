"""Experts in checkpoints: their names, and the stacks that hold all experts of a layer.

The decoder has each expert's matrices apart, as Qwen and OLMoE store them:
`mlp.experts.5.gate_proj.weight`, with the router in `mlp.gate.weight`. Others:

    Mixtral     block_sparse_moe.experts.5.w1.weight    gate; w3: up, w2: down
                block_sparse_moe.gate.weight            router
    Granite     block_sparse_moe.input_linear.weight    [experts, gate and up, hidden]
                block_sparse_moe.output_linear.weight   [experts, hidden, width]
                block_sparse_moe.router.layer.weight    router
    transformers 5, if told to save them so:
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
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvkeep.models.layers.experts import EXPERT_SCALES, ROUTER_SCALE
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.formats import FORMATS, GROUP
from kvkeep.models.weights.tensors import NORM

Shape = tuple[int, ...]

_MOE_TENSOR = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.(.+)")
_PARALLEL_MOE_TENSOR = re.compile(r"(model\.layers\.\d+\.)((?:router|experts)\..+)")
_PARALLEL_ROUTER = {
    "router.proj.weight": "mlp.gate.weight",
    "router.scale": ROUTER_SCALE,
    "router.per_expert_scale": EXPERT_SCALES,
}
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ROUTERS = ("gate.weight", "router.layer.weight", "router.weight")
_ROUTER_BIAS = "router.bias"
_GATE_UP_STACKS = ("experts.gate_up_proj", "input_linear.weight")
_DOWN_STACKS = ("experts.down_proj", "output_linear.weight")
_CLAMPED_PART = re.compile(r"(experts\.)\d+\.(gate|up|down)_proj\.(weight|bias)")
_CLAMPED_STACK = re.compile(
    r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj(|_bias|_blocks)"
)


def expert_name(spec: ModelSpec, name: str) -> str:
    """Return the decoder's name of an expert's matrix or a router; any other name unchanged."""
    if spec.experts_beside:
        match = _PARALLEL_MOE_TENSOR.fullmatch(name)
        if match is None or match.group(2) not in _PARALLEL_ROUTER:
            return name
        return f"{match.group(1)}{_PARALLEL_ROUTER[match.group(2)]}"
    match = _MOE_TENSOR.fullmatch(name)
    if not spec.experts or match is None:
        return name
    layer, matrix = match.groups()
    if matrix in _ROUTERS:
        return f"{layer}mlp.gate.weight"
    if matrix == _ROUTER_BIAS:
        return f"{layer}mlp.gate.bias"
    if mixtral := re.fullmatch(r"experts\.(\d+)\.(w[123])\.weight", matrix):
        return f"{layer}mlp.experts.{mixtral.group(1)}.{_MIXTRAL[mixtral.group(2)]}.weight"
    return name


def stored_expert_name(spec: ModelSpec, name: str) -> str:
    """Return the checkpoint's name of a decoder's tensor; the stack's if it is part of one."""
    match = _MOE_TENSOR.fullmatch(name)
    if not spec.experts or match is None:
        return name
    layer, matrix = match.groups()
    if spec.clamped_experts:
        router = matrix.replace("gate.", "router.") if matrix.startswith("gate.") else matrix
        return f"{layer}mlp.{_clamped_stack_name(router)}"
    expert = re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", matrix)
    if spec.experts_beside:
        stored = {ours: theirs for theirs, ours in _PARALLEL_ROUTER.items()}.get(f"mlp.{matrix}")
        if expert:
            stored = f"experts.{'down' if expert.group(2) == 'down_proj' else 'gate_up'}_proj"
        return f"{layer}{stored}" if stored else name
    if spec.architecture == "GraniteMoeForCausalLM":
        if matrix == "gate.weight":
            return f"{layer}block_sparse_moe.router.layer.weight"
        if expert:
            stack = "output" if expert.group(2) == "down_proj" else "input"
            return f"{layer}block_sparse_moe.{stack}_linear.weight"
    if spec.architecture == "MixtralForCausalLM":
        if matrix == "gate.weight":
            return f"{layer}block_sparse_moe.gate.weight"
        if expert:
            matrix = {ours: theirs for theirs, ours in _MIXTRAL.items()}[expert.group(2)]
            return f"{layer}block_sparse_moe.experts.{expert.group(1)}.{matrix}.weight"
    return name


def split_stack_shapes(spec: ModelSpec, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a model's tensors with all experts apart.

    A stack of another shape than the spec's stays whole, under a name that no decoder has.
    """
    split: dict[str, Shape] = {}
    used_scales = set()
    for name, shape in shapes.items():
        expected = stack_shape(spec, name)
        whole = expected is None or tuple(shape) != expected
        if not whole and name.endswith("_blocks"):
            scales = _scales_name(name)
            whole = tuple(shapes.get(scales, ())) != tuple(shape[:-1])
            used_scales |= set() if whole else {scales}
        if whole:
            split[name] = shape
            continue
        if spec.clamped_experts:
            columns: Shape = () if name.endswith("_bias") else (_clamped_sizes(spec, name)[1],)
        else:
            columns = shape[2:]
        split |= {part: (len(rows), *columns) for part, _, rows in _stack_parts(spec, name)}
    return {name: shape for name, shape in split.items() if name not in used_scales}


def split_stacks(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors with all experts apart; their shapes were checked before."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if stack_shape(spec, name) is None:
            if not (spec.clamped_experts and _is_scales(name, tensors)):
                split[name] = tensor
            continue
        for part, expert, rows in _stack_parts(spec, name):
            selected = slice(rows.start, rows.stop, rows.step)
            if not spec.clamped_experts:
                split[part] = tensor[expert, selected]
            elif name.endswith("_blocks"):
                scales = tensors[_scales_name(name)][expert]
                values = _mxfp4_values(tensor[expert][selected], scales[selected])
                split[part] = values.to(tensors[NORM].dtype)
            else:
                split[part] = tensor[expert].t()[selected].contiguous()
    return split


def stack_shape(spec: ModelSpec, name: str) -> Shape | None:
    """Return the shape of a stored stack of experts; None for any other tensor."""
    if spec.clamped_experts:
        match = _CLAMPED_STACK.fullmatch(name)
        if match is None:
            return None
        rows, columns = _clamped_sizes(spec, name)
        if match.group(3) == "_bias":
            return spec.experts, rows
        if match.group(3) == "_blocks":
            return spec.experts, rows, columns // GROUP, GROUP // 2
        return spec.experts, columns, rows
    _, parts = _stacked_rows(spec, name)
    if not parts:
        return None
    columns = spec.expert_size if "down_proj" in parts else spec.hidden_size
    return spec.experts, sum(map(len, parts.values())), columns


def clamped_stack_entry(parts: Sequence[Tensor]) -> Tensor:
    """Return one expert's entry of a gpt-oss stack from its gate and up, or its only matrix."""
    rows = torch.stack(list(parts), 1).flatten(0, 1)
    return rows.t().contiguous()


def _stack_parts(spec: ModelSpec, name: str) -> Iterator[tuple[str, int, range]]:
    """The decoder's tensors in a stack: name, expert, and rows within the expert's entry."""
    if not spec.clamped_experts:
        prefix, parts = _stacked_rows(spec, name)
        for expert in range(spec.experts if parts else 0):
            for part, rows in parts.items():
                yield f"{prefix}{expert}.{part}.weight", expert, rows
        return
    match = _CLAMPED_STACK.fullmatch(name)
    assert match is not None, "called for stacks only"
    count, _ = _clamped_sizes(spec, name)
    parts = {"down": range(count)}
    if match.group(2) == "gate_up":
        parts = {"gate": range(0, count, 2), "up": range(1, count, 2)}
    kind = "bias" if match.group(3) == "_bias" else "weight"
    for expert in range(spec.experts):
        for part, rows in parts.items():
            yield f"{match.group(1)}{expert}.{part}_proj.{kind}", expert, rows


def _stacked_rows(spec: ModelSpec, name: str) -> tuple[str, dict[str, range]]:
    """The name prefix of a stack's parts, and the rows of each; empty for any other tensor."""
    pattern = _PARALLEL_MOE_TENSOR if spec.experts_beside else _MOE_TENSOR
    width, match = spec.expert_size, pattern.fullmatch(name)
    if not spec.experts or match is None:
        return "", {}
    layer, matrix = match.groups()
    rows = {}
    if matrix in _GATE_UP_STACKS:
        rows = {"gate_proj": range(width), "up_proj": range(width, 2 * width)}
    elif matrix in _DOWN_STACKS:
        rows = {"down_proj": range(spec.hidden_size)}
    return f"{layer}mlp.experts.", rows


def _clamped_stack_name(matrix: str) -> str:
    """The stack that holds an expert's matrix or bias (both without `mlp.`); else the name."""
    match = _CLAMPED_PART.fullmatch(matrix)
    if match is None:
        return matrix
    kind = "down" if match.group(2) == "down" else "gate_up"
    return f"{match.group(1)}{kind}_proj{'_bias' if match.group(3) == 'bias' else ''}"


def _clamped_sizes(spec: ModelSpec, name: str) -> tuple[int, int]:
    """Rows and columns of each expert's matrix in a gpt-oss stack."""
    if "down_proj" in name:
        return spec.hidden_size, spec.expert_size
    return 2 * spec.expert_size, spec.hidden_size


def _mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack to `[rows, columns]` float32.

    blocks: `[rows, groups, 16]` uint8, scales: `[rows, groups]` uint8.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return FORMATS["MXFP4"].values(codes, (scales.unsqueeze(-1),))


def _scales_name(blocks: str) -> str:
    return f"{blocks.removesuffix('blocks')}scales"


def _is_scales(name: str, tensors: Mapping[str, Tensor]) -> bool:
    return name.endswith("_scales") and name.replace("_scales", "_blocks") in tensors
