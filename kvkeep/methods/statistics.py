"""What a calibration knows of a model."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """Of queries before rotation, float32; each KV head's are those of all heads that share it.

    mean: `[layers, kv_heads, head_dim]`. moment: `[layers, kv_heads, head_dim, head_dim]`, the mean
    of q q^T. tolerance: `[layers, kv_heads]`, how alike (cosine) keys must be there to be merged
    without harm to what queries get.
    """

    mean: Tensor
    moment: Tensor
    tolerance: Tensor
