"""Repositories of the Hugging Face hub: choosing a model in one, and downloading it."""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.errors import BadModelFile, ModelNotFound

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

    GgufModels = dict[str, list[RepoSibling]]

# `Path` joins the two slashes of a URL.
_HUB_NAME = re.compile(
    r"(?:(?:https?:/{1,2})?(?:huggingface\.co|hf\.co)/)?"
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?/?"
)
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]  # of a folder; the rest is its weights
_PART_AND_SUFFIX = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
# Files beside models: projectors for images, and importance matrices.
_NOT_MODEL_NAME = re.compile("mmproj|imatrix", re.IGNORECASE)
_QUANTISATION = re.compile(r"(?<![A-Z0-9])(?:UD-)?(?:I?Q\d\w*|TQ\d_\d|MXFP4\w*|BF16|FP?16|F32)\b")
_PREFERRED_QUANTISATIONS = ("Q4_K_M", "Q8_0")  # of a repository named without a quantisation


def parse_hub_name(model: str) -> tuple[str, str | None] | None:
    """Return the repository and quantisation that a name gives, or None for another kind of name.

    Example: "hf.co/owner/name:q4_k_m" is ("owner/name", "Q4_K_M"), and "owner/name" has None.
    """
    match = _HUB_NAME.fullmatch(model)
    if match is None or (match[2] is None and model.endswith(".gguf")):
        return None
    quantisation = None if match[2] in (None, "latest") else match[2].upper().removesuffix(".GGUF")
    return match[1], quantisation


