"""The executor on the compiled kernels: a decode step through all layers in one call.

Weights are read as they are packed, activations are bfloat16, sums float32, and so is the residual
stream. A sequence's results are the same to the last bit whether it decodes alone or in a group.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.compiled.binding import HEAD_DIMS, CModel, library, require_done
from kvkeep.compiled.chunk import chunk_attention
from kvkeep.compiled.instruction_sets import has_fast_bf16, load_error, selected_set
from kvkeep.compiled.matrices import PackedLinear, shared_scratch
from kvkeep.compiled.model import describe_model, kernel_groups
from kvkeep.compiled.operands import ModelOperands, address
from kvkeep.compiled.step import describe_step
from kvkeep.errors import KernelMismatch
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.network import Network
from kvkeep.models.layers.primitives import HEAD
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.formats import GROUP
from kvkeep.models.weights.packing import Matrix, as_tensor
from kvkeep.models.weights.tensors import is_router, matrices, matrices_per_token


def can_decode(spec: ModelSpec, layout: Layout) -> bool:
    """Whether the kernels support this model on this machine."""
    return not unsupported_reason(spec, layout)


def unsupported_reason(spec: ModelSpec, layout: Layout) -> str:
    """Say why the kernels do not run a model, as a predicate of "the kernels"; "" if they do."""
    heads = [group.head_dim for group in spec.groups]
    queries = [spec.heads * width for width in heads]
    widths = (spec.hidden_size, *_mlp_sizes(spec), *queries, spec.per_layer_size)
    unknown = ", ".join(str(width) for width in heads if width not in HEAD_DIMS)
    reasons = {
        f"run on a CPU, not on {layout.device}": layout.device.type != "cpu",
        f"are for bfloat16, not for {str(layout.dtype).removeprefix('torch.')}": (
            layout.dtype is not torch.bfloat16
        ),
        f"know one residual stream, not {spec.altup_inputs} (AltUp)": spec.altup_inputs > 0,
        f"are for heads of {', '.join(map(str, HEAD_DIMS))}, not of {unknown}": bool(unknown),
        "rotate whole heads": any(
            group.head_dim != 2 * len(group.rope.inverse_frequencies) for group in spec.groups
        ),
        f"read groups of {GROUP}, and its widths are {', '.join(map(str, widths))}": (
            any(width % GROUP for width in widths)
        ),
        "take as many heads for each KV head": any(
            spec.heads % group.kv_heads for group in spec.groups
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "") or unavailable_reason()


def prompt_dtype() -> torch.dtype:
    """Return the dtype of torch's products for prompts of bfloat16 models."""
    return torch.bfloat16 if has_fast_bf16() else torch.float32


def unavailable_reason() -> str:
    """Say why this machine has no kernels, as `unsupported_reason` does; "" where it has some."""
    if library():
        return ""
    selected = selected_set()
    if error := load_error(selected.name):
        return f"cannot be loaded ({error})"
    return selected.torch_reason or "were built from other sources"


def _mlp_sizes(spec: ModelSpec) -> list[int]:
    """Return the widths of a model's MLPs and experts."""
    layers = set(map(spec.is_sparse, range(spec.layers)))
    sparse = [spec.expert_size, spec.shared_expert_size] if True in layers else []
    dense = [spec.intermediate_size] if False in layers or spec.experts_beside else []
    return list(filter(None, [*dense, *sparse]))


