"""Experts under the names and in the stacks that checkpoints have for them.

Here each is by itself, as Qwen and OLMoE store them: `mlp.experts.5.gate_proj.weight`, and the
router is `mlp.gate.weight`. Others:

    Mixtral     block_sparse_moe.experts.5.w1.weight    gate; w3: up, w2: down
                block_sparse_moe.gate.weight            router
    Granite     block_sparse_moe.input_linear.weight    [experts, gate and up, hidden]
                block_sparse_moe.output_linear.weight   [experts, hidden, width]
                block_sparse_moe.router.layer.weight    router
    in memory   mlp.experts.gate_up_proj, mlp.experts.down_proj: such stacks of transformers 5,
                which it can be told to write
    Gemma 4     experts.gate_up_proj, experts.down_proj: such stacks, beside the MLP
                router.proj.weight                      router

A part of a stack is looked at where it lies: nothing is copied. gpt-oss has others, in
`clamped_experts.py`.
"""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from kvkeep.models.layers.experts import EXPERT_SCALES, ROUTER_SCALE
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.clamped_experts import (
    clamped,
    clamped_shapes,
    clamped_stack_name,
    clamped_stack_shape,
)

_OF_A_LAYER = re.compile(r"(model\.layers\.\d+\.)(?:mlp|block_sparse_moe)\.(.+)")
_BESIDE = re.compile(r"(model\.layers\.\d+\.)((?:router|experts)\..+)")
_ROUTERS_BESIDE = {
    "router.proj.weight": "mlp.gate.weight",
    "router.scale": ROUTER_SCALE,
    "router.per_expert_scale": EXPERT_SCALES,
}
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_ROUTERS = ("gate.weight", "router.layer.weight", "router.weight")
_ROUTER_BIAS = "router.bias"
_GATE_UP = ("experts.gate_up_proj", "input_linear.weight")
_DOWN = ("experts.down_proj", "output_linear.weight")


def expert_name(spec: ModelSpec, name: str) -> str:
    """The name here of an expert's matrix or a router; any other name as it is."""
    if spec.experts_beside:
        beside = _BESIDE.fullmatch(name)
        if beside is None or beside.group(2) not in _ROUTERS_BESIDE:
            return name
        return f"{beside.group(1)}{_ROUTERS_BESIDE[beside.group(2)]}"
    found = _OF_A_LAYER.fullmatch(name)
    if not spec.experts or found is None:
        return name
    layer, matrix = found.groups()
    if matrix in _ROUTERS:
        return f"{layer}mlp.gate.weight"
    if matrix == _ROUTER_BIAS:
        return f"{layer}mlp.gate.bias"
    if one := re.fullmatch(r"experts\.(\d+)\.(w[123])\.weight", matrix):
        return f"{layer}mlp.experts.{one.group(1)}.{_MIXTRAL[one.group(2)]}.weight"
    return name


def unstacked_shapes(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors once all experts are apart.

    A stack of another shape than the spec's stays whole, and is none of the model's.
    """
    if spec.clamped_experts:
        return clamped_shapes(spec, shapes)
    apart: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if tuple(shape) == stack_shape(spec, name):
            parts = {part: len(rows) for part, _, rows in _parts(spec, name)}
            apart |= {part: (rows, shape[2]) for part, rows in parts.items()}
        else:
            apart[name] = shape
    return apart


def unstacked(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors, all experts apart; their shapes are checked."""
    if spec.clamped_experts:
        return clamped(spec, tensors)
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if stack_shape(spec, name) is None:
            apart[name] = tensor
        for part, expert, rows in _parts(spec, name):
            apart[part] = tensor[expert, rows.start : rows.stop]
    return apart


def stored_expert_name(spec: ModelSpec, name: str) -> str:
    """The name that a checkpoint has for what is called so here: of a stack it is the stack's."""
    found = _OF_A_LAYER.fullmatch(name)
    if not spec.experts or found is None:
        return name
    layer, matrix = found.groups()
    if spec.clamped_experts:
        router = matrix.replace("gate.", "router.") if matrix.startswith("gate.") else matrix
        return f"{layer}mlp.{clamped_stack_name(router)}"
    expert = re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", matrix)
    if spec.experts_beside:
        theirs = {ours: name for name, ours in _ROUTERS_BESIDE.items()}.get(f"mlp.{matrix}")
        if expert:
            theirs = f"experts.{'down' if expert.group(2) == 'down_proj' else 'gate_up'}_proj"
        return f"{layer}{theirs}" if theirs else name
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


def stack_shape(spec: ModelSpec, name: str) -> tuple[int, ...] | None:
    """The shape of a stored tensor that is a stack of experts; None for any other."""
    if spec.clamped_experts:
        return clamped_stack_shape(spec, name)
    _, rows = _stacked(spec, name)
    if not rows:
        return None
    columns = spec.expert_size if "down_proj" in rows else spec.hidden_size
    return spec.experts, sum(map(len, rows.values())), columns


def _parts(spec: ModelSpec, name: str) -> Iterator[tuple[str, int, range]]:
    """Of a stack: the name of each part here, its expert, and its rows among that one's."""
    prefix, rows = _stacked(spec, name)
    for expert in range(spec.experts if rows else 0):
        for part, some in rows.items():
            yield f"{prefix}{expert}.{part}.weight", expert, some


def _stacked(spec: ModelSpec, name: str) -> tuple[str, dict[str, range]]:
    """How the parts of a stack begin, and the rows of each kind; none of any other tensor."""
    width = spec.expert_size
    found = (_BESIDE if spec.experts_beside else _OF_A_LAYER).fullmatch(name)
    if not spec.experts or found is None:
        return "", {}
    layer, matrix = found.groups()
    rows = {}
    if matrix in _GATE_UP:
        rows = {"gate_proj": range(width), "up_proj": range(width, 2 * width)}
    elif matrix in _DOWN:
        rows = {"down_proj": range(spec.hidden_size)}
    return f"{layer}mlp.experts.", rows
