"""A calibration: what compression decides by, measured once for each model.

As an importance matrix is for weights, it is a file made once from some text, and good for every
session of that model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.cache.checks import require, require_finite, require_tensor, require_whole
from kvkeep.cache.state import MAX_NUMBER
from kvkeep.compression.methods import Statistics
from kvkeep.compression.methods.statistics import Surrogate
from kvkeep.errors import CorruptFile
from kvkeep.loaded_model import LoadedModel
from kvkeep.storage.files.tensors import tensor_bytes
from kvkeep.storage.snapshots.container import read_container, write_container

KIND, FORMAT = "calibration", 2


@dataclass(frozen=True)
class Calibration:
    """statistics: see there. fingerprint: of the model. tokens: that it was made from.

    r_squared: which part of what reconstruction gives to cells of text held back the surrogate
    explains; None without one.
    """

    statistics: Statistics
    fingerprint: dict[str, str]
    model: str
    tokens: int
    r_squared: float | None = None

    @property
    def digest(self) -> str:
        """Of the statistics: what a session that was begun with them asks for."""
        hashed, known = blake3(), self.statistics
        for tensor in (known.mean, known.moment, known.tolerance, *_guessing(known).values()):
            hashed.update(tensor_bytes(tensor))
        return hashed.hexdigest()

    def require(self, model: LoadedModel) -> None:
        """Raises FingerprintMismatch, naming what differs, for another model."""
        model.fingerprint.require(self.fingerprint, "the calibration")

    def save(self, path: str | Path) -> int:
        """Writes the file, or leaves the one that is there. Returns its bytes."""
        document = {
            "fingerprint": self.fingerprint,
            "model": self.model,
            "tokens": self.tokens,
            "r_squared": self.r_squared,
        }
        known = self.statistics
        rows, columns = _half(known.moment.shape[-1])
        tensors = {
            "mean": known.mean,
            "moment_half": known.moment[..., rows, columns],
            "tolerance": known.tolerance,
            **_guessing(known),
        }
        return write_container(Path(path), KIND, FORMAT, document, tensors)


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
    layout = model.decoder.new_cache().layout
    shape = (layout.layers, layout.kv_heads, layout.head_dim)
    require_tensor("mean", tensors["mean"], torch.float32, *shape)
    require_tensor("tolerance", tensors["tolerance"], torch.float32, *shape[:2])
    for name in ("mean", "tolerance"):
        require_finite(name, tensors[name])
    require_whole("tokens", document["tokens"], 1, MAX_NUMBER)
    require(isinstance(document["model"], str), "the model must be a name")
    r_squared = document.get("r_squared")
    require(r_squared is None or isinstance(r_squared, float), "r_squared must be a number")
    moment, surrogate = _moment(tensors, shape), _surrogate(tensors, shape)
    return Calibration(
        Statistics(tensors["mean"], moment, tensors["tolerance"], surrogate),
        document["fingerprint"],
        document["model"],
        document["tokens"],
        r_squared,
    )


def _moment(tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> Tensor:
    """The whole of it, as format 1 keeps it, or of the half that is kept since."""
    width = shape[-1]
    if "moment" in tensors:
        require_tensor("moment", tensors["moment"], torch.float32, *shape, width)
        require_finite("moment", tensors["moment"])
        return tensors["moment"]
    half = tensors["moment_half"]
    require_tensor("moment_half", half, torch.float32, *shape[:2], width * (width + 1) // 2)
    require_finite("moment_half", half)
    rows, columns = _half(width)
    moment = torch.empty(*shape, width, dtype=torch.float32, device="cpu")
    moment[..., rows, columns] = half
    moment[..., columns, rows] = half
    return moment


def _half(width: int) -> Tensor:
    """`[2, width * (width + 1) / 2]`: rows and columns of the upper half of a square."""
    return torch.triu_indices(width, width, dtype=torch.int64, device="cpu")


def _surrogate(tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> Surrogate | None:
    if "surrogate.key" not in tensors:
        return None
    shapes = {"key": shape, "value": shape, "constant": shape[:2]}
    for name, wanted in shapes.items():
        require_tensor(name, tensors[f"surrogate.{name}"], torch.float32, *wanted)
        require_finite(name, tensors[f"surrogate.{name}"])
    return Surrogate(**{name: tensors[f"surrogate.{name}"] for name in shapes})


def _guessing(statistics: Statistics) -> dict[str, Tensor]:
    """The tensors of the surrogate, where there is one."""
    known = statistics.surrogate
    if known is None:
        return {}
    return {
        "surrogate.key": known.key,
        "surrogate.value": known.value,
        "surrogate.constant": known.constant,
    }