class CompiledExecutor:
    """Decode steps by the kernels; chunks by torch, except for attention.

    tensors: the model's, bfloat16. packed: matrices by name to read instead for sampled tokens;
    may be empty. Tokens of a prompt read the tensor where there is one, so that their cells are the
    same to rounding however the prompt is cut into steps; a matrix that is packed alone is read as
    if each weight had been rounded to bfloat16, a router as it is. The head computes the next
    token's logits and is read as it is packed for all tokens.

    Raises KernelMismatch for weights that are not those of `spec`: the kernels do not check what
    they read, so it is checked here, once.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Tensor], packed: Mapping[str, Matrix]
    ):
        self.spec = spec
        self._operands = ModelOperands(spec, tensors, packed)
        self._cell_shapes = [
            (len(spec.layers_with_cells(group)), group.kv_heads, group.head_dim)
            for group in spec.groups
        ]
        self._kernel_groups = [spec.groups.index(group) for group, _ in kernel_groups(spec)]
        kernels = library()
        assert kernels is not None, "can_decode must hold"
        self._kernels = kernels
        self._decode_model = describe_model(spec, self._operands, sampled=True)
        self._prompt_model = describe_model(spec, self._operands, sampled=False)
        self._product_dtype = prompt_dtype()
        self.name = f"compiled {selected_set().name}"
        if self._product_dtype is not torch.bfloat16:
            self.name += ", prompts in float32"
        self._products = {name: self._product(name) for name in self._product_names()}
        self._network = Network(spec, self._operands.tensors | self._routers(), self._products)
        # Seconds of decode steps by PHASES; None while they are not counted.
        self.seconds: ctypes.Array[ctypes.c_double] | None = None

    def _product_names(self) -> list[str]:
        """Return the matrices that prompts are multiplied by as PackedLinear.

        All that are packed alone; without fast bfloat16, also the tensors, for float32 products.
        """
        tensors = self._operands.tensors
        packed_alone = [name for name in self._operands.shapes if name not in tensors]
        if self._product_dtype is torch.bfloat16:
            return packed_alone
        layers = set(matrices(self.spec)) - {HEAD}
        return packed_alone + [n for n in layers if n in tensors and not is_router(n)]

    def _routers(self) -> dict[str, Tensor]:
        """Return packed routers in float32: prompts are routed by the file's values, too."""
        names = (name for name in self._products if is_router(name))
        return {
            name: as_tensor(self._operands.weight(name, sampled=False), torch.float32)
            for name in names
        }

    def _product(self, name: str) -> PackedLinear:
        bias = self._operands.tensors.get(name.removesuffix("weight") + "bias")
        weight = self._operands.weight(name, sampled=False)
        matrix = self._operands.matrix(name, sampled=False)
        return PackedLinear(self._kernels, matrix, bias, weight, self._product_dtype)

    def matrix_bytes(self) -> dict[str, int]:
        """Return the bytes of each matrix that a sampled token reads, by name."""
        names = matrices_per_token(self.spec)
        return {name: self._operands.weight(name, sampled=True).nbytes for name in names}

    def unpacked(self, name: str) -> Tensor:
        """Return a matrix that is packed alone as `[rows, columns]` bfloat16."""
        return self._products[name].dense()

    def hidden(self, tokens: Tensor, step: AnyStep, norms: Tensor | None = None) -> Tensor:
        """Return the final hidden states of a step, `[tokens, hidden]` bfloat16."""
        if isinstance(step, ChunkStep):
            with shared_scratch():
                return self._network.forward(tokens, chunk_attention(step, self._kernels), norms)
        model = self._decode_model if step.sampled else self._prompt_model
        steps = [step] if isinstance(step, DecodeStep) else step.steps
        return self._decode(tokens.tolist(), steps, model)

    def _decode(self, tokens: Sequence[int], steps: Sequence[DecodeStep], model: CModel) -> Tensor:
        spec = self.spec
        if len(tokens) != len(steps) or not 0 <= min(tokens) <= max(tokens) < spec.vocab_size:
            raise KernelMismatch(
                f"{len(steps)} tokens of 0 to {spec.vocab_size - 1} were to be decoded; found "
                f"{list(tokens)}"
            )
        hidden = torch.empty(len(tokens), spec.hidden_size, dtype=torch.bfloat16, device="cpu")
        step, _shared_views = describe_step(
            tokens,
            steps,
            self._cell_shapes,
            self._kernel_groups,
            spec.heads,
            hidden,
            torch.get_num_threads(),
            self.seconds,
        )
        require_done(self._kernels.kvkeep_decode(model, step))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, `[n, vocab]` float32."""
        hidden, count = hidden.contiguous(), hidden.shape[0]
        rows = address(hidden, "hidden states", torch.bfloat16, (count, self.spec.hidden_size))
        out = torch.empty(count, self.spec.vocab_size, dtype=torch.float32, device="cpu")
        head, threads = self._decode_model.head, torch.get_num_threads()
        require_done(self._kernels.kvkeep_product(head, rows, count, out.data_ptr(), threads))
        if self.spec.logits_multiplier != 1:
            out.mul_(self.spec.logits_multiplier)
        cap = self.spec.logits_softcap
        return out.div_(cap).tanh_().mul_(cap) if cap else out
