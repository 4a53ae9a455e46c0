"""Stacks, which are checkpoint tensors that hold several of the decoder's, and names of experts.

Fused matrices lie below one another: query, key and value, or gate and up. Of experts, the decoder
has each one's matrices apart, as Qwen and OLMoE store them: `mlp.experts.5.gate_proj.weight`, with
the router in `mlp.gate.weight`. Others:

    Mixtral     block_sparse_moe.experts.5.w1.weight    gate; w3: up, w2: down
                block_sparse_moe.gate.weight            router
    LFM2-MoE    feed_forward.experts.5.w1.weight        and so on, beside:
                feed_forward.expert_bias                added to weights to choose experts
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

from kvkeep.models.layers.experts import EXPERT_SCALES, ROUTER_SCALE, SELECTION_BIAS
from kvkeep.models.layers.primitives import FINAL_NORM
from kvkeep.models.spec.families import FAMILIES
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.formats import FORMATS, GROUP_COLUMNS

Shape = tuple[int, ...]

_LAYER_TENSOR = re.compile(r"(model\.layers\.\d+\.)(.+)")
_MODULE = r"(?:mlp|block_sparse_moe|feed_forward)"  # of experts
_ROUTER = re.compile(_MODULE + r"\.(?:gate|router|router\.layer)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_MIXTRAL_EXPERT = re.compile(_MODULE + r"\.experts\.(\d+)\.(w[123])\.weight")
# Architectures whose experts have Mixtral's names, and the module that they are in.
_MIXTRAL_MODULES = {
    "MixtralForCausalLM": "block_sparse_moe",
    "Lfm2MoeForCausalLM": "feed_forward",
}
_MIXTRAL_PROJECTIONS = {"w1": "gate", "w2": "down", "w3": "up"}
# Architectures of which transformers reads experts in stacks only.
_EXPERTS_IN_STACKS = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
_GEMMA_ROUTER_NAMES = {
    "router.proj.weight": "mlp.gate.weight",
    "router.scale": ROUTER_SCALE,
    "router.per_expert_scale": EXPERT_SCALES,
}
# The module of the experts, unless they lie beside the MLP, and the stack in it.
_EXPERT_STACK = re.compile(
    r"((?:mlp|block_sparse_moe|feed_forward)\.)?"
    r"(?:experts\.(gate_up|up|down)_proj(_bias|_blocks)?|(input|output)_linear\.weight)"
)


@dataclass(frozen=True)
class Stack:
    """A checkpoint tensor that holds the matrices, or biases, of several of the decoder's modules.

    Attributes:
        prefix: the beginning of the decoder's names, before the index of an expert.
        ending: the end of the decoder's names, "weight" or "bias".
        experts: the number of experts; 0 for fused matrices.
        rows: the rows of each module in the matrix (of one expert), by its name behind the prefix.
        row_shape: the shape of one row; empty for biases.
        transposed: whether matrices are `[experts, columns, rows]` (gpt-oss), if not in MXFP4.
        scales: the name of the tensor of scales, for blocks in MXFP4.
    """

    prefix: str
    ending: str
    experts: int
    rows: dict[str, range]
    row_shape: Shape
    transposed: bool = False
    scales: str = ""

    @property
    def shape(self) -> Shape:
        """The shape of the checkpoint tensor."""
        rows = sum(map(len, self.rows.values()))
        shape = (*self.row_shape, rows) if self.transposed else (rows, *self.row_shape)
        if self.scales:
            shape = rows, self.row_shape[0] // GROUP_COLUMNS, GROUP_COLUMNS // 2
        return (self.experts, *shape) if self.experts else shape

    def part_shapes(self) -> dict[str, Shape]:
        """Return the shapes of the decoder's tensors, by name."""
        return {name: (len(rows), *self.row_shape) for name, _, rows in self.parts()}

    def split(self, tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """Return the decoder's tensors in the stack `name`. Shapes were checked before."""
        parts: dict[str, Tensor] = {}
        for part_name, index, row_range in self.parts():
            matrix = tensors[name][index]
            rows = slice(row_range.start, row_range.stop, row_range.step)
            if self.scales:
                values = _mxfp4_values(matrix[rows], tensors[self.scales][index][rows])
                parts[part_name] = values.to(tensors[FINAL_NORM].dtype)
            elif self.transposed:  # biases have one dimension, and stay as they are
                parts[part_name] = matrix.t()[rows].contiguous()
            else:
                parts[part_name] = matrix[rows]
        return parts

    def parts(self) -> Iterator[tuple[str, tuple[int, ...], range]]:
        """Yield each part's name, the index of its matrix in the stack, and its rows there."""
        indices: list[tuple[int, ...]] = [(expert,) for expert in range(self.experts)] or [()]
        for index in indices:
            prefix = self.prefix + "".join(f"{expert}." for expert in index)
            for module, rows in self.rows.items():
                yield f"{prefix}{module}.{self.ending}", index, rows


def find_stack(spec: ModelSpec, name: str, row_shape: Shape = ()) -> Stack | None:
    """Return a checkpoint's stack by its name; None for any other tensor.

    row_shape: of a fused matrix: `Stack.shape` and `part_shapes` repeat it.
    """
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        return None
    prefix, stored_name = match.groups()
    stack = _expert_stack(spec, prefix, stored_name)
    return stack or _fused_stack(spec, prefix, stored_name, row_shape)


def fused_modules(spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Return the modules in each fused matrix of a layer, and their row counts."""
    family, key_rows = FAMILIES[spec.architecture], spec.kv_heads * spec.head_dim
    mlp = _fused_mlp(spec)
    query, key, value = (f"self_attn.{x}_proj" for x in "qkv")
    fused = {
        family.fused_qkv: {query: spec.heads * spec.head_dim, key: key_rows, value: key_rows},
        family.fused_gate_up: dict.fromkeys(
            (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            spec.shared_expert_size or spec.intermediate_size,
        ),
    }
    if family.fused_delta_net and (states := spec.states) is not None:
        value_width, prefix = states.value_heads * states.value_dim, "linear_attn.in_proj"
        heads = states.value_heads
        fused[f"{prefix}_qkvz"] = {f"{prefix}_qkv": states.channels, f"{prefix}_z": value_width}
        fused[f"{prefix}_ba"] = {f"{prefix}_b": heads, f"{prefix}_a": heads}
    return {name: modules for name, modules in fused.items() if name}


def renamed_modules(spec: ModelSpec) -> dict[str, str]:
    """Return a family's `renamed_tensors` as they hold for a model."""
    family = FAMILIES[spec.architecture]
    renamed = family.renamed_tensors
    # Granite 4 has the same names for its MLP and its shared expert.
    if not (spec.ungated_shared_expert and family.fused_gate_up):
        return dict(renamed)
    mlp = _fused_mlp(spec)
    return {stored: name.replace("mlp.", f"{mlp}.", 1) for stored, name in renamed.items()}


def _fused_mlp(spec: ModelSpec) -> str:
    """Return the module that a fused gate and up projection is of: Granite 4's shared expert."""
    return "mlp.shared_expert" if spec.ungated_shared_expert else "mlp"


def _fused_stack(spec: ModelSpec, prefix: str, stored_name: str, row_shape: Shape) -> Stack | None:
    """Return the stack of a layer's fused matrix or bias; None for any other tensor."""
    fused_name, _, ending = stored_name.rpartition(".")
    modules = fused_modules(spec).get(fused_name)
    if modules is None or ending not in ("weight", "bias"):
        return None
    rows, first = {}, 0
    for module, count in modules.items():
        rows[module] = range(first, first + count)
        first += count
    return Stack(prefix, ending, 0, rows, row_shape)


def _expert_stack(spec: ModelSpec, prefix: str, stored_name: str) -> Stack | None:
    """Return the stack of a layer's experts; None for any other tensor."""
    match = _EXPERT_STACK.fullmatch(stored_name)
    if not spec.experts or match is None:
        return None
    module, projection, suffix, linear = match.groups(default="")
    is_stack = bool(module) and not suffix
    if spec.clamped_experts:
        is_stack = module == "mlp." and not linear
    elif spec.experts_beside:
        is_stack = not (module or linear or suffix)
    if not is_stack:
        return None
    width, columns = spec.expert_size, spec.expert_latent_size or spec.hidden_size
    if projection == "down" or linear == "output":
        rows, columns = {"down_proj": range(columns)}, width
    elif not spec.gated_mlps:
        rows = {"up_proj": range(width)}
    elif spec.clamped_experts:
        rows = {"gate_proj": range(0, 2 * width, 2), "up_proj": range(1, 2 * width, 2)}
    else:
        rows = {"gate_proj": range(width), "up_proj": range(width, 2 * width)}
    is_bias = suffix == "_bias"
    return Stack(
        f"{prefix}mlp.experts.",
        "bias" if is_bias else "weight",
        spec.experts,
        rows,
        () if is_bias else (columns,),
        transposed=spec.clamped_experts,
        scales=f"{prefix}{stored_name.removesuffix('blocks')}scales" if suffix == "_blocks" else "",
    )


def expert_name(spec: ModelSpec, name: str) -> str:
    """Return the decoder's name of an expert's matrix or a router; any other name unchanged."""
    match = _LAYER_TENSOR.fullmatch(name)
    if not spec.experts or match is None:
        return name
    prefix, stored_name = match.groups()
    if spec.experts_beside:
        return prefix + _GEMMA_ROUTER_NAMES.get(stored_name, stored_name)
    if stored_name == "feed_forward.expert_bias":
        return prefix + SELECTION_BIAS
    if router := _ROUTER.fullmatch(stored_name):
        return f"{prefix}mlp.gate.{router.group(1)}"
    if expert := _MIXTRAL_EXPERT.fullmatch(stored_name):
        index, matrix = expert.groups()
        return f"{prefix}mlp.experts.{index}.{_MIXTRAL_PROJECTIONS[matrix]}_proj.weight"
    return name


def stored_expert_name(spec: ModelSpec, name: str) -> str:
    """Return the checkpoint's name of a decoder's tensor; the stack's if it is part of one."""
    match = _LAYER_TENSOR.fullmatch(name)
    if not spec.experts or match is None:
        return name
    prefix, decoder_name = match.groups()
    stored_name, expert = decoder_name, _EXPERT.fullmatch(decoder_name)
    index, projection, ending = expert.groups() if expert else ("", "", "")
    stack = "down_proj" if projection == "down" else "gate_up_proj"
    if spec.clamped_experts:
        stored_name = decoder_name.replace("mlp.gate.", "mlp.router.")
        if expert:
            stored_name = f"mlp.experts.{stack}{'_bias' if ending == 'bias' else ''}"
    elif spec.experts_beside:
        router_names = {name: stored for stored, name in _GEMMA_ROUTER_NAMES.items()}
        stored_name = f"experts.{stack}" if expert else router_names.get(decoder_name, decoder_name)
    elif spec.architecture in _EXPERTS_IN_STACKS and expert:
        stored_name = f"mlp.experts.{stack}"
    elif spec.architecture in ("GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM"):
        linear = "output" if projection == "down" else "input"
        stored_name = decoder_name.replace("mlp.gate.", "block_sparse_moe.router.layer.")
        if expert:
            stored_name = f"block_sparse_moe.{linear}_linear.weight"
    elif module := _MIXTRAL_MODULES.get(spec.architecture):
        mixtral_names = {name: stored for stored, name in _MIXTRAL_PROJECTIONS.items()}
        stored_name = re.sub(r"^mlp\.(gate\.|expert_bias)", rf"{module}.\1", decoder_name)
        if expert:
            stored_name = f"{module}.experts.{index}.{mixtral_names[projection]}.weight"
    return prefix + stored_name


def _mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return `[rows, columns]` float32. scales: `[rows, groups]` uint8, of blocks of 16 bytes."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return FORMATS["MXFP4"].values(codes, (scales.unsqueeze(-1),))
