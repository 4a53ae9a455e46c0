"""The executor that computes with the compiled kernels: one call decodes through all layers.

Weights are read as they are packed. Activations are bfloat16; sums and the residual stream are
float32. A sequence's results are bitwise the same whether it decodes alone or in a group.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.compiled.binding import HEAD_DIMS, CModel, kernel_library, raise_for_status
from kvkeep.compiled.chunk import chunk_attention
from kvkeep.compiled.instruction_sets import has_fast_bf16, load_error, selected_set
from kvkeep.compiled.matrices import PackedLinear, shared_scratch
from kvkeep.compiled.model import describe_model, kernel_groups
from kvkeep.compiled.operands import ModelOperands, address
from kvkeep.compiled.step import GroupShape, describe_step
from kvkeep.errors import KernelMismatch
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.network import Network
from kvkeep.models.layers.primitives import LM_HEAD
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.formats import GROUP_COLUMNS
from kvkeep.models.weights.packing import Matrix, as_tensor
from kvkeep.models.weights.tensors import is_router, matrix_shapes, step_matrices


def unsupported_reason(spec: ModelSpec, layout: Layout) -> str:
    """Say why the kernels do not run a model, as a predicate of "the kernels"; empty if they do."""
    groups, head_dims = spec.groups, [group.head_dim for group in spec.groups]
    query_sizes = [spec.heads * head_dim for head_dim in head_dims]
    widths = (spec.hidden_size, *_mlp_sizes(spec), *query_sizes, spec.per_layer_size)
    dtype_name, widths_text = str(layout.dtype).removeprefix("torch."), ", ".join(map(str, widths))
    bad_head_dims = ", ".join(str(dim) for dim in head_dims if dim not in HEAD_DIMS)
    has_partial_rope = any(g.head_dim != 2 * len(g.rope.inverse_frequencies) for g in groups)
    has_bad_width = any(width % GROUP_COLUMNS for width in widths)
    has_uneven_heads = any(spec.heads % group.kv_heads for group in groups)
    obstacles = [
        (layout.device.type != "cpu", f"run on a CPU, not on {layout.device}"),
        (layout.dtype is not torch.bfloat16, f"support bfloat16, not {dtype_name}"),
        (spec.states, "compute no state layers"),
        (spec.altup_inputs, f"support one residual stream, not {spec.altup_inputs} (AltUp)"),
        (bad_head_dims, f"support head_dim {', '.join(map(str, HEAD_DIMS))}, not {bad_head_dims}"),
        (has_partial_rope, "need RoPE over the whole head"),
        (has_bad_width, f"need widths that are multiples of {GROUP_COLUMNS}; found {widths_text}"),
        (has_uneven_heads, "need the same number of query heads for each KV head"),
    ]
    return next((text for exists, text in obstacles if exists), "") or unavailable_reason()


def prompt_dtype() -> torch.dtype:
    """Return the dtype of torch's products for prompts of bfloat16 models."""
    return torch.bfloat16 if has_fast_bf16() else torch.float32


def unavailable_reason() -> str:
    """Say why this machine has no kernels, as `unsupported_reason`; empty if it has some."""
    if kernel_library():
        return ""
    selected = selected_set()
    if error := load_error(selected.name):
        return f"cannot be loaded ({error})"
    return selected.torch_reason or "were built from the sources of another kvkeep version"


def _mlp_sizes(spec: ModelSpec) -> list[int]:
    """Return the widths of a model's MLPs and experts."""
    has_experts = [spec.has_experts(layer) for layer in range(spec.layers)]
    expert_sizes = [spec.expert_size, spec.shared_expert_size] if any(has_experts) else []
    has_mlp = spec.experts_beside or not all(has_experts)
    return list(filter(None, [spec.intermediate_size if has_mlp else 0, *expert_sizes]))


