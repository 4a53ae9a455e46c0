"""The calibrations of this machine: a file for each, named by its model and its digest.

New sessions use the newest of their model. Earlier ones stay, since saved sessions need the
calibration that they were created with.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from kvkeep.compression.calibration.calibration import Calibration, load_calibration
from kvkeep.errors import CorruptFile, StoreError
from kvkeep.loaded_model import LoadedModel
from kvkeep.models.hub.library import data_folders
from kvkeep.storage.files.atomic import make_folder

_SUFFIX = ".kvcal"
_DIGEST_LENGTH = 32  # of a digest, in a name


def add_calibration(calibration: Calibration) -> Path:
    """Add a calibration to this machine as its model's newest; return its file.

    Raises StoreError.
    """
    key = _model_key(calibration.fingerprint)
    path = _folders()[0] / f"{key}-{calibration.digest[:_DIGEST_LENGTH]}{_SUFFIX}"
    _create_folder(path.parent)
    calibration.save(path)
    return path


def unfinished_calibration_path(model: LoadedModel) -> Path:
    """Return the file of partial results of a model's next calibration. Raises StoreError."""
    path = _folders()[0] / f"{_model_key(model.fingerprint.to_dict())}{_SUFFIX}.unfinished"
    _create_folder(path.parent)
    return path


def has_any_calibration() -> bool:
    """Whether this machine has a calibration of any model; needs no loaded model."""
    return any(any(folder.glob(f"*{_SUFFIX}")) for folder in _folders())


def default_calibration(model: LoadedModel) -> Calibration | None:
    """Return the newest calibration of a model, if any. Raises as `load_calibration`."""
    dated = list[tuple[float, Path]]()
    for path in _paths(model, "*"):
        with suppress(FileNotFoundError):  # removed meanwhile
            dated.append((path.stat().st_mtime, path))
    return load_calibration(max(dated)[1], model) if dated else None


def find_calibration(digest: str, model: LoadedModel) -> Calibration | None:
    """Return the calibration of a model that a session names; None if it is not here.

    digest: `Calibration.digest`. Raises as `load_calibration`.
    """
    if not re.fullmatch("[0-9a-f]{64}", digest):  # from a file that other software wrote
        return None
    for path in _paths(model, f"-{digest[:_DIGEST_LENGTH]}"):
        calibration = load_calibration(path, model)
        if calibration.digest != digest:
            raise CorruptFile(
                f"{path} has the digest {calibration.digest}, which differs from its name: replace "
                "it by a copy from another machine (cp -p)"
            )
        return calibration
    # Earlier versions had one for each model, without a digest in its name.
    unnamed = (load_calibration(path, model) for path in _paths(model, ""))
    return next((calibration for calibration in unnamed if calibration.digest == digest), None)


def copy_advice(digest: str) -> str:
    """Return how to get a calibration that is on another machine, for error messages."""
    return (
        f"copy *-{digest[:_DIGEST_LENGTH]}{_SUFFIX} from the folder of calibrations of the machine "
        f"that has it to {_folders()[0]} with its modification time (cp -p): new sessions use the "
        "newest"
    )


def _paths(model: LoadedModel, ending: str) -> list[Path]:
    """Return files of a model by the ending of their names, which may be a pattern."""
    if not has_any_calibration():
        return []  # names have the fingerprint, for which all weights are read
    name = f"{_model_key(model.fingerprint.to_dict())}{ending}{_SUFFIX}"
    return [path for folder in _folders() for path in folder.glob(name)]


def _model_key(fingerprint: Mapping[str, str]) -> str:
    """Return the beginning of the names of a model's files."""
    return blake3(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:24]


def _folders() -> list[Path]:
    return data_folders("calibrations")


def _create_folder(folder: Path) -> None:
    try:
        make_folder(folder)
    except OSError as error:
        raise StoreError(f"{folder} cannot be created: {error.strerror or error}") from error
