"""Blocks of a prefix cache with rounded cells, apart from exact ones.

Their keys begin at another root, so that a lookup for exact cells never finds them, and one for
rounded cells finds those of its codec and basis alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.cache.checks import require, require_tensor
from kvkeep.errors import InvalidArgument, StoreError
from kvkeep.storage.files.tensors import tensor_bytes
from kvkeep.storage.lossy.basis import LOSSY_CODECS, CellBasis, newest_basis
from kvkeep.storage.lossy.cells import CodedCells, decode_cells, encode_cells
from kvkeep.storage.prefixes.inventory import BLOCK_TOKENS
from kvkeep.storage.snapshots.fingerprint import Fingerprint

_Cells: TypeAlias = tuple[Tensor, Tensor]  # keys and values of a block

BLOCK_CODECS = ("exact", *LOSSY_CODECS)


def block_codec(codec: str) -> str:
    """Return the codec of prefix blocks where sessions are saved by `codec`: others are exact."""
    return codec if codec in BLOCK_CODECS else "exact"


@dataclass(frozen=True)
class BlockCoding:
    """The codec and the basis of the blocks of one model."""

    codec: str
    basis: CellBasis

    def root(self, exact_root: str) -> str:
        """Return the parent key of a prompt's first block. exact_root: that of exact blocks."""
        return rounded_root(exact_root, self.codec, self.basis.digest)

    def fields(self) -> dict[str, str]:
        """Return what the document of a block says of its coding."""
        return {"rounded": self.codec, "basis": self.basis.digest}

    def encode(self, cells: _Cells, start: int) -> dict[str, Tensor]:
        """Return the tensors of a block that begins at token `start` of a prompt."""
        step, positions, tensors = self.basis.steps[self.codec], _positions(start), {}
        for name, vectors in zip(("keys", "values"), cells, strict=True):
            coded = encode_cells(vectors.cpu(), positions, self.basis, step, name == "keys")
            frame = torch.frombuffer(bytearray(coded.frames[0]), dtype=torch.uint8)
            tensors[f"{name}.frames"], tensors[f"{name}.exact"] = frame, coded.exact
            tensors[f"{name}.exact_cells"] = coded.exact_cells
        return tensors

    def decode(self, tensors: Mapping[str, Tensor], start: int) -> _Cells | None:
        """Undo `encode`. Returns None for tensors that are not those of a block."""
        step, positions = self.basis.steps[self.codec], _positions(start)
        try:
            keys, values = (
                decode_cells(coded, positions, self.basis, step, name == "keys")
                for name, coded in self._coded(tensors).items()
            )
        except (LookupError, ValueError):
            return None
        return keys, values

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether tensors have the names and shapes of a block, which is not decoded."""
        try:
            return bool(self._coded(tensors))
        except (LookupError, ValueError):
            return False

    def _coded(self, tensors: Mapping[str, Tensor]) -> dict[str, CodedCells]:
        """Return the coded keys and values. Raises LookupError or ValueError for other tensors."""
        layout, result = self.basis.layout, dict[str, CodedCells]()
        for name in ("keys", "values"):
            frame, cells = tensors[f"{name}.frames"], tensors[f"{name}.exact_cells"]
            exact = tensors[f"{name}.exact"]
            require_tensor(f"{name}.frames", frame, torch.uint8, None)
            require_tensor(f"{name}.exact_cells", cells, torch.int32, None)
            shape = (layout.layers, layout.kv_heads, len(cells), layout.head_dim)
            require_tensor(f"{name}.exact", exact, layout.dtype, *shape)
            require(len(frame) > 0, "an empty frame")
            result[name] = CodedCells((bytes(tensor_bytes(frame)),), cells, exact)
        return result


class BlockCodings:
    """The codings of a prefix cache's blocks, one for each model.

    The basis of a model is looked up once: a newer one is used by caches that are opened later.
    """

    def __init__(self, codec: str):
        """Raises InvalidArgument for an unknown codec."""
        if codec not in BLOCK_CODECS:
            known = ", ".join(BLOCK_CODECS)
            raise InvalidArgument(f"codec must be one of {known}; found {codec!r}")
        self.codec = codec
        self._bases = dict[str, CellBasis]()  # by the model's weights and settings

    def of(self, fingerprint: Fingerprint) -> BlockCoding | None:
        """Return how blocks of a model are coded; None if they are exact. Raises StoreError."""
        if self.codec == "exact":
            return None
        fields = {k: v for k, v in fingerprint.to_dict().items() if k != "steps"}
        model = repr(sorted(fields.items()))
        if model not in self._bases:
            try:
                self._bases[model] = newest_basis(fields)
            except InvalidArgument as error:
                raise StoreError(str(error)) from error
        return BlockCoding(self.codec, self._bases[model])


def rounded_root(exact_root: str, codec: str, basis: str) -> str:
    """Return the parent key of a rounded prompt's first block. basis: its digest."""
    return blake3(f"{exact_root} {codec} {basis}".encode()).hexdigest()[:32]


def _positions(start: int) -> Tensor:
    return torch.arange(start, start + BLOCK_TOKENS, dtype=torch.int64, device="cpu")
