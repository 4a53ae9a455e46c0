"""The folder that transformers and mlx-lm read: they know nothing of packed weights."""

from pathlib import Path

from kvkeep.models.hub.source import home
from kvkeep.models.weights.export import export
from kvkeep.models.weights.packed import converted_file


def unpacked(folder: Path, progress: bool) -> Path:
    """The model's own folder where it is in Hugging Face layout, else what it is unpacked to.

    That is done once, into kvkeep's home. Raises as `export`.
    """
    own = converted_file(folder)
    if own is None:
        return folder
    state = own.stat()
    kept = home() / "bench" / f"{folder.name}-{state.st_size}-{state.st_mtime_ns}"
    if not kept.exists():
        export(folder, kept, progress=progress)
    return kept
