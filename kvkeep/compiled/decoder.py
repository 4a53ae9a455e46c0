"""A decode step through all layers by the compiled kernels: one call for each token.

Weights are read as they are packed, activations are bfloat16, sums float32, and so is the residual
stream. A sequence's results are the same to the last bit whether it decodes alone or in a group.
"""

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import pointer

import torch
from torch import Tensor

from kvkeep.cache import Attends, Layout
from kvkeep.cache.layers import ByLayer
from kvkeep.cache.step import ChunkStep, DecodeStep
from kvkeep.compiled.binding import (
    HEAD_DIMS,
    CGroup,
    CLayer,
    CMatrix,
    CMlp,
    CModel,
    library,
    require_done,
)
from kvkeep.compiled.chunk import ChunkAttention
from kvkeep.compiled.experts import mixture, mlp
from kvkeep.compiled.instruction_sets import choice, load_error, multiplies_bf16
from kvkeep.compiled.matrices import PackedLinear, described
from kvkeep.compiled.operands import address
from kvkeep.compiled.step import describe
from kvkeep.errors import KernelMismatch
from kvkeep.models.executor import AnyStep
from kvkeep.models.formats import GROUP
from kvkeep.models.llama import Llama, embedding_multiplier
from kvkeep.models.packing import Matrix, as_tensor
from kvkeep.models.spec import GATINGS, LayerGroup, ModelSpec
from kvkeep.models.weights import (
    EMBEDDING,
    HEAD,
    is_router,
    matrices,
    read_by_a_token,
    tensor_shapes,
)

_LAYER = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
}
# Of a ModelSpec, what the kernels do not heed.
_UNKNOWN = (
    "wide_shared_mlp",
    "keys_as_values",
    "values_normed",
    "per_layer_size",
    "layer_scales",
)


def can_decode(spec: ModelSpec, layout: Layout) -> bool:
    """Whether there are kernels for this model on this machine."""
    return not obstacle(spec, layout)


