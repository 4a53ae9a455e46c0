"""Which model a memory belongs to: cells mean nothing to any other."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.errors import FingerprintMismatch
from kvkeep.files.tensors import tensor_bytes
from kvkeep.models.spec import ModelSpec


@dataclass(frozen=True)
class Fingerprint:
    """Digests of all that decides what a cell means.

    weights: of every tensor's name, shape and bytes, as loaded. config: of the architecture's
    numbers without RoPE. rope: of the frequency table and scaling. tokenizer: of its definition.
    dtype, layout: of the cells.
    """

    weights: str
    config: str
    rope: str
    tokenizer: str
    dtype: str
    layout: str

    def digest(self) -> str:
        """One hex string for all of it."""
        return _digest(asdict(self))

    def describes(self, cells: Tensor) -> bool:
        """Whether keys or values are `[layers, kv_heads, n, head_dim]` of this dtype and layout."""
        if cells.dim() != 4:
            return False
        layers, kv_heads, _, head_dim = cells.shape
        found = _dtype_name(cells.dtype), _layout_name(layers, kv_heads, head_dim)
        return found == (self.dtype, self.layout)

    def require(self, saved: Mapping[str, str], source: str) -> None:
        """Raises FingerprintMismatch, naming each field in which a saved one differs."""
        differing = [f.name for f in fields(self) if saved.get(f.name) != getattr(self, f.name)]
        if "dtype" in differing and "weights" in differing:
            differing.remove("weights")  # converted weights have other bytes in any case
        if differing:
            details = "; ".join(_explain(name, saved, self) for name in differing)
            raise FingerprintMismatch(
                f"{source} belongs to another model: {details}. Load the model that it was saved "
                "with, or evaluate the text again"
            )


def _explain(name: str, saved: Mapping[str, str], here: Fingerprint) -> str:
    then, now = saved.get(name, "missing"), getattr(here, name)
    if name in ("dtype", "layout"):
        return f"the {name} differs ({then} there, {now} here)"
    plural = "differ" if name == "weights" else "differs"
    return f"the {name} {plural} ({then[:12]} there, {now[:12]} here)"


def fingerprint(
    spec: ModelSpec, tensors: Mapping[str, Tensor], tokenizer: str, layout: Layout
) -> Fingerprint:
    """tokenizer: its JSON definition."""
    config = asdict(spec)
    rope = config.pop("rope")
    return Fingerprint(
        weights=_weights_digest(tensors),
        config=_digest(config),
        rope=_digest(rope),
        tokenizer=blake3(tokenizer.encode()).hexdigest(),
        dtype=_dtype_name(layout.dtype),
        layout=_layout_name(layout.layers, layout.kv_heads, layout.head_dim),
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout_name(layers: int, kv_heads: int, head_dim: int) -> str:
    return f"{layers} layers x {kv_heads} KV heads x {head_dim}"


def _digest(value: object) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _weights_digest(tensors: Mapping[str, Tensor]) -> str:
    digest = blake3(max_threads=blake3.AUTO)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor_bytes(tensor.cpu().contiguous()))
    return digest.hexdigest()
