"""The executor whose forward torch runs, with the kernels' products and attention of prompts.

It serves models with layers that the kernels do not compute. Weights are read as they are packed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.cache.group_step import GroupStep
from kvkeep.compiled.binding import kernel_library, raise_for_status
from kvkeep.compiled.chunk import layer_attention
from kvkeep.compiled.instruction_sets import has_fast_bf16, load_error, selected_set
from kvkeep.compiled.matrices import PackedLinear, shared_scratch
from kvkeep.compiled.operands import ModelOperands, address
from kvkeep.compiled.states import KernelMixer, unsupported_states
from kvkeep.compiled.structures import CMatrix
from kvkeep.errors import InvalidArgument
from kvkeep.models.layers.executor import AnyStep, run_network
from kvkeep.models.layers.network import Network
from kvkeep.models.layers.primitives import LM_HEAD
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.formats import GROUP_COLUMNS
from kvkeep.models.weights.packing import Matrix, as_tensor
from kvkeep.models.weights.tensors import is_router, matrix_shapes, step_matrices

# Sets whose integer products were measured to be faster than torch's in float32.
_INTEGER_SETS = ("amx", "avx512bf16", "avxvnni", "avx2")
# Sets whose products with rows of 8 bits are faster than torch's in bfloat16 by
# `benchmarks.products`.
_BYTE_SETS = ("avx512bf16",)


def products_reason(spec: ModelSpec, layout: Layout) -> str:
    """Say why the kernels do not multiply a model's matrices, as `unsupported_reason`, or "".

    They do so for models with state layers; other models are computed as a whole or not at all.
    """
    columns = {shape[1] for shape in matrix_shapes(spec).values()}
    dtype_name = str(layout.dtype).removeprefix("torch.")
    bad_columns = ", ".join(str(x) for x in sorted(columns) if x % GROUP_COLUMNS)
    obstacles = [
        (spec.states is None, "compute no models of this kind"),
        (layout.device.type != "cpu", f"run on a CPU, not on {layout.device}"),
        (layout.dtype is not torch.bfloat16, f"support bfloat16, not {dtype_name}"),
        (bad_columns, f"need widths that are multiples of {GROUP_COLUMNS}; found {bad_columns}"),
    ]
    return next((text for exists, text in obstacles if exists), "") or unavailable_reason()


def unavailable_reason() -> str:
    """Say why this machine has no kernels, as `unsupported_reason`; empty if it has some."""
    if kernel_library():
        return ""
    selected = selected_set()
    if error := load_error(selected.name):
        return f"cannot be loaded ({error})"
    return selected.torch_reason or "were built from the sources of another kvkeep version"


@dataclass(frozen=True)
class PromptProducts:
    """The way in which prompts of bfloat16 models are multiplied.

    dtype: of torch's products. row_bits: not 0 where the kernels multiply packed matrices, as
    integers, since that is faster than torch: the bits of each number of the rows, 16, or 8 for
    formats whose codes can be multiplied so.
    """

    dtype: torch.dtype
    row_bits: int

    @property
    def by_torch_in_bfloat16(self) -> bool:
        """Whether torch computes all of them, in the dtype of the weights."""
        return self.dtype is torch.bfloat16 and not self.row_bits

    def without_bytes(self) -> "PromptProducts":
        """Return the products as they are without KVKEEP_PROMPT_BITS=8."""
        usual_bits = 0 if self.dtype is torch.bfloat16 else 16
        return replace(self, row_bits=usual_bits) if self.row_bits == 8 else self

    @property
    def rounding(self) -> str:
        """How rows are rounded on request, as `Executor.rounding`; "" if they are not."""
        return "rows of 8 bits" if self.row_bits == 8 else ""

    def __str__(self) -> str:
        how = {0: "", 8: f", packed weights by {self.rounding}", 16: ", packed weights as integers"}
        return str(self.dtype).removeprefix("torch.") + how[self.row_bits]


def prompt_row_bits() -> int:
    """Return the value of KVKEEP_PROMPT_BITS: 8, or 16 if it is not set.

    Raises InvalidArgument for another value.
    """
    text = os.environ.get("KVKEEP_PROMPT_BITS") or "16"
    if text not in ("8", "16"):
        raise InvalidArgument(f"KVKEEP_PROMPT_BITS must be 8 or 16; found {text!r}")
    return int(text)


def prompt_products() -> PromptProducts:
    """Return how prompts are multiplied on this processor by the selected instruction set.

    Raises InvalidArgument for a wrong value of KVKEEP_PROMPT_BITS.
    """
    row_bits, dtype = prompt_row_bits(), torch.float32
    sets: tuple[str, ...] = _INTEGER_SETS
    if has_fast_bf16():
        dtype, sets = torch.bfloat16, _BYTE_SETS if row_bits == 8 else ()
    has_integers = selected_set().name in sets and kernel_library() is not None
    return PromptProducts(dtype, row_bits if has_integers else 0)


class ProductExecutor:
    """Runs all steps by torch, with the kernels' products and their attention of chunks.

    tensors: bfloat16 weights by name. packed: matrices by name that are not among them.

    A matrix without a tensor is read as it is packed, each weight rounded to bfloat16; routers are
    not rounded, and integer products (`prompt_products`) round no weights. All tokens read the head
    as it is packed.

    Raises KernelMismatch for weights that `spec` does not describe: the kernels check nothing.
    """

    row_limit = 0

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Tensor], packed: Mapping[str, Matrix]
    ):
        self.spec = spec
        self.operands = ModelOperands(spec, tensors, packed)
        kernels = kernel_library()
        assert kernels is not None, "the reason against this executor must be empty"
        self.kernels = kernels
        products = prompt_products()
        self.products = products if self._multiplies_packed() else products.without_bytes()
        self.rounding = self.products.rounding
        self.name = f"torch, products by {selected_set().name}"
        if not self.products.by_torch_in_bfloat16:
            self.name += f" in {self.products}"
        self._linears = {name: self._packed_linear(name) for name in self._linear_names()}
        self._tensors = self.operands.tensors | self._routers()
        self.network = Network(spec, self._tensors, self._linears)

    @cached_property
    def state_mixer(self) -> KernelMixer | None:
        """The kernels of state layers, if they support those of the model."""
        layers = self.spec.states
        if layers is None or unsupported_states(layers):
            return None
        return KernelMixer(self.spec, layers, self.operands, self.kernels)

    @cached_property
    def _group_network(self) -> Network:
        """The network of a group's decode steps, whose rows are never bytes, however many."""
        if self.products.row_bits != 8:
            return self.network
        row_bits = self.products.without_bytes().row_bits
        linears = {name: replace(x, _row_bits=row_bits) for name, x in self._linears.items()}
        return Network(self.spec, self._tensors, linears)

    @cached_property
    def _head(self) -> CMatrix:
        return self.operands.describe_matrix(LM_HEAD, sampled=True)

    def _multiplies_packed(self) -> bool:
        """Whether a layer's matrix is packed of which a prompt's rows have integer products."""
        names = set(matrix_shapes(self.spec)) - {LM_HEAD}
        weights = [self.operands.weight(x, sampled=False) for x in names if not is_router(x)]
        return not all(isinstance(weight, Tensor) for weight in weights)

    def _linear_names(self) -> list[str]:
        """Return the names of the matrices that a prompt's rows are multiplied by as PackedLinear.

        All without a tensor. Without fast bfloat16 also tensors, for float32 products.
        """
        tensors = self.operands.tensors
        names = [name for name in self.operands.shapes if name not in tensors]
        if self.products.dtype is not torch.bfloat16:
            layer_matrices = set(matrix_shapes(self.spec)) - {LM_HEAD}
            names += [x for x in layer_matrices if x in tensors and not is_router(x)]
        return names

    def _routers(self) -> dict[str, Tensor]:
        """Return packed routers in float32, so that prompts are routed by unrounded weights."""
        return {
            name: as_tensor(self.operands.weight(name, sampled=False), torch.float32)
            for name in self._linears
            if is_router(name)
        }

    def _packed_linear(self, name: str) -> PackedLinear:
        bias = self.operands.tensors.get(name.removesuffix("weight") + "bias")
        weight = self.operands.weight(name, sampled=False)
        matrix = self.operands.describe_matrix(name, sampled=False, rounded=True)
        dtype, row_bits = self.products.dtype, self.products.row_bits
        return PackedLinear(self.kernels, matrix, bias, weight, dtype, row_bits)

    def matrix_bytes(self) -> dict[str, int]:
        """Return the size in bytes of each matrix that a sampled token reads, by name."""
        names = step_matrices(self.spec)
        return {name: self.operands.weight(name, sampled=True).nbytes for name in names}

    def unpack_matrix(self, name: str) -> Tensor:
        """Unpack a matrix that has no tensor, `[rows, columns]` bfloat16."""
        return self._linears[name].dense()

    def forward(self, tokens: Tensor, step: AnyStep, input_norms: Tensor | None = None) -> Tensor:
        """Return the final hidden states of a step, `[n, hidden]` bfloat16; see `Executor`."""
        with shared_scratch():
            attention = layer_attention(step)
            network = self._group_network if isinstance(step, GroupStep) else self.network
            return run_network(network, tokens, step, attention, input_norms, self.state_mixer)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, `[n, vocab]` float32."""
        hidden, count = hidden.contiguous(), hidden.shape[0]
        shape = (count, self.spec.hidden_size)
        hidden_address = address(hidden, "hidden states", torch.bfloat16, shape)
        out = torch.empty(count, self.spec.vocab_size, dtype=torch.float32, device="cpu")
        product, threads = self.kernels.kvkeep_product, torch.get_num_threads()
        raise_for_status(product(self._head, hidden_address, count, out.data_ptr(), threads))
        if self.spec.logits_multiplier != 1:
            out.mul_(self.spec.logits_multiplier)
        cap = self.spec.logits_softcap
        return out.div_(cap).tanh_().mul_(cap) if cap else out
