"""Gated MLPs, and mixtures of experts in their place or beside them (arXiv:1701.06538, 2101.03961).

A router scores all experts for each token, in float32 whatever the weights are: rounded to bfloat16
its scores would tie. The token goes through the experts with the highest scores (on ties, the lower
index), and their outputs are summed, weighted by their shares of the softmax, or by the sigmoid of
their scores.
"""

from collections.abc import Callable
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkeep.models.layers.primitives import Linear, NamedWeights, WeightMatrix, multiply
from kvkeep.models.spec.model_spec import Gating


def _clamped_gating(gate: Tensor, up: Tensor) -> Tensor:
    """Gate as gpt-oss: (up + 1) * gate * sigmoid(1.702 gate), with gate <= 7 and |up| <= 7."""
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


GATING_FUNCTIONS: dict[Gating, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped": _clamped_gating,
    "relu2": lambda gate, up: F.relu(gate) * up,  # of an MLP without a gate, both are the same
}


class Mlp:
    """A gated MLP (SwiGLU and GEGLU, arXiv:2002.05202), or one without a gate.

    width: the intermediate size. io_width: of what it reads and gives; 0 for the hidden size.
    bias: whether all projections have one. sparsity: the share of gate values that are zeroed.
    """

    def __init__(
        self,
        weights: NamedWeights,
        prefix: str,
        width: int,
        bias: bool,
        sparsity: float = 0,
        io_width: int = 0,
    ):
        io_width = io_width or weights.spec.hidden_size
        self._gate: WeightMatrix | None = None
        if weights.spec.gated_mlps:
            self._gate = weights.matrix(f"{prefix}.gate_proj.weight", width, io_width, bias)
        self._up = weights.matrix(f"{prefix}.up_proj.weight", width, io_width, bias)
        self._down = weights.matrix(f"{prefix}.down_proj.weight", io_width, width, bias)
        self._gating = GATING_FUNCTIONS[weights.spec.gating]
        self._gate_multiplier = weights.spec.gate_multiplier
        self._output_multiplier = weights.spec.mlp_output_multiplier
        self._threshold_stds = NormalDist().inv_cdf(sparsity) if sparsity else None

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to the same shape."""
        if self._gate is None:
            up = self._up(x)
            return multiply(self._down(self._gating(up, up)), self._output_multiplier)
        gate = multiply(self._gate(x), self._gate_multiplier)
        if self._threshold_stds is not None:
            gate = _sparsify(gate, self._threshold_stds)
        output = self._down(self._gating(gate, self._up(x)))
        return multiply(output, self._output_multiplier)


def _sparsify(gate: Tensor, threshold_stds: float) -> Tensor:
    """Subtract a threshold from gate values, and zero those below it (Gemma 3n, arXiv:2506.06644).

    The threshold follows from a normal distribution, so that nothing is sorted: 5% of it lie above
    1.645 standard deviations, and a sparsity of 0.95 keeps these.

    gate: `[n, intermediate_size]`. threshold_stds: standard deviations from the mean of a token's
    values to the threshold.
    """
    gate32 = gate.float()  # few values are kept, and they depend on the threshold's last bits
    std = gate32.std(dim=-1, correction=0, keepdim=True)
    threshold = gate32.mean(dim=-1, keepdim=True) + threshold_stds * std
    return F.relu(gate32 - threshold).to(gate.dtype)


class Experts:
    """A mixture of experts.

    The tokens of a step that are routed to one expert go through it together. So the last bits of a
    token's output may depend on how many tokens of its step share its experts, never on the number
    of threads.

    A shared expert processes every token, weighted by the sigmoid of its gate if it has one.
    """

    def __init__(self, weights: NamedWeights):
        spec, hidden_size = weights.spec, weights.spec.hidden_size
        bias = spec.clamped_experts  # only gpt-oss has biases
        self._experts_per_token, self._norm_topk = spec.experts_per_token, spec.norm_topk
        self._router = weights.float32_linear("mlp.gate.weight", spec.experts, hidden_size, bias)
        latent_size = spec.expert_latent_size
        self._experts = [
            Mlp(weights, f"mlp.experts.{i}", spec.expert_size, bias, io_width=latent_size)
            for i in range(spec.experts)
        ]
        self._latent_down: WeightMatrix | None = None
        self._latent_up: WeightMatrix | None = None
        if latent_size:
            self._latent_down = weights.matrix(LATENT_DOWN, latent_size, hidden_size)
            self._latent_up = weights.matrix(LATENT_UP, hidden_size, latent_size)
        self._uses_sigmoid, self._routed_scale = spec.sigmoid_router, spec.routed_scale
        self._selection_bias: Tensor | None = None
        if spec.router_bias:
            self._selection_bias = weights.tensor(SELECTION_BIAS, spec.experts).float()
        self._shared: Mlp | None = None
        self._shared_gate: Linear | None = None
        if spec.shared_expert_size:
            self._shared = Mlp(weights, "mlp.shared_expert", spec.shared_expert_size, bias=False)
        if spec.shared_expert_size and not spec.ungated_shared_expert:
            shared_gate = "mlp.shared_expert_gate.weight"
            self._shared_gate = weights.float32_linear(shared_gate, 1, hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to the same shape."""
        return self.apply(x, *self.route(x))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (float32) and ids (int64) of each token's experts, `[n, per_token]`."""
        if self._uses_sigmoid:
            return self._route_by_sigmoid(self._router(x.float()).sigmoid())
        scores, expert_ids = self._router(x.float()).sort(dim=-1, descending=True, stable=True)
        candidates = scores[:, : self._experts_per_token] if self._norm_topk else scores
        routing_weights = candidates.softmax(-1)[:, : self._experts_per_token]
        return routing_weights, expert_ids[:, : self._experts_per_token]

    def _route_by_sigmoid(self, all_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `route` does. all_weights: of every expert, `[n, experts]`."""
        bias = self._selection_bias
        order = (all_weights if bias is None else all_weights + bias).argsort(
            dim=-1, descending=True, stable=True
        )
        expert_ids = order[:, : self._experts_per_token]
        routing_weights = all_weights.gather(1, expert_ids)
        if self._norm_topk:
            routing_weights = routing_weights / (routing_weights.sum(-1, keepdim=True) + 1e-6)
        return routing_weights * self._routed_scale, expert_ids

    def apply(self, x: Tensor, routing_weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Map `[n, hidden_size]` to the same shape by the experts that `route` has chosen."""
        inputs = x if self._latent_down is None else self._latent_down(x)
        total = torch.zeros(inputs.shape, dtype=torch.float32, device=x.device)
        # An assignment is an index into the flattened ids: a is of token a // per_token.
        by_expert = expert_ids.flatten().argsort(stable=True)
        counts = expert_ids.flatten().bincount(minlength=len(self._experts)).tolist()
        for expert, assignments in zip(self._experts, torch.split(by_expert, counts), strict=True):
            if len(assignments):
                rows = assignments // self._experts_per_token
                output = expert(inputs[rows]).float() * routing_weights.flatten()[assignments, None]
                total.index_add_(0, rows, output)  # no token is routed to an expert twice
        if self._latent_up is not None:
            total = self._latent_up(total.to(x.dtype)).float()
        if self._shared is not None:
            shared, gate = self._shared(x).float(), self._shared_gate
            total += shared if gate is None else gate(x.float()).sigmoid() * shared
        return total.to(x.dtype)


# Tensor names after a layer's prefix: norms of the MLP's output and of the experts' input and
# output, by the fields of the kernels' struct, and the router's scales.
PARALLEL_NORMS = {
    "mlp_norm": "post_feedforward_layernorm_1",
    "norm": "pre_feedforward_layernorm_2",
    "output_norm": "post_feedforward_layernorm_2",
}
SELECTION_BIAS = "mlp.expert_bias"
LATENT_DOWN, LATENT_UP = "mlp.latent_down.weight", "mlp.latent_up.weight"
ROUTER_SCALE, EXPERT_SCALES = "mlp.gate.scale", "mlp.gate.expert_scales"


class ParallelExperts:
    """A mixture of experts beside an MLP, as Gemma 4 has it.

    Both read the residual stream through norms of their own, and their outputs are normed
    separately and added. The router reads the residual stream, too: normed without a weight, and
    scaled element by element. Each expert's output is scaled by a learned number.
    """

    def __init__(self, weights: NamedWeights, experts: Experts):
        hidden_size = weights.spec.hidden_size
        self._experts, self._eps = experts, weights.spec.norm_eps
        self._mlp_norm, self._norm, self._output_norm = (
            weights.norm(f"{name}.weight", hidden_size) for name in PARALLEL_NORMS.values()
        )
        self._router_scale = weights.tensor(ROUTER_SCALE, hidden_size).float()
        self._expert_scales = weights.tensor(EXPERT_SCALES, weights.spec.experts).float()

    def __call__(self, x: Tensor, mlp_output: Tensor) -> Tensor:
        """Return the sum of MLP and experts. x: the residual stream; both `[n, hidden_size]`."""
        x32 = x.float()
        router_input = F.rms_norm(x32, x32.shape[1:], None, self._eps) * self._router_scale
        routing_weights, expert_ids = self._experts.route(router_input * x32.shape[1] ** -0.5)
        routing_weights = routing_weights * self._expert_scales[expert_ids]
        experts_output = self._experts.apply(self._norm(x), routing_weights, expert_ids)
        return self._mlp_norm(mlp_output) + self._output_norm(experts_output)
