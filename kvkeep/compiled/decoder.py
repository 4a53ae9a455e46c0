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
from kvkeep.compiled.binding import HEAD_DIMS, raise_for_status
from kvkeep.compiled.chunk import chunk_attention
from kvkeep.compiled.instruction_sets import selected_set
from kvkeep.compiled.matrices import shared_scratch
from kvkeep.compiled.model import describe_model, kernel_groups
from kvkeep.compiled.products import ProductExecutor, unavailable_reason
from kvkeep.compiled.states import DecodedStates, output_width, unsupported_states
from kvkeep.compiled.step import GroupShape, describe_step
from kvkeep.compiled.structures import CModel
from kvkeep.errors import KernelMismatch
from kvkeep.models.layers.executor import AnyStep, run_network
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.formats import GROUP_COLUMNS
from kvkeep.models.weights.packing import Matrix

# With more rows, torch's products of weights rounded to bfloat16 are faster.
MAX_ROWS = 16


def unsupported_reason(spec: ModelSpec, layout: Layout) -> str:
    """Say why the kernels do not run a model, as a predicate of "the kernels"; empty if they do."""
    groups, head_dims = spec.groups, [group.head_dim for group in spec.groups]
    query_sizes = [spec.heads * head_dim for head_dim in head_dims]
    state_size = output_width(spec.states) if spec.states else 0
    state_reason = unsupported_states(spec.states) if spec.states else ""
    factor_reason = _unsupported_factors(spec)
    widths = (spec.hidden_size, *_mlp_sizes(spec), *query_sizes, state_size, spec.per_layer_size)
    dtype_name, widths_text = str(layout.dtype).removeprefix("torch."), ", ".join(map(str, widths))
    bad_head_dims = ", ".join(str(dim) for dim in head_dims if dim not in HEAD_DIMS)
    has_other_table = any(g.head_dim != 2 * len(g.rope.inverse_frequencies) for g in groups)
    has_bad_width = any(width % GROUP_COLUMNS for width in widths)
    has_uneven_heads = any(spec.heads % group.kv_heads for group in groups)
    obstacles = [
        (layout.device.type != "cpu", f"run on a CPU, not on {layout.device}"),
        (layout.dtype is not torch.bfloat16, f"support bfloat16, not {dtype_name}"),
        (state_reason, state_reason),
        (factor_reason, factor_reason),
        (spec.expert_latent_size, "compute no experts with a width of their own"),
        (spec.altup_inputs, f"support one residual stream, not {spec.altup_inputs} (AltUp)"),
        (bad_head_dims, f"support head_dim {', '.join(map(str, HEAD_DIMS))}, not {bad_head_dims}"),
        (has_other_table, "need a RoPE frequency for each pair of a head"),
        (has_bad_width, f"need widths that are multiples of {GROUP_COLUMNS}; found {widths_text}"),
        (has_uneven_heads, "need the same number of query heads for each KV head"),
    ]
    return next((text for exists, text in obstacles if exists), "") or unavailable_reason()


def _unsupported_factors(spec: ModelSpec) -> str:
    """Say which factors and sums of Falcon-H1 the kernels lack, as `unsupported_reason`, or ""."""
    states = spec.states
    if (spec.qkv_bias and spec.attention_input_multiplier != 1) or (
        states and states.proj_bias and states.input_multiplier != 1
    ):
        return "apply factors to inputs of attention and states only where these have no biases"
    if spec.experts and (spec.gate_multiplier, spec.mlp_output_multiplier) != (1, 1):
        return "apply no factors to experts"
    if states and states.beside_attention and spec.norms_after:
        return "norm no sum of attention and a state layer"
    return ""


def _mlp_sizes(spec: ModelSpec) -> list[int]:
    """Return the widths of a model's MLPs and experts."""
    has_experts = [spec.has_experts(layer) for layer in range(spec.layers)]
    expert_sizes = [spec.expert_size, spec.shared_expert_size] if any(has_experts) else []
    has_mlp = spec.experts_beside or not all(has_experts)
    return list(filter(None, [spec.intermediate_size if has_mlp else 0, *expert_sizes]))


class CompiledExecutor(ProductExecutor):
    """Runs decode steps by the kernels, and chunks by torch with their attention and states.

    tensors: bfloat16 weights by name. packed: matrices by name that sampled tokens read instead.

    A prompt's tokens read the tensor if there is one, so that their cells are the same to rounding
    however the prompt is cut into steps. From a matrix without a tensor, up to `MAX_ROWS` tokens
    are multiplied as sampled ones are, and more of them by each weight rounded to bfloat16; routers
    are not rounded, and integer products (`prompt_products`) round no weights. All tokens read the
    head as it is packed.

    Raises KernelMismatch for weights that `spec` does not describe: the kernels check nothing.
    """

    row_limit = MAX_ROWS

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Tensor], packed: Mapping[str, Matrix]
    ):
        super().__init__(spec, tensors, packed)
        self._shapes = [
            GroupShape(len(spec.layers_with_cells(x)), x.kv_heads, spec.heads, x.head_dim)
            for x in spec.groups
        ]
        # For each of the kernels' groups, the index of the model's group whose cells it reads.
        self._model_groups = [spec.groups.index(group) for group, _ in kernel_groups(spec)]
        self._decode_model = describe_model(spec, self.operands, sampled=True)
        self._prompt_model = describe_model(spec, self.operands, sampled=False)
        self.name = f"compiled {selected_set().name}"
        if not self.products.by_torch_in_bfloat16:
            self.name += f", prompts in {self.products}"
        # The seconds of decode steps in each of PHASES; None if they are not measured.
        self.seconds: ctypes.Array[ctypes.c_double] | None = None

    def forward(self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None) -> Tensor:
        """Return the final hidden states of a step, `[n, hidden]` bfloat16. tokens: `[n]` ids.

        input_norms: for a chunk only, `[layers, n]` float32, filled with each layer input's norm.
        """
        if isinstance(step, ChunkStep):
            with shared_scratch():
                attention = chunk_attention(step, self.kernels)
                return run_network(
                    self.network, tokens, step, attention, input_norms, self.state_mixer
                )
        model = self._decode_model if step.sampled else self._prompt_model
        steps = [step] if isinstance(step, DecodeStep) else step.steps
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
        states = None if spec.states is None else DecodedStates(spec.states, steps)
        step, _views_kept_alive = describe_step(
            tokens, steps, self._shapes, self._model_groups, hidden, states, self.seconds
        )
        raise_for_status(self.kernels.kvkeep_decode(model, step))
        if states is not None:
            states.finish()
        return hidden