def download_folder(
    repository: str,
    _unused: Path,
    progress: bool,
    check: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Fetch the missing files of a repository into the hub's own cache; return their folder.

    _unused: the folder that `store_model` passes. check: raises an exception for a folder that is
        not to be completed, before its weights are downloaded.

    Raises ModelNotFound for every failure of a download, and BadModelFile.
    """
    from huggingface_hub import snapshot_download

    from kvkeep.models.weights.tensors import weight_files

    with _hub_request(repository, progress):
        folder = Path(snapshot_download(repository, allow_patterns=_SMALL_FILES))
    check(folder)
    files = weight_files(folder)
    with _hub_request(repository, progress):
        snapshot_download(repository, revision=folder.name, allow_patterns=files)
    missing = [name for name in files if not (folder / name).exists()]
    if missing:
        raise ModelNotFound(
            f"the Hugging Face hub has no {missing[0]} in {repository!r}, or cannot be reached; "
            "kvkeep reads weights from safetensors or GGUF files: name another repository, or pull "
            "again when there is a network"
        )
    return folder


def default_quantisation(repository: str) -> str | None:
    """Return the quantisation to take of a repository that has GGUF files but no safetensors.

    None for other repositories, and if the hub cannot be reached: `download_folder` reports that.
    Raises ModelNotFound if there are several and none of them is preferred.
    """
    try:
        info = _model_info(repository)
    except ModelNotFound:
        return None
    if any(file.rfilename.endswith(".safetensors") for file in info.siblings or ()):
        return None
    models = _gguf_models(info)
    labels = [_label(name) for name in models]
    preferred = [label for label in _PREFERRED_QUANTISATIONS if label in labels]
    if len(labels) > 1 and not preferred:
        raise ModelNotFound(
            f"add a quantisation to the name, such as {repository}:{labels[0]}. It has "
            f"{_format_sizes(models)}"
        )
    return next(iter(preferred or labels), None)


def download_gguf(repository: str, quantisation: str, folder: Path, progress: bool) -> Path:
    """Download a GGUF model into `folder`, resuming earlier downloads; return its first file.

    They are in a subfolder named by their digests, so that a download of other contents is not
    continued. huggingface_hub's own functions resume a download within one process only. Raises
    ModelNotFound, BadModelFile, and UnsupportedModel before anything is downloaded.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    from kvkeep.models.gguf.config import check_arch

    info = _model_info(repository)
    files = _choose_files(repository, quantisation, _gguf_models(info))
    if family := (info.gguf or {}).get("architecture"):
        check_arch(family)
    if any((file.size or 0) > MAX_HTTP_DOWNLOAD_SIZE for file in files):
        names = " ".join(file.rfilename for file in files)
        raise ModelNotFound(
            f"kvkeep downloads files of up to {MAX_HTTP_DOWNLOAD_SIZE / 1e9:.0f} GB: run `hf "
            f"download {repository} {names} --local-dir .`, and pass the path of the file"
        )
    digests = [file.lfs.sha256 if file.lfs else str(file.blob_id) for file in files]
    folder /= hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / Path(file.rfilename).name for file in files]
    for file, path in zip(files, paths, strict=True):
        with path.open("ab") as download, _hub_request(repository, progress):
            http_get(
                hf_hub_url(repository, file.rfilename, revision=info.sha),
                download,
                resume_size=download.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=path.name,
            )
        if file.lfs:
            check_sha256(path, file.lfs.sha256)
    return paths[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raise BadModelFile for a download with another digest, and remove it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        path.unlink()
        raise BadModelFile(
            f"{path.name} has sha256 {digest}, expected {expected}: it is damaged or not the "
            "published file. Pull again; if this happens again, do not trust the source"
        )


def _model_info(repository: str) -> "ModelInfo":
    from huggingface_hub import HfApi

    with _hub_request(repository):
        return HfApi().model_info(repository, files_metadata=True, timeout=10)


def _gguf_models(info: "ModelInfo") -> "GgufModels":
    """Return the files of each GGUF model, parts in order, by path without number and suffix."""
    models: GgufModels = {}
    for file in sorted(info.siblings or (), key=lambda file: file.rfilename):
        name = _PART_AND_SUFFIX.sub("", file.rfilename)
        if name != file.rfilename and not _NOT_MODEL_NAME.search(name):
            models.setdefault(name, []).append(file)
    return models


def _label(name: str) -> str:
    """Return a model's quantisation, or its file name if that states none."""
    quantisations: list[str] = _QUANTISATION.findall(name.upper())
    return quantisations[-1] if quantisations else Path(name).name.upper()


def _choose_files(repository: str, quantisation: str, models: "GgufModels") -> list["RepoSibling"]:
    """Return the files of the model with a quantisation or file name. Raises ModelNotFound."""
    name_pattern = re.compile(rf"(?<![A-Z0-9_]){re.escape(quantisation)}(?![A-Z0-9_])")
    matches = [name for name in models if _label(name) == quantisation]
    matches = matches or [name for name in models if name_pattern.search(name.upper())]
    if len(matches) == 1:
        return models[matches[0]]
    if matches:
        names = ", ".join(f"{repository}:{Path(name).name}.gguf" for name in matches)
        raise ModelNotFound(f"name one of the files in {quantisation}: {names}")
    if not models:
        raise ModelNotFound(f"leave out :{quantisation}, {repository} has no GGUF files")
    nearest = get_close_matches(quantisation, map(_label, models), 1, cutoff=0)[0]
    raise ModelNotFound(
        f"{repository} has no {quantisation}; the nearest is {repository}:{nearest}. It has "
        f"{_format_sizes(models)}"
    )


def _format_sizes(models: "GgufModels") -> str:
    """List the quantisations of models with their sizes, smallest first."""
    labels = sorted((sum(file.size or 0 for file in models[name]), _label(name)) for name in models)
    return ", ".join(f"{label} ({size / 1e9:.1f} GB)" for size, label in labels)


@contextmanager
def _hub_request(repository: str, progress: bool = False) -> Iterator[None]:
    """Show progress bars or not in the block, and turn the hub's errors into ModelNotFound."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    were_disabled = are_progress_bars_disabled()
    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        yield
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"check the name: there is no local path {repository!r}, and no such model on the "
            "Hugging Face hub. If the model is private, run `hf auth login`; if it has terms, "
            f"accept them on https://huggingface.co/{repository}"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # of the disk
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ModelNotFound(
            f"the Hugging Face hub cannot be reached ({type(error).__name__}: {reason}). Pull "
            f"{repository!r} again when there is a network (downloads resume; see HF_HUB_OFFLINE, "
            "HTTPS_PROXY and HF_ENDPOINT), or pull it on another machine, copy its files and run "
            "`kvkeep models add NAME PATH` here"
        ) from error
    finally:
        if were_disabled != are_progress_bars_disabled():
            (disable_progress_bars if were_disabled else enable_progress_bars)()
