"""The MLP of a layer, and a mixture of experts in its place (arXiv:1701.06538, arXiv:2101.03961).

A router scores all experts for each token, in float32 whatever the weights are: rounded to bfloat16
its scores would tie. The token goes through the few that score highest, of equal ones through those
of lower index, and what they give is added up by their shares of the softmax.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.models.layers.linear import Linear
from kvkeep.models.spec.model_spec import Gating, ModelSpec


class Product(Protocol):
    """A matrix with rows of input, `[n, in]` to `[n, out]`, whatever it is kept as."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def chosen(self, rows: Tensor) -> Tensor:
        """Some rows of the matrix, `[n, in]`. rows: `[n]` int64."""


def _clamped(gate: Tensor, up: Tensor) -> Tensor:
    """Gpt-oss's: (up + 1) * gate * sigmoid(1.702 gate), no gate above 7 and no up beyond 7."""
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


GATED: dict[Gating, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped": _clamped,
}


@dataclass(frozen=True)
class Mlp:
    """A gated MLP (SwiGLU and GEGLU, arXiv:2002.05202)."""

    gate: Callable[[Tensor], Tensor]
    up: Product
    down: Product
    gating: Gating = "silu"

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, hidden_size]` to the same."""
        return self.down(GATED[self.gating](self.gate(x), self.up(x)))


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token goes through, as much as the sigmoid of its gate says."""

    mlp: Mlp
    gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, hidden_size]` to the same, float32."""
        return self.gate(x.float()).sigmoid() * self.mlp(x).float()


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    router: `[experts, hidden_size]` float32, as is its bias. per_token: how many a token goes
    through. norm_topk: their weights add up to 1, and else to their share of all.

    The tokens of a step that chose an expert go through it together, so that what a token becomes
    may depend in its last bits on how many others of its step chose the same one; never on the
    number of threads.
    """

    router: Linear
    each: tuple[Mlp, ...]
    per_token: int
    norm_topk: bool
    shared: SharedExpert | None

    def __call__(self, x: Tensor) -> Tensor:
        """`[n, hidden_size]` to the same."""
        return self.through(x, *self.route(x))

    def through(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The same where it is known, as `route` has it, which experts each goes through."""
        sum = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # Choices in the order of their experts; choice c is of token c // per_token.
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.each)).tolist()
        for expert, choices in zip(self.each, torch.split(order, counts), strict=True):
            if len(choices):
                tokens = choices // self.per_token
                given = expert(x[tokens]).float() * weights.flatten()[choices, None]
                sum.index_add_(0, tokens, given)  # no token chose an expert twice
        if self.shared is not None:
            sum += self.shared(x)
        return sum.to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and experts, int64, that each token goes through: `[n, per_token]`."""
        scores, order = self.router(x.float()).sort(dim=-1, descending=True, stable=True)
        shares = scores[:, : self.per_token] if self.norm_topk else scores
        weights = shares.softmax(-1)[:, : self.per_token]
        return weights, order[:, : self.per_token]


def mlp_of(
    spec: ModelSpec, layer: int, tensors: Mapping[str, Tensor], product: Callable[[str], Product]
) -> Mlp | Experts:
    """A layer's MLP, or what it has in its place. product: of a matrix, by its name."""
    prefix = f"model.layers.{layer}.mlp"
    if spec.experts_beside or not spec.is_sparse(layer):
        return _mlp(prefix, product, spec.gating)
    return experts_of(spec, layer, tensors, product)


def experts_of(
    spec: ModelSpec, layer: int, tensors: Mapping[str, Tensor], product: Callable[[str], Product]
) -> Experts:
    """A layer's mixture of experts."""
    prefix = f"model.layers.{layer}.mlp"

    def router(name: str, rows: int) -> Linear:
        weight = tensors.get(name)
        if weight is None:
            weight = product(name).chosen(torch.arange(rows, dtype=torch.int64, device="cpu"))
        bias = tensors.get(f"{name.removesuffix('weight')}bias")
        return Linear(weight.float(), None if bias is None else bias.float())

    shared = None
    if spec.shared_expert_size:
        gate = router(f"{prefix}.shared_expert_gate.weight", 1)
        shared = SharedExpert(_mlp(f"{prefix}.shared_expert", product, spec.gating), gate)
    return Experts(
        router=router(f"{prefix}.gate.weight", spec.experts),
        each=tuple(
            _mlp(f"{prefix}.experts.{i}", product, spec.gating) for i in range(spec.experts)
        ),
        per_token=spec.experts_per_token,
        norm_topk=spec.norm_topk,
        shared=shared,
    )


def _mlp(prefix: str, product: Callable[[str], Product], gating: Gating) -> Mlp:
    gate, up, down = (product(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down"))
    return Mlp(gate, up, down, gating)
