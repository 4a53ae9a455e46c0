"""A calibration: statistics for compression, measured once for each model.

Like an importance matrix for weights, it is a file made once from some text, and valid for every
session of that model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.cache.checks import require, require_finite, require_tensor, require_whole
from kvkeep.cache.state import MAX_NUMBER
from kvkeep.compression.methods.statistics import Statistics, Surrogate
from kvkeep.errors import CorruptFile
from kvkeep.loaded_model import LoadedModel
from kvkeep.models.hub.library import home
from kvkeep.storage.files.tensors import tensor_bytes
from kvkeep.storage.snapshots.container import read_container, write_container

KIND, FORMAT = "calibration", 2


@dataclass(frozen=True)
class Calibration:
    """The statistics of a model.

    Attributes:
        fingerprint: of the model.
        model: its name.
        tokens: count of tokens that were measured.
        r_squared: the share of the variance of reconstruction scores of held-back text that the
            surrogate explains; None without a surrogate.
    """

    statistics: Statistics
    fingerprint: dict[str, str]
    model: str
    tokens: int
    r_squared: float | None = None

    @property
    def digest(self) -> str:
        """A digest of the statistics, by which snapshots refer to the calibration of a session."""
        digest, statistics = blake3(), self.statistics
        tensors = (statistics.mean, statistics.moment, statistics.tolerance)
        for tensor in (*tensors, *_surrogate_tensors(statistics).values()):
            digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    def require(self, model: LoadedModel) -> None:
        """Raise FingerprintMismatch, naming what differs, for another model."""
        model.fingerprint.require(self.fingerprint, "the calibration")

    def save(self, path: str | Path) -> int:
        """Write the file atomically; return its size in bytes."""
        document = {name: value for name, value in vars(self).items() if name != "statistics"}
        statistics = self.statistics
        rows, columns = _upper_half(statistics.moment.shape[-1])
        tensors = {
            "mean": statistics.mean,
            "moment_half": statistics.moment[..., rows, columns],
            "tolerance": statistics.tolerance,
            **_surrogate_tensors(statistics),
        }
        return write_container(Path(path), KIND, FORMAT, document, tensors)


def load_calibration(path: str | Path, model: LoadedModel) -> Calibration:
    """Read a calibration, verify every byte of it, and check that it is of this model.

    Raises StoreError and its kinds, and FingerprintMismatch.
    """
    container = read_container(Path(path), KIND, FORMAT)
    try:
        return _from_saved(container.document, container.tensors, model)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} is corrupt: {error!r} while it was put together") from error


def calibration_path(model: LoadedModel) -> Path:
    """Return the default path of a model's calibration, named by the model's fingerprint."""
    saved = json.dumps(model.fingerprint.saved(), sort_keys=True)
    return _calibrations_folder() / f"{blake3(saved.encode()).hexdigest()[:24]}.kvcal"


def any_default_calibration() -> bool:
    """Whether any model has a calibration at its default path; needs no loaded model."""
    return any(_calibrations_folder().glob("*.kvcal"))


def default_calibration(model: LoadedModel) -> Calibration | None:
    """Return the calibration at a model's default path; None if there is none.

    Raises StoreError and its kinds for a damaged file.
    """
    path = calibration_path(model)
    return load_calibration(path, model) if path.exists() else None


def _calibrations_folder() -> Path:
    return home() / "calibrations"


def _from_saved(
    document: Mapping[str, Any], tensors: Mapping[str, Tensor], model: LoadedModel
) -> Calibration:
    # Checked first: another model's statistics have another shape without being damaged.
    model.fingerprint.require(document["fingerprint"], "the calibration")
    layout = model.decoder.new_cache().layout
    shape = (layout.layers, layout.kv_heads, layout.head_dim)
    statistics = Statistics(
        _checked_tensor(tensors, "mean", *shape),
        _read_moment(tensors, shape),
        _checked_tensor(tensors, "tolerance", *shape[:2]),
        _read_surrogate(tensors, shape),
    )
    require_whole("tokens", document["tokens"], 1, MAX_NUMBER)
    require(isinstance(document["model"], str), "the model must be a name")
    r_squared = document.get("r_squared")
    require(r_squared is None or isinstance(r_squared, float), "r_squared must be a number")
    return Calibration(
        statistics, document["fingerprint"], document["model"], document["tokens"], r_squared
    )


def _checked_tensor(tensors: Mapping[str, Tensor], name: str, *shape: int) -> Tensor:
    """Return the tensor of that name. Raises ValueError unless it has that shape and is finite."""
    require_tensor(name, tensors[name], torch.float32, *shape)
    require_finite(name, tensors[name])
    return tensors[name]


def _read_moment(tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> Tensor:
    """Return the second moment: whole in files of format 1, as its upper half since."""
    width = shape[-1]
    if "moment" in tensors:
        return _checked_tensor(tensors, "moment", *shape, width)
    half = _checked_tensor(tensors, "moment_half", *shape[:2], width * (width + 1) // 2)
    rows, columns = _upper_half(width)
    moment = torch.empty(*shape, width, dtype=torch.float32, device="cpu")
    moment[..., rows, columns] = half
    moment[..., columns, rows] = half
    return moment


def _upper_half(width: int) -> Tensor:
    """Return rows and columns of the upper triangle of a square, `[2, width * (width + 1) / 2]`."""
    return torch.triu_indices(width, width, dtype=torch.int64, device="cpu")


def _read_surrogate(tensors: Mapping[str, Tensor], shape: tuple[int, int, int]) -> Surrogate | None:
    if "surrogate.key" not in tensors:
        return None
    return Surrogate(
        _checked_tensor(tensors, "surrogate.key", *shape),
        _checked_tensor(tensors, "surrogate.value", *shape),
        _checked_tensor(tensors, "surrogate.constant", *shape[:2]),
    )


def _surrogate_tensors(statistics: Statistics) -> dict[str, Tensor]:
    """Return the surrogate's tensors by their names in the file; empty without one."""
    surrogate = statistics.surrogate
    fields = {} if surrogate is None else vars(surrogate)
    return {f"surrogate.{name}": tensor for name, tensor in fields.items()}
