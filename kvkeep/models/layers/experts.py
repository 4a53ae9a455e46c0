"""Gated MLPs, and mixtures of experts in their place or beside them (arXiv:1701.06538, 2101.03961).

A router scores all experts for each token, in float32 whatever the weights are: rounded to bfloat16
its scores would tie. The token goes through the experts with the highest scores (on ties, the lower
index), and their outputs are summed, weighted by their shares of the softmax.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.models.layers.primitives import Linear, NamedWeights, Norm, Product
from kvkeep.models.spec.model_spec import Gating


def _clamped_gating(gate: Tensor, up: Tensor) -> Tensor:
    """Gate as gpt-oss: (up + 1) * gate * sigmoid(1.702 gate), with gate <= 7 and |up| <= 7."""
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


GATED: dict[Gating, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped": _clamped_gating,
}


@dataclass(frozen=True)
class Mlp:
    """A gated MLP (SwiGLU and GEGLU, arXiv:2002.05202)."""

    gate: Callable[[Tensor], Tensor]
    up: Product
    down: Product
    gating: Gating = "silu"

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to the same shape."""
        return self.down(GATED[self.gating](self.gate(x), self.up(x)))


@dataclass(frozen=True)
class SparseGate:
    """An MLP gate of Gemma 3n, which keeps only values far above their mean (arXiv:2506.06644).

    The bound follows from a normal distribution, so that nothing is sorted: 5% of it lie above
    1.645 standard deviations, and a sparsity of 0.95 keeps these, less the bound.

    gate: `[intermediate_size, hidden_size]`. deviations: standard deviations from the mean of a
    token's values to the bound.
    """

    gate: Callable[[Tensor], Tensor]
    deviations: float

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to `[n, intermediate_size]`."""
        values = self.gate(x)
        x32 = values.float()  # few values are kept, and they depend on the bound's last bits
        spread = x32.std(dim=-1, correction=0, keepdim=True)
        bound = x32.mean(dim=-1, keepdim=True) + self.deviations * spread
        return F.relu(x32 - bound).to(values.dtype)


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token goes through, weighted by the sigmoid of its gate."""

    mlp: Mlp
    gate: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to the same shape, float32."""
        return self.gate(x.float()).sigmoid() * self.mlp(x).float()


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    The tokens of a step that are routed to one expert go through it together. So the last bits of a
    token's output may depend on how many tokens of its step share its experts, never on the number
    of threads.

    Attributes:
        router: `[experts, hidden_size]` float32, as is its bias.
        norm_topk: the weights of a token's experts sum to 1; otherwise each is the expert's share
            of the softmax over all experts.
    """

    router: Linear
    experts: tuple[Mlp, ...]
    per_token: int
    norm_topk: bool
    shared: SharedExpert | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to the same shape."""
        return self.apply(x, *self.route(x))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (float32) and experts (int64) of each token, `[n, per_token]`."""
        scores, order = self.router(x.float()).sort(dim=-1, descending=True, stable=True)
        candidates = scores[:, : self.per_token] if self.norm_topk else scores
        weights = candidates.softmax(-1)[:, : self.per_token]
        return weights, order[:, : self.per_token]

    def apply(self, x: Tensor, weights: Tensor, routed: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to the same shape, routed as `route` returned it."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # Assignments sorted by expert; assignment a is of token a // per_token.
        order = routed.flatten().argsort(stable=True)
        counts = routed.flatten().bincount(minlength=len(self.experts)).tolist()
        for expert, assignments in zip(self.experts, torch.split(order, counts), strict=True):
            if len(assignments):
                tokens = assignments // self.per_token
                output = expert(x[tokens]).float() * weights.flatten()[assignments, None]
                total.index_add_(0, tokens, output)  # no token is routed to an expert twice
        if self.shared is not None:
            total += self.shared(x)
        return total.to(x.dtype)


# Tensor names behind a layer's prefix.
PARALLEL_NORMS = {
    "mlp_norm": "post_feedforward_layernorm_1",
    "norm": "pre_feedforward_layernorm_2",
    "output_norm": "post_feedforward_layernorm_2",
}
ROUTER_SCALE, EXPERT_SCALES = "mlp.gate.scale", "mlp.gate.expert_scales"


@dataclass(frozen=True)
class ParallelExperts:
    """A mixture of experts beside an MLP, as Gemma 4 has it.

    Both read the residual stream through norms of their own, and their outputs are normed
    separately and added. The router reads the residual stream, too: normed without a weight, and
    scaled element by element. Each expert's output is scaled by a learned number.

    Attributes:
        norm, output_norm: of the experts.
        router_scale: `[hidden_size]` float32.
        expert_scales: `[experts]` float32.
        eps: of the norm of the router's input.
    """

    experts: Experts
    mlp_norm: Norm
    norm: Norm
    output_norm: Norm
    router_scale: Tensor
    expert_scales: Tensor
    eps: float

    def __call__(self, x: Tensor, mlp_output: Tensor) -> Tensor:
        """Return the sum of MLP and experts. x: the residual stream; all `[n, hidden_size]`."""
        x32 = x.float()
        router_input = F.rms_norm(x32, x32.shape[1:], None, self.eps) * self.router_scale
        weights, routed = self.experts.route(router_input * x32.shape[1] ** -0.5)
        weights = weights * self.expert_scales[routed]
        experts_output = self.experts.apply(self.norm(x), weights, routed)
        return self.mlp_norm(mlp_output) + self.output_norm(experts_output)


def make_mlp(weights: NamedWeights, layer: int) -> Mlp:
    spec = weights.spec
    mlp = _make_gated_mlp(weights, "mlp", spec.mlp_width(layer), spec.mlp_bias)
    sparsity = spec.activation_sparsity[layer] if spec.activation_sparsity else 0
    if not sparsity:
        return mlp
    return replace(mlp, gate=SparseGate(mlp.gate, NormalDist().inv_cdf(sparsity)))


def make_experts(weights: NamedWeights) -> Experts:
    spec, hidden, shared = weights.spec, weights.spec.hidden_size, None
    bias = spec.clamped_experts
    router = weights.float32_linear("mlp.gate.weight", spec.experts, hidden, bias)
    experts = tuple(
        _make_gated_mlp(weights, f"mlp.experts.{i}", spec.expert_size, bias)
        for i in range(spec.experts)
    )
    if spec.shared_expert_size:
        mlp = _make_gated_mlp(weights, "mlp.shared_expert", spec.shared_expert_size, bias=False)
        gate = weights.float32_linear("mlp.shared_expert_gate.weight", 1, hidden)
        shared = SharedExpert(mlp, gate)
    return Experts(router, experts, spec.experts_per_token, spec.norm_topk, shared)


def make_parallel_experts(weights: NamedWeights, experts: Experts) -> ParallelExperts:
    spec, hidden = weights.spec, weights.spec.hidden_size
    norms = {
        field: weights.norm(f"{name}.weight", hidden) for field, name in PARALLEL_NORMS.items()
    }
    return ParallelExperts(
        experts,
        **norms,
        router_scale=weights.tensor(ROUTER_SCALE, hidden).float(),
        expert_scales=weights.tensor(EXPERT_SCALES, spec.experts).float(),
        eps=spec.norm_eps,
    )


def _make_gated_mlp(weights: NamedWeights, name: str, width: int, bias: bool) -> Mlp:
    hidden = weights.spec.hidden_size
    return Mlp(
        weights.product(f"{name}.gate_proj.weight", width, hidden, bias),
        weights.product(f"{name}.up_proj.weight", width, hidden, bias),
        weights.product(f"{name}.down_proj.weight", hidden, width, bias),
        weights.spec.gating,
    )
