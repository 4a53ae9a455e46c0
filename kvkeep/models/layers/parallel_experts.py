"""A mixture of experts beside an MLP, as Gemma 4 has it.

Both read the residual stream, each by a norm of its own, and what they give is normed each by
itself and added. The router reads the residual stream, too: normed without a weight, and scaled
number by number. What an expert gives is scaled by a learned number of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvkeep.models.layers.experts import Experts, Product, experts_of
from kvkeep.models.layers.norms import Norm, norm_of
from kvkeep.models.spec.model_spec import ModelSpec

NORMS = {
    "mlp_norm": "post_feedforward_layernorm_1",
    "norm": "pre_feedforward_layernorm_2",
    "output_norm": "post_feedforward_layernorm_2",
}
ROUTER_SCALE, EXPERT_SCALES = "mlp.gate.scale", "mlp.gate.expert_scales"  # behind a layer's prefix


@dataclass(frozen=True)
class ExpertsBeside:
    """mlp_norm: of what the MLP gives. norm, output_norm: of what experts read, and give.

    router_scale: `[hidden_size]`, expert_scales: `[experts]`, both float32. eps: of the norm of
    what the router reads.
    """

    experts: Experts
    mlp_norm: Norm
    norm: Norm
    output_norm: Norm
    router_scale: Tensor
    expert_scales: Tensor
    eps: float

    def __call__(self, x: Tensor, given: Tensor) -> Tensor:
        """`[n, hidden_size]` of the residual stream x, and what the MLP gives, to their sum."""
        wide = x.float()
        read = F.rms_norm(wide, wide.shape[1:], None, self.eps) * self.router_scale
        weights, chosen = self.experts.route(read * wide.shape[1] ** -0.5)
        weights = weights * self.expert_scales[chosen]
        beside = self.experts.through(self.norm(x), weights, chosen)
        return self.mlp_norm(given) + self.output_norm(beside)


def experts_beside(
    spec: ModelSpec, layer: int, tensors: Mapping[str, Tensor], product: Callable[[str], Product]
) -> ExpertsBeside | None:
    """None where the model has none."""
    if not spec.experts_beside:
        return None
    prefix = f"model.layers.{layer}."
    return ExpertsBeside(
        experts=experts_of(spec, layer, tensors, product),
        **{role: norm_of(spec, tensors[f"{prefix}{name}.weight"]) for role, name in NORMS.items()},
        router_scale=tensors[f"{prefix}{ROUTER_SCALE}"].float(),
        expert_scales=tensors[f"{prefix}{EXPERT_SCALES}"].float(),
        eps=spec.norm_eps,
    )


def experts_beside_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of what a layer has for them beside matrices; none where there are none."""
    if not spec.experts_beside:
        return {}
    norms = {f"{name}.weight": (spec.hidden_size,) for name in NORMS.values()}
    return {**norms, ROUTER_SCALE: (spec.hidden_size,), EXPERT_SCALES: (spec.experts,)}
