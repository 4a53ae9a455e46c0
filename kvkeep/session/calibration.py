"""A calibration: what compression decides by, measured once for each model.

As an importance matrix is for weights, it is a file made once from some text, and good for every
session of that model.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.cache.checks import require, require_finite, require_tensor, require_whole
from kvkeep.cache.state import MOST
from kvkeep.errors import CorruptFile
from kvkeep.files.tensors import tensor_bytes
from kvkeep.loaded import LoadedModel
from kvkeep.methods import Statistics
from kvkeep.store.container import read_container, write_container

KIND, FORMAT = "calibration", 1


@dataclass(frozen=True)
class Calibration:
    """statistics: see there. fingerprint: of the model. tokens: that it was made from."""

    statistics: Statistics
    fingerprint: dict[str, str]
    model: str
    tokens: int

    @property
    def digest(self) -> str:
        """Of the statistics: what a session that was begun with them asks for."""
        hashed = blake3()
        for tensor in asdict(self.statistics).values():
            hashed.update(tensor_bytes(tensor))
        return hashed.hexdigest()

    def require(self, model: LoadedModel) -> None:
        """Raises FingerprintMismatch, naming what differs, for another model."""
        model.fingerprint.require(self.fingerprint, "the calibration")

    def save(self, path: str | Path) -> int:
        """Writes the file, or leaves the one that is there. Returns its bytes."""
        document = {"fingerprint": self.fingerprint, "model": self.model, "tokens": self.tokens}
        return write_container(Path(path), KIND, FORMAT, document, asdict(self.statistics))


def load_calibration(path: str | Path, model: LoadedModel) -> Calibration:
    """Reads a calibration and verifies every byte of it, and that it is of this model.

    Raises StoreError and its kinds, and FingerprintMismatch.
    """
    container = read_container(Path(path), KIND, FORMAT)
    try:
        return _assemble(container.document, container.tensors, model)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} is corrupt: {error!r} while it was put together") from error


def _assemble(
    document: Mapping[str, Any], tensors: Mapping[str, Tensor], model: LoadedModel
) -> Calibration:
    # First of all: another model's statistics have another shape, and are whole for all that.
    model.fingerprint.require(document["fingerprint"], "the calibration")
    spec = model.spec
    shape = (spec.layers, spec.kv_heads, spec.head_dim)
    require_tensor("mean", tensors["mean"], torch.float32, *shape)
    require_tensor("moment", tensors["moment"], torch.float32, *shape, spec.head_dim)
    require_tensor("tolerance", tensors["tolerance"], torch.float32, *shape[:2])
    for name in ("mean", "moment", "tolerance"):
        require_finite(name, tensors[name])
    require_whole("tokens", document["tokens"], 1, MOST)
    require(isinstance(document["model"], str), "the model must be a name")
    return Calibration(
        Statistics(tensors["mean"], tensors["moment"], tensors["tolerance"]),
        document["fingerprint"],
        document["model"],
        document["tokens"],
    )
