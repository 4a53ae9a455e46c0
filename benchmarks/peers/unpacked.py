"""Unpacked model folders for transformers and mlx-lm, which cannot read packed weights."""

from pathlib import Path

from kvkeep.models.hub.library import home
from kvkeep.models.weights.export import export
from kvkeep.models.weights.packed import converted_file


def unpacked_folder(folder: Path, progress: bool) -> Path:
    """Return a folder in Hugging Face layout: the model's own, or one unpacked into kvkeep's home.

    Unpacks once. Raises as `export`.
    """
    packed_file = converted_file(folder)
    if packed_file is None:
        return folder
    status = packed_file.stat()
    target = home() / "bench" / f"{folder.name}-{status.st_size}-{status.st_mtime_ns}"
    if not target.exists():
        export(folder, target, progress=progress)
    return target