class CompiledExecutor:
    """Runs decode steps by the kernels, and chunks by torch with the kernels' attention.

    tensors: bfloat16 weights by name. packed: matrices by name that sampled tokens read instead.

    A prompt's tokens read the tensor if there is one, so that their cells are the same to rounding
    however the prompt is cut into steps. From a matrix without a tensor they read each weight
    rounded to bfloat16; routers are not rounded. All tokens read the head as it is packed.

    Raises KernelMismatch for weights that `spec` does not describe: the kernels check nothing.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Tensor], packed: Mapping[str, Matrix]
    ):
        self.spec = spec
        self._operands = ModelOperands(spec, tensors, packed)
        self._shapes = [
            GroupShape(len(spec.layers_with_cells(x)), x.kv_heads, spec.heads, x.head_dim)
            for x in spec.groups
        ]
        # For each of the kernels' groups, the index of the model's group whose cells it reads.
        self._model_groups = [spec.groups.index(group) for group, _ in kernel_groups(spec)]
        kernels = kernel_library()
        assert kernels is not None, "unsupported_reason must be empty"
        self._kernels = kernels
        self._decode_model = describe_model(spec, self._operands, sampled=True)
        self._prompt_model = describe_model(spec, self._operands, sampled=False)
        self._product_dtype = prompt_dtype()
        self.name = f"compiled {selected_set().name}"
        if self._product_dtype is not torch.bfloat16:
            self.name += ", prompts in float32"
        self._linears = {name: self._packed_linear(name) for name in self._linear_names()}
        self._network = Network(spec, self._operands.tensors | self._routers(), self._linears)
        # The seconds of decode steps in each of PHASES; None if they are not measured.
        self.seconds: ctypes.Array[ctypes.c_double] | None = None

    def _linear_names(self) -> list[str]:
        """Return the names of the matrices that a prompt's rows are multiplied by as PackedLinear.

        All without a tensor. Without fast bfloat16 also tensors, for float32 products.
        """
        tensors = self._operands.tensors
        names = [name for name in self._operands.shapes if name not in tensors]
        if self._product_dtype is not torch.bfloat16:
            layer_matrices = set(matrix_shapes(self.spec)) - {LM_HEAD}
            names += [x for x in layer_matrices if x in tensors and not is_router(x)]
        return names

    def _routers(self) -> dict[str, Tensor]:
        """Return packed routers in float32, so that prompts are routed by unrounded weights."""
        return {
            name: as_tensor(self._operands.weight(name, sampled=False), torch.float32)
            for name in self._linears
            if is_router(name)
        }

    def _packed_linear(self, name: str) -> PackedLinear:
        bias = self._operands.tensors.get(name.removesuffix("weight") + "bias")
        weight = self._operands.weight(name, sampled=False)
        matrix = self._operands.describe_matrix(name, sampled=False)
        return PackedLinear(self._kernels, matrix, bias, weight, self._product_dtype)

    def matrix_bytes(self) -> dict[str, int]:
        """Return the size in bytes of each matrix that a sampled token reads, by name."""
        names = step_matrices(self.spec)
        return {name: self._operands.weight(name, sampled=True).nbytes for name in names}

    def unpack_matrix(self, name: str) -> Tensor:
        """Unpack a matrix that has no tensor, `[rows, columns]` bfloat16."""
        return self._linears[name].dense()

    def forward(self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None) -> Tensor:
        """Return the final hidden states of a step, `[n, hidden]` bfloat16. tokens: `[n]` ids.

        input_norms: for a chunk only, `[layers, n]` float32, filled with each layer input's norm.
        """
        if isinstance(step, ChunkStep):
            with shared_scratch():
                attention = chunk_attention(step, self._kernels)
                return self._network.forward(tokens, attention, input_norms)
        model = self._decode_model if step.sampled else self._prompt_model
        steps = [step] if isinstance(step, DecodeStep) else step.steps  # of a batch of sequences
        return self._decode(tokens.tolist(), steps, model)

    def _decode(self, tokens: Sequence[int], steps: Sequence[DecodeStep], model: CModel) -> Tensor:
        """Return the hidden states of one token for each step, all in one call of the kernels."""
        spec = self.spec
        if len(tokens) != len(steps) or not 0 <= min(tokens) <= max(tokens) < spec.vocab_size:
            raise KernelMismatch(
                f"expected {len(steps)} tokens to decode, each from 0 to {spec.vocab_size - 1}; "
                f"found {list(tokens)}"
            )
        hidden = torch.empty(len(tokens), spec.hidden_size, dtype=torch.bfloat16, device="cpu")
        step, _views_kept_alive = describe_step(
            tokens, steps, self._shapes, self._model_groups, hidden, self.seconds
        )
        raise_for_status(self._kernels.kvkeep_decode(model, step))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, `[n, vocab]` float32."""
        hidden, count = hidden.contiguous(), hidden.shape[0]
        shape = (count, self.spec.hidden_size)
        hidden_address = address(hidden, "hidden states", torch.bfloat16, shape)
        out = torch.empty(count, self.spec.vocab_size, dtype=torch.float32, device="cpu")
        head, threads = self._decode_model.head, torch.get_num_threads()
        product = self._kernels.kvkeep_product
        raise_for_status(product(head, hidden_address, count, out.data_ptr(), threads))
        if self.spec.logits_multiplier != 1:
            out.mul_(self.spec.logits_multiplier)
        cap = self.spec.logits_softcap
        return out.div_(cap).tanh_().mul_(cap) if cap else out
