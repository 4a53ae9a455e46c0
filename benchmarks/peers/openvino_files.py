"""Models in OpenVINO's format, converted from GGUF files by OpenVINO GenAI."""

import os
import shutil
import tempfile
from pathlib import Path

from kvkeep.models.hub.library import home

MODEL = "openvino_model.xml"


def openvino_model(file: Path) -> Path:
    """Return the model of a GGUF file; converted once for each version of the file.

    Raises ImportError if OpenVINO GenAI is not installed, RuntimeError if it cannot read the file.
    """
    import openvino_genai

    status = file.stat()
    target = home() / "bench" / f"{file.stem}-{status.st_size}-{status.st_mtime_ns}-openvino"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as folder:
            copy = Path(folder) / "model" / file.name  # it writes beside the file
            copy.parent.mkdir()
            _link(file.resolve(), copy)
            openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
            copy.unlink()
            os.replace(copy.parent, target)
    return target / MODEL


def _link(file: Path, copy: Path) -> None:
    """Link a file under another path, or copy it where that is on another file system."""
    try:
        os.link(file, copy)
    except OSError:
        shutil.copyfile(file, copy)
