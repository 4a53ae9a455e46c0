"""A decode step through all layers by the compiled kernels: one call for each token.

Weights are read as they are packed, activations are bfloat16, sums float32, and so is the residual
stream. A sequence's results are the same to the last bit whether it decodes alone or in a group.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvkeep.cache import LayerAttention, Layout
from kvkeep.cache.layers import LayerDispatch
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.compiled.binding import (
    HEAD_DIMS,
    CModel,
    library,
    require_done,
)
from kvkeep.compiled.chunk import ChunkAttention
from kvkeep.compiled.held import Held
from kvkeep.compiled.instruction_sets import choice, load_error, multiplies_bf16
from kvkeep.compiled.matrices import PackedLinear, one_scratch
from kvkeep.compiled.model import described_model, kernel_groups
from kvkeep.compiled.operands import address
from kvkeep.compiled.step import describe
from kvkeep.errors import KernelMismatch
from kvkeep.models.layers.executor import AnyStep
from kvkeep.models.layers.network import Network
from kvkeep.models.spec.model_spec import ModelSpec
from kvkeep.models.weights.formats import GROUP
from kvkeep.models.weights.packing import Matrix, as_tensor
from kvkeep.models.weights.tensors import (
    HEAD,
    is_router,
    matrices,
    matrices_per_token,
)


def can_decode(spec: ModelSpec, layout: Layout) -> bool:
    """Whether there are kernels for this model on this machine."""
    return not obstacle(spec, layout)


def obstacle(spec: ModelSpec, layout: Layout) -> str:
    """Why not, as what the kernels do or are; "" where there are some."""
    heads = [group.head_dim for group in spec.groups]
    queries = [spec.heads * width for width in heads]
    widths = (spec.hidden_size, *_inner(spec), *queries, spec.per_layer_size)
    unknown = ", ".join(str(width) for width in heads if width not in HEAD_DIMS)
    against = {
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
    return next((why for why, holds in against.items() if holds), "") or unusable()


def prompts_in() -> torch.dtype:
    """Of the products of prompts of bfloat16 models, where there are kernels."""
    return torch.bfloat16 if multiplies_bf16() else torch.float32


def unusable() -> str:
    """Why this machine has no kernels, as `obstacle` says it."""
    if library():
        return ""
    chosen = choice()
    if error := load_error(chosen.name):
        return f"cannot be loaded ({error})"
    return chosen.why_torch or "were built from other sources"


def _inner(spec: ModelSpec) -> list[int]:
    """Of all MLPs and experts that there are."""
    layers = set(map(spec.is_sparse, range(spec.layers)))
    sparse = [spec.expert_size, spec.shared_expert_size] if True in layers else []
    dense = [spec.intermediate_size] if False in layers or spec.experts_beside else []
    return list(filter(None, [*dense, *sparse]))


class CompiledExecutor:
    """Steps of one token, alone or in a group, by the kernels; chunks by torch, but attention.

    tensors: the model's, bfloat16. packed: matrices to read instead, by name, for tokens that were
    sampled; may be empty. A prompt's read tensors, where there are any, so that its cells are the
    same to rounding however it is cut into steps; matrices that are packed alone are read as if
    each weight had been rounded to bfloat16, routers as they are. The head is of what is chosen
    next, and is read as it is packed for all.

    Raises KernelMismatch for weights that are not those of `spec`: what the kernels read without
    looking is looked at here, once.
    """

    def __init__(
        self, spec: ModelSpec, tensors: Mapping[str, Tensor], packed: Mapping[str, Matrix]
    ):
        self.spec = spec
        self._held = Held(spec, tensors, packed)
        self._vectors = [
            (len(spec.layers_with_cells(group)), group.kv_heads, group.head_dim)
            for group in spec.groups
        ]
        self._of_kernels = [spec.groups.index(group) for group, _ in kernel_groups(spec)]
        kernels = library()
        assert kernels is not None, "can_decode was asked"
        self._kernels = kernels
        self._decoding = described_model(spec, self._held, sampled=True)
        self._prefilling = described_model(spec, self._held, sampled=False)
        # What the library multiplies slowly as it is goes by our products, too.
        self._products_in = prompts_in()
        self.name = f"compiled {choice().name}"
        if self._products_in is not torch.bfloat16:
            self.name += ", prompts in float32"
        self._products = {name: self._product(name) for name in self._by_products()}
        self._network = Network(spec, self._held.tensors | self._routers(), self._products)
        self.seconds: ctypes.Array[ctypes.c_double] | None = None  # by PHASES, where counted

    def _by_products(self) -> list[str]:
        absent = [name for name in self._held.shapes if name not in self._held.tensors]
        if self._products_in is torch.bfloat16:
            return absent
        layers = set(matrices(self.spec)) - {HEAD}
        return absent + [n for n in layers if n in self._held.tensors and not is_router(n)]

    def _routers(self) -> dict[str, Tensor]:
        """Those that are no tensors, float32: a prompt is routed by what the file has, too."""
        names = (name for name in self._products if is_router(name))
        return {name: as_tensor(self._held.found(name, False), torch.float32) for name in names}

    def _product(self, name: str) -> PackedLinear:
        bias = self._held.tensors.get(name.removesuffix("weight") + "bias")
        found = self._held.found(name, sampled=False)
        matrix = self._held.matrix(name, sampled=False)
        return PackedLinear(self._kernels, matrix, bias, found, self._products_in)

    def matrix_bytes(self) -> dict[str, int]:
        """What each matrix takes that is read for a token that was sampled, by name."""
        names = matrices_per_token(self.spec)
        return {name: self._held.found(name, sampled=True).nbytes for name in names}

    def unpacked(self, name: str) -> Tensor:
        """A matrix that is packed alone, `[rows, columns]` bfloat16."""
        return self._products[name].dense()

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        if isinstance(step, ChunkStep):
            return self.chunk(tokens, step, None)
        model = self._decoding if step.sampled else self._prefilling
        steps = [step] if isinstance(step, DecodeStep) else step.steps
        return self._of_one_token_each(tokens.tolist(), steps, model)

    def chunk(self, tokens: Tensor, step: ChunkStep, norms: Tensor | None) -> Tensor:
        attention: LayerAttention = ChunkAttention(step, self._kernels)
        if isinstance(step.local, ChunkStep):
            local = ChunkAttention(step.local, self._kernels)
            attention = LayerDispatch(step.placements, attention, local)
        with one_scratch():
            return self._network.forward(tokens, attention, norms)

    def _of_one_token_each(
        self, tokens: Sequence[int], steps: Sequence[DecodeStep], model: CModel
    ) -> Tensor:
        spec = self.spec
        if len(tokens) != len(steps) or not 0 <= min(tokens) <= max(tokens) < spec.vocab_size:
            raise KernelMismatch(
                f"{len(steps)} tokens of 0 to {spec.vocab_size - 1} were to be decoded; found "
                f"{list(tokens)}"
            )
        shape = (len(tokens), spec.hidden_size)
        hidden = torch.empty(shape, dtype=torch.bfloat16, device="cpu")
        threads = torch.get_num_threads()
        step = describe(
            tokens,
            steps,
            self._vectors,
            self._of_kernels,
            spec.heads,
            hidden,
            threads,
            self.seconds,
        )
        require_done(self._kernels.kvkeep_decode(model, step.structure))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        hidden, count = hidden.contiguous(), hidden.shape[0]
        read = address(hidden, "hidden states", torch.bfloat16, (count, self.spec.hidden_size))
        out = torch.empty(count, self.spec.vocab_size, dtype=torch.float32, device="cpu")
        threads = torch.get_num_threads()
        head, written = self._decoding.head, out.data_ptr()
        require_done(self._kernels.kvkeep_product(head, read, count, written, threads))
        if self.spec.logits_multiplier != 1:
            out.mul_(self.spec.logits_multiplier)
        cap = self.spec.logits_softcap
        return out.div_(cap).tanh_().mul_(cap) if cap else out
