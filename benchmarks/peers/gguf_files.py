"""GGUF files for llama.cpp: the model's own, and requantised ones."""

import hashlib
import os
import re
import tempfile
from pathlib import Path

from benchmarks.peers.llama_library import load_library
from kvkeep.errors import ModelError
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.hub.library import home
from kvkeep.models.hub.source import KNOWN_MODELS, fetch_known_model

REQUANTISED = ("Q4_0", "Q8_0")


def gguf_file(model: str, progress: bool) -> Path:
    """Return the GGUF file of a model: a path, or the file of a known model.

    The latter is fetched once, into kvkeep's home. Raises ModelError if there is none.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path.resolve()
    known = KNOWN_MODELS.get(model.lower())
    if known is None:
        raise ModelError(f"there is no GGUF file of {model}: give one with --gguf")
    target = _folder() / Path(known.member).name
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_folder(), prefix=".fetching-") as folder:
            os.replace(fetch_known_model(known, Path(folder), progress), target)
    return target


def weights_of(file: Path) -> str:
    """Return the type of a file, such as "Q4_1". Raises BadModelFile."""
    from gguf import LlamaFileType

    file_type = LlamaFileType(GgufFile.open(file).value("general.file_type"))
    return file_type.name.removeprefix("MOSTLY_").removeprefix("ALL_")


def requantised(file: Path, weights: str, threads: int) -> Path:
    """Return the model requantised by llama.cpp; written once for each version of the file.

    Raises ModelError if llama.cpp cannot, ImportError if it is not installed.
    """
    file = file.resolve()
    status = file.stat()
    state = f"{file}\n{status.st_size}\n{status.st_mtime_ns}"
    digest = hashlib.sha256(state.encode()).hexdigest()[:12]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)
    target = _folder() / f"{stem}-{digest}-{weights}.gguf"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_folder(), prefix=".quantising-") as folder:
            temporary = Path(folder) / target.name
            _quantise(file, temporary, weights, threads)
            os.replace(temporary, target)
    return target


def _quantise(source: Path, target: Path, weights: str, threads: int) -> None:
    library = load_library()
    params = library.llama_model_quantize_default_params()
    params.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{weights}")
    params.nthread, params.allow_requantize = threads, True
    if library.llama_model_quantize(str(source).encode(), str(target).encode(), params):
        raise ModelError(f"llama.cpp cannot hold {source.name} as {weights}")


def _folder() -> Path:
    folder = home() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
