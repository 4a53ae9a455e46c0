"""A calibration: statistics for compression, measured once for each model on some text.

Like an importance matrix for weights, it is a file that is valid for every session of its model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from kvkeep.cache import Layout
from kvkeep.cache.checks import require, require_finite, require_int, require_tensor
from kvkeep.cache.state import MAX_EXACT_INT
from kvkeep.compression.methods.statistics import Statistics, Surrogate
from kvkeep.errors import CorruptFile
from kvkeep.loaded_model import LoadedModel
from kvkeep.storage.files.tensors import tensor_bytes
from kvkeep.storage.snapshots.container import read_container, write_container

_FILE_KIND, _FORMAT_VERSION = "calibration", 2
# The surrogate's tensors in the file, and its fields.
_SURROGATE_FIELDS = {
    "surrogate.key": "key_weights",
    "surrogate.value": "value_weights",
    "surrogate.constant": "constant",
}


@dataclass(frozen=True)
class Calibration:
    """The statistics of a model.

    Attributes:
        fingerprint: of the model.
        model: the model's name.
        tokens: how many tokens were measured.
        r_squared: the surrogate's R² on the reconstruction scores of held-back text; None without a
            surrogate.
    """

    statistics: Statistics
    fingerprint: dict[str, str]
    model: str
    tokens: int
    r_squared: float | None = None

    @property
    def digest(self) -> str:
        """A digest of the statistics; snapshots name the calibration of their session by it."""
        digest, statistics = blake3(), self.statistics
        tensors = (statistics.mean, statistics.moment, statistics.min_cosine)
        for tensor in (*tensors, *_surrogate_tensors(statistics).values()):
            digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    def require(self, model: LoadedModel) -> None:
        """Raise FingerprintMismatch, naming what differs, for another model."""
        model.fingerprint.require_match(self.fingerprint, "the calibration")

    def save(self, path: str | Path) -> int:
        """Write the file atomically; return its size in bytes."""
        document = {name: value for name, value in vars(self).items() if name != "statistics"}
        statistics = self.statistics
        rows, columns = _upper_half_indices(statistics.moment.shape[-1])
        tensors = {
            "mean": statistics.mean,
            "moment_half": statistics.moment[..., rows, columns],
            "tolerance": statistics.min_cosine,
            **_surrogate_tensors(statistics),
        }
        return write_container(Path(path), _FILE_KIND, _FORMAT_VERSION, document, tensors)


def load_calibration(path: str | Path, model: LoadedModel) -> Calibration:
    """Read a calibration, verify every byte of it, and check that it is of this model.

    Raises StoreError and its kinds, and FingerprintMismatch.
    """
    container = read_container(Path(path), _FILE_KIND, _FORMAT_VERSION)
    try:
        return _from_saved(container.document, container.tensors, model)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CorruptFile(f"{path} is corrupt: {error!r} while it was loaded") from error


def _from_saved(
    document: Mapping[str, Any], tensors: Mapping[str, Tensor], model: LoadedModel
) -> Calibration:
    """Return the calibration of a file's JSON document and tensors, which are checked."""
    # Checked first: another model's statistics have another shape without being damaged.
    model.fingerprint.require_match(document["fingerprint"], "the calibration")
    _check_tensors(tensors, model.decoder.new_cache().layout)
    surrogate = None
    if "surrogate.key" in tensors:
        surrogate = Surrogate(**{field: tensors[name] for name, field in _SURROGATE_FIELDS.items()})
    # Files of format 1 store the whole matrix, later ones its upper half.
    moment = tensors["moment"] if "moment" in tensors else _full_moment(tensors["moment_half"])
    statistics = Statistics(tensors["mean"], moment, tensors["tolerance"], surrogate)
    require_int("tokens", document["tokens"], 1, MAX_EXACT_INT)
    require(isinstance(document["model"], str), "the model must be a name")
    r_squared = document.get("r_squared")
    require(r_squared is None or isinstance(r_squared, float), "r_squared must be a number")
    return Calibration(
        statistics, document["fingerprint"], document["model"], document["tokens"], r_squared
    )


def _check_tensors(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise ValueError for a tensor that is not finite or does not fit the layout."""
    heads_shape, head_dim = (layout.layers, layout.kv_heads), layout.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "mean": (*heads_shape, head_dim),
        "moment": (*heads_shape, head_dim, head_dim),
        "moment_half": (*heads_shape, head_dim * (head_dim + 1) // 2),
        "tolerance": heads_shape,
        "surrogate.key": (*heads_shape, head_dim),
        "surrogate.value": (*heads_shape, head_dim),
        "surrogate.constant": heads_shape,
    }
    for name, shape in shapes.items():
        if name in tensors:
            require_tensor(name, tensors[name], torch.float32, *shape)
            require_finite(name, tensors[name])


def _full_moment(upper_half: Tensor) -> Tensor:
    """Return symmetric matrices, whose upper halves are `[..., width * (width + 1) / 2]`."""
    width = math.isqrt(2 * upper_half.shape[-1])
    rows, columns = _upper_half_indices(width)
    moment = torch.empty(*upper_half.shape[:-1], width, width, dtype=torch.float32, device="cpu")
    moment[..., rows, columns] = upper_half
    moment[..., columns, rows] = upper_half
    return moment


def _upper_half_indices(width: int) -> Tensor:
    """Return rows and columns of the upper triangle of a square, `[2, width * (width + 1) / 2]`."""
    return torch.triu_indices(width, width, dtype=torch.int64, device="cpu")


def _surrogate_tensors(statistics: Statistics) -> dict[str, Tensor]:
    """Return the surrogate's tensors by their names in the file; empty without a surrogate."""
    surrogate = statistics.surrogate
    if surrogate is None:
        return {}
    return {name: getattr(surrogate, field) for name, field in _SURROGATE_FIELDS.items()}
