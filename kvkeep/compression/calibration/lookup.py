"""The calibration that is kept of a model on this machine, for whoever names no file."""

import json
from pathlib import Path

from blake3 import blake3

from kvkeep.compression.calibration.calibration import Calibration, load_calibration
from kvkeep.loaded_model import LoadedModel
from kvkeep.models.hub.source import home


def calibration_place(model: LoadedModel) -> Path:
    """Where it is, or would be: named by the model's fingerprint, whatever the model is called."""
    saved = json.dumps(model.fingerprint.saved(), sort_keys=True)
    return _folder() / f"{blake3(saved.encode()).hexdigest()[:24]}.kvcal"


def is_any_kept() -> bool:
    """Whether there is one of any model: asked before a model is loaded."""
    return any(_folder().glob("*.kvcal"))


def kept_calibration(model: LoadedModel) -> Calibration | None:
    """None where none was made. Raises StoreError and its kinds for a file that is not sound."""
    place = calibration_place(model)
    return load_calibration(place, model) if place.exists() else None


def _folder() -> Path:
    return home() / "calibrations"