def obstacle(spec: ModelSpec, layout: Layout) -> str:
    """Why not, as what the kernels do or are; "" where there are some."""
    widths = (spec.hidden_size, *_inner(spec), spec.heads * spec.head_dim)
    against = {
        f"run on a CPU, not on {layout.device}": layout.device.type != "cpu",
        f"are for bfloat16, not for {str(layout.dtype).removeprefix('torch.')}": (
            layout.dtype is not torch.bfloat16
        ),
        f"are for heads of {', '.join(map(str, HEAD_DIMS))}, not of {spec.head_dim}": (
            spec.head_dim not in HEAD_DIMS
        ),
        "rotate whole heads": spec.head_dim != 2 * len(spec.rope.inverse_frequencies),
        f"read groups of {GROUP}, and its widths are {', '.join(map(str, widths))}": (
            any(width % GROUP for width in widths)
        ),
        "need heads of one width in all layers, each with cells of its own": (
            len({group.head_dim for group in spec.groups}) > 1 or bool(spec.shared_kv_layers)
        ),
        "know no embeddings of each layer, normed values or scales of layers yet": any(
            getattr(spec, name) for name in _UNKNOWN
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
    return list(filter(None, [*([spec.intermediate_size] if False in layers else []), *sparse]))


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
        self._shapes = tensor_shapes(spec)
        # Whatever else there is by these names, no kernel knows of it.
        self._tensors = {
            name: tensors[name].contiguous() for name in self._shapes if name in tensors
        }
        self._packed = packed
        self._vectors = [
            (len(group.layers), group.kv_heads, group.head_dim) for group in spec.groups
        ]
        self._held: list[Tensor] = []  # what the kernels are handed beside the model's tensors
        kernels = library()
        assert kernels is not None, "can_decode was asked"
        self._kernels = kernels
        self._decoding = self._described(sampled=True)
        self._prefilling = self._described(sampled=False)
        # What the library multiplies slowly as it is goes by our products, too.
        self._products_in = prompts_in()
        self.name = f"compiled {choice().name}"
        if self._products_in is not torch.bfloat16:
            self.name += ", prompts in float32"
        self._products = {name: self._product(name) for name in self._by_products()}
        self._network = Llama(spec, self._tensors | self._routers(), self._products)
        self.seconds: ctypes.Array[ctypes.c_double] | None = None  # by PHASES, where counted

    def _described(self, sampled: bool) -> CModel:
        spec = self.spec
        layers = (CLayer * spec.layers)(*(self._layer(i, sampled) for i in range(spec.layers)))
        return CModel(
            spec.layers,
            len(spec.groups),
            spec.hidden_size,
            spec.intermediate_size,
            spec.heads,
            spec.head_dim,
            spec.norm_eps,
            float(spec.unit_norms),
            embedding_multiplier(spec, torch.bfloat16),
            spec.residual_multiplier,
            spec.qk_norm_whole,
            spec.centred_norms,
            spec.parallel,
            GATINGS.index(spec.gating),
            spec.experts,
            spec.experts_per_token,
            spec.expert_size,
            spec.shared_expert_size,
            spec.norm_topk,
            self._pointer("model.norm.weight"),
            layers,
            (CGroup * len(spec.groups))(*map(self._group, spec.groups)),
            self._matrix(EMBEDDING, sampled=False),
            self._matrix(HEAD, sampled=True),
        )

    def _group(self, group: LayerGroup) -> CGroup:
        scale = group.query_scale
        return CGroup(
            len(group.layers),
            group.kv_heads,
            group.softmax_scale,
            self.spec.attention_softcap,
            None if scale is None else self._kept(scale, torch.float32),
            self._kept(group.rope.inverse_frequencies, torch.float64),
        )

    def _kept(self, numbers: Sequence[float] | Tensor, dtype: torch.dtype) -> int:
        """The address of numbers that are held for as long as the executor is."""
        self._held.append(torch.as_tensor(numbers, dtype=dtype, device="cpu").contiguous())
        return self._held[-1].data_ptr()

    def _layer(self, index: int, sampled: bool) -> CLayer:
        prefix = f"model.layers.{index}."
        matrices = {
            role: self._matrix(f"{prefix}{name}.weight", sampled) for role, name in _LAYER.items()
        }
        norms = {
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "query_norm": "self_attn.q_norm",
            "key_norm": "self_attn.k_norm",
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        }

        def matrix(name: str) -> CMatrix:
            return self._matrix(name, sampled)

        sparse, group = self.spec.is_sparse(index), self.spec.group_of(index)
        sinks = self._tensors.get(f"{prefix}self_attn.sinks")
        return CLayer(
            **matrices,
            mlp=CMlp() if sparse else mlp(f"{prefix}mlp", matrix),
            mixture=pointer(mixture(self.spec, f"{prefix}mlp", matrix)) if sparse else None,
            **{role: self._pointer(f"{prefix}{name}.weight") for role, name in norms.items()},
            sinks=None if sinks is None else self._kept(sinks, torch.float32),
            group=self.spec.groups.index(group),
            place=group.layers.index(index),
            rotated=index not in self.spec.unrotated_layers,
        )

    def _found(self, name: str, sampled: bool) -> Matrix:
        """What tokens that were sampled are multiplied by, or those of a prompt."""
        tied = name == HEAD and self.spec.tied_head
        held: tuple[Mapping[str, Matrix], ...] = (self._tensors, self._packed)
        for there in reversed(held) if sampled else held:
            for each in (HEAD, EMBEDDING) if tied else (name,):
                if each in there:
                    return there[each]
        raise KernelMismatch(f"the compiled kernels need {name}, and there is none")

    def _matrix(self, name: str, sampled: bool) -> CMatrix:
        shape = self._shapes[EMBEDDING if name == HEAD and self.spec.tied_head else name]
        bias = self._pointer(name.removesuffix("weight") + "bias")
        rounded = not sampled and not is_router(name)
        return described(name, self._found(name, sampled), shape, bias, rounded)

    def _by_products(self) -> list[str]:
        absent = [name for name in self._shapes if name not in self._tensors]
        if self._products_in is torch.bfloat16:
            return absent
        layers = set(matrices(self.spec)) - {HEAD}
        return absent + [n for n in layers if n in self._tensors and not is_router(n)]

    def _routers(self) -> dict[str, Tensor]:
        """Those that are no tensors, float32: a prompt is routed by what the file has, too."""
        names = (name for name in self._products if is_router(name))
        return {name: as_tensor(self._found(name, False), torch.float32) for name in names}

    def _product(self, name: str) -> PackedLinear:
        bias = self._tensors.get(name.removesuffix("weight") + "bias")
        found = self._found(name, sampled=False)
        matrix = self._matrix(name, sampled=False)
        return PackedLinear(self._kernels, matrix, bias, found, self._products_in)

    def _pointer(self, name: str) -> int | None:
        """None where the model's kind has no such tensor."""
        if name not in self._shapes:
            return None
        return address(self._tensors[name], name, torch.bfloat16, self._shapes[name])

    def matrix_bytes(self) -> dict[str, int]:
        """What each matrix takes that is read for a token that was sampled, by name."""
        names = read_by_a_token(self.spec)
        return {name: self._found(name, sampled=True).nbytes for name in names}

    def unpacked(self, name: str) -> Tensor:
        """A matrix that is packed alone, `[rows, columns]` bfloat16."""
        return self._products[name].dense()

    def hidden(self, tokens: Tensor, step: AnyStep) -> Tensor:
        if isinstance(step, ChunkStep):
            return self.chunk(tokens, step, None)
        model = self._decoding if step.sampled else self._prefilling
        steps = [step] if isinstance(step, DecodeStep) else step.steps
        return self._of_one_token_each(tokens.tolist(), steps, model)

    def chunk(self, tokens: Tensor, step: ChunkStep, lengths: Tensor | None) -> Tensor:
        attention: Attends = ChunkAttention(step, self._kernels)
        if isinstance(step.local, ChunkStep):
            local = ChunkAttention(step.local, self._kernels)
            attention = ByLayer(step.places, attention, local)
        return self._network.forward(tokens, attention, lengths)

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
        step = describe(tokens, steps, self._vectors, spec.heads, hidden, threads, self.seconds)
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
