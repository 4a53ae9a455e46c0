"""What reconstruction would give a cell, guessed from the cell alone (KVzap, arXiv:2601.07891)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Surrogate:
    """A linear guess for each layer and KV head, fitted when a model is calibrated; float32.

    The paper reads hidden states, which nobody has once a token is evaluated. A key before rotation
    and a value say as much, and are there for as long as the cell is.

    key, value: `[layers, kv_heads, head_dim]`. constant: `[layers, kv_heads]`.
    """

    key: Tensor
    value: Tensor
    constant: Tensor

    def score(self, keys: Tensor, values: Tensor, owners: Tensor | None = None) -> Tensor:
        """`[layers, kv_heads, n]` float32: the natural log of the share that each cell would get.

        keys: `[layers, kv_heads, n, head_dim]`, before rotation; values: likewise. owners: of
        ragged cells, `[total, head_dim]`, which layer and KV head each is of; `[total]` comes back.
        """
        key, value, constant = (x.to(keys.device) for x in (self.key, self.value, self.constant))
        if owners is not None:
            key, value = key.flatten(0, 1)[owners], value.flatten(0, 1)[owners]
            guessed = (keys.float() * key).sum(-1) + (values.float() * value).sum(-1)
            return guessed + constant.flatten()[owners]
        guessed = keys.float() @ key.unsqueeze(-1) + values.float() @ value.unsqueeze(-1)
        return guessed.squeeze(-1) + constant.unsqueeze(-1)

    def layers(self, where: slice) -> "Surrogate":
        """That of some layers."""
        return Surrogate(self.key[where], self.value[where], self.constant[where])

    def head(self, layer: int, head: int) -> "Surrogate":
        """That of one KV head, of shape `[1, 1, ...]`."""
        own = slice(layer, layer + 1), slice(head, head + 1)
        return Surrogate(self.key[own], self.value[own], self.constant[own])

    @classmethod
    def of(cls, weights: Tensor) -> "Surrogate":
        """weights: `[layers, kv_heads, 2 head_dim + 1]`: of the key, of the value, the constant."""
        width, weights = weights.shape[-1] // 2, weights.float()
        key, value = weights[..., :width], weights[..., width:-1]
        return cls(key.contiguous(), value.contiguous(), weights[..., -1].contiguous())


def features(keys: Tensor, values: Tensor) -> Tensor:
    """`[..., n, 2 head_dim + 1]` float64, of keys and values `[..., n, head_dim]`."""
    one = torch.ones(*keys.shape[:-1], 1, dtype=torch.float64, device=keys.device)
    return torch.cat((keys.double(), values.double(), one), -1)
